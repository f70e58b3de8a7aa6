"""The analyses: check, diagnose, compare, list names, statistics of values, each example."""

import functools
import os
import tempfile

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

import clipgrad as cg
from tests.helpers import array

X, Y = np.float32([0.5, -1.5]), np.float32([2.0, 3.0])
NO_SQRT = np.float32([4.0, 0.0])


def cubic(x, y=Y, *, scale=1.0):
    return {"a": scale * x**3, "b": jnp.sum(jnp.sin(x) * y)}


def sines(x, y=Y, *, scale=1.0):
    return {"a": scale * jnp.sin(x), "b": jnp.sum(x * y)}


@jax.custom_vjp
def half(x):
    return x * x


half.defvjp(lambda x: (x * x, x), lambda x, g: (x * g,))


@jax.custom_vjp
def nearly(x):
    return x * x


nearly.defvjp(lambda x: (x * x, x), lambda x, g: (2.02 * x * g,))
clipped = functools.partial(cg.clip_cotangent, rule=cg.ClipByValue(0.1))


@jax.custom_vjp
def safe_root(x):
    return jnp.sign(x) * jnp.sqrt(jnp.abs(x))


def _safe_slope(x, g):
    return (jnp.where(x == 0, 0, g * 0.5 / jnp.sqrt(jnp.where(x == 0, 1, jnp.abs(x)))),)


# At 0 the slopes have no limit, so these elements can't be verified.
safe_root.defvjp(lambda x: (safe_root(x), x), _safe_slope)
QUARTER = np.float32([0, 0, 0, 2])


def half_and_sum(x):
    return {"a": half(x), "b": jnp.sum(x)}


def checked(make, fun=cubic, args=(X,), **arguments):
    try:
        report = make(fun, args, **{"raise_on_failure": False, **arguments})
    except cg.GradCheckError as error:
        return "raised", error.report.ok
    failures = [str(failure) for failure in report.failures]
    counts = report.verified, report.evaluations, len(report.devices)
    return report.ok, failures, sorted(report.not_run), *counts


def differences(make, fun=cubic, args=(X,), **arguments):
    return make(fun, args, **{"cotangent": {"a": X, "b": np.float32(1)}, **arguments})


def root(x, y=Y, *, shift=1.0):
    return jnp.sum(jnp.sqrt(x + shift)) + jnp.sum(y * x)


def logarithm(x, y=Y, *, shift=1.0):
    return jnp.sum(jnp.log(x + shift)) + jnp.sum(y * x)


def stopped(x, y=Y, *, shift=1.0):
    return root(x, jax.lax.stop_gradient(y), shift=shift)


def root_with_aux(x):
    return root(x, shift=0.0), x


def of_batch(w, batch):
    return jnp.mean(jnp.sqrt(batch @ w))


def contents_of(diagnosis):
    rows = [(row.module, row.line, row.norm) for row in diagnosis.rows]
    examples = [example.index for example in diagnosis.examples]
    return diagnosis.ok, diagnosis.message, list(diagnosis.notes), rows, examples


def diagnosed(make, fun=root, args=(NO_SQRT,), **arguments):
    return contents_of(make(fun, args, **arguments))


def named(x, y=Y, *, shift=1.0):
    with jax.named_scope("first"):
        h = jnp.sin(x + shift)
    with jax.named_scope("second"):
        h = h * y
    return jnp.sum(h**3)


def doubled(x, y=Y, *, shift=1.0):
    with jax.named_scope("first"):
        h = 2 * jnp.sin(x + shift)
    with jax.named_scope("second"):
        h = h * y
    return jnp.sum(h**3)


def renamed(x, y=Y, *, shift=1.0):
    with jax.named_scope("one"):
        h = jnp.sin(x + shift) * 1.5
    with jax.named_scope("two"):
        h = h * y
    return jnp.sum(h**3)


def with_aux(fun):
    def called(*args, **kwargs):
        return fun(*args, **kwargs), args[0] * 2

    return called


NAMED_AUX, DOUBLED_AUX = with_aux(named), with_aux(doubled)


def compared(make, fun=named, other=doubled, args=(X,), **arguments):
    comparison = make(fun, other, args, **arguments)
    rows = [(row.module, row.kind, row.step) for row in comparison.rows]
    return comparison.ok, comparison.message, list(comparison.notes), rows


def saved(make, fun=named, args=(X,), path="run.npz", **arguments):
    with tempfile.TemporaryDirectory() as folder:
        make(fun, args, os.path.join(folder, path), **arguments)
        with np.load(os.path.join(folder, path)) as file:
            arrays = [file[name] for name in sorted(file.files)]
        return sorted(os.listdir(folder)), arrays


def listed(make, fun=named, args=(X,), **arguments):
    return str(make(fun, args, **arguments))


def tagged(x, extra=None):
    return jnp.sum(checkpoint_name(jnp.sin(x if extra is None else extra), "h"))


def scan(x):
    def step(h, _):
        with jax.named_scope("cell"):
            h = jnp.sin(h)
        return h, None

    return jnp.sum(jax.lax.scan(step, x, None, length=3)[0])


def valued(make, fun=named, **arguments):
    return jax.jit(make(fun, **arguments))(X)


def with_cotangents(make, fun=named, **arguments):
    return jax.jit(make(fun, **arguments))(X, Y)


BATCH = np.float32([[1, 2, 3], [0.1, 0.2, 0.1], [4, 0, 1], [0, 0.1, 0]])
WEIGHTS = {"a": np.float32([1, 2, 3]), "b": np.float32([0.5])}
WITH_NAN = np.where(BATCH == 4, np.float32(np.nan), BATCH)
RULE = cg.ClipByGlobalNorm(1.0)


def of_example(w, x):
    return jnp.sin(jnp.dot(w["a"], x)) * w["b"][0]


def other_example(w, x):
    return jnp.cos(jnp.dot(w["a"], x)) * w["b"][0]


def example_with_aux(w, x):
    return of_example(w, x), x


class Linear(nnx.Module):
    def __init__(self):
        self.a = nnx.Param(array(np.ones(3)))
        self.b = nnx.BatchStat(array(np.ones(3)))


def of_model(model, x):
    return jnp.dot(jnp.sin(model.a[...] + model.b[...]), x)


def of_examples(make, loss=of_example, weights=WEIGHTS, batch=BATCH, **arguments):
    each = make(loss, **arguments)
    try:
        return jax.jit(each)(weights, batch), str(each.plan(weights, batch))
    except FloatingPointError as error:
        return str(error)


def each_norm(make, loss_fn=of_example, **arguments):
    return of_examples(make, loss_fn, **arguments)


def each_clip(make, loss_fn=of_example, **arguments):
    return of_examples(make, loss_fn, **arguments)


def each_spread(make, **arguments):
    """The norms where two devices have a half of the weights each."""
    each = make(lambda w, x: jax.lax.psum(jnp.dot(w, x), "x"), **arguments)
    mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    specs = (jax.P("x"), jax.P())
    norms = jax.shard_map(
        lambda w, x: each(w, x)[None] + 0 * w[0], mesh=mesh, in_specs=specs, out_specs=jax.P("x")
    )
    return jax.jit(norms)(np.ones(4, np.float32), np.float32([[3, 4], [1, 2]]))


MODEL = Linear()
ROOTS = dict(fun=root, other=logarithm)
WITH_MODEL = dict(weights=MODEL, loss_fn=of_model)
ROWS = {
    "check_grads": (
        checked, {}, dict(fun=half), dict(args=(X, Y)), dict(kwargs={"scale": np.float32(2)}),
        dict(wrt=0, args=(X, Y)), dict(no_grad=0, args=(X, Y)), dict(output="b", fun=half_and_sum),
        dict(order=2), dict(mode="full"), dict(max_relative_error=1e-3, fun=nearly, tolerance=0.5),
        dict(tolerance=0.5, fun=nearly),
        dict(min_verified=0.2, fun=safe_root, args=(QUARTER,), points=1),
        dict(time_budget=1e-9), dict(devices=("cpu", "gpu")), dict(points=1),
        dict(seed=1, fun=half), dict(cotangent=np.float32([1, 0]), fun=half),
        dict(raise_on_failure=True, fun=half),
        dict(skip="linearity", fun=clipped, tolerance=0.5),
    ),
    "numerical_grad": (
        differences, {}, dict(fun=sines), dict(args=(2 * X,)),
        dict(kwargs={"scale": np.float32(2)}),
        dict(wrt=1, args=(X, Y)), dict(output="b", cotangent=None),
        dict(cotangent={"a": Y, "b": np.float32(0)}), dict(delta=0.1),
    ),
    "diagnose": (
        diagnosed, dict(kwargs={"shift": 0.0}), dict(fun=logarithm), dict(args=(X * X,)),
        dict(kwargs={"shift": 0.0}), dict(argnums=1, args=(NO_SQRT, Y)),
        dict(has_aux=True, fun=root_with_aux, kwargs=None),
        dict(examples=1, fun=of_batch, args=(np.ones(3, np.float32), 0 * BATCH), kwargs=None),
    ),
    "compare": (
        compared, {}, dict(fun=doubled), dict(other=named), dict(args=(X * X,), **ROOTS),
        dict(kwargs={"shift": 3.0}, **ROOTS), dict(other_args=(2 * X,), other=named),
        dict(argnums=0, args=(X * X, Y), fun=root, other=stopped),
        dict(has_aux=True, fun=NAMED_AUX, other=DOUBLED_AUX),
        dict(names={"first": "one", "second": "two"}, other=renamed), dict(rtol=10.0),
    ),
    "save_run": (
        saved, {}, dict(fun=doubled), dict(args=(X, Y)), dict(path="other.npz"),
        dict(argnums=0, args=(X, Y)), dict(has_aux=True, fun=NAMED_AUX),
        dict(kwargs={"shift": 0.0}),
    ),
    "list_names": (
        listed, {}, dict(fun=scan), dict(args=(X[:1], Y[:1])),
        dict(kwargs={"extra": BATCH}, fun=tagged), dict(lines=True),
    ),
    "with_value_stats": (
        valued, {}, dict(fun=doubled), dict(watch=["first"]), dict(has_aux=True, fun=NAMED_AUX),
    ),
    "value_and_grad_with_stats": (
        with_cotangents, {}, dict(fun=doubled), dict(argnums=1), dict(has_aux=True, fun=NAMED_AUX),
        dict(error_clip={"first": cg.ClipByValue(0.1)}), dict(watch=["first"]),
    ),
    "per_example_norms": (
        each_norm, {}, dict(loss_fn=other_example), dict(has_aux=True, loss_fn=example_with_aux),
        dict(where="a"), dict(per_leaf=True), dict(microbatch=2), dict(method="direct"),
        dict(wrt=nnx.BatchStat, **WITH_MODEL), dict(axis_name="x", call=each_spread),
    ),
    "clip_per_example": (
        each_clip, dict(rule=RULE), dict(loss_fn=other_example), dict(rule=cg.ClipByNorm(1.0)),
        dict(reduce="sum"), dict(microbatch=2), dict(has_aux=True, loss_fn=example_with_aux),
        dict(where="a"), dict(nonfinite="zero", batch=WITH_NAN), dict(method="direct"),
        dict(wrt=nnx.BatchStat, **WITH_MODEL),
    ),
}  # fmt: skip
WITHOUT = {("diagnose", "kwargs"): dict(kwargs=None)}
