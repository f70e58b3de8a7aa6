"""What the backward pass brings to the variables of a program, measured in one compiled run."""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import DropVar, JaxprEqn, Literal, Var

import clipgrad._jaxpr as _jaxpr
from clipgrad._diagnose.units import ProgramBlock, Unit
from clipgrad._jaxpr import OPERAND, RESULT, Site, at_first, dtype_of, holds_floats, on_host
from clipgrad._numerics import at_least_float32

_SCALE = 2.0**15  # the largest loss scale that float16 can hold


class CotangentSite(NamedTuple):
    """A site of a `Probe`, in its block; of an operation with its equation."""

    site: Site
    block: ProgramBlock
    variable: Var
    equation: JaxprEqn | None = None


class Summary(NamedTuple):
    """Numbers of a cotangent; with leading axes for the scans and `shard_map`s around it."""

    reached: Any  # 1 if there is a cotangent at all
    nonfinite: Any  # how many elements are NaN or inf
    zeros: Any  # the share of zeros
    largest: Any  # the largest magnitude that is finite
    norm: Any  # of the finite elements
    value: Any  # of an operand: its element where the cotangent is not finite
    bad_values: Any  # of an operand: how many of its elements are not finite


Measured = dict[Site, Summary]


def module_sites(block: ProgramBlock) -> list[CotangentSite]:
    """What leaves each unit, and what each scan carries."""
    sites = []
    for unit in block.all_units():
        sites += [CotangentSite(site, unit.block, v) for v, site in unit.leaves.items()]
        if inner := unit.holder:
            sites += [CotangentSite(site, inner, v) for v, site in inner.carried.items()]
    return sites


def operation_sites(units: Iterable[Unit]) -> list[CotangentSite]:
    """All results and operands of the equations in these units and of the programs inside."""
    found = [pair for u in units for e in u.equations for pair in u.block.within(e)]
    return [
        CotangentSite(block.site(kind, equation, i), block, v, equation)
        for block, equation in found
        for kind, variables in ((RESULT, equation.outvars), (OPERAND, equation.invars))
        for i, v in enumerate(variables)
        if holds_floats(v) and not isinstance(v, Literal | DropVar)
    ]


def measure(
    program: Any,
    inputs: Sequence[Any],
    chosen: Sequence[int],
    sites: list[CotangentSite],
    *,
    wide: bool = False,
    cured: bool = False,
    is_scaled: bool = False,
) -> tuple[float, list[Summary], Measured]:
    """Run the backward pass; with `wide` in float32 where it is in half precision.

    With `cured`, operands that are sites give back 0 for what is not finite. With `is_scaled` the
    loss is multiplied by a large number.

    Returns:
      The loss, summaries of the gradients of the chosen inputs, and of the sites.
    """
    # A probe of a variable that does not depend on the inputs would give it a cotangent, and
    # differentiate what is behind it: a loop of unknown length, say, which has no derivative.
    active = _jaxpr.active_variables(program, chosen)
    probes = {own.site: _probe_of(own) for own in sites}
    silent = {s.site: _split_summary(probes.pop(s.site)) for s in sites if s.variable not in active}
    base = _jaxpr.Widen(jnp.float32) if wide else None

    def loss(given: list, others: list, probes: dict[Site, Any]) -> Any:
        left = iter(given)
        all_inputs = [next(left) if i in chosen else x for i, x in enumerate(others)]
        hook = _jaxpr.Probe(probes, _summary, base, cured)
        value = _jaxpr.evaluate(program, [hook.constant(x, None) for x in all_inputs], hook)[0]
        return value * jnp.asarray(_SCALE, value.dtype) if is_scaled else value

    @jax.jit
    def run(*args: list) -> Any:
        value, (grads, measured) = jax.value_and_grad(loss, argnums=(0, 2))(*args)
        return value, [_summary(grad) for grad in grads], measured

    inputs = [base.constant(x, None) for x in inputs] if base else inputs
    others = [None if i in chosen else x for i, x in enumerate(inputs)]
    value, grads, measured = on_host(run([inputs[i] for i in chosen], others, probes))
    found = {site: _split_summary(numbers) for site, numbers in measured.items()}
    return float(value), [_split_summary(grad) for grad in grads], silent | found


def _split_summary(numbers: Any) -> Summary:
    return Summary(*np.moveaxis(numbers, -1, 0))


def joined(summary: Summary, block: ProgramBlock) -> Summary:
    """The numbers of a site in a block, those of the devices of a `shard_map` joined."""
    for axis in reversed([i for i, (name, _) in enumerate(block.axes) if name != "scan"]):
        worst = np.expand_dims(np.argmax(summary.nonfinite, axis), axis)
        summary = Summary(
            reached=np.max(summary.reached, axis),
            nonfinite=np.sum(summary.nonfinite, axis),
            zeros=np.mean(summary.zeros, axis),
            largest=np.max(summary.largest, axis),
            norm=np.linalg.norm(np.asarray(summary.norm, np.float64), axis=axis),
            value=np.take_along_axis(summary.value, worst, axis).squeeze(axis),
            bad_values=np.take_along_axis(summary.bad_values, worst, axis).squeeze(axis),
        )
    return summary


def _probe_of(site: CotangentSite) -> Any:
    wide = str(dtype_of(site.variable)) in ("float64", "complex128")
    lengths = [length for _, length in site.block.axes]
    return np.zeros((*lengths, len(Summary._fields)), "float64" if wide else "float32")


def _summary(cotangent: Any, x: Any = None) -> jax.Array:
    """The fields of a `Summary` in one array."""
    size = jnp.abs(cotangent)
    size = size.astype(at_least_float32(size.dtype))
    bad = ~jnp.isfinite(size)
    finite = jnp.where(bad, 0, size)
    largest = jnp.max(finite, initial=0)
    unit = finite / jnp.where(largest == 0, 1, largest)
    norm = largest * jnp.sqrt(jnp.sum(unit * unit))
    zeros = jnp.mean((size == 0).astype(size.dtype)) if size.size else jnp.zeros_like(norm)
    value, bad_values = jnp.zeros_like(norm), jnp.zeros_like(norm)
    x = None if x is None else jnp.asarray(x)  # a constant may come as a Python number
    if x is not None and x.size:
        value = at_first(bad, x).astype(norm.dtype)
        bad_values = jnp.sum(~jnp.isfinite(x)).astype(norm.dtype)
    count = jnp.sum(bad).astype(norm.dtype)
    return jnp.stack([jnp.ones_like(norm), count, zeros, largest, norm, value, bad_values])
