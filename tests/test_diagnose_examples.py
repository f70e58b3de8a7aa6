"""diagnose(examples=...): which examples of a batch are bad, and where they are."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import clipgrad as cg

W = {"w": jnp.array([1.0, 2.0])}


def roots(params, batch):
    return jnp.mean(jnp.sqrt(batch["x"] @ params["w"]) * batch["scale"])


def batch(size=8, **changes):
    x, scale = np.ones((size, 2), np.float32), np.ones(size, np.float32)
    for index, value in changes.get("x", {}).items():
        x[index] = value
    for index, value in changes.get("scale", {}).items():
        scale[index] = value
    return {"x": x, "scale": scale}


def test_the_bad_examples_are_named_and_no_others():
    given = batch(x={2: 0, 5: -1}, scale={7: 1e3, 6: 50})
    for which in ("batch", 1, -1):
        found = cg.diagnose(roots, (W, given), examples=which)
        assert [example.index for example in found.examples] == [2, 5, 7]
    vanishing, negative, far = found.examples
    assert vanishing.loss == 0 and not np.isfinite(vanishing.norm)
    assert np.isnan(negative.loss) and negative.device == ""
    own = jax.grad(roots)(W, jax.tree.map(lambda x: x[7:], given))["w"]
    np.testing.assert_allclose(far.norm, np.linalg.norm(own), rtol=1e-5)
    assert "example 7: its loss is 1.73e+03, the norm of its gradient" in str(found)
    assert cg.diagnose(roots, (W, batch()), examples="batch").examples == ()
    named = cg.diagnose(roots, (W,), {"batch": given}, examples="batch")
    assert [example.index for example in named.examples] == [2, 5, 7]


@pytest.mark.kinds()
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_the_device_of_an_example_is_named(kind):
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(kind, kind))
    given = jax.device_put(batch(x={5: -1}), NamedSharding(mesh, P("data")))
    params = jax.device_put(W, NamedSharding(mesh, P()))
    (bad,) = cg.diagnose(roots, (params, given), examples="batch").examples
    assert bad.index == 5 and bad.device == "data=2"


@pytest.mark.exhaustive
def test_a_loss_that_needs_whole_batches_gets_copies_of_one_example():
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))

    def part(w, x):
        return jax.lax.pmean(jnp.mean(jnp.log(x @ w)), "x")

    mapped = jax.shard_map(part, mesh=mesh, in_specs=(P(), P("x")), out_specs=P())
    x = batch(x={3: 0})["x"]
    found = cg.diagnose(lambda w, x: mapped(w, x), (W["w"], x), examples="x")
    (bad,) = found.examples
    assert bad.index == 3 and np.isneginf(bad.loss)


@pytest.mark.parametrize("args, which, match", [
    ((W, batch()), "bach", "examples: got 'bach', expected the name or the position .*batch"),
    ((W, batch()), 2, "examples: got 2, expected the name"),
    ((W, {"x": np.ones((8, 2), np.float32), "scale": jnp.float32(1.0)}), 1,
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


@pytest.mark.parametrize("size, dtype", [(2, np.float32), (5, jnp.bfloat16), (8, np.float32)])
def test_labels_beside_the_batch_are_cut_with_it(size, dtype):
    params = {"w": jnp.array([1.0, 0.5], dtype)}
    loss = jax.jit(squares) if size == 5 else squares
    for bad in ({"label": size - 1}, {"wrong": size - 1}) if size > 2 else ({"label": 1},):
        x, y = inputs(size, dtype, **bad)
        for which in ("x", "y", [1, "y"]):
            found = cg.diagnose(loss, (params, x, y), examples=which)
            assert [example.index for example in found.examples] == [size - 1], (bad, which)
            other = [note for note in found.notes if "has the axis of the batch too" in note]
            assert len(other) == isinstance(which, str | int)


def test_labels_by_keyword_and_keys_are_cut_with_the_batch():
    def noisy(params, x, *, y, keys):
        noise = jax.vmap(lambda key: jax.random.normal(key, ()))(keys)
        return squares(params, x, y) + 0 * jnp.mean(noise * y)

    x, y = inputs(8, label=3)
    named = {"y": y, "keys": jax.random.split(jax.random.key(0), 8)}
    found = cg.diagnose(noisy, (W, x), named, examples="x")
    assert [example.index for example in found.examples] == [3]
    assert [note.split()[1] for note in found.notes] == ["kwargs['y']", "kwargs['keys']"]


def test_an_argument_with_as_many_rows_that_is_no_part_of_the_examples_stays_whole():
    x, y = inputs(4, label=2)
    given = {"x": x, "ids": np.array([0, 3, 1, 2])}
    found = cg.diagnose(weighted, (W, given, y, np.ones(4, np.float32)), examples="batch")
    assert [example.index for example in found.examples] == [2]
    assert found.notes[0] == "examples: args[2] has the axis of the batch too"
    assert found.notes[1].startswith("examples: args[3] has 4 rows too, but was left whole")
    more = cg.diagnose(weighted, (W, given, y, np.ones(5, np.float32)), examples="batch")
    assert [example.index for example in more.examples] == [2] and len(more.notes) == 1


def test_it_is_said_where_the_arguments_of_an_example_are_not_clear():
    x, y = inputs(4, label=2)
    closed = "examples: got 'x', but the loss does not take 8 examples there .* closes over"
    with pytest.raises(ValueError, match=closed):
        cg.diagnose(lambda params, x: squares(params, x, y), (W, x), examples="x")
    found = cg.diagnose(
        lambda params, x, y: squares(params, x.reshape(4, 2), y), (W, x, y), examples=("x", "y")
    )  # a size that is written into the loss
    assert [example.index for example in found.examples] == [2]
