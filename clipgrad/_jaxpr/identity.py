"""The identity of a program: a key by which programs are told apart, or known to be the same."""

import dataclasses
import hashlib
import struct
from collections.abc import Callable, Hashable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.extend.core import JaxprEqn, Literal, Primitive

from clipgrad._jaxpr.programs import (
    CUSTOM_RULES,
    called_program,
    map_programs,
    opened,
    value_programs,
)

# Whose objects say by `==` whether they are the same; any other object is the same as itself alone.
_COMPARABLE = frozenset({"builtins", "jax", "jaxlib", "ml_dtypes", "numpy"})
_LIGHT = 2**16  # bytes of an array inside a program that is no burden to keep


class ProgramKey:
    """Equal to the keys of programs that compute the same from the same constants and inputs.

    It holds all objects that it is compared by, so that no other object has their addresses.

    Attributes:
      is_light: whether neither the key nor its program holds an object of a user's, such as a
        callback, whose closure may be of any size, or a large array.
    """

    __slots__ = ("_hash", "_parts", "is_light")

    def __init__(self, parts: Hashable, is_light: bool = False):
        self._parts, self._hash, self.is_light = parts, hash(parts), is_light

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ProgramKey) or self._hash != other._hash:
            return False
        return self._parts == other._parts


class Itself:
    """Equal to nothing but the wrapper of the same object, which it holds."""

    __slots__ = ("_held",)

    def __init__(self, held: Any):
        self._held = held

    def __hash__(self) -> int:
        return id(self._held)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Itself) and self._held is other._held


def program_key(program: Any) -> ProgramKey:
    """The key of a program, but for the values of its own constants, which may be given anew.

    Two programs have equal keys if they have the same primitives, types, effects and parameters in
    the same order. Parameters are compared by equality, functions among them by identity; numbers
    by their bits; programs inside, and the constants that these keep to themselves, by the same
    rules. Derivative rules of functions are not compared, so what is kept may not hold them. What
    cannot be compared has a key that equals no other.
    """
    description = _Description()
    try:
        return ProgramKey(description.whole(program), description.is_light)
    except Exception:
        return ProgramKey(Itself(object()))


def equation_text(equation: JaxprEqn) -> str | None:
    """Text that is equal in all processes for the same primitive, types and parameters.

    The programs inside that `value_programs` has are left out. None if there is no such text, as
    for an operation with rules of its own.
    """
    if equation.primitive.name in CUSTOM_RULES:
        return None
    inside = map_programs(equation, lambda _: None) if value_programs(equation) else {}
    try:
        return _text(_Description().one(equation, dict(equation.params) | inside))
    except Exception:
        return None


def _text(part: Any) -> str:
    if isinstance(part, tuple):
        return f"({','.join(map(_text, part))})"
    if isinstance(part, frozenset):
        return f"{{{','.join(sorted(map(_text, part)))}}}"
    part = part._held if isinstance(part, Itself) else part
    if isinstance(part, Primitive):
        return part.name
    is_kept_once = "<" not in getattr(part, "__qualname__", "<") and _is_of_a_package(part)
    if isinstance(part, type) or is_kept_once:
        return f"{part.__module__}.{part.__qualname__}"
    if " at 0x" in (text := repr(part)):
        raise ValueError("an object is the same as itself alone")
    return text


def _is_of_a_package(function: Any) -> bool:
    """Whether a function is of a package of JAX, and closes over nothing."""
    package = (getattr(function, "__module__", None) or "").partition(".")[0]
    return package in _COMPARABLE and not getattr(function, "__closure__", None)


class _Description:
    """Describes programs by nested tuples; each program inside is described once."""

    def __init__(self) -> None:
        self.is_light = True
        self._numbers: dict[Hashable, int] = {}  # of descriptions
        self._known: dict[Itself, int] = {}  # of programs

    def whole(self, program: Any) -> Hashable:
        """The description of a program and of all programs inside it."""
        jaxpr, constants = opened(program)
        self.is_light &= all(map(_is_small, constants))  # newer JAX holds them in programs inside
        return self._program(jaxpr, ()), tuple(self._numbers)

    def one(self, equation: JaxprEqn, params: dict) -> Hashable:
        """The description of an operation, of any operands."""
        types = [self(atom.aval) for atom in (*equation.invars, *equation.outvars)]
        found = Itself(equation.primitive), self(params), self(equation.effects), *types
        return found, tuple(self._numbers)

    def _inside(self, program: Any) -> int:
        itself = Itself(program)
        if itself not in self._known:
            described = self._program(*opened(program))
            self._known[itself] = self._numbers.setdefault(described, len(self._numbers))
        return self._known[itself]

    def _program(self, jaxpr: Any, constants: Iterable) -> Hashable:
        names: dict[Any, int] = {}

        def define(variables: Iterable) -> Hashable:
            new = list(variables)
            names.update(zip(new, range(len(names), len(names) + len(new)), strict=True))
            return tuple(self(v.aval) for v in new)

        def use(atoms: Iterable) -> Hashable:
            literal = lambda a: (self(a.aval), self(a.val))  # noqa: E731
            return tuple(literal(a) if isinstance(a, Literal) else names[a] for a in atoms)

        inputs = define(jaxpr.constvars), define(jaxpr.invars), tuple(map(self, constants))
        equations = tuple(self._equation(e, use, define) for e in jaxpr.eqns)
        return inputs, equations, use(jaxpr.outvars), self(jaxpr.effects)

    def _equation(self, equation: JaxprEqn, use: Callable, define: Callable) -> Hashable:
        params = dict(equation.params)
        if equation.primitive.name in CUSTOM_RULES:
            params = {"program": called_program(equation)}
        own = Itself(equation.primitive), Itself(equation.ctx)  # JAX has one for equal contexts
        parts = use(equation.invars), self(params), self(equation.effects)
        return *own, *parts, define(equation.outvars)

    def __call__(self, value: Any) -> Hashable:
        """The description of a parameter, a type, an effect, a number or an array."""
        if isinstance(value, Tracer):
            raise TypeError("a traced value has no numbers to compare")
        if hasattr(value, "eqns"):
            return "program", self._inside(value)
        kind = type(value)
        if isinstance(value, (tuple, list)):
            return kind, *map(self, value)
        if isinstance(value, (set, frozenset)):
            return kind, frozenset(map(self, value))
        if isinstance(value, dict):
            return kind, *((self(key), self(part)) for key, part in value.items())
        if isinstance(value, (np.ndarray, np.generic, jax.Array)):
            self.is_light &= _is_small(value)
            return _array_bits(value)
        if isinstance(value, (float, complex)):
            return kind, struct.pack("dd", value.real, value.imag)
        return self._object(kind, value)

    def _object(self, kind: type, value: Any) -> Hashable:
        if kind.__module__.partition(".")[0] not in _COMPARABLE:
            self.is_light = False
            return Itself(value)
        if dataclasses.is_dataclass(value):
            names = [field.name for field in dataclasses.fields(value)]
            if set(getattr(value, "__dict__", names)) <= set(names):
                return kind, *(self(getattr(value, name)) for name in names)
        if not callable(value):
            return kind, value
        self.is_light &= _is_of_a_package(value)
        return Itself(value)


def _is_small(value: Any) -> bool:
    return np.size(value) * getattr(value, "dtype", np.dtype(float)).itemsize <= _LIGHT


def _array_bits(value: Any) -> Hashable:
    aval = jax.typeof(value)
    is_key = jnp.issubdtype(aval.dtype, jax.dtypes.prng_key)
    numbers = np.asarray(jax.random.key_data(value) if is_key else value)
    return type(value), aval, numbers.dtype, hashlib.sha256(numbers.tobytes()).digest()
