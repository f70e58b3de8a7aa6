"""A training step that is compiled once and says what was clipped."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from clipgrad._global_norm import global_norm
from clipgrad._gradient_clip import GradientClipState, keeping_statistics
from clipgrad._numbers import at_least_float32
from clipgrad._skip_spikes import SkipSpikesState
from clipgrad._stats import count_nonfinite

Metrics = dict[str, Any]


class TrainState(NamedTuple):
    """What a training step carries: the parameters and the state of the optimizer."""

    params: Any
    opt_state: Any


@dataclasses.dataclass(frozen=True)
class TrainStep:
    """A compiled function ``step(state, batch) -> (state, metrics)`` and its first state.

    Attributes:
      update: the function that `jax.jit` compiled, for ``lower`` and the like.
      optimizer: the optimizer.
    """

    update: Any
    optimizer: optax.GradientTransformation

    def init(self, params: Any) -> TrainState:
        """The first state; it holds copies, since each step takes over the buffers of its state."""
        params = jax.tree.map(_own, params)
        with keeping_statistics():
            opt_state = self.optimizer.init(params)
        return TrainState(params, jax.tree.map(_own, opt_state))

    def __call__(self, state: TrainState, batch: Any) -> tuple[TrainState, Metrics]:
        """One step of training."""
        return self.update(state, batch)


def train_step(
    loss_fn: Callable[..., Any],
    optimizer: optax.GradientTransformation,
    *,
    accumulate: int = 1,
    has_aux: bool = False,
    donate: bool = True,
) -> TrainStep:
    """Makes a compiled training step of a loss function and any optax optimizer.

    Guarantees:
      * It is traced once for all batches of one shape, whatever the schedules do.
      * With ``accumulate=k`` gradients are averaged over k microbatches, in float32 or wider,
        and clipped once, after that. A microbatch holds every k-th example, so that devices that
        share the batch share each microbatch.
      * The state keeps the statistics of the gradient clips in the optimizer, whether or not
        they were made with ``stats=True``.

    Args:
      loss_fn: ``loss_fn(params, batch)``, a scalar, or ``(scalar, aux)``.
      optimizer: an optax gradient transformation, such as
        ``optax.chain(clipgrad.clip_by_global_norm(1.0), optax.adam(1e-3))``, or
        ``optax.MultiSteps``. It is handed ``value``, ``grad`` and ``value_fn`` if it takes them.
      accumulate: the number of microbatches that the leading axis of the batch is split into.
      has_aux: whether ``loss_fn`` returns something besides the loss.
      donate: whether a step may write the new state into the buffers of the old one, which
        can't be used any more then.

    Returns:
      A `TrainStep`: ``state = step.init(params)``, then ``state, metrics = step(state, batch)``.
      The metrics are a dictionary of ``loss``, ``grad_norm`` (before any clip), ``nonfinite`` (the
      number of gradient elements that are NaN or inf), ``clips`` (the `ClipStats` of each gradient
      clip in the optimizer), with exactly one of them ``clipped_norm`` and ``clip_scale``, with
      `skip_spikes` ``skipped``, and with ``has_aux`` ``aux`` (stacked over microbatches).

    Raises:
      TypeError: if ``optimizer`` is no gradient transformation.
      ValueError: if ``accumulate`` is no positive integer; when called, if it does not divide the
        batch.

    Example:
      >>> import clipgrad as cg, jax.numpy as jnp, optax
      >>> loss = lambda params, batch: jnp.sum(params["w"] * batch)
      >>> optimizer = optax.chain(cg.clip_by_global_norm(1.0), optax.sgd(1.0))
      >>> step = cg.train_step(loss, optimizer)
      >>> state = step.init({"w": jnp.zeros(2)})
      >>> state, metrics = step(state, jnp.array([3.0, 4.0]))
      >>> print(state.params["w"], metrics["grad_norm"], metrics["clipped_norm"])
      [-0.6 -0.8] 5.0 1.0
    """
    if isinstance(optimizer, optax.MultiSteps):
        optimizer = optimizer.gradient_transformation()
    if not isinstance(optimizer, optax.GradientTransformation):
        raise TypeError(
            f"optimizer: got {type(optimizer).__name__}, expected an optax.GradientTransformation "
            "such as optax.chain(clipgrad.clip_by_global_norm(1.0), optax.adam(1e-3))"
        )
    if isinstance(accumulate, bool) or not isinstance(accumulate, int) or accumulate < 1:
        raise ValueError(f"accumulate: got {accumulate!r}, expected a positive integer")
    extended = optax.with_extra_args_support(optimizer)
    value_and_grad = jax.value_and_grad(loss_fn, has_aux=has_aux)

    def loss_of(params: Any, batch: Any) -> jax.Array:
        return loss_fn(params, batch)[0] if has_aux else loss_fn(params, batch)

    if accumulate > 1:
        value_and_grad = _accumulated(value_and_grad, accumulate)

    def update(state: TrainState, batch: Any) -> tuple[TrainState, Metrics]:
        value, grads = value_and_grad(state.params, batch)
        loss, aux = value if has_aux else (value, None)
        extra_args = {"value": loss, "grad": grads, "value_fn": lambda p: loss_of(p, batch)}
        updates, opt_state = extended.update(grads, state.opt_state, state.params, **extra_args)
        params = optax.apply_updates(state.params, updates)
        metrics = {"loss": loss, **_metrics(grads, opt_state), **({"aux": aux} if has_aux else {})}
        return TrainState(params, opt_state), metrics

    return TrainStep(jax.jit(update, donate_argnums=0 if donate else ()), optimizer)


def _metrics(grads: Any, opt_state: Any) -> Metrics:
    clips = tuple(s.stats for s in _states(opt_state, GradientClipState) if s.stats)
    skips = [s.skipped for s in _states(opt_state, SkipSpikesState)]
    metrics = {
        "grad_norm": global_norm(grads),
        "nonfinite": count_nonfinite(grads),
        "clips": clips,
    }
    if len(clips) == 1:
        metrics |= {"clipped_norm": clips[0].clipped_norm, "clip_scale": clips[0].scale}
    return metrics | ({"skipped": jnp.stack(skips).any()} if skips else {})


def _states(opt_state: Any, kind: type) -> list[Any]:
    """The states of one kind in the state of an optimizer."""
    leaves = jax.tree.leaves(opt_state, is_leaf=lambda s: isinstance(s, kind))
    return [leaf for leaf in leaves if isinstance(leaf, kind)]


def _accumulated(value_and_grad: Callable[..., Any], parts: int) -> Callable[..., Any]:
    """``value_and_grad`` averaged over microbatches; the aux values are stacked."""

    def split(leaf: jax.Array) -> jax.Array:
        if not jnp.ndim(leaf) or leaf.shape[0] % parts:
            raise ValueError(
                f"accumulate: got a batch leaf of shape {jnp.shape(leaf)}, whose leading axis "
                f"{parts} microbatches do not divide"
            )
        # Strided, so that a leading axis that is sharded stays where it is.
        return jnp.reshape(leaf, (leaf.shape[0] // parts, parts, *leaf.shape[1:]))

    def averaged(params: Any, batch: Any) -> Any:
        batch = jax.tree.map(split, batch)

        def microbatch(i: Any) -> Any:
            return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, i, 1, False), batch)

        def body(total: Any, i: jax.Array) -> Any:
            value, grads = value_and_grad(params, microbatch(i))
            loss, aux = value if isinstance(value, tuple) else (value, None)
            return jax.tree.map(lambda t, new: t + new.astype(t.dtype), total, (loss, grads)), aux

        value, grads = jax.eval_shape(lambda: value_and_grad(params, microbatch(0)))
        shapes = (value[0] if isinstance(value, tuple) else value, grads)
        zeros = jax.tree.map(_wide_zeros, (jnp.zeros_like(shapes[0]), params), shapes)
        total, aux = jax.lax.scan(body, zeros, jnp.arange(parts))
        mean = jax.tree.map(lambda t, s: (t / parts).astype(s.dtype), total, shapes)
        loss, grads = mean
        return ((loss, aux) if isinstance(value, tuple) else loss), grads

    return averaged


def _wide_zeros(leaf: Any, shape: Any) -> jax.Array:
    """Zeros placed as a leaf is, in a dtype to sum in."""
    return jnp.zeros_like(leaf, dtype=at_least_float32(shape.dtype))


def _own(leaf: Any) -> Any:
    """A copy that is not weakly typed, so that the second step is not traced anew."""
    return jnp.array(leaf, dtype=jnp.asarray(leaf).dtype, copy=True)
