"""Where low precision loses; and that a comparison without any judgment is not ok."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import clipgrad as cg
from clipgrad._compare.row_numbers import numbers_of, plain_row
from clipgrad._compare.wider import NOTHING_LEFT, lost_precision
from tests.compare.compare_models import with_vjp
from tests.helpers import array
from tests.rows import first_row


def numbers(*shape, seed, dtype="float32"):
    return array(np.random.default_rng(seed).normal(size=shape), dtype)


def loss_of(variance):
    """A loss of the variance of values far from zero."""

    def loss(params, x):
        with jax.named_scope("hidden"):
            h = jnp.tanh(x @ params["w"])
        with jax.named_scope("far"):
            h = h + params["far"]
        with jax.named_scope("variance"):
            v = variance(h)
        with jax.named_scope("out"):
            return jnp.mean(v * params["scale"])

    return loss


# As the difference of two moments, and of differences from the mean.
cancelling = loss_of(lambda h: jnp.mean(h * h, axis=-1) - jnp.mean(h, axis=-1) ** 2)
careful = loss_of(lambda h: jnp.mean((h - jnp.mean(h, axis=-1, keepdims=True)) ** 2, axis=-1))


def arguments(far, dtype="bfloat16"):
    params = {
        "w": numbers(4, 6, seed=1, dtype=dtype),
        "far": array(np.full((1, 6), far), dtype),
        "scale": numbers(8, seed=2, dtype=dtype),
    }
    return params, numbers(8, 4, seed=3, dtype=dtype)


def errors(fun, args):
    """The share of each leaf's gradient that is rounding, by its own gradient in float64."""

    def gradient(args):
        params, x = jax.grad(fun, (0, 1))(*args)
        return params | {"args[1]": x}

    near = gradient(args)
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda x: jnp.asarray(np.asarray(x, np.float64)), args)
        exact = gradient(wide)
        return {
            name: np.linalg.norm(np.asarray(near[name], np.float64) - g) / np.linalg.norm(g)
            for name, g in exact.items()
        }


@pytest.mark.slow
@first_row
@pytest.mark.parametrize("other", ["float64", "float32"])
def test_cancellation_is_found_in_its_module_and_in_the_leaves_behind_it(other):
    args = arguments(30.0)
    comparison = cg.compare(cancelling, other, args)
    assert not comparison.ok and {f.kind for f in comparison.findings} == {"rounding"}
    assert comparison.findings[0].module == "variance" and comparison.findings[0].factor > 10
    assert comparison.findings[0].file == __file__
    lost = {f.path: f.ratio for f in comparison.findings if f.path}
    exact = errors(cancelling, args)
    assert set(lost) <= {name for name, error in exact.items() if error > 0.04}
    assert "scale" in lost
    np.testing.assert_allclose(lost["scale"], exact["scale"], rtol=0.35)


@pytest.mark.slow
def test_the_careful_twin_and_small_values_lose_nothing():
    assert cg.compare(cancelling, "float64", arguments(0.0)).ok
    assert cg.compare(careful, "float64", arguments(0.0)).ok
    comparison = cg.compare(cancelling, "float64", arguments(30.0, "float32"))
    assert comparison.ok, str(comparison)


@pytest.mark.slow
def test_rtol_is_the_share_of_a_gradient_that_may_be_rounding():
    assert cg.compare(cancelling, "float32", arguments(30.0), rtol=1e9).ok
    comparison = cg.compare(cancelling, "float32", arguments(0.0), rtol=1e-5)
    paths = {f.path for f in comparison.findings if f.path}
    assert paths == {"w", "far", "scale", "args[1]"} and not comparison.ok


@pytest.mark.slow
def test_custom_rules_stay():
    """A wrong rule is the same in both types: no precision is lost there."""

    def twice(grads):
        return jax.tree.map(lambda g: g * 2, grads)

    def loss(w, x):
        return jnp.mean(with_vjp(jnp.tanh, twice)(x @ w) ** 2)

    args = numbers(4, 3, seed=7, dtype="bfloat16"), numbers(5, 4, seed=8, dtype="bfloat16")
    assert cg.compare(loss, "float64", args).ok


@pytest.mark.parametrize(
    "kwargs, words",
    [
        ({"other": "float16"}, "other: got 'float16', expected the name of a wider dtype"),
        ({"other": "float32", "names": {"a": "b"}}, "both runs are of fun"),
        ({"other": "float32", "other_args": (1,)}, "both runs are of fun"),
        ({"other": "float32", "argnums": None}, "argnums: got None with other='float32'"),
    ],
)
def test_wrong_arguments_with_a_dtype_are_told(kwargs, words):
    with pytest.raises(ValueError, match=words):
        cg.compare(cancelling, args=arguments(0.0), **kwargs)


# ---- the judgment of a leaf ----

TYPES = [("bfloat16", "float32"), ("float16", "float32"), ("float32", "float64")]
UNIT = np.random.default_rng(0).normal(size=12)
UNIT /= np.linalg.norm(UNIT)
ERROR = np.roll(UNIT, 1) - UNIT * (np.roll(UNIT, 1) @ UNIT)
ERROR /= np.linalg.norm(ERROR)


def coarser(narrow, dtype):
    return float(jnp.finfo(narrow).eps / jnp.finfo(dtype).eps)


def verdict(narrow, wide, *, most=0.05, types=("bfloat16", "float32"), moved=0.0):
    """What is said of a gradient: a finding, a note, or None."""
    rows = [
        plain_row("gradient", "w", x, numbers=numbers_of(x))
        for x in (np.asarray(narrow), np.asarray(wide))
    ]
    rows[0].numbers = rows[0].numbers._replace(moved=np.full((1, 515), moved))
    most_left = NOTHING_LEFT * coarser(*types)
    return lost_precision(*rows, types[1], most, most_left, lambda: None)


@pytest.mark.parametrize("types", TYPES)
def test_a_leaf_is_judged_by_its_own_size(types):
    for size in (1e-30, 1.0, 1e30):
        for error in (0.06, 0.43, 1.0, 30.0, 300.0):
            leaf_verdict = verdict(size * (UNIT + error * ERROR), size * UNIT, types=types)
            assert np.isclose(leaf_verdict.ratio, error) and "is rounding" in leaf_verdict.message
        for error in (0.0, 1e-3, 0.04):
            assert verdict(size * (UNIT + error * ERROR), size * UNIT, types=types) is None


@pytest.mark.parametrize("types", TYPES)
def test_a_sum_that_is_zero_is_a_note_by_its_error_beside_the_wider_type(types):
    """Its gradient in the wider type is rounding of that type, as many times smaller."""
    for error in coarser(*types) * np.array([0.25, 1.0, 8.0]):
        assert verdict(UNIT + error * ERROR, UNIT, types=types) == "w: zero but for rounding"
    # By chance it may be exactly zero: then its floor decides.
    assert verdict(0 * UNIT, UNIT, types=types).ratio == 1
    far = coarser(*types)
    assert verdict(0 * UNIT, UNIT, types=types, moved=far) == "w: zero but for rounding"


@pytest.mark.parametrize("odd", [np.inf, -np.inf, np.nan])
def test_an_overflow_is_a_finding_and_is_no_share(odd):
    exact = np.arange(1.0, 9.0)
    for count in (1, 7, 8):
        near = np.where(np.arange(8) < count, odd, exact)
        for pair, text in (((near, exact), "is finite in float32"), ((exact, near), "32 only")):
            leaf_verdict = verdict(*pair)
            assert (
                text in leaf_verdict.message
                and leaf_verdict.kind == "rounding"
                and leaf_verdict.ratio == np.inf
            )
        leaf_verdict = verdict(near, near)
        assert (
            leaf_verdict.kind == "not judged" and "NaN or inf in both types" in leaf_verdict.message
        )


@pytest.mark.slow
def test_a_leaf_that_is_mostly_rounding_is_found_beside_an_infinite_one():
    def loss(params, x):
        return cancelling(params, x) + jnp.sum(jnp.sqrt(params["z"]))

    params, x = arguments(100.0)
    comparison = cg.compare(loss, "float32", (params | {"z": jnp.zeros(2, "bfloat16")}, x))
    lost = {f.path: f.ratio for f in comparison.findings if f.path}
    assert not comparison.ok and "scale" in lost and lost["scale"] > 0.4, str(comparison)


def with_zeros(params, x):
    """Softmax ignores a bias of the keys, and one of all logits; a norm one before it."""
    keys = x @ params["w"] + params["keys"]
    h = x + jax.nn.softmax(x @ keys.T / 4, axis=-1) @ x + params["norm"]
    h = h - jnp.mean(h, axis=0, keepdims=True)
    h = jnp.tanh(h / jnp.sqrt(jnp.var(h, axis=0, keepdims=True) + 1e-5))
    return jnp.mean(jax.nn.log_softmax(h @ params["w"] + params["logits"])[:, :2])


@pytest.mark.slow
@pytest.mark.parametrize(
    "dtype, cast, other",
    [
        ("bfloat16", None, "float32"),
        ("float16", None, "float32"),
        ("float32", "bfloat16", "float32"),
        pytest.param("float32", None, "float64", marks=pytest.mark.slow),
        pytest.param("bfloat16", None, "float64", marks=pytest.mark.slow),
        pytest.param("float32", "bfloat16", "float64", marks=pytest.mark.slow),
    ],
)
def test_a_gradient_that_is_zero_is_a_note_in_every_pair_of_types(dtype, cast, other):
    def loss(params, x):
        params, x = jax.tree.map(lambda a: a.astype(cast or dtype), (params, x))
        return with_zeros(params, x)

    params = {"w": numbers(6, 6, seed=4, dtype=dtype) / 3}
    params |= {"keys": numbers(1, 6, seed=5, dtype=dtype)}
    params |= {"norm": numbers(1, 6, seed=7, dtype=dtype), "logits": jnp.ones((1, 1), dtype)}
    comparison = cg.compare(loss, other, (params, numbers(12, 6, seed=6, dtype=dtype)))
    zeros = {f"{name}: zero but for rounding" for name in ("keys", "logits", "norm")}
    assert comparison.ok and set(comparison.notes) == zeros, str(comparison)


def test_a_backward_pass_that_is_narrower_than_the_loss_is_seen():
    @jax.custom_vjp
    def total(w):
        return jnp.sum(w)

    def backward(w, g):
        return (
            ((w * 1e3 + 1).astype("bfloat16") - 1e3 * w.astype("bfloat16")).astype(w.dtype) * g,
        )

    total.defvjp(lambda w: (jnp.sum(w), w), backward)
    comparison = cg.compare(total, "float32", (jnp.abs(numbers(5, seed=1)) + 1,))
    assert not comparison.ok and comparison.findings[0].ratio > 0.3 and not comparison.notes, str(
        comparison
    )


@pytest.mark.slow
def test_an_overflow_names_the_first_module_and_the_leaves():
    def loss(w, x):
        with jax.named_scope("fine"):
            h = x @ w
        with jax.named_scope("powers"):
            h = h**4
        return jnp.mean(h)

    args = 30 * numbers(6, 3, seed=1, dtype="float16"), numbers(8, 6, seed=3, dtype="float16")
    comparison = cg.compare(loss, "float32", args)
    assert not comparison.ok and "nan%" not in str(comparison)
    assert (comparison.findings[0].module, comparison.findings[0].kind) == ("powers", "rounding")
    assert "it has NaN or inf, and is finite in float32" in comparison.findings[-1].message
    assert any(note.startswith("the loss is inf") for note in comparison.notes)


def test_a_type_that_is_as_narrow_is_said():
    args = numbers(3, seed=1), numbers(3, seed=2)
    comparison = cg.compare(lambda w, x: jnp.sum(w * x), "float32", args)
    assert comparison.ok and "nothing in fun is narrower than float32" in comparison.notes[0]
    assert not cg.compare(lambda w, x: jnp.sum(w * x), "float64", args).notes


# ---- two functions ----


def undecided(w, wave=jnp.sin):
    """One rounding of a weight turns its wave by several radians."""
    return jnp.sum(wave(w * (30 / float(jnp.finfo(w.dtype).eps))))


def undecided_too(w):
    return undecided(w, jnp.cos)


def decided(w, scale):
    return jnp.sum(jnp.tanh(w)) * scale


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_no_gradient_that_is_judged_is_not_ok(dtype):
    w = (0.2 if dtype == "float16" else 1) * jnp.abs(numbers(7, seed=3, dtype=dtype))
    comparison = cg.compare(undecided, undecided_too, (w,))
    (finding,) = comparison.findings
    assert not comparison.ok and finding.kind == "not judged", str(comparison)
    wider = "float64" if dtype == "float32" else "float32"
    assert f'compare(fun, "{wider}", args)' in finding.message
    assert "or give rtol=" in " ".join(str(comparison).split())  # in lines of one width
    assert str(comparison).startswith("not judged: neither agreement nor a difference was found\n")
    assert cg.compare(undecided, undecided_too, (w,), rtol=1e9).ok
    assert cg.compare(undecided, undecided, (w,)).ok  # bit for bit the same


@pytest.mark.slow
def test_a_leaf_that_is_not_judged_is_never_ok():
    def loss(wave):
        return lambda p: 1e-3 * undecided(p["w"], wave) + decided(p["b"], 1.0)

    params = {"w": numbers(7, seed=3), "b": numbers(3, seed=4)}
    comparison = cg.compare(loss(jnp.sin), loss(jnp.cos), (params,))
    assert not comparison.ok and {f.kind for f in comparison.findings} <= {"not judged", "value"}, (
        str(comparison)
    )
    assert (
        "w: rounding decides here, so the gradient is called neither equal nor different"
        in comparison.notes
    )


@pytest.mark.slow
def test_a_gradient_that_is_zero_but_for_rounding_is_no_difference():
    """The bias of keys: a softmax ignores it, in each version."""

    def loss(p, x, by):
        keys = x @ p["w"] + p["keys"] * by
        return jnp.mean((jax.nn.softmax(x @ keys.T / by) @ x) ** 2)

    params = {"w": numbers(6, 6, seed=4) / 3, "keys": numbers(1, 6, seed=5)}
    x = numbers(12, 6, seed=6)
    by_hand = lambda p, x: loss(p, x[::-1], 1.0)  # noqa: E731
    comparison = cg.compare(lambda p, x: loss(p, x, 1.0), by_hand, (params, x))
    assert comparison.ok and "keys: zero but for rounding" in comparison.notes, str(comparison)


@pytest.mark.slow
def test_trees_without_a_path_in_common_are_compared_by_their_numbers():
    w = numbers(3, seed=1)
    pair = lambda by: (lambda p: decided(p["a"], 1.0), lambda p: decided(p["b"], by))  # noqa: E731
    comparison = cg.compare(*pair(1.0), ({"a": w},), other_args=({"b": w},))
    assert comparison.ok and not comparison.unmatched, str(comparison)
    comparison = cg.compare(*pair(1.1), ({"a": w},), other_args=({"b": w},))
    assert not comparison.ok and comparison.findings[0].kind == "value"
    comparison = cg.compare(*pair(1.0), ({"a": w},), other_args=({"b": w + 1},))
    assert not comparison.ok and "gradient a, only in fun" in comparison.unmatched


@pytest.mark.parametrize("outputs", [lambda x: {"y": x}, lambda x: {"y": x, "n": jnp.asarray(3)}])
def test_a_step_of_which_no_floating_output_is_judged_is_not_ok(outputs):
    w = numbers(7, seed=3)
    pair = (lambda w: outputs(undecided(w)), lambda w: outputs(undecided_too(w)))
    comparison = cg.compare(*pair, (w,), argnums=None)
    assert not comparison.ok and [f.kind for f in comparison.findings] == ["not judged"], str(
        comparison
    )
