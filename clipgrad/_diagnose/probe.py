"""Measuring what the backward pass brings to the values of a program."""

import functools
import math
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
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

RESULT, OPERAND, STATE = "result", "operand", "state"
# An array of so few elements, at all steps and on all devices, leaves a program as it is, and is
# reduced on the host: to compile a reduction takes longer. A program has some thousands of values.
_SENT_WHOLE = 2**12


def is_sent_whole(size: int, around: Place | None, but_in: Collection[str] = ()) -> bool:
    """Whether a value of a program in some equations leaves it whole; in some kinds none does."""
    if around is None:
        return size <= _SENT_WHOLE
    is_in = any(equation.primitive.name in but_in for equation in around.chain)
    return not is_in and size * math.prod(length for _, length in around.axes) <= _SENT_WHOLE


class Site(NamedTuple):
    """A value whose cotangent is measured.

    It is summed over all uses, but for that of an operand.
    """

    kind: str  # RESULT, OPERAND or STATE
    place: tuple[int, ...]  # the key of the `Place` of the equation; of a state: of the scan
    position: int  # among the results, the operands or the states

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
        """The operands of an equation through their probes, and what a scan carries."""
        pairs = zip(equation.invars, inputs, strict=True)
        inputs = [x if type(v) is Literal else self._state(v, x) for v, x in pairs]
        return self._measured(OPERAND, equation, inputs)

    def results(self, equation: JaxprEqn, outputs: Sequence) -> Sequence:
        """The results of an equation, through their probes."""
        return self._measured(RESULT, equation, outputs)

    def __call__(self, equation: JaxprEqn, inputs: list) -> Sequence | None:
        """The results of an equation without sites inside; None where there are some."""
        if equation.primitive.name in PRINTS:
            return []
        found = self.base(equation, inputs)
        if found is not None or self.flatten:
            return found
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
        """The probes for a program of an equation, at this step or on this device."""
        probes = step if isinstance(step, OrderedDict) else self.steps(equation)
        base = self.base.inside(equation, step)
        return Probe(probes, self.summary, base, Place(equation, self.parent))

    def shard(self, own: OrderedDict[Site, Any]) -> "Probe":
        """The probes on a device."""
        return Probe(own, self.summary, self.base, self.parent)

    @functools.cached_property
    def _deeper(self) -> dict[int, OrderedDict[Site, Any]]:
        """The probes inside of each equation, by its id."""
        depth, found = len(self.parent.chain) if self.parent else 0, {}
        for site, probe in self.probes.items():
            if len(site.around) > depth:
                found.setdefault(site.around[~depth], OrderedDict())[site] = probe
        return found

    def _state(self, variable: Var, x: Any) -> Any:
        """The carry of a scan, through one probe for all its uses."""
        if variable not in self._states or self.parent is None:
            return x
        if variable not in self._probed_states:
            site = Site(STATE, self.parent.key, self._states[variable])
            self._probed_states[variable] = self._through(site, x)
        return self._probed_states[variable]

    def _measured(self, kind: str, equation: JaxprEqn, values: Sequence) -> list:
        key = Place(equation, self.parent).key
        return [self._through(Site(kind, key, i), x) for i, x in enumerate(values)]

    def _through(self, site: Site, x: Any) -> Any:
        probe = self.probes.get(site)
        return x if probe is None else _identity(self.summary, x, probe)


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
