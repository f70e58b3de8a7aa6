"""Models of flax: a port from Linen to NNX."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen

import clipgrad as cg
from tests.compare.compare_flax import BATCHES, LinenNet, NnxNet, square

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("users_promotion")]


def of_linen(params, x):
    return square(LinenNet().apply({"params": params}, x))


def ported(params):
    """The net in NNX with the numbers of one in Linen."""
    net = NnxNet(alone=True)
    for name, layer in params.items():
        getattr(net, name).kernel[...] = layer["kernel"]
        getattr(net, name).bias[...] = layer["bias"]
    return net


def test_a_port_from_linen_to_nnx():
    x, of_nnx = BATCHES[0], lambda net, x: square(net(x))
    params = LinenNet().init(jax.random.key(0), x)["params"]
    names = {"LinenNet/up": "up", "LinenNet/out": "out"}
    against = functools.partial(cg.compare, of_linen, of_nnx, (params, x), names=names)
    comparison = against(other_args=(ported(params), x))
    assert comparison.ok and sum(row.kind == "module" for row in comparison.rows) == 2, str(
        comparison
    )
    assert not [place for place in comparison.unmatched if place.startswith("gradient")]
    changed = {**params, "out": {**params["out"], "kernel": params["out"]["kernel"] * 1.01}}
    comparison = against(other_args=(ported(changed), x))
    assert (
        comparison.findings[0].kind == "value" and "LinenNet/out" in comparison.findings[0].message
    )


class Renamed(linen.Module):
    first: str
    scale: float = 1.0

    @linen.compact
    def __call__(self, x):
        x = self.scale * linen.Dense(3, name=self.first)(x)
        return linen.Dense(2, name="head")(jnp.tanh(x))


def scoped(name, scale=1.0):
    """A loss in plain JAX whose scopes have the names of leaves."""

    def loss(params, x):
        with jax.named_scope(name):
            x = scale * jnp.tanh(x @ params[name]["w"])
        with jax.named_scope("head"):
            return jnp.mean((x @ params["head"]) ** 2)

    return loss


@pytest.mark.slow
@pytest.mark.parametrize("scale", [1.0, 1.1])
@pytest.mark.parametrize("name", ["linen", "scopes"])
def test_compare_matches_the_leaves_of_modules_that_names_rename(name, scale, users_promotion):
    x = np.linspace(-1, 1, 8, dtype=np.float32).reshape(2, 4)
    if name == "linen":
        of = lambda model: lambda params, x: jnp.mean(model.apply(params, x) ** 2)  # noqa: E731
        one, two = of(Renamed("a")), of(Renamed("b", scale))
        params = Renamed("a").init(jax.random.key(0), x)
        leaves, names = params["params"], {"Renamed/a": "Renamed/b"}
        others = {"params": {"b": leaves["a"], "head": leaves["head"]}}
    else:
        one, two, names = scoped("a"), scoped("b", scale), {"a": "b"}
        w, head = (np.linspace(1, 2, n * k, dtype=np.float32) for n, k in ((4, 3), (3, 2)))
        leaves = {"w": w.reshape(4, 3)}
        params = {"a": leaves, "head": head.reshape(3, 2)}
        others = {"b": leaves, "head": params["head"]}
    comparison = cg.compare(one, two, (params, x), other_args=(others, x), names=names)
    assert not any("only in" in finding.message for finding in comparison.findings)
    assert comparison.ok == (scale == 1)
    if scale != 1:
        assert comparison.findings[0].kind == "value", comparison


def two_products(turn, scale=1.0):
    """A loss of two weights, which are turned before they are used."""

    def loss(params, x):
        with jax.named_scope("first"):
            x = jnp.tanh(scale * x @ turn(params["w"]))
        with jax.named_scope("second"):
            return jnp.mean((x @ turn(params["v"])) ** 2)

    return loss


@pytest.mark.slow
@pytest.mark.parametrize("scale", [1.0, 1.1])
@pytest.mark.parametrize("width", [4, 3], ids=["square", "not square"])
def test_compare_turns_gradients_as_their_parameters(width, scale, users_promotion):
    rng = np.random.default_rng(0)
    x, w, v = (np.float32(rng.normal(size=s)) for s in ((2, 4), (4, width), (width, 3)))
    params = {"w": w, "v": v}
    others = jax.tree.map(np.transpose, params)
    plain, turned = two_products(lambda w: w), two_products(jnp.transpose, scale)
    comparison = cg.compare(plain, turned, (params, x), other_args=(others, x))
    assert comparison.ok == (scale == 1), comparison
    assert scale == 1 or comparison.findings[0].module == "first"


@jax.custom_vjp
def turned_back(w):
    return w


turned_back.defvjp(lambda w: (w, None), lambda _, g: (g.T,))


@pytest.mark.slow
def test_compare_finds_a_gradient_that_is_turned_beside_its_parameter(users_promotion):
    rng = np.random.default_rng(0)
    params, x = {k: np.float32(rng.normal(size=(4, 4))) for k in "wv"}, np.ones((2, 4), "float32")
    pair = two_products(lambda w: w), two_products(turned_back)
    assert not cg.compare(*pair, (params, x)).ok
