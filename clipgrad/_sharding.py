"""Shardings: the explicit one of an array, and whether one device has all of it."""

from typing import Any

import jax
import jax.numpy as jnp


def explicit_sharding(x: jax.Array) -> Any:
    """The sharding that the type of ``x`` has; ``None`` where it is replicated or up to XLA."""
    sharding = getattr(jax.typeof(x), "sharding", None)
    spread = sharding is not None and any(axis is not None for axis in sharding.spec)
    return sharding if spread else None


def unreduced_axes(x: Any) -> tuple[str, ...]:
    """The explicit mesh axes over which ``x`` is still to be added up."""
    sharding = getattr(jax.typeof(x), "sharding", None) if isinstance(x, jax.Array) else None
    return tuple(sorted(getattr(getattr(sharding, "spec", None), "unreduced", None) or ()))


def on_every_device(x: jax.Array) -> jax.Array:
    """``x`` with all of it on each device, where its type has another sharding: to flatten it."""
    sharding = explicit_sharding(x)
    if sharding is None:
        return x
    return jax.sharding.reshard(x, sharding.update(spec=jax.sharding.PartitionSpec()))


def broadcast_like(x: jax.Array, leaf: jax.Array) -> jax.Array:
    """``x`` broadcast to the shape of ``leaf``, and to its sharding where that is explicit."""
    return jnp.broadcast_to(x, leaf.shape, out_sharding=explicit_sharding(leaf))


def on_one_device(tree: Any) -> bool:
    """Whether the program that these arrays are in is known to run on one device.

    On several a branch that adds up would be a second collective in the program, though not one
    that is executed.
    """
    shardings = [getattr(jax.typeof(x), "sharding", None) for x in jax.tree.leaves(tree)]
    sizes = [s.mesh.size for s in shardings if s is not None and not s.mesh.empty]
    return max(sizes, default=jax.device_count()) == 1


def is_local(x: jax.Array) -> bool:
    """Whether all elements are known to be on one device: alone, or within `jax.shard_map`."""
    sharding = getattr(jax.typeof(x), "sharding", None)
    kinds = () if sharding is None else sharding.mesh.axis_types
    within = bool(kinds) and all(kind == jax.sharding.AxisType.Manual for kind in kinds)
    return within or on_one_device(x)
