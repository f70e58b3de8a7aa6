"""The place of an operation: its equation, its module, and its line in the user's files."""

import functools
import os
import pathlib
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.extend.core import JaxprEqn

from clipgrad._names.scopes import ScopePath, path
from clipgrad._programs import (
    SCANS,
    SHARD_MAPS,
    axis_lengths,
    chain_key,
    device_count,
    function_file,
    function_name,
    has_custom_rule,
    is_jit,
    is_scan,
    is_shard_map,
    manual_axes,
    opened,
    operation_name,
    scan_length,
)

_PACKAGE = pathlib.Path(__file__).parents[1]
_INSTALLED = (
    os.path.dirname(jax.__file__ or ""),
    *(sysconfig.get_path(name) or "" for name in ("stdlib", "platstdlib", "purelib", "platlib")),
)
_LIBRARY = str(_PACKAGE)
_EVALUATION = str(_PACKAGE / "_programs")  # evaluates programs of others, with their lines
_DEMO = str(_PACKAGE / "_demo")  # programs as a user would write them
# Files that every traced call of a function of JAX goes through; they say nothing of it.
_MACHINERY = {
    "api.py", "core.py", "custom_derivatives.py", "pjit.py", "traceback_util.py", "api_util.py",
    "linear_util.py", "partial_eval.py", "source_info_util.py", "ufunc_api.py", "array_methods.py",
    "ad_checkpoint.py", "batching.py", "ad.py",
}  # fmt: skip
# Files and folders of frameworks that every call of a layer goes through.
_FRAMES_OF_LAYERS = tuple(
    os.path.join("", *name.split("/"))
    for name in """flax/linen/module.py flax/linen/transforms.py flax/core flax/nnx/transforms
    flax/nnx/module.py flax/nnx/pytreelib.py flax/nnx/extract.py flax/nnx/graph.py
    equinox/_module equinox/_jit.py equinox/_vmap_pmap.py equinox/_ad.py equinox/_eval_shape.py
    haiku/_src/module.py haiku/_src/transform.py haiku/_src/lift.py haiku/_src/stateful.py
    keras/src/layers/layer.py keras/src/ops/operation.py keras/src/utils
    keras/src/backend""".split()
)
# The folders of functions that people call, and frames in these that are no such functions.
_FOLDERS = [*(f"jax/_src/{folder}" for folder in ("numpy", "nn", "lax", "scipy", "ops")), "optax"]
_FUNCTIONS = tuple(os.path.join("", *folder.split("/"), "") for folder in _FOLDERS)
_WRAPPERS = frozenset({"wrapper", "call", "fn", "op"})


class Location(NamedTuple):
    """A line of the user's, and what an installed package does there."""

    file: str | None
    line: int | None
    package: str | None  # such as "norm (jax/_src/numpy/linalg.py:1243)"

    def __str__(self) -> str:
        if self.file is None:
            return self.package or "an unknown line"
        return f"{shown(self.file)}:{self.line}"


class Place(NamedTuple):
    """An equation of a program, and the equations that hold this program, the innermost first."""

    equation: JaxprEqn
    parent: "Place | None" = None

    @property
    def chain(self) -> list[JaxprEqn]:
        return [self.equation, *(self.parent.chain if self.parent else ())]

    @property
    def key(self) -> tuple[int, ...]:
        """A key that is equal for the same place only."""
        return chain_key(self.chain)

    @property
    def operation(self) -> str:
        """The name of the primitive, or of the function that a rule was written for."""
        if not is_jit(self.equation) and not has_custom_rule(self.equation):
            return operation_name(self.equation)
        return self.equation.params.get("name") or function_name(self.equation)

    @property
    def module(self) -> str:
        paths = [path(equation) for equation in reversed(self.chain)]
        return "/".join(segment for scopes in paths for segment in scopes)

    @property
    def scans(self) -> list[JaxprEqn]:
        """The scans around the equation, outermost first."""
        around = reversed(self.chain[1:])
        return [equation for equation in around if is_scan(equation)]

    @property
    def axes(self) -> tuple[tuple[str, int], ...]:
        """The scans and the `shard_map`s that a program in the equation is in, with lengths.

        Outermost first, the equation itself among them.
        """
        axes = [(e, scan_length(e)) for e in reversed(self.chain) if is_scan(e) or is_shard_map(e)]
        return tuple(
            (SHARD_MAPS.noun, device_count(e)) if length is None else (SCANS.noun, length)
            for e, length in axes
        )

    @property
    def nest(self) -> tuple[int, ...]:
        """The lengths of the scans around the equation, outermost first."""
        return tuple(scan_length(equation) or 0 for equation in self.scans)

    def device(self, numbers: Iterable[Any]) -> str | None:
        """The coordinates of the first of some devices of a `shard_map`, such as "data=5".

        Axes along which it is all of them are left out; None if it is every device.
        """
        around = next(e for e in self.chain[1:] if is_shard_map(e))
        axes = list(manual_axes(around))
        is_meant: Any = np.zeros(axis_lengths(around), bool)
        is_meant.flat[np.ravel(list(numbers))] = True
        for axis in manual_axes(around):
            at = axes.index(axis)
            if (is_meant.any(at) == is_meant.all(at)).all():
                is_meant = is_meant.any(at)
                axes.remove(axis)
        # A `pmap` without a name has JAX's own.
        names = ["pmap" if axis.startswith("_internal_pmap") else axis for axis in axes]
        first = np.argwhere(is_meant)[0]
        return ", ".join(f"{name}={i}" for name, i in zip(names, first, strict=True)) or None

    @property
    def _frames(self) -> list[Any]:
        """The lines that were run, innermost first; tracebacks end where programs begin."""
        chain = self.chain
        pairs = zip(chain, [*chain[1:], None], strict=True)
        return [frame for equation, around in pairs for frame in _frames_inside(equation, around)]

    @property
    def derivative_of(self) -> tuple[Any, ...] | None:
        """The call of the user's that the operation is made in, where JAX differentiates it.

        It is the code and the instruction, which operations of one call share. None for an
        operation that JAX has not made while it differentiates.
        """
        traceback = self.equation.source_info.traceback
        codes, instructions = traceback.raw_frames() if traceback is not None else ((), ())
        files = [code.co_filename for code in codes]
        first = next((i for i, file in enumerate(files) if is_users(file)), None)
        if first is None or not any(map(_is_of_derivatives, files[:first])):
            return None
        return codes[first], instructions[first]

    @property
    def function(self) -> str:
        """The function of JAX or optax that was called, or else the name of the operation."""
        if has_custom_rule(self.equation):
            return self.operation
        name_of_call = self.operation
        for frame in self._frames:
            if is_users(frame.file_name):
                break
            name = frame.function_name.rpartition(".")[2].lstrip("_")
            is_one = any(part in frame.file_name for part in _FUNCTIONS) and name not in _WRAPPERS
            is_own = name.endswith("__") or name.startswith("operator_")  # of Python, not of JAX
            if is_one and not is_own and "control_flow" not in frame.file_name:
                name_of_call = name
        return name_of_call

    @property
    def location(self) -> Location:
        """The innermost line of the user's own files."""
        frames = self._frames
        first = next((i for i, frame in enumerate(frames) if is_users(frame.file_name)), None)
        called = [f for f in frames[:first] if not _is_machinery(f.file_name)]
        package = _package_frame(called[-1]) if called else None
        if first is None:
            return Location(None, None, package)
        return Location(frames[first].file_name, frames[first].line_num, package)


class PlacedEquation(NamedTuple):
    """An equation of a program or of a program inside of it."""

    position: tuple[int, ...]  # its number, behind the numbers of equations and programs around it
    place: Place
    jaxpr: Any  # the program that it is an equation of
    scopes: ScopePath  # the scopes around this program


def placed_equations(
    program: Any,
    programs: Callable[[JaxprEqn], list[Any]],
    around: tuple[int, ...] = (),
    parent: Place | None = None,
    scopes: ScopePath = (),
) -> Iterator[PlacedEquation]:
    """The equations of a program, each behind the equations of the ``programs`` inside of it."""
    jaxpr = opened(program)[0]
    for number, equation in enumerate(jaxpr.eqns):
        place, inside = Place(equation, parent), (*scopes, *path(equation))
        for i, inner in enumerate(programs(equation)):
            yield from placed_equations(inner, programs, (*around, number, i), place, inside)
        yield PlacedEquation((*around, number), place, jaxpr, scopes)


@functools.cache
def is_users(file: str) -> bool:
    """Whether a file is the user's: of no installed package, the standard library or this one."""
    if file.startswith(_DEMO):
        return True
    if file.startswith("<frozen") or {"site-packages", "dist-packages"} & set(file.split(os.sep)):
        return False
    return not file.startswith((*filter(None, _INSTALLED), _LIBRARY + os.sep))


def _frames_inside(equation: JaxprEqn, around: JaxprEqn | None) -> list[Any]:
    """The lines that made an equation, of the program that ``around`` holds.

    JAX keeps the program of a jitted function of its own for all callers. If it was first traced
    while another program was evaluated, its equations have lines of that one, and none of the
    function; then they say nothing.
    """
    traceback = equation.source_info.traceback
    frames = [] if traceback is None else traceback.frames
    if around is None or not is_jit(around):
        return frames
    return [] if is_foreign(equation, function_file(around)) else frames


def is_foreign(equation: JaxprEqn, file: str | None) -> bool:
    """Whether the lines of an equation are of others than the function it is in, of this file."""
    traceback = equation.source_info.traceback
    if not file or traceback is None or is_users(file) or file.startswith(_EVALUATION):
        return False
    return all(code.co_filename != file for code in traceback.raw_frames()[0])


def _is_of_derivatives(file: str) -> bool:
    return file.endswith(os.path.join("interpreters", "ad.py"))


@functools.cache
def _is_machinery(file: str) -> bool:
    """Whether a file is of calls as such: of JAX or a framework, or of this library."""
    if file.startswith(_LIBRARY + os.sep) or os.path.basename(file) in _MACHINERY:
        return True
    return any(name in file for name in _FRAMES_OF_LAYERS)


def _package_frame(frame: Any) -> str:
    parts = pathlib.PurePath(frame.file_name).parts
    roots = [i for i, part in enumerate(parts) if part in ("site-packages", "dist-packages")]
    name = "/".join(parts[roots[-1] + 1 :]) if roots else shown(frame.file_name)
    return f"{frame.function_name.rpartition('.')[2]} ({name}:{frame.line_num})"


def shown(file: str) -> str:
    """The file relative to the current folder, if it is inside of it."""
    whole, folder = pathlib.Path(file), pathlib.Path.cwd()
    return str(whole.relative_to(folder)) if whole.is_relative_to(folder) else file
