"""A diagnosis finds what is sick, and is silent about what is healthy."""

import pytest

import clipgrad as cg
from tests.diagnose_zoo import DECAYS, HEALTHY, SICK

pytestmark = pytest.mark.usefixtures("users_promotion")

# Of the healthy programs, a loop whose decay is meant, a deep network and a mask.
CORE = ("discounted_return_of_the_first_step", "scanned_residual_layers", "masked_attention")


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in CORE else pytest.mark.exhaustive) for name in HEALTHY],
)
def test_what_is_healthy_has_no_finding(name):
    if name.startswith(("lstm", "narrow", "gru")):
        pytest.importorskip("flax")
    found = cg.diagnose(*HEALTHY[name]())
    assert found.ok, str(found)


@pytest.mark.kinds(name=lambda name: SICK[name][1])
@pytest.mark.parametrize("name", SICK)
def test_what_is_sick_is_found(name):
    program, expected, factor = SICK[name]
    findings = cg.diagnose(*program()).findings
    assert findings and findings[0].kind == expected, [f.message for f in findings]
    assert factor is None or findings[0].factor == pytest.approx(factor, rel=1e-2)


@pytest.mark.parametrize("name", ["moving_average", "unrolled_fixed_point", *DECAYS])
def test_a_decay_is_a_note_while_all_leaves_keep_a_gradient(name):
    found = cg.diagnose(*(HEALTHY | DECAYS)[name]())
    (note,) = found.notes
    assert found.ok and note.startswith("tests/diagnose_zoo.py:") and "at each of the" in note
    assert note.endswith("all leaves keep a gradient")
