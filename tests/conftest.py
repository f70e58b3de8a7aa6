"""Strict numerics for every test, eight CPU devices, and a fresh PRNG key."""

import collections
import contextlib
import ctypes
import gc
import importlib.metadata
import itertools
import os
import pathlib

# Most of the time goes into compiling, so the compiler may do little. What depends on what it
# does for a user is compiled with `helpers.RELEASED`.
_FLAGS = [
    "--xla_force_host_platform_device_count=8",
    "--xla_backend_optimization_level=0",
    "--xla_cpu_parallel_codegen_split_count=1",
    "--xla_llvm_disable_expensive_passes=true",
]
if tuple(map(int, importlib.metadata.version("jaxlib").split(".")[:2])) < (0, 11):
    _FLAGS.append("--xla_cpu_use_fusion_emitters=false")
os.environ["XLA_FLAGS"] = " ".join([*_FLAGS, os.environ.get("XLA_FLAGS", "")])

import hypothesis  # noqa: E402
import jax  # noqa: E402
import pytest  # noqa: E402

from tests import costs, kinds  # noqa: E402

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

# A tenth of the time goes into the stacks of calls that a compiled program keeps for profilers.
jax.config.update("jax_include_full_tracebacks_in_locations", False)

# Many tests compile the same program: what one has compiled, the others and the next run load.
_CACHE = pathlib.Path(__file__).parents[1] / ".pytest_cache" / "d" / "jax"
jax.config.update("jax_compilation_cache_dir", str(_CACHE))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)

hypothesis.settings.register_profile(
    "clipgrad",
    deadline=None,
    derandomize=True,
    max_examples=25,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("clipgrad")


def pytest_addoption(parser):
    parser.addoption("--costs", action="store_true", help="CPU seconds of each file of tests")


def pytest_configure(config):
    config.pluginmanager.register(kinds)
    if config.option.costs:
        config.pluginmanager.register(costs.Costs())


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """What runs first."""
    # test_one_device.py empties JAX's caches: the less is in them, the less is made again.
    items.sort(key=lambda item: "test_one_device" not in item.nodeid)


def pytest_collection_finish():
    """The garbage collector need not look again and again at what stays.

    That is what was imported and, in the caches of JAX, most of what the tests make.
    """
    gc.freeze()
    gc.set_threshold(10_000, 20, 50)


# The bytes of a process beyond which the caches of JAX are emptied, and what it may add until then:
# the 3,400 tests that README's command leaves out would take 11 GB in each of two processes.
_MOST, _MORE = 6 * 2**30, 2 * 2**30
_limits = [_MOST]
# The areas of memory beyond which they are emptied. A compiled program has three, Linux gives a
# process 65,530, and XLA crashes without one. They are counted after each tenth test.
_AREAS = 30_000
_ended = itertools.count(1)


def _resident():
    with contextlib.suppress(OSError):  # Linux has it
        pages = int(pathlib.Path("/proc/self/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")
    return 0


def _has_many_areas():
    if next(_ended) % 10:
        return False
    with contextlib.suppress(OSError):
        return pathlib.Path("/proc/self/maps").read_bytes().count(b"\n") > _AREAS
    return False


def pytest_runtest_teardown(nextitem):
    """Programs of tests that are over need no memory."""
    if nextitem is not None and (_has_many_areas() or _resident() > _limits[-1]):
        jax.clear_caches()
        gc.collect()
        with contextlib.suppress(Exception):  # glibc alone has it
            ctypes.CDLL(None).malloc_trim(0)
        _limits.append(max(_MOST, _resident() + _MORE))


@pytest.fixture
def key():
    """The PRNG key of every test."""
    return jax.random.key(76)


@pytest.fixture
def users_promotion():
    """The promotion of dtypes and ranks that users have, for programs written for them."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


@pytest.fixture
def compiled():
    """A counter of the programs compiled."""
    counts = collections.Counter()

    def listen(event, duration, **details):
        del duration, details
        counts["compiled"] += event.endswith("backend_compile_duration")

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield counts
    jax.monitoring.unregister_event_duration_listener(listen)
