"""The edges of a program at which cotangents end."""

import functools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from jax.extend.core import JaxprEqn, Literal, Var

from clipgrad._diagnose.blocks import Block
from clipgrad._diagnose.edges import OPERAND
from clipgrad._diagnose.probe import RESULT
from clipgrad._diagnose.reach import Reach
from clipgrad._jaxpr import holds_floats, opened
from clipgrad._names import Place
from clipgrad._program import active_dependence

EDGE, SUM, BRANCH, CARRY = "edge", "sum", "branch", "carry"


class ZeroCut(NamedTuple):
    """An operand whose cotangent is zero, of an operation with a result that is alive.

    Attributes:
      kind: "edge"; "sum" if the cotangents of several uses cancel; "branch" if the operand is read
        only in branches that are not taken; "carry" if the next step of a scan does not read it.
      block: the program that the operation is in.
      place: the operation.
      operand: which of its operands.
      where: at which steps of the scans, and on which devices around.
      largest: of the cotangents of the results; infinite if the result has none.
      sources: the inputs that the operand is differentiated by.
      order: the place in the program.
      is_alive: whether the operand has a cotangent from another use, at all these steps.
      uses: of a sum, all operations that read the value.
    """

    kind: str
    block: Block
    place: Place
    operand: int
    where: np.ndarray
    largest: float
    sources: frozenset[int]
    order: tuple[int, ...]
    is_alive: bool = False
    uses: tuple[JaxprEqn, ...] = ()

    @property
    def variable(self) -> Any:
        """The operand."""
        return self.place.equation.invars[self.operand]

    def range(self, atom: Any) -> tuple[float, float]:
        """The smallest and the largest element of a value of the program, where it is cut."""
        return self.block.range(atom, self.where)

    @property
    def steps(self) -> tuple[int, ...]:
        """The steps of the innermost scan; () if it is all of them."""
        around = [e.primitive.name for e in reversed(self.place.chain[1:])]
        axes = [name for name in around if name in ("scan", "shard_map")]
        if not axes or axes[-1] != "scan" or self.where.ndim != len(axes):
            return ()
        mask = self.where.reshape(-1, self.where.shape[-1]).any(0)
        return () if mask.all() else tuple(map(int, np.flatnonzero(mask)))


def zero_cuts(program: Any, block: Block, chosen: Sequence[int]) -> list[ZeroCut]:
    """All cuts of a program, in program order."""
    search = _Search(program, chosen)
    found = {i: np.any(block.values.gradients[i, (0,)]) for i in chosen}
    totals = [found.get(i) for i in range(len(block.jaxpr.invars))]
    return sorted(search.cuts(block, totals, ()), key=lambda cut: cut.order)


class _Search:
    """One search for the cuts of a program."""

    def __init__(self, program: Any, chosen: Sequence[int]):
        self._active = active_dependence(program, chosen)

    def cuts(
        self, block: Block, totals: Sequence[Any], around: tuple[int, ...]
    ) -> Iterator[ZeroCut]:
        """The cuts in a block; ``totals`` are the cotangents of its inputs."""
        uses: dict[Var, list[tuple[int, JaxprEqn, int, np.ndarray]]] = {}
        known = dict(zip(block.jaxpr.invars, totals, strict=True))
        for v, (i, _, k) in block.producers.items():
            known[v] = block.cotangent(i, RESULT, k)
        for i, equation in enumerate(block.jaxpr.eqns):
            for k, v in enumerate(equation.invars):
                found = block.cotangent(i, OPERAND, k)
                if found is None:
                    continue
                uses.setdefault(v, []).append((i, equation, k, found))
                if (cut := self._cut(block, i, equation, k, around)) is not None:
                    total = known.get(v)
                    is_alive = total is not None and bool(np.all((total != 0) | ~cut.where))
                    yield cut._replace(is_alive=is_alive)
            for n, inner in enumerate(block.children.get(i, ())):
                if inner.ran:
                    own = self._totals(block, i, equation)
                    yield from self.cuts(inner, own, (*around, i, n))
        for v, own in uses.items():
            if (cut := self._sum(block, own, known.get(v), around)) is not None:
                yield cut

    def _cut(
        self, block: Block, i: int, equation: JaxprEqn, k: int, around: tuple[int, ...]
    ) -> ZeroCut | None:
        place, kind = block.place(equation), EDGE
        if i in block.children:
            is_branch = equation.primitive.name == "cond" and k > 0
            if not is_branch or _is_read(block.children[i], k - 1):
                return None
            kind = BRANCH
        own = np.asarray(block.cotangent(i, OPERAND, k))
        if not np.any(own == 0):
            return None
        sizes = [_result_size(block, i, n) for n in range(len(equation.outvars))]
        largest = functools.reduce(np.maximum, sizes)
        where = np.asarray((own == 0) & ~(largest == 0))
        if not where.any():
            return None
        sources = self._active[place.key][k]
        size = float(np.max(np.broadcast_to(largest, where.shape)[where]))
        return ZeroCut(kind, block, place, k, where, size, sources, (*around, i))

    def _totals(self, block: Block, i: int, equation: JaxprEqn) -> list[Any]:
        first = 1 if equation.primitive.name == "cond" else 0
        inner = block.children[i][0]
        found = []
        for k in range(len(inner.jaxpr.invars)):
            own = block.cotangent(i, OPERAND, k + first)
            is_longer = equation.primitive.name in ("scan", "shard_map")
            own = own[..., None] if own is not None and is_longer else own
            found.append(None if inner.is_carry(k) else own)
        return found

    def _sum(self, block: Block, uses: list, total: Any, around: tuple[int, ...]) -> ZeroCut | None:
        if total is None:
            return None
        masks = [np.asarray((found != 0) & (total == 0)) for *_, found in uses]
        live = [use for use, mask in zip(uses, masks, strict=True) if mask.any()]
        if not live:
            return None
        i, equation, k, _ = live[0]
        where = functools.reduce(np.logical_or, masks)
        size = max(float(np.max(found)) for *_, found in live)
        sources = self._active[block.place(equation).key][k]
        readers = tuple(e for _, e, _, _ in live)
        place = block.place(equation)
        return ZeroCut(SUM, block, place, k, where, size, sources, (*around, i), uses=readers)


def _result_size(block: Block, i: int, n: int) -> np.ndarray:
    """The largest cotangent of a result; of one without, such as integers, inf if it is read."""
    found = block.cotangent(i, RESULT, n)
    if found is not None:
        return np.where(np.isnan(found), np.inf, found)
    return np.asarray(np.inf if _is_alive(block, block.jaxpr.eqns[i].outvars[n]) else 0.0)


def _is_alive(block: Block, variable: Var) -> bool:
    """Whether the loss, or something that has a cotangent, is computed from a value."""
    is_alive, outermost = False, block
    while outermost.outer is not None:
        outermost = outermost.outer

    def goes_on(own: Block, i: int, k: int) -> bool:
        nonlocal is_alive
        results = (own.cotangent(i, RESULT, n) for n in range(len(own.jaxpr.eqns[i].outvars)))
        is_alive = is_alive or any(found is not None and np.any(found) for found in results)
        return not is_alive

    walk = Reach(goes_on, {variable})
    walk.leave(block)
    return is_alive or walk.has(outermost.jaxpr.outvars[0])


def _is_read(branches: list[Block], position: int) -> bool:
    """Whether a branch that ran reads an input."""
    return any(_reads(b, b.jaxpr.invars[position]) for b in branches if b.ran)


def _reads(block: Block, variable: Var) -> bool:
    return any(v is variable for v in block.jaxpr.outvars) or any(
        v is variable for e in block.jaxpr.eqns for v in e.invars
    )


def inside_of_loop(cut: ZeroCut) -> Place:
    """The operation in the condition of a loop that reads the operand and has no derivative."""
    equation = cut.place.equation
    program = equation.params["cond_jaxpr"]
    read = (
        {opened(program)[0].invars[cut.operand]}
        if cut.operand < equation.params["cond_nconsts"]
        else set()
    )
    for inner in opened(program)[0].eqns:
        if any(type(v) is not Literal and v in read for v in inner.invars):
            if not any(map(holds_floats, inner.outvars)):
                return Place(inner, cut.place)
            read.update(inner.outvars)
    return cut.place
