"""The circumstances of a run: versions and devices."""

import importlib.metadata
import platform
from typing import Any

import jax

_CAPTURE_PACKAGES = ("clipgrad", "jax", "jaxlib", "optax", "orbax-checkpoint", "numpy")


def circumstances() -> dict[str, Any]:
    """Versions, and the devices and processes of the run."""
    versions = {name: importlib.metadata.version(name) for name in _CAPTURE_PACKAGES}
    return {
        "versions": versions | {"python": platform.python_version()},
        "platform": jax.default_backend(),
        "device_kind": jax.devices()[0].device_kind,
        "devices": jax.device_count(),
        "processes": jax.process_count(),
    }
