"""The choice of a method."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

from clipgrad._per_example.batches import batch_size
from clipgrad._per_example.direct import direct_sums
from clipgrad._per_example.explicit import shares_axes, with_auto_axes
from clipgrad._per_example.one_pass import one_pass_sums
from clipgrad._per_example.plan import method_for
from clipgrad._per_example.subject import PerExampleSubject
from clipgrad._per_example.traced import ExampleGradient, followed
from clipgrad._per_example.two_passes import two_passes_sums

Sums = Callable[[Any, Any], tuple[Any, tuple[Any, ...]]]
_FORMS = {"one pass": one_pass_sums, "two passes": two_passes_sums}


def sums_of(subject: PerExampleSubject, params: Any, batch: Any) -> Sums:
    """The function of parameters and examples that gives the sum of the clipped gradients."""
    direct = subject.why_direct(params) is not None
    form = functools.partial(direct_sums if direct else _followed_sums, subject)
    if direct and not shares_axes(params, batch):
        return form  # the loss may name shardings itself
    return with_auto_axes(form, lambda whole, each: (whole, each))


def _followed_sums(
    subject: PerExampleSubject, params: Any, examples: Any
) -> tuple[Any, tuple[Any, Any]]:
    """The sum of the clipped gradients, from a program that is traced once."""
    run = functools.partial(sums_of_followed, subject)
    return followed(subject, params, examples, run)[0]


def sums_of_followed(
    subject: PerExampleSubject,
    gradient: ExampleGradient,
    shapes: Sequence[Any],
    params: Any,
    examples: Any,
) -> tuple[Any, tuple[Any, Any]]:
    """The sum of the clipped gradients by the method that fits these shapes of one of them."""
    method, _ = method_for(subject, params, shapes, batch_size(examples))
    if method == "direct":  # for its time
        total, (value, stats, _) = direct_sums(subject, params, examples)
        return total, (value, stats)
    return _FORMS[method](subject, gradient, params, examples)
