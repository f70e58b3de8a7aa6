"""Arguments from a line of text: `f32[8,16], f32[16], i32[8]`."""

import re

import jax
import jax.numpy as jnp
import numpy as np

DTYPES = {
    "f16": "float16",
    "bf16": "bfloat16",
    "f32": "float32",
    "f64": "float64",
    "c64": "complex64",
    "c128": "complex128",
    "i32": "int32",
    "i64": "int64",
    "u32": "uint32",
    "bool": "bool",
}
SHAPE = re.compile(r"(\w+)\[([\d\s,]*)\]")
INTEGERS = 4
WIDE = ("f64", "c128", "i64")


def random_arguments(text: str, seed: int) -> tuple:
    """Draw normal numbers, and integers below 4, of the shapes that `text` lists.

    Raises:
      ValueError: the text is no list of shapes.
    """
    rng = np.random.default_rng(seed)
    left = SHAPE.sub("", text).replace(",", "").strip()
    found = SHAPE.findall(text)
    if left or not found:
        raise ValueError(
            f'args={text!r} is no list of shapes; write dtype[sizes], as in "f32[8,16], f32[16]", '
            "or module:function for a function that makes the arguments"
        )
    return tuple(_draw(rng, name, sizes) for name, sizes in found)


def _draw(rng, name: str, sizes: str):
    if name not in DTYPES:
        raise ValueError(f"{name!r} is no dtype; expected one of {', '.join(DTYPES)}")
    if name in WIDE and not jax.config.jax_enable_x64:  # pyright: ignore[reportAttributeAccessIssue]
        raise ValueError(f"{name!r} needs 64-bit types, which are off; add --x64")
    shape = tuple(int(size) for size in sizes.split(",") if size.strip())
    dtype = DTYPES[name]
    if dtype.startswith("complex"):
        values = rng.normal(size=shape) + 1j * rng.normal(size=shape)
    elif name in ("i32", "i64", "u32", "bool"):
        values = rng.integers(0, 2 if name == "bool" else INTEGERS, shape)
    else:
        values = rng.normal(size=shape)
    return jnp.asarray(values, dtype)
