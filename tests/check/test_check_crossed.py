"""A wrong rule fails and the right one passes beside and inside of what a training step has.

As they are, both are rows of `check_tables.py`. Here each pair is in one surrounding, in turn: in
another one with another seed (`helpers.SEED`).
"""

from typing import Any

import equinox as eqx
import jax.numpy as jnp
import pytest

import clipgrad as cg
from tests.check.check_zoo import PAIRS
from tests.registry.surroundings import AROUND, drawn, row_id

pytestmark = pytest.mark.usefixtures("users_promotion")

CROSSED = """wrong_sign permuted_cotangent off_by_one_percent missing_factor forgotten_mean
first_row_instead_of_the_sum swapped_residuals wrong_for_negative_inputs_only dropped_second_output
scatter_that_sets_instead_of_adds leaves_of_a_tree_swapped transposed_weight_gradient
layer_norm_without_the_mean_term cumulative_sum_not_reversed norm_without_its_division
convolution_with_an_unflipped_kernel custom_jvp_with_a_missing_factor
wrong_deep_inside_a_scan""".split()


class Model(eqx.Module):
    arrays: Any


def in_equinox(function):
    return lambda model: function(*model.arrays)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "around"), drawn(CROSSED, [*AROUND, in_equinox]), ids=row_id)
def test_check_grads_judges_a_rule_alike_wherever_it_is(name, around):
    wrong, right, args = PAIRS[name][0](jnp.float32)
    args = (Model(args),) if around is in_equinox else args
    report = cg.check_grads(around(right), args, raise_on_failure=False)
    assert report.ok, report
    report = cg.check_grads(around(wrong), args, raise_on_failure=False)
    assert "value" in {failure.check for failure in report.failures}, report
