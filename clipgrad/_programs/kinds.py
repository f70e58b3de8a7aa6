"""The table of the primitives that hold programs: all that is known of each, in one row.

To add a primitive, write a row of `KINDS`: what holds its programs, which of them derivatives go
through, whether values inside of them have names, and what feeds them. How `evaluate` binds it
again is an entrance (`entrances.py`), how `diagnose` opens it on a tape is an opening of it.
"""

import dataclasses
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax.extend.core import JaxprEqn
from jax.extend.core import primitives as jax_primitives

from clipgrad._programs.hijax import expanded_program, high_operation
from clipgrad._programs.primitives import PrimitiveTable, TracedOnce, on_a_mesh, public_primitives


class Feed(NamedTuple):
    """The operands that enter a program inside of an equation, and those that decide whether it
    runs.

    Attributes:
      operands: the operand that each input of the program is.
      carried: the result of one step of a loop that an input of the next step is.
      control: the operands that decide whether, or how often, the program runs.
    """

    operands: tuple[int, ...]
    carried: dict[int, int]
    control: tuple[int, ...] = ()


def held_programs(equation: JaxprEqn) -> list:
    """Return all programs inside an equation, in JAX's containers."""
    parts = (p if isinstance(p, tuple) else (p,) for p in equation.params.values())
    programs = [item for part in parts for item in part if hasattr(item, "eqns")]
    if not programs and high_operation(equation) is not None:
        programs = [program for program in [expanded_program(equation)] if program is not None]
    return programs


def called_program(equation: JaxprEqn) -> Any:
    """Return the program of an equation that holds one, such as `jit`, `scan` or a custom rule."""
    names = ("jaxpr", "call_jaxpr", "call", "fun_jaxpr")
    named = (equation.params[name] for name in names if name in equation.params)
    program = next(named, None)
    return held_programs(equation)[0] if program is None else program


def scan_counts(equation: JaxprEqn) -> tuple[int, int]:
    """Return how many inputs of a scan are constants and how many are carried."""
    params = equation.params
    if "num_carry" in params:
        return params["num_consts"], params["num_carry"]
    constants, carry, _ = params["ft_in"].unpack()
    return len(constants), len(carry)


def while_counts(equation: JaxprEqn) -> tuple[int, int]:
    """Return how many inputs of a `while` are constants of its condition and of its body."""
    return equation.params["cond_nconsts"], equation.params["body_nconsts"]


def _inputs_of(program: Any) -> int:
    return len(getattr(program, "jaxpr", program).invars)


def _feed_last(equation: JaxprEqn, program: Any) -> Feed:
    """The last operands are the inputs: of a cond, the first one is the index."""
    first = len(equation.invars) - _inputs_of(program)
    return Feed(tuple(range(first, len(equation.invars))), {}, tuple(range(first)))


def _feed_scan(equation: JaxprEqn, program: Any) -> Feed:
    constants, carried = scan_counts(equation)
    return Feed(tuple(range(_inputs_of(program))), {constants + i: i for i in range(carried)})


def _feed_while(equation: JaxprEqn, program: Any) -> Feed:
    first, constants = while_counts(equation)
    operands = tuple(range(first, len(equation.invars)))
    carried = {i: i - constants for i in range(constants, len(operands))}
    return Feed(operands, carried, tuple(range(len(equation.invars))))


def _feed_solve(equation: JaxprEqn, program: Any) -> Feed:
    """A linear solve is followed as one operation."""
    raise NotImplementedError(operation_name(equation))


def _none(equation: JaxprEqn) -> list:
    return []


def _body(equation: JaxprEqn) -> list:
    return [equation.params["body_jaxpr"]]


def _matrix(equation: JaxprEqn) -> list:
    return [equation.params["jaxprs"].matvec]


def _first_program(equation: JaxprEqn) -> list:
    return held_programs(equation)[:1]


@dataclasses.dataclass(frozen=True, eq=False)
class Kind:
    """A row: primitives that hold programs in one way.

    Attributes:
      noun: the word for it.
      through: the programs that derivatives go through, operation by operation.
      values: the programs whose values have names, and can be kept besides the results. They are in
        the order in which `evaluate` numbers the branches of a cond.
      followed: the programs whose operations are followed one by one.
      feed: what feeds one of the programs, and what it feeds.
    """

    noun: str
    through: Callable[[JaxprEqn], list] = _none
    values: Callable[[JaxprEqn], list] = _none
    followed: Callable[[JaxprEqn], list] = _none
    feed: Callable[[JaxprEqn, Any], Feed] = _feed_last


def _branches(equation: JaxprEqn) -> list:
    """A choice by platform is one operation."""
    return [] if chooses_by_platform(equation) else held_programs(equation)


# The programs inside are the equation, operation by operation.
_WHOLE: tuple[Any, Any, Any] = (held_programs, held_programs, held_programs)
SCANS = Kind("scan", *_WHOLE, _feed_scan)
WHILES = Kind("while", values=_body, followed=_body, feed=_feed_while)
CONDS = Kind("cond", held_programs, held_programs, _branches)
JIT = Kind("jit", *_WHOLE)
REMAT = Kind("remat", *_WHOLE)
CALLS = Kind("call", *_WHOLE)
SHARD_MAPS = Kind("shard_map", *_WHOLE)
CUSTOM_RULES = Kind("custom rule", followed=_first_program)
LINEAR_SOLVES = Kind("linear solve", through=_matrix, feed=_feed_solve)
# Operations that hold functions, as a reduction does, and have derivatives of their own.
WITH_FUNCTIONS = Kind("operation with functions")
# Programs that are written for a device or a compiler, and in the types that they have.
KERNELS = Kind("kernel")


def _ruled_for_vmap(x: Any) -> Any:
    rule = jax.custom_batching.custom_vmap(lambda x: x)
    rule.def_vmap(lambda size, batched, x: (x, True))
    return rule(x)


def _linear_call(x: Any) -> Any:
    same = lambda _, x: x  # noqa: E731
    return jax.custom_derivatives.linear_call(same, same, (), x)


def _high_operation(x: Any) -> Any:
    """A `jax.lax.custom_root`, which JAX 0.12 writes as one."""
    return jax.lax.custom_root(lambda y: y - x, x, lambda f, y: x, lambda g, y: y)


_PALLAS, _PARTITIONING = "jax.experimental.pallas", "jax.experimental.custom_partitioning"


def _kernel(x: Any) -> Any:
    return sys.modules[_PALLAS].pallas_call(lambda x, y: None, out_shape=x)(x)


def _run_state(x: Any) -> Any:
    return sys.modules[_PALLAS].run_state(lambda reference: None)(x)


def _partitioned(x: Any) -> Any:
    same = sys.modules[_PARTITIONING].custom_partitioning(lambda x: x)
    same.def_partition(lambda *shardings: shardings, sharding_rule="i -> i")
    return same(x)


KINDS: PrimitiveTable[Kind] = PrimitiveTable(
    "KINDS",
    {
        SCANS: ("scan_p",),
        WHILES: ("while_p",),
        CONDS: ("cond_p",),
        JIT: ("jit_p",),
        REMAT: ("remat_p",),
        CALLS: ("closed_call_p", "call_p"),
        SHARD_MAPS: (TracedOnce("shard_map", on_a_mesh(lambda x: x)),),
        CUSTOM_RULES: (
            "custom_jvp_call_p",
            "custom_vjp_call_p",
            TracedOnce("custom_vmap", _ruled_for_vmap),
            TracedOnce("hijax", _high_operation),
        ),
        LINEAR_SOLVES: ("linear_solve_p",),
        WITH_FUNCTIONS: (
            "reduce_p",
            "reduce_window_p",
            "select_and_scatter_p",
            "scatter_p",
            "scatter_add_p",
            "scatter_mul_p",
            "scatter_min_p",
            "scatter_max_p",
            TracedOnce("scatter-sub", lambda x: x.at[0].subtract(1.0)),
            TracedOnce("linear_call", _linear_call),
            TracedOnce("composite", lambda x: jax.lax.composite(lambda x: x, "clipgrad.probe")(x)),
        ),
        KERNELS: (
            TracedOnce("pallas_call", _kernel, module=_PALLAS),
            TracedOnce("run_state", _run_state, module=_PALLAS),
            TracedOnce("partitioned", _partitioned, module=_PARTITIONING),
        ),
    },
)


def kind_of(equation: JaxprEqn) -> Kind | None:
    """The row of an equation that holds programs; None for any other, or without a row."""
    if equation.primitive in public_primitives() or held_programs(equation):
        return KINDS.get(equation.primitive)
    return None


def operation_name(equation: JaxprEqn) -> str:
    """The name that JAX gives an operation: to show it, and for the rules of a user's that ask.

    Never decide by this name: the row says what an operation is.
    """
    return equation.primitive.name


def noun_of(equation: JaxprEqn) -> str:
    """The word for an equation in messages: the name of the operation, unless it says nothing."""
    kind = kind_of(equation)
    says_nothing = kind is WHILES or high_operation(equation) is not None
    return kind.noun if kind and says_nothing else operation_name(equation)


def is_scan(equation: JaxprEqn) -> bool:
    return kind_of(equation) is SCANS


def is_while(equation: JaxprEqn) -> bool:
    return kind_of(equation) is WHILES


def is_cond(equation: JaxprEqn) -> bool:
    return kind_of(equation) is CONDS


def is_jit(equation: JaxprEqn) -> bool:
    return kind_of(equation) is JIT


def is_shard_map(equation: JaxprEqn) -> bool:
    return kind_of(equation) is SHARD_MAPS


def has_custom_rule(equation: JaxprEqn) -> bool:
    return kind_of(equation) is CUSTOM_RULES


def has_custom_vjp(equation: JaxprEqn) -> bool:
    """Whether an equation is a function of `jax.custom_vjp`."""
    is_own = {"fwd", "bwd"} <= getattr(high_operation(equation), "params", {}).keys()
    return is_own or equation.primitive is jax_primitives.custom_vjp_call_p


def has_own_derivative(equation: JaxprEqn) -> bool:
    """Whether an equation has a rule, of JAX's or of a user's, that stands in the program."""
    return kind_of(equation) in (CUSTOM_RULES, LINEAR_SOLVES) or is_linear_part(equation)


def is_linear_part(equation: JaxprEqn) -> bool:
    """Whether an equation is the derivative of a custom rule, before it is transposed."""
    return equation.primitive is jax_primitives.custom_lin_p


def is_linear_solve(equation: JaxprEqn) -> bool:
    return kind_of(equation) is LINEAR_SOLVES


def is_tag(equation: JaxprEqn) -> bool:
    """Whether an equation is a tag of `checkpoint_name`."""
    return equation.primitive is jax_primitives.name_p


def tag_of(equation: JaxprEqn) -> str | None:
    """The name that a tag gives its value; None for another equation."""
    return equation.params["name"] if is_tag(equation) else None


def detaches(equation: JaxprEqn) -> bool:
    """Whether an equation is a `stop_gradient`."""
    return equation.primitive is jax_primitives.stop_gradient_p


def scan_length(equation: JaxprEqn) -> int | None:
    """The number of steps of a scan; None for another equation."""
    return equation.params["length"] if is_scan(equation) else None


def is_reversed(equation: JaxprEqn) -> bool:
    """Whether an equation is a scan that goes from the last step to the first."""
    return is_scan(equation) and equation.params["reverse"]


def tracks_devices(equation: JaxprEqn) -> bool:
    """Whether an equation is a `shard_map` that knows what varies along its axes."""
    return is_shard_map(equation) and equation.params["check_vma"]


def chooses_by_platform(equation: JaxprEqn) -> bool:
    """Whether an equation is a cond that chooses by the platform, when XLA compiles."""
    return equation.params.get("branches_platforms") is not None
