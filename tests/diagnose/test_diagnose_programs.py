"""A diagnosis of programs on several devices, in loops, and under JAX's own settings."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import io_callback
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import clipgrad as cg
from tests.diagnose.diagnose_zoo import kinds
from tests.helpers import array, line_of
from tests.rows import crossed, first_row, some_of

# Each program differs in kind, so that each runs by default.
pytestmark = pytest.mark.usefixtures("users_promotion")
D = PartitionSpec("d")


def mesh(kind=AxisType.Auto):
    return jax.make_mesh((8,), ("d",), axis_types=(kind,))


def mapped(fun, **options):
    return jax.shard_map(fun, mesh=mesh(), **options)


def root(x):
    return jnp.sqrt(x)


def over_three(of, x):
    """The sum over three steps, at the second of which the number is ``x``."""
    steps = jnp.stack([x + 1, x, x + 2])
    return jax.lax.scan(lambda total, x: (total + of(x).sum(), None), 0.0, steps)[0]


def total(x):
    return jax.lax.psum(root(x), "d")


def each(of, out_specs=D, **options):
    return lambda x: mapped(of, in_specs=D, out_specs=out_specs, **options)(x).sum()


SPREAD = {
    "shard_map": each(lambda x: total(x) * (1.0 + jax.lax.axis_index("d"))),
    "unchecked": each(lambda x: jax.lax.all_gather(root(x), "d").mean()[None], check_vma=False),
    "pmap": lambda x: jax.pmap(lambda x: jax.lax.pmean(root(x), "d"), axis_name="d")(x).sum(),
    "scan on devices": each(lambda x: over_three(total, x), PartitionSpec()),
    "devices in a scan": lambda x: over_three(each(root), x),
}


@pytest.mark.slow
@first_row
@pytest.mark.parametrize("bad, kind", [(0.0, "vjp"), (-0.5, "value")])
@pytest.mark.parametrize("name", SPREAD)
def test_it_is_found_on_one_of_several_devices(name, bad, kind):
    (finding,) = cg.diagnose(SPREAD[name], (jnp.ones(8).at[3].set(bad),)).findings
    assert (finding.kind, finding.operation, finding.device) == (kind, "sqrt", "d=3")
    assert ", on device d=3" in finding.message
    assert finding.line == line_of(root, "sqrt") and f"sqrt at {bad:g}" in finding.message
    assert finding.step == (1 if "scan" in name else None)
    assert (finding.file or "").endswith("test_diagnose_programs.py")


@pytest.mark.slow
def test_devices_that_read_nothing_and_a_scan_without_steps_are_followed():
    of_index = mapped(
        lambda: jnp.log(jax.lax.axis_index("d") - 2.0)[None], in_specs=(), out_specs=D
    )
    (finding,) = cg.diagnose(lambda x: of_index().sum() * x, (1.0,)).findings
    assert (finding.operation, finding.device) == ("log", "d=0"), finding
    empty = lambda x: jax.lax.scan(lambda c, y: (c * y, None), x, jnp.ones((0, 2)))[0].sum()  # noqa: E731
    assert cg.diagnose(empty, (jnp.ones(2),)).ok


def cells(x, y):
    grid = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)

    def cell(x, y):
        big = jnp.maximum(1 / x, -1)
        root = jax.lax.psum(0 * big, "model") + jnp.sqrt(y)
        return jax.lax.pmean(jax.lax.psum((root * jnp.cos(jnp.cbrt(x - 3))).sum(), "data"), "model")

    specs = PartitionSpec("data"), PartitionSpec("data", "model")
    return jax.shard_map(cell, mesh=grid, in_specs=specs, out_specs=PartitionSpec())(
        x[:, None], y.reshape(4, 2)
    )


@pytest.mark.slow
def test_of_faults_on_several_devices_the_first_is_named():
    def places_of_faults(x=(), y=()):
        xs, ys = jnp.ones(4), jnp.ones(8)
        for i, value in x:
            xs = xs.at[i].set(value)
        for i, value in y:
            ys = ys.at[i].set(value)
        findings = cg.diagnose(cells, (xs, ys), argnums=(0, 1)).findings
        return [(f.kind, f.operation, f.device) for f in findings]

    everywhere = [(i, -0.5) for i in range(8)]
    assert places_of_faults(y=everywhere) == [("value", "sqrt", None)]
    assert places_of_faults(y=[(5, -0.5), (6, -0.5)]) == [("value", "sqrt", "data=2, model=1")]
    # The first operation is on the last device, and is the same along the other axis.
    assert places_of_faults(x=[(3, 0.0)], y=[(0, -0.5)])[0] == ("value", "div", "data=3")
    assert places_of_faults(x=[(1, 3.0)], y=[(6, -0.5)])[0] == ("value", "sqrt", "data=3, model=0")


@pytest.mark.slow
def test_growth_on_devices_has_the_factor_of_the_program_on_one():
    def loss(w, x):
        def step(h, x):
            return h @ w + x, None

        return jax.lax.scan(step, jnp.zeros_like(x[0]), x)[0]

    def by_device(w, x):
        return mapped(loss, in_specs=(PartitionSpec(), PartitionSpec(None, "d")), out_specs=D)(w, x)

    args = 1.5 * jnp.eye(4), jnp.ones((50, 8, 4))
    one, several = (cg.diagnose(lambda w, x, f=f: f(w, x).sum(), args) for f in (loss, by_device))
    assert kinds(one) == kinds(several) == ["grows"]
    norms = [[row.norm for row in d.rows if row.operation == "scan"] for d in (one, several)]
    np.testing.assert_allclose(*norms, rtol=1e-5)
    assert several.findings[0].factor == pytest.approx(1.5)


def first_layers(ws, x, some=8):
    for w in ws[:some]:
        x = jax.nn.leaky_relu(x) @ w
    return x


@first_row
@pytest.mark.parametrize("deep", [
    lambda ws, x: jax.lax.cond(x[0, 0] > -9, first_layers, lambda ws, x: x, ws, x),
    lambda ws, x: jax.lax.switch(0, [first_layers, lambda ws, x: first_layers(ws, x, 1)], ws, x),
    lambda ws, x: jax.checkpoint(jax.jit(first_layers))(ws, x),
], ids=["cond", "switch", "checkpoint"])  # fmt: skip
def test_layers_in_a_branch_are_a_depth(deep):
    args = [array(40 * np.eye(4))] * 8, array(np.full((3, 4), 1e-3))
    diagnosis = cg.diagnose(lambda ws, x: jnp.sum(deep(ws, x)), args)
    assert kinds(diagnosis) == ["grows"] and "each of the 8 modules" in diagnosis.message


@pytest.mark.slow
@pytest.mark.parametrize("bad, kind", [(0.0, "vjp"), (-0.5, "value")])
def test_arrays_with_explicit_axes_are_diagnosed(bad, kind):
    x = jnp.ones((8, 4)).at[3, 1].set(bad)
    x = jax.device_put(x, NamedSharding(mesh(AxisType.Explicit), D))
    assert kinds(cg.diagnose(lambda x: jnp.sum(jnp.sqrt(x)), (x,))) == [kind]


def mapped_loop(x):
    stop = jax.lax.stop_gradient(x)
    double = lambda y: y * 2 + jnp.sqrt(y - 1) * 0  # noqa: E731
    loop = lambda x: jax.lax.while_loop(lambda y: y < 5, double, 2 + x)  # noqa: E731
    return jnp.sum(x * jax.vmap(loop)(stop))


@pytest.mark.slow
def test_a_mapped_loop_is_diagnosed():
    assert cg.diagnose(mapped_loop, (jnp.array([0.0, 1.0]),)).ok
    finding, *_ = cg.diagnose(mapped_loop, (jnp.array([0.0, -3.0]),)).findings
    assert (finding.kind, finding.operation) == ("value", "sqrt")
    assert finding.line == line_of(mapped_loop, "sqrt") and "sqrt at -2" in finding.message


def test_a_mapped_loop_is_evaluated_again_by_name():
    def loss(x):
        return mapped_loop(checkpoint_name(x, "x"))

    clipped = cg.error_clip_by_name(loss, {"x": cg.ErrorClipByValue(max=5.0)})
    x = array([0.0, 1.0])
    value, grad = jax.value_and_grad(clipped)(x)
    assert value == loss(x) and grad.tolist() == [5.0, 5.0] != jax.grad(loss)(x).tolist()


@pytest.mark.parametrize("sick", [True, False])
def test_settings_of_jax_are_off_inside_and_come_back(sick):
    ones = array(np.ones(3))

    def loss(x):
        if not sick:
            raise KeyError("of the user")
        return jnp.sum(jnp.log(x - 2) + jnp.sqrt(x - 1))

    settings = jax.debug_nans(True), jax.debug_infs(True), jax.transfer_guard("disallow")
    with settings[0], settings[1], settings[2]:
        before = jax.config.jax_debug_nans, jax.config.jax_debug_infs
        if sick:
            assert kinds(cg.diagnose(loss, (ones,))) == ["value", "vjp"]
        else:
            with pytest.raises(KeyError):
                cg.diagnose(loss, (ones,))
        assert (jax.config.jax_debug_nans, jax.config.jax_debug_infs) == before == (True, True)
        assert jax.config.jax_transfer_guard == "disallow"


@pytest.mark.parametrize("argnums", [np.int64(1), (np.int32(0), np.int64(1)), np.array([-1])])
def test_numpy_integers_choose_arguments(argnums):
    diagnosis = cg.diagnose(lambda x, y: x * jnp.sqrt(y), (1.0, 0.0), argnums=argnums)
    assert kinds(diagnosis) == ["vjp"]
    with pytest.raises(ValueError, match="^argnums: got 1.0 for 2 arguments"):
        cg.diagnose(lambda x, y: x * y, (1.0, 0.0), argnums=1.0)


def finite_part(y):
    return jnp.sum(jnp.where(jnp.isfinite(y), y, 0.0) ** 2)


def pixels(w, x):
    return finite_part(x @ w)


def logs_of_pixels(w, x):
    logs = jnp.log(x)
    return finite_part(logs @ w)


def pixels_in_a_scan(w, x):
    return jax.lax.scan(lambda total, x: (total + finite_part(x @ w), None), 0.0, x)[0]


def pixels_on_devices(w, x):
    specs = {"in_specs": (PartitionSpec(), D), "out_specs": PartitionSpec()}
    return mapped(lambda w, x: jax.lax.psum(finite_part(x @ w), "d"), **specs)(w, x)


@crossed(1)
@pytest.mark.parametrize("bad", [jnp.inf, jnp.nan, -1.0])
@pytest.mark.parametrize("loss", [pixels, logs_of_pixels, pixels_in_a_scan, pixels_on_devices])
def test_data_that_are_not_finite_are_the_finding_although_the_loss_is(loss, bad):
    x = np.ones((8, 4), np.float32)
    x[3, 1] = bad
    diagnosis = cg.diagnose(loss, (array(np.ones((4, 3))), array(x)))
    if bad == -1 and loss is not logs_of_pixels:
        assert diagnosis.ok
        return
    (finding,) = diagnosis.findings
    is_log = loss is logs_of_pixels and bad == -1
    assert (finding.kind, finding.operation) == ("value", "log" if is_log else "argument")
    assert finding.line == line_of(loss, "jnp.log" if is_log else "def")
    phrase = "it is computed from args[1]" if is_log else "1 of 32 elements of args[1]"
    assert phrase in finding.message and "the VJP of dot_general (" in finding.message


def kernel_root(interpret):
    """The square root as a kernel with a rule, and the sum of it of positive numbers."""

    def kernel(x, out):
        out[...] = jnp.sqrt(x[...])

    def root(x):
        return pl.pallas_call(kernel, jax.ShapeDtypeStruct(x.shape, x.dtype), interpret=interpret)(
            x
        )

    rooted = jax.custom_vjp(root)
    rooted.defvjp(lambda x: (root(x), x), lambda x, g: (g / (2 * root(x)),))
    return rooted


# The interpreter of kernels for TPUs calls the host, and so has effects of its own.
KERNELS = {"plain": kernel_root(True), "TPU": kernel_root(pltpu.InterpretParams())}


def with_a_kernel(x, kernel="plain"):
    return jnp.sum(KERNELS[kernel](x))


def with_a_tpu_kernel_in_loops(x):
    def step(total, x):
        root = jax.lax.cond(x > 9, lambda x: x, lambda x: KERNELS["TPU"](x[None])[0], x)
        return total + root, None

    return jax.jit(lambda x: jax.lax.scan(step, 0.0, x)[0])(x)


def with_a_reference(x):
    total = jax.new_ref(jnp.zeros(()))

    def step(i, _):
        total[...] += jnp.sqrt(x[i])

    jax.lax.fori_loop(0, 3, step, None)
    return total[...]


def written_and_read(x):
    ref = jax.new_ref(2 * x)
    ref[...] = jnp.sqrt(ref[...])
    return jnp.sum(jax.freeze(ref))


@pytest.mark.slow
@pytest.mark.parametrize("loss", some_of(
    [with_a_kernel, with_a_tpu_kernel_in_loops, with_a_reference, written_and_read],
    [with_a_kernel, written_and_read],
))  # fmt: skip
def test_kernels_and_references_inside_of_a_loss_are_diagnosed(loss):
    def findings_with(bad):
        findings = cg.diagnose(loss, (jnp.array([1.0, bad, 2.0]),)).findings
        return [(f.kind, f.operation, f.step) for f in findings]

    step = 1 if loss in (with_a_reference, with_a_tpu_kernel_in_loops) else None
    names = ("root", "pallas_call") if "kernel" in loss.__name__ else ("sqrt", "sqrt")
    assert findings_with(3.0) == []
    assert findings_with(0.0) == [("vjp", names[0], step)]
    assert findings_with(-1.0)[0] == ("value", names[1], step)


@pytest.mark.slow
def test_versions_with_kernels_for_tpus_are_compared():
    args = (jnp.array([1.0, 3.0, 2.0]),)
    assert cg.compare(with_a_kernel, with_a_tpu_kernel_in_loops, args).ok
    comparison = cg.compare(with_a_kernel, lambda x: 1.01 * with_a_kernel(x, "TPU"), args)
    assert [finding.kind for finding in comparison.findings] == ["value"]


def called_in_a_kernel(x):
    def kernel(x, out):
        io_callback(lambda: None, None)
        out[...] = 2 * x[...]

    return jnp.sum(pl.pallas_call(kernel, jax.typeof(x), interpret=pltpu.InterpretParams())(x))


def called_in_a_loop(x):
    def body(state):
        io_callback(lambda: None, None)
        return state[0] + 1, 2 * state[1]

    return x[0] + jax.lax.while_loop(lambda state: state[0] < 2, body, (0, 1.0))[1]


@pytest.mark.parametrize("loss", [called_in_a_kernel, called_in_a_loop])
def test_calls_of_the_host_are_side_effects_wherever_they_are(loss):
    for run in (cg.diagnose, lambda loss, args: cg.compare(loss, loss, args)):
        with pytest.raises(
            ValueError, match=r"^fun: got a function with side effects \(io_callback\)"
        ):
            run(loss, (array(np.ones(8)),))
