"""What `compare` and `save_run` can't be called with is refused before anything is traced."""

import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import clipgrad as cg
from clipgrad._compare.result import _COMPARISON_HEADS, ComparisonFinding
from tests.helpers import array

DOCS = pathlib.Path(__file__).parents[2] / "docs"
TORCH_RUN = pathlib.Path(__file__).parent / "torch_runs" / "mlp.npz"
ARGS = array(np.ones((3, 2))), array(np.ones((4, 3)))
TRACES = []


def loss(w, x):
    TRACES.append("fun")
    return jnp.mean(jnp.tanh(x @ w) ** 2)


def other(w, x):
    TRACES.append("other")
    return loss(w, x)


def of_three(w, x, y):
    return loss(w, x) + y


def compare(*versions, args=ARGS, **options):
    return lambda folder: cg.compare(
        *(folder / v if isinstance(v, str) and v.endswith(".npz") else v for v in versions),
        args,
        **options,
    )


def save(path, **options):
    return lambda folder: cg.save_run(loss, ARGS, folder / path, **options)


CALLS = {
    "no file": (compare(loss, "x.npz"), ValueError, "x.npz', no such file"),
    "no first file": (compare("x.npz", loss), ValueError, "x.npz', no such file"),
    "an empty file": (compare(loss, "empty.npz"), ValueError, "an empty file"),
    "no archive": (compare(loss, "text.npz"), ValueError, "no whole .npz file"),
    "another archive": (compare(loss, "numpy.npz"), ValueError, "an archive of something else"),
    "a narrower dtype": (compare(loss, "float16"), ValueError, "the name of a wider dtype"),
    "a dtype itself": (compare(loss, jnp.float32), TypeError, 'write "float32"'),
    "a number": (compare(loss, 3), TypeError, "expected a function of the same arguments"),
    "another order": (compare(ARGS, loss, args=other), TypeError, "compare.fun, other, args."),
    "a dtype of a step": (compare(loss, "float32", argnums=None), ValueError, "got None with"),
    "a dtype and names": (compare(loss, "float32", names={"a": "b"}), ValueError, "both runs are"),
    "a list": (compare(loss, other, args=[*ARGS]), TypeError, "args: got list"),
    "no arguments": (compare(loss, other, args=None), TypeError, "args"),
    "too few": (compare(loss, of_three), TypeError, r"write \(w, x, y\)"),
    "other arguments, a list": (
        compare(loss, other, other_args=[*ARGS]), TypeError, "other_args: got list"
    ),
    "other arguments, too few": (
        compare(loss, other, other_args=ARGS[:1]), TypeError, "other_args: got 1"
    ),
    "a keyword": (compare(loss, other, kwargs={"z": 1}), TypeError, "'z'"),
    "argnums": (compare(loss, other, argnums="w"), ValueError, "argnums: got 'w', expected .all.,"),
    "a position": (compare(loss, other, argnums=(0, 5)), ValueError, "expected positions below 2"),
    "half a position": (compare(loss, other, argnums=0.5), ValueError, "argnums: got 0.5"),
    "aux of a step": (
        compare(loss, other, argnums=None, has_aux=True), ValueError, "has_aux: got True"
    ),
    "names": (compare(loss, other, names=["h"]), TypeError, "expected a mapping"),
    "rtol": (compare(loss, other, rtol="1e-3"), ValueError, "rtol: got '1e-3'"),
    "torch and a step": (compare(loss, TORCH_RUN, argnums=None), ValueError, "a whole step"),
    "torch and names": (
        compare(TORCH_RUN, loss, names={"a": "b"}), ValueError, "matched by their numbers"
    ),
    "arguments of two files": (
        compare(TORCH_RUN, TORCH_RUN), ValueError, "args: got arguments beside two runs"
    ),
    "to no folder": (save("there/x.npz"), ValueError, "expected one in a folder that exists"),
    "to save by argnums": (save("y.npz", argnums="w"), ValueError, "argnums: got 'w'"),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_nothing_is_traced_before_paths_and_types_are_checked(name, tmp_path):
    (tmp_path / "empty.npz").touch()
    (tmp_path / "text.npz").write_text("loss 3.4\n" * 9)
    np.savez(tmp_path / "numpy.npz", x=np.ones(3))
    call, error, text = CALLS[name]
    TRACES.clear()
    with pytest.raises(error, match=text):
        call(tmp_path)
    assert not TRACES


def test_the_other_version_may_take_other_arguments():
    options = {"other_args": (*ARGS, array(np.zeros(()))), "argnums": (0, 1), "rtol": 1e-3}
    assert cg.compare(loss, of_three, ARGS, **options).ok


NAMES = {"h": "missing"}, {"missing": "h"}, {"model.py:999": "model.py:1"}


def test_lines_are_names_beside_modules():
    named = lambda w, x: jnp.mean(jax.named_call(jnp.tanh, name="h")(x @ w) ** 2)  # noqa: E731
    line = named.__code__.co_firstlineno
    names = {f"test_compare_checks.py:{line}": f"test_compare_checks.py:{line}"}
    comparison = cg.compare(named, named, ARGS, names=names, rtol=1e-3)
    assert comparison.ok and {row.module for row in comparison.rows} >= {"h", *names}, str(
        comparison.rows
    )


@pytest.mark.parametrize("names", NAMES, ids=str)
def test_nothing_runs_before_names_are_checked(names, monkeypatch):
    from clipgrad._compare.recording import Recording

    monkeypatch.setattr(Recording, "run", lambda *_, **__: pytest.fail("it runs"))
    named = lambda w, x: jnp.mean(jax.named_call(jnp.tanh, name="h")(x @ w) ** 2)  # noqa: E731
    with pytest.raises(ValueError, match="names: got '(missing|model.py:999)'"):
        cg.compare(named, named, ARGS, names=names)


@pytest.mark.parametrize("result", ["a tree", "an array", "a loss and more"])
def test_a_step_without_argnums_is_told_what_to_write(result, tmp_path):
    step = {
        "a tree": lambda w, x: {"w": w * x.mean()},
        "an array": lambda w, x: w * x.mean(),
        "a loss and more": lambda w, x: (w * x.mean(), x.mean()),
    }[result]
    with pytest.raises(
        ValueError, match=r"got .* from it, expected .*; for a whole step, .*, write argnums=None"
    ):
        cg.compare(step, step, ARGS)
    with pytest.raises(ValueError, match="; for a whole step, .*, write argnums=None"):
        cg.save_run(step, ARGS, tmp_path / "x.npz")
    assert cg.compare(step, step, ARGS, argnums=None, rtol=1e-3).ok


@pytest.mark.parametrize("kind", _COMPARISON_HEADS)
def test_each_kind_of_finding_is_in_the_docstring_and_on_a_page(kind):
    pages = [(DOCS / f"{name}.md").read_text() for name in ("two_versions", "bfloat16")]
    for text in (ComparisonFinding.__doc__ or "", "".join(pages)):
        assert f'"{kind}"' in text
