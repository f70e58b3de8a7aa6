"""The subjects: each module has its title and its rows."""

from benchmarks.subjects import (
    checker,
    clips,
    compilation,
    error_clip,
    leaves,
    names,
    norm,
    per_example,
    recorder,
    steps,
    thresholds,
    updates,
    values,
)

SUBJECTS = {
    module.__name__.rpartition(".")[2]: module
    for module in (
        norm,
        leaves,
        clips,
        steps,
        updates,
        per_example,
        compilation,
        error_clip,
        names,
        values,
        checker,
        thresholds,
        recorder,
    )
}
