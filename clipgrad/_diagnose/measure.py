"""The cotangents of the variables of a program, measured in one compiled run."""

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from clipgrad._diagnose.probe import Probe, Site, Summary, is_sent_whole, received, summary
from clipgrad._names import active_variables
from clipgrad._programs import SCANS, Widen, evaluate, jit_by_size, on_host

# From the largest that float16 can hold: a smaller one where this makes the gradient NaN or inf.
LOSS_SCALES = (2.0**15, 2.0**9, 2.0**4)


class Measured(NamedTuple):
    """The measurements of one run of the backward pass."""

    loss: float
    grads: list[Summary]  # of the inputs that are chosen
    sites: dict[Site, Summary]


def measure(
    program: Any,
    inputs: Sequence[Any],
    chosen: Sequence[int],
    sites: Sequence[Site],
    scale: float | None = None,
) -> Measured:
    """Run the backward pass, of the loss or of a multiple of it."""
    # A probe of a variable that does not depend on the inputs would give it a cotangent, and
    # differentiate what is behind it: a loop of unknown length, say, which has no derivative.
    active = active_variables(program, chosen)
    # In the order of the program, which is the same in all processes, as addresses are not.
    probes = OrderedDict((site, site.probe) for site in sites)
    sent_none = {site: probes.pop(site) for site in list(probes) if site.variable not in active}

    def loss(moved: list, others: list, values: list) -> Any:
        hook = Probe(OrderedDict(zip(probes, values, strict=True)))
        value = evaluate(program, _merged(moved, others, chosen), hook)[0]
        return value if scale is None else value * jnp.asarray(scale, value.dtype)

    @jit_by_size(program)
    def run(*args: list) -> Any:
        value, (grads, measured) = jax.value_and_grad(loss, argnums=(0, 2))(*args)
        sent = [summary(grad, is_sent_whole(grad)) for grad in grads]
        return value, sent, measured

    moved, others = _moved_and_others(inputs, chosen)
    value, grads, measured = on_host(run(moved, others, list(probes.values())))
    sent = sent_none | dict(zip(probes, measured, strict=True))
    at_sites = {site: received(numbers, site.is_whole) for site, numbers in sent.items()}
    of_inputs = [received(g, is_sent_whole(x)) for g, x in zip(grads, moved, strict=True)]
    return Measured(float(value), of_inputs, at_sites)


def _moved_and_others(inputs: Sequence[Any], chosen: Sequence[int]) -> tuple[list, list]:
    """The inputs that are differentiated, and all others, with None for these."""
    others = [None if i in chosen else x for i, x in enumerate(inputs)]
    return [inputs[i] for i in chosen], others


def _merged(moved: Sequence[Any], others: Sequence[Any], chosen: Sequence[int]) -> list:
    by_number = dict(zip(chosen, moved, strict=True))
    return [by_number.get(i, x) for i, x in enumerate(others)]


def widened_largest(program: Any, inputs: Sequence[Any], chosen: Sequence[int]) -> list[float]:
    """The largest magnitude of each gradient in float32, where the program has half precision."""
    hook = Widen(jnp.float32)
    inputs = [hook.constant(x, None) for x in inputs]

    @jit_by_size(program)
    def run(moved: list, others: list) -> list:
        loss = lambda moved: evaluate(program, _merged(moved, others, chosen), hook)[0]  # noqa: E731
        return [jnp.max(jnp.abs(g), initial=0) for g in jax.grad(loss)(moved)]

    return [float(x) for x in on_host(run(*_moved_and_others(inputs, chosen)))]


def over_devices(numbers: Summary, axes: Sequence[tuple[str, int]]) -> Summary:
    """The numbers of a site, the devices of the `shard_map`s around it joined."""
    for axis in reversed([i for i, (name, _) in enumerate(axes) if name != SCANS.noun]):
        numbers = Summary(
            reached=np.max(numbers.reached, axis),
            nonfinite=np.max(numbers.nonfinite, axis),
            zeros=np.mean(numbers.zeros, axis),
            largest=np.max(numbers.largest, axis),
            norm=np.linalg.norm(np.asarray(numbers.norm, np.float64), axis=axis),
        )
    return numbers
