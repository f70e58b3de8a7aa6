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
    """Makes a function that also returns statistics of named values inside.

    A name is a tag, which you set by `jax.ad_checkpoint.checkpoint_name`, a module path, or a line,
    such as ``"model.py:14"``; `list_names` lists the names.

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
      watch: names to measure, and patterns such as ``"block_*/attn"``; ``None``: all tags, or all
        modules if there are no tags. With a dictionary from names or patterns to an axis of the
        (batched) value, such as ``{"**/logits": 1}`` for attention heads, you get one entry for
        each index of that axis; the axes of scans come first. ``None`` instead of the axis: one
        entry for the whole value.
      has_aux: ``True`` if ``fun`` returns ``(result, aux)``.

    Returns:
      A function with the arguments of ``fun`` that returns ``(result, stats)``, or with ``has_aux``
      ``(result, (aux, stats))``. So for the gradient write ``has_aux=True``, as above; without it
      JAX raises "Gradient only defined for scalar-output functions". ``stats`` is a dictionary
      from names to `ValueStats`, with one entry for each name that a pattern matches.

    Raises:
      TypeError: if ``fun`` is not a function, ``watch`` not a collection of names, or an axis not
        an integer; when called, if the values of a name are not floating or complex, or with
        ``has_aux`` the result is not a pair.
      ValueError: when called, if a name or a pattern matches no value, or only inaccessible values;
        if values lack the axis, have axes of different lengths, or if a mesh may cut the axis; with
        ``watch=None``, if there are neither tags nor modules.

    The values of a module are computed inside, and used or returned outside; if there are no such
    values, unused ones count. The value of a line is the last floating one that the line computes
    each time it runs. You need no gradient: values inside a `jax.lax.while_loop`, and others
    without a cotangent, are measured, too. To get values and cotangents from one run, write
    ``cg.value_and_grad_with_stats(cg.with_value_stats(loss), has_aux=True)``.

    Guarantees:
      * The result and the derivatives are those of ``fun``; the statistics have no derivatives. If
        your compiled program does not use the statistics, the result is bit-identical; otherwise
        the rounding may change, because XLA then stores values that were fused before.
      * A compiled program returns the statistics as further results, without a callback. `jax.jit`
        inside keeps shardings and donated arguments, and `jax.checkpoint` stays.
      * For each scan around a name, the statistics have one leading axis, outermost first. A
        `jax.lax.fori_loop` with known bounds is a scan. Values that share a name are joined. So are
        `jax.lax.while_loop` steps, and the steps of scans with different lengths.
      * In a `jax.lax.cond` only the chosen branch counts. If a `jax.vmap` in ``fun`` gives each
        lane its own condition, JAX computes both branches, and both count.
      * If you `jax.vmap` the result, you get statistics for each lane; a `jax.vmap` inside ``fun``
        gives statistics of the whole batch.
      * Inside `jax.shard_map` you get statistics of all devices together. A value that does not
        vary along a mesh axis counts once; with ``check_vma=False`` it counts on every device. You
        can keep an axis only of values that are the same on all devices.
      * Values inside custom rules and `jax.lax.custom_linear_solve` are not measured; the results
        belong to the modules around. Names and models are treated as in `error_clip_by_name`.
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
    """Measures values by name; values with the same name and scans are joined at once.

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
    """The hook that measures these names, and for each name the number of shared scans."""
    chosen = watched_names(program, axes, _OF_VALUES, VALUES)
    seen_sites = {n: list(VALUES.counted(sites)) for n, sites in sites_of(program, chosen).items()}
    watched = []
    for name, (kind, axis) in chosen.items():
        if axis is not None:
            _check_axis(name, axis, seen_sites[name])
        wide = any(site.dtype in ("float64", "complex128") for site in seen_sites[name])
        used = any(site.used for site in seen_sites[name])
        watched.append((name, kind, used, axis, "float64" if wide else "float32"))
    common = {name: len(common_nest(sites)) for name, sites in seen_sites.items()}
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
    by_name: dict[str, ValueStats] = {}
    for (name, nest), stats in notes.items():
        for _ in nest[common[name] :]:
            stats = stats.over(common[name])
        by_name[name] = by_name[name].joined(stats) if name in by_name else stats
    return {name: by_name[name] for name in common}
