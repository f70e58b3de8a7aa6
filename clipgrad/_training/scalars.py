"""Statistics, metrics and states as one flat dictionary for loggers."""

from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from clipgrad._arrays import check_tree, explain_call, instances, is_array
from clipgrad._clip import ClipStats, GradientClipState, SkipSpikesState
from clipgrad._frameworks import without_variables
from clipgrad._training.train_step import TrainState
from clipgrad._values import ValueStats

Items = Iterator[tuple[str, Any]]

_FIELDS = {
    ClipStats: ("norm", "clipped_norm", "scale", "clipped", "fraction", "nonfinite", "zeros"),
    ValueStats: ("norm", "rms", "max", "zeros", "nonfinite"),
    GradientClipState: ("count", "clipped_count", "nonfinite_count", "threshold"),
    SkipSpikesState: (
        *("raw_norm", "skipped", "skipped_count", "spike_count", "consecutive"),
        "nonfinite_consecutive",
    ),
}
_OWN = tuple(_FIELDS)


@explain_call(
    'write scalars({"first": ..., "second": ...})', prefix='write scalars({"train": tree})'
)
def scalars(tree: Any) -> dict[str, jax.Array]:
    """Statistics of clips as a flat dictionary of numbers, for a logger.

    Statistics of clips and of values give their fields below their name, such as ``attn/norm``. The
    clips of ``train_step``'s metrics, and those in the state of an optimizer, are called ``clip``;
    ``clip_0``, ``clip_1``, ... if there are several.

    Guarantees:
      * Works under `jax.jit`. Values have at most one axis: one entry for each step of a scan, or
        for each inner step of nested scans, in their order.
      * Booleans are 0 and 1. Other real arrays in metrics (``aux``) are kept if they have at most
        one axis; states and parameters of other libraries are left out.

    Args:
      tree: the statistics of `value_and_grad_with_stats` or `with_value_stats`, the metrics or the
        state of `train_step`, the state of an optimizer (also ``nnx.Optimizer(...).opt_state``), a
        `ClipStats` or `ValueStats`, or a dictionary or tuple of such.

    Returns:
      A dictionary from names, joined by ``/``, to arrays.

    Raises:
      ValueError: if there is nothing to log in ``tree``, or two values have the same name.

    Example:
      >>> import clipgrad as cg, jax, jax.numpy as jnp
      >>> def loss(x):
      ...     with jax.named_scope("attn"):
      ...         h = 2 * x
      ...     return (h ** 2).sum()
      >>> _, _, stats = cg.value_and_grad_with_stats(loss)(jnp.ones(4))
      >>> found = cg.scalars(stats)    # wandb.log(found)
      >>> print(float(found["attn/norm"]))
      8.0
    """
    check_tree("tree", tree)
    tree = without_variables(tree)
    found: dict[str, jax.Array] = {}
    for name, value in _items("", tree, _clip_names(tree)):
        if name in found:
            raise ValueError(
                f"tree: got two values with the name {name!r}, expected one; write one dictionary "
                'for each source, such as {"generator": ..., "discriminator": ...}'
            )
        found[name] = jnp.ravel(value) if jnp.ndim(value) > 1 else jnp.asarray(value)
        if jnp.issubdtype(found[name].dtype, jnp.bool_):
            found[name] = found[name].astype(jnp.float32)
    if not found:
        raise ValueError(
            f"tree: got {type(tree).__name__} without statistics or numbers, expected statistics, "
            "metrics, or the state of a clip with stats=True; of gradients write "
            '{"grad_norm": clipgrad.global_norm(grads)}'
        )
    return found


def _items(path: str, tree: Any, clips: Iterator[str]) -> Items:
    """The names and numbers below a path; ``clips`` has the names of the clips of a state."""
    if isinstance(tree, TrainState):
        yield from _items(path, tree.opt_state, clips)
    elif isinstance(tree, ClipStats | ValueStats):
        yield from _fields_of(path, tree)
    elif isinstance(tree, GradientClipState):
        path = _join(path, next(clips))
        yield from _fields_of(path, tree)
        # Of a tree that is one array the statistics of its leaf are those of the tree.
        leaves = {name: stats for name, stats in (tree.leaf_stats or {}).items() if name}
        for part in (tree.stats, leaves):
            yield from _items(path, part, clips)
    elif isinstance(tree, SkipSpikesState):
        yield from _fields_of(_join(path, "skip_spikes"), tree)
        yield from _items(path, tree.inner_state, clips)
    elif isinstance(tree, Mapping):
        for key, value in tree.items():
            if key == "clips" and _is_stats(value):
                value = dict(zip(_numbered(len(value)), value, strict=True))
                yield from _items(path, value, clips)
            else:
                yield from _items(_join(path, str(key)), value, _clip_names(value))
    elif isinstance(tree, tuple | list):
        # Of a state of another library only what is this library's.
        inner = instances(tree, _OWN) if hasattr(tree, "_fields") else tree
        for i, value in enumerate(inner):
            own = isinstance(value, (*_OWN, tuple, Mapping))
            yield from _items(path if own else _join(path, str(i)), value, clips)
    elif path and _is_loggable(tree):
        yield path, tree


def _fields_of(path: str, record: Any) -> Items:
    for name in next(names for kind, names in _FIELDS.items() if isinstance(record, kind)):
        if (value := getattr(record, name)) is not None:
            yield _join(path, name), value


def _clip_names(tree: Any) -> Iterator[str]:
    """The names of the clips of a state, in their order."""
    return iter(_numbered(len(instances(tree, GradientClipState))))


def _numbered(count: int) -> list[str]:
    return ["clip"] if count == 1 else [f"clip_{i}" for i in range(count)]


def _is_stats(value: Any) -> bool:
    return isinstance(value, tuple) and all(isinstance(item, ClipStats) for item in value)


def _is_loggable(value: Any) -> bool:
    if not isinstance(value, bool | int | float | np.number | np.bool) and not is_array(value):
        return False
    dtype = jnp.result_type(value)
    is_real = any(jnp.issubdtype(dtype, kind) for kind in (jnp.bool_, jnp.integer, jnp.floating))
    return jnp.ndim(value) <= 1 and is_real


def _join(path: str, name: str) -> str:
    return "/".join(filter(None, (path, name)))
