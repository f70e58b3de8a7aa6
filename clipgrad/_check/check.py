"""`Check`, the central record: a function, its gradients, and how its slopes are measured."""

import contextlib
import dataclasses
import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

import clipgrad._jaxpr as _jaxpr
import clipgrad._trees as _trees
from clipgrad._check import contract, tolerances
from clipgrad._check.beside import Beside, kept_beside
from clipgrad._check.differences import Differences, are_on_cpu
from clipgrad._check.evaluation import (
    Chaotic,
    choose,
    jumped,
    masked,
    settled_values,
    unseen_notes,
    why_not,
)
from clipgrad._check.further import EQUALITY, NOTHING, disordered, nearby, sorted_axes
from clipgrad._check.gradients import (
    VJP,
    Gradient,
    PlainAD,
    differentiated,
    drawn,
    has_rules,
)
from clipgrad._check.loops import Longer, found_by_loops, has_loops
from clipgrad._check.options import Options
from clipgrad._check.points import (
    COTANGENTS,
    NEARBY,
    Point,
    Scales,
    cotangents,
    make_point,
    moved_apart,
)
from clipgrad._check.report import Failure
from clipgrad._check.rounding import CONSTANTS, OF_RULE, OWN, gradient_movement
from clipgrad._check.search import Finding, Judge
from clipgrad._check.subject import CheckSubject
from clipgrad._check.tolerances import (
    Excuse,
    NearbySizes,
    Tolerance,
    make_tolerance,
    mean_along,
    narrowest,
)
from clipgrad._check.verdicts import (
    KINK,
    OK,
    ROUNDING,
    UNSEEN,
    VANISHED,
    are_verified,
)
from clipgrad._check.widening import Widened, widened_program
from clipgrad._errors import first_line
from clipgrad._program import Parts

STOPS = "values under jax.lax.stop_gradient are held fixed, as JAX differentiates them"
NOT_CONVERGED = (
    "loops of a fixed number of iterations still converge in float64: the formula is judged to "
    "what as many again change"
)
CARRIED = (
    "numbers are carried as integers, which hides them from AD: slopes alone judge, by steps that "
    "are not below the roundings of {}"
)
# Parts of a full move to a further point, tried until the function is finite there.
REACHES = (1.0, 2.0**-3, 2.0**-6, 2.0**-10)
# Make hooks: without `stop_gradient`, and with loops that run on.
FREELY = functools.partial(_jaxpr.Widen, np.float64, lambda x: x)
RUN_ON = functools.partial(Longer, np.float64)

Errors = Callable[[np.ndarray], np.ndarray]  # of elements, by their indices


@dataclasses.dataclass
class Log:
    """The findings so far; `hidden` elements reach nothing but outputs that are left out."""

    options: Options
    failures: list[Failure] = dataclasses.field(default_factory=list)
    notes: list[str] = dataclasses.field(default_factory=list)
    not_run: dict[str, str] = dataclasses.field(default_factory=dict)
    evaluations: int = 0
    verified: int = 0
    at_kinks: int = 0
    elements: int = 0
    vanished: Any = False
    hidden: Any = False
    started: float = dataclasses.field(default_factory=time.monotonic)
    precision: str = "no precision"
    devices: list[str] = dataclasses.field(default_factory=list)

    def fail(self, failures: Sequence[Failure]) -> None:
        """Record failures, but not of checks that are switched off."""
        self.failures += [f for f in failures if f.check not in self.options.skip]

    def is_late(self) -> bool:
        """Whether the time budget is spent."""
        budget = self.options.time_budget
        return budget is not None and time.monotonic() - self.started > budget

    def has_time(self, name: str) -> bool:
        """Whether there is time left for a check; notes that it was not run if there is none."""
        if self.is_late():
            self.not_run[name] = f"the time budget of {self.options.time_budget:g} s is spent"
        return not self.is_late()

    def count(self, point: Point, found: Sequence[Finding]) -> None:
        """Count the elements that were verified, and those at kinks, which no slope verifies."""
        kinds = _kinds_at(point, found)
        self.elements, self.at_kinks = point.scale.size, int(np.sum(kinds == KINK))
        self.verified = int(np.sum(are_verified(kinds) & ~np.asarray(self.hidden)))
        vanished = kinds == VANISHED
        self.vanished = vanished if vanished.any() else False

    def count_elsewhere(self, point: Point, found: Sequence[Finding]) -> None:
        """Count the elements that are verified here, and vanish at the point that was passed."""
        if not np.any(self.vanished):
            return
        seen = self.vanished & are_verified(_kinds_at(point, found))
        self.verified, self.vanished = self.verified + int(np.sum(seen)), self.vanished & ~seen


def _kinds_at(point: Point, found: Sequence[Finding]) -> np.ndarray:
    """The most severe verdict on each element of a point, of one that is not finite unseen."""
    kinds = np.where(point.finite, np.int8(OK), np.int8(UNSEEN))
    for finding in found:
        kinds[finding.indices] = np.maximum(kinds[finding.indices], finding.verdict.kind)
    return kinds


@dataclasses.dataclass(eq=False)
class Check:
    """A function whose gradient exists and has the right types, and how its slopes are measured.

    Attributes:
      subject: the function of its float leaves, and the point.
      log: what has been found so far.
      covectors: random dense cotangents as real vectors, one row each.
      vjp: the VJP at the given point.
      gradient: the gradients there, one row for each cotangent, and later for the first alone.
      differences: measures slopes.
      tolerance: how far the gradient may be off as it is computed.
      plain: plain AD in float64; None if it cannot be had.
      rule: the VJP as it is written, in float64; None if it cannot be had.
      stops: whether the function holds a `stop_gradient`.
      are_zero: whether the gradient is zero, at each point that was checked.
    """

    subject: CheckSubject
    log: Log
    covectors: np.ndarray
    vjp: VJP
    gradient: np.ndarray
    differences: Differences
    tolerance: Tolerance
    plain: Gradient | None
    rule: Gradient | None
    stops: bool = False
    are_zero: list[bool] = dataclasses.field(default_factory=list)
    # What is known of further points, and of the noise at the last ones.
    _elsewhere: dict[tuple[int, int], list | None] = dataclasses.field(default_factory=dict)
    _noise: list[tuple[Any, int, Errors]] = dataclasses.field(default_factory=list)

    @property
    def options(self) -> Options:
        """The options of the check."""
        return self.log.options

    @functools.cached_property
    def _unordered(self) -> list[tuple[int, int]]:
        """Leaves in order along an axis, where the function is the same in any other order."""
        subject, found = self.subject, []
        for axis in sorted_axes(subject.inputs) if has_rules(subject) else ():
            self.log.evaluations += 1
            with contextlib.suppress(Exception):  # a callback may refuse what is out of order
                outputs = subject.fun(disordered(subject.inputs, [axis], self.options.seed))
                found += [axis] if _are_near(outputs, subject.outputs) else []
        return found

    def elsewhere(self, k: int, keeps: int = NOTHING) -> tuple[list, VJP] | None:
        """The k-th further point and the VJP there; None if the function is not finite there."""
        key, found = (k, keeps), None
        if xs := self._elsewhere.get(key):
            return xs, differentiated(self.subject, xs)
        for reach in () if key in self._elsewhere else REACHES:
            xs = nearby(self.subject, self.options.seed + k, reach, keeps)
            if keeps == NOTHING:
                xs = disordered(xs, self._unordered, self.options.seed + k)
            self.log.evaluations += 1
            try:
                vjp = differentiated(self.subject, xs)
            except Exception:  # a callback may refuse what has no structure
                if keeps == EQUALITY:
                    raise
                break
            if all(np.isfinite(_trees.widened_leaf(y)).all() for y in vjp.outputs):
                _trees.give_back(self.gradient.shape[1])  # the point was made in many steps
                found = xs, vjp
                break
        self._elsewhere[key] = found and found[0]
        return found

    def point(self, xs=None, gradient: np.ndarray | None = None) -> Point:
        """A point and the gradients computed there, or the given one.

        It is made anew each time, since its gradients need the memory of several models.
        """
        xs = self.subject.inputs if xs is None else xs
        gradient = self.gradient if gradient is None else gradient
        self.are_zero.append(not gradient.any())
        options, rows = self.options, len(gradient)
        is_own = options.delta is not None or options.max_relative_error is not None
        exact = None if is_own else self._kept(self.rule, xs, gradient)
        reference = None
        if options.mode == "auto" and options.delta is None:
            reference = self._reference(xs, gradient, exact)
        around = functools.cache(lambda: self._around(xs, rows))
        gradients = gradient, exact, reference
        point = make_point(self.subject, xs, gradients, options.seed, options.delta)
        _trees.give_back(gradient.shape[1])
        both = {self.rule, self.plain}
        rounded = functools.cache(lambda *parts: self._moved(both, xs, gradient, Parts(*parts)))
        return dataclasses.replace(point, around=around, rounded=rounded)

    def _around(self, xs, rows: int) -> NearbySizes | None:
        if self.plain is None:
            return None
        apart = moved_apart(self.subject, xs, self.options.seed, NEARBY, np.float32)
        ranges, scale = self.subject.ranges, Scales(xs)
        found = np.zeros((2, len(ranges)))
        bits = [np.zeros(-(-(stop - start) // 8), np.uint8) for start, stop in ranges]
        for row in range(rows):
            leaves: Any = self._exact(self.plain, apart, row)
            for leaf, (start, stop) in enumerate(ranges if leaves else ()):
                part = _trees.gradient_rows([[leaves[leaf]]], 1)
                leaves[leaf] = None  # its memory
                bits[leaf] |= np.packbits(part[0] != 0)
                both = [mean_along(part, along) for along in (np.ones(1), scale[start:stop])]
                np.maximum(found[:, leaf], np.ravel(both), out=found[:, leaf])
            if leaves is None or not np.isfinite(found).all():
                return None
        return NearbySizes(found[0], found[1].max(), bits)

    def _kept(self, of: Gradient | None, xs, gradient: np.ndarray, first: int = 0) -> Any:
        """Exact gradients from the first cotangent on; None if they cannot be had."""
        return kept_beside(gradient, lambda k: self._exact(of, xs, first + k))

    def _reference(self, xs, gradient: np.ndarray, exact: Any) -> Any:
        """Plain AD's gradients; where they are the rule's, these, to save their memory."""
        if exact is None or self.rule is self.plain:
            return exact if exact is not None else self._kept(self.plain, xs, gradient)
        found = exact
        tolerance = make_tolerance(self.subject.ranges, ["float64"] * len(self.subject.inputs))
        for k in range(len(gradient)):
            row = None  # the last one's memory
            row = self._kept(self.plain, xs, gradient[k : k + 1], k)
            if row is None:
                return None
            bad = self._differ(row, exact[k : k + 1], exact=tolerance)
            if isinstance(exact, Beside):
                off = np.abs(row[0, bad] - exact[k, bad])
                bad = bad[~(off <= exact.error(k, bad))]
            if len(bad):
                found = np.array(found) if found is exact else found
                found[k, bad] = row[0, bad]
        return found

    def _exact(self, gradient: Gradient | None, xs, row: int) -> list | None:
        self.log.evaluations += gradient is not None and not row  # one for all rows
        return self._attempt(gradient, lambda of: of.leaves(xs, self.covectors[row]))

    def _attempt(self, gradient: Gradient | None, make: Callable[[Gradient], Any]) -> Any:
        """A result made of a gradient in float64; None if it cannot be had, and a note says why.

        It runs what others wrote: plain AD has no gradient of a `while_loop`, and a rule may raise
        anything.
        """
        if gradient is None:
            return None
        try:
            return make(gradient)
        except Exception as error:
            what = "AD reference" if gradient is self.plain else "rule in float64"
            note = f"no {what} ({first_line(error)})"
            self.log.notes += [] if note in self.log.notes else [note]
            return None

    def pulled(self, covectors: np.ndarray) -> np.ndarray:
        """The gradients for other cotangents at the given point, by plain AD if it can be had."""
        found = self._attempt(self.plain, lambda of: of(self.subject.inputs, covectors))
        return self.vjp.rows(covectors) if found is None else found

    def judge_of_formula(self, point: Point) -> Judge:
        """Judges the rule as it is written, evaluated in float64."""
        converge = functools.cache(lambda: self._unconverged(point))
        is_found = np.any(self.tolerance.loops)

        rounding = functools.cache(lambda: self.tolerance.explained(point.rounded(*CONSTANTS)))

        def allowance(indices):
            if is_found or not converge().any():
                return rounding()(indices)
            self.log.notes += [] if NOT_CONVERGED in self.log.notes else [NOT_CONVERGED]
            return rounding()(indices) + converge()[indices]

        is_plain = self.rule is self.plain
        settles = is_plain or is_found
        return self._judge(
            *(point, point.exact, point.reference, self.tolerance.in_float64()),
            excuse=Excuse(tolerances.SLIGHT, OK, allowance),
            unconverged=converge() if is_found else None,
            unsettled=functools.cache(lambda: 0.0 if settles else self._unsettled(point)),
            is_plain=is_plain,
        )

    def judge_of_arithmetic(self, point: Point) -> Judge:
        """Judges the gradient as it was computed: by the rule in float64, if it could be had."""
        known = point.exact is not None
        exact = point.exact if known else point.reference
        verified = tolerances.MOST_EXCUSED if known else tolerances.SLIGHT
        is_known = self.rule is self.plain and isinstance(exact, Beside)
        near = exact if is_known else point.gradient
        lost = lambda indices: self.noise(point.xs, near)(indices)  # noqa: E731
        excuse = Excuse(verified, ROUNDING, lost, of_zero=known)
        return self._judge(point, point.gradient, exact, self.tolerance, excuse=excuse)

    def _judge(self, *own, **more) -> Judge:
        known = {"delta": self.options.delta, "is_late": self.log.is_late}
        return Judge(self.differences, *own, **known, **more)

    # Needed by the case root_by_halving_thirty_times.
    def _unsettled(self, point: Point) -> np.ndarray:
        """The distance of the value from where loops of a fixed length settle, 0 if they do not."""
        cotangents, base = np.abs(self.covectors[: len(point.gradient)]), self.differences.base
        with contextlib.suppress(Exception):
            values = settled_values(self.subject, self.differences, point.xs)
            off = 0 * base if values is None else np.abs(values - base)
            if np.linalg.norm(off) <= tolerances.SOLVED * np.linalg.norm(base):
                return cotangents @ off
        return np.zeros(len(cotangents))

    def _moved(self, gradients, xs, near: Any, parts: Parts) -> np.ndarray:
        """The distance that roundings move each element of some gradients."""
        moved: Any = np.float32(0)
        covectors = self.covectors[: len(near)]
        for gradient in gradients:
            measure = lambda of: gradient_movement(of, xs, covectors, parts, near)  # noqa: E731
            own = self._attempt(gradient, measure)
            moved = moved if own is None else np.fmax(moved, own, out=own)
        return np.broadcast_to(moved, self.gradient.shape[1])

    # Needed by the case odeint.
    def _unconverged(self, point: Point) -> np.ndarray:
        """The distance of the rule and plain AD, excused by loops that end before they converge."""
        covectors, moved = self.covectors[: len(point.gradient)], np.zeros_like(point.gradient)
        hooks = (RUN_ON, None)
        for gradient in {self.rule, self.plain} if has_loops(self.subject.program) else ():
            both = self._attempt(gradient, lambda of: [of(point.xs, covectors, h) for h in hooks])
            moved += 0.0 if both is None else np.abs(np.subtract(*both))
        exact = point.gradient if point.exact is None else point.exact
        change = np.where(np.isfinite(moved), moved, np.inf).max(axis=0)
        return self.tolerance.unconverged(change, exact)

    def noise(self, xs, near: Any = None) -> Errors:
        """Gives the errors of elements at a point that rounding explains.

        For all cotangents, or those of the gradients that were computed there.
        """
        rows = COTANGENTS if near is None else len(near)
        for known, count, found in self._noise:
            if known is xs and count == rows:
                return found
        if near is None and rows <= len(self.gradient):
            near = self.gradient[:rows]
        found = self._noise_at(xs, self.vjp.rows(self.covectors[:rows]) if near is None else near)
        self._noise[:] = [*self._noise[-1:], (xs, rows, found)]
        return found

    # Needed by causal attention near ones of check_vanishing.
    def _noise_at(self, xs, near: Any) -> Errors:
        plain = self.tolerance.explained(self._moved([self.plain], xs, near, OWN))
        if self.rule is None or self.rule is self.plain:
            return plain
        # Where its terms cancel, a rule may lose more than plain AD.
        own = self.tolerance.explained(self._moved([self.rule], xs, near, OF_RULE))
        exact, rows = self._kept(self.rule, xs, near), len(near)
        scale, around, leaves_of = Scales(xs), self._around(xs, rows), self.tolerance.leaves_of
        known = [0.0 if exact is None else self.tolerance.sizes(exact, scale).overall.max()]
        known += [] if around is None else [around.largest]
        value = np.nan_to_num(np.abs(_trees.to_numpy(self.subject.outputs)), posinf=0.0)
        most = self.tolerance.cancelled(max(known), np.max(np.abs(self.covectors[:rows]) @ value))

        def errors(indices):
            bound = most[leaves_of(indices)] / scale[indices]
            return np.fmax(plain(indices), np.fmin(own(indices), bound))

        return errors

    def compare(self, check: str, got, expected, what: str, xs=None) -> list:
        """Compare two computations of one gradient; a failure names the worst element."""
        bad = self._differ(got[None], expected[None])
        if np.isfinite(tolerances.distance(got[bad], expected[bad])).any():  # no noise excuses NaN
            noise = self.noise(xs or self.subject.inputs)
            around = self._around(xs or self.subject.inputs, 1)
            bad = self._differ(got[None], expected[None], noise, around)
        if not len(bad):
            return []
        worst = int(bad[np.argmax(tolerances.distance(got[bad], expected[bad]))])
        detail = (
            f"{what}: {len(bad)} of {got.size} elements differ; worst: {got[worst]:.7g}, "
            f"expected {expected[worst]:.7g}"
        )
        return [Failure(check, self.subject.element(worst), detail)]

    def _differ(
        self, got, expected, noise: Errors | None = None, around=None, exact: Any = None
    ) -> np.ndarray:
        """The elements where two computations are further apart than the noise of their leaf.

        For `exact` ones, of that tolerance, none of the noise that one may have is left out.
        """
        tolerance, same = exact or self.tolerance, 1.0 if exact else tolerances.SAME
        if not exact and np.array_equal(got, expected):
            return np.zeros(0, int)
        pair, found = (expected, got), []
        is_finite = (isinstance(g, Beside) or np.isfinite(g.sum()) for g in pair)
        either = zip(pair, is_finite, strict=True)
        known, other = (g if f else np.where(np.isfinite(g), g, 0) for g, f in either)
        sizes = tolerance.sizes(known, np.ones(1), around=around)
        for leaf, area in enumerate(tolerance.ranges):
            allowed = tolerance.elements(sizes, leaf, np.ones(1), beside=not exact)
            extra = tolerance.relative[leaf] * sizes.around[leaf]
            floor = same * (allowed.floor - extra) + extra
            if noise is not None:  # each is off
                parts = tolerances.pieces(*area)
                floor = floor + 2 * max(noise(np.arange(p.start, p.stop)).max() for p in parts)
            allowed = allowed._replace(floor=floor, paddle=None)
            slack = lambda where, a=allowed: a.slack(known[:, where], other[:, where])  # noqa: E731
            found.append(tolerances.off_by_more(pair, area, floor, slack))
        return np.concatenate(found)


def prepare(subject: CheckSubject, log: Log) -> Check | None:
    """Check what must hold before numbers mean anything; None if it does not."""
    vjp = _differentiated(subject, log)
    if vjp is None:
        return None
    # Before the function is traced, which may change its state.
    covectors, gradient = drawn(subject, vjp, log.options.seed)
    log.fail(contract.finite_gradient(subject, gradient))
    evaluated = _chosen_evaluation(subject, covectors, log)
    if evaluated is None:
        return None
    log.precision = evaluated[0].evaluation.label
    check = _visible(measured(subject, log, covectors, vjp, gradient, evaluated))
    if check.stops and check.plain is not None and _stops_matter(check):
        log.notes.append(STOPS)
    return check


def _visible(check: Check) -> Check:
    """The check without the outputs whose slopes cannot be seen; a note names them."""
    subject, differences, log = check.subject, check.differences, check.log
    constant, lost = masked(subject, differences, check.pulled)
    jumps = jumped(subject, differences.base, check.tolerance.names)
    differences.constant, left_out = constant, lost | jumps
    if not left_out.any():
        return check
    hidden = np.where(left_out, check.covectors, 0.0)
    differences.covectors = check.covectors - hidden
    gradient = check.vjp.rows(differences.covectors)
    reach = np.abs([*check.vjp.rows(hidden), *check.pulled(hidden)]).max(axis=0)
    log.hidden = (reach > 0) & ~gradient.any(axis=0)
    log.notes += unseen_notes(subject, differences.base, lost, jumps)
    return dataclasses.replace(check, covectors=differences.covectors, gradient=gradient)


def measured(
    subject: CheckSubject,
    log: Log,
    covectors: np.ndarray,
    vjp: VJP,
    gradient: np.ndarray,
    evaluated: tuple[Differences, Widened | None],
    plain: Gradient | None = None,
) -> Check:
    """The check of a function whose gradients are there; `plain` is plain AD, if known."""
    differences, wide = evaluated
    tolerance = _tolerance(subject, differences, wide, log)
    plain, rule, backward = exact_gradients(subject, wide, log, plain)
    tolerance = _of_solvers(subject, backward, tolerance, log)
    stops = wide is not None and wide.stops
    return Check(subject, log, covectors, vjp, gradient, differences, tolerance, plain, rule, stops)


def exact_gradients(
    subject: CheckSubject, wide: Widened | None, log: Log, plain: Gradient | None
) -> tuple[Gradient | None, Gradient | None, Any]:
    """Plain AD, the rule as it is written, and the program of its backward pass where it is needed.

    Where there is no custom rule to strip, the rule is plain AD, unless this is given.
    """
    rule = backward = None
    is_plain, program = plain is None and not has_rules(subject), subject.program
    if wide is not None and wide.grain:
        log.notes.append(CARRIED.format(wide.grain))
        return None, None, None
    if plain is None and wide is not None:
        function = PlainAD(wide, len(subject.inputs))
        plain = Gradient(function, _jaxpr.opened(program)[1], subject.outputs)
    try:
        if not is_plain or any(found_by_loops(program)):
            seeds = [jax.ShapeDtypeStruct(y.shape, y.dtype) for y in subject.outputs]
            backward = jax.make_jaxpr(subject.pull_back)(subject.inputs, seeds)
        rule = plain if is_plain or wide is None else None
        if wide is not None and not is_plain:
            widened = widened_program(backward)
            rule = Gradient(widened, _jaxpr.opened(backward)[1], subject.outputs)
        if rule is not None and rule.function.looks_at_bits:
            rule = None
            log.notes.append("no rule in float64 (the function looks at the bits of its numbers)")
    except Exception as error:
        log.notes.append(f"no rule in float64 ({why_not(error)})")
    return plain, rule, backward


def _differentiated(subject: CheckSubject, log: Log) -> VJP | None:
    again, covectors = subject.fun(subject.inputs), cotangents(subject, log.options.seed)
    log.evaluations += 3
    relative = 0.0 if are_on_cpu(subject.outputs) else 1e-3
    if not _are_near(subject.outputs, again, relative):
        detail = "two calls of the function give different values (randomness or side effects?)"
        log.failures.append(Failure("determinism", subject.output_names[0], detail))
        return None
    failures = contract.finite_values(subject)
    try:
        vjp = differentiated(subject, subject.inputs)
        first = vjp.pull(_trees.cotangent_leaves(covectors[0], subject.outputs))[0]
        failures += contract.primal(subject, vjp.outputs, "differentiated")
        failures += contract.same_types(subject, first)
        failures += contract.integers(subject, covectors[0])
    except Exception as error:
        log.failures += _not_differentiated(subject, error)
        return None
    log.fail(failures)
    stop = any("shape" in f.detail or f.check == "finite" for f in failures)
    different = any(a.dtype != b.dtype for a, b in zip(subject.outputs, vjp.outputs, strict=True))
    return None if stop or different else vjp


def _not_differentiated(subject: CheckSubject, error: Exception) -> list[Failure]:
    """The failures where `jax.vjp` raises an error, for the leaves that it raises it for."""
    closing = [] if subject.program is None else _jaxpr.closing_functions(subject.program)
    if not closing:
        detail = f"differentiation raises {first_line(error)}"
        return [Failure("cotangent", subject.names[0], detail)]
    detail = (
        f"jax.vjp raises {type(error).__name__}: the derivative rules of {', '.join(closing)} "
        "close over a traced value; pass it to the function as an argument, or leave this leaf "
        "out with wrt or no_grad"
    )
    names = [name for i, name in enumerate(subject.names) if not _is_differentiable(subject, i)]
    return [Failure("cotangent", name, detail) for name in names or subject.names[:1]]


def _is_differentiable(subject: CheckSubject, i: int) -> bool:
    """Whether JAX differentiates the function with respect to one leaf, the others held."""
    try:
        outputs, pull = jax.vjp(subject.alone(i), subject.inputs[i])
        pull(outputs)
    except Exception:
        return False
    return True


def _chosen_evaluation(subject: CheckSubject, covectors, log: Log):
    """The way to evaluate the function, or None where it fails another way."""
    try:
        return choose(subject, covectors, log.notes)
    except Chaotic as error:
        log.notes = [f"not verified: {error.__doc__}"]
        return None
    except ValueError:
        compiled = contract.primal(
            subject, _jaxpr.quick_jit(subject.fun)(subject.inputs), "compiled"
        )
        log.fail([failure._replace(check="jit") for failure in compiled])
        if not log.failures:
            raise
        return None


def _are_near(first, second, relative: float = 1e-3) -> bool:
    same = functools.partial(np.allclose, rtol=relative, atol=0.0, equal_nan=True)
    values = (map(_trees.widened_leaf, leaves) for leaves in (first, second))
    return [y.shape for y in first] == [y.shape for y in second] and all(map(same, *values))


def _tolerance(subject: CheckSubject, differences, widened, log: Log) -> Tolerance:
    own = subject.dtypes
    inner = (widened.narrow if widened else set()) | {
        _trees.real_dtype(y).name for y in subject.outputs
    }
    narrow = narrowest(inner)
    if narrow != narrowest([*own, narrow]) or narrow not in own:
        log.notes.append(
            f"the function computes in {narrow} inside, so the tolerances are those of {narrow}"
        )
    options = log.options
    tolerance = make_tolerance(
        subject.ranges, own, inner, options.max_relative_error, options.tolerance
    )
    return tolerance.of_slopes_in(differences.evaluation.dtype)


def _stops_matter(check: Check) -> bool:
    """Whether the gradient would be another, were it not for `stop_gradient`.

    The maximum that a softmax subtracts is behind one, and does not matter.
    """
    at = check.subject.inputs, check.covectors[:1]
    try:
        plain: Any = check.plain
        free, exact = plain(*at, FREELY), plain(*at)
    except Exception:
        return True
    return bool(np.abs(free - exact).max() > tolerances.PRECISE * np.abs(exact).max())


def _of_solvers(subject: CheckSubject, backward: Any, tolerance: Tolerance, log: Log) -> Tolerance:
    """The tolerance, which knows the leaves whose gradients are found by loops that stop."""
    if backward is None or log.options.tolerance is not None:
        return tolerance
    solved = np.asarray(found_by_loops(backward))
    names = ", ".join(name for name, flag in zip(subject.names, solved, strict=True) if flag)
    if not names:
        return tolerance
    text = f"{names}: found by a loop that stops when it is near enough, and judged to how near "
    log.notes.append(f"{text}it is, {tolerances.SOLVED:g} at most")
    return dataclasses.replace(tolerance, loops=solved)
