"""Two versions of one loss: the module, the kind and the step of each planted difference."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name

import clipgrad as cg
from clipgrad._compare.renamed import Renamed, same_leaves
from tests.compare.compare_models import (
    GRADS_FAULTS,
    LAYERS,
    STEP_FAULTS,
    VALUE_FAULTS,
    VERSIONS,
    VJP_FAULTS,
    make_args,
    model,
)
from tests.helpers import array
from tests.rows import first_row, in_turn

LAST = LAYERS - 1


def rows(names):
    """Each name in float32 with scanned layers: none of them in the core."""
    return [pytest.param(name, marks=pytest.mark.slow) for name in names]


def expected(module, step, scan):
    """Module and step of a scanned model, or of one that is unrolled."""
    is_layer = module.startswith("layers")
    if scan or not is_layer:
        return module, step if is_layer else None
    return module.replace("layers", f"layers_{step}", 1), None


def compared(parts, scan=True, dtype="float32"):
    with jax.enable_x64(dtype == "float64"):
        return cg.compare(model(scan=scan), model(**parts, scan=scan), make_args(dtype))


def check(comparison, kind, module, step, scan):
    assert not comparison.ok and len(comparison.findings) == 1, str(comparison)
    (finding,) = comparison.findings
    wanted = (kind, *expected(module, step, scan))
    assert (finding.kind, finding.module, finding.step) == wanted, str(comparison)


OTHERS = [
    pytest.param(True, "float64", marks=pytest.mark.slow),
    pytest.param(False, "float32", marks=pytest.mark.slow),
]
KINDS = pytest.mark.parametrize("scan, dtype", [(True, "float32"), *OTHERS])


@in_turn
@KINDS
@pytest.mark.parametrize("name", rows(VALUE_FAULTS))
def test_a_value_that_differs_is_found_in_its_module(name, scan, dtype):
    parts, module = VALUE_FAULTS[name]
    check(compared(parts, scan, dtype), "value", module, 0, scan)


@in_turn
@KINDS
@pytest.mark.parametrize("name", rows(VJP_FAULTS))
def test_a_wrong_backward_pass_is_found_in_its_module(name, scan, dtype):
    parts, module = VJP_FAULTS[name]
    check(compared(parts, scan, dtype), "vjp", module, LAST, scan)


@in_turn
@KINDS
@pytest.mark.parametrize("name", rows(GRADS_FAULTS))
def test_a_gradient_that_differs_alone_is_found_by_its_path(name, scan, dtype):
    parts, path = GRADS_FAULTS[name]
    comparison = compared(parts, scan, dtype)
    assert {f.kind for f in comparison.findings} == {"grads"} and not comparison.ok, str(comparison)
    assert [f.path for f in comparison.findings] == [path]


@in_turn
@KINDS
@pytest.mark.parametrize("name", rows(STEP_FAULTS))
def test_the_step_is_that_of_the_fault(name, scan, dtype):
    parts, kind, step = STEP_FAULTS[name]
    check(compared(parts, scan, dtype), kind, "layers", step, scan)


@in_turn
@KINDS
@pytest.mark.parametrize("name", rows(VERSIONS))
def test_equal_versions_have_no_findings(name, scan, dtype):
    comparison = compared(VERSIONS[name], scan, dtype)
    assert comparison.ok and not comparison.findings, str(comparison)
    assert len(comparison.rows) > 50


@pytest.mark.slow
@pytest.mark.parametrize("swapped, reverse", [(False, True), (True, False)])
def test_a_carry_that_has_a_name_is_not_listed_again(swapped, reverse):
    """Calls are matched with the steps of a scan in the order of time."""

    def layer(x, w, name):
        with jax.named_scope(name):
            return jnp.tanh(x @ w)

    def scanned(w, x):
        step = lambda x, w: (layer(x, w, "layers"), None)  # noqa: E731
        return jnp.mean(jax.lax.scan(step, x, w, reverse=reverse)[0])

    def unrolled(w, x):
        for i in range(3)[:: -1 if reverse else 1]:
            x = layer(x, w[i], f"layer_{i}")
        return jnp.mean(x)

    args = 0.3 * jnp.arange(12.0).reshape(3, 2, 2), jnp.ones((4, 2))
    pair, names = (unrolled, scanned), {"layer_*": "layers"}
    if swapped:
        pair, names = pair[::-1], {"layers": "layer_*"}
    comparison = cg.compare(*pair, args, names=names)
    assert comparison.ok and len(comparison.rows) == 3 and not comparison.unmatched, str(comparison)
    assert not comparison.notes  # each step agrees


@jax.custom_vjp
def wrong_rule(x):
    return x


wrong_rule.defvjp(lambda x: (x, None), lambda _, g: (1.5 * g,))


def half(x):
    return x.astype(jnp.bfloat16)


def network(scanned=True, cast=False, extra=None, rule=lambda x: x, by=1.0):
    """Two layers and a head, whose weights are cast where they are used, or all at once."""

    def loss(params, x):
        def layer(x, w):
            with jax.named_scope("norm"):
                y = rule(x) / jnp.sqrt(1 + jnp.mean(x**2))
            with jax.named_scope("mlp"):
                return x + jnp.tanh(half(y) @ narrow(w)).astype(x.dtype), None

        narrow = (lambda w: w) if cast else half
        weights, head = map(half, params) if cast else params
        if scanned:
            with jax.named_scope("layers"):
                x, _ = jax.lax.scan(layer, x, weights)
        for i in range(0 if scanned else 2):
            with jax.named_scope(f"layer_{i}"):
                x, _ = layer(x, weights[i])
        if extra:
            with jax.named_scope(extra):
                x = x * 1.1
        with jax.named_scope("head"):
            z = (half(x) @ narrow(head)).astype(jnp.float32) * by
        return jnp.mean(z**2)

    return loss


UNROLLED = {"names": {"layers": "layer_*"}}
# The versions, and what is found; each row is named for what it needs.
NEEDS = {
    "the last step's carry is the scan's result": (
        {}, {"scanned": False, "by": 1.2}, UNROLLED, ("value", "head", None),
    ),
    "what a step carries is used in the next": (
        {}, {"rule": wrong_rule}, {}, ("vjp", "layers", 1),  # it uses it in the norm and beside it
    ),
    "operations that one version has": ({}, {"extra": "dropout"}, {}, ("value", "", None)),
    "operations on inputs alone are left out": (
        {}, {"cast": True, "by": 1.2}, {}, ("value", "head", None),
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", NEEDS)
def test_the_module_is_that_of_the_operations_between(name):
    parts_here, other, options, expected = NEEDS[name]
    weights = jnp.linspace(0.1, 0.6, 18).reshape(2, 3, 3), jnp.linspace(0.5, 1.2, 6).reshape(3, 2)
    args = weights, jnp.linspace(-1.0, 1.0, 12).reshape(4, 3)
    comparison = cg.compare(network(**parts_here), network(**other), args, rtol=2e-3, **options)
    (finding,) = comparison.findings
    assert (finding.kind, finding.module, finding.step) == expected, str(comparison)


# ---- small functions ----

ARGS = tuple(
    array(np.linspace(start, 1, size).reshape(-1, width))
    for start, size, width in ((0.1, 6, 2), (-1, 12, 3))
)


def small(scale=1.0, name="hidden", after=1.0, tag=None, aux=None):
    def loss(w, x):
        with jax.named_scope(name):
            h = jnp.tanh(x @ w) * scale
        h = checkpoint_name(h, tag) if tag else h
        value = jnp.mean(h**2) * after
        return value if aux is None else (value, aux)

    return loss


@pytest.mark.slow
def test_the_loss_is_the_last_place():
    comparison = cg.compare(small(), small(after=1.1), ARGS)
    (finding,) = comparison.findings
    assert (finding.kind, finding.module, finding.step) == ("value", "", None)
    assert "the loss differs by 0.091" in finding.message
    assert finding.file == __file__ and finding.line


@pytest.mark.slow
def test_names_that_differ_are_matched_by_names():
    comparison = cg.compare(small(), small(name="other"), ARGS)
    assert comparison.ok and len(comparison.unmatched) == 2 and not comparison.rows
    assert comparison.notes == ("no named value was matched; name values by names=, or tag them",)
    comparison = cg.compare(
        small(), small(name="other", scale=1.1), ARGS, names={"hidden": "other"}
    )
    assert not comparison.unmatched and comparison.findings[0].module == "hidden"
    with pytest.raises(
        ValueError, match="got 'hiden', expected the path of a value or of a leaf in"
    ):
        cg.compare(small(), small(name="other"), ARGS, names={"hiden": "other"})
    for names in ({"hidden": "othr"}, {"h*": "*r"}):
        (target,) = map(re.escape, names.values())
        with pytest.raises(
            ValueError, match=f"names: got '{target}' for .*value or of a leaf in oth"
        ):
            cg.compare(small(), small(name="other"), ARGS, names=names)


def test_the_deeper_of_two_names_counts_wherever_it_stands():
    names = {"net/block_*": "layers/*", "net/block_*/norm": "layers/*/scale"}
    for some in (names, dict(reversed(names.items()))):
        renamed = Renamed(some)
        assert renamed("net/block_1/norm/mean") == "layers/1/scale/mean"
        assert renamed("net/block_1/dense") == "layers/1/dense"


@pytest.mark.slow
def test_names_are_patterns_whose_stars_stand_for_the_same_text():
    names = {"a_*/b": "x*/c"}
    comparison = cg.compare(small(name="a_7/b"), small(name="x7/c"), ARGS, names=names)
    assert len(comparison.rows) == 1 and comparison.unmatched == (
        "module a_7 [4, 2]: 1 in fun, 0 in other",
        "module x7 [4, 2]: 1 in other, 0 in fun",
    )


@pytest.mark.slow
def test_a_value_without_a_match_has_its_own_name():
    two = lambda name: lambda w, x: small(name=name)(w, x) + small(name="same")(w, x)  # noqa: E731
    deep = lambda w, x: small(name="b")(w, x[:2]) + small(name="b")(w, x)  # noqa: E731
    comparison = cg.compare(two("a"), deep, ARGS, names={"a": "b", "same": "b"})
    assert "module a (as b) [4, 2]: 2 in fun, 1 in other" in str(comparison.unmatched)


@pytest.mark.slow
def test_has_aux_leaves_aux_out():
    comparison = cg.compare(small(aux=1), small(aux=2), ARGS, has_aux=True)
    assert comparison.ok and len(comparison.rows) == 1
    with pytest.raises(ValueError, match="expected a scalar; write has_aux=True"):
        cg.compare(small(aux=1), small(aux=2), ARGS)


@pytest.mark.slow
def test_what_differs_inside_of_equal_outputs_is_a_note():
    def loss(w, x, by):
        with jax.named_scope("inside"):
            h = (x @ w) * by
        with jax.named_scope("outside"):
            h = h / by
        return jnp.mean(h**2)

    comparison = cg.compare(functools.partial(loss, by=2.0), functools.partial(loss, by=4.0), ARGS)
    assert comparison.ok and not comparison.findings
    assert comparison.notes[0] == "outputs and gradients agree, but the values of inside differ"
    assert comparison.notes[1].endswith("the cotangents of inside differ")


@pytest.mark.slow
def test_other_args_may_have_another_dtype_and_other_leaves():
    wide = tuple(x.astype(jnp.bfloat16) for x in ARGS)

    def loss(w, x):
        return small()(w.astype(jnp.float32), x.astype(jnp.float32))

    comparison = cg.compare(loss, loss, ARGS, other_args=tuple(x.astype(jnp.float32) for x in wide))
    assert not comparison.ok
    assert cg.compare(loss, loss, wide, other_args=tuple(x * 1 for x in wide)).ok
    tree = {"w": ARGS[0], "more": ARGS[0]}
    comparison = cg.compare(
        lambda p, x: loss(p["w"], x), lambda p, x: loss(p["w"], x) + 0 * p["more"].sum(),
        ({"w": ARGS[0]}, ARGS[1]), other_args=(tree, ARGS[1]),
    )  # fmt: skip
    assert not comparison.ok and comparison.unmatched == ("gradient more, only in other",)
    assert [(f.kind, f.path) for f in comparison.findings] == [("grads", "more")]


@pytest.mark.slow
@pytest.mark.parametrize("argnums, paths", [(0, [""]), ((0, 1), ["0", "1"]), ((1, 0), ["1", "0"])])
def test_paths_are_those_of_the_gradient(argnums, paths):
    def wrong(w, x):
        @jax.custom_vjp
        def passed(v):
            return v

        passed.defvjp(lambda v: (v, None), lambda _, g: (2 * g,))
        return small()(passed(w), passed(x))

    comparison = cg.compare(small(), wrong, ARGS, argnums=argnums)
    assert [f.path for f in comparison.findings] == paths
    assert {f.kind for f in comparison.findings} == {"grads"}


@pytest.mark.slow
def test_a_place_that_rounding_decides_is_not_judged():
    def loss(w, x, shift):
        h = jnp.sum(x * w)
        with jax.named_scope("noise"):
            noise = jnp.sin(1e9 * (h + shift))
        return jnp.mean(h) + 0 * noise

    plain = functools.partial(loss, shift=0.0)
    shifted = functools.partial(loss, shift=1e-6)
    comparison = cg.compare(plain, shifted, (jnp.float32(0.3), jnp.linspace(0.1, 1.0, 7)))
    assert (
        "noise: rounding decides here, so the value is called neither equal nor different"
        in comparison.notes
    )


@pytest.mark.slow
def test_values_in_while_loops_have_no_cotangent():
    def loss(w, x, by):
        def body(state):
            i, h = state
            with jax.named_scope("cell"):
                h = jnp.tanh(h) * by
            return i + 1, h

        _, h = jax.lax.while_loop(lambda s: s[0] < 3, body, (0, jax.lax.stop_gradient(x @ w)))
        return jnp.mean(h) + jnp.mean(w)

    comparison = cg.compare(functools.partial(loss, by=1.0), functools.partial(loss, by=1.1), ARGS)
    assert comparison.findings[0].module == "cell"
    assert comparison.rows[0].cotangent is None


@pytest.mark.slow
def test_branches_that_are_not_taken_are_equal():
    def loss(w, x, by):
        def first(h):
            with jax.named_scope("first"):
                return jnp.tanh(h)

        def second(h):
            with jax.named_scope("second"):
                return jnp.sin(h) * by

        return jnp.mean(jax.lax.cond(x[0, 0] < 0, first, second, x @ w))

    plain = functools.partial(loss, by=1.0)
    changed = functools.partial(loss, by=1.1)
    assert cg.compare(plain, changed, ARGS).ok
    comparison = cg.compare(plain, changed, (ARGS[0], ARGS[1] + 2))
    assert comparison.findings[0].module == "second"


@pytest.mark.parametrize(
    "paths, other, pairs",
    [
        (["scale", "z/scale"], ["z/scale"], {1: 0}),  # an end of a path is not the path
        (["z/scale"], ["scale", "z/scale"], {0: 1}),
        (["scale", "w"], ["z/scale", "w"], {1: 1}),
        (["a/k", "b/k"], ["params/a/k", "params/b/k", "stats/m"], {0: 0, 1: 1}),
        (["params/a/k", "params/b/k"], ["b/k", "a/k"], {0: 1, 1: 0}),
        (["k", "b"], ["params/k"], {0: 0}),
        (["scale", "b"], ["z/scale", "z/c", "d"], {}),
        (["w"], ["a/w", "b/w"], {}),  # either
        ([""], ["w"], {0: 0}),
        ([""], ["w", "b"], {}),
        ([""], [""], {0: 0}),
        (["a"], ["b"], {}),
    ],
)
def test_leaves_are_the_same_by_their_whole_path(paths, other, pairs):
    """But for a prefix, which is that of the whole tree; in both orders."""
    assert same_leaves(paths, other) == pairs
    assert same_leaves(other, paths) == {j: i for i, j in pairs.items()}


@pytest.mark.slow
def test_a_leaf_of_one_version_is_a_finding():
    def loss(params, x):
        return small(scale=params["z"]["scale"])(params["w"], x)

    params = {"w": ARGS[0], "z": {"scale": jnp.ones((1, 2))}}
    scaled = lambda p, x: loss(p, x) * p["scale"][0]  # noqa: E731
    more = params | {"scale": jnp.ones(2)}
    comparison = cg.compare(scaled, loss, (more, ARGS[1]), other_args=(params, ARGS[1]))
    assert comparison.unmatched == ("gradient scale, only in fun",), str(comparison)
    assert not comparison.ok and [(f.kind, f.path) for f in comparison.findings] == [
        ("grads", "scale")
    ]
    other = {"w": ARGS[0].T, "z": {"scale": jnp.ones((1, 2))}}
    turned = lambda p, x: loss(p | {"w": p["w"].T}, x)  # noqa: E731
    assert cg.compare(loss, turned, (params, ARGS[1]), other_args=(other, ARGS[1])).ok
    other["w"], flat = ARGS[0].ravel(), lambda p, x: loss(p | {"w": p["w"].reshape(3, 2)}, x)
    comparison = cg.compare(loss, flat, (params, ARGS[1]), other_args=(other, ARGS[1]))
    assert comparison.unmatched == ("gradient w, of another shape: [3, 2] in fun, [6] in other",)
    assert not comparison.ok and [f.path for f in comparison.findings] == ["w"]


def doubled(h):
    """The identity with a cotangent that is twice as large."""

    @jax.custom_vjp
    def passed(h):
        return h

    passed.defvjp(lambda h: (h, None), lambda _, g: (2 * g,))
    return passed(h)


@pytest.mark.slow
@first_row
@pytest.mark.parametrize("faulty", ["second", "first", "third"])
def test_the_message_of_a_vjp_names_the_module_that_is_wrong(faulty):
    def loss(w, x, wrong):
        for name in ("first", "second", "third"):
            with jax.named_scope(name):
                x = jnp.tanh((doubled(x) if name == wrong else x) @ w)
        return jnp.mean(x)

    args = jnp.eye(3) + 0.1, ARGS[1]
    plain = functools.partial(loss, wrong=None)
    (finding,) = cg.compare(plain, functools.partial(loss, wrong=faulty), args, argnums=1).findings
    if faulty == "first":  # the input has no name: the leaf itself differs
        assert (finding.kind, finding.module) == ("grads", "first")
        return
    assert (finding.kind, finding.module) == ("vjp", faulty)
    before = {"second": "first", "third": "second"}[faulty]
    assert f"the cotangent that {faulty} passes back to {before} differs by" in finding.message


@pytest.mark.parametrize("transform", [jax.jit, jax.grad, jax.vmap])
@pytest.mark.parametrize("options", [{}, {"argnums": None}, {"other": "float32"}])
def test_a_call_inside_of_a_transformation_is_told(transform, options):
    def mean(w):
        return jnp.mean(w**2)

    def inside(args, w, fun=mean):
        comparison = cg.compare(fun, **({"other": fun} | options), args=args(w))
        return w if comparison.ok else -w

    calls = {"args": lambda w: inside(lambda w: (w,), w)}
    calls["args|fun"] = lambda w: inside(lambda w: (jnp.ones(3),), w, lambda v: mean(v * w))
    for name, call in calls.items():
        with pytest.raises(TypeError, match=f"^({name}): got a traced array, float32.* outside of"):
            transform(call)(array(np.ones((2, 3))) if transform is jax.vmap else array(np.ones(3)))


@pytest.mark.parametrize(
    "call, error, words",
    [
        (lambda: cg.compare(1, small(), ARGS), TypeError, "fun: got"),
        (lambda: cg.compare(small(), 1, ARGS), TypeError, "other: got int, expected a function"),
        (lambda: cg.compare(small(), small(), ARGS[0]), TypeError, "args: got float32.*write"),
        (
            lambda: cg.compare(small(), small(), ARGS, other_args=list(ARGS)),
            TypeError, "other_args: got list, expected a tuple",
        ),
        (lambda: cg.compare(small(), small(), ARGS, names=["a"]), TypeError, "names: got"),
        (lambda: cg.compare(small(), small(), ARGS, rtol=-1.0), ValueError, "rtol: got -1.0"),
        (lambda: cg.compare(small(), small(), ARGS, argnums=2), ValueError, "argnums: got 2"),
        (lambda: cg.compare(small(), small(), ARGS[0], ARGS[1]), TypeError, "expected a tuple"),
        (lambda: cg.compare(small(), small(), ARGS, ARGS[1]), TypeError, r"kwargs: got float32\["),
        (
            lambda: cg.compare(small(), small(), ARGS, argnums=None, has_aux=True),
            ValueError, "has_aux: got True with argnums=None",
        ),
    ],
)  # fmt: skip
def test_wrong_arguments_are_told(call, error, words):
    with pytest.raises(error, match=words):
        call()
