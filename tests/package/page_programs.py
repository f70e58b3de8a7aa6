"""Runs the programs of a page as a user does: in a process of its own, on one device or on more.

This module imports no JAX, so that a server can import the libraries once and fork a process for
each page: XLA reads its flags when the first array is made.
"""

import contextlib
import io
import os
import pathlib
import re

BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
FILE = re.compile(r"\b(\w+\.py)[:(]\d")
LIBRARIES = ("optax", "flax.linen", "flax.nnx", "clipgrad")
COUNT = "--xla_force_host_platform_device_count"
CACHE = pathlib.Path(__file__).parents[2] / ".pytest_cache" / "d" / "jax"


def cells(text: str) -> list[tuple[str, str | None]]:
    """The programs of a page, each with the output that the page shows behind it, or None."""
    pairs: list[tuple[str, str | None]] = []
    before = ""
    for kind, block in BLOCK.findall(text):
        if kind == "python":
            pairs.append((block, None))
        elif kind == "text" and before == "python":
            pairs[-1] = (pairs[-1][0], block)
        before = kind
    return pairs


def file_of(text: str) -> str:
    """The file in which the page's outputs say that its programs stand."""
    shown = "".join(output or "" for _, output in cells(text))
    return next(iter(FILE.findall(shown)), "model.py")


def printed(text: str, devices: int, folder: str) -> list[str]:
    """What each program of a page prints, run in order in this process."""
    # Compiled quickly, as in the tests; a page that makes eight devices has no flags before.
    flags = [flag for flag in os.environ.pop("XLA_FLAGS").split() if COUNT not in flag]
    if COUNT not in text:
        os.environ["XLA_FLAGS"] = " ".join([*flags, f"{COUNT}={devices}"])
    os.chdir(folder)
    import jax

    jax.config.update("jax_compilation_cache_dir", str(CACHE))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    names, texts = {"__name__": "__main__"}, []
    for program, _ in cells(text):
        with contextlib.redirect_stdout(io.StringIO()) as output:
            exec(compile(program, file_of(text), "exec"), names)
        texts.append(output.getvalue())
    return texts
