"""Words of a command line: arguments such as `f32[8,16], i32[8]`, and positions."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

DTYPES = {
    "f32": "float32", "c64": "complex64", "i32": "int32", "u32": "uint32", "bool": "bool",
    "f16": "float16", "bf16": "bfloat16", "f64": "float64", "c128": "complex128", "i64": "int64",
}  # fmt: skip
SHAPE = re.compile(r"(\w+)\[([\d\s,]*)\]")
INTEGERS = 4


def position_or_name(text: str) -> int | str:
    return int(text) if text.isdigit() else text


def random_arguments(text: str, seed: int) -> tuple:
    """Draw normal numbers, and integers below 4, of the shapes that `text` lists.

    Raises:
      ValueError: the text is not a list of shapes.
    """
    rng = np.random.default_rng(seed)
    left = SHAPE.sub("", text).replace(",", "").strip()
    shapes = SHAPE.findall(text)
    if left or not shapes:
        sizes = re.fullmatch(r"[(\[]?(\d+(?:\s*,\s*\d+)*),?[)\]]?", text.strip())
        hint = f'; write "f32[{sizes[1]}]"' if sizes else ""
        raise ValueError(
            f'--args: got {text!r}, expected shapes, dtype[sizes], such as "f32[8,16], f32[16]", '
            f"or module:function, a function that returns the tuple of arguments{hint}"
        )
    return tuple(_draw(rng, name, sizes) for name, sizes in shapes)


def _draw(rng: np.random.Generator, name: str, sizes: str) -> Any:
    if DTYPES.get(name, name) not in DTYPES.values():
        raise ValueError(f"--args: got {name!r}, expected a dtype, one of {', '.join(DTYPES)}")
    dtype = jnp.dtype(DTYPES.get(name, name))
    if jax.dtypes.canonicalize_dtype(dtype) != dtype:
        raise ValueError(
            f"--args: got {name!r}, expected a type of 32 bits or less; for 64 bits add --x64"
        )
    shape = tuple(int(size) for size in sizes.split(",") if size.strip())
    if dtype.kind in "biu":
        return jnp.asarray(rng.integers(0, 2 if dtype.kind == "b" else INTEGERS, shape), dtype)
    values = rng.normal(size=shape)
    return jnp.asarray(values + 1j * rng.normal(size=shape) if dtype.kind == "c" else values, dtype)
