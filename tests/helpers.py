"""The registries that the law files run over: rules with NumPy references, and places."""

import inspect
import os
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import clipgrad as cg
from clipgrad._clip import RULES
from clipgrad._programs import held_programs, opened

Tree = dict[str, np.ndarray]

HOMES = {name: m for m in (cg, cg.types, cg.published) for name in m.__all__}
NAMES = sorted(HOMES)


def public(name: str) -> Any:
    """The public thing of this name, wherever it lives."""
    return getattr(HOMES[name], name)


# The compiler's own defaults, for programs whose speed, memory or rounding is under test.
RELEASED: dict[str, Any] = {
    "xla_backend_optimization_level": 3,
    "xla_llvm_disable_expensive_passes": False,
}
if jax.__version_info__ < (0, 11):
    RELEASED["xla_cpu_use_fusion_emitters"] = True


# Which of the rows that take turns run, and what Hypothesis looks at: each week another number.
SEED = int(os.environ.get("CLIPGRAD_SEED", "0"))


def environment_of_users() -> dict[str, str]:
    """That of a process without what the tests tell the compiler."""
    return {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}


def quick_flags() -> str:
    """What the tests tell the compiler, but for the number of devices."""
    return " ".join(f for f in os.environ["XLA_FLAGS"].split() if "device_count" not in f)


class Case(NamedTuple):
    """A rule, what it should give, and how far a tree is from its limits.

    ``reference(tree, params, c)`` computes the rule in float64; ``ratios(tree, params, c)`` gives
    norm / limit of each of its groups. ``limits``: what is within the limit stays as it is.
    """

    name: str
    make: Callable[[Any], Any]
    reference: Callable[[Tree, Tree, float], Tree]
    ratios: Callable[[Tree, Tree, float], list[np.ndarray]]
    optax: Any = None
    limits: bool = True


def _norm(x, ord=2, axis=None):
    size = np.abs(x)
    if ord == np.inf:
        return size.max(axis=axis, keepdims=True, initial=0)
    return (size**ord).sum(axis=axis, keepdims=True) ** (1 / ord)


def _unit_axis(x):
    return tuple(range(x.ndim - 1)) if x.ndim >= 2 else None


def _shrink(x, norm, limit):
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(norm > limit, x * (limit / norm), x)


def _per_leaf(norm_of, limit_of):
    """Reference and ratios of a rule that scales each leaf, or slice, on its own."""

    def reference(tree, params, c):
        return {k: _shrink(x, norm_of(x), limit_of(params[k], c)) for k, x in tree.items()}

    def ratios(tree, params, c):
        return [norm_of(x) / limit_of(params[k], c) for k, x in tree.items()]

    return reference, ratios


def _joint(ord):
    def norm_of(tree):
        parts = [np.ravel(x) for x in tree.values()]
        return _norm(np.concatenate(parts) if parts else np.zeros(0), ord)

    def reference(tree, params, c):
        return {k: _shrink(x, norm_of(tree).reshape(()), c) for k, x in tree.items()}

    return reference, lambda tree, params, c: [norm_of(tree) / c]


def _auto_norm(gamma):
    _, ratios = _joint(2)

    def reference(tree, params, c):
        (norm,) = ratios(tree, params, 1.0)
        return {k: x * (c / (norm.reshape(()) + gamma)) for k, x in tree.items()}

    return reference, ratios


def _threshold(w, c):
    return c


def _agc(axis_of):
    def limit(w, c):
        return c * np.maximum(_norm(w, 2, axis_of(w)), 1e-3)

    def reference(tree, params, c):
        return {
            k: _shrink(x, _norm(x, 2, axis_of(x)), limit(params[k], c)) for k, x in tree.items()
        }

    def ratios(tree, params, c):
        return [_norm(x, 2, axis_of(x)) / limit(params[k], c) for k, x in tree.items()]

    return reference, ratios


def _rms(x):
    return np.sqrt((np.abs(x) ** 2).mean(keepdims=True)) if x.size else np.zeros((1,) * x.ndim)


def _value(tree, params, c):
    return {k: np.clip(x, -c, c) for k, x in tree.items()}


def _norm_case(ord, axis=None):
    return _per_leaf(lambda x: _norm(x, ord, axis), _threshold)


CASES = [
    Case(
        "ClipByValue",
        lambda c: cg.ClipByValue(c),
        _value,
        lambda tree, params, c: [np.abs(x) / c for x in tree.values()],
        "clip",
    ),
    Case("ClipByNorm", lambda c: cg.ClipByNorm(c), *_norm_case(2)),
    Case("ClipByNorm(ord=1)", lambda c: cg.ClipByNorm(c, ord=1), *_norm_case(1)),
    Case("ClipByNorm(ord=inf)", lambda c: cg.ClipByNorm(c, ord=jnp.inf), *_norm_case(np.inf)),
    Case("ClipByNorm(axis=-1)", lambda c: cg.ClipByNorm(c, axis=-1), *_norm_case(2, -1)),
    Case("ClipByGlobalNorm", lambda c: cg.ClipByGlobalNorm(c), *_joint(2), "clip_by_global_norm"),
    Case("ClipByGlobalNorm(ord=3)", lambda c: cg.ClipByGlobalNorm(c, ord=3), *_joint(3)),
    Case("ClipByBlockRMS", lambda c: cg.ClipByBlockRMS(c), *_per_leaf(_rms, _threshold),
         "clip_by_block_rms"),
    Case("AdaptiveClip", lambda c: cg.AdaptiveClip(c), *_agc(_unit_axis), "adaptive_grad_clip"),
    Case("AdaptiveClip(axis=-1)", lambda c: cg.AdaptiveClip(c, axis=-1), *_agc(lambda x: -1)),
    Case("AutoNorm", lambda c: cg.AutoNorm(c, gamma=1.0), *_auto_norm(1.0), limits=False),
]  # fmt: skip
assert {type(case.make(1.0)) for case in CASES} == set(RULES)
assert all(case.limits == type(case.make(1.0)).limits for case in CASES)
LIMITING = [case for case in CASES if case.limits]
SCALING = [case for case in CASES if case.name != "ClipByValue"]


def by_error_clip(rule: Any, grads: Any, params: Any) -> Any:
    """The rule applied in the backward pass of the identity at ``params``."""
    return jax.vjp(lambda x: cg.clip_cotangent(x, rule), params)[1](grads)[0]


def by_gradient_clip(rule: Any, grads: Any, params: Any) -> Any:
    """The rule applied before the optimizer."""
    tx = cg.gradient_clip(rule)
    return tx.update(grads, tx.init(params), params)[0]


PLACES = {"error_clip": by_error_clip, "gradient_clip": by_gradient_clip}


def tree_of(key: jax.Array, dtype: Any = jnp.float32, scale: float = 1.0) -> dict[str, jax.Array]:
    """A tree with a convolution kernel, a dense kernel, a bias and an empty leaf."""
    shapes = {"bias": (5,), "conv": (2, 3, 4), "dense": (4, 5), "empty": (0, 3)}
    rng = generator(key)
    return {name: array(rng.normal(size=s) * scale, dtype) for name, s in shapes.items()}


def generator(key: jax.Array) -> np.random.Generator:
    """NumPy's random numbers for a key: JAX's are a program for each shape."""
    return np.random.default_rng(np.asarray(jax.random.key_data(key)))


def key_of(seed: int) -> jax.Array:
    """`jax.random.key(seed)` for a table of tests: that itself is a program."""
    return jax.random.wrap_key_data(np.uint32([0, seed]))


def array(x: Any, dtype: Any = np.float32) -> jax.Array:
    """An array that no program makes: each process that collects makes the arrays of a module."""
    return jax.device_put(np.array(x, dtype))  # jnp.array compiles a copy for each shape


def float64(tree: Any) -> Any:
    """The tree as NumPy arrays of float64 (or complex128)."""

    def wide(x):
        return np.asarray(x, np.complex128 if np.iscomplexobj(x) else np.float64)

    return jax.tree.map(wide, tree)


def assert_same(actual: Any, expected: Any) -> None:
    """Equal structure, shapes, dtypes and bits."""
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes(), (a, b)


def assert_close(actual: Any, expected: Any, rtol: float = 1e-6, atol: float = 0.0) -> None:
    """Equal structure and close values, as float64."""
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for a, b in zip(
        jax.tree.leaves(float64(actual)), jax.tree.leaves(float64(expected)), strict=True
    ):
        np.testing.assert_allclose(a, b, rtol=rtol, atol=atol)


def reductions(compiled: Any) -> int:
    """The number of reduce instructions in a compiled program."""
    return compiled.as_text().count(" reduce(")


def all_reduces(compiled: Any) -> int:
    """The number of all-reduces in a compiled program; a tuple counts as one."""
    text = compiled.as_text()
    return text.count(" all-reduce(") + text.count(" all-reduce-start(")


def operations(program, seen):
    """The equations of a program and of those inside, each program once."""
    jaxpr = opened(program)[0]
    if any(jaxpr is other for other in seen):
        return 0
    seen.append(jaxpr)
    inner = [p for e in jaxpr.eqns for p in held_programs(e)]
    return len(jaxpr.eqns) + sum(operations(p, seen) for p in inner)


def stable_id(value: Any) -> str:
    """A test's name for a value, the same in every process: without its address."""
    return re.sub(" at 0x[0-9a-f]+", "", str(value))


def line_of(function: Callable, text: str) -> int | None:
    """The line of a function, or of what it wraps, that holds a text."""
    lines, first = inspect.getsourcelines(inspect.unwrap(function))
    return next((first + i for i, line in enumerate(lines) if text in line), None)
