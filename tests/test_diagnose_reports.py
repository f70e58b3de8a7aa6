"""Faults as people have reported them: each ends in a sentence that its author can act on."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import clipgrad as cg
from tests.test_diagnose import line_of

BOUND = "bound its argument, as in jnp.exp(jnp.minimum(x, "
BOTH_SIDES = "mask its input, not only its result: with ok where it is finite, jnp.where(ok, "
NAME = "tests/test_diagnose_reports.py"


def message(loss, *args, **options):
    """The message of the first finding."""
    return cg.diagnose(loss, args, **options).findings[0].message


def at(fun, text):
    return f"({NAME}:{line_of(fun, text)})"


def bounded(ratio, kind):
    choices = (lambda r: jnp.minimum(r, 2.0), lambda r: jnp.where(r > 2, 2.0, r),
               lambda r: jnp.clip(r, 0.0, 2.0), lambda r: 1 / (1 + r), jnp.tanh,
              lambda r: jnp.minimum(jnp.clip(r, 0.8, 9.0), r))  # fmt: skip
    return choices[kind](ratio)


@pytest.mark.parametrize(
    "kind, dtype", list(enumerate([jnp.float32, jnp.float16, jnp.bfloat16] * 2))
)
def test_an_overflow_that_is_hidden_is_named(kind, dtype):
    def loss(x):
        return jnp.sum(bounded(jnp.exp(x), kind)).astype(jnp.float32)

    x = jnp.array([0.5, 300.0, 1.0], dtype)
    found = message(jax.jit(loss) if kind % 2 else loss, x)
    assert "the VJP of exp at 300" in found and BOUND in found
    assert "since its value is not finite there" in found
    assert cg.diagnose(loss, (x.at[1].set(2.0),)).ok


def delays(params, times):
    decay = jnp.exp(-times / 10 ** params["tau"])
    return jnp.sum(jnp.where(times > 0, 10 ** params["size"] * decay, 0.0) ** 2)


def test_an_overflow_that_another_vjp_reads_is_named():
    params = {"tau": jnp.float32(0.8), "size": jnp.float32(-2.0)}
    found = message(delays, params, jnp.linspace(-4000.0, 500.0, 10))
    assert "the VJP of mul" in found and "since it reads the result of exp at " in found
    assert f"{at(delays, 'jnp.exp')}, which is not finite" in found
    assert BOUND in found and "jnp.where(ok, jnp.exp(jnp.where(ok, x, 0.0)), 0.0)" in found


@pytest.mark.parametrize("of, bad, operation", [
    (lambda x: 1 / x, 0.0, "div"), (jnp.arcsin, 2.0, "asin"), (jnp.sinh, 200.0, "sinh"),
])  # fmt: skip
def test_each_hidden_value_gets_the_double_where(of, bad, operation):
    def loss(x):
        return jax.lax.scan(lambda c, x: (c + jnp.where(x != bad, of(x), 0.0), None), 0.0, x)[0]

    (finding,) = cg.diagnose(loss, (jnp.array([1.0, bad]),)).findings
    assert (finding.operation, finding.step) == (operation, 1)
    assert "since its value is not finite there" in finding.message
    assert (BOUND if operation == "sinh" else BOTH_SIDES) in finding.message


def looked_up(params, ids, keep):
    with jax.named_scope("embed"):
        rows = jnp.take(params["table"], ids, axis=0)
    return jnp.sum(jnp.where(keep, rows * params["scale"], 0.0))


@pytest.mark.parametrize("bad", [10, -11])
@pytest.mark.parametrize("keep", [True, False])
def test_an_index_out_of_range_is_named_with_its_bound(bad, keep):
    params = {"table": jnp.ones((10, 4)), "scale": jnp.ones((1, 1, 4))}
    ids = np.array([[3, 9], [bad, 0]])
    found = message(looked_up, params, ids, jnp.array(ids != bad)[..., None] | keep)
    index = bad if bad > 0 else bad + 10  # a negative one counts from the end
    assert f"gather of index {index} on axis 0 of float32[10, 4]" in found
    assert "correct the indices" in found
    assert f"{NAME}:{line_of(looked_up, 'jnp.take')}" in found


def attention(params, x, mask, keep):
    with jax.named_scope("attention"):
        q, k, v = (x @ params[name] for name in "qkv")
        scores = jnp.where(mask, q @ k.swapaxes(-1, -2), -jnp.inf)
        out = jax.nn.softmax(scores) @ v
    return jnp.sum(jnp.where(keep, out, 0.0) ** 2)


def test_a_row_that_is_masked_throughout_and_dropped_later_is_named():
    keys = jax.random.split(jax.random.key(0), 4)
    params = {name: jax.random.normal(key, (4, 4)) for name, key in zip("qkv", keys, strict=False)}
    x, mask = jax.random.normal(keys[3], (2, 4, 4)), np.tril(np.ones((2, 4, 4), bool))
    mask[1, :, 0] = False
    args = params, x, mask, mask.any(-1, keepdims=True)
    report = cg.diagnose(attention, args, examples=(1, 2, 3))
    (finding,) = report.findings
    assert finding.module == "attention"
    assert f"in softmax {at(attention, 'softmax')}" in finding.message
    assert "a row whose elements are all masked holds only -inf" in finding.message
    assert "select a finite mask" in finding.message
    assert finding.message.endswith("the softmax is over axis 2 of float32[2, 4, 4]")
    assert [example.index for example in report.examples] == [1]


def cast(x):
    return jnp.sum(x.astype(jnp.float32)) * 1e5


def multiplied(x):
    return jnp.sum((x * jnp.float16(300)).astype(jnp.float32)) * 300


def used_twice(x):
    y = x * 1
    return (y.astype(jnp.float32).sum() + (2 * y).astype(jnp.float32).sum()) * 3e4


@pytest.mark.parametrize("loss, named", [
    (cast, "the cotangent 1e+05 exceeds"), (multiplied, "a cotangent exceeds"),
    (used_twice, "a cotangent exceeds"),
])  # fmt: skip
def test_a_cotangent_that_float16_does_not_hold_is_named_with_its_limit(loss, named):
    x = jnp.full(3, 1e-3, jnp.float16)
    found = message(jax.jit(loss), x)
    assert f"{named} 65504, the largest float16; multiply the loss by a smaller scale" in found
    assert cg.diagnose(lambda x: loss(x) / 1e4, (x,)).ok
    if loss is cast:
        assert cg.diagnose(loss, (x.astype(jnp.bfloat16),)).ok


def test_a_singular_matrix_is_named():
    found = message(lambda a: jnp.linalg.solve(a, jnp.ones(2)).sum(), jnp.ones((2, 2)))
    assert "solve" in found and "the matrix may be singular" in found
