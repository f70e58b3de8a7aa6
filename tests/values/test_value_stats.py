"""Statistics of values by name, against the values themselves in NumPy and float64."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import clipgrad as cg
from clipgrad._values import value_stats
from tests.error_clips.framework_models import Transformer, linen
from tests.error_clips.framework_models import X as inputs
from tests.error_clips.tagged import X, loss_of, scanned
from tests.helpers import array, assert_close, assert_same, operations
from tests.rows import each_value, first_row, some_of
from tests.values.value_programs import COUNTED, PROGRAMS, in_a_while

PROPERTIES = ("norm", "rms", "max", "nonfinite", "zero_fraction", "size")
scope = jax.named_scope


def reference(values, axis=None):
    """The properties of arrays together, in float64."""
    values = [np.asarray(v) for v in values]
    if axis is not None:
        split = [np.moveaxis(v, axis, 0) for v in values]
        rows = [reference([v[i] for v in split]) for i in range(len(split[0]))]
        return {name: np.array([row[name] for row in rows]) for name in PROPERTIES}
    every = np.concatenate([v.ravel() for v in values]) if values else np.zeros(0)
    every = np.abs(every.astype(np.complex128))
    size = max(every.size, 1)
    norm = np.sqrt(np.sum(every**2))
    return {
        "norm": norm, "rms": norm / np.sqrt(size), "max": every.max(initial=0),
        "nonfinite": np.sum(~np.isfinite(every)), "size": every.size,
        "zero_fraction": np.mean(every == 0) if every.size else 0,
    }  # fmt: skip


def assert_stats(stats, values, axis=None, rtol=1e-6):
    """The statistics of arrays, with leading axes of scans if there is a list for each step."""
    with np.errstate(all="ignore"):
        expected = reference(values, axis)
    for name, numbers in numbers_of(stats).items():
        np.testing.assert_allclose(numbers, expected[name], rtol=rtol, err_msg=name, equal_nan=True)


@jax.jit
def numbers_of(stats):
    return {name: getattr(stats, name) for name in PROPERTIES}


# ---- one array ----------------------------------------------------------------------------------

ARRAYS = {
    "ordinary": np.linspace(-2, 3, 12).reshape(3, 4),
    "scalar": np.array(-2.5),
    "empty": np.zeros((0, 3)),
    "zeros": np.zeros((2, 2)),
    "one zero": np.array([[0.0, -1.0], [2.0, 0.0]]),
    "large": np.array([[1e20, -3e20], [1.0, 2e20]]),
    "small": np.array([[3e-30, -4e-30], [0.0, 1e-32]]),
    "mixed": np.array([[1e20, 1.0], [1e-30, 1e-20]]),
    "inf": np.array([[1.0, np.inf], [2.0, 0.0]]),
    "NaN": np.array([[1.0, np.nan], [2.0, -np.inf]]),
    "complex": np.array([[3 + 4j, 0], [1j, -2.0]]),
    "edges": np.float32([[1, 1e-45], [-0.0, -3e38]]),
}
every_array = pytest.mark.parametrize("name", ARRAYS)


@pytest.mark.usefixtures("devices")
@each_value
@every_array
@pytest.mark.parametrize("axis", [None, 0, -1])
def test_the_statistics_of_an_array_are_those_of_numpy(name, axis):
    value = ARRAYS[name]
    if axis is not None and value.ndim == 0:
        with pytest.raises(ValueError, match=r"axis: got .*, expected an axis of an array of sha"):
            cg.types.ValueStats.of(array(value), axis)
        return
    x = array(value, jnp.complex64 if value.dtype.kind == "c" else jnp.float32)
    stats = cg.types.ValueStats.of(x, axis)
    assert stats.max.shape == (() if axis is None else (x.shape[axis],))
    if name != "inf" and name != "NaN":
        assert_stats(stats, [value], axis)
    else:
        kept = reference([value], axis)
        np.testing.assert_array_equal(stats.nonfinite, kept["nonfinite"])
        np.testing.assert_array_equal(stats.max, kept["max"])
        np.testing.assert_array_equal(np.isfinite(stats.norm), np.isfinite(kept["norm"]))


def test_float64_stays_and_what_is_no_array_of_floating_numbers_is_refused():
    for value in (3, [1.0], array(np.arange(3), np.int32), None):
        with pytest.raises(TypeError, match="x: got .*, expected an array of floating or compl"):
            cg.types.ValueStats.of(value)
    with jax.enable_x64():
        x = jnp.array([3e-170, 4e-170])
        stats = cg.types.ValueStats.of(x)
        assert stats.norm.dtype == jnp.float64
        np.testing.assert_allclose(stats.norm, 5e-170, rtol=1e-14)


def test_statistics_of_parts_join_to_those_of_the_whole():
    parts = [cg.types.ValueStats.of(array(v)) for v in (ARRAYS["large"], [[1.0]])]
    assert_stats(parts[0].joined(parts[1]), [ARRAYS["large"], [[1.0]]])
    stacked = jax.tree.map(lambda *x: np.stack(x), *parts)
    assert_same(stacked.over(0), parts[0].joined(parts[1]))


# ---- by name, in any program --------------------------------------------------------------------


def recorded(model, run=lambda f: f()):
    """The values of each tag in the order of computation."""
    seen = {}

    def tag(x, name):
        keep = seen.setdefault(name, [])
        jax.debug.callback(lambda x: keep.append(np.asarray(x, np.float64)), x, ordered=False)
        return checkpoint_name(x, name)

    run(lambda: jax.block_until_ready(model(X, tag)))
    jax.effects_barrier()
    return seen


def together(stats):
    """The statistics over all steps of scans."""
    for _ in range(stats.size.ndim):
        stats = stats.over(0)
    return stats


@first_row
@pytest.mark.parametrize("name", COUNTED)
def test_tags_are_measured_in_any_program(name):
    seen = recorded(PROGRAMS[name])
    measured = cg.with_value_stats(lambda x: PROGRAMS[name](x, checkpoint_name))
    result, stats = jax.jit(measured)(X)
    assert_close(result, jax.jit(lambda x: PROGRAMS[name](x, checkpoint_name))(X), 1e-6, 1e-6)
    untaken = {key for key, value in stats.items() if key not in seen}
    assert all(float(jnp.sum(stats[key].size)) == 0 for key in untaken)
    for key, values in seen.items():
        assert_stats(together(stats[key]), values, rtol=2e-6)


@pytest.mark.parametrize("reverse", [False, True])
def test_each_step_of_a_scan_has_an_entry(reverse):
    h, seen = np.ones(3), []
    rows = np.asarray(X, np.float64)
    for row in rows[::-1] if reverse else rows:
        h = np.tanh(h @ np.linspace(-1.0, 1.0, 9).reshape(3, 3) + row)
        seen.append({"h": h, "out": np.sin(h)})
    model = lambda x: scanned(x, checkpoint_name, reverse=reverse)  # noqa: E731
    stats = jax.jit(cg.with_value_stats(model))(X)[1]
    for i, values in enumerate(seen[::-1] if reverse else seen):
        for name, value in values.items():
            assert_stats(entry(stats[name], i), [value], rtol=2e-6)


def entry(stats, i):
    return jax.tree.map(lambda s: np.asarray(s)[i], stats)


@pytest.mark.parametrize("trips", [0, 3])
def test_the_iterations_of_a_loop_of_unknown_length_are_joined(trips):
    def model(x, n):
        def body(state):
            with scope("net"):
                h = state[1] * 2
            return state[0] + 1, h

        return lax.while_loop(lambda s: s[0] < n, body, (0, x))[1]

    result, stats = jax.jit(cg.with_value_stats(model))(X, trips)
    np.testing.assert_allclose(result, np.asarray(X) * 2**trips)
    assert_stats(stats["net"], [np.asarray(X, np.float64) * 2**i for i in range(1, trips + 1)])


def test_a_lane_of_vmap_has_its_own_statistics_and_a_batch_inside_has_those_of_all():
    def model(x):
        return checkpoint_name(jnp.sin(x), "h").sum()

    stats = jax.vmap(cg.with_value_stats(model))(X)[1]["h"]
    for i, row in enumerate(np.sin(np.asarray(X, np.float64))):
        assert_stats(entry(stats, i), [row])
    stats = cg.with_value_stats(jax.vmap(model))(X)[1]["h"]
    assert_stats(stats, [np.sin(np.asarray(X, np.float64))])


@pytest.mark.parametrize("check", [True, False])
def test_devices_count_together_and_what_they_share_once_where_jax_knows(check):
    mesh = jax.make_mesh((2, 2), ("d", "m"), (AxisType.Auto,) * 2)

    def model(x, y):
        def step(total, row):
            with scope("net"):
                h = row * y
            return total + h.sum(), None

        tagged = checkpoint_name(x * 2, "own")
        shared = checkpoint_name(y * 3, "shared")
        half = lax.psum(tagged, "d")
        half = checkpoint_name(half, "summed")
        start = lax.pcast(jnp.zeros(()), ("d",), to="varying") if check else jnp.zeros(())
        return lax.scan(step, start, x)[0][None] + shared.sum() + half.sum()

    fun = jax.shard_map(model, mesh=mesh, in_specs=(P("d"), P()), out_specs=P("d"), check_vma=check)
    x, y = np.asarray(X, np.float64), np.array([1.0, -2.0, 3.0])
    stats = jax.jit(cg.with_value_stats(fun, watch=["**", "net"]))(X, array(y))[1]
    times = 1 if check else 2
    assert_stats(stats["own"], [2 * x] * times)
    assert_stats(stats["shared"], [3 * y] * (1 if check else 4))
    assert_stats(stats["summed"], [2 * (x[:2] + x[2:])] * (1 if check else 4))
    for i in range(2):
        rows = [x[i] * y, x[2 + i] * y] * times
        assert_stats(entry(stats["net"], i), rows)


@pytest.mark.slow
def test_an_axis_that_is_kept_has_an_entry_for_each_index_behind_those_of_scans():
    def layer(x, scale):
        with scope("attn"):
            logits = x * scale
        return jnp.tanh(logits), None

    def model(x):
        return lax.scan(layer, x, jnp.array([1.0, 5.0]))[0].sum()

    x, logits = np.asarray(X, np.float64), []
    for scale in (1.0, 5.0):
        logits.append(x * scale)
        x = np.tanh(logits[-1])
    for axis, watch in ((-1, {"attn": -1}), (0, {"**/attn": 0}), (1, {"a*": np.int64(1)})):
        stats = jax.jit(cg.with_value_stats(model, watch=watch))(X)[1]["attn"]
        assert stats.max.shape == (2, X.shape[axis])
        for i, value in enumerate(logits):
            assert_stats(entry(stats, i), [value], axis, rtol=2e-6)
    whole = cg.with_value_stats(model, watch={"attn": None})(X)[1]["attn"]
    assert whole.max.shape == (2,)


@pytest.mark.slow
@pytest.mark.parametrize("check", [True, False])
def test_an_axis_that_a_mesh_may_cut_is_not_kept(check):
    mesh = jax.make_mesh((2,), ("m",), (AxisType.Auto,), devices=jax.devices()[:2])

    def summed(x):
        return lax.psum(checkpoint_name(x * 2, "h").sum(), "m")

    def same(x):
        h = checkpoint_name(lax.psum(x, "m"), "h")
        return h.sum()

    def measured(model, axis):
        fun = jax.shard_map(model, mesh=mesh, in_specs=P("m"), out_specs=P(), check_vma=check)
        return cg.with_value_stats(fun, watch={"h": axis})(X)[1]["h"]

    match = r"the axis 1 for 'h', whose values may differ between the devices along 'm', expected"
    for model in (summed, same)[: 1 if check else 2]:
        with pytest.raises(ValueError, match=match):
            measured(model, 1)
    assert_stats(measured(summed, None), [2 * np.asarray(X, np.float64)])
    if check:
        x = np.asarray(X, np.float64)
        assert_stats(measured(same, 1), [x[:2] + x[2:]], 1)


# ---- unchanged value and derivatives, and composition -------------------------------------------


@first_row
@pytest.mark.parametrize("name", [n for n in PROGRAMS if n not in ("while", "linear solve")])
def test_value_and_gradient_are_those_of_the_function(name):
    loss = loss_of(PROGRAMS[name])
    plain = jax.jit(jax.value_and_grad(loss))(X)
    measured = jax.value_and_grad(cg.with_value_stats(loss), has_aux=True)

    def without(x):
        (value, _), grads = measured(x)
        return value, grads

    assert_same(jax.jit(without)(X), plain)
    (value, _), grads = jax.jit(measured)(X)
    assert_close((value, grads), plain, rtol=1e-5, atol=1e-6)


def test_statistics_have_no_derivative_and_forward_mode_goes_through():
    def regularized(x):
        value, stats = cg.with_value_stats(lambda x: checkpoint_name(x * x, "h").sum())(x)
        return value + stats["h"].norm

    assert_same(jax.grad(regularized)(X), 2 * X)
    fun = lambda x: in_a_while(x, checkpoint_name)  # noqa: E731
    measured = lambda x: cg.with_value_stats(fun)(x)[0]  # noqa: E731
    assert_close(jax.jvp(measured, (X,), (X,)), jax.jvp(fun, (X,), (X,)), rtol=1e-6)


def test_auxiliary_results_come_before_the_statistics():
    def loss(x):
        return checkpoint_name(x, "h").sum(), {"text": "a", "x": x}

    value, (aux, stats) = cg.with_value_stats(loss, has_aux=True)(X)
    assert aux["text"] == "a" and list(stats) == ["h"]
    assert_same((value, aux["x"]), (X.sum(), X))
    with pytest.raises(TypeError, match=r"has_aux: got a result of .*, expected fun to return"):
        cg.with_value_stats(lambda x: checkpoint_name(x, "h"), has_aux=True)(X)


# ---- what is watched ----------------------------------------------------------------------------


def odd(x):
    with scope("idle"):
        jnp.cos(x)
    with scope("index"):
        index = jnp.argmax(x)
    with scope("net"):
        y = rule_with_a_tag(x) * 2
    with scope("two"):
        two = x * 2, x.T * 3
    y = checkpoint_name(y, "tag") * jnp.take(x, index) * two[0] * two[1].T
    return y.sum() + in_a_while(x, named).sum()


def named(x, name):
    with scope(f"loop/{name}"):
        return x * 1.0


@jax.custom_jvp
def rule_with_a_tag(x):
    with scope("inside"):
        return checkpoint_name(jnp.sin(x), "deep") * 1.0


rule_with_a_tag.defjvp(lambda x, t: (rule_with_a_tag(x[0]), t[0]))


@pytest.mark.slow
def test_values_without_cotangents_are_listed_and_say_so_where_cotangents_are_asked():
    by_name = {name.name: name for name in cg.list_names(odd, (X,))}
    assert {n: r.cotangent for n, r in by_name.items()} == {
        "idle": False, "net": True, "two": True, "tag": True, "loop/h": False, "loop": False,
    }  # fmt: skip
    stats = cg.with_value_stats(odd, watch=["**"])(X)[1]
    assert set(stats) == set(by_name)
    assert_stats(stats["idle"], [np.cos(np.asarray(X, np.float64))])
    loss = lambda x: odd(lax.stop_gradient(x))  # noqa: E731
    watched = lambda name: cg.value_and_grad_with_stats(loss, watch=[name])(X)  # noqa: E731
    with pytest.raises(ValueError, match=r"'idle', which names an unused .*with_value_stats meas"):
        watched("idle")
    for name in ("loop/h", "loop/*"):
        with pytest.raises(ValueError, match=r"a value in a while loop.*with_value_stats measure"):
            watched(name)
    assert set(cg.value_and_grad_with_stats(loss, watch=["**"])(X)[2]) == {"net", "tag", "two"}


def test_without_a_choice_tags_are_measured_or_else_modules():
    assert list(cg.with_value_stats(lambda x: scanned(x, checkpoint_name))(X)[1]) == ["h", "out"]
    names = list(cg.with_value_stats(lambda x: scanned(x, named))(X)[1])
    assert names == ["loop/h", "loop", "loop/out"]
    assert cg.with_value_stats(lambda x: scanned(x, named), watch=[])(X)[1] == {}
    with pytest.raises(ValueError, match="with_value_stats: got a function without tags, expected"):
        cg.with_value_stats(jnp.sin)(X)
    with pytest.raises(TypeError, match="fun: got 3, expected a function"):
        cg.with_value_stats(3)


@pytest.mark.parametrize(
    ("watch", "error", "match"),
    [
        ("h", TypeError, r"watch: got 'h', expected names such as \[\"h\"\]"),
        ([3], TypeError, r"watch: got \[3\], expected names"),
        ({"tag": "heads"}, TypeError, "watch: got 'heads' for 'tag', expected an axis of its val"),
        ({"tag": True}, TypeError, "watch: got True for 'tag', expected an axis"),
        ({"tag": (1, "m")}, TypeError, r"watch: got \(1, 'm'\) for 'tag', expected an axis"),
        (["tug"], ValueError, "got 'tug', expected a name that is tagged .*there are"),
        (["index"], TypeError, "names int32 values, expected floating or complex values"),
        (["deep"], ValueError, "'deep', which tags a variable inside of custom_jvp_call, expecte"),
        ({"tag": 2}, ValueError, r"got the axis 2 for 'tag', expected an axis of all .*\(4, 3\)"),
        ({"two": 0}, ValueError, r"'two', whose values have the lengths \[3, 4\] there"),
        ({"t*": 1, "**": 0}, ValueError, "'t\\*' and '\\*\\*' with a choice each"),
    ],
    ids=str,
)
def test_what_cannot_be_measured_is_an_error(watch, error, match):
    with pytest.raises(error, match=match):
        cg.with_value_stats(odd, watch=watch)(X)


# ---- in a training step, and for loggers --------------------------------------------------------


def attention_loss(params, batch):
    with scope("attn"):
        logits = checkpoint_name(batch @ params["w"], "logits")
    return jnp.mean(jnp.tanh(logits) ** 2)


@pytest.mark.parametrize(("accumulate", "has_aux"), some_of([(1, False), (2, True)], [(2, True)]))
def test_a_training_step_measures_the_values_before_it(accumulate, has_aux):
    loss = (lambda p, b: (attention_loss(p, b), 2 * b)) if has_aux else attention_loss
    options = {"accumulate": accumulate, "has_aux": has_aux, "error_clip": {"attn": None}}
    watch = {"attn": None, "logits": -1}
    step = cg.train_step(loss, optax.sgd(0.1), watch_values=watch, **options)
    plain = cg.train_step(loss, optax.sgd(0.1), **options)
    params = {"w": array(np.linspace(-1.0, 2.0, 9).reshape(3, 3))}
    state, metrics = step(step.init(params), X)
    other, without = plain(plain.init(params), X)
    assert_close(state, other, rtol=1e-5)
    values, numbers = metrics["values"], cg.scalars(metrics)
    assert jax.tree.structure(metrics | {"values": 0}) == jax.tree.structure(
        without | {"values": 0}
    )
    logits = np.asarray(X, np.float64) @ np.linspace(-1.0, 2.0, 9).reshape(3, 3)
    assert_stats(values["attn"], [logits], rtol=2e-6)
    assert_stats(values["logits"], [logits], -1, rtol=2e-6)
    assert {"values/attn/rms", "values/attn/max", "values/logits/max", "loss"} <= set(numbers)
    assert numbers["values/logits/max"].shape == (3,) and numbers["values/attn/rms"].shape == ()
    assert set(cg.scalars({"attn": values["attn"]})) == {
        "attn/norm", "attn/rms", "attn/max", "attn/zero_fraction", "attn/nonfinite"
    }  # fmt: skip
    state, _ = step(state, X)
    assert step.update._cache_size() == 1


def test_one_more_value_of_a_shape_adds_few_operations():
    """Values of one shape are measured by one function, so that each is little more than a call."""

    def model(layers, x):
        for i in range(layers):
            with scope(f"layer{i}"):
                x = jnp.sin(x)
        return x.sum()

    def count(layers):
        fun = lambda x: cg.with_value_stats(lambda x: model(layers, x))(x)  # noqa: E731
        return operations(jax.make_jaxpr(fun)(X), [])

    assert count(7) - count(4) <= 3 * 12


@pytest.mark.slow
@each_value
@pytest.mark.parametrize("scale", [1.0, 1e30, 1e-30])
@pytest.mark.parametrize("bad", [None, np.nan, -np.inf])
def test_one_reduction_gives_what_sums_give_side_by_side(scale, bad, monkeypatch):
    x = np.random.default_rng(0).normal(size=(5, 7)) * scale
    x[1, 2], x[3, 3] = 0, x[3, 3] if bad is None else bad
    x = jnp.asarray(x, jnp.float32)
    for axis in (None, 0, 1):
        both_ways = []
        for fits in (True, False):
            monkeypatch.setattr(
                value_stats, "fit_one_reduction", lambda *_, fits_one=fits: fits_one
            )
            jax.clear_caches()
            both_ways.append(jax.jit(lambda x, axis=axis: cg.types.ValueStats.of(x, axis))(x))
        together, apart = both_ways
        np.testing.assert_allclose(together.norm, apart.norm, rtol=1e-6)
        for name in ("max", "nonfinite", "zero_count", "size"):
            np.testing.assert_array_equal(getattr(together, name), getattr(apart, name))


# -- In models of flax, Haiku and NNX, and what they cost there.


@pytest.mark.slow
@pytest.mark.usefixtures("users_promotion")
def test_linen_modules_have_the_values_that_flax_captures():
    module = Transformer()
    params, loss = linen(module)
    captured = module.apply(params, inputs, capture_intermediates=True)[1]["intermediates"]
    outputs = {
        "/".join(("Transformer", *(k.key for k in path[:-2]))): value
        for path, value in jax.tree_util.tree_leaves_with_path(captured)
    }
    stats = jax.jit(cg.with_value_stats(loss))(params, inputs)[1]
    assert set(outputs) <= set(stats) and len(outputs) > 5
    for name, value in outputs.items():
        if stats[name].size == value.size:
            assert_stats(stats[name], [value], rtol=2e-6)


class Attention(nn.Module):
    """Attention whose logits are named by the einsum that computes them."""

    @nn.compact
    def __call__(self, x):
        return nn.MultiHeadDotProductAttention(2, name="attn")(x)


@pytest.mark.slow
@pytest.mark.usefixtures("users_promotion")
def test_the_logits_of_unedited_attention_have_an_entry_for_each_head():
    x = jax.random.normal(jax.random.key(0), (2, 5, 8))
    model = Attention()
    params = model.init(jax.random.key(1), x)
    stats = cg.with_value_stats(model.apply, watch={"**/*->...hqk": -3})(params, x)[1]
    ((name, stats_of_heads),) = stats.items()
    p = params["params"]["attn"]
    q, k = (
        np.einsum("btd,dhf->bthf", x, np.asarray(p[n]["kernel"], np.float64))
        for n in ("query", "key")
    )
    logits = np.einsum("bqhf,bkhf->bhqk", q, k) / 2
    assert_stats(stats_of_heads, [logits], 1, rtol=1e-5)


class Normalized(nnx.Module):
    """A layer with statistics of its batches."""

    def __init__(self, rngs):
        self.up, self.norm = nnx.Linear(3, 4, rngs=rngs), nnx.BatchNorm(4, rngs=rngs)

    def __call__(self, x):
        return self.norm(self.up(x))


@pytest.mark.slow
@pytest.mark.usefixtures("users_promotion")
def test_an_nnx_model_is_measured_and_changes_as_without():
    loss = lambda model, x: jnp.mean(model(x) ** 2)  # noqa: E731
    one, other = Normalized(nnx.Rngs(0)), Normalized(nnx.Rngs(0))
    expected = np.asarray(X, np.float64) @ np.asarray(one.up.kernel[...], np.float64)
    value, stats = cg.with_value_stats(loss, watch=["*"])(one, X)
    assert_close(value, loss(other, X))
    assert_close(nnx.state(one), nnx.state(other))
    assert_stats(stats["up"], [expected])
    step = cg.train_step(loss, optax.sgd(0.1), watch_values=["up"])
    _, metrics = step(step.init(one), X)
    assert_stats(metrics["values"]["up"], [expected])
