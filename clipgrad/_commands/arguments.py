"""Arguments to check at: from a line such as `f32[8,16], i32[8]`, or from a signature."""

import inspect
import re
import types
import typing
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from clipgrad._trees import is_array

DTYPES = {
    "f32": "float32",
    "c64": "complex64",
    "i32": "int32",
    "u32": "uint32",
    "bool": "bool",
    "f16": "float16",
    "bf16": "bfloat16",
    "f64": "float64",
    "c128": "complex128",
    "i64": "int64",
}
SHAPE = re.compile(r"(\w+)\[([\d\s,]*)\]")
# In a docstring, behind the name of a parameter: "(8, 16)", ": (8, 16)", "... of shape (8, 16)".
SIZES = re.compile(r"(?:^|^:\s*|shape\s*[=:]?\s*)\(((?:[1-9]\d*,?\s*)+)\)")
SCALARS = (float, jax.Array, "float", "jax.Array")
SCALAR = "f32[]"
INTEGERS = 4
FIRST_SIZE = 3
WIDE = ("float64", "complex128", "int64")


class Parameter(NamedTuple):
    """A parameter of a function; its shape, if known, is text such as `f32[8,16]`."""

    name: str
    required: bool
    by_name: bool
    default: Any
    shape: str | None


class Arguments(NamedTuple):
    args: tuple
    kwargs: dict[str, Any]

    def __str__(self) -> str:
        named = [f"{name}={_argument_text(value)}" for name, value in self.kwargs.items()]
        return ", ".join([*map(_argument_text, self.args), *named])


def random_arguments(text: str, seed: int) -> tuple:
    """Draw normal numbers, and integers below 4, of the shapes that `text` lists.

    Raises:
      ValueError: the text is not a list of shapes.
    """
    rng = np.random.default_rng(seed)
    left = SHAPE.sub("", text).replace(",", "").strip()
    found = SHAPE.findall(text)
    if left or not found:
        raise ValueError(
            f'args: got {text!r}, expected shapes, dtype[sizes], such as "f32[8,16], f32[16]", '
            "or module:function, a function that returns the tuple of arguments"
        )
    return tuple(_draw(rng, name, sizes) for name, sizes in found)


def inferred_arguments(parameters: list[Parameter], seed: int) -> Arguments | None:
    """Draw arguments of the shapes that the parameters have; None if one that is needed has none.

    Parameters with another default keep it; if no parameter has a shape, defaults that are floats
    are the arguments.
    """
    drawn = {p.name: p.default if is_array(p.default) else p.shape for p in parameters}
    values = {name: value for name, value in drawn.items() if value is not None}
    values = values or {p.name: p.default for p in parameters if isinstance(p.default, float)}
    if not values or any(p.required and p.name not in values for p in parameters):
        return None
    shapes = ", ".join(value for value in values.values() if isinstance(value, str))
    random = iter(random_arguments(shapes, seed) if shapes else ())
    values = {name: next(random) if isinstance(v, str) else v for name, v in values.items()}
    args = []
    for parameter in parameters:
        if parameter.by_name or parameter.name not in values:
            break
        args.append(values.pop(parameter.name))
    return Arguments(tuple(args), values)


def example(parameters: list[Parameter]) -> str:
    """A value of `--args` for these parameters, and their names."""
    needed = [p for p in parameters if p.required] or parameters[:1]
    usual = ["f32[8,16]", *["f32[16]"] * len(needed)]
    known = [p.shape if p.shape != SCALAR else None for p in needed]
    shapes = [shape or other for shape, other in zip(known, usual, strict=False)]
    names = f"  (shapes for {', '.join(p.name for p in needed)})" if needed else ""
    return f'--args "{", ".join(shapes) or "f32[8,16]"}"{names}'


def parameters_of(fun: Callable) -> list[Parameter]:
    """The parameters with their shapes, by annotation (jaxtyping's or text) or docstring."""
    document, sizes = inspect.getdoc(fun) or "", {}
    several = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [
        Parameter(
            name=p.name,
            required=p.default is p.empty,
            by_name=p.kind is p.KEYWORD_ONLY,
            default=None if p.default is p.empty else p.default,
            shape=_annotated(p.annotation, sizes)
            or _documented(p.name, document)
            or (SCALAR if p.annotation in SCALARS and p.default is p.empty else None),
        )
        for p in _signature(fun)
        if p.kind not in several
    ]


def _signature(fun: Callable) -> list[inspect.Parameter]:
    for evaluate in (True, False):
        try:
            found = inspect.signature(inspect.unwrap(fun), eval_str=evaluate)
            return list(found.parameters.values())
        except Exception:  # a builtin has no signature, and annotations may name what is not there
            continue
    return []


def _annotated(annotation: Any, sizes: dict[str, int]) -> str | None:
    """The shape of `Float[Array, "8 16"]`, or of a text; a named size is small."""
    if isinstance(annotation, str):
        return _written_type(annotation)
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return next(filter(None, (_annotated(a, sizes) for a in typing.get_args(annotation))), None)
    dims, dtypes = getattr(annotation, "dim_str", None), getattr(annotation, "dtypes", None)
    if not isinstance(dims, str):
        return None
    if not isinstance(dtypes, list | tuple):
        dtypes = ["float32"]
    dtype = next((short for short, name in DTYPES.items() if name in dtypes), None)
    found = [_size(dim, sizes) for dim in dims.split() if dim != "..." and "*" not in dim]
    return None if dtype is None or None in found else f"{dtype}[{','.join(map(str, found))}]"


def _size(dim: str, sizes: dict[str, int]) -> int | None:
    dim = dim.rpartition("=")[2].lstrip("#?")
    if dim.isdecimal():
        return int(dim)
    if dim.startswith("_"):
        dim = f"_{len(sizes)}"
    return sizes.setdefault(dim, FIRST_SIZE + len(sizes)) if dim.isidentifier() else None


def _documented(name: str, document: str) -> str | None:
    """The shape on the line of a docstring that begins with the name: `x: f32[8,16]`."""
    line = re.search(rf"^\s*{name}\s*([:(].*)$", document, re.MULTILINE)
    if line is None:
        return None
    written, sizes = _written_type(line[1]), SIZES.search(line[1])
    if written or not sizes:
        return written
    return f"f32[{','.join(re.findall('[0-9]+', sizes[1]))}]"


def _written_type(text: str) -> str | None:
    return next((f"{a}[{b}]" for a, b in SHAPE.findall(text) if a in DTYPES), None)


def _draw(rng, name: str, sizes: str):
    dtype = DTYPES.get(name, name)
    if dtype not in DTYPES.values():
        raise ValueError(f"args: got {name!r}, expected a dtype, one of {', '.join(DTYPES)}")
    if dtype in WIDE and not jax.config.jax_enable_x64:  # pyright: ignore[reportAttributeAccessIssue]
        raise ValueError(
            f"args: got {name!r}, expected a type of 32 bits or less; for 64 bits add --x64"
        )
    shape = tuple(int(size) for size in sizes.split(",") if size.strip())
    if dtype.startswith("complex"):
        values = rng.normal(size=shape) + 1j * rng.normal(size=shape)
    elif dtype in ("int32", "int64", "uint32", "bool"):
        values = rng.integers(0, 2 if name == "bool" else INTEGERS, shape)
    else:
        values = rng.normal(size=shape)
    return jnp.asarray(values, dtype)


def _argument_text(value: Any) -> str:
    if not is_array(value):
        return repr(value)
    short = {name: short for short, name in DTYPES.items()}
    return f"{short.get(str(value.dtype), value.dtype)}[{','.join(map(str, value.shape))}]"
