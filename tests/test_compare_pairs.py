"""Losses as people write them, and mixed precision: planted differences are named, others not."""

import jax
import pytest

import clipgrad as cg
from tests import compare_mixed
from tests.compare_pairs import EQUAL, PLANTED, Draw

pytestmark = pytest.mark.usefixtures("users_promotion")

CORE = ("float16 in a norm", "advantage not stopped", "rows over devices", "masks", "logsumexp")
CORE += ("the mask is late by one",)
DTYPES = pytest.mark.parametrize(
    "dtype", ["float32", pytest.param("float64", marks=pytest.mark.exhaustive)]
)


def rows(table):
    """Each name; those of the core without a mark."""
    return [n if n in CORE else pytest.param(n, marks=pytest.mark.exhaustive) for n in table]


def compared(pair, dtype):
    with jax.enable_x64(dtype == "float64"):
        return cg.compare(pair.fun, pair.other, pair.args(Draw(dtype)))


@DTYPES
@pytest.mark.parametrize("name", rows(PLANTED))
def test_a_planted_difference_is_named(name, dtype):
    found = compared(PLANTED[name], dtype)
    assert not found.ok and len(found.findings) == 1, str(found)
    (finding,) = found.findings
    assert (finding.kind, finding.module, finding.step) == PLANTED[name].found, str(found)


@DTYPES
@pytest.mark.parametrize("name", rows(EQUAL))
def test_equal_pairs_have_no_findings(name, dtype):
    found = compared(EQUAL[name], dtype)
    assert found.ok and not found.findings, str(found)


@pytest.mark.parametrize("name", rows(compare_mixed.RIGHT))
def test_a_right_version_in_mixed_precision_has_no_findings(name):
    pair = compare_mixed.RIGHT[name]()
    found = cg.compare(pair.fun, pair.other, pair.args, **pair.options)
    assert found.ok and not found.findings, str(found)
    assert len(found.rows) >= 9


@pytest.mark.parametrize("name", rows(compare_mixed.FAULTS))
def test_a_planted_fault_in_mixed_precision_is_named(name):
    pair = compare_mixed.FAULTS[name]()
    found = cg.compare(pair.fun, pair.other, pair.args, **pair.options)
    assert not found.ok, str(found)
    if "argnums" in pair.options:
        assert set(pair.found) <= {f.path for f in found.findings}, str(found)
    else:
        assert (found.findings[0].kind, found.findings[0].module) == pair.found, str(found)
