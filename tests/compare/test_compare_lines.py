"""Versions in which nothing has a name: the line where they differ, marked with `# here`."""

import importlib.util
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import clipgrad as cg

HEAD = """
import jax, jax.numpy as jnp
from jax import lax
"""
# One file, of which each line with `if bug` may be another in the second version.
SHARED = (
    HEAD
    + """
@jax.custom_vjp
def wrong_tanh(x):
    return jnp.tanh(x)

wrong_tanh.defvjp(lambda x: (jnp.tanh(x), x), lambda x, g: (g * (1 - jnp.tanh(x)),))

def layer(w, x, bug):
    h = x @ w
    h = {act}
    {after}
    return x + h

def loss(ws, x, bug=False, scanned=False):
    if scanned:
        x, _ = lax.scan(lambda x, w: (layer(w, x, bug), None), x, ws)
    else:
        for i in range(3):
            x = layer(ws[i], x, bug and i == 1)
    y = {norm}
    return jnp.mean(y * y)
"""
)
PARTS = {"act": "jnp.tanh(h)", "after": "pass", "norm": "x - jnp.mean(x, -1, keepdims=True)"}
CHANGES = {
    "another function": {"act": "jnp.sin(h) if bug else jnp.tanh(h)  # here"},
    "a factor": {"after": "h = h * 1.01 if bug else h  # here"},
    "a cast": {"after": "h = h.astype(jnp.float16).astype(h.dtype) if bug else h  # here"},
    "a mask": {"after": "h = jnp.where(h > 0.9, 0, h) if bug else h  # here"},
    "a stop_gradient": {"after": "h = lax.stop_gradient(h) if bug else h  # here"},
    "a wrong rule": {"act": "wrong_tanh(h) if bug else jnp.tanh(h)  # here"},
}
# A rewrite of the loss above, in other lines.
REWRITTEN = (
    HEAD
    + """
def loss(ws, x):
    x = x.T
    for w in ws:
        pre = w.T @ x
        x = {add}
    center = x - x.sum(0, keepdims=True) / x.shape[0]
    return jnp.sum(center ** 2) / {count}
"""
)
REWRITES = {
    "its sum": ({"add": "x + lax.tanh(pre)", "count": "2  # here"}, "return jnp.mean"),
    "its step": ({"add": "x + 0.99 * lax.tanh(pre)  # here", "count": "x.size"}, "h = jnp.tanh(h)"),
}
DEFAULT = "a factor", "a wrong rule", "its step"


def loss_of(text, name, folder):
    """The loss of a file, and the lines that are marked."""
    path = folder / f"{name}.py"
    path.write_text(text)
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    marked = [i for i, line in enumerate(text.splitlines(), 1) if line.endswith("# here")]
    return module.loss, marked


def arguments(dtype=np.float32):
    keys = jax.random.split(jax.random.key(3))
    ws, x = jax.random.normal(keys[0], (3, 4, 4)) / 2, jax.random.normal(keys[1], (5, 4))
    return ws.astype(dtype), x.astype(dtype)


def buggy(loss, scanned=False):
    return lambda ws, x: loss(ws, x, True, scanned)


def slow(cases):
    marks = lambda name: [pytest.mark.slow] * (name not in DEFAULT)  # noqa: E731
    return [pytest.param(name, marks=marks(name)) for name in cases]


@pytest.mark.slow
@pytest.mark.parametrize("change", slow(CHANGES))
@pytest.mark.parametrize("scanned", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_line_of_shared_code_that_differs_is_told(change, scanned, tmp_path):
    loss, lines = loss_of(SHARED.format(**PARTS | CHANGES[change]), "model", tmp_path)
    comparison = cg.compare(
        lambda ws, x: loss(ws, x, False, scanned), buggy(loss, scanned), arguments()
    )
    finding = comparison.findings[0]
    assert (finding.file, [finding.line]) == (str(tmp_path / "model.py"), lines)
    is_backward = change in ("a stop_gradient", "a wrong rule")
    assert finding.kind == ("vjp" if is_backward else "value")
    if not (is_backward or scanned):
        assert "in layer, the second of 3 runs" in finding.message
    if change == "a factor":
        assert re.search(r"model.py:\d+, h in layer.*, only in other", finding.message)


@pytest.mark.slow
@pytest.mark.parametrize("change", slow(REWRITES))
def test_a_rewrite_is_the_same_up_to_a_line(change, tmp_path):
    parts, text = REWRITES[change]
    source = SHARED.format(**PARTS)
    loss, _ = loss_of(source, "model", tmp_path)
    other, (line,) = loss_of(REWRITTEN.format(**parts), "port", tmp_path)
    (finding,) = cg.compare(loss, other, arguments()).findings
    here = next(i for i, line in enumerate(source.splitlines(), 1) if text in line)
    assert finding.line == here and f"port.py:{line}" in finding.message
    assert re.search(r"the same up to model.py:\d+.* and port.py:\d+", finding.message)


EQUAL = {
    "another spelling": {"act": "1 - 2 / (jnp.exp(2 * h) + 1) if bug else jnp.tanh(h)"},
    "a line that does nothing": {"after": "h = h * 2 / 2 if bug else h"},
    "checkpoint": {"act": "jax.checkpoint(jnp.tanh)(h) if bug else jnp.tanh(h)"},
}


@pytest.mark.parametrize("change", [pytest.param(c, marks=pytest.mark.slow) for c in EQUAL])
@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
def test_equal_versions_have_no_finding(change, dtype, tmp_path):
    loss, _ = loss_of(SHARED.format(**PARTS | EQUAL[change]), "model", tmp_path)
    with jax.numpy_dtype_promotion("standard"):
        comparison = cg.compare(loss, buggy(loss, scanned=True), arguments(dtype))
    assert comparison.ok and not comparison.findings


@pytest.mark.slow
def test_what_a_scan_carries_has_a_line_or_none(tmp_path):
    source = (
        HEAD
        + """
def loss(w, xs, rule=lambda c: c):
    return lax.scan(lambda c, x: (jnp.tanh(rule(c) * w + x), None), xs[0], xs)[0].sum()
"""
    )
    loss, _ = loss_of(source, "model", tmp_path)
    rule = jax.custom_vjp(lambda c: c)
    rule.defvjp(lambda c: (c, None), lambda _, g: (1.1 * g,))
    args = np.full(3, 0.5, np.float32), arguments()[1][:, :3]
    finding = cg.compare(loss, lambda w, xs: loss(w, xs, rule), args).findings[0]
    assert (
        finding.kind == "vjp" and "  " not in finding.message and "; in fun" not in finding.message
    )


@pytest.mark.slow
def test_equal_rewrites_have_no_finding(tmp_path):
    loss, _ = loss_of(SHARED.format(**PARTS), "model", tmp_path)
    parts = {"add": "x + lax.tanh(pre)", "count": "x.size"}
    other, _ = loss_of(REWRITTEN.format(**parts), "port", tmp_path)
    assert cg.compare(loss, other, arguments()).ok


@pytest.mark.slow
def test_names_may_be_lines(tmp_path):
    loss, _ = loss_of(SHARED.format(**PARTS), "model", tmp_path)
    number = lambda text, file: next(  # noqa: E731
        i for i, line in enumerate((tmp_path / file).read_text().splitlines(), 1) if text in line
    )
    other, _ = loss_of(REWRITTEN.format(**REWRITES["its step"][0]), "port", tmp_path)
    missing = {"model.py:1": f"port.py:{number('pre =', 'port.py')}"}
    with pytest.raises(ValueError, match=r"got 'model.py:1', expected a line of fun"):
        cg.compare(loss, other, arguments(), names=missing)


@pytest.mark.slow
def test_a_file_knows_a_statement_whose_line_has_moved(tmp_path):
    before, _ = loss_of(SHARED.format(**PARTS), "before", tmp_path)
    cg.save_run(before, arguments(), tmp_path / "before.npz")
    text = "# a comment\n\n" + SHARED.format(**PARTS | {"after": "h = h * 1.01  # here"})
    after, (line,) = loss_of(text, "before", tmp_path)
    finding = cg.compare(tmp_path / "before.npz", after, arguments()).findings[0]
    assert finding.line == line and "only in other" in finding.message


WINDOWS = (
    HEAD
    + """
def loss(w, x):
    axes = ("NWC", "WIO", "NWC")
    y = lax.conv_general_dilated(x[None], w, (1,), "SAME", dimension_numbers=axes)[0]  # here
    y = jax.nn.relu(y)
    return jnp.mean(y ** 2)
"""
)
PRODUCTS = (
    HEAD
    + """
def loss(w, x):
    padded = jnp.pad(x, ((1, 1), (0, 0)))
    windows = jnp.stack([padded[i : i + x.shape[0]] for i in range(3)], 1)
    out = jnp.einsum("tkc,kco->to", windows, w[::-1])  # here
    return jnp.mean(jnp.maximum(out, 0) ** 2)
"""
)


@pytest.mark.slow
def test_a_line_that_ends_with_an_index_computes_and_one_that_pads_only_moves(tmp_path):
    loss, (line,) = loss_of(WINDOWS, "model", tmp_path)
    other, (other_line,) = loss_of(PRODUCTS, "port", tmp_path)
    args = arguments()[0][:, :, :3], arguments()[1]
    (finding,) = cg.compare(loss, other, args).findings
    assert finding.line == line and f"port.py:{other_line}" in finding.message
