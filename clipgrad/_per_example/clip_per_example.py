"""Gradients of each example of a batch, clipped one by one and then reduced."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp

from clipgrad._arrays import Where, explain_call
from clipgrad._clip import ClipStats, NonFinite, as_rule, check_policy, raise_for_counts
from clipgrad._per_example.batches import check_microbatch
from clipgrad._per_example.clipped_sums import sums_by_norms, sums_of_elements
from clipgrad._per_example.padding import Padding, as_padding, count_real, real_losses
from clipgrad._per_example.plan import Plan, plan_of
from clipgrad._per_example.prepare import ExampleRun, prepared
from clipgrad._per_example.request import Method, Request, check_method, scalar_loss
from clipgrad._per_example.scaling import axis_name_of
from clipgrad._per_example.sensitivity import sensitivity_of
from clipgrad._training import wide_zeros

Reduction = Literal["mean", "sum"]
REDUCTIONS = get_args(Reduction)


@explain_call(
    noise_multiplier='add the noise to the sum of the clipped gradients: write reduce="sum"',
)
def clip_per_example(
    loss_fn: Callable[..., Any],
    rule: Callable[..., Any] | None,
    *,
    reduce: Reduction = "mean",
    microbatch: int | None = None,
    has_aux: bool = False,
    where: Where = None,
    nonfinite: NonFinite = "propagate",
    method: Method = "auto",
    wrt: Any = None,
) -> "ClipPerExample":
    r"""Makes a ``value_and_grad`` that clips the gradient of each example of a batch.

    You get the mean or the sum of the clipped gradients. So a single example can change the step
    only a little, whether it is an outlier or private data (for differential privacy, add the noise
    to the sum yourself).

    Example:
      >>> import clipgrad as cg, jax.numpy as jnp
      >>> loss = lambda w, example: jnp.dot(w, example)
      >>> per_example = cg.clip_per_example(loss, cg.ClipByGlobalNorm(1.0), microbatch=1)
      >>> value, grads, stats = per_example(jnp.zeros(2), jnp.array([[0.0, 8.0], [0.5, 0.0]]))
      >>> print(grads.round(5), stats.norm.round(5), stats.clipped)
      [0.25 0.5 ] [8.  0.5] [ True False]

    Args:
      loss_fn: ``loss_fn(params, example)``, the loss for one example, a scalar or
        ``(scalar, aux)``. An example is the batch without the leading axis; if your model takes
        batches, write ``x[None]``. If some examples only fill the batch, pass
        ``is_padding_example``, below.
      rule: the clip for each example's gradient: a rule such as ``ClipByGlobalNorm(1.0)``, a
        function of the tree, or ``None``: off.
      reduce: ``"mean"`` or ``"sum"``, for the clipped gradients and for the losses.
      microbatch: the number of examples to differentiate at once, a divisor of the batch size; a
        small number saves memory. ``None``: all examples.
      has_aux: ``True`` if ``loss_fn`` returns ``(scalar, aux)``.
      where: the leaves to clip: path patterns such as ``"blocks/*/kernel"`` or ``"!head"``, a tree
        of booleans, or a function from the parameters to such a tree; ``None``: all. The gradients
        of all other leaves are summed without a clip.
      nonfinite: the policy for NaN and inf. ``"propagate"``: they stay. ``"zero"``: if an example's
        gradient has NaN or inf in a leaf to clip, that example adds nothing to the leaves to clip.
        ``"error"``: you get an error with the leaves, the number of bad examples, and the first bad
        example.
      method: ``"auto"``: per-example gradients are not computed, where possible; if that needs much
        memory and ``microbatch`` is ``None``, a part of the examples runs at a time. ``"direct"``:
        as `jax.vmap` of `jax.grad`.
      wrt: the variables to differentiate in a flax NNX model, a filter such as ``nnx.LoRAParam``;
        ``None``: every ``nnx.Param``.

    Returns:
      A function ``(params, batch) -> (value, grads, stats)``, or with ``has_aux``
      ``-> ((value, aux), grads, stats)``. ``grads`` has the structure and dtypes of ``params``,
      with ``None`` for integers; for models you get the same types as from ``nnx.grad`` and
      ``equinox.filter_grad``. ``stats`` is a `ClipStats` with one entry for each example, in batch
      order: ``stats.norm`` has the shape (B,), and ``stats.clipped.mean()`` is the share of clipped
      examples. ``aux`` has one entry for each example, too. You may pass ``is_padding_example=`` to
      the function, a boolean for each example, with True for examples that only fill the batch.
      They add nothing, whatever numbers they hold, and a mean divides by the number of all other
      examples (at least 1). The function has two methods: ``plan(params, batch)`` shows the method
      for each leaf, and the reason; ``sensitivity()`` says how much one example can change the sum.

    Raises:
      TypeError: if ``loss_fn`` is not a function, or ``rule`` is no rule, function or ``None``.
      ValueError: for any other unknown option; when called, if the arrays in the batch have no
        common leading axis, or ``microbatch`` does not divide it; if the parameters have no arrays;
        if arrays are on Explicit mesh axes; if examples are spread over an ``axis_name``; and if
        the loss is not a floating scalar.
      FloatingPointError: for NaN or inf with ``nonfinite="error"``; under `jax.jit` the function
        must be transformed by `jax.experimental.checkify.checkify` for this.

    The result is, or with ``reduce="sum"`` is $B$ times,

    $$\frac{1}{B} \sum_{i=1}^{B} \mathrm{rule}(\nabla_w\,\mathrm{loss}(w, x_i))$$

    over the leading axis of the batch, of size $B$. For one example, the gradient of a weight is a
    sum of products $X^\top Y$, where $X$ is the layer input and $Y$ the cotangent of the layer
    output. So neither the norm nor the clipped sum needs this gradient:

    $$\|X^\top Y\|^2 = \langle X X^\top, Y Y^\top \rangle, \qquad
    \sum_i c_i X_i^\top Y_i = (c X)^\top Y$$

    clipgrad follows each weight through the loss: through scans, `jax.jit` and `jax.checkpoint`,
    and when the weight is transposed, reshaped, cast or cut. Where the weight meets data, in a
    dense layer, a convolution or a lookup, clipgrad reads the rows of $X$ and $Y$. If you use a
    leaf in any other way (a bias, a masked weight, a branch), the leaf is "direct": JAX computes
    the gradient for each example. Every leaf is direct with ``nonfinite="error"``, and with rules
    that do not scale by L2 norms (value clips, other orders, units, functions).

    ==============================  ======================================================
    example, limit or batch         what is added, with ``ClipByGlobalNorm``
    ==============================  ======================================================
    a gradient of norm 0            exact zeros
    a norm within the limit         the gradient, unchanged
    ``max_norm=0``                  exact zeros
    ``max_norm=inf``                the gradient, unchanged
    ``max_norm`` below 0            `ValueError`; acts as 0 if traced
    NaN or inf in the gradient      NaN; nothing with ``nonfinite="zero"``
    padding, of any numbers         exact zeros; its loss counts as 0, its statistics are of 0
    padding alone                   exact zeros, for ``"mean"`` too
    ==============================  ======================================================

    Guarantees:
      * One example adds a norm of at most ``max_norm * (1 + 4e-7)`` to the sum, also for float16
        and bfloat16, and whatever the device's default matmul precision is: gradients are clipped
        and summed in float32, or in float64 if the parameter is float64.
      * At the end, the sum is rounded once to the parameter's dtype. This changes each element by
        up to 1/256 in bfloat16, or 1/2048 in float16, which may be more than one example adds. If
        the bound must hold for the result, keep the parameters in float32 and cast them inside the
        loss:

        >>> half = lambda w, example: loss(w.astype(jnp.bfloat16), example)    # w is float32
        >>> _, grads, _ = cg.clip_per_example(half, cg.ClipByGlobalNorm(1.0), reduce="sum")(
        ...     jnp.zeros(2), jnp.full((1001, 2), 30.0, jnp.bfloat16))
        >>> print(grads.dtype, jnp.round(grads[0] * 2**0.5))    # bfloat16 has 1000 and 1004
        float32 1001.0

      * With the rule ``None`` and ``"mean"`` you get `jax.value_and_grad` of the mean loss.
      * With ``ClipByGlobalNorm`` and ``"sum"`` you get the result of
        ``optax.per_example_global_norm_clip`` on float32, up to rounding.
      * Where products cancel, a norm is too large rather than too small, because the estimated
        rounding error of a Gram sum is added. Elsewhere the addition is a few parts in a million.
      * ``method="auto"`` runs a part of the examples at a time if the rows of all examples need
        more than 1 GiB per device (or more than twice the parameter bytes, if that is larger).
      * For leaves that are not direct, ``stats.nonfinite`` counts all elements of a leaf if the
        norm is not finite. Per-example statistics are not private.
      * Under `jax.jit` you may shard the batch over Auto mesh axes; if the number of devices
        divides ``microbatch``, each device computes its own examples. In `jax.shard_map` you get
        the result for the examples on one device, each example being whole: average or sum over the
        axis yourself.

    References:
      Abadi, Chu, Goodfellow, McMahan, Mironov, Talwar and Zhang, Deep Learning with Differential
      Privacy, 2016, https://arxiv.org/abs/1607.00133.
    """
    rule = as_rule(rule, of="gradients")
    check_policy(nonfinite)
    check_method(method)
    if reduce not in REDUCTIONS:
        raise ValueError(f"reduce: got {reduce!r}, expected one of {', '.join(REDUCTIONS)}")
    check_microbatch(microbatch)
    loss_fn = scalar_loss(loss_fn, has_aux)
    measurer = None if rule is None else type(rule).__name__
    options = (microbatch, has_aux, where, nonfinite, method, wrt, measurer, axis_name_of(rule))
    return ClipPerExample(Request(loss_fn, rule, *options), reduce)


@dataclasses.dataclass(frozen=True, eq=False)
class ClipPerExample:
    """A function of parameters and a batch; see `clip_per_example`."""

    request: Request
    reduce: Reduction

    @explain_call("write (params, (x, y))", "clip_per_example(loss_fn, rule)")
    def __call__(
        self, params: Any, batch: Any, *, is_padding_example: Any = None
    ) -> tuple[Any, Any, ClipStats]:
        """The reduced loss, the reduced clipped gradients, and the statistics of each example.

        ``is_padding_example``: a boolean for each example, see `clip_per_example`.
        """
        run = prepared(self.request, params, batch)
        padding = as_padding(is_padding_example, run.size)
        total, (value, stats, *counts) = _summed(run, padding)
        for of_leaves in counts:  # the direct method has them
            raise_for_counts(of_leaves)
        losses, aux = value if self.request.has_aux else (value, None)
        loss = jnp.sum(real_losses(losses, padding))
        if self.reduce == "mean":
            count = count_real(padding, run.size)
            total = jax.tree.map(lambda t: t / count, total)
            loss = jnp.mean(losses) if padding is None else loss / count
        params = run.arrays.params
        grads = jax.tree.map(lambda t, p: t.astype(jnp.result_type(p)), total, params)
        value = (loss, aux) if self.request.has_aux else loss
        run.count_random_state()
        return value, run.arrays.parameters.with_variables(grads), stats

    def plan(self, params: Any, batch: Any) -> Plan:
        """The plan for each leaf, from shapes alone, such as `jax.eval_shape` returns."""
        return plan_of(self.request, params, batch)

    def sensitivity(
        self, neighboring_relation: Any = "replace_special", *, params: Any = None
    ) -> Any:
        """How much one example changes the sum of the clipped gradients, as an L2 norm.

        Example:
          >>> import clipgrad as cg, jax.numpy as jnp
          >>> loss = lambda w, example: jnp.dot(w, example)
          >>> rule = cg.ClipByGlobalNorm(0.5)
          >>> clip = cg.clip_per_example(loss, rule, reduce="sum", nonfinite="zero")
          >>> clip.sensitivity(), clip.sensitivity("replace_one")
          (0.5, 1.0)

        Args:
          neighboring_relation: which two batches are neighbors. ``"add_or_remove_one"``: one has an
            example more; ``"replace_special"``: an example of one is padding in the other;
            ``"replace_one"``: an example of one is another one in the other, which is twice as
            much. Or a ``dp_accounting.NeighboringRelation`` of this name.
          params: the parameters, or their shapes, for a rule whose bound depends on these:
            `ClipByNorm` (the square root of the number of leaves) and `ClipByBlockRMS` (of the
            number of elements).

        Returns:
          The bound of the rule, a number, up to the rounding that `clip_per_example` says.

        Raises:
          ValueError: for another relation, and where nothing bounds the sum: the mean of a batch
            whose size is not known, ``nonfinite`` other than ``"zero"``, ``where``, and rules
            without such a bound; for ``params`` that are left out where they are needed.
        """
        if self.reduce != "sum":
            raise ValueError(
                f'reduce: got {self.reduce!r}, whose bound depends on the batch; write reduce="sum"'
                " and divide by the expected number of examples"
            )
        return sensitivity_of(self.request, neighboring_relation, params)


def _summed(run: ExampleRun, padding: Padding) -> tuple[Any, tuple[Any, ...]]:
    """The sum of the clipped gradients; what the loss returned, statistics, and what is bad."""
    request, params, *_ = run.arrays
    if request.why_elements is None:
        of_some = functools.partial(sums_by_norms, request, run.program)
    else:
        of_some = functools.partial(sums_of_elements, request)
    return run.accumulate(of_some, jax.tree.map(wide_zeros, params, params), padding)
