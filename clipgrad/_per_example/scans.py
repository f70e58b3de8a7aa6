"""Gradients that leave a scan: stacked, or added up in its carry."""

import dataclasses
import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend.core import JaxprEqn

from clipgrad._jaxpr import (
    called_program,
    evaluate,
    scan_again,
    scan_counts,
)
from clipgrad._per_example.course import Lost
from clipgrad._per_example.follow import Follow, follows, gradient_array, is_plain_array
from clipgrad._per_example.linear import total
from clipgrad._per_example.squares import Squares
from clipgrad._per_example.sums import Summed
from clipgrad._per_example.terms import CHANGED_CARRY, Carry, Factor, Products
from clipgrad._per_example.wanted import WantedGradient, Wants, added_carries, is_matrix, want_scan

_NUMBERS = itertools.count()


@follows("scan", wants=want_scan)
def _follow_scan(hook: Follow, equation: JaxprEqn, inputs: list, wants: Wants) -> list:
    """The scan with gradients that are added to its carry taken out of it, as stacked factors."""
    constants, carried = scan_counts(equation)
    program, length = called_program(equation), equation.params["length"]
    summed = _summed(hook, equation, wants)
    lazy = {
        i: Carry(next(_NUMBERS), want.leaves)
        for i in _lazy(hook, equation, wants) - summed
        if (want := wants[i]) is not None
    }
    flags = [
        _want_inside(want, length) if i in lazy else want if i in summed else None
        for i, want in enumerate(wants[:carried])
    ]
    inner = Follow.of(equation, [*flags, *wants[carried:]], hook)
    avals = [variable.aval for variable in equation.outvars]
    rebuilt: list[Callable[[Sequence], Any]] = []

    def body(carry: Sequence, element: Sequence) -> tuple[Any, Any]:
        dense = iter(carry)
        state = [
            _placeholder(avals[i], lazy[i]) if i in lazy else next(dense) for i in range(carried)
        ]
        outputs = evaluate(program, [*inputs[:constants], *state, *element], inner)
        added = [_added(outputs[i], own) for i, own in lazy.items()]
        kept = tuple(_array(outputs[i]) for i in range(carried) if i not in lazy)
        arrays, rebuild = _once((outputs[carried:], added))
        rebuilt[:] = [rebuild]
        return kept, arrays

    first = tuple(_array(inputs[constants + i]) for i in range(carried) if i not in lazy)
    last, once = scan_again(equation, body, first, tuple(inputs[constants + carried :]))
    stacked, added = rebuilt[0](once)
    dense, factors = iter(last), iter(_with_common(added))
    results = [
        total(avals[i], inputs[constants + i], _joined_steps(next(factors), avals[i]))
        if i in lazy
        else next(dense)
        for i in range(carried)
    ]
    pairs = zip(stacked, avals[carried:], strict=True)
    return results + [_stacked(value, aval, length) for value, aval in pairs]


def _once(tree: Any) -> tuple[list[jax.Array], Callable[[Sequence], Any]]:
    """The arrays of a tree, those of several factors once, and how it is made of such arrays."""
    arrays, structure = jax.tree.flatten(tree)
    once = {id(x): x for x in arrays}
    places = {key: i for i, key in enumerate(once)}
    own = [places[id(x)] for x in arrays]
    return list(once.values()), lambda values: structure.unflatten([values[i] for i in own])


def _with_common(gradients: Sequence[Products]) -> list[Products]:
    """The gradients, whose factors know whether several of these have them."""
    owners = Counter(key for each in gradients for key in {*map(id, jax.tree.leaves(each))})

    def marked(x: Any) -> Any:
        return dataclasses.replace(x, is_common=owners[id(x.values)] > 1)

    is_factor = lambda x: isinstance(x, Factor)  # noqa: E731
    return [jax.tree.map(marked, each, is_leaf=is_factor) for each in gradients]


def _array(value: Any) -> Any:
    return value if isinstance(value, Summed) else gradient_array(value)


def _lazy(hook: Follow, equation: JaxprEqn, wants: Wants) -> set[int]:
    """The carries of matrices that the body may only add to."""
    carried = scan_counts(equation)[1]
    found = [i for i in range(carried) if is_matrix(equation.outvars[i].aval)]
    return added_carries(equation, wants, found, lambda want: True, hook.varying)


def _summed(hook: Follow, equation: JaxprEqn, wants: Wants) -> set[int]:
    """The carries that hold sums over the examples: which the body only adds to."""
    reduction = hook.reduction
    if reduction is None:
        return set()
    found = range(scan_counts(equation)[1])
    return added_carries(equation, wants, found, reduction.adds, hook.varying)


def _want_inside(want: WantedGradient | None, length: int) -> WantedGradient | None:
    return want and want._replace(is_whole=False, steps=want.steps * length)


def _placeholder(aval: Any, carry: Carry) -> Products:
    return Products((), tuple(aval.shape), aval.dtype, (carry,))


def _added(value: Any, carry: Carry) -> Products:
    """The sum of products that a step adds to its carry."""
    is_sum = isinstance(value, Products) and value.carried == (carry,)
    # What differs between steps can't be behind their sum.
    if not is_sum or any(term.shared for term in value.terms):
        raise Lost(carry.leaves, CHANGED_CARRY)
    return Products(value.terms, value.shape, value.dtype)


def _joined_steps(value: Products, aval: Any) -> Products:
    """The sum over the steps of what was stacked."""
    terms = tuple(term.stacked(None).tidied() for term in value.terms)
    return Products(terms, tuple(aval.shape), aval.dtype)


def _stacked(value: Any, aval: Any, length: int) -> Any:
    """The output of a scan, from what its steps gave."""
    if isinstance(value, Squares):
        return value.over_axis()
    if is_plain_array(value) or isinstance(value, Summed):
        return value
    terms = tuple(term.stacked(length) for term in value.terms)
    squares = value.squares and value.squares.over_axis()
    return Products(terms, tuple(aval.shape), aval.dtype, squares=squares)
