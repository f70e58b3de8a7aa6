"""`clipgrad selftest`: checks every VJP of this library on every device that is available."""

import argparse
import concurrent.futures
import functools
import math
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from clipgrad._arrays import global_norm, looped, quotient, scaled_to
from clipgrad._check import check_grads
from clipgrad._clip import RULES, AutoNorm, ClipByNorm, ErrorClipByValue
from clipgrad._commands.function import FAILED, PASSED, UsageError, add_command
from clipgrad._devices import PLATFORMS, find_devices
from clipgrad._error_clip import clip_cotangent, error_clip, error_clip_by_name

INFINITE = (
    *(rule(math.inf) for rule in RULES if rule.limits and not rule.needs_params),
    ClipByNorm(math.inf, axis=-1),
)
ACTIVE = (
    *(rule(0.3) for rule in RULES if rule.limits),
    ClipByNorm(0.3, axis=-1),
    AutoNorm(0.3),
)


class Case(NamedTuple):
    """A function of this library whose gradient must pass `check_grads`."""

    name: str
    function: Callable
    args: tuple
    order: Literal[1, 2] = 1


class Law(NamedTuple):
    """Two gradients that must be the same."""

    name: str
    left: Any
    right: Any


def cases() -> Iterator[Case]:
    x, w = _normal_array(3, 4), _normal_array(4, 4)
    rows = jax.device_put(np.asarray(w)[:3])
    yield from _at_each_place("off", [None])
    yield from _at_each_place("every rule infinite", INFINITE)
    for rule in ACTIVE:
        name = f"meta-gradient through {rule!r}"
        yield Case(name, lambda g, p, rule=rule: rule({"g": g}, {"g": p}), (x, rows), order=2)
    for ord in (1, 2, 3, math.inf):
        function = lambda a, b, ord=ord: global_norm({"a": a, "b": b}, ord)  # noqa: E731
        yield Case(f"global_norm, ord={ord}", function, (x, w), order=1 if ord == math.inf else 2)
    # Where many devices are, the clips above may use other programs than those with this loop.
    yield Case("numbers in one kernel", lambda x: looped(jnp.sqrt, jnp.sum(x * x)), (x,), order=2)
    yield Case("a quotient", lambda x: quotient(x, 1 + jnp.sum(x * x)), (x,), order=2)
    scaled = lambda x, limit: scaled_to(x, 1 + jnp.sum(x * x), limit)  # noqa: E731
    yield Case("a leaf scaled to a limit", scaled, (x, np.float32(0.5)), order=2)
    named = error_clip_by_name(_closing_cell, {"h": ErrorClipByValue(math.inf)})
    yield Case("a rule that closes over a value, by name", named, (x, w))


def _at_each_place(title: str, rules: Sequence[Any]) -> Iterator[Case]:
    """A cell with several rules, none of which ever clips, at two places and transformed."""
    x, w, xs = _normal_array(3, 4), _normal_array(4, 4), _normal_array(5, 3, 4)

    def clip(value: Any) -> Any:
        return functools.reduce(clip_cotangent, rules, value)

    decorated = functools.reduce(lambda f, rule: error_clip(rule)(f), rules, _cell)
    placed = lambda x, w: clip(_cell(clip(x), w))  # noqa: E731
    for place, f in (("clip_cotangent", placed), ("error_clip", decorated)):
        yield Case(f"{place}, {title}", f, (x, w), order=2)
        yield Case(f"{place} under jit, {title}", jax.jit(f), (x, w))
        yield Case(f"{place} under scan, {title}", _scanned(f), (x, w, xs))
        yield Case(f"{place} under remat, {title}", jax.checkpoint(f), (x, w))
        yield Case(f"{place} under vmap, {title}", jax.vmap(f, (0, None)), (xs, w))


def _scanned(f: Callable) -> Callable:
    def step(w: Any, h: Any, x: Any) -> tuple[Any, Any]:
        return (h := f(h + x, w)), h

    return lambda h, w, xs: lax.scan(functools.partial(step, w), h, xs)


def laws() -> Iterator[Law]:
    """The VJP of a clipped function is the function's VJP, of the clipped cotangent."""
    x, w, cotangent = _normal_array(3, 4), _normal_array(4, 4), 3 * _normal_array(3, 4)
    _, plain = jax.vjp(lambda x: _cell(x, w), x)
    for rule in ACTIVE:
        if rule.needs_params:
            continue
        clipped = jax.vjp(lambda x, rule=rule: clip_cotangent(_cell(x, w), rule), x)[1]
        yield Law(f"outputs clipped by {rule!r}", clipped(cotangent), plain(rule(cotangent)))
        decorated = jax.vjp(error_clip(rule)(lambda x: _cell(x, w)), x)[1]
        (of_input,) = plain(cotangent)
        yield Law(f"inputs clipped by {rule!r}", decorated(cotangent), (rule(of_input),))


def _cell(x, w):
    return jnp.tanh(x @ w)


def _closing_cell(x, w):
    """A cell whose rule closes over a value of the program around it."""
    fixed = lax.stop_gradient(w)
    layer = jax.custom_vjp(lambda x: x @ fixed)
    layer.defvjp(lambda x: (x @ fixed, None), lambda _, g: (g @ fixed.T,))
    return jnp.tanh(checkpoint_name(layer(x), "h") + x @ w)


def _normal_array(*shape):
    rng = np.random.default_rng(list(shape))
    return jax.device_put(rng.normal(size=shape).astype(np.float32))


def add_selftest_parser(subparsers: Any) -> None:
    about = "Check every VJP of this library on every available device."
    parser = add_command(subparsers, "selftest", about, run_selftest)
    words = f"some of {', '.join(PLATFORMS)}, such as cpu,gpu (default: all)"
    parser.add_argument("--device", type=lambda text: text.split(","), help=words)


def run_selftest(options: argparse.Namespace) -> int:
    devices = find_devices(options.device)
    if not devices.there:
        wanted = ",".join(options.device)
        raise UsageError(f"--device: got {wanted}, expected a device that is here")
    failed = 0
    for ok, text in _results(options.device):
        failed += not ok
        print(f"{'ok    ' if ok else 'FAILED'} {text}", flush=True)
    absent = ", ".join(devices.absent) or "none"
    print(f"{failed} failed; devices: {', '.join(devices.there)}; not here, so not run: {absent}")
    return FAILED if failed else PASSED


def _results(kinds: list[str] | None) -> Iterator[tuple[bool, str]]:
    """Whether each case and each law holds, and what is printed of it."""

    def report_of(case: Case) -> Any:
        call = case.function, case.args
        return check_grads(*call, order=case.order, devices=kinds, raise_on_failure=False)

    # Compiling is most of the work, and may be done at once.
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as workers:
        every = list(cases())
        for case, report in zip(every, workers.map(report_of, every), strict=True):
            details = "" if report.ok else f"\n{report}"
            yield report.ok, f"{case.name} ({report.seconds:.1f} s){details}"
    for law in laws():
        pairs = zip(jax.tree.leaves(law.left), jax.tree.leaves(law.right), strict=True)
        yield all(np.allclose(*pair, rtol=1e-6, atol=1e-6) for pair in pairs), law.name
