"""What a first call of `compare` and of `check_grads` compiles and runs."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

import clipgrad as cg
from clipgrad._compare import recording
from clipgrad._compare.loss_recording import recorded_loss
from clipgrad._programs import is_repetitive, opened_scans
from tests.helpers import array

W = array(np.random.default_rng(0).normal(size=(3, 3)) * 0.5)
X = array(np.random.default_rng(1).normal(size=(4, 3)))
STEPS = 40
COMPILED = "/jax/core/compile/backend_compile_duration"


def unrolled(w, x, times=1.0):
    for i in range(STEPS):
        x = jnp.tanh(x @ w + 0.5)
        x = x * times if i == STEPS - 2 else x
    return jnp.mean(x**2)


def scanned(w, x):
    step = lambda x, _: (jnp.tanh(x @ w + 0.5), None)  # noqa: E731
    return jnp.mean(jax.lax.scan(step, x, length=STEPS)[0] ** 2)


def branching(w, x):
    h = jax.lax.cond(jnp.sum(x) > 0, lambda: jnp.sin(x @ w), lambda: jnp.cos(x @ w))
    near = jax.lax.stop_gradient(h)
    h = h + jax.lax.while_loop(lambda h: jnp.sum(h**2) > 0.1, lambda h: jnp.sin(h) * 0.7, near)
    return jnp.mean(jnp.abs(jnp.fft.fft(h.astype(jnp.bfloat16).astype(jnp.float32))))


def on_devices(w, x):
    def own(w, x):
        h = jnp.sin(x @ w)
        return jax.lax.psum(jnp.sum(h**2), "d")

    mesh, P = Mesh(np.array(jax.devices()[:4]), "d"), PartitionSpec
    return jax.shard_map(own, mesh=mesh, in_specs=(P(), P("d")), out_specs=P())(w, x)


def remade(fun, monkeypatch, most, can_be_cut=True):
    monkeypatch.setattr(recording, "_most_whole", lambda record: most)
    monkeypatch.setattr(recording, "can_be_cut", lambda program: can_be_cut)
    made = recorded_loss(fun, (W, X), {}, 0, False)
    made = made if made.has_lines else made.with_lines()
    record = made.run(floor=True)
    return made, [row for row in record.rows if row.kind in recording.NOTED]


@pytest.mark.slow
@pytest.mark.parametrize("fun", [scanned, branching, on_devices])
def test_values_that_leave_a_program_have_the_sketches_that_it_makes_of_larger_ones(
    fun, monkeypatch
):
    """And those that are made when a piece of it, or some steps of its scan, have run."""
    monkeypatch.setattr(opened_scans, "AT_ONCE", 7 * 4 * 48)  # bytes of 7 of 40 steps, or fewer
    (first, whole), (by_pieces, at_once), (second, inside) = (
        remade(fun, monkeypatch, *how) for how in ((2**25,), (0,), (0, False))
    )
    assert (first.sketched, second.sketched) == (False, True)
    assert not first.is_by_pieces and not second.is_by_pieces
    assert by_pieces.is_by_pieces == (fun is not on_devices)
    for own, *others in zip(whole, at_once, inside, strict=True):
        for other in others:
            assert (own.numbers.moved is None) == (other.numbers.moved is None)
            scale = np.max(np.abs(other.numbers.sketch), initial=1e-6)
            np.testing.assert_allclose(own.numbers.sketch, other.numbers.sketch, atol=1e-5 * scale)
    assert any(np.any(row.numbers.moved) for row in whole if row.numbers.moved is not None)


def test_nothing_is_rounded_where_two_versions_agree(monkeypatch):
    def forbidden(*arguments):
        raise AssertionError("the rounding was measured")

    monkeypatch.setattr(recording, "rounded", forbidden)
    assert cg.compare(scanned, lambda w, x: scanned(w, x) * 1.0, (W, X)).ok
    with pytest.raises(AssertionError, match="was measured"):
        cg.compare(scanned, lambda w, x: scanned(w, x) * 1.01, (W, X))


def test_a_loop_of_python_is_repetitive_and_a_scan_is_not():
    assert is_repetitive(jax.make_jaxpr(jax.grad(unrolled))(W, X))
    assert not is_repetitive(jax.make_jaxpr(jax.grad(scanned))(W, X))


@pytest.mark.slow
def test_a_loop_of_python_is_compared_by_operations_that_are_compiled_once(monkeypatch):
    """With the findings and the numbers of one program."""
    other = lambda w, x: unrolled(w, x, 1.02)  # noqa: E731
    comparison = cg.compare(unrolled, other, (W, X))
    monkeypatch.setattr(recording, "is_repetitive", lambda program: False)
    compiled = cg.compare(unrolled, other, (W, X))
    assert not comparison.ok
    assert [f.line for f in comparison.findings] == [f.line for f in compiled.findings]
    for own, its in zip(comparison.rows, compiled.rows, strict=True):
        assert (own.module, own.step) == (its.module, its.step)
        np.testing.assert_allclose(own.value, its.value, rtol=0.1, atol=1e-6)
        np.testing.assert_allclose(own.value_tolerance, its.value_tolerance, rtol=1, atol=1e-6)


@pytest.mark.parametrize(
    ("size", "sketched", "is_brief"), [(3, False, True), (3, True, False), (4000, False, False)]
)
def test_what_could_take_much_more_memory_keeps_xlas_own_optimization(size, sketched, is_brief):
    """Programs that are compiled whole, with sketches in them or with large arguments."""
    made = recorded_loss(lambda w, x: jnp.mean(x @ w), (W, X), {}, 0, False)
    made = dataclasses.replace(made, sketched=sketched)
    for row in made.record.rows[:1]:
        row.numbers = row.numbers._replace(whole=np.zeros((size, size), np.float32))
    assert (made._jit() is not jax.jit) is is_brief


@pytest.mark.slow
def test_the_check_of_a_shard_map_compiles_no_operation_alone():
    """As one in `jax.jit`; 450 programs otherwise."""
    compiled = []

    def count(event: str, duration_secs: float, **kwargs: str | int) -> None:
        compiled.append(event) if event == COMPILED else None

    jax.monitoring.register_event_duration_secs_listener(count)
    report = cg.check_grads(on_devices, (W, X))
    assert report.ok, report
    assert 0 < len(compiled) < 150
