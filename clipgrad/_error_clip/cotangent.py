"""Clipping the cotangent of a value: the one custom VJP of the clips."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.extend as jex
import jax.numpy as jnp

from clipgrad._arrays import (
    check_gradients,
    check_is_tree,
    check_tree,
    combine,
    explain_call,
    in_one_program,
    is_array,
    is_clippable,
    is_none,
    partition,
)
from clipgrad._clip import (
    ClipStats,
    apply_rule,
    check_is_no_rule,
    clipped_with_stats,
    for_value,
    is_data,
)
from clipgrad._compat import to_varying, varying_axes
from clipgrad._error_clip.rule_trees import RuleTree

CotangentRule = Callable[..., Any]


@explain_call("write clip_cotangent(x, rule), with a tree for several values")
def clip_cotangent(
    x: Any, rule: CotangentRule | Any | None, *, probe: ClipStats | None = None
) -> Any:
    r"""Clips the gradient at a value: use the result, since ``x`` itself is not clipped.

    The value does not change. In the backward pass the gradient of the value, the *cotangent*, is
    clipped before the operation that computed ``x`` receives it.

    Example:
      >>> import clipgrad as cg, jax
      >>> def loss(x, rule=None, probe=None):
      ...     h = cg.clip_cotangent(2 * x, rule, probe=probe)
      ...     return 10 * h
      >>> print(jax.grad(loss)(1.0), jax.grad(loss)(1.0, cg.ErrorClipByValue(max=5.0)))
      20.0 10.0
      >>> probe = cg.types.ClipStats.zero()
      >>> stats = jax.grad(loss, argnums=2)(1.0, cg.ErrorClipByValue(max=5.0), probe)
      >>> print(stats.norm, stats.clipped_norm)
      10.0 5.0

    Args:
      x: a pytree of arrays.
      rule: a `ClipRule`, a function of the cotangent tree, or ``None``: off. You may also write a
        tree of rules that is a prefix of ``x``, such as ``{"w": rule, "b": None}``: each rule clips
        one part. A function may have the keyword-only parameters ``name``, here the part's path
        (``""`` for ``x``), and ``operation``, here ``""``.
      probe: to get statistics, make `ClipStats.zero()` an argument of the function that you
        differentiate, and pass the argument here. The gradient with respect to the probe is the
        clip's `ClipStats`, summed over all uses of the probe. If you scan over
        ``ClipStats.zero((steps,))``, you get one entry for each step.

    Returns:
      ``x``.

    Raises:
      TypeError: if ``rule`` is not a rule, or ``probe`` not a `ClipStats` without leading axes.
      ValueError: if the rule does not fit ``x`` (you get the error here, not in the backward pass),
        or if a tree of rules is not a prefix of ``x``.

    Let $\bar x$ be the sum of the cotangents from all uses of the result. The program that produced
    ``x`` receives the cotangent $\mathrm{rule}(\bar x)$.

    Guarantees:
      * The value is bit-identical to ``x``, and the forward pass is the same program as before.
      * The cotangent is summed over all uses, and then clipped once. Structure, shapes and dtypes
        are kept.
      * The forward pass saves only thresholds that are arrays, and ``x`` if the rule needs the
        value (`AdaptiveClip`).
      * Leaves without cotangents (integers, booleans, ``None``, strings, PRNG keys, objects) stay
        as they are; a custom rule sees ``None`` in their places.
      * You can use a clip inside and outside of all JAX transformations, and differentiate the
        result again. Only forward mode has no cotangents: pass ``rule=None`` there. Inside
        `jax.vmap` a norm rule measures each example; outside, the batch.
      * If one clip is around another, the outer one gets the cotangent first:
        ``clip_cotangent(clip_cotangent(x, inner), outer)`` computes ``inner(outer(cotangent))``.
    """
    check_is_no_rule("x", x, rule, "the value", "clip_cotangent(x, rule)")
    check_is_tree("x", x, "error_clip(rule)(fun) for a function")
    return clip_argument(x, rule, probe)


def clip_argument(x: Any, rule: Any, probe: ClipStats | None = None) -> Any:
    """`clip_cotangent` for any argument that a function may get, even another function."""
    rules = RuleTree.of("rule", rule)
    if probe is not None:
        _check_probe(probe)
    check_tree("x", x)
    check_gradients("x", x)
    return rules.clip(functools.partial(_clip_by_one, probe), x)


def clip_of_value(
    x: Any, rule: Any, name: str, operation: str, probe: ClipStats | None = None
) -> Any:
    """`clip_cotangent` for a value inside of a function, with known name and operation."""
    return clip_cotangent(x, for_value(rule, name, operation), probe=probe)


def _clip_by_one(probe: ClipStats | None, x: Any, rule: CotangentRule | None) -> Any:
    """The value, with its cotangent clipped by one rule."""
    leaves, structure = jax.tree.flatten(x, is_leaf=is_none)
    # Python and NumPy numbers have cotangents only where they are watched.
    kind: Any = jax.Array if probe is None else object
    chosen, rest = partition(leaves, lambda x: is_clippable(x) and isinstance(x, kind))
    if (rule is None and probe is None) or not jax.tree.leaves(chosen):
        return x
    arrays = jax.tree.map(lambda x: x if isinstance(x, jax.Array) else jnp.asarray(x), chosen)
    dtype = None if probe is None else probe.before.dtype.name
    backward, saved = _trace_backward(rule, structure, dtype, arrays)
    # The probe varies as the arrays do, so that its cotangent is summed over the devices.
    axes = frozenset().union(*map(varying_axes, jax.tree.leaves(arrays)))
    probe = jax.tree.map(lambda field: to_varying(field, axes), probe)
    clipped = _clipped_identity(backward, arrays, saved, probe)
    return structure.unflatten(combine(clipped, rest))


def _trace_backward(
    rule: Any, structure: Any, dtype: str | None, arrays: list[Any]
) -> tuple[Callable[..., Any], Any]:
    """The backward pass: a function of saved arrays and cotangents, and the arrays to save.

    The saved arrays are those in the rule and those that the rule closes over. The backward pass
    may not close over tracers: inside of `jax.lax.scan` these would belong to another trace when
    the pass runs. clipgrad's rules are traced once for all variables of one shape; any other rule
    may depend on state that changes, and is traced anew.
    """
    leaves, fields = jax.tree.flatten(rule)
    arrays_of_rule, fixed = partition(leaves, is_array)
    params = arrays if getattr(rule, "needs_params", False) else None
    static = structure, dtype, fields, tuple(fixed)
    if rule is None or is_data(rule):
        traced = _cached.trace(*static, arrays_of_rule, arrays, params)
        program, shapes = traced.jaxpr, traced.out_info
    else:
        run = functools.partial(_clipped_and_stats, *static)
        program, shapes = jax.make_jaxpr(run, return_shape=True)(arrays_of_rule, arrays, params)
    jaxpr, outputs = program.jaxpr, jax.tree.structure(shapes)

    def backward(saved: Any, cotangents: Any) -> Any:
        constants, arrays_of_rule, params = saved
        run = jex.core.jaxpr_as_fun(jex.core.ClosedJaxpr(jaxpr, constants))
        return outputs.unflatten(
            in_one_program(run)(*jax.tree.leaves((arrays_of_rule, cotangents, params)))
        )

    return backward, (list(program.consts), arrays_of_rule, params)


def _clipped_and_stats(
    structure: Any,
    dtype: str | None,
    fields: Any,
    fixed: tuple[Any, ...],
    arrays_of_rule: list[Any],
    cotangents: list[Any],
    params: list[Any] | None,
) -> tuple[list[Any], ClipStats | None]:
    """The clipped cotangents of a tree, and the statistics if they have a dtype.

    The rule has ``fields``, of which some are ``fixed`` and the others are ``arrays_of_rule``.
    """
    rule = fields.unflatten(combine(arrays_of_rule, fixed))
    tree = structure.unflatten(cotangents)
    primal = None if params is None else structure.unflatten(params)
    if dtype is not None:
        clipped, stats = clipped_with_stats(rule, tree, primal, dtype)
        return jax.tree.leaves(clipped), stats
    return jax.tree.leaves(tree if rule is None else apply_rule(rule, tree, primal)), None


_cached = jax.jit(_clipped_and_stats, static_argnums=(0, 1, 2, 3))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _clipped_identity(backward: Any, arrays: Any, saved: Any, probe: Any) -> Any:
    return arrays


def _clip_forward(backward: Any, arrays: Any, saved: Any, probe: Any) -> Any:
    return arrays, saved


def _clip_backward(backward: Any, saved: Any, cotangents: Any) -> Any:
    clipped, stats = backward(saved, cotangents)
    return jax.tree.structure(cotangents).unflatten(clipped), None, stats


_clipped_identity.defvjp(_clip_forward, _clip_backward)


def _check_probe(probe: ClipStats) -> None:
    if not isinstance(probe, ClipStats):
        raise TypeError(
            f"probe: got {type(probe).__name__}, expected clipgrad.types.ClipStats.zero() as an "
            "argument of the differentiated function"
        )
    if jnp.shape(probe.before) != (3,):
        raise TypeError(
            f"probe: got leading axes {jnp.shape(probe.before)[:-1]}, expected a probe without "
            "leading axes; pass it to jax.lax.scan as xs"
        )
