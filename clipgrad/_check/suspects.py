"""Single elements looked at closely: those that disagree with plain AD, and any others."""

import numpy as np

from clipgrad._check.judge import KINK, OK, UNSURE, WRONG, Verdict
from clipgrad._check.real import to_numpy
from clipgrad._check.session import SINGLE, Point, Session


def elements(session: Session, point: Point, indices: np.ndarray, judged: bool = True) -> Verdict:
    """The verdict on single elements, in units of the gradient."""
    ranges = np.stack([indices, indices + 1], axis=1)
    verdict = session.verdict(point, ranges, SINGLE, point.gradient, judged)
    unit = point.scale[indices]
    names = ("numeric", "analytic", "error", "ahead", "behind")
    return verdict._replace(**{name: getattr(verdict, name) / unit for name in names})


def suspected(session: Session, point: Point, reference: np.ndarray, indices) -> Verdict:
    """The verdict on suspects; two of a kind stand for all if no element examined is wrong.

    Of a kind are those of one value that are off by one ratio, as are the zeros given to a relu.
    """
    ratio = point.gradient[0, indices] / reference[0, indices]
    alike = np.stack([to_numpy(point.xs)[indices], np.float32(ratio).astype(float)], axis=1)
    _, first, kind = np.unique(alike, axis=0, return_index=True, return_inverse=True)
    second = np.asarray([np.flatnonzero(kind.ravel() == k)[-1] for k in range(len(first))])
    chosen = np.concatenate([first, second])
    if len(chosen) < len(indices):
        verdict = elements(session, point, indices[chosen])
        verdict = _with_reference(verdict, point, reference, indices[chosen])
        if np.isin(verdict.kind, (OK, KINK)).all():
            return Verdict(*(column[kind.ravel()] for column in verdict))
    return _with_reference(elements(session, point, indices), point, reference, indices)


def _with_reference(verdict: Verdict, point: Point, reference, indices) -> Verdict:
    """Where differences are too noisy to tell but do not contradict the reference, it decides.

    A gradient far below the noise of the outputs is among them, but not one that vanishes.
    """
    off = np.abs(reference - point.gradient)[:, indices]
    row = np.argmax(off, axis=0)
    better, analytic = reference[row, indices], point.gradient[row, indices]
    close = np.abs(verdict.numeric - verdict.analytic) <= verdict.error
    blurred = (np.abs(verdict.numeric - better) <= verdict.error) & (
        np.abs(better - analytic) <= verdict.error
    )
    unsure = (verdict.kind == UNSURE) | ((verdict.kind == OK) & blurred)
    wrong = unsure & np.isfinite(verdict.numeric) & close
    return verdict._replace(
        kind=np.where(wrong, WRONG, verdict.kind),
        numeric=np.where(wrong, better, verdict.numeric),
        analytic=np.where(wrong, analytic, verdict.analytic),
    )
