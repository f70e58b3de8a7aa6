"""Functions with rules of their own that close over values of the program around them.

The rules of a `jax.custom_vjp` or `jax.custom_jvp` are Python functions, which JAX calls when it
differentiates. They may close over values of the function that was traced, and these are nothing
any more when its program is evaluated again. Here they become arguments.
"""

import functools
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal, Var, jaxpr_as_fun, jaxprs_in_params

from clipgrad._jaxpr.elements import holds_floats
from clipgrad._jaxpr.evaluate import Hook, ProgramValues, bind, evaluate
from clipgrad._jaxpr.programs import called_program, opened, read_once

# By program. No tracer is kept, which would keep its trace.
_MOVED: weakref.WeakKeyDictionary[Any, list[int]] = weakref.WeakKeyDictionary()

# A variable, or the identity of an equation's parameters and the number of a result.
ClosurePlace = Any
Known = dict[ClosurePlace, Any]


def with_explicit_closures(program: Any, inputs: Sequence) -> Any:
    """Return the program with what its custom rules close over as their arguments.

    It is the same program if no rule closes over a value of it.
    """
    if not _closes(program):
        return program
    return jax.make_jaxpr(lambda *inputs: evaluate(program, inputs, _Explicit({})))(*inputs)


def closing_functions(program: Any) -> list[str]:
    """Return the functions whose rules close over values of the program: name, file and line."""
    found = (e for e in _custom_equations(program) if _has_closure(e, set()))
    return list(dict.fromkeys(_function_name(equation, "func_src_info") for equation in found))


class _Rules(NamedTuple):
    """The rules of an equation, traced.

    Of a `custom_vjp`: from inputs to results and residuals, and from residuals and cotangents to
    the cotangents of the inputs ``reached``; all others are zero, and not computed. Of a
    `custom_jvp`: from inputs and the tangents of those that are ``moved`` to both of the results.
    """

    programs: tuple[Any, ...] = ()
    moved: Sequence[int] = ()  # the inputs that the function may be differentiated by
    reached: Sequence[int] = ()
    error: Exception | None = None  # why they can't be traced

    def given(self, number: int, known: Known) -> Any:
        """A program with these values in place of the tracers."""
        jaxpr, constants = opened(self.programs[number])
        return ClosedJaxpr(jaxpr, [known.get(_place(x), x) for x in constants])

    def check(self, equation: JaxprEqn, closed: list, inputs: dict[int, Any]) -> None:
        """Raises `ValueError` if the equation can't be differentiated by these values.

        Inputs, by their numbers, may be what the function closed over when it was traced first.
        """
        first = equation.params["num_consts"]
        held = [x for i, x in inputs.items() if i >= first and i not in self.moved]
        found = next(filter(holds_floats, [*closed, *held]), None)
        if self.error is not None:
            over = "a value of an enclosing transformation, such as jax.vmap, which ends earlier"
        elif found is not None:
            over = f"a value of type {jax.typeof(found).str_short()} that is differentiated"
        else:
            return
        kind = equation.primitive.name.removesuffix("_call")
        where, name = _function_name(equation, "func_src_info"), _function_name(equation)
        raise ValueError(
            f"fun: got the jax.{kind} function {where}, whose rules close over {over}; expected "
            f"rules that take it as an argument: call {name}(..., value), and return its "
            "derivative from the rules; if it needs none, close over jax.lax.stop_gradient(value)"
        ) from self.error


class _Explicit(Hook):
    """Gives custom rules what they close over as arguments; all else stays as it is."""

    def __init__(self, known: Known):
        self._known = known

    def __call__(self, equation: JaxprEqn, inputs: list) -> Sequence | None:
        """The results of a custom rule; None for an equation with such rules inside."""
        if equation.primitive.name in _CONVERSIONS:
            return self._converted(equation, inputs)
        programs = jaxprs_in_params(equation.params)
        return None if any(map(_closes, programs)) else bind(equation, inputs)

    def values(self, jaxpr: Any) -> ProgramValues:
        return _Noted(self, self._known)

    def _converted(self, equation: JaxprEqn, inputs: list) -> Sequence:
        try:
            rules, closed = _rules(equation), _closed_over(equation)
        except jax.errors.UnexpectedTracerError as error:
            rules, closed = _Rules(error=error), {}
        except Exception:
            return bind(equation, inputs)
        values = {place: self._value(tracer) for place, tracer in closed.items()}
        known = {place: value for place, value in values.items() if value is not None}
        if not known and not equation.params["num_consts"] and rules.error is None:
            return bind(equation, inputs)
        call = _CONVERSIONS[equation.primitive.name](equation, rules, list(known))
        return call(list(known.values()), list(inputs))

    def _value(self, tracer: Any) -> Any:
        """The present value of a tracer of the program that was traced; None for another tracer."""
        if isinstance(getattr(tracer, "val", None), Literal):
            return jnp.asarray(tracer.val.val)
        places = _place(tracer), _place_of_result(tracer)
        return next((self._known[place] for place in places if place in self._known), None)


class _Noted(ProgramValues):
    """Notes the values of variables by their places."""

    def __init__(self, hook: Hook, known: Known):
        super().__init__(hook)
        self._known = known
        self._params = None  # of the equation whose results are written next

    def inputs(self, equation: JaxprEqn) -> list:
        self._params = equation.params
        return super().inputs(equation)

    def write(self, variables: Sequence[Var], values: Sequence[Any]) -> None:
        super().write(variables, values)
        self._known.update(zip(variables, values, strict=True))
        own = enumerate(values) if self._params is not None else ()
        self._known.update(((id(self._params), i), value) for i, value in own)


def _place(tracer: Any) -> ClosurePlace:
    """The variable of a tracer, in whose place the program that was traced has its value."""
    variable = getattr(tracer, "val", None)
    return variable if isinstance(variable, Var) else id(tracer)


def _place_of_result(tracer: Any) -> ClosurePlace:
    """The place of a tracer as a result of an equation.

    JAX 0.10.0 drops the variables that no equation uses, and to be closed over is no use.
    """
    variable = getattr(tracer, "val", None)
    made: Any = getattr(tracer, "parent", None)
    outputs = list(getattr(made, "outvars", ()))
    return (id(made.params), outputs.index(variable)) if variable in outputs else None


@read_once
def _closes(jaxpr: Any) -> bool:
    """Whether a function with a rule, in a program or in one inside it, closes over its values."""
    own = (equation for equation in jaxpr.eqns if equation.primitive.name in _CONVERSIONS)
    inside = any(map(_closes, _inner_programs(jaxpr)))
    return inside or any(_has_closure(equation, set(jaxpr.constvars)) for equation in own)


def _inner_programs(jaxpr: Any) -> Iterator[Any]:
    """The programs that derivatives may reach: the program of a function with a rule is not one."""
    for equation in jaxpr.eqns:
        if equation.primitive.name not in _CONVERSIONS:
            yield from jaxprs_in_params(equation.params)


def _has_closure(equation: JaxprEqn, constants: set[Var]) -> bool:
    """Whether a function closes over a value, as far as its rule can be traced."""
    if any(x not in constants for x in equation.invars[: equation.params["num_consts"]]):
        return True
    try:
        return bool(_closed_over(equation))
    except jax.errors.UnexpectedTracerError:
        return True
    except Exception:
        return False


def _closed_over(equation: JaxprEqn, known: Known | None = None) -> Known:
    """The tracers that the rules of an equation close over, and those that rules in them do.

    A rule may use the function that it is of, so this ends where nothing is new.
    """
    found, programs = dict(known or {}), _rules(equation).programs
    for program in programs:
        tracers = (x for x in opened(program)[1] if isinstance(x, Tracer))
        found |= {_place(tracer): tracer for tracer in tracers}
    if known is not None and len(found) == len(known):
        return found
    for inner in (e for program in programs for e in _custom_equations(program)):
        found = _closed_over(inner, found)
    return found


def _custom_equations(program: Any) -> Iterator[JaxprEqn]:
    """The functions with rules of a program and of those inside it that derivatives may reach."""
    jaxpr = opened(program)[0]
    yield from (e for e in jaxpr.eqns if e.primitive.name in _CONVERSIONS)
    for inner in _inner_programs(jaxpr):
        yield from _custom_equations(inner)


def _rules(equation: JaxprEqn) -> _Rules:
    """Trace the rules of an equation, as JAX does where it differentiates.

    An input may be what the function closed over when it was traced the first time, and JAX raises
    an error where that is differentiated.
    """
    trace = _traced_jvp if equation.primitive.name == "custom_jvp_call" else _traced_vjp
    own = range(equation.params["num_consts"], len(equation.invars))
    floating = [i for i in own if holds_floats(equation.invars[i])]
    key = opened(called_program(equation))[0]
    if key in _MOVED:  # where a trace has failed, JAX forgets what an earlier one has found
        return trace(equation, _MOVED[key])
    if not floating:
        return _Rules()
    try:
        return trace(equation, floating)
    except jax.errors.UnexpectedTracerError:
        raise
    except Exception as error:
        moved = [i for i in floating if len(floating) > 1 and _is_traceable(trace, equation, i)]
        if not moved:
            raise error
        _MOVED[key] = moved
        return trace(equation, moved)


def _is_traceable(trace: Callable[..., Any], equation: JaxprEqn, moved: int) -> bool:
    try:
        trace(equation, [moved])
    except jax.errors.UnexpectedTracerError:
        raise
    except Exception:
        return False
    return True


def _traced_vjp(equation: JaxprEqn, moved: list[int]) -> _Rules:
    reached: set[int] = set()

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
        found = structure.unflatten(residuals)(_with_float0(cotangents, outputs))
        return [x for i, x in zip(moved, found, strict=True) if i in reached]

    second = jax.make_jaxpr(backward)(residuals, _floating(outputs))
    return _Rules((first, second), moved, [i for i in moved if i in reached])


def _traced_jvp(equation: JaxprEqn, moved: list[int]) -> _Rules:
    def both(inputs, tangents):
        def call(*chosen):
            new = dict(zip(moved, chosen, strict=True))
            return bind(equation, [new.get(i, x) for i, x in enumerate(inputs)])

        outputs, found = jax.jvp(call, tuple(inputs[i] for i in moved), tuple(tangents))
        return outputs, _floating(found, outputs)

    inputs = [variable.aval for variable in equation.invars]
    program = jax.make_jaxpr(both)(inputs, [inputs[i] for i in moved])
    return _Rules((program,), moved)


def _primal(equation: JaxprEqn) -> Callable[..., list]:
    """The function itself, which needs nothing of what its rules alone close over."""

    def call(closed, inputs):
        return jaxpr_as_fun(called_program(equation))(*inputs)

    call.__name__ = _function_name(equation)
    return call


def _explicit_vjp(equation: JaxprEqn, rules: _Rules, places: list) -> Callable[..., list]:
    """The function of a `custom_vjp` equation, of what its rules close over and its inputs."""
    count, call = len(equation.outvars), jax.custom_vjp(_primal(equation))

    def forward(closed, inputs):
        differentiated = {i: x.value for i, x in enumerate(inputs) if x.perturbed}
        rules.check(equation, [x.value for x in closed if x.perturbed], differentiated)
        closed, inputs = jax.tree.map(lambda x: x.value, (closed, inputs))
        known = dict(zip(places, closed, strict=True))
        found = evaluate(rules.given(0, known), inputs, _Explicit(known))
        return found[:count], (found[count:], closed)

    def backward(residuals, cotangents):
        saved, closed = residuals
        known = dict(zip(places, closed, strict=True))
        arrays = map(_instantiated, _floating(cotangents, equation.outvars))
        found = evaluate(rules.given(1, known), [*saved, *arrays], _Explicit(known))
        given = dict(zip(rules.reached, found, strict=True))
        return None, [given.get(i) for i in range(len(equation.invars))]

    call.defvjp(forward, backward, symbolic_zeros=True)
    return call


def _explicit_jvp(equation: JaxprEqn, rules: _Rules, places: list) -> Callable[..., list]:
    """The function of a `custom_jvp` equation, of what its rule closes over and its inputs."""
    call = jax.custom_jvp(_primal(equation))

    def both(primals, tangents):
        (closed, inputs), (closed_tangents, tangents) = primals, tangents
        pairs = zip([*closed, *inputs], [*closed_tangents, *tangents], strict=True)
        differentiated = [None if isinstance(t, SymbolicZero) else x for x, t in pairs]
        count = len(closed)
        rules.check(equation, differentiated[:count], dict(enumerate(differentiated[count:])))
        known = dict(zip(places, closed, strict=True))
        arrays = [_instantiated(tangents[i]) for i in rules.moved]
        found = evaluate(rules.given(0, known), [*inputs, *arrays], _Explicit(known))
        outputs = found[: len(equation.outvars)]
        return outputs, _with_float0(found[len(outputs) :], outputs)

    call.defjvp(both, symbolic_zeros=True)
    return call


_CONVERSIONS = {"custom_vjp_call": _explicit_vjp, "custom_jvp_call": _explicit_jvp}


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


def _function_name(equation: JaxprEqn, kind: str = "func_name") -> str:
    """The name of the function that the rules are of; with its file and line: another kind."""
    info = getattr(opened(called_program(equation))[0], "debug_info", None)
    found = (getattr(info, name, None) for name in (kind, "func_name"))
    return next(filter(None, found), equation.primitive.name)
