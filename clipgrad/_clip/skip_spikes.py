"""Skipping the steps whose gradient is not finite, or far larger than those before."""

from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from clipgrad._arrays import (
    AxisName,
    Where,
    explain_call,
    global_norm,
    increment_if,
    instances,
    partition,
    selected,
)
from clipgrad._clip.history import HistoryThreshold
from clipgrad._clip.optimizer import as_optimizer
from clipgrad._clip.stats import stats_dtype
from clipgrad._clip.thresholds import Window, check_between, unlimited
from clipgrad._compat import exportable
from clipgrad._frameworks import is_model

# The deviation counts as at least this part of the mean, so that equal norms, as of a full batch,
# don't make an outlier of the next one.
_LEAST_DEVIATION = 0.01


@exportable
class SkipSpikesState(NamedTuple):
    """The state of `skip_spikes`.

    Attributes:
      inner_state: the state of the optimizer after the last step that was not skipped.
      window: the norms of the last steps that were not skipped; ``None`` with ``sigma=None``.
      raw_norm: the norm of the last gradient; 0 if it was not finite.
      skipped: whether the last step was skipped.
      skipped_count: the number of steps that were skipped.
      spike_count: the number of those whose gradient was finite.
      consecutive: the number of skipped outliers since the last step that was not skipped.
      nonfinite_consecutive: the number of gradients in a row, up to the last one, that were not
        finite.
      halted: whether a step has halted the training; ``None`` without ``halt``.
      halted_at: the step that halted it, 0 for the first, or -1; ``None`` without ``halt``.
      count: the number of steps, those after the halt included; ``None`` without ``halt``.
    """

    inner_state: Any
    window: Window | None
    raw_norm: jax.Array
    skipped: jax.Array
    skipped_count: jax.Array
    spike_count: jax.Array
    consecutive: jax.Array
    nonfinite_consecutive: jax.Array
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
) -> optax.GradientTransformationExtraArgs:
    r"""Wraps an optimizer, and skips steps whose gradient is not finite or is an outlier.

    The raw global norm $n$ decides, before any clip in ``inner``. A step is skipped if $n$ is NaN
    or inf, if $n > \mathrm{max\_norm}$, or if it is an outlier: $n > \mu + \mathrm{sigma} \cdot
    \max(s, \mu / 100)$ with mean $\mu$ and deviation $s$ of the last norms, once there are
    ``min_history`` of them. Then the update is zero, and the state of ``inner`` does not change.

    Guarantees:
      * On a step that is not skipped, updates and state are the same as from ``inner``.
      * On a skipped step the updates are exact zeros, and the state of ``inner`` is bit-identical:
        it is selected, not multiplied, since 0 times NaN is NaN. ``inner`` sees zero gradients.
      * Neither the norm of a skipped step nor a norm of 0 enters the history.
      * The structure and the dtypes of the state never change; counters count the skipped steps.
      * A sudden and permanent growth of the gradients, or gradients that stay NaN, stop the
        training: ``consecutive`` and ``nonfinite_consecutive`` in the state show it.
      * With ``halt`` the first bad step is the last one that changes anything: each later update
        is zero too, and only ``count`` in the state changes, until `resume`. The compiled step
        selects this without the host. So a loop that dispatches steps ahead, and donates
        buffers, still has the parameters from before the bad step.

    Args:
      inner: an optax gradient transformation, or ``optax.MultiSteps``, whose average of gradients
        would keep a NaN forever if it were outside. A clip belongs inside, for the steps before
        the history is full:
        ``skip_spikes(optax.chain(clip_by_global_norm(1.0), optax.sgd(0.1)))``.
      max_norm: an absolute limit; ``None``: no limit.
      window: the number of norms in the history; by default 128.
      sigma: the most deviations that a norm may be above the mean. ``None``: no history and no
        outliers; a step is skipped only if its norm is not finite or above ``max_norm``.
      min_history: the number of norms before a finite norm can be an outlier; by default half a
        window, and at least 2.
      where: which leaves make up the norm; see `clip_grads`.
      axis_name: the mapped axes that the updates are spread over; see `global_norm`.
      halt: ``True``: a step whose norm is not finite halts the training; ``"spike"``: each skipped
        step does. With `train_step` or ``update(..., value=loss)`` a loss that is not finite halts
        it too, even if the gradient is finite. `FlightRecorder` saves the bad step. The rest of the
        optimizer belongs inside: a later transformation, such as weight decay, goes on after the
        halt.

    Returns:
      A gradient transformation with the state `SkipSpikesState`, which passes all extra arguments
      of ``update`` on to ``inner``.

    Raises:
      ValueError: for a number out of range, and for ``window`` or ``min_history`` with
        ``sigma=None``; for an unknown ``halt``; by ``init``, if ``where`` selects nothing.
      TypeError: if ``inner`` is not a gradient transformation, or for another type of number.

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

    References:
      The OLMo Team, 2 OLMo 2 Furious, 2024, https://arxiv.org/abs/2501.00656: updates are
      skipped on outliers of the norm.
    """
    inner = as_optimizer("inner", inner)
    history = _history(window, sigma, min_history)
    _check_halt(halt)
    if max_norm is not None:
        check_between("max_norm", max_norm, 0)
    largest = jnp.inf if max_norm is None else float(max_norm)

    def init(params: Any) -> Any:
        norm = jnp.zeros((), stats_dtype(partition(params, selected(where, params))[0]))
        *counters, count = [jnp.zeros((), jnp.int32) for _ in range(5)]
        norms = None if history is None else history.init(norm)
        state = SkipSpikesState(inner.init(params), norms, norm, jnp.zeros((), bool), *counters)
        flag = {"halted": jnp.zeros((), bool), "halted_at": count - 1, "count": count}
        return state._replace(**flag) if halt else state

    def update(updates: Any, state: Any, params: Any = None, **extra_args: Any) -> tuple[Any, Any]:
        measured, _ = partition(updates, selected(where, updates))
        norm = global_norm(measured, axis_name=axis_name).astype(state.raw_norm.dtype)
        nonfinite, unsound = ~jnp.isfinite(norm), _bad_loss(halt, extra_args)
        never = nonfinite | unsound | (norm > largest)
        spike = ~never & (norm > _limit(history, state))
        skip = never | spike | _halted(halt, state)
        new, inner_state = inner.update(
            _zero_if(skip, updates), state.inner_state, params, **extra_args
        )
        kept = jax.tree.map(lambda o, n: jnp.where(skip, o, n), state.inner_state, inner_state)
        after = _after(state, norm, never | spike, spike)
        if halt:
            bad = never | spike if halt == "spike" else unsound | nonfinite
            after = _after_halt(state, after, bad)
        return _zero_if(skip, new), after._replace(inner_state=kept)

    return optax.GradientTransformationExtraArgs(init, update)


def _history(
    window: int | None, sigma: float | None, min_history: int | None
) -> HistoryThreshold | None:
    """The rule of outliers; ``None`` with ``sigma=None``, where nothing else may be given."""
    if sigma is not None:
        return HistoryThreshold(128 if window is None else window, sigma, min_history)
    for name, value in {"window": window, "min_history": min_history}.items():
        if value is not None:
            raise ValueError(
                f"{name}: got {value!r} with sigma=None, expected a number as sigma, because "
                f"{name} needs a history; or leave {name} out"
            )
    return None


def _limit(history: HistoryThreshold | None, state: SkipSpikesState) -> jax.Array:
    """The norm above which a step is an outlier."""
    if history is None:
        return unlimited(state.raw_norm)
    if state.window is None:
        raise ValueError(
            f"state: got a state without the history that sigma={history.sigma} needs, expected "
            "the state of init(params)"
        )
    return history.limit(state.window, _LEAST_DEVIATION)


def _after(
    state: SkipSpikesState, norm: jax.Array, skip: jax.Array, spike: jax.Array
) -> SkipSpikesState:
    """The state with the counters and the history after a step."""
    finite, window = jnp.isfinite(norm), state.window
    longer = optax.safe_increment(state.nonfinite_consecutive)
    return state._replace(
        window=None if window is None else window.push(jnp.where(skip, 0, norm)),
        raw_norm=jnp.where(finite, norm, 0),
        skipped=skip,
        skipped_count=increment_if(skip, state.skipped_count),
        spike_count=increment_if(skip & finite, state.spike_count),
        consecutive=jnp.where(skip, increment_if(spike, state.consecutive), 0),
        nonfinite_consecutive=jnp.where(finite, 0, longer),
    )


def _check_halt(halt: Any) -> None:
    if not (isinstance(halt, bool) or isinstance(halt, str) and halt == "spike"):
        raise ValueError(
            f'halt: got {halt!r}, expected True (a gradient that is not finite), "spike" (each '
            "skipped step) or False"
        )


def _halted(halt: bool | str, state: SkipSpikesState) -> Any:
    """Whether an earlier step has halted the training."""
    if halt and state.halted is None:
        raise ValueError(
            f"state: got a state without the flag that halt={halt!r} needs, expected the state "
            "of init(params)"
        )
    return state.halted if halt else False


def _bad_loss(halt: bool | str, extra_args: dict[str, Any]) -> Any:
    """Whether the loss, if `update` got it, is not finite; its gradient may be."""
    value = extra_args.get("value") if halt else None
    return jnp.array(False) if value is None else jnp.any(~jnp.isfinite(value))


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

    Only the flag changes, neither the parameters, which are those from before the bad step, nor the
    counters. It works under `jax.jit`, and on a state that is not halted.

    Args:
      tree: the state of the optimizer, or any tree with it, such as a ``TrainState``.

    Returns:
      The same tree, whose next step is an ordinary one.

    Raises:
      ValueError: if there is no state of ``skip_spikes(halt=...)`` in ``tree``.

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
    """
    found = []

    def resumed(node: Any) -> Any:
        if not isinstance(node, SkipSpikesState):
            return node
        node = node._replace(inner_state=walk(node.inner_state))
        if node.halted is None:
            return node
        found.append(node)
        off = jax.tree.map(jnp.zeros_like, node.halted)
        none = jax.tree.map(lambda count: jnp.full_like(count, -1), node.halted_at)
        return node._replace(halted=off, halted_at=none)

    def is_leaf(x: Any) -> bool:
        # A model stays the object that it is: its copy has a shared variable several times.
        return isinstance(x, SkipSpikesState) or is_model(x) and not instances(x, SkipSpikesState)

    def walk(part: Any) -> Any:
        return jax.tree.map(resumed, part, is_leaf=is_leaf)

    result = walk(tree)
    if not found:
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
