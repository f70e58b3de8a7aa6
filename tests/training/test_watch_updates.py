"""watch_updates: right norms in every loop, wrapper, dtype and range; and a run that diverges."""

import equinox as eqx
import flax.linen as linen
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training import train_state

import clipgrad as cg
from tests.helpers import all_reduces, array, assert_close, assert_same
from tests.rows import each_value, first_row, first_rows, some_of

pytestmark = pytest.mark.usefixtures("users_promotion")

RNG = np.random.default_rng(0)
PARAMS = {
    "emb": array(RNG.normal(size=(5, 3))),
    "blocks": {
        "attn": {"q": array(RNG.normal(size=(2, 3, 3))), "b": array(RNG.normal(size=(2, 3)))},
        "up": {"kernel": array(RNG.normal(size=(2, 3, 4)))},
    },
}
GRADS = jax.tree.map(lambda w: array(2 * np.cos(5 * np.asarray(w))), PARAMS)


def expected_norms(grads, params, updates, by, stacked=""):
    """The norms by NumPy in float64: a dictionary of three numbers or rows for each group."""
    rows = {}
    for tree in (grads, params, updates):
        sums = {}
        for path, leaf in jax.tree.leaves_with_path(tree):
            name = jax.tree_util.keystr(path, simple=True, separator="/")
            x = np.asarray(leaf)
            x = x.astype(np.complex128 if np.iscomplexobj(x) else np.float64)
            is_stacked = bool(stacked) and f"/{stacked}/" in f"/{name}/"
            axes = tuple(range(1, x.ndim)) if is_stacked else None
            sums[by(name)] = sums.get(by(name), 0) + np.sum(np.abs(x) ** 2, axis=axes)
        for group, total in sums.items():
            rows.setdefault(group, []).append(np.sqrt(total))
    return rows


def assert_norms(measured, expected, rtol=1e-6):
    assert set(measured) == set(expected)
    for group, norms in measured.items():
        for actual, right in zip(norms, expected[group], strict=True):
            assert actual.shape == np.shape(right)
            np.testing.assert_allclose(actual, right, rtol=rtol)


def module_of(path):
    return path.rpartition("/")[0] or path


GROUPINGS = {
    "module": ("module", module_of, ""),
    "leaf": ("leaf", lambda path: path, ""),
    "one segment": (1, lambda path: path.split("/")[0], ""),
    "two segments": (2, lambda path: "/".join(path.split("/")[:2]), ""),
    "a function": (lambda path: path[0], lambda path: path[0], ""),
    "stacked": ("module", module_of, "blocks"),
    "stacked leaves": ("leaf", lambda path: path, "attn"),
    "stacked and joined": (1, lambda path: path.split("/")[0], "blocks"),
}


@pytest.mark.parametrize(
    "name", some_of(GROUPINGS, ["module", "two segments", "a function", "stacked and joined"])
)
def test_norms_of_groups_and_layers_are_those_of_numpy(name):
    by, group_of, stacked = GROUPINGS[name]
    tx = cg.watch_updates(optax.adam(0.1), by=by, stacked=stacked or None)
    first = tx.init(PARAMS)
    updates, state = jax.jit(tx.update)(GRADS, first, PARAMS)
    assert_norms(state.norms, expected_norms(GRADS, PARAMS, updates, group_of, stacked))
    assert jax.tree.map(jnp.shape, first) == jax.tree.map(jnp.shape, state)
    assert all(x.dtype == jnp.float32 for x in jax.tree.leaves(state.norms))
    assert not any(map(np.any, jax.tree.leaves(first.norms)))


# ---- in every wrapper, inside and outside: updates are the optimizer's, and one update is watched

INNER = optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(0.1))
WRAPPERS = {
    "chain": lambda w: optax.chain(optax.identity(), w(INNER), optax.identity()),
    "named_chain": lambda w: optax.named_chain(("a", w(INNER)), ("b", optax.identity())),
    "MultiSteps inside": lambda w: w(optax.MultiSteps(INNER, 1)),
    "MultiSteps outside": lambda w: optax.MultiSteps(w(INNER), 1).gradient_transformation(),
    "masked": lambda w: optax.masked(w(INNER), {"emb": False, "blocks": True}),
    "multi_transform": lambda w: optax.multi_transform(
        {"a": w(INNER), "b": optax.sgd(0.1)}, {"emb": "b", "blocks": "a"}
    ),
    "inject_hyperparams": lambda w: optax.inject_hyperparams(lambda rate: w(optax.adam(rate)))(0.1),
    "inject inside": lambda w: w(optax.inject_hyperparams(optax.adam)(0.1)),
    "apply_if_finite": lambda w: optax.apply_if_finite(w(INNER), 3),
    "skip_spikes inside": lambda w: w(cg.skip_spikes(INNER)),
    "skip_spikes outside": lambda w: cg.skip_spikes(w(INNER)),
    "schedule_free inside": lambda w: w(optax.contrib.schedule_free(optax.sgd(0.1), 0.1)),
    "schedule_free outside": lambda w: optax.contrib.schedule_free(w(optax.sgd(0.1)), 0.1),
    "sam": lambda w: w(
        optax.contrib.sam(optax.sgd(0.1), optax.sgd(0.05), sync_period=2, reset_state=False)
    ),
}


@first_row
@pytest.mark.parametrize("name", WRAPPERS)
def test_updates_are_those_of_the_optimizer_and_are_measured_in_any_wrapper(name):
    watched, plain = WRAPPERS[name](cg.watch_updates), WRAPPERS[name](lambda tx: tx)
    plain = plain.gradient_transformation() if isinstance(plain, optax.MultiSteps) else plain
    state, expected_state = watched.init(PARAMS), plain.init(PARAMS)
    steps = [jax.jit(tx.update) for tx in (watched, plain)]
    for _ in range(2):
        updates, new = steps[0](GRADS, state, PARAMS)
        expected, expected_state = steps[1](GRADS, expected_state, PARAMS)
        if "schedule_free" in name:  # a difference, of which XLA rounds the parts otherwise
            assert_close(updates, expected, rtol=1e-4, atol=1e-6)
        else:
            assert_same(updates, expected)
        assert jax.tree.map(jax.typeof, new) == jax.tree.map(jax.typeof, state)
        state = new
    numbers = cg.scalars([state])
    assert {key.split("/")[0] for key in numbers} >= {"updates"}
    norm = np.linalg.norm([float(x) for k, x in numbers.items() if k.endswith("attn/grad")])
    assert norm == pytest.approx(float(cg.global_norm(GRADS["blocks"]["attn"])), rel=1e-6)
    if name in ("chain", "named_chain", "MultiSteps inside", "skip_spikes outside", "sam"):
        ratio = numbers["updates/emb/update"] / numbers["updates/emb/param"]
        assert numbers["updates/emb/update"] == pytest.approx(
            float(cg.global_norm(updates["emb"])), rel=1e-6
        )
        np.testing.assert_allclose(numbers["updates/emb/ratio"], ratio, rtol=1e-6)


# ---- in every framework's loop


class Up(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.Linear(3, 3, rngs=rngs)
        self.value = nnx.Param(array(np.ones(3)))

    def __call__(self, x):
        return self.up(x) * self.value[...]


class Model(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.blocks = nnx.List([Up(rngs), Up(rngs)])
        self.seen = nnx.Variable(array(np.zeros(())))

    def __call__(self, x):
        for block in self.blocks:
            x = block(x)
        return jnp.sum(x**2)


class Linen(linen.Module):
    @linen.compact
    def __call__(self, x):
        boxed = linen.with_partitioning(linen.initializers.ones, (None, None))
        x = linen.Dense(3, name="up", kernel_init=boxed)(x)
        return jnp.sum(linen.Dense(3, name="down")(x) ** 2)


class Attention(eqx.Module):
    query: jax.Array
    value: jax.Array
    name: str = "a text"


X = array(np.ones((2, 3)))
GROUPS_OF_NNX = {"blocks/0/up", "blocks/0", "blocks/1/up", "blocks/1"}


def by_nnx_optimizer(tx):
    model = Model()
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    optimizer.update(model, nnx.grad(lambda model: model(X))(model))
    return optimizer.opt_state, GROUPS_OF_NNX


def by_train_step_of_nnx(tx):
    step = cg.train_step(lambda model, x: model(x), tx)
    return step(step.init(Model()), X)[0], GROUPS_OF_NNX


def by_flax_train_state(tx, trained=lambda variables: variables["params"]):
    variables = Linen().init(jax.random.key(0), X)
    state = train_state.TrainState.create(apply_fn=Linen().apply, params=trained(variables), tx=tx)

    def loss(params):
        return Linen().apply(params if "params" in params else {"params": params}, X)

    return state.apply_gradients(grads=jax.grad(loss)(state.params)).opt_state, {"up", "down"}


def by_flax_with_collection(tx):
    return by_flax_train_state(tx, lambda variables: variables)


def by_equinox(tx):
    model = {"attn": Attention(jnp.ones(3), array([2.0] * 3)), "norm": jnp.ones(3)}
    loss = lambda model, x: jnp.sum((model["attn"].query * model["attn"].value * x) ** 2)  # noqa: E731
    grads = eqx.filter_grad(loss)(model, X)
    state = tx.init(eqx.filter(model, eqx.is_inexact_array))
    return tx.update(grads, state, eqx.filter(model, eqx.is_inexact_array))[1], {"attn", "norm"}


def by_train_step_of_equinox(tx):
    model = {"attn": Attention(array(np.ones(3)), array([2.0] * 3)), "norm": array(np.ones(3))}
    loss = lambda model, x: jnp.sum((model["attn"].query * model["attn"].value * x) ** 2)  # noqa: E731
    step = cg.train_step(loss, tx)
    return step(step.init(model), X)[0], {"attn", "norm"}


LOOPS = [
    by_train_step_of_nnx,
    by_train_step_of_equinox,
    by_nnx_optimizer,
    by_flax_train_state,
    by_flax_with_collection,
    by_equinox,
]


@first_rows(2)
@pytest.mark.parametrize("loop", LOOPS, ids=lambda f: f.__name__)
def test_groups_of_each_framework_are_its_modules(loop):
    state, groups = loop(cg.watch_updates(optax.adam(1e-3)))
    numbers = cg.scalars(state)
    fields = ("grad", "param", "update", "ratio")
    expected = {f"updates/{group}/{field}" for group in groups for field in fields}
    assert {key for key in numbers if key.startswith("updates/")} == expected
    last = max(groups)
    assert float(numbers[f"updates/{last}/param"]) > 0


def test_metrics_have_the_gradient_before_the_clip_and_join_the_keys_of_other_statistics():
    def loss(params, x):
        with jax.named_scope("blocks/3/attn"):
            h = jnp.tanh(x @ params["blocks"][3]["attn"]["kernel"])
        return 100 * jnp.sum(h)

    params = {"blocks": [{}, {}, {}, {"attn": {"kernel": array(np.ones((3, 3)))}}]}
    tx = cg.watch_updates(optax.chain(cg.clip_by_global_norm(1.0, stats=True), optax.sgd(0.1)))
    step = cg.train_step(loss, tx, error_clip={"**/attn": None}, watch_values=["**/attn"])
    state, metrics = jax.device_get(step(step.init(params), X))
    norms = metrics["updates"]["blocks/3/attn"]
    assert norms.grad == metrics["grad_norm"] > 1.01 * metrics["clipped_norm"]
    np.testing.assert_allclose(norms.update, 0.1, rtol=1e-5)
    keys = set(cg.scalars(metrics))
    places = {f"{kind}/blocks/3/attn" for kind in ("updates", "error_clip", "values")}
    assert places == {key.rpartition("/")[0] for key in keys if "attn" in key}
    assert {k for k in cg.scalars(state) if "updates" in k} == {k for k in keys if "updates" in k}


def test_keys_of_linen_join_if_groups_have_the_class_of_the_model():
    by = lambda path: "Linen/" + path.rpartition("/")[0]  # noqa: E731
    tx = cg.watch_updates(optax.sgd(0.1), by=by)
    loss = lambda variables, x: Linen().apply(variables, x)  # noqa: E731
    step = cg.train_step(loss, tx, watch_values=["Linen/*"])
    keys = cg.scalars(step(step.init(Linen().init(jax.random.key(0), X)), X)[1])
    places = {key.rpartition("/")[0] for key in keys if "Linen" in key}
    assert places == {
        f"{kind}/Linen/{name}" for kind in ("updates", "values") for name in ("up", "down")
    }


@pytest.mark.slow
def test_layers_are_an_array_or_one_number_each():
    tx = cg.watch_updates(optax.sgd(0.1), stacked="blocks")
    _, state = tx.update(GRADS, tx.init(PARAMS), PARAMS)
    whole, apart = cg.scalars(state), cg.scalars(state, layers=True)
    assert whole["updates/blocks/attn/ratio"].shape == (2,)
    assert {k for k in apart if "attn/ratio" in k} == {
        f"updates/blocks/attn/ratio/{i}" for i in range(2)
    }
    assert apart["updates/blocks/attn/ratio/1"] == whole["updates/blocks/attn/ratio"][1]
    assert apart["updates/emb/ratio"] == whole["updates/emb/ratio"]
    assert set(cg.scalars(state.norms)) == {k.removeprefix("updates/") for k in whole}


# ---- numbers: dtypes, ranges, NaN, zeros

DTYPES = ["float32", "bfloat16", "float16", "complex64", "float8_e4m3fn", "float8_e5m2"]


@each_value
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("stacked", [None, "w"])
def test_every_dtype_is_measured_in_float32(dtype, stacked):
    rows = np.arange(1.0, 13.0).reshape(3, 4) / 8
    w = array(rows * (1 if dtype != "complex64" else 1 + 2j), dtype)
    tree = {"w": w, "steps": array(np.arange(3), np.int32), "none": None}
    tx = cg.watch_updates(optax.identity(), stacked=stacked)
    _, state = jax.jit(tx.update)(tree, tx.init(tree), tree)
    assert list(state.norms) == ["w"]
    wide = {"w": np.asarray(w).astype("complex64" if dtype == "complex64" else "float32")}
    assert_norms(state.norms, expected_norms(wide, wide, wide, lambda path: path, stacked or ""))
    assert state.norms["w"].grad.dtype == jnp.float32


def test_float64_is_measured_in_float64():
    with jax.enable_x64(True):
        tree = {"w": array([3e200, 4e200], np.float64), "v": array(np.ones(2))}
        tx = cg.watch_updates(optax.sgd(0.5))
        _, state = jax.jit(tx.update)(tree, tx.init(tree), tree)
        np.testing.assert_allclose(state.norms["w"].grad, 5e200, rtol=1e-12)


RANGES = {
    "large": [3e30, 4e30],
    "small": [3e-30, 4e-30],
    "both": [3e30, 3e-30],
    "zero": [0.0, 0.0],
    "NaN": [np.nan, 1.0],
    "inf": [np.inf, 1.0],
    "NaN and large": [np.nan, 3e30],
}


@each_value
@pytest.mark.parametrize("devices", [1, 8])
@pytest.mark.parametrize("stacked", [None, "w"])
@pytest.mark.parametrize("name", RANGES)
def test_norms_leave_no_range_and_hide_nothing(name, stacked, devices, monkeypatch):
    """On one device a branch adds up again what is out of range; elsewhere three sums."""
    if devices == 1:
        monkeypatch.setattr(jax, "device_count", lambda *_: 1)
    x = np.array(RANGES[name], np.float32)
    tree = {"a": {"w": array([x, [1.0, 2.0]])}, "b": array(np.ones(2))}
    tx = cg.watch_updates(optax.scale(0.25), stacked=stacked)
    _, state = jax.jit(lambda tree: tx.update(tree, tx.init(tree), tree))(tree)
    wide = jax.tree.map(np.float64, tree)
    quarter = jax.tree.map(lambda x: x / 4, wide)
    with np.errstate(all="ignore"):
        assert_norms(state.norms, expected_norms(wide, wide, quarter, module_of, stacked or ""))
    ratio = np.atleast_1d(state.norms["a"].ratio)[0]
    if name != "inf":
        expected = {"zero": 0.0 if stacked else 0.25}.get(name, 0.25)
        np.testing.assert_allclose(ratio, np.nan if "NaN" in name else expected, rtol=1e-6)


def test_parameters_of_zeros_have_a_ratio_of_zero():
    norms = cg.types.UpdateNorms(*map(jnp.float32, (1.0, 0.0, np.nan)))
    assert norms.ratio == 0 and np.isnan(norms.update)
    rows = cg.types.UpdateNorms(array(np.ones(2)), array([0.0, 2.0]), array(np.ones(2)))
    np.testing.assert_array_equal(rows.ratio, [0.0, 0.5])


def test_scales_of_eight_bit_floats_are_in_no_group():
    params = {
        "params": {"w": array(np.ones(2))},
        "_overwrite_with_gradient": {"scale": array(np.ones(()))},
    }
    assert list(cg.watch_updates(optax.sgd(1.0)).init(params).norms) == ["w"]


# ---- transformations

MESH_SPECS = {"w": jax.P("x"), "v": jax.P(None, "x"), "b": jax.P()}
SHARDED = {"w": np.arange(32).reshape(8, 4), "v": np.ones((2, 8)), "b": np.ones(3)}
SHARDED = {name: array(x) for name, x in SHARDED.items()}


@first_row
@pytest.mark.parametrize("stacked", ["v", None])
@pytest.mark.parametrize("axes", ["Auto", "Explicit"])
def test_under_shardings_there_is_one_all_reduce(axes, stacked):
    kind = getattr(jax.sharding.AxisType, axes)
    mesh = jax.make_mesh((8,), ("x",), axis_types=(kind,))
    tx = cg.watch_updates(optax.adam(0.1), stacked=stacked)
    updates, expected = jax.jit(tx.update)(SHARDED, tx.init(SHARDED), SHARDED)
    with jax.set_mesh(mesh):
        tree = {
            name: jax.device_put(x, jax.sharding.NamedSharding(mesh, MESH_SPECS[name]))
            for name, x in SHARDED.items()
        }
        compiled = jax.jit(tx.update).lower(tree, tx.init(tree), tree).compile()
        measured_updates, state = compiled(tree, tx.init(tree), tree)
    assert_norms(state.norms, {k: list(v) for k, v in expected.norms.items()})
    assert all_reduces(compiled) == 1
    np.testing.assert_allclose(measured_updates["w"], updates["w"], rtol=1e-6)


def test_inside_shard_map_the_named_axes_are_added_up():
    mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    tx = cg.watch_updates(optax.sgd(0.1), axis_name="x", stacked="v")
    whole = cg.watch_updates(optax.sgd(0.1), stacked="v")
    _, expected = jax.jit(whole.update)(SHARDED, whole.init(SHARDED), SHARDED)

    def step(tree):
        def body(state, _):
            return tx.update(tree, state, tree)[1], None

        return jax.lax.scan(body, tx.init(tree), None, 2)[0].norms

    norms = jax.jit(jax.shard_map(step, mesh=mesh, in_specs=(MESH_SPECS,), out_specs=jax.P()))(
        SHARDED
    )
    assert_norms(norms, {k: list(v) for k, v in expected.norms.items()})


@pytest.mark.slow
def test_a_scan_over_steps_and_a_map_over_seeds():
    tx = cg.watch_updates(optax.adam(0.1))

    def train(scale):
        params = jax.tree.map(lambda w: scale * w, PARAMS)

        def body(carried, _):
            params, state = carried
            grads = jax.tree.map(jnp.cos, params)
            updates, state = tx.update(grads, state, params)
            return (optax.apply_updates(params, updates), state), state.norms

        return jax.lax.scan(body, (params, tx.init(params)), None, 3)[1]

    scales = jnp.array([1.0, 1e25])
    rows = jax.jit(jax.vmap(train))(scales)
    assert rows["emb"].grad.shape == (2, 3)
    for i, scale in enumerate(scales):
        alone = jax.jit(train)(scale)
        for group in alone:
            for a, b in zip(alone[group], rows[group], strict=True):
                np.testing.assert_allclose(a, b[i], rtol=1e-5)


@pytest.mark.slow
def test_a_checkpoint_restores_the_state(tmp_path):
    ocp = pytest.importorskip("orbax.checkpoint")
    tx = cg.watch_updates(optax.adam(0.1), stacked="blocks")
    _, state = tx.update(GRADS, tx.init(PARAMS), PARAMS)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", state)
        checkpointer.wait_until_finished()
        restored = checkpointer.restore(tmp_path / "state", tx.init(PARAMS))
    assert_same(restored, state)


def test_an_optimizer_may_be_differentiated():
    tx = cg.watch_updates(optax.sgd(0.1))

    def after(w):
        updates, _ = tx.update({"w": w**2}, tx.init({"w": w}), {"w": w})
        return jnp.sum(w + updates["w"])

    gradient = jax.jit(jax.grad(after))(array([1.0, 2.0]))
    np.testing.assert_allclose(gradient, [0.8, 0.6], rtol=1e-6)


# ---- a run that diverges by one layer: the ratio names it long before the loss doubles


def diverging(sick, steps=180):
    """The losses and the ratios of blocks, of which one has a rate that never stops to grow."""
    keys = jax.random.split(jax.random.key(0), 20)
    matrix = lambda i, rows, columns: jax.random.normal(keys[i], (rows, columns)) / rows**0.5  # noqa: E731
    blocks = [
        {"up": matrix(2 * i + 1, 16, 16), "down": 0.3 * matrix(2 * i + 2, 16, 16)} for i in range(6)
    ]
    params = {"emb": matrix(0, 8, 16), "blocks": blocks, "head": matrix(15, 16, 1)}
    xs = jax.random.normal(keys[16], (steps, 64, 8))
    noise = 0.5 * jax.random.normal(keys[17], (steps, 64, 1))

    def loss(params, batch):
        h = batch[0] @ params["emb"]
        for block in params["blocks"]:
            h = h + jnp.tanh(h @ block["up"]) @ block["down"]
        return jnp.mean((h @ params["head"] - batch[1]) ** 2)

    def label(path, _):
        return "late" if f"[{sick}]" in jax.tree_util.keystr(path) else "all"

    late = optax.adam(lambda i: 3e-3 * 1.05 ** jnp.maximum(i - 40, 0))
    rates = {"all": optax.adam(3e-3), "late": late}
    rate_of = lambda params: jax.tree.map_with_path(label, params)  # noqa: E731
    tx = cg.watch_updates(optax.chain(cg.clip_by_global_norm(1.0), optax.partition(rates, rate_of)))
    step = cg.train_step(loss, tx)

    def one(state, batch):
        state, metrics = step(state, batch)
        return state, (metrics["loss"], {n: x.ratio for n, x in metrics["updates"].items()})

    batches = (xs, jnp.sin(xs.sum(-1, keepdims=True)) + noise)
    return jax.jit(lambda params: jax.lax.scan(one, step.init(params), batches)[1])(params)


@pytest.mark.slow
@first_row
@pytest.mark.parametrize("sick", [3, 1])
def test_the_ratio_names_the_layer_that_diverges_twenty_steps_before_the_loss_doubles(sick):
    losses, ratios = jax.device_get(diverging(sick))
    rows = np.array([ratios[name] for name in ratios])
    loudest = np.array(list(ratios))[rows.argmax(0)]
    stands_out = rows.max(0) > 4 * np.median(rows, axis=0)
    smooth = np.convolve(losses, np.ones(5) / 5, "valid")
    doubled = np.flatnonzero(smooth[20:] > 2 * np.minimum.accumulate(smooth)[20:])[0] + 20
    named = np.flatnonzero(stands_out[20:])[0] + 20
    assert loudest[named] == f"blocks/{sick}" and doubled - named >= 20, (named, doubled)
    assert set(loudest[:doubled][stands_out[:doubled]]) == {f"blocks/{sick}"}


# ---- bad input

WRONG = {
    "by a word": ({"by": "layer"}, ValueError, 'by: got \'layer\', expected "module", "leaf", a'),
    "by zero": ({"by": 0}, ValueError, "by: got 0, expected"),
    "by a flag": ({"by": True}, ValueError, "by: got True, expected"),
    "by a function of numbers": (
        {"by": len},
        TypeError,
        "by: got 13 from it for 'blocks/attn/b'",
    ),
    "stacked nothing": ({"stacked": "layers"}, ValueError, "stacked: got 'layers', expected one"),
    "stacked a part": (
        {"stacked": "q"},
        ValueError,
        r"stacked: got the group 'blocks/attn' with 'blocks/attn/b' \(not stacked\) and "
        r"'blocks/attn/q' \(2 layers\), expected the same layers",
    ),
    "different layers": (
        {"stacked": lambda tree: jax.tree.map(lambda _: True, tree), "by": lambda path: "all"},
        ValueError,
        r"'blocks/attn/b' \(2 layers\) and 'emb' \(5 layers\)",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_groups_are_an_error(name):
    options, kind, match = WRONG[name]
    with pytest.raises(kind, match=match):
        cg.watch_updates(optax.sgd(0.1), **options).init(PARAMS)


def test_wrong_calls_are_an_error():
    tx = cg.watch_updates(optax.sgd(0.1))
    state = tx.init(PARAMS)
    with pytest.raises(ValueError, match=r"params: got None, .*write update\(grads, state, params"):
        tx.update(GRADS, state)
    with pytest.raises(ValueError, match="params: got the groups .*but the state has .*expected"):
        tx.update({"w": array(np.ones(2))}, state, {"w": array(np.ones(2))})
    with pytest.raises(ValueError, match="updates: got a tree of 1 leaves, expected one for each"):
        tx.update({"w": array(np.ones(2))}, state, PARAMS)
    with pytest.raises(TypeError, match="optimizer: got function, expected an optax.Gradient"):
        cg.watch_updates(optax.adam)
    with pytest.raises(ValueError, match=r"stacked: got a leaf of shape \(\) at 'w', expected a"):
        cg.watch_updates(optax.sgd(0.1), stacked="w").init({"w": array(np.ones(()))})
    with pytest.raises(TypeError, match="optimizer: got a clip alone"):
        cg.train_step(lambda w, x: w.sum(), cg.watch_updates(cg.clip_by_norm(1.0)))
