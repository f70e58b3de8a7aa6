"""Value, gradient, and what arrived at the tagged variables in the backward pass."""

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

import clipgrad._jaxpr as _jaxpr
from clipgrad._by_name import ByName, Rules, check_names, checked_rules, warn_of_batches
from clipgrad._nnx import is_model, value_and_grad, with_models
from clipgrad._stats import ClipStats

_CALLER = "value_and_grad_with_stats"


def value_and_grad_with_stats(
    fun: Callable[..., Any],
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    *,
    rules: Rules | None = None,
    watch: Iterable[str] | None = None,
) -> Callable[..., Any]:
    r"""`jax.value_and_grad` with a third result: statistics of each tagged variable's cotangent.

    A variable is tagged by `jax.ad_checkpoint.checkpoint_name`; see `error_clip_by_name`.

    Guarantees:
      * Value and gradient are those of ``jax.value_and_grad(error_clip_by_name(fun, rules))``;
        flax NNX models are differentiated as by ``nnx.value_and_grad``, by their
        ``nnx.Param``, and what ``fun`` changes in them is changed.
      * The statistics leave the compiled backward pass as the gradients do, with no callback;
        under `jax.jit` statistics that are not used are not computed.
      * The statistics of a name have one leading axis for each scan around it, outermost first:
        in an RNN one entry for each time step, in a transformer that scans its layers one for each
        layer. Variables that share a name are added up: step by step as far as the lengths of the
        scans around them are the same from the outermost on, over all steps of the rest.
      * Under `jax.vmap` each lane has its own; inside of a `jax.vmap` in ``fun`` they are those of
        the whole batch.
      * Inside of `jax.shard_map` they are those of all devices together, like the gradients of
        what the devices share; with ``check_vma=False`` each device has its own.

    Args:
      fun: a function that returns a scalar, or ``(scalar, aux)``.
      argnums: the positions of the arguments to differentiate.
      has_aux: whether ``fun`` returns something besides the scalar.
      rules: a rule for each name; ``None`` in place of a rule: watch only.
      watch: further names to watch only; ``None``: all names whose variables have cotangents.

    Returns:
      A function of the arguments of ``fun`` that returns ``(value, grads, stats)``, or
      ``((value, aux), grads, stats)``, with a dictionary ``stats`` from names to `ClipStats`.

    Raises:
      TypeError: as `error_clip_by_name`, or if ``watch`` is not a collection of names.
      ValueError: when called, as `error_clip_by_name`, or if nothing is tagged with ``watch=None``.

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
    """
    return with_stats(fun, argnums, has_aux, rules, watch, value_and_grad)


def with_stats(
    fun: Callable[..., Any],
    argnums: int | Sequence[int],
    has_aux: bool,
    rules: Rules | None,
    watch: Iterable[str] | None,
    value_and_grad: Callable[..., Any],
) -> Callable[..., Any]:
    """`value_and_grad_with_stats`, by what ``value_and_grad(args)`` returns instead of JAX's."""
    plain = jax.value_and_grad(fun, argnums, has_aux)
    named = checked_rules({} if rules is None else rules)
    watched = _checked_watch(watch)
    chosen = argnums if isinstance(argnums, Iterable) else (argnums,)
    first = next(iter(chosen), 0)

    @functools.wraps(fun)
    def run(*args: Any, **kwargs: Any) -> Any:
        if not all(-len(args) <= i < len(args) for i in chosen):
            plain(*args, **kwargs)  # says what is wrong in its own words
        traced, has_changes = _traced(fun, _as_arrays(args, chosen), kwargs)
        probes = _probes(traced.program, named, watched)
        warn_of_batches(traced.program, named, _CALLER, stacklevel=3)

        def with_probes(*packed: Any) -> Any:
            *args, kwargs = packed
            args[first], probes = args[first]
            hook = ByName(named, probes)

            def again(function: Any, args: Any, kwargs: Any) -> Any:
                known = traced if function is fun else _jaxpr.trace(function, args, kwargs)
                return known.evaluate(args, kwargs, hook)

            return with_models(again, fun, tuple(args), kwargs)

        positions = tuple(i % len(args) for i in chosen)
        seen = (args, kwargs) if has_changes else [args[i] for i in positions]
        differentiated = value_and_grad(seen)(
            with_probes, argnums=positions if chosen is argnums else positions[0], has_aux=has_aux
        )
        # The keyword arguments come last, since NNX resolves keywords by the signature of `fun`.
        packed = [(arg, probes) if i == positions[0] else arg for i, arg in enumerate(args)]
        value, grads = differentiated(*packed, kwargs)
        (grad, stats), *others = grads if chosen is argnums else (grads,)
        return value, ((grad, *others) if chosen is argnums else grad), stats

    return run


def _traced(fun: Callable[..., Any], args: tuple, kwargs: Any) -> tuple[_jaxpr.Traced, bool]:
    """The program of a function, and whether it would change a model; here they stay."""
    traced: list[_jaxpr.Traced] = []
    changes: list[bool] = []

    def read(function: Any, args: Any, kwargs: Any) -> None:
        def noted(*args: Any, **kwargs: Any) -> Any:
            result = function(*args, **kwargs)
            changes.append(function is not fun and bool(result[0]))
            return result

        traced.append(_jaxpr.trace(noted, args, kwargs))

    with_models(read, fun, args, kwargs)
    return traced[0], changes[0]


def _checked_watch(watch: Any) -> tuple[str, ...] | None:
    if watch is None:
        return None
    names = tuple(watch) if isinstance(watch, Iterable) and not isinstance(watch, str) else None
    if names is None or not all(isinstance(name, str) for name in names):
        raise TypeError(
            f'watch: got {watch!r}, expected names such as ["h"], or None for all names there are'
        )
    return names


def _as_arrays(args: tuple, argnums: Iterable[int]) -> tuple:
    """The arguments, with arrays for the Python numbers in those that are differentiated."""

    def as_array(leaf: Any) -> Any:
        return jnp.asarray(leaf) if isinstance(leaf, int | float | complex) else leaf

    arrays = list(args)
    for i in argnums:
        arrays[i] = jax.tree.map(as_array, args[i], is_leaf=is_model)
    return tuple(arrays)


def _probes(program: Any, rules: Rules, watch: tuple[str, ...] | None) -> dict[str, ClipStats]:
    found = _jaxpr.sites(program)
    if watch is None:
        watch = tuple(s.name for s in found if s.is_out_of_reach or s.is_differentiable and s.used)
        if not watch:
            raise ValueError(
                f"{_CALLER}: got a function without tags, expected one with tagged variables; tag "
                'one by x = jax.ad_checkpoint.checkpoint_name(x, "x")'
            )
    names = tuple(dict.fromkeys([*rules, *watch]))
    check_names(program, names, _CALLER)
    return {name: _probe([s for s in found if s.name == name and not s.within]) for name in names}


def _probe(own: list[Any]) -> ClipStats:
    """Statistics of nothing, with an axis for each scan around all these sites."""
    shape = []
    for lengths in zip(*(site.nest for site in own), strict=False):
        if len(set(lengths)) > 1:
            break
        shape.append(lengths[0])
    wide = any(site.dtype in ("float64", "complex128") for site in own)
    return ClipStats.zero(tuple(shape), jnp.float64 if wide else jnp.float32)
