"""Giving memory that nothing uses back to the system."""

import ctypes
import functools
import sys
from collections.abc import Callable


def return_free_memory() -> None:
    """Give the free pages of the heap back to the system, where the C library is glibc.

    glibc keeps what is freed between arrays that still live. Between pieces of a program that is as
    much as all of its arrays, of other sizes than those that come next. Elsewhere nothing happens:
    the allocators of macOS, Windows and musl return large arrays by themselves.
    """
    if (trim := _trim()) is not None:
        trim(0)


@functools.cache
def _trim() -> Callable[[int], int] | None:
    """The function `malloc_trim` of glibc, or None."""
    if not sys.platform.startswith("linux"):
        return None
    try:
        trim = ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError):
        return None
    trim.argtypes, trim.restype = [ctypes.c_size_t], ctypes.c_int
    return trim
