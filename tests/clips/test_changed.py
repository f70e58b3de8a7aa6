"""The elements that a clip changed: one number for each spelling of a clip, and in each place."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name

import clipgrad as cg
from tests.helpers import array
from tests.rows import first_rows, some_of

GRADS = {
    "a": np.float32([100, 1e-3, 0]),
    "b": np.float32([[0, 0], [8, 6], [0.3, 0.4]]),
    "c": np.zeros(2, np.float32),
}
PARAMS = jax.tree.map(np.ones_like, GRADS)


def subclasses(cls):
    """A class, one that adds nothing, and one whose clip is its own."""

    def by_hand(self, grads, params=None):
        return cls.__call__(self, grads, params)

    return {
        "": cls,
        "plain": type("Plain", (cls,), {}),
        "own": type("Own", (cls,), {"__call__": by_hand}),
    }


def spelled(cls, *args, **options):
    return {name: made(*args, **options) for name, made in subclasses(cls).items()}


ORDERS = (1, 2, 3, jnp.inf)
# Each rule in several spellings, and the elements of each leaf in the groups that it scales.
RULES = {
    **{f"tree, {p}": (spelled(cg.ClipByGlobalNorm, 1.0, ord=p), (3, 6, 2)) for p in ORDERS},
    **{f"tree within, {p}": (spelled(cg.ClipByGlobalNorm, 1e4, ord=p), (0, 0, 0)) for p in ORDERS},
    **{f"leaf, {p}": (spelled(cg.ClipByNorm, 20.0, ord=p), (3, 0, 0)) for p in ORDERS},
    **{f"row, {p}": (spelled(cg.ClipByNorm, 1.0, ord=p, axis=-1), (3, 2, 0)) for p in ORDERS},
    "rms": (spelled(cg.ClipByBlockRMS, 1.0), (3, 6, 0)),
    "unit": (spelled(cg.AdaptiveClip, 3.6), (3, 3, 0)),
    "row as unit": (spelled(cg.AdaptiveClip, 0.5, axis=-1), (3, 2, 0)),
    "auto": (spelled(cg.AutoNorm, 1.0), (3, 6, 2)),
    # Of value rules and functions the elements that differ.
    "value": (spelled(cg.ClipByValue, 0.35), (1, 3, 0)),
    "function": ({"": lambda g: jax.tree.map(lambda x: jnp.minimum(x, 0.35), g)}, (1, 3, 0)),
    "none": ({"": None}, (0, 0, 0)),
}  # fmt: skip


def in_each_place(rule):
    """The statistics of a clip of the gradients: of a call, a state, each leaf, and a probe."""
    tx = cg.gradient_clip(rule, stats="per_leaf")

    def loss(x, probe, grads):
        clipped = cg.clip_cotangent(x, rule, probe=probe)
        return sum(jnp.vdot(clipped[key], grads[key]) for key in grads)

    def run(grads):
        state = tx.update(grads, tx.init(PARAMS), PARAMS)[1]
        probed = jax.grad(loss, 1)(PARAMS, cg.types.ClipStats.zero(), grads)
        called = cg.clip_grads(grads, rule, PARAMS)[1]
        leaves = jax.tree.map(lambda *x: sum(x), *state.leaf_stats.values())
        return [called, state.stats, leaves, probed], list(state.leaf_stats.values())

    return jax.jit(run)(GRADS)


BY_DEFAULT = {
    ("tree, 2", "plain"), ("tree within, 2", ""),
    ("unit", ""), ("value", "own"), ("function", ""),
}  # fmt: skip
SPELLINGS = some_of([(name, each) for name, (own, _) in RULES.items() for each in own], BY_DEFAULT)


@pytest.mark.parametrize(("name", "spelling"), SPELLINGS)
def test_one_number_of_changed_elements(name, spelling):
    spellings, changed = RULES[name]
    places, leaves = in_each_place(spellings[spelling])
    assert [leaf.changed for leaf in leaves] == list(changed)
    assert [stats.changed for stats in places] == [sum(changed)] * 4
    assert [stats.size for stats in places] == [11] * 4


SPREAD_BY_DEFAULT = {(name, "", "zero") for name in ("tree, 2", "unit", "value")}
SPREAD = [
    pytest.param(name, *more, marks=() if (name, *more) in SPREAD_BY_DEFAULT else pytest.mark.slow)
    for name in ("tree, 2", "tree, 3", "row, 2", "row, 1", "leaf, 2", "rms", "unit", "value")
    for more in itertools.product(("", "own"), ("propagate", "zero"))
]


@pytest.mark.parametrize(("name", "spelling", "nonfinite"), SPREAD)
def test_statistics_of_a_spread_tree_are_those_of_the_whole(name, spelling, nonfinite):
    """A leaf that is spread has statistics on each device, which add up; one norm has its own."""
    mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    whole = {"a": np.float32([[100, 1e-3], [0, 5]]), "b": np.float32([[0, 7], [6, np.nan]])}
    if nonfinite == "propagate":
        whole["b"][1, 1] = 0.1
    rule = RULES[name][0][spelling]
    fields = {"axis_name": "x"} if hasattr(rule, "axis_name") and name != "value" else {}
    if name.startswith("row"):
        fields["axis_name"] = ()  # a row is whole on its device
    spread = type(rule)(**{**vars(rule), **fields})

    def stats(grads, rule=spread):
        return cg.clip_grads(grads, rule, jax.tree.map(jnp.ones_like, grads), nonfinite=nonfinite)[
            1
        ]

    def summed(grads):
        stats_here = stats(grads)
        return stats_here if name.startswith("tree") else jax.lax.psum(stats_here, "x")

    mapped = jax.shard_map(summed, mesh=mesh, in_specs=jax.P("x"), out_specs=jax.P())
    right = jax.jit(lambda g: stats(g, rule))(whole)
    for field, stats_here, expected in zip(
        right._fields, jax.jit(mapped)(whole), right, strict=True
    ):
        np.testing.assert_allclose(stats_here, expected, rtol=1e-6, err_msg=field)


OF_DEVICES = {
    "one norm of all": cg.ClipByGlobalNorm(1e-3, axis_name="x"),
    "a norm of each": cg.ClipByGlobalNorm(1e-3, axis_name=()),
    "another order": cg.ClipByGlobalNorm(1e-3, ord=3, axis_name="x"),
    "leaves": cg.ClipByNorm(1e-3, axis_name="x"),
    "block RMS": cg.ClipByBlockRMS(1e-4, axis_name=()),
    "value": cg.ClipByValue(1e-4),
    "function": lambda grads: jax.tree.map(jnp.sign, grads),
}


@first_rows(2)
@pytest.mark.parametrize("name", OF_DEVICES)
def test_statistics_by_name_on_devices_count_the_elements_of_all(name):
    mesh = jax.make_mesh((8,), ("x",), (jax.sharding.AxisType.Auto,))

    def loss(w, x):
        return jax.lax.pmean(jnp.mean(checkpoint_name(jnp.tanh(x @ w), "h") ** 2), "x")

    run = cg.value_and_grad_with_stats(loss, error_clip={"h": OF_DEVICES[name]})
    spec = jax.sharding.PartitionSpec
    specs = {"in_specs": (spec(), spec("x")), "out_specs": spec()}
    x = array(np.linspace(-1, 1, 48).reshape(16, 3))
    _, _, stats = jax.jit(jax.shard_map(run, mesh=mesh, **specs))(array(np.ones((3, 2))), x)
    assert float(stats["h"].size) == 32 and float(stats["h"].fraction) == 1
