"""Measuring what the backward pass brings to the values of a program."""

import functools
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
from jax.extend.core import JaxprEqn, Literal, Var

from clipgrad._compat import to_varying, varying_axes
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

RESULT, STATE = "result", "state"


class Site(NamedTuple):
    """A value whose cotangent is measured.

    It is summed over all uses.
    """

    kind: str  # RESULT or STATE
    place: tuple[int, ...]  # the key of the `Place` of the equation; of a state: of the scan
    position: int  # among the results or the states

    @property
    def around(self) -> tuple[int, ...]:
        """The key of the equation whose program the value is in."""
        return self.place if self.kind == STATE else self.place[1:]


class Probe(Hook):
    """Lets the values of sites through unchanged; the cotangent of each probe is a summary.

    A summary is ``summary(cotangent, probe)``, a tree of the structure, shapes and dtypes of the
    probe. A probe has one leading axis for each scan and each `shard_map` around its site.

    Args:
      probes: a tree of arrays for each site, in an order that does not depend on addresses.
      summary: what is measured.
      base: what is done at equations besides, such as `Widen`.
    """

    def __init__(
        self,
        probes: OrderedDict[Site, Any],
        summary: Callable[[Any, Any], Any],
        base: Hook | None = None,
        parent: Place | None = None,
    ):
        self.probes, self.summary = probes, summary
        self.base, self.parent = base or Hook(), parent
        self.flatten = self.base.flatten
        around = parent and parent.equation
        states = carried_variables(around) if around and around.primitive.name == "scan" else []
        self._states = {v: i for i, v in enumerate(states)}
        self._probed_states: dict[Var, Any] = {}

    def constant(self, value: Any, aval: Any) -> Any:
        """The constant as the base evaluates it."""
        return self.base.constant(value, aval)

    def operands(self, equation: JaxprEqn, inputs: list) -> list:
        """The operands of an equation; what a scan carries through its probe."""
        pairs = zip(equation.invars, inputs, strict=True)
        return [x if type(v) is Literal else self._state(v, x) for v, x in pairs]

    def results(self, equation: JaxprEqn, outputs: Sequence) -> Sequence:
        """The results of an equation, through their probes."""
        key = Place(equation, self.parent).key
        return [self._through(Site(RESULT, key, i), x) for i, x in enumerate(outputs)]

    def __call__(self, equation: JaxprEqn, inputs: list) -> Sequence | None:
        """The results of an equation without sites inside; None where there are some."""
        if equation.primitive.name in PRINTS:
            return []
        found = self.base(equation, inputs)
        if found is not None or self.flatten:
            return found
        if not entered_programs(equation)[0] or not self._inside(equation):
            return bind(equation, inputs)
        if equation.primitive.name in JIT:
            return evaluate(called_program(equation), inputs, self.inside(equation, ()))
        return None

    def steps(self, equation: JaxprEqn) -> OrderedDict[Site, Any]:
        """The probes inside of an equation."""
        return self._inside(equation)

    shards = steps  # devices are apart as steps are

    def inside(self, equation: JaxprEqn, step: Any) -> "Probe":
        """The probes for a program of an equation, at this step or on this device."""
        place = Place(equation, self.parent)
        probes = step if isinstance(step, OrderedDict) else self._inside(equation)
        base = self.base.inside(equation, step)
        return Probe(probes, self.summary, base, place)

    def shard(self, own: OrderedDict[Site, Any]) -> "Probe":
        """The probes on a device."""
        return Probe(own, self.summary, self.base, self.parent)

    def _inside(self, equation: JaxprEqn) -> OrderedDict[Site, Any]:
        key = Place(equation, self.parent).key
        own = [each for each in self.probes.items() if each[0].around[-len(key) :] == key]
        return OrderedDict(own)

    def _state(self, variable: Var, x: Any) -> Any:
        """The carry of a scan, through one probe for all its uses."""
        if variable not in self._states or self.parent is None:
            return x
        if variable not in self._probed_states:
            site = Site(STATE, self.parent.key, self._states[variable])
            self._probed_states[variable] = self._through(site, x)
        return self._probed_states[variable]

    def _through(self, site: Site, x: Any) -> Any:
        probe = self.probes.get(site)
        if probe is None:
            return x
        return _identity(self.summary, x, probe)


def carried_variables(scan: JaxprEqn) -> list[Var]:
    """The variables that a scan carries in its body."""
    constants, carried = scan_counts(scan)
    return opened(called_program(scan))[0].invars[constants : constants + carried]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _identity(summary: Callable, x: Any, probe: Any) -> Any:
    return x


def _identity_forward(summary: Callable, x: Any, probe: Any) -> Any:
    return x, probe


def _identity_backward(summary: Callable, probe: Any, cotangent: Any) -> Any:
    def as_probe(found, own):
        return to_varying(found.astype(own.dtype), varying_axes(own))

    return cotangent, jax.tree.map(as_probe, summary(cotangent, probe), probe)


_identity.defvjp(_identity_forward, _identity_backward)
