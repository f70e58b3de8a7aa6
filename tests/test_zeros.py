"""Where the gradient of a leaf that is exactly zero was cut."""

import jax
import jax.numpy as jnp
import pytest

import clipgrad as cg
from tests import zero_cuts
from tests.zero_cuts import CUTS, HEALTHY, NOTED, X


def diagnosed(programs):
    """One diagnosis of the sum of some programs, which are written as users write them."""
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        loss, params = zero_cuts.merged(programs)
        return cg.diagnose(loss, (params, jnp.asarray(X)))


@pytest.fixture(scope="module")
def table():
    """One diagnosis of all cuts together."""
    return diagnosed([(cut.function, cut.params) for cut in CUTS])


def told(cut, found):
    """What a diagnosis has on the leaf of a cut: lines and causes of findings, lines of notes."""
    leaf = f"args[0]['{cut.name}']{cut.leaf}"
    findings = [(f.line, f.cause) for f in found.findings if leaf in f.leaf.split(", ")]
    notes = [note for note in found.notes if leaf in note]
    return findings, notes


@pytest.mark.parametrize("cut", CUTS, ids=lambda cut: cut.name)
def test_a_cut_is_found_at_its_line_with_its_cause(cut, table):
    findings, notes = told(cut, table)
    if cut.cause not in NOTED:
        assert findings == [(cut.line, cut.cause)]
        return
    assert not findings
    assert any(cut.line is None or f"zero_cuts.py:{cut.line}:" in note for note in notes)


def test_healthy_programs_have_no_finding():
    found = diagnosed(HEALTHY)
    assert found.ok, found
