"""A leaf has one name and one path, whatever function speaks of it and whatever holds it."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import clipgrad as cg
from clipgrad._arrays import leaf_names, leaf_paths
from tests.helpers import array
from tests.rows import each_value, first_rows

UP = np.array([0.5, 2.0, 3.0], np.float32)
X = array([1, 2, 3])


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Network:
    blocks: list


def blocks():
    return [{"up": array(UP + 1)}, {"up": array(UP)}]


def in_nnx():
    nnx = pytest.importorskip("flax.nnx")

    class Block(nnx.Module):
        def __init__(self, up):
            self.up = nnx.Param(array(up))

    class Model(nnx.Module):
        def __init__(self):
            self.blocks = nnx.List([Block(UP + 1), Block(UP)])

    return Model(), lambda model: model.blocks[1].up[...]


def in_equinox():
    eqx = pytest.importorskip("equinox")

    class Block(eqx.Module):
        up: jax.Array

    class Model(eqx.Module):
        blocks: list

    return Model([Block(array(UP + 1)), Block(array(UP))]), lambda m: m.blocks[1].up


def in_flax():
    nn = pytest.importorskip("flax.linen")

    class Model(nn.Module):
        @nn.compact
        def __call__(self):
            box = nn.with_partitioning(lambda key: array(UP), ("embed",))
            return nn.meta.unbox(self.param("up", box))

    model = Model()
    return model.init(jax.random.key(0)), model.apply


# What holds the leaf, with how a loss reads it; its name in Python, and its path.
HOLDERS = {
    "dictionary": (lambda: ({"blocks": blocks()}, lambda p: p["blocks"][1]["up"]),
                   "args[0]['blocks'][1]['up']", "blocks/1/up"),
    "list": (lambda: (blocks(), lambda p: p[1]["up"]), "args[0][1]['up']", "1/up"),
    "dataclass": (lambda: (Network(blocks()), lambda p: p.blocks[1]["up"]),
                  "args[0].blocks[1]['up']", "blocks/1/up"),
    "nnx": (in_nnx, "args[0].blocks[1].up", "blocks/1/up"),
    "equinox": (in_equinox, "args[0].blocks[1].up", "blocks/1/up"),
    "flax": (in_flax, "args[0]['params']['up']", "params/up"),
}  # fmt: skip


@jax.custom_vjp
def twice(x):
    return 2 * x


twice.defvjp(lambda x: (2 * x, None), lambda _, g: (3 * g,))


def of_diagnosis(params, read):
    diagnosis = cg.diagnose(lambda p, x: jnp.sum(jax.lax.floor(read(p)) * x), (params, X))
    assert diagnosis.findings[0].leaf in diagnosis.message
    return {diagnosis.findings[0].leaf}


def of_bad_argument(params, read):
    bad = jax.tree.map(lambda x: x * np.nan if np.all(np.asarray(x) == UP) else x, params)
    diagnosis = cg.diagnose(lambda p, x: jnp.sum(read(p) * x), (bad, X))
    return set(re.findall(r"elements of (\S+) are not finite", diagnosis.message))


def of_check(params, read):
    with pytest.raises(cg.GradCheckError) as error:
        cg.check_grads(lambda p: twice(read(p)), (params,))
    return {re.sub(r"\[\d\]$", "", error.value.report.failures[0].where)}


def of_comparison(params, read):
    def loss(double):
        return lambda p, x: jnp.sum(double(read(p)) * x)

    finding = cg.compare(loss(lambda x: 2 * x), loss(twice), (params, X)).findings[0]
    assert f"the gradient of {finding.path} differs" in finding.message
    return {finding.path}


def of_plan(params, read):
    clip = cg.clip_per_example(lambda p, x: jnp.sum(read(p) * x), cg.ClipByGlobalNorm(1.0))
    rows = clip.plan(params, array(np.ones((2, 3)))).leaves
    return {row.path for row in rows} - {"blocks/0/up", "0/up"}


def of_error_of_examples(params, read):
    clip = cg.clip_per_example(
        lambda p, x: jnp.sum(read(p) * x), cg.ClipByGlobalNorm(1.0), nonfinite="error"
    )
    with pytest.raises(FloatingPointError) as error:
        clip(params, array(np.full((2, 3), np.nan)))
    return set(re.findall(r"NaN or inf in '([^']+)'", str(error.value)))


def of_capture(params, read, tmp_path):
    pytest.importorskip("orbax.checkpoint")
    recorder = cg.FlightRecorder(tmp_path, raise_on_halt=False)
    recorder.record(0, X, params=params, bad=True)
    recorder.close()
    capture = cg.load_capture(recorder.captures[0])
    return {path for path in leaf_paths(capture.params) if not path.startswith(("0", "blocks/0"))}


def of_clip(params, read):
    with pytest.raises(ValueError, match="where") as error:
        cg.clip_by_norm(1.0, where="nothing").init(params)
    return set(re.findall(r"'([^']+/up)'", str(error.value))) - {"blocks/0/up", "0/up"}


NAMED = {"diagnosis": of_diagnosis, "bad argument": of_bad_argument, "check": of_check}
WITH_PATHS = {
    "comparison": of_comparison, "plan": of_plan, "examples": of_error_of_examples,
    "capture": of_capture, "clip": of_clip,
}  # fmt: skip


@each_value
@pytest.mark.parametrize("speaker", [*NAMED, *WITH_PATHS])
@pytest.mark.parametrize("holder", HOLDERS)
def test_a_leaf_has_one_name_and_one_path(holder, speaker, request):
    make, name, path = HOLDERS[holder]
    more = [request.getfixturevalue("tmp_path")] if speaker == "capture" else []
    spelled = (NAMED | WITH_PATHS)[speaker](*make(), *more)
    assert spelled == {name if speaker in NAMED else path}


@first_rows(3)
@pytest.mark.parametrize("holder", HOLDERS)
def test_names_and_paths_are_those_of_all_functions(holder):
    make, name, path = HOLDERS[holder]
    params, _ = make()
    assert leaf_names("args", (params,))[-1] == name
    assert leaf_paths(params)[-1] == path
    assert cg.check_grads(lambda p: make()[1](p), (params,), wrt=name).ok
