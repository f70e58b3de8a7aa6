"""Losses as people write them, and mixed precision: planted differences are named, others not."""

import jax
import jax.numpy as jnp
import pytest

import clipgrad as cg
from tests.compare.compare_models import MIXED, MIXED_FAULTS, make_args, model
from tests.compare.compare_pairs import EQUAL, PLANTED, Draw

pytestmark = pytest.mark.usefixtures("users_promotion")

CORE = ("advantage not stopped", "rows over devices", "masks")
DTYPES = pytest.mark.parametrize(
    "dtype", ["float32", pytest.param("float64", marks=pytest.mark.slow)]
)


def rows(table):
    """Each name; those of the core without a mark."""
    return [n if n in CORE else pytest.param(n, marks=pytest.mark.slow) for n in table]


def compared(pair, dtype):
    with jax.enable_x64(dtype == "float64"):
        return cg.compare(pair.fun, pair.other, pair.args(Draw(dtype)))


@pytest.mark.slow
@DTYPES
@pytest.mark.parametrize("name", rows(PLANTED))
def test_a_planted_difference_is_named(name, dtype):
    found = compared(PLANTED[name], dtype)
    assert not found.ok and len(found.findings) == 1, str(found)
    (finding,) = found.findings
    assert (finding.kind, finding.module, finding.step) == PLANTED[name].found, str(found)


@pytest.mark.slow
@DTYPES
@pytest.mark.parametrize("name", rows(EQUAL))
def test_equal_pairs_have_no_findings(name, dtype):
    found = compared(EQUAL[name], dtype)
    assert found.ok and not found.findings, str(found)


def compared_in_mixed_precision(parts, scan=True):
    kinds = {"scan": scan, "dtype": parts.get("dtype", jnp.bfloat16)}
    names = {} if parts.get("scan", scan) == scan else {"names": {"layers": "layers_*"}}
    return cg.compare(model(**kinds), model(**kinds | parts), make_args(), **names)


# Rounding decides a gradient of these, such as one of positions in bfloat16: `ok` is strict.
UNDECIDED = {"attention in blocks"}


@pytest.mark.parametrize("name", rows(MIXED))
def test_a_right_version_in_mixed_precision_has_no_findings(name):
    found = compared_in_mixed_precision(MIXED[name])
    assert {f.kind for f in found.findings} <= ({"not judged"} if name in UNDECIDED else set())
    assert found.ok is not bool(found.findings), str(found)
    assert len(found.rows) >= 9


@pytest.mark.parametrize("name", rows(MIXED_FAULTS))
def test_a_planted_fault_in_mixed_precision_is_named(name):
    parts, expected = MIXED_FAULTS[name]
    found = compared_in_mixed_precision(parts, parts.get("scan", True))
    assert not found.ok, str(found)
    assert (found.findings[0].kind, found.findings[0].module) == expected, str(found)
