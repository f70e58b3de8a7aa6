"""The second order: the VJP is a function too, of the inputs and the cotangent; check its VJP."""

import clipgrad._trees as _trees
from clipgrad._check.check import Check, measured
from clipgrad._check.evaluation import choose
from clipgrad._check.gradients import Gradient, PlainAD, differentiated, drawn
from clipgrad._check.report import Failure
from clipgrad._check.subject import CheckSubject, traced
from clipgrad._check.values import failures_and_notes, found_at
from clipgrad._errors import first_line

NAME = "second order"


def check_second_order(check: Check) -> None:
    """The second order, if it is asked for and the first is right."""
    log = check.log
    if check.options.order < 2 or not log.has_time(NAME):
        return
    if log.failures:
        log.not_run[NAME] = "the first order fails"
        return
    try:
        second = _of_the_vjp(check)
    except Exception as error:
        detail = f"the VJP cannot be differentiated: it raises {first_line(error)}"
        log.failures.append(Failure(NAME, check.subject.names[0], detail))
        return
    point = second.point()
    mode = "reference" if check.stops and point.reference is not None else "auto"
    found = found_at(second, point, mode)
    failures, notes = failures_and_notes(second.subject, point, found, check=NAME)
    log.failures += failures
    log.notes += notes
    log.evaluations += second.differences.evaluations + 3


def _of_the_vjp(check: Check) -> Check:
    """The VJP as a function to be checked, of inputs and cotangent.

    Plain AD differentiates the VJP of plain AD. In slopes of the VJP as written `stop_gradient` is
    not held: a held one would hide exactly the derivative that a rule forgets.
    """
    subject = _vjp(check)
    vjp = differentiated(subject, subject.inputs)
    covectors, gradient = drawn(subject, vjp, check.options.seed)
    plain, count = check.plain, len(subject.inputs)
    if plain is not None:
        plain = Gradient(PlainAD(plain.function, count), plain.constants, subject.outputs)
    notes: list[str] = []
    evaluated = choose(subject, covectors, notes, hold=False)
    check.log.notes += [f"{NAME}: {note}" for note in notes]
    return measured(subject, check.log, covectors, vjp, gradient, evaluated, plain)


def _vjp(check: Check) -> CheckSubject:
    subject, count = check.subject, len(check.subject.inputs)

    def gradient(leaves):
        return subject.pull_back(leaves[:count], leaves[count:])

    inputs = [*subject.inputs, *_trees.cotangent_leaves(check.covectors[0], subject.outputs)]
    return subject._replace(
        fun=gradient,
        program=traced(gradient, inputs),
        inputs=inputs,
        names=[*subject.names, *(f"cotangent of {name}" for name in subject.output_names)],
        outputs=gradient(inputs),
        output_names=[f"gradient of {name}" for name in subject.names],
    )
