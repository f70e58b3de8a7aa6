"""Strict numerics for every test, eight CPU devices, and a fresh PRNG key."""

import importlib.metadata
import os
import zlib

# Most of the time goes into compiling, so the compiler may do little. What depends on what it
# does for a user is compiled with `helpers.RELEASED`.
_FLAGS = ["--xla_force_host_platform_device_count=8", "--xla_backend_optimization_level=0"]
if tuple(map(int, importlib.metadata.version("jaxlib").split(".")[:2])) < (0, 11):
    _FLAGS.append("--xla_cpu_use_fusion_emitters=false")
os.environ["XLA_FLAGS"] = " ".join([*_FLAGS, os.environ.get("XLA_FLAGS", "")])

import hypothesis  # noqa: E402
import jax  # noqa: E402
import pytest  # noqa: E402

from tests.helpers import FEWER  # noqa: E402

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

hypothesis.settings.register_profile(
    "clipgrad",
    deadline=None,
    derandomize=True,
    max_examples=8 if FEWER else 25,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("clipgrad")


@pytest.fixture
def key(request):
    """A PRNG key of the test's own: the same in every run and in every order."""
    return jax.random.key(zlib.crc32(request.node.nodeid.encode()))


@pytest.fixture
def users_promotion():
    """The promotion of dtypes and ranks that users have, for programs written for them."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield
