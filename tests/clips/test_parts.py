"""Inside of shard_map a norm is that of the whole gradient, or a warning says whose it is."""

import functools
import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import clipgrad as cg
from tests.helpers import array, assert_close
from tests.rows import first_row, first_rows

GRADS = array([3.0, 4.0, 12.0, 0.0])
LEAF = "got leaves that vary over 'd', a mapped axis that axis_name does not name.*axis_name='d'.*"
WARNING = LEAF + r"or axis_name=\(\) if each device"


def updated(tx):
    return lambda g: tx.update(g, tx.init(g), g)[0]


def by_cotangent(rule):
    return lambda g: jax.vjp(lambda x: cg.clip_cotangent(x, rule), g)[1](g)[0]


CLIPS = {
    "global_norm": lambda name: lambda g: cg.global_norm(g, axis_name=name) * jnp.ones_like(g),
    "clip_by_global_norm": lambda name: updated(cg.clip_by_global_norm(1.0, axis_name=name)),
    "clip_by_block_rms": lambda name: updated(cg.clip_by_block_rms(1.0, axis_name=name)),
    "adaptive_grad_clip": lambda name: updated(cg.adaptive_grad_clip(0.1, axis_name=name)),
    "AutoNorm": lambda name: cg.AutoNorm(1.0, axis_name=name),
    "skip_spikes": lambda name: updated(cg.skip_spikes(optax.sgd(1.0), axis_name=name)),
    "statistics": lambda name: updated(
        cg.clip_by_global_norm(1.0, axis_name=name, stats="per_leaf")
    ),
    "error clip": lambda name: by_cotangent(cg.ClipByGlobalNorm(1.0, axis_name=name)),
    "error clip of slices": lambda name: by_cotangent(cg.ClipByNorm(1.0, axis=0, axis_name=name)),
}
every_clip = pytest.mark.parametrize("clip", CLIPS.values(), ids=CLIPS)


def make_mesh(**sizes):
    count = int(np.prod(list(sizes.values())))
    axes = {"axis_types": (AxisType.Auto,) * len(sizes), "devices": jax.devices()[:count]}
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), **axes)


def on_devices(f, **options):
    mesh = make_mesh(d=2)
    specs = {"in_specs": P("d"), "out_specs": P("d")} | options
    return jax.shard_map(f, mesh=mesh, **specs)


@every_clip
def test_a_clip_of_a_part_of_the_gradient_warns_once(clip):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        jax.eval_shape(on_devices(clip(None)), GRADS)
    assert len(caught) == 1, [str(w.message) for w in caught]
    assert re.search(WARNING, str(caught[0].message))


@first_row
@every_clip
def test_what_is_meant_is_written_in_one_of_two_ways(clip):
    whole, each = (jax.jit(on_devices(clip(name)))(GRADS) for name in ("d", ()))
    assert_close(whole, clip(None)(GRADS), rtol=1e-6)
    assert_close(
        each,
        np.concatenate([clip(None)(array(part)) for part in np.reshape(GRADS, (2, 2))]),
        rtol=1e-6,
    )


@pytest.mark.parametrize("name", [("d",), ("m",), ("d", "m"), ()])
def test_of_two_axes_each_that_is_not_named_is_warned_of(name):
    """An empty name says that each device has its own norm."""
    unnamed = sorted({"d", "m"} - {*name}) if name else []
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        clip = lambda g: cg.ClipByGlobalNorm(0.5, axis_name=name)(g)  # noqa: E731
        spread = {"in_specs": P(("d", "m")), "out_specs": P(("d", "m"))}
        mapped = jax.shard_map(clip, mesh=make_mesh(d=2, m=2), **spread)
        jax.eval_shape(mapped, array(np.ones(8)))
    texts = [str(w.message) for w in seen]
    assert len(texts) == bool(unnamed)
    assert all(f"vary over {', '.join(map(repr, unnamed))}, a mapped" in text for text in texts)


def test_nothing_warns_where_leaves_are_the_same_or_nothing_is_known():
    clip = CLIPS["clip_by_global_norm"](None)
    jax.jit(on_devices(clip, in_specs=P(), out_specs=P()))(GRADS)
    jax.jit(on_devices(clip, check_vma=False))(GRADS)
    jax.jit(on_devices(lambda g: cg.ClipByValue(1.0)(g)))(GRADS)


# JAX tracks that a leaf varies, and not along which axis: only the caller knows what cuts a slice.
SLICES = {
    "rows": lambda name: cg.ClipByNorm(0.5, axis=-1, axis_name=name),
    "units": lambda name: lambda g: cg.AdaptiveClip(0.1, axis=-1, axis_name=name)(g, g + 1.0),
}


@pytest.mark.slow
@first_row
@pytest.mark.parametrize("clip", SLICES.values(), ids=SLICES)
def test_slices_warn_until_somebody_says_what_cuts_them(clip):
    mesh, x = make_mesh(d=2, m=2), jax.random.normal(jax.random.key(3), (8, 4))
    run = functools.partial(jax.shard_map, mesh=mesh)
    rows = {"in_specs": P(("d", "m")), "out_specs": P(("d", "m"))}
    with pytest.warns(UserWarning, match=r"vary over 'd', 'm', .*or axis_name=\(\) if each device"):
        jax.jit(run(lambda g: clip(None)(g), **rows))(x[:, :4].repeat(4, 0))
    whole = jax.jit(run(lambda g: clip(())(g), **rows))(x)
    assert_close(whole, clip(None)(x), rtol=1e-6)
    # Cut by one axis, and whole along the other one: nothing to warn of.
    cut = {"in_specs": P(None, "m"), "out_specs": P(None, "m")}
    assert_close(jax.jit(run(lambda g: clip("m")(g), **cut))(x), clip(None)(x), rtol=1e-6)
    both = {"in_specs": P("d", "m"), "out_specs": P("d", "m")}
    expected = jnp.concatenate([clip(None)(part) for part in jnp.split(x, 2)])
    assert_close(jax.jit(run(lambda g: clip("m")(g), **both))(x), expected, rtol=1e-6)


RNG = np.random.default_rng(1)
PARAMS = {"cut": array(RNG.normal(size=(3, 4))), "same": array(RNG.normal(size=3))}
EXAMPLES = array(RNG.normal(size=(4, 3)))
PLACES = {"cut": P(None, "m"), "same": P()}


def of_example(params, x):
    return jnp.sum(jnp.tanh(x @ params["cut"]) ** 2) + jnp.sum(params["same"] * x**2)


def of_example_on_devices(params, x):
    cut_part = jnp.sum(jnp.tanh(x @ params["cut"]) ** 2)
    return jax.lax.psum(cut_part, "m") + jnp.sum(params["same"] * x**2)


# Of what clips or measures each example: from an axis_name to a function of a loss.
OF_EXAMPLES = {
    method: lambda name, method=method: (
        lambda loss: (
            lambda params, x: cg.clip_per_example(
                loss, cg.ClipByGlobalNorm(1.0, axis_name=name), method=method, reduce="sum"
            )(params, x)[1]["cut"]
        )
    )
    for method in ("auto", "direct")
}
OF_EXAMPLES["norms by leaf"] = lambda name: (
    lambda loss: cg.per_example_norms(loss, axis_name=name, per_leaf=True)
)


@pytest.mark.slow
@first_row
@pytest.mark.parametrize("kind", [*OF_EXAMPLES][::-1])
def test_an_example_over_parts_of_the_parameters_is_whole_or_warns(kind):
    of = OF_EXAMPLES[kind]
    # Examples over d, and parameters over m.
    out = P("d", None) if kind.startswith("norms") else P("d", None, "m")
    specs = {"mesh": make_mesh(d=2, m=2), "in_specs": (PLACES, P("d")), "out_specs": out}

    def run(name):
        return jax.jit(
            jax.shard_map(
                lambda *args: jax.tree.map(
                    lambda x: x[None], of(name)(of_example_on_devices)(*args)
                ),
                **specs,
            )
        )

    expected = [of(None)(of_example)(PARAMS, part) for part in jnp.split(EXAMPLES, 2)]
    expected = jax.tree.map(lambda *parts: jnp.stack(parts), *expected)
    assert_close(run("m")(PARAMS, EXAMPLES), expected, rtol=1e-5)
    each = lambda name: jax.shard_map(  # noqa: E731
        lambda *args: jax.tree.leaves(of(name)(of_example_on_devices)(*args))[0].sum()[None],
        **specs | {"out_specs": P(("d", "m"))},
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        jax.jit(each(None))(PARAMS, EXAMPLES)
    assert len(caught) == 1, [str(w.message) for w in caught]
    assert re.search(r"vary over 'm', .*axis_name='m' for", str(caught[0].message))
    jax.jit(each(()))(PARAMS, EXAMPLES)  # meant, and nothing warns
    with pytest.raises(ValueError, match="^axis_name: got 'd' for a batch .*spread over 'd', exp"):
        jax.jit(each("d"))(PARAMS, EXAMPLES)


@pytest.mark.slow
def test_followed_gradients_are_as_direct_whatever_axes_the_loss_varies_over():
    """The loss of one example varies over more mapped axes than it, as many, or fewer."""
    losses = (
        of_example,
        of_example_on_devices,
        lambda params, x: jax.lax.psum(of_example(params, x), "d"),
    )
    # Of all leaves, of which each device has its own norm, and of none that is clipped.
    rules = (cg.ClipByGlobalNorm(1.0, axis_name=()), None)

    def run(method):
        def of_device(params, x):
            clips = [
                cg.clip_per_example(loss, rule, method=method) for loss in losses for rule in rules
            ]
            return jax.tree.map(lambda g: g[None, None], [clip(params, x)[1] for clip in clips])

        places = {"in_specs": (PLACES, P("d")), "out_specs": P("d", "m")}
        mapped = jax.shard_map(of_device, mesh=make_mesh(d=2, m=2), **places)
        return jax.jit(mapped)(PARAMS, EXAMPLES)

    expected = run("direct")
    assert_close(run("auto"), expected, rtol=1e-5, atol=1e-6)  # of a sum of numbers near 1


TREES = {"sharded": GRADS, "same": array([5.0, 1.0])}
SPECS = {"sharded": P("d"), "same": P()}
UNTRACKED = {
    "global_norm": lambda name: lambda g: cg.global_norm(g, axis_name=name),
    "ClipByGlobalNorm": lambda name: cg.ClipByGlobalNorm(1.0, axis_name=name),
    "ClipByNorm": lambda name: cg.ClipByNorm(1.0, axis_name=name),
    "ClipByBlockRMS": lambda name: cg.ClipByBlockRMS(1.0, axis_name=name),
    "AdaptiveClip": lambda name: lambda g: cg.AdaptiveClip(1.0, axis_name=name)(g, g),
    "AutoNorm": lambda name: cg.AutoNorm(axis_name=name),
}


@first_rows(2)
@pytest.mark.parametrize("caller", UNTRACKED)
def test_where_nothing_tracks_what_varies_a_name_warns_until_a_spec_says_that_all_does(caller):
    """A leaf that is the same on all devices is counted once for each of them."""

    def run(name, **options):
        both = lambda g: (UNTRACKED[caller](name)(g), jnp.zeros(()))[1]  # noqa: E731
        return jax.jit(on_devices(both, in_specs=(SPECS,), out_specs=P(), **options))(TREES)

    message = f"{caller}: got axis_name='d', and JAX does not track .*jax.P\\('d'\\) if every leaf"
    with pytest.warns(UserWarning, match=message):
        run("d", check_vma=False)
    run(P("d"), check_vma=False)
    run("d")
    with pytest.warns(UserWarning, match=message):
        jax.vmap(lambda g: (UNTRACKED[caller]("d")(g), 0)[1], axis_name="d")(GRADS)


def test_without_tracking_a_leaf_that_is_the_same_counts_once_for_each_device():
    every = lambda g: cg.global_norm(g, axis_name=P("d"))  # noqa: E731
    counted = on_devices(every, in_specs=(SPECS,), out_specs=P(), check_vma=False)
    assert_close(jax.jit(counted)(TREES), np.sqrt(13.0**2 + 2 * 26.0), rtol=1e-6)
