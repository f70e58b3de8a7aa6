"""Programs that time this library beside its peers: ``python -m benchmarks``."""
