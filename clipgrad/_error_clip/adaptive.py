"""Error clips that find their threshold: one history for each name, kept from step to step."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from clipgrad._clip import adaptive_threshold
from clipgrad._error_clip.adapting import ErrorClipHistory, Stepwise, check_adaptive
from clipgrad._error_clip.names import Rules, check_function, checked_rules
from clipgrad._error_clip.watch import value_and_grad_with_stats
from clipgrad._trees import described, matches

Histories = dict[str, ErrorClipHistory]


@dataclasses.dataclass(frozen=True, eq=False)
class AdaptiveRules:
    """The rules by name of one function, some of which have an adaptive threshold."""

    rules: dict[str, Any]

    @classmethod
    def of(cls, rules: Rules) -> "AdaptiveRules":
        plain = _plain(rules) if isinstance(rules, Mapping) else {}
        checked_rules({**rules, **plain} if plain else rules)
        for name in plain:
            check_adaptive(name, rules[name])
        return cls(dict(rules))

    @property
    def are_adaptive(self) -> bool:
        return bool(_plain(self.rules))

    def first(self, stats: Any) -> Histories:
        """Empty histories, from the statistics of a step or their shapes."""
        return {n: ErrorClipHistory.empty(self._rule_of(n), stats[n]) for n in self._names(stats)}

    def bound(self, histories: Histories) -> dict[str, Any]:
        """The rules of a step: what a pattern matches has its own history, or is only watched."""
        kept = histories.values() if isinstance(histories, Mapping) else [None]
        if not all(isinstance(history, ErrorClipHistory) for history in kept):
            raise TypeError(
                f"state: got {described(histories)}, expected the histories of the last step, at "
                "first of init; write state = clip.init(*args), then "
                "value, grads, state, stats = clip(state, *args)"
            )
        return {**self.rules, **_plain(self.rules)} | {
            name: Stepwise(self._rule_of(name), kept.threshold) for name, kept in histories.items()
        }

    def after(self, histories: Histories, stats: Any, parts: int = 1) -> Histories:
        """The histories after a step with these statistics, of so many microbatches."""
        if (found := self._names(stats)) != (known := sorted(histories)):
            raise ValueError(
                f"error_clip: got histories of {known}, but the rules match {found}, expected the "
                "state of init for the same function"
            )
        return {n: h.after(self._rule_of(n), stats[n], parts) for n, h in histories.items()}

    def _names(self, stats: Any) -> list[str]:
        return sorted(n for n in stats if adaptive_threshold(self._rule_of(n)) is not None)

    def _rule_of(self, name: str) -> Any:
        """The rule of a name that is there; an exact name wins over a pattern."""
        if name in self.rules:
            return self.rules[name]
        rules = [rule for pattern, rule in self.rules.items() if matches(pattern, name)]
        if any(map(adaptive_threshold, rules)) and len(set(map(repr, rules))) > 1:
            raise ValueError(
                f"error_clip: got several rules for {name!r}, {rules}, expected one; add a rule "
                f"for {name!r} itself"
            )
        return rules[0] if rules else None


def _plain(rules: Any) -> dict[str, None]:
    """`None` in place of each adaptive rule: only watch."""
    return {name: None for name, rule in rules.items() if adaptive_threshold(rule) is not None}


@dataclasses.dataclass(frozen=True, eq=False)
class AdaptiveErrorClip:
    """A function with a state; see `adaptive_error_clip`."""

    fun: Callable[..., Any]
    rules: AdaptiveRules
    argnums: int | Sequence[int]
    has_aux: bool

    def init(self, *args: Any, **kwargs: Any) -> Histories:
        """Empty histories, a dictionary by name; the function is traced, not run."""
        watched = self._with(dict.fromkeys(self.rules.rules))
        return self.rules.first(jax.eval_shape(lambda: watched(*args, **kwargs)[2]))

    def __call__(self, state: Histories, /, *args: Any, **kwargs: Any) -> Any:
        """The value, the gradients, the next state and the statistics."""
        value, grads, stats = self._with(self.rules.bound(state))(*args, **kwargs)
        return value, grads, self.rules.after(state, stats), stats

    def _with(self, rules: Rules) -> Callable[..., Any]:
        return value_and_grad_with_stats(
            self.fun, self.argnums, self.has_aux, rules=rules, watch=()
        )


def adaptive_error_clip(
    fun: Callable[..., Any],
    rules: Rules,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
) -> AdaptiveErrorClip:
    r"""Value and gradient of a function whose error clips find their threshold.

    The rules are ``ClipByNorm(threshold)`` or ``ClipByGlobalNorm(threshold)`` with an adaptive
    threshold (`PercentileThreshold`, `ZScoreThreshold`, `EMAThreshold`, `HistoryThreshold`, or one
    of your own); other rules stay as they are. `train_step` takes them as ``error_clip=`` and keeps
    the state itself.

    Guarantees:
      * The limit of a step comes from the finite norms of the cotangents in the steps before it:
        it is the one that the threshold sets where the norm of the step is NaN. So the warm-up of
        `EMAThreshold` clips nothing, and `ZScoreThreshold` limits to the mean plus z deviations.
      * The statistics that make the gradients' histories leave the one backward pass that there is;
        nothing is traced again at the next step.
      * Each name that a pattern matches, and each step of the scans around it, has its own history.
        Variables that share a name have one, of the norm of all together, by which each of them is
        limited.

    Args:
      fun: a function that returns a scalar, or ``(scalar, aux)``.
      rules: a rule for each name or pattern, see `error_clip_by_name`.
      argnums: the positions of the arguments to differentiate.
      has_aux: whether ``fun`` returns ``(scalar, aux)``.

    Returns:
      A function ``(state, *args) -> (value, grads, state, stats)``, with ``has_aux`` ``((value,
      aux), grads, state, stats)``; its method ``init(*args)`` gives the first state, a dictionary
      from names to `ErrorClipHistory`. Its arrays can be carried by `jax.lax.scan` and saved.

    Raises:
      TypeError: as `error_clip_by_name`, and for an adaptive threshold in another rule.
      ValueError: when called, as `value_and_grad_with_stats`, and for the state of another
        function or of scans of another length.

    Example:
      >>> import clipgrad as cg, jax.numpy as jnp
      >>> from jax.ad_checkpoint import checkpoint_name
      >>> loss = lambda w, x: checkpoint_name(2 * w, "h") * x
      >>> clip = cg.adaptive_error_clip(loss, {"h": cg.ClipByNorm(cg.PercentileThreshold(100))})
      >>> state = clip.init(1.0, 1.0)
      >>> for x in (1.0, 3.0, 50.0):
      ...     value, grads, state, stats = clip(state, 1.0, x)
      ...     print(grads, stats["h"].norm, stats["h"].clipped_norm)
      2.0 1.0 1.0
      2.0 3.0 1.0
      6.0 50.0 3.0
    """
    check_function(fun)
    return AdaptiveErrorClip(fun, AdaptiveRules.of(rules), argnums, has_aux)
