"""The norms of the gradients of the examples of a batch, alone."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax

from clipgrad._arrays import AxisName, Where, explain_call, is_none, tree_norm, with_paths
from clipgrad._per_example.batches import batch_size, check_microbatch
from clipgrad._per_example.gradients import ExampleProgram
from clipgrad._per_example.norms_of_arrays import norms_of_array, side_by_side
from clipgrad._per_example.plan import Plan, plan_of
from clipgrad._per_example.prepare import prepared
from clipgrad._per_example.request import Method, Request, check_method, scalar_loss


@explain_call("write per_example_norms(loss)(params, x)")
def per_example_norms(
    loss_fn: Callable[..., Any],
    *,
    has_aux: bool = False,
    where: Where = None,
    per_leaf: bool = False,
    microbatch: int | None = None,
    method: Method = "auto",
    wrt: Any = None,
    axis_name: AxisName = None,
) -> "PerExampleNorms":
    r"""Makes a function that returns the L2 norm of the gradient of each example of a batch.

    Where possible, these gradients are not computed at all, see `clip_per_example`.

    Example:
      >>> import clipgrad as cg, jax.numpy as jnp
      >>> loss = lambda w, example: jnp.dot(w, example)
      >>> norms = cg.per_example_norms(loss)
      >>> norms(jnp.zeros(2), jnp.array([[3.0, 4.0], [0.6, 0.8]])).round(5)
      Array([5., 1.], dtype=float32)

    Args:
      loss_fn: ``loss_fn(params, example)``, the loss for one example, a scalar or
        ``(scalar, aux)``. An example is the batch without the leading axis; if your model takes
        batches, write ``x[None]``.
      has_aux: ``True`` if ``loss_fn`` returns ``(scalar, aux)``; ``aux`` is not used.
      where: the leaves to measure: path patterns such as ``"blocks/*/kernel"`` or ``"!head"``, a
        tree of booleans, or a function from the parameters to such a tree; ``None``: all.
      per_leaf: ``True``: you get norms for each leaf.
      microbatch: the number of examples to differentiate at once, a divisor of the batch size;
        ``None``: all examples.
      method: ``"auto"``: per-example gradients are not computed, where possible. ``"direct"``: as
        `jax.vmap` of `jax.grad`.
      wrt: the variables to differentiate in a flax NNX model, a filter such as ``nnx.LoRAParam``;
        ``None``: every ``nnx.Param``.
      axis_name: inside `jax.shard_map` or `jax.pmap`, the mesh axes over which the parameters are
        spread; ``None``: each device has whole parameters.

    Returns:
      A function ``(params, batch) -> norms``, an array of shape (B,) for B examples; with
      ``per_leaf`` a dictionary from paths such as ``"layers/0/kernel"`` to such arrays. The
      function's method ``plan(params, batch)`` shows the method for each leaf, and the reason.

    Raises:
      ValueError: for a ``microbatch`` that is not a positive integer, an unknown ``method``; when
        called, for parameters, a batch, a loss, mesh axes or an ``axis_name`` as `clip_per_example`
        refuses them.
      TypeError: if ``loss_fn`` is not a function; when called, for parameters that are not arrays.

    The result is

    $$\|\nabla_w\,\mathrm{loss}(w, x_i)\|_2 \quad \text{for each example } x_i.$$

    Guarantees:
      * A norm equals the `global_norm` of the example's gradient to about 1e-5. Where products
        cancel, a norm is too large rather than too small; see `clip_per_example`.
      * No norm overflows or underflows as long as the norm itself is in the range of the dtype.

    References:
      Goodfellow, Efficient Per-Example Gradient Computations, 2015,
      https://arxiv.org/abs/1510.01799.
    """
    check_method(method)
    check_microbatch(microbatch)
    loss_fn = scalar_loss(loss_fn, has_aux)
    options = (microbatch, has_aux, where, "propagate", method, wrt, "per_example_norms", axis_name)
    return PerExampleNorms(Request(loss_fn, None, *options), per_leaf)


@dataclasses.dataclass(frozen=True, eq=False)
class PerExampleNorms:
    """A function of parameters and a batch; see `per_example_norms`."""

    request: Request
    per_leaf: bool

    @explain_call("write (params, (x, y))", "per_example_norms(loss_fn)")
    def __call__(self, params: Any, batch: Any) -> Any:
        """The norms of the gradients of the examples."""
        run = prepared(self.request, params, batch)
        norms = run.accumulate(functools.partial(self._norms, run.request, run.program), ())[1]
        run.count_random_state()
        return norms

    def plan(self, params: Any, batch: Any) -> Plan:
        """The plan for each leaf, from shapes alone, such as `jax.eval_shape` returns."""
        return plan_of(self.request, params, batch)

    def _norms(
        self, request: Request, program: ExampleProgram, params: Any, examples: Any
    ) -> tuple[tuple[()], Any]:
        _, gradients = program.gradients(params, examples)
        chosen = [i for i, flag in enumerate(request.flags(params)) if flag]
        norms = program.norms(chosen, gradients, batch_size(examples))
        if request.axis_name:  # each leaf varies on its own
            joined = jax.vmap(lambda norms: tree_norm(norms, axis_name=request.axis_name).value)
        elif self.per_leaf:
            joined = lambda norms: norms[0]  # noqa: E731
        else:
            joined = lambda norms: norms_of_array(side_by_side(norms))  # noqa: E731
        if not self.per_leaf:
            return (), joined(norms)
        paths = [path for path, leaf in with_paths(params) if not is_none(leaf)]
        return (), {paths[i]: joined([norm]) for i, norm in zip(chosen, norms, strict=True)}
