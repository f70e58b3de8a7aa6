"""Strict numerics for every test, eight CPU devices, compiled programs that are kept, and a key."""

import collections
import contextlib
import gc
import importlib.metadata
import os
import pathlib

# Most of the time goes into compiling, so the compiler may do little. What depends on what it
# does for a user is compiled with `helpers.RELEASED`; XLA_FLAGS of one's own come last and win.
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

# What JAX compiles while the tests are imported, which each process does.
AT_IMPORT = collections.Counter()


def _counting(counts):
    """A listener that counts compiled programs by the names of their functions."""

    def listen(event, duration, **details):
        del duration
        if event.endswith("backend_compile_duration"):
            counts[str(details["fun_name"])] += 1

    return listen


_COUNT_AT_IMPORT = _counting(AT_IMPORT)
jax.monitoring.register_event_duration_secs_listener(_COUNT_AT_IMPORT)

from tests import costs, helpers, rows  # noqa: E402

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
# A tenth of the time goes into the stacks of calls that a compiled program keeps for profilers.
jax.config.update("jax_include_full_tracebacks_in_locations", False)
# Many tests compile the same program: what one has compiled, the others and the next run load.
_CACHE = pathlib.Path(__file__).parents[1] / ".pytest_cache" / "d" / "jax"
jax.config.update("jax_compilation_cache_dir", str(_CACHE))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)

# The same examples in each run, but with HYPOTHESIS_PROFILE=new, which one job of CI sets.
_ALL = dict(deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.register_profile("same", derandomize=True, max_examples=25, **_ALL)
hypothesis.settings.register_profile("new", max_examples=50, print_blob=True, **_ALL)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "same"))


def pytest_addoption(parser):
    parser.addoption("--costs", action="store_true", help="CPU seconds of each file and dear row")
    parser.addoption("--half", metavar="SEED", help="of each test half of the slow rows, by a seed")


def pytest_configure(config):
    if config.option.costs:
        config.pluginmanager.register(costs.Costs())


def pytest_report_header():
    profile = os.environ.get("HYPOTHESIS_PROFILE", "same")
    return f"CLIPGRAD_SEED={helpers.SEED} HYPOTHESIS_PROFILE={profile}"


def pytest_collection_modifyitems(config, items):
    """What takes longest first: else one process ends minutes after the others."""
    items.sort(key=lambda item: not rows.is_first(item))
    if config.option.half is not None:
        left_out = rows.other_half(items, config.option.half)
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]


@pytest.fixture
def compiled_at_import():
    """A counter of the programs compiled while the tests were imported."""
    return AT_IMPORT


def pytest_collection_finish():
    """The garbage collector need not look again and again at what stays, as what was imported."""
    jax.monitoring.unregister_event_duration_listener(_COUNT_AT_IMPORT)
    gc.freeze()
    gc.set_threshold(10_000, 20, 50)


@pytest.fixture(scope="module", autouse=True)
def few_programs():
    """Linux gives a process 65,530 areas of memory, and a compiled program takes three of them."""
    yield
    with contextlib.suppress(OSError):  # Linux has it
        if pathlib.Path("/proc/self/maps").read_bytes().count(b"\n") > 20_000:
            jax.clear_caches()
            gc.collect()


@pytest.fixture(scope="module", params=["eight", pytest.param("one", marks=pytest.mark.slow)])
def devices(request):
    """Eight CPU devices, and as a slow row one, on which norms are other programs.

    What was traced for eight is not valid there.
    """
    if request.param == "eight":
        yield
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax, "device_count", lambda: 1)
        jax.clear_caches()
        yield
    jax.clear_caches()


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
    """A counter of the programs compiled, by the names of their functions."""
    counts = collections.Counter()
    listen = _counting(counts)
    jax.monitoring.register_event_duration_secs_listener(listen)
    yield counts
    jax.monitoring.unregister_event_duration_listener(listen)
