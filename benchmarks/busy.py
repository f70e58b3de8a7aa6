"""CPU seconds of clips per example in multiples of the plain gradient's, on a busy machine.

    python -m benchmarks.busy [WORK ...]

Other programs on the machine change what a program takes in wall time, and hardly what it takes in
CPU seconds. The programs take turns; the table has the medians of their ratios, and temporaries.
"""

import sys
import time

import jax
import numpy as np

from benchmarks.rows import Scale
from benchmarks.subjects import per_example as subject

SECONDS = 30
ROUNDS = 5
METHODS = ("one pass", "two passes")


def cpu_seconds(program, args):
    start = time.process_time()
    jax.block_until_ready(program(*args))
    return time.process_time() - start


def cells(program, plain, taken, beside):
    bytes_, least = (p.memory_analysis().temp_size_in_bytes for p in (program, plain))
    ratio = np.median(np.divide(taken, beside))
    return [f"{ratio:.2f}", f"{bytes_ / 1e6:.1f}", f"{bytes_ / least:.2f}"]


def line(name, model, size):
    args = model.params, model.batch(size)
    functions = {"no clip": subject.unclipped(model)}
    functions |= {method: subject.clipped(model, method) for method in METHODS}
    functions["optax"] = subject.optax_sum(model)
    programs = {name: jax.jit(f).lower(*args).compile() for name, f in functions.items()}
    for program in programs.values():
        cpu_seconds(program, args)
    taken = {name: [] for name in programs}
    end = time.monotonic() + SECONDS
    while time.monotonic() < end or len(taken["no clip"]) < ROUNDS:
        for who, program in programs.items():
            taken[who].append(cpu_seconds(program, args))
    plain, beside = programs["no clip"], taken["no clip"]
    work = f"{name}, batch {size}"
    for who in (*METHODS, "optax"):
        found = cells(programs[who], plain, taken[who], beside)
        print("|", " | ".join([work, who, *found, str(len(beside))]), "|", flush=True)
        work = ""


def main(wanted):
    print("| work | by | CPU seconds | temporaries, MB | times as many | rounds |")
    print("| --- | --- | ---: | ---: | ---: | ---: |", flush=True)
    for name, make, sizes, _ in subject.WORK:
        if not wanted or any(part in name for part in wanted):
            line(name, make(Scale(1)), sizes[0])


if __name__ == "__main__":
    main(sys.argv[1:])
