"""A function, and statistics of the values with names inside of it."""

import functools
import operator
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax

import clipgrad._programs as _programs
from clipgrad._arrays import Pattern, explain_call
from clipgrad._compat import varying_axes
from clipgrad._error_clip import check_function
from clipgrad._frameworks import Pure, with_models
from clipgrad._names import (
    VALUES,
    NamedSite,
    Seen,
    checked_watch,
    common_nest,
    line_keys,
    sites_of,
    watched_names,
)
from clipgrad._values.hook import KeyedNotes, ValueHook, value_hook
from clipgrad._values.value_stats import ValueStats

Watch = Iterable[Pattern] | Mapping[str, int | None] | Mapping[Pattern, int | None] | None
_OF_VALUES = "with_value_stats"


@explain_call()
def with_value_stats(
    fun: Callable[..., Any], *, watch: Watch = None, has_aux: bool = False
) -> Callable[..., Any]:
    """Makes a function that also returns statistics of the values with names inside of it.

    A name is a tag, given by `jax.ad_checkpoint.checkpoint_name`, the path of a module, or a line,
    such as ``"model.py:14"``; `list_names` lists them.

    Example:
      >>> import clipgrad as cg, jax, jax.numpy as jnp
      >>> def loss(w, x):
      ...     with jax.named_scope("attn"):
      ...         logits = x @ w
      ...     return jax.nn.logsumexp(logits, axis=-1).sum()
      >>> step = jax.jit(jax.value_and_grad(cg.with_value_stats(loss), has_aux=True))
      >>> (value, stats), grads = step(jnp.eye(2), jnp.array([[3.0, 0.0], [0.0, -4.0]]))
      >>> print(stats["attn"].rms, stats["attn"].max, stats["attn"].zero_fraction)
      2.5 4.0 0.5
      >>> per_column = cg.with_value_stats(loss, watch={"attn": -1})
      >>> print(per_column(jnp.eye(2), jnp.array([[3.0, 0.0], [0.0, -4.0]]))[1]["attn"].max)
      [3. 4.]

    Args:
      fun: a function of trees of arrays.
      watch: the names to measure, and patterns of them such as ``"block_*/attn"``; ``None``: all
        tags, or all modules if there are no tags. A dictionary from names or patterns to an axis,
        such as ``{"**/logits": 1}`` for the heads of attention, keeps this axis of the (batched)
        value: there is one entry for each index, behind the axes of scans. ``None`` instead of the
        axis: one entry for the whole value.
      has_aux: ``True`` if ``fun`` returns ``(result, aux)``.

    Returns:
      A function of the arguments of ``fun`` that returns ``(result, stats)``, or with ``has_aux``
      ``(result, (aux, stats))``, with a dictionary ``stats`` from names to `ValueStats`, one for
      each name that a pattern matches.

    Raises:
      TypeError: if ``fun`` is not a function, ``watch`` not a collection of names, or an axis not
        an integer; when called, if the values of a name are not floating or complex, or with
        ``has_aux`` the result is not a pair.
      ValueError: when called, if a name or a pattern matches no value, or only values that can't be
        reached; if values have no such axis, or axes of different lengths, or a mesh may cut it; if
        there are neither tags nor modules with ``watch=None``.

    The values of a module are those that are computed inside, and used or returned outside; if
    there are none, those that nothing uses. The value of a line is the last floating one that it
    computes each time it runs. No gradient is needed: values of a
    `jax.lax.while_loop`, and others without a cotangent, are measured, too. For values and
    cotangents of one run write ``cg.value_and_grad_with_stats(cg.with_value_stats(loss),
    has_aux=True)``.

    Guarantees:
      * The result and its derivatives are the same as of ``fun``; the statistics have none. If a
        compiled program does not use them, the result is bit-identical; if it does, the rounding
        may change, because XLA then stores what it had fused.
      * The statistics leave a compiled program as further results, without a callback. A `jax.jit`
        inside keeps its shardings and donated arguments; `jax.checkpoint` stays.
      * The statistics of a name have one leading axis for each scan around it, outermost first. A
        `jax.lax.fori_loop` whose bounds are known is a scan. Values that share a name are joined,
        and so are the steps of a `jax.lax.while_loop`, and those of scans whose lengths differ.
      * A branch of a `jax.lax.cond` that is not taken counts nothing, unless a `jax.vmap` in
        ``fun`` gives each lane a condition of its own: then JAX computes both, and both count.
      * Under `jax.vmap` each lane has its own statistics; inside a `jax.vmap` in ``fun`` they are
        statistics of the whole batch.
      * Inside `jax.shard_map` they are statistics of all devices together. A value that does not
        vary along an axis of the mesh counts once; with ``check_vma=False`` it counts on every
        device. An axis is kept only of values that are the same on all devices.
      * Custom rules and `jax.lax.custom_linear_solve` are left whole: their results are values of
        the modules around. Names and models are treated as by `error_clip_by_name`.
    """
    check_function(fun)
    axes = _checked_axes(watch)

    @functools.wraps(fun)
    def run(*args: Any, **kwargs: Any) -> Any:
        return with_models(measured, fun, args, kwargs)

    def measured(fun: Any, args: Any, kwargs: Any) -> Any:
        traced = _programs.trace(fun, args, kwargs)
        hook, common = _measure(traced.program, axes)
        result = traced.evaluate(args, kwargs, hook)
        stats = _stats_by_name(hook.noted(), common)
        if isinstance(fun, Pure):
            changes, result = result
            return changes, _with_stats_behind(result, stats, has_aux)
        return _with_stats_behind(result, stats, has_aux)

    return run


def _with_stats_behind(result: Any, stats: dict[str, ValueStats], has_aux: bool) -> Any:
    if not has_aux:
        return result, stats
    if not isinstance(result, tuple) or len(result) != 2:
        raise TypeError(
            f"has_aux: got a result of {type(result).__name__}, expected fun to return "
            "(result, aux) with has_aux=True"
        )
    return result[0], (result[1], stats)


def _checked_axes(watch: Any) -> dict[str, int | None] | None:
    """The axis of each name that is watched; ``None``: no choice."""
    names = checked_watch(watch)
    if names is None or not isinstance(watch, Mapping):
        return names
    for name, axis in watch.items():
        is_axis = hasattr(axis, "__index__") and not isinstance(axis, bool)
        if axis is not None and not is_axis:
            raise TypeError(
                f"watch: got {axis!r} for {name!r}, expected an axis of its values such as -1, or "
                "None for whole values"
            )
    return {name: None if axis is None else operator.index(axis) for name, axis in watch.items()}


@value_hook(choices=["watched"])
class _Measure(ValueHook):
    """Measures values by name; all that share a name and the scans around are joined at once.

    The key of a note is the name, and the lengths of the scans between its program and the value.
    """

    # For each name its kind, whether its values are used, the axis that is kept, and the dtype of
    # its statistics.
    watched: tuple[tuple[str, str, bool, int | None, str], ...] = ()

    @property
    def is_reusable(self) -> bool:
        return True

    def wants(self, name: str, kind: str, used: bool) -> bool:
        return self._by_name.get(name, ())[:2] == (kind, used)

    @functools.cached_property
    def _by_name(self) -> dict[str, tuple[Any, ...]]:
        return {name: (kind, *rest) for name, kind, *rest in self.watched}

    def note_of(self, seen: Seen, x: jax.Array) -> ValueStats:
        *_, axis, dtype = self._by_name[seen.name]
        if axis is not None:
            _check_whole(seen.name, axis, varying_axes(x) & self.axes)
        return ValueStats.of(x, axis, dtype)

    def key(self, seen: Seen) -> tuple[str, tuple[int, ...]]:
        """The name; there is no scan between."""
        return seen.name, ()

    def key_around(self, equation: Any, program: int, key: Any) -> Any:
        """The key with the length of a scan in front of the others."""
        name, nest = key
        length = _programs.scan_length(equation)
        return name, nest if length is None else (length, *nest)

    def joined(self, first: ValueStats, second: ValueStats) -> ValueStats:
        return first.joined(second)

    def over_devices(self, equation: Any, key: Any, note: ValueStats) -> ValueStats:
        *_, axis, _ = self._by_name[key[0]]
        if axis is not None and not _programs.tracks_devices(equation):
            _check_whole(key[0], axis, frozenset(_programs.manual_axes(equation)))
        return note.over(0)


def _check_whole(name: str, axis: int, meshes: frozenset[str]) -> None:
    """Refuses to keep an axis of values that may differ along axes of a mesh."""
    if meshes:
        raise ValueError(
            f"{_OF_VALUES}: got the axis {axis} for {name!r}, whose values may differ between the "
            f"devices along {', '.join(map(repr, sorted(meshes)))}, expected values that are the "
            f"same on all, since JAX does not say which axes a mesh cuts; watch={{{name!r}: None}} "
            "measures whole values, and ValueStats.of(x, axis) inside of the shard_map a part"
        )


def _measure(program: Any, axes: dict[str, int | None] | None) -> tuple[_Measure, dict[str, int]]:
    """The hook that measures these names, and the number of scans that the values of each share."""
    chosen = watched_names(program, axes, _OF_VALUES, VALUES)
    own = {n: list(VALUES.own(sites)) for n, sites in sites_of(program, chosen).items()}
    watched = []
    for name, (kind, axis) in chosen.items():
        if axis is not None:
            _check_axis(name, axis, own[name])
        wide = any(site.dtype in ("float64", "complex128") for site in own[name])
        used = any(site.used for site in own[name])
        watched.append((name, kind, used, axis, "float64" if wide else "float32"))
    common = {name: len(common_nest(sites)) for name, sites in own.items()}
    return _Measure(watched=tuple(watched), lines=line_keys(program, chosen)), common


def _check_axis(name: str, axis: int, sites: list[NamedSite]) -> None:
    """Raises `ValueError` if there is no such axis, or if it is not of one length."""
    for site in sites:
        if not -len(site.shape) <= axis < len(site.shape):
            raise ValueError(
                f"{_OF_VALUES}: got the axis {axis} for {name!r}, expected an axis of all its "
                f"values, one of which has the shape {site.shape}"
            )
    lengths = sorted({site.shape[axis] for site in sites})
    if len(lengths) > 1:
        raise ValueError(
            f"{_OF_VALUES}: got the axis {axis} for {name!r}, whose values have the lengths "
            f"{lengths} there, expected one length; tag the value you mean with checkpoint_name"
        )


def _stats_by_name(notes: KeyedNotes, common: dict[str, int]) -> dict[str, ValueStats]:
    """The statistics of each name, with the axes of the scans that its values share."""
    found: dict[str, ValueStats] = {}
    for (name, nest), stats in notes.items():
        for _ in nest[common[name] :]:
            stats = stats.over(common[name])
        found[name] = found[name].joined(stats) if name in found else stats
    return {name: found[name] for name in common}
