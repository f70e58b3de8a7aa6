"""Parts of an axis of a leaf that a program reads apart, such as the keys of a fused kernel."""

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from jax.extend.core import JaxprEqn

from clipgrad._diagnose.blocks import Block, reached
from clipgrad._diagnose.cuts import ZeroCut
from clipgrad._diagnose.probe import OPERAND, RESULT
from clipgrad._diagnose.subject import DiagnosisSubject

_TAKES_APART = ("slice", "split", "unstack")


class CutPiece(NamedTuple):
    """The elements of an axis of an input that are read apart, and without a gradient."""

    argument: int  # the input
    axis: int
    elements: np.ndarray  # whether each of them is among these
    cuts: list[ZeroCut]  # where their gradient is cut


def may_have_cut_pieces(block: Block, given: DiagnosisSubject, zeros: Sequence[float]) -> bool:
    """Whether as large a share of a gradient is zero as a piece of an axis has."""
    equations = [equation for _, equation in block.operations()]
    apart = [e for e in equations if e.primitive.name in _TAKES_APART]
    pieces = {(m, len(own)) for e in apart for result in _pieces_of(e) for m, own in result}
    for i, share in zip(given.chosen, zeros, strict=True):
        if not 0 < share < 1:
            continue
        axes = {axis for n in set(np.shape(given.inputs[i])) for axis in _axes_of(equations, n)}
        if any(size <= share * m * (1 + 1e-3) for m, size in pieces if m in dict(axes)):
            return True
    return False


def cut_pieces(
    given: DiagnosisSubject, block: Block, cuts: Sequence[ZeroCut], skipped: Sequence[int]
) -> Iterator[CutPiece]:
    """The pieces of inputs whose gradient is zero, but not that of the rest of the input."""
    read: dict[int, list[np.ndarray]] = {i: [] for i in given.chosen}
    for (i, axes), own in block.values.gradients.items():
        read[i] += [own] if len(axes) == 1 else []
    left = {i for i, axes in read.items() if i not in skipped and not all(map(np.all, axes))}
    ends = {(cut.place.key, cut.operand): cut for cut in cuts}
    equations = [equation for own in block.blocks() for equation in own.jaxpr.eqns]
    for own in block.blocks() if left else ():
        for number, equation in enumerate(own.jaxpr.eqns):
            if equation.primitive.name not in _TAKES_APART:
                continue
            sources = block.values.sources[own.place(equation).key][0] & left
            for k, piece in enumerate(_pieces_of(equation)):
                found = own.cotangent(number, RESULT, k)
                if found is None or np.any(found != 0):
                    continue
                behind = _cuts_behind(own, equation.outvars[k], ends)
                for i in sorted(sources) if behind else ():
                    for axis, elements in _zero_elements(piece, read[i], equations):
                        yield CutPiece(i, axis, elements, behind)


def _zero_elements(
    piece: list[tuple[int, np.ndarray]], read: Sequence[np.ndarray], equations: list[JaxprEqn]
) -> Iterator[tuple[int, np.ndarray]]:
    """The axes of an input whose elements in a piece are all zero, and these elements."""
    for axis, is_read in enumerate(read):
        for m, stride in _axes_of(equations, len(is_read)):
            for length, own in piece:
                elements = np.isin(np.arange(len(is_read)) // stride % m, own)
                if m == length and elements.any() and not np.any(is_read & elements):
                    yield axis, elements


def _pieces_of(equation: JaxprEqn) -> list[list[tuple[int, np.ndarray]]]:
    """For each result the lengths of the axes that it has a part of, and which part."""
    operand: Any = equation.invars[0].aval
    shape, params = operand.shape, equation.params
    if equation.primitive.name == "slice":
        strides = params["strides"] or (1,) * len(shape)
        taken = zip(params["start_indices"], params["limit_indices"], strides, strict=True)
        every = [(n, np.arange(*own)) for n, own in zip(shape, taken, strict=True)]
        return [[(n, own) for n, own in every if len(own) < n]]
    length = shape[params["axis"]]
    sizes = params["sizes"] if equation.primitive.name == "split" else (1,) * length
    parts = np.split(np.arange(length), np.cumsum(sizes)[:-1])
    return [[(length, own)] if len(own) < length else [] for own in parts]


def _axes_of(equations: Iterable[JaxprEqn], length: int) -> set[tuple[int, int]]:
    """The lengths of axes that one becomes in reshapes, and the strides of these in it."""
    found = {(length, 1)}
    for equation in equations:
        if equation.primitive.name != "reshape":
            continue
        operand: Any = equation.invars[0].aval
        before, after = operand.shape, equation.params["new_sizes"]
        for p in (p for p, n in enumerate(before) if n == length):
            outer = math.prod(before[:p])
            ends = [math.prod(after[: j + 1]) for j in range(len(after))]
            inside = [
                (m, end) for m, end in zip(after, ends, strict=True)
                if m > 1 and outer * m <= end <= outer * length
            ]  # fmt: skip
            found |= {(m, outer * length // end) for m, end in inside}
    return found


def _cuts_behind(block: Block, variable: Any, ends: dict) -> list[ZeroCut]:
    """The cuts that end the way from a value that has no gradient."""
    found: list[ZeroCut] = []

    def goes_on(own: Block, number: int, k: int) -> bool:
        key = own.place(own.jaxpr.eqns[number]).key
        if (key, k) in ends:
            found.append(ends[key, k])
            return False
        cotangent = own.cotangent(number, OPERAND, k)
        return cotangent is not None and not np.any(cotangent != 0)

    reached(block, [variable], goes_on)
    return list({id(cut): cut for cut in found}.values())
