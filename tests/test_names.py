"""What `list_names` and `clipgrad names` say; what the names are is in test_modules.py."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name

import clipgrad as cg
from clipgrad._commands import cli

X = jnp.ones((2, 3))


def model(x, scale=1.0):
    def layer(h, _):
        with jax.named_scope("layer"):
            h = jnp.tanh(checkpoint_name(h, "inside"))
        return h, None

    with jax.named_scope("encoder"):
        h = lax.scan(layer, x, None, length=4)[0]
        wide = jnp.concatenate([h, h]).astype(jnp.bfloat16)
    with jax.named_scope("index"):
        index = jnp.argmax(h)
    return (wide * scale).sum() + h.ravel()[index].astype(jnp.bfloat16)


TABLE = """\
name           kind    shape  dtype     scans  sites  cotangent
inside         tag     2 x 3  float32   4      1      yes
encoder/layer  module  2 x 3  float32   4      1      yes
encoder        module  4 x 3  bfloat16         2      yes"""


def test_the_table_has_the_largest_of_the_variables_of_a_name():
    shape = jax.ShapeDtypeStruct(X.shape, X.dtype)  # which is enough: nothing is run
    assert str(cg.list_names(model, (shape,))) == TABLE
    assert cg.list_names(jnp.sin, (X,)) == ()


def test_what_nothing_uses_does_not_count_beside_values_of_its_name_that_something_uses():
    def module(x):
        with jax.named_scope("net"):
            return jnp.sin(x)

    def scanned(x):
        module(jnp.concatenate([x, x]))
        return lax.scan(lambda h, _: (module(h), None), x, None, length=3)[0]

    def looped(x):
        module(jnp.concatenate([x, x]))
        return lax.while_loop(lambda h: h[0, 0] > 0.5, module, x)

    (name,) = cg.list_names(looped, (X,))
    assert (name.shape, name.sites, name.cotangent) == (X.shape, 1, False)
    stats = cg.with_value_stats(scanned, watch=["net"])(X)[1]["net"]
    np.testing.assert_array_equal(stats.size, [X.size] * 3)


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ((3, (X,)), "fun: got int, expected a function"),
        ((model, X), r"args: got float32\[2, 3\], expected a tuple; for one argument write \(x,\)"),
        ((model, [X]), r"args: got list, expected a tuple"),
        ((model, (X,), [2.0]), r"args: got the arguments of fun one by one.*; write \(x, scale\)"),
    ],
    ids=lambda value: str(type(value).__name__),
)
def test_wrong_arguments_are_refused(arguments, match):
    with pytest.raises(TypeError, match=match):
        cg.list_names(*arguments)


MODULE = """
import jax, jax.numpy as jnp

def loss(x):
    with jax.named_scope("net"):
        y = jnp.sin(x)
    return y.sum()

def make():
    return (jnp.ones(3),)

def nothing(x):
    return x.sum()

def raises(x):
    raise ValueError("not like this")
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "named_here.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.parametrize("args", ["named_here:make", "f32[3]"])
def test_the_command_prints_the_table(folder, capsys, args):
    assert cli.main(["names", "named_here:loss", "--args", args]) == 0
    row = capsys.readouterr().out.splitlines()[1].split()
    assert row == ["net", "module", "3", "float32", "1", "yes"]


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["named_here:nothing", "--args", "f32[3]"], "got a function without tags or modules; tag"),
        (["named_here:raises", "--args", "f32[3]"], "named_here:raises raises ValueError: not lik"),
        (["named_here:lose", "--args", "f32[3]"], "has no 'lose'; the nearest are ['loss'"),
        (["named_here:loss"], "; write clipgrad names named_here:loss --args"),
    ],
)
def test_what_cannot_be_listed_exits_with_two_and_one_line(folder, capsys, words, line):
    assert cli.main(["names", *words]) == 2
    shown = capsys.readouterr()
    assert shown.err.startswith("clipgrad names: ") and line in shown.err
    assert shown.err.count("\n") == 1 and not shown.out
