"""Rules in the form of a tree: each clips the part of a value below its place."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import optax

from clipgrad._arrays import check_tree, is_array, parts_below, path_string
from clipgrad._clip import as_rule, for_value


class RuleTree(NamedTuple):
    """A rule, or a tree of rules that is a prefix of the tree of a value."""

    argument: str  # whose rules they are, for errors
    tree: Any  # as it was written
    paths: list[str]
    rules: list[Any]
    structure: Any

    @classmethod
    def of(cls, argument: str, rules: Any) -> "RuleTree":
        """The rules of an argument; `TypeError` for one that is none."""
        if isinstance(rules, optax.GradientTransformation):
            as_rule(rules)  # a tuple of functions, and no tree of rules
        check_tree(argument, rules)
        entries, structure = jax.tree_util.tree_flatten_with_path(rules, is_leaf=_is_rule)
        each = [as_rule(rule) for _, rule in entries]
        return cls(argument, rules, [path_string(path) for path, _ in entries], each, structure)

    def clip(self, clip: Callable[[Any, Any], Any], x: Any, name: str = "") -> Any:
        """The value with each part as ``clip(part, rule)``; a part is named by its path."""
        if is_array(x):
            as_rule(self.tree)  # an array has no parts
        parts = parts_below(self.argument, "rules", self.structure, x)
        names = ["/".join(filter(None, (name, path))) for path in self.paths]
        rules = map(for_value, self.rules, names)
        return self.structure.unflatten(map(clip, parts, rules))


def _is_rule(rules: Any) -> bool:
    return rules is None or callable(rules)
