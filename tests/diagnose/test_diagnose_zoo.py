"""A diagnosis finds what is sick, at its line, and is silent about what is healthy."""

import re

import pytest

import clipgrad as cg
from clipgrad._diagnose.finding_kinds import FINDING_KINDS
from clipgrad._diagnose.records import GradientFinding
from tests.diagnose.diagnose_numbers import HEALTHY, NOTED, SICK
from tests.pages import rows
from tests.rows import first_row, some_of

pytestmark = pytest.mark.usefixtures("users_promotion")

# Of the healthy programs, a loop whose decay is meant, a deep network, masks and infinities.
CORE = (
    "discounted_return_of_the_first_step", "scanned_residual_layers", "masked_attention",
    "double_where", "gradient_that_a_mask_drops", "stopped", "infinities", "scan_without_steps",
)  # fmt: skip


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in CORE else pytest.mark.slow) for name in HEALTHY],
)
def test_what_is_healthy_has_no_finding(name):
    diagnosis = cg.diagnose(*HEALTHY[name]())
    assert diagnosis.ok and str(diagnosis).startswith("nothing is wrong"), str(diagnosis)


# The operations that are suspect are in the table of `test_advice.py`.
DEAR = {"attention", "equal_eigenvalues", "index_10_value"}
ONE_OF_EACH_KIND = {SICK[n].expected["kind"]: n for n in reversed(SICK) if n not in DEAR}.values()


@pytest.mark.parametrize("name", some_of(SICK, ONE_OF_EACH_KIND))
def test_what_is_sick_is_found(name):
    SICK[name].check()


@first_row
@pytest.mark.parametrize("name", NOTED)
def test_what_is_no_fault_is_a_note(name):
    make, *texts = NOTED[name]
    diagnosis = cg.diagnose(*make())
    (note,) = diagnosis.notes
    assert diagnosis.ok and all(text in note for text in texts)
    assert note.startswith("tests/diagnose/diagnose_")


def test_the_kinds_of_findings_are_those_of_the_page_and_of_the_docstrings():
    page = [name for row in rows("nan.md", "kind") for name in row[0].split(", ")]
    assert sorted(page) == sorted({row.expected["kind"] for row in SICK.values()} | {"zero"})
    assert sorted(page) == sorted(FINDING_KINDS)
    assert sorted(re.findall(r'^ *"(\w+)"  ', cg.diagnose.__doc__, re.MULTILINE)) == sorted(page)
    (kind,) = re.findall(r"kind: (.*?)\n\s+file:", GradientFinding.__doc__, re.DOTALL)
    assert sorted(re.findall(r'"(\w+)"', kind)) == sorted(page)
