"""What the backward pass brings to the variables of a program, measured in one compiled run."""

import functools
import types
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import DropVar, JaxprEqn, Literal, Var

import clipgrad._jaxpr as _jaxpr
from clipgrad._compat import to_varying, varying_axes
from clipgrad._diagnose.numbers import at_first, dtype_of, holds_floats, on_host
from clipgrad._diagnose.subject import PRINTS
from clipgrad._diagnose.units import CLOSED, ProgramBlock, Unit, equations_of
from clipgrad._numerics import at_least_float32

_HALF_DTYPES = (jnp.dtype("float16"), jnp.dtype("bfloat16"))
_SCALE = 2.0**15  # the largest loss scale that float16 can hold
# What has programs with half precision inside, or looks at the bits of a number.
_OWN_TYPES = CLOSED | {"bitcast_convert_type"}
RESULT, OPERAND, STATE = "result", "operand", "state"


class CotangentSite(NamedTuple):
    """A variable whose cotangent is measured: summed over its uses, or of one use (an operand)."""

    kind: str
    block: ProgramBlock
    equation: JaxprEqn | None
    position: int
    variable: Var

    @property
    def key(self) -> tuple:
        """What an evaluation finds the site by."""
        by = id(self.variable) if self.kind == STATE else id(self.equation)
        return self.kind, id(self.block), by, self.position


class Summary(NamedTuple):
    """Numbers of a cotangent; with leading axes for the scans and `shard_map`s around it."""

    reached: Any  # 1 if there is a cotangent at all
    nonfinite: Any  # how many elements are NaN or inf
    zeros: Any  # the share of zeros
    largest: Any  # the largest magnitude that is finite
    norm: Any  # of the finite elements
    value: Any  # of an operand: its element where the cotangent is not finite
    bad_values: Any  # of an operand: how many of its elements are not finite


def module_sites(block: ProgramBlock) -> list[CotangentSite]:
    """What leaves each unit, and what each scan carries."""
    sites = []
    for unit in block.all_units():
        sites += [CotangentSite(RESULT, unit.block, e, i, v) for v, (e, i) in unit.leaves.items()]
        if inner := unit.holder:
            sites += [
                CotangentSite(STATE, inner, None, 0, v) for v in inner.states if holds_floats(v)
            ]
    return sites


def operation_sites(units: Iterable[Unit]) -> list[CotangentSite]:
    """All results and operands of the equations in these units and of the programs inside."""
    found = [pair for u in units for e in u.equations for pair in equations_of(u.block, e)]
    return [
        CotangentSite(kind, block, equation, i, v)
        for block, equation in found
        for kind, variables in ((RESULT, equation.outvars), (OPERAND, equation.invars))
        for i, v in enumerate(variables)
        if holds_floats(v) and not isinstance(v, Literal | DropVar)
    ]


def measure(
    program: Any,
    inputs: Sequence[Any],
    chosen: Sequence[int],
    block: ProgramBlock,
    sites: list[CotangentSite],
    *,
    wide: bool = False,
    cured: bool = False,
    is_scaled: bool = False,
) -> tuple[float, list[Summary], dict[tuple, Summary]]:
    """Run the backward pass; with `wide` in float32 where it is in half precision.

    With `cured`, operands that are sites give back 0 for what is not finite. With `is_scaled` the
    loss is multiplied by a large number.

    Returns:
      The loss, summaries of the gradients of the chosen inputs, and of the sites by key.
    """
    # A probe of a variable that does not depend on the inputs would give it a cotangent, and
    # differentiate what is behind it: a loop of unknown length, say, which has no derivative.
    active = _jaxpr.active_variables(program, chosen)
    silent = {s.key: _split_summary(_probe_of(s)) for s in sites if s.variable not in active}
    sites = [site for site in sites if site.variable in active]
    keys = [site.key for site in sites]
    kind = _Wide if wide else _Probes
    within = block.blocks() if wide else (b for site in sites for b in site.block.around())
    opened = frozenset(map(id, within))

    def loss(given: list, others: list, probes: list) -> Any:
        left = iter(given)
        all_inputs = [next(left) if i in chosen else x for i, x in enumerate(others)]
        hook = kind(block, opened, dict(zip(keys, probes, strict=True)), cured)
        value = _jaxpr.evaluate(program, [hook.constant(x, None) for x in all_inputs], hook)[0]
        return value * jnp.asarray(_SCALE, value.dtype) if is_scaled else value

    @jax.jit
    def run(*args: list) -> Any:
        value, (grads, measured) = jax.value_and_grad(loss, argnums=(0, 2))(*args)
        return value, [_summary(grad) for grad in grads], measured

    inputs = [_widened_half(x) for x in inputs] if wide else inputs
    others = [None if i in chosen else x for i, x in enumerate(inputs)]
    probes = [_probe_of(site) for site in sites]
    value, grads, measured = on_host(run([inputs[i] for i in chosen], others, probes))
    found = dict(zip(keys, map(_split_summary, measured), strict=True))
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


class _Probes(_jaxpr.Hook):
    """Lets each site's variable pass through a probe, whose cotangent is the summary."""

    def __init__(
        self,
        block: ProgramBlock,
        opened: frozenset[int],
        probes: dict[tuple, Any],
        cured: bool = False,
    ):
        self.block, self.opened, self.probes, self.cured = block, opened, probes, cured
        self.states: dict[Var, Any] = {}

    def __call__(self, equation, inputs):
        if equation.primitive.name in PRINTS:
            return []
        pairs = enumerate(zip(equation.invars, inputs, strict=True))
        inputs = [self._operand(equation, i, v, x) for i, (v, x) in pairs]
        outputs = enumerate(self._outputs(equation, inputs))
        return [self._probed((RESULT, id(self.block), id(equation), i), x) for i, x in outputs]

    def steps(self, equation):
        inner = self._inner(equation)
        within = {id(b) for b in inner.blocks()} if inner else ()
        return {str(key): (p,) for key, p in self.probes.items() if key[1] in within}

    shards = steps  # devices are apart as steps are

    def inside(self, equation, step):
        inner = self._inner(equation)
        probes = dict(self.probes)
        if equation.primitive.name in ("scan", "shard_map"):
            probes |= {key: step[str(key)][0] for key in probes if str(key) in step}
        return type(self)(inner, self.opened, probes, self.cured)

    def _inner(self, equation) -> Any:
        return self.block.children.get(id(equation))

    def _operand(self, equation, position, variable, x):
        if type(variable) is Literal:
            return x
        if variable not in self.states:
            key = STATE, id(self.block), id(variable), 0
            self.states[variable] = self._probed(key, x) if key in self.probes else None
        state = self.states[variable]
        return self._probed(
            (OPERAND, id(self.block), id(equation), position), x if state is None else state
        )

    def _outputs(self, equation, inputs):
        inner = self._inner(equation)
        if inner is None or id(inner) not in self.opened:
            return self.bind(equation, inputs)
        if equation.primitive.name in _jaxpr.JIT:
            (program,), _ = _jaxpr.entered_programs(equation)
            return _jaxpr.evaluate(program, inputs, self.inside(equation, ()))
        invars = [v for v in equation.invars if type(v) is not Literal]
        given = [x for v, x in zip(equation.invars, inputs, strict=True) if type(v) is not Literal]
        alone = types.SimpleNamespace(
            invars=invars, constvars=(), eqns=[equation], outvars=equation.outvars
        )
        return _jaxpr.evaluate(alone, given, _Entered(self))

    def bind(self, equation, inputs):
        """The results of one operation."""
        return _jaxpr.bind(equation, inputs)

    def _probed(self, key, x):
        probe = self.probes.get(key)
        return x if probe is None else _identity(key[0] == OPERAND, self.cured, x, probe)


class _Wide(_Probes):
    """The same in float32 for what is in half precision; custom rules by plain AD."""

    def constant(self, value, aval):
        return _widened_half(value)

    def bind(self, equation, inputs):
        if equation.primitive.name in _jaxpr.CUSTOM_RULES:
            program = _jaxpr.called_program(equation)
            inner = ProgramBlock([program])
            opened = frozenset(map(id, inner.blocks()))
            return _jaxpr.evaluate(program, inputs, _Wide(inner, opened, {}))
        if equation.primitive.name in _OWN_TYPES:
            pairs = zip(equation.invars, inputs, strict=True)
            inputs = [jnp.asarray(x, dtype_of(v)) if holds_floats(v) else x for v, x in pairs]
            return [self.constant(x, None) for x in _jaxpr.bind(equation, inputs)]
        narrow = {k: jnp.dtype("float32") for k, v in equation.params.items() if _is_half_dtype(v)}
        return _jaxpr.bind(equation, inputs, **narrow)


def _widened_half(x: Any) -> Any:
    return jnp.asarray(x, jnp.float32) if getattr(x, "dtype", None) in _HALF_DTYPES else x


def _is_half_dtype(value: Any) -> bool:
    return isinstance(value, np.dtype) and value in _HALF_DTYPES


class _Entered(_jaxpr.Hook):
    """Has an equation entered, with the hooks of another inside."""

    def __init__(self, hook: _Probes):
        self.steps, self.shards = hook.steps, hook.shards
        self.inside, self.constant = hook.inside, hook.constant


def _probe_of(site: CotangentSite) -> Any:
    wide = str(dtype_of(site.variable)) in ("float64", "complex128")
    lengths = [length for _, length in site.block.axes]
    return np.zeros((*lengths, len(Summary._fields)), "float64" if wide else "float32")


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _identity(keeps: bool, cured: bool, x: Any, probe: Any) -> Any:
    return x


def _forward(keeps: bool, cured: bool, x: Any, probe: Any) -> Any:
    return x, (x if keeps else None, probe)


def _backward(keeps: bool, cured: bool, residuals: Any, cotangent: Any) -> Any:
    x, probe = residuals
    summary = _summary(cotangent, x).astype(probe.dtype)
    summary = to_varying(summary, varying_axes(probe))
    if keeps and cured:
        cotangent = jnp.where(jnp.isfinite(cotangent), cotangent, jnp.zeros_like(cotangent))
    return cotangent, summary


_identity.defvjp(_forward, _backward)


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
