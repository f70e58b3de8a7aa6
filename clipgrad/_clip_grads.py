"""Clipping a tree of gradients in one call."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax.typing import ArrayLike

from clipgrad._nonfinite import apply_policy
from clipgrad._norms import Norm
from clipgrad._rules import ClipByGlobalNorm, apply_rule, as_rule
from clipgrad._stats import ClipStats, count_nonfinite, stats_dtype
from clipgrad._where import Where, keep_selected, put_back, selected


def clip_grads(
    grads: Any,
    rule: Callable[..., Any] | None,
    params: Any = None,
    *,
    where: Where = None,
    nonfinite: str = "propagate",
    norm: ArrayLike | None = None,
) -> tuple[Any, ClipStats]:
    """Clips a tree of gradients and says what was done: no optimizer is needed.

    Guarantees:
      * Structure, shapes and dtypes are kept; leaves without numbers to clip (``None``, integers,
        booleans, ``float0``, PRNG keys) come back as they are.
      * What ``where`` leaves out is neither measured nor scaled.
      * The statistics of a global L2 norm take no second pass over the gradients; under
        `jax.jit` statistics that are not used are not computed.

    Args:
      grads: a pytree of gradients.
      rule: a `ClipRule`, a function of the tree, or ``None``: off.
      params: the parameters, for rules that need them (`AdaptiveClip`).
      where: which leaves take part: a tree of booleans that is a prefix of ``grads``, a function
        from the tree to one, or a regular expression that is searched in paths such as
        ``"layers/0/kernel"``; ``None``: all.
      nonfinite: ``"propagate"``; ``"zero"``: NaN and inf become 0 before anything is measured;
        ``"error"``: raise and name the leaves.
      norm: the norm that `ClipByGlobalNorm` would measure, if it is known already.

    Returns:
      The clipped gradients, and a `ClipStats` of the leaves that take part.

    Raises:
      TypeError: if ``rule`` is none, or ``where`` holds anything else than booleans.
      ValueError: if ``where`` selects nothing or is no prefix, for an unknown ``nonfinite``, for
        ``norm`` with another rule, and whatever the rule raises.
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
    """
    clipped, stats = clip_and_watch(
        grads, as_rule(rule), params, where=where, nonfinite=nonfinite, norm=norm
    )
    return clipped, stats()


def clip_and_watch(
    grads: Any,
    rule: Callable[..., Any] | None,
    params: Any,
    *,
    where: Where,
    nonfinite: str,
    norm: ArrayLike | None,
) -> tuple[Any, Callable[[], ClipStats]]:
    """`clip_grads` of a rule that has been checked, with the statistics on demand."""
    flags = selected(where, grads)
    raw = keep_selected(grads, flags)
    tree = apply_policy(nonfinite, raw)
    if isinstance(rule, ClipByGlobalNorm):
        clipped, stats = _by_global_norm(rule, tree, norm)
    elif norm is not None:
        raise ValueError(f"norm: got one with {rule!r}, expected ClipByGlobalNorm to use it")
    else:
        clipped = tree if rule is None else apply_rule(rule, tree, params)
        stats = lambda: ClipStats.of(tree, clipped)  # noqa: E731
    watch = (
        stats if nonfinite != "zero" else lambda: stats()._replace(nonfinite=count_nonfinite(raw))
    )
    return put_back(clipped, grads, flags), watch


def _by_global_norm(
    rule: ClipByGlobalNorm, tree: Any, given: ArrayLike | None
) -> tuple[Any, Callable[[], ClipStats]]:
    norm = rule.measure(tree) if given is None else _known_norm(given, tree)
    clipped = rule.scale(tree, norm)
    if rule.ord != 2:
        return clipped, lambda: ClipStats.of(tree, clipped)
    return clipped, lambda: ClipStats.of_scaling(tree, norm, rule.limit(norm), rule.axis_name)


def _known_norm(given: ArrayLike, tree: Any) -> Norm:
    root = jnp.asarray(given).astype(stats_dtype(tree))
    return Norm(root, jnp.ones_like(root))
