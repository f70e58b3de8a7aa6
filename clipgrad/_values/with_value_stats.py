"""A function, and statistics of the values with names inside of it."""

import functools
import operator
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import jax

import clipgrad._jaxpr as _jaxpr
import clipgrad._names as _names
from clipgrad._compat import varying_axes
from clipgrad._error_clip import check_function
from clipgrad._frameworks import Pure, with_models
from clipgrad._names import VALUES, checked_watch, common_nest, sites_by_name, watched_names
from clipgrad._values.hook import KeyedNotes, Seen, ValueHook, value_hook
from clipgrad._values.value_stats import ValueStats

AxisOfDevices = tuple[int, str | tuple[str, ...]]
Watch = Iterable[str] | Mapping[str, int | AxisOfDevices | None] | None
_OF_VALUES = "with_value_stats"


class KeptAxis(NamedTuple):
    """An axis of values with an entry for each index.

    Attributes:
      axis: its position.
      cut: the axes of a mesh that cut it, the outermost first; None: nobody has said which.
    """

    axis: int
    cut: tuple[str, ...] | None


def with_value_stats(
    fun: Callable[..., Any], *, watch: Watch = None, has_aux: bool = False
) -> Callable[..., Any]:
    r"""A function that also returns statistics of the values with names inside of it.

    A name is a tag, given by `jax.ad_checkpoint.checkpoint_name`, or the path of a module, see
    `error_clip_by_name`. The values of a module are those that are computed inside, and used or
    returned outside; if there are none, those that nothing uses. No gradient is needed: values of a
    `jax.lax.while_loop`, and others without a cotangent, are measured, too. `list_names` lists the
    names.

    For values and cotangents of one run write
    ``cg.value_and_grad_with_stats(cg.with_value_stats(loss), has_aux=True)``.

    Guarantees:
      * The result and its derivatives are the same as of ``fun``; the statistics have none. If a
        compiled program does not use them, the compiler removes them, and the result is
        bit-identical; if it does, the rounding may change, because XLA then stores what it had
        fused.
      * The statistics leave a compiled program as further results, without a callback. A `jax.jit`
        inside keeps its shardings and donated arguments; `jax.checkpoint` stays.
      * The statistics of a name have one leading axis for each scan around it, outermost first. A
        `jax.lax.fori_loop` whose bounds are known is a scan. Values that share a name are joined:
        step by step as far as the lengths of the scans around them are the same from the outermost
        on, over all steps of the rest. The steps of a `jax.lax.while_loop` are joined; inside of a
        `jax.vmap` its step counts for all lanes as long as one of them goes on.
      * A branch of a `jax.lax.cond` that is not taken counts nothing. Where a `jax.vmap` in ``fun``
        gives each lane a condition of its own, JAX computes both branches in all lanes, and both
        count.
      * Under `jax.vmap` each lane has its own statistics; inside a `jax.vmap` in ``fun`` they are
        statistics of the whole batch.
      * Inside `jax.shard_map` they are statistics of all devices together. A value that does not
        vary along an axis of the mesh counts once; with ``check_vma=False`` it counts on every
        device. An entry of an axis that is kept joins the entries with its index on all devices;
        JAX does not say whether an axis of the mesh cuts it, so a warning asks for
        ``{name: (axis, "m")}`` if ``"m"`` does, whose devices then follow one another, and for
        ``{name: (axis, ())}`` if each device has all of it.
      * `jax.custom_vjp`, `jax.custom_jvp` and `jax.lax.custom_linear_solve` are left whole: their
        results are values of the modules around.
      * Names and models are treated as by `error_clip_by_name`: ``fun`` is traced once per call,
        and NNX models among its arguments change as ``fun`` changes them.

    Args:
      fun: a function of pytrees.
      watch: names and patterns; ``None``: all tags, or all modules if there are no tags. A
        dictionary from names or patterns to an axis of the value keeps this axis: there is one
        entry for each index, behind the axes of scans, such as for each head of attention logits;
        ``None`` in place of the axis: one entry for the whole value; ``(axis, mesh axes)``: an
        axis that these cut inside a `jax.shard_map`. Inside a `jax.vmap` in ``fun`` it is an axis
        of the batched value.
      has_aux: whether ``fun`` returns ``(result, aux)``.

    Returns:
      A function of the arguments of ``fun`` that returns ``(result, stats)``, or with ``has_aux``
      ``(result, (aux, stats))``, with a dictionary ``stats`` from names to `ValueStats`, one for
      each name that a pattern matches.

    Raises:
      TypeError: if ``fun`` is not a function, ``watch`` not a collection of names, or an axis not
        an integer or of this form; when called, if the values of a name are not floating or
        complex, or with ``has_aux`` the result is not a pair.
      ValueError: when called, if a name or a pattern matches no value, or only values that can't be
        reached; if values have no such axis, or axes of different lengths, or do not vary along an
        axis of a mesh that is said to cut them; if there are neither tags nor modules with
        ``watch=None``.

    Example:
      >>> import clipgrad as cg, jax, jax.numpy as jnp
      >>> def loss(w, x):
      ...     with jax.named_scope("attn"):
      ...         logits = x @ w
      ...     return jax.nn.logsumexp(logits, axis=-1).sum()
      >>> step = jax.jit(jax.value_and_grad(cg.with_value_stats(loss), has_aux=True))
      >>> (value, stats), grads = step(jnp.eye(2), jnp.array([[3.0, 0.0], [0.0, -4.0]]))
      >>> print(stats["attn"].rms, stats["attn"].max, stats["attn"].zeros)
      2.5 4.0 0.5
      >>> per_column = cg.with_value_stats(loss, watch={"attn": -1})
      >>> print(per_column(jnp.eye(2), jnp.array([[3.0, 0.0], [0.0, -4.0]]))[1]["attn"].max)
      [3. 4.]
    """
    check_function(fun)
    axes = _checked_axes(watch)

    @functools.wraps(fun)
    def run(*args: Any, **kwargs: Any) -> Any:
        return with_models(measured, fun, args, kwargs)

    def measured(fun: Any, args: Any, kwargs: Any) -> Any:
        traced = _jaxpr.trace(fun, args, kwargs)
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


def _checked_axes(watch: Any) -> dict[str, KeptAxis | None] | None:
    """The axis of each name that is watched; ``None``: no choice."""
    names = checked_watch(watch)
    if names is None or not isinstance(watch, Mapping):
        return names
    return {name: _checked_axis(name, given) for name, given in watch.items()}


def _checked_axis(name: str, given: Any) -> KeptAxis | None:
    if given is None:
        return None
    is_pair = isinstance(given, tuple) and len(given) == 2
    pair: tuple[Any, Any] = given if is_pair else (given, None)
    axis, cut = pair
    cut = (cut,) if isinstance(cut, str) else cut
    are_names = cut is None or (isinstance(cut, tuple) and all(isinstance(a, str) for a in cut))
    is_axis = hasattr(axis, "__index__") and not isinstance(axis, bool)
    if not is_axis or not are_names:
        raise TypeError(
            f"watch: got {given!r} for {name!r}, expected an axis of its values such as -1, None "
            'for whole values, or (-1, "m") for an axis that the axis "m" of a mesh cuts'
        )
    return KeptAxis(operator.index(axis), cut)


@value_hook(choices=["watched"])
class _Measure(ValueHook):
    """Measures values by name; all that share a name and the scans around are joined at once.

    The key of a note is the name, and the lengths of the scans between its program and the value.
    """

    # For each name its kind, whether its values are used, the axis that is kept, and the dtype of
    # its statistics.
    watched: tuple[tuple[str, str, bool, KeptAxis | None, str], ...] = ()

    @property
    def is_reusable(self) -> bool:
        return True

    def wants(self, name: str, kind: str, used: bool) -> bool:
        return self._by_name.get(name, ())[:2] == (kind, used)

    @functools.cached_property
    def _by_name(self) -> dict[str, tuple[Any, ...]]:
        return {name: (kind, *rest) for name, kind, *rest in self.watched}

    def note_of(self, seen: Seen, x: jax.Array) -> ValueStats:
        *_, kept, dtype = self._by_name[seen.name]
        if kept is not None:
            _check_cut(seen.name, kept, varying_axes(x) & self.axes, self.axes)
        return ValueStats.of(x, kept and kept.axis, dtype)

    def key(self, seen: Seen) -> tuple[str, tuple[int, ...]]:
        """The name; there is no scan between."""
        return seen.name, ()

    def key_around(self, equation: Any, program: int, key: Any) -> Any:
        """The key with the length of a scan in front of the others."""
        name, nest = key
        is_scan = equation.primitive.name == "scan"
        return name, (equation.params["length"], *nest) if is_scan else nest

    def joined(self, first: ValueStats, second: ValueStats) -> ValueStats:
        return first.joined(second)

    def over_devices(self, equation: Any, key: Any, note: ValueStats) -> ValueStats:
        *_, kept, _ = self._by_name[key[0]]
        axes = _jaxpr.manual_axes(equation)
        sizes = [equation.params["mesh"].shape[axis] for axis in axes]
        cut = kept.cut or () if kept else ()
        return note.over_devices(sizes, [axes.index(axis) for axis in cut if axis in axes])


def _check_cut(name: str, kept: KeptAxis, varying: frozenset[str], tracked: frozenset[str]) -> None:
    """Asks which axes of a mesh cut an axis that is kept; `ValueError` if one can't."""
    if kept.cut is None and varying:
        every = " and ".join(map(repr, sorted(varying)))
        one = repr(min(varying))
        warnings.warn(
            f"{_OF_VALUES}: got values of {name!r} that vary over {every}, so that each entry of "
            f"the axis {kept.axis} joins the entries with its index on all devices; write "
            f"watch={{{name!r}: ({kept.axis}, {one})}} if {one} cuts this axis, or "
            f"({kept.axis}, ()) if each device has all of it",
            stacklevel=2,
        )
    same = sorted((tracked & {*(kept.cut or ())}) - varying)
    if same:
        raise ValueError(
            f"watch: got {kept.cut!r} for {name!r}, expected axes of a mesh that cut its axis "
            f"{kept.axis}; its values are the same along {same[0]!r}"
        )


def _measure(
    program: Any, axes: dict[str, KeptAxis | None] | None
) -> tuple[_Measure, dict[str, int]]:
    """The hook that measures these names, and the number of scans that the values of each share."""
    chosen = watched_names(program, axes, _OF_VALUES, VALUES)
    there = sites_by_name(program)
    own = {name: list(VALUES.own(there[name])) for name in chosen}
    watched = []
    for name, (kind, kept) in chosen.items():
        if kept is not None:
            _check_axis(name, kept, own[name], program)
        wide = any(site.dtype in ("float64", "complex128") for site in own[name])
        used = any(site.used for site in own[name])
        watched.append((name, kind, used, kept, "float64" if wide else "float32"))
    common = {name: len(common_nest(sites)) for name, sites in own.items()}
    return _Measure(watched=tuple(watched)), common


def _stats_by_name(notes: KeyedNotes, common: dict[str, int]) -> dict[str, ValueStats]:
    """The statistics of each name, with the axes of the scans that its values share."""
    found: dict[str, ValueStats] = {}
    for (name, nest), stats in notes.items():
        for _ in nest[common[name] :]:
            stats = stats.over(common[name])
        found[name] = found[name].joined(stats) if name in found else stats
    return {name: found[name] for name in common}


def _check_axis(name: str, kept: KeptAxis, sites: list[_names.NamedSite], program: Any) -> None:
    """Raises `ValueError` if there is no such axis, or if it is not of one length."""
    axis = kept.axis
    there = _mesh_axes(program) if kept.cut else ()
    unknown = [a for a in kept.cut or () if a not in there]
    if unknown:
        raise ValueError(
            f"watch: got {kept.cut!r} for {name!r}, expected axes of a mesh of a shard_map inside "
            f"this function, which are {sorted(there)}; without shard_map an axis is kept whole"
        )
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


def _mesh_axes(program: Any) -> frozenset[str]:
    equations = _jaxpr.equations(program)
    mapped = (e for e in equations if e.primitive.name == "shard_map")
    return frozenset(axis for e in mapped for axis in _jaxpr.manual_axes(e))
