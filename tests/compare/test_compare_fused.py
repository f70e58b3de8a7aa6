"""Weights that one version holds apart and the other fused, stacked, or under other names."""

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import clipgrad as cg
from clipgrad._compare.common_pieces import Leaf, common_pieces
from tests.compare import fused_models as models
from tests.rows import some_of

pytestmark = pytest.mark.usefixtures("users_promotion")


def leaves_of(values, gradients):
    """The leaves of a tree by numbers."""
    pairs = zip(jax.tree.leaves(values), jax.tree.leaves(gradients), strict=True)
    return {i: Leaf(*(np.float64(x) for x in pair)) for i, pair in enumerate(pairs)}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", models.PAIRS)
def test_pieces_are_found_by_numbers(name, dtype):
    """Each element of each leaf is in one piece, and its gradient is the same."""
    trees = models.pair_of(name, dtype=dtype)
    of_gradients = models.PAIRS[name](models.Numbers("float32", 1, has_zeros=False), 1.0)
    sides = [leaves_of(trees[k], of_gradients[k]) for k in (1, 3)]
    for a, b in (sides, sides[::-1]):
        free = [{i: np.ones(leaf.values.size, bool) for i, leaf in side.items()} for side in (a, b)]
        for (i, j), (ours, theirs), _ in common_pieces(a, b):
            assert free[0][i][ours].all() and free[1][j][theirs].all()
            free[0][i][ours] = free[1][j][theirs] = False
            for x, y in zip(a[i], b[j], strict=True):
                assert np.array_equal(x.ravel()[ours], y.ravel()[theirs])
        assert not any(left.any() for side in free for left in side.values())


def test_what_is_equal_by_chance_is_no_piece():
    rng = np.random.default_rng(0)
    x, y = (np.round(rng.normal(size=shape)) for shape in ((4, 6), (6, 8)))
    assert not common_pieces(leaves_of([x], [x]), leaves_of([y], [y]))
    y[:, 0] = 0
    half = np.concatenate([rng.normal(size=(6, 2)), y[:, :3]], 1)
    assert not common_pieces(leaves_of([half], [half]), leaves_of([y], [y]))


def compared(pair, is_first=False):
    """The comparison of the losses of a pair, or of its second with the first."""
    one, params, other, others = pair
    if is_first:
        one, params, other, others = other, others, one, params
    args = jax.device_put((params, others))
    return cg.compare(one, other, (args[0], models.X), other_args=(args[1], models.X))


FEW = [("gate and up", "float32", False), ("renamed", "bfloat16", True)]
ROWS = [(name, *row) for name in models.PAIRS for row in (("float32", False), ("bfloat16", True))]


@pytest.mark.parametrize("name, dtype, is_first", some_of(ROWS, FEW))
def test_fused_leaves_are_compared(name, dtype, is_first):
    comparison = compared(models.pair_of(name, dtype=dtype), is_first)
    assert comparison.ok and "gradient" not in str(comparison.unmatched), comparison


@pytest.mark.slow
@pytest.mark.parametrize("name", models.PAIRS)
def test_fused_leaves_of_other_names_are_compared(name):
    comparison = compared(models.of_other_names(*models.pair_of(name)))
    assert comparison.ok and "gradient" not in str(comparison.unmatched), comparison


@pytest.mark.slow
@pytest.mark.parametrize("number, name", [*enumerate(models.PAIRS)])
def test_another_value_is_found_beside_fused_leaves(number, name):
    pair = models.pair_of(name, scale=1.1)
    pair = models.of_other_names(*pair) if number % 2 else pair
    comparison = compared(pair, is_first=number % 4 < 2)
    assert [f.kind for f in comparison.findings] == ["value"], comparison
    assert "gradient" not in str(comparison.unmatched)


@pytest.mark.slow
@pytest.mark.parametrize("is_first", [False, True])
def test_a_wrong_gradient_of_a_part_is_found(is_first):
    pair = models.fused(models.Numbers("float32"), 1.0, wrong="k", bias="__call__")
    (finding,) = compared(pair, is_first).findings
    assert finding.kind == "grads" and finding.path == ("wk", "wqkv")[is_first], finding
    if is_first:
        assert "wqkv, where it is wk in other," in finding.message


class Net(nn.Module):
    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(11, 8, name="embed")(tokens)
        x = x + self.param("pos", nn.initializers.normal(), (6, 8))
        for i in range(2):
            x = x + nn.Dense(8, name=f"layer_{i}")(jnp.tanh(x))
        return nn.Dense(3, name="head")(x)


class Port(eqx.Module):
    """The same in Equinox; its root module has arrays."""

    wte: jax.Array
    pos: jax.Array
    blocks: list
    head: eqx.nn.Linear
    scale: float = eqx.field(static=True, default=1.0)

    @classmethod
    def of(cls, params, scale):
        layers = [linear(params[f"layer_{i}"]) for i in range(2)]
        arrays = params["embed"]["embedding"], params["pos"]
        return cls(*arrays, layers, linear(params["head"]), scale)

    def __call__(self, tokens):
        x = self.wte[tokens] + self.pos
        for block in self.blocks:
            x = x + self.scale * jax.vmap(block)(jnp.tanh(x))
        return jax.vmap(self.head)(x)


def linear(dense):
    kernel = dense["kernel"]
    layer = eqx.nn.Linear(*kernel.shape, key=jax.random.key(0))
    weights = kernel.T, dense["bias"]
    return eqx.tree_at(lambda layer: (layer.weight, layer.bias), layer, weights)


NAMES = [
    {"embed/embedding": "wte"},
    {"Net/head": "head"},
    {"Net/layer_*": "blocks/*"},
    {"embed/embedding": "wte", "Net/layer_*": "blocks/*", "Net/head": "head"},
]


@pytest.mark.slow
@pytest.mark.parametrize("scale", [1.0, 1.1])
@pytest.mark.parametrize("is_first", [False, True])
@pytest.mark.parametrize("names", NAMES, ids=" ".join)
def test_names_may_be_of_leaves_and_of_some_alone(names, is_first, scale):
    """The others are matched by their numbers."""
    tokens = np.arange(6) % 11
    params = Net().init(jax.random.key(0), tokens)
    of_linen = lambda p, t: jnp.mean(Net().apply(p, t) ** 2)  # noqa: E731
    of_port = lambda model, t: jnp.mean(model(t) ** 2)  # noqa: E731
    sides = [(of_linen, params), (of_port, Port.of(params["params"], scale))]
    if is_first:
        sides, names = sides[::-1], {new: name for name, new in names.items()}
    (fun, args), (other, others) = sides
    comparison = cg.compare(fun, other, (args, tokens), other_args=(others, tokens), names=names)
    assert comparison.ok is (scale == 1), comparison
    assert [f.kind for f in comparison.findings] == ["value"][: scale != 1]
    assert "gradient" not in str(comparison.unmatched)


def test_the_error_of_a_name_says_that_leaves_have_names():
    loss = lambda p: jnp.sum(p["w"] ** 2)  # noqa: E731
    with pytest.raises(ValueError, match="expected the path of a value or of a leaf in fun"):
        cg.compare(loss, loss, ({"w": np.ones(3)},), names={"v": "w"})


@pytest.mark.slow
def test_names_of_leaves_alone_change_nothing_where_all_leaves_are_the_same():
    def named(name):
        def loss(params, x):
            with jax.named_scope(name):
                return jnp.mean((x @ params["w"]) ** 2)

        return loss

    assert cg.compare(named("a"), named("b"), ({"w": models.X.T}, models.X), names={"w": "w"}).ok
