"""Arguments of `update` reach an inner optimizer that names them, through every wrapper."""

import jax
import jax.numpy as jnp
import optax
import pytest

import clipgrad as cg

pytestmark = [pytest.mark.usefixtures("users_promotion"), pytest.mark.slow]


def seeing():
    """An optimizer that names all that `train_step` gives, keeps it, and has no other parameter."""

    def update(updates, state, params=None, *, value, grad, value_fn):
        del state, params
        shown = value, jnp.sum(grad["w"]), value_fn(grad)
        return updates, {"given": jnp.stack(shown)}

    return optax.GradientTransformationExtraArgs(lambda _: {"given": jnp.zeros(3)}, update)


def seeing_of_a_user():
    """An optimizer that names what a loop of a user gives."""

    def update(updates, state, params=None, *, value, temperature):
        del state, params
        return updates, {"given": jnp.stack([value, temperature])}

    return optax.GradientTransformationExtraArgs(lambda _: {"given": jnp.zeros(2)}, update)


WRAPPERS = {
    "bare": lambda core: core,
    "named chain": lambda core: optax.named_chain(("a", core), ("b", optax.scale(1.0))),
    "masked": lambda core: optax.masked(core, {"w": True}),
    "multi_transform": lambda core: optax.multi_transform({"a": core}, {"w": "a"}),
    "MultiSteps": lambda core: optax.MultiSteps(core, 1),
    "apply_if_finite": lambda core: optax.apply_if_finite(core, 3),
    "skip_spikes of it": lambda core: cg.skip_spikes(
        optax.MultiSteps(core, 1).gradient_transformation(), halt=True
    ),
    "schedule_free": lambda core: optax.contrib.schedule_free(core, 0.1),
    "flatten": optax.flatten,
}


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_all_that_a_step_gives_reaches_the_optimizer_in_every_wrapper(wrapper):
    def loss(p, x):
        return jnp.sum(p["w"] * x)

    step = cg.train_step(loss, WRAPPERS[wrapper](seeing()))
    state, metrics = step(step.init({"w": jnp.array([1.0, 2.0])}), jnp.full(2, 3.0))
    seen = optax.tree.get(state.opt_state, "given")
    assert metrics["loss"] == 9 and seen.tolist() == [9, 6, 18]


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_arguments_that_only_an_inner_optimizer_names_reach_it(wrapper):
    inner, params = WRAPPERS[wrapper](seeing_of_a_user()), {"w": jnp.ones(2)}
    tx = cg.skip_spikes(inner, halt=True)
    _, state = tx.update(params, tx.init(params), params, value=1.0, temperature=2.0)
    assert optax.tree.get(state, "given").tolist() == [1, 2]


def test_what_a_wrapper_takes_for_itself_does_not_reach_an_optimizer_without_a_parameter():
    tx, params = cg.skip_spikes(seeing_of_a_user()), {"w": jnp.ones(2)}
    extra = {"value": 1.0, "temperature": 2.0, "grad_norm": 1.0, "unknown": 3.0}
    _, state = tx.update(params, tx.init(params), params, **extra)
    assert optax.tree.get(state, "given").tolist() == [1, 2]


def test_extra_arguments_reach_the_optimizer_through_multi_steps():
    params = {"w": jnp.ones(2)}
    loss = lambda p, x: jnp.sum(p["w"]) + jax.lax.stop_gradient(x)  # noqa: E731
    for outside in (True, False):
        inner = cg.skip_spikes(optax.sgd(1.0), sigma=None, halt=True)
        inner = inner if outside else optax.chain(optax.sgd(1.0), optax.contrib.reduce_on_plateau())
        multi = optax.MultiSteps(inner, 2)
        if outside:  # which `train_step` refuses
            opt_state = multi.init(params)
            for x in (0.0, jnp.nan):
                value, grads = jax.value_and_grad(loss)(params, jnp.float32(x))
                updates, opt_state = multi.update(grads, opt_state, params, value=value)
            assert opt_state.inner_opt_state.skipped and (updates["w"] == 0).all()
        else:
            step = cg.train_step(loss, cg.skip_spikes(multi, halt=True))
            state = step.init(params)
            for x in (0.0, jnp.nan):
                state, metrics = step(state, jnp.float32(x))
            assert metrics["skipped"] and (state.params["w"] == 1).all()
            opt_state = state.opt_state
        assert (opt_state.gradient_step, opt_state.mini_step) == (int(outside), int(not outside))
    assert optax.MultiSteps(optax.sgd(1.0), 2).has_updated(state.opt_state) is not None
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        state.opt_state.nothing  # noqa: B018
