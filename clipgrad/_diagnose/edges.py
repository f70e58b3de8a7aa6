"""The cotangents of all operands and results of a program, and the ranges of all its values."""

import math
from collections.abc import Sequence, Set
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import DropVar, JaxprEqn, Literal, Var

from clipgrad._compat import to_varying, varying_axes
from clipgrad._diagnose.probe import RESULT
from clipgrad._jaxpr import (
    PRINTS,
    Hook,
    bind,
    device_count,
    differentiated_programs,
    dtype_of,
    evaluate,
    holds_floats,
    is_reference,
    jit_for_one_call,
    manual_axes,
    on_host,
    opened,
)
from clipgrad._numerics import largest
from clipgrad._program import active_variables

OPERAND = "operand"
NEVER = np.array([np.inf, -np.inf], np.float32)  # the range of what was not computed
_REAL = np.dtype(np.float32)
# A value of so few elements, at all steps and on all devices, leaves the program as it is: to
# compile its reductions takes longer.
_WHOLE_VALUES = 2**12


class EdgeValues(NamedTuple):
    """The cotangents of operands and results of a program, and the ranges of values.

    All have leading axes for the scans and the `shard_map`s around the program.
    """

    probes: Any
    notes: Any
    gradients: Any = ()  # of the outermost program: which elements of each axis are not all zero
    layers: Any = ()  # likewise of some axes of an input together

    def cotangent(self, number: int, kind: str, position: int) -> np.ndarray | None:
        """The largest magnitude of a cotangent; None if it is not measured."""
        return self.probes["own"].get(f"{number} {kind} {position}")

    def result_range(self, number: int, position: int, where: Any) -> tuple[float, float]:
        """The smallest and the largest element of a result, at all steps or at some."""
        return _over_steps(self.notes["results"][str(number)][position], where)

    def input_range(self, position: int, where: Any) -> tuple[float, float]:
        """The smallest and the largest element of an input, at all steps or at some."""
        return _over_steps(self.notes["inputs"][position], where)

    @property
    def ran(self) -> bool:
        """Whether the program was run at all; a branch may not be."""
        return bool(np.any(np.isfinite(self.notes["ran"][0])))

    def inside(self, number: int) -> list["EdgeValues"]:
        """The measured values of the programs inside of an equation."""
        probes = self.probes["inside"].get(str(number), [])
        notes = self.notes["inside"].get(str(number), [])
        return [EdgeValues(*own) for own in zip(probes, notes, strict=True)]


def _over_steps(noted: Any, where: Any) -> tuple[float, float]:
    is_whole = isinstance(noted, dict)  # the value itself
    found = np.asarray(noted["whole"] if is_whole else noted, np.float64)
    if where is not None and found.shape[: where.ndim] == where.shape:
        found = found[where]
    low, high = (found, found) if is_whole else (found[..., 0], found[..., 1])
    return float(np.min(low, initial=np.inf)), float(np.max(high, initial=-np.inf))


def inner_programs(equation: JaxprEqn) -> list:
    """The programs inside of an equation whose edges are measured."""
    is_whole = equation.params.get("branches_platforms") is not None
    return [] if is_whole else differentiated_programs(equation)


def edge_values(
    program: Any,
    inputs: Sequence[Any],
    chosen: Sequence[int],
    layers: Sequence[tuple[int, tuple[int, ...]]] = (),
) -> EdgeValues:
    """Measure a program at its inputs.

    Args:
      program: the program.
      inputs: the inputs.
      chosen: the positions of those that are differentiated.
      layers: chosen inputs, and axes of them that are measured together.
    """
    active = active_variables(program, chosen)
    probes = _zero_probes(program, active, ())

    @jit_for_one_call(program)
    def run(inputs: list, probes: Any) -> Any:
        def loss(given: list, probes: Any) -> Any:
            changed = dict(zip(chosen, given, strict=True))
            hook = Edges(opened(program)[0], probes)
            every = [jnp.asarray(changed.get(i, x)) for i, x in enumerate(inputs)]
            value = evaluate(program, every, hook)[0]
            return value, hook.noted()

        given = [inputs[i] for i in chosen]
        _, pull_back, notes = jax.vjp(loss, given, probes, has_aux=True)
        grads, found = pull_back(jnp.ones((), dtype_of(opened(program)[0].outvars[0])))
        of = dict(zip(chosen, grads, strict=True))
        by_layer = [_nonzero(of[i], axes) for i, axes in layers]
        return found, notes, [_nonzero_by_axis(grad) for grad in grads], by_layer

    found, *rest = on_host(run(list(inputs), probes))
    return EdgeValues(_largest_by_step(program, found, 0), *rest)


def _nonzero_by_axis(x: Any) -> list[Any]:
    """For each axis which of its elements are not zero throughout."""
    return [_nonzero(x, (axis,)) for axis in range(max(x.ndim, 1))]


def _nonzero(x: Any, axes: Sequence[int]) -> Any:
    """Whether elements along some axes, in this order, are not all zero."""
    found = jnp.any(x != 0, axis=tuple(n for n in range(x.ndim) if n not in axes))
    return jnp.transpose(found, np.argsort(np.argsort(axes)).tolist()) if found.ndim > 1 else found


def _zero_probes(program: Any, active: Set[Var], lengths: tuple[int, ...]) -> dict[str, Any]:
    """Zeros for each active operand and result, by the number of its equation."""
    own: dict[str, Any] = {}
    inside: dict[str, Any] = {}
    for i, equation in enumerate(opened(program)[0].eqns):
        for kind, variables in ((OPERAND, equation.invars), (RESULT, equation.outvars)):
            for position, v in enumerate(variables):
                if type(v) not in (Literal, DropVar) and v in active and holds_floats(v):
                    shape = (*lengths, *_probe_shape(v.aval.shape, math.prod(lengths)))
                    own[f"{i} {kind} {position}"] = np.zeros(shape, _REAL)
        if programs := inner_programs(equation):
            deeper = (*lengths, *_loop_axes(equation))
            inside[str(i)] = [_zero_probes(inner, active, deeper) for inner in programs]
    return {"own": own, "inside": inside}


def _probe_shape(shape: tuple[int, ...], copies: float) -> tuple[int, ...]:
    """The shape of what leaves the program for a value: the whole, or a number."""
    return shape if math.prod(shape) * copies <= _WHOLE_VALUES else ()


def _largest_by_step(program: Any, found: Any, axes: int) -> dict[str, Any]:
    """The largest magnitudes of what has left the program, behind the axes of its loops."""

    def largest(x: np.ndarray) -> np.ndarray:
        return np.max(np.abs(x).reshape(*x.shape[:axes], -1), axis=-1, initial=0)

    inside = {}
    for i, programs in found["inside"].items():
        equation = opened(program)[0].eqns[int(i)]
        pairs = zip(inner_programs(equation), programs, strict=True)
        inside[i] = [_largest_by_step(p, own, axes + len(_loop_axes(equation))) for p, own in pairs]
    return {"own": {name: largest(x) for name, x in found["own"].items()}, "inside": inside}


def _loop_axes(equation: JaxprEqn) -> tuple[int, ...]:
    name = equation.primitive.name
    if name == "scan":
        return (equation.params["length"],)
    return (device_count(equation),) if name == "shard_map" else ()


class Edges(Hook):
    """Measures one evaluation of a program.

    The gradient of a probe is the largest magnitude of the cotangent at its edge; the notes are the
    ranges of inputs and results.
    """

    has_notes = True

    def __init__(
        self, jaxpr: Any, probes: Any, axes: frozenset[str] = frozenset(), copies: float = 1
    ):
        self._jaxpr, self._probes, self._axes = jaxpr, probes, axes
        self._copies = copies  # how many steps and devices are around; infinite in a branch
        self._numbers = {id(e): str(i) for i, e in enumerate(jaxpr.eqns)}
        self._held: list[Any] = []  # the programs inside of an equation, and their probes
        self._inputs: list[Any] = []
        self._results: dict[str, Any] = {}
        self._inside: dict[str, Any] = {}

    def starts(self, inputs: Sequence) -> None:
        """Note the ranges of the inputs."""
        self._inputs = [self._range(x) for x in inputs]

    def constant(self, value: Any, aval: Any) -> Any:
        """The value as an array."""
        return value if hasattr(value, "dtype") else jnp.asarray(value, aval.dtype)

    def operands(self, equation: JaxprEqn, inputs: list) -> list:
        """The operands of an equation, each through its probe."""
        return self._through(OPERAND, equation, inputs)

    def results(self, equation: JaxprEqn, outputs: Sequence) -> Sequence:
        """The results of an equation, each through its probe, and their ranges."""
        number = self._numbers[id(equation)]
        self._results[number] = [self._range(y) for y in outputs]
        return self._through(RESULT, equation, outputs)

    def __call__(self, equation: JaxprEqn, inputs: list) -> Sequence | None:
        """The results of an equation that is not gone into."""
        if equation.primitive.name in PRINTS:
            return []
        return None if inner_programs(equation) else bind(equation, inputs)

    def steps(self, equation: JaxprEqn) -> Any:
        """The probes inside of an equation."""
        return self._probes["inside"][self._numbers[id(equation)]]

    shards = steps

    def inside(self, equation: JaxprEqn, step: Any) -> "Edges":
        """The hook of a program inside, at this step."""
        probes = step if step != () else self.steps(equation)
        programs = [opened(p)[0] for p in inner_programs(equation)]
        axes = self._axes
        if equation.primitive.name == "shard_map" and equation.params["check_vma"]:
            axes |= {*manual_axes(equation)}
        copies = self._copies * math.prod(_loop_axes(equation))
        copies = math.inf if equation.primitive.name == "cond" else copies
        inner = Edges(programs[0], probes[0], axes, copies)
        inner._held = list(zip(programs, probes, strict=True))
        return inner

    def branch(self, number: int) -> "Edges":
        """The hook of a branch."""
        jaxpr, probes = self._held[number]
        return Edges(jaxpr, probes, self._axes, self._copies)

    def shard(self, own: Any) -> "Edges":
        """The hook of a device."""
        return Edges(self._jaxpr, own[0], self._axes, self._copies)

    def noted(self) -> Any:
        """The ranges of this evaluation."""
        found = {"ran": [jnp.zeros(2)], "inputs": self._inputs, "results": self._results}
        return jax.tree.map(self._marked, found) | {"inside": self._inside}

    def note(self, equation: JaxprEqn, inputs: list, notes: list) -> None:
        """Keep the ranges inside of an equation."""
        self._inside[self._numbers[id(equation)]] = notes

    def empty(self, shapes: Any) -> Any:
        """The ranges of what is not computed."""
        return jax.tree.map(lambda x: self._marked(jnp.broadcast_to(NEVER, x.shape)), shapes)

    def _range(self, x: Any) -> Any:
        dtype = dtype_of(x)
        if is_reference(x) or dtype is None or not _is_number(dtype):
            return jnp.asarray(NEVER)
        x = lax.stop_gradient(jnp.abs(x) if jnp.iscomplexobj(x) else x)
        if x.size * self._copies <= _WHOLE_VALUES:
            return {"whole": self._marked(x)}
        x = x.astype(_REAL)
        low, high = (f(x, initial=n) for f, n in ((jnp.min, np.inf), (jnp.max, -np.inf)))
        return self._marked(jnp.stack([low, high]))

    def _through(self, kind: str, equation: JaxprEqn, values: Sequence) -> list:
        number = self._numbers[id(equation)]
        own = [self._probes["own"].get(f"{number} {kind} {i}") for i in range(len(values))]
        pairs = zip(values, own, strict=True)
        return [x if probe is None else _measured_edge(x, probe) for x, probe in pairs]

    def _marked(self, x: Any) -> Any:
        """Marked as different on each device of the `shard_map`s around."""
        return to_varying(x, self._axes) if self._axes else x


def _is_number(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, jnp.number) or jnp.issubdtype(dtype, jnp.bool_)


@jax.custom_vjp
def _measured_edge(x: Any, probe: Any) -> Any:
    return x


def _measured_edge_forward(x: Any, probe: Any) -> Any:
    return x, probe


def _measured_edge_backward(probe: Any, cotangent: Any) -> Any:
    size = jnp.abs(cotangent) if jnp.iscomplexobj(cotangent) else cotangent
    if size.shape != probe.shape:
        size = largest(jnp.abs(size))
    found = size.astype(_REAL)
    if size.dtype.itemsize > _REAL.itemsize:  # what is too small for float32 is not zero
        found = jnp.where((size != 0) & (found == 0), jnp.finfo(_REAL).tiny, found)
    return cotangent, to_varying(found, varying_axes(probe))


_measured_edge.defvjp(_measured_edge_forward, _measured_edge_backward)
