"""A loss of two layers in scopes, and its arguments on one device and laid out over eight."""

import jax
import jax.numpy as jnp
import numpy as np

from tests.compare.compare_trainers import AXIS, numbers, placed
from tests.helpers import array

PARAMS = {
    "w": array(np.asarray(numbers(8, 16, seed=30)) / 3),
    "v": array(np.asarray(numbers(16, 8, seed=31)) / 4),
}
BATCH = (numbers(16, 8, seed=32), numbers(16, 8, seed=33))
ARGS = (PARAMS, BATCH)


def mlp(params, batch, by=1.0):
    with jax.named_scope("first"):
        h = jnp.tanh(batch[0] @ params["w"])
    with jax.named_scope("second"):
        z = h @ params["v"] * by
    return jnp.mean((z - batch[1]) ** 2)


LAYOUTS = {
    "data parallel": lambda: (placed(PARAMS), placed(BATCH, AXIS)),
    "tensor parallel": lambda: (
        {"w": placed(PARAMS["w"], None, AXIS), "v": placed(PARAMS["v"], AXIS)}, placed(BATCH),
    ),
    "FSDP": lambda: (placed(PARAMS, AXIS), placed(BATCH, AXIS)),
}  # fmt: skip
