"""Devices, progress, and the function that a request is made into."""

import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import clipgrad as cg
from clipgrad import _devices as devices
from clipgrad._check.checked_function import checked_function
from clipgrad._check.report import GradCheckReport
from clipgrad._check.slopes import progress_bar
from clipgrad._check.tolerances import LONG
from tests.helpers import array
from tests.rows import each_value, some_of

X = array([0.5, 1.5])


def slow(case):
    return pytest.param(case, marks=pytest.mark.slow)


def test_the_default_device_comes_first_and_the_cpu_always():
    kinds = devices.find_devices(None)
    assert list(kinds.there)[0] == jax.default_backend() and "cpu" in kinds.there
    assert kinds.absent == []


def test_kinds_that_are_not_there_are_told_from_those_that_are():
    kinds = devices.find_devices(("tpu", "cpu"))
    assert list(kinds.there) == ["cpu"] and kinds.absent == ["tpu"]
    assert devices.find_devices("cpu") == devices.find_devices(["cpu"])


@pytest.mark.parametrize("kinds", [("abacus",), (), ["cpu", "CPU"]])
def test_an_impossible_kind_is_refused_with_the_list_of_possible_ones(kinds):
    with pytest.raises(ValueError, match=r"^devices: got .*, expected some of cpu, gpu, tpu"):
        devices.find_devices(kinds)


def test_arrays_move_and_what_is_no_array_or_there_already_stays():
    cpu = jax.devices("cpu")[0]
    tree = (X, "word", 3, None)
    moved = devices.moved(tree, cpu)
    assert moved[0] is X and moved[1:] == ("word", 3, None)
    other = jax.device_put(X, jax.devices("cpu")[1])
    assert devices.moved(other, cpu) is other


@pytest.mark.slow
def test_a_gradient_that_differs_between_devices_names_both(monkeypatch):
    first, second = jax.devices("cpu")[:2]
    two_devices = devices.Devices({"gpu": first, "cpu": second}, [])
    module = sys.modules["clipgrad._check.check_grads"]
    monkeypatch.setattr(module, "find_devices", lambda kinds: two_devices)
    sine = jax.custom_vjp(jnp.sin)

    def backward(x, cotangent):
        is_second = jax.config.jax_default_device == second
        return ((1.0 + is_second) * cotangent * jnp.cos(x),)

    sine.defvjp(lambda x: (jnp.sin(x), x), backward)
    report = cg.check_grads(sine, (X,), raise_on_failure=False)
    assert report.devices == ("gpu", "cpu") and {f.check for f in report.failures} == {"devices"}
    text = "the gradient on cpu: 2 of 2 elements wrong; worst: numeric -0.8775826, analytic -1.7551"
    assert text in str(report)


WRONG_ON = {"the first": {"gpu"}, "the second": {"cpu"}, "both": {"gpu", "cpu"}, "none": set()}
OPTIONS = {"by three witnesses": {}, "by Paddle's rule": {"max_relative_error": 0.005}}


@each_value
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("where", WRONG_ON)
def test_each_device_is_held_against_the_numeric_gradient(monkeypatch, where, options):
    """A callback tells the devices apart: the rule that is traced does not know of them."""
    there = dict(zip(("gpu", "cpu"), jax.devices("cpu"), strict=False))
    module = sys.modules["clipgrad._check.check_grads"]
    monkeypatch.setattr(module, "find_devices", lambda kinds: devices.Devices(there, []))
    wrong = [there[kind] for kind in WRONG_ON[where]]

    def backward(x, cotangent):
        is_wrong = isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer)
        is_wrong = is_wrong and jax.config.jax_default_device in wrong
        return ((1.0 + is_wrong) * cotangent * jnp.cos(x),)

    sine = jax.custom_vjp(jnp.sin)
    sine.defvjp(lambda x: (jnp.sin(x), x), backward)
    skip = ("jit", "vmap", "determinism", "points")
    report = cg.check_grads(sine, (X,), raise_on_failure=False, skip=skip, **OPTIONS[options])
    named = {"gpu": "computed on gpu", "cpu": "the gradient on cpu: 2 of 2 elements wrong"}
    for kind, text in named.items():
        assert (text in str(report)) == (kind in WRONG_ON[where]), str(report)
    assert report.ok == (where == "none") and report.devices == ("gpu", "cpu")


GROUPS = {"gpu": slice(0, 4), "cpu": slice(4, 8)}  # two kinds, as far as a check can tell


@pytest.fixture
def two_kinds(monkeypatch):
    groups = {kind: jax.devices("cpu")[where] for kind, where in GROUPS.items()}

    def moved(tree, device):
        (group,) = (set(g) for g in groups.values() if device in g)
        put = lambda x: x if x.devices() <= group else jax.device_put(x, device)  # noqa: E731
        return jax.tree.map(put, tree)

    module = sys.modules["clipgrad._check.check_grads"]
    pair = devices.Devices({kind: group[0] for kind, group in groups.items()}, [])
    monkeypatch.setattr(module, "find_devices", lambda kinds: pair)
    monkeypatch.setattr(module, "moved", moved)
    return groups


BOUND = {
    "shard_map": lambda mesh: jax.shard_map(
        lambda x: jnp.sin(x), mesh=mesh, in_specs=P("i"), out_specs=P("i")
    ),
    "constraint": lambda mesh: (
        lambda x: jnp.sin(lax.with_sharding_constraint(x, NamedSharding(mesh, P("i"))))
    ),
    "array": lambda mesh: (lambda factor: jax.jit(lambda x: jnp.sin(x) * factor))(
        jax.device_put(X, NamedSharding(mesh, P("i")))
    ),
    "put": lambda mesh: lambda x: jnp.sin(jax.device_put(x, mesh.devices[0])),
}


@pytest.mark.parametrize("kind", some_of(GROUPS, ["gpu"]))
@pytest.mark.parametrize("name", ["array", *map(slow, ["shard_map", "constraint", "put"])])
def test_a_function_bound_to_devices_is_checked_on_these_and_the_report_says_so(
    two_kinds, name, kind
):
    mesh = Mesh(np.asarray(two_kinds[kind][:2]), ("i",))
    x = jax.device_put(X, NamedSharding(mesh, P("i")))
    checked = cg.check_grads(BOUND[name](mesh), (x,))
    (other,) = GROUPS.keys() - {kind}
    assert checked.ok and checked.verified == 2
    if name == "put":  # it goes where it is bound to
        assert checked.devices == ("gpu", "cpu") and not any(
            "device" in key for key in checked.not_run
        )
        return
    assert checked.devices == (kind,)
    assert checked.not_run[f"device {other}"].endswith(
        "that the function holds is on other devices"
    )


def test_a_function_that_fails_on_every_device_raises_its_own_error(two_kinds):
    def fails(x):
        raise ValueError("no such mesh")

    with pytest.raises(ValueError, match="^no such mesh$"):
        cg.check_grads(fails, (X,))
    meshes = (Mesh(np.asarray(group[:2]), ("i",)) for group in two_kinds.values())
    first, second = (BOUND["shard_map"](mesh) for mesh in meshes)
    with pytest.raises(ValueError, match="incompatible devices"):
        cg.check_grads(lambda x: first(x) + second(x), (X,))


CALLS = {
    "check": lambda x: cg.check_grads(jnp.sin, (x,)),
    "closure": lambda x: cg.check_grads(lambda y: x * y, (np.ones(2, np.float32),)),
    "numerical": lambda x: cg.numerical_grad(jnp.sin, (x,)),
}
TRANSFORMED = {
    "jit": jax.jit,
    "vmap": jax.vmap,
    "grad": jax.grad,
    "scan": lambda call: lambda x: lax.scan(lambda c, y: (c, call(y)), 0, x),
}


@pytest.mark.parametrize("name", TRANSFORMED)
@pytest.mark.parametrize("call", CALLS)
def test_a_check_inside_of_a_transformation_is_refused_in_a_sentence(call, name):
    with pytest.raises(TypeError, match=r"^(args|fun): got a traced array, .*outside of jax.jit"):
        TRANSFORMED[name](CALLS[call])(X)


class Bar:
    """Stands in for tqdm."""

    total = done = 0

    def __init__(self, total, **options):
        Bar.total, self.options = total, options

    def __enter__(self):
        return self

    def __exit__(self, *error):
        return None

    def update(self, count):
        Bar.done += count


def test_long_work_shows_a_bar_where_tqdm_is_installed(monkeypatch):
    monkeypatch.setitem(sys.modules, "tqdm", types.SimpleNamespace(tqdm=Bar))
    with progress_bar(LONG) as update:
        update(7)
    assert (Bar.total, Bar.done) == (LONG, 7)


@pytest.mark.parametrize("total", [LONG - 1, LONG])
def test_short_work_and_work_without_tqdm_is_silent(monkeypatch, total, capsys):
    monkeypatch.setitem(sys.modules, "tqdm", None)
    with progress_bar(total) as update:
        assert update(3) is None
    assert capsys.readouterr() == ("", "")


def test_a_function_that_cannot_be_traced_has_no_program_and_no_gradient():
    function = lambda x: x * 2 if float(x[0]) > 0 else x  # noqa: E731
    assert checked_function(function, (X,)).program is None
    text = str(cg.check_grads(function, (X,), raise_on_failure=False))
    assert "[cotangent] args[0]: differentiation raises ConcretizationTypeError" in text


def test_reasons_that_are_the_same_are_told_once():
    missing = {"jit": "no rule", "vmap": "no rule", "device tpu": "absent"}
    report = GradCheckReport((), (), missing, 1, 0.1, "float64", ("cpu",), 1)
    assert str(report).splitlines()[1:] == [
        "  not run: jit, vmap (no rule)",
        "  not run: device tpu (absent)",
    ]


@pytest.mark.slow
def test_the_checks_of_rules_are_not_run_where_there_is_no_rule():
    report = cg.check_grads(jnp.sin, (X,))
    assert set(report.not_run) == {"vmap", "outputs"}
    assert report.not_run["vmap"] == "it has only JAX's own operations, without a custom rule"
    assert "vmap" not in cg.check_grads(jax.nn.relu, (X,)).not_run
