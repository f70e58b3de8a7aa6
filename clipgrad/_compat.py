"""The differences between versions of JAX, and between a module and itself reloaded."""

import sys
from typing import Any, TypeVar

import jax
import jax.export
from jax.core import ShapedArray

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
