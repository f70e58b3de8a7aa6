"""Clipping a tree of gradients in one call."""

from collections.abc import Callable
from typing import Any

from clipgrad._arrays import Where, check_is_tree, explain_call
from clipgrad._clip.any_rule import as_rule, check_no_pairs
from clipgrad._clip.clipping import Clipped, Part, measured_norms
from clipgrad._clip.nonfinite import NonFinite, check_policy
from clipgrad._clip.rules import check_is_no_rule
from clipgrad._clip.stats import ClipStats


@explain_call()
def clip_grads(
    grads: Any,
    rule: Callable[..., Any] | None,
    params: Any = None,
    *,
    where: Where = None,
    nonfinite: NonFinite = "propagate",
) -> tuple[Any, ClipStats]:
    """Clips a gradient tree without an optimizer, and returns statistics.

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

    Args:
      grads: a pytree of gradients.
      rule: a `ClipRule`, such as ``ClipByGlobalNorm(1.0)``; or a function from the tree to
        the clipped tree; ``None``: off.
      params: the parameters, if the rule needs them (`AdaptiveClip`).
      where: the leaves to clip: path patterns, a tree of booleans that is a prefix of ``grads``, or
        a function from the tree to such a tree; ``None``: all. ``"kernel"`` selects leaves at or
        below this segment, such as ``"layers/0/kernel"`` but not ``"layers/0/out_kernel"``;
        ``"layers/*/kernel"`` selects one in each layer; ``"!head"`` all but the head. If you write
        several, ``("layers", "!bias")``, the last that matches decides. A `re.Pattern` is searched
        in the paths.
      nonfinite: the policy for NaN and inf. ``"propagate"``: the rule decides. ``"zero"``: they
        become 0 before the clip. ``"error"``: you get an error that names the leaves.

    Returns:
      The clipped gradients, and a `ClipStats` for the selected leaves.

    Raises:
      TypeError: if ``rule`` is not a rule, ``where`` has leaves other than booleans, or a leaf is
        an object or has a dtype that JAX lacks (strings and functions are ignored); for a list of
        array pairs, such as (parameter, gradient), without ``params``.
      ValueError: if ``where`` selects nothing or is not a prefix, for an unknown ``nonfinite``,
        and each error of the rule.
      FloatingPointError: for NaN or inf with ``nonfinite="error"``; under `jax.jit`, and so in
        `train_step` and ``optax.MultiSteps``, you must transform the function by
        `jax.experimental.checkify.checkify` for this.

    Guarantees:
      * Structure, shapes and dtypes are kept; leaves without numbers to clip (``None``, integers,
        booleans, ``float0``, PRNG keys) come back as they are.
      * Leaves that ``where`` leaves out are neither measured nor scaled.
      * Neither are leaves below flax's ``_overwrite_with_gradient`` (scales and histories for 8-bit
        floats, whose gradient is their next value).
      * With a global L2 norm, statistics need no second pass over the gradients; under `jax.jit`
        statistics that you do not use are not computed.
    """
    check_policy(nonfinite)
    check_is_no_rule("grads", grads, rule, "the gradients", "clip_grads(grads, rule)")
    check_is_no_rule("params", params, rule, "the parameters", "clip_grads(grads, rule, params)")
    check_is_tree("grads", grads, "clip_grads(jax.grad(loss)(params, batch), rule)")
    check_no_pairs(grads, params)
    rule, part = as_rule(rule, of="gradients"), Part.of(grads, where, nonfinite)
    norms = measured_norms(rule, part.before, params, counts=True)
    clipped = Clipped.by(rule, part, norms, params)
    return clipped.tree, clipped.stats()
