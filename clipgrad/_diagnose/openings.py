"""How what holds a program is opened on a tape: one row for each kind of `_programs`.

A primitive that JAX adds is a row of `clipgrad/_programs/kinds.py`, and runs as one operation here.
To open it, write a row of `OPENINGS`; a class of its own overrides the ways in which its program
is not one that runs once, on the operands.
"""

from clipgrad._diagnose.opened_calls import InBranch, InMesh, InRule
from clipgrad._diagnose.opened_loops import InScan, InWhile
from clipgrad._diagnose.tape import Inside
from clipgrad._programs import (
    CALLS,
    CONDS,
    CUSTOM_RULES,
    JIT,
    REMAT,
    SCANS,
    SHARD_MAPS,
    WHILES,
    Kind,
)

# Linear solves, kernels, and operations with functions stay whole: their programs are no parts that
# run one after the other.
OPENINGS: dict[Kind, type[Inside]] = {
    JIT: Inside,
    REMAT: Inside,
    CALLS: Inside,
    CONDS: InBranch,
    SCANS: InScan,
    WHILES: InWhile,
    CUSTOM_RULES: InRule,
    SHARD_MAPS: InMesh,
}
