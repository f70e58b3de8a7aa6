"""Losses as people write them: each planted difference is named, and equal pairs have none."""

import jax
import pytest

import clipgrad as cg
from tests.compare_pairs import EQUAL, PLANTED, Draw

pytestmark = pytest.mark.usefixtures("users_promotion")

CORE = ("float16 in a norm", "advantage not stopped", "rows over devices", "masks")
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
