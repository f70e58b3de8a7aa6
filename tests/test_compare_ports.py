"""Ports: losses in JAX beside files that torch wrote; bugs of ports are named at their module.

`tests/torch_runs/make.py` wrote the files; `tests/test_torch_runs.py` tests the writing itself.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import clipgrad as cg
from clipgrad._commands.cli import main
from clipgrad._compare.differences import Judgment
from clipgrad._compare.gradients import find
from clipgrad._compare.likeness import Likeness, similarity
from clipgrad._compare.matching import Pair, instances_of
from clipgrad._compare.places import ComparedPlace, JudgedRuns
from clipgrad._compare.port_record import PortEntry, PortRun
from clipgrad._compare.ports import match_leaves, parameter_texts
from clipgrad._compare.signatures import host_sketch, layouts, orders_of, signature
from clipgrad._compare.slices import Ancestors
from clipgrad._compare.versions import version
from tests import port_models as models

pytestmark = pytest.mark.usefixtures("users_promotion")
DEAR = pytest.mark.exhaustive
STACKED = functools.partial(models.decoder_args, stacked=True)
NARROW = functools.partial(models.decoder_args, dtype="bfloat16")
SCANNED = functools.partial(models.decoder, scanned=True)
TABLE = {
    "gru": ("gru", models.gru, models.gru_args),
    "layers": ("layers", models.layers, models.layers_args),
    "decoder": ("decoder", models.decoder, models.decoder_args),
    "decoder scanned": ("decoder", SCANNED, STACKED),
    "decoder bfloat16": ("decoder_bfloat16", models.decoder, NARROW),
}


@pytest.mark.parametrize("name", ["gru", *(pytest.param(n, marks=DEAR) for n in [*TABLE][1:])])
def test_a_right_port_is_silent_and_each_bug_is_named_at_its_module(name):
    run, loss, make = TABLE[name]
    bugs = models.BUGS[name.split()[0]]
    found = models.compared(run, loss, make(models.numbers(run)), range(-1, len(bugs)))
    right = next(found)
    assert right.ok and not right.findings, str(right)
    assert len(right.rows) > 5 and not any(
        x.startswith("values only in t") for x in right.unmatched
    )
    missed = []
    for (bug, module), wrong in zip(bugs.items(), found, strict=True):
        kind, place = next(((f.kind, f.module or "") for f in wrong.findings), ("", "-"))
        last = place.split("/")[-1]
        if kind != "value" or not last.startswith(module) or bool(last) != bool(module):
            missed.append((bug, place))
    # In bfloat16 rounding explains some of them, such as an epsilon of 1e-3 for 1e-5.
    assert len(missed) <= (2 if "bfloat16" in name else 0), missed


def test_the_first_value_that_differs_is_named_also_where_it_enters_a_module():
    """A scope that only JAX has, calls in a loop beside a scan, and what is flattened."""
    bugs = models.BUGS["tagger"]
    args = models.tagger_args(models.tagger_numbers())
    found = models.compared(models.tagger_run(), models.tagger, args, range(-1, len(bugs)))
    right = next(found)
    assert right.ok, str(right)
    assert any("fc/kernel is not fc.weight, but has the same numbers" in x for x in right.notes)
    for (bug, module), wrong in zip(bugs.items(), found, strict=True):
        kinds = ["argument", "value"] if module == "fc" else ["value"]
        assert [f.kind for f in wrong.findings] == kinds, (bug, str(wrong))
        assert (wrong.findings[-1].module or "").split("/")[-1] == module, (bug, str(wrong))


def test_a_layer_that_was_copied_twice_is_named_with_what_it_should_be():
    rng, names = np.random.default_rng(0), {"down": "fc2", "ln": "norm", "up": "fc1"}
    theirs = {
        f"blocks.{i}.{name}.bias": rng.normal(size=5).astype(np.float32)
        for i in range(3)
        for name in ("norm", "fc1", "fc2")
    }
    entries = [
        PortEntry(name, "parameter", "", (), None, None, layouts(x, "float32"), None)
        for name, x in theirs.items()
    ]
    params = {
        f"block_{i}/{name}/bias": signature(theirs[f"blocks.{0 if i == 1 else i}.{other}.bias"])
        for i in range(3)
        for name, other in names.items()
    }

    likeness = Likeness({}, set())
    texts = parameter_texts(match_leaves(params, {}, entries, likeness, None), likeness)
    assert texts == {
        f"block_1/{name}/bias": f"block_1/{name}/bias has the numbers of blocks.0.{other}.bias, "
        f"not of blocks.1.{other}.bias"
        for name, other in names.items()
    }


def gru_pair():
    args = models.gru_args(models.numbers("gru"))
    return models.FOLDER / "gru.npz", lambda p, x, y: models.gru(p, x, y, -1), args


@DEAR
def test_both_orders_files_and_names(tmp_path):
    path, loss, args = gru_pair()
    cg.save_run(loss, args, tmp_path / "jax.npz")
    pairs = [(path, loss, args), (loss, path, args), (path, tmp_path / "jax.npz")]
    found = [cg.compare(*pair) for pair in (*pairs, (tmp_path / "jax.npz", path))]
    assert all(each.ok for each in found), str(found[0])
    assert len({len(each.rows) for each in found}) == 1
    named = cg.compare(loss, path, args, names={"cell": "gru"})
    assert named.ok
    assert cg.compare(path, loss, args, names={"gru": "cell"}).ok
    with pytest.raises(ValueError, match="names: got 'sell', expected the path of a value"):
        cg.compare(loss, path, args, names={"sell": "gru"})
    with pytest.raises(ValueError, match="a run of torch and another run of torch, expected a los"):
        cg.compare(path, path)


@DEAR
def test_parameters_that_differ_are_named_first():
    path, loss, (params, x, y) = gru_pair()
    cell, head = params["cell"], params["head"]
    changes = {
        "has the numbers of gru.weight_ih_l0[8:16]": {"cell": {**cell, "ir": cell["iz"]}},
        "head/bias is not head.bias": {"head": {**head, "bias": head["bias"] * 2}},
        "has the same numbers in another order": {"head": {**head, "kernel": head["kernel"][::-1]}},
        "cell/hz is gru.weight_hh_l0[8:16] with its axes as (0, 1)": {
            "cell": {**cell, "hz": cell["hz"].T}
        },
    }
    for text, change in changes.items():
        found = cg.compare(path, loss, ({**params, **change}, x, y))
        assert [f.kind for f in found.findings] == ["argument", "value"], str(found)
        assert text in found.findings[0].message, str(found)
    found = cg.compare(path, loss, (params, 2 * x, y))
    assert found.findings[0].path == "args[1]", str(found)


MODULE = """
import jax
from tests import port_models as models

def right(params, x, y):
    return models.layers(params, x, y, -1)

def args():
    return models.layers_args(models.numbers("layers"))

def twice():
    params, x, y = args()
    layers = jax.tree.map(lambda w: w[:1].repeat(3, 0).at[2].set(w[2]), params["layers"])
    return params | {"layers": layers}, x, y
"""


@DEAR
def test_the_command_compares_with_a_file_of_torch(tmp_path, monkeypatch, capsys):
    """Layers under `nn.scan` beside a list of modules; one layer is copied twice."""
    (tmp_path / "portmodels.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    command = ["compare", str(models.FOLDER / "layers.npz"), "portmodels:right", "--args"]
    assert main([*command, "portmodels:args"]) == 0
    assert "no difference beyond rounding" in capsys.readouterr().out
    assert main([*command, "portmodels:twice"]) == 1
    found = " ".join(capsys.readouterr().out.split())
    assert "layers/fc/kernel is not layers.*.fc.weight" in found, found
    assert "value: the values differ from here on: Net/layers/norm, step 1" in found, found
    assert main(["compare", "portmodels:right", command[1], "--args", "portmodels:args"]) == 0
    assert main([*command[:3]]) == 2
    assert "--args" in capsys.readouterr().err


# ---- a convolution net in Flax: NHWC beside NCHW ----


def convolutions(train, **changes):
    import flax.linen as nn

    how = {"epsilon": 1e-5, "padding": ((1, 1), (1, 1)), "momentum": 0.9} | changes

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            norm = functools.partial(
                nn.BatchNorm, not train, epsilon=how["epsilon"], momentum=how["momentum"]
            )
            x = nn.Conv(4, (3, 3), padding=1, use_bias=False, name="conv1")(x)
            x = nn.relu(norm(name="bn1")(x))
            x = nn.Conv(6, (3, 3), 2, padding=how["padding"], name="conv2")(x)
            x = nn.relu(norm(name="bn2")(x))
            return nn.Dense(5, name="fc")(x.mean((1, 2)))

    def loss(params, stats, x, y):
        variables = {"params": params, "batch_stats": stats}
        out = Net().apply(variables, x, mutable=["batch_stats"])[0]
        return jnp.mean((out - y) ** 2)

    return loss


def convolution_args(run):
    found = models.numbers(run)
    params = {
        "conv1": {"kernel": found["conv1.weight"].transpose(2, 3, 1, 0)},
        "conv2": {
            "kernel": found["conv2.weight"].transpose(2, 3, 1, 0),
            "bias": found["conv2.bias"],
        },
        "fc": {"kernel": found["fc.weight"].T, "bias": found["fc.bias"]},
    }
    stats = {}
    for name in ("bn1", "bn2"):
        params[name] = {"scale": found[f"{name}.weight"], "bias": found[f"{name}.bias"]}
        stats[name] = {"mean": found[f"{name}.running_mean"], "var": found[f"{name}.running_var"]}
    return params, stats, found["args.0"].transpose(0, 2, 3, 1), found["args.1"]


@DEAR
@pytest.mark.parametrize(
    ("run", "changes", "module"),
    [
        ("conv_eval", {}, None),
        ("conv_train", {}, None),
        ("conv_eval", {"epsilon": 1e-2}, "Net/bn1"),
        ("conv_eval", {"padding": ((0, 2), (0, 2))}, "Net/conv2"),
    ],
)
def test_nchw_beside_nhwc(run, changes, module):
    args = convolution_args(run)
    found = cg.compare(models.FOLDER / f"{run}.npz", convolutions("train" in run, **changes), args)
    if module is None:
        # A bias before a normalization has no gradient but rounding.
        own = [note for note in found.notes if "rounding decides here" not in note]
        assert found.ok and not found.findings and not own, str(found)
        assert not any("array" in text for text in found.unmatched), str(found)
    else:
        assert [(f.kind, f.module) for f in found.findings] == [("value", module)], str(found)


# ---- the parts ----


@pytest.mark.parametrize(("is_matched", "module"), [(True, "outer/second"), (False, "outer")])
def test_a_value_that_agrees_at_an_earlier_step_is_no_reason_to_blame_what_follows_it(
    is_matched, module
):
    """At the step that differs it was not matched: the fault may be before it."""

    def loss(weights, x):
        def step(h, w):
            with models.named("outer"):
                with models.named("first"):
                    h = jnp.tanh(h @ w)
                with models.named("second"):
                    return jnp.sin(h), None

        return jnp.mean(lax.scan(step, x, weights)[0])

    own = version(loss, (np.ones((3, 2, 2)), np.ones((1, 2))), {}, 0, False)
    places = [
        ComparedPlace(
            Pair(at, at), Judgment(float(at.steps >= (1,) and "second" in value.name), 1e-6), None
        )
        for value in own.values
        for at in instances_of(value)
        if value.name.startswith("outer/")
        and (is_matched or value.name != "outer/first" or at.steps != (1,))
    ]
    places.sort(key=lambda place: place.pair.own.time)
    (found,) = find(own, own, JudgedRuns(places, Judgment(1.0, 1e-6), [], []))
    assert (found.kind, found.module, found.step) == ("value", module, 1)


def test_what_leaves_two_modules_and_what_is_not_used_is_no_difference():
    """If the outer module agrees, the other framework's inner one ends elsewhere."""

    def loss(w, x):
        def step(h, _):
            with models.named("outer"):
                with models.named("unused"):
                    jnp.sin(h @ w)
                with models.named("inner"):
                    h = jnp.tanh(h @ w)
            return h, jnp.cos(h)

        return jnp.mean(lax.scan(step, x, None, 2)[0])

    values = version(loss, (np.ones((2, 2)), np.ones((1, 2))), {}, 0, False).values
    of = {v.name: [i for i in instances_of(v) if i.steps == (1,)] for v in values}
    (outer,), (inner,), (unused,) = (of[n] for n in ("outer", "outer/inner", "outer/unused"))
    assert Ancestors([outer]).has(inner) and not Ancestors([inner]).has(outer)
    assert not Ancestors([outer]).has(unused)
    used = Ancestors(())
    assert used.is_used(inner.value) and not used.is_used(unused.value)


def written_run(loss, w, x):
    """The run that another framework would write of a loss, which calls modules by ``call``."""
    seen = []

    def call(name, f, h):
        seen.append((name.replace("/", "."), "enters", h))
        h = f(h)
        seen.append((name.replace("/", "."), "module", h))
        return h

    whole, gradient = jax.value_and_grad(loss)(w, x, lambda name, f, h: f(h))
    loss(w, x, call)
    signed = functools.partial(layouts, dtype="float32")
    values = [
        PortEntry(name, kind, "", (), None, None, signed(np.asarray(h)), None)
        for name, kind, h in seen
    ]
    leaves = [
        PortEntry("w", "parameter", "", (), None, None, signed(w), signed(np.asarray(gradient))),
        PortEntry("args[0]", "argument", "", (), None, None, signed(x), None),
    ]
    return PortRun(values, leaves, np.asarray(whole), "float32", {})


def compared_calls(loss, changes):
    """The comparison of a loss with its run, where changes replace what `call` does."""
    rng = np.random.default_rng(0)
    x, w = (rng.normal(size=shape).astype(np.float32) for shape in ((3, 4), (4, 4)))

    def call(name, f, h):
        def inside(f):
            with models.named(name.split("/")[-1]):
                return f(h)

        return changes[name](inside, f, h) if name in changes else inside(f)

    run = written_run(loss, w, x)
    (found,) = models.compared(run, lambda w, x, _: loss(w, x, call), (w, x), [0])
    return found


def stacked_calls(w, x, call):
    """A stem, a value of it, and a block of a norm and a product."""

    def block(h):
        h = call("block/norm", lambda h: h / (1 + jnp.abs(h)), h)
        return call("block/fc", lambda h: jnp.tanh(h @ w), h)

    h = call("pre", jnp.exp, call("stem", lambda h: jnp.sin(h @ w), x))
    return jnp.mean(call("block", block, h) ** 2)


def faint_calls(w, x, call):
    """A loss whose changes are below its rounding."""
    h = call("stem", lambda h: jnp.sin(h @ w), x)
    h = h + 0.1 * call("pre", jnp.cos, h)
    return 1 + 1e-9 * jnp.mean(call("fc", lambda h: h @ w, h) ** 2)


def left_out(inside, f, h):
    del inside, f
    return h


def unused(inside, f, h):
    inside(f)
    return h


@pytest.mark.parametrize(
    ("name", "change", "module", "own", "other"),
    [
        ("pre", left_out, "", "stem", "pre"),
        ("block/norm", left_out, "block", "pre", "block.norm"),
        ("pre", unused, "pre", "stem", "pre"),
        ("block/norm", unused, "block/norm", "pre", "block.norm"),
    ],
)
def test_a_module_that_is_left_out_is_named_by_who_passes_another_value_on(
    name, change, module, own, other
):
    """Not the module that computes of the other value, which is right."""
    found = compared_calls(stacked_calls, {name: change})
    (finding,) = found.findings
    assert finding.module == module, str(found)
    assert f"it is computed of {own}, in torch of {other}" in finding.message, finding.message


@pytest.mark.parametrize("is_used", [True, False])
def test_a_far_value_differs_if_one_that_is_computed_of_it_does_though_the_loss_agrees(is_used):
    """If nothing that differs is computed of it, the other framework cuts it otherwise."""

    def other(inside, f, h):
        far = inside(lambda h: 3 * jnp.sin(h))
        return far if is_used else far - far + f(h)

    found = compared_calls(faint_calls, {"pre": other})
    assert [(x.kind, x.module) for x in found.findings] == [("value", "pre")] * is_used, str(found)


@pytest.mark.parametrize("shape", [(), (1, 5), (4, 3), (2, 1, 3, 4), (2, 2, 3, 2, 2)])
def test_every_order_of_axes_is_sketched(shape):
    x = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    found = layouts(x, "float32")
    assert len(found.sketches) == len(orders_of(shape)) <= 24
    for order, sketch in zip(found.orders, found.sketches, strict=True):
        turned = np.squeeze(x).transpose(np.argsort(np.argsort(order)).astype(int))
        np.testing.assert_array_equal(sketch, host_sketch(turned))
    if len(shape) == 4:
        assert (2, 3, 0) in found.orders  # OIHW with one input channel, as HWIO


def test_names_of_one_module_are_alike():
    same = [
        ("Net/Dense_0", "fc1"), ("layers_3/attn/query", "layers.3.self_attn.q_proj"),
        ("encoder/bn1", "encoder.bn1"), ("cell", "gru"), ("block_1/ln_2", "h.1.ln_2"),
    ]  # fmt: skip
    for ours, theirs in same:
        scores = {b: similarity(ours, b, ((), ())) for _, b in same}
        assert max(scores, key=scores.__getitem__) == theirs, scores
    steps = [similarity("layers/q", f"layers.{i}.q", ((1,), ())) for i in range(3)]
    assert steps[1] > max(steps[0], steps[2])
