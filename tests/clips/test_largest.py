"""The largest number of arrays that several devices hold: NaN if one is, wherever it is."""

import ast
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import clipgrad as cg
from clipgrad import _arrays
from tests.helpers import array
from tests.rows import crossed

SHAPE = (16, 24)
LAYOUTS = {"rows": P("d"), "columns": P(None, "d")}
# Where NaN is: nowhere, on the first device, on the last, on one between, on two.
PLACES = [(), ((0, 0),), ((-1, -1),), ((7, 11),), ((0, -1), (9, 2))]


def model(w, x):
    return jnp.sum(checkpoint_name(w * x, "h"))


def of_stats(stats):
    return {"max": stats.max}


def every_largest(mesh, spec):
    """A compiled program that returns what there is of largest numbers, for each reduced axis."""

    def on_devices(check):
        def local(w, x):
            return model(w, x).reshape(1)

        return jax.shard_map(
            local, mesh=mesh, in_specs=(P(), spec), out_specs=P("d"), check_vma=check
        )

    def measured(fun, watch, x):
        return of_stats(cg.with_value_stats(fun, watch=watch)(jnp.ones((), x.dtype), x)[1]["h"])

    def program(x):
        return {
            "all": [
                measured(model, ["h"], x),
                measured(on_devices(True), ["h"], x),
                measured(on_devices(False), ["h"], x),
                {"max": cg.global_norm({"x": x}, jnp.inf)},
                {"max": _arrays.largest(jnp.abs(x))},
                {"max": cg.ClipByValue(1.0).measure(x)[0].value},
            ],
            "0": [measured(model, {"h": 0}, x)],
            "1": [measured(model, {"h": 1}, x)],
        }

    return jax.jit(program)


def expected(x, axis):
    """The largest numbers by NumPy, which keeps NaN."""
    over = {"all": None, "0": 1, "1": 0}[axis]
    return {"max": np.abs(x).max(over)}


@crossed(1)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_nan_on_any_device_is_in_every_largest_number(layout, dtype):
    mesh = jax.make_mesh((8,), ("d",), (AxisType.Auto,))
    run, place = every_largest(mesh, LAYOUTS[layout]), NamedSharding(mesh, LAYOUTS[layout])
    step = cg.train_step(model, optax.sgd(0.1), watch_values=["h"])
    ordinary = np.random.default_rng(0).normal(size=SHAPE)
    cases = [(sign * ordinary - shift, p) for p in PLACES for sign, shift in ((1, 0), (-1, 9))]
    for values, places in cases:
        x = np.array(values, dtype)
        for index in places:
            x[index] = np.nan
        placed, x = jax.device_put(x, place), np.array(x, np.float32)
        for axis, every in run(placed).items():
            wanted = expected(x, axis)
            for i, numbers in enumerate(every):
                for name, value in numbers.items():
                    value = np.float32(value)
                    np.testing.assert_array_equal(value, wanted[name], f"{name} {axis} {i}")
        metrics = step(step.init(array(np.ones(()), dtype)), placed)[1]
        for name, value in of_stats(metrics["values"]["h"]).items():
            np.testing.assert_array_equal(np.float32(value), expected(x, "all")[name], name)


# ---- no other maximum ---------------------------------------------------------------------------

EXTREMES = {
    *("max", "min", "amax", "amin", "nanmax", "nanmin", "fmax", "fmin"),
    *("pmax", "pmin", "reduce_max", "reduce_min", "cummax", "cummin", "segment_max", "segment_min"),
}
# The others: (file, function) and why no NaN is lost there.
HARMLESS = {
    ("_arrays/numbers.py", "largest"): "the one maximum",
    **dict.fromkeys(
        [
            ("_arrays/ranges.py", "_bounded_product"),
            ("_arrays/ranges.py", "bounded_square"),
            ("_arrays/ranges.py", "narrow_root"),
            ("_arrays/ranges.py", "scaled_squares"),
            ("_arrays/ranges.py", "sums_of_norm"),
        ],
        "`lax.max` of an element and a bound, whose NaN another sum has",
    ),
    ("_arrays/sums.py", "maxima"): "of integers, whose largest is NaN: one collective",
    ("_arrays/sums.py", "merged"): "of integers",
    ("_programs/elements.py", "at_first"): "on every device",
    ("_compare/sketches.py", "_sizes"): "of finite elements",
    ("_diagnose/cut_facts.py", "_other_numbers"): "of NumPy, of finite operands",
    ("_diagnose/opened_loops.py", "_by_step"): "of levels, which are integers",
    ("_diagnose/measure.py", "run"): "of gradients that are finite",
    ("_diagnose/probe.py", "_sums_of"): "a sum beside it says whether there is NaN",
    ("_per_example/norms_of_arrays.py", "largest_of_each"): "of what is then squared and added up",
    ("_recorder/flag.py", "_copied_numbers"): "of integers",
    ("_clip/thresholds/ema.py", "update"): "of finite norms",
    ("_clip/thresholds/ema.py", "_jointly"): "of finite norms",
    ("_training/accumulate.py", "averaged"): "along an axis that no device cuts",
    ("_training/metrics.py", "_of_skips"): "of integers",
}


HOST = {"_check", "_demo"}  # methods there are of NumPy's arrays


def extremes_of(path):
    """The functions of a module that take a maximum or minimum of elements of JAX's arrays."""
    tree = ast.parse(path.read_text())
    imports = [n for n in ast.walk(tree) if isinstance(n, ast.Import | ast.ImportFrom)]
    if "jnp" not in {name.asname for n in imports for name in n.names}:
        return  # NumPy, on the host

    def visit(node, function):
        name = node.name if isinstance(node, ast.FunctionDef) else function
        called = node.func if isinstance(node, ast.Call) else None
        for attribute, bases in ((node, ("jnp", "lax", "jax.lax")), (called, None)):
            if isinstance(attribute, ast.Attribute) and attribute.attr in EXTREMES:
                of, is_method = (
                    ast.unparse(attribute.value),
                    not {path.parent.name, path.stem} & HOST,
                )
                if of in bases if bases else is_method and of != "np":
                    yield name
        for child in ast.iter_child_nodes(node):
            yield from visit(child, name)

    yield from visit(tree, None)


@pytest.mark.slow
def test_there_is_one_maximum_over_elements():
    root = pathlib.Path(cg.__file__).parent
    extremes = {
        (str(path.relative_to(root)), function)
        for path in root.rglob("*.py")
        for function in extremes_of(path)
    }
    assert extremes == HARMLESS.keys(), "write _arrays.largest, or say here why NaN is not lost"
