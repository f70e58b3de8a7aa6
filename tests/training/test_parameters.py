"""What of a model is trained, and what is state: one answer at every entry point."""

import dataclasses
import sys

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState
from jax.ad_checkpoint import checkpoint_name

import clipgrad as cg
from clipgrad._frameworks import Parameters
from tests.helpers import array, assert_close

pytestmark = [pytest.mark.usefixtures("users_promotion"), pytest.mark.slow]
X = array(np.linspace(-1.0, 2.0, 12, dtype=np.float32).reshape(4, 3) ** 2)


class Counter(nnx.Variable):
    """A variable of a user's own."""


class Plain(nnx.Module):
    def __init__(self, rngs):
        self.first, self.last = nnx.Linear(3, 4, rngs=rngs), nnx.Linear(4, 2, rngs=rngs)

    def inner(self, h):
        return jnp.tanh(h)

    def __call__(self, x):
        return self.last(checkpoint_name(self.inner(self.first(x)), "h"))


class Normed(Plain):
    def __init__(self, rngs):
        super().__init__(rngs)
        self.norm = nnx.BatchNorm(4, rngs=rngs)
        self.table = nnx.data(jnp.ones(4))
        self.ids = nnx.Param(jnp.arange(4))

    def inner(self, h):
        return self.norm(h) * self.table + self.ids[...].sum()


class Dropped(Plain):
    def __init__(self, rngs):
        super().__init__(rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def inner(self, h):
        return self.dropout(h)


class Counted(Plain):
    def __init__(self, rngs):
        super().__init__(rngs)
        self.count = Counter(jnp.zeros((), jnp.int32))

    def inner(self, h):
        self.count[...] += 1
        return h


class Adapted(Plain):
    """With a layer that is there twice."""

    def __init__(self, rngs):
        super().__init__(rngs)
        base = nnx.Linear(4, 4, rngs=rngs)
        self.again = self.lora = nnx.LoRA(4, 2, 4, base_module=base, rngs=rngs)
        self.lora.lora_b[...] = jnp.ones((2, 4))

    def inner(self, h):
        return self.again(self.lora(h))


KINDS = [Plain, Normed, Dropped, Counted, Adapted]
FILTERS = {"Adapted": nnx.LoRAParam}
every_kind = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)


def loss(model, x):
    return jnp.mean((model(x) - 1) ** 2)


def of_one(model, x):
    return loss(model, x[None])


def wrt_of(kind):
    return nnx.All(FILTERS.get(kind.__name__, nnx.Param), lambda path, _: "ids" not in path)


def gradient(kind, model, x):
    return nnx.value_and_grad(loss, argnums=nnx.DiffState(0, wrt_of(kind)))(model, x)


def numbers(tree):
    leaves = jax.tree.leaves(tree)
    is_key = lambda x: jnp.issubdtype(x.dtype, jax.dtypes.prng_key)  # noqa: E731
    return [np.array(jax.random.key_data(x) if is_key(x) else x) for x in leaves]


def state_of(model):
    return numbers(nnx.state(model))


def trained_by_nnx(kind, steps=2):
    model = kind(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(0.1), wrt=wrt_of(kind))

    @nnx.jit
    def step(model, optimizer):
        value, grads = gradient(kind, model, X)
        optimizer.update(model, grads)
        return value, cg.global_norm(nnx.as_pure(grads))

    return model, [step(model, optimizer) for _ in range(steps)]


@pytest.mark.parametrize("options", [{}, {"error_clip": {"h": None}}], ids=["plain", "watched"])
@every_kind
def test_a_step_trains_a_model_as_nnx_does_and_returns_its_state(kind, options):
    expected, seen = trained_by_nnx(kind)
    model_of_user = kind(nnx.Rngs(0))
    before = state_of(model_of_user)
    step = cg.train_step(loss, optax.adam(0.1), wrt=FILTERS.get(kind.__name__), **options)
    state = step.init(model_of_user)
    for value, norm in seen:
        state, metrics = step(state, X)
        assert_close((metrics["loss"], metrics["grad_norm"]), (value, norm), rtol=1e-5)
    assert_close(state_of(state.params), state_of(expected), rtol=1e-5, atol=1e-6)
    assert_close(state_of(model_of_user), before, rtol=0)
    assert isinstance(state.params, kind) and step.update._cache_size() == 1
    assert options == {} or metrics["error_clip"]["h"].norm > 0


@every_kind
def test_statistics_come_with_the_gradient_of_nnx(kind):
    argnums = nnx.DiffState(0, wrt_of(kind))
    expected, model = kind(nnx.Rngs(0)), kind(nnx.Rngs(0))
    value, grads = gradient(kind, expected, X)
    watched = cg.value_and_grad_with_stats(loss, argnums, watch=["h", "**"])(model, X)
    assert_close((watched[0], numbers(watched[1])), (value, numbers(grads)), rtol=1e-5, atol=1e-6)
    assert jax.tree.structure(watched[1]) == jax.tree.structure(grads)
    assert_close(state_of(model), state_of(expected), rtol=1e-5)
    assert watched[2]["h"].norm > 0 and "first" in watched[2]


def each_by_nnx(kind, model):
    @nnx.split_rngs(splits=len(X))
    @nnx.vmap(in_axes=(nnx.StateAxes({nnx.RngState: 0, ...: None}), 0))
    def each(model, x):
        return gradient(kind, model, x[None])[1]

    return nnx.as_pure(each(model, X))


@pytest.mark.parametrize("method", ["direct", "auto"])
@pytest.mark.parametrize("kind", [Plain, Adapted, Dropped], ids=lambda kind: kind.__name__)
def test_each_example_has_the_gradient_of_nnx(kind, method):
    expected, model = kind(nnx.Rngs(0)), kind(nnx.Rngs(0))
    each = each_by_nnx(kind, expected)
    options = {"wrt": FILTERS.get(kind.__name__), "method": method}
    _, grads, stats = cg.clip_per_example(of_one, None, **options)(model, X)
    assert isinstance(grads, nnx.State)
    mean = jax.tree.map(lambda x: x.mean(0), each)
    assert_close(numbers(grads), numbers(mean), rtol=1e-4, atol=1e-5)
    norms = jax.vmap(cg.global_norm)(each)
    assert_close(stats.norm, norms, rtol=1e-4)
    assert_close(state_of(model), state_of(expected), rtol=0)
    again = kind(nnx.Rngs(0))
    assert_close(cg.per_example_norms(of_one, **options)(again, X), norms, rtol=1e-4)
    assert_close(state_of(again), state_of(expected), rtol=0)
    before = state_of(again)
    assert len(cg.per_example_norms(of_one, **options).plan(again, X).leaves) == len(numbers(grads))
    assert_close(state_of(again), before, rtol=0)


@pytest.mark.parametrize("kind", [Normed, Counted], ids=lambda kind: kind.__name__)
def test_a_model_that_an_example_would_change_is_refused_with_the_line_to_write(kind):
    model = kind(nnx.Rngs(0))
    clipped = cg.clip_per_example(of_one, cg.ClipByGlobalNorm(1.0))
    with pytest.raises(ValueError, match=r"changes (BatchStat|Counter) at .*expected a loss that"):
        clipped(model, X)
    with pytest.raises(ValueError, match=r"model.eval\(\)"):
        cg.per_example_norms(of_one)(model, X)
    graph, params, rest = nnx.split(model, nnx.Param, ...)  # the line that the error writes
    params = nnx.filter_state(params, lambda path, _: "ids" not in path)
    names = dict(nnx.to_flat_state(params))
    ids = {} if kind is Counted else {"ids": nnx.Param(jnp.arange(4))}
    whole = lambda p: nnx.merge(graph, nnx.merge_state(p, nnx.State(ids)), rest, copy=True)  # noqa: E731
    _, grads, _ = cg.clip_per_example(lambda p, x: of_one(whole(p), x), None)(params, X)
    assert dict(nnx.to_flat_state(grads)).keys() == names.keys()


@pytest.mark.parametrize("kind", [Normed, Dropped], ids=lambda kind: kind.__name__)
def test_the_state_goes_from_one_microbatch_to_the_next(kind):
    expected, model = kind(nnx.Rngs(0)), kind(nnx.Rngs(0))
    parts = [X[i::2] for i in range(2)]
    grads = [nnx.as_pure(gradient(kind, expected, part)[1]) for part in parts]
    step = cg.train_step(loss, optax.sgd(1.0), accumulate=2)
    state, _ = step(step.init(model), X)
    params = nnx.as_pure(nnx.state(model, wrt_of(kind)))
    moved = jax.tree.map(lambda w, *g: w - sum(g) / 2, params, *grads)
    trained = nnx.as_pure(nnx.state(state.params, wrt_of(kind)))
    assert_close(trained, moved, rtol=1e-5, atol=1e-6)
    rest = nnx.Not(nnx.Param)
    assert_close(
        numbers(nnx.state(state.params, rest)), numbers(nnx.state(expected, rest)), rtol=1e-5
    )


def test_a_skipped_step_leaves_the_state_of_the_model():
    step = cg.train_step(loss, cg.skip_spikes(optax.sgd(0.1), halt=True))
    state, _ = step(step.init(Normed(nnx.Rngs(0))), X)
    before = state_of(state.params)
    state, metrics = step(state, X.at[0, 0].set(jnp.nan))
    assert metrics["skipped"]
    assert_close(state_of(state.params), before, rtol=0)


# bad input


def test_a_filter_or_a_model_without_anything_to_train_is_refused():
    model = Plain(nnx.Rngs(0))
    with pytest.raises(ValueError, match="without variables that are trained, with Param, exp"):
        cg.train_step(loss, optax.sgd(0.1), wrt=nnx.LoRAParam).init(model)
    with pytest.raises(TypeError, match=r"wrt: got 3.5, expected a filter .* as nnx.Param"):
        cg.clip_per_example(of_one, None, wrt=3.5)(model, X)
    with pytest.raises(ValueError, match="wrt: got .*Param.* without a model of flax NNX"):
        cg.train_step(loss, optax.sgd(0.1), wrt=nnx.Param).init({"w": jnp.ones(2)})


def test_a_state_of_equinox_among_the_parameters_is_refused_with_the_line_to_write():
    model_and_state = eqx.nn.make_with_state(eqx.nn.BatchNorm)(4, axis_name="b", mode="batch")
    step = cg.train_step(lambda p, x: jnp.float32(0), optax.sgd(0.1))
    with pytest.raises(ValueError, match=r"equinox.nn.State .*expected the model alone; write"):
        step.init(model_and_state)


LINEN = nn.Sequential([nn.Dense(4), nn.BatchNorm(use_running_average=True), nn.Dense(1)])


class Fourier(nn.Module):
    """A collection of the user's own."""

    @nn.compact
    def __call__(self, x):
        table = self.variable("table", "w", jnp.ones, (3, 4))
        return nn.Dense(1)(jnp.sin(x @ table.value))


ENTRIES = {
    "train_step": lambda loss, p: cg.train_step(loss, optax.sgd(0.1)).init(p),
    "clip_per_example": lambda loss, p: cg.clip_per_example(loss, None)(p, X),
    "per_example_norms": lambda loss, p: cg.per_example_norms(loss)(p, X),
}


@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize("net", [LINEN, Fourier()], ids=["batch_stats", "table"])
def test_a_collection_of_linen_beside_the_parameters_is_refused_with_the_line_to_write(net, entry):
    variables = net.init(jax.random.key(0), X)
    others = {name: part for name, part in variables.items() if name != "params"}
    whole = lambda v, x: jnp.sum(net.apply(v, x[None]) ** 2)  # noqa: E731
    with pytest.raises(ValueError, match=rf"collection '{[*others][0]}' .* expected the .* write"):
        ENTRIES[entry](whole, variables)
    ENTRIES[entry](lambda p, x: whole({"params": p, **others}, x), variables["params"])
    ENTRIES[entry](whole, {"params": variables["params"]} | jax.tree.map(jnp.int32, others))


def test_a_state_in_place_of_the_parameters_is_refused():
    params = {"w": jnp.ones(3)}
    state = TrainState.create(apply_fn=None, params=params, tx=optax.sgd(0.1))
    ours = cg.train_step(lambda p, x: jnp.float32(0), optax.sgd(0.1)).init(params)
    for each in (state, ours, {"params": params, "opt_state": state.opt_state}):
        for run in ENTRIES.values():
            with pytest.raises(ValueError, match="with params and opt_state, .* state.params"):
                run(lambda p, x: jnp.sum(p.params["w"] * x), each)


class Zoo(eqx.Module):
    """Leaves of all kinds, of which the floating arrays are trained."""

    w: jax.Array
    ids: jax.Array
    key: jax.Array
    table: np.ndarray
    number: float
    none: None
    act: object
    shared: eqx.nn.Shared

    def __init__(self, seed):
        keys = jax.random.split(jax.random.key(seed), 3)
        self.w, self.ids, self.key = jax.random.normal(keys[0], (3,)), jnp.arange(3), keys[1]
        self.table, self.number, self.none, self.act = np.ones(3, np.float32), 0.5, None, jnp.tanh
        pair = eqx.nn.Linear(3, 3, key=keys[1]), eqx.nn.Linear(3, 3, key=keys[2])
        self.shared = eqx.nn.Shared(pair, lambda p: p[1].weight, lambda p: p[0].weight)

    def __call__(self, x):
        first, last = self.shared()
        h = last(self.act(first(x))) * self.w[self.ids] * self.table
        return jnp.sum(h) * self.number + jax.random.normal(self.key)


def test_an_equinox_model_with_all_kinds_of_leaves_is_trained_as_filter_grad_does():
    tx, whole = optax.adam(0.1), lambda model, x: jnp.mean(jax.vmap(model)(x) ** 2)
    step, expected = cg.train_step(whole, tx), Zoo(0)
    state, opt_state = step.init(Zoo(0)), tx.init(eqx.filter(expected, eqx.is_inexact_array))
    for _ in range(2):
        state, _ = step(state, X)
        grads = eqx.filter_grad(whole)(expected, X)
        updates, opt_state = tx.update(grads, opt_state)
        expected = eqx.apply_updates(expected, updates)
    assert jax.tree.structure(state.params) == jax.tree.structure(expected)
    assert state.params.act is expected.act and step.update._cache_size() == 1
    trained, wanted = (eqx.filter(x, eqx.is_array) for x in (state.params, expected))
    assert_close(numbers(trained), numbers(wanted), rtol=1e-5, atol=1e-6)


def test_a_loss_that_makes_variables_is_refused_with_microbatches():
    def sow(model, x):
        model.seen = Counter(jnp.sum(x))
        return loss(model, x)

    step = cg.train_step(sow, optax.sgd(0.1), accumulate=2)
    with pytest.raises(ValueError, match="changes more of an NNX model than .* accumulate=2"):
        step(step.init(Plain(nnx.Rngs(0))), X)
    step = cg.train_step(sow, optax.sgd(0.1))
    state, _ = step(step.init(Plain(nnx.Rngs(0))), X)
    assert_close(state.params.seen[...], jnp.sum(X), rtol=1e-6)


def test_a_position_of_variables_without_an_argument_is_an_error():
    grads = cg.value_and_grad_with_stats(lambda x: x, argnums=nnx.DiffState(3, nnx.Param))
    with pytest.raises(TypeError, match="argnums: got 3, expected the position of one of the 1"):
        grads(1.0)


# A further framework is one class: a box has an array that is trained, and counts what it saw.


class Box:
    def __init__(self, weights, total):
        self.weights, self.total = weights, total


jax.tree_util.register_pytree_node(
    Box, lambda box: ((box.weights, box.total), None), lambda _, parts: Box(*parts)
)


@dataclasses.dataclass(frozen=True, eq=False)
class BoxParameters(Parameters):
    trained: jax.Array
    state: jax.Array

    @classmethod
    def fits(cls, params, wrt):
        return isinstance(params, Box)

    @classmethod
    def of(cls, params, wrt):
        return cls(params.weights, params.total)

    def whole(self, trained):
        return Box(trained, self.state)

    def call(self, fun, trained, state, *args):
        box = Box(trained, state)
        return fun(box, *args), box.total

    def with_changes(self, changes):
        return self.with_state(changes)

    def with_state(self, state):
        return dataclasses.replace(self, state=state)

    def with_state_of(self, other, where):
        return self.with_state(jnp.where(where, other.state, self.state))

    def has_form_of(self, other):
        return True


@pytest.fixture
def boxes(monkeypatch):
    room = sys.modules["clipgrad._frameworks.take_apart"]
    monkeypatch.setattr(room, "KINDS", (BoxParameters, *room.KINDS))


def counting(box, x):
    box.total = box.total + jnp.sum(x)
    return jnp.mean(x @ box.weights)


@pytest.mark.usefixtures("boxes")
@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_further_kind_of_parameters_is_trained_with_its_state(accumulate):
    step = cg.train_step(
        counting, cg.skip_spikes(optax.sgd(1.0)), accumulate=accumulate, donate=False
    )
    state, _ = step(step.init(Box(jnp.ones(3), jnp.zeros(()))), X)
    assert_close(state.params.weights, 1 - X.mean(0), rtol=1e-6)
    assert_close(state.params.total, X.sum(), rtol=1e-6)
    skipped, metrics = step(state, jnp.nan * X)
    assert metrics["skipped"] and skipped.params.total == state.params.total
    np.testing.assert_array_equal(skipped.params.weights, state.params.weights)


@pytest.mark.usefixtures("boxes")
def test_a_further_kind_of_parameters_is_clipped_by_example():
    box = Box(jnp.ones(3), jnp.zeros(()))
    rule = cg.ClipByGlobalNorm(0.1)
    _, grads, stats = cg.clip_per_example(lambda box, x: x @ box.weights, rule)(box, X)
    norms = jnp.linalg.norm(X, axis=1)
    expected = jnp.mean(X * jnp.minimum(1, 0.1 / norms)[:, None], axis=0)
    assert_close(grads, expected, rtol=1e-5)
    assert_close(stats.norm, norms, rtol=1e-5)
