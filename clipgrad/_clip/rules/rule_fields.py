"""How a rule is declared: a frozen dataclass whose thresholds are leaves of a pytree."""

import dataclasses
from collections.abc import Callable
from typing import Any, TypeVar, dataclass_transform

import jax

from clipgrad._arrays import explain_call
from clipgrad._clip.known_rules import RULES
from clipgrad._clip.rule_thresholds import MAIN, leaf_fields, main_fields
from clipgrad._clip.thresholds import check_threshold

C = TypeVar("C", bound=type)


@dataclass_transform(frozen_default=True, field_specifiers=(dataclasses.field,))
def pytree_rule(cls: C) -> C:
    """Makes a frozen dataclass whose fields are pytree children, unless marked as static.

    Unlike with `jax.tree_util.register_dataclass`, instances that JAX rebuilds don't run
    ``__post_init__``: it checks what a user writes, and a rule's gradient may be negative.
    """
    cls = dataclasses.dataclass(frozen=True, eq=False)(cls)
    names = leaf_fields(cls)
    static = [f.name for f in dataclasses.fields(cls) if f.name not in names]

    def flatten_with_keys(rule: Any) -> Any:
        written = vars(rule)
        children = [(jax.tree_util.GetAttrKey(n), written[n]) for n in names]
        return children, tuple(written[n] for n in static)

    def unflatten(aux: Any, children: Any) -> Any:
        rule = object.__new__(cls)
        for name, value in [*zip(names, children, strict=True), *zip(static, aux, strict=True)]:
            object.__setattr__(rule, name, value)
        return rule

    _check_main(cls)
    explain_call()(cls)
    jax.tree_util.register_pytree_with_keys(cls, flatten_with_keys, unflatten)
    RULES.append(cls)
    return cls


def _check_main(cls: type) -> None:
    """Raises `TypeError` for a rule without one main threshold."""
    if len(names := main_fields(cls)) != 1:
        raise TypeError(
            f"{cls.__name__}: got {names or 'no field'} as the main threshold, expected one field; "
            "write max_norm: Threshold = dataclasses.field(metadata=threshold(main=True))"
        )


def threshold(main: bool = False, **checks: bool) -> Any:
    """The metadata of a field for a threshold, which is a leaf.

    ``main`` marks the one that the state of a gradient clip shows, and that a history may set with
    ``adaptive=True``; ``checks`` are those of `check_threshold`.
    """

    def check(name: str, value: Any) -> Any:
        check_threshold(name, value, **checks)
        return value

    return {MAIN: main, "check": check}


def static(check: Callable[[str, Any], Any] | None = None) -> Any:
    """The metadata of a field that is part of a rule's tree structure, not a leaf."""
    return {"static": True, "check": check}
