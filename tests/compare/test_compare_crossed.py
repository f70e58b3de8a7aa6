"""Versions are compared alike wherever a training step has them: `registry/surroundings.py`."""

import pytest

import clipgrad as cg
from tests.compare.compare_pairs import EQUAL, PLANTED, Draw
from tests.registry.surroundings import drawn, row_id

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("users_promotion")]


def compared(pair, around):
    return cg.compare(around(pair.fun), around(pair.other), pair.args(Draw("float32")))


@pytest.mark.parametrize(("name", "around"), drawn(PLANTED), ids=row_id)
def test_compare_finds_a_planted_difference_wherever_it_is(name, around):
    comparison = compared(PLANTED[name], around)
    assert not comparison.ok and comparison.findings[0].kind == PLANTED[name].finding[0], comparison


@pytest.mark.parametrize(("name", "around"), drawn(EQUAL), ids=row_id)
def test_compare_finds_nothing_in_equal_versions_wherever_they_are(name, around):
    comparison = compared(EQUAL[name], around)
    assert comparison.ok and not comparison.findings, comparison
