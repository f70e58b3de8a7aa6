"""The check of values at one point: which gradient is judged by which, failures and notes."""

import numpy as np

from clipgrad._check.check import Check
from clipgrad._check.further import EQUALITY, NOTHING, SYMMETRY, symmetric_leaves
from clipgrad._check.points import Point, dense_numbers
from clipgrad._check.report import Failure
from clipgrad._check.search import Finding, doubtful_leaves, search, wrong_leaves
from clipgrad._check.structure import check_ties, excuse_structure
from clipgrad._check.subject import CheckSubject
from clipgrad._check.verdicts import KINDS, WRONG

STRUCTURES = {SYMMETRY: "the symmetry of matrices", EQUALITY: "what is equal, zero or symmetric"}
UNSEEN_THERE = "what is wrong there alone was not seen"
LAYOUT_LIMIT = 100_000  # elements of a leaf that are compared with its transpose and permutations


def check_values(check: Check, point: Point) -> None:
    """Search for wrong elements at the point that was passed."""
    log = check.log
    found = found_at(check, point, check.options.mode)
    failures, notes = failures_and_notes(check.subject, point, found)
    judge = check.judge_of_arithmetic(point)
    failures += check_ties(check.subject, judge, check.vjp, found, check.options.seed)
    log.count(point, found)
    log.fail(failures)
    log.notes += notes


def note_independence(check: Check) -> None:
    """A note where the gradient is zero at every point, and no slope says otherwise."""
    are_zero, log = check.are_zero, check.log
    if not all(are_zero) or any(f.check == "value" for f in log.failures):
        return
    where = "everywhere" if len(are_zero) > 1 else "at this point, and no other was checked"
    log.notes.append(f"the gradient is zero {where}: does the output depend on the inputs?")


def check_further_points(check: Check) -> None:
    """The values once more at other points, and then the first pull-back again."""
    log = check.log
    if any(failure.check == "value" for failure in log.failures):
        log.not_run["points"] = "the values at the first point are wrong"
        return
    for k in range(1, check.options.points):
        if not _check_further_point(check, k):
            log.not_run["points"] = "the function is not finite at points nearby"
            return
    text = "the first pull-back, called again after another point was differentiated"
    again = check.vjp(check.covectors[0])
    log.fail(check.compare("points", again, check.gradient[0], text))


def _check_further_point(check: Check, k: int) -> bool:
    """Check at the k-th further point, of as little structure as the function is meant for.

    What is wrong where plain AD does not have the slopes of the function either is no fault of the
    rule: there, the function is not meant to be differentiated.
    """
    log, where, why = check.log, "at a second point " if k == 1 else "at a further point ", ""
    symmetric = symmetric_leaves(check.subject.inputs)
    for keeps in (NOTHING, *([SYMMETRY] if symmetric else []), EQUALITY):
        elsewhere = check.elsewhere(k, keeps)
        if elsewhere is None:
            why = why or "the function is not finite"
            continue
        xs, vjp = elsewhere
        point = check.point(xs, vjp.rows(check.covectors[:1]))
        mode = check.options.mode
        mode = "auto" if mode == "auto" and point.reference is not None else "fast"
        found = found_at(check, point, mode)
        failures, notes = failures_and_notes(check.subject, point, found, where)
        wrong = wrong_leaves(found)
        moved = symmetric if keeps == NOTHING else set()
        doubt = _doubt(check, point, wrong, moved) if wrong and keeps != EQUALITY else ""
        if doubt and (point.reference is not None or keeps == NOTHING):
            why = why or doubt
            continue
        right = "right at the point that you passed; "
        log.fail([f._replace(detail=right + f.detail) for f in failures])
        log.count_elsewhere(point, found)
        log.notes += [note for note in notes if note.replace(where, "", 1) not in log.notes]
        if keeps != NOTHING:
            log.notes.append(
                f"{where}{STRUCTURES[keeps]} is kept: without it {why}; {UNSEEN_THERE}"
            )
        return True
    return False


# Needed by the case cholesky_that_reads_one_triangle.
def _doubt(check: Check, point: Point, wrong: set[int], moved: set[int]) -> str:
    """Why a function may not be meant for a point where its gradient is wrong; "" if it is.

    `wrong` are the leaves in which it is, `moved` the leaves that are not symmetric there.
    A function that is meant for symmetric ones has another gradient of these too elsewhere.
    """
    plain = point.reference
    if plain is None:
        return "there is no plain AD to compare with" if wrong & moved else ""
    judge = check.judge_of_arithmetic(point)
    judge = judge if point.exact is None else check.judge_of_formula(point)
    asked = wrong | moved
    apart = [[leaf] for leaf in asked]
    if doubtful_leaves(judge, apart):
        return "plain AD does not have the slopes of the function"
    for leaf in wrong & moved:
        (start, stop), shape = check.subject.ranges[leaf], point.xs[leaf].shape
        parts = plain[0, start:stop].reshape(*shape, -1)
        if _near(parts, np.swapaxes(parts, -2, -3)):
            return "the function reads both triangles as one"
    return ""


def found_at(check: Check, point: Point, mode: str) -> list[Finding]:
    """The wrong elements at one point: is the formula right, and then is its arithmetic?

    The rule evaluated in float64 must agree with slopes to float64's tolerance; the gradient as it
    was computed must then agree with that rule to its own. Where the rule cannot run in float64,
    slopes judge the gradient as it was computed.
    """
    of_arithmetic, seed = check.judge_of_arithmetic(point), check.options.seed
    known = point.exact is not None
    judge = check.judge_of_formula(point) if known else of_arithmetic
    found = excuse_structure(check.subject, judge, search(judge, mode), seed)
    if known:
        found += search(of_arithmetic, "reference", without=wrong_leaves(found))
    return found


def failures_and_notes(
    subject: CheckSubject, point: Point, found: list[Finding], where: str = "", check: str = "value"
) -> tuple[list[Failure], list[str]]:
    """Return the failures and the notes of a search, one of each kind for each leaf."""
    wrong = [finding for finding in found if finding.is_wrong]
    failures = [_finding_failure(subject, point, finding, check, where) for finding in wrong]
    notes = []
    for leaf, _, verdict, seen, _ in found:
        start, stop = subject.ranges[leaf]
        counts = [(int(np.sum(verdict.kind == kind)), kind) for kind in KINDS]
        texts = [f"{n} of {stop - start} elements {KINDS[k].note}" for n, k in counts if n]
        if (verdict.kind == WRONG).any() and not seen.all():
            texts.append(f"{seen.sum()} of {len(seen)} elements in doubt were checked one by one")
        notes += [f"{subject.names[leaf]}: {where}{text}" for text in texts]
    return failures, notes


def _finding_failure(
    subject: CheckSubject, point: Point, finding: Finding, check: str, where: str
) -> Failure:
    start, stop = subject.ranges[finding.leaf]
    wrong = np.flatnonzero(finding.verdict.kind == WRONG)
    verdict, indices = finding.verdict.part(wrong), finding.indices[wrong]
    off, seen = np.abs(verdict.numeric - verdict.analytic), finding.seen[wrong]
    k = int(np.argmax(np.where(np.isfinite(off), off, 0) * (seen if seen.any() else 1)))
    numbers = f"numeric {verdict.numeric[k]:.7g} +- {verdict.error[k]:.0e}"
    if verdict.kink[k]:
        numbers = f"kink: slopes {verdict.behind[k]:.7g} and {verdict.ahead[k]:.7g}"
    hint = _finding_hint(subject, point, finding, verdict)
    return Failure(
        check=check,
        where=subject.element(int(indices[k])),
        detail=(
            f"{where}{'' if finding.exact else 'at least '}{len(wrong)} of {stop - start} elements "
            f"wrong; worst: {numbers}, analytic {verdict.analytic[k]:.7g}{hint}"
        ),
        numeric=float(verdict.numeric[k]),
        error=float(verdict.error[k]),
        analytic=float(verdict.analytic[k]),
        indices=indices - start,
        ratio=verdict.analytic / np.where(verdict.numeric == 0, np.nan, verdict.numeric),
    )


def _finding_hint(subject: CheckSubject, point: Point, finding: Finding, verdict) -> str:
    (start, stop), leaf = subject.ranges[finding.leaf], subject.inputs[finding.leaf]
    ratio = ratio_hint(verdict.numeric, verdict.analytic)
    count = stop - start if point.reference is not None else 0
    if ratio or not 3 <= count <= LAYOUT_LIMIT or count != leaf.size:
        return ratio
    known = np.asarray(point.reference), point.gradient
    both = (g[0, start:stop].reshape(leaf.shape) for g in known)
    return layout_hint(*both)


# Ratios that spread this much, relative to what sets them apart from 1 and from 0, are one number:
# results rounded to bfloat16 spread by 0.4 %, so a missing factor of 2 is still seen there.
SAME_RATIO = 0.01
# Elements of a permutation are this part of the usual distance to the next one apart, or less.
OF_GAPS = 0.1
EXACT = 1e-3
SAME_ROWS = 1e-9  # numbers of float64 that are nearer are equal


def ratio_hint(numeric: np.ndarray, analytic: np.ndarray) -> str:
    """A remark if analytic/numeric is one number throughout."""
    known = np.isfinite(analytic) & np.isfinite(numeric) & (numeric != 0)
    if len(numeric) < 2 or not known.all():
        return ""
    ratio = analytic / numeric
    middle = float(np.median(ratio))
    if middle == 0 and not ratio.any():
        return "; analytic is 0 throughout"
    if np.ptp(ratio) > SAME_RATIO * min(abs(middle), abs(middle - 1)):
        return ""
    meaning = " (the sign)" if abs(middle + 1) < EXACT else ""
    digits = 4 if abs(middle - 1) > EXACT else 8
    return f"; analytic/numeric is {middle:.{digits}g} throughout{meaning}"


def layout_hint(numeric: np.ndarray, analytic: np.ndarray) -> str:
    """A remark if a whole leaf's analytic gradient is the numeric one, rearranged.

    Equal numbers, or rows, may be in such an order by accident: two numbers are no order, and what
    has equal rows may as well be shifted as reversed.
    """
    if not np.all(np.isfinite(analytic)) or _near(numeric, analytic):
        return ""
    if len(_distinct_rows(numeric.reshape(-1, 1))) < 3:
        return ""
    if numeric.ndim == 2 and numeric.shape[0] == numeric.shape[1] and _near(numeric.T, analytic):
        return "; analytic is the transpose of numeric"
    for axis in range(numeric.ndim):
        count, rows = numeric.shape[axis], np.moveaxis(numeric, axis, 0)
        if not _near(np.flip(numeric, axis), analytic):
            continue
        if len(_distinct_rows(rows.reshape(count, -1))) == count:
            return f"; analytic is numeric reversed along axis {axis}"
    both = np.sort(numeric, axis=None), np.sort(analytic, axis=None)
    apart = OF_GAPS * np.median(np.diff(both[0]))  # else any two would be near, if there are many
    if _near(*both) and np.abs(both[0] - both[1]).max() <= apart:
        return "; analytic is a permutation of numeric"
    return ""


def _distinct_rows(rows: np.ndarray) -> np.ndarray:
    """A number for each row that equals no other, but for rounding."""
    found = np.sort(rows @ dense_numbers(np.random.default_rng(0), rows.shape[1]))
    return found[np.diff(found, prepend=-np.inf) > SAME_ROWS * np.abs(found).max()]


def _near(a: np.ndarray, b: np.ndarray) -> bool:
    return bool(np.allclose(a, b, rtol=EXACT, atol=EXACT * np.sqrt(np.mean(a**2))))
