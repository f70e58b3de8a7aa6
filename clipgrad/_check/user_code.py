"""Code of others, which may raise anything: the one place that catches it."""

from collections.abc import Callable
from typing import Any

import jax


class UserError(Exception):
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


class NotNearby(UserError):
    """The function raised it at a point near the given one."""


def call_user(call: Callable[..., Any], *args: Any) -> Any:
    """The result of a call of a function that is under test, or of JAX about it.

    Raises:
      UserError: it raises any error.
    """
    try:
        return call(*args)
    except UserError:
        raise
    except Exception as error:
        raise UserError(whole_text(error)) from error


def whole_text(error: BaseException) -> str:
    """The kind of an error and all of its text."""
    text = str(error).strip()
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def call_compiled(program: Any, *args: Any) -> Any:
    """The results of a compiled program of ours, which calls `call_user`, once they are there.

    Raises:
      UserError: their part of it raises an error, or what is compiled fails. Where it cannot be
        traced the fault is ours, and its error is raised as it is.
    """
    try:
        return call_user(lambda: jax.block_until_ready(program(*args)))
    except UserError:
        if hasattr(program, "trace"):
            program.trace(*args)
        raise
