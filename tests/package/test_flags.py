"""Calls give their answers under JAX's debugging flags, and healthy numbers raise nothing."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import clipgrad as cg
from tests.helpers import array
from tests.rows import this_turn

pytestmark = pytest.mark.slow


@contextlib.contextmanager
def debugged():
    with jax.debug_nans(True), jax.debug_infs(True):
        yield


FLAGS = {"debug": debugged, "disable_jit": jax.disable_jit, "checking_leaks": jax.checking_leaks}
RULES = {
    "value": cg.ClipByValue(0.1),
    "norm": cg.ClipByNorm(0.1),
    "rows": cg.ClipByNorm(0.1, axis=-1),
    "global": cg.ClipByGlobalNorm(0.1),
    "block rms": cg.ClipByBlockRMS(0.1),
    "auto": cg.AutoNorm(0.1),
}
THRESHOLDS = {
    "ema": cg.EMAThreshold(),
    "percentile": cg.PercentileThreshold(90.0),
}
PARAMS = [array(np.random.default_rng(i).normal(size=(4, 4)) / 3) for i in (0, 1)]
X = array(np.random.default_rng(2).normal(size=(6, 4)))


def loss(params, x):
    for i, w in enumerate(params):
        with jax.named_scope(f"block_{i}"):
            x = x + jnp.tanh(x @ w)
    return jnp.mean(x**2)


def other(params, x):
    return loss([params[0], params[1] * jnp.asarray(1.01, x.dtype)], x)


def stepped(optimizer, **options):
    step = cg.train_step(loss, optimizer, **options)
    state = step.init(PARAMS)
    for _ in range(3):
        state, metrics = step(state, X)
    return state.params, metrics["grad_norm"]


def updated(tx):
    state = tx.init(PARAMS)
    for _ in range(3):
        updates, state = tx.update(PARAMS, state, PARAMS)
    return updates


def statistics(function):
    return [(at.norm, at.max, at.nonfinite) for at in function(PARAMS, X)[1].values()]


def finding(first):
    return np.array([ord(letter) for letter in f"{first.kind} {first.module}"])


CALLS = {
    **{f"clip, {n}": lambda r=r: cg.clip_grads(PARAMS, r)[0] for n, r in RULES.items()},
    **{f"mapped, {n}": lambda r=r: jax.vmap(r)(jnp.stack(PARAMS)) for n, r in RULES.items()},
    **{f"adapted, {n}": lambda t=t: updated(cg.clip_by_norm(t)) for n, t in THRESHOLDS.items()},
    "adaptive": lambda: updated(cg.adaptive_grad_clip(0.01)),
    "value stats": lambda: statistics(cg.with_value_stats(loss)),
    "cotangent stats": lambda: [
        s.norm for s in cg.value_and_grad_with_stats(loss)(PARAMS, X)[2].values()
    ],
    "by name": lambda: jax.grad(
        cg.error_clip_by_name(loss, {"block_1": cg.ErrorClipByValue(1e-3)})
    )(PARAMS, X),
    "norms": lambda: cg.per_example_norms(loss)(PARAMS, X[:, None]),
    **{
        f"each example, {method}": lambda method=method: cg.clip_per_example(
            loss, cg.ClipByGlobalNorm(0.1), method=method
        )(PARAMS, X[:, None])[1]
        for method in ("direct", "auto")
    },
    "step": lambda: stepped(
        cg.skip_spikes(optax.chain(cg.clip_by_global_norm(0.1), optax.sgd(0.1)), halt=True),
        watch_values=["block_0"],
        error_clip={"block_1": cg.ClipByNorm(0.1)},
    ),
    "compare": lambda: finding(cg.compare(loss, other, (PARAMS, X)).findings[0]),
    "diagnose": lambda: finding(
        cg.diagnose(lambda w: jnp.sum(jnp.sqrt(w)), (jnp.array([1.0, 0.0]),)).findings[0]
    ),
    "check": lambda: np.array(cg.check_grads(jnp.tanh, (X[0],)).ok),
}


@pytest.fixture(scope="module")
def plain():
    """The answer of each call without flags, computed once.

    Programs that are compiled under a flag serve no other test, and are thousands: JAX keeps 8,192
    in a process, and beyond that `_cache_size` of a function that was just called may be 0.
    """
    yield {}
    jax.clear_caches()


# Thresholds, and rules of one kind, differ in their arithmetic alone, which only the first flag
# looks at.
ALIKE = {"percentile", "block rms", "auto"}
OTHERS = [call for call in CALLS if call.split(", ")[-1] not in ALIKE]
PAIRS = [(flag, call) for flag in FLAGS for call in (CALLS if flag == "debug" else OTHERS)]


@pytest.mark.parametrize(("flag", "call"), this_turn(PAIRS))
def test_a_flag_changes_no_answer(flag, call, plain, users_promotion):
    if call not in plain:
        plain[call] = CALLS[call]()
    with FLAGS[flag]():
        answer = CALLS[call]()
    close = dict(rtol=2e-5, atol=1e-6)  # other programs round otherwise
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, **close), answer, plain[call])
