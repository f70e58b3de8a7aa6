"""A training step that is compiled once and says what was clipped."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.core import Tracer

from clipgrad._arrays import (
    answers_lookups,
    check_is_tree,
    check_leaves,
    check_scalar,
    check_takes,
    check_tree,
    combine,
    described,
    donated_leaf,
    explain_call,
    is_complex,
    is_tracing,
    loss_and_aux,
    overwrite,
    path_string,
    split_overwritten,
    zeros_for,
)
from clipgrad._error_clip import Rules, checked_rules, with_stats
from clipgrad._frameworks import (
    Parameters,
    as_static,
    from_static,
    has_modules,
    is_model,
    take_apart,
)
from clipgrad._training.accumulate import Gradients, Weight, accumulated, weight_of
from clipgrad._training.metrics import shown_metrics, step_metrics
from clipgrad._training.optimizer_states import found_in
from clipgrad._training.optimizers import checked_optimizer, checked_states
from clipgrad._training.train_state import TrainState
from clipgrad._values import ValueStats, Watch, with_value_stats


@answers_lookups(
    "step",
    lower="step.update.lower(state, batch)",
    metrics="state, metrics = step(state, batch)",
    params="state.params",
    state="state = step.init(params)",
    step="step(state, batch)",
)
@dataclasses.dataclass(frozen=True)
class TrainStep:
    """A compiled function ``step(state, batch) -> (state, metrics)`` and its first state.

    Attributes:
      update: the compiled function of `jax.jit`, for example for ``update.lower(...)``.
      optimizer: the optimizer.
      wrt: the variables to train in an NNX model.
    """

    update: Any
    optimizer: optax.GradientTransformation
    wrt: Any = None

    @explain_call("write step.init(params)", "step.init")
    def init(self, params: Any) -> TrainState:
        """The first state, with copies of the parameters: a step may overwrite the buffers."""
        check_tree("params", params)
        check_is_tree("params", params, "step.init(params)")
        if not has_modules(params):  # leaves of a module that are not floating arrays stay
            check_leaves("params", params)
            _check_numbers(params)
        params = from_static(jax.tree.map(_copied_leaf, as_static(params)))
        trained = take_apart(params, self.wrt).trained
        opt_state = jax.tree.map(_copied_leaf, self.optimizer.init(trained))
        checked_states(opt_state)
        return TrainState(params, opt_state)

    @explain_call("write step(state, (x, y))", "step")
    def __call__(self, state: TrainState, batch: Any) -> tuple[TrainState, dict[str, Any]]:
        """One step of training."""
        _check_state(state, batch)
        check_tree("batch", batch)
        state, metrics = self.update(as_static(state), batch)
        return from_static(state), shown_metrics(metrics)


@explain_call(
    learning_rate="it is the optimizer's; write train_step(loss_fn, optax.adam(learning_rate))",
    lr="it is the optimizer's; write train_step(loss_fn, optax.adam(lr))",
    skip_nonfinite="write train_step(loss_fn, skip_spikes(optimizer))",
)
def train_step(
    loss_fn: Callable[..., Any],
    optimizer: optax.GradientTransformation,
    *,
    error_clip: Rules | None = None,
    watch_values: Watch = None,
    accumulate: int = 1,
    weight: Weight | None = None,
    has_aux: bool = False,
    donate: bool = True,
    wrt: Any = None,
) -> TrainStep:
    """Makes a compiled training step from a loss function and any optax optimizer.

    Example:
      >>> import clipgrad as cg, jax.numpy as jnp, optax
      >>> loss = lambda params, batch: jnp.sum(params["w"] * batch)
      >>> clip = cg.clip_by_global_norm(1.0, stats=True)
      >>> step = cg.train_step(loss, optax.chain(clip, optax.sgd(1.0)))
      >>> state = step.init({"w": jnp.zeros(2)})
      >>> state, metrics = step(state, jnp.array([3.0, 4.0]))
      >>> print(state.params["w"], metrics["grad_norm"], metrics["clipped_norm"])
      [-0.6 -0.8] 5.0 1.0

    Args:
      loss_fn: ``loss_fn(params, batch)``, which returns a scalar or ``(scalar, aux)``. The
        parameters may be a whole Equinox model, whose floating arrays are trained, or a tree with
        flax NNX models.
      optimizer: an optax gradient transformation, such as
        ``optax.chain(clipgrad.clip_by_global_norm(1.0), optax.adam(1e-3))``, or
        ``optax.MultiSteps``. The optimizer gets the extra arguments ``value``, ``grad`` and
        ``value_fn``.
      error_clip: a rule for each name or pattern of values inside ``loss_fn``, as
        ``{"encoder/*": ErrorClipByValue(max=5.0)}``; ``None`` instead of a rule: watch only. With
        ``accumulate=k`` a rule sees the cotangents of one microbatch: if your loss is a mean over
        the batch, make a value limit k times as large.
      watch_values: names and patterns of values inside ``loss_fn`` to measure, such as
        ``["**/attn"]``, or a dictionary from names to an axis to keep, such as ``{"attn": -1}`` for
        statistics of each feature.
      accumulate: the number of microbatches into which the leading axis of the batch is split. PRNG
        keys in the batch need that axis, too: ``jax.random.split(key, examples)``.
      weight: a function of a microbatch that returns the weight, such as the number of tokens,
        ``lambda batch: jnp.sum(batch["mask"])``. Loss, gradients, and the cotangents in
        ``error_clip`` statistics are weighted by this. A microbatch with weight 0 does not count,
        even if its numbers are NaN; if all weights are 0, all count alike. ``None``: all
        microbatches count alike.
      has_aux: whether ``loss_fn`` returns ``(scalar, aux)``.
      donate: whether a step may write the new state into the old state's buffers; you can't use the
        old state afterwards.
      wrt: the variables to train in a flax NNX model, a filter such as ``nnx.LoRAParam``; ``None``:
        every ``nnx.Param``.

    Returns:
      A `TrainStep`: ``state = step.init(params)``, then ``state, metrics = step(state, batch)``.
      ``metrics`` is a dictionary with ``loss``, ``grad_norm`` (the norm of all gradients, before
      any clip) and ``nonfinite`` (the number of gradient elements that are NaN or inf), and

      * with ``stats=True`` on a clip, in any wrapper: ``clips`` (the `ClipStats` of each such clip,
        in the order of the optimizer state), and for the last clip ``measured_norm`` (the L2 norm
        that the clip measured, which differs from ``grad_norm`` with ``where=``, a mask or an
        earlier transformation), ``clipped_norm`` (the norm after the clip) and ``clip_scale``
        (their ratio); with ``stats="per_leaf"`` ``leaves`` (statistics for each leaf by path:
        ``all_zero`` is 1 where the gradient is exactly zero); ``clip``, or ``clip_0``, ``clip_1``,
        ...: threshold, counts and ``leaves`` of each clip;
      * with `skip_spikes`: ``skipped``, ``skipped_consecutive`` and ``nonfinite_consecutive``,
        joined if there are several; and ``skip_spikes`` with all numbers of one, such as the
        ``limit`` for this step;
      * with `watch_updates`: ``updates``, the `UpdateNorms` of each group of leaves;
      * with ``error_clip``: a dictionary ``error_clip`` with `ClipStats` for each name (added up
        over microbatches);
      * with ``watch_values``: a dictionary ``values`` with `ValueStats` for each name (joined over
        microbatches), computed with the parameters before the step;
      * with ``has_aux``: ``aux`` (stacked over microbatches).

    Raises:
      TypeError: if ``loss_fn`` or ``weight`` is not a function, ``optimizer`` not a gradient
        transformation or a clip alone, or ``error_clip`` not a mapping of names to rules; by
        ``step.init``, for PRNG keys outside of an Equinox model.
      ValueError: if ``accumulate`` is not a positive integer, or ``optax.MultiSteps`` is around
        `skip_spikes`, whose average would keep a NaN; when called, if ``accumulate`` does not
        divide the batch, ``weight`` returns more than a number, a name can't be found or reached, a
        step has overwritten the state, or the optimizer's state has places for integer parameters.

    Guarantees:
      * A step is traced once for all batches of one shape, also with schedules.
      * With ``accumulate=k`` gradients are averaged over k microbatches, in float32 or wider, and
        then clipped once. A microbatch has every k-th example, so devices that share the batch
        share each microbatch. With ``weight`` you get gradient and loss for the whole batch, if the
        loss is a mean over the items that the weight counts.
      * If a clip does not run in a step, as in ``optax.MultiSteps`` before the last microbatch or
        in a skipped step, you see the statistics from the last step in which the clip ran.
      * A flax NNX model is trained as by ``nnx.grad`` and ``nnx.Optimizer``. The next state also
        has the model's other state, such as batch statistics, as ``loss_fn`` left it. The model
        that you pass to ``step.init`` does not change. If `skip_spikes` or
        ``optax.apply_if_finite`` skips a step, parameters and other state stay as they were.
      * The loss descends in complex parameters, too: the optimizer gets the conjugate of what
        `jax.grad` returns.
      * Integer and boolean parameters stay as they are. Leaves below flax's
        ``_overwrite_with_gradient`` (scales and histories for 8-bit floats) are overwritten by
        their gradient, as in ``flax.training.TrainState``, and not by the optimizer; with
        ``accumulate`` by the largest gradient among the microbatches.
    """
    _check_arguments(loss_fn, accumulate, weight)
    rules = None if error_clip is None else checked_rules(error_clip, argument="error_clip")
    optimizer = checked_optimizer(optimizer)
    watches = watch_values is not None
    watched = functools.partial(with_value_stats, watch=watch_values, has_aux=has_aux)
    gradients = _gradients(watched(loss_fn) if watches else loss_fn, has_aux or watches, rules)
    if accumulate > 1:
        gradients = accumulated(gradients, accumulate, weight)

    def update(state: TrainState, batch: Any) -> tuple[TrainState, dict[str, Any]]:
        state = from_static(state)
        before = checked_states(state.opt_state)
        if weight is not None and accumulate == 1:  # else it is asked for each microbatch
            jax.eval_shape(functools.partial(weight_of, weight), batch)
        parameters = take_apart(state.params, wrt)
        (loss, aux), grads, stats, after = gradients(parameters, batch)
        aux, values = _apart(aux, has_aux, accumulate) if watches else (aux, {})
        _check_trained(optimizer, parameters.trained, state)
        grads, overwriting = split_overwritten(grads)
        seen = jax.tree.map(_descent, combine(grads, zeros_for(overwriting)))

        def value_fn(trained: Any) -> Any:
            result, _ = parameters.call(loss_fn, trained, parameters.state, batch)
            return result[0] if has_aux else result

        extra = {"value": loss, "grad": seen, "value_fn": value_fn}
        updates, opt_state = optimizer.update(seen, state.opt_state, after.trained, **extra)
        params = optax.apply_updates(after.trained, updates)
        states = found_in(opt_state)
        metrics = step_metrics(loss, grads, states)
        skipped = states.have_skipped(before, updates)
        following = after.with_state_of(parameters, where=skipped)
        params = following.whole(overwrite(params, overwriting, keep=skipped))
        metrics |= {} if error_clip is None else {"error_clip": stats}
        metrics |= ({"values": values} if watches else {}) | ({"aux": aux} if has_aux else {})
        return as_static(TrainState(params, opt_state)), metrics

    compiled = jax.jit(update, donate_argnums=0 if donate else ())
    return TrainStep(compiled, optimizer, wrt)


def _descent(grad: jax.Array) -> jax.Array:
    """The direction of steepest ascent, which optax steps against.

    JAX's derivative by a complex parameter is its conjugate.
    """
    return jnp.conj(grad) if is_complex(grad) else grad


def _check_arguments(loss_fn: Any, accumulate: Any, weight: Any) -> None:
    is_optimizer = isinstance(loss_fn, optax.GradientTransformation)
    if is_optimizer or not callable(loss_fn):
        got = "an optax.GradientTransformation" if is_optimizer else type(loss_fn).__name__
        raise TypeError(
            f"loss_fn: got {got}, expected a function of (params, batch); write "
            "train_step(loss_fn, optimizer)"
        )
    check_takes("loss_fn", loss_fn, "params", "batch")
    if isinstance(accumulate, bool) or not isinstance(accumulate, int) or accumulate < 1:
        raise ValueError(f"accumulate: got {accumulate!r}, expected a positive integer")
    if weight is not None and not callable(weight):
        raise TypeError(
            f"weight: got {described(weight)}, expected a function of a microbatch; write "
            'lambda batch: jnp.sum(batch["mask"]), its number of tokens'
        )


def _check_state(state: Any, batch: Any) -> None:
    """Anything instead of the state is refused, such as the batch."""
    if not all(hasattr(state, field) for field in TrainState._fields):
        is_swapped = isinstance(batch, TrainState)
        advice = "the state comes first" if is_swapped else "it is step.init(params)"
        if isinstance(state, tuple) and any(isinstance(x, TrainState) for x in state):
            advice = "a step returns it with its metrics, state, metrics = step(state, batch)"
        raise TypeError(
            f"state: got {type(state).__name__}, expected the state of a training step; {advice}: "
            "write step(state, batch)"
        )
    if (path := donated_leaf(state)) is not None:
        raise ValueError(
            f"state: got a buffer that another step has overwritten, at state{path}, expected the "
            "state that the last step returned; write state, metrics = step(state, batch), or "
            "train_step(..., donate=False)"
        )


def _apart(aux: Any, has_aux: bool, parts: int) -> tuple[Any, dict[str, ValueStats]]:
    """The auxiliary results of a loss, and the statistics of its values, over microbatches."""
    aux, values = aux if has_aux else (None, aux)
    return aux, {name: s.over(0) for name, s in values.items()} if parts > 1 else values


def _gradients(
    loss_fn: Callable[..., Any], has_aux: bool, rules: dict[str, Any] | None
) -> Gradients:
    """The gradients of a loss, with the statistics of its error clips."""

    def gradients(params: Parameters, batch: Any) -> Any:
        def loss(trained: Any, state: Any, batch: Any) -> Any:
            result, changes = params.call(loss_fn, trained, state, batch)
            value, aux = loss_and_aux("loss_fn", result, has_aux)
            check_scalar("loss_fn", value)
            return value, (aux, changes)

        plain = functools.partial(jax.value_and_grad, has_aux=True)
        run = plain(loss)
        if rules is not None:
            run = with_stats(loss, 0, True, rules, (), lambda _: plain, "train_step")
        (value, (aux, changes)), grads, *stats = run(params.trained, params.state, batch)
        return (value, aux), grads, stats[0] if stats else {}, params.with_changes(changes)

    return gradients


def _check_numbers(params: Any) -> None:
    """Raises `TypeError` for keys of random numbers, by which JAX does not differentiate."""
    for path, leaf in jax.tree_util.tree_flatten_with_path(params, is_leaf=is_model)[0]:
        if is_model(leaf):
            continue  # its keys are state
        if hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jax.dtypes.extended):
            raise TypeError(
                f"params: got a leaf of dtype {leaf.dtype} at {path_string(path)!r}, expected "
                "numbers; pass PRNG keys in the batch, or jax.random.key_data(key)"
            )


def _check_trained(optimizer: Any, trained: Any, state: TrainState) -> None:
    """Raises `ValueError` for an optimizer's state with places for integers, as of momentum."""
    if jax.tree.structure(trained) == jax.tree.structure(state.params):
        return
    expected = jax.tree.structure(jax.eval_shape(optimizer.init, trained))
    if jax.tree.structure(state.opt_state) != expected:
        raise ValueError(
            "state: got an optimizer state of another structure, expected the state of "
            "step.init(params), which leaves out the integers among the parameters, and all but "
            f"the trained variables of an NNX model: {expected}"
        )


def _copied_leaf(leaf: Any) -> Any:
    """A copy that is not weakly typed, so that the second step is not traced anew.

    What lies on devices of this process is copied there, without a program for each shape, unless
    it is weakly typed or JAX traces: a program would be bound to these devices.
    """
    leaf = jnp.asarray(leaf) if hasattr(leaf, "__jax_array__") else leaf
    dtype = jnp.result_type(leaf)
    if not isinstance(leaf, jax.Array):
        return jax.device_put(np.array(leaf, dtype))
    is_key = jnp.issubdtype(dtype, jax.dtypes.extended)  # of random numbers in an Equinox module
    is_here = not isinstance(leaf, Tracer) and not is_tracing() and leaf.is_fully_addressable
    if is_here and (is_key or not leaf.weak_type):
        return jax.device_put(leaf, leaf.sharding if leaf.committed else None, may_alias=False)
    return jnp.copy(leaf) if is_key else jnp.array(leaf, dtype, copy=True)
