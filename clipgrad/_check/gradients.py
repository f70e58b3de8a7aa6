"""The gradient as a user's program computes it, and the exact ones to compare it with."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.extend.core import Primitive, primitives

import clipgrad._jaxpr as _jaxpr
from clipgrad._check.contract import primal
from clipgrad._check.differences import on_cpu
from clipgrad._check.evaluation import widened_program
from clipgrad._check.programs import is_steady, kept_by_key, low_jit, quick_jit
from clipgrad._check.subject import CheckSubject
from clipgrad._check.tolerances import STOPPED
from clipgrad._check.vectors import (
    cotangent_leaves,
    from_rows,
    gradient_vector,
    to_numpy,
    wide_dtype,
    widened_leaf,
)
from clipgrad._check.widening import OPAQUE, Unsupported, Widened

OWN = frozenset(p for p in vars(primitives).values() if isinstance(p, Primitive))
FOREIGN = ("custom_", *sorted(OPAQUE))


class VJP(NamedTuple):
    """The result of `jax.vjp` at one point: the outputs, and the map from cotangents."""

    outputs: list[jax.Array]
    pull: Callable[[Sequence], list]
    like: Sequence[jax.Array]

    def __call__(self, covector: np.ndarray) -> np.ndarray:
        """The real gradient for a real cotangent vector."""
        return gradient_vector(self.pull(cotangent_leaves(covector, self.like)))

    def rows(self, covectors: np.ndarray) -> np.ndarray:
        """The gradients for several cotangents, shape (cotangents, inputs)."""
        return np.stack([self(covector) for covector in covectors])


class Differentiate(NamedTuple):
    """Differentiates a function at a point, `compiled` as one program or eagerly.

    `steady` is False if the function has no custom rule, but other operations in other contexts.
    """

    call: Callable[[Sequence[jax.Array]], VJP]
    compiled: bool
    steady: bool = True

    def __call__(self, xs: Sequence[jax.Array]) -> VJP:
        """`jax.vjp` at a point."""
        return self.call(xs)


def differentiator(subject: CheckSubject) -> Differentiate:
    """How to differentiate the function at a point.

    It is differentiated eagerly, as in a user's program, if it has rules of its own or does not do
    the same in every context. JAX's own operations are compiled as one program, unless the
    compiler simplifies their rounding away.
    """
    eager = Differentiate(lambda xs: eagerly(subject, xs), compiled=False)
    if not is_plain_subject(subject):
        return eager
    if not is_steady(subject.fun, subject.program, subject.inputs):
        return eager._replace(steady=False)
    compiled = Differentiate(_compiled_vjp(subject), compiled=True)
    try:
        same = not primal(subject, compiled(subject.inputs).outputs, "compiled")
    except Exception:
        same = False
    return compiled if same else eager


def is_plain_subject(subject: CheckSubject) -> bool:
    """Whether the function is made of JAX's own operations alone, with no custom rule."""
    if subject.program is None:
        return False
    return all(
        equation.primitive in OWN and not equation.primitive.name.startswith(FOREIGN)
        for equation in _jaxpr.equations(subject.program)
    )


def has_rules(subject: CheckSubject) -> bool:
    """Whether a derivative rule is not JAX's own, as far as can be seen."""
    if subject.program is None:
        return True
    names = {equation.primitive.name for equation in _jaxpr.equations(subject.program)}
    return bool(names & (_jaxpr.CUSTOM_RULES | OPAQUE))


def eagerly(subject: CheckSubject, xs: Sequence[jax.Array], pulled: Callable | None = None) -> VJP:
    """`jax.vjp` outside of `jax.jit`; `pulled(pull, cotangents)` calls the pull-back."""
    outputs, pull = jax.vjp(subject.fun, list(xs))
    pulled = pulled or (lambda pull, cotangents: pull(cotangents))
    return VJP(outputs, lambda cts: pulled(pull, list(cts))[0], subject.outputs)


def _compiled_vjp(subject: CheckSubject) -> Callable[[Sequence[jax.Array]], VJP]:
    @quick_jit
    def program(xs, cotangents):
        outputs, pull = jax.vjp(subject.fun, xs)
        return outputs, pull(cotangents)[0]

    def differentiate(xs):
        xs = list(xs)
        outputs, _ = program(xs, subject.outputs)
        return VJP(outputs, lambda cts: program(xs, list(cts))[1], subject.outputs)

    return differentiate


class Exact:
    """A gradient evaluated in float64: plain AD's, or the rule's own.

    Args:
      run: the compiled program, from constants, inputs and a cotangent to the gradient.
      nudged: makes the same program with its constants off by one rounding, for a seed.
      constants: the program's constants.
      outputs: the outputs at the base point, for shapes and dtypes.
    """

    def __init__(self, run: Callable, nudged: Callable, constants: Sequence, outputs: Sequence):
        self._run, self._nudged = run, nudged
        self._constants, self._outputs = constants, outputs

    def __call__(self, xs: Sequence[jax.Array], covectors: np.ndarray) -> np.ndarray:
        """The gradients for each cotangent, shape (cotangents, inputs)."""
        return self._gradients(self._run, xs, covectors)

    def moved_by_constants(self, xs, covectors: np.ndarray) -> np.ndarray:
        """How far the gradient moves when every constant does by one rounding of its type."""
        exact = self(xs, covectors)
        moved = [self._gradients(self._nudged(seed), xs, covectors) for seed in (0, 1)]
        return np.max([np.abs(gradient - exact) for gradient in moved], axis=0)

    def _gradients(self, run, xs, covectors) -> np.ndarray:
        with jax.enable_x64(True), on_cpu():
            leaves = [np.asarray(widened_leaf(x)) for x in xs]
            like = [jax.ShapeDtypeStruct(y.shape, wide_dtype(y.dtype)) for y in self._outputs]
            cotangents = [cotangent_leaves(row, like) for row in covectors]
            rows = [gradient_vector(run(self._constants, leaves, u)) for u in cotangents]
        return np.stack(rows)


class GradientOf:
    """Plain AD's VJP of a widened function, as a function of `count` inputs and the cotangent."""

    def __init__(self, widened: "Widened | GradientOf", count: int):
        self._widened, self._count = widened, count
        self.text, self.narrow, self.stops = widened.text, widened.narrow, widened.stops

    def call(self, constants, leaves):
        """The gradient in float64."""
        return self._pull(self._widened.call, constants, leaves)

    def native(self, constants, leaves):
        """The gradient in the program's own types."""
        return self._pull(self._widened.native, constants, leaves)

    def nudged(self, seed: int) -> Callable:
        """The gradient in float64, with every constant off by one rounding of its type."""
        return lambda constants, leaves: self._pull(self._widened.nudged(seed), constants, leaves)

    def _pull(self, call, constants, leaves):
        pull = jax.vjp(lambda xs: call(constants, xs), leaves[: self._count])[1]
        return pull(leaves[self._count :])[0]


def plain_ad(
    widened: Widened | GradientOf, program: Any, outputs: Sequence, name: str = "plain AD"
) -> Exact:
    """JAX's own derivative of the widened function, every custom rule stripped.

    It is exact for every element at the price of one backward pass, and nominates suspects. It is
    never the last word: it shares JAX's rules, and has subgradients of its own at kinks.
    """

    def pullback(call):
        def run(constants, xs, cotangent):
            return jax.vjp(lambda xs: call(constants, xs), xs)[1](cotangent)[0]

        return low_jit(run)

    return _exact(name, pullback, widened, program, outputs)


def traced_vjp(subject: CheckSubject) -> Any:
    """The function's own VJP as a program of inputs and cotangents, or the error in tracing it."""
    cotangents = [jax.ShapeDtypeStruct(y.shape, y.dtype) for y in subject.outputs]
    try:
        return jax.make_jaxpr(lambda xs, u: jax.vjp(subject.fun, xs)[1](u)[0])(
            subject.inputs, cotangents
        )
    except Exception as error:
        return error


def rule_in_float64(subject: CheckSubject, program: Any) -> Exact:
    """The function's own VJP, its rules as written, evaluated in float64.

    Raises:
      Unsupported: it cannot be traced or widened, or looks at the bits of its numbers.
    """
    if isinstance(program, Exception):
        raise Unsupported(f"it cannot be traced: {type(program).__name__}") from program
    widened = widened_program(program)
    if widened.looks_at_bits:
        raise Unsupported("the function looks at the bits of its numbers")

    def rows(call):
        def run(constants, xs, cotangent):
            return call(constants, [*xs, *cotangent])

        return low_jit(run)

    return _exact("rule", rows, widened, program, subject.outputs)


def stops_matter(widened: Widened, subject: CheckSubject, direction: np.ndarray) -> bool:
    """Whether the slope along a direction would be another, were it not for `stop_gradient`.

    The maximum that a softmax subtracts is behind one, and does not matter.
    """
    if not widened.stops:
        return False
    program = subject.program

    def run(constants, xs, tangents):
        both = (widened.call, widened.freely)
        calls = [lambda xs, call=call: call(constants, xs) for call in both]
        return [jax.jvp(call, (xs,), (tangents,)) for call in calls]

    with jax.enable_x64(True), on_cpu():
        xs = [np.asarray(widened_leaf(x)) for x in subject.inputs]
        compiled = kept_by_key(("stops", widened.text), lambda: low_jit(run))
        found = compiled(_jaxpr.opened(program)[1], xs, from_rows(direction, xs))
    (values, stopped), (_, free) = found
    values, stopped, free = (to_numpy(leaves) for leaves in (values, stopped, free))
    size = np.abs(values).max() + np.abs(stopped).max()
    return bool(np.abs(stopped - free).max() > STOPPED * size)


def _exact(name: str, compile: Callable, widened, program: Any, outputs) -> Exact:
    key = (name, widened.text)

    def nudged(seed):
        return kept_by_key((*key, seed), lambda: compile(widened.nudged(seed)))

    run = kept_by_key(key, lambda: compile(widened.call))
    return Exact(run, nudged, _jaxpr.opened(program)[1], outputs)


def rounding_of_plain_ad(
    widened: Widened | GradientOf, program: Any, exact: np.ndarray, xs, covectors, outputs
) -> np.ndarray:
    """How far the stripped function's own gradient is off, for want of precision.

    Eagerly, since a compiler may simplify away just what loses precision.
    """
    call = functools.partial(widened.native, _jaxpr.opened(program)[1])
    _, pull = jax.vjp(call, list(xs))
    cotangents = [cotangent_leaves(row, outputs) for row in covectors]
    native = np.stack([gradient_vector(pull(leaves)[0]) for leaves in cotangents])
    return np.abs(native - exact)
