"""Any chain of operations, each example's gradient: against one after the other in float64."""

import jax
import numpy as np
import pytest
from hypothesis import Phase, given, settings

import clipgrad as cg
from tests.per_example_chains import CHAINS, PLACES, arguments, chains, loss_of
from tests.test_per_example_products import assert_clipped, every_way, norms_of, one_by_one, wide


def check(chain, *, x64=False, rtol=2e-5):
    """Both methods and the norms of each leaf, where the median of the norms is the limit."""
    loss = loss_of(chain)
    params, batch = arguments(chain)
    each = one_by_one(loss, params, batch)
    norms = norms_of(each)
    limit = float(np.median(np.sqrt(sum(n**2 for n in norms.values()))))
    with jax.enable_x64(x64):
        args = wide((params, batch)) if x64 else (params, batch)
        ways, by_leaf = every_way(loss, cg.ClipByGlobalNorm(limit), *args)
        for result in ways.values():
            assert_clipped(result, each, limit, rtol)
    assert set(by_leaf) == set(norms)
    for path, norm in norms.items():
        np.testing.assert_allclose(by_leaf[path], norm, rtol=rtol, atol=1e-30, err_msg=path)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", CHAINS)
def test_a_chain_is_clipped_and_measured_as_one_example_after_the_other(name):
    check(CHAINS[name])


def pairs(chain, place=None):
    """Which operations and places a chain has, each with the place around it."""
    for name, what in chain:
        yield place, name
        if name in PLACES:
            yield from pairs(what, name)


@pytest.mark.exhaustive
def test_any_chain_is_clipped_and_measured_as_one_example_after_the_other():
    """In float64, since the gradient of a deep chain has few digits in float32."""
    seen = {pair for chain in CHAINS.values() for pair in pairs(chain)}

    # Of the chains that are drawn, those run that have five new pairs, or a new operation.
    @settings(max_examples=60, phases=[Phase.generate])
    @given(chains)
    def compare(chain):
        new = set(pairs(chain)) - seen
        if len(new) >= 5 or {name for _, name in new} - {name for _, name in seen}:
            check(chain, x64=True, rtol=1e-9)
            seen.update(new)

    compare()


def test_the_chains_have_each_place():
    fixed = {name for chain in CHAINS.values() for _, name in pairs(chain)}
    assert fixed >= set(PLACES)
