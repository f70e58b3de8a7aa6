"""Evaluation of the function for differences: the best way that works, and what it cannot see."""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

import clipgrad._jaxpr as _jaxpr
import clipgrad._trees as _trees
from clipgrad._check.differences import Differences, Evaluation, in_float64
from clipgrad._check.loops import has_loops, stops_by_numbers
from clipgrad._check.points import NEARBY, SINGLE, Scales, moved_apart, random_direction
from clipgrad._check.subject import CheckSubject
from clipgrad._check.tolerances import NOISE, NOISY, RELATIVE, SAME_VALUES, SOLVED, narrowest
from clipgrad._check.widening import Unsupported, Widened, widened_program
from clipgrad._errors import first_line

# Binary exponents of the steps, in units of the scale of each element.
#   quick: two steps that Richardson extrapolates. In float64 the truncation error (h ** 4) and the
#     rounding error (eps / h) of 2 ** -16 are both below 1e-10 of an ordinary function.
#   ladder: for a close look, from steps that no rounding spoils to steps within which no kink lies.
WIDE_QUICK, WIDE_LADDER = (16, 18), tuple(range(4, 33, 4))
SINGLE_QUICK, SINGLE_LADDER = (4, 5), tuple(range(2, 11))
HALF_QUICK, HALF_LADDER = (2, 3), (1, 2, 3, 4)
# The least share of the outputs that are the same in two precisions, if it is one function.
SAME_SHARE = 0.75
# An output that nothing moves, and that is so many times as large as what moves, is a mask.
MASK = 2.0**10
BY_CHANCE = 0.01  # of the outputs, which may be as small as they are by chance


# Needed by the case a_chaotic_map.
class Chaotic(Exception):
    """Rounding of the inputs alone moves the values by a hundredth or more."""


class _OtherValues(Unsupported):
    """An evaluation whose values are not the function's."""


def choose(
    subject: CheckSubject, covectors: np.ndarray, notes: list[str], hold: bool = True
) -> tuple[Differences, Widened | None]:
    """Try the evaluations in order, down to running them, and return the first that works.

    With it comes the widened program, if that is it; what was not possible goes to `notes`. `hold`
    keeps what is behind `stop_gradient` fixed.
    """
    ways: list[tuple[str, Callable]] = [
        ("evaluation in float64", lambda subject: _in_float64(subject, hold)),
        ("casting the inputs to float64", lambda subject: (_cast(subject), None)),
        ("evaluation in native precision", lambda subject: (_native(subject), None)),
    ]
    if subject.program is None:
        ways = ways[2:]
    elif stops_by_numbers(subject.program):  # not worth a word where it does not converge
        ways = [("", lambda subject: _in_float64(subject, hold, longer=True)), *ways]
    for label, make in ways:
        try:
            evaluation, widened = make(subject)
            differences = Differences(evaluation, covectors)
            part, inner = SAME_VALUES if label else SOLVED, widened.narrow if widened else set()
            _probe_evaluation(subject, differences, part, inner)
            return differences, widened
        except Exception as error:
            if not label:
                continue
            notes.append(f"{label} is not possible ({why_not(error)})")
            if isinstance(error, _OtherValues) and _is_chaotic(subject):
                raise Chaotic from error
    raise ValueError("the function cannot be evaluated at a point nearby: " + "; ".join(notes))


def settled_values(subject: CheckSubject, differences: Differences, xs) -> np.ndarray | None:
    """The outputs if loops of a fixed length ran for as long again; None if there are none."""
    if differences.evaluation.label != "float64" or not has_loops(subject.program):
        return None
    longer = Differences(_in_float64(subject, True, longer=True)[0], differences.covectors)
    longer.set_base(xs, _trees.zeros_in_place(int(_trees.offsets(subject.inputs)[-1]), np.float32))
    return longer.base


def _in_float64(
    subject: CheckSubject, hold: bool, longer: bool = False
) -> tuple[Evaluation, Widened]:
    widened = widened_program(subject.program)
    held = hold and widened.stops
    evaluation = _wide_evaluation(
        widened.measured(held, longer),
        subject,
        "float64",
        constants=_jaxpr.opened(subject.program)[1],
        key=(widened.key, held, longer),
        held=held,
        grain=widened.grain,
    )
    return evaluation, widened


def _wide_evaluation(call, subject: CheckSubject, label: str, **options) -> Evaluation:
    like = [jax.ShapeDtypeStruct(x.shape, _trees.wide_dtype(x.dtype)) for x in subject.inputs]
    steps = _steps(options.get("grain") or "float64")
    return Evaluation(call, like, np.float64, label, *steps, **options)


def _steps(name: str) -> tuple:
    """The steps of the quick look and of the close one, not below the roundings of a type."""
    known = {"float64": (WIDE_QUICK, WIDE_LADDER), "float32": (SINGLE_QUICK, SINGLE_LADDER)}
    return known.get(name, (HALF_QUICK, HALF_LADDER))


def _cast(subject: CheckSubject) -> Evaluation:
    names = [equation.primitive.name for equation in _jaxpr.equations(subject.program)]
    if not jax.config.read("jax_enable_x64") and any("callback" in name for name in names):
        raise Unsupported("a callback runs in another thread, where 64-bit types are off")
    call, label = lambda constants, xs: subject.fun(xs), "float64 (inputs cast)"
    evaluation = _wide_evaluation(call, subject, label)
    with in_float64():
        program = jax.make_jaxpr(subject.fun)(list(evaluation.like))
    if _jaxpr.computed_types(program) != {"float64"}:
        raise Unsupported("the function computes in a narrower type inside")
    return evaluation


def _native(subject: CheckSubject) -> Evaluation:
    like = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in subject.inputs]
    name = narrowest([*subject.dtypes, *(_trees.real_dtype(y).name for y in subject.outputs)])
    dtype = np.float64 if name == "float64" else np.float32
    compiled = subject.program is not None
    call = lambda constants, xs: subject.fun(xs)  # noqa: E731
    return Evaluation(call, like, dtype, name, *_steps(name), compiled=compiled)


def _probe_evaluation(
    subject: CheckSubject, differences: Differences, part: float, inner: set[str]
) -> None:
    """Run it: same values as the function's own, and nearby no callback that refuses the point."""
    size = int(_trees.offsets(subject.inputs)[-1])
    differences.set_base(subject.inputs, _trees.zeros_in_place(size, np.float32))
    _same_values(subject, differences.base, part, inner)
    if differences.evaluation.key is None:
        scales = Scales(subject.inputs)
        along = scales.times(random_direction(subject, 0, 0, scales.dtype))
        along *= NEARBY
        differences.change(subject.inputs, along)


def _same_values(subject: CheckSubject, values: np.ndarray, part: float, inner: set[str]) -> None:
    """Raises an error unless the values are the function's own but for rounding and for jumps.

    A value that is itself a rounding error, as the determinant of a singular matrix, is compared
    with how far larger moves of the inputs move it.
    """
    own = _trees.to_numpy(subject.outputs)
    near = ~jumped(subject, values, [*subject.dtypes, *inner])
    off, size = _rms((own - values)[near]), _rms(own[near])
    if not np.isfinite(own).all() or off <= part * size + jnp.finfo(np.float32).tiny:
        return
    if not off <= part * max(size, _change(subject, NEARBY)):
        raise _OtherValues("its values differ from those of the function")


def _is_chaotic(subject: CheckSubject) -> bool:
    """Whether one rounding of each input moves the values by a part that matters."""
    eps = max(float(jnp.finfo(x.dtype).eps) for x in subject.inputs)
    size = _rms(_trees.to_numpy(subject.outputs))
    return bool(_change(subject, eps) > SAME_VALUES / 10 * max(size, _change(subject, NEARBY)))


def _change(subject: CheckSubject, part: float) -> float:
    """The change of the values when each input moves by about a part of itself, up or down."""
    moved = moved_apart(subject, subject.inputs, 0, part)
    return _rms(_trees.to_numpy(subject.fun(moved)) - _trees.to_numpy(subject.outputs))


def _rms(values: np.ndarray) -> float:
    return float(np.sqrt(np.mean(values**2)))


def why_not(error: Exception) -> str:
    """Why something is not possible, in one line."""
    return str(error) if isinstance(error, Unsupported) else first_line(error)


def jumped(subject: CheckSubject, values: np.ndarray, dtypes: Sequence[str]) -> np.ndarray:
    """The outputs whose `values` in float64 are others by more than rounding in these types.

    So they are where a tie is broken otherwise. Where they are more than a part, none is returned:
    then the whole is another function, or all of it is rounding.
    """
    own = _trees.to_numpy(subject.outputs)
    narrow = narrowest([*dtypes, *(_trees.real_dtype(y).name for y in subject.outputs)])
    size = np.fmin(np.abs(own), np.abs(values))
    typical = np.sqrt(np.mean(np.fmin(size, np.quantile(size, SAME_SHARE)) ** 2))
    found = np.abs(own - values) > RELATIVE[narrow] * (size + typical)
    return found & (found.mean() <= 1 - SAME_SHARE)


# Needed by test_a_mask_among_the_outputs_has_no_noise.
def masked(
    subject: CheckSubject, differences: Differences, pulled: Callable
) -> tuple[np.ndarray, np.ndarray]:
    """The outputs that hold a mask such as -1e30 alone, and those that are sums with one.

    The first stay as they are, and depend on nothing, as `pulled`, the gradient for a cotangent,
    shows; in the others the changes of the function are lost.
    """
    size, none = np.abs(differences.base), np.zeros(differences.base.shape, bool)
    if not (size > 0).any() or size.max() <= MASK * np.quantile(size[size > 0], BY_CHANCE):
        return none, none
    along = Scales(subject.inputs).times(random_direction(subject, 0, SINGLE)) * NEARBY
    change = np.abs(differences.change(subject.inputs, along)).max(axis=0)
    still = (change == 0) & (size > MASK * size.max(initial=0.0, where=change > 0))
    lost = NOISE * differences.evaluation.eps * size > NOISY * change.max()
    if still.any() and not pulled(differences.covectors[:1] * still).any():
        return still, lost & ~still
    return none, lost


def unseen_notes(subject: CheckSubject, values, lost: np.ndarray, jumps: np.ndarray) -> list[str]:
    """The notes on outputs that are left out, one for each reason."""
    own, notes = _trees.to_numpy(subject.outputs), []
    for where, why in ((jumps, "the function jumps here"), (lost, "lost beside so large a number")):
        if where.any():
            k = int(np.argmax(where))
            numbers = f"{own[k]:.7g}" + (f", in float64 {values[k]:.7g}" if where is jumps else "")
            name = f"{subject.output_element(k)}: {int(where.sum())} of {where.size} outputs"
            notes.append(f"{name} not verified: {why} ({numbers})")
    return notes
