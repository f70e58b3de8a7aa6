"""The cotangents of all operands and results of a program, and the ranges of all its values."""

from collections import OrderedDict
from collections.abc import Iterator, Sequence, Set
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import DropVar, JaxprEqn, Literal, Var

from clipgrad._diagnose.blocks import inner_programs
from clipgrad._diagnose.notes import Noting, Whole
from clipgrad._diagnose.probe import OPERAND, RESULT, Probe, Site, is_sent_whole
from clipgrad._jaxpr import (
    dtype_of,
    evaluate,
    holds_floats,
    is_reference,
    jit_for_one_call,
    on_host,
)
from clipgrad._names import Place, placed_equations
from clipgrad._numerics import at_least_float32, largest, real_or_absolute
from clipgrad._program import active_dependence, active_variables

NEVER = np.array([np.inf, -np.inf], np.float32)  # the range of what was not computed


class EdgeValues(NamedTuple):
    """The cotangents of operands and results of a program, and the ranges of values.

    All have leading axes for the scans and the `shard_map`s around.
    """

    cotangents: dict[Site, np.ndarray]  # their largest magnitudes
    ranges: dict[tuple[int, ...], Any]  # by the ids of the variable and of the equations around it
    # Of inputs: which elements of an axis, or of some axes together, are not all zero.
    gradients: dict[tuple[int, tuple[int, ...]], np.ndarray]
    sources: dict[tuple[int, ...], list[frozenset[int]]]  # of operands, see `active_dependence`

    def range(self, key: tuple[int, ...], where: Any) -> tuple[float, float]:
        """The smallest and the largest element of a value, at all steps or at some."""
        noted = self.ranges.get(key, NEVER)
        is_whole = isinstance(noted, Whole)
        found = np.asarray(noted.value if is_whole else noted, np.float64)
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
    """Measure a program at its inputs, differentiated by those that are chosen.

    ``layers`` are inputs, and axes of them that are measured together, besides each axis alone.
    """
    sites = OrderedDict(_sites(program, active_variables(program, chosen)))
    probes = OrderedDict((site, probe) for site, (_, probe) in sites.items())
    alone = [(i, (axis,)) for i in chosen for axis in range(max(np.ndim(inputs[i]), 1))]
    asked = list(dict.fromkeys([*alone, *layers]))

    @jit_for_one_call(program)
    def run(inputs: list, probes: Any) -> Any:
        def loss(given: list, probes: Any) -> Any:
            changed = dict(zip(chosen, given, strict=True))
            every = [changed.get(i, x) for i, x in enumerate(inputs)]
            return evaluate(program, every, Probe(probes, _whole_or_largest))[0]

        inputs, ranging = [*map(jnp.asarray, inputs)], _Ranging()
        evaluate(program, inputs, ranging)
        grads, found = jax.grad(loss, argnums=(0, 1))([inputs[i] for i in chosen], probes)
        of = dict(zip(chosen, grads, strict=True))
        return found, ranging.found.values, [_nonzero(of[i], axes) for i, axes in asked]

    found, ranges, nonzero = on_host(run(list(inputs), probes))
    sizes = {  # the largest magnitudes, behind the axes of the loops
        site: np.max(np.abs(found[site]), axis=tuple(range(axes, found[site].ndim)), initial=0)
        for site, (axes, _) in sites.items()
    }
    gradients, sources = dict(zip(asked, nonzero, strict=True)), active_dependence(program, chosen)
    return EdgeValues(sizes, ranges, gradients, sources)


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


def _whole_or_largest(cotangent: Any, probe: Any) -> Any:
    size = real_or_absolute(cotangent)
    return size if size.shape == probe.shape else largest(jnp.abs(size))


class _Ranging(Noting):
    """Notes the ranges of all values, and that a program runs."""

    def enters(self, place: Place) -> bool:
        """Whether an equation has programs inside that are measured."""
        return bool(inner_programs(place.equation))

    def reduced(self, x: Any) -> Any:
        """The smallest and the largest element."""
        x = x.astype(NEVER.dtype)
        return jnp.stack([jnp.min(x, initial=np.inf), jnp.max(x, initial=-np.inf)])

    def values(self, jaxpr: Any) -> Any:
        """Note the ranges of the inputs, and that the program runs."""
        self._keep([jaxpr, *jaxpr.invars], [jnp.zeros(()), *self.inputs])
        return super().values(jaxpr)

    def results(self, equation: JaxprEqn, outputs: Sequence) -> Sequence:
        """Note the ranges of the results."""
        self._keep(equation.outvars, outputs)
        return outputs

    def empty(self, shapes: Any) -> Any:
        """The ranges of what is not computed."""
        zeros = super().empty(shapes)
        return jax.tree.map(lambda x: x + NEVER if x.dtype == NEVER.dtype else x, zeros)

    def _keep(self, variables: Sequence, values: Sequence) -> None:
        for v, x in zip(variables, values, strict=True):
            kinds = () if is_reference(x) or dtype_of(x) is None else (jnp.number, jnp.bool_)
            if any(jnp.issubdtype(dtype_of(x), kind) for kind in kinds):
                self.keep(v, real_or_absolute(x))
