"""Clipping a tree of gradients in one call."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.typing import ArrayLike

from clipgrad._nonfinite import apply_policy
from clipgrad._norms import AxisName, Norm
from clipgrad._rules import ClipByGlobalNorm, apply_rule, as_rule
from clipgrad._stats import (
    ClipStats,
    count_nonfinite,
    scaling_by_leaf,
    stats_by_leaf,
    stats_dtype,
)
from clipgrad._trees import paths_taking_part
from clipgrad._where import Where, keep_selected, put_back, selected


def clip_grads(
    grads: Any,
    rule: Callable[..., Any] | None,
    params: Any = None,
    *,
    where: Where = None,
    measure: Where = None,
    nonfinite: str = "propagate",
    norm: ArrayLike | None = None,
) -> tuple[Any, ClipStats]:
    """Clips a tree of gradients and says what was done: no optimizer is needed.

    Guarantees:
      * Structure, shapes and dtypes are kept; leaves without numbers to clip (``None``, integers,
        booleans, ``float0``, PRNG keys) come back as they are.
      * What ``where`` leaves out is neither measured nor scaled, unless ``measure`` selects it.
      * The statistics of a global L2 norm take no second pass over the gradients; under
        `jax.jit` statistics that are not used are not computed.

    Args:
      grads: a pytree of gradients.
      rule: a `ClipRule`, a function of the tree, or ``None``: off.
      params: the parameters, for rules that need them (`AdaptiveClip`).
      where: which leaves take part: a tree of booleans that is a prefix of ``grads``, a function
        from the tree to one, or a regular expression that is searched in paths such as
        ``"layers/0/kernel"`` (with and without a ``/value`` of flax NNX at the end); ``None``:
        all.
      measure: which leaves make up the norm of `ClipByGlobalNorm`, written like ``where``;
        ``None``: those that ``where`` selects. The statistics then have this norm before the
        clip, and what the clip would make of it.
      nonfinite: ``"propagate"``; ``"zero"``: NaN and inf become 0 before anything is measured;
        ``"error"``: raise and name the leaves.
      norm: the norm that `ClipByGlobalNorm` would measure, if it is known already.

    Returns:
      The clipped gradients, and a `ClipStats` of the leaves that take part.

    Raises:
      TypeError: if ``rule`` is none, or ``where`` holds anything else than booleans.
      ValueError: if ``where`` selects nothing or is no prefix, for an unknown ``nonfinite``, for
        ``norm`` or ``measure`` with another rule, and whatever the rule raises.
      FloatingPointError: for NaN or inf with ``nonfinite="error"``; under `jax.jit` the function
        must be transformed by `jax.experimental.checkify.checkify` for this.

    Example:
      >>> import clipgrad as cg, jax.numpy as jnp
      >>> grads = {"b": jnp.array([3.0]), "w": jnp.array([4.0])}
      >>> clipped, stats = cg.clip_grads(grads, cg.ClipByGlobalNorm(1.0))
      >>> clipped
      {'b': Array([0.6], dtype=float32), 'w': Array([0.8], dtype=float32)}
      >>> print(stats.norm, stats.clipped_norm, stats.clipped)
      5.0 1.0 True
      >>> cg.clip_grads(grads, cg.ClipByGlobalNorm(1.0), where="w")[0]
      {'b': Array([3.], dtype=float32), 'w': Array([1.], dtype=float32)}
      >>> cg.clip_grads(grads, cg.ClipByGlobalNorm(1.0), where="w", measure=".")[0]
      {'b': Array([3.], dtype=float32), 'w': Array([0.8], dtype=float32)}
    """
    rule = as_rule(rule)
    check_measure(rule, measure)
    taken = take(grads, where, nonfinite, measure)
    clipped, watch = clip_taken(taken, rule, params, norm)
    return clipped, watch.total()


class Taken(NamedTuple):
    """The leaves of a tree that a clip acts on; ``None`` in place of the others.

    Attributes:
      grads: the whole tree.
      flags: for each leaf whether it is taken.
      raw: the leaves as they were.
      tree: the leaves after the policy about NaN and inf.
      measured: the leaves that make up the norm.
    """

    grads: Any
    flags: list[bool]
    raw: Any
    tree: Any
    measured: Any


class Watch(NamedTuple):
    """The statistics of a clip, computed when they are asked for: in total and by leaf."""

    total: Callable[[], ClipStats]
    leaves: Callable[[], dict[str, ClipStats]]


def check_measure(rule: Any, measure: Where) -> None:
    """Refuses ``measure`` where there is no single norm."""
    if measure is not None and not isinstance(rule, ClipByGlobalNorm):
        raise ValueError(f"measure: got one with {rule!r}, expected ClipByGlobalNorm to use it")


def take(grads: Any, where: Where, nonfinite: str, measure: Where) -> Taken:
    """The leaves of ``grads`` that ``where`` selects, and those that ``measure`` does."""
    flags = selected(where, grads)
    raw = keep_selected(grads, flags)
    tree = measured = apply_policy(nonfinite, raw)
    if measure is not None:
        measured = apply_policy(
            nonfinite, keep_selected(grads, selected(measure, grads, "measure"))
        )
    return Taken(grads, flags, raw, tree, measured)


def clip_taken(
    taken: Taken, rule: Callable[..., Any] | None, params: Any, norm: Norm | ArrayLike | None
) -> tuple[Any, Watch]:
    """`clip_grads` of a rule and leaves that have been checked, with the statistics on demand."""
    if isinstance(rule, ClipByGlobalNorm):
        clipped, watch = _by_global_norm(rule, taken, norm)
    elif norm is not None:
        raise ValueError(f"norm: got one with {rule!r}, expected ClipByGlobalNorm to use it")
    else:
        clipped = taken.tree if rule is None else apply_rule(rule, taken.tree, params)
        watch = _watch(taken.tree, clipped)
    if taken.tree is not taken.raw:
        watch = _counting(taken.raw, watch, getattr(rule, "axis_name", None))
    return put_back(clipped, taken.grads, taken.flags), watch


def _by_global_norm(
    rule: ClipByGlobalNorm, taken: Taken, given: Norm | ArrayLike | None
) -> tuple[Any, Watch]:
    tree = taken.tree
    norm = norm_of(rule, taken, given)
    clipped = rule.scale(tree, norm)
    if rule.ord != 2:
        return clipped, _watch(tree, clipped)
    limit = rule.limit(norm)
    return clipped, Watch(
        lambda: ClipStats.of_scaling(tree, norm, limit, rule.axis_name),
        lambda: scaling_by_leaf(tree, norm, limit, rule.axis_name),
    )


def norm_of(rule: ClipByGlobalNorm, taken: Taken, given: Norm | ArrayLike | None) -> Norm:
    """The norm that decides: the one that was given, or else measured."""
    if given is None:
        return rule.measure(taken.measured)
    if isinstance(given, Norm):
        return given
    root = jnp.asarray(given).astype(stats_dtype(taken.tree))
    return Norm(root, jnp.ones_like(root))


def _watch(tree: Any, clipped: Any) -> Watch:
    return Watch(lambda: ClipStats.of(tree, clipped), lambda: stats_by_leaf(tree, clipped))


def _counting(raw: Any, watch: Watch, axis_name: AxisName) -> Watch:
    """The same, with NaN and inf counted in the tree as it was."""

    def recount(stats: ClipStats, tree: Any) -> ClipStats:
        count = count_nonfinite(tree, axis_name)
        return stats._replace(nonfinite=count.astype(stats.nonfinite.dtype))

    def leaves() -> dict[str, ClipStats]:
        stats = watch.leaves()
        return {p: recount(stats[p], x) for p, x in zip(*paths_taking_part(raw), strict=True)}

    return Watch(lambda: recount(watch.total(), raw), leaves)
