"""The module path of an equation: the named scopes around it."""

import functools
import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import jax
from jax.extend import source_info_util
from jax.extend.core import JaxprEqn

ScopePath = tuple[str, ...]


# JAX has no public name for the kinds of entries of a name stack. They are read when they are
# first asked for, so that an import needs no form of a name stack.
@functools.cache
def _scope_entry() -> type:
    """The class of the entry of a scope."""
    with jax.named_scope("scope"):
        return type(source_info_util.current_name_stack().stack[-1])


@functools.cache
def _vmap_entry() -> Any:
    """The entry of `jax.vmap`."""
    with source_info_util.transform_name_stack("vmap"):
        return source_info_util.current_name_stack().stack[-1]


@functools.cache
def _transform_entry() -> type:
    """The class of the entries that transformations leave in a name stack."""
    with source_info_util.transform_name_stack("jvp"):
        return type(source_info_util.current_name_stack().stack[-1])


def transforms(equation: JaxprEqn) -> frozenset[str]:
    """Return the transformations that made an equation of its program, such as "transpose"."""
    stack = equation.source_info.name_stack.stack
    return frozenset(entry.name for entry in stack if type(entry) is _transform_entry())


def path(equation: JaxprEqn) -> ScopePath:
    """Return the scopes around an equation within its own program, outermost first.

    Those around a program inside another equation are that equation's. `jax.named_scope("a/b")`
    is two scopes; entries of transformations such as `vmap` are none.
    """
    stack = equation.source_info.name_stack.stack
    scopes = (e.name for e in stack if type(e) is _scope_entry())
    return tuple(segment for name in scopes for segment in name.split("/") if segment)


def common_start(paths: Iterable[Sequence[Any]]) -> tuple[Any, ...]:
    """Return what all paths begin with."""
    columns = zip(*paths, strict=False)
    same = itertools.takewhile(lambda column: all(x == column[0] for x in column), columns)
    return tuple(column[0] for column in same)


def common_end(paths: Iterable[Sequence[Any]]) -> tuple[Any, ...]:
    """Return what all paths end with."""
    return common_start(path[::-1] for path in paths)[::-1]


def is_mapped(equation: JaxprEqn) -> bool:
    """Whether a `vmap` of this program surrounds an equation; a scope "vmap" has another type."""
    entries, vmap = equation.source_info.name_stack.stack, _vmap_entry()
    return any(type(entry) is type(vmap) and entry == vmap for entry in entries)


def outside_of_scopes(count: int) -> Any:
    """A context without the innermost so many scopes; the transformations in them stay."""
    stack = source_info_util.current_name_stack()
    for i, entry in reversed(list(enumerate(stack.stack))):
        if count and type(entry) is _scope_entry():
            segments = [segment for segment in entry.name.split("/") if segment]
            kept = segments[: max(len(segments) - count, 0)]
            count -= len(segments) - len(kept)
            outer = stack[:i].extend("/".join(kept)) if kept else stack[:i]
            stack = outer + stack[i + 1 :]
    return source_info_util.set_name_stack(stack)


def scope_around(name: str) -> Any:
    """`jax.named_scope`, around the innermost scopes that layers of Equinox have entered."""
    stack = source_info_util.current_name_stack()
    place = len(stack)
    for i, entry in reversed(list(enumerate(stack.stack))):
        if type(entry) is _scope_entry():
            if not entry.name.startswith("eqx."):
                break
            place = i
    return source_info_util.set_name_stack(stack[:place].extend(name) + stack[place:])
