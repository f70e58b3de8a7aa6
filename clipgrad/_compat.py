"""The differences between versions of JAX, and between kinds of devices, in one place."""

import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.export
import jax.numpy as jnp
from jax.core import ShapedArray, Tracer

T = TypeVar("T", bound=type)


def varying_axes(x: Any) -> frozenset[str]:
    """The manual mesh axes along which ``x``, or a variable of its type, differs.

    They are empty where they are not tracked.
    """
    aval = x if isinstance(x, ShapedArray) else jax.typeof(x)
    manual = getattr(aval, "manual_axis_type", None)
    return frozenset(getattr(manual, "varying", None) or getattr(aval, "vma", None) or ())


def tracks_varying(axis_name: str) -> bool:
    """Whether ``axis_name`` belongs to a ``shard_map`` that knows what varies along it."""
    return axis_name in varying_axes(jax.lax.axis_index(axis_name))


def to_varying(x: jax.Array, axes: frozenset[str]) -> jax.Array:
    """``x`` marked as varying along ``axes``, as a loop carry inside ``shard_map`` must be."""
    missing = tuple(sorted(axes - varying_axes(x)))
    return jax.lax.pcast(x, missing, to="varying") if missing else x


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


def by_platform(
    *args: Any, cpu: Callable[..., Any], gpu: Callable[..., Any], default: Callable[..., Any]
) -> Any:
    """One of three functions that give the same: what compilers make of them differs.

    The one for a CPU may have a branch, and where there are several devices ``default`` is used.
    """
    forms = {} if gpu is default else {"cuda": gpu, "rocm": gpu}
    forms |= {"cpu": cpu} if on_one_device(args) else {}
    return jax.lax.platform_dependent(*args, **forms, default=default)


def gpus_have_bfloat16() -> bool:
    """Whether each GPU here, if any, multiplies bfloat16: before Ampere (8.0) XLA refuses to.

    A program may be compiled for a GPU that is not here, and that is taken to be a newer one.
    """
    try:
        found = jax.local_devices(backend="cuda")
    except RuntimeError:
        return True
    return all(float(gpu.compute_capability) >= 8 for gpu in found)


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


def exportable(cls: T) -> T:
    """A class decorator: programs that return this named tuple can be exported and serialized.

    JAX takes each name once, so a module that is reloaded keeps its class; then states that were
    made before are still of the class that all other modules know.
    """
    known = getattr(sys.modules[cls.__module__], cls.__name__, None)
    if known is not None:
        return known
    name = f"clipgrad.{cls.__name__}"
    return jax.export.register_namedtuple_serialization(cls, serialized_name=name)


PLATFORMS = ("cpu", "gpu", "tpu", "cuda", "rocm", "METAL")


class Devices(NamedTuple):
    """The devices there are among those asked for, and the kinds that are not there."""

    there: dict[str, Any]
    absent: list[str]


def find_devices(kinds: Sequence[str] | None) -> Devices:
    """Look the kinds up; None asks for all there are, the default one first."""
    if kinds is None:
        here = dict.fromkeys([jax.default_backend(), "cpu"])
        return Devices({kind: device for kind in here if (device := _first(kind))}, [])
    kinds = [kinds] if isinstance(kinds, str) else list(kinds)
    unknown = [kind for kind in kinds if kind not in PLATFORMS]
    if unknown or not kinds:
        raise ValueError(
            f"devices: got {tuple(unknown or kinds)!r}, expected some of {', '.join(PLATFORMS)}, "
            "or None for all devices here"
        )
    there = {kind: device for kind in kinds if (device := _first(kind))}
    return Devices(there, [kind for kind in kinds if kind not in there])


def _first(kind: str) -> Any:
    try:
        return jax.devices(kind)[0]
    except RuntimeError:
        return None


def moved(tree: Any, device: Any) -> Any:
    """The tree with its arrays on `device`; arrays that are on such a device stay."""

    def move(leaf):
        if not isinstance(leaf, jax.Array) or isinstance(leaf, Tracer):
            return leaf
        platforms = {d.platform for d in leaf.devices()}
        return leaf if platforms == {device.platform} else jax.device_put(leaf, device)

    return jax.tree.map(move, tree)
