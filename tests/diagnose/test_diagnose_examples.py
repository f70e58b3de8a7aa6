"""diagnose(examples=...): which examples of a batch are bad, and where they are."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import clipgrad as cg
from tests.helpers import array
from tests.rows import first_row, some_of

W = {"w": array([1.0, 2.0])}


def roots(params, batch):
    return jnp.mean(jnp.sqrt(batch["x"] @ params["w"]) * batch["scale"])


def batch(size=8, **changes):
    x, scale = np.ones((size, 2), np.float32), np.ones(size, np.float32)
    for index, value in changes.get("x", {}).items():
        x[index] = value
    for index, value in changes.get("scale", {}).items():
        scale[index] = value
    return {"x": x, "scale": scale}


@pytest.mark.parametrize("which", some_of(["batch", 1, -2], [-2]))
def test_the_bad_examples_are_named_and_no_others(which):
    bad_batch = batch(x={2: 0, 5: -1}, scale={7: 1e3, 6: 50})
    times = lambda params, batch, factor: factor * roots(params, batch)  # noqa: E731
    diagnosis = cg.diagnose(times, (W, bad_batch, 1.0), examples=which)
    assert [example.index for example in diagnosis.examples] == [2, 5, 7]


@pytest.mark.slow
def test_of_a_bad_example_its_loss_and_its_norm_are_told():
    bad_batch = batch(x={2: 0, 5: -1}, scale={7: 1e3, 6: 50})
    diagnosis = cg.diagnose(roots, (W, bad_batch), examples="batch")
    vanishing, negative, far = diagnosis.examples
    assert vanishing.loss == 0 and not np.isfinite(vanishing.norm)
    assert np.isnan(negative.loss) and negative.device == ""
    gradient_alone = jax.grad(roots)(W, jax.tree.map(lambda x: x[7:], bad_batch))["w"]
    np.testing.assert_allclose(far.norm, np.linalg.norm(gradient_alone), rtol=1e-5)
    assert "example 7: its loss is 1.73e+03, the norm of its gradient" in str(diagnosis)
    assert cg.diagnose(roots, (W, batch()), examples="batch").examples == ()
    named = cg.diagnose(roots, (W,), {"batch": bad_batch}, examples="batch")
    assert [example.index for example in named.examples] == [2, 5, 7]


@pytest.mark.slow
@first_row
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_the_device_of_an_example_is_named(kind):
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(kind, kind))
    bad_batch = jax.device_put(batch(x={5: -1}), NamedSharding(mesh, P("data")))
    params = jax.device_put(W, NamedSharding(mesh, P()))
    (bad,) = cg.diagnose(roots, (params, bad_batch), examples="batch").examples
    assert bad.index == 5 and bad.device == "data=2"


@pytest.mark.slow
def test_a_loss_that_needs_whole_batches_gets_copies_of_one_example():
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))

    def part(w, x):
        return jax.lax.pmean(jnp.mean(jnp.log(x @ w)), "x")

    mapped = jax.shard_map(part, mesh=mesh, in_specs=(P(), P("x")), out_specs=P())
    x = batch(x={3: 0})["x"]
    diagnosis = cg.diagnose(lambda w, x: mapped(w, x), (W["w"], x), examples="x")
    (bad,) = diagnosis.examples
    assert bad.index == 3 and np.isneginf(bad.loss)


@pytest.mark.parametrize("args, which, match", [
    ((W, batch()), "bach", "examples: got 'bach', expected the name or the position .*batch"),
    ((W, batch()), 2, "examples: got 2, expected the name"),
    ((W, {"x": np.ones((8, 2), np.float32), "scale": array(1.0)}), 1,
     r"examples: got \(\), \(8, 2\) in args\[1\], expected one leading axis for all"),
  ((W, batch(), np.ones(7)), (1, 2),
   r"examples: got \(8,\), \(8, 2\) in args\[1\] and \(7,\) in args\[2\], expected one leading"),
  ((W, batch()), (), "examples: got no argument, expected"),
])  # fmt: skip
def test_what_is_no_batch_is_refused(args, which, match):
    with pytest.raises(ValueError, match=match):
        cg.diagnose(lambda params, batch, *_: roots(params, batch), args, examples=which)


def squares(params, x, y):
    return jnp.mean((x @ params["w"] - y) ** 2)


def weighted(params, batch, y, classes):
    """The labels choose weights of classes, of which there may be as many as examples."""
    picked = classes[batch["ids"]]
    return jnp.mean(picked * (batch["x"] @ params["w"] - y) ** 2)


def inputs(size, dtype=np.float32, **bad):
    x, y = np.ones((size, 2), dtype), np.full(size, 2, dtype)
    y[bad.get("wrong", 1)] += 1000 if "wrong" in bad else 0
    y[bad.get("label", 1)] += np.nan if "label" in bad else 0
    return x, y


@first_row
@pytest.mark.parametrize("size, dtype", [(2, np.float32), (5, jnp.bfloat16), (8, np.float32)])
def test_labels_beside_the_batch_are_cut_with_it(size, dtype):
    params = {"w": array([1.0, 0.5], dtype)}
    loss = jax.jit(squares) if size == 5 else squares
    for bad in ({"label": size - 1}, {"wrong": size - 1}) if size > 2 else ({"label": 1},):
        x, y = inputs(size, dtype, **bad)
        diagnosis = cg.diagnose(loss, (params, x, y), examples=[1, "y"])
        assert [example.index for example in diagnosis.examples] == [size - 1], bad


def test_labels_by_keyword_and_keys_are_cut_with_the_batch():
    def noisy(params, x, *, y, keys):
        noise = jax.vmap(lambda key: jax.random.normal(key, ()))(keys)
        return squares(params, x, y) + 0 * jnp.mean(noise * y)

    x, y = inputs(8, label=3)
    named = {"y": y, "keys": jax.random.split(jax.random.key(0), 8)}
    diagnosis = cg.diagnose(noisy, (W, x), named, examples=("x", "y", "keys"))
    assert [example.index for example in diagnosis.examples] == [3]


@pytest.mark.slow
def test_an_argument_with_as_many_rows_that_is_not_named_stays_whole():
    x, y = inputs(4, label=2)
    inputs_with_ids = {"x": x, "ids": np.array([0, 3, 1, 2])}
    args = (W, inputs_with_ids, y, np.ones(4, np.float32))
    diagnosis = cg.diagnose(weighted, args, examples=("batch", "y"))
    assert [example.index for example in diagnosis.examples] == [2]


def test_it_is_said_that_all_arguments_of_an_example_are_to_be_named():
    x, y = inputs(4, label=2)
    wanted = r"examples: got 'x', but args\[2\] has 4 rows too"
    with pytest.raises(ValueError, match=wanted):
        cg.diagnose(squares, (W, x, y), examples="x")


def hinge(w, x):
    return jnp.mean(jnp.maximum(x @ w, 0))


@pytest.mark.parametrize("far", [False, True])
def test_examples_without_a_gradient_are_no_measure_of_the_others(far):
    x = -np.ones((8, 2), np.float32)
    x[3:6] = 1e-6
    x[5] = 1.0 if far else 1e-6
    diagnosis = cg.diagnose(hinge, (array(np.ones(2)), x), examples="x")
    assert [example.index for example in diagnosis.examples] == [5] * far


def test_examples_that_are_bad_alike_are_one_line():
    many = {0: -1, **{i: -1 for i in range(1, 8)}}
    text = str(cg.diagnose(roots, (W, batch(x=many)), examples="batch"))
    assert "examples 0 to 7, each: its loss is nan, the norm of its gradient nan\n" in text
    assert text.count("its loss is nan") == 1
    apart = str(cg.diagnose(roots, (W, batch(x={i: -1 for i in (0, 2, 4, 6)})), examples="batch"))
    assert "examples 0, 2, 4 and 1 more, each: its loss is nan" in apart
    few = str(cg.diagnose(roots, (W, batch(x={1: -1, 2: -1})), examples="batch"))
    assert few.count("its loss is nan") == 2


@pytest.mark.parametrize(
    "examples, error, words",
    [
        ("bach", ValueError, "examples: got 'bach', expected the name or the position"),
        (7, ValueError, "examples: got 7, expected the name or the position"),
        (
            None.__class__,
            TypeError,
            "examples: got <class 'NoneType'>, expected the name or the pos",
        ),
        ([1.5], TypeError, r"examples: got \[1.5\], expected the name or the position"),
    ],
)
def test_wrong_examples_are_told_before_the_loss_is_called(examples, error, words):
    calls = []

    def counted(params, batch):
        calls.append(1)
        return roots(params, batch)

    with pytest.raises(error, match=words):
        cg.diagnose(counted, (W, batch()), examples=examples)
    assert not calls


@pytest.mark.slow
def test_examples_of_an_accumulated_step_are_those_of_the_batch(tmp_path):
    step = cg.train_step(roots, cg.skip_spikes(optax.sgd(0.1), halt=True), accumulate=4)
    bad_batch = batch(x={5: -1})
    state, _ = step(step.init(W), bad_batch)
    with cg.FlightRecorder(tmp_path, raise_on_halt=False) as recorder:
        recorder.record(state, bad_batch)
    diagnosis = cg.diagnose(roots, cg.load_capture(recorder.captures[0]).args, examples="batch")
    assert [example.index for example in diagnosis.examples] == [5]
