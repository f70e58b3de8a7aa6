"""A wrong rule fails and the right one passes beside and inside of what a training step has.

As they are, both are rows of `check_tables.py`. Here each pair is in one surrounding, in turn: in
another one with another seed (`helpers.SEED`).
"""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.experimental import pallas as pl

import clipgrad as cg
from tests.check.check_zoo import PAIRS
from tests.helpers import SEED

pytestmark = pytest.mark.usefixtures("users_promotion")

CROSSED = """wrong_sign permuted_cotangent off_by_one_percent missing_factor forgotten_mean
first_row_instead_of_the_sum swapped_residuals wrong_for_negative_inputs_only dropped_second_output
scatter_that_sets_instead_of_adds leaves_of_a_tree_swapped transposed_weight_gradient
layer_norm_without_the_mean_term cumulative_sum_not_reversed norm_without_its_division
convolution_with_an_unflipped_kernel custom_jvp_with_a_missing_factor
wrong_deep_inside_a_scan""".split()


def detached(args):
    """A number of the arguments that no gradient passes."""
    first = next(x for x in jax.tree.leaves(args) if jnp.issubdtype(x.dtype, jnp.floating))
    return lax.stop_gradient(jnp.mean(jnp.abs(first)))


def scaled(outputs, factor):
    return jax.tree.map(lambda y: y * factor.astype(y.dtype), outputs)


def in_branches_that_are_one_function(function):
    return lambda *args: lax.switch(
        (detached(args) > 0).astype(int), [function, function, function], *args
    )


def beside_a_detached_loop(function):
    def halved_until_small(x):
        return lax.while_loop(lambda s: s > 1, lambda s: s / 2, x + 1)

    return lambda *args: scaled(function(*args), halved_until_small(detached(args)))


def beside_a_kernel(function):
    def kernel(x, out):
        out[...] = jnp.exp(-x[...])

    def surrounded(*args):
        x = detached(args).reshape(1)
        factor = pl.pallas_call(kernel, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
                                interpret=True)(x)  # fmt: skip
        return scaled(function(*args), factor[0])

    return surrounded


def in_a_vmap(function):
    def surrounded(*args):
        both = jax.tree.map(lambda x: jnp.stack([x, x]), args)
        return jax.tree.map(lambda y: y[0], jax.vmap(function)(*both))

    return surrounded


def in_a_scan_with_remat(function):
    def surrounded(*args):
        step = lambda carry, _: (carry, jax.checkpoint(function)(*args))  # noqa: E731
        return jax.tree.map(lambda y: y[1], lax.scan(step, 0, length=2)[1])

    return surrounded


class Model(eqx.Module):
    arrays: Any


def in_equinox(function):
    return lambda model: function(*model.arrays)


AROUND = [
    in_branches_that_are_one_function, beside_a_detached_loop, beside_a_kernel, in_a_vmap,
    in_a_scan_with_remat, in_equinox,
]  # fmt: skip
ROWS = [(name, AROUND[(i + SEED) % len(AROUND)]) for i, name in enumerate(CROSSED)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "around"), ROWS, ids=lambda x: x if isinstance(x, str) else x.__name__
)
def test_check_grads_judges_a_rule_alike_wherever_it_is(name, around):
    wrong, right, args = PAIRS[name][0](jnp.float32)
    args = (Model(args),) if around is in_equinox else args
    report = cg.check_grads(around(right), args, raise_on_failure=False)
    assert report.ok, report
    report = cg.check_grads(around(wrong), args, raise_on_failure=False)
    assert "value" in {failure.check for failure in report.failures}, report
