"""The gradient as a user's program computes it, and the exact ones to compare it with."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

import clipgrad._jaxpr as _jaxpr
import clipgrad._trees as _trees
from clipgrad._check.differences import in_float64
from clipgrad._check.kept import kept_by_key
from clipgrad._check.subject import CheckSubject
from clipgrad._check.widening import Jitter, MovedConstants, Widened


class VJP(NamedTuple):
    """The result of `jax.vjp` at one point: the outputs, and the map from cotangents."""

    outputs: list[jax.Array]
    pull: Callable[[Sequence], tuple]
    like: Sequence[jax.Array]

    def __call__(self, covector: np.ndarray) -> np.ndarray:
        """The real gradient for a real cotangent vector."""
        return _trees.gradient_vector(self.pull(_trees.cotangent_leaves(covector, self.like))[0])

    def rows(self, covectors: np.ndarray) -> np.ndarray:
        """The gradients for several cotangents, shape (cotangents, inputs)."""
        found = (self.pull(_trees.cotangent_leaves(u, self.like))[0] for u in covectors)
        return _trees.gradient_rows(found, len(covectors))


def differentiated(subject: CheckSubject, xs: Sequence[jax.Array]) -> VJP:
    """`jax.vjp` at a point, outside of `jax.jit` as in a user's program."""
    return VJP(*jax.vjp(subject.fun, list(xs)), subject.outputs)


def has_rules(subject: CheckSubject) -> bool:
    """Whether a derivative rule is not JAX's own, as far as can be seen."""
    if subject.program is None:
        return True
    names = {equation.primitive.name for equation in _jaxpr.equations(subject.program)}
    return bool(names & _jaxpr.FOREIGN_PROGRAMS) or any(n.startswith("custom_") for n in names)


class PlainAD:
    """The VJP of a widened function, as a function of `count` inputs and the cotangent.

    It is exact for every element at the price of one backward pass, and nominates suspects. It is
    never the last word: it shares JAX's rules, and has subgradients of its own at kinks.
    """

    def __init__(self, of: "Widened | PlainAD", count: int):
        self._of, self._count = of, count
        self.key, self.looks_at_bits = ("VJP", of.key), of.looks_at_bits

    def call(self, constants: Sequence, leaves: list, hook: _jaxpr.Hook | None = None) -> list:
        """The gradient under a hook, in float64 if there is none."""
        pull = jax.vjp(lambda xs: self._of.call(constants, xs, hook), leaves[: self._count])[1]
        return pull(leaves[self._count :])[0]


class Gradient:
    """A gradient as a function of inputs and a cotangent, to be evaluated in float64.

    Args:
      function: the widened program of a rule, or plain AD.
      constants: the constants of the program.
      outputs: the outputs at the base point, for shapes and dtypes.
    """

    def __init__(self, function: Widened | PlainAD, constants: Sequence, outputs: Sequence):
        self.function, self.constants, self._outputs = function, constants, outputs

    def __call__(self, xs, covectors: np.ndarray, name: Any = "", hook: Any = None) -> np.ndarray:
        """The gradients in float64 for each cotangent, shape (cotangents, inputs).

        `name` tells one hook from another, whose compiled programs are kept.
        """
        function = self.function

        def call(constants, leaves):
            wide = [x.astype(_trees.wide_dtype(x.dtype)) for x in leaves]
            return function.call(constants, wide, hook)

        run = kept_by_key((name, function.key), lambda: _jaxpr.low_jit(call))
        with in_float64():
            leaves = [np.asarray(x) for x in xs]
            like = [
                jax.ShapeDtypeStruct(y.shape, _trees.wide_dtype(y.dtype)) for y in self._outputs
            ]
            cotangents = [_trees.cotangent_leaves(row, like) for row in covectors]
            found = (run(self.constants, [*leaves, *u]) for u in cotangents)
            return _trees.gradient_rows(found, len(cotangents))

    def moved_by_constants(self, xs, covectors: np.ndarray) -> np.ndarray:
        """The change of the gradient when every constant moves by one rounding of its type."""
        return self._moved_by(MovedConstants, xs, covectors)

    def moved_by_rounding(
        self, xs, covectors: np.ndarray, eps: float = np.finfo(np.float64).eps
    ) -> np.ndarray:
        """The change of the gradient when every result of an operation moves by one rounding."""
        many = Jitter.MANY
        once, often = (self._moved_by(Jitter, xs, covectors, by * eps) for by in (1, many))
        # The jump at a tie is as large whatever the roundings that untie it.
        return np.where(often > Jitter.MANY / 4 * once, once, 0.0)

    def _moved_by(self, hook: Callable, xs, covectors: np.ndarray, *options: float) -> np.ndarray:
        exact = self(xs, covectors)
        moved = [
            self(xs, covectors, (hook, seed, *options), hook(seed, *options)) for seed in (0, 1)
        ]
        return np.max([np.abs(gradient - exact) for gradient in moved], axis=0)

    def in_own_types(self, xs, covectors: np.ndarray) -> np.ndarray:
        """The gradients in the types of the program.

        Eagerly, since a compiler may simplify away just what loses precision.
        """
        inputs = ([*xs, *_trees.cotangent_leaves(row, self._outputs)] for row in covectors)
        found = (self.function.call(self.constants, x, _jaxpr.NoRules(np.float64)) for x in inputs)
        return _trees.gradient_rows(found, len(covectors))


def traced_vjp(subject: CheckSubject) -> Any:
    """The VJP of a function, its rules as written, as a program of inputs and cotangents."""
    cotangents = [jax.ShapeDtypeStruct(y.shape, y.dtype) for y in subject.outputs]
    return jax.make_jaxpr(subject.pull_back)(subject.inputs, cotangents)
