"""Ports: losses in JAX beside files that torch wrote; bugs of ports are named at their module.

`torch_runs/make.py` wrote the files; `test_torch_runs.py` tests the writing itself.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import pytest

import clipgrad as cg
from tests.compare import port_models as models

pytestmark = pytest.mark.usefixtures("users_promotion")
DEAR = pytest.mark.slow
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


# Numbers alone name one module later what is left out, or gets another value that agrees (the
# residual, and the value before it). In bfloat16 rounding explains some mistakes, such as an
# epsilon of 1e-3 for 1e-5, and a GELU for a SiLU is named at the layer around it.
LATER = {"no final norm", "no residual", "norm after"}
KNOWN = {
    "gru": {"last but one"},
    "decoder": LATER,
    "decoder scanned": LATER | {"embedding scaled"},
    "decoder bfloat16": LATER | {"norm epsilon", "mean in the norm", "gelu"},
}
# Rounding decides a gradient of these: `ok` is strict.
UNDECIDED = {"decoder bfloat16"}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gru", *(pytest.param(n, marks=DEAR) for n in [*TABLE][1:])])
def test_a_right_port_is_silent_and_each_bug_is_named_at_its_module(name):
    run, loss, make = TABLE[name]
    bugs = models.BUGS[name.split()[0]]
    comparisons = models.compared(run, loss, make(models.numbers(run)), range(-1, len(bugs)))
    right = next(comparisons)
    assert {f.kind for f in right.findings} <= ({"not judged"} if name in UNDECIDED else set())
    assert right.ok is not bool(right.findings), str(right)
    assert len(right.rows) > 5 and not any(
        x.startswith("values only in t") for x in right.unmatched
    )
    missed = set()
    for (bug, module), wrong in zip(bugs.items(), comparisons, strict=True):
        assert not wrong.ok, bug
        kind, place = next(((f.kind, f.module or "") for f in wrong.findings), ("", "-"))
        last = place.split("/")[-1]
        if kind != "value" or not last.startswith(module) or bool(last) != bool(module):
            missed.add(bug)
    assert missed <= KNOWN.get(name, set()), missed


@pytest.mark.slow
def test_the_first_value_that_differs_is_named_also_where_it_enters_a_module():
    """A scope that only JAX has, calls in a loop beside a scan, and what is flattened."""
    bugs = models.BUGS["tagger"]
    args = models.tagger_args(models.tagger_numbers())
    comparisons = models.compared(models.tagger_run(), models.tagger, args, range(-1, len(bugs)))
    right = next(comparisons)
    assert right.ok, str(right)
    for (bug, module), wrong in zip(bugs.items(), comparisons, strict=True):
        kinds = ["argument", "value"] if module == "fc" else ["value"]
        assert [f.kind for f in wrong.findings] == kinds, (bug, str(wrong))
        assert (wrong.findings[-1].module or "").split("/")[-1] == module, (bug, str(wrong))


@pytest.mark.slow
def test_of_another_framework_the_name_alone_is_known():
    run = dataclasses.replace(models.tagger_run(), framework="another framework")
    number = [*models.BUGS["tagger"]].index("epsilon")
    args = models.tagger_args(models.tagger_numbers())
    right, wrong = models.compared(run, models.tagger, args, (-1, number))
    assert right.ok and "in another framework it leaves" in wrong.message, str(wrong)


def gru_pair():
    args = models.gru_args(models.numbers("gru"))
    return models.FOLDER / "gru.npz", lambda p, x, y: models.gru(p, x, y, -1), args


@DEAR
def test_files_on_both_sides_and_in_both_orders(tmp_path):
    path, loss, args = gru_pair()
    cg.save_run(loss, args, tmp_path / "jax.npz")
    pairs = [(path, loss, args), (loss, path, args), (path, tmp_path / "jax.npz")]
    comparisons = [cg.compare(*pair) for pair in (*pairs, (tmp_path / "jax.npz", path))]
    assert all(each.ok for each in comparisons), str(comparisons[0])
    assert len({len(each.rows) for each in comparisons}) == 1
    assert cg.compare(path, path).ok  # two runs of torch have the same names
    with pytest.raises(ValueError, match="values are matched by their numbers"):
        cg.compare(loss, path, args, names={"cell": "gru"})
    with pytest.raises(ValueError, match="a run of torch and a whole step, expected a loss in JAX"):
        cg.compare(path, lambda *args: loss(*args), args, argnums=None)


@DEAR
def test_parameters_that_differ_are_named_first():
    path, loss, (params, x, y) = gru_pair()
    cell, head = params["cell"], params["head"]
    changes = {
        "cell/ir": {"cell": {**cell, "ir": cell["iz"] * 2}},
        "head/bias": {"head": {**head, "bias": head["bias"] * 2}},
        "head/kernel": {"head": {**head, "kernel": head["kernel"] * 1.1}},
    }
    for name, change in changes.items():
        comparison = cg.compare(path, loss, ({**params, **change}, x, y))
        assert [f.kind for f in comparison.findings[:2]] == ["argument", "value"], str(comparison)
        assert (
            comparison.findings[0].path == name
            and f"{name} is not" in comparison.findings[0].message
        )
    comparison = cg.compare(path, loss, (params, 2 * x, y))
    assert comparison.findings[0].path == "args[1]", str(comparison)


@DEAR
def test_a_layer_that_is_copied_twice_is_told_by_the_stack_of_its_list():
    """Layers under `nn.scan` beside a list of modules."""
    params, x, y = models.layers_args(models.numbers("layers"))
    layers = jax.tree.map(lambda w: w[:1].repeat(3, 0).at[2].set(w[2]), params["layers"])
    loss = lambda p, x, y: models.layers(p, x, y, -1)  # noqa: E731
    arguments = params | {"layers": layers}, x, y
    text = " ".join(str(cg.compare(models.FOLDER / "layers.npz", loss, arguments)).split())
    # Those arguments are told from which the first value that differs is made.
    assert "layers/norm/scale is not layers.*.norm.weight" in text, text
    assert "value: the values differ from here on: Net/layers" in text, text


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
    stored = models.numbers(run)
    params = {
        "conv1": {"kernel": stored["conv1.weight"].transpose(2, 3, 1, 0)},
        "conv2": {
            "kernel": stored["conv2.weight"].transpose(2, 3, 1, 0),
            "bias": stored["conv2.bias"],
        },
        "fc": {"kernel": stored["fc.weight"].T, "bias": stored["fc.bias"]},
    }
    stats = {}
    for name in ("bn1", "bn2"):
        params[name] = {"scale": stored[f"{name}.weight"], "bias": stored[f"{name}.bias"]}
        stats[name] = {"mean": stored[f"{name}.running_mean"], "var": stored[f"{name}.running_var"]}
    return params, stats, stored["args.0"].transpose(0, 2, 3, 1), stored["args.1"]


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
    comparison = cg.compare(
        models.FOLDER / f"{run}.npz", convolutions("train" in run, **changes), args
    )
    if module is None:
        # A bias before a normalization has no gradient but rounding.
        other_notes = [
            note for note in comparison.notes if not note.endswith("zero but for rounding")
        ]
        assert comparison.ok and not comparison.findings and not other_notes, str(comparison)
        assert not any("array" in text for text in comparison.unmatched), str(comparison)
    else:
        assert [(f.kind, f.module) for f in comparison.findings] == [("value", module)], str(
            comparison
        )
