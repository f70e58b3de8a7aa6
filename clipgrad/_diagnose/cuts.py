"""The edges of a program at which cotangents end."""

import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from jax.extend.core import JaxprEqn, Literal, Var

from clipgrad._diagnose.blocks import Block, reached
from clipgrad._diagnose.flags import SAME_AS_OPERAND
from clipgrad._diagnose.probe import OPERAND, RESULT
from clipgrad._jaxpr import holds_floats, opened, scan_counts
from clipgrad._names import Place

EDGE, SUM, BRANCH, CARRY = "edge", "sum", "branch", "carry"


class ZeroCut(NamedTuple):
    """An operand whose cotangent is zero, of an operation with a result that is alive.

    Of the kind EDGE; SUM if the cotangents of several uses cancel; BRANCH if the operand is read
    only in branches that are not taken; CARRY if the next step of a scan does not read it.
    """

    kind: str
    block: Block  # the program that the operation is in
    place: Place
    operand: int  # which of its operands
    where: np.ndarray  # at which steps of the scans, and on which devices around
    largest: float  # of the cotangents of the results; infinite if the result has none
    sources: frozenset[int]  # the inputs that the operand is differentiated by
    order: tuple[int, ...]  # the place in the program
    is_alive: bool = False  # whether it has a cotangent from another use, at all these steps
    uses: tuple[JaxprEqn, ...] = ()  # of a sum, all operations that read the value

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


def zero_cuts(block: Block) -> list[ZeroCut]:
    """All cuts of a program but those of carries, in program order."""
    found = [cut for own in block.blocks() for cut in (*_edge_cuts(own), *_sum_cuts(own))]
    return sorted(found, key=lambda cut: cut.order)


def _edge_cuts(block: Block) -> Iterator[ZeroCut]:
    for i, equation in enumerate(block.jaxpr.eqns):
        inside = [inner for inner in block.children.get(i, ()) if inner.ran]
        for k, v in enumerate(equation.invars):
            own = block.cotangent(i, OPERAND, k)
            if own is None or not np.any(own == 0):
                continue
            is_branch = equation.primitive.name == "cond" and k > 0
            is_read = is_branch and any(b.reads(b.jaxpr.invars[k - 1]) for b in inside)
            if i in block.children and (is_read or not is_branch):
                continue
            sizes = [_result_size(block, i, n) for n in range(len(equation.outvars))]
            largest = functools.reduce(np.maximum, sizes)
            where = np.asarray((own == 0) & ~(largest == 0))
            if where.any():
                size = float(np.max(np.broadcast_to(largest, where.shape)[where]))
                total = block.total(v)
                is_alive = total is not None and bool(np.all((total != 0) | ~where))
                kind = BRANCH if i in block.children else EDGE
                yield _cut(kind, block, i, k, where, size)._replace(is_alive=is_alive)


def _sum_cuts(block: Block) -> Iterator[ZeroCut]:
    """The values whose uses have cotangents that are not zero, but whose sum is."""
    for v, uses in block.uses.items():
        total = block.total(v)
        if total is None:
            continue
        own = [(i, k, found) for i, k in uses
               if (found := block.cotangent(i, OPERAND, k)) is not None]  # fmt: skip
        live = [use for use in own if np.any((use[2] != 0) & (total == 0))]
        if live:
            masks = [np.asarray((found != 0) & (total == 0)) for *_, found in live]
            size = max(float(np.max(found)) for *_, found in live)
            cut = _cut(SUM, block, *live[0][:2], functools.reduce(np.logical_or, masks), size)
            yield cut._replace(uses=tuple(block.jaxpr.eqns[i] for i, *_ in live))


def _cut(kind: str, block: Block, i: int, k: int, where: np.ndarray, largest: float) -> ZeroCut:
    place = block.place(block.jaxpr.eqns[i])
    sources = block.values.sources[place.key][k]
    return ZeroCut(kind, block, place, k, where, largest, sources, (*block.order, i))


def _result_size(block: Block, i: int, n: int) -> np.ndarray:
    """The largest cotangent of a result; of one without, such as integers, inf if it is read."""
    found = block.cotangent(i, RESULT, n)
    if found is not None:
        return np.where(np.isnan(found), np.inf, found)
    return np.asarray(np.inf if _is_alive(block, block.jaxpr.eqns[i].outvars[n]) else 0.0)


def _is_alive(block: Block, variable: Var) -> bool:
    """Whether the loss, or something that has a cotangent, is computed from a value."""
    is_alive, outermost = False, [*block.around()][-1]

    def goes_on(own: Block, i: int, k: int) -> bool:
        nonlocal is_alive
        results = (own.cotangent(i, RESULT, n) for n in range(len(own.jaxpr.eqns[i].outvars)))
        is_alive = is_alive or any(found is not None and np.any(found) for found in results)
        return not is_alive

    found = reached(block, [variable], goes_on)
    return is_alive or (outermost, outermost.jaxpr.outvars[0]) in found


def carry_cuts(block: Block) -> Iterator[ZeroCut]:
    """All writes of a step of a scan to the carry that the next step does not read."""
    for body in block.blocks():
        for n, v in enumerate(body.jaxpr.invars):
            if body.parent is None or body.outer is None or not body.is_carry(n):
                continue
            params = body.parent.equation.params
            k = n - scan_counts(body.parent.equation)[0]
            result = body.outer.cotangent(body.order[-2], RESULT, k)
            producer = _producer(body, body.jaxpr.outvars[k])
            if result is None or producer is None or _has_reader(body, v):
                continue
            steps = np.arange(params["length"])
            is_last = steps == (steps[0] if params["reverse"] else steps[-1])
            where = (np.asarray(result) != 0)[..., None] & ~is_last
            if where.any():
                own, i = producer
                sources = own.values.sources[own.place(own.jaxpr.eqns[i]).key]
                operand = max(range(len(sources)), key=lambda k: len(sources[k]), default=0)
                cut = _cut(CARRY, own, i, operand, where, float(np.max(result)))
                yield cut._replace(sources=frozenset().union(*sources))


def _has_reader(block: Block, variable: Var) -> bool:
    """Whether an operation with a derivative reads a value, or a program hands it on."""
    if any(v is variable for v in block.jaxpr.outvars):
        return True
    for i, k in block.uses.get(variable, ()):
        inner = block.children.get(i, [])
        inputs = [b.jaxpr.invars[k - len(block.jaxpr.eqns[i].invars)] for b in inner]
        if block.cotangent(i, OPERAND, k) is not None and (
            not inner or any(map(_has_reader, inner, inputs))
        ):
            return True
    return False


def _producer(block: Block, atom: Any) -> tuple[Block, int] | None:
    """The operation that makes a result, and its program, inside of calls and before moves."""
    if type(atom) is Literal or atom not in block.producers:
        return None
    number, equation, k = block.producers[atom]
    name, inner, deeper = equation.primitive.name, block.children.get(number, []), None
    if name in SAME_AS_OPERAND:
        deeper = _producer(block, equation.invars[0])
    elif len(inner) == 1 and name != "scan":
        deeper = _producer(inner[0], inner[0].jaxpr.outvars[k])
    return deeper or (block, number)


def inside_of_loop(cut: ZeroCut) -> Place:
    """The operation in the condition of a loop that reads the operand and has no derivative."""
    params = cut.place.equation.params
    jaxpr = opened(params["cond_jaxpr"])[0]
    read = {jaxpr.invars[cut.operand]} if cut.operand < params["cond_nconsts"] else set()
    for inner in jaxpr.eqns:
        if any(type(v) is not Literal and v in read for v in inner.invars):
            if not any(map(holds_floats, inner.outvars)):
                return Place(inner, cut.place)
            read.update(inner.outvars)
    return cut.place
