"""Runs of the parts of a program: as JAX places them, or each on all devices of a mesh."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import JaxprEqn
from jax.sharding import PartitionSpec

from clipgrad._compat import to_varying
from clipgrad._programs import (
    ENTRANCES,
    Hook,
    Use,
    bind,
    device_count,
    held_programs,
    kind_of,
    low_jit,
    manual_axes,
    tracks_devices,
    use_of,
)


class Runs:
    """Runs parts of a program on values as they are.

    Parts whose compiled text is the same, such as equal layers, are compiled once in a diagnosis.

    Attributes:
      axes: how many axes of devices are in front of each array.
      hook: sees the equations of a part that holds several.
    """

    axes = 0
    hook = Hook()

    def __init__(self, programs: dict[Any, Any] | None = None):
        self.programs = {} if programs is None else programs

    def mapped(self, fun: Callable) -> Callable:
        """A function of what one device has, as one of what all have."""
        return fun

    def compiled(self, fun: Callable, *args: Any) -> Any:
        """The result of a function, compiled."""
        return self.executable(fun, *args)(*args)

    def executable(self, fun: Callable, *args: Any) -> Callable:
        """A function, compiled for arguments like these."""
        jitted: Any = low_jit(fun, keep_unused=True)
        lowered = jitted.lower(*args)
        text, types = lowered.as_text(), tuple(map(str, map(jax.typeof, jax.tree.leaves(args))))
        if "callback" in text:  # the text does not have the function that is called
            return lowered.compile()
        key = text, types, lowered.in_tree, lowered.out_tree
        if key not in self.programs:
            self.programs[key] = lowered.compile()
        return self.programs[key]

    def at(self, x: Any, step: int) -> Any:
        """The part of an array for a step, along its first axis."""
        return x[step]

    def constant(self, x: Any) -> Any:
        """A constant of the program, as a value."""
        return x if hasattr(x, "dtype") else jnp.asarray(x)


class OnDevices(Runs):
    """Runs parts of the program of a `shard_map`; each array has an axis of devices in front."""

    axes = 1

    def __init__(self, equation: JaxprEqn, programs: dict[Any, Any]):
        super().__init__(programs)
        self.equation = equation
        self._spec = PartitionSpec(manual_axes(equation))
        self.is_checked = tracks_devices(equation)
        self.hook = _Varying(manual_axes(equation)) if self.is_checked else Hook()

    def mapped(self, fun: Callable) -> Callable:
        """A function of what one device has, as one of what all have."""

        def one(*xs: Any) -> Any:
            return jax.tree.map(lambda y: jnp.asarray(y)[None], fun(*(x[0] for x in xs)))

        return lambda *xs: self._shard_map(one, (self._spec,) * len(xs), self._spec)(*xs)

    def spread(self, *operands: Any) -> list:
        """The part of each operand that a device gets."""
        specs = tuple(self.equation.params["in_specs"])
        return self._shard_map(lambda *xs: [x[None] for x in xs], specs, self._spec)(*operands)

    def collect(self, which: Sequence[int], parts: Sequence[Any]) -> Any:
        """Some results of the `shard_map`, of what each device has."""
        specs = [self.equation.params["out_specs"][j] for j in which]
        one = lambda *xs: [x[0] for x in xs]  # noqa: E731
        return self._shard_map(one, (self._spec,) * len(parts), specs, False)(*parts)

    def at(self, x: Any, step: int) -> Any:
        """The part of an array for a step, on each device."""
        return x[:, step]

    def constant(self, x: Any) -> Any:
        """A constant of the program, on each device."""
        x = super().constant(x)
        return jnp.broadcast_to(x, (device_count(self.equation), *x.shape))

    def _shard_map(self, fun: Callable, ins: Any, outs: Any, is_checked: bool = True) -> Callable:
        return jax.shard_map(
            fun,
            mesh=self.equation.params["mesh"],
            in_specs=ins,
            out_specs=outs,
            axis_names=set(manual_axes(self.equation)),
            check_vma=self.is_checked and is_checked,
        )


class _Varying(Hook):
    """Has each value inside of a `shard_map` vary over the devices, as the values of a tape do."""

    def __init__(self, axes: Sequence[str]):
        self._axes = frozenset(axes)

    def __call__(self, equation: JaxprEqn, inputs: list) -> Sequence | None:
        """The results; None where there are programs to go into."""
        if use_of(equation) is Use.VARIES:
            return inputs
        if held_programs(equation) and kind_of(equation) in ENTRANCES:
            return None
        inputs = [to_varying(x, self._axes) for x in inputs]
        return [to_varying(y, self._axes) for y in bind(equation, inputs)]
