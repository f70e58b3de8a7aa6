"""Lines are names: which value a line is, in which run, and that all that takes a name takes it."""

import inspect
import linecache
import pathlib
import re

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec as P

import clipgrad as cg
from clipgrad import _names
from tests.helpers import array, assert_close
from tests.rows import some_of

DOCS = pathlib.Path(__file__).parents[2] / "docs" / "names.md"
FILE = "test_lines.py"
W, XS = array(1.5), array([0.5, -1.0, 2.0])
RULE = cg.ErrorClipByValue(0.1)


@pytest.fixture(autouse=True, scope="module")
def programs():
    yield
    jax.clear_caches()


def line(function, mark="# here"):
    """The name of the line of a function that a comment marks."""
    text, first = inspect.getsourcelines(function)
    (number,) = (first + i for i, row in enumerate(text) if row.rstrip().endswith(mark))
    return f"{FILE}:{number}"


def values(fun, *args):
    """What `line_values` says of a function, of the lines that compute a value themselves."""
    program = jax.make_jaxpr(fun)(*args)
    return [v for v in _names.line_values(program) if v.kind == _names.LINE]


# A line in each kind of program, beside the clip that is written by hand


def cell(w, x, clip):
    h = jnp.sin(w * x) * x  # here
    h = clip(h)
    return h * h + x


def plain(w, xs, clip):
    return cell(w, xs, clip).sum()


def jitted(w, xs, clip):
    once = jax.jit(lambda w, x: cell(w, x, clip))
    return once(w, once(w, xs)).sum()


def rematerialized(w, xs, clip):
    return jax.checkpoint(lambda w, x: cell(w, x, clip))(w, xs).sum()


def in_scan(w, xs, clip):
    return lax.scan(lambda c, x: (cell(w, c + x, clip), None), w, xs)[0]


def in_scan_of_remat(w, xs, clip):
    @jax.checkpoint
    def step(c, x):
        return jax.jit(lambda w, c: cell(w, c, clip))(w, c + x), x * 2

    c, ys = lax.scan(step, w, xs)
    return c + ys.sum()


def in_cond(w, xs, clip):
    return lax.cond(w > 0, lambda x: cell(w, x, clip), lambda x: 2 * x, xs).sum()


def in_vmap(w, xs, clip):
    return jax.vmap(lambda x: cell(w, x, clip))(xs).sum()


def in_a_loop(w, xs, clip):
    for _ in range(3):
        xs = cell(w, xs, clip)
    return xs.sum()


def in_shard_map(w, xs, clip):
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    mapped = lambda w, x: cell(w, x, clip)  # noqa: E731
    return jax.shard_map(mapped, mesh=mesh, in_specs=(P(), P("data")), out_specs=P("data"))(
        w, xs
    ).sum()


def behind_a_custom_rule(w, xs, clip):
    @jax.custom_vjp
    def swish(x):
        return x * jax.nn.sigmoid(x)

    swish.defvjp(lambda x: (swish(x), x), lambda x, g: (2 * g,))
    return swish(cell(w, swish(xs), clip)).sum()


# The function, and how many elements of values the line has in all.
PROGRAMS = {
    plain: 3, jitted: 6, rematerialized: 3, in_scan: 3, in_scan_of_remat: 3, in_cond: 3,
    in_vmap: 3, in_a_loop: 9, in_shard_map: 3, behind_a_custom_rule: 3,
}  # fmt: skip
TABLE = pytest.mark.parametrize(
    "program",
    some_of(PROGRAMS, [plain, in_a_loop]),
    ids=lambda program: program.__name__,
)


def by_hand(program, rule=RULE):
    return lambda w, xs: program(w, xs, lambda h: cg.clip_cotangent(h, rule))


def unclipped(program):
    return lambda w, xs: program(w, xs, lambda h: h)


@TABLE
def test_an_error_clip_at_a_line_is_the_clip_that_is_written_there(program):
    loss = unclipped(program)
    both = lambda f: jax.jit(jax.value_and_grad(f, argnums=(0, 1)))  # noqa: E731
    clipped = cg.error_clip_by_name(loss, {line(cell): RULE})
    assert jax.jit(loss)(W, XS) == jax.jit(clipped)(W, XS)
    expected = both(by_hand(program))(W, XS)
    assert_close(both(clipped)(W, XS), expected)
    assert not np.allclose(expected[1][1], both(loss)(W, XS)[1][1], atol=1e-3)


@TABLE
def test_statistics_of_a_line_are_those_of_the_value(program):
    name = line(cell)
    probe = cg.types.ClipStats.zero(())

    def with_probe(w, xs, probe):
        return program(w, xs, lambda h: cg.clip_cotangent(h, RULE, probe=probe))

    watched = cg.value_and_grad_with_stats(unclipped(program), error_clip={name: RULE})
    measured = jax.jit(lambda w, xs: watched(w, xs)[2][name])(W, XS)
    expected = jax.jit(jax.grad(with_probe, argnums=2))(W, XS, probe)
    total = lambda norm: (norm**2).sum()  # noqa: E731
    assert_close(total(measured.norm), expected.norm**2)
    assert_close(total(measured.clipped_norm), expected.clipped_norm**2)
    measured = cg.with_value_stats(unclipped(program), watch=[name])
    stats = jax.jit(lambda w, xs: measured(w, xs)[1][name])(W, XS)
    assert stats.size.sum() == PROGRAMS[program]


def test_a_scan_gives_one_run_with_an_entry_for_each_step():
    (name,) = (n for n in cg.list_names(unclipped(in_scan), (W, XS), lines=True) if n.variable)
    assert (name.name, name.kind, name.variable) == (line(cell), "line", "h")
    assert (name.scans, name.sites, name.shape, name.cotangent) == ((3,), 1, (), True)
    assert re.fullmatch(r"<lambda>:\d+ > in_scan:\d+ > <lambda>:\d+ > cell:\d+", name.calls)


def test_a_line_in_a_while_loop_has_values_and_no_cotangent():
    def loss(x):
        def step(c):
            y = 2 * c[1]  # here
            return c[0] + 1, y

        return lax.while_loop(lambda c: c[0] < 3, step, (0, x))[1]

    name = line(loss)
    (listed,) = (n for n in cg.list_names(loss, (W,), lines=True) if n.name == name)
    assert not listed.cotangent
    assert cg.with_value_stats(loss, watch=[name])(W)[1][name].size == 3
    with pytest.raises(ValueError, match="computes a value in a while loop"):
        cg.value_and_grad_with_stats(loss, watch=[name])(W)


# The value of a line, what it is called, and how often it runs


def several_lines(x):
    h = jnp.tanh(
        x * 2
        + 1
    )  # fmt: skip
    return h


def a_call_of_a_package(x):
    h = jax.nn.softmax(x)
    return h


def a_pair(x):
    y, _ = x * 2, x.sum()
    return y


def a_changed_variable(x):
    x += x
    return x


def an_attribute(x):
    box = type("Box", (), {})()
    box.h = x * 2
    return box.h


def a_lambda(x):
    h = (lambda y: y * 2)(x)
    return h


def a_mapped_lambda(x):
    h = jax.vmap(lambda y: jnp.sin(y) * 2)(x)
    return h


def a_scanned_lambda(x):
    h, _ = lax.scan(lambda c, _: (c * 2, None), x, length=3)
    return h


def a_body_of_one_line(x):
    for _ in range(3): x = x * 2  # fmt: skip  # noqa: E701
    return x


def a_loop_of_one_operation(x):
    for _ in range(3):
        x = jnp.tanh(x)
    return x


def a_loop_of_several_operations(x):
    for _ in range(3):
        x = x - x.mean()
    return x


def a_comprehension(x):
    ys = [jnp.tanh(x + i) for i in range(3)]
    return sum(ys)


def a_generator(x):
    y = sum(x * i for i in range(3))
    return y


def a_function_that_is_mapped_over_a_tree(x):
    ys = jax.tree.map(lambda y: y * 2, [x, x])
    return ys[0] + ys[1]


def between_other_lines(x):
    h = (x + 1) * cell(x, x, lambda h: h) + 2
    return h


# The variable, the number of runs, and the primitive of the last one of the line behind the def.
VALUES = {
    several_lines: ("h", 1, "tanh"),
    a_call_of_a_package: ("h", 1, "div"),
    a_pair: ("y", 1, "mul"),
    a_changed_variable: ("x", 1, "add"),
    a_lambda: ("h", 1, "mul"),
    a_mapped_lambda: ("h", 1, "mul"),
    a_scanned_lambda: ("h", 1, "scan"),
    a_body_of_one_line: ("x", 3, "mul"),
    a_comprehension: ("ys", 3, "tanh"),
    a_generator: ("y", 1, "add"),
    between_other_lines: ("h", 1, "add"),
}
IN_THE_SECOND_LINE = {
    an_attribute: ("box.h", 1, "mul"),
    a_loop_of_one_operation: ("x", 3, "tanh"),
    a_loop_of_several_operations: ("x", 3, "sub"),
}
ROWS = [(f, 1, *value) for f, value in VALUES.items()]
ROWS += [(f, 2, *value) for f, value in IN_THE_SECOND_LINE.items()]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0].__name__)
def test_the_value_of_a_line(row):
    function, behind, variable, runs, primitive = row
    number = function.__code__.co_firstlineno + behind
    runs_there = [v for v in values(function, XS) if v.line.number == number]
    assert [v.run for v in runs_there] == list(range(1, runs + 1))
    assert {v.runs for v in runs_there} == {runs}
    last = runs_there[-1]
    assert (last.line.variable, last.place.equation.primitive.name) == (variable, primitive)
    where = f"{FILE}:{number}, {variable} in {function.__name__}"
    nth = ["", "", ", the second of 2 runs", ", the third of 3 runs"][runs]
    assert str(last) == where + nth
    assert last.led_by == f"{function.__name__}:{number}"


def test_a_callback_of_a_package_runs_for_each_call():
    number = a_function_that_is_mapped_over_a_tree.__code__.co_firstlineno + 1
    mapped = values(a_function_that_is_mapped_over_a_tree, XS)
    assert [v.run for v in mapped if v.line.number == number] == [1, 2]


def test_runs_are_counted_through_calls_and_loops():
    def loss(x):
        for _ in range(2):
            x = cell(x, x, lambda h: h)
        return jax.jit(lambda x: cell(x, x, lambda h: h))(x)

    words = [str(v) for v in values(loss, XS) if v.line.variable]
    where = f"{line(cell)}, h in cell, the "
    assert words == [f"{where}{n} of 3 runs" for n in ("first", "second", "third")]


@pytest.mark.parametrize("steps", [2, 11])
def test_many_runs_have_numbers(steps):
    def loss(x):
        for _ in range(steps):
            x = x * 2
        return x

    assert str(values(loss, XS)[-1]).endswith(
        ", the second of 2 runs" if steps == 2 else ", number 11 of 11 runs"
    )


def test_code_without_a_file_has_lines_without_variables():
    scope = {}
    exec("def loss(x):\n    y = x * 2\n    return y.sum()", scope)
    assert list(map(str, values(scope["loss"], XS))) == [
        "<string>:2, in loss",
        "<string>:3, in loss",
    ]
    grads = jax.grad(cg.error_clip_by_name(scope["loss"], {"<string>:2": RULE}))(XS)
    assert_close(grads, np.full(3, 0.2))


def test_a_cell_of_a_notebook_has_lines():
    text, name = "def loss(x):\n    y = x * 2\n    return y.sum()\n", "<ipython-input-3-0123abcd>"
    linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
    scope = {}
    exec(compile(text, name, "exec"), scope)
    assert str(values(scope["loss"], XS)[0]) == f"{name}:2, y in loss"
    assert cg.with_value_stats(scope["loss"], watch=[f"{name}:2"])(XS)[1][f"{name}:2"].size == 3


@pytest.mark.parametrize("program", [plain, in_a_loop])
def test_what_is_added_to_a_program_is_of_no_line(program):
    loss = lambda w, xs: cg.with_value_stats(unclipped(program), watch=[line(cell)])(w, xs)  # noqa: E731
    before = list(map(str, values(unclipped(program), W, XS)))
    assert list(map(str, values(loss, W, XS))) == before
    twice = cg.with_value_stats(loss, watch=[line(cell)], has_aux=True)
    assert list(map(str, values(twice, W, XS))) == before


def test_the_backward_pass_of_a_gradient_inside_is_apart():
    program = jax.make_jaxpr(jax.grad(unclipped(plain)))(W, XS)
    kinds = {v.kind for v in _names.line_values(program) if v.line.key.endswith(line(cell))}
    assert kinds == {_names.LINE, _names.BACKWARD}


def test_a_clip_at_a_line_that_no_cotangent_passes_is_said():
    step = jax.grad(unclipped(plain))
    with pytest.warns(UserWarning, match="computes gradients itself"):
        cg.error_clip_by_name(step, {line(cell): RULE})(W, XS)


@pytest.mark.filterwarnings("error")
def test_a_clip_at_a_line_of_a_loss_with_gradients_inside_acts():
    def loss(w, xs):
        return plain(w - 0.1 * jax.grad(unclipped(plain))(w, xs), xs, lambda h: h)

    clipped = cg.error_clip_by_name(loss, {line(cell): cg.ErrorClipByValue(1e-9)})
    assert abs(jax.grad(clipped)(W, XS)) < 1e-6 < abs(jax.grad(loss)(W, XS))


# Patterns


def double(x):
    h = x * 2
    return h


def loss_of_calls(x):
    h = double(x)  # here
    return h.sum()


PATTERNS = [
    ("{file}:{n}", True), ("error_clips/{file}:{n}", True), ("./error_clips/{file}:{n}", True),
    ("**/{file}:{n}", True), ("test_*.py:{n}", True), ("{whole}:{n}", True),
    ("other/{file}:{n}", False), ("lines.py:{n}", False),
]  # fmt: skip


@pytest.mark.parametrize(("pattern", "is_one"), PATTERNS)
def test_the_file_of_a_pattern_is_the_end_of_a_path(pattern, is_one):
    n = double.__code__.co_firstlineno + 1
    pattern = pattern.format(file=FILE, n=n, whole=__file__)
    if is_one:
        assert list(cg.with_value_stats(double, watch=[pattern])(XS)[1]) == [f"{FILE}:{n}"]
    else:
        with pytest.raises(ValueError, match="expected a line of this function"):
            cg.with_value_stats(double, watch=[pattern])(XS)


def test_any_line_of_a_statement_means_it():
    first = several_lines.__code__.co_firstlineno + 1
    for n in range(first, first + 4):
        stats = cg.with_value_stats(several_lines, watch=[f"{FILE}:{n}"])(XS)[1]
        assert list(stats) == [f"{FILE}:{first}"]


def test_a_star_means_the_lines_that_compute_and_a_number_a_line_that_calls_too():
    n = double.__code__.co_firstlineno + 1
    computing = {f"{FILE}:{n}", f"{FILE}:{loss_of_calls.__code__.co_firstlineno + 2}"}
    assert set(cg.with_value_stats(loss_of_calls, watch=[f"{FILE}:*"])(XS)[1]) == computing
    listed = {name.name for name in cg.list_names(loss_of_calls, (XS,), lines=True)}
    assert listed == computing
    clipped = cg.error_clip_by_name(loss_of_calls, {line(loss_of_calls): RULE})
    assert_close(jax.grad(clipped)(XS), np.full(3, 0.2))


@pytest.mark.parametrize("called", [double, jax.jit(double), jax.checkpoint(double)])
def test_a_line_that_calls_runs_as_often_as_it_calls(called):
    def loss(x):
        for _ in range(2):
            x = called(x)  # here
        return x.sum()

    assert cg.with_value_stats(loss, watch=[line(loss)])(XS)[1][line(loss)].size == 6
    assert line(loss) not in {name.name for name in cg.list_names(loss, (XS,), lines=True)}


def test_a_line_without_a_statement_means_none():
    def loss(x):
        for y in [x * 2]:
            x = y + 1

            # here
            x = x * 2
        return x

    with pytest.raises(ValueError, match="expected a line of this function"):
        cg.with_value_stats(loss, watch=[line(loss)])(XS)


def test_one_that_is_left_out_and_one_with_a_rule_of_its_own():
    n = double.__code__.co_firstlineno + 1
    last = f"{FILE}:{loss_of_calls.__code__.co_firstlineno + 2}"
    stats = cg.with_value_stats(loss_of_calls, watch=[f"{FILE}:*", f"!{FILE}:{n}"])(XS)[1]
    assert list(stats) == [last]
    rules = {f"{FILE}:*": RULE, f"{FILE}:{n}": None}
    watched = cg.value_and_grad_with_stats(loss_of_calls, error_clip=rules)
    stats = watched(XS)[2]
    assert stats[last].clipped and not stats[f"{FILE}:{n}"].clipped
    with pytest.raises(ValueError, match="expected one rule for it"):
        rules = {f"{FILE}:{n}": RULE, f"error_clips/{FILE}:{n}": cg.ErrorClipByValue(1.0)}
        cg.error_clip_by_name(loss_of_calls, rules)(XS)


def test_stars_of_names_and_expressions_mean_no_lines():
    named = lambda x: double(jax.named_call(lambda x: x + 1, name="inner")(x)).sum()  # noqa: E731
    for pattern in ("**", "*", re.compile(".")):
        assert set(cg.with_value_stats(named, watch=[pattern])(XS)[1]) == {"inner"}


def test_a_tag_that_looks_like_a_line_is_the_tag():
    def loss(x):
        return jax.ad_checkpoint.checkpoint_name(x * 2, "a.py:1").sum()

    assert list(cg.with_value_stats(loss, watch=["a.py:1"])(XS)[1]) == ["a.py:1"]


@pytest.mark.parametrize(
    "call",
    [
        lambda name: cg.error_clip_by_name(loss_of_calls, {name: RULE})(XS),
        lambda name: cg.value_and_grad_with_stats(loss_of_calls, error_clip={name: RULE})(XS),
        lambda name: cg.value_and_grad_with_stats(loss_of_calls, watch=[name])(XS),
        lambda name: cg.with_value_stats(loss_of_calls, watch=[name])(XS),
    ],
    ids=["error_clip_by_name", "error_clip", "watch", "with_value_stats"],
)
def test_a_pattern_without_a_line_names_the_nearest(call):
    n = loss_of_calls.__code__.co_firstlineno
    near = rf"the nearest lines are {FILE}:{n - 4} \(h in double\), {FILE}:{n + 2} \(return h.sum"
    with pytest.raises(ValueError, match=f"got '{FILE}:{n - 1}', expected a line .*{near}"):
        call(f"{FILE}:{n - 1}")
    with pytest.raises(ValueError, match=f"got 'model.py:3', .*the first lines are {FILE}:"):
        call("model.py:3")


def test_a_line_inside_of_a_custom_rule_cannot_be_reached():
    @jax.custom_vjp
    def swish(x):
        return x * jax.nn.sigmoid(x)  # here

    swish.defvjp(lambda x: (swish(x), x), lambda x, g: (g,))
    loss = lambda x: swish(x).sum()  # noqa: E731
    with pytest.raises(ValueError, match="computes a variable inside of custom_vjp_call"):
        cg.error_clip_by_name(loss, {line(swish.__wrapped__): RULE})(XS)


def test_a_rule_hears_of_the_line_and_of_the_operation():
    heard = []

    def rule(cotangent, *, name, operation):
        heard.append((name, operation))
        return cotangent

    jax.grad(cg.error_clip_by_name(unclipped(plain), {line(cell): rule}))(W, XS)
    assert heard == [(line(cell), "mul")]


def test_a_norm_rule_at_a_line_in_a_vmap_is_warned_of():
    clipped = cg.error_clip_by_name(unclipped(in_vmap), {line(cell): cg.ClipByNorm(1.0)})
    with pytest.warns(UserWarning, match="got a norm rule for .* inside jax.vmap"):
        jax.grad(clipped)(W, XS)


def test_files_of_one_name_are_told_apart(tmp_path):
    scope = {}
    for folder in ("a", "b"):
        path = tmp_path / folder / "model.py"
        path.parent.mkdir()
        path.write_text(f"def {folder}(x):\n    y = x * 2\n    return y\n")
        exec(compile(path.read_text(), str(path), "exec"), scope)
    loss = lambda x: scope["a"](scope["b"](x)).sum()  # noqa: E731
    assert set(cg.with_value_stats(loss, watch=["model.py:2"])(XS)[1]) == {
        "a/model.py:2",
        "b/model.py:2",
    }
    grads = jax.grad(cg.error_clip_by_name(loss, {"a/model.py:2": RULE}))(XS)
    assert_close(grads, np.full(3, 0.4))


def test_lines_are_read_on_request_only(monkeypatch):
    def read(jaxpr):
        raise AssertionError("nobody asked for lines")

    def loss(x):
        with jax.named_scope("cell"):
            h = jax.ad_checkpoint.checkpoint_name(x * 2, "h")
        return lax.scan(jax.checkpoint(lambda c, y: (c + y, None)), 0.0, h)[0]

    monkeypatch.setattr("clipgrad._names.lines._stacks", read)
    cg.list_names(loss, (XS,))
    cg.value_and_grad_with_stats(loss, error_clip={"h": RULE}, watch=["**"])(XS)
    cg.with_value_stats(loss)(XS)
    jax.grad(cg.error_clip_everywhere(loss, RULE))(XS)
    with pytest.raises(AssertionError, match="nobody asked for lines"):
        cg.with_value_stats(loss, watch=["model.py:1"])(XS)


# Lists


def test_the_table_of_lines():
    n = double.__code__.co_firstlineno + 1
    m = loss_of_calls.__code__.co_firstlineno + 2
    table = str(cg.list_names(loss_of_calls, (XS,), lines=True)).splitlines()
    assert [row.split() for row in table] == [
        "name kind calls variable shape dtype scans sites cotangent".split(),
        f"{FILE}:{n} line loss_of_calls:{m - 1} > double:{n} h 3 float32 1 yes".split(),
        f"{FILE}:{m} line loss_of_calls:{m} scalar float32 1 yes".split(),
    ]


def test_a_function_without_names_hears_of_lines():
    assert "lines=True" in str(cg.list_names(loss_of_calls, (XS,)))
    none = str(cg.list_names(lambda x: x, (XS,), lines=True))
    assert none.startswith("no names: no line computes") and "lines=True" not in none
    with pytest.raises(ValueError, match="list_names\\(fun, args, lines=True\\) lists the lines"):
        cg.value_and_grad_with_stats(loss_of_calls)(XS)
    with pytest.raises(TypeError, match="lines: got 1, expected True or False"):
        cg.list_names(loss_of_calls, (XS,), lines=1)


@pytest.mark.slow
@pytest.mark.usefixtures("users_promotion")
def test_the_page_shows_what_its_program_prints(tmp_path, capsys):
    text = DOCS.read_text().partition("## Lines are names")[2]
    program, shown = re.findall(r"```(?:py|text)\n(.*?)```", text, re.DOTALL)[:2]
    path = tmp_path / "model.py"
    path.write_text(program)
    exec(compile(program, str(path), "exec"), {})
    assert capsys.readouterr().out == shown


# Models and training steps


class Eqx(eqx.Module):
    w: jax.Array

    def __call__(self, x):
        h = self.w * x  # here
        return h


class Nnx(nnx.Module):
    def __init__(self):
        self.w = nnx.Param(jnp.array(1.5))

    def __call__(self, x):
        h = self.w[...] * x  # here
        return h


@pytest.mark.slow
@pytest.mark.parametrize("make", [lambda: Eqx(W), Nnx], ids=["equinox", "nnx"])
def test_lines_of_models(make):
    model = make()
    name = line(type(model))
    loss = lambda model, x: model(x).sum()  # noqa: E731
    (listed,) = (n for n in cg.list_names(loss, (model, XS), lines=True) if n.name == name)
    assert listed.calls.endswith(f"{type(model).__name__}.__call__:{name.partition(':')[2]}")
    _, grads, stats = cg.value_and_grad_with_stats(loss, error_clip={name: RULE})(model, XS)
    assert stats[name].clipped
    assert_close(jax.tree.leaves(grads)[0], 0.1 * XS.sum())
    assert cg.with_value_stats(loss, watch=[name])(model, XS)[1][name].size == 3


@pytest.mark.slow
def test_lines_in_a_training_step():
    loss = lambda params, xs: plain(params["w"], xs, lambda h: h)  # noqa: E731
    step = cg.train_step(
        loss, optax.sgd(1.0), error_clip={line(cell): RULE}, watch_values=[line(cell)]
    )
    _, metrics = step(step.init({"w": W}), XS)
    assert metrics["error_clip"][line(cell)].clipped
    assert metrics["values"][line(cell)].size == 3
