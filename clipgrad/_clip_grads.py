"""Clipping a tree of gradients in one call."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.typing import ArrayLike

from clipgrad._nonfinite import apply_policy
from clipgrad._norms import AxisName, Norm
from clipgrad._rules import apply_rule, as_rule, is_own
from clipgrad._stats import (
    ClipStats,
    LazyStats,
    count_nonfinite,
    stats_dtype,
)
from clipgrad._trees import check_leaves, clippable_leaves, combine, partition
from clipgrad._where import Where, selected


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
      * The statistics of a global L2 norm need no second pass over the gradients; under
        `jax.jit` statistics that are not used are not computed.

    Args:
      grads: a pytree of gradients.
      rule: a `ClipRule`, a function of the tree, or ``None``: off.
      params: the parameters, for rules that need them (`AdaptiveClip`).
      where: which leaves are clipped: a tree of booleans that is a prefix of ``grads``, a function
        from the tree to one, or an expression on paths such as ``"layers/0/kernel"``; ``None``:
        all. An expression that is whole segments of a path selects the leaves at or below it:
        ``"kernel"`` selects this one, and not ``"layers/0/out_kernel"``. Any other is a regular
        expression that is searched in the paths: ``"kern"``, ``"^layers/[0-3]/"``.
      measure: which leaves make up the norm of `ClipByGlobalNorm`, written like ``where``;
        ``None``: those that ``where`` selects. The statistics then have this norm before the
        clip, and what the clip would make of it.
      nonfinite: ``"propagate"``; ``"zero"``: NaN and inf become 0 before anything is measured;
        ``"error"``: raise and name the leaves.
      norm: the norm that `ClipByGlobalNorm` would measure, if it is known already.

    Returns:
      The clipped gradients, and a `ClipStats` of the leaves that ``where`` selects.

    Raises:
      TypeError: if ``rule`` is not a rule, ``where`` has anything else than booleans, or a leaf is
        an object or of a dtype that JAX lacks; strings and functions are passed over.
      ValueError: if ``where`` selects nothing or is not a prefix, for an unknown ``nonfinite``, for
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
      >>> cg.clip_grads(grads, cg.ClipByGlobalNorm(1.0), where="w", measure="w|b")[0]
      {'b': Array([3.], dtype=float32), 'w': Array([0.8], dtype=float32)}
    """
    rule = as_rule(rule)
    check_measure(rule, measure)
    selection = select(grads, where, nonfinite, measure)
    clipped, stats = clip_selection(
        selection, rule, params, norms_of(rule, selection, params, norm)
    )
    return clipped, stats.total()


class Selection(NamedTuple):
    """The leaves of a tree that a clip acts on; ``None`` in place of the others."""

    raw: Any  # as they were
    rest: Any  # the others
    tree: Any  # after the policy about NaN and inf
    measured: Any  # the leaves that make up the norm


def has_one_norm(rule: Any) -> bool:
    """Whether a rule scales the whole tree by one norm."""
    return is_own(rule) and rule.acts_on == "tree"


def check_measure(rule: Any, measure: Where) -> None:
    """Refuses ``measure`` where there is not a single norm."""
    if measure is not None and not has_one_norm(rule):
        raise ValueError(
            f"measure: got leaves for a norm with {rule!r}, expected ClipByGlobalNorm, the rule "
            "with one norm for all leaves"
        )


def select(grads: Any, where: Where, nonfinite: str, measure: Where) -> Selection:
    """The leaves of ``grads`` that ``where`` selects, and those that ``measure`` does."""
    raw, rest = partition(grads, selected(where, grads))
    check_leaves("grads", raw)
    tree = measured = apply_policy(nonfinite, raw)
    if measure is not None:
        chosen, _ = partition(grads, selected(measure, grads, "measure"))
        measured = apply_policy(nonfinite, chosen)
    return Selection(raw, rest, tree, measured)


def norms_of(rule: Any, selection: Selection, params: Any, given: ArrayLike | None) -> list[Any]:
    """The norms that a rule scales by: measured, or the one that is known; of other rules none."""
    if given is not None:
        if not has_one_norm(rule):
            raise ValueError(
                f"norm: got {given!r} with {rule!r}, expected ClipByGlobalNorm, the rule with one "
                "norm for all leaves"
            )
        root = jnp.asarray(given).astype(stats_dtype(selection.tree))
        return [Norm.of(root, jnp.ones_like(root))]
    scales = is_own(rule) and rule.acts_on != "element"
    return rule.measure(selection.measured, params) if scales else []


def clip_selection(
    selection: Selection, rule: Any, params: Any, norms: list[Any]
) -> tuple[Any, LazyStats]:
    """The whole tree with the selected leaves clipped, and the statistics of these."""
    tree = selection.tree
    if rule is None:
        clipped = tree
    else:
        clipped = rule.scale(tree, norms) if is_own(rule) else apply_rule(rule, tree, params)
    stats = LazyStats.of(rule, tree, clipped, norms)
    if tree is not selection.raw:
        stats = _counting(selection.raw, stats, getattr(rule, "axis_name", None))
    return combine(clipped, selection.rest), stats


def _counting(raw: Any, stats: LazyStats, axis_name: AxisName) -> LazyStats:
    """The same, with NaN and inf counted in the tree as it was."""

    def recount(stats: ClipStats, tree: Any) -> ClipStats:
        count = count_nonfinite(tree, axis_name)
        return stats._replace(nonfinite=count.astype(stats.nonfinite.dtype))

    def leaves() -> dict[str, ClipStats]:
        parts = zip(stats.leaves().items(), clippable_leaves(raw), strict=True)
        return {path: recount(of_leaf, leaf) for (path, of_leaf), leaf in parts}

    return LazyStats(lambda: recount(stats.total(), raw), leaves)
