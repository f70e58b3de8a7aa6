"""Checks of how a gradient behaves: repeated, scaled, compiled, batched, in parts."""

import dataclasses
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import clipgrad._programs as _programs
from clipgrad._check import vectors
from clipgrad._check.checked_function import CheckedFunction
from clipgrad._check.options import Options, refuse
from clipgrad._check.points import AS_COMPUTED, Point, masked_rows
from clipgrad._check.report import Failure
from clipgrad._check.tolerances import LOOSE, ORDERS, Precision, precision, tolerance_of
from clipgrad._check.user_code import UserError, call_user
from clipgrad._check.verdict import told_apart
from clipgrad._check.vjp import differentiated
from clipgrad._check.wrong_rules import lines_to_blame, named_rules

if TYPE_CHECKING:
    from clipgrad._check.log import Log

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


class Behavior(NamedTuple):
    """A check: the claims that it makes of a gradient, and whether they are of custom rules alone.

    Those would test JAX without a custom rule, and of wrong values they say nothing new.
    """

    claims: Callable[[Point, Options], Claims]
    is_of_rules: bool = False


def check_behavior(point: Point, log: "Log") -> None:
    """All checks of behavior that are not switched off."""
    without = ""
    if not point.witnesses.is_ruled:
        without = "it has only JAX's own operations, without a custom rule"
    elif any(failure.check == "value" for failure in log.failures):
        without = "values are wrong"
    for name, behavior in BEHAVIORS.items():
        if name in log.options.skip or not log.has_time(name):
            continue
        if without and behavior.is_of_rules:
            log.not_run[name] = without
            continue
        log.evaluations += 2
        try:
            failures = broken(point, name, behavior.claims(point, log.options), log.options)
            log.fail(_with_rules(point, name, failures, log.options))
        except NotRun as reason:
            log.not_run[name] = str(reason)
        except UserError as error:
            if error.is_lacking:
                log.not_run[name] = str(error)
            else:
                where = point.witnesses.function.names[0]
                log.failures.append(Failure(name, where, f"the gradient raises {error}"))


def _with_rules(point: Point, name: str, failures: list, options: Options) -> list[Failure]:
    """Failures with the lines of the rules that break the same claims without the others."""

    def blames(function: CheckedFunction) -> bool:
        vjp = differentiated(function, point.xs)
        witnesses = point.witnesses._replace(function=function)
        computed = vjp.rows(point.covectors)
        alone = dataclasses.replace(point, witnesses=witnesses, vjp=vjp, computed=computed)
        return bool(broken(alone, name, BEHAVIORS[name].claims(alone, options), options))

    lines = lines_to_blame(point.witnesses.function, blames) if failures else []
    return [f._replace(detail=f.detail + named_rules(lines)) for f in failures]


def broken(point: Point, check: str, claims: Iterable[Claim], options: Options) -> list[Failure]:
    """The failures of claims, that two computations of one gradient are equal; two are enough."""
    failures = [_broken(point, check, claim, options.tolerance) for claim in claims]
    return [failure for failure in failures if failure][:2]


def _broken(point: Point, check: str, claim: Claim, stated: float | None) -> Failure | None:
    """The failure of a claim, which names the worst element."""
    got, expected = claim.got, claim.expected
    if np.array_equal(got, expected, equal_nan=True):
        return None
    known, other = (np.where(np.isfinite(x), x, 0.0) for x in (expected, got))
    tolerance = tolerance_of(point.witnesses.narrow, stated)
    typical = point.typical(known[None])[0, point.leaf]
    allowed = tolerance(np.fmax(np.abs(known), np.abs(other)), ORDERS * typical)
    allowed = 0.0 if claim.exactly else allowed
    off = np.where(got == expected, 0.0, np.abs(got - expected))
    off = np.where(np.isnan(got) & np.isnan(expected), 0.0, np.where(np.isnan(off), np.inf, off))
    bad = off > allowed
    if bad.any() and np.isfinite(off[bad]).all() and not claim.exactly:
        bad &= off > allowed + 2 * point.rounding(AS_COMPUTED).max()  # each of both is off
    if not bad.any():
        return None
    worst = int(np.argmax(np.where(bad, off, -1)))
    same = "are not bit-identical" if claim.exactly else "differ"
    numbers = "worst: {}, expected {}".format(*told_apart(got[worst], expected[worst]))
    detail = f"{claim.text}: {int(bad.sum())} of {got.size} elements {same}; {numbers}"
    return Failure(check, point.witnesses.function.element(worst), detail)


def are_on_cpu(leaves) -> bool:
    """Whether these are JAX's arrays on CPUs, whose programs give the same bits each time."""
    placed = [isinstance(leaf, jax.Array) for leaf in leaves]
    return all(placed) and all(d.platform == "cpu" for leaf in leaves for d in leaf.devices())


def determinism(point: Point, options: Options) -> Claims:
    """Two calls of the pull-back agree, and so do two derivatives of the function."""
    first, expected, exactly = point.covectors[0], point.computed[0], are_on_cpu(point.xs)
    yield Claim(point.vjp(first), expected, "the pull-back called twice", exactly)
    text = "the function differentiated twice (randomness or side effects?)"
    yield Claim(point.vjp.again(point.xs)(first), expected, text, exactly)


def linearity(point: Point, options: Options) -> Claims:
    """The pull-back maps 0 to 0, multiples to multiples, negative ones too, and sums to sums.

    An element that is not finite is no multiple and no sum, and another check has said so.
    """
    u, gradient, finite = point.covectors[0], point.gradient[0], point.finite

    def claim(got: np.ndarray, expected: np.ndarray, what: str) -> Claim:
        return Claim(np.where(finite, got, 0.0), expected, NOT_LINEAR.format(what))

    row = precision(point.witnesses.narrow)
    large = row.factor if options.tolerance is None else LOOSE
    yield claim(point.vjp(0 * u), 0 * gradient, "a zero cotangent")
    for factor in (-large, 1 / large):
        scaled = point.vjp(factor * u) / factor
        is_outside = _leaves_the_range(gradient * factor, row)
        sign = "-" if factor < 0 else ""
        text = f"the cotangent times {sign}2 ** {np.log2(abs(factor)):g}"
        yield claim(np.where(is_outside, gradient, scaled), gradient, text)
    rows = masked_rows(point.witnesses.function, options.seed)
    parts = point.vjp(u * rows) + point.vjp(u * (1 - rows))
    yield claim(parts, gradient, "masked rows of a cotangent and of the others")
    ones = np.ones_like(u)
    parts = np.where(finite, point.vjp(ones), 0.0) + gradient
    yield claim(point.vjp(u + ones), parts, "the sum of a cotangent and a constant one")


def _leaves_the_range(scaled: np.ndarray, row: Precision) -> np.ndarray:
    """Where a multiple of a gradient overflows or underflows, which is no fault."""
    limits, size = jnp.finfo(row.range_of), np.abs(scaled)
    is_low = (size > 0) & (size < row.spare * float(limits.tiny))
    return is_low | ~(size + vectors.root_mean_square(scaled) <= float(limits.max) / 16)


def jit(point: Point, options: Options) -> Claims:
    """The gradient under `jax.jit` is the eager one, if that was computed."""
    if point.vjp.compiled is not None:
        return
    function = point.witnesses.function
    u = vectors.cotangent_leaves(point.covectors[0], function.outputs)
    gradient = _programs.low_jit(function.pull_back)
    got = _compiled(point, gradient, (point.xs, u), (function.fun, point.xs))
    text = "under jax.jit, compared with eager"
    yield Claim(vectors.gradient_vector(got), point.computed[0], text)


def vmap(point: Point, options: Options) -> Claims:
    """Under `jax.vmap`, over cotangents and over points, rows are those found one by one."""
    function, both = point.witnesses.function, vectors.stacked([point.xs, point.xs])
    cotangents = [vectors.cotangent_leaves(u, function.outputs) for u in point.covectors]
    pairs = vectors.stacked(cotangents)
    for xs, axes in ((both, (0, 0)), (point.xs, (None, 0))):
        mapped = _programs.low_jit(jax.vmap(function.pull_back, axes))
        gradients = _compiled(point, mapped, (xs, pairs), (jax.vmap(function.fun), both))
        for k in (0, 1):
            row = vectors.gradient_vector([np.asarray(leaf)[k] for leaf in gradients])
            text = f"under jax.vmap, row {k} compared with the row alone"
            yield Claim(row, point.computed[k], text)


def _compiled(point: Point, gradient: Callable, inputs: tuple, forward: tuple) -> list:
    """Run what is compiled; if that fails, the gradient is to blame or else the function."""
    try:
        return call_user(lambda: jax.block_until_ready(gradient(*inputs)))
    except UserError as error:
        if error.is_lacking:
            raise
        if not point.witnesses.is_ruled:
            raise NotRun(f"JAX's own derivative raises {error}") from error
        try:
            call_user(jax.eval_shape, *forward)
        except UserError as other:
            raise NotRun(f"the function itself raises {other}") from other
        raise


def outputs(point: Point, options: Options) -> Claims:
    """Single outputs have their parts of the gradient, and single inputs the gradient of all.

    A rule may be told which cotangents are zero, and which inputs are differentiated.
    """
    function, u, expected = point.witnesses.function, point.covectors[0], point.computed[0]
    program = function.program
    equations = [] if program is None else _programs.equations(program)
    sees_zeros = program is None or any(e.params.get("symbolic_zeros") for e in equations)
    total = np.zeros_like(expected)
    for k, (start, stop) in enumerate(vectors.areas(function.outputs)):
        single = np.zeros_like(u)
        single[start:stop] = u[start:stop]
        with_zeros = point.vjp(single) if len(function.outputs) > 1 else expected
        total += with_zeros
        if sees_zeros:
            alone = function._replace(
                fun=lambda xs, k=k: [function.fun(xs)[k]], outputs=[function.outputs[k]]
            )
            got = differentiated(alone, point.xs)(u[start:stop])
            text = f"{function.output_names[k]} alone, compared with zeros for the others"
            yield Claim(got, with_zeros, text)
    yield Claim(total, expected, "the sum of the pull-backs of single outputs, and all at once")
    for k, (start, stop) in enumerate(function.ranges if sees_zeros else []):
        alone = function._replace(fun=lambda x, k=k: function.alone(k, list(point.xs))(x[0]))
        got = expected.copy()
        got[start:stop] = differentiated(alone, point.xs[k : k + 1])(u)
        yield Claim(got, expected, f"{function.names[k]} alone, compared with all inputs at once")


# A further check is a function that yields claims, a row here, a name in `options.Check`, and a row
# in the table of `check_grads`; a test holds the three together. One that `is_of_rules` stands in
# the sentence below that table, too. Its sick program is a `@pair(name)` in the zoo of the tests.
# They run in this order.
BEHAVIORS: dict[str, Behavior] = {
    "determinism": Behavior(determinism),
    "linearity": Behavior(linearity),
    "jit": Behavior(jit),
    "vmap": Behavior(vmap, is_of_rules=True),
    "outputs": Behavior(outputs, is_of_rules=True),
}
# All that `skip` takes: what `check_grads` asks first, and these.
CHECKS = ("primal", "cotangent", "finite", "value", "points", "devices", *BEHAVIORS)


def skipped(skip: str | Collection[str]) -> frozenset[str]:
    """The checks to leave out; raises an error for others than there are."""
    names = [skip] if isinstance(skip, str) else list(skip)
    if unknown := [name for name in names if name not in CHECKS]:
        refuse("skip", unknown, f"some of {', '.join(CHECKS)}")
    return frozenset(names)
