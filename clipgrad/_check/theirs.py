"""Code of others, which may raise anything: the one place that catches it."""

from collections.abc import Callable
from typing import Any

import jax


class TheirError(Exception):
    """Code of others raised an error, which is the cause of this one.

    Nothing else is caught in the checker: a fault of its own ends it, and weakens no check.
    """

    @property
    def original(self) -> BaseException:
        """The error that they raised."""
        return self.__cause__ or self

    @property
    def is_lacking(self) -> bool:
        """Whether XLA lacks an operation on this device, as products of some types."""
        return "UNIMPLEMENTED" in str(self.original)


class NotNearby(TheirError):
    """The function raised it at a point near the given one."""


def theirs(call: Callable[..., Any], *args: Any) -> Any:
    """The result of a call of a function that is under test, or of JAX about it.

    Raises:
      TheirError: it raises any error.
    """
    try:
        return call(*args)
    except TheirError:
        raise
    except Exception as error:
        raise TheirError(whole(error)) from error


def whole(error: BaseException) -> str:
    """The kind of an error and all of its text."""
    text = str(error).strip()
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def ran(program: Any, *args: Any) -> Any:
    """The results of a compiled program of ours, which calls `theirs`, once they are there.

    Raises:
      TheirError: their part of it raises an error, or what is compiled fails. Where it cannot be
        traced the fault is ours, and its error is raised as it is.
    """
    try:
        return theirs(lambda: jax.block_until_ready(program(*args)))
    except TheirError:
        if hasattr(program, "trace"):
            program.trace(*args)
        raise
