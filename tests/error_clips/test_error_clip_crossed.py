"""A value is clipped by name as by hand wherever a program has it: `registry/surroundings.py`."""

import jax
import pytest

import clipgrad as cg
from tests.error_clips.tagged import MODELS, X, by_hand, loss_of
from tests.helpers import assert_close
from tests.registry.surroundings import drawn, row_id

RULES = {"h": cg.ErrorClipByValue(0.05), "out": cg.ErrorClipByValue(0.1)}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "around"), drawn(MODELS), ids=row_id)
def test_error_clip_by_name_clips_a_value_wherever_it_is(name, around):
    def model(x, tag):
        return around(lambda x: MODELS[name](x, tag))(x)

    names = {value.name for value in cg.list_names(loss_of(model), (X,))}
    rules = {name: rule for name, rule in RULES.items() if name in names}
    clipped = jax.jit(jax.grad(cg.error_clip_by_name(loss_of(model), rules)))(X)
    expected = jax.jit(jax.grad(loss_of(model, by_hand(rules))))(X)
    assert_close(clipped, expected, rtol=1e-5, atol=1e-6)
    plain = jax.jit(jax.grad(loss_of(model)))(X)
    assert rules and (abs(clipped - plain) > 1e-3).any()
