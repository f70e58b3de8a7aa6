"""Memory that was freed and that the C library holds back."""

import contextlib
import ctypes
import functools
from collections.abc import Callable

# Freed pieces of up to 32 MB, which most leaves are, stay with the process, and what is larger does
# not fit into them: a check would take half as much again.
TRIMMED = 2**20  # elements


@functools.cache
def _trim() -> Callable[[int], object]:
    with contextlib.suppress(Exception):  # glibc alone has it
        return ctypes.CDLL(None).malloc_trim
    return lambda padding: 0


def give_back(elements: int) -> None:
    """Give freed memory back to the system, after work on arrays of so many elements."""
    if elements >= TRIMMED:
        _trim()(0)
