"""Kinds of devices: which are there, and which form of a function each of them gets."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
from jax.core import Tracer

from clipgrad._sharding import on_one_device


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
        gpus = jax.local_devices(backend="cuda")
    except RuntimeError:
        return True
    return all(float(gpu.compute_capability) >= 8 for gpu in gpus)


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
