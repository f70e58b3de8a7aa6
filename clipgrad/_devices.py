"""The kinds of device that a gradient is computed on."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
from jax.core import Tracer

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
