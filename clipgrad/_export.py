"""Named tuples in programs that `jax.export` serializes."""

from typing import TypeVar

import jax.export

T = TypeVar("T", bound=tuple)


def exportable(cls: type[T]) -> type[T]:
    """A class decorator: functions that return this named tuple can be exported and serialized."""
    name = f"clipgrad.{cls.__name__}"
    return jax.export.register_namedtuple_serialization(cls, serialized_name=name)
