"""A training step that is compiled once and says what was clipped."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from clipgrad._compat import exportable
from clipgrad._error_clip import AdaptiveRules, Rules, with_stats
from clipgrad._frameworks import (
    Parameters,
    as_static,
    from_static,
    has_modules,
    is_model,
    take_apart,
)
from clipgrad._gradient_clip import (
    GradientClipState,
    SkipSpikesState,
    as_optimizer,
    asking_for_stats,
    stats_in,
    with_room,
    without_room,
)
from clipgrad._numerics import global_norm
from clipgrad._stats import ClipStats, count_nonfinite
from clipgrad._training.accumulate import Gradients, accumulated
from clipgrad._trees import (
    check_leaves,
    check_scalar,
    check_tree,
    combine,
    donated_leaf,
    instances,
    loss_and_aux,
    overwrite,
    path_string,
    split_overwritten,
    zeros_for,
)
from clipgrad._values import ValueStats, Watch, with_value_stats

StepMetrics = dict[str, Any]


@exportable
class TrainState(NamedTuple):
    """The state of a training step.

    Attributes:
      params: the parameters.
      opt_state: the state of the optimizer.
      error_clip: an `ErrorClipHistory` for each name whose error clip has an adaptive threshold;
        ``None`` if there are none, and before the first step without a batch in ``step.init``.
    """

    params: Any
    opt_state: Any
    error_clip: Any = None


@dataclasses.dataclass(frozen=True)
class TrainStep:
    """A compiled function ``step(state, batch) -> (state, metrics)`` and its first state.

    Attributes:
      update: the compiled function of `jax.jit`, for example for ``update.lower(...)``.
      optimizer: the optimizer.
      wrt: which variables of an NNX model are trained.
    """

    update: Any
    optimizer: optax.GradientTransformation
    histories: Callable[[Any, Any], Any] | None = None
    wrt: Any = None

    def init(self, params: Any, batch: Any = None) -> TrainState:
        """The first state; it has copies, because a step may overwrite the buffers of its state.

        Error clips with an adaptive threshold have a history for each name and scan step, which
        only a batch tells: pass one (its values don't matter) where the structure of the state must
        not change, as in `jax.lax.scan`; else the first step makes the histories.
        """
        check_tree("params", params)
        if not has_modules(params):  # leaves of a module that are not floating arrays stay
            check_leaves("params", params)
            _check_numbers(params)
        params = from_static(jax.tree.map(_copied_leaf, as_static(params)))
        trained = take_apart(params, self.wrt).trained
        opt_state = jax.tree.map(_copied_leaf, self.optimizer.init(trained))
        state = TrainState(params, opt_state)
        return state if batch is None else self._with_histories(state, batch)

    def _with_histories(self, state: TrainState, batch: Any) -> TrainState:
        if self.histories is None or state.error_clip is not None:
            return state
        return state._replace(error_clip=self.histories(state.params, batch))

    def __call__(self, state: TrainState, batch: Any) -> tuple[TrainState, StepMetrics]:
        """One step of training."""
        _check_state(state, batch)
        check_tree("batch", batch)
        state = self._with_histories(state, batch)
        try:
            state, metrics = self.update(as_static(state), batch)
            return from_static(state), metrics
        except (RuntimeError, ValueError) as error:
            if "deleted" not in str(error) or donated_leaf(state) is None:
                raise
            raise ValueError(
                "state: got buffers that another step has overwritten, expected the state that the "
                "last step returned; write state, metrics = step(state, batch), or "
                "train_step(..., donate=False)"
            ) from error


def train_step(
    loss_fn: Callable[..., Any],
    optimizer: optax.GradientTransformation,
    *,
    error_clip: Rules | None = None,
    watch_values: Watch = None,
    accumulate: int = 1,
    has_aux: bool = False,
    donate: bool = True,
    wrt: Any = None,
) -> TrainStep:
    """Makes a compiled training step from a loss function and any optax optimizer.

    Guarantees:
      * It is traced once for all batches of one shape, also with schedules.
      * With ``accumulate=k`` gradients are averaged over k microbatches, in float32 or wider,
        and then clipped once. A microbatch has every k-th example, so the devices that share the
        batch share each microbatch.
      * The state is the optimizer's state. The metrics have the statistics of every gradient clip
        in it, with ``stats=True`` or without, in any wrapper: ``optax.MultiSteps``,
        ``optax.masked``, your own. If a wrapper does not keep the state of the clip, there are no
        statistics, and a warning says so.
      * A clip that does not act in a step, as in ``optax.MultiSteps`` before the last microbatch or
        in a skipped step, has statistics of size 0 there: norm 0, scale 1.
      * A model of flax NNX among the parameters is trained as by ``nnx.grad`` and
        ``nnx.Optimizer``: its ``nnx.Param`` (or ``wrt=``) are differentiated and updated, and its
        other state, such as statistics of batches and counts of random numbers, is in the next
        state as ``loss_fn`` has left it. The model that you pass to ``step.init`` does not change;
        ``state.params`` is the trained one. A step that `skip_spikes` skips leaves both.
      * Integers and booleans among the parameters stay as they are; the optimizer sees ``None`` in
        their places.
      * Leaves below flax's ``_overwrite_with_gradient`` (scales and histories of 8-bit floats) are
        overwritten by their gradient, as in ``flax.training.TrainState``, except in a step that
        `skip_spikes` skips. The optimizer sees zeros in place of these gradients, and with
        ``accumulate`` the largest value of the microbatches counts.

    Args:
      loss_fn: ``loss_fn(params, batch)``, a scalar, or ``(scalar, aux)``. The parameters may be a
        whole Equinox model: its floating arrays are trained, and its other leaves are kept. They
        may be a model of flax NNX, or a tree with such models.
      optimizer: an optax gradient transformation, such as
        ``optax.chain(clipgrad.clip_by_global_norm(1.0), optax.adam(1e-3))``, or
        ``optax.MultiSteps``. It gets the extra arguments ``value``, ``grad`` and ``value_fn``.
      error_clip: a rule for each name of a variable inside ``loss_fn``, a tag, the path of a
        module or a pattern, see `error_clip_by_name`; ``None`` in place of a rule: watch only. With
        ``accumulate=k`` it sees the cotangents of one microbatch. If the loss is a mean over the
        batch, they are k times as large, so make a limit by value k times as large, too.
        ``ClipByNorm(threshold)`` and ``ClipByGlobalNorm(threshold)`` may have an adaptive threshold
        such as ``PercentileThreshold(90)``: the state then has a history of the cotangent's norm
        for each name and scan step, see `adaptive_error_clip`.
      watch_values: names and patterns of values inside ``loss_fn`` to measure, or a dictionary from
        them to an axis that is kept, see `with_value_stats`.
      accumulate: the number of microbatches that the leading axis of the batch is split into.
      has_aux: whether ``loss_fn`` returns ``(scalar, aux)``.
      donate: whether a step may write the new state into the buffers of the old one, which you
        can't use after that.
      wrt: which variables of a model of flax NNX are trained, a filter such as ``nnx.LoRAParam``;
        ``None``: its ``nnx.Param``.

    Returns:
      A `TrainStep`: ``state = step.init(params)``, then ``state, metrics = step(state, batch)``.
      The metrics are a dictionary of ``loss``, ``grad_norm`` (the norm of all gradients, before any
      clip), ``nonfinite`` (the number of gradient elements that are NaN or inf) and ``clips`` (the
      `ClipStats` of each gradient clip in the optimizer, in the order of its state). With exactly
      one clip they have ``measured_norm`` (the L2 norm that the clip measured, which is not
      ``grad_norm`` with ``where=``, a mask or an earlier transformation), ``clipped_norm`` (the
      norm after the clip) and ``clip_scale`` (their ratio); with one clip of ``stats="per_leaf"``
      ``leaves`` (the `ClipStats` of each leaf by path: ``zeros`` is 1 where the gradient is exactly
      zero); with `skip_spikes` ``skipped`` and
      ``nonfinite_consecutive``; with ``error_clip`` a dictionary ``error_clip`` of the `ClipStats`
      of each name (added up over microbatches); with ``watch_values`` a dictionary ``values`` of
      the `ValueStats` of each name (joined over microbatches), of the parameters before the step;
      with ``has_aux`` ``aux`` (stacked over microbatches).

    Raises:
      TypeError: if ``optimizer`` is not a gradient transformation, or ``error_clip`` not a mapping
        of names to rules; by ``step.init``, for PRNG keys among parameters
        that are not in an Equinox model.
      ValueError: if ``accumulate`` is not a positive integer; when called, if it does not divide
        the batch, a name can't be found or reached, a step has overwritten the state, or the
        optimizer's state has places for integer parameters.

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
    _check_arguments(loss_fn, accumulate)
    optimizer = as_optimizer("optimizer", optimizer)
    adaptive, watches = AdaptiveRules.of(error_clip or {}), watch_values is not None
    seen_loss = (
        with_value_stats(loss_fn, watch=watch_values, has_aux=has_aux) if watches else loss_fn
    )

    def gradients_of(rules: Rules | None) -> Gradients:
        gradients = _gradients(seen_loss, has_aux or watches, rules)
        return accumulated(gradients, accumulate) if accumulate > 1 else gradients

    def histories(params: Any, batch: Any) -> Any:
        watched, given = gradients_of(dict.fromkeys(adaptive.rules)), take_apart(params, wrt)
        return adaptive.first(jax.eval_shape(lambda batch: watched(given, batch)[2], batch))

    def update(state: TrainState, batch: Any) -> tuple[TrainState, StepMetrics]:
        state = from_static(state)
        kept = state.error_clip
        gradients = gradients_of(error_clip if kept is None else adaptive.bound(kept))
        given = take_apart(state.params, wrt)
        (loss, aux), grads, stats, after = gradients(given, batch)
        aux, values = _apart(aux, has_aux, accumulate) if watches else (aux, {})
        _check_trained(optimizer, given.trained, state)
        grads, overwriting = split_overwritten(grads)

        seen = combine(grads, zeros_for(overwriting))
        extra = {"value": loss, "grad": seen, "value_fn": _value_fn(loss_fn, has_aux, given, batch)}
        updates, opt_state, clips = _updated(optimizer, seen, after.trained, state.opt_state, extra)
        params = optax.apply_updates(after.trained, updates)
        metrics = {"loss": loss, **_metrics(grads, opt_state, clips)}
        skipped = metrics.get("skipped", False)
        params = after.unless(skipped, given).whole(overwrite(params, overwriting, keep=skipped))
        metrics |= {} if error_clip is None else {"error_clip": stats}
        metrics |= ({"values": values} if watches else {}) | ({"aux": aux} if has_aux else {})
        kept = None if kept is None else adaptive.after(kept, stats, accumulate)
        return as_static(TrainState(params, opt_state, kept)), metrics

    compiled = jax.jit(update, donate_argnums=0 if donate else ())
    return TrainStep(compiled, optimizer, histories if adaptive.are_adaptive else None, wrt)


def _check_arguments(loss_fn: Any, accumulate: Any) -> None:
    if isinstance(loss_fn, optax.GradientTransformation):
        raise TypeError(
            "loss_fn: got an optax.GradientTransformation, expected a function of (params, batch); "
            "write train_step(loss_fn, optimizer)"
        )
    if isinstance(accumulate, bool) or not isinstance(accumulate, int) or accumulate < 1:
        raise ValueError(f"accumulate: got {accumulate!r}, expected a positive integer")


def _check_state(state: Any, batch: Any) -> None:
    """Anything in place of the state is refused, such as the batch."""
    if not all(hasattr(state, field) for field in TrainState._fields):
        is_swapped = isinstance(batch, TrainState)
        advice = "the state comes first" if is_swapped else "it is step.init(params)"
        raise TypeError(
            f"state: got {type(state).__name__}, expected the state of a training step; {advice}: "
            "write step(state, batch)"
        )


def _apart(aux: Any, has_aux: bool, parts: int) -> tuple[Any, dict[str, ValueStats]]:
    """The auxiliary results of a loss, and the statistics of its values, over microbatches."""
    aux, values = aux if has_aux else (None, aux)
    return aux, {name: s.over(0) for name, s in values.items()} if parts > 1 else values


def _value_fn(
    loss_fn: Callable[..., Any], has_aux: bool, given: Parameters, batch: Any
) -> Callable[[Any], Any]:
    """The loss as a function of what is trained, for an optimizer that searches along a line."""

    def value(trained: Any) -> Any:
        with asking_for_stats(""):
            result, _ = given.call(loss_fn, trained, given.state, batch)
        return result[0] if has_aux else result

    return value


def _updated(
    optimizer: optax.GradientTransformation,
    grads: Any,
    params: Any,
    state: Any,
    extra: dict[str, Any],
) -> tuple[Any, Any, tuple[ClipStats, ...]]:
    """The result of an optimizer, and the statistics of all clips in it.

    Inside of this one update every clip has a state with statistics, whatever wraps it.
    """
    wide = state
    # An init that has run on numbers may fail on shapes; then the clips say that there is no place.
    with contextlib.suppress(Exception), asking_for_stats("init"):
        wide = with_room(state, jax.eval_shape(optimizer.init, params))
    with asking_for_stats("update"):
        updates, after = optimizer.update(grads, wide, params, **extra)
    return updates, without_room(after, state), stats_in(after)


def _gradients(loss_fn: Callable[..., Any], has_aux: bool, rules: Rules | None) -> Gradients:
    """The gradients of a loss, with the statistics of its error clips."""

    def gradients(params: Parameters, batch: Any) -> Any:
        def loss(trained: Any, state: Any, batch: Any) -> Any:
            result, changes = params.call(loss_fn, trained, state, batch)
            value, aux = loss_and_aux("loss_fn", result, has_aux)
            check_scalar("loss_fn", value)
            return value, (aux, changes)

        plain = functools.partial(jax.value_and_grad, has_aux=True)
        run = (
            plain(loss) if rules is None else with_stats(loss, 0, True, rules, (), lambda _: plain)
        )
        (value, (aux, changes)), grads, *stats = run(params.trained, params.state, batch)
        return (value, aux), grads, stats[0] if stats else {}, params.after(changes)

    return gradients


def _metrics(grads: Any, opt_state: Any, clips: tuple[ClipStats, ...]) -> StepMetrics:
    skips = instances(opt_state, SkipSpikesState)
    metrics = {
        "grad_norm": global_norm(grads, axis_name=()),
        "nonfinite": count_nonfinite(grads),
        "clips": clips,
    }
    if len(clips) == 1:
        (clip,) = clips
        metrics |= {"measured_norm": clip.norm, "clipped_norm": clip.clipped_norm}
        metrics["clip_scale"] = clip.scale
    by_leaf = [s.leaf_stats for s in instances(opt_state, GradientClipState) if s.leaf_stats]
    if len(by_leaf) == 1:
        metrics["leaves"] = by_leaf[0]
    if skips:
        metrics["skipped"] = jnp.stack([s.skipped for s in skips]).any()
        in_a_row = jnp.stack([s.nonfinite_consecutive for s in skips])
        metrics["nonfinite_consecutive"] = in_a_row.max()
    return metrics


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


def _check_trained(
    optimizer: optax.GradientTransformation, trained: Any, state: TrainState
) -> None:
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
    """A copy that is not weakly typed, so that the second step is not traced anew."""
    if jnp.issubdtype(jnp.asarray(leaf).dtype, jax.dtypes.extended):
        return jnp.copy(leaf)  # keys of random numbers in an Equinox module
    return jnp.array(leaf, dtype=jnp.asarray(leaf).dtype, copy=True)
