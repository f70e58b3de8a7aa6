"""All tables of the checker as two, by what they ask: which gradients are wrong, which are right.

`LIMITS` has the rows that the checker judges otherwise, each with what it says: it misses a wrong
gradient ("missed"), or does not accept a right one ("refused").
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from tests.check import (
    check_cases,
    check_functions,
    check_history,
    check_lazy,
    check_vanishing,
    check_zoo,
)
from tests.check.check_carriers import CARRIERS
from tests.check.check_carriers import RIGHT as LOOKED_AT
from tests.check.check_zoo import VALUES_ALONE
from tests.helpers import SEED

BOTH, ALL = ("float32", "float64"), ("float32", "float64", "bfloat16")
NEAR = {"wrong": ("ones", "nearly one"), "right": ("ones", "nearly one", "about a half")}


class Row(NamedTuple):
    """A gradient: `make(dtype)` gives the function, its arguments, and perhaps options.

    Attributes:
      check: the check that a wrong one must fail; None for any.
      dtypes: the types in which it is judged.
      strict: whether it runs with JAX's strict promotion of types and ranks.
    """

    make: Callable[[Any], tuple]
    check: str | None = None
    dtypes: tuple[str, ...] = BOTH
    strict: bool = False


WRONG: dict[str, Row] = {}
RIGHT: dict[str, Row] = {}


def pair(make, which: int, options: dict | None = None) -> Callable[[Any], tuple]:
    """One of a wrong and a right function, and their arguments."""

    def made(dtype):
        *functions, args = make(dtype)
        return functions[which], args, options or {}

    return made


def of_bugs() -> None:
    """Small bugs, and bugs modeled on those of published libraries, each with its right twin."""
    twins = set(check_zoo.RIGHT.values())
    rows = [(name, *row, BOTH) for name, row in check_zoo.PAIRS.items()]
    for name, bug in check_history.HISTORY.items():
        rows.append((name, *bug[:2], BOTH if bug.dtype == "float32" else (bug.dtype,)))
    for name, make, check, dtypes in rows:
        options = {"order": 2} if check == "second order" else {}
        WRONG[name] = Row(pair(make, 0, options), check, dtypes, strict=True)
        if name in twins or name in check_history.HISTORY:
            RIGHT[name] = Row(pair(make, 1, options), None, dtypes, strict=True)


def of_cases() -> None:
    """Solvers, samplers, kinks, ties, masked rows; what is right at the point alone; carriers."""
    WRONG.update({name: Row(make) for name, make in check_cases.WRONG.items()})
    RIGHT.update({name: Row(make) for name, make in check_cases.RIGHT.items()})
    for name, (make, _) in check_lazy.LAZY.items():
        WRONG[name] = Row(pair(make, 0, VALUES_ALONE), "value")
        RIGHT[name] = Row(pair(make, 1))
    for name, make in CARRIERS.items():
        WRONG[name] = Row(pair(make, 0, VALUES_ALONE), "value", ALL)
        RIGHT[name] = Row(pair(make, 1), None, ALL)
    RIGHT.update({name: Row(make) for name, make in LOOKED_AT.items()})


def of_functions() -> None:
    """Right functions, most of them without a rule."""
    every = [(check_functions.FUNCTIONS, BOTH), (check_functions.MORE, BOTH[:1])]
    for table, dtypes in every:
        for name, (function, make) in table.items():
            at = lambda dtype, f=function, make=make: (f, make(dtype))  # noqa: E731
            RIGHT[f"function {name}"] = Row(at, None, dtypes, strict=True)


def of_vanishing() -> None:
    """Rules where a gradient vanishes, and what may be wrong with them, at a point in turn."""
    for turn, (name, row) in enumerate(check_vanishing.VANISHING.items(), SEED):
        # Of this difference itself, half precision leaves nothing but rounding.
        dtypes = BOTH if name == "difference of logsumexp" else ALL
        for bug, what in enumerate(("right", *row.bugs)):
            near = NEAR["wrong" if bug else "right"]
            where = near[(turn // 6 + bug) % len(near)]  # six seeds have a row in each type
            make = functools.partial(_vanishing, name, where, bug)
            table = WRONG if bug else RIGHT
            table[f"{name} {where} {what}"] = Row(make, "value" if bug else None, dtypes)


def _vanishing(name, where, bug, dtype):
    row = check_vanishing.VANISHING[name]
    args = jnp.int32(bug), *check_vanishing.point(where, row, dtype)
    right = {"min_verified": 0.1} if dtype == jnp.bfloat16 else {}
    return check_vanishing.function(name), args, VALUES_ALONE if bug else right


for fill in (of_bugs, of_cases, of_functions, of_vanishing):
    fill()

LIMITS: dict[tuple[str, str], str] = {
    ("wrong", "a_sort_of_sorted_numbers"): "a further point keeps what is far apart in order",
    ("wrong", "a_sort_of_the_rows_of_a_range"): "a further point keeps what is far apart in order",
    ("wrong", "sum_in_fixed_point"): "numbers cast to integers in a rule have no slopes in float64",
    ("right", "sum_in_fixed_point"): "numbers cast to integers in a rule have no slopes in float64",
    ("right", "deep_equilibrium"): 'a loop stops by its numbers: write skip="linearity"',
    ("right", "deep_equilibria_of_a_batch"): 'a loop stops by its numbers: skip="linearity"',
    ("right", "roots_by_iteration_in_tenths"): "not converged in float64: write tolerance=...",
    ("right", "root_by_halving_thirty_times"): "not converged in float64: write tolerance=...",
    ("right", "root_by_bisection"): "bisection has no slopes",
    ("right", "a_jit_that_donates_its_input"): "it cannot be called twice: check it undonated",
    ("right", "a_sum_beside_a_large_number_by_callback"): "rounding hides its slopes at a point",
    ("right", "rounding_to_24_bits"): "a staircase of JAX's own: nothing was verified",
    ("right", "rounding_to_small_steps"): "a staircase of JAX's own: nothing was verified",
}
# In half precision alone, where slopes are known to a quarter at best: it is told that too little
# was verified, and that float32 is judged better.
LIMITS_OF_TYPES: dict[tuple[str, str], str] = {
    ("inverse_root_by_a_first_guess", "bfloat16"): "its slopes are known to 27 %",
    ("sorted_by_integer_keys", "bfloat16"): "its steps change the order of its elements",
}
# JAX 0.12 has another derivative of a Cholesky decomposition, with which these are accepted.
if jax.__version_info__ < (0, 11):
    LIMITS |= {
        ("right", f"a_product_{name}"): "one triangle alone is read"
        for name in (
            "beside_a_cholesky_decomposition",
            "with_itself_beside_a_decomposition_that_reads_one_triangle",
        )
    }
