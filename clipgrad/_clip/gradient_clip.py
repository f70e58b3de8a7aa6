"""Gradient clip: clip rules as optax gradient transformations."""

from collections.abc import Callable
from typing import Any, NoReturn

import optax

from clipgrad._arrays import Where, explain_call, partition, selected
from clipgrad._clip.any_rule import as_rule
from clipgrad._clip.clipping import Clipped, Part, measured_norms
from clipgrad._clip.nonfinite import NonFinite, check_policy
from clipgrad._clip.rule_thresholds import adaptive_threshold, resolve_schedules
from clipgrad._clip.state import (
    KeptStats,
    adapted,
    check_state,
    first_state,
    has_lasting_state,
    next_state,
)

_COMPOSER = (
    "for a type of Composer write clipgrad.published.gradient_clipping(clipping_type, threshold), "
    "or give the rule, such as ClipByGlobalNorm(threshold)"
)


class ClipTransformation(optax.GradientTransformationExtraArgs):
    """A clip without an optimizer, known by its type."""

    def __call__(self, grads: Any, *more: Any) -> NoReturn:
        """Says what to write: a transformation has ``update``, and a rule is called."""
        raise TypeError(
            "got a call of a clip's transformation, expected a place in optax.chain(clip, "
            "optax.adam(1e-3)); to clip gradients once write "
            "clip_grads(grads, ClipByNorm(max_norm)), or another rule"
        )


@explain_call(
    f"write the others by name, of where=, nonfinite=, stats=; {_COMPOSER}",
    clipping_type=_COMPOSER,
    clipping_threshold=_COMPOSER,
)
def gradient_clip(
    rule: Callable[..., Any] | None,
    *,
    where: Where = None,
    nonfinite: NonFinite = "propagate",
    stats: KeptStats = False,
) -> optax.GradientTransformationExtraArgs:
    """Makes an optax transformation from any clip rule; put it before the optimizer.

    Example:
      >>> import clipgrad as cg, jax.numpy as jnp, optax
      >>> rule = cg.ClipByNorm(optax.linear_schedule(1.0, 0.5, transition_steps=10))
      >>> tx = optax.chain(cg.gradient_clip(rule, where="kernel", stats=True), optax.sgd(1.0))
      >>> params = {"bias": jnp.array([3.0]), "kernel": jnp.array([3.0, 4.0])}
      >>> updates, state = tx.update(params, tx.init(params))
      >>> updates
      {'bias': Array([-3.], dtype=float32), 'kernel': Array([-0.6, -0.8], dtype=float32)}
      >>> print(optax.tree.get(state, "stats").norm, optax.tree.get(state, "threshold"))
      5.0 1.0

    Args:
      rule: a `ClipRule`, such as ``ClipByNorm(1.0)``; or a function from a gradient tree to the
        clipped tree; ``None``: off. Here thresholds may be schedules, such as
        ``optax.linear_schedule(...)``, and the main threshold (``max_norm``, ``max``,
        ``threshold``, ``clipping``) may be an `AdaptiveThreshold`.
      where: the leaves to clip: path patterns such as ``"kernel"``, ``"blocks/*/kernel"`` or
        ``"!head"`` (all but the head), a tree of booleans, or a function from the tree to such a
        tree; ``None``: all.
      nonfinite: the policy for NaN and inf. ``"propagate"``: the rule decides. ``"zero"``: they
        become 0 before the clip. ``"error"``: you get an error that names the leaves.
      stats: ``True``: the state has the last update's `ClipStats`, and counts steps.
        ``"per_leaf"``: the state also has a `ClipStats` for each leaf.

    Returns:
      An `optax.GradientTransformationExtraArgs`.

    Raises:
      TypeError: if ``rule`` is not a rule.
      ValueError: for an unknown ``nonfinite`` or ``stats``; by ``init``, if ``where``
        selects nothing.

    Guarantees:
      * If thresholds are numbers and ``stats=False``, the state is `optax.EmptyState`, so you can
        restore checkpoints that you made with optax's clips.
      * Otherwise it is a `GradientClipState`, whose structure never changes.
      * A schedule gets the number of updates so far: 0 at the first.
      * An adaptive threshold sees the norm of each step once, before the clip.
      * ``update`` keeps the structure of the state.
    """
    rule = as_rule(rule, schedules=True, of="gradients")
    check_policy(nonfinite)
    if stats not in (True, False, "per_leaf"):
        raise ValueError(f"stats: got {stats!r}, expected True, False or 'per_leaf'")
    needs_state = has_lasting_state(rule, False)

    def init(params: Any) -> Any:
        tree, _ = partition(params, selected(where, params))
        return first_state(rule, tree, stats)

    def update(updates: Any, state: Any, params: Any = None, **extra_args: Any) -> tuple[Any, Any]:
        del extra_args
        check_state(state, rule, stats)
        active = resolve_schedules(rule, state.count) if needs_state else rule
        part = Part.of(updates, where, nonfinite)
        norms = measured_norms(active, part.before, params, counts=bool(stats))
        if adaptive_threshold(active) is not None:
            active, state = adapted(active, state, norms)
        clipped = Clipped.by(active, part, norms, params)
        return clipped.tree, next_state(state, clipped)

    return ClipTransformation(init, update)
