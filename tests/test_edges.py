"""Edges at which clips have gone wrong: each of these inputs once gave another result."""

import dataclasses
import functools

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.ad_checkpoint import checkpoint_name

import clipgrad as cg
from tests.helpers import PLACES, assert_same


@pytest.mark.kinds("ord", "size")
@pytest.mark.parametrize("ord", [0.5, 1, 2, 3, jnp.inf])
@pytest.mark.parametrize("size", [8e37, 9e37, 3e38])
def test_the_largest_numbers_are_clipped_in_every_norm(ord, size):
    clipped = cg.ClipByNorm(1.0, ord=ord)(jnp.full(2, size))
    np.testing.assert_allclose(clipped, 1.0 if ord == jnp.inf else 2 ** (-1 / ord), rtol=1e-5)


def test_a_state_that_was_made_eagerly_can_be_donated():
    tx = cg.clip_by_global_norm(optax.linear_schedule(1.0, 0.5, 10), stats=True)
    params = {"w": jnp.ones(3)}
    step = jax.jit(lambda state, grads: tx.update(grads, state)[1], donate_argnums=0)
    assert step(tx.init(params), params).count == 1


@pytest.mark.exhaustive
def test_masks_of_trees_with_none():
    grads = {"a": None, "b": jnp.full((2, 2), 9.0), "c": jnp.full(2, 9.0)}
    where = lambda tree: jax.tree.map(lambda x: x.ndim > 1, tree)  # noqa: E731
    for mask in (where, where(grads)):
        clipped, _ = cg.clip_grads(grads, cg.ClipByNorm(1.0), where=mask)
        assert clipped["c"] is grads["c"] and clipped["b"][0, 0] == 0.5
    with pytest.raises(ValueError, match="where: got None in the mask where the tree has leaves"):
        cg.clip_grads(grads, cg.ClipByNorm(1.0), where={"a": None, "b": True, "c": None})
    with pytest.raises(ValueError, match=r"where: got '\(', expected a path or a regular"):
        cg.clip_grads(grads, cg.ClipByNorm(1.0), where="(")


@dataclasses.dataclass(frozen=True)
class Both:
    first: object
    second: object

    def __call__(self, grads, params=None):
        return self.second(self.first(grads))


def test_a_dataclass_of_ones_own_that_holds_rules_is_a_rule():
    rule = Both(cg.ClipByValue(4.0), cg.ClipByNorm(1.0))
    grads = jnp.array([3.0, 9.0])
    np.testing.assert_allclose(cg.clip_grads(grads, rule)[0], [0.6, 0.8], rtol=1e-6)
    tx = cg.gradient_clip(rule, stats=True)
    updates, state = tx.update(grads, tx.init(grads))
    np.testing.assert_allclose(updates, [0.6, 0.8], rtol=1e-6)
    assert state.threshold is None


@pytest.mark.parametrize("rule", [cg.ClipByValue(1.0), cg.ClipByGlobalNorm(1.0)], ids=range(2))
def test_export_with_a_symbolic_shape(rule):
    (n,) = jax.export.symbolic_shape("n")
    gradient = jax.jit(jax.grad(lambda x: jnp.sum(3 * cg.clip_cotangent(x, rule))))
    exported = jax.export.export(gradient)(jax.ShapeDtypeStruct((n, 3), jnp.float32))
    np.testing.assert_allclose(exported.call(jnp.ones((2, 3))), gradient(jnp.ones((2, 3))))


def test_a_signature_that_lies_is_refused_and_not_passed_over():
    def shifted(f):
        @functools.wraps(f)
        def inner(rng, *args):
            return f(*args)

        return inner

    clipped = cg.error_clip(cg.ClipByValue(0.1))(shifted(lambda x: 5 * x))
    with pytest.raises(TypeError, match="got a call that does not fit the signature"):
        jax.grad(lambda x: clipped(None, x))(1.0)


def test_generators_are_refused():
    def generate(x):
        yield x

    with pytest.raises(TypeError, match="expected a function that returns a result"):
        cg.error_clip(outputs=cg.ClipByValue(1.0))(generate)


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
def test_a_bound_above_the_range_of_a_narrow_dtype(dtype):
    x = jnp.array([1.0, -2.0]).astype(dtype)
    for rule in (cg.ClipByValue(1e6), cg.ClipByValue(1e6, -1e6), cg.ClipByValue(jnp.inf)):
        assert_same(rule(x), x)


def test_parameters_that_are_python_or_numpy_numbers_train_without_a_retrace():
    traces = []

    def loss(p, b):
        traces.append(1)
        return jnp.sum((p["w"] * b + p["b"]) ** 2)

    step = cg.train_step(loss, optax.sgd(0.1))
    state = step.init({"w": np.ones(3), "b": 2.0})
    for _ in range(3):
        state, _ = step(state, jnp.ones(3))
    assert len(traces) == 1


def test_a_schedule_that_falls_below_zero_acts_as_zero():
    tx = cg.clip_by_global_norm(optax.linear_schedule(1.0, -1.0, 2))
    state = tx.init(jnp.ones(2))
    for limit in (1.0, 0.0, 0.0):
        updates, state = tx.update(jnp.array([3.0, 4.0]), state)
        np.testing.assert_allclose(jnp.linalg.norm(updates), limit, atol=1e-7)
    negative = jax.tree.map(lambda c: -c, cg.ClipByNorm(1.0))
    np.testing.assert_array_equal(negative(jnp.ones(3)), 0)


@pytest.mark.exhaustive
def test_smaller_edges():
    assert (
        cg.clip_by_norm(1.0, stats=True)
        .init({"w": jax.ShapeDtypeStruct((3,), jnp.bfloat16)})
        .stats.norm.dtype
        == jnp.float32
    )
    assert np.isfinite(jax.grad(lambda g: cg.global_norm(g, 0.5))(jnp.array([1.0, 1e-30]))).all()
    np.testing.assert_allclose(abs(cg.ClipByValue(1.0)(jnp.array([3e38 + 3e38j]))), 1, rtol=1e-6)
    with pytest.raises(ValueError, match=r"threshold: got an array of shape \(1,\), expected one"):
        cg.ClipByGlobalNorm(jnp.array([1.0]))(jnp.ones(2))
    with pytest.raises(ValueError, match="dtype: got bfloat16, expected float32 or float64"):
        cg.types.ClipStats.zero(dtype=jnp.bfloat16)
    with pytest.raises(TypeError, match="name it in static_args"):
        jax.jit(lambda axis: cg.ClipByNorm(1.0, axis=axis)(jnp.ones(2)))(0)


# NumPy's float64, which JAX computes in float32: a warning would be an error here. It would come
# while JAX traces, so most of these programs are not compiled.

NUMPY = {"b": np.float64(2.0), "v": np.ones(3), "w": np.ones((3, 4))}
RULES = {
    "value": cg.ClipByValue,
    "norm": cg.ClipByNorm,
    "norm of order 1": lambda c: cg.ClipByNorm(c, ord=1),
    "largest": lambda c: cg.ClipByNorm(c, ord=jnp.inf),
    "global norm": cg.ClipByGlobalNorm,
    "block RMS": cg.ClipByBlockRMS,
    "adaptive": cg.AdaptiveClip,
    "function": lambda c: lambda tree: jax.tree.map(lambda g: 0.5 * g, tree),
}


def model(params, x):
    h = checkpoint_name(x @ params["w"], "h")
    return jnp.mean(h) * params["b"] + jnp.sum(params["v"])


X = np.ones((4, 3))


@pytest.mark.kinds()
@pytest.mark.parametrize("run", [
    lambda: cg.global_norm(NUMPY),
    lambda: cg.types.ClipStats.of(NUMPY, NUMPY),
    lambda: cg.clip_by_global_norm(1.0).update(
        NUMPY, optax.EmptyState(), grad_norm=np.float64(3.0)),
    lambda: cg.clip_grads(NUMPY, cg.ClipByGlobalNorm(1.0), norm=np.float64(3.0)),
    *(lambda kind=kind: cg.published.apply_gradient_clipping(
        NUMPY, NUMPY, clipping_type=kind, clipping_threshold=np.float64(0.1))
      for kind in ("norm", "value", "adaptive")),
    *(lambda options=options: (lambda tx: tx.update(NUMPY, tx.init(NUMPY), NUMPY))(
        cg.skip_spikes(optax.sgd(0.1, 0.9), **options))
      for options in ({}, {"max_norm": np.float64(3.0), "sigma": None})),
    lambda: jax.grad(cg.error_clip(cg.ClipByNorm(0.1))(model))(NUMPY, X),
    lambda: jax.grad(cg.error_clip_by_name(model, {"h": cg.ClipByNorm(0.1)}))(NUMPY, X),
    lambda: jax.grad(cg.error_clip_everywhere(model, cg.ClipByNorm(0.1)))(NUMPY, X),
    lambda: cg.value_and_grad_with_stats(model)(NUMPY, X),
    lambda: cg.clip_per_example(model, cg.ClipByNorm(0.1), microbatch=2)(NUMPY, np.ones((4, 3))),
    lambda: (lambda step: step(step.init(NUMPY), X))(
        cg.train_step(model, optax.sgd(0.1), accumulate=2, error_clip={"h": cg.ClipByNorm(0.1)})),
], ids=range(15))  # fmt: skip
def test_nothing_else_warns_of_numpy_numbers(run):
    for leaf in jax.tree.leaves(jax.eval_shape(run)):
        assert leaf.dtype in (jnp.float32, jnp.int32, bool)


# Scales of a microscaling format are no gradients: they have no zero and no sign.

SCALES = jnp.ones((2, 2), jnp.float8_e8m0fnu)


def scaled(params, x=1.0):
    return jnp.sum(checkpoint_name(params, "h").astype(jnp.float32)) * jnp.sum(x)


def step_of(tx):
    step = cg.train_step(scaled, tx)
    return step(step.init(SCALES), jnp.ones(2))


@pytest.mark.parametrize("run", [
    *(lambda make=make: make(1.0)(SCALES, SCALES)
      for name, make in RULES.items() if name != "function"),
    *(lambda make=make: cg.clip_grads(SCALES, make(1.0), SCALES) for make in RULES.values()),
    *(lambda make=make: cg.clip_cotangent(SCALES, make(1.0)) for make in RULES.values()),
    *(lambda make=make: cg.gradient_clip(make(1.0)).update(SCALES, optax.EmptyState(), SCALES)
      for make in RULES.values()),
    lambda: cg.clip_grads(SCALES, None),
    lambda: cg.clip_by_norm(1.0, stats=True).init(SCALES),
    lambda: cg.skip_spikes(optax.sgd(0.1)).init(SCALES),
    lambda: cg.global_norm(SCALES),
    lambda: cg.types.ClipStats.of(SCALES, SCALES),
    *(lambda kind=kind: cg.published.apply_gradient_clipping(
        SCALES, SCALES, clipping_type=kind, clipping_threshold=0.1)
      for kind in ("norm", "value", "adaptive")),
    lambda: cg.clip_per_example(scaled, cg.ClipByNorm(1.0))(SCALES, jnp.ones(2)),
    lambda: cg.error_clip(cg.ClipByNorm(1.0))(scaled)(SCALES),
    lambda: jax.vjp(cg.error_clip_by_name(scaled, {"h": cg.ClipByNorm(1.0)}), SCALES),
    lambda: jax.vjp(cg.error_clip_everywhere(
        lambda x: scaled(x.astype(SCALES.dtype)), cg.ClipByNorm(1.0)), jnp.ones(2)),
    lambda: cg.value_and_grad_with_stats(scaled)(SCALES),
    lambda: step_of(optax.sgd(0.1)),
    lambda: step_of(optax.chain(cg.clip_by_norm(1.0), optax.sgd(0.1))),
])  # fmt: skip
def test_a_dtype_without_zero_and_sign_is_refused(run):
    with pytest.raises(TypeError, match="got a leaf of dtype float8_e8m0fnu.*such as float32"):
        run()


# Schedules and arrays that are no thresholds.


@pytest.mark.parametrize("value", [None, "0.5", 1j, True, jnp.array(1j)], ids=repr)
@pytest.mark.parametrize(
    "make, field",
    [
        (cg.ClipByValue, "max"),
        (lambda t: cg.ClipByValue(1.0, min=t), "min"),
        (cg.ClipByNorm, "max_norm"),
        (cg.ClipByGlobalNorm, "max_norm"),
        (cg.ClipByBlockRMS, "threshold"),
        (cg.AdaptiveClip, "clipping"),
        (lambda t: cg.AdaptiveClip(0.1, eps=t), "eps"),
    ],
    ids=range(7),
)
def test_a_schedule_that_returns_no_number_is_refused_under_its_name(make, field, value):
    early = cg.gradient_clip(make(lambda step: value))
    with pytest.raises(TypeError, match=f"^{field}: got .* from the schedule, expected a number"):
        early.init(jnp.ones(2))
    later = {"value": 0.5}
    late = cg.gradient_clip(make(lambda step: later["value"]))
    state = late.init(jnp.ones(2))
    later["value"] = value
    with pytest.raises(TypeError, match=f"^{field}: got .* from the schedule, expected a number"):
        late.update(jnp.ones(2), state, jnp.ones(2))


@pytest.mark.parametrize("wrong", [jnp.ones(3), jnp.ones((2, 2)), np.ones((1, 1, 1))], ids=str)
def test_a_limit_of_units_of_another_shape_is_refused(wrong):
    x = {"w": jnp.ones((2, 2))}
    match = r"got an array of shape \(.*\), expected one that broadcasts to the norms, of shape"
    for rule in (cg.AdaptiveClip(wrong), cg.AdaptiveClip(0.1, eps=wrong)):
        for clip in PLACES.values():
            with pytest.raises(ValueError, match=match):
                clip(rule, x, x)
    with pytest.raises(ValueError, match=match):
        cg.published.apply_gradient_clipping(
            x, x, clipping_type="adaptive", clipping_threshold=wrong
        )


@pytest.mark.exhaustive
@pytest.mark.parametrize("limit", [np.int64(2**31), np.int64(2**32 - 1), 2**31, 10**10])
def test_large_integer_thresholds_do_not_wrap(limit):
    for make in (cg.ClipByNorm, cg.ClipByValue, cg.ClipByGlobalNorm, cg.ClipByBlockRMS):
        assert_same(make(limit)(jnp.array([-1.0, 0.5, 3.0])), jnp.array([-1.0, 0.5, 3.0]))
    tx = cg.clip_by_global_norm(limit, stats=True)
    updates, state = tx.update(jnp.ones(2), tx.init(jnp.ones(2)))
    assert (updates == 1).all() and state.threshold == np.float32(limit)
