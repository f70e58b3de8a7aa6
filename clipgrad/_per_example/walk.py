"""The walk along the program of a loss, to where its weights meet data."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from jax.extend.core import JaxprEqn

from clipgrad._per_example.use_kinds import use_of
from clipgrad._per_example.uses import Use
from clipgrad._per_example.weight_views import WeightView, has_views
from clipgrad._programs import (
    CALLS,
    JIT,
    REMAT,
    SCANS,
    Chain,
    flow,
    is_reference,
    kind_of,
    noun_of,
    opened,
    scan_counts,
    scan_length,
)


@dataclasses.dataclass
class WalkedProgram:
    """The uses of the weights of a program.

    Attributes:
      uses: where a view of a leaf meets data.
      others: for each leaf that is used in another way, how.
    """

    uses: list[Use] = dataclasses.field(default_factory=list)
    others: dict[int, str] = dataclasses.field(default_factory=dict)

    def _end(self, views: Sequence[WeightView | None], reason: str) -> None:
        """Notes that views are not followed any further."""
        for view in views:
            if view is not None:
                self.others.setdefault(view.leaf, reason)

    @classmethod
    def of(cls, program: Any, count: int) -> "WalkedProgram":
        """The uses of the first ``count`` inputs of a program, from shapes alone."""
        jaxpr, walked = opened(program)[0], cls()
        leaves = [
            WeightView.of_leaf(i, v.aval.shape) if has_views(v.aval) else None
            for i, v in enumerate(jaxpr.invars[:count])
        ]
        data = [None] * (len(jaxpr.invars) - count)
        walked.others |= {i: "not real numbers" for i, view in enumerate(leaves) if view is None}
        carry = lambda *_: None  # noqa: E731  what is carried ends, so each step is the first
        results = flow(program, [*leaves, *data], walked._step, _one_of, carry=carry)
        walked._end(results, "it is a result of the loss")
        return walked

    def _step(self, chain: Chain, views: list, inside: Callable[..., list]) -> list:
        """The results of an operation, as views."""
        equation = chain[0]
        nothing = [None] * len(equation.outvars)
        if not any(views):
            return nothing
        kind = kind_of(equation)
        if not equation.outvars:
            if any(map(is_reference, equation.invars)):  # by which it may come back
                self._end(views, f"used by {noun_of(equation)}")
            return []
        if kind in (JIT, CALLS):
            return inside()
        if kind in (REMAT, SCANS):
            entered = self._entered(equation, views) if kind is SCANS else views
            self._end(inside(entered), f"{noun_of(equation)} returns it")
            return nothing
        if use := self._use(chain, views):
            self.uses.append(use)
            return nothing
        if len(views) == 1:
            results = views[0].results(equation)
            if None not in results and all(has_views(v.aval) for v in equation.outvars):
                return results
        self._end(views, f"used by {noun_of(equation)}")
        return nothing

    def _entered(self, scan: JaxprEqn, views: list) -> list:
        """What a step of a scan gets, as views."""
        (constants, carried), length = scan_counts(scan), scan_length(scan) or 0
        split = constants + carried
        self._end(views[constants:split], "carried by a scan")
        pairs = enumerate(views)
        inside = [view and view.in_scan(length, i >= split) for i, view in pairs]
        return [None if constants <= i < split else view for i, view in enumerate(inside)]

    def _use(self, chain: Chain, views: list) -> Use | None:
        """The use of a view by an operation that meets it with data."""
        operands = [i for i, view in enumerate(views) if view]
        if len(operands) != 1 or len(views) != 2:
            return None
        path = tuple(equation.outvars[0] for equation in reversed(chain))
        return use_of(path, chain[0], operands[0], views[operands[0]])


def _one_of(*views: WeightView | None) -> WeightView | None:
    """The view of a value that is one of several: it is followed if there is only one."""
    return views[0] if len(views) == 1 else None
