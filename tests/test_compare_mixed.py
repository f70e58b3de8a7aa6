"""Mixed precision: right versions of a model and of a step are silent, planted faults are named."""

import pytest

import clipgrad as cg
from tests.compare_mixed import FAULTS, RIGHT

pytestmark = pytest.mark.usefixtures("users_promotion")

CORE = ("logsumexp", "the mask is late by one")


def rows(table):
    """Each name; those of the core without a mark."""
    return [n if n in CORE else pytest.param(n, marks=pytest.mark.exhaustive) for n in table]


def compared(pair):
    return cg.compare(pair.fun, pair.other, pair.args, **pair.options)


@pytest.mark.parametrize("name", rows(RIGHT))
def test_a_right_version_has_no_findings(name):
    found = compared(RIGHT[name]())
    assert found.ok and not found.findings, str(found)
    assert len(found.rows) >= 9


@pytest.mark.parametrize("name", rows(FAULTS))
def test_a_planted_fault_is_named(name):
    pair = FAULTS[name]()
    found = compared(pair)
    assert not found.ok, str(found)
    if "argnums" in pair.options:
        assert set(pair.found) <= {f.path for f in found.findings}, str(found)
    else:
        assert (found.findings[0].kind, found.findings[0].module) == pair.found, str(found)
