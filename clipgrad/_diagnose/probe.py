"""Measuring the cotangents that the backward pass brings to some values of a program."""

import functools
import math
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn, Var

from clipgrad._arrays import at_least_float32, real_or_absolute
from clipgrad._compat import to_varying, varying_axes
from clipgrad._names import Place
from clipgrad._programs import (
    JIT,
    Hook,
    Part,
    ProgramValues,
    bind,
    called_program,
    dtype_of,
    entered_programs,
    is_print,
    opened,
    scan_counts,
)
from clipgrad._sharding import on_every_device

# An array of so few elements, at all steps and on all devices, leaves a program as it is, and is
# reduced on the host: to compile a reduction takes longer. A program has some thousands of values.
_SENT_WHOLE = 2**12


class Site(NamedTuple):
    """A value whose cotangent is measured, from all of its uses."""

    around: tuple[int, ...]  # the key of the `Place` whose program it is in
    axes: tuple[tuple[str, int], ...]  # the scans and the `shard_map`s around it, with lengths
    variable: Var

    @property
    def is_whole(self) -> bool:
        """Whether its cotangent leaves the program whole."""
        return is_sent_whole(self.variable.aval, self.axes)

    @property
    def probe(self) -> np.ndarray:
        """Zeros, whose cotangent is the `summary` of its own."""
        aval: Any = self.variable.aval
        length = 1 + aval.size if self.is_whole else _SUM_COUNT
        dtype = np.finfo(at_least_float32(dtype_of(aval))).dtype
        return np.zeros((*(n for _, n in self.axes), length), dtype)


def site_of(variable: Var, around: Place | None) -> Site:
    """The site of a variable of the program in an equation, or of the whole program."""
    return Site(around.key, around.axes, variable) if around else Site((), (), variable)


def is_sent_whole(x: Any, axes: Sequence[tuple[str, int]] = ()) -> bool:
    """Whether a value of a program leaves it whole."""
    return x.size * math.prod(n for _, n in axes) <= _SENT_WHOLE


@jax.tree_util.register_pytree_node_class
class Probe(Hook):
    """Lets the values of sites through unchanged; the cotangent of each probe is a `summary`."""

    in_place = (JIT,)

    def __init__(self, probes: OrderedDict[Site, Any], parent: Place | None = None):
        self._probes, self._parent = probes, parent
        depth = len(parent.chain) if parent else 0
        self._deeper: dict[int, OrderedDict[Site, Any]] = {}
        for site, probe in probes.items():
            if len(site.around) > depth:
                # `around` has the innermost equation first: this is the one in this program.
                inside = self._deeper.setdefault(site.around[~depth], OrderedDict())
                inside[site] = probe

    def tree_flatten(self) -> tuple[tuple, tuple]:
        """The probes, and the sites that they are of."""
        return tuple(self._probes.values()), (tuple(self._probes), self._parent)

    @classmethod
    def tree_unflatten(cls, sites: tuple, probes: Sequence) -> "Probe":
        """The same with other probes."""
        return cls(OrderedDict(zip(sites[0], probes, strict=True)), sites[1])

    def values(self, jaxpr: Any) -> ProgramValues:
        """The values of the program, which pass their probes."""
        around = self._parent.key if self._parent else ()
        here = {site.variable: site for site in self._probes if site.around == around}
        return _Probed(self, {v: (site.is_whole, self._probes[site]) for v, site in here.items()})

    def __call__(self, equation: JaxprEqn, inputs: list) -> Sequence | None:
        """The results of an equation without sites inside; None where there are some."""
        if is_print(equation):
            return []
        has_sites = entered_programs(equation)[0] and self.slices(equation)
        return None if has_sites else bind(equation, inputs)

    def slices(self, equation: JaxprEqn) -> OrderedDict[Site, Any]:
        """The probes inside of an equation."""
        return self._deeper.get(id(equation), OrderedDict())

    def inside(self, equation: JaxprEqn, part: Part) -> "Probe":
        """The probes for a program of an equation, at this step or on this device."""
        probes = self.slices(equation) if part.slices is None else part.slices
        return Probe(probes, Place(equation, self._parent))


class _Probed(ProgramValues):
    """The values of a program, some of which pass a probe."""

    def __init__(self, hook: Hook, probes: dict[Var, tuple[bool, Any]]):
        super().__init__(hook)
        self._probes = probes

    def write(self, variables: Sequence[Var], values: Sequence[Any]) -> None:
        pairs = zip(variables, values, strict=True)
        passed = [
            _identity(probe[0], x, probe[1]) if (probe := self._probes.get(v)) else x
            for v, x in pairs
        ]
        super().write(variables, passed)


def carried_variables(scan: JaxprEqn) -> list[Var]:
    """The variables that a scan carries in its body."""
    constants, carried = scan_counts(scan)
    return opened(called_program(scan))[0].invars[constants : constants + carried]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _identity(is_whole: bool, x: Any, probe: Any) -> Any:
    return x


def _backward(is_whole: bool, probe: Any, cotangent: Any) -> Any:
    sent = summary(cotangent, is_whole).astype(probe.dtype)
    return cotangent, to_varying(sent, varying_axes(probe))


_identity.defvjp(lambda is_whole, x, probe: (x, probe), _backward)

_SUM_COUNT = 4  # the length of a summary of sums


class Summary(NamedTuple):
    """Numbers of a cotangent; with leading axes for the scans and `shard_map`s around it."""

    reached: Any  # 1 if there is a cotangent at all
    nonfinite: Any  # 1 if an element is NaN or inf; then the largest and the norm are NaN
    zeros: Any  # the share of zeros
    largest: Any  # the largest magnitude
    norm: Any  # the L2 norm


def summary(cotangent: Any, is_whole: bool) -> jax.Array:
    """A cotangent as a vector: 1, and all of it, or its sums."""
    x = real_or_absolute(cotangent)
    x = x.astype(at_least_float32(x.dtype))
    if not is_whole:
        return _sums_of(x)
    return jnp.concatenate([jnp.ones(1, x.dtype), on_every_device(x).reshape(-1)])


@jax.jit
def _sums_of(x: jax.Array) -> jax.Array:
    """1, the share of zeros, the largest magnitude, and the sum of squares in units of that.

    XLA's CPU loops store what is compared or selected, or an absolute value that is used twice: a
    copy of the gradient for each. So here is none. Cotangents of one shape share what is traced.
    """
    zeros = 1 - _mean(jnp.abs(jnp.sign(x)))
    largest = jnp.max(jnp.abs(x))
    unit = x / jnp.where(largest == 0, 1, largest)
    return jnp.stack([jnp.ones_like(zeros), zeros, largest, jnp.sum(unit * unit)])


def _mean(x: jax.Array) -> jax.Array:
    """The mean, of rows first: a sum of ones is exact up to 2 ** 24 in float32."""
    return jnp.mean(jnp.mean(x, axis=-1) if x.ndim > 1 else x)


def received(sent: Any, is_whole: bool) -> Summary:
    """The summary of a vector that has left the program, on the host."""
    sent = np.asarray(sent, np.float64)
    reached, numbers = sent[..., 0], sent[..., 1:]
    if is_whole:
        size = np.abs(numbers)
        largest = np.max(size, axis=-1, initial=0)
        with np.errstate(invalid="ignore"):
            unit = size / np.where(largest == 0, 1, largest)[..., None]
        squares = np.sum(unit**2, axis=-1)
        zeros = np.mean(size == 0, axis=-1) if numbers.shape[-1] else np.zeros_like(largest)
    else:
        zeros, largest, squares = np.moveaxis(numbers, -1, 0)
    bad = ~(np.isfinite(squares) & np.isfinite(largest))
    none = np.where(bad, np.nan, 0)
    with np.errstate(invalid="ignore"):
        norm = largest * np.sqrt(squares) + none
    return Summary(reached, bad * 1.0, np.where(bad, 0, zeros), largest + none, norm)
