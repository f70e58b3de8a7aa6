"""The cotangents of all operands and results of a program, and the ranges of all its values."""

from collections import OrderedDict
from collections.abc import Iterator, Sequence, Set
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import DropVar, JaxprEqn, Literal, Var

from clipgrad._diagnose.blocks import inner_programs
from clipgrad._diagnose.probe import OPERAND, RESULT, Probe, Site, as_varying, is_sent_whole
from clipgrad._jaxpr import (
    Hook,
    dtype_of,
    evaluate,
    holds_floats,
    is_reference,
    jit_for_one_call,
    on_host,
    opened,
)
from clipgrad._names import Place, placed_equations
from clipgrad._numerics import at_least_float32, largest, real_or_absolute
from clipgrad._program import active_variables

NEVER = np.array([np.inf, -np.inf], np.float32)  # the range of what was not computed


class EdgeValues(NamedTuple):
    """The cotangents of operands and results of a program, and the ranges of values.

    All have leading axes for the scans and the `shard_map`s around.
    """

    cotangents: dict[Site, np.ndarray]  # their largest magnitudes
    ranges: dict[tuple[int, ...], Any]  # by the ids of the variable and of the equations around it
    # Of inputs: which elements of an axis, or of some axes together, are not all zero.
    gradients: dict[tuple[int, tuple[int, ...]], np.ndarray]

    def range(self, key: tuple[int, ...], where: Any) -> tuple[float, float]:
        """The smallest and the largest element of a value, at all steps or at some."""
        noted = self.ranges[key]
        is_whole = isinstance(noted, dict)  # the value itself
        found = np.asarray(noted["whole"] if is_whole else noted, np.float64)
        if where is not None and found.shape[: where.ndim] == where.shape:
            found = found[where]
        low, high = (found, found) if is_whole else (found[..., 0], found[..., 1])
        return float(np.min(low, initial=np.inf)), float(np.max(high, initial=-np.inf))


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
      layers: chosen inputs, and axes of them that are measured together, besides each axis alone.
    """
    sites = OrderedDict(_sites(program, active_variables(program, chosen)))
    probes = OrderedDict((site, probe) for site, (_, probe) in sites.items())
    alone = [(i, (axis,)) for i in chosen for axis in range(max(np.ndim(inputs[i]), 1))]
    asked = list(dict.fromkeys([*alone, *layers]))

    @jit_for_one_call(program)
    def run(inputs: list, probes: Any) -> Any:
        def loss(given: list, probes: Any) -> Any:
            changed = dict(zip(chosen, given, strict=True))
            hook = Edges(probes)
            every = [jnp.asarray(changed.get(i, x)) for i, x in enumerate(inputs)]
            value = evaluate(program, every, hook)[0]
            return value, hook.noted()

        given = [inputs[i] for i in chosen]
        _, pull_back, notes = jax.vjp(loss, given, probes, has_aux=True)
        grads, found = pull_back(jnp.ones((), dtype_of(opened(program)[0].outvars[0])))
        of = dict(zip(chosen, grads, strict=True))
        return found, notes, [_nonzero(of[i], axes) for i, axes in asked]

    found, ranges, nonzero = on_host(run(list(inputs), probes))
    sizes = {site: _largest_by_step(found[site], axes) for site, (axes, _) in sites.items()}
    return EdgeValues(sizes, ranges, dict(zip(asked, nonzero, strict=True)))


def _nonzero(x: Any, axes: Sequence[int]) -> Any:
    """Whether elements along some axes, in this order, are not all zero."""
    found = jnp.any(x != 0, axis=tuple(n for n in range(x.ndim) if n not in axes))
    return jnp.transpose(found, np.argsort(np.argsort(axes)).tolist()) if found.ndim > 1 else found


def _sites(program: Any, active: Set[Var]) -> Iterator[tuple[Site, tuple[int, np.ndarray]]]:
    """The active operands and results; of each the loops around it, and its probe, of zeros."""
    for own in placed_equations(program, inner_programs):
        equation, around = own.place
        lengths = tuple(length for _, length in around.axes) if around else ()
        for kind, variables in ((OPERAND, equation.invars), (RESULT, equation.outvars)):
            for position, v in enumerate(variables):
                if type(v) not in (Literal, DropVar) and v in active and holds_floats(v):
                    aval: Any = v.aval
                    shape = aval.shape if is_sent_whole(aval.size, around) else ()
                    dtype = np.finfo(at_least_float32(aval.dtype)).dtype
                    probe = np.zeros((*lengths, *shape), dtype)
                    yield Site(kind, own.place.key, position), (len(lengths), probe)


def _largest_by_step(x: np.ndarray, axes: int) -> np.ndarray:
    """The largest magnitudes of what has left the program, behind the axes of its loops."""
    return np.max(np.abs(x).reshape(*x.shape[:axes], -1), axis=-1, initial=0)


def _whole_or_largest(cotangent: Any, probe: Any) -> Any:
    size = real_or_absolute(cotangent)
    return size if size.shape == probe.shape else largest(jnp.abs(size))


class Edges(Probe):
    """Probes of one evaluation of a program, whose notes are the ranges of all values."""

    has_notes = True

    def __init__(self, probes: OrderedDict[Site, Any], parent: Place | None = None):
        super().__init__(probes, _whole_or_largest, None, parent)
        self._inputs: Sequence = ()
        self._ranges: OrderedDict[tuple[int, ...], Any] = OrderedDict()

    def _with(self, probes: OrderedDict, base: Hook, parent: Place | None) -> "Edges":
        return Edges(probes, parent)

    def starts(self, inputs: Sequence) -> None:
        """Keep the inputs for `values`."""
        self._inputs = inputs

    def values(self, jaxpr: Any) -> Any:
        """Note the ranges of the inputs, and that the program runs."""
        self._note([jaxpr, *jaxpr.invars], [jnp.zeros(()), *self._inputs])
        return super().values(jaxpr)

    def constant(self, value: Any, aval: Any) -> Any:
        """The value as an array."""
        return value if hasattr(value, "dtype") else jnp.asarray(value, aval.dtype)

    def results(self, equation: JaxprEqn, outputs: Sequence) -> Sequence:
        """The results of an equation through their probes; their ranges are noted."""
        self._note(equation.outvars, outputs)
        return super().results(equation, outputs)

    def enters(self, equation: JaxprEqn) -> bool:
        """Whether an equation has programs inside that are measured."""
        return bool(inner_programs(equation))

    def noted(self) -> Any:
        """The ranges of this evaluation."""
        return self._ranges

    def note(self, equation: JaxprEqn, inputs: list, notes: list) -> None:
        """Keep the ranges inside of an equation; branches may be one program."""
        for key, own in (pair for ranges in notes for pair in ranges.items()):
            self._ranges[key] = (
                _joined_range(self._ranges[key], own) if key in self._ranges else own
            )

    def empty(self, shapes: Any) -> Any:
        """The ranges of what is not computed."""
        return jax.tree.map(
            lambda x: as_varying(jnp.broadcast_to(NEVER, x.shape), self.parent), shapes
        )

    def _note(self, variables: Sequence, values: Sequence) -> None:
        key = self.parent.key if self.parent else ()
        pairs = zip(variables, values, strict=True)
        self._ranges.update({(id(v), *key): self._range(x) for v, x in pairs})

    def _range(self, x: Any) -> Any:
        dtype = dtype_of(x)
        if is_reference(x) or dtype is None or not _is_number(dtype):
            return as_varying(jnp.asarray(NEVER), self.parent)
        x = lax.stop_gradient(real_or_absolute(x))
        if is_sent_whole(x.size, self.parent, but_in=("cond",)):
            return {"whole": as_varying(x, self.parent)}
        x = x.astype(NEVER.dtype)
        low, high = (f(x, initial=n) for f, n in ((jnp.min, np.inf), (jnp.max, -np.inf)))
        return as_varying(jnp.stack([low, high]), self.parent)


def _joined_range(a: Any, b: Any) -> Any:
    return jnp.stack([jnp.minimum(a[..., 0], b[..., 0]), jnp.maximum(a[..., 1], b[..., 1])], -1)


def _is_number(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, jnp.number) or jnp.issubdtype(dtype, jnp.bool_)
