"""Functions with rules of their own that close over values of the program around them.

The rules of a `jax.custom_vjp` or `jax.custom_jvp` are Python functions, which JAX calls when it
differentiates. They may close over values of the function that was traced, and these are nothing
any more when its program is evaluated again. Here they become arguments; but for those of functions
in a mapped scan, whose programs JAX traces again when it maps them.
"""

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal, Var, jaxpr_as_fun
from jax.extend.core import primitives as jax_primitives

from clipgrad._programs.elements import holds_floats
from clipgrad._programs.evaluate import Hook, ProgramValues, bind, evaluate
from clipgrad._programs.hijax import high_operation
from clipgrad._programs.kinds import called_program, has_custom_rule, held_programs
from clipgrad._programs.programs import equations, function_name, opened, read_once

# Of a variable, or of the identity of an equation's parameters and the number of a result.
Known = dict[Any, Any]


def with_explicit_closures(program: Any, inputs: Sequence) -> Any:
    """Return the program with what its custom rules close over as their arguments.

    It is the same program if no rule closes over a value of it.
    """
    if not _closes(program):
        return program
    return jax.make_jaxpr(lambda *inputs: evaluate(program, inputs, _Explicit()))(*inputs)


def closing_functions(program: Any) -> list[str]:
    """Return the functions whose rules close over values of the program: name, file and line."""
    ruled = (e for e in equations(program) if _is_ruled(e) and _closing_rules(e))
    return list(dict.fromkeys(function_name(equation, "func_src_info") for equation in ruled))


def _is_ruled(equation: JaxprEqn) -> bool:
    """Whether JAX differentiates an equation by a rule that is a function in Python."""
    rules = (jax_primitives.custom_jvp_call_p, jax_primitives.custom_vjp_call_p)
    is_high = high_operation(equation) is not None and has_custom_rule(equation)
    return equation.primitive in rules or is_high


@read_once
def _closes(jaxpr: Any) -> bool:
    """Whether a rule, in a program or in one inside it that is differentiated, closes over a value.

    No tracer is kept, which would keep its trace.
    """
    return any(
        _closing_rules(e) is not None if _is_ruled(e) else _closes_inside(e) for e in jaxpr.eqns
    )


def _closes_inside(equation: JaxprEqn) -> bool:
    return any(map(_closes, held_programs(equation)))


class _Rules(NamedTuple):
    """The rules of an equation, traced, and what they close over.

    From inputs to results and residuals; and from residuals and cotangents to the cotangents of the
    inputs ``reached``: all others are zero, and not computed.
    """

    programs: tuple[Any, ...] = ()
    reached: Sequence[int] = ()
    closed: Sequence[Tracer] = ()
    error: Exception | None = None  # why they can't be traced


class _Explicit(Hook):
    """Gives custom rules what they close over as arguments; all else stays as it is."""

    def __init__(self):
        self._known: Known = {}

    def __call__(self, equation: JaxprEqn, inputs: list) -> Sequence | None:
        """The results of a custom rule; None for an equation with such rules inside."""
        rules = _closing_rules(equation) if _is_ruled(equation) else None
        if rules is None:
            return None if _closes_inside(equation) else bind(equation, inputs)
        known = {id(tracer): self._value(tracer) for tracer in rules.closed}
        known = {place: value for place, value in known.items() if value is not None}
        return _explicit(equation, rules, list(known))(list(known.values()), list(inputs))

    def values(self, jaxpr: Any) -> ProgramValues:
        return _Noted(self, self._known)

    def _value(self, tracer: Any) -> Any:
        """The present value of a tracer of the program that was traced; None for another tracer."""
        variable, made = getattr(tracer, "val", None), getattr(tracer, "parent", None)
        if isinstance(variable, Literal):
            return jnp.asarray(variable.val)
        if isinstance(variable, Var) and variable in self._known:
            return self._known[variable]
        # JAX 0.10.0 drops the variables that no equation uses: to be closed over is no use.
        numbers = (i for i, v in enumerate(getattr(made, "outvars", ())) if v is variable)
        return self._known.get((id(getattr(made, "params", None)), next(numbers, None)))


class _Noted(ProgramValues):
    """Notes the values of variables."""

    def __init__(self, hook: Hook, known: Known):
        super().__init__(hook)
        self._known = known

    def write(self, variables: Sequence[Var], values: Sequence[Any]) -> None:
        super().write(variables, values)
        self._known.update(zip(variables, values, strict=True))

    def write_results(self, equation: JaxprEqn, outputs: Sequence) -> None:
        numbered = enumerate(outputs)
        self._known |= {(id(equation.params), number): value for number, value in numbered}
        super().write_results(equation, outputs)


def _closing_rules(equation: JaxprEqn) -> _Rules | None:
    """The rules of an equation if they close over a value, as far as they can be traced."""
    try:
        rules = _traced(equation)
    except jax.errors.UnexpectedTracerError as error:
        return _Rules(error=error)
    except Exception:  # JAX raises it where it differentiates
        return None
    return rules if rules.closed else None


def _traced(equation: JaxprEqn) -> _Rules:
    """Trace the rules of an equation, as JAX does where it differentiates."""
    arguments = range(_constant_count(equation), len(equation.invars))
    moved, reached = [i for i in arguments if holds_floats(equation.invars[i])], set()

    def forward(inputs):
        def call(*chosen):
            pairs = zip(moved, chosen, strict=True)
            marked = {i: watched(functools.partial(reached.add, i), x) for i, x in pairs}
            return bind(equation, [marked.get(i, x) for i, x in enumerate(inputs)])

        return jax.vjp(call, *(inputs[i] for i in moved))

    inputs = [variable.aval for variable in equation.invars]
    first, (outputs, pull) = jax.make_jaxpr(forward, return_shape=True)(inputs)
    residuals, structure = jax.tree.flatten(pull)

    def backward(residuals, cotangents):
        in_cotangents = structure.unflatten(residuals)(_with_float0(cotangents, outputs))
        return [x for i, x in zip(moved, in_cotangents, strict=True) if i in reached]

    second = jax.make_jaxpr(backward)(residuals, _floating(outputs))
    constants = [x for program in (first, second) for x in opened(program)[1]]
    closed = {id(x): x for x in constants if isinstance(x, Tracer)}
    return _Rules((first, second), sorted(reached), list(closed.values()))


def _constant_count(equation: JaxprEqn) -> int:
    """The number of the first inputs that the function itself closes over."""
    operation = high_operation(equation)
    if operation is None:
        return equation.params["num_consts"]
    first = operation.in_avals[0] if operation.in_avals else ()
    return len(jax.tree.leaves(first)) if isinstance(first, list) else 0  # a list of constants


def _explicit(equation: JaxprEqn, rules: _Rules, closed: list[int]) -> Callable[..., list]:
    """The function of an equation, of what its rules close over and its inputs."""
    count = len(equation.outvars)

    def primal(values, inputs):  # it needs nothing of what its rules alone close over
        return jaxpr_as_fun(called_program(equation))(*inputs)

    def evaluated(number, values, inputs):
        known = dict(zip(closed, values, strict=True))
        jaxpr, constants = opened(rules.programs[number])
        constants = [known.get(id(x), x) for x in constants]
        return jaxpr_as_fun(ClosedJaxpr(jaxpr, constants))(*inputs)

    def forward(values, inputs):
        held = [*values, *inputs[: _constant_count(equation)]]
        _require_rules(equation, rules, [x.value for x in held if x.perturbed])
        values, inputs = jax.tree.map(lambda x: x.value, (values, inputs))
        results = evaluated(0, values, inputs)
        return results[:count], (results[count:], values)

    def backward(residuals, cotangents):
        saved, values = residuals
        arrays = map(_instantiated, _floating(cotangents, equation.outvars))
        in_cotangents = evaluated(1, values, [*saved, *arrays])
        by_input = dict(zip(rules.reached, in_cotangents, strict=True))
        return None, [by_input.get(i) for i in range(len(equation.invars))]

    primal.__name__ = function_name(equation)
    call = jax.custom_vjp(primal)
    call.defvjp(forward, backward, symbolic_zeros=True)
    return call


def _require_rules(equation: JaxprEqn, rules: _Rules, differentiated: list) -> None:
    """Raises `ValueError` if the rules were not traced, or close over what is differentiated."""
    value = next(filter(holds_floats, differentiated), None)
    if rules.error is not None:
        over = "a value of an enclosing transformation, such as jax.vmap, which ends earlier"
    elif value is not None:
        over = f"a value of type {jax.typeof(value).str_short()} that is differentiated"
    else:
        return
    is_jvp = equation.primitive is jax_primitives.custom_jvp_call_p
    is_jvp = is_jvp or "jvp_rule" in getattr(high_operation(equation), "params", ())
    kind = "custom_jvp" if is_jvp else "custom_vjp"
    where, name = function_name(equation, "func_src_info"), function_name(equation)
    raise ValueError(
        f"fun: got the jax.{kind} function {where}, whose rules close over {over}; expected "
        f"rules that take it as an argument: call {name}(..., value), and return its "
        "derivative from the rules; if it needs none, close over jax.lax.stop_gradient(value)"
    ) from rules.error


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def watched(note: Callable[[], None], x: Any) -> Any:
    """``x``; calls ``note`` if the cotangent that comes back to it is not zero by its type."""
    return x


def _mark_backward(note: Callable[[], None], residuals: None, cotangent: Any) -> Any:
    if not isinstance(cotangent, SymbolicZero):
        note()
    return (cotangent,)


watched.defvjp(lambda note, x: (x.value, None), _mark_backward, symbolic_zeros=True)


def _floating(values: Sequence, like: Sequence | None = None) -> list:
    """Those of some values that have tangents and cotangents, by their own types or by others'."""
    pairs = zip(values, values if like is None else like, strict=True)
    return [value for value, other in pairs if holds_floats(other)]


def _with_float0(values: Iterable, like: Sequence) -> list:
    """The values with zeros of type float0 where another has no tangents."""
    left = iter(values)
    zero = lambda x: np.zeros(getattr(x, "aval", x).shape, jax.dtypes.float0)  # noqa: E731
    return [next(left) if holds_floats(x) else zero(x) for x in like]


def _instantiated(x: Any) -> Any:
    aval: Any = getattr(x, "aval", None)
    return jnp.zeros(aval.shape, aval.dtype) if isinstance(x, SymbolicZero) else x
