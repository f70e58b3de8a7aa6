"""Each disease of a gradient is found at its line, its module and its step."""

import inspect
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import clipgrad as cg
from clipgrad._demo import TASKS
from clipgrad._diagnose.advice import SUSPECTS, suspect
from clipgrad._diagnose.trends import trend
from clipgrad._docs import docs_page
from tests.diagnose_zoo import cross_entropy
from tests.test_docs import DOCS, PROGRAM, rows

pytestmark = pytest.mark.usefixtures("users_promotion")
FILE = __file__


def line_of(fun, text):
    """The line of a function's source that holds a text."""
    lines, first = inspect.getsourcelines(fun)
    return first + next(i for i, line in enumerate(lines) if text in line)


def kinds(found):
    return [finding.kind for finding in found.findings]


def root(x):
    return jnp.sqrt(x)


# The functions of the table of docs/nan.md, each on a line of its own, with the point of the table,
# one where it is healthy, and the kind and operation of the finding.
DISEASES = {
    "root": (lambda x: jnp.sqrt(x), 0.0, 0.5, "vjp", "sqrt"),
    "norm": (lambda x: jnp.linalg.norm(jnp.stack([x, x])), 0.0, 0.5, "vjp", "sqrt"),
    "log": (lambda x: jnp.where(x > 0, jnp.log(x), 0.0), 0.0, 0.5, "vjp", "log"),
    "power": (lambda x: x**0.3, 0.0, 0.5, "vjp", "pow"),
    "deviation": (lambda x: jnp.std(jnp.stack([x, 0.0 * x])), 0.0, 0.5, "vjp", "sqrt"),
    "log of softmax": (
        lambda x: jnp.log(jax.nn.softmax(jnp.stack([x, 0.0]))[0]), -200.0, 0.5, "value", "log"
    ),
    "masked softmax": (
        lambda x: jax.nn.softmax(jnp.stack([x, -jnp.inf]))[0], -jnp.inf, 0.5, "value", "sub"
    ),
    "arccos": (lambda x: jnp.arccos(x), 1.0, 0.5, "vjp", "acos"),
    "arccosh": (lambda x: jnp.arccosh(x), 1.0, 1.5, "vjp", "acosh"),
    "masked exp": (lambda x: jnp.where(x < 80, jnp.exp(x), 0.0), 200.0, 0.5, "vjp", "exp"),
    "fourth power": (
        lambda x: (x.astype(jnp.float16) ** 4).astype(jnp.float32), 300.0, 0.5, "value",
        "integer_pow",
    ),
}  # fmt: skip
STEPS, SICK = 5, 3


def eagerly(fun):
    return lambda x: fun(x[SICK])


def compiled(fun):
    return jax.jit(lambda x: 2 * jax.jit(fun)(x[SICK]))


def scanned(fun):
    def loss(x):
        return jax.lax.scan(lambda total, x: (total + fun(x), None), 0.0, x)[0]

    return loss


def rematerialized(fun):
    return jax.checkpoint(scanned(jax.checkpoint(fun)))


def in_a_module(fun):
    nn = pytest.importorskip("flax.linen")

    class Sick(nn.Module):
        @nn.compact
        def __call__(self, x):
            return fun(x)

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            return Sick(name="sick")(x[SICK])

    return lambda x: Model().apply({}, x)


PLACES = [eagerly, compiled, scanned, rematerialized, in_a_module]


@pytest.mark.exhaustive
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("disease", DISEASES)
def test_each_suspect_of_the_page_is_found_at_its_line(disease, place):
    fun, bad, good, kind, operation = DISEASES[disease]
    x = jnp.full(STEPS, good).at[SICK].set(bad)
    found = cg.diagnose(place(fun), (x,))
    assert kinds(found) == [kind], str(found)
    (finding,) = found.findings
    assert finding.file == FILE and finding.line == fun.__code__.co_firstlineno
    assert finding.operation == operation
    assert finding.step == (SICK if place in (scanned, rematerialized) else None)
    assert finding.module == ("Model/sick" if place is in_a_module else "")
    assert any(f"; {s.advice(operation)}" in finding.message for s in SUSPECTS)
    assert "clipgrad help" not in finding.message or f"({docs_page('nan')})" in finding.message
    assert all(len(line) <= 100 for line in str(found).splitlines())
    assert cg.diagnose(place(fun), (jnp.full(STEPS, good),)).ok


def test_parameters_that_are_nan_already_lead_to_an_earlier_step():
    def loss(w, x):
        return jnp.sum((x @ w) ** 2)

    bad = jnp.array([1.0, jnp.nan])
    (finding,) = cg.diagnose(loss, (bad, jnp.ones((3, 2)))).findings
    assert "1 of 2 elements of args[0] are not finite before the loss uses them" in finding.message
    assert f"earlier one: diagnose its capture or checkpoint ({docs_page('my_run_blew_up')})" in (
        finding.message
    )
    (finding,) = cg.diagnose(loss, (jnp.ones(2), jnp.stack([bad, bad]))).findings
    assert "args[1]" in finding.message and "capture" not in finding.message


def test_the_table_of_the_page_is_the_data():
    table = [tuple(row) for row in rows("nan.md", "operation")]
    data = [(s.code, s.at, s.computes, s.instead.strip("`")) for s in SUSPECTS]
    assert table == data


def test_the_most_special_suspect_is_chosen():
    assert suspect("vjp", "sqrt", "norm", "float32", (0.0,)).code.startswith("jnp.linalg.norm")
    assert suspect("vjp", "sqrt", None, "float32", (0.0,)).code == "jnp.sqrt(x)"
    assert suspect("vjp", "tanh", None, "float32", (0.0,)) is None


@pytest.mark.parametrize(
    "fun, at, operation, computes",
    [
        (lambda x: 1 / x, 1e-30, "div", "1 / x ** 2, which overflows"),
        (lambda x: jnp.arctan2(x, x), 0.0, "atan2", "0 / 0"),
        (lambda x: jnp.log(x), -0.3, "log", None),
        (lambda x: jnp.log(x.astype(jnp.float16)).astype(jnp.float32), -0.3, "log", None),
    ],
)
def test_a_suspect_that_the_values_do_not_fit_is_not_named(fun, at, operation, computes):
    finding = cg.diagnose(fun, (at,)).findings[0]
    assert finding.operation == operation
    assert not any(s.advice(operation) in finding.message for s in SUSPECTS)
    if computes:
        assert finding.message.endswith(f"; the backward pass computes {computes}")


def test_a_library_line_is_the_users_with_the_library_beside_it():
    def loss(x):
        first = jnp.linalg.norm(x + 1)
        second = jnp.linalg.norm(x)
        return first + second

    (finding,) = cg.diagnose(jax.jit(loss), (jnp.zeros(3),)).findings
    assert finding.line == line_of(loss, "second =")  # of the same function twice
    assert f"test_diagnose.py:{finding.line}: " in finding.message
    assert "in norm (jax/" in finding.message and "sqrt at 0" in finding.message


@pytest.mark.exhaustive
def test_one_value_and_one_vjp_are_said_in_this_order():
    def loss(x):
        a = jnp.sum(jnp.sqrt(2 * x)) + jnp.sum(jnp.sqrt(x))
        b = jnp.sum(jnp.log(x))
        return a + b + jnp.sum(jnp.log(jax.lax.stop_gradient(2 * x)))

    found = cg.diagnose(loss, (jnp.array([1.0, 0.0]),))
    lines = [(f.kind, f.line) for f in found.findings]
    assert lines == [("value", line_of(loss, "log(")), ("vjp", line_of(loss, "sqrt("))]


def test_the_loss_is_traced_once_and_its_arguments_stay():
    traced = []

    def loss(x):
        traced.append(x)
        return jnp.sqrt(x).sum()

    x = jnp.zeros(3)
    assert not cg.diagnose(loss, (x,)).ok
    assert len(traced) == 1
    assert (x == 0).all()


def where(ok, of, x, other):
    """The double `where`, and the single one if the other number is no better."""
    return jnp.sum(jnp.where(ok, of(jnp.where(ok, x, other)), 0.0))


ENDS_FINITE = {
    "double where": lambda x: where(x > 0, jnp.sqrt, x, 1.0),
    "a mask": lambda x: jnp.sum(jax.nn.softmax(jnp.where(x > 0, x, -jnp.inf)) ** 2),
    "a gradient that a mask drops": lambda x: where(x > 0, jnp.sqrt, x, 0.0),
    "stopped": lambda x: jnp.sum(jnp.floor(jnp.sqrt(x)) + x + jax.lax.stop_gradient(jnp.sqrt(x))),
    "rules": lambda x: jnp.sum(jax.nn.relu(x) + jax.nn.silu(x)) + jax.nn.logsumexp(-100.0 * x),
}


@pytest.mark.parametrize("name", ENDS_FINITE)
def test_what_ends_finite_has_no_finding(name):
    found = cg.diagnose(ENDS_FINITE[name], (jnp.array([1.0, 0.0, 2.0]),))
    assert found.ok and str(found).startswith("nothing is wrong")


def test_a_nan_in_an_argument_names_the_argument():
    params = {"w": jnp.array([1.0, jnp.nan]), "b": jnp.ones(2)}
    found = cg.diagnose(lambda p, x: jnp.sum(p["w"] * x + p["b"]), (params, jnp.ones(2)))
    assert kinds(found) == ["value"] and found.findings[0].operation == "argument"
    assert "1 of 2 elements of args[0]['w']" in found.findings[0].message


@pytest.mark.exhaustive
def test_inf_in_an_argument_is_named_where_it_becomes_nan():
    def loss(mask, x):
        return jnp.sum(jax.nn.softmax(x + mask))

    found = cg.diagnose(loss, (jnp.full(2, -jnp.inf), jnp.ones(2)), argnums=1)
    assert kinds(found) == ["value"] and found.findings[0].line == line_of(loss, "softmax")
    assert "(args[0] contains inf)" in found.findings[0].message
    masked = jnp.array([0.0, 0.0, -jnp.inf])
    sharp = lambda mask, x: jnp.sum(jax.nn.softmax(x + mask) ** 2)  # noqa: E731
    assert cg.diagnose(sharp, (masked, jnp.array([0.3, 0.5, 0.7])), argnums=1).ok


def test_a_constant_that_reaches_the_loss_is_said():
    found = cg.diagnose(lambda x: jnp.sum(jnp.where(x > 1, x, -jnp.inf)), (jnp.ones(2),))
    assert kinds(found) == ["value"] and "a constant that is not finite" in str(found)


def twice(y):
    return 2e38 * jnp.sin(y) + 2e38 * jnp.tan(y)


def sums_in_a_scan(x):
    return jax.lax.scan(lambda t, _: (t + 1e38 * jnp.sin(x), None), 0.0, None, length=5)[0]


@jax.jit
def uses_in_a_jit(x):
    y = 2.0 * x
    return 2e38 * jnp.sin(y) + jax.jit(jnp.tan)(y) * 2e38


def uses_of_what_a_scan_carries(x):
    return jax.lax.scan(lambda c, _: (twice(c), None), x, None, length=1)[0]


def uses_behind_a_rule(x):
    return twice(jax.nn.relu(x + 1.0) - (2.0 * x + 1))


def uses_of_a_sum_and_of_its_part(x):
    part = jnp.sinh(x)
    y = part + jnp.arctan(2.0 * x)
    return twice(y) + part


def uses_of_a_sum_in_a_scan(x):
    def step(total, _):
        y = jnp.sinh(x) + jnp.arctan(2.0 * x)
        return total + twice(y), None

    return jax.lax.scan(step, 0.0, None, length=2)[0]


def uses_in_a_branch(x):
    return jax.lax.cond(x < 1, uses_of_an_argument, lambda x: x, x)


def uses_of_an_argument(x):
    return twice(x)


@pytest.mark.kinds()
@pytest.mark.parametrize(
    "loss, operation",
    [
        (uses_of_what_a_scan_carries, "scan"),
        (uses_behind_a_rule, "sub"),
        (uses_in_a_branch, "argument"),
        (uses_of_an_argument, "argument"),
        (uses_in_a_jit, "mul"),
        (uses_of_a_sum_and_of_its_part, "add"),
        (uses_of_a_sum_in_a_scan, "add"),
        (sums_in_a_scan, "argument"),
    ],
)
def test_a_sum_of_cotangents_that_overflows_is_found(loss, operation):
    (finding,) = cg.diagnose(loss, (jnp.array(0.0),)).findings
    assert (finding.kind, finding.operation) == ("sum", operation)
    assert "the cotangents of its uses are finite, but their sum is not" in finding.message
    assert operation != "argument" or "args[0] is used" in finding.message
    assert operation in ("argument", "scan") or finding.line == line_of(loss, "2.0 * x")
    step = {uses_of_what_a_scan_carries: 0, uses_of_a_sum_in_a_scan: 1}.get(loss)
    assert finding.step == step


def test_a_gradient_that_is_not_finite_is_never_ok(monkeypatch):
    module = sys.modules["clipgrad._diagnose.judge"]
    monkeypatch.setattr(module, "faults", lambda *args: [])
    (finding,) = cg.diagnose(root, (jnp.array(0.0),)).findings
    assert finding.kind == "vjp" and "the gradient of args[0] is not finite" in finding.message


@pytest.mark.exhaustive
def test_a_constant_has_the_step_at_which_it_first_comes_in():
    constant = np.array([np.nan], np.float32)

    def loss(x):
        return jax.lax.scan(lambda c, _: (c * constant, None), x, None, length=4)[0].sum()

    (finding,) = cg.diagnose(loss, (jnp.ones(1),)).findings
    assert finding.step == 0 and finding.operation == "mul"


def test_a_loss_that_is_not_finite_is_never_ok(monkeypatch):
    module = sys.modules["clipgrad._diagnose.judge"]
    monkeypatch.setattr(module, "level", lambda x: 0)
    found = cg.diagnose(lambda x: jnp.where(x > 1, x, jnp.inf), (jnp.array(0.0),))
    assert kinds(found) == ["value"] and "the compiled loss is inf" in found.findings[0].message


def test_the_gradient_is_that_of_the_compiled_loss():
    def loss(x):
        return jnp.log(jnp.exp(x))

    compiled = jax.jit(jax.value_and_grad(loss))(-200.0)
    assert cg.diagnose(loss, (-200.0,)).ok == np.isfinite(compiled).all()


@pytest.mark.exhaustive
def test_an_operation_whose_nan_is_masked_is_not_the_finding():
    def loss(x):
        sick = jnp.linalg.norm(x[:2] * x[2:])
        root = jnp.sqrt(jnp.where(x > 0, x, 0.0))
        return sick + jnp.sum(jnp.where(x > 0, root, 0.0))

    (finding,) = cg.diagnose(loss, (jnp.array([1.0, 0.0, 0.0, 1.0]),)).findings
    assert finding.kind == "vjp" and finding.line == line_of(loss, "norm(")


def rooted(x, **options):
    return jax.lax.scan(lambda t, x: (t + jnp.sqrt(x), None), 0.0, x, **options)[0]


PROGRAMS = {
    "nested": lambda x: jax.lax.scan(lambda t, row: (t + rooted(row), None), 0.0, x)[0],
    "reversed": lambda x: rooted(x[0], reverse=True),
    "branch": lambda x: jax.lax.cond(x[0, 0] > 0, lambda x: rooted(x[0]), lambda x: 0.0, x),
    "vmap": lambda x: jnp.sum(jax.vmap(lambda row: jnp.sum(jnp.sqrt(row)))(x)),
    "map": lambda x: jnp.sum(jax.lax.map(lambda x: jnp.sqrt(x), x[0])),
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("bad, kind", [(0.0, "vjp"), (-1.0, "value")])
@pytest.mark.parametrize("name", PROGRAMS)
def test_it_is_found_inside_of_other_programs(name, bad, kind):
    x = jnp.ones((3, 4)).at[0, 1].set(bad)
    (finding,) = cg.diagnose(PROGRAMS[name], (x,)).findings
    assert (finding.kind, finding.operation) == (kind, "sqrt")
    own = PROGRAMS[name].__code__.co_firstlineno
    assert finding.line == (own if "map" in name else line_of(rooted, "sqrt"))
    assert finding.step == (None if name == "vmap" else 1)


@jax.custom_vjp
def bad_rule(x):
    return x


bad_rule.defvjp(lambda x: (x, x), lambda x, g: (g / (x - x),))


@jax.custom_vjp
def good_rule(x):
    return jnp.sqrt(x)


good_rule.defvjp(lambda x: (jnp.sqrt(x), x), lambda x, g: (g * 0.5,))


def test_a_bad_custom_vjp_is_found_at_its_call():
    def loss(x):
        return jnp.sum(bad_rule(2 * x))

    (finding,) = cg.diagnose(loss, (jnp.ones(3),)).findings
    assert (finding.kind, finding.operation) == ("vjp", "bad_rule")
    assert finding.line == line_of(loss, "bad_rule")


def test_a_healthy_custom_vjp_is_a_note():
    found = cg.diagnose(lambda x: jnp.sum(good_rule(x)), (jnp.zeros(3),))
    assert found.ok and len(found.notes) == 1 and "good_rule has a custom VJP" in found.notes[0]


def rnn(radius, steps=50, size=16):
    q = np.linalg.qr(np.random.default_rng(0).normal(size=(size, size)))[0]

    def loss(w, x):
        return jnp.sum(jax.lax.scan(lambda h, x: (h @ w + x, None), jnp.zeros(size), x)[0])

    return loss, (jnp.asarray(radius * q, jnp.float32), jnp.full((steps, size), 0.01))


def test_a_slow_decay_is_told_where_nothing_is_left():
    loss, args = rnn(0.7, 220)
    (note,) = cg.diagnose(loss, args).notes
    assert "a factor of 0.7 at each of the" in note and note.endswith("leaves keep a gradient")
    assert not cg.diagnose(*rnn(0.7, 50)).notes

    def of_start(h, w):
        return jnp.sum(jax.lax.scan(lambda h, x: (h @ w + x, None), h, args[1])[0])

    (finding,) = cg.diagnose(of_start, (jnp.ones(16), args[0])).findings
    assert finding.kind == "shrinks" and finding.factor == pytest.approx(0.7, rel=1e-3)


def test_a_trend_has_a_factor_and_a_size():
    for factor, steps, growth in [
        (1.04, 300, None), (1.06, 300, 1.06), (1.06, 20, None),
        (0.65, 40, None), (0.55, 40, 0.55), (0.55, 10, None), (0.65, 400, 0.65),
    ]:  # fmt: skip
        found = trend(factor ** np.arange(steps))
        assert found and found.growth == (growth and pytest.approx(growth)), (factor, steps)


def test_growth_between_the_scans_inside_is_of_the_outer_scan():
    def loss(w, x):
        def outer(h, x):
            return jax.lax.scan(lambda h, x: (h + x, None), w * h, x)[0], None

        return jax.lax.scan(outer, 0.0, x)[0]

    (finding,) = cg.diagnose(loss, (jnp.array(5.0), jnp.zeros((8, 10)))).findings
    assert finding.factor == pytest.approx(5) and "at each of the 8 steps of the scan," in str(
        finding.message
    )


@pytest.mark.exhaustive
def test_a_gradient_that_overflows_is_found_at_its_step_and_grows():
    loss, (w, x) = rnn(1.5, 400)
    first, second = cg.diagnose(loss, (1.5 * jnp.eye(16), 0 * x)).findings
    assert (first.kind, first.operation) == ("vjp", "dot_general")
    # 1.5 ** n leaves float32 between n = 218 and 219; the last step is 399.
    assert first.step == 399 - 218
    assert second.kind == "grows" and second.factor == pytest.approx(1.5)


@pytest.mark.exhaustive
def test_float64_is_diagnosed_too():
    with jax.enable_x64(True):
        found = cg.diagnose(lambda x: jnp.sum(jnp.sqrt(x)), (jnp.zeros(3),))
        assert kinds(found) == ["vjp"] and found.rows[0].dtype == "float64"


def test_what_cannot_be_gone_into_is_a_note():
    def loss(x):
        constant = jax.pure_callback(lambda: np.float32(1), jax.ShapeDtypeStruct((), jnp.float32))
        return x + constant

    found = cg.diagnose(loss, (1.0,))
    assert found.ok and "pure_callback is measured as one operation" in found.notes[0]
    assert f"test_diagnose.py:{line_of(loss, 'pure_callback')}" in found.notes[0]


def deep(scale, depth=20, size=32):
    keys = jax.random.split(jax.random.key(0), depth)
    weights = [scale / size**0.5 * jax.random.normal(key, (size, size)) for key in keys]

    def loss(weights, x):
        for i, w in enumerate(weights):
            with jax.named_scope(f"layer_{i}"):
                x = x @ w
        return jnp.sqrt(jnp.mean(x**2))

    return loss, (weights, jax.random.normal(jax.random.key(1), (4, size)))


def test_an_expression_that_grows_is_not_called_modules_with_a_matrix_product():
    def loss(x):
        for scale in (3.0, 4.0, 5.0, 2.0, 3.0, 6.0, 4.0, 3.0, 5.0):
            x = jnp.sin(x) * scale
        return jnp.sum(x @ jnp.ones((3, 1)))

    (finding,) = cg.diagnose(loss, (jnp.full((3,), 1e-6),)).findings
    assert finding.kind == "grows" and "parts of the model" in finding.message


@pytest.mark.exhaustive
@pytest.mark.parametrize("scale, kind", [(2.5, "grows"), (0.4, "shrinks")])
def test_a_deep_model_grows_or_shrinks_by_module(scale, kind):
    found = cg.diagnose(*deep(scale))
    assert kinds(found) == [kind]
    assert found.findings[0].factor == pytest.approx(scale, rel=0.15)
    assert found.findings[0].module == "layer_0"
    assert {row.module for row in found.rows} >= {f"layer_{i}" for i in range(20)}
    assert str(found).count("layer_") >= 10 and cg.diagnose(*deep(1.0)).ok


def small_steps(w, x):
    h = (x @ w) * w.dtype.type(1e-3)
    h = h * w.dtype.type(1e-3)
    return 0.1 * jnp.mean(h.astype(jnp.float32))


@pytest.mark.exhaustive
def test_float16_underflows_where_bfloat16_does_not():
    def arguments(dtype):
        return jnp.ones((8, 8), dtype), jnp.ones((4, 8), dtype)

    (finding,) = cg.diagnose(small_steps, arguments(jnp.float16)).findings
    assert finding.kind == "underflow" and finding.line == line_of(small_steps, "x @ w")
    assert cg.diagnose(small_steps, arguments(jnp.bfloat16)).ok


LOW = jnp.float16
HALF = {
    "relu": lambda x: jax.nn.relu(x * 2),
    "relu6": lambda x: jax.nn.relu6(x * 2),
    "noise": lambda x: x * 2 + jax.random.normal(jax.random.key(0), x.shape, x.dtype),
    "while": lambda x: x * 2 + jax.lax.while_loop(lambda y: y < 3, lambda y: y + 1, LOW(0)),
}


@pytest.mark.kinds()
@pytest.mark.parametrize("layer", HALF)
def test_underflow_is_found_behind_rules_bits_and_loops(layer):
    def loss(x):
        h = HALF[layer](x) * x.dtype.type(1e-3)
        return jnp.sum(h.astype(jnp.float32) * 1e-6)

    found = cg.diagnose(loss, (jnp.array([-1.0, 1.0, 2.0, 2.5], jnp.float16),))
    assert "underflow" in kinds(found), str(found)
    assert not any("did not look for" in note for note in found.notes)


def test_the_gradient_of_an_argument_that_underflows_is_found():
    def loss(params):
        h = params["w"] * params["w"].dtype.type(1e-3)
        return jnp.sum(h.astype(jnp.float32) * 1e-6)

    (finding,) = cg.diagnose(loss, ({"w": jnp.ones(4, jnp.float16)},)).findings
    assert (finding.kind, finding.operation) == ("underflow", "argument")
    assert (finding.leaf, finding.cause) == ("args[0]['w']", "underflow")
    assert "100% of the gradient of args[0]['w'] is zero in float16" in finding.message
    assert cg.diagnose(loss, ({"w": jnp.ones(4, jnp.bfloat16)},)).ok


def test_rows_have_the_cotangents_by_step():
    def loss(w, x):
        with jax.named_scope("rnn"):
            return jnp.sum(jax.lax.scan(lambda h, x: (w * h + x, h), 0.0, x)[0])

    rows = cg.diagnose(loss, (2.0, jnp.ones(4))).rows
    (row,) = [row for row in rows if row.operation == "scan"]
    np.testing.assert_allclose(row.norm, [16, 8, 4, 2])
    assert row.module == "rnn" and row.scans == (4,) and row.dtype == "float32" and row.shape == ()
    assert not row.nonfinite.any() and not row.zeros.any()
    np.testing.assert_allclose(row.largest, row.norm)


@pytest.mark.parametrize("count", [2, 2**11])  # which is summed up in the program
def test_rows_have_the_zeros_of_small_and_of_large_cotangents(count):
    factors = np.repeat(np.float32([-2, 0, 1, 3]), count)
    rows = cg.diagnose(lambda x: jnp.sum(jnp.sin(x) * factors), (jnp.zeros(4 * count),)).rows
    sine = next(row for row in rows if row.operation == "sin")
    assert (sine.zeros, sine.largest, sine.nonfinite) == (0.25, 3, 0)
    np.testing.assert_allclose(sine.norm, np.linalg.norm(factors), rtol=1e-5)


def test_huge_and_tiny_cotangents_have_a_norm():
    for factor in (1e30, 1e-30):
        found = cg.diagnose(lambda x, f=factor: jnp.sum(jnp.sin(x) * f), (jnp.zeros(4),))
        sine = next(row for row in found.rows if row.operation == "sin")
        np.testing.assert_allclose(sine.norm, 2 * factor, rtol=1e-5)


@pytest.mark.exhaustive
def test_the_growth_of_the_character_rnn_is_found():
    task = TASKS["char-rnn"]
    data = task.load()
    params = task.init(data, np.random.default_rng(0))
    step = jax.jit(jax.grad(task.loss))
    seen = []
    for number in range(20):  # of the first twenty steps without clipping
        batch = task.sample(data, jax.random.key(number))
        if number >= 4:  # the first do not grow yet
            found = cg.diagnose(task.loss, (params, batch)).findings
            seen += [f for f in found if f.kind == "grows"]
        if seen:
            break
        params = jax.tree.map(lambda w, g: w - g, params, step(params, batch))
    assert seen and 1.05 < seen[0].factor < 1.5 and seen[0].operation == "scan"
    assert seen[0].file.endswith("_demo.py")


@pytest.mark.parametrize(
    "fun, args, options, error, match",
    [
        (3, (1.0,), {}, TypeError, "^fun: got 3, expected a function"),
        (cg.ErrorClipByValue(max=1.0), (1.0,), {}, TypeError, "^fun: got ClipByValue"),
        (jnp.sum, [1.0], {}, TypeError, r"^args: got list, expected a tuple; write \(a,\)"),
        (jnp.sum, (1.0,), {"kwargs": [1]}, TypeError, "^kwargs: got list, expected a mapping"),
        (jnp.sin, (jnp.ones(2),), {}, ValueError, r"^fun: got float32\[2\].*write its mean or sum"),
        (lambda x: (x, x), (1.0,), {}, ValueError, "^fun: got a tuple.*has_aux=True"),
        (lambda x: x, (1.0,), {"has_aux": True}, ValueError, r"^fun: got float32.*leave has_aux"),
        (lambda x: 1.0, (1.0,), {}, ValueError, "^fun: got float .*computed from the arg"),
        (jnp.sum, (1.0,), {"argnums": 1}, ValueError, "^argnums: got 1 for 1 arguments"),
        (jnp.sum, (1.0,), {"argnums": ()}, ValueError, r"^argnums: got \(\), expected at least"),
        (lambda x: jnp.sum(x) * 1.0, (jnp.arange(3),), {}, ValueError, r"got int32\[3\] in args"),
        (lambda x: 1.0 * x, (1,), {}, ValueError, r"^args: got int in args\[0\], expected float"),
        (lambda x: 1j * x, (1.0,), {}, ValueError, r"^fun: got complex64\[\]"),
    ],
)
def test_bad_input_is_refused_clearly(fun, args, options, error, match):
    with pytest.raises(error, match=match):
        cg.diagnose(fun, args, **options)


def test_a_function_that_changes_a_reference_is_refused():
    ref = jax.new_ref(jnp.zeros(()))

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


@pytest.mark.exhaustive
def test_complex_parameters_aux_keywords_and_several_arguments_work():
    def loss(z, x, *, scale):
        return scale * jnp.sum(jnp.abs(z) + jnp.sqrt(x)), {"z": z}

    args = jnp.array([1.0 + 1j]), jnp.zeros(1)
    options = {"kwargs": {"scale": 2.0}, "has_aux": True}
    assert cg.diagnose(loss, args, **options).ok
    assert kinds(cg.diagnose(loss, args, argnums=(0, 1), **options)) == ["vjp"]
    assert kinds(cg.diagnose(loss, args, argnums=-1, **options)) == ["vjp"]


@pytest.mark.exhaustive
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
    found = cg.diagnose(lambda model, x: model(x), (model, jnp.ones(3)))
    assert kinds(found) == ["vjp"] and found.findings[0].operation == "sqrt"
    assert model.calls[...] == 0


@pytest.mark.exhaustive
def test_the_picture_marks_the_finding(tmp_path):
    found = cg.diagnose(scanned(root), (jnp.ones(STEPS).at[SICK].set(0.0),))
    chart = found.plot()
    assert len(chart.axes) == 2
    texts = [[text.get_text() for text in axes.texts] for axes in chart.axes]
    assert texts[1] == ["vjp: sqrt"]
    chart.savefig(tmp_path / "picture.png")


def test_a_picture_without_matplotlib_says_what_to_install(monkeypatch):
    found = cg.diagnose(jnp.sum, (jnp.ones(3),))
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match="plot needs matplotlib; install it with"):
        found.plot()


@pytest.mark.exhaustive
def test_healthy_models_of_equinox_and_haiku_have_no_finding():
    eqx, hk = pytest.importorskip("equinox"), pytest.importorskip("haiku")
    x, y = jax.random.normal(jax.random.key(0), (8, 20, 6)), jnp.arange(8)

    def lstm(x):
        out, _ = hk.dynamic_unroll(hk.LSTM(16), x, hk.LSTM(16).initial_state(8), time_major=False)
        return hk.Linear(10)(out[:, -1])

    model = hk.transform(lstm)
    params = jax.jit(model.init)(jax.random.key(1), x)
    loss = lambda params: cross_entropy(model.apply(params, None, x), y)  # noqa: E731
    assert cg.diagnose(loss, (params,)).ok
    arrays, static = eqx.partition(eqx.nn.MLP(6, 10, 32, 8, key=jax.random.key(2)), eqx.is_array)
    loss = lambda arrays: cross_entropy(  # noqa: E731
        jax.vmap(eqx.combine(arrays, static))(x[:, 0]), y
    )
    found = cg.diagnose(loss, (arrays,))
    assert found.ok and any("eqx.nn.MLP" in row.module for row in found.rows)


@pytest.mark.exhaustive
def test_the_page_begins_with_a_diagnosis_and_prints_what_it_says():
    import contextlib
    import io

    page = (DOCS / "nan.md").read_text()
    program = "\n".join(PROGRAM.findall(page)[:2])
    assert "cg.diagnose(" in program and page.index("cg.diagnose(") < page.index("## 1.")
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(program, "model.py", "exec"), {})
    shown = page.split("```text\n")[1].split("```")[0]
    assert drop_lines_of_packages(printed.getvalue()) == drop_lines_of_packages(shown)


def drop_lines_of_packages(text):
    """The words of a text; lines of JAX differ between versions."""
    import re

    return re.sub(r"(linalg\.py):\d+", r"\1", text).split()


def without_derivative(y):
    return jax.lax.while_loop(lambda c: jnp.sum(c) < 100, lambda c: 2 * c, y)


def sampled_noise(x, data):
    noise = jax.random.gamma(jax.random.key(0), 1 + jnp.abs(data))
    return jnp.sum(jnp.sqrt(x) * jax.lax.stop_gradient(noise))


@pytest.mark.kinds()
@pytest.mark.parametrize(
    "loss",
    [
        lambda x, data: jnp.sum(jnp.sqrt(x) * without_derivative(3 * data)),
        lambda x, data: jnp.sum(jnp.sqrt(x) * without_derivative(jax.lax.stop_gradient(3 + x))),
        lambda x, data: jnp.sum(jnp.sqrt(x) * jnp.nextafter(2 * data, 3 * data)),
        sampled_noise,
    ],
    ids=["loop on data", "loop on a stopped gradient", "no rule", "a sampler"],
)
def test_what_has_no_derivative_is_no_hindrance_beside_what_is_differentiated(loss):
    ones = jnp.ones(3)
    assert cg.diagnose(loss, (ones, ones)).ok
    (finding,) = cg.diagnose(loss, (ones.at[1].set(0.0), ones)).findings
    assert (finding.kind, finding.operation) == ("vjp", "sqrt")


@pytest.mark.parametrize("factor", [0.1, 1e3])
def test_heads_beside_each_other_are_no_depth(factor):
    def loss(heads, x):
        return sum(factor**i * jnp.sum(jnp.tanh(x @ w)) for i, w in enumerate(heads))

    found = cg.diagnose(loss, ([0.1 * jnp.eye(4)] * 8, jnp.ones(4)))
    assert found.ok and not found.notes


def test_under_vmap_a_finding_names_no_machinery_of_jax():
    mapped = jax.vmap(lambda row: jnp.sum(jnp.sqrt(row)))
    (finding,) = cg.diagnose(lambda x: jnp.sum(mapped(x)), (jnp.zeros((3, 4)),)).findings
    assert finding.operation == "sqrt" and "batching" not in finding.message


def test_equal_eigenvalues_have_a_cause_and_a_next_step():
    loss = lambda a: jnp.sum(jnp.linalg.eigh(a)[1] * jnp.arange(9.0).reshape(3, 3))  # noqa: E731
    (finding,) = cg.diagnose(loss, (jnp.eye(3),)).findings
    assert finding.operation == "eigh" and "two of them are equal: " in finding.message


def test_a_bad_rule_of_the_users_leads_to_the_checker():
    (finding,) = cg.diagnose(lambda x: jnp.sum(bad_rule(2 * x)), (jnp.ones(3),)).findings
    assert finding.message.endswith("cg.check_grads compares it with numerical slopes")


def test_the_kinds_of_findings_are_those_of_the_page():
    from clipgrad._diagnose.kinds import FINDING_KINDS

    page = [name for row in rows("nan.md", "kind") for name in row[0].split(", ")]
    assert sorted(page) == sorted(FINDING_KINDS)
