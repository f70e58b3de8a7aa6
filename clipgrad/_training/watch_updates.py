"""Norms of gradients, parameters and updates by group of leaves, in any optimizer."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from clipgrad._arrays import (
    AxisName,
    Where,
    answers_lookups,
    explain_call,
    is_none,
    one_program_if_eager,
    warn_of_parts,
    widest,
)
from clipgrad._clip import Wrapper, as_optimizer
from clipgrad._compat import exportable
from clipgrad._training.leaf_groups import By, LeafGroups, check_by


@exportable
@answers_lookups("norms")
class UpdateNorms(NamedTuple):
    """The norms for a group of leaves in one step, of shape ``()`` or ``(layers,)``.

    Example:
      >>> import clipgrad as cg
      >>> print(cg.types.UpdateNorms(grad=30.0, param=8.0, update=0.5).ratio)
      0.0625

    Attributes:
      grad: the norm of the gradient that arrives, before any clip inside.
      param: the norm of the parameters before the step.
      update: the norm of the update that the optimizer returns.
    """

    grad: jax.Array
    param: jax.Array
    update: jax.Array

    @property
    def ratio(self) -> jax.Array:
        """The update norm divided by the parameter norm; 0 if all parameters are 0."""
        return _ratio(self.update, self.param)


@one_program_if_eager
def _ratio(update: jax.Array, param: jax.Array) -> jax.Array:
    return jnp.where(param == 0, 0, update / jnp.where(param == 0, 1, param))


@exportable
@answers_lookups("state")
class WatchUpdatesState(NamedTuple):
    """The state of `watch_updates`.

    Attributes:
      inner_state: the optimizer state.
      norms: the last step's `UpdateNorms` for each group; zeros before the first step.
    """

    inner_state: Any
    norms: dict[str, UpdateNorms]


@explain_call()
def watch_updates(
    optimizer: optax.GradientTransformation | optax.MultiSteps,
    *,
    by: By = "module",
    stacked: Where = None,
    axis_name: AxisName = None,
) -> optax.GradientTransformationExtraArgs:
    r"""Wraps an optimizer, and measures each module's gradient, parameters and update.

    The ratio of update to parameters shows you which layer learns, stands still or explodes. A
    healthy ratio is about 1e-3. In an unstable run the ratio doubles before you see anything in the
    loss.

    Example:
      >>> import clipgrad as cg, jax.numpy as jnp, optax
      >>> tx = cg.watch_updates(optax.sgd(0.5))
      >>> params = {"attn": {"q": jnp.array([3.0]), "k": jnp.array([4.0])}, "mlp": jnp.ones(1)}
      >>> grads = {"attn": {"q": jnp.array([0.6]), "k": jnp.array([0.8])}, "mlp": jnp.zeros(1)}
      >>> updates, state = tx.update(grads, tx.init(params), params)
      >>> print(state.norms["attn"].grad, state.norms["attn"].update, state.norms["attn"].ratio)
      1.0 0.5 0.1

    Args:
      optimizer: an optax gradient transformation, or ``optax.MultiSteps``. Put everything inside
        that changes the update: a clip, weight decay, a schedule, `skip_spikes`.
      by: how to group leaves: ``"module"``, by the path without the last segment; ``"leaf"``; a
        number of segments, from the first on; or a function of the path. A path looks like
        ``"blocks/0/attn/kernel"``, without the ``params/`` that flax Linen puts around all leaves.
      stacked: leaves whose first axis is layers, as from ``flax.linen.scan``, from NNX blocks made
        under ``nnx.vmap``, or from your own scan: path patterns such as ``"blocks"``, a tree of
        booleans, or a function from the tree to such a tree. You then get one norm for each layer.
      axis_name: the name or names of the `jax.shard_map`, `jax.pmap` or `jax.vmap` axes over which
        the leaves are spread, so that norms cover all devices. ``jax.P("x")`` says that every leaf
        is spread, even if JAX does not know this. You do not need this under `jax.jit`.

    Returns:
      A gradient transformation with the state `WatchUpdatesState`. Extra arguments of ``update``
      are passed on to the optimizer. With `train_step` you find the norms in
      ``metrics["updates"]``, and with `scalars` as ``updates/blocks/0/attn/ratio``.

    Raises:
      TypeError: if ``optimizer`` is not a gradient transformation, or the function ``by`` does not
        return text.
      ValueError: for any other ``by``; by ``init``, if ``stacked`` selects nothing, or leaves in
        one group have different numbers of layers; by ``update``, without parameters.

    Guarantees:
      * Updates and inner state are the optimizer's.
      * NaN and inf are not hidden. Norms neither overflow nor underflow; they are float32, or
        float64 if a leaf is. If all parameters are 0, the ratio is 0.
      * Structure, shapes and dtypes of the state never change, so a scan can carry the state.
      * Integers, ``None`` and leaves that gradients overwrite (scales for 8-bit floats) are in no
        group.
    """
    inner = as_optimizer("optimizer", optimizer)
    check_by(by)

    def init(params: Any) -> WatchUpdatesState:
        groups = LeafGroups.of(params, by, stacked)
        dtype = widest(_measured(groups, params))
        norms = {  # each with a buffer of its own, so that the state can be donated
            name: UpdateNorms(*(jnp.zeros(shape, dtype) for _ in UpdateNorms._fields))
            for name, shape in groups.shapes.items()
        }
        return WatchUpdatesState(inner.init(params), norms)

    def update(updates: Any, state: Any, params: Any = None, **extra_args: Any) -> tuple[Any, Any]:
        if params is None:
            raise ValueError(
                "params: got None, expected the parameters, whose norms are measured; write "
                "update(grads, state, params)"
            )
        new, inner_state = inner.update(updates, state.inner_state, params, **extra_args)
        groups = LeafGroups.of(params, by, stacked)
        if groups.shapes != {name: x.grad.shape for name, x in state.norms.items()}:
            raise ValueError(
                f"params: got the groups {groups.shapes}, but the state has {list(state.norms)}; "
                "expected the state of init(params) for the same parameters"
            )
        trees = [_measured(groups, tree) for tree in (updates, params, new)]
        warn_of_parts("watch_updates", trees[0], axis_name)
        measured = groups.norms(trees, axis_name)
        dtypes = {name: x.grad.dtype for name, x in state.norms.items()}
        norms = {
            name: UpdateNorms(*(x.astype(dtypes[name]) for x in each))
            for name, each in measured.items()
        }
        return new, WatchUpdatesState(inner_state, norms)

    return Wrapper.of(optimizer, init, update)


def _measured(groups: LeafGroups, tree: Any) -> list[jax.Array]:
    """The leaves of a tree that are in a group."""
    leaves = jax.tree.leaves(tree, is_leaf=is_none)
    if len(leaves) != len(groups.measured):
        raise ValueError(
            f"updates: got a tree of {len(leaves)} leaves, expected one for each of the "
            f"{len(groups.measured)} of the parameters"
        )
    return [jnp.asarray(x) for x, flag in zip(leaves, groups.measured, strict=True) if flag]
