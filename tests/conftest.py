"""Strict numerics for every test, eight CPU devices, and a fresh PRNG key."""

import os
import zlib

os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
)

import hypothesis  # noqa: E402
import jax  # noqa: E402
import pytest  # noqa: E402

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

hypothesis.settings.register_profile(
    "clipgrad",
    deadline=None,
    derandomize=True,
    max_examples=25,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("clipgrad")


@pytest.fixture
def key(request):
    """A PRNG key of the test's own: the same in every run and in every order."""
    return jax.random.key(zlib.crc32(request.node.nodeid.encode()))
