"""Versions in frameworks: a port from Linen to NNX."""

import functools

import jax
import jax.numpy as jnp
import pytest
from flax import linen, nnx

import clipgrad as cg
from tests.test_compare_versions import BATCH

pytestmark = [pytest.mark.exhaustive, pytest.mark.usefixtures("users_promotion")]


class LinenNet(linen.Module):
    """Two layers."""

    @linen.compact
    def __call__(self, x):
        return linen.Dense(8, name="down")(linen.relu(linen.Dense(16, name="up")(x)))


class NnxNet(nnx.Module):
    """The same."""

    def __init__(self, params):
        kinds = {"rngs": nnx.Rngs(0), "param_dtype": params["up"]["kernel"].dtype}
        self.up, self.down = nnx.Linear(8, 16, **kinds), nnx.Linear(16, 8, **kinds)
        for name, layer in params.items():
            getattr(self, name).kernel[...] = layer["kernel"]
            getattr(self, name).bias[...] = layer["bias"]

    def __call__(self, x):
        return self.down(nnx.relu(self.up(x)))


def of_linen(params, batch):
    return jnp.mean((LinenNet().apply(params, batch[0]) - batch[1]) ** 2)


def of_nnx(net, batch):
    return jnp.mean((net(batch[0]) - batch[1]) ** 2)


def test_a_port_from_linen_to_nnx():
    params = LinenNet().init(jax.random.key(0), BATCH[0])
    names = {"LinenNet/up": "up", "LinenNet/down": "down"}
    against = functools.partial(cg.compare, of_linen, of_nnx, (params, BATCH), names=names)
    found = against(other_args=(NnxNet(params["params"]), BATCH))
    assert found.ok and sum(row.kind == "module" for row in found.rows) == 2, str(found)
    assert not [place for place in found.unmatched if place.startswith("gradient")]
    changed = jax.tree.map(lambda x: x, params["params"])
    changed["down"]["kernel"] = changed["down"]["kernel"] * 1.01
    found = against(other_args=(NnxNet(changed), BATCH))
    assert found.findings[0].kind == "value" and "LinenNet/down" in found.findings[0].message
    net = NnxNet(params["params"])
    assert cg.compare(of_nnx, of_nnx, (net, BATCH)).ok
