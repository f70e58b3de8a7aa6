"""The gradient as a user's program computes it, and the exact ones to compare it with."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

import clipgrad._jaxpr as _jaxpr
import clipgrad._trees as _trees
from clipgrad._check.differences import in_float64, without_copy
from clipgrad._check.points import cotangents
from clipgrad._check.subject import CheckSubject
from clipgrad._check.tolerances import PRECISE
from clipgrad._check.widening import Widened

# Elements of a point that is widened before a program runs: one program serves it in any type. For
# more, each leaf is widened where it is needed.
WIDENED_FIRST = 2**16
DRAWS = 4  # of cotangents, until no leaf's effects cancel in one of them


class VJP(NamedTuple):
    """The result of `jax.vjp` at one point: the outputs, and the map from cotangents."""

    outputs: list[jax.Array]
    pull: Callable[[Sequence], tuple]
    like: Sequence[jax.Array]

    def __call__(self, covector: np.ndarray) -> np.ndarray:
        """The real gradient for a real cotangent vector."""
        return self.rows(covector[None])[0]

    def rows(self, covectors: np.ndarray) -> np.ndarray:
        """The gradients for several cotangents, shape (cotangents, inputs)."""
        found = (self.pull(_trees.cotangent_leaves(u, self.like))[0] for u in covectors)
        return _trees.gradient_rows(found, len(covectors))


def differentiated(subject: CheckSubject, xs: Sequence[jax.Array]) -> VJP:
    """`jax.vjp` at a point, outside of `jax.jit` as in a user's program."""
    return VJP(*jax.vjp(subject.fun, list(xs)), subject.outputs)


# Needed by test_no_cotangent_cancels_what_an_input_does_to_several_outputs.
def drawn(subject: CheckSubject, vjp: VJP, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """The cotangents of a check and the gradients for them: each sees every leaf that has effects.

    The effects of a number that is there in two outputs cancel in a cotangent that sums to zero.
    """
    largest: Any = 0.0
    for k in range(DRAWS):
        covectors = cotangents(subject, seed + k)
        gradient = vjp.rows(covectors)
        sizes = np.stack([np.abs(gradient[:, a:b]).max(axis=1) for a, b in subject.ranges])
        largest = np.fmax(largest, sizes.max(axis=1, keepdims=True))
        if np.all(~(sizes <= PRECISE * largest) | (largest == 0) & (k > 0)):
            return covectors, gradient
        gradient = None  # its memory
    covectors = cotangents(subject, seed)
    return covectors, vjp.rows(covectors)


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
        return self.pull_back(constants, leaves[: self._count], hook)(leaves[self._count :])[0]

    def pull_back(self, constants: Sequence, xs: list, hook: _jaxpr.Hook | None) -> Callable:
        """The map from cotangents to gradients."""
        return jax.vjp(lambda xs: self._of.call(constants, xs, hook), xs)[1]


class Gradient:
    """A gradient as a function of inputs and a cotangent, to be evaluated in float64.

    Args:
      function: the widened program of a rule, or plain AD.
      constants: the constants of the program.
      outputs: the outputs at the base point, for shapes and dtypes.
    """

    def __init__(self, function: Widened | PlainAD, constants: Sequence, outputs: Sequence):
        self.function, self.constants, self.outputs = function, constants, outputs
        self.moved: Callable | None = None  # the program with its roundings, once it is traced
        # Of a call without a hook: calls with any hook raise it as well.
        self._error: Exception | None = None

    def __call__(self, xs, covectors: np.ndarray, hook: Callable | None = None) -> np.ndarray:
        """The gradients in float64 for each cotangent, shape (cotangents, inputs).

        Compiled programs are kept by `hook`, which makes a hook.
        """
        found = (self.leaves(xs, row, hook) for row in covectors)
        return _trees.gradient_rows(found, len(covectors))

    def leaves(self, xs, covector: np.ndarray, hook: Callable | None = None) -> list[jax.Array]:
        """The gradient in float64 for one cotangent, leaf by leaf."""
        function = self.function
        if self._error is not None:
            raise self._error

        def call(constants, leaves):
            wide = [x.astype(_trees.wide_dtype(x.dtype)) for x in leaves]
            return function.call(constants, wide, hook and hook())

        run = _jaxpr.kept_by_key((hook, function.key), lambda: _jaxpr.low_jit(call))
        with in_float64():
            size = sum(x.size for x in xs)
            _trees.give_back(size)
            widened = _trees.widened_leaf if size <= WIDENED_FIRST else without_copy
            leaves = [widened(x) for x in xs]
            like = [jax.ShapeDtypeStruct(y.shape, _trees.wide_dtype(y.dtype)) for y in self.outputs]
            cotangent = _trees.cotangent_leaves(covector, like)
            try:
                return jax.block_until_ready(run(self.constants, [*leaves, *cotangent]))
            except Exception as error:
                self._error = None if hook else error.with_traceback(None)
                raise
