"""Value, gradient, and what arrived at variables with names in the backward pass."""

import functools
import operator
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import clipgrad._names as _names
import clipgrad._programs as _programs
from clipgrad._arrays import Pattern, check_tree, described, explain_call, is_array, loss_and_aux
from clipgrad._clip import ClipStats
from clipgrad._error_clip.by_name import ByName, warn_of_batches
from clipgrad._error_clip.named_rules import Rules, check_function, checked_rules, program_of
from clipgrad._frameworks import (
    Pure,
    has_modules,
    is_diff_state,
    is_model,
    model_value_and_grad,
    with_models,
)
from clipgrad._names import (
    CLIPPED,
    Matches,
    active_variables,
    checked_watch,
    common_nest,
    resolved,
    watched_names,
)

_CALLER = "value_and_grad_with_stats"


@explain_call()
def value_and_grad_with_stats(
    fun: Callable[..., Any],
    argnums: Any = 0,
    has_aux: bool = False,
    *,
    error_clip: Rules | None = None,
    watch: Iterable[Pattern] | None = None,
) -> Callable[..., Any]:
    r"""Like `jax.value_and_grad`, and also returns statistics of the gradient at named values.

    Example:
      >>> import clipgrad as cg, jax, jax.numpy as jnp
      >>> from jax.ad_checkpoint import checkpoint_name
      >>> def loss(w, inputs):
      ...     def cell(h, x):
      ...         h = checkpoint_name(w * h + x, "h")
      ...         return h, None
      ...     return jax.lax.scan(cell, 0.0, inputs)[0]
      >>> watched = jax.jit(cg.value_and_grad_with_stats(loss))
      >>> value, grads, stats = watched(2.0, jnp.ones(4))
      >>> print(value, grads, stats["h"].norm)
      15.0 17.0 [8. 4. 2. 1.]

    Args:
      fun: a function that returns a scalar, or ``(scalar, aux)``.
      argnums: the position or positions of the arguments to differentiate.
      has_aux: whether ``fun`` returns ``(scalar, aux)``.
      error_clip: a rule for each name or pattern of values inside ``fun``, as
        ``{"encoder/*": ErrorClipByValue(max=5.0)}``; ``None`` instead of a rule: watch only.
      watch: further names and patterns to watch without a clip, such as ``["**/attn"]`` or
        ``["model.py:14"]``; ``None``: all tags whose variables have cotangents or, if there are
        none, all modules.

    Returns:
      A function with the arguments of ``fun`` that returns ``(value, grads, stats)``, or
      ``((value, aux), grads, stats)``. ``stats`` is a dictionary from names to `ClipStats`.

    Raises:
      TypeError: as `error_clip_by_name`; if ``watch`` is not a collection of names, or
        ``argnums`` are not positions of arguments.
      ValueError: when called, as `error_clip_by_name`, if a name is only in a
        `jax.lax.while_loop`, or if there is nothing to watch with ``watch=None``.

    Guarantees:
      * Value and gradient are the same as from
        ``jax.value_and_grad(error_clip_by_name(fun, error_clip))``. flax NNX models are
        differentiated as by ``nnx.value_and_grad`` (an ``nnx.DiffState`` in ``argnums`` selects
        variables), and arguments with Equinox modules as by ``eqx.filter_value_and_grad``.
      * The compiled backward pass returns the statistics like gradients, without a callback. Under
        `jax.jit` statistics that you do not use are not computed, and change no bit.
      * For each scan around a name, the statistics have one leading axis, outermost first: in an
        RNN you get one entry for each time step, in a transformer that scans its layers one for
        each layer. Variables that share a name are added up. They share the axes of scans that have
        the same lengths, from the outermost on; over all other scans you get sums.
      * If you `jax.vmap` the result, you get statistics for each lane; a `jax.vmap` inside ``fun``
        gives statistics of the whole batch. Inside `jax.shard_map` you get statistics of all
        devices together, or with ``check_vma=False`` of each device.
    """
    check_function(fun)
    named = checked_rules({} if error_clip is None else error_clip, argument="error_clip")
    return with_stats(fun, argnums, has_aux, named, watch, model_value_and_grad, _CALLER)


def with_stats(
    fun: Callable[..., Any],
    argnums: Any,
    has_aux: bool,
    rules: dict[str, Any],
    watch: Iterable[Pattern] | None,
    value_and_grad: Callable[..., Any],
    caller: str,
) -> Callable[..., Any]:
    """`value_and_grad_with_stats` for a caller, with rules that are checked.

    ``value_and_grad(args)`` replaces JAX's function.
    """
    watched, chosen = checked_watch(watch), _checked_argnums(argnums)

    @functools.wraps(fun)
    def run(*args: Any, **kwargs: Any) -> Any:
        positions = _argnums_of_call(chosen, len(args))
        filters: dict[int | str, Any] = dict(
            zip(positions, (getattr(x, "filter", None) for x in chosen), strict=True)
        )
        arrays = _as_arrays(args, positions)
        traced, has_changes, moved = program_of(fun, arrays, kwargs, filters)
        names, probes = _named(traced.program, rules, watched, caller, (args, kwargs))
        warn_of_batches(traced.program, names, caller)

        def with_probes(*packed: Any) -> Any:
            *args, kwargs, probes = packed

            def again(function: Any, args: Any, kwargs: Any) -> Any:
                apart = isinstance(function, Pure)
                known = _programs.trace(function, args, kwargs) if apart else traced
                active = active_variables(known.program, moved)
                return known.evaluate(args, kwargs, ByName.of(known.program, names, probes, active))

            result = with_models(again, fun, tuple(args), kwargs)
            loss_and_aux("fun", result, has_aux)
            return result

        # The keyword arguments and the probes, whose gradient is the statistics, come last, since
        # NNX resolves keywords by the signature of `fun`.
        pairs = zip(chosen, positions, strict=True)
        numbers = [type(x)(i, x.filter) if is_diff_state(x) else i for x, i in pairs]
        seen = (args, kwargs) if has_changes else [args[i] for i in positions]
        differentiated = value_and_grad(seen)(
            with_probes, argnums=(*numbers, len(args) + 1), has_aux=has_aux
        )
        value, (*grads, stats) = differentiated(*args, kwargs, probes)
        return value, (tuple(grads) if isinstance(argnums, Iterable) else grads[0]), stats

    return run


def _checked_argnums(argnums: Any) -> list[Any]:
    """The positions to differentiate, of which each may be an `nnx.DiffState`."""
    chosen = list(argnums) if isinstance(argnums, Iterable) else [argnums]
    if not chosen or not all(_is_position(x) or is_diff_state(x) for x in chosen):
        has_arrays = any(map(is_array, jax.tree.leaves(argnums)))
        raise (TypeError if chosen else ValueError)(
            f"argnums: got {described(argnums) if has_arrays else repr(argnums)}, expected the "
            f"position of an argument, or several, such as 0 or (0, 1){_instead(argnums)}"
        )
    return chosen


def _is_position(x: Any) -> bool:
    return hasattr(x, "__index__") and (not is_array(x) or x.dtype.kind in "iu" and x.ndim == 0)


def _instead(argnums: Any) -> str:
    """A hint for rules, names or arguments in the place of positions."""
    if any(map(is_array, jax.tree.leaves(argnums))):
        return f"; write {_CALLER}(fun)(params, x)"
    if isinstance(argnums, Mapping):
        return f"; write error_clip={{{str(list(argnums))[1:-1]}: ...}}"
    if isinstance(argnums, str):
        return f"; write watch=[{argnums!r}]"
    names = isinstance(argnums, Iterable) and [*argnums]
    return f"; write watch={names}" if names and all(isinstance(x, str) for x in names) else ""


def _argnums_of_call(chosen: list[Any], count: int) -> list[int]:
    """The positions among so many arguments, from the first on."""
    positions = [x.argnum if is_diff_state(x) else operator.index(x) for x in chosen]
    if wrong := [i for i in positions if not -count <= i < count]:
        raise TypeError(
            f"argnums: got {wrong[0]}, expected the position of one of the {count} positional "
            "arguments"
        )
    return [i % count for i in positions]


def _as_arrays(args: tuple, argnums: Iterable[int]) -> tuple:
    """The arguments, with arrays for the Python numbers in those that are differentiated."""

    def as_array(leaf: Any) -> Any:
        return jnp.asarray(leaf) if isinstance(leaf, kinds) else leaf

    check_tree("args", args)
    arrays = list(args)
    for i in argnums:
        _check_is_floating(i, args[i])
        # In an Equinox model numbers are not differentiated, see `equinox_value_and_grad`.
        kinds = np.number if has_modules(args[i]) else int | float | complex | np.number
        arrays[i] = jax.tree.map(as_array, args[i], is_leaf=is_model)
    return tuple(arrays)


def _check_is_floating(position: int, arg: Any) -> None:
    """Raises `TypeError` for a number or an array by which nothing is differentiated."""
    dtype = getattr(arg, "dtype", None) or (isinstance(arg, bool | int) and jnp.dtype(type(arg)))
    if dtype and (jnp.issubdtype(dtype, jnp.integer) or jnp.issubdtype(dtype, jnp.bool_)):
        raise TypeError(
            f"args: got {described(arg)} at position {position}, by which the function is "
            "differentiated, expected real- or complex-valued inputs; write 1.0 for 1, "
            "x.astype(float), or argnums="
        )


def _named(
    program: Any, rules: Rules, watch: dict[str, Any] | None, caller: str, arguments: Any
) -> tuple[Matches, dict[str, ClipStats]]:
    """The rules for clipped and watched names, and empty statistics for each name.

    The statistics have an axis for each scan around all sites of the name.
    """
    clipped = resolved(program, rules, caller, CLIPPED, arguments)
    names = watched_names(program, watch, caller, CLIPPED, clipped) | clipped
    probes = {}
    for name, sites in _names.sites_of(program, names).items():
        moving = [site for site in sites if site.has_cotangent]
        wide = any(site.dtype in ("float64", "complex128") for site in moving)
        probes[name] = ClipStats.zero(common_nest(moving), jnp.float64 if wide else jnp.float32)
    return names, probes
