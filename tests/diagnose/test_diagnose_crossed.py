"""A diagnosis says the same of a fault wherever it is, and nothing of what is healthy."""

import re

import pytest

import clipgrad as cg
from tests.diagnose import diagnose_crossed as crossed

pytestmark = pytest.mark.usefixtures("users_promotion")
SURROUNDINGS = [*crossed.AROUND, *crossed.MODELS]
# What bfloat16 does not overflow, underflow or round as float32 does.
OTHERWISE = {("divided_by_what_overflows", "in_bfloat16"), ("small_cotangents", "in_bfloat16")}


def rows(functions):
    """All pairs; by default each surrounding with one function, and each function with one."""
    names = list(functions)
    pairs = [
        (function, surrounding, i % len(SURROUNDINGS) == j or j % len(names) == i)
        for i, function in enumerate(names)
        for j, surrounding in enumerate(SURROUNDINGS)
        if (function, surrounding) not in OTHERWISE
    ]
    marks = {True: (), False: pytest.mark.exhaustive}
    return [pytest.param(*pair, marks=marks[is_default]) for *pair, is_default in pairs]


def said(found):
    return " ".join([*(finding.message for finding in found.findings), *found.notes])


@pytest.mark.parametrize("name, surrounding", rows(crossed.SICK))
def test_a_fault_is_found_at_its_line_wherever_it_is(name, surrounding):
    fault = crossed.SICK[name]
    loss, args, leaf = crossed.subject(surrounding, fault.function, fault.w)
    found = cg.diagnose(loss, args)
    assert "clipgrad/_" not in said(found) and "states[" not in said(found)
    if fault.what == "stop_gradient":
        assert found.ok and f"gradient of {leaf} is 0: stop_gradient detaches it" in said(found)
        assert found.message == "nothing is wrong with the gradient"
        return
    (finding,) = found.findings
    assert finding.message == found.message
    what = finding.cause if fault.kind == "zero" else finding.operation
    assert (finding.kind, what, finding.line) == (fault.kind, fault.what, fault.line), found
    if fault.kind == "zero":
        assert finding.leaf == leaf and not re.search(r"at step \d", finding.message)


@pytest.mark.parametrize("name, surrounding", rows(crossed.HEALTHY))
def test_nothing_is_said_of_a_healthy_function_wherever_it_is(name, surrounding):
    loss, args, _ = crossed.subject(surrounding, crossed.HEALTHY[name], crossed.W)
    found = cg.diagnose(loss, args)
    assert found.ok and found.message == "nothing is wrong with the gradient", found
    assert not any("gradient of" in note for note in found.notes), found
