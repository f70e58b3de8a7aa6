"""Where the gradient of a leaf that is exactly zero was cut."""

import dataclasses
import functools
import graphlib
import importlib
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.ad_checkpoint import checkpoint_name

import clipgrad as cg
from clipgrad._diagnose import causes, zeros
from clipgrad._diagnose.cut_facts import CutFacts
from clipgrad._diagnose.openings import OPENINGS
from clipgrad._programs import kinds
from tests.diagnose import zero_cuts
from tests.diagnose.cut_losses import CUTS as MORE_CUTS
from tests.diagnose.zero_cuts import CUTS, HEALTHY, NOTED, SILENT, X
from tests.helpers import array
from tests.rows import first_row, some_of, this_turn


def trained(p, x):
    return jnp.sum(p["w"] * x)


def diagnosed(programs):
    """One diagnosis of the sum of some programs, as users write them, and of one that trains."""
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        loss, params = zero_cuts.merged([*programs, (trained, {"w": X})])
        return cg.diagnose(loss, (params, array(X)))


def lines_and_notes(cut, diagnosis):
    """What a diagnosis has on the leaf of a cut: lines and causes of findings, lines of notes."""
    leaf = f"args[0]['{cut.name}']{cut.leaf}"
    findings = [(f.line, f.cause) for f in diagnosis.findings if leaf in f.leaf.split(", ")]
    notes = [note for note in diagnosis.notes if leaf in note]
    return findings, notes


ONE_OF_EACH_CAUSE = {cut.cause: cut for cut in reversed(CUTS)}.values()


@pytest.mark.parametrize("cut", some_of(CUTS, ONE_OF_EACH_CAUSE), ids=lambda cut: cut.name)
def test_a_cut_is_found_at_its_line_with_its_cause(cut):
    findings, notes = lines_and_notes(cut, diagnosed([(cut.function, cut.params)]))
    if cut.cause not in NOTED:
        assert findings == [(cut.line, cut.cause)]
        return
    assert not findings
    assert any(cut.line is None or f"zero_cuts.py:{cut.line}:" in note for note in notes)


@pytest.mark.slow
def test_cuts_of_frameworks_are_found_and_their_healthy_programs_are_silent():
    frameworks = importlib.import_module("tests.diagnose.zero_cuts_frameworks")
    diagnosis = diagnosed([(cut.function, cut.params) for cut in frameworks.CUTS])
    for cut in frameworks.CUTS:
        assert lines_and_notes(cut, diagnosis)[0] == [(cut.line, cut.cause)], cut.name
    assert diagnosed(frameworks.HEALTHY).ok


def test_each_cause_is_a_row_of_the_page_and_cuts_a_program():
    speaking = [cause for cause in causes.CAUSES if not cause.is_silent]
    assert NOTED == {cause.name for cause in speaking if cause.is_note} | {"unused"}
    page = (pathlib.Path(cg.__file__).parents[1] / "docs" / "zero.md").read_text()
    tables = [table.partition("\n\n")[0].splitlines()[2:] for table in page.split("| cause |")[1:]]
    findings, notes = ({n.strip() for row in t for n in row.split("|")[1].split(",")}
                       for t in tables)  # fmt: skip
    assert notes == NOTED
    assert findings == {cause.name for cause in speaking if not cause.is_note} | {"unused"}
    programs = {cut.cause for cut in CUTS} | {cause for _, cause, *_ in MORE_CUTS.values()}
    assert programs >= {cause.name for cause in speaking}, "write a program in zero_cuts.py"


def turned_around(causes):
    """The causes in another order that `precedes` allows: the last first, where it does."""
    *rows, last = causes
    graph = {row: [] for row in rows}
    for i, row in enumerate(rows):
        later = [other for other in rows[i:] if other.name in row.precedes]
        assert {other.name for other in later} == set(row.precedes), row.name
        for other in later:
            graph[other].append(row)
    order, sorter = [], graphlib.TopologicalSorter(graph)
    sorter.prepare()
    ready = list(sorter.get_ready())
    while ready:
        row = max(ready, key=rows.index)
        ready.remove(row)
        order.append(row)
        sorter.done(row)
        ready += sorter.get_ready()
    return (*order, last)


def later_causes(name):
    """The causes that those of a name precede, and that these precede in turn."""
    after = {n for row in causes.CAUSES if row.name == name for n in row.precedes}
    return after.union(*map(later_causes, after))


@pytest.mark.slow
def test_the_order_of_causes_is_what_they_say(monkeypatch):
    """Those that hold together say which of them comes first: no cut depends on the order else."""
    names = [cause.name for cause in causes.CAUSES]
    turned = turned_around(causes.CAUSES)
    assert sum(a.name != b for a, b in zip(turned, names, strict=True)) > len(names) / 2
    together = [(cut.function, cut.params) for cut in this_turn(CUTS)]
    unsaid, cause_of = set(), zeros.cause_of

    def watched(cut, traced, zero):
        facts = CutFacts(cut, traced, zero)
        first, *others = [row.name for row in causes.CAUSES if row.holds(facts)]
        said = {first, causes.CAUSES[-1].name} | later_causes(first)
        unsaid.update((first, other) for other in others if other not in said)
        return cause_of(cut, traced, zero)

    with monkeypatch.context() as patch:
        patch.setattr(zeros, "cause_of", watched)
        diagnosis = diagnosed(together)
    assert not unsaid, "the first of two causes that hold together does not precede the other"
    monkeypatch.setattr(causes, "CAUSES", turned)
    again = diagnosed(together)
    assert [(f.leaf, f.cause) for f in again.findings] == [
        (f.leaf, f.cause) for f in diagnosis.findings
    ]
    assert again.notes == diagnosis.notes


def test_each_kind_of_program_is_opened_or_stays_whole():
    whole = {kinds.LINEAR_SOLVES, kinds.WITH_FUNCTIONS, kinds.KERNELS}
    every = {kind for kind in vars(kinds).values() if isinstance(kind, kinds.Kind)}
    assert OPENINGS.keys() | whole == every and not OPENINGS.keys() & whole


@pytest.mark.slow
@pytest.mark.parametrize(("function", "params"), HEALTHY)
def test_healthy_programs_have_no_finding(function, params):
    diagnosis = diagnosed([(function, params)])
    assert diagnosis.ok, diagnosis


@pytest.mark.slow
@pytest.mark.parametrize(("function", "params"), SILENT)
def test_what_has_a_gradient_beside_the_cut_is_silent(function, params):
    assert diagnosed([(function, params)]).ok  # known limits


def named(name, function):
    def program(p, x):
        return function(p, x)

    program.__name__ = name
    return program


def over_a_batch(function):
    return lambda p, x: jnp.mean(jax.vmap(lambda x: function(p, x))(jnp.stack([x, 2 * x])))


def rearranged(w):
    return (2 * w).astype(w.dtype).swapaxes(0, 1).swapaxes(0, 1).reshape(*w.shape[:2], -1) / 2


WRAPPED = {
    "jit of checkpoint": lambda function: jax.jit(jax.checkpoint(function)),
    "jit of vmap": lambda function: jax.jit(over_a_batch(function)),
    "rearranged": lambda f: lambda p, x: f({"w": rearranged(p["w"]).reshape(p["w"].shape)}, x),
}


def layers_found(cut, wrapped="jit of checkpoint"):
    """A diagnosis of stacked layers inside of some transformations."""
    return diagnosed([(named(cut.name, WRAPPED[wrapped](cut.function)), cut.params)])


@pytest.mark.slow
@first_row
@pytest.mark.parametrize("cut", zero_cuts.LAYERS, ids=lambda cut: cut.name)
@pytest.mark.parametrize("wrapped", WRAPPED)
def test_layers_of_a_scan_without_a_gradient_are_named(cut, wrapped):
    diagnosis = layers_found(cut, wrapped)
    assert lines_and_notes(dataclasses.replace(cut, leaf="['w']"), diagnosis) == (
        [(cut.line, cut.cause)],
        [],
    )
    (finding,) = [f for f in diagnosis.findings if f"['{cut.name}']" in f.leaf]
    assert f"in layer {cut.leaf} of " in finding.message


@pytest.mark.slow
def test_messages_have_the_numbers_of_the_layers_that_are_cut():
    cuts = {cut.name: cut for cut in zero_cuts.LAYERS}
    message = lambda name: layers_found(cuts[name]).findings[0].message  # noqa: E731
    assert "all 4 elements of its input, -1.1 to -0.3;" in message("dead_layer_of_a_scan")
    assert "multiplied by a constant that is 0, at step 2" in message("dropped_layer")
    assert "at step" not in message("replaced_from_the_last")  # which are three


@pytest.mark.slow
@first_row
@pytest.mark.parametrize("cut", zero_cuts.NOTED_LAYERS, ids=lambda cut: cut.name)
def test_layers_that_may_be_meant_to_have_no_gradient_are_noted_at_most(cut):
    findings, notes = lines_and_notes(dataclasses.replace(cut, leaf="['w']"), layers_found(cut))
    assert not findings and len(notes) == bool(cut.leaf)
    assert all(f"in layer {cut.leaf} of 4" in note for note in notes)
    assert all(cut.cause in note for note in notes)


# -- In the run.

TINY = float(np.finfo(np.float32).tiny)


@pytest.mark.usefixtures("users_promotion")
def test_statistics_of_a_name_say_whether_its_cotangent_is_exactly_zero():
    cotangents = {"none": 0.0, "some": [0.0, 2.0], "tiny": TINY, "bad": [jnp.nan, 0.0], "empty": []}

    def loss(w):
        tagged = {name: checkpoint_name(w * jnp.ones(np.shape(c) or 2), name)
               for name, c in cotangents.items()}  # fmt: skip
        return sum(jnp.sum(tagged[name] * jnp.asarray(c)) for name, c in cotangents.items())

    _, _, stats = jax.jit(cg.value_and_grad_with_stats(loss))(1.0)
    zeros = {name: float(tagged.all_zero) for name, tagged in stats.items()}
    assert zeros == dict.fromkeys(cotangents, 0.0) | {"none": 1.0}
    narrow = cg.types.ClipStats.of(*[array([2.0**-24, 0], jnp.float16)] * 2)
    assert narrow.all_zero == 0 and cg.scalars({"h": stats["none"]})["h/all_zero"] == 1


def rounded_gate(params, x):
    return jnp.sum(jnp.round(params["gate"]) * x) + jnp.sum((params["w"] - x) ** 2)


GATED = {"gate": array(np.ones(4)), "w": array(np.zeros(4))}


def steps(optimizer, **options):
    step = cg.train_step(rounded_gate, cg.skip_spikes(optimizer, halt=True), **options)
    return step, step.init(GATED)


@pytest.mark.slow
@pytest.mark.usefixtures("users_promotion")
def test_metrics_name_the_leaves_that_are_exactly_zero_without_another_pass():
    by_leaf = cg.clip_by_global_norm(1.0, stats="per_leaf")
    step, state = steps(optax.chain(by_leaf, optax.sgd(0.1)), donate=False)
    _, metrics = step(state, jnp.asarray(X))
    assert {name: float(s.all_zero) for name, s in metrics["leaves"].items()} == {"gate": 1, "w": 0}

    def without(*args):
        after, metrics = step.update(*args)
        return after, {name: value for name, value in metrics.items() if name != "leaves"}

    both = step.update, jax.jit(without)
    programs = [f.lower(state, jnp.asarray(X)).compile().as_text() for f in both]
    kernels = [text.count(" reduce(") + text.count("custom-call") for text in programs]
    assert kernels[0] == kernels[1] and "callback" not in programs[0]
    plain, state = steps(optax.sgd(0.1))
    assert "leaves" not in plain(state, jnp.asarray(X))[1]


# -- Programs of other tests.


def transformer():
    models = importlib.import_module("tests.compare.compare_models")
    return models.model(scan=False), models.make_args()


def model_of_a_test(name):
    module = importlib.import_module("tests.per_example.test_per_example_models")
    loss, params, batch = module.MODELS[name][0]()
    return loss, (params, jax.tree.map(lambda x: x[0], batch))


MODELS = ["wmt", "scanned layers", "resnet", "nnx transformer", "equinox recurrent"]


@pytest.mark.slow
@pytest.mark.usefixtures("users_promotion")
@pytest.mark.parametrize(
    "make",
    [transformer]
    + [pytest.param(functools.partial(model_of_a_test, name), id=name) for name in MODELS],
)
def test_programs_of_other_tests_have_no_finding(make):
    assert cg.diagnose(*make()).ok
