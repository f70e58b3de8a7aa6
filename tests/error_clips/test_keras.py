"""The recipe for Keras 3 on JAX, as it stands in docs/names.md."""

import ast
import importlib.util
import os
import pathlib
import re
import subprocess
import sys

import pytest

# Importing it would choose a backend.
pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("keras") is None, reason="Keras is not installed"
)
ROOT = pathlib.Path(__file__).parents[2]
HEAD = "import jax, jax.numpy as jnp\nimport clipgrad as cg\n"
CHECKS = """
assert float(logged['up/norm']) > 0
for variable, value, before in zip(net.trainable_variables, trained, first):
    assert (variable.value == value).all() and not (value == before).all(), variable.path
names = {name.name for name in cg.list_names(lambda *a: keras_loss(*a)[0], (trained, others, x, y))}
assert names == {"up", "norm", "head"}, names
value, grads, stats = cg.value_and_grad_with_stats(keras_loss, has_aux=True, watch=())(
    trained, others, x, y)
expected = jax.value_and_grad(keras_loss, has_aux=True)(trained, others, x, y)
assert jax.tree.all(jax.tree.map(lambda a, b: (a == b).all(), (value, grads), expected))
"""


@pytest.mark.slow
def test_the_recipe_trains_a_keras_model_and_names_its_layers():
    """In a process of its own, since Keras takes its backend from the environment."""
    *_, recipe = re.findall(r"```py\n(.*?)```", (ROOT / "docs/names.md").read_text(), re.DOTALL)
    start = "for _ in range(2):\n"
    recipe = recipe.replace(start, "first = trained\n" + start)
    environment = {**os.environ, "KERAS_BACKEND": "jax", "JAX_PLATFORMS": "cpu"}
    result = subprocess.run(
        [sys.executable, "-c", HEAD + recipe + CHECKS],
        capture_output=True, text=True, env=environment, cwd=ROOT,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr[-2000:]
    assert ast.literal_eval(result.stdout) == ["head/norm", "norm/norm", "up/norm"]
