"""Clips: functions, rules, thresholds and error clips."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

import clipgrad as cg

A, B = np.float32([3, 4]), np.float32([[6, 8], [0.3, 0.4]])
GRADS = {"a": A, "b": B}
WITH_NAN = {"a": np.float32([3, np.nan]), "b": B}
PARAMS = {"a": np.float32([1, 1]), "b": np.float32([[1, 2], [3, 4]])}
NORMS = np.float32([2, 3, 2.5, 1.5, 40, 2, 3, 2.2, 2.8, 30, 2.6, 2.4])
RULE, OTHER = cg.ClipByGlobalNorm(1.0), cg.ClipByNorm(1.0)


def updated(make, grads=GRADS, devices=1, **arguments):
    """The updates and the state of a transformation; for an axis name those of two devices."""
    tx = make(**arguments)

    def run(grads):
        return tx.update(grads, tx.init(PARAMS), PARAMS)

    return on_devices(devices, run, grads)


def on_devices(count, run, grads):
    if count == 1:
        return jax.jit(run)(grads)
    return jax.jit(jax.vmap(run, axis_name="x"))(
        jax.tree.map(lambda g: np.stack([g, 2 * g]), grads)
    )


def ruled(make, grads=GRADS, devices=1, **arguments):
    rule = make(**arguments)
    return on_devices(devices, lambda g: rule(g, PARAMS), grads)


def thresholds(make, **arguments):
    """The thresholds of a history of norms of two leaves."""
    threshold = make(**arguments)
    norms = np.stack([NORMS, np.roll(NORMS, 1)], 1)
    step = lambda state, norms: threshold.update(state, norms)[::-1]  # noqa: E731
    return jax.jit(lambda n: jax.lax.scan(step, threshold.init(n[0]), n)[1])(norms)


def gradients(wrapped, *args):
    return jax.jit(jax.grad(lambda *args: jnp.sum(wrapped(*args)), tuple(range(len(args)))))(*args)


def named(x):
    with jax.named_scope("net/h"):
        h = jnp.sin(x)
    return jnp.sum(h * h * h)


def other(x):
    with jax.named_scope("net/h"):
        h = jnp.cos(x)
    return jnp.sum(h * h * h)


def scale(w, x):
    return {"y": 3 * w * x, "z": w + x}


def cotangents(make, x=A, probe=False, **arguments):
    """The cotangent of the value, and that of the probe."""
    probe = cg.types.ClipStats.zero() if probe else None
    clip = lambda x, probe: jnp.sum(make(x, probe=probe, **arguments) ** 2)  # noqa: E731
    return clip(x, None), jax.jit(jax.grad(clip, (0, 1)))(x, probe)


def decorated(make, **arguments):
    def total(w, x):
        results = make(**arguments)(scale)(w, x)
        return jnp.sum(results["y"]) + 5 * jnp.sum(results["z"])

    return jax.jit(jax.grad(total, (0, 1)))(A, 2 * A)


def transformed(make, fun=named, **arguments):
    return gradients(make(fun, **arguments), A)


def suggested(make, **arguments):
    return make(**arguments)


def compared(make, grads=GRADS, **arguments):
    return jax.jit(functools.partial(make, **arguments))(grads)


def measured(make, tree=GRADS, devices=1, **arguments):
    return on_devices(devices, lambda tree: make(tree, **arguments), tree)


OF_CLIPS = {
    "where": dict(where="a"),
    "nonfinite": dict(nonfinite="zero", grads=WITH_NAN),
    "stats": dict(stats=True),
}
SPREAD = dict(axis_name=jax.P("x"), devices=2)
# For each function how it is called, with which arguments, and for each argument another value; a
# row with several is beside a row with all but the first.
ROWS = {
    "clip_by_value": (updated, dict(max=2.0), dict(max=1.0),
                      dict(min=-0.5, grads={"a": -A, "b": B}), dict(nan=0.0, grads=WITH_NAN),
                      OF_CLIPS),
    "clip_by_norm": (updated, dict(max_norm=2.0), dict(max_norm=1.0), dict(ord=1), dict(axis=-1),
                     SPREAD, OF_CLIPS),
    "clip_by_global_norm": (updated, dict(max_norm=2.0), dict(max_norm=1.0), dict(ord=jnp.inf),
                            SPREAD, OF_CLIPS),
    "clip_by_block_rms": (updated, dict(threshold=2.0), dict(threshold=1.0), SPREAD,
                          OF_CLIPS),
    "adaptive_grad_clip": (updated, dict(clipping=0.1), dict(clipping=0.2), dict(eps=9.0),
                           dict(axis=-1), SPREAD, OF_CLIPS),
    "gradient_clip": (updated, dict(rule=RULE), dict(rule=OTHER), OF_CLIPS),
    "clip_grads": (compared, dict(rule=RULE), dict(grads={"a": B, "b": A}), dict(rule=OTHER),
                   dict(params=jax.tree.map(lambda w: 2 * w, PARAMS), rule=cg.AdaptiveClip(0.1)),
                   dict(where="a"), dict(nonfinite="zero", grads=WITH_NAN)),
    "global_norm": (measured, {}, dict(tree={"a": A}), dict(ord=1), SPREAD),
    "ClipByValue": (ruled, dict(max=2.0), dict(max=1.0), dict(min=-0.5, grads={"a": -A}),
                    dict(nan=0.0, grads=WITH_NAN)),
    "ClipByNorm": (ruled, dict(max_norm=2.0), dict(max_norm=1.0), dict(ord=1), dict(axis=-1),
                   SPREAD),
    "ClipByGlobalNorm": (ruled, dict(max_norm=2.0), dict(max_norm=1.0), dict(ord=3),
                         SPREAD),
    "ClipByBlockRMS": (ruled, dict(threshold=2.0), dict(threshold=1.0), SPREAD),
    "AdaptiveClip": (ruled, dict(clipping=0.1), dict(clipping=0.2), dict(eps=9.0), dict(axis=-1),
                     SPREAD),
    "AutoNorm": (ruled, {}, dict(max_norm=2.0), dict(gamma=1.0), SPREAD),
    "PercentileThreshold": (thresholds, dict(percentile=90.0, window=8), dict(percentile=50.0),
                            dict(window=4), dict(feed="clipped")),
    "ZScoreThreshold": (thresholds, dict(warmup=4), dict(z=1.0), dict(decay=0.5), dict(warmup=2),
                        dict(eps=1.0), dict(max_norm=2.0), dict(feed="raw")),
    "EMAThreshold": (thresholds, dict(warmup=3), dict(decay=0.5), dict(relative=2.0),
                     dict(absolute=2.0), dict(warmup=5), dict(feed="raw")),
    "HistoryThreshold": (thresholds, dict(window=4), dict(window=8), dict(sigma=1.0),
                         dict(min_history=1), dict(feed="clipped")),
    "clip_cotangent": (cotangents, dict(rule=RULE), dict(x=2 * A), dict(rule=cg.ClipByValue(0.1)),
                       dict(probe=True)),
    "error_clip": (decorated, {}, dict(inputs=RULE), dict(outputs=RULE)),
    "error_clip_by_name": (transformed, dict(rules={"net/h": RULE}), dict(fun=other),
                           dict(rules={"net/h": cg.ClipByValue(0.1)}),
                           dict(prefix="net/", rules={"h": RULE})),
    "error_clip_everywhere": (transformed, dict(rule=RULE), dict(fun=other), dict(rule=OTHER)),
    "apply_gradient_clipping": (
        compared, dict(clipping_type="norm", clipping_threshold=1.0), dict(grads={"a": A}),
        dict(clipping_type="value"), dict(clipping_threshold=2.0),
        dict(params=jax.tree.map(lambda w: 2 * w, PARAMS), clipping_type="adaptive"),
        dict(axis=-1, params=PARAMS, clipping_type="adaptive"),
    ),
    "gradient_clipping": (updated, dict(clipping_type="norm", clipping_threshold=1.0),
                          dict(clipping_type="value"), dict(clipping_threshold=2.0),
                          dict(axis=-1, clipping_type="adaptive")),
    "suggest_threshold": (suggested, dict(norms=NORMS), dict(norms=2 * NORMS),
                          dict(percentile=10.0)),
}  # fmt: skip
# What a row needs in the call without its first argument, instead of leaving it out.
WITHOUT = {
    ("clip_grads", "params"): dict(params=PARAMS),
    ("error_clip_by_name", "prefix"): dict(rules={"net/h": None}),
    ("apply_gradient_clipping", "params"): dict(params=PARAMS),
    # One norm of the tree, and one of each value.
    ("error_clip_everywhere", "rule"): dict(rule=cg.ClipByValue(0.1)),
}
