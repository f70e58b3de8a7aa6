"""An error of the user's function is the user's, and the function has run once."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import clipgrad as cg
from tests.helpers import array
from tests.rows import each_value

pytestmark = pytest.mark.usefixtures("users_promotion")
X, VALUE = array(np.ones(2)), cg.ErrorClipByValue(1.0)


class NNXModel(nnx.Module):
    def __init__(self):
        self.layer = nnx.Linear(2, 2, rngs=nnx.Rngs(0))

    def __call__(self, x):
        return jnp.sum(self.layer(x))


class EquinoxModel(eqx.Module):
    layer: eqx.nn.Linear

    def __init__(self):
        self.layer = eqx.nn.Linear(2, 2, key=jax.random.key(0))

    def __call__(self, x):
        return jnp.sum(self.layer(x))


MODELS = {"NNX": NNXModel, "Equinox": EquinoxModel}


def raise_it(error):
    raise error


# What a user's function may do wrong, behind a call of the model.
ERRORS = {
    "RuntimeError": (RuntimeError, lambda model: raise_it(RuntimeError("mine"))),
    "ValueError": (ValueError, lambda model: raise_it(ValueError("mine"))),
    "TypeError": (TypeError, lambda model: raise_it(TypeError("mine"))),
    "KeyError": (KeyError, lambda model: {"a": 1}["b"]),
    "shapes": (TypeError, lambda model: jnp.ones((2, 3)) @ jnp.ones(2)),
    "a shape in a layer": ((TypeError, ValueError), lambda model: model(jnp.ones((2, 3)))),
    "two trees": (ValueError, lambda model: jax.tree.map(jnp.add, {"a": X}, {"b": X})["a"]),
    "two trees, one mapped": (ValueError, lambda model: jax.tree.map(sum, {"a": X}, X)["a"]),
    "trees with the model": (ValueError, lambda m: jax.tree.map(lambda x, _: x, [m], [m, m])),
    "an attribute": (AttributeError, lambda model: model.missing),
    "a traced branch": (jax.errors.TracerBoolConversionError, lambda model: bool(model(X) > 0)),
}
CALLS = {
    "by name": lambda f, m: cg.error_clip_by_name(f, {"layer": VALUE})(m, X),
    "everywhere": lambda f, m: cg.error_clip_everywhere(f, VALUE)(m, X),
    "statistics": lambda f, m: cg.value_and_grad_with_stats(f, watch=["layer"])(m, X),
    "values": lambda f, m: cg.with_value_stats(f)(m, X),
    "list_names": lambda f, m: cg.list_names(f, (m, X)),
    "train_step": lambda f, m: _stepped(f, m),
}  # fmt: skip


def _stepped(f, model):
    params = model if isinstance(model, nnx.Module) else eqx.filter(model, eqx.is_array)
    step = cg.train_step(f, optax.sgd(0.1), error_clip={"layer": VALUE})
    return step(step.init(params), X)


@each_value
@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("framework", MODELS)
def test_a_function_that_raises_runs_once(framework, call, error):
    kind, wrong = ERRORS[error]
    runs = []

    def loss(model, x):
        runs.append(type(model))
        return model(x) + jnp.sum(wrong(model))

    with pytest.raises(kind):
        CALLS[call](loss, MODELS[framework]())
    assert len(runs) == 1


def test_a_model_that_is_joined_with_a_part_from_outside_runs_again_without_names():
    model = EquinoxModel()
    static = eqx.filter(model, eqx.is_array, inverse=True)
    runs = []

    def loss(model, x):
        runs.append(1)
        return eqx.combine(eqx.filter(model, eqx.is_array), static)(x)

    clipped = cg.error_clip_everywhere(loss, VALUE)
    assert clipped(model, X) == loss(model, X) and len(runs) == 3
