"""Where a gradient ends, and why: a cause is told only if it is one, at the user's line."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend import source_info_util

import clipgrad as cg
from tests.diagnose.cut_losses import CUTS, P, X, keep_half, stop
from tests.helpers import array, line_of
from tests.rows import some_of

pytestmark = pytest.mark.usefixtures("users_promotion")
SOME = frozenset(
    """masks_that_the_data_makes_from_the_second_step_on integers_in_a_scan empty_slice
    exponent_of_one divisor_that_overflows at_each_step_of_a_carry""".split()
)
ROWS = [pytest.param(n, marks=() if n in SOME else pytest.mark.slow) for n in CUTS]


@pytest.mark.parametrize("name", ROWS)
def test_a_cut_is_told_where_it_is_and_why(name):
    loss, cause, says, never, params = CUTS[name]
    diagnosis = cg.diagnose(loss, (params, X))
    (finding,) = diagnosis.findings
    fields = finding.kind, finding.cause, finding.leaf, finding.line
    assert fields == ("zero", cause, "args[0]['w']", line_of(loss, "# cut")), diagnosis
    assert says in finding.message and never not in finding.message, diagnosis


def test_a_function_of_jax_that_another_program_traced_first_has_the_line_of_its_caller():
    """JAX keeps what it has traced of ``jnp.round``: the lines are those of the first trace."""
    other = jax.make_jaxpr(lambda x: 2 * x)(1.0).eqns[0].source_info
    with source_info_util.user_context(other.traceback):
        jax.make_jaxpr(lambda x: jnp.round(x, 7))(array(np.ones(3)))

    def loss(w):
        return jnp.sum(jnp.round(w, 7))  # cut

    assert cg.diagnose(loss, (array(np.ones(3)),)).findings[0].line == line_of(loss, "# cut")


# -- What may be meant.


@pytest.mark.slow
def test_masks_of_a_key_that_a_scan_carries_are_random_at_each_step():
    def loss(p, x):
        def step(key, row):
            key, now = jax.random.split(key)
            keep = keep_half(now)
            return key, jnp.sum(p["w"] * keep * (1 - keep))

        return jnp.sum(lax.scan(step, jax.random.key(1), x)[1]) + jnp.sum(p["v"])

    diagnosis = cg.diagnose(loss, (P, X))
    assert diagnosis.ok and "random numbers alone" in diagnosis.notes[0], diagnosis


@pytest.mark.parametrize("by", [
    lambda h: lax.cond(jnp.sum(h**2) < 1e9, stop, lambda h: h, h),
    lambda h: lax.switch(jnp.argmin(h) * 0, [stop, jnp.sin], h),
    lambda h: lax.fori_loop(0, (h[0] < 9).astype(int), lambda i, y: y + 0.1, stop(h)),
    lambda h: jnp.where(jnp.sum(h**2) < 1e9, stop(h), h),
], ids=["cond", "switch", "loop", "where"])  # fmt: skip
def test_what_only_chooses_a_branch_is_no_use_of_a_value(by):
    diagnosis = cg.diagnose(lambda p, x: jnp.sum(by(p["w"] * 2) * p["v"]), (P, X))
    assert diagnosis.ok and "detache" in " ".join(diagnosis.notes), diagnosis


def test_a_loss_that_reads_no_parameter_is_not_ok_and_one_unused_leaf_is_a_note():
    diagnosis = cg.diagnose(lambda p, x: jnp.mean((jnp.zeros_like(p["w"]) + x) ** 2), (P, X))
    (finding,) = diagnosis.findings
    assert (finding.kind, finding.cause) == ("zero", "unused")
    assert finding.leaf == "args[0]['v'], args[0]['w']" and finding.message == diagnosis.message
    some = cg.diagnose(lambda p, x: jnp.sum(p["v"] * x), (P, X))
    assert some.ok and some.notes == ("the loss does not depend on args[0]['w']",)


# -- Not finite.


def masked(p, x):
    y = jnp.sin(p["w"] * x)
    return jnp.sum(jnp.where(jnp.isfinite(y), y**2, 0.0) * p["v"])


FINE, BAD = array([0.3, 0.7, -1.1]), array([1.0, jnp.nan, 2.0])


@pytest.mark.parametrize("args, leaf", [
    (({"w": BAD, "v": array([1.0, jnp.nan, 1.0])}, FINE), "args[0]['w']"),
    (({"w": FINE, "v": FINE}, BAD), "args[1]"),
    (({"w": FINE, "v": FINE}, array([1.0, jnp.inf, 2.0])), "args[1]"),
], ids=["parameter", "batch", "inf"])  # fmt: skip
def test_an_argument_that_is_not_finite_is_named_behind_a_mask(args, leaf):
    args[0]["v"] = array(np.ones(3))
    finding = cg.diagnose(masked, args).findings[0]
    assert (finding.kind, finding.operation) == ("value", "argument")
    assert f"1 of 3 elements of {leaf} are not finite" in finding.message
    assert ("the step that made them so is an earlier one" in finding.message) == (
        leaf == "args[0]['w']"  # which is trained
    )


@pytest.mark.parametrize("constant", [
    lambda x: jnp.array(jnp.nan), lambda x: jnp.log(jnp.zeros(3)).sum(),
    lambda x: jnp.sum(x * jnp.array([1.0, jnp.nan])),
], ids=["literal", "computed", "product"])  # fmt: skip
def test_a_constant_that_is_not_finite_is_no_argument(constant):
    diagnosis = cg.diagnose(constant, (array(np.ones(2)),))
    assert not diagnosis.ok and "elements of args[0]" not in diagnosis.message


@pytest.mark.slow
@pytest.mark.parametrize("inner, name", [
    (lambda y: jnp.sqrt(jnp.abs(y)), "sqrt"),
    pytest.param(lambda y: jnp.linalg.norm(y, axis=-1), "norm", marks=pytest.mark.slow),
    pytest.param(lambda y: jnp.log(jnp.abs(y)) ** 2, "log", marks=pytest.mark.slow),
], ids=["sqrt", "norm", "log"])  # fmt: skip
def test_an_inner_gradient_names_the_operation_of_the_user(inner, name):
    def loss(w, x):
        grad = jax.grad(lambda w: jnp.mean(inner(x @ w)))(w)  # here
        return jnp.mean((x @ (w - 0.1 * grad)) ** 2)

    finding = cg.diagnose(loss, (jnp.zeros((3, 2)), X)).findings[0]
    assert name in finding.message and "interpreters" not in finding.message
    assert re.search(r"test_diagnose_cuts.py:\d+", finding.message)


# -- The advice, and what is steady.


@pytest.mark.parametrize(
    "dtype, small, other", [("float16", 1e-4, "bfloat16"), ("bfloat16", 3e-20, "float32")]
)
def test_underflow_advises_a_wider_type_and_a_scale_that_was_tried(dtype, small, other):
    factors = array(np.where(np.arange(64) < 32, 1, small), dtype)

    def loss(w):
        return jnp.sum(jnp.sin(w) * factors * factors).astype(jnp.float32)

    message = cg.diagnose(loss, (array(np.linspace(0.1, 1, 64), dtype),)).message
    assert f"zero in {dtype} but not in float32" in message and f"use {other}" in message
    assert "scale the loss, for example by 2 ** 15" in message


@pytest.mark.slow
def test_a_scale_that_makes_the_gradient_nan_is_not_advised():
    """Scaled by 2 ** 15, the cotangents of what is large overflow in float16."""
    factors = jnp.where(jnp.arange(64) < 32, 300, 1e-4).astype(jnp.float16)

    def loss(w):
        return jnp.sum(jnp.sin(w) * factors * factors * 0.5).astype(jnp.float32)

    message = cg.diagnose(loss, (jnp.linspace(0.1, 1, 64).astype(jnp.float16),)).message
    scale = re.search(r"scale the loss, for example by 2 \*\* (\d+)", message)
    grad = jax.grad(lambda w: loss(w) * 2.0 ** int(scale[1]) if scale else loss(w))
    assert jnp.isfinite(grad(jnp.linspace(0.1, 1, 64).astype(jnp.float16))).all(), message


def decaying(factor, end):
    def loss(p, x):
        h = lax.scan(lambda h, _: (factor * h, None), p["w"], None, length=24)[0]
        return jnp.sum(h * end(p))

    return loss


@pytest.mark.slow
def test_a_decay_is_a_note_while_the_leaf_keeps_most_of_its_gradient():
    loss = decaying(0.5, lambda p: p["v"])
    lost = cg.diagnose(loss, (P, X))
    assert [finding.kind for finding in lost.findings] == ["shrinks"]

    def kept(p, x):
        return loss(p, x) + 1e-2 * jnp.sum(p["w"])  # a hundredth of the largest cotangent

    diagnosis = cg.diagnose(kept, (P, X))
    assert diagnosis.ok and "all leaves keep a gradient" in diagnosis.notes[0], diagnosis


def test_a_decay_beside_a_leaf_without_a_gradient_is_a_note_that_does_not_say_all_keep_one():
    decays = decaying(0.5, lambda p: p["v"])

    def loss(p, x):
        return decays(p, x) + 1e-2 * jnp.sum(p["w"]) + jnp.sum(jnp.round(p["u"]))

    diagnosis = cg.diagnose(loss, (P | {"u": X}, X))
    assert [finding.leaf for finding in diagnosis.findings] == ["args[0]['u']"]
    assert not any("all leaves keep a gradient" in note for note in diagnosis.notes)


@pytest.mark.parametrize("reverse", some_of([True, False], [True]))
def test_what_grows_in_a_scan_grows_in_a_reversed_one(reverse):
    def loss(p, x):
        h = lax.scan(lambda h, _: (3.0 * h, None), p["w"], None, length=24, reverse=reverse)[0]
        return jnp.sum(h * p["v"])

    (finding,) = cg.diagnose(loss, (P, X)).findings
    assert finding.kind == "grows", finding
