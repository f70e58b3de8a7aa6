"""The rules of this library: which they are, and which subclasses clip in their way."""

from typing import Any

# The classes of this library's rules, in the order in which `pytree_rule` made them.
# A module that is reloaded keeps the list, which other modules hold.
RULES: list[type] = globals().get("RULES", [])


def is_known(rule: Any) -> bool:
    """Whether a rule is of this library: all that it computes with is in its fields.

    A subclass is not: it may keep anything else. See also `is_data`.
    """
    return type(rule) in RULES


def is_norm_rule(rule: Any) -> bool:
    """Whether a rule, or a subclass of it, scales groups of elements by their norms."""
    return isinstance(rule, tuple(RULES)) and rule.acts_on != "element"


# The methods by which a norm rule clips.
_CLIPPING = (
    "__call__",
    "measure",
    "_measure_and_count",
    "norms_and_limits",
    "l2_limits",
    "changes",
    "scale",
)


def scales_by_norms(rule: Any) -> bool:
    """Whether a norm rule scales as its norms and limits say: no subclass has a way of its own."""
    if not is_norm_rule(rule):
        return False
    known = next(cls for cls in type(rule).__mro__ if cls in RULES)
    return all(getattr(type(rule), name) is getattr(known, name) for name in _CLIPPING)


def is_data(rule: Any) -> bool:
    """Whether all that a rule computes with is data, so that what was traced may be kept.

    A function in a field, such as ``axis`` of `AdaptiveClip`, may depend on anything.
    """
    return is_known(rule) and not any(map(callable, vars(rule).values()))
