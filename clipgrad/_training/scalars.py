"""Statistics, metrics and states as one flat dictionary for loggers."""

from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from clipgrad._arrays import check_tree, explain_call, instances, is_array
from clipgrad._clip import ClipStats
from clipgrad._frameworks import without_variables
from clipgrad._training.optimizer_states import STATES, found_in, numbered
from clipgrad._training.train_state import TrainState
from clipgrad._training.watch_updates import UpdateNorms
from clipgrad._values import ValueStats

Items = Iterator[tuple[str, Any]]

_FIELDS = {
    ClipStats: ("norm", "clipped_norm", "scale", "clipped", "fraction", "nonfinite", "all_zero"),
    ValueStats: ("norm", "rms", "max", "zero_fraction", "nonfinite"),
    UpdateNorms: ("grad", "param", "update", "ratio"),
}
_RECORDS = tuple(_FIELDS)


@explain_call(
    'write scalars({"first": ..., "second": ...})', prefix='write scalars({"train": tree})'
)
def scalars(tree: Any, *, layers: bool = False) -> dict[str, jax.Array]:
    """Makes a flat dictionary of numbers from clip statistics, for your logger.

    Example:
      >>> import clipgrad as cg, jax, jax.numpy as jnp
      >>> def loss(x):
      ...     with jax.named_scope("attn"):
      ...         h = 2 * x
      ...     return (h ** 2).sum()
      >>> _, _, stats = cg.value_and_grad_with_stats(loss)(jnp.ones(4))
      >>> numbers = cg.scalars(stats)    # wandb.log(numbers)
      >>> print(float(numbers["attn/norm"]))
      8.0

    Args:
      tree: statistics from `value_and_grad_with_stats` or `with_value_stats`, metrics or state from
        `train_step`, an optimizer state (also ``nnx.Optimizer(...).opt_state``), a `ClipStats` or
        `ValueStats`, or a dictionary or tuple of these.
      layers: ``True``: you get one number for each entry of an array, as
        ``updates/blocks/attn/ratio/0``, if your logger takes no arrays.

    Returns:
      A dictionary from names, joined by ``/``, to arrays.

    Raises:
      ValueError: if there is nothing to log in ``tree``, or two values have the same name.

    For named statistics, you find the numbers below the name, such as ``attn/norm``. A clip in
    ``train_step``'s metrics or in an optimizer state is called ``clip``, or ``clip_0``, ``clip_1``,
    ... if several clips have statistics. Statistics for each leaf are below:
    ``clip/leaves/layers/0/kernel/norm``. `skip_spikes` gives ``skip_spikes/raw_norm``,
    ``skip_spikes/limit`` and counters, and `watch_updates` gives ``updates/blocks/0/attn/ratio``.

    Guarantees:
      * A clip has the same keys whether you pass metrics or a state.
      * You can call `scalars` under `jax.jit`. Arrays have at most one axis: one entry for each
        layer, or each scan step, or each inner step of nested scans, in order.
      * Booleans are 0 and 1. Other real arrays in metrics (``aux``) are kept if they have at most
        one axis; states and parameters of other libraries are left out.
    """
    check_tree("tree", tree)
    tree = without_variables(tree)
    numbers: dict[str, jax.Array] = {}
    for name, value in _items("", tree):
        if name in numbers:
            raise ValueError(
                f"tree: got two values with the name {name!r}, expected one; write one dictionary "
                'for each source, such as {"generator": ..., "discriminator": ...}'
            )
        numbers[name] = jnp.ravel(value) if jnp.ndim(value) > 1 else jnp.asarray(value)
        if jnp.issubdtype(numbers[name].dtype, jnp.bool_):
            numbers[name] = numbers[name].astype(jnp.float32)
    if not numbers or _are_parameters(tree, numbers):
        raise ValueError(
            f"tree: got {type(tree).__name__} without statistics or numbers, expected statistics, "
            "metrics, or the state of a clip with stats=True; of gradients write "
            '{"grad_norm": clipgrad.global_norm(grads)}, and of parameters '
            "watch_updates(optimizer), whose state has their norms"
        )
    return _entries_apart(numbers) if layers else numbers


def _are_parameters(tree: Any, numbers: Mapping[str, jax.Array]) -> bool:
    """Whether these are arrays of layers, of which only the vectors, such as biases, are left."""
    is_whole = len(numbers) == len(jax.tree.leaves(tree))
    has_number = any(value.ndim == 0 for value in numbers.values())
    return not (is_whole or has_number or instances(tree, (*_RECORDS, *STATES, TrainState)))


def _entries_apart(numbers: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """The numbers, with the index of an entry of an array at the end of its name."""
    apart: dict[str, jax.Array] = {}
    for name, value in numbers.items():
        apart |= (
            {_join(name, str(i)): x for i, x in enumerate(value)} if value.ndim else {name: value}
        )
    return apart


def _items(path: str, tree: Any) -> Items:
    """The names and numbers below a path."""
    if isinstance(tree, TrainState):
        yield from _items_of_state(path, tree.opt_state)
    elif isinstance(tree, _RECORDS):
        for name in next(names for kind, names in _FIELDS.items() if isinstance(tree, kind)):
            yield _join(path, name), getattr(tree, name)
    elif isinstance(tree, Mapping):
        yield from _items_of_mapping(path, tree)
    elif _is_state(tree):
        yield from _items_of_state(path, tree)
    elif isinstance(tree, tuple | list):
        yield from _items_of_sequence(path, tree)
    elif path and _is_loggable(tree):
        yield path, tree


def _items_of_mapping(path: str, tree: Mapping) -> Items:
    has_clips = _are_stats(tree.get("clips"))
    for key, value in tree.items():
        if key == "clips" and has_clips:
            names = numbered("clip", len(value))
            yield from _items(path, dict(zip(names, value, strict=True)))
        elif not (key == "leaves" and has_clips):  # each clip has its own beside it
            yield from _items(_join(path, str(key)), value)


def _items_of_state(path: str, opt_state: Any) -> Items:
    """The numbers of this library in the state of an optimizer, with the names of metrics."""
    states = found_in(opt_state)
    yield from _items(path, states.measured)
    yield from _items(path, states.records)
    yield from _items(path, states.updates)


def _items_of_sequence(path: str, tree: tuple | list) -> Items:
    """The items of a chain of states together, and of all else one by one."""
    yield from _items_of_state(path, [value for value in tree if _is_state(value)])
    for i, value in enumerate(tree):
        if not _is_state(value):
            is_container = isinstance(value, (*_RECORDS, TrainState, tuple, Mapping))
            yield from _items(path if is_container else _join(path, str(i)), value)


def _is_state(tree: Any) -> bool:
    """Whether this is a part of an optimizer's state, with states of this library in it or not."""
    if isinstance(tree, (*_RECORDS, TrainState)):
        return False
    return hasattr(tree, "_fields") or bool(instances(tree, STATES))


def _are_stats(value: Any) -> bool:
    return isinstance(value, tuple) and all(isinstance(item, ClipStats) for item in value)


def _is_loggable(value: Any) -> bool:
    if not isinstance(value, bool | int | float | np.number | np.bool) and not is_array(value):
        return False
    dtype = jnp.result_type(value)
    is_real = any(jnp.issubdtype(dtype, kind) for kind in (jnp.bool_, jnp.integer, jnp.floating))
    return jnp.ndim(value) <= 1 and is_real


def _join(path: str, name: str) -> str:
    return "/".join(filter(None, (path, name)))
