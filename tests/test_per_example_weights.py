"""Generated chains of weights: one answer by every method, policy and size, with inf and NaN too.

The truth is NumPy's, of the gradients of one example after the other in float64.
"""

import itertools
from typing import NamedTuple

import jax
import numpy as np
import pytest

import clipgrad as cg
from clipgrad._per_example import convolutions, grams, plan, terms, two_passes
from tests.per_example_weights import USES, poisoned, program
from tests.test_per_example_products import norms_of, one_by_one, wide

# The constants that decide; half of the programs have the values of a size beyond each of them.
SMALL = {
    (convolutions, "_MOST_TAPS"): 2,
    (grams, "_PIECE"): 2,
    (terms, "MOST_TERMS"): 3,
    (plan, "_ROOM"): 64,
    (two_passes, "_are_halved"): lambda gradient, params, size: size % 2 == 0,
    (two_passes, "by_platform"): lambda *args, cpu, **others: cpu(*args),  # one device only
}


class Way(NamedTuple):
    """One way to the clipped sum."""

    method: str
    nonfinite: str
    is_small: bool  # whether the constants are small, so that all is beyond them

    def of(self, loss, limit):
        options = {"reduce": "sum", "method": self.method, "nonfinite": self.nonfinite}
        return cg.clip_per_example(loss, cg.ClipByGlobalNorm(limit), **options)

    def patched(self, monkeypatch):
        for (module, name), value in SMALL.items() if self.is_small else ():
            monkeypatch.setattr(module, name, value)


METHODS, POLICIES = ("one pass", "two passes", "auto", "direct"), ("zero", "propagate")
WAYS = [Way(*way) for way in itertools.product(METHODS, POLICIES, (False, True))]


def ways_of(seed):
    """Four of the ways, so that four seeds have all of them."""
    return [way for i, way in enumerate(WAYS) if (i + i // 4) % 4 == seed % 4]


class Expected(NamedTuple):
    """What comes out, in NumPy."""

    norm: np.ndarray
    ok: np.ndarray  # which examples are not left out
    total: dict


def expected(each, limit, nonfinite, arrays):
    """The answer, where the leaves ``arrays`` are those in which NaN and inf count as 0."""
    ok = np.ones(len(next(iter(each.values()))), bool)
    if nonfinite == "zero":
        each = {k: np.where(np.isfinite(g), g, 0) if k in arrays else g for k, g in each.items()}
        ok = np.all([np.isfinite(n) for n in norms_of(each).values()], axis=0)
        each = {k: np.where(ok.reshape(-1, *[1] * (g.ndim - 1)), g, 0) for k, g in each.items()}
    norm = np.sqrt(sum(n**2 for n in norms_of(each).values()))
    factor = np.where(np.isfinite(norm), np.minimum(1, limit / np.maximum(norm, 1e-300)), np.nan)
    return Expected(norm, ok, {k: np.tensordot(factor, g, 1) for k, g in each.items()})


def assert_norm(found, norm, where):
    """Where products cancel, a norm may be too large, as promised, and never too small."""
    np.testing.assert_allclose(found, norm, rtol=1e-8, atol=1e-30, err_msg=where)
    finite = np.isfinite(norm)
    assert (found[finite] >= norm[finite] * (1 - 1e-9) - 1e-30).all(), where


def assert_answer(result, truth, where):
    norm, grads = result
    if np.isfinite(truth.norm).all():
        assert_norm(norm[truth.ok], truth.norm[truth.ok], where)
    for path, total in truth.total.items():
        scale = np.abs(total).max(initial=0)
        if not np.isfinite(scale):
            assert not np.isfinite(np.asarray(grads[path])).all(), (where, path)
            continue
        np.testing.assert_allclose(
            grads[path], total, rtol=0, atol=1e-8 * scale + 1e-30, err_msg=f"{where} {path}"
        )


def in_numpy(results):
    """Norms and gradients of each way, and the norms by leaf."""
    found, by_leaf = results
    return jax.tree.map(np.asarray, ({k: (s.norm, g) for k, (_, g, s) in found.items()}, by_leaf))


def check(seed, monkeypatch):
    loss, params, batch, names = program(seed)
    batches = {"finite": batch, "poisoned": poisoned(seed, batch)}
    each = {name: one_by_one(loss, params, b) for name, b in batches.items()}
    norms = norms_of(each["finite"])
    limit = float(np.median(np.sqrt(sum(n**2 for n in norms.values()))))
    ways, plans = ways_of(seed), {}

    @jax.jit
    def run(params, batch):
        found = {}
        for way in ways:
            with monkeypatch.context() as patch:
                way.patched(patch)
                plans[way] = way.of(loss, limit).plan(params, batch)
                found[str(way)] = way.of(loss, limit)(params, batch)
        return found, cg.per_example_norms(loss, per_leaf=True)(params, batch)

    with jax.enable_x64(True):
        results = {name: in_numpy(run(*wide((params, b)))) for name, b in batches.items()}
    for name, (found, by_leaf) in results.items():
        for way in ways:
            arrays = {leaf.path for leaf in plans[way].leaves if leaf.norm == "direct"}
            truth = expected(each[name], limit, way.nonfinite, arrays)
            assert_answer(found[str(way)], truth, f"{name} {way} {names}")
            assert not [leaf for leaf in plans[way].leaves if "failed" in leaf.reason]
            if way.method == "auto":
                kept, of_all = plans[way].bytes, plans[way].direct_bytes
                room = max(2 * of_all // len(jax.tree.leaves(batch)[0]), SMALL[plan, "_ROOM"])
                fits = kept <= of_all and not (way.is_small and kept > room)
                assert plans[way].method == ("one pass" if fits else "two passes")
        for path, norm in norms_of(each[name]).items():
            assert_norm(by_leaf[path], norm, path)


def test_any_chain_of_weights_has_one_answer(monkeypatch):
    check(0, monkeypatch)


@pytest.mark.exhaustive
def test_the_programs_are_on_both_sides_of_each_decision(monkeypatch):
    """Small constants change the plan; each kind of norm and each use is there."""
    leaves, seen, changed = [], set(), {name: 0 for _, name in SMALL}
    for seed in range(5):
        loss, params, batch, names = program(seed)
        of = lambda: Way("auto", "zero", False).of(loss, 1.0).plan(params, batch)  # noqa: E731, B023
        plain = of()
        leaves += plain.leaves
        seen |= {name for _, *chain in names for name in chain}
        for (module, name), value in SMALL.items():
            with monkeypatch.context() as patch:
                patch.setattr(module, name, value)
                changed[name] += of() != plain
    assert {leaf.norm for leaf in leaves} == {"Gram", "product", "direct"} and seen >= set(USES)
    # Norms with cross terms, of two products and of three.
    shared = [leaf for leaf in leaves if leaf.path == "w6"]
    assert {leaf.norm for leaf in shared} == {"Gram"}
    assert {leaf.products for leaf in shared} == {2, 3}
    assert {name for name, n in changed.items() if n} >= {"_MOST_TAPS", "MOST_TERMS", "_ROOM"}
    assert sum(leaf.norm == "direct" for leaf in leaves) <= len(leaves) * 4 / 5


@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", range(1, 15))
def test_any_other_chain_of_weights_has_one_answer(seed, monkeypatch):
    check(seed, monkeypatch)
