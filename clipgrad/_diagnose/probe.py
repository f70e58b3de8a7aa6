"""Measuring the cotangents that the backward pass brings to some values of a program."""

import functools
from collections import OrderedDict
from collections.abc import Sequence, Set
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn, Literal, Var

from clipgrad._compat import on_every_device, to_varying, varying_axes
from clipgrad._jaxpr import (
    JIT,
    PRINTS,
    Hook,
    bind,
    called_program,
    entered_programs,
    evaluate,
    opened,
    scan_counts,
)
from clipgrad._names import Place
from clipgrad._numerics import at_least_float32, real_or_absolute

RESULT, STATE = "result", "state"


class Site(NamedTuple):
    """A value whose cotangent is measured, from all of its uses."""

    kind: str  # RESULT or STATE
    place: tuple[int, ...]  # the key of the `Place` of the equation; of a state: of the scan
    position: int  # among the results, or the states

    @property
    def around(self) -> tuple[int, ...]:
        """The key of the equation whose program the value is in."""
        return self.place if self.kind == STATE else self.place[1:]


class Probe(Hook):
    """Lets the values of sites through unchanged; the cotangent of each probe is a `summary`.

    A probe has one leading axis for each scan and each `shard_map` around its site. ``whole`` are
    the sites of small values.
    """

    def __init__(
        self,
        probes: OrderedDict[Site, Any],
        whole: Set[Site] = frozenset(),
        parent: Place | None = None,
    ):
        self._probes, self._whole, self._parent = probes, whole, parent
        depth = len(parent.chain) if parent else 0
        self._deeper: dict[int, OrderedDict[Site, Any]] = {}
        for site, probe in probes.items():
            if len(site.around) > depth:
                inside = self._deeper.setdefault(site.around[~depth], OrderedDict())
                inside[site] = probe
        around = parent.equation if parent else None
        states = carried_variables(around) if around and around.primitive.name == "scan" else []
        self._states = {v: i for i, v in enumerate(states)}
        self._probed: dict[Var, Any] = {}

    def operands(self, equation: JaxprEqn, inputs: list) -> list:
        """The operands of an equation; what a scan carries has passed its probe."""
        pairs = zip(equation.invars, inputs, strict=True)
        return [x if type(v) is Literal else self._state(v, x) for v, x in pairs]

    def results(self, equation: JaxprEqn, outputs: Sequence) -> Sequence:
        """The results of an equation, through their probes."""
        key = Place(equation, self._parent).key
        return [self._through(Site(RESULT, key, i), x) for i, x in enumerate(outputs)]

    def __call__(self, equation: JaxprEqn, inputs: list) -> Sequence | None:
        """The results of an equation without sites inside; None where there are some."""
        if equation.primitive.name in PRINTS:
            return []
        if not (entered_programs(equation)[0] and self.steps(equation)):
            return bind(equation, inputs)
        if equation.primitive.name in JIT:
            return evaluate(called_program(equation), inputs, self.inside(equation, ()))
        return None

    def steps(self, equation: JaxprEqn) -> OrderedDict[Site, Any]:
        """The probes inside of an equation."""
        return self._deeper.get(id(equation), OrderedDict())

    shards = steps  # devices are apart as steps are

    def inside(self, equation: JaxprEqn, step: Any) -> "Probe":
        """The probes for a program of an equation, at this step."""
        probes = step if isinstance(step, OrderedDict) else self.steps(equation)
        return Probe(probes, self._whole, Place(equation, self._parent))

    def shard(self, own: OrderedDict[Site, Any]) -> "Probe":
        """The probes on a device."""
        return Probe(own, self._whole, self._parent)

    def _state(self, variable: Var, x: Any) -> Any:
        """The carry of a scan, through one probe for all its uses."""
        if variable not in self._states or self._parent is None:
            return x
        if variable not in self._probed:
            site = Site(STATE, self._parent.key, self._states[variable])
            self._probed[variable] = self._through(site, x)
        return self._probed[variable]

    def _through(self, site: Site, x: Any) -> Any:
        probe = self._probes.get(site)
        return x if probe is None else _identity(site in self._whole, x, probe)


def carried_variables(scan: JaxprEqn) -> list[Var]:
    """The variables that a scan carries in its body."""
    constants, carried = scan_counts(scan)
    return opened(called_program(scan))[0].invars[constants : constants + carried]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _identity(is_whole: bool, x: Any, probe: Any) -> Any:
    return x


def _backward(is_whole: bool, probe: Any, cotangent: Any) -> Any:
    found = summary(cotangent, is_whole).astype(probe.dtype)
    return cotangent, to_varying(found, varying_axes(probe))


_identity.defvjp(lambda is_whole, x, probe: (x, probe), _backward)

SUM_COUNT = 4  # the length of a summary of sums


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
    reached, own = sent[..., 0], sent[..., 1:]
    if is_whole:
        size = np.abs(own)
        largest = np.max(size, axis=-1, initial=0)
        with np.errstate(invalid="ignore"):
            unit = size / np.where(largest == 0, 1, largest)[..., None]
        squares = np.sum(unit**2, axis=-1)
        zeros = np.mean(size == 0, axis=-1) if own.shape[-1] else np.zeros_like(largest)
    else:
        zeros, largest, squares = np.moveaxis(own, -1, 0)
    bad = ~(np.isfinite(squares) & np.isfinite(largest))
    none = np.where(bad, np.nan, 0)
    with np.errstate(invalid="ignore"):
        norm = largest * np.sqrt(squares) + none
    return Summary(reached, bad * 1.0, np.where(bad, 0, zeros), largest + none, norm)
