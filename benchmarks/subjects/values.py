"""Statistics of values by name, beside the plain gradient and flax's captured intermediates."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import clipgrad as cg
from benchmarks import models
from benchmarks.rows import FLOOR, OURS, PEER, Row, Scale, Side, jitted
from benchmarks.subjects.names import NARROW

TITLE = "Statistics of values by name"
FLAX, PLAIN = "flax capture_intermediates", "plain"


def variants(fun: Callable, names: list[str]) -> dict[str, Callable]:
    """What this library makes of a model: functions that return the statistics as a second."""
    measured = cg.with_value_stats(fun, watch=names)

    def with_some(*args: Any) -> tuple[Any, Any]:
        value, stats = measured(*args)
        return value, {name: (s.rms, s.max) for name, s in stats.items()}

    def with_all(*args: Any) -> tuple[Any, Any]:
        value, stats = measured(*args)
        return value, cg.scalars(stats)

    def unused(*args: Any) -> tuple[Any, Any]:
        return measured(*args)[0], ()

    return {"unused": unused, "rms and max used": with_some, "all used": with_all}


def captured(apply: Callable, params: Any, x: Any) -> tuple[Any, Any]:
    """The loss, and the same statistics of what flax captures."""
    out, state = apply(params, x, capture_intermediates=True)
    summary = lambda a: (jnp.sqrt(jnp.mean(a**2)), jnp.max(jnp.abs(a)))  # noqa: E731
    return jnp.mean(out**2), jax.tree.map(summary, state["intermediates"])


def programs(fun: Callable, apply: Callable, names: list[str]) -> dict[str, Callable]:
    """The gradient beside statistics: the variants, flax and the plain gradient."""

    def of(changed: Callable) -> Callable:
        gradient = jax.value_and_grad(changed, has_aux=True)

        def run(*args: Any) -> tuple[Any, Any]:
            (value, stats), grads = gradient(*args)
            return (value, grads), stats

        return run

    return {
        **{name: of(changed) for name, changed in variants(fun, names).items()},
        FLAX: of(lambda p, x: captured(apply, p, x)),
        PLAIN: of(lambda p, x: (fun(p, x), ())),
    }


def sides(scale: Scale, scanned: bool, narrow: bool = False) -> list[Side]:
    """The variants, flax and the plain gradient; also computed in bfloat16."""
    fun, params, data, names = models.flax_transformer(scale, scanned)
    dtype = models.in_bfloat16 if narrow else lambda fun: fun
    found = programs(dtype(fun), dtype(models.flax_apply(scale, scanned)), names)
    kinds = {FLAX: PEER, PLAIN: FLOOR}
    return [
        jitted(name, kinds.get(name, OURS), run, params, data, numbers=lambda result: result[0])
        for name, run in found.items()
    ]


def rows(scale: Scale) -> list[Row]:
    """A transformer whose layers are unrolled, and one that scans them; all modules."""
    found = {"unrolled transformer": False, "scanned transformer": True}
    plain = [
        Row(name, lambda s=scanned: sides(scale, s), rtol=1e-5, budget=12.0)
        for name, scanned in found.items()
    ]
    narrow = lambda: sides(scale, scanned=True, narrow=True)  # noqa: E731
    return [*plain, Row("scanned transformer in bfloat16", narrow, rtol=NARROW, budget=12.0)]
