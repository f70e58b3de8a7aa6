"""The line inside of the first module that differs, in models whose modules have names."""

import pathlib

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax

import clipgrad as cg
from clipgrad._compare import inner_lines
from tests.helpers import array

W = array(np.random.default_rng(0).normal(size=(3, 4, 4)) * 0.5)
X = array(np.random.default_rng(1).normal(size=(5, 4)))
FAULTS = ("a factor", "a function", "a cast", "a line more", "a rule", "a cut")


@jax.custom_vjp
def wrong_tanh(x):
    return jnp.tanh(x)


wrong_tanh.defvjp(lambda x: (jnp.tanh(x), x), lambda x, g: (g * (1 - jnp.tanh(x)),))


def inside(w, x, fault):
    h = x @ w
    h = h * (1.05 if fault == "a factor" else 1.0)  # a factor
    h = (jnp.sin if fault == "a function" else jnp.tanh)(h)  # a function
    h = h.astype(jnp.float16 if fault == "a cast" else h.dtype).astype(h.dtype)  # a cast
    if fault == "a line more":
        h = h + 0.1  # a line more
    h = (wrong_tanh if fault == "a rule" else jnp.tanh)(h)  # a rule
    h = h * (lax.stop_gradient(h) if fault == "a cut" else h)  # a cut
    h = jnp.cos(h)
    return x + h


def unrolled(fault):
    def loss(ws, x):
        for i in range(3):
            with jax.named_scope(f"layer_{i}"):
                x = inside(ws[i], x, fault if i == 1 else None)
        return jnp.mean(x**2)

    return loss, (W, X)


def scanned(fault):
    def step(x, w):
        with jax.named_scope("layer"):
            return inside(w, x, fault), None

    return lambda ws, x: jnp.mean(lax.scan(step, x, ws)[0] ** 2), (W, X)


class LinenLayer(nn.Module):
    fault: str | None

    @nn.compact
    def __call__(self, x):
        return inside(self.param("w", lambda key: W[0]), x, self.fault)


class LinenModel(nn.Module):
    fault: str | None

    @nn.compact
    def __call__(self, x):
        return LinenLayer(self.fault, name="second")(LinenLayer(None, name="first")(x))


def linen(fault):
    params = {"params": {"first": {"w": W[0]}, "second": {"w": W[0]}}}
    return lambda p, x: jnp.mean(jnp.square(jnp.asarray(LinenModel(fault).apply(p, x)))), (
        params,
        X,
    )


class NnxLayer(nnx.Module):
    def __init__(self):
        self.w = nnx.Param(W[0])

    def __call__(self, x, fault):
        return inside(self.w[...], x, fault)


class NnxModel(nnx.Module):
    def __init__(self):
        self.first, self.second = NnxLayer(), NnxLayer()

    def __call__(self, x, fault):
        return self.second(self.first(x, None), fault)


def of_nnx(fault):
    return lambda model, x: jnp.mean(model(x, fault) ** 2), (NnxModel(), X)


class EquinoxLayer(eqx.Module):
    w: jax.Array

    def __call__(self, x, fault):
        return inside(self.w, x, fault)


class EquinoxModel(eqx.Module):
    first: EquinoxLayer
    second: EquinoxLayer

    def __call__(self, x, fault):
        return self.second(self.first(x, None), fault)


def equinox(fault):
    model = EquinoxModel(EquinoxLayer(W[0]), EquinoxLayer(W[0]))
    return lambda model, x: jnp.mean(model(x, fault) ** 2), (model, X)


def line_of(fault):
    lines = pathlib.Path(__file__).read_text().splitlines()
    return 1 + next(i for i, line in enumerate(lines) if line.endswith(f"# {fault}"))


MODULES = {unrolled: "layer_1", scanned: "layer", linen: "second", of_nnx: "second"}
MODULES[equinox] = "second"
DEFAULT = {(scanned, "a line more")}
ROWS = [
    pytest.param(kind, fault, marks=() if (kind, fault) in DEFAULT else pytest.mark.slow)
    for kind in MODULES
    for fault in FAULTS
]


@pytest.mark.parametrize("kind, fault", ROWS)
def test_a_finding_of_a_module_tells_the_line_inside(kind, fault):
    (fun, args), (other, _) = kind(None), kind(fault)
    finding = cg.compare(fun, other, args).findings[0]
    assert finding.kind == ("vjp" if fault in ("a rule", "a cut") else "value")
    assert finding.module is not None and finding.module.endswith(MODULES[kind])
    text = f"inside, {pathlib.Path(__file__).name}:{line_of(fault)}, "
    assert text in finding.message or finding.line == line_of(fault), finding.message


def test_no_line_is_recorded_where_a_module_has_one_or_nothing_differs(monkeypatch):
    def forbidden(*arguments):
        raise AssertionError("lines were matched")

    def loss(w, x, times=1.0):
        with jax.named_scope("layer"):
            h = jnp.tanh(x @ w * times)
        return jnp.mean(h**2)

    monkeypatch.setattr(inner_lines, "match_by_name", forbidden)
    assert cg.compare(loss, loss, (W[0], X)).ok
    comparison = cg.compare(loss, lambda w, x: loss(w, x, 1.1), (W[0], X))
    assert comparison.findings[0].module == "layer" and "inside" not in comparison.message
