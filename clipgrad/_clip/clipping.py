"""One clip of a tree: select, measure, take the limits, scale, put back; and its statistics."""

from collections.abc import Callable
from typing import Any, NamedTuple

from clipgrad._arrays import (
    Where,
    check_leaves,
    clippable_leaves,
    clippable_paths,
    combine,
    partition,
    selected,
)
from clipgrad._clip.applied import apply_rule
from clipgrad._clip.limits import adaptive_threshold, is_own
from clipgrad._clip.nonfinite import apply_policy
from clipgrad._clip.stats import ClipStats, count_nonfinite, stats_dtype, stats_of_limits

# From the norms to the rule with its threshold, and what the threshold keeps.
Adapt = Callable[[list[Any]], tuple[Any, Any]]


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
        """The statistics of the selected leaves: of norms and limits where these are known."""
        limits = None
        if self.norms and is_own(self.rule) and self.rule.acts_on != "element":
            limits = self.rule.l2_limits(self.before, self.norms)
        if limits is None:
            stats = ClipStats.of(self.before, self.after)
        else:
            stats = stats_of_limits(self.rule, self.before, limits)
        return self._counted(stats, self.raw)

    def leaf_stats(self) -> dict[str, ClipStats]:
        """The statistics of each leaf by path."""
        trees = map(clippable_leaves, (self.before, self.after, self.raw))
        rows = zip(clippable_paths(self.before), *trees, strict=True)
        dtype = stats_dtype(self.before)
        return {
            path: self._counted(ClipStats.of(before, after, dtype), raw)
            for path, before, after, raw in rows
        }

    def _counted(self, stats: ClipStats, raw: Any) -> ClipStats:
        """The statistics, with NaN and inf counted in the tree before the clip."""
        if self.before is self.raw:
            return stats
        count = count_nonfinite(raw, getattr(self.rule, "axis_name", None))
        return stats._replace(nonfinite=count.astype(stats.nonfinite.dtype))


def clip_tree(
    grads: Any, rule: Any, params: Any, where: Where, nonfinite: str, adapt: Adapt | None = None
) -> Clipped:
    """The whole tree with the selected leaves clipped."""
    raw, rest = partition(grads, selected(where, grads))
    check_leaves("grads", raw)
    before = apply_policy(nonfinite, raw)
    scales = is_own(rule) and rule.acts_on != "element"
    needs_norms = scales or adaptive_threshold(rule) is not None
    norms = rule.measure(before, params) if needs_norms else []
    rule, adapted = (rule, None) if adapt is None else adapt(norms)
    after = before
    if rule is not None:
        after = rule.scale(before, norms) if is_own(rule) else apply_rule(rule, before, params)
    return Clipped(combine(after, rest), rule, norms, raw, before, after, adapted)
