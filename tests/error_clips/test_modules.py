"""Names that are the paths of modules: the scopes that a value leaves."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AxisType, PartitionSpec

import clipgrad as cg
from tests.error_clips.tagged import W, X
from tests.helpers import array
from tests.rows import first_row

RULE = cg.ErrorClipByValue(max=0.05)
scope = jax.named_scope


# Each program takes `leave(value, path)`, which is the identity in the program that is transformed
# and `clip_cotangent` where the same is written by hand.


def nested(x, leave):
    """A value that is used inside and outside of its module, and two that leave one."""
    with scope("net"):
        with scope("a"):
            h = jnp.tanh(x @ W)
            inside, other = h * jnp.sin(h), jnp.cos(x)
        h, inside, other = (leave(value, "net/a") for value in (h, inside, other))
        with scope("b"):
            y = jnp.sin(inside) + h
        y = leave(y, "net/b")
    return leave(h, "net") + 3 * leave(y, "net") * leave(other, "net")


def scans(x, leave):
    """Scans within a module, one that uses a value of another, and one that uses one of its own."""

    def cell(h, row):
        with scope("cell"):
            h = jnp.tanh(h @ W + row)
        h = leave(h, "rnn/cell")
        return h, jnp.sin(h)

    with scope("rnn"):
        last, memory = lax.scan(cell, jnp.ones(3), x)
        total = jnp.cos(memory)
    last, memory = leave(last, "rnn"), leave(memory, "rnn")

    def decode(h, _):
        with scope("decoder"):
            h = jnp.sin(h @ W + memory.sum(0))
        h = leave(h, "decoder")
        with scope("rnn"):
            h = h + total.sum(0)  # which does not leave the module
        return leave(h, "rnn"), None

    return (last + lax.scan(decode, jnp.ones(3), None, length=3)[0])[None]


def branches(x, leave):
    def first(x):
        with scope("one"):
            x = jnp.sin(x)
        return leave(x, "net/one")

    with scope("net"):
        y = lax.cond(x[0, 0] < 0, first, jnp.cos, x)
    return 2 * leave(y, "net")


def compiled_within_a_module(x, leave):
    with scope("outer"):
        y = jax.jit(lambda x: nested(x, lambda h, name: leave(h, f"outer/{name}")))(x)
    return leave(y, "outer")


def rematerialized(x, leave):
    return jax.checkpoint(functools.partial(nested, leave=leave))(x)


def sharded(x, leave):
    mesh = jax.make_mesh((4,), ("d",), (AxisType.Auto,))
    rows = PartitionSpec("d")
    run = functools.partial(nested, leave=leave)
    return jax.shard_map(run, mesh=mesh, in_specs=rows, out_specs=rows)(x)


def beside_custom_rules(x, leave):
    @jax.custom_vjp
    def rule(x):
        return jnp.sin(x)

    rule.defvjp(lambda x: (jnp.sin(x), x), lambda x, g: (2 * g * jnp.cos(x),))
    with scope("net"):
        y = jax.nn.silu(rule(jax.nn.relu(x) @ W))
    return jax.nn.relu(leave(y, "net"))


PROGRAMS = [
    nested, scans, branches, compiled_within_a_module, rematerialized, sharded, beside_custom_rules
]  # fmt: skip
programs = pytest.mark.parametrize("program", PROGRAMS, ids=lambda f: f.__name__)


def untouched(x, path):
    del path
    return x


def loss_of(program, leave=untouched):
    return lambda x: jnp.sum(jnp.sin(program(x, leave)))


def names(program):
    return {name.name for name in cg.list_names(loss_of(program), (X,))}


@functools.cache
def by_hand(program):
    """The gradient without a clip, and those with clips at each name and at all."""

    def gradient(chosen):
        def leave(x, path):
            return cg.clip_cotangent(x, RULE) if path in chosen else x

        return jax.jit(jax.grad(loss_of(program, leave)))(X)

    every = tuple(sorted(names(program)))
    return gradient(()), {chosen: gradient(chosen) for chosen in [*zip(every), every]}


@pytest.mark.slow
@programs
def test_the_gradient_is_that_of_clips_written_by_hand(program):
    plain, expected = by_hand(program)
    for chosen, gradient in expected.items():
        clipped = cg.error_clip_by_name(loss_of(program), dict.fromkeys(chosen, RULE))
        np.testing.assert_allclose(jax.jit(jax.grad(clipped))(X), gradient, rtol=1e-6, atol=1e-7)
        assert not np.allclose(gradient, plain, rtol=1e-3)


@first_row
@programs
def test_a_name_without_a_rule_changes_nothing(program):
    """Nor does one with a rule change the value."""
    loss = loss_of(program)
    clipped, off = (cg.error_clip_by_name(loss, {"**": rule}) for rule in (RULE, None))
    np.testing.assert_array_equal(jax.jit(clipped)(X), jax.jit(loss)(X))
    np.testing.assert_array_equal(clipped(X), loss(X))
    np.testing.assert_array_equal(jax.jit(jax.grad(off))(X), jax.jit(jax.grad(loss))(X))
    assert "custom_vjp_call" not in str(jax.make_jaxpr(off)(X)) or program is beside_custom_rules


@pytest.mark.slow
@first_row
@programs
def test_statistics_are_those_of_a_probe_written_by_hand(program):
    loss = loss_of(program)
    value, gradient, stats = jax.jit(cg.value_and_grad_with_stats(loss))(X)
    expected = jax.jit(jax.value_and_grad(loss))(X)
    np.testing.assert_allclose(value, expected[0], rtol=1e-6)
    np.testing.assert_allclose(gradient, expected[1], rtol=1e-6, atol=1e-7)
    assert set(stats) == names(program)

    @jax.jit
    @jax.grad
    def with_dummies(dummies):
        def leave(x, path):
            return cg.clip_cotangent(x, None, probe=dummies[path])

        return loss_of(program, leave)(X)

    seen = with_dummies({name: cg.types.ClipStats.zero() for name in stats})
    for name, watched in stats.items():
        dummy = seen[name]
        total = jax.tree.map(lambda s, d: s.reshape(-1, *d.shape).sum(0), watched, dummy)
        np.testing.assert_allclose(total.norm, dummy.norm, rtol=1e-6)
        assert float(total.size) == float(dummy.size)


def test_the_cotangent_is_clipped_once_after_it_has_been_summed_over_the_uses_outside():
    def loss(x):
        with scope("net"):
            h = 2 * x
        return 3 * h - 5 * h + 10 * h

    clipped = cg.error_clip_by_name(loss, {"net": cg.ErrorClipByValue(max=6.0)})
    assert jax.grad(clipped)(1.0) == 12.0


def test_an_inner_module_sees_what_the_outer_one_has_clipped():
    def loss(x):
        with scope("a"), scope("b"):
            h = 2 * x
        return 10 * h

    rules = {"a": cg.ErrorClipByValue(max=4.0), "a/b": cg.ErrorClipByValue(max=3.0)}
    _, gradient, stats = cg.value_and_grad_with_stats(loss, error_clip=rules)(1.0)
    assert (gradient, stats["a"].norm, stats["a/b"].norm) == (6.0, 10.0, 4.0)


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("*", {"net", "head"}),
        ("**/b", {"net/b", "head/b"}),
        ("net/**", {"net", "net/a", "net/b"}),
        ("*t/a*", {"net/a"}),
        ("n**/b", {"net/b"}),
        ("**/net/**/b/**", {"net/b"}),
    ],
)
def test_patterns_match_segments(pattern, expected):
    def loss(x):
        y = nested(x, untouched)
        with scope("head"), scope("b"):
            return jnp.sum(y * y)

    assert set(cg.value_and_grad_with_stats(loss, watch=[pattern])(X)[2]) == expected
    stats = cg.value_and_grad_with_stats(loss, error_clip={pattern: RULE}, watch=())(X)[2]
    assert set(stats) == expected


def test_what_is_written_out_wins_over_a_pattern():
    rules = {"**": RULE, "net/a": None}
    stats = cg.value_and_grad_with_stats(loss_of(nested), error_clip=rules)(X)[2]
    assert not stats["net/a"].clipped
    assert stats["net"].clipped
    clipped = cg.error_clip_by_name(loss_of(nested), rules)
    apart = cg.error_clip_by_name(loss_of(nested), {"net": RULE, "net/b": RULE})
    np.testing.assert_array_equal(jax.grad(clipped)(X), jax.grad(apart)(X))


@pytest.mark.parametrize(
    "second", [RULE, None, dataclasses.replace(RULE), cg.ErrorClipByValue(max=0.07)], ids=str
)
def test_two_patterns_for_one_name_have_one_rule_or_are_an_error(second):
    clipped = cg.error_clip_by_name(loss_of(nested), {"net/*": RULE, "**/a": second})
    if second == RULE:
        clipped(X)
        return
    with pytest.raises(ValueError, match=r"got 'net/\*' and '\*\*/a' with a rule each.*'net/a'"):
        clipped(X)


def tagged_like_a_module(x):
    with scope("net"):
        h = checkpoint_name(2 * x, "net")
        h = checkpoint_name(3 * h, "other")
    return 10 * h


def test_a_tag_wins_over_a_module_of_its_name():
    stats = cg.value_and_grad_with_stats(tagged_like_a_module, watch=["net"])(1.0)[2]
    assert stats["net"].norm == 30.0
    names_there = cg.list_names(tagged_like_a_module, (array(np.ones(2)),))
    assert [(n.name, n.kind, n.sites) for n in names_there] == [
        ("net", "tag", 1),
        ("other", "tag", 1),
    ]


def test_without_a_choice_tags_are_watched_and_modules_only_where_there_are_none():
    assert set(cg.value_and_grad_with_stats(tagged_like_a_module)(1.0)[2]) == {"net", "other"}

    def both(x):
        with scope("module"):
            h = checkpoint_name(2 * x, "tag")
        return 10 * h

    assert set(cg.value_and_grad_with_stats(both)(1.0)[2]) == {"tag"}
    rules = {"module": None}
    assert set(cg.value_and_grad_with_stats(both, error_clip=rules)(1.0)[2]) == {"tag", "module"}
    assert set(cg.value_and_grad_with_stats(both, watch=["**"])(1.0)[2]) == {"tag", "module"}


def with_integers(x):
    with scope("index"):
        index = jnp.argmax(x)
    with scope("net"):
        y = x[index]
    return y.sum()


def within_a_custom_rule(x):
    @jax.custom_vjp
    def rule(x):
        with scope("inside"):
            y = jnp.sin(x)
        return 2 * y

    rule.defvjp(lambda x: (rule(x), x), lambda x, g: (g,))
    with scope("net"):
        y = rule(x)
    return y.sum()


def with_a_dead_end(x):
    with scope("dead"):
        jnp.sin(x)
    return x.sum()


@pytest.mark.parametrize(
    ("loss", "name", "error", "match"),
    [
        (with_integers, "index", TypeError, "got 'index', which names int32 values, expected floa"),
        (with_integers, "ind*", TypeError, r"got 'ind\*', which names int32 values, expected"),
        (with_integers, "nte", ValueError, r"path of a module in it .*; there are \['net', 'i"),
        (with_integers, "*/x", ValueError, r"got '\*/x', expected a name .* \*\* for any number"),
        (within_a_custom_rule, "**/inside", ValueError, "variable inside of custom_vjp_call, exp"),
        (with_a_dead_end, "dead", ValueError, "names an unused value, expected one that"),
    ],
)
def test_what_cannot_be_clipped_is_an_error(loss, name, error, match):
    with pytest.raises(error, match=match):
        cg.error_clip_by_name(loss, {name: RULE})(array(np.arange(3.0)))
    with pytest.raises(error, match=match):
        cg.value_and_grad_with_stats(loss, watch=[name])(array(np.arange(3.0)))
    listed = cg.list_names(loss, (array(np.arange(3.0)),))
    assert name not in {n.name for n in listed if n.cotangent}


def without_derivative(y):
    """A loop of unknown length, which can't be differentiated in reverse."""
    return lax.while_loop(lambda c: c.sum() < 100, lambda c: 2 * c, y)


def on_data_in_a_scan(x, data):
    def body(carry, row):
        h, total = carry
        with scope("prepare"):
            y = 3 * row + total
        with scope("net"):
            h = jnp.sin(h) * without_derivative(y)
        return (h, y), None

    return lax.scan(jax.checkpoint(body), (x, jnp.ones(2)), data)[0][0].sum()


def on_a_stopped_gradient(x, data):
    with scope("prepare"):
        y = jax.jit(lambda x: 3 * lax.stop_gradient(x))(x) + data
    with scope("net"):
        out = x * without_derivative(y)
    return out.sum()


@pytest.mark.slow
@first_row
@pytest.mark.parametrize(
    ("loss", "data"),
    [(on_data_in_a_scan, array(np.ones((3, 2)))), (on_a_stopped_gradient, array(np.ones(2)))],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_value_that_does_not_depend_on_what_is_differentiated_is_left_alone(loss, data):
    x = jnp.array([1.0, 2.0])
    value, gradient, stats = jax.jit(cg.value_and_grad_with_stats(loss))(x, data)
    np.testing.assert_allclose(gradient, jax.grad(loss)(x, data), rtol=1e-6)
    assert not stats["prepare"].size.any()
    assert stats["net"].norm.all()
    by_position = cg.value_and_grad_with_stats(lambda data, x: loss(x, data), argnums=-1)
    np.testing.assert_allclose(by_position(data, x)[1], gradient, rtol=1e-6)


def test_state_that_a_scan_carries_becomes_active_on_the_way():
    def loss(x, data):
        def body(carry, _):
            first, second, third = carry
            with scope("cell"):
                moved = 2 * first, 2 * second, 2 * third
            return (x, moved[0], moved[1]), None

        return lax.scan(body, (data, data, data), None, length=4)[0][2].sum()

    stats = cg.value_and_grad_with_stats(loss)(array(np.ones(2)), array(np.ones(2)))[2]
    np.testing.assert_array_equal(stats["cell"].size, [4, 4, 4, 4])
    np.testing.assert_array_equal(stats["cell"].norm > 0, [False, False, True, True])


@pytest.mark.parametrize("first", ["scope", "transformation"])
def test_a_scope_that_is_called_like_a_transformation_is_none_whatever_came_first(first):
    def scoped(x):
        with scope("vmap"):
            y = 2 * x
        return (5 * y).sum()

    def transformed(x):
        return jax.vmap(lambda x: 3 * jnp.sin(x))(x).sum()

    order = [(scoped, 1), (transformed, 0)]
    for fun, count in order if first == "scope" else order[::-1]:
        assert len(cg.list_names(fun, (array(np.ones(3)),))) == count
