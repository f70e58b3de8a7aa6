"""Checks of how a gradient behaves: repeated, scaled, compiled, batched, in parts."""

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import clipgrad._programs as _programs
from clipgrad._check import vectors
from clipgrad._check.log import Log
from clipgrad._check.points import OWN, Point, masked_rows
from clipgrad._check.report import Failure
from clipgrad._check.theirs import TheirError, theirs
from clipgrad._check.verdict import ORDERS, slack_of, told_apart
from clipgrad._check.witnesses import differentiated

# Powers of two by which a cotangent is multiplied; half precision has no room for more.
# Nor has what the user states a tolerance for, such as a loop that stops when it is near enough.
LARGE, LARGE_HALF, LARGE_LOOSE = 2.0**20, 2.0**4, 2.0
EIGHT_BITS = 8
NOT_LINEAR = (
    "the rule is not linear, the pull-back of {} (a clip that acts there? a loop that stops by its "
    'numbers? write skip="linearity")'
)


class NotRun(Exception):
    """A check that cannot be run, and why."""


class Claim(NamedTuple):
    """Two computations of one gradient that must be equal; to the last bit if `exactly`."""

    got: np.ndarray
    expected: np.ndarray
    text: str
    exactly: bool = False


Claims = Iterator[Claim]


def check_behavior(point: Point, log: Log) -> None:
    """All checks of behavior that are not switched off."""
    without = ""
    if not point.of.is_ruled:
        without = "it has only JAX's own operations, without a custom rule"
    elif any(failure.check == "value" for failure in log.failures):
        without = "values are wrong"
    for name, claims in BEHAVIORS.items():
        if name in log.options.skip or not log.has_time(name):
            continue
        if without and name in OF_RULES:
            log.not_run[name] = without
            continue
        log.evaluations += 2
        try:
            judge_claims(point, name, claims(point, log), log)
        except NotRun as reason:
            log.not_run[name] = str(reason)
        except TheirError as error:
            if error.is_lacking:
                log.not_run[name] = str(error)
            else:
                where = point.of.function.names[0]
                log.failures.append(Failure(name, where, f"the gradient raises {error}"))


def judge_claims(point: Point, check: str, claims: Iterable[Claim], log: Log) -> None:
    """Compare each two computations of one gradient; two failures of a check are enough."""
    found = [_broken(point, check, claim, log) for claim in claims]
    log.fail([failure for failure in found if failure][:2])


def _broken(point: Point, check: str, claim: Claim, log: Log) -> Failure | None:
    """The failure of a claim, which names the worst element."""
    got, expected = claim.got, claim.expected
    if np.array_equal(got, expected, equal_nan=True):
        return None
    known, other = (np.where(np.isfinite(x), x, 0.0) for x in (expected, got))
    slack = slack_of(point.of.narrow, log.options.tolerance)
    typical = point.typical(known[None])[0, point.leaf]
    allowed = slack(np.fmax(np.abs(known), np.abs(other)), ORDERS * typical)
    allowed = 0.0 if claim.exactly else allowed
    off = np.where(got == expected, 0.0, np.abs(got - expected))
    off = np.where(np.isnan(got) & np.isnan(expected), 0.0, np.where(np.isnan(off), np.inf, off))
    bad = off > allowed
    if bad.any() and np.isfinite(off[bad]).all() and not claim.exactly:
        bad &= off > allowed + 2 * point.rounding(OWN).max()  # each of both is off
    if not bad.any():
        return None
    worst = int(np.argmax(np.where(bad, off, -1)))
    same = "are not bit-identical" if claim.exactly else "differ"
    numbers = "worst: {}, expected {}".format(*told_apart(got[worst], expected[worst]))
    detail = f"{claim.text}: {int(bad.sum())} of {got.size} elements {same}; {numbers}"
    return Failure(check, point.of.function.element(worst), detail)


def are_on_cpu(leaves) -> bool:
    """Whether these are JAX's arrays on CPUs, whose programs give the same bits each time."""
    placed = [isinstance(leaf, jax.Array) for leaf in leaves]
    return all(placed) and all(d.platform == "cpu" for leaf in leaves for d in leaf.devices())


def determinism(point: Point, log: Log) -> Claims:
    """Two calls of the pull-back agree, and so do two derivatives of the function."""
    first, expected, exactly = point.covectors[0], point.computed[0], are_on_cpu(point.xs)
    yield Claim(point.vjp(first), expected, "the pull-back called twice", exactly)
    anew = differentiated(point.of.function, point.xs)(first)
    text = "the function differentiated twice (randomness or side effects?)"
    yield Claim(anew, expected, text, exactly)


def linearity(point: Point, log: Log) -> Claims:
    """The pull-back maps 0 to 0, multiples to multiples, negative ones too, and sums to sums.

    An element that is not finite is no multiple and no sum, and another check has said so.
    """
    u, gradient, finite = point.covectors[0], point.gradient[0], point.finite

    def claim(got: np.ndarray, expected: np.ndarray, what: str) -> Claim:
        return Claim(np.where(finite, got, 0.0), expected, NOT_LINEAR.format(what))

    narrow = jnp.finfo(point.of.narrow)
    is_half, has_few_bits = narrow.bits <= 16, narrow.bits <= EIGHT_BITS
    large = LARGE_HALF if is_half else LARGE
    large = LARGE_LOOSE if has_few_bits or log.options.tolerance is not None else large
    yield claim(point.vjp(0 * u), 0 * gradient, "a zero cotangent")
    for factor in (-large, 1 / large):
        scaled = point.vjp(factor * u) / factor
        # What overflows or underflows because of the factor is no fault.
        limits, size = jnp.finfo("float16" if is_half else "float32"), np.abs(gradient * factor)
        limits = narrow if has_few_bits else limits
        low = (size > 0) & (size < float(limits.tiny) * (1 if has_few_bits else 1e3))
        typical = vectors.root_mean_square(gradient) * abs(factor)
        outside = low | ~(size + typical <= float(limits.max) / 16)
        sign = "-" if factor < 0 else ""
        text = f"the cotangent times {sign}2 ** {np.log2(abs(factor)):g}"
        yield claim(np.where(outside, gradient, scaled), gradient, text)
    rows = masked_rows(point.of.function, log.options.seed)
    parts = point.vjp(u * rows) + point.vjp(u * (1 - rows))
    yield claim(parts, gradient, "masked rows of a cotangent and of the others")
    ones = np.ones_like(u)
    parts = np.where(finite, point.vjp(ones), 0.0) + gradient
    yield claim(point.vjp(u + ones), parts, "the sum of a cotangent and a constant one")


def jit(point: Point, log: Log) -> Claims:
    """The gradient under `jax.jit` is the eager one."""
    function = point.of.function
    u = vectors.cotangent_leaves(point.covectors[0], function.outputs)
    got = _compiled(point, function.pull_back, (point.xs, u), (function.fun, point.xs))
    text = "under jax.jit, compared with eager"
    yield Claim(vectors.gradient_vector(got), point.computed[0], text)


def vmap(point: Point, log: Log) -> Claims:
    """Under `jax.vmap`, over cotangents and over points, rows are those found one by one."""
    function, both = point.of.function, vectors.stacked([point.xs, point.xs])
    cotangents = [vectors.cotangent_leaves(u, function.outputs) for u in point.covectors]
    pairs = vectors.stacked(cotangents)
    for xs, axes in ((both, (0, 0)), (point.xs, (None, 0))):
        mapped = jax.vmap(function.pull_back, axes)
        found = _compiled(point, mapped, (xs, pairs), (jax.vmap(function.fun), both))
        for k in (0, 1):
            row = vectors.gradient_vector([np.asarray(leaf)[k] for leaf in found])
            text = f"under jax.vmap, row {k} compared with the row alone"
            yield Claim(row, point.computed[k], text)


def _compiled(point: Point, gradient: Callable, inputs: tuple, forward: tuple) -> list:
    """Compile and run; if that fails, the gradient is to blame unless the function fails too."""
    try:
        return theirs(lambda: jax.block_until_ready(_programs.low_jit(gradient)(*inputs)))
    except TheirError as error:
        if error.is_lacking:
            raise
        if not point.of.is_ruled:
            raise NotRun(f"JAX's own derivative raises {error}") from error
        try:
            theirs(jax.eval_shape, *forward)
        except TheirError as other:
            raise NotRun(f"the function itself raises {other}") from other
        raise


def outputs(point: Point, log: Log) -> Claims:
    """Single outputs have their parts of the gradient, and single inputs the gradient of all.

    A rule may be told which cotangents are zero, and which inputs are differentiated.
    """
    function, u, expected = point.of.function, point.covectors[0], point.computed[0]
    program = function.program
    found = [] if program is None else _programs.equations(program)
    is_told = program is None or any(e.params.get("symbolic_zeros") for e in found)
    total = np.zeros_like(expected)
    for k, (start, stop) in enumerate(vectors.areas(function.outputs)):
        single = np.zeros_like(u)
        single[start:stop] = u[start:stop]
        with_zeros = point.vjp(single) if len(function.outputs) > 1 else expected
        total += with_zeros
        if is_told:
            alone = function._replace(
                fun=lambda xs, k=k: [function.fun(xs)[k]], outputs=[function.outputs[k]]
            )
            got = differentiated(alone, point.xs)(u[start:stop])
            text = f"{function.output_names[k]} alone, compared with zeros for the others"
            yield Claim(got, with_zeros, text)
    yield Claim(total, expected, "the sum of the pull-backs of single outputs, and all at once")
    for k, (start, stop) in enumerate(function.ranges if is_told else []):
        alone = function._replace(fun=lambda x, k=k: function.alone(k, point.xs)(x[0]))
        got = expected.copy()
        got[start:stop] = differentiated(alone, point.xs[k : k + 1])(u)
        yield Claim(got, expected, f"{function.names[k]} alone, compared with all inputs at once")


BEHAVIORS: dict[str, Callable[[Point, Log], Claims]] = {
    claims.__name__: claims for claims in (determinism, linearity, jit, vmap, outputs)
}
# Without a custom rule they would test JAX, and of wrong values they say nothing new.
OF_RULES = {"vmap", "outputs"}
