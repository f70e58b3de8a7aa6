"""The flow of facts along a program and the programs inside of it, to a fixed point.

A fact is what is known of each value: of what it is computed, say. It goes along each operation by
a function, around each loop until nothing more becomes known, and out of each branch.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

from jax.extend.core import JaxprEqn, Literal, Var

from clipgrad._programs.elements import is_reference
from clipgrad._programs.kinds import Feed, kind_of
from clipgrad._programs.programs import opened, tracked_programs

Fact = TypeVar("Fact")


class Chain(tuple[JaxprEqn, ...]):
    """An equation, and the equations that hold its program, outwards.

    Attributes:
      position: the number of the equation in its program, behind those of the equations around it
        and of the programs in them.
    """

    position: tuple[int, ...]

    @classmethod
    def of(cls, equation: JaxprEqn, around: "Chain", position: tuple[int, ...]) -> "Chain":
        """The chain of an equation in a program of the first one ``around``."""
        chain = cls((equation, *around))
        chain.position = position
        return chain


def chain_key(chain: Sequence[JaxprEqn]) -> tuple[int, ...]:
    """A key of the place of an equation, by the equations around it: equal for that place only."""
    return tuple(map(id, chain))


class FlowStep(Protocol[Fact]):
    """The facts of the results of an operation.

    Args:
      chain: the operation, and those that hold its program, the innermost first.
      operands: the facts of its operands.
      inside: the facts of its results, by the programs inside; without any, all operands joined.
        Other facts may go into the programs: ``inside(facts)``, one for each operand.
    """

    def __call__(
        self, chain: Chain, operands: list[Fact], inside: Callable[..., list[Fact]], /
    ) -> Sequence[Fact]: ...


def _as_it_is(chain: Chain, number: int, fact: Any) -> Any:
    return fact


def flow(
    program: Any,
    inputs: Sequence[Fact],
    step: FlowStep[Fact],
    join: Callable[..., Fact],
    programs: Callable[[JaxprEqn], list[Any]] = tracked_programs,
    known: dict[Var, Fact] | None = None,
    carry: Callable[[Chain, int, Fact], Fact] = _as_it_is,
) -> list[Fact]:
    """The facts of the results of a program.

    Args:
      program: the program.
      inputs: the facts of its inputs.
      step: what is known behind each operation. It is called again where a loop brings more; then
        the last call knows most.
      join: the fact of what is one of several; of none, that of a constant. Joined again and again
        it must come to an end.
      programs: the programs inside of an equation that facts go through.
      known: is filled with the facts of all variables, also inside; of several calls, joined.
      carry: the fact with which the next step of a loop begins, of the loop, the number of a result
        of its step, and what is known of that.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from clipgrad._programs import flow
      >>> depth = lambda chain, operands, inside: [1 + max(operands)] * len(chain[0].outvars)
      >>> program = jax.make_jaxpr(lambda x: jnp.sin(x) * 2)(1.0)
      >>> flow(program, [0], depth, lambda *depths: max((0, *depths)))
      [2]
    """
    return _Flow(step, join, programs, known, carry).along(opened(program)[0], inputs, Chain())


def flow_through(
    equation: JaxprEqn,
    operands: list[Fact],
    step: FlowStep[Fact],
    join: Callable[..., Fact],
    programs: Callable[[JaxprEqn], list[Any]] = tracked_programs,
) -> list[Fact]:
    """The facts of the results of one operation, see `flow`."""
    chain = Chain.of(equation, Chain(), (0,))
    return [*_Flow(step, join, programs, None, _as_it_is).stepped(chain, operands)]


class _Flow:
    def __init__(self, step: Any, join: Any, programs: Any, known: dict | None, carry: Any):
        self._step, self._join, self._programs, self._known = step, join, programs, known
        self._carry = carry

    def along(
        self, jaxpr: Any, inputs: Sequence, around: Chain, inside: tuple[int, ...] = ()
    ) -> list:
        """The facts of the results of a program at a position ``inside`` of the chain around."""
        none = self._join()
        known = dict(zip(jaxpr.invars, inputs, strict=True))
        read = lambda atom: none if type(atom) is Literal else known.get(atom, none)  # noqa: E731
        for number, equation in enumerate(jaxpr.eqns):
            operands = [read(v) for v in equation.invars]
            chain = Chain.of(equation, around, (*inside, number))
            results = self.stepped(chain, operands)
            known.update(zip(equation.outvars, results, strict=True))
            # What an operation writes to a reference, others read.
            written = [v for v in equation.invars if is_reference(v)]
            if written:
                known |= dict.fromkeys(written, self._join(*operands))
        if self._known is not None:
            pairs = known.items()
            self._known |= {v: self._join(fact, self._known.get(v, none)) for v, fact in pairs}
        return [read(atom) for atom in jaxpr.outvars]

    def stepped(self, chain: Chain, operands: list) -> Sequence:
        def inside(facts: Sequence | None = None) -> list:
            return self._inside(chain, operands if facts is None else facts)

        return self._step(chain, operands, inside)

    def _inside(self, chain: Chain, operands: Sequence) -> list:
        equation = chain[0]
        programs, kind = self._programs(equation), kind_of(equation)
        if not programs or kind is None:
            return [self._join(*operands)] * len(equation.outvars)
        each = [
            self._through(opened(p)[0], kind.feed(equation, p), operands, chain, number)
            for number, p in enumerate(programs)
        ]
        return [self._join(*results) for results in zip(*each, strict=True)]

    def _through(
        self, jaxpr: Any, feed: Feed, operands: Sequence, chain: Chain, number: int
    ) -> list:
        """The results of a program; of a loop, when another step brings no more."""
        inputs, inside = [operands[i] for i in feed.operands], (*chain.position, number)
        if not feed.carried:
            return self.along(jaxpr, inputs, chain, inside)
        # What a step writes to a reference, the next may read.
        written = self._join(*operands)
        pairs = zip(inputs, jaxpr.invars, strict=True)
        inputs = [written if is_reference(v) else fact for fact, v in pairs]
        while True:
            outputs = self.along(jaxpr, inputs, chain, inside)
            carried = {i: self._carry(chain, k, outputs[k]) for i, k in feed.carried.items()}
            state = {i: self._join(inputs[i], fact) for i, fact in carried.items()}
            if all(inputs[i] == fact for i, fact in state.items()):
                break
            inputs = [state.get(i, fact) for i, fact in enumerate(inputs)]
        if feed.control:  # a loop that may make no step
            outputs = [self._join(outputs[k], inputs[i]) for i, k in feed.carried.items()]
        return outputs
