"""The tables of JAX's primitives are whole, and know them by their objects."""

import ast
import importlib
import inspect
import json
import math
import os
import pathlib
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import Primitive
from jax.extend.core import primitives as jax_primitives
from jax.sharding import AxisType, PartitionSpec

import clipgrad as cg
from clipgrad import _programs
from clipgrad._programs import KINDS, NUMERIC, Does, flow, kind_of, numeric_of
from clipgrad._programs.primitives import PrimitiveTable, TracedOnce
from tests.helpers import array, assert_same
from tests.rows import first_row

X = array(np.linspace(0.1, 1.0, 4))
TABLES = {"KINDS": KINDS, "NUMERIC": NUMERIC}


def public():
    return {n: p for n, p in vars(jax_primitives).items() if isinstance(p, Primitive)}


def test_every_primitive_that_jax_names_has_a_row():
    assert [n for n, p in public().items() if p not in KINDS and p not in NUMERIC] == []


ROOT = pathlib.Path(cg.__file__ or "").parent


@pytest.mark.slow
def test_the_name_of_a_primitive_is_read_in_the_table_alone():
    """Elsewhere it is asked what an equation is, or what to call it in a message."""
    reading = []
    for path in ROOT.rglob("*.py"):
        attributes = (
            n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Attribute)
        )
        owners = {ast.unparse(n.value).rpartition(".")[2] for n in attributes if n.attr == "name"}
        reading += [path.relative_to(ROOT).as_posix()] * ("primitive" in owners)
    assert reading == ["_programs/kinds.py"]


def traced_once():
    rows = [entries for table in TABLES.values() for entries in table._rows.values()]
    return [p for entries in rows for p in entries if isinstance(p, TracedOnce)]


@pytest.mark.parametrize("probe", traced_once(), ids=lambda probe: probe.name)
def test_each_program_that_is_traced_once_has_a_primitive(probe):
    """Of its own, or, in a JAX without one, such as `stack` in 0.10.0, some that JAX names."""
    if probe.module not in sys.modules:
        pytest.importorskip(probe.module)
    program = jax.make_jaxpr(probe.run)(jax.ShapeDtypeStruct(probe.shape, "float32"))
    primitives = {e.primitive for e in _programs.equations(program)}
    assert primitives
    assert all(p in KINDS or p in NUMERIC for p in primitives)


def kernel(x):
    pallas = pytest.importorskip("jax.experimental.pallas")

    def run(x, y):
        y[...] = x[...]

    return pallas.pallas_call(run, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype))(x)


def written(x):
    pallas = pytest.importorskip("jax.experimental.pallas")

    def run(reference):
        reference[...] = reference[...] * 2

    return pallas.run_state(run)(x)


def partitioned(x):
    module = pytest.importorskip("jax.experimental.custom_partitioning")
    sine = module.custom_partitioning(jnp.sin)
    sine.def_partition(lambda *shardings: shardings, sharding_rule="i -> i")
    return sine(x)


def sharded(x):
    mesh = jax.make_mesh((4,), ("d",), (AxisType.Auto,))
    return jax.shard_map(jnp.sin, mesh=mesh, in_specs=PartitionSpec("d"),
                         out_specs=PartitionSpec("d"))(x)  # fmt: skip


def root(x):
    return lax.custom_root(lambda y: y - x, x, lambda f, y: x, lambda g, y: y / g(1.0))


@jax.custom_vjp
def ruled(x):
    return jnp.sin(x)


ruled.defvjp(lambda x: (jnp.sin(x), x), lambda x, g: (2 * g,))
batched = jax.custom_batching.custom_vmap(lambda x: jnp.sin(x))
batched.def_vmap(lambda size, is_batched, x: (jnp.sin(x), True))

# Programs by the kind of the equation in them that holds programs.
HOLDING = {
    "scan": lambda x: lax.scan(lambda c, y: (c + y, c), 0.0, x),
    "while": lambda x: lax.while_loop(lambda c: c[0] < 3, jnp.sin, x),
    "cond": lambda x: lax.cond(x[0] > 0, jnp.sin, jnp.cos, x),
    "jit": jax.jit(jnp.sin),
    "remat": jax.checkpoint(jnp.sin),
    "shard_map": sharded,
    "custom rule": (ruled, jax.nn.relu, batched, lambda x: root(x[0])),
    "linear solve": lambda x: lax.custom_linear_solve(
        lambda v: 2 * v, x, lambda f, b: b / 2, symmetric=True
    ),
    "operation with functions": (
        lambda x: lax.reduce(x, 0.0, lambda a, b: jnp.where(a > b, a, b * 2), (0,)),
        lambda x: x.at[0].add(1.0),
        lambda x: lax.composite(jnp.sin, "clipgrad.sine")(x),
    ),
    "kernel": (kernel, written, partitioned),
}
PROGRAMS = [
    pytest.param(noun, f, id=f"{noun} {i}")
    for noun, functions in HOLDING.items()
    for i, f in enumerate(functions if isinstance(functions, tuple) else (functions,))
]


@pytest.mark.parametrize(("noun", "function"), PROGRAMS)
def test_an_equation_that_holds_programs_is_of_a_kind(noun, function):
    equations = list(_programs.equations(jax.make_jaxpr(function)(X)))
    holding = [e for e in equations if _programs.held_programs(e)]
    assert [e.primitive.name for e in holding if kind_of(e) is None] == []
    assert noun in {kind.noun for e in equations if (kind := kind_of(e))}


# Primitives of a part of JAX's public functions, which nobody asks the tables for: of random keys,
# of references, and of shapes that are numbers in the program.
OTHERS = frozenset(
    """random_wrap random_unwrap random_clone addupdate platform_index
    lu_pivots_to_permutation scaled_matmul_wrapper scaled_matmul dce_sink unreachable geqp3 geqrf
    ormqr empty_ref free_ref with_memory_space_constraint tie reciprocal""".split()
)
MODULES = "jax.lax jax.numpy jax.numpy.linalg jax.numpy.fft jax.nn jax.scipy.special jax.lax.linalg"


def public_functions():
    for name in MODULES.split():
        module = importlib.import_module(name)
        for attribute in sorted(vars(module)):
            if callable(f := getattr(module, attribute)) and not attribute.startswith("_"):
                if not inspect.isclass(f):
                    yield f


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_the_public_functions_of_jax_have_no_primitive_without_a_row():
    """Those that take one, two or three matrices, most of 500."""
    matrix = jax.ShapeDtypeStruct((4, 4), "float32")
    primitives, traced = set(), 0
    for function in public_functions():
        for count in (1, 2, 3):
            try:
                program = jax.make_jaxpr(function)(*[matrix] * count)
            except Exception:
                continue
            traced += 1
            primitives |= {e.primitive for e in _programs.equations(program)}
            break
    without = {p.name for p in primitives if p not in KINDS and p not in NUMERIC}
    assert traced > 300
    assert without - OTHERS == set()


def tagged(x):
    def step(carry, row):
        with jax.named_scope("cell"):
            carry = jnp.tanh(carry * row)
        return checkpoint_name(carry, "h"), None

    carry, _ = lax.scan(jax.checkpoint(step), jnp.sum(jax.jit(jnp.sin)(x)), x)
    carry = lax.cond(carry > 0, jnp.sin, lambda c: checkpoint_name(c, "other"), carry)
    return lax.while_loop(lambda c: c < 1, lambda c: 2 * checkpoint_name(c, "doubled"), carry)


def answers():
    program = jax.make_jaxpr(tagged)(X)
    names = [(name.name, name.kind) for name in cg.list_names(tagged, (X,))]
    (again,) = _programs.evaluate(program, [X], _programs.Hook())
    (wide,) = _programs.evaluate(program, [X], _programs.Widen(jnp.float32))
    values = cg.with_value_stats(tagged, watch=["h", "cell", "doubled"])(X)
    return names, jax.tree.map(np.asarray, (again, wide, values))


RENAMED = "scan_p while_p cond_p jit_p remat_p name_p stop_gradient_p closed_call_p tanh_p"


@pytest.mark.slow
@first_row
@pytest.mark.parametrize("name", RENAMED.split())
def test_a_primitive_that_jax_renames_is_known_by_its_object(monkeypatch, name):
    before = answers()
    monkeypatch.setattr(getattr(jax_primitives, name), "name", "renamed")
    after = answers()
    assert before[0] == after[0]
    jax.tree.map(np.testing.assert_array_equal, before[1], after[1])


ZERO = array(np.zeros(3))
TWICE = array([[1.0], [-1.0]])
EXPLAINED = {  # functions of three numbers, and what `diagnose` says that knows their primitives
    "cast": (lambda x: x.astype(jnp.int32) * 1.5, "a cast to int32"),
    "bits": (lambda x: lax.bitcast_convert_type(x, jnp.int32) * 1e-9, "a cast to int32"),
    "index": (lambda x: jnp.argmax(x) * 1.5, "the indices of"),
    "comparison": (lambda x: (x > 1) * 1.5, "a comparison"),
    "flat": (jnp.round, "flat everywhere"),
    "detached": (lax.stop_gradient, "detaches it"),
    "clipped": (lambda x: lax.clamp(-0.1, x, 0.1) + 1, "clips all 3"),
    "one side": (lambda x: lax.max(x, 5.0 + ZERO), "is flat at all 3"),
    "mask": (lambda x: lax.select(x < -1, x, ZERO + 1), "takes the other side"),
    "read": (lambda x: jnp.concatenate([x, ZERO + 1])[3:], "reads or writes no element"),
    "written": (lambda x: lax.dynamic_update_slice(x, ZERO + 1, (0,)), "is overwritten before"),
    "added": (lambda x: (ZERO + 1).at[0].add(x[0])[1:], "reads or writes no element"),
    "dropped": (
        lambda x: (ZERO + 1).at[5].add(x[0], mode="drop"),
        "5 on axis 0 of float32[3], are",
    ),
    "factor": (lambda x: x * jnp.where(x > 9, x, 0.0) + 1, "it is multiplied by values that are 0"),
    "sum": (lambda x: lax.broadcast_in_dim(x, (2, 3), (1,)) * TWICE, "nothing is wrong"),
    "power": (lambda x: (x * 1e-25) ** 2, "rounds to 0 in float32"),
    "random": (lambda x: x * jax.random.bernoulli(jax.random.key(0), 1e-9, (3,)), "random numbers"),
    "sqrt": (lambda x: jnp.sqrt(x - x), "has no finite derivative at 0"),
    "log": (lambda x: jnp.where(x > 9, jnp.log(x - x), x), "even if jnp.where masks its result"),
    "exp": (lambda x: jnp.exp(x + 1000), "bound its argument"),
    "cosh": (lambda x: jnp.where(x > 9, jnp.cosh(x + 1000), x), "bound its argument"),
    "div": (lambda x: 1e-30 / (x * 1e-25), "computes 1 / x ** 2"),
    "atan2": (lambda x: jnp.arctan2(x - x, x - x), "computes 0 / 0"),
    "solve": (lambda x: jnp.linalg.solve(jnp.zeros((3, 3)), x), "the matrix may be singular"),
    "eigh": (lambda x: jnp.linalg.eigh(jnp.eye(3) * x[0])[1], "two of them are equal"),
    "lookup": (lambda x: x.at[jnp.array([5])].get(mode="fill"), "correct the indices"),
    "softmax": (lambda x: jax.nn.softmax(x - jnp.inf), "all masked"),
    "reference": (lambda x: jax.freeze(jax.new_ref(jnp.round(x))), "flat everywhere"),
}


@pytest.fixture(scope="module")
def forgotten():
    """What was compiled of renamed primitives says their names: later tests have their own."""
    yield
    jax.clear_caches()


@pytest.fixture
def renamed(monkeypatch, forgotten):
    """A made-up JAX that calls each primitive otherwise, but for one that JAX knows by name."""
    for primitive in {*KINDS, *NUMERIC} - {jax_primitives.custom_lin_p}:
        monkeypatch.setattr(primitive, "name", f"renamed_{primitive.name}")


@pytest.mark.slow
@pytest.mark.usefixtures("users_promotion", "renamed")
@pytest.mark.parametrize("name", EXPLAINED)
def test_diagnose_knows_what_it_explains_by_the_object_of_a_primitive(name):
    function, says = EXPLAINED[name]
    diagnosis = cg.diagnose(lambda x: jnp.sum(function(x)), (jnp.array([0.5, -0.25, 2.0]),))
    assert says in "\n".join(
        [diagnosis.message, *(f.message for f in diagnosis.findings), *diagnosis.notes]
    )


# Files that show the name of a primitive to people, or hand it to their rules.
SHOWN = """_check/float64 _diagnose/diagnose _diagnose/discharge _error_clip/everywhere
_names/operations _names/places _per_example/places _per_example/walk"""


def reads_a_name(node):
    names = [n for n in ast.walk(node) if isinstance(n, ast.Attribute) and n.attr == "name"]
    return any(getattr(n.value, "attr", "") == "primitive" for n in names)


@pytest.mark.slow
def test_no_other_room_compares_the_name_of_a_primitive():
    root = pathlib.Path(cg.__file__).parent
    paths = [path for path in root.rglob("*.py") if path.parent.name != "_programs"]
    trees = {str(p.relative_to(root).with_suffix("")): ast.parse(p.read_text()) for p in paths}
    assert {name for name, tree in trees.items() if reads_a_name(tree)} <= set(SHOWN.split())
    compared = [n for tree in trees.values() for n in ast.walk(tree) if isinstance(n, ast.Compare)]
    assert not any(map(reads_a_name, compared))


def test_a_jax_without_a_primitive_that_a_row_needs_is_told_by_name(monkeypatch):
    """The made-up JAX calls `scan_p` otherwise: one place says so, when it is first asked."""
    table = PrimitiveTable("KINDS", {object(): ("scan_p", "log2_p?")})
    monkeypatch.delattr(jax_primitives, "scan_p")
    with pytest.raises(
        AttributeError, match=r"has no jax\.extend\.core\.primitives\.scan_p.*KINDS"
    ):
        table.get(jax_primitives.tanh_p)


HOLDERS = {
    "scan_p": lambda run, x: lax.scan(lambda c, y: (run(c + y), None), x[0], x)[0],
    "while_p": lambda run, x: lax.while_loop(lambda c: c[0] < 1, lambda c: run(c) + 1, x),
    "cond_p": lambda run, x: lax.cond(x[0] > 5, run, jnp.cos, x),
    "jit_p": lambda run, x: jax.jit(run)(x),
    "remat_p": lambda run, x: jax.checkpoint(run)(x),
}


@first_row
@pytest.mark.parametrize("name", HOLDERS)
def test_a_primitive_of_a_new_jax_that_no_row_has_is_told_where_a_name_in_it_is_wanted(
    monkeypatch, name
):
    """It holds programs as before, under a name of its own: the program stays what it is."""

    def model(x):
        return jnp.sum(HOLDERS[name](lambda x: checkpoint_name(jnp.sin(x), "h"), x))

    monkeypatch.delitem(KINDS._public, getattr(jax_primitives, name))
    monkeypatch.setattr(getattr(jax_primitives, name), "name", "made_up")
    program = jax.make_jaxpr(model)(X)
    holding = [e for e in program.eqns if _programs.held_programs(e) and kind_of(e) is None]
    assert "made_up" in {_programs.noun_of(e) for e in holding}
    assert_same(_programs.evaluate(program, [X], _programs.Hook()), [model(X)])
    message = "got 'h', which tags a variable inside of made_up, expected one whose"
    with pytest.raises(ValueError, match=f"error_clip_by_name: {message} cotangents"):
        cg.error_clip_by_name(model, {"h": cg.ErrorClipByValue(1.0)})(X)
    with pytest.raises(ValueError, match=f"with_value_stats: {message} values"):
        cg.with_value_stats(model, watch=["h"])(X)


def test_what_an_operation_does_to_numbers_is_read_from_its_row():
    program = jax.make_jaxpr(lambda x: (jnp.stack([x, x]), jnp.tile(x, 2), jnp.unstack(x)))(X)
    does = {e: numeric_of(e).does for e in _programs.equations(program) if e.outvars}
    does = {e: effect for e, effect in does.items() if kind_of(e) is None}
    assert set(does.values()) <= {Does.COPIES}
    logs = jax.make_jaxpr(lambda x: (jnp.log(x), jnp.log1p(x)))(X)
    assert all(map(_programs.is_bad_at("log of zero"), _programs.equations(logs)))
    assert "log of zero" in {row.bad_at for row in NUMERIC.values()}
    assert not hasattr(jax_primitives, "log2_p") or NUMERIC[vars(jax_primitives)["log2_p"]].bad_at


def test_facts_flow_around_loops_to_a_fixed_point():
    """A loop that carries its last three states needs three rounds."""

    def states(w, x):
        def step(carry, row):
            a, b, c = carry
            return (b, c, a * w + row), None

        return lax.scan(step, (x[0], x[1], x[2]), x)[0]

    def either(*facts):
        return frozenset().union(*facts)

    def through(chain, operands, inside):
        return inside()

    program = jax.make_jaxpr(states)(1.0, X)
    inputs = [frozenset({"w"}), frozenset({"x"})]
    assert flow(program, inputs, through, either) == [frozenset({"w", "x"})] * 3
    never = jax.make_jaxpr(lambda x: lax.while_loop(lambda c: c < 0, lambda c: c * 0 + 1.0, x))(1.0)
    assert flow(never, [frozenset({"start"})], through, either) == [frozenset({"start"})]


@pytest.mark.slow
def test_other_facts_may_go_into_a_program_and_on_to_the_next_step():
    """Each operation has its position; of a branch that is the number of the branch, too."""

    def counted(x):
        x = lax.cond(x > 0, jnp.sin, jnp.sin, x)
        return lax.scan(lambda c, y: (jnp.cos(c) + y, c), x, X)

    positions = []

    def through(chain, operands, inside):
        positions.append(chain.position)
        if kind_of(chain[0]) is _programs.SCANS:
            return inside([fact | {"entered"} for fact in operands])
        return inside()

    def carry(loop, number, fact):
        assert number == 0 and kind_of(loop[0]) is _programs.SCANS
        return frozenset({"carried"})

    either = lambda *facts: frozenset().union(*facts)  # noqa: E731
    program = jax.make_jaxpr(counted)(1.0)
    facts_of_results = flow(program, [frozenset({"x"})], through, either, carry=carry)
    assert facts_of_results == [frozenset({"x", "entered", "carried"})] * 2
    chains = {*positions}
    conditional = next(i for i, e in enumerate(program.eqns) if _programs.is_cond(e))
    assert {(conditional, 0, 0), (conditional, 1, 0), (conditional,)} <= chains


UPGRADES = ("jax_custom_vjp3", "jax_custom_jvp3", "jax_remat3")


def upgraded_calls(flag):
    """The answers of all calls in a process with JAX's upgrade flags, or without."""
    flags = {name.upper(): flag for name in UPGRADES}
    script = pathlib.Path(__file__).parent / "upgraded_calls.py"
    path = os.pathsep.join([str(script.parents[2]), *filter(None, sys.path)])
    run = subprocess.run(
        [sys.executable, str(script)], env={**os.environ, **flags, "PYTHONPATH": path},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-2000:]
    return json.loads(run.stdout.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.skipif(
    not all(hasattr(jax.config, name) for name in UPGRADES),
    reason=f"JAX {jax.__version__} has no flags JAX_CUSTOM_VJP3, JAX_CUSTOM_JVP3 and JAX_REMAT3",
)
def test_all_calls_give_the_same_answers_under_the_upgrade_flags_of_jax():
    plain, upgraded = upgraded_calls("0"), upgraded_calls("1")
    assert len(plain) == 17
    for name, answer in plain.items():
        assert _close(answer, upgraded[name]), name


def _close(answer, other):
    """Texts are the same but for numbers, which are close."""
    if isinstance(answer, list):
        return len(answer) == len(other) and all(map(_close, answer, other))
    if isinstance(answer, str):
        number = r"-?\d+\.?\d*(?:e[-+]\d+)?"
        first, second = (list(map(float, re.findall(number, text))) for text in (answer, other))
        return re.sub(number, "#", answer) == re.sub(number, "#", other) and _close(first, second)
    return answer == other or math.isclose(answer, other, rel_tol=1e-3, abs_tol=1e-7)
