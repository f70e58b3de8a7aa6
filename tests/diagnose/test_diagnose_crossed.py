"""A diagnosis says the same of a fault wherever it is, and nothing of what is healthy."""

import re

import pytest

import clipgrad as cg
from tests.diagnose import diagnose_crossed as crossed
from tests.helpers import SEED
from tests.rows import some_of

pytestmark = pytest.mark.usefixtures("users_promotion")
PLAIN, *SURROUNDINGS = [*crossed.AROUND, *crossed.MODELS]
# What bfloat16 does not overflow, underflow or round as float32 does.
OTHERWISE = {("divided_by_what_overflows", "in_bfloat16"), ("small_cotangents", "in_bfloat16")}


def rows(functions):
    """Every fourth function in one surrounding by default, in turn, another with another seed.

    Slow: the others; as they are, and in two more.
    """

    def turn(step):
        places = [SURROUNDINGS[(i + step) % len(SURROUNDINGS)] for i in range(len(functions))]
        return set(zip(functions, places, strict=True)) - OTHERWISE

    drawn = turn(SEED)
    more = turn(SEED + 3) | turn(SEED + 6) | {(name, PLAIN) for name in functions}
    return some_of(sorted(drawn | more), sorted(drawn)[::4])


def said(diagnosis):
    return " ".join([*(finding.message for finding in diagnosis.findings), *diagnosis.notes])


@pytest.mark.parametrize("name, surrounding", rows(crossed.SICK))
def test_a_fault_is_found_at_its_line_wherever_it_is(name, surrounding):
    fault = crossed.SICK[name]
    loss, args, leaf = crossed.subject(surrounding, fault.function, fault.w)
    diagnosis = cg.diagnose(loss, args)
    assert "clipgrad/_" not in said(diagnosis) and "states[" not in said(diagnosis)
    if fault.what == "stop_gradient":
        assert diagnosis.ok and f"gradient of {leaf} is 0: stop_gradient detaches it" in said(
            diagnosis
        )
        assert diagnosis.message == "nothing is wrong with the gradient"
        return
    (finding,) = diagnosis.findings
    assert finding.message == diagnosis.message
    what = finding.cause if fault.kind == "zero" else finding.operation
    assert (finding.kind, what, finding.line) == (fault.kind, fault.what, fault.line), diagnosis
    if fault.kind == "zero":
        assert finding.leaf == leaf and not re.search(r"at step \d", finding.message)


@pytest.mark.parametrize("name, surrounding", rows(crossed.HEALTHY))
def test_nothing_is_said_of_a_healthy_function_wherever_it_is(name, surrounding):
    loss, args, _ = crossed.subject(surrounding, crossed.HEALTHY[name], crossed.W)
    diagnosis = cg.diagnose(loss, args)
    assert diagnosis.ok and diagnosis.message == "nothing is wrong with the gradient", diagnosis
    assert not any("gradient of" in note for note in diagnosis.notes), diagnosis
