"""Every process of a run compiles the same programs: no order in them is that of addresses."""

import os
import pathlib
import re
import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow
ROOT = pathlib.Path(__file__).parents[2]

# What each process does; before it, an odd one takes memory, so that addresses are in other order.
WORKER = """
import random, sys
folder, number = sys.argv[1], int(sys.argv[2])
import jax, jax.numpy as jnp, optax
import clipgrad as cg
from jax.ad_checkpoint import checkpoint_name

random.seed(number)
held = [[object() for _ in range(random.randrange(1, 40))] for _ in range(20_000)]
random.shuffle(held)
del held[: 10_000 * number]

def block(x, w):
    with jax.named_scope("block"):
        h = checkpoint_name(jnp.tanh(x @ w), "h")
        return h * jnp.sqrt(1 + h**2), jnp.sum(h)

def loss(params, x):
    with jax.named_scope("first"):
        x = jnp.sin(x @ params["first"])
    x, sums = jax.lax.scan(jax.checkpoint(block), x, params["blocks"])
    for i in range(2):
        with jax.named_scope(f"last_{i}"):
            x = jnp.tanh(x @ params["last"]) + x
    return jnp.mean(x**2) + 1e-3 * jnp.sum(sums)

keys = jax.random.split(jax.random.key(0), 4)
params = {"first": jax.random.normal(keys[0], (3, 4)), "last": jax.random.normal(keys[1], (4, 4))}
params["blocks"] = 3 * jax.random.normal(keys[2], (3, 4, 4))
x = jax.random.normal(keys[3], (5, 3))
jax.config.update("jax_dump_ir_to", folder)

def sick(params, x):
    return loss(params, x) + jnp.sqrt(jnp.sum(0 * x))

cg.diagnose(loss, (params, x))
cg.diagnose(sick, (params, x), argnums=(0, 1))
cg.value_and_grad_with_stats(cg.with_value_stats(loss), has_aux=True)(params, x)
rules = {"h": cg.ClipByNorm(0.1), "**/last_*": None}
jax.jit(jax.grad(cg.error_clip_by_name(loss, rules)))(params, x)
for method in "auto", "direct":
    clipped = cg.clip_per_example(loss, cg.ClipByGlobalNorm(0.1), method=method)
    jax.jit(clipped)(params, x[:, None])
cg.compare(loss, jax.jit(loss), (params, x))
tx = optax.chain(cg.adaptive_grad_clip(0.01, stats=True), optax.adam(1e-3))
fixed = {"h": cg.ClipByNorm(0.1)}
step = cg.train_step(loss, tx, error_clip=fixed, watch_values=["**"])
state = step.init(params)
step(state, x)
"""

# What one process has compiled, the other one loads, which takes half the time.
CACHED = {
    "JAX_COMPILATION_CACHE_DIR": str(ROOT / ".pytest_cache" / "d" / "jax"),
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    "JAX_INCLUDE_FULL_TRACEBACKS_IN_LOCATIONS": "false",
}


def programs(folder, number):
    """The text of the programs that a process compiles, in the order in which it does so."""
    environment = os.environ | CACHED | {"PYTHONHASHSEED": str(number), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", WORKER, str(folder), str(number)]
    subprocess.run(command, env=environment, check=True, cwd=ROOT)
    paths = sorted(folder.glob("*.mlir"), key=lambda path: int(re.search(r"\d+", path.name)[0]))
    return [(path.name, path.read_text()) for path in paths]


def test_every_process_compiles_the_same_programs(tmp_path):
    folders = [tmp_path / "1", tmp_path / "2"]
    first, second = (programs(folder, i) for i, folder in enumerate(folders, start=1))
    assert len(first) > 10
    for (name, text), (other_name, other) in zip(first, second, strict=True):
        assert (name, text) == (other_name, other)
