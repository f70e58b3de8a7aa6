"""Clipping a tree of gradients in one call."""

from collections.abc import Callable
from typing import Any, NamedTuple

from clipgrad._gradient_clip.nonfinite import apply_policy, check_policy
from clipgrad._rules import adaptive_threshold, apply_rule, as_rule, is_own
from clipgrad._stats import ClipStats, count_nonfinite, stats_by_leaf, stats_of_clip
from clipgrad._trees import Where, check_leaves, clippable_leaves, combine, partition, selected


def clip_grads(
    grads: Any,
    rule: Callable[..., Any] | None,
    params: Any = None,
    *,
    where: Where = None,
    nonfinite: str = "propagate",
) -> tuple[Any, ClipStats]:
    """Clips a tree of gradients without an optimizer, and returns statistics of the clip.

    Guarantees:
      * Structure, shapes and dtypes are kept; leaves without numbers to clip (``None``, integers,
        booleans, ``float0``, PRNG keys) come back as they are.
      * Leaves that ``where`` leaves out are neither measured nor scaled.
      * Leaves below flax's ``_overwrite_with_gradient`` (scales and histories of 8-bit floats,
        whose gradient is their next value) are neither measured nor scaled.
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
      nonfinite: ``"propagate"``; ``"zero"``: NaN and inf become 0 before anything is measured;
        ``"error"``: raise and name the leaves.

    Returns:
      The clipped gradients, and a `ClipStats` of the leaves that ``where`` selects.

    Raises:
      TypeError: if ``rule`` is not a rule, ``where`` has leaves other than booleans, or a leaf is
        an object or of a dtype that JAX lacks; strings and functions are ignored.
      ValueError: if ``where`` selects nothing or is not a prefix, for an unknown ``nonfinite``,
        and each error of the rule.
      FloatingPointError: for NaN or inf with ``nonfinite="error"``; under `jax.jit`, and so in
        `train_step` and ``optax.MultiSteps``, the function must be transformed by
        `jax.experimental.checkify.checkify` for this.

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
    """
    rule = as_rule(rule)
    clipped = ClipScope.checked(where, nonfinite).clip(grads, rule, params)
    return clipped.tree, clipped.stats()


class Clipped(NamedTuple):
    """A clipped tree, and what its statistics are made of."""

    tree: Any
    rule: Any  # with the thresholds that were used
    norms: list[Any]  # that the rule scaled by
    raw: Any  # the selected leaves as they were,
    before: Any  # after the policy about NaN and inf,
    after: Any  # and clipped
    adapted: Any  # what an adaptive threshold keeps

    def stats(self) -> ClipStats:
        """The statistics of the selected leaves."""
        stats = stats_of_clip(self.rule, self.before, self.after, self.norms)
        return self._counted(stats, self.raw)

    def leaf_stats(self) -> dict[str, ClipStats]:
        """The statistics of each leaf."""
        stats = stats_by_leaf(self.rule, self.before, self.after, self.norms)
        parts = zip(stats.items(), clippable_leaves(self.raw), strict=True)
        return {path: self._counted(of_leaf, leaf) for (path, of_leaf), leaf in parts}

    def _counted(self, stats: ClipStats, raw: Any) -> ClipStats:
        """The statistics, with NaN and inf counted in the tree before the clip."""
        if self.before is self.raw:
            return stats
        count = count_nonfinite(raw, getattr(self.rule, "axis_name", None))
        return stats._replace(nonfinite=count.astype(stats.nonfinite.dtype))


# From the norms to the rule with its threshold, and what the threshold keeps.
Adapt = Callable[[list[Any]], tuple[Any, Any]]


class ClipScope(NamedTuple):
    """The leaves to clip, and the policy for NaN and inf."""

    where: Where
    nonfinite: str

    @classmethod
    def checked(cls, where: Where, nonfinite: str) -> "ClipScope":
        """The arguments of these names, if they are right."""
        check_policy(nonfinite)
        return cls(where, nonfinite)

    def clip(self, grads: Any, rule: Any, params: Any, adapt: Adapt | None = None) -> Clipped:
        """The whole tree with the selected leaves clipped."""
        raw, rest = partition(grads, selected(self.where, grads))
        check_leaves("grads", raw)
        before = apply_policy(self.nonfinite, raw)
        norms = self._norms(rule, before, params)
        rule, adapted = (rule, None) if adapt is None else adapt(norms)
        after = before
        if rule is not None:
            own = is_own(rule)
            after = rule.scale(before, norms) if own else apply_rule(rule, before, params)
        return Clipped(combine(after, rest), rule, norms, raw, before, after, adapted)

    def _norms(self, rule: Any, before: Any, params: Any) -> list[Any]:
        """The norms that a rule scales by, or that its adaptive threshold needs."""
        scales = is_own(rule) and rule.acts_on != "element"
        if not scales and adaptive_threshold(rule) is None:
            return []
        return rule.measure(before, params)


def has_one_norm(rule: Any) -> bool:
    """Whether a rule scales the whole tree by one norm."""
    return is_own(rule) and rule.acts_on == "tree"
