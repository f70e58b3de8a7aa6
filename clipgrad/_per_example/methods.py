"""The choice of a method."""

import functools
from collections.abc import Callable
from typing import Any

from clipgrad._per_example.direct import direct_sums
from clipgrad._per_example.explicit import shares_axes, with_auto_axes
from clipgrad._per_example.one_pass import one_pass_sums
from clipgrad._per_example.plan import plan_of
from clipgrad._per_example.subject import PerExampleSubject
from clipgrad._per_example.two_passes import two_passes_sums

Sums = Callable[[Any, Any], tuple[Any, tuple[Any, Any]]]
_FORMS = {"one pass": one_pass_sums, "two passes": two_passes_sums, "direct": direct_sums}


def sums_of(subject: PerExampleSubject, params: Any, batch: Any) -> Sums:
    """The function of parameters and examples that gives the sum of the clipped gradients."""
    if subject.why_direct(params) is not None:
        method = "direct"
    else:
        method = (
            plan_of(subject, params, batch).method if subject.method == "auto" else subject.method
        )
    form = functools.partial(_FORMS[method], subject)
    if method == "direct" and not shares_axes(params, batch):
        return form  # the loss may name shardings itself
    return with_auto_axes(form, lambda whole, each: (whole, each))
