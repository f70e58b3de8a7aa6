"""A loss as a program with named leaves: what `diagnose`, `compare` and the recorder read.

A leaf has two spellings, both from its keys: its name, as one writes it in Python, such as
``args[0]['w']`` or, of a model, ``args[0].blocks[1].up``; and its path in its argument, as patterns
have it, such as ``blocks/1/up``. Neither shows how a framework stores a model.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import keystr

import clipgrad._programs as _programs
from clipgrad._arrays import (
    argument_name,
    check_concrete,
    check_scalar,
    check_tree,
    described,
    donated_leaf,
    is_array,
    loss_and_aux,
    path_string,
)
from clipgrad._error_clip import check_call
from clipgrad._frameworks import (
    Pure,
    differentiated_inputs,
    has_modules,
    is_model,
    paths_of_arrays,
    with_models,
)
from clipgrad._programs import holds_floats


class Leaf(NamedTuple):
    """An array among the arguments of a function.

    Attributes:
      argument: the position of its argument, or the keyword.
      path: its path in the argument, such as ``blocks/1/up``.
      name: as one writes it in Python, such as ``args[0].blocks[1].up``.
    """

    argument: int | str
    path: str
    name: str


def _leaf(keys: Any) -> Leaf:
    """The leaf with these keys in the pair of arguments and keyword arguments."""
    argument = keys[1].key if keys[0].idx else keys[1].idx
    return Leaf(argument, path_string(keys[2:]), argument_name(argument) + keystr(keys[2:]))


class TracedLoss(NamedTuple):
    """A loss, traced.

    Attributes:
      fun: the function.
      program: its jaxpr; the first result is the loss.
      inputs: the arrays among the arguments.
      leaves: the leaf of each input.
      chosen: the numbers of the inputs by which the loss is differentiated.
    """

    fun: Callable[..., Any]
    program: Any
    inputs: list[Any]
    leaves: list[Leaf]
    chosen: list[int]

    @property
    def names(self) -> list[str]:
        """The names of the inputs, such as ``args[0]['w']``."""
        return [leaf.name for leaf in self.leaves]


def traced_loss(
    fun: Any,
    args: Any,
    kwargs: Any,
    argnums: int | Sequence[int],
    has_aux: bool,
    by_name: Sequence[str] = (),
    otherwise: str = "",
) -> TracedLoss:
    """Check the arguments of a loss, and trace it once.

    The loss is differentiated by the keyword arguments ``by_name``, too. The error of what is no
    loss ends with ``otherwise``, what to write for it.

    Raises:
      TypeError: `fun` is not a function, `args` not a tuple, or `kwargs` not a mapping.
      ValueError: `jax.grad` does not accept the loss, or an argument to differentiate.
    """
    check_call(fun, args, kwargs)
    positions = [] if by_name and argnums == () else _positions(argnums, len(args))
    args = _with_arrays(args, positions)
    check_concrete("args", (args, kwargs))
    leaves = [leaf for i in positions for leaf in jax.tree.leaves(args[i])]
    if leaves and all(isinstance(leaf, int) for leaf in leaves):
        raise ValueError(_nothing_floating(args, positions))
    traced: list[TracedLoss] = []

    def run(function: Any, packed: Any, named: Any) -> None:
        traced.append(_trace(fun, function, packed, named, positions, has_aux, by_name, otherwise))

    with_models(run, fun, args, dict(kwargs or {}))
    return traced[0]


def _positions(argnums: Any, count: int) -> list[int]:
    chosen = np.ravel(np.asarray(argnums))
    if not chosen.size:
        raise ValueError(
            f"argnums: got {argnums!r}, expected at least one position of an argument to "
            "differentiate"
        )
    if chosen.dtype.kind not in "iub" or not all(-count <= i < count for i in chosen):
        raise ValueError(
            f"argnums: got {argnums!r} for {count} arguments, expected positions below {count}"
        )
    return [int(i) % count for i in chosen]


def _with_arrays(args: tuple, positions: list[int]) -> tuple:
    """The arguments, with arrays for the Python numbers in those that are differentiated."""

    def as_array(leaf: Any) -> Any:
        return jnp.asarray(leaf) if isinstance(leaf, float | complex | np.inexact) else leaf

    check_tree("args", args)
    if (path := donated_leaf(args)) is not None:
        raise ValueError(
            f"args: got an array that a function has overwritten, at args{path}, expected arrays "
            "that were not donated; pass a copy to the step that donates them, or load the "
            "capture again"
        )
    return tuple(
        jax.tree.map(as_array, arg, is_leaf=is_model)
        if i in positions and not has_modules(arg)
        else arg
        for i, arg in enumerate(args)
    )


def _trace(
    fun: Callable,
    function: Callable,
    args: tuple,
    kwargs: dict,
    positions: list[int],
    has_aux: bool,
    by_name: Sequence[str],
    otherwise: str,
) -> TracedLoss:
    is_split = isinstance(function, Pure)  # an NNX model among the arguments is graph and states

    def loss(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        try:
            return _checked_loss(result[1] if is_split else result, has_aux)
        except (TypeError, ValueError) as error:
            raise type(error)(f"{error}{otherwise}") from None

    program = _programs.trace(loss, args, kwargs).program
    check_concrete("fun", _programs.opened(program)[1])
    if names := _programs.side_effects(program):  # a reference that the loss creates is its own
        raise ValueError(
            f"fun: got a function with side effects ({', '.join(names)}), expected one "
            "without; pass each changed value as an argument, and return it"
        )
    packed = args[0] if is_split else (args, kwargs)
    arrays = [(path, leaf) for path, leaf in paths_of_arrays(packed) if is_array(leaf)]
    moved = differentiated_inputs(packed, dict.fromkeys([*positions, *by_name]))
    pairs = zip(arrays, moved, strict=True)
    chosen = [i for i, ((_, x), is_moved) in enumerate(pairs) if is_moved and holds_floats(x)]
    if not chosen:
        raise ValueError(_nothing_floating(args, positions))
    inputs, leaves = [x for _, x in arrays], [_leaf(keys) for keys, _ in arrays]
    return TracedLoss(fun, program, inputs, leaves, chosen)


def _nothing_floating(args: tuple, positions: list[int]) -> str:
    """The error of a loss without anything to differentiate by; it says what there is instead."""
    leaves = [leaf for i in positions for leaf in jax.tree.leaves(args[i])]
    there = {described(leaf) for leaf in leaves}
    where = ", ".join(map(argument_name, positions))
    return (
        f"args: got {', '.join(sorted(there)) or 'no arrays'} in {where}, expected floating "
        "arrays to differentiate; write 1.0 for 1, or x.astype(float), or choose other argnums"
    )


def _checked_loss(result: Any, has_aux: bool) -> jax.Array:
    value, _ = loss_and_aux("fun", result, has_aux)
    check_scalar("fun", value)
    if not isinstance(value, jax.Array):
        raise ValueError(
            f"fun: got {described(value)} from it, expected a scalar loss computed from the "
            "arguments"
        )
    return value
