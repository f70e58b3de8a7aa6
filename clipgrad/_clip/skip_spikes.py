"""Skipping the steps whose gradient is not finite, or far larger than those before."""

from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from clipgrad._arrays import (
    AxisName,
    Where,
    answers_lookups,
    clippable_leaves,
    clippable_paths,
    described,
    explain_call,
    global_norm,
    increment_if,
    instances,
    partition,
    selected,
    total_over_devices,
)
from clipgrad._clip.optimizer import Wrapper, as_optimizer
from clipgrad._clip.spike_limit import Judged, SpikeLimit
from clipgrad._clip.stats import stats_dtype
from clipgrad._clip.thresholds import Window, unlimited
from clipgrad._compat import exportable
from clipgrad._flax import is_model


@exportable
@answers_lookups("state")
class SkipSpikesState(NamedTuple):
    """The state of `skip_spikes`.

    Attributes:
      inner_state: the optimizer state after the last step that was not skipped.
      window: the norms (with ``judge="loss"`` the losses) from the last steps that were not
        skipped; ``None`` with ``sigma=None``.
      raw_norm: the last gradient's norm, before any clip; may be NaN or inf.
      limit: the last step's limit; the largest finite number if there was none.
      skipped: whether the last step was skipped.
      skipped_count: the number of skipped steps.
      spike_count: the number of skipped steps in which all numbers were finite.
      skipped_consecutive: the number of skipped steps in a row, up to the last one, whatever the
        reason.
      nonfinite_consecutive: the number of steps in a row, up to the last one, whose gradient,
        update or loss (as far as it is judged) was not finite.
      judged: with ``judge="update"`` the norm of the last update, with ``"loss"`` the loss, which
        was compared with ``limit``; ``None`` with ``"gradient"``, where it is ``raw_norm``.
      nonfinite_leaves: for each leaf, by path, whether the optimizer turned the last, finite
        gradient into an update that is not finite; ``None`` without ``halt``.
      halted: whether a step has halted the training; ``None`` without ``halt``.
      halted_at: the step that halted the training, 0 for the first, or -1; ``None`` without
        ``halt``.
      count: the number of steps, steps after the halt included; ``None`` without ``halt``.
    """

    inner_state: Any
    window: Window | None
    raw_norm: jax.Array
    limit: jax.Array
    skipped: jax.Array
    skipped_count: jax.Array
    spike_count: jax.Array
    skipped_consecutive: jax.Array
    nonfinite_consecutive: jax.Array
    judged: jax.Array | None = None
    nonfinite_leaves: dict[str, jax.Array] | None = None
    halted: jax.Array | None = None
    halted_at: jax.Array | None = None
    count: jax.Array | None = None  # pyright: ignore[reportIncompatibleMethodOverride]

    def __getattr__(self, name: str) -> Any:
        """A field of the state of ``optax.MultiSteps`` inside, which trainers look for here."""
        inner = self[0]
        if isinstance(inner, optax.MultiStepsState) and name in inner._fields:
            return getattr(inner, name)
        raise AttributeError(f"SkipSpikesState has no attribute {name!r}")


@explain_call(
    max_consecutive_errors="a step that is not finite is always skipped; write halt=True to stop",
    patience="a step that is not finite is always skipped; write halt=True to stop",
)
def skip_spikes(
    inner: optax.GradientTransformation | optax.MultiSteps,
    *,
    max_norm: float | None = None,
    window: int | None = None,
    sigma: float | None = 6.0,
    min_history: int | None = None,
    where: Where = None,
    axis_name: AxisName = None,
    halt: bool | Literal["spike"] = False,
    judge: Judged = "gradient",
) -> optax.GradientTransformationExtraArgs:
    r"""Wraps an optimizer, and skips steps that are not finite or whose gradient is an outlier.

    Example:
      >>> import clipgrad as cg, jax.numpy as jnp, optax
      >>> tx = cg.skip_spikes(optax.sgd(1.0), max_norm=10.0)
      >>> state = tx.init(jnp.zeros(2))
      >>> for grads in (jnp.array([3.0, 4.0]), jnp.array([jnp.nan, 1.0]), jnp.array([30.0, 40.0])):
      ...     updates, state = tx.update(grads, state)
      ...     print(updates, state.skipped)
      [-3. -4.] False
      [0. 0.] True
      [0. 0.] True

    Args:
      inner: an optax gradient transformation, or ``optax.MultiSteps`` (never put
        ``optax.MultiSteps`` outside: the averaged gradient would keep a NaN forever). Put a clip
        inside, for the steps before the history is full:
        ``skip_spikes(optax.chain(clip_by_global_norm(1.0), optax.sgd(0.1)))``.
      max_norm: an absolute limit for the judged norm or loss; ``None``: no limit.
      window: the number of norms in the history; by default 128.
      sigma: how many deviations a norm may be above the mean. ``None``: no history and no outliers;
        a step is skipped only if the norm is not finite or above ``max_norm``.
      min_history: the number of norms before a finite norm can be an outlier; by default half a
        window, and at least 2.
      where: the leaves to measure: path patterns such as ``"kernel"`` or ``"!head"``, a tree of
        booleans, or a function from the tree to such a tree; ``None``: all.
      axis_name: the name or names of the `jax.shard_map`, `jax.pmap` or `jax.vmap` axes over which
        the updates are spread, so that norms cover all devices. ``jax.P("x")`` says that every leaf
        is spread, even if JAX does not know this. You do not need this under `jax.jit`.
      halt: ``True``: if a gradient or update is not finite, the training halts before the
        parameters change. ``"spike"``: the training halts at any skipped step. With `train_step` or
        ``update(..., value=loss)`` a loss that is not finite halts the training, too, even if the
        gradient is finite. `FlightRecorder` saves the bad step. Put the whole optimizer inside: a
        transformation outside, such as weight decay, goes on after the halt.
      judge: the number to compare with ``max_norm`` and the history: the norm of the
        ``"gradient"``; the norm of the ``"update"``, which may grow before you see anything in the
        loss; or the ``"loss"``, which `train_step` passes, or you by ``update(..., value=loss)``.
        With ``"loss"`` a step whose loss is not finite is skipped even without ``halt``.

    Returns:
      A gradient transformation with the state `SkipSpikesState`. Extra arguments of ``update`` are
      passed on to ``inner``.

    Raises:
      ValueError: for a number out of range, and for ``window`` or ``min_history`` with
        ``sigma=None``; for an unknown ``halt`` or ``judge``; by ``init``, if ``where`` selects
        nothing; by ``update``, without the loss that ``judge="loss"`` needs.
      TypeError: if ``inner`` is not a gradient transformation, or for another type of number.

    The raw global norm $n$ decides, before any clip in ``inner``. A step is skipped if $n$ is NaN
    or inf, if $n > \mathrm{max\_norm}$, or if $n$ is an outlier:
    $n > \mu + \mathrm{sigma} \cdot \max(s, \mu / 100)$ with mean $\mu$ and deviation $s$ of the
    last norms, once there are ``min_history`` norms. A step is skipped, too, if ``inner`` turns a
    finite gradient into an update that is not finite. In a skipped step the update is zero, and the
    state of ``inner`` does not change. With ``judge="update"`` $n$ is the norm of the update from
    ``inner``, and with ``judge="loss"`` the loss.

    Guarantees:
      * In all other steps, updates and state are the same as from ``inner``.
      * In a skipped step the updates are exact zeros, and the state of ``inner`` is bit-identical
        (selected, not multiplied, since 0 times NaN is NaN). If the gradient or the loss is the
        reason, ``inner`` sees zero gradients.
      * Norms from skipped steps, and norms of 0, do not enter the history.
      * Structure and dtypes of the state never change; counters count the skipped steps.
      * If gradients grow suddenly and stay large, or stay NaN, every further step is skipped: you
        see this in ``skipped_consecutive`` and ``nonfinite_consecutive`` in the state.
      * With ``halt``, after the first bad step each update is zero and only ``count`` in the state
        changes, until you call `resume`. The compiled step does this without the host. So even if
        your loop dispatches steps ahead and donates buffers, you still have the parameters from
        before the bad step.

    References:
      The OLMo Team, 2 OLMo 2 Furious, 2024, https://arxiv.org/abs/2501.00656: updates are
      skipped on outliers of the norm.
    """
    optimizer = as_optimizer("inner", inner)
    spike_limit = SpikeLimit.of(judge, max_norm, window, sigma, min_history)
    _check_halt(halt)

    def norm_of(tree: Any, state: SkipSpikesState) -> jax.Array:
        measured, _ = partition(tree, selected(where, tree))
        return global_norm(measured, axis_name=axis_name).astype(state.raw_norm.dtype)

    def init(params: Any) -> Any:
        norm = jnp.zeros((), stats_dtype(partition(params, selected(where, params))[0]))
        return _first_state(optimizer.init(params), norm, spike_limit, params if halt else None)

    def update(updates: Any, state: Any, params: Any = None, **extra_args: Any) -> tuple[Any, Any]:
        _check_is_state(state)
        halted, norm = _halted(halt, state), norm_of(updates, state)
        limit = spike_limit.limit(state.window, norm)
        loss = spike_limit.loss_in(extra_args, norm)
        # A step is bad for one of two reasons: before the optimizer has seen it, or after that.
        unsound = ~jnp.isfinite(norm) | _bad_loss(halt or judge == "loss", extra_args)
        number = {"gradient": norm, "loss": loss}.get(judge, jnp.zeros_like(norm))
        is_bad = unsound | (number > limit)
        shown = _zero_if(is_bad | halted, updates)
        new, inner_state = optimizer.update(shown, state.inner_state, params, **extra_args)
        leaves = _nonfinite_leaves(new, axis_name) if halt else None
        made = ~is_bad & _any_nonfinite(new, leaves, axis_name)  # by the optimizer
        if judge == "update":  # of zeros, if that is what was shown
            number = jnp.where(is_bad, jnp.nan, norm_of(new, state))
        skip, nonfinite = is_bad | made | (number > limit), unsound | made
        after = _after(state, spike_limit, number, skip, nonfinite)._replace(
            raw_norm=norm, limit=limit, judged=None if state.judged is None else number
        )
        if halt:
            after = after._replace(nonfinite_leaves=_leaf_flags(state, leaves, made))
            after = _after_halt(state, after, skip if halt == "spike" else nonfinite)
        kept = _selected(skip | halted, state.inner_state, inner_state)
        return _zero_if(skip | halted, new), after._replace(inner_state=kept)

    return Wrapper.of(inner, init, update)


def _check_is_state(state: Any) -> None:
    if not hasattr(state, "raw_norm"):  # the parameters, say
        raise ValueError(
            f"state: got {described(state)}, expected the SkipSpikesState of init(params); write "
            "update(grads, state, params)"
        )


def _first_state(
    inner_state: Any, norm: jax.Array, spike_limit: SpikeLimit, params: Any
) -> SkipSpikesState:
    """The state before the first step, with a flag of the halt and of each leaf of ``params``."""

    def off() -> jax.Array:  # a buffer of its own, so that the state can be donated
        return jnp.zeros((), bool)

    def zero() -> jax.Array:
        return jnp.zeros((), jnp.int32)

    state = SkipSpikesState(
        inner_state=inner_state,
        window=spike_limit.init(norm),
        raw_norm=norm,
        limit=unlimited(norm),
        skipped=off(),
        skipped_count=zero(),
        spike_count=zero(),
        skipped_consecutive=zero(),
        nonfinite_consecutive=zero(),
        judged=None if spike_limit.judge == "gradient" else jnp.zeros_like(norm),
    )
    if params is None:
        return state
    leaves = {path: off() for path in clippable_paths(params)}
    flag = {"halted": off(), "halted_at": zero() - 1, "count": zero()}
    return state._replace(nonfinite_leaves=leaves, **flag)


def _after(
    state: SkipSpikesState,
    spike_limit: SpikeLimit,
    number: jax.Array,
    skip: jax.Array,
    nonfinite: jax.Array,
) -> SkipSpikesState:
    """The state with the counters and the history after a step."""

    def longer(count: jax.Array, condition: jax.Array) -> jax.Array:
        return jnp.where(condition, optax.safe_increment(count), 0)

    return state._replace(
        window=spike_limit.pushed(state.window, number, skip),
        skipped=skip,
        skipped_count=increment_if(skip, state.skipped_count),
        spike_count=increment_if(skip & ~nonfinite, state.spike_count),
        skipped_consecutive=longer(state.skipped_consecutive, skip),
        nonfinite_consecutive=longer(state.nonfinite_consecutive, nonfinite),
    )


def _nonfinite_leaves(tree: Any, axis_name: AxisName) -> list[jax.Array]:
    """For each leaf that is a number, how many elements are NaN or inf."""
    return [
        total_over_devices([_count_nonfinite(x)], [x], axis_name) for x in clippable_leaves(tree)
    ]


def _any_nonfinite(tree: Any, leaves: list[jax.Array] | None, axis_name: AxisName) -> jax.Array:
    """Whether an update has NaN or inf; ``leaves`` is what is known of its leaves."""
    if leaves is not None:
        return sum(leaves, jnp.zeros((), jnp.float32)) > 0
    arrays = clippable_leaves(tree)
    return total_over_devices(list(map(_count_nonfinite, arrays)), arrays, axis_name) > 0


def _count_nonfinite(leaf: jax.Array) -> jax.Array:
    return jnp.sum(~jnp.isfinite(leaf), dtype=jnp.float32)


def _leaf_flags(
    state: SkipSpikesState, leaves: list[jax.Array] | None, made: jax.Array
) -> dict[str, jax.Array]:
    """The flags of the leaves whose update the optimizer has made NaN or inf, by path."""
    paths = state.nonfinite_leaves
    if paths is None or leaves is None or len(paths) != len(leaves):
        raise ValueError(
            f"updates: got {len(leaves or ())} leaves, but the state has {len(paths or ())}; "
            "expected the state of init(params) for the same parameters"
        )
    return {path: made & (count > 0) for path, count in zip(paths, leaves, strict=True)}


def _check_halt(halt: Any) -> None:
    if not (isinstance(halt, bool) or isinstance(halt, str) and halt == "spike"):
        raise ValueError(
            f'halt: got {halt!r}, expected True (what is not finite), "spike" (each skipped step) '
            "or False"
        )


def _halted(halt: bool | str, state: SkipSpikesState) -> Any:
    """Whether an earlier step has halted the training."""
    if halt and state.halted is None:
        raise ValueError(
            f"state: got a state without the flag that halt={halt!r} needs, expected the state "
            "of init(params)"
        )
    return state.halted if halt else False


def _bad_loss(counts: bool | str, extra_args: dict[str, Any]) -> Any:
    """Whether the loss, if `update` got it and it counts, is not finite; its gradient may be."""
    value = extra_args.get("value") if counts else None
    return jnp.array(False) if value is None else jnp.any(~jnp.isfinite(value))


def _selected(condition: jax.Array, yes: Any, no: Any) -> Any:
    return jax.tree.map(lambda y, n: jnp.where(condition, y, n), yes, no)


def _after_halt(state: Any, after: SkipSpikesState, bad: jax.Array) -> SkipSpikesState:
    """The state after a step: once it is halted, nothing in it but the count changes."""
    halting = bad & ~state.halted
    after = after._replace(halted_at=jnp.where(halting, state.count, state.halted_at))
    fields = {name: x for name, x in after._asdict().items() if name != "inner_state"}
    before = {name: getattr(state, name) for name in fields}
    kept = jax.tree.map(lambda new, old: jnp.where(state.halted, old, new), fields, before)
    kept |= {"halted": state.halted | bad, "count": optax.safe_increment(state.count)}
    return after._replace(**kept)


@explain_call()
def resume(tree: Any) -> Any:
    """Lets a training continue after ``skip_spikes(halt=...)`` halted it.

    Only the flag changes; the parameters stay as before the bad step, and so do the counters. You
    can call `resume` under `jax.jit`, and on a state that is not halted.

    Example:
      >>> import clipgrad as cg, jax.numpy as jnp, optax
      >>> tx = cg.skip_spikes(optax.sgd(1.0), halt=True)
      >>> state = tx.init(jnp.zeros(2))
      >>> for grads in (jnp.array([jnp.nan, 1.0]), jnp.array([3.0, 4.0])):
      ...     updates, state = tx.update(grads, state)
      ...     print(updates, state.halted, state.halted_at)
      [0. 0.] True 0
      [0. 0.] True 0
      >>> print(tx.update(jnp.array([3.0, 4.0]), cg.resume(state))[0])
      [-3. -4.]

    Args:
      tree: the optimizer state, or any tree that contains it, such as a ``TrainState``.

    Returns:
      The same tree; the next step is an ordinary one.

    Raises:
      ValueError: if there is no state of ``skip_spikes(halt=...)`` in ``tree``.
    """
    halting = []

    def resumed(node: Any) -> Any:
        if not isinstance(node, SkipSpikesState):
            return node
        node = node._replace(inner_state=walk(node.inner_state))
        if node.halted is None:
            return node
        halting.append(node)
        off = jax.tree.map(jnp.zeros_like, node.halted)
        none = jax.tree.map(lambda count: jnp.full_like(count, -1), node.halted_at)
        return node._replace(halted=off, halted_at=none)

    def is_leaf(x: Any) -> bool:
        # A model stays the object that it is: its copy has a shared variable several times.
        return isinstance(x, SkipSpikesState) or is_model(x) and not instances(x, SkipSpikesState)

    def walk(part: Any) -> Any:
        return jax.tree.map(resumed, part, is_leaf=is_leaf)

    result = walk(tree)
    if not halting:
        raise ValueError(
            f"tree: got {type(tree).__name__} without a state of skip_spikes(halt=...), expected "
            "the state of clipgrad.skip_spikes(optimizer, halt=True)"
        )
    return result


def _zero_if(condition: jax.Array, tree: Any) -> Any:
    def zero(leaf: Any) -> Any:
        dtype = getattr(leaf, "dtype", type(leaf))
        if not (dtype in (int, float, complex) or jnp.issubdtype(dtype, jnp.number)):
            return leaf
        return jnp.where(condition, jnp.zeros_like(leaf), leaf)

    return jax.tree.map(zero, tree)
