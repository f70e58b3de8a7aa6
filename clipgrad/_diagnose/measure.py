"""The cotangents of the variables of a program, measured in one compiled run."""

import math
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Var

from clipgrad._diagnose.probe import SUM_COUNT, Probe, Site, Summary, received, summary
from clipgrad._jaxpr import Widen, dtype_of, evaluate, jit_by_size, on_host
from clipgrad._names import Place
from clipgrad._numerics import at_least_float32
from clipgrad._program import active_variables

LOSS_SCALE = 2.0**15  # the largest loss scale that float16 can hold
# An array of so few elements, at all steps and on all devices, leaves a program as it is, and is
# reduced on the host: to compile a reduction takes longer. A program has some thousands of values.
_SENT_WHOLE = 2**12


class CotangentSite(NamedTuple):
    """A site of a `Probe`, the equations around it, and its variable."""

    site: Site
    around: Place | None
    variable: Var


class Measured(NamedTuple):
    """The measurements of one run of the backward pass."""

    loss: float
    grads: list[Summary]  # of the inputs that are chosen
    sites: dict[Site, Summary]


def measure(
    program: Any,
    inputs: Sequence[Any],
    chosen: Sequence[int],
    sites: Sequence[CotangentSite],
    is_scaled: bool = False,
) -> Measured:
    """Run the backward pass; with `is_scaled` the loss is multiplied by a large number."""
    # A probe of a variable that does not depend on the inputs would give it a cotangent, and
    # differentiate what is behind it: a loop of unknown length, say, which has no derivative.
    active = active_variables(program, chosen)
    # In the order of the program, which is the same in all processes, as addresses are not.
    avals: dict[Site, Any] = {own.site: own.variable.aval for own in sites}
    whole = frozenset(s.site for s in sites if _is_whole(avals[s.site].size, s.around))
    probes = OrderedDict((s.site, _probe_of(s, s.site in whole)) for s in sites)
    silent = [own.site for own in sites if own.variable not in active]
    sent_none = {site: probes.pop(site) for site in silent}

    def loss(given: list, others: list, values: list) -> Any:
        hook = Probe(OrderedDict(zip(probes, values, strict=True)), whole)
        value = evaluate(program, _merged(given, others, chosen), hook)[0]
        return value * jnp.asarray(LOSS_SCALE, value.dtype) if is_scaled else value

    @jit_by_size(program)
    def run(*args: list) -> Any:
        value, (grads, measured) = jax.value_and_grad(loss, argnums=(0, 2))(*args)
        sent = [summary(grad, _is_whole(grad.size)) for grad in grads]
        return value, sent, measured

    given, others = _given_and_others(inputs, chosen)
    value, grads, measured = on_host(run(given, others, list(probes.values())))
    sent = sent_none | dict(zip(probes, measured, strict=True))
    found = {site: received(numbers, site in whole) for site, numbers in sent.items()}
    sizes = [np.size(x) for x in given]
    own = [received(g, _is_whole(size)) for g, size in zip(grads, sizes, strict=True)]
    return Measured(float(value), own, found)


def _given_and_others(inputs: Sequence[Any], chosen: Sequence[int]) -> tuple[list, list]:
    """The inputs that are differentiated, and all others, with None for these."""
    others = [None if i in chosen else x for i, x in enumerate(inputs)]
    return [inputs[i] for i in chosen], others


def _merged(given: Sequence[Any], others: Sequence[Any], chosen: Sequence[int]) -> list:
    own = dict(zip(chosen, given, strict=True))
    return [own.get(i, x) for i, x in enumerate(others)]


def _probe_of(own: CotangentSite, is_whole: bool) -> np.ndarray:
    aval: Any = own.variable.aval
    lengths = tuple(length for _, length in own.around.axes) if own.around else ()
    length = 1 + aval.size if is_whole else SUM_COUNT
    dtype = np.finfo(at_least_float32(dtype_of(own.variable))).dtype
    return np.zeros((*lengths, length), dtype)


def _is_whole(size: int, around: Place | None = None) -> bool:
    """Whether a value of a program in some equations leaves it whole."""
    return size * math.prod(n for _, n in (around.axes if around else ())) <= _SENT_WHOLE


def rows_of_gradients(
    program: Any, inputs: Sequence[Any], chosen: Sequence[int]
) -> list[np.ndarray]:
    """The norm of each row of the gradients, along their first axes."""

    @jit_by_size(program)
    def run(given: list, others: list) -> list:
        loss = lambda given: evaluate(program, _merged(given, others, chosen), Probe(OrderedDict()))  # noqa: E731
        grads = jax.grad(lambda given: loss(given)[0])(given)
        flat = [jnp.abs(g).reshape(*g.shape[:1], -1).astype(jnp.float32) for g in grads]
        return [jnp.linalg.norm(g, axis=-1) for g in flat]

    return on_host(run(*_given_and_others(inputs, chosen)))


def widened_largest(program: Any, inputs: Sequence[Any], chosen: Sequence[int]) -> list[float]:
    """The largest magnitude of each gradient in float32, where the program has half precision."""
    hook = Widen(jnp.float32)
    inputs = [hook.constant(x, None) for x in inputs]

    @jit_by_size(program)
    def run(given: list, others: list) -> list:
        loss = lambda given: evaluate(program, _merged(given, others, chosen), hook)[0]  # noqa: E731
        return [jnp.max(jnp.abs(g), initial=0) for g in jax.grad(loss)(given)]

    return [float(x) for x in on_host(run(*_given_and_others(inputs, chosen)))]


def joined(found: Summary, around: Place | None) -> Summary:
    """The numbers of a site in some equations, the devices of a `shard_map` joined."""
    axes = around.axes if around else ()
    for axis in reversed([i for i, (name, _) in enumerate(axes) if name != "scan"]):
        found = Summary(
            reached=np.max(found.reached, axis),
            nonfinite=np.max(found.nonfinite, axis),
            zeros=np.mean(found.zeros, axis),
            largest=np.max(found.largest, axis),
            norm=np.linalg.norm(np.asarray(found.norm, np.float64), axis=axis),
        )
    return found
