"""Trees: which are refused, which leaves are clipped, their paths, and a tree in two parts."""

import collections
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from clipgrad._flax import boxes
from clipgrad._sharding import unreduced_axes


def is_clippable(leaf: Any) -> bool:
    """Whether a leaf is measured and clipped: floating or complex numbers are, nothing else.

    Of the floating dtypes float8_e8m0fnu is none that a gradient has: it has no zero and no sign.
    """
    if isinstance(leaf, (float, complex)):
        return True
    dtype = getattr(leaf, "dtype", None)
    is_number = dtype is not None and jnp.issubdtype(dtype, jnp.inexact)
    return is_number and dtype != jnp.float8_e8m0fnu


def is_none(leaf: Any) -> bool:
    """``is_leaf`` for trees in which ``None`` counts as a leaf."""
    return leaf is None


def is_tracing() -> bool:
    """Whether JAX traces a function now, in which what is put on a device is an operation."""
    return isinstance(_put_number(), Tracer)


def _put_number() -> jax.Array:
    return jax.device_put(np.zeros(()))


def check_concrete(name: str, values: Any) -> None:
    """Raises `TypeError` inside of a transformation of JAX, where values are not known."""
    traced = [x for x in (*jax.tree.leaves(values), _put_number()) if isinstance(x, Tracer)]
    if traced:
        raise TypeError(
            f"{name}: got a traced array, {described(traced[0])}, expected arrays with values; "
            "call this outside of jax.jit, jax.grad, jax.vmap and jax.lax.scan, since it runs the "
            "function itself"
        )


def is_array(leaf: Any) -> bool:
    """Whether a leaf is an array of JAX, a tracer included, or one of NumPy that JAX can take."""
    return isinstance(leaf, jax.Array) or isinstance(leaf, np.ndarray) and _in_jax(leaf.dtype)


def is_float_array(leaf: Any) -> bool:
    return is_array(leaf) and jnp.issubdtype(leaf.dtype, jnp.inexact)


def is_complex(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jnp.complexfloating)


def wide_dtype(dtype: Any) -> np.dtype:
    """The 64-bit dtype of the same kind; integers and the rest stay as they are."""
    if jnp.issubdtype(dtype, jnp.complexfloating):
        return np.dtype(np.complex128)
    return np.dtype(np.float64) if jnp.issubdtype(dtype, jnp.floating) else dtype


def widened_leaf(leaf: Any) -> np.ndarray:
    """A leaf in NumPy, in float64 or complex128."""
    return np.asarray(leaf).astype(wide_dtype(leaf.dtype), copy=False)


def described(x: Any) -> str:
    """The dtype and the shape of an array as text, such as "float32[3, 2]", or a type's name."""
    return f"{x.dtype}{list(x.shape)}" if is_array(x) else type(x).__name__


def shown(x: Any) -> str:
    """A number or a text as it is written, and anything else by its type: no arrays in messages."""
    return repr(x) if isinstance(x, bool | int | float | complex | str | None) else described(x)


def _in_jax(dtype: np.dtype) -> bool:
    """Whether JAX has a dtype of NumPy."""
    if dtype == jax.dtypes.float0 or jnp.issubdtype(dtype, jnp.bool_):
        return True
    widest = 16 if jnp.issubdtype(dtype, jnp.complexfloating) else 8
    return jnp.issubdtype(dtype, jnp.number) and dtype.isnative and dtype.itemsize <= widest


def check_is_tree(name: str, value: Any, instead: str) -> None:
    """Raises `TypeError` for a function in the place of arrays; ``instead`` is what to write."""
    if callable(value) and jax.tree_util.all_leaves([value]) and not is_array(value):
        raise TypeError(f"{name}: got a function, expected a tree of arrays; write {instead}")


def parts_below(name: str, kind: str, prefix: Any, tree: Any) -> list[Any]:
    """The part of a tree below each leaf of a structure, or `ValueError` if it is no prefix.

    ``name`` is the name of the argument and ``kind`` what its leaves are, for the error.
    """
    try:
        return prefix.flatten_up_to(tree)
    except (ValueError, TypeError):
        structure = jax.tree.structure(tree, is_leaf=is_none)
        raise ValueError(
            f"{name}: got {kind} of the structure {prefix}, expected a prefix of {structure}"
        ) from None


def check_tree(name: str, tree: Any) -> None:
    """Raises `ValueError` for what JAX cannot take apart, and for trees that are very deep.

    JAX's own errors do not say why, and each of them takes a frame or more of Python's stack for
    good: so a tree is not shown to JAX before it is known to end, with keys that can be sorted.
    """
    most = sys.getrecursionlimit() // 2
    level, depth = _containers_in([[tree]]), 0
    while level and depth <= most:
        for container in level.values():
            try:
                if type(container) in (dict, collections.defaultdict):  # whose keys JAX sorts
                    sorted(container)
            except TypeError as error:
                raise ValueError(
                    f"{name}: got a dictionary whose keys can't be sorted, expected keys of one "
                    "type, such as strings"
                ) from error
        level, depth = _containers_in(level.values()), depth + 1
    if level:
        raise ValueError(
            f"{name}: got a tree that contains itself, or has more than {most} levels, expected "
            "fewer levels; stack the arrays of the levels, or call sys.setrecursionlimit"
        )


def _containers_in(containers: Iterable[Any]) -> dict[int, Any]:
    """The containers in some others, each of them once."""
    parts = (x.values() if isinstance(x, dict) else x for x in containers)
    return {id(x): x for part in parts for x in part if isinstance(x, dict | list | tuple)}


def check_leaves(name: str, tree: Any) -> None:
    """Raises `TypeError` for a leaf that may hold numbers which nobody would clip.

    Strings and functions, as in models of some frameworks, hold none.
    """
    leaves = jax.tree.leaves(tree)
    strange = next((leaf for leaf in leaves if _is_strange(leaf)), None)
    if strange is None:
        return
    path = next(path for path, leaf in with_paths(tree) if leaf is strange)
    place, kind = f" at {path!r}" if path else "", type(strange).__name__
    hint = f"make {kind} a pytree with jax.tree_util.register_dataclass, or replace it with None"
    if isinstance(strange, np.ndarray | np.generic):
        hint = f"{strange.dtype} is not a dtype of JAX; write x.astype(...)"
    elif type(strange) is jax.ShapeDtypeStruct:
        hint = "to work with shapes only, write jax.eval_shape(function, ...)"
    elif hasattr(strange, "dtype"):
        hint = "write jax.numpy.asarray(x), or ref[...] for a reference"
    raise TypeError(f"{name}: got a leaf of type {kind}{place}, expected arrays or numbers; {hint}")


def check_gradients(name: str, tree: Any) -> None:
    """Raises an error for a leaf that no gradient is: without a zero, or not yet added up."""
    for leaf in jax.tree.leaves(tree):
        if getattr(leaf, "dtype", None) == jnp.float8_e8m0fnu:
            raise TypeError(
                f"{name}: got a leaf of dtype float8_e8m0fnu, which has no zero and no sign; "
                "expected a dtype that gradients can have, such as float32 or float8_e5m2"
            )
        if axes := unreduced_axes(leaf):
            raise ValueError(
                f"{name}: got a leaf of type {jax.typeof(leaf)}, which is not yet added up over "
                f"the mesh axes {axes}; expected the sum, since a clip of parts is none of the "
                f"sum: write {name} = jax.reshard({name}, jax.P()), or with the layout of the "
                "parameters, before"
            )


def _is_strange(leaf: Any) -> bool:
    if isinstance(leaf, jax.Array | bool | int | float | complex | str):
        return False
    if isinstance(leaf, np.ndarray | np.generic):
        return not _in_jax(leaf.dtype)
    if hasattr(leaf, "dtype"):
        return not hasattr(leaf, "__jax_array__")
    return not callable(leaf)


def partition(tree: Any, chosen: Callable[[Any], bool] | Sequence[bool]) -> tuple[Any, list[Any]]:
    """The tree with ``None`` instead of leaves that are not chosen, and a list of these.

    The list has ``None`` instead of leaves that are chosen, and `combine` puts it back. ``None``
    in the tree counts as a leaf; ``chosen`` is a function of a leaf, or a flag for each leaf.
    """
    leaves, structure = jax.tree.flatten(tree, is_leaf=is_none)
    flags = [chosen(leaf) for leaf in leaves] if callable(chosen) else chosen
    pairs = list(zip(leaves, flags, strict=True))
    kept = structure.unflatten([leaf if flag else None for leaf, flag in pairs])
    return kept, [None if flag else leaf for leaf, flag in pairs]


def combine(tree: Any, rest: Sequence[Any]) -> Any:
    """The tree with the leaves of ``rest`` instead of its ``None``."""
    leaves, structure = jax.tree.flatten(tree, is_leaf=is_none)
    pairs = zip(leaves, rest, strict=True)
    return structure.unflatten([other if leaf is None else leaf for leaf, other in pairs])


def instances(tree: Any, kind: Any) -> list[Any]:
    return parts_that(tree, lambda x: isinstance(x, kind))


def parts_that(tree: Any, is_one: Callable[[Any], bool]) -> list[Any]:
    """The parts of a tree for which this holds, the outermost of parts in parts."""
    return [leaf for leaf in jax.tree.leaves(tree, is_leaf=is_one) if is_one(leaf)]


def clippable_leaves(tree: Any) -> list[jax.Array]:
    """The leaves of ``tree`` that are measured and clipped, as arrays."""
    check_tree("tree", tree)
    check_leaves("tree", tree)
    check_gradients("grads", tree)
    return [jnp.asarray(leaf) for leaf in jax.tree.leaves(tree) if is_clippable(leaf)]


def clippable_paths(tree: Any) -> list[str]:
    return [path for path, leaf in with_paths(tree) if is_clippable(leaf)]


def map_clippable(f: Callable[..., Any], tree: Any, *lists: Sequence[Any]) -> Any:
    """Maps over the leaves that are clipped, with an item of each list; the others stay."""
    rows = zip(clippable_leaves(tree), *lists, strict=True)
    return with_clippable(tree, [f(leaf, *items) for leaf, *items in rows])


def with_clippable(tree: Any, leaves: Iterable[Any]) -> Any:
    """The tree with these instead of the leaves that are clipped; the others stay."""
    before, structure = jax.tree.flatten(tree, is_leaf=is_none)
    new = iter(leaves)
    return structure.unflatten([next(new) if is_clippable(x) else x for x in before])


def parameters_like(tree: Any, params: Any) -> list[Any]:
    """For each leaf of ``tree`` that is clipped the leaf of ``params`` in its place."""
    leaves, structure = jax.tree.flatten(tree, is_leaf=is_none)
    try:
        others = structure.flatten_up_to(params)
    except (ValueError, TypeError) as error:
        raise ValueError(
            f"params: got another structure, expected the structure of the gradients, "
            f"{structure}: {error}"
        ) from None
    for (path, leaf), other in zip(with_paths(tree), others, strict=True):
        if is_clippable(leaf) and (not is_clippable(other) or jnp.shape(other) != jnp.shape(leaf)):
            raise ValueError(
                f"params: got {getattr(other, 'shape', other)} for {path or 'the leaf'}, expected "
                f"the shape of its gradient, {jnp.shape(leaf)}"
            )
    return [w for leaf, w in zip(leaves, others, strict=True) if is_clippable(leaf)]


def leaves_with_keys(
    tree: Any, is_leaf: Callable[[Any], bool] = lambda x: False
) -> list[tuple[tuple[Any, ...], Any]]:
    """The leaves of a tree with their keys; what a box of flax holds stands instead of the box.

    So the kernel of a layer is at ``layers[0].kernel`` in a model of flax NNX, in its state and in
    its gradient, and with a sharding or without. All names and paths of leaves come from here.
    """
    kinds = boxes()
    is_cut = lambda x: is_leaf(x) or isinstance(x, kinds)  # noqa: E731
    leaves = []
    for keys, part in jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_cut)[0]:
        if is_leaf(part) or not isinstance(part, kinds):
            leaves.append((keys, part))
            continue
        inside = jax.tree_util.tree_flatten_with_path(part, is_leaf=is_leaf)[0]
        first = int(len({deeper[:1] for deeper, _ in inside}) == 1)
        leaves += [((*keys, *deeper[first:]), leaf) for deeper, leaf in inside]
    return leaves


def path_string(path: Any) -> str:
    """The path of a leaf as text: ``"layers/0/kernel"``."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def leaf_names(root: str, tree: Any) -> list[str]:
    """The names of the leaves of a tree, called ``root``, as one writes them: ``args[0]['w']``."""
    return [root + jax.tree_util.keystr(keys) for keys, _ in leaves_with_keys(tree)]


def leaf_paths(tree: Any) -> list[str]:
    """The paths of the leaves of a tree, as patterns have them: ``0/w``."""
    return [path_string(keys) for keys, _ in leaves_with_keys(tree)]


def donated_leaf(tree: Any) -> str | None:
    """The place of the first array that a function has overwritten, as ``[0]['w']``, or None."""
    if not any(map(_is_deleted, jax.tree.leaves(tree))):  # paths would be dear in each step
        return None
    entries = leaves_with_keys(tree)
    return next(jax.tree_util.keystr(path) for path, leaf in entries if _is_deleted(leaf))


def _is_deleted(leaf: Any) -> bool:
    return not isinstance(leaf, Tracer) and hasattr(leaf, "is_deleted") and leaf.is_deleted()


def with_paths(tree: Any) -> list[tuple[str, Any]]:
    """The leaves of ``tree``, ``None`` included, with their paths."""
    return [(path_string(path), leaf) for path, leaf in leaves_with_keys(tree, is_none)]
