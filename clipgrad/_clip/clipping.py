"""One clip of a tree: select, measure, take the limits, scale, put back; and its statistics."""

from typing import Any, NamedTuple

from clipgrad._arrays import (
    Where,
    check_gradients,
    check_leaves,
    clippable_leaves,
    clippable_paths,
    combine,
    count_nonfinite,
    partition,
    selected,
)
from clipgrad._clip.any_rule import apply_rule
from clipgrad._clip.known_rules import is_known, is_norm_rule, scales_by_norms
from clipgrad._clip.nonfinite import apply_policy
from clipgrad._clip.rule_thresholds import adaptive_threshold
from clipgrad._clip.stats import (
    ClipStats,
    elements_of_groups,
    groups_that_differ,
    stats_dtype,
    stats_of_limits,
    stats_over_devices,
)
from clipgrad._compat import to_varying, varying_axes


class Part(NamedTuple):
    """The leaves of a tree that are clipped, with ``None`` instead of all others."""

    raw: Any  # as they were
    before: Any  # after the policy about NaN and inf
    rest: list[Any]  # the other leaves

    @classmethod
    def of(cls, grads: Any, where: Where = None, nonfinite: str = "propagate") -> "Part":
        """The part that ``where`` selects."""
        raw, rest = partition(grads, selected(where, grads))
        check_leaves("grads", raw)
        check_gradients("grads", raw)
        return cls(raw, apply_policy(nonfinite, raw), rest)


def measured_norms(rule: Any, tree: Any, params: Any, counts: bool = False) -> list[Any]:
    """The norms that a rule scales by, or that its threshold adapts to; none if it needs none.

    ``counts``: they may have the number of NaN and inf, for statistics.
    """
    if counts and scales_by_norms(rule):
        return rule._measure_and_count(tree, params)
    is_measured = scales_by_norms(rule) or adaptive_threshold(rule) is not None
    return rule.measure(tree, params) if is_measured else []


def scaled_tree(rule: Any, tree: Any, norms: list[Any], params: Any) -> Any:
    """The tree clipped by a rule that has measured these norms."""
    if rule is None:
        return tree
    takes_norms = is_known(rule) or scales_by_norms(rule)
    return rule.scale(tree, norms) if takes_norms else apply_rule(rule, tree, params)


class Clipped(NamedTuple):
    """A clipped tree, and what its statistics are made of."""

    rule: Any  # with the thresholds that were used
    norms: list[Any]  # that the rule scaled by
    part: Part
    after: Any  # the part, clipped

    @classmethod
    def by(cls, rule: Any, part: Part, norms: list[Any], params: Any) -> "Clipped":
        """The part clipped, by a rule whose thresholds are numbers."""
        return cls(rule, norms, part, scaled_tree(rule, part.before, norms, params))

    @property
    def tree(self) -> Any:
        """The whole tree."""
        return combine(self.after, self.part.rest)

    def stats(self) -> ClipStats:
        """The statistics of the selected leaves: of norms and limits where these are known.

        Those of a rule with one norm for the whole tree are of all devices that it is spread over;
        those of any other of this device, since a leaf is added up over them by whoever needs it.
        """
        before, rule = self.part.before, self.rule
        limits = rule.l2_limits(before, self.norms) if scales_by_norms(rule) else None
        if limits is not None:
            return self._counted(stats_of_limits(rule, before, limits), self.part.raw)
        groups = scaled_groups(rule, before, self.after, self.norms)
        if groups is None or rule.acts_on != "tree" or not rule.axis_name:
            stats = stats_of_groups(before, self.after, groups)
            return self._counted(stats, self.part.raw)
        leaves = list(self.leaf_stats().values())
        return stats_over_devices(leaves, clippable_leaves(before), rule.axis_name)

    def leaf_stats(self) -> dict[str, ClipStats]:
        """The statistics of each leaf by path, on this device."""
        before, after, raw = map(clippable_leaves, (self.part.before, self.after, self.part.raw))
        groups = scaled_groups(self.rule, self.part.before, self.after, self.norms)
        if groups is not None:
            groups = groups * len(before) if self.rule.acts_on == "tree" else groups
        each = [None] * len(before) if groups is None else [[group] for group in groups]
        rows = zip(clippable_paths(self.part.before), before, after, raw, each, strict=True)
        dtype = stats_dtype(self.part.before)
        return {
            path: self._counted(stats_of_groups(b, a, group, dtype), r, joint=False)
            for path, b, a, r, group in rows
        }

    def _counted(self, stats: ClipStats, raw: Any, joint: bool = True) -> ClipStats:
        """The statistics, with NaN and inf counted in the tree before the clip."""
        if self.part.before is self.part.raw:
            return stats
        is_joint = joint and is_norm_rule(self.rule) and self.rule.acts_on == "tree"
        count = count_nonfinite(raw, self.rule.axis_name if is_joint else None)
        return stats._replace(nonfinite=count.astype(stats.nonfinite.dtype))


def scaled_groups(rule: Any, before: Any, after: Any, norms: list[Any]) -> list[Any] | None:
    """For each group of elements whether a norm rule has scaled it; ``None`` for other rules.

    Of a subclass that clips in its own way, a group is scaled if an element of it differs.
    """
    if scales_by_norms(rule):
        return [rule.changes(*pair) for pair in rule.norms_and_limits(norms)]
    return groups_that_differ(rule, before, after) if is_norm_rule(rule) else None


def stats_of_groups(
    before: Any, after: Any, groups: list[Any] | None, dtype: Any = None
) -> ClipStats:
    """The statistics of a clip, on this device, of whose groups these were scaled."""
    stats = ClipStats.of(before, after, dtype)
    if groups is None:
        return stats
    changed = elements_of_groups(groups, before, stats.size.dtype)
    # Counted on each device, also where one norm of all devices decides.
    return stats._replace(changed=to_varying(changed, varying_axes(stats.before)))


def clipped_with_stats(
    rule: Any, tree: Any, params: Any = None, dtype: Any = None
) -> tuple[Any, ClipStats]:
    """A clip of a whole tree, and its statistics on this device."""
    norms = measured_norms(rule, tree, params)
    after = scaled_tree(rule, tree, norms, params)
    groups = scaled_groups(rule, tree, after, norms)
    return after, stats_of_groups(tree, after, groups, dtype)
