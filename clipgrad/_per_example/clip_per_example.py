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

    It returns the mean or the sum of the clipped gradients. So no single example has more than its
    share, for outliers, and for differential privacy (add the noise to the sum yourself).

    Example:
      >>> import clipgrad as cg, jax.numpy as jnp
      >>> loss = lambda w, example: jnp.dot(w, example)
      >>> per_example = cg.clip_per_example(loss, cg.ClipByGlobalNorm(1.0), microbatch=1)
      >>> value, grads, stats = per_example(jnp.zeros(2), jnp.array([[0.0, 8.0], [0.5, 0.0]]))
      >>> print(grads.round(5), stats.norm.round(5), stats.clipped)
      [0.25 0.5 ] [8.  0.5] [ True False]

    Args:
      loss_fn: ``loss_fn(params, example)``, the loss of one example, a scalar or ``(scalar, aux)``.
        An example is the batch without its leading axis; for a model of batches write ``x[None]``.
        An example that only fills the batch is left out by ``is_padding_example``, below.
      rule: what to do with the gradient of an example: a rule such as ``ClipByGlobalNorm(1.0)``, a
        function of the tree, or ``None``: nothing.
      reduce: ``"mean"`` or ``"sum"``, of the clipped gradients and of the losses.
      microbatch: the number of examples to differentiate at once, which must divide the batch. It
        bounds the memory. ``None``: all of them.
      has_aux: ``True`` if ``loss_fn`` returns ``(scalar, aux)``.
      where: the leaves to clip: patterns of their paths such as ``"blocks/*/kernel"`` or
        ``"!head"``, a tree of booleans, or a function from the tree of parameters to one; ``None``:
        all. The gradients of the others are summed without a clip.
      nonfinite: what to do with NaN and inf. ``"propagate"``: they stay. ``"zero"``: if the
        gradient of an example has one in a leaf that is clipped, these leaves get nothing from that
        example. ``"error"``: an error names the leaves, the number of bad examples, and the first
        of them.
      method: ``"auto"``: without the gradient of each example, where possible; if that takes much
        memory and ``microbatch`` is ``None``, of a part of the examples at a time. ``"direct"``: as
        `jax.vmap` of `jax.grad` does.
      wrt: the variables of a model of flax NNX to differentiate, a filter such as
        ``nnx.LoRAParam``; ``None``: its ``nnx.Param``.

    Returns:
      A function ``(params, batch) -> (value, grads, stats)``, with ``has_aux`` ``((value, aux),
      grads, stats)``. ``grads`` has the structure and dtypes of ``params``, with ``None`` for
      integers; for models it is as of ``nnx.grad`` and ``equinox.filter_grad``. ``stats`` are
      `ClipStats` with one entry for each example, in the order of the batch: ``stats.norm`` has the
      shape (B,), and ``stats.clipped.mean()`` is the share of the examples that were clipped.
      ``aux`` has one entry for each example, too. The function takes ``is_padding_example=``, a
      boolean for each example: True for one that only fills the batch. It adds nothing, whatever
      it holds, and a mean divides by the number of the others, or by 1. The method ``plan(params,
      batch)`` of the function shows what is done with each leaf, and why; ``sensitivity()`` is how
      much one example changes the sum.

    Raises:
      TypeError: if ``loss_fn`` is not a function, or ``rule`` is no rule, function or ``None``.
      ValueError: for an option of another kind; when called, for a batch without a common leading
        axis or one that ``microbatch`` does not divide, parameters without arrays, arrays on
        Explicit mesh axes, an ``axis_name`` that the examples are spread over, and a loss of one
        example that is not a floating scalar.
      FloatingPointError: for NaN or inf with ``nonfinite="error"``; under `jax.jit` the function
        must be transformed by `jax.experimental.checkify.checkify` for this.

    The result is, or with ``reduce="sum"`` is $B$ times,

    $$\frac{1}{B} \sum_{i=1}^{B} \mathrm{rule}(\nabla_w\,\mathrm{loss}(w, x_i))$$

    over the leading axis of the batch, of size $B$. The gradient of a weight for one example is a
    sum of products $X^\top Y$ of the input of a layer and the cotangent of its output. So norm and
    clipped sum do not need this gradient:

    $$\|X^\top Y\|^2 = \langle X X^\top, Y Y^\top \rangle, \qquad
    \sum_i c_i X_i^\top Y_i = (c X)^\top Y$$

    clipgrad follows each weight through the program of the loss: through scans, `jax.jit` and
    `jax.checkpoint`, transposed, reshaped, cast or cut. Where the weight meets data, in a dense
    layer, a convolution or a lookup, it reads the rows of $X$ and $Y$. A leaf that is used in
    another way (a bias, a masked weight, a branch) is direct: JAX makes its gradient for each
    example. So is every leaf with ``nonfinite="error"``, and for rules that do not scale by L2
    norms (value clips, other orders, units, functions).

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
      * One example adds a norm of at most ``max_norm * (1 + 4e-7)`` to the sum, for float16 and
        bfloat16 as well, whatever the default precision of products is where it runs: gradients are
        clipped and summed in float32, or float64 if the parameter is.
      * The sum is rounded to the dtype of the parameter once, at the end, by up to 1/256 of each
        element in bfloat16, 1/2048 in float16: that may be more than the share of one example. If
        the bound must hold for the result, keep the parameters in float32 and cast them inside the
        loss, as here:

        >>> half = lambda w, example: loss(w.astype(jnp.bfloat16), example)    # w is float32
        >>> _, grads, _ = cg.clip_per_example(half, cg.ClipByGlobalNorm(1.0), reduce="sum")(
        ...     jnp.zeros(2), jnp.full((1001, 2), 30.0, jnp.bfloat16))
        >>> print(grads.dtype, jnp.round(grads[0] * 2**0.5))    # bfloat16 has 1000 and 1004
        float32 1001.0

      * With the rule ``None`` and ``"mean"`` it is `jax.value_and_grad` of the mean loss.
      * With ``ClipByGlobalNorm`` and ``"sum"`` it equals ``optax.per_example_global_norm_clip`` on
        float32, up to rounding.
      * Where products cancel, a norm is too large rather than too small: the estimated rounding of
        a Gram sum is added. Elsewhere this is a few parts in a million of the norm.
      * ``method="auto"`` takes a part of the examples at a time if the rows of all examples need
        more than 1 GiB for each device, or twice the bytes of the parameters, if that is more.
      * Where norms are enough, ``stats.nonfinite`` counts all elements of a leaf whose norm is not
        finite. Statistics of examples are not private.
      * Under `jax.jit` the batch may be sharded over Auto mesh axes; if the number of devices
        divides ``microbatch``, each device computes its own examples. In `jax.shard_map` the result
        is of the examples of one device, each of them whole: average or sum it over the axis.

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
