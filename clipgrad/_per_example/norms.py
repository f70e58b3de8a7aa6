"""The norms of the gradients of the examples of a batch, alone."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from clipgrad._numerics import AxisName, accumulator, tree_norm, warn_of_parts
from clipgrad._per_example.batches import (
    batch_size,
    check_microbatch,
    each,
    on_each_device,
    part_count,
    shares_axes,
    whole_examples,
    with_auto_axes,
)
from clipgrad._per_example.follow import SquaredNorm
from clipgrad._per_example.plan import Plan, plan_of
from clipgrad._per_example.scales import squares_of_leaves
from clipgrad._per_example.subject import PerExampleSubject, check_method, check_params, scalar_loss
from clipgrad._per_example.traced import ExampleGradient, followed
from clipgrad._trees import Where, is_none, with_paths


def per_example_norms(
    loss_fn: Callable[..., Any],
    *,
    has_aux: bool = False,
    where: Where = None,
    per_leaf: bool = False,
    microbatch: int | None = None,
    method: str = "auto",
    wrt: Any = None,
    axis_name: AxisName = None,
) -> "PerExampleNorms":
    r"""Makes a function that returns the L2 norm of the gradient of each example of a batch.

    $$\|\nabla_w\,\mathrm{loss}(w, x_i)\|_2 \quad \text{for each example } x_i$$

    The gradient of a weight for one example is a sum of products $X^\top Y$ of the input of a
    layer and the cotangent of its output, and $\|X^\top Y\|^2 = \langle X X^\top, Y Y^\top
    \rangle$. So the norm does not need this gradient.

    Guarantees:
      * A norm is the `global_norm` of the example's gradient to about 1e-5, and where products
        cancel it is not too small; see `clip_per_example`.
      * It neither overflows nor underflows while the norm itself is in the range of its dtype.

    Args:
      loss_fn: ``loss_fn(params, example)``, a scalar or ``(scalar, aux)``, where an example is the
        batch without its leading axis.
      has_aux: whether ``loss_fn`` returns ``(scalar, aux)``; ``aux`` is not used.
      where: which leaves are measured; see `clip_grads`.
      per_leaf: whether to return the norms of each leaf.
      microbatch: the number of examples at once, which must divide the batch; ``None``: all.
      method: see `clip_per_example`; ``"direct"`` computes the gradients; all others measure
        them where they arise.
      wrt: which variables of a model of flax NNX are differentiated; see `clip_per_example`.
      axis_name: the mapped axes that the parameters are spread over; see `global_norm`.

    Returns:
      A function ``(params, batch) -> norms``, an array of shape (B,); with ``per_leaf`` a
      dictionary from paths such as ``"layers/0/kernel"`` to these. Its method ``plan(params,
      batch)`` shows the method for each leaf, and the reason.

    Raises:
      ValueError: for a ``microbatch`` that is not a positive integer, an unknown ``method``; when
        called, for parameters, a batch, a loss or an ``axis_name`` as `clip_per_example` refuses
        them.
      TypeError: if ``loss_fn`` is not a function; when called, for parameters that are not arrays.

    Example:
      >>> import clipgrad as cg, jax.numpy as jnp
      >>> loss = lambda w, example: jnp.dot(w, example)
      >>> cg.per_example_norms(loss)(jnp.zeros(2), jnp.array([[3.0, 4.0], [0.6, 0.8]]))
      Array([5., 1.], dtype=float32)

    References:
      Goodfellow, Efficient Per-Example Gradient Computations, 2015,
      https://arxiv.org/abs/1510.01799.
    """
    check_method(method)
    check_microbatch(microbatch)
    loss_fn = scalar_loss(loss_fn, has_aux)
    subject = PerExampleSubject(loss_fn, None, microbatch, has_aux, where, "propagate", method, wrt)
    return PerExampleNorms(subject, per_leaf, axis_name)


@dataclasses.dataclass(frozen=True, eq=False)
class PerExampleNorms:
    """A function of parameters and a batch; see `per_example_norms`."""

    subject: PerExampleSubject
    per_leaf: bool
    axis_name: AxisName

    def __call__(self, params: Any, batch: Any) -> Any:
        """The norms of the gradients of the examples."""
        check_params(params)
        apart = self.subject.apart(params, batch)
        own = dataclasses.replace(self, subject=apart.subject)
        norms = own._of_arrays(apart.trained, apart.batch)
        apart.note()
        return norms

    def _of_arrays(self, params: Any, batch: Any) -> Any:
        _, parts = part_count(batch, self.subject.microbatch)
        of_some = self._of_some
        with whole_examples(batch, self.axis_name):
            warn_of_parts("per_example_norms", self.subject.clipped(params), self.axis_name)
        if self.subject.why_direct(params) is None or shares_axes(params, batch):
            of_some = with_auto_axes(of_some, lambda whole, each: each)
        return each(of_some, on_each_device(params, batch), batch, parts)

    def plan(self, params: Any, batch: Any) -> Plan:
        """The plan for each leaf, from shapes alone, such as `jax.eval_shape` returns."""
        check_params(params, shapes=True)
        apart = self.subject.apart(params, batch)
        subject = apart.subject
        if subject.method == "auto":
            subject = dataclasses.replace(subject, method="one pass")
        own = dataclasses.replace(self, subject=subject)
        plan = plan_of(subject, apart.trained, apart.batch, own._norms_of_followed)
        if plan.method == "direct":
            return plan
        return plan._replace(reason="norms are measured where factors arise")

    def _of_some(self, params: Any, examples: Any) -> Any:
        subject = self.subject
        if subject.why_direct(params) is None:
            return followed(subject, params, examples, self._norms_of_followed)[0]
        grad = jax.grad(subject.loss_fn, has_aux=subject.has_aux)
        grads = jax.vmap(grad, in_axes=(None, 0))(params, examples)
        values = jax.tree.leaves(grads[0] if subject.has_aux else grads)
        return self._norms(params, values, batch_size(examples))

    def _norms_of_followed(
        self, gradient: ExampleGradient, shapes: Any, params: Any, examples: Any
    ) -> Any:
        squared = SquaredNorm(frozenset())
        values, _ = gradient.each(params, examples, squared)
        return self._norms(params, values, batch_size(examples))

    def _norms(self, params: Any, values: list[Any], size: int) -> Any:
        paths = [path for path, leaf in with_paths(params) if not is_none(leaf)]
        chosen = [i for i, flag in enumerate(self.subject.flags(params)) if flag]
        if self.axis_name:
            return self._norms_over_devices(values, chosen, paths, size)
        leaves = squares_of_leaves({i: values[i] for i in chosen}, size, frozenset())
        if not self.per_leaf:
            return jax.vmap(lambda x: x.over_axis().norm().value, in_axes=1)(leaves)
        norms = jax.vmap(jax.vmap(lambda x: x.norm().value))(leaves)
        kinds = [accumulator(jnp.asarray(p)) for p in jax.tree.leaves(params)]
        return {paths[i]: norms[k].astype(kinds[i]) for k, i in enumerate(chosen)}

    def _norms_over_devices(
        self, values: list[Any], chosen: list[int], paths: list[str], size: int
    ) -> Any:
        """The norms of leaves that are in parts on several devices; each leaf varies on its own."""
        alone = [squares_of_leaves({i: values[i]}, size, frozenset()) for i in chosen]
        own = [jax.vmap(lambda x: x.over_axis().norm().value, in_axes=1)(leaf) for leaf in alone]
        whole = jax.vmap(lambda norms: tree_norm(norms, axis_name=self.axis_name).value)
        if not self.per_leaf:
            return whole(own)
        return {paths[i]: whole([norm]) for i, norm in zip(chosen, own, strict=True)}
