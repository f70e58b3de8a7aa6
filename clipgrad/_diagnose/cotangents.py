"""The cotangents of the variables of a program, measured in one compiled run.

Where one is not finite, a second run counts its elements that are not.
"""

import functools
import math
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal, Var

import clipgrad._jaxpr as _jaxpr
from clipgrad._compat import on_every_device
from clipgrad._diagnose.blocks import Block
from clipgrad._diagnose.probe import RESULT, Probe, Site, is_sent_whole
from clipgrad._jaxpr import dtype_of, on_host
from clipgrad._names import Place
from clipgrad._numerics import at_least_float32, real_or_absolute
from clipgrad._program import active_variables

LOSS_SCALE = 2.0**15  # the largest loss scale that float16 can hold


class CotangentSite(NamedTuple):
    """A site of a `Probe`, the equations around it, and its variable."""

    site: Site
    around: Place | None
    variable: Var


class Summary(NamedTuple):
    """Numbers of a cotangent; with leading axes for the scans and `shard_map`s around it."""

    reached: Any  # 1 if there is a cotangent at all
    nonfinite: Any  # how many elements are NaN or inf; NaN if they are not counted
    zeros: Any  # the share of zeros
    largest: Any  # the largest magnitude that is finite
    norm: Any  # of the finite elements


Measured = dict[Site, Summary]


def parts_of_arguments(block: Block, chosen: Sequence[int]) -> list[list[CotangentSite]]:
    """For each chosen input its slices, such as ``w[i]``, if it is read in no other way."""
    slices: dict[int, list[CotangentSite]] = {}
    whole: set[int] = set()
    for inner, equation in block.operations():
        is_in_loop = inner.parent is not None and inner.parent.axes
        for position, variable in enumerate(equation.invars):
            found = inner.origin(variable)
            argument = -1 if type(found) is Literal else block.positions.get(found, -1)
            if equation.primitive.name == "slice" and position == 0 and not is_in_loop:
                site = Site(RESULT, inner.place(equation).key, 0)
                own = CotangentSite(site, inner.parent, equation.outvars[0])
                slices.setdefault(argument, []).append(own)
            else:
                whole.add(argument)
    return [[] if i in whole else slices.get(i, []) for i in chosen]


def measure(
    program: Any,
    inputs: Sequence[Any],
    chosen: Sequence[int],
    sites: list[CotangentSite],
    *,
    wide: bool = False,
    is_scaled: bool = False,
) -> tuple[float, list[Summary], Measured]:
    """Run the backward pass: the loss, the gradients of the chosen inputs, and the sites.

    With `wide` in float32 where it is in half precision; with `is_scaled` the loss is multiplied by
    a large number.
    """
    base = _jaxpr.Widen(jnp.float32) if wide else None
    inputs = [base.constant(x, None) for x in inputs] if base else inputs
    run = functools.partial(_measured, program, inputs, chosen, base=base, is_scaled=is_scaled)
    loss, grads, found = run(sites)
    uncounted = [own for own in sites if np.isnan(found[own.site].nonfinite).any()]
    if uncounted or any(np.isnan(grad.nonfinite) for grad in grads):
        _, grads, counted = run(uncounted, is_counted=True)
        found |= counted
    return loss, grads, found


def _measured(
    program: Any,
    inputs: Sequence[Any],
    chosen: Sequence[int],
    sites: list[CotangentSite],
    *,
    base: _jaxpr.Hook | None,
    is_scaled: bool,
    is_counted: bool = False,
) -> tuple[float, list[Summary], Measured]:
    """Run the backward pass once."""
    # A probe of a variable that does not depend on the inputs would give it a cotangent, and
    # differentiate what is behind it: a loop of unknown length, say, which has no derivative.
    active = active_variables(program, chosen)
    # In the order of the program, which is the same in all processes, as addresses are not.
    probes = OrderedDict((own.site, _probe_of(own, is_counted)) for own in sites)
    silent = {s.site: _received(probes.pop(s.site)) for s in sites if s.variable not in active}

    def loss(given: list, others: list, values: list) -> Any:
        left = iter(given)
        all_inputs = [next(left) if i in chosen else x for i, x in enumerate(others)]
        own = OrderedDict(zip(probes, values, strict=True))
        hook = Probe(own, lambda x, probe: _sent(x, probe.whole is not None, is_counted), base)
        value = _jaxpr.evaluate(program, [hook.constant(x, None) for x in all_inputs], hook)[0]
        return value * jnp.asarray(LOSS_SCALE, value.dtype) if is_scaled else value

    @_jaxpr.jit_for_one_call(program)
    def run(*args: list) -> Any:
        value, (grads, measured) = jax.value_and_grad(loss, argnums=(0, 2))(*args)
        sent = [_sent(grad, is_sent_whole(grad.size, None), is_counted) for grad in grads]
        return value, sent, measured

    others = [None if i in chosen else x for i, x in enumerate(inputs)]
    given = [inputs[i] for i in chosen]
    value, grads, measured = on_host(run(given, others, list(probes.values())))
    found = {site: _received(numbers) for site, numbers in zip(probes, measured, strict=True)}
    return float(value), [_received(grad) for grad in grads], silent | found


def joined(summary: Summary, around: Place | None) -> Summary:
    """The numbers of a site in some equations, the devices of a `shard_map` joined."""
    axes = around.axes if around else ()
    for axis in reversed([i for i, (name, _) in enumerate(axes) if name != "scan"]):
        summary = Summary(
            reached=np.max(summary.reached, axis),
            nonfinite=np.sum(summary.nonfinite, axis),
            zeros=np.mean(summary.zeros, axis),
            largest=np.max(summary.largest, axis),
            norm=np.linalg.norm(np.asarray(summary.norm, np.float64), axis=axis),
        )
    return summary


class Sent(NamedTuple):
    """The results of the program for a cotangent: the whole, or its sums."""

    reached: Any  # 1, so that it is 0 where there is no cotangent
    whole: Any
    sums: Any  # of `_cotangent_sums`


def _probe_of(site: CotangentSite, is_counted: bool) -> Sent:
    aval: Any = site.variable.aval
    lengths = tuple(length for _, length in site.around.axes) if site.around else ()
    dtype = at_least_float32(dtype_of(site.variable))
    real = np.finfo(dtype).dtype
    if is_sent_whole(aval.size, site.around):
        return Sent(np.zeros(lengths, real), np.zeros((*lengths, *aval.shape), dtype), None)
    return Sent(np.zeros(lengths, real), None, np.zeros((*lengths, 3 + is_counted), real))


def _sent(cotangent: Any, is_whole: bool, is_counted: bool) -> Sent:
    dtype = at_least_float32(cotangent.dtype)
    reached = jnp.ones((), jnp.finfo(dtype).dtype)
    if is_whole:
        return Sent(reached, on_every_device(cotangent).astype(dtype), None)
    return Sent(reached, None, _cotangent_sums(cotangent, is_counted))


@functools.partial(jax.jit, static_argnums=1)
def _cotangent_sums(cotangent: Any, is_counted: bool) -> jax.Array:
    """The share of zeros, the largest magnitude, and the sum of squares in units of that.

    Of a cotangent that is not empty. The sum is NaN where an element is not finite; with
    `is_counted` the numbers are of the finite elements, and the number of all others comes last.

    XLA's CPU loops store what is compared or selected, or an absolute value that is used twice: a
    copy of the gradient for each. So that is left to cotangents that are not finite. Cotangents of
    one shape share what is traced.
    """
    x = real_or_absolute(cotangent)
    x = x.astype(at_least_float32(x.dtype))
    counted = []
    if is_counted:
        is_finite, is_zero = jnp.isfinite(x), x == 0
        counted = [jnp.sum(~is_finite).astype(x.dtype)]
        x, zeros = jnp.where(is_finite, x, 0), _mean(is_zero.astype(x.dtype))
    else:
        zeros = 1 - _mean(jnp.abs(jnp.sign(x)))
    largest = jnp.max(jnp.abs(x))
    unit = x / jnp.where(largest == 0, 1, largest)
    return jnp.stack([zeros, largest, jnp.sum(unit * unit), *counted])


def _mean(x: jax.Array) -> jax.Array:
    """The mean, of rows first: a sum of ones is exact up to 2 ** 24 in float32."""
    rows = jnp.mean(x, axis=-1) if x.ndim > 1 else x
    return jnp.mean(rows)


def _received(sent: Sent) -> Summary:
    """The summary of what has left the program, on the host."""
    if sent.whole is None:
        zeros, largest, squares, *counted = np.moveaxis(np.asarray(sent.sums, np.float64), -1, 0)
        bad = counted[0] if counted else np.where(np.isfinite(squares), 0, np.nan)
        return Summary(sent.reached, bad, zeros, largest, largest * np.sqrt(squares))
    around = np.shape(sent.reached)
    each = math.prod(np.shape(sent.whole)[len(around) :])
    size = np.abs(sent.whole).reshape(*around, each).astype(np.float64)
    bad = ~np.isfinite(size)
    finite = np.where(bad, 0, size)
    largest = np.max(finite, axis=-1, initial=0)
    unit = finite / np.where(largest == 0, 1, largest)[..., None]
    norm = largest * np.linalg.norm(unit, axis=-1)
    zeros = np.mean(size == 0, axis=-1) if size.size else np.zeros_like(norm)
    return Summary(sent.reached, np.sum(bad, axis=-1), zeros, largest, norm)
