"""How to evaluate the function for differences: the best way that works on it."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

import clipgrad._jaxpr as _jaxpr
import clipgrad._trees as _trees
from clipgrad._check.differences import Differences, Evaluation, Moves
from clipgrad._check.points import element_scales, random_direction
from clipgrad._check.subject import CheckSubject
from clipgrad._check.tolerances import SAME_VALUES, narrowest
from clipgrad._check.widening import Unsupported, Widened, widened_program
from clipgrad._errors import first_line

# Binary exponents of the steps, in units of the scale of each element.
#   quick: two steps that Richardson extrapolates. In float64 the truncation error (h ** 4) and the
#     rounding error (eps / h) of 2 ** -16 are both below 1e-10 of an ordinary function.
#   finer: smaller steps for a random direction, where those of `quick` cross a kink of a network
#     (`test_auto_takes_under_a_hundred_evaluations_for_a_deep_relu_network`).
#   ladder: for a close look, from steps that no rounding spoils to steps within which no kink lies.
WIDE_QUICK, WIDE_FINER, WIDE_LADDER = (16, 18), (22, 24), tuple(range(4, 33, 4))
SINGLE_QUICK, SINGLE_LADDER = (4, 5), tuple(range(2, 11))
HALF_QUICK, HALF_LADDER = (2, 3), (1, 2, 3, 4)
# Steps that distinguish float64 from a narrower type: at 2 ** -33 a float32 does not move.
PROBE = (10, 33)
MOVED_FAR = 2.0**-4  # a part of the inputs that is far above rounding
CAST = "float64 (inputs cast)"


class Chaotic(Exception):
    """Rounding of the inputs alone moves the values by a hundredth or more."""


class _NotSmooth(Exception):
    """A float64 evaluation that computes in a narrower type inside."""


def choose(
    subject: CheckSubject, covectors: np.ndarray, notes: list[str]
) -> tuple[Differences, Widened | None]:
    """Try the evaluations in order, down to running them, and return the first that works.

    With it comes the widened program, if that is it; what was not possible goes to `notes`.
    """
    ways: list[tuple[str, Callable]] = [
        ("evaluation in float64", evaluation_in_float64),
        ("casting the inputs to float64", lambda subject: (_cast(subject), None)),
        ("evaluation in native precision", lambda subject: (_native(subject), None)),
    ]
    for label, make in ways if subject.program is not None else ways[2:]:
        try:
            evaluation, widened = make(subject)
            differences = Differences(evaluation, covectors)
            _probe_evaluation(subject, differences)
            return differences, widened
        except Exception as error:
            notes.append(f"{label} is not possible ({why_not(error)})")
            if isinstance(error, _NotSmooth) and _is_chaotic(subject):
                raise Chaotic from error
    raise ValueError("the function cannot be evaluated at a point nearby: " + "; ".join(notes))


def evaluation_in_float64(subject: CheckSubject, hold: bool = True) -> tuple[Evaluation, Widened]:
    """The evaluation of the widened program; `hold` keeps what is behind `stop_gradient` fixed."""
    widened = widened_program(subject.program)
    held = hold and widened.stops
    evaluation = _wide_evaluation(
        widened.held if held else widened.call,
        subject,
        "float64",
        constants=_jaxpr.opened(subject.program)[1],
        key=(widened.text, held),
        held=held,
    )
    return evaluation, widened


def _wide_evaluation(call, subject: CheckSubject, label: str, **options) -> Evaluation:
    like = [jax.ShapeDtypeStruct(x.shape, _trees.wide_dtype(x.dtype)) for x in subject.inputs]
    steps = WIDE_QUICK, WIDE_LADDER
    return Evaluation(call, like, np.float64, label, *steps, finer=WIDE_FINER, **options)


def _cast(subject: CheckSubject) -> Evaluation:
    names = [equation.primitive.name for equation in _jaxpr.equations(subject.program)]
    if not jax.config.read("jax_enable_x64") and any("callback" in name for name in names):
        raise Unsupported("a callback runs in another thread, where 64-bit types are off")
    return _wide_evaluation(lambda constants, xs: subject.fun(xs), subject, CAST)


def _native(subject: CheckSubject) -> Evaluation:
    like = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in subject.inputs]
    name = narrowest([*subject.dtypes, *(_trees.real_dtype(y).name for y in subject.outputs)])
    steps = {"float64": (WIDE_QUICK, WIDE_LADDER), "float32": (SINGLE_QUICK, SINGLE_LADDER)}
    quick, ladder = steps.get(name, (HALF_QUICK, HALF_LADDER))
    dtype = np.float64 if name == "float64" else np.float32
    compiled = subject.program is not None
    call = lambda constants, xs: subject.fun(xs)  # noqa: E731
    return Evaluation(call, like, dtype, name, quick, ladder, compiled=compiled)


def _probe_evaluation(subject: CheckSubject, differences: Differences) -> None:
    """Run it once: same values as the function's own, and no narrow type hidden inside."""
    differences.set_base(subject.inputs)
    _same_values(subject, differences.base)
    if differences.evaluation.key is not None:  # no callback that may refuse another point
        return
    along = random_direction(subject, 0, 0) * element_scales(subject.inputs)
    gradient, first = np.zeros((len(differences.covectors), along.size)), np.zeros(len(PROBE), int)
    whole = Moves(first, first + along.size, 2.0 ** -np.array(PROBE))
    slopes = differences.measure(subject.inputs, along, gradient, whole)
    if differences.evaluation.label != CAST:
        return
    far, near = slopes.central
    noise = slopes.noise[1]
    jumps = np.abs(near - far) > 10 * np.abs(far) + 10 * noise
    if np.any(jumps | ((near == 0) & (np.abs(far) > 10 * noise))):
        raise _NotSmooth("the function computes in a narrower type inside")


def _same_values(subject: CheckSubject, values: np.ndarray) -> None:
    """Raises an error unless the values are the function's own but for rounding.

    A value that is itself a rounding error, as the determinant of a singular matrix, is compared
    with how far larger moves of the inputs move it.
    """
    own = _trees.to_numpy(subject.outputs)
    off, size = np.sqrt(np.mean((own - values) ** 2)), np.sqrt(np.mean(own**2))
    if not np.isfinite(own).all() or off <= SAME_VALUES * size + jnp.finfo(np.float32).tiny:
        return
    if not off <= SAME_VALUES * max(size, _change(subject, MOVED_FAR)):
        raise _NotSmooth("its values differ from those of the function")


def _is_chaotic(subject: CheckSubject) -> bool:
    """Whether one rounding of each input moves the values by a part that matters."""
    eps = max(float(jnp.finfo(x.dtype).eps) for x in subject.inputs)
    size = np.sqrt(np.mean(_trees.to_numpy(subject.outputs) ** 2))
    return bool(_change(subject, eps) > SAME_VALUES / 10 * max(size, _change(subject, MOVED_FAR)))


def _change(subject: CheckSubject, part: float) -> float:
    """How far the values move when each input does by about a part of itself, up or down."""
    factors = 1 + part * random_direction(subject, 0, 0)
    like = [_trees.widened_leaf(x) for x in subject.inputs]
    wide = _trees.from_rows(_trees.to_numpy(subject.inputs) * factors, like)
    leaves = [jax.device_put(w.astype(x.dtype)) for w, x in zip(wide, subject.inputs, strict=True)]
    change = _trees.to_numpy(subject.fun(leaves)) - _trees.to_numpy(subject.outputs)
    return float(np.sqrt(np.mean(change**2)))


def why_not(error: Exception) -> str:
    """Why something is not possible, in one line."""
    is_said = isinstance(error, (_NotSmooth, Unsupported))
    return str(error) if is_said else first_line(error)
