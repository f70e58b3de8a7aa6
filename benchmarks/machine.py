"""What a result depends on: machine, versions, date."""

import datetime
import importlib.metadata
import os
import pathlib
import platform
import subprocess

import jax

PACKAGES = ("jax", "jaxlib", "optax", "chex", "flax", "jax-privacy", "opacus", "rlax", "torch")


def _processor() -> str:
    """The processor by its maker's name, where the system tells."""
    try:
        lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _cores() -> int:
    """Those that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _versions() -> dict[str, str]:
    found = {"Python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _commit() -> str:
    """The commit that was measured, if this is a clone."""
    root = pathlib.Path(__file__).parents[1]
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--exclude", "*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def facts() -> dict[str, object]:
    """All of it, as JSON takes it."""
    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "commit": _commit(),
        "processor": _processor(),
        "cores": _cores(),
        "device": jax.devices()[0].device_kind,
        "load": round(os.getloadavg()[0], 1),
        "versions": _versions(),
    }
