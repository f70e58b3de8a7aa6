"""Examples are clipped alike wherever a loss has its weights: `registry/surroundings.py`."""

import jax.numpy as jnp
import numpy as np
import pytest

import clipgrad as cg
from tests.helpers import SEED
from tests.per_example.per_example_programs import PROGRAMS, arguments
from tests.per_example.per_example_references import (
    assert_clipped,
    every_way,
    norms_of,
    one_by_one,
)
from tests.registry.surroundings import drawn, row_id

# Each program with another seed.
ROWS = drawn(list(PROGRAMS)[SEED % 5 :: 5], seed=SEED // 5)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "around"), ROWS, ids=row_id)
def test_clip_per_example_clips_each_one_wherever_its_weights_are(name, around):
    loss, (params, batch) = around(PROGRAMS[name].loss), arguments(name)
    each = one_by_one(loss, params, batch)
    limit = float(np.median(np.sqrt(sum(n**2 for n in norms_of(each).values()))))
    ways, by_leaf = every_way(loss, cg.ClipByGlobalNorm(limit), params, batch)
    for result in ways.values():
        assert_clipped(result, each, limit)
    for path, norm in norms_of(each).items():
        np.testing.assert_allclose(by_leaf[path], norm, rtol=2e-5, atol=1e-30, err_msg=path)
    assert jnp.isfinite(limit) and limit > 0
