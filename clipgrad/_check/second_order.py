"""The second order: the VJP is a function too, of the inputs and the cotangent; check its VJP."""

from clipgrad._check import vectors
from clipgrad._check.log import Log
from clipgrad._check.points import Point, cotangents
from clipgrad._check.report import Failure
from clipgrad._check.subject import CheckSubject, traced
from clipgrad._check.theirs import TheirError, theirs
from clipgrad._check.values import check_point
from clipgrad._check.witnesses import differentiated, find_witnesses

NAME = "second order"


def check_second_order(point: Point, log: Log) -> None:
    """The second order, if it is asked for and the first is right."""
    if log.options.order < 2 or not log.has_time(NAME):
        return
    if log.failures:
        log.not_run[NAME] = "the first order fails"
        return
    notes: list[str] = []
    try:
        subject = _vjp(point)
        vjp = differentiated(subject, subject.inputs)
        of = find_witnesses(subject, notes, point.of)
        covectors = cotangents(subject, log.options.seed)
        second = Point(of, vjp, subject.inputs, covectors, log)
    except TheirError as error:
        detail = f"the VJP cannot be differentiated: it raises {error}"
        log.failures.append(Failure(NAME, point.of.subject.names[0], detail))
        return
    found = check_point(second, log, disputes_fail=True)
    log.failures += found.failures(check=NAME)
    log.notes += [f"{NAME}: {note}" for note in [*notes, *found.notes()]]
    log.evaluations += of.evaluation.count


def _vjp(point: Point) -> CheckSubject:
    """The VJP as a function to be checked, of inputs and cotangent."""
    subject, count = point.of.subject, len(point.xs)

    def gradient(leaves):
        return subject.pull_back(leaves[:count], leaves[count:])

    inputs = [*point.xs, *vectors.cotangent_leaves(point.covectors[0], subject.outputs)]
    return subject._replace(
        fun=gradient,
        program=traced(gradient, inputs),
        inputs=inputs,
        names=[*subject.names, *(f"cotangent of {name}" for name in subject.output_names)],
        outputs=theirs(gradient, inputs),
        output_names=[f"gradient of {name}" for name in subject.names],
    )
