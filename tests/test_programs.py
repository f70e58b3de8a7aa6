"""Generated programs: clips by name against the same clips written by hand, at random depths."""

import functools
import itertools
import os

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name

import clipgrad as cg
from tests.helpers import assert_close

X = jnp.array([0.3, -0.7, 1.1])
RULES = {
    "value": cg.ErrorClipByValue(0.2),
    "half": lambda g: 0.5 * g,
    "norm": cg.ClipByGlobalNorm(jnp.array(0.3)),
}
NAMES = [*RULES, "watched"]
POLICIES = [
    None,
    jax.checkpoint_policies.dots_saveable,
    jax.checkpoint_policies.save_only_these_names("value", "watched"),
]

# A block is a list of statements. A norm rule is joint inside of vmap where the clip by hand is
# one per lane, by design: its name is not drawn there.
waves = st.tuples(st.just("wave"), st.sampled_from([0.5, 1.5, -1.0]))


def tags(names):
    return st.tuples(st.just("tag"), st.sampled_from(names))


def flat(names):
    """A few waves and tags, at least one of these."""
    body = st.lists(st.one_of(waves, tags(names)), max_size=2)
    return st.builds(lambda body, tag: [*body, tag], body, tags(names))


LANES = flat(["value", "half", "watched"])


def nest(kind, inner):
    match kind:
        case "remat":
            return st.tuples(st.just(kind), inner, st.sampled_from(POLICIES))
        case "scan":
            return st.tuples(st.just(kind), inner, st.integers(1, 3), st.booleans())
        case "cond":
            return st.tuples(st.just(kind), inner, inner)
        case "vmap":
            return st.tuples(st.just(kind), LANES)
        case _:
            return st.tuples(st.just(kind), inner)


def blocks(depth):
    """Blocks with nests up to this depth."""
    if not depth:
        return flat(NAMES)
    inner = blocks(depth - 1)
    anything = st.one_of(waves, tags(NAMES), *(nest(kind, inner) for kind in _NESTS))
    return st.builds(lambda body, last: [*body, *last], st.lists(anything, max_size=1), inner)


def numbered(block, counter):
    """The block with a number of its own for each tag."""
    return [
        (*statement, next(counter))
        if statement[0] == "tag"
        else tuple(numbered(p, counter) if isinstance(p, list) else p for p in statement)
        for statement in block
    ]


def tagged(block, nest=()):
    """The number, name and loop nest of each tag."""
    for kind, *parts in block:
        if kind == "tag":
            yield parts[1], parts[0], nest
        loop = (parts[1],) if kind == "scan" else (2,) if kind == "loop" else ()
        for part in parts:
            if isinstance(part, list):
                yield from tagged(part, nest + loop)


def run(block, x, probes, tag):
    """Runs a block; ``probes`` has an entry for each tag in it, sliced by the loops around."""
    for kind, *parts in block:
        if kind == "wave":
            x = jnp.sin(x * parts[0]) + 0.3 * x
        elif kind == "tag":
            h = tag(x, parts[0], probes.get(parts[1]))
            x = 0.5 * h + jnp.sin(h)
        else:
            x = _NESTS[kind](x, probes, tag, *parts)
    return x


def _some(probes, block):
    numbers = {number for number, _, _ in tagged(block)}
    return {number: probe for number, probe in probes.items() if number in numbers}


def _jit(x, probes, tag, block):
    return jax.jit(lambda x, probes: run(block, x, probes, tag))(x, _some(probes, block))


def _remat(x, probes, tag, block, policy):
    again = jax.checkpoint(lambda x, probes: run(block, x, probes, tag), policy=policy)
    return again(x, _some(probes, block))


def _scan(x, probes, tag, block, length, reverse):
    def body(x, probes):
        return run(block, x, probes, tag), None

    return lax.scan(body, x, _some(probes, block), length=length, reverse=reverse)[0]


def _cond(x, probes, tag, first, second):
    on, off = (functools.partial(run, block, probes=probes, tag=tag) for block in (first, second))
    return lax.cond(jnp.sum(x) > 0.5, on, off, x)


def _vmap(x, probes, tag, block):
    lanes = jnp.array([0.5, 1.0])
    return jnp.sum(jax.vmap(lambda scale: run(block, x * scale, probes, tag))(lanes), 0)


_NESTS = {
    "jit": _jit,
    "remat": _remat,
    "scan": _scan,
    "cond": _cond,
    "vmap": _vmap,
    "loop": functools.partial(_scan, length=2, reverse=False),
}


def by_hand(block):
    """Value, gradient and statistics by name, with a probe for each tag."""
    sites = list(tagged(block))

    def tag(x, name, probe):
        return cg.clip_cotangent(x, RULES.get(name), probe=probe)

    def loss(x, probes):
        return jnp.sum(jnp.cos(run(block, x, probes, tag)))

    probes = {number: cg.types.ClipStats.zero(nest) for number, _, nest in sites}
    value, (grads, each) = jax.value_and_grad(loss, argnums=(0, 1))(X, probes)
    return value, grads, {name: _total(name, sites, each) for name in {s[1] for s in sites}}


def _total(name, sites, each):
    own = [(number, nest) for number, other, nest in sites if other == name]
    shared = len(os.path.commonprefix([nest for _, nest in own]))
    parts = [_sum_over(each[number], range(shared, len(nest))) for number, nest in own]
    return jax.tree.map(lambda *fields: sum(fields), *parts)


def _sum_over(stats, axes):
    return jax.tree.map(lambda field: field.sum(tuple(axes)), stats)


def by_name(block):
    names = {name for _, name, _ in tagged(block)}

    def loss(x):
        tag = lambda x, name, probe: checkpoint_name(x, name)  # noqa: E731
        return jnp.sum(jnp.cos(run(block, x, {}, tag)))

    rules = {name: rule for name, rule in RULES.items() if name in names}
    return cg.value_and_grad_with_stats(loss, rules=rules)(X)


def shown(block, nest=()):
    """Which statements a block has, each with the nests around it; of a nest how it is made."""
    for kind, *parts in block:
        made = parts[:1] if kind == "tag" else [p for p in parts if not isinstance(p, list)]
        yield nest, kind, *(() if kind == "wave" else made)
        for part in parts:
            if isinstance(part, list):
                yield from shown(part, (*nest, kind))


# Of the programs that are drawn, those run that have a statement in nests where none had it.
@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", sorted(_NESTS))
def test_value_gradient_and_statistics_are_those_of_clips_written_by_hand(kind):
    seen = set()

    @hypothesis.settings(max_examples=25, phases=[hypothesis.Phase.generate])
    @hypothesis.given(st.data())
    def compare(data):
        outer, after = data.draw(nest(kind, blocks(1))), data.draw(flat(NAMES))
        block = numbered([outer, *after], itertools.count())
        if seen.issuperset(shown(block)):
            return
        both = jax.jit(lambda: (by_name(block), by_hand(block)))
        actual, expected = both()
        assert_close(actual, expected, rtol=1e-4, atol=1e-6)
        assert np.isfinite(actual[1]).all()
        seen.update(shown(block))

    compare()
