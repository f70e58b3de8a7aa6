"""What a diagnosis says and refuses; the programs that it judges are in test_diagnose_zoo.py."""

import contextlib
import gc
import io
import re
import sys
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import clipgrad as cg
from clipgrad._demo import TASKS
from clipgrad._diagnose import advice
from tests.diagnose.diagnose_zoo import kinds
from tests.helpers import array
from tests.pages import DOCS, PROGRAM, rows

pytestmark = pytest.mark.usefixtures("users_promotion")


# Of each row of the table of docs/nan.md the finding, and a part of its advice.
SUSPECTS = {
    "jnp.sqrt(x)": ("vjp", "sqrt", "mask its input: with ok = x > 0"),
    "jnp.linalg.norm(jnp.stack([x, x]))": ("vjp", "sqrt", "use a safe norm"),
    "jnp.where(x > 0, jnp.log(x), 0.0)": ("vjp", "log", "even if jnp.where masks its result"),
    "x ** 0.3": ("vjp", "pow", "mask its input: with ok = x > 0"),
    "jnp.std(jnp.stack([x, x]))": ("vjp", "sqrt", "jnp.sqrt(jnp.var(x) + 1e-6)"),
    "jnp.log(jax.nn.softmax(jnp.stack([x, 0.0]))[0])": ("value", "log", "jax.nn.log_softmax"),
    "jax.nn.softmax(jnp.stack([x, -jnp.inf]))[0]": ("value", "sub", "select a finite mask"),
    "jax.nn.logsumexp(jnp.stack([x, x]))": ("value", "log", "select a finite mask"),
    "jnp.arccos(x)": ("vjp", "acos", "jnp.acos(jnp.clip(x, "),
    "jnp.arccosh(x)": ("vjp", "acosh", "jnp.acosh(jnp.maximum(x, "),
    "jnp.where(x < 80, jnp.exp(x), 0.0)": ("vjp", "exp", "jnp.exp(jnp.minimum(x, "),
    "x.astype(jnp.float16) ** 4": ("value", "integer_pow", "compute in bfloat16 or float32"),
}
PAGE = {row[0]: row[1:] for row in rows("nan.md", "operation")}


def test_the_suspects_are_those_of_the_page_and_of_this_file():
    table = {row.code: [row.at, row.computes, row.instead.strip("`")] for row in advice.SUSPECTS}
    assert table == PAGE and table.keys() == SUSPECTS.keys()


STEPS, SICK, LINE = 5, 4, 7


def of_the_page(code):
    """An expression of the page as a function, whose line is `LINE` of a file of its own."""
    return eval(compile("\n" * (LINE - 1) + f"lambda x: {code}", "page.py", "eval"), globals())


def eagerly(fun):
    return lambda x: fun(x[SICK]).astype(jnp.float32)


def compiled(fun):
    return jax.jit(lambda x: jnp.float32(2) * jax.jit(fun)(x[SICK]))


def scanned(fun):
    def loss(x):
        return jax.lax.scan(lambda total, x: (total + fun(x).astype(jnp.float32), None), 0.0, x)[0]

    return loss


def rematerialized(fun):
    return jax.checkpoint(scanned(jax.checkpoint(fun)))


def in_a_module(fun):
    nn = pytest.importorskip("flax.linen")

    class Sick(nn.Module):
        @nn.compact
        def __call__(self, x):
            return fun(x).astype(jnp.float32)

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            return Sick(name="sick")(x[SICK])

    return lambda x: Model().apply({}, x)


PLACES = [eagerly, compiled, scanned, rematerialized, in_a_module]


@pytest.mark.slow
@pytest.mark.parametrize(
    "code, place", [(code, PLACES[i % len(PLACES)]) for i, code in enumerate(PAGE)]
)
def test_each_suspect_of_the_page_is_found_at_its_line_and_what_to_write_instead_is_well(
    code, place
):
    kind, operation, advice = SUSPECTS[code]
    at, _, instead = PAGE[code]
    good = jnp.full(STEPS, 1.5 if "arccosh" in code else 0.5)
    bad = good.at[SICK].set(float(at))
    diagnosis = cg.diagnose(place(of_the_page(code)), (bad,))
    (finding,) = diagnosis.findings
    assert (finding.kind, finding.operation) == (kind, operation)
    assert (finding.file, finding.line) == ("page.py", LINE)
    assert finding.step == (SICK if place in (scanned, rematerialized) else None)
    assert finding.module == ("Model/sick" if place is in_a_module else "")
    assert advice in finding.message
    assert "clipgrad help" not in finding.message or "clipgrad help nan)" in finding.message
    assert all(len(line) <= 100 for line in str(diagnosis).splitlines())
    well = (instead, bad) if instead.startswith(("j", "x.")) else (code, good)
    assert not {"value", "vjp"} & {*kinds(cg.diagnose(place(of_the_page(well[0])), well[1:]))}


def test_the_loss_is_traced_once_and_its_arguments_stay():
    traced = []

    def loss(x):
        traced.append(x)
        return jnp.sqrt(x).sum()

    x = array(np.zeros(3))
    assert not cg.diagnose(loss, (x,)).ok
    assert len(traced) == 1
    assert (x == 0).all()


@pytest.mark.slow
def test_float64_is_diagnosed_too():
    with jax.enable_x64(True):
        diagnosis = cg.diagnose(lambda x: jnp.sum(jnp.sqrt(x)), (jnp.zeros(3),))
        assert kinds(diagnosis) == ["vjp"] and diagnosis.rows[0].dtype == "float64"


def test_rows_have_the_cotangents_by_step():
    def loss(w, x):
        with jax.named_scope("rnn"):
            return jnp.sum(jax.lax.scan(lambda h, x: (w * h + x, h), 0.0, x)[0])

    rows = cg.diagnose(loss, (2.0, array(np.ones(4)))).rows
    (row,) = [row for row in rows if row.operation == "scan"]
    np.testing.assert_allclose(row.norm, [16, 8, 4, 2])
    assert row.module == "rnn" and row.scans == (4,) and row.dtype == "float32" and row.shape == ()
    assert not row.nonfinite.any() and not row.zeros.any()
    np.testing.assert_allclose(row.largest, row.norm)


@pytest.mark.parametrize("count", [2, 2**11])  # which is summed up in the program
def test_rows_have_the_zeros_of_small_and_of_large_cotangents(count):
    factors = np.repeat(np.float32([-2, 0, 1, 3]), count)
    rows = cg.diagnose(lambda x: jnp.sum(jnp.sin(x) * factors), (array(np.zeros(4 * count)),)).rows
    sine = next(row for row in rows if row.operation == "sin")
    assert (sine.zeros, sine.largest, sine.nonfinite) == (0.25, 3, 0)
    np.testing.assert_allclose(sine.norm, np.linalg.norm(factors), rtol=1e-5)


def test_huge_and_tiny_cotangents_have_a_norm():
    for factor in (1e30, 1e-30):
        diagnosis = cg.diagnose(lambda x, f=factor: jnp.sum(jnp.sin(x) * f), (array(np.zeros(4)),))
        sine = next(row for row in diagnosis.rows if row.operation == "sin")
        np.testing.assert_allclose(sine.norm, 2 * factor, rtol=1e-5)


@pytest.mark.slow
def test_the_growth_of_the_character_rnn_is_found():
    task = TASKS["char-rnn"]
    data = task.load()
    params = task.init(data, np.random.default_rng(0))
    step = jax.jit(jax.grad(task.loss))
    seen = []
    for number in range(20):  # of the first twenty steps without clipping
        batch = task.sample(data, jax.random.key(number))
        if number >= 4:  # the first do not grow yet
            findings = cg.diagnose(task.loss, (params, batch)).findings
            seen += [f for f in findings if f.kind == "grows"]
        if seen:
            break
        params = jax.tree.map(lambda w, g: w - g, params, step(params, batch))
    assert seen and 1.05 < seen[0].factor < 1.5 and seen[0].operation == "scan"
    assert seen[0].file.endswith("_demo.py")


@pytest.mark.parametrize(
    "fun, args, options, error, match",
    [
        (3, (1.0,), {}, TypeError, "^fun: got 3, expected a function"),
        (cg.ErrorClipByValue(max=1.0), (1.0,), {}, TypeError, "^fun: got the rule ClipByValue"),
        (jnp.sum, [1.0], {}, TypeError, r"^args: got list, expected a tuple; write \(a,\)"),
        (jnp.sum, (1.0,), {"kwargs": [1]}, TypeError, "^kwargs: got list, expected a mapping"),
        (
            jnp.sin,
            (array(np.ones(2)),),
            {},
            ValueError,
            r"^fun: got float32\[2\].*write its mean or sum",
        ),
        (lambda x: (x, x), (1.0,), {}, ValueError, "^fun: got a tuple.*has_aux=True"),
        (lambda x: x, (1.0,), {"has_aux": True}, ValueError, r"^fun: got float32.*leave has_aux"),
        (lambda x: 1.0, (1.0,), {}, ValueError, "^fun: got float .*computed from the arg"),
        (jnp.sum, (1.0,), {"argnums": 1}, ValueError, "^argnums: got 1 for 1 arguments"),
        (jnp.sum, (1.0,), {"argnums": ()}, ValueError, r"^argnums: got \(\), expected at least"),
        (
            lambda x: jnp.sum(x) * 1.0,
            (array(np.arange(3), np.int32),),
            {},
            ValueError,
            r"got int32\[3\] in args",
        ),
        (lambda x: 1.0 * x, (1,), {}, ValueError, r"^args: got int in args\[0\], expected float"),
        (lambda x: 1j * x, (1.0,), {}, ValueError, r"^fun: got complex64\[\]"),
    ],
)
def test_bad_input_is_refused_clearly(fun, args, options, error, match):
    with pytest.raises(error, match=match):
        cg.diagnose(fun, args, **options)


def test_a_function_that_changes_a_reference_is_refused():
    ref = jax.new_ref(array(np.zeros(())))

    def loss(x):
        ref[...] = x
        return x * x

    with pytest.raises(ValueError, match="^fun: got a function with side effects"):
        cg.diagnose(loss, (1.0,))


def test_prints_are_left_out(capsys):
    def loss(x):
        jax.debug.print("x is {}", x)
        return jnp.sqrt(x)

    assert kinds(cg.diagnose(loss, (0.0,))) == ["vjp"]
    jax.effects_barrier()
    assert capsys.readouterr().out == ""


@pytest.mark.slow
def test_complex_parameters_aux_keywords_and_several_arguments_work():
    def loss(z, x, *, scale):
        return scale * jnp.sum(jnp.abs(z) + jnp.sqrt(x)), {"z": z}

    args = jnp.array([1.0 + 1j]), jnp.zeros(1)
    options = {"kwargs": {"scale": 2.0}, "has_aux": True}
    assert cg.diagnose(loss, args, **options).ok
    assert kinds(cg.diagnose(loss, args, argnums=(0, 1), **options)) == ["vjp"]
    assert kinds(cg.diagnose(loss, args, argnums=-1, **options)) == ["vjp"]


@pytest.mark.slow
def test_an_nnx_model_is_diagnosed_and_not_changed():
    nnx = pytest.importorskip("flax.nnx")

    class Model(nnx.Module):
        def __init__(self):
            self.w = nnx.Param(jnp.zeros(3))
            self.calls = nnx.Variable(jnp.zeros((), int))

        def __call__(self, x):
            self.calls[...] += 1
            return jnp.linalg.norm(self.w[...] * x)

    model = Model()
    diagnosis = cg.diagnose(lambda model, x: model(x), (model, jnp.ones(3)))
    assert kinds(diagnosis) == ["vjp"] and diagnosis.findings[0].operation == "sqrt"
    assert model.calls[...] == 0


@pytest.mark.slow
def test_the_picture_marks_the_finding(tmp_path):
    diagnosis = cg.diagnose(scanned(jnp.sqrt), (jnp.ones(STEPS).at[SICK].set(0.0),))
    chart = diagnosis.plot()
    assert len(chart.axes) == 2
    texts = [[text.get_text() for text in axes.texts] for axes in chart.axes]
    assert texts[1] == ["vjp: sqrt"]
    chart.savefig(tmp_path / "picture.png")


def test_a_picture_without_matplotlib_says_what_to_install(monkeypatch):
    diagnosis = cg.diagnose(jnp.sum, (array(np.ones(3)),))
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match="plot needs matplotlib; install it with"):
        diagnosis.plot()


@pytest.mark.slow
def test_the_page_begins_with_a_diagnosis_and_prints_what_it_says():
    page = (DOCS / "nan.md").read_text()
    program = "\n".join(PROGRAM.findall(page)[:3])
    assert "cg.diagnose(" in program and page.index("cg.diagnose(") < page.index("## 1.")
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(program, "model.py", "exec"), {})
    shown = page.split("```text\n")[1].split("```")[0]
    assert drop_lines_of_packages(printed.getvalue()) == drop_lines_of_packages(shown)


def drop_lines_of_packages(text):
    """The words of a text; lines of JAX differ between versions."""
    return re.sub(r"(linalg\.py):\d+", r"\1", text).split()


W = np.ones(4, np.float32)


@pytest.mark.slow
def test_what_a_loss_closes_over_is_read_anew():
    closed_over = {"array": W, "function": jnp.sin}

    def loss(w):
        return jnp.sum(closed_over["function"](w * closed_over["array"]) ** 2)

    operations = []
    for change in (
        {},
        {"array": np.float32([1, np.inf, 1, 1])},
        {"array": W - 1, "function": jnp.sqrt},
    ):
        closed_over |= change
        operations.append([finding.operation for finding in cg.diagnose(loss, (W,)).findings])
    assert operations == [[], ["sin"], ["sqrt"]]


class Held:
    """What a callback closes over."""


@pytest.mark.slow
def test_nothing_of_a_users_is_kept_alive():
    held, factor = Held(), np.full(2**15, 2.0, np.float32)
    references = weakref.ref(held), weakref.ref(factor)

    def loss(w, held=held, factor=factor):
        called = jax.pure_callback(lambda x: (held, x)[1], jax.typeof(w), jax.lax.stop_gradient(w))
        return jnp.sum(w * called) + jnp.sum(w[0] * factor)

    assert cg.diagnose(loss, (W,)).ok
    del loss, held, factor
    gc.collect()
    assert [reference() for reference in references] == [None, None]
