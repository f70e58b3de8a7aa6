"""The evaluator enters every nested program, and shows the hook each equation in it."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental.xla_metadata import set_xla_metadata
from jax.sharding import AxisType, PartitionSpec

from clipgrad import _programs
from tests.helpers import array
from tests.rows import crossed

X = array(np.linspace(0.1, 1.0, 4))


def stated(rule):
    rule.defvjp(lambda x: (jnp.sin(x), x), lambda x, g: (2 * g,))
    return rule


def jvp_rule():
    rule = jax.custom_jvp(jnp.sin)
    rule.defjvp(lambda p, t: (jnp.sin(p[0]), 2 * t[0]))
    return rule


def vmap_rule():
    rule = jax.custom_batching.custom_vmap(lambda x: jnp.sin(x))
    rule.def_vmap(lambda size, batched, x: (jnp.sin(x), True))
    return rule


def sharded(x):
    mesh = jax.make_mesh((4,), ("d",), (AxisType.Auto,))
    spec = PartitionSpec("d")
    return jax.shard_map(jnp.sin, mesh=mesh, in_specs=spec, out_specs=spec)(x)


CUSTOM = {
    "custom_jvp": jvp_rule(),
    "custom_vjp": stated(jax.custom_vjp(lambda x: jnp.sin(x))),
    "custom_vmap": vmap_rule(),
}
NESTED = {
    "jit": jax.jit(jnp.sin),
    "remat": jax.checkpoint(jnp.sin),
    "scan": lambda x: lax.scan(lambda c, t: (c + x[1], jnp.sin(t) * x[0]), x[0], x)[1],
    "reversed scan": lambda x: lax.scan(lambda c, t: (c + t, jnp.sin(c)), x[0], x, reverse=True)[1],
    "while": lambda x: lax.while_loop(
        lambda c: c[1] < x[3] + 2, lambda c: (jnp.sin(c[0]) * x, c[1] + 1), (x, x[0])
    )[0],
    "cond": lambda x: lax.cond(x[0] > 0, jnp.sin, jnp.cos, x),
    "linear solve": lambda x: jnp.linalg.solve(2 * np.eye(4, dtype=np.float32), jnp.sin(x)),
    "shard_map": sharded,
}


FLAT = _programs.Widen.in_place, _programs.Widen.whole


class Doubling(_programs.Hook):
    """Doubles every sine."""

    def __init__(self, flatten=False):
        if flatten:
            self.in_place, self.whole = FLAT

    def __call__(self, equation, inputs):
        if equation.primitive.name == "sin":
            return [2 * out for out in _programs.bind(equation, inputs)]
        return None


def again(function, hook, x=X):
    return _programs.evaluate(jax.make_jaxpr(function)(x), [x], hook)[0]


@crossed(6)
@pytest.mark.parametrize("flatten", [False, True])
@pytest.mark.parametrize("name", NESTED | CUSTOM)
def test_a_hook_that_does_nothing_changes_no_value_and_no_derivative(name, flatten):
    function = (NESTED | CUSTOM)[name]
    evaluated = jax.jit(lambda x: again(function, _keep(flatten), x))
    np.testing.assert_allclose(evaluated(X), function(X), rtol=1e-6)
    if name != "while" and name in NESTED:
        sums = (lambda x, f=f: f(x).sum() for f in (evaluated, function))
        ours, plain = (jax.jit(jax.grad(total))(X) for total in sums)
        np.testing.assert_allclose(ours, plain, rtol=1e-5)


def _keep(flatten):
    hook = _programs.Hook()
    if flatten:
        hook.in_place, hook.whole = FLAT
    return hook


@pytest.mark.parametrize("name", NESTED)
def test_a_hook_reaches_the_equations_of_a_nested_program(name):
    assert not np.allclose(again(NESTED[name], Doubling()), NESTED[name](X))


def kinds_of(program):
    return {kind for e in program.eqns if (kind := _programs.kind_of(e)) is not None}


@pytest.mark.parametrize("name", sorted(NESTED.keys() - {"linear solve"}))
def test_a_hook_enters_all_kinds_but_those_that_it_leaves_whole(name):
    program, hook, others = jax.make_jaxpr(NESTED[name])(X), Doubling(), Doubling()
    hook.whole = kinds_of(program)
    others.whole = set(_programs.KINDS.values()) - hook.whole
    np.testing.assert_allclose(*_programs.evaluate(program, [X], hook), NESTED[name](X), rtol=1e-6)
    assert not np.allclose(*_programs.evaluate(program, [X], others), NESTED[name](X))


@pytest.mark.parametrize("name", ["jit", "remat", *CUSTOM])
def test_a_kind_that_a_hook_has_in_place_is_evaluated_without_its_wrapper(name):
    program, hook = jax.make_jaxpr((NESTED | CUSTOM)[name])(X), _programs.Hook()
    hook.in_place = kinds_of(program)
    again = jax.make_jaxpr(lambda x: _programs.evaluate(program, [x], hook))(X)
    assert kinds_of(program) and not kinds_of(again)


@pytest.mark.parametrize("name", CUSTOM)
def test_custom_rules_stay_whole_unless_flattened(name):
    np.testing.assert_allclose(again(CUSTOM[name], Doubling()), jnp.sin(X))
    np.testing.assert_allclose(again(CUSTOM[name], Doubling(flatten=True)), 2 * np.sin(X))


def test_a_rule_kept_whole_keeps_its_derivative_and_a_flattened_one_loses_it():
    total = lambda hook: lambda x: again(CUSTOM["custom_vjp"], hook, x).sum()  # noqa: E731
    np.testing.assert_allclose(jax.grad(total(_programs.Hook()))(X), [2] * 4)
    np.testing.assert_allclose(jax.grad(total(_keep(True)))(X), np.cos(X), rtol=1e-6)


def test_remat_stays_remat_with_its_policy():
    policy = jax.checkpoint_policies.everything_saveable
    function = functools.partial(jax.checkpoint, policy=policy)(jnp.sin)
    program = jax.make_jaxpr(lambda x: again(function, _programs.Hook(), x))(X)
    remats = [e for e in _programs.equations(program) if _programs.kind_of(e) is _programs.REMAT]
    assert remats[0].params["policy"] is policy


def solved(x):
    return lax.custom_linear_solve(lambda v: 2 * v, x, lambda f, b: b / 2, symmetric=True)


def partly_sharded(x):
    mesh = jax.make_mesh((2, 2), ("d", "m"), (AxisType.Auto, AxisType.Auto))
    spec = PartitionSpec("d")
    options = {"mesh": mesh, "in_specs": spec, "out_specs": spec, "axis_names": {"d"}}
    return jax.shard_map(lambda x: lax.psum(x, "d") + x, **options, check_vma=False)(x)


def compiled(x):
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return jax.jit(jnp.sin, keep_unused=True, inline=True, out_shardings=device)(x)


OPTIONS = {
    "reversed scan": NESTED["reversed scan"],
    "unrolled scan": lambda x: lax.scan(
        lambda c, t: (c + t, t), x[0], x, unroll=2, _split_transpose=True
    )[1],
    "remat": jax.checkpoint(jnp.sin, prevent_cse=False),
    "shard_map of one axis": partly_sharded,
    "jit": compiled,
}


def equations_of(function):
    return _programs.opened(jax.make_jaxpr(function)(X))[0].eqns


@pytest.mark.parametrize("name", OPTIONS)
def test_the_options_of_a_nested_program_are_kept(name):
    plain, evaluated = (
        next(e for e in equations_of(f) if _programs.entered_programs(e)[0])
        for f in (OPTIONS[name], lambda x: again(OPTIONS[name], _programs.Hook(), x))
    )
    assert plain.primitive is evaluated.primitive

    def options(equation):
        kinds = bool, int, str, frozenset, tuple, jax.sharding.Mesh, type(None)
        return {k: v for k, v in equation.params.items() if isinstance(v, kinds)}

    assert options(plain) == options(evaluated) and len(options(plain)) > 1


def halved(x):
    return lax.while_loop(lambda c: c[0] < 2, lambda c: (c[0] + x, jnp.sin(c[1]) + x), (x, x))[1]


NOTED = []


def noting(x):
    def note(value):
        jax.debug.callback(lambda v: NOTED.append(float(v)), value, ordered=True)
        return value

    return lax.while_loop(lambda c: note(c) < x[3] + 2, lambda c: note(-c) * -1 + 1, x[0])


def recomputed(x):
    return jax.grad(lambda x: jax.checkpoint(lambda x: jnp.sin(jnp.sin(x)))(x).sum())(x)


def solved_by_steps(x):
    """A root by Newton's method, whose rule solves by steps too."""
    root = jax.custom_vjp(jax.vmap(halved))
    root.defvjp(lambda x: (root(x), x), lambda x, g: (jax.vmap(halved)(x) * g,))
    return jnp.sin(root(x))


def summed_in_place(x):
    total = jax.new_ref(jnp.zeros(()))

    def body(c):
        total[...] = total[...] + c
        return c + 1

    return lax.while_loop(lambda c: c < 5, body, x[0]) + total[...]


SAME = {
    "while of a vmap": jax.vmap(halved),
    "while with effects": noting,
    "cond on the platform": lambda x: lax.platform_dependent(x, cpu=jnp.sin, default=jnp.cos),
    "remat that is differentiated": recomputed,
    "custom rule with a while": solved_by_steps,
    "while that writes": summed_in_place,
}


@pytest.mark.parametrize("name", SAME)
def test_a_program_is_bound_again_as_it_was(name):
    plain = jax.make_jaxpr(SAME[name])(X)
    evaluated = jax.make_jaxpr(lambda x: again(SAME[name], _programs.Hook(), x))(X)
    texts = [re.sub("0x[0-9a-f]+", "", str(program)) for program in (plain, evaluated)]
    assert texts[0] == texts[1]


def test_a_symmetric_linear_solve_stays_symmetric():
    for program in (solved, lambda x: again(solved, _programs.Hook(), x)):
        solve = jax.make_jaxpr(program)(X).eqns[0].params["jaxprs"]
        assert solve.vecmat is solve.matvec


class PerStep(_programs.Hook):
    """Multiplies each sine inside a scan by that step's weight."""

    def __init__(self, weights, weight=None):
        self.weights, self.weight = weights, weight

    def slices(self, equation):
        return self.weights

    def inside(self, equation, part):
        return PerStep(self.weights, part.slices) if _programs.is_scan(equation) else self

    def __call__(self, equation, inputs):
        if equation.primitive.name == "sin" and self.weight is not None:
            return [self.weight * out for out in _programs.bind(equation, inputs)]
        return None


def test_a_hook_hands_values_out_step_by_step():
    function = lambda x: lax.scan(lambda c, t: (c, jnp.sin(t)), x[0], x)[1]  # noqa: E731
    weights = array(np.arange(4.0))
    np.testing.assert_allclose(
        again(function, PerStep(weights)), np.arange(4) * np.sin(X), rtol=1e-6
    )


def test_a_hook_is_asked_about_constants():
    class Tripled(_programs.Hook):
        def constant(self, value, aval):
            return 3 * value

    table = np.arange(4, dtype=np.float32)
    np.testing.assert_allclose(again(lambda x: x + table, Tripled()), np.asarray(X) + 3 * table)


def test_a_context_of_an_equation_is_kept():
    def scoped(x):
        with jax.named_scope("outer"), set_xla_metadata(note="of the user"):
            return jax.jit(lambda x: jnp.sin(x))(x)

    text = jax.jit(lambda x: again(scoped, _programs.Hook(), x)).lower(X).as_text(debug_info=True)
    assert "outer" in text and 'note = "of the user"' in text


@pytest.mark.parametrize(("is_reusable", "times"), [(True, 1), (False, 3)])
def test_an_inner_jit_is_compiled_once_if_equal_hooks_always_do_the_same(is_reusable, times):
    inner = jax.jit(jnp.sin)
    seen = []

    class Seen(_programs.Hook):
        def __call__(self, equation, inputs):
            seen.append(equation.primitive.name)
            return None

    Seen.is_reusable = is_reusable
    hook = Seen()
    for _ in range(3):
        again(lambda x: inner(x), hook)
    assert seen.count("sin") == times
