"""Facts of a cut, which the causes ask for: each is computed once, when it is asked for."""

import dataclasses
import functools
import string
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import primitives

from clipgrad._diagnose.finding_texts import array_type, operation_at
from clipgrad._diagnose.guilty import (
    chooses_derivative,
    is_of_users_rule,
    origin,
    runs_once,
)
from clipgrad._diagnose.index_ranges import Indices, all_dropped
from clipgrad._diagnose.levels import INF, holds_zeros, range_of, wide
from clipgrad._diagnose.opened_loops import InScan
from clipgrad._diagnose.origins import Argument, Constant, Cut, Operation, Origin, Way
from clipgrad._diagnose.segments import as_program
from clipgrad._diagnose.sources import sources
from clipgrad._diagnose.tape import Entry, Tape
from clipgrad._losses import TracedLoss
from clipgrad._programs import (
    BACK_AT_ANY_SIZE,
    BACK_BY_FACTORS,
    BACK_IN_SUMS,
    Back,
    Does,
    Widen,
    detaches,
    dtype_of,
    evaluate,
    has_custom_rule,
    holds_floats,
    is_scan,
)

# Functions that a line may call, by what their operations are.
FLAT = frozenset("round floor ceil sign nextafter floor_divide rint trunc fix".split())
INDICES = frozenset(
    """argmax argmin argsort top_k sort searchsorted digitize unique histogram bincount
    approx_top_k approx_max_k approx_min_k""".split()
)
ONE_SIDED = frozenset("relu maximum max leaky_relu relu6 hinge_loss".split())
CLIPPING = frozenset("clip clamp minimum min hard_tanh hard_sigmoid hard_swish hard_silu".split())
_HALF = ("float16", "bfloat16")
_OTHER_STEPS = 8  # of a scan, that a cut is looked for at


class Factor(NamedTuple):
    """Why a product passes no cotangent back, if the other factor is zero where there is one."""

    kind: str = ""  # the name of a cause
    source: str = ""  # what is zero


class CutFacts:
    """The facts of one cut: of its entry, at the operand that has no cotangent.

    Args:
      cut: the cut.
      traced: the loss.
      zero: the inputs whose gradients are zero.
    """

    def __init__(self, cut: Cut, traced: TracedLoss, zero: Any):
        self.cut, self.traced, self.zero = cut, traced, zero
        self.entry: Entry = cut.entry
        self.operand, self.way = cut.operand, cut.way
        self.back = self.entry.numeric.back
        self.array = self.entry.ins[self.operand]

    # -- How the operand is used, and what the operation is.

    @property
    def is_random_choice(self) -> bool:
        """Whether random numbers alone choose a branch, or an operand of a `where`."""
        is_mask = self.back is Back.CHOSEN and self.way is Way.OPERATION
        is_chosen = self.way is Way.BRANCH or is_mask
        return is_chosen and _is_random(
            self.entry.tape, self.entry.equation.invars[:1], self.traced
        )

    @property
    def is_softmax_over_one(self) -> bool:
        return "softmax" in self._function and 1 in np.shape(self.array)

    @property
    def stops(self) -> bool:
        return detaches(self.entry.equation)

    @property
    def is_detached_copy(self) -> bool:
        """Whether a `where` takes the same numbers without a derivative."""
        is_taken = chooses_derivative(self.entry) and self.is_zero_at_any_size
        return is_taken and not all(self.entry.active[1:])

    @property
    def is_of_users_rule(self) -> bool:
        return self.entry.alive and is_of_users_rule(self.entry)

    @property
    def is_whole(self) -> bool:
        """Whether what is used of the results has no derivative by its type."""
        return not self.entry.alive or self._function in INDICES

    @property
    def is_cast(self) -> bool:
        """Whether this is a cast; one to bool is a comparison."""
        is_named = self._function == "astype"
        return self.is_whole and (self.entry.numeric.does is Does.CASTS or is_named)

    @property
    def is_bitcast(self) -> bool:
        is_bitcast = self.entry.equation.primitive is primitives.bitcast_convert_type_p
        return self.is_whole and is_bitcast

    @property
    def is_index(self) -> bool:
        return self.is_whole and (self._function in INDICES or self.back is Back.RANKED)

    @property
    def is_comparison(self) -> bool:
        return self.is_whole and self.back is Back.COMPARED

    @property
    def is_clip(self) -> bool:
        return self._function in CLIPPING or self.back is Back.CLIPPED

    @property
    def is_one_sided(self) -> bool:
        is_known = self._function in ONE_SIDED or self.back is Back.ONE_SIDED
        return is_known and not self.is_clip and not self.is_read

    @property
    def is_relu_above(self) -> bool:
        return self.is_one_sided and "relu" in self._function and range_of([self.array])[0] > 0

    @property
    def is_mask(self) -> bool:
        return self.back is Back.CHOSEN

    @property
    def is_read(self) -> bool:
        """Whether the operation takes some numbers of the operand."""
        return self.back is Back.READ

    @property
    def is_written(self) -> bool:
        """Whether the operation puts one operand into another."""
        return self.back in (Back.WRITTEN, Back.OVERWRITTEN)

    @functools.cached_property
    def dropped(self) -> Indices | None:
        """The indices of a gather or a scatter that uses nothing of it, since all are outside."""
        return all_dropped(self.entry, self.operand) if self.way is Way.OPERATION else None

    @property
    def is_written_over(self) -> bool:
        is_in_scan = bool(self.entry.tape.steps)
        is_over = self.back is Back.OVERWRITTEN and (self.operand == 0 or is_in_scan)
        return is_over and self.is_zero_at_any_size

    @property
    def is_unary(self) -> bool:
        """Whether this is a function of one array, or has a rule of its own."""
        return has_custom_rule(self.entry.equation) or sum(map(holds_floats, self.entry.ins)) == 1

    # -- What the numbers are.

    @property
    def is_at_zero(self) -> bool:
        return range_of([self.array]) == (0, 0)

    @functools.cached_property
    def is_zero_at_any_size(self) -> bool:
        """Whether nothing is passed back, however large the cotangents of the results are."""
        return self._is_zero(self._pulled(self.entry.ins, self._unit))

    @functools.cached_property
    def is_flat_here(self) -> bool:
        """Whether the operation is flat at these numbers, but not at others."""
        return self.is_zero_at_any_size and self._lives_elsewhere

    @property
    def is_flat_everywhere(self) -> bool:
        is_named = self._function in FLAT and self.entry.alive
        return self.entry.numeric.is_flat or (
            is_named and self.is_zero_at_any_size and not self._lives_elsewhere
        )

    @functools.cached_property
    def is_underflow(self) -> bool:
        """Whether what is passed back is too small for its type."""
        if not self.is_zero_at_any_size:
            return True
        return self.back in BACK_AT_ANY_SIZE and 0 < self._true_size < float(self._limits.tiny)

    @functools.cached_property
    def adds_up_to_zero(self) -> bool:
        """Whether what is passed back is a sum of numbers that are not zero."""
        if self.back not in BACK_IN_SUMS or not self.is_zero_at_any_size:
            return False
        sizes = [jnp.abs(x) if holds_floats(x) else x for x in self.entry.ins]
        return not self._is_zero(self._pulled(sizes, self._abs_unit))

    @functools.cached_property
    def infinite(self) -> str:
        """An operand that is inf wherever there is a cotangent, and what has made it; or ""."""
        if not self.entry.alive or not self.is_zero_at_any_size:
            return ""
        for atom, x in zip(self.entry.equation.invars, self.entry.ins, strict=True):
            if self.entry.tape.is_constant(atom) or not self._is_infinite(x):
                continue
            root = origin(self.entry.tape, atom, INF)
            match root:
                case Operation(entry):
                    return f"inf, which {operation_at(entry)} ({entry.place.location}) makes"
                case Argument(number):
                    return f"inf, which {self.traced.names[number]} holds"
        return ""

    @functools.cached_property
    def factor(self) -> Factor:
        """Why a product passes nothing back, if its other factor is zero."""
        if self.back not in BACK_BY_FACTORS or self.way is not Way.OPERATION:
            return Factor()
        other = 1 - self.operand if self.operand < 2 else 0
        atom, tape = self.entry.equation.invars[other], self.entry.tape
        if holds_zeros(self.entry.ins[other]):
            return self._factor_of(*zero_source(tape, atom))
        if not self._is_disjoint(other):
            return Factor()
        kind = "random" if _is_random(tape, [atom], self.traced) else "zero factor"
        return Factor(kind, "its other factor, which is 0 wherever there is a cotangent")

    @property
    def is_zero_at_each_step(self) -> bool:
        """Whether the operation passes nothing back at any step of the scan around."""
        holders, tape = [], self.entry.tape
        while tape.within and not isinstance(tape.within.entry.inside, InScan):
            holders.append(tape.within.entry)
            tape = tape.within.entry.tape
        if tape.within is None:
            return False
        inside, now = tape.within.entry.inside, tape.within.step
        steps = [t for t in inside.times if t != now]
        some = steps[:: -(-len(steps) // _OTHER_STEPS)] if steps else []
        return bool(some) and all(self._is_zero_in(inside.step(t), holders) for t in some)

    # -- Words.

    def words(self, text: str) -> dict[str, Any]:
        """The words for the places of a text."""
        fields = {field for _, field, _, _ in string.Formatter().parse(text) if field}
        return {field: getattr(self, f"_{field}") for field in fields}

    @property
    def _label(self) -> str:
        is_known = self._function in FLAT | INDICES
        is_operation = self.entry.numeric.is_flat or self.back is Back.RANKED
        return self._operation if is_operation and not is_known else self._function

    @functools.cached_property
    def _function(self) -> str:
        return self.entry.place.function

    @property
    def _operation(self) -> str:
        return self.entry.place.operation

    @property
    def _operand(self) -> int:
        return self.operand

    @property
    def _dtype(self) -> Any:
        whole = [v for v in self.entry.equation.outvars if self.entry.alive or not holds_floats(v)]
        return next((dtype_of(v) for v in whole or self.entry.equation.outvars), None)

    @property
    def _emptiness(self) -> str:
        if is_scan(self.entry.equation):
            return "it has no steps"
        return f"its result has shape {next(map(np.shape, self.entry.outs), ())}"

    @property
    def _count(self) -> int:
        return np.size(self.array)

    @property
    def _numbers(self) -> str:
        return _range(self.array)

    @property
    def _source(self) -> str:
        return self.factor.source

    @property
    def _outside(self) -> str:
        """The indices that are out of range, and the array: "9 on axis 0 of float32[5, 4]"."""
        assert self.dropped is not None
        array = array_type(self.entry.equation.invars[0])
        return f"{self.dropped.ranges_outside} of {array}"

    @property
    def _infinite(self) -> str:
        return self.infinite

    @property
    def _operands(self) -> str:
        """All operands with their numbers; of a power they have names."""
        is_power = self.entry.equation.primitive is primitives.pow_p
        names = ("its base", "its exponent") if is_power else ()
        words = [*names, *(f"operand {i}" for i in range(len(names), len(self.entry.ins)))]
        return ", ".join(
            f"{word} is {_range(x)}"
            for word, x in zip(words, self.entry.ins, strict=True) if holds_floats(x)
        )  # fmt: skip

    @property
    def _size(self) -> str:
        return f", {self._true_size:.2g}," if 0 < self._true_size < np.inf else ""

    @property
    def _number_type(self) -> Any:
        return dtype_of(self.array)

    @property
    def _cure(self) -> str:
        """The remedy for numbers that are too small; a scale is named only if it helps."""
        is_wider = self._true_size >= np.finfo(np.float32).tiny
        is_half = str(self._number_type) in _HALF and is_wider
        other = "compute in float32" if is_half else f"rescale its numbers ({self._operands})"
        return other if self.is_zero_at_any_size else f"scale the loss, or {other}"

    # -- Derivatives at other numbers.

    @property
    def _limits(self) -> Any:
        return jnp.finfo(dtype_of(self.array))

    @functools.cached_property
    def _unit(self) -> list:
        """The cotangents of the results, the largest 1; ones if there are none."""
        got = [g for g in self.entry.out_cotangents if g is not None]
        size = max((float(np.max(np.abs(wide(g)), initial=0)) for g in got), default=0)
        if not 0 < size < np.inf:
            return [jnp.ones_like(y) if holds_floats(y) else None for y in self.entry.outs]
        return [None if g is None else _scaled(g, size) for g in self.entry.out_cotangents]

    @property
    def _abs_unit(self) -> list:
        return [None if g is None else jnp.abs(g) for g in self._unit]

    def _pulled(self, ins: Sequence[Any], out_cotangents: Sequence[Any]) -> Any:
        """The cotangent of the operand, for other operands or cotangents of the results."""
        count = len(self.entry.ins)
        other = dataclasses.replace(
            self.entry,
            ins=list(ins),
            out_cotangents=list(out_cotangents),
            in_cotangents=[None] * count,
        )
        try:
            other.backward()
        except (TypeError, ValueError, NotImplementedError):
            return None
        return other.in_cotangents[self.operand]

    @staticmethod
    def _is_zero(x: Any) -> bool:
        """Whether there is no finite number but zero."""
        return x is None or not np.any(np.isfinite(wide(x)) & (wide(x) != 0))

    @functools.cached_property
    def _lives_elsewhere(self) -> bool:
        return any(
            not self._is_zero(self._pulled(self._with(x), self._unit)) for x in self._other_numbers
        )

    @property
    def _other_numbers(self) -> Iterator[Any]:
        """The operand nearer to zero, of the other sign, and on both sides of all numbers."""
        x = jnp.asarray(self.array)
        sizes = [np.abs(range_of([x])).max() for x in self.entry.ins if holds_floats(x)]
        far = 2 * min(max(sizes), float(self._limits.max) / 8) + 1
        scales = (2.0**-3, 2.0**-7, 2.0**-14, -1.0)
        yield from (x * jnp.asarray(scale, x.dtype) for scale in scales)
        yield from (jnp.full_like(x, number) for number in (0.5, -0.5))
        yield from (x + jnp.asarray(number, x.dtype) for number in (far, -far))
        ramp = np.linspace(-1, 1, x.size).reshape(x.shape)
        yield jnp.asarray(ramp, x.dtype)

    def _with(self, array: Any) -> list:
        ins = list(self.entry.ins)
        ins[self.operand] = array
        return ins

    @functools.cached_property
    def _true_size(self) -> float:
        """The largest number that is passed back, in float64; 0 if it cannot be computed."""
        entry = self.entry
        equation, hook = entry.equation, Widen(jnp.float64)
        if entry.tape.runs.axes:
            return 0.0
        outs = [j for j, g in enumerate(entry.out_cotangents) if g is not None and holds_floats(g)]
        program = as_program([equation], entry.tape.jaxpr, equation.outvars)

        def run(x: Any) -> list:
            pairs = zip(self._with(x), equation.invars, strict=True)
            inputs = [hook.constant(x, None) for x, a in pairs if not hasattr(a, "val")]
            results = evaluate(program, inputs, hook)
            return [results[j] for j in outs]

        try:
            with jax.enable_x64(True):
                start = jnp.asarray(hook.constant(self.array, None))
                got = [jnp.asarray(hook.constant(entry.out_cotangents[j], None)) for j in outs]
                (cotangent,) = jax.vjp(run, start)[1](got)
                return float(np.max(np.abs(np.asarray(cotangent)), initial=0))
        except (TypeError, ValueError, NotImplementedError):
            return 0.0

    def _is_infinite(self, x: Any) -> bool:
        """Whether an operand is inf wherever a result has a cotangent."""
        if not holds_floats(x) or not np.size(x):
            return False
        is_inf = np.isinf(wide(x))
        got = [
            wide(g)
            for g in self.entry.out_cotangents
            if g is not None and np.shape(g) == np.shape(x)
        ]
        where = np.any([g != 0 for g in got], axis=0) if got else np.ones(np.shape(x), bool)
        return bool(is_inf[where].all() and where.any())

    def _is_disjoint(self, other: int) -> bool:
        """Whether the other factor is zero wherever there is a cotangent."""
        ones = {self.operand: jnp.ones_like(self.array)}
        ones[other] = (jnp.asarray(self.entry.ins[other]) != 0).astype(self.entry.ins[other].dtype)
        ins = [ones.get(i, x) for i, x in enumerate(self.entry.ins)]
        got = [None if g is None else (g != 0).astype(g.dtype) for g in self._unit]
        return self._is_zero(self._pulled(ins, got))

    def _factor_of(self, source: Origin, is_state: bool) -> Factor:
        """The source of a factor that is zero; a scan begins with it if ``is_state``."""
        match source:
            case Constant():
                is_factor = self.back is Back.MULTIPLIED and not is_state
                kind = "zero factor" if is_factor else "constant zeros"
                return Factor(kind, "a constant that is 0")
            case Argument(number):
                later = "zero factors" if number in self.zero else "trains later"
                kind = later if number in self.traced.chosen else "zero factor"
                return Factor(kind, f"{self.traced.names[number]}, which is 0")
            case Operation(entry):
                is_random = _is_random(entry.tape, entry.equation.invars, self.traced)
                place = entry.place
                made_by = f"values that are 0 since {place.function} ({place.location})"
                return Factor("random" if is_random else "zero factor", made_by)

    def _is_zero_in(self, tape: Tape, holders: list[Entry]) -> bool:
        """Whether the operation passes nothing back in another step."""
        for holder in reversed(holders):
            entry = tape.made.get(holder.equation.outvars[0])
            if entry is None or not entry.inside:
                return False
            tape = entry.inside.tape
        entry = tape.made.get(self.entry.equation.outvars[0])
        if entry is None:
            return False
        if entry.alive:
            return holds_zeros(entry.in_cotangents[self.operand])
        cut = dataclasses.replace(self.cut, entry=entry)
        return CutFacts(cut, self.traced, self.zero).is_zero_at_any_size


def _scaled(x: Any, size: float) -> Any:
    """An array over a number, which may be too small for the processor."""
    return jnp.asarray(np.asarray(wide(x) / size), dtype_of(x))


def _range(x: Any) -> str:
    low, high = (number + 0.0 for number in range_of([x]))  # -0.0 is 0
    return f"{low:.3g} to {high:.3g}" if np.size(x) > 1 else f"{high:.3g}"


def _is_random(tape: Tape, atoms: Any, traced: TracedLoss) -> bool:
    """Whether values are random, and computed from keys and counters alone."""
    arguments, is_drawn = sources(tape, atoms)
    return is_drawn and not any(holds_floats(traced.inputs[i]) for i in arguments)


def zero_source(tape: Tape, atom: Any) -> tuple[Origin, bool]:
    """The first value that is zero, from which a value has its zeros.

    Second is whether a scan begins with it.
    """
    is_state = False
    while not tape.is_constant(atom):
        entry = tape.made.get(atom)
        if entry is None:
            number = tape.jaxpr.invars.index(atom)
            if tape.within is None:
                return Argument(number), is_state
            inside, now = tape.within.entry.inside, tape.within.time
            is_carry = isinstance(inside, InScan) and inside.is_carry(number)
            is_state = is_state or is_carry
            if is_carry and now and not holds_zeros(tape.within.entry.ins[number]):
                tape = inside.step(inside.times[now - 1])
                atom = tape.jaxpr.outvars[number - inside.fixed]
            else:
                tape, atom = tape.outside(number)
        elif runs_once(entry):
            tape, atom = entry.inside.result(entry.equation.outvars.index(atom), 0)
        else:
            operands = entry.equation.invars
            zeros = [a for a, x in zip(operands, entry.ins, strict=True) if holds_zeros(x)]
            if all(map(tape.is_constant, operands)):
                break
            way = entry.numeric.back
            is_part = way in BACK_BY_FACTORS and (way is not Back.DIVIDED or operands[0] in zeros)
            if not zeros or not (is_part or len(zeros) == len(operands)):
                return Operation(entry), is_state
            atom = zeros[0]
    return Constant(), is_state
