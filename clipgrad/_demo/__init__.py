"""``clipgrad demo``: what clipping does to training, on real data."""
