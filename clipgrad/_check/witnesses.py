"""The witnesses of a gradient: the rule as it is written, and plain AD, both in float64."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import clipgrad._programs as _programs
from clipgrad._check import vectors
from clipgrad._check.checked_function import CheckedFunction
from clipgrad._check.float64 import Unsupported, Wide, in_float64
from clipgrad._check.slopes import Evaluation, Neighborhood, spread
from clipgrad._check.tolerances import GRADIENTS, RUNS_OF_GRADIENT, narrowest
from clipgrad._check.traced_again import has_rules
from clipgrad._check.user_code import UserError, call_compiled, call_user
from clipgrad._programs import Parts, rounded_in_float64

Call = Callable[[list, _programs.Hook | None], Any]


class Witness:
    """A gradient as a function of inputs and a cotangent, in float64.

    Args:
      call: from inputs and cotangents in one list, and a hook, to the gradient's leaves.
      function: the function.
    """

    def __init__(self, call: Call, function: CheckedFunction):
        self.call, self._function, self._outputs = call, function, function.outputs
        jit = _jit_of(function, GRADIENTS)
        self._run = jit(lambda leaves: call_user(call, leaves, None))
        self._platform = next(iter(function.inputs[0].devices())).platform
        self._moved: Callable | None = None

    def at(self, xs: Sequence[Any], covectors: np.ndarray) -> np.ndarray:
        """The gradients for each cotangent, shape (cotangents, inputs)."""
        with in_float64():
            inputs = [self._inputs(xs, u) for u in covectors]
            wide = [[vectors.widened_leaf(x) for x in leaves] for leaves in inputs]
            gradients = [call_compiled(self._run, leaves) for leaves in wide]
            return np.stack([vectors.gradient_vector(leaves) for leaves in gradients])

    def moved(self, xs, covectors: np.ndarray, parts: Parts, exact: np.ndarray) -> np.ndarray:
        """The distance that roundings move each element by, for the cotangent with the most.

        The root mean square of some runs, in which each number moves by `parts` of a rounding.
        """
        most = np.zeros(exact.shape[1])
        for u, gradient in zip(covectors, exact, strict=True):
            inputs = self._inputs(xs, u)
            self._moved = moved = self._moved or self._traced(inputs)
            leaves = [np.asarray(x) for x in inputs]
            run = lambda s, m=moved, x=leaves: vectors.gradient_vector(m(x, s, parts))  # noqa: E731
            with in_float64():
                most = np.fmax(most, spread(run, gradient, RUNS_OF_GRADIENT))
        return most

    def moved_with_inputs(self, xs, covectors: np.ndarray, exact: np.ndarray) -> np.ndarray:
        """The distance that a rounding of each input moves each element by: no other program."""
        run = lambda seed: self.at(vectors.moved_leaves(xs, seed, is_wide=True), covectors)  # noqa: E731
        return spread(run, exact, RUNS_OF_GRADIENT).max(axis=0)

    def _inputs(self, xs, u: np.ndarray) -> list:
        return [*xs, *vectors.cotangent_leaves(u, self._outputs)]

    def _traced(self, inputs: list) -> Callable:
        hook, platform = _programs.NoRules(jnp.float64), self._platform
        program = jax.make_jaxpr(lambda leaves: self.call(leaves, hook))(inputs)
        jit = _jit_of(self._function, GRADIENTS * RUNS_OF_GRADIENT)

        def rounded_gradient(leaves, seed, parts):
            return rounded_in_float64(program, leaves, seed, parts, platform)

        is_cut = _programs.has_repeated_operations(program)
        return _programs.ByPieces(rounded_gradient, jit) if is_cut else jit(rounded_gradient)


def _jit_of(function: CheckedFunction, runs: int) -> Callable[[Callable], Callable]:
    """`jax.jit` for so many gradients of a function in float64."""
    if function.program is None:
        return _programs.low_jit
    return _programs.jit_by_size(function.program, runs, is_wide=True)


class Witnesses(NamedTuple):
    """A function, its gradients, and how its slopes are measured.

    Attributes:
      function: the function of its float leaves, and the point.
      rule: the VJP as it is written, in float64; None if it cannot be had.
      plain: plain AD in float64; None if it cannot be had. It is the rule where there is none.
      here: the function's values at the point and beside it, of which slopes are made.
      narrow: the narrowest type that the function computes in.
      is_ruled: whether it has a rule that is not of JAX's own operations.
      loops: whether it holds a loop that stops by its numbers.
    """

    function: CheckedFunction
    rule: Witness | None
    plain: Witness | None
    here: Neighborhood
    narrow: str
    is_ruled: bool
    loops: bool = False


def find_neighborhood(
    function: CheckedFunction, notes: list[str], hold: bool = True
) -> tuple[Neighborhood, Wide | None]:
    """The values for slopes: in float64 if they can be, or else in the function's own type."""
    try:
        wide = Wide(function.program)
        here = Neighborhood(Evaluation(function, wide, hold), function.inputs)
        here.require_same_values()
        return here, wide
    except (Unsupported, UserError) as error:
        notes.append(f"evaluation in float64 is not possible ({error})")
        here = Neighborhood(Evaluation(function, None, hold), function.inputs)
        _ = here.base  # where the function raises an error, it does so now
        return here, None


def find_witnesses(
    function: CheckedFunction, notes: list[str], of_function: Witnesses | None = None
) -> Witnesses:
    """The witnesses of a function, or of the VJP of another one, whose witnesses are known.

    Plain AD of a VJP is that of the plain VJP. In slopes of a VJP `stop_gradient` is not held: that
    would hide exactly the derivative that a rule forgets.
    """
    here, wide = find_neighborhood(function, notes, hold=of_function is None)
    program, rule, plain = function.program, None, None
    types = _programs.computed_types(program) if program is not None else set()
    is_ruled = has_rules(function) if of_function is None else of_function.is_ruled
    if wide is not None:
        first = wide if of_function is None else of_function.plain and of_function.plain.call
        plain = _plain_ad(function, first)
        rule = plain if of_function is None and not is_ruled else _rule(function, notes)
    narrow, loops = narrowest([*function.dtypes, *types]), _stops_by_numbers(program)
    return Witnesses(function, rule, plain, here, narrow, is_ruled, loops)


def _plain_ad(function: CheckedFunction, evaluated: Call | None) -> Witness | None:
    count = len(function.inputs)
    if evaluated is None:
        return None

    def call(leaves, hook):
        _, pull = jax.vjp(lambda xs: evaluated(xs, hook), leaves[:count])
        return pull(leaves[count:])[0]

    return Witness(call, function)


def _rule(function: CheckedFunction, notes: list[str]) -> Witness | None:
    count = len(function.inputs)
    pull_back = lambda leaves: function.pull_back(leaves[:count], leaves[count:])  # noqa: E731
    seeds = [jax.ShapeDtypeStruct(y.shape, y.dtype) for y in function.outputs]
    try:
        return Witness(
            Wide(call_user(jax.make_jaxpr(pull_back), [*function.inputs, *seeds])), function
        )
    except (Unsupported, UserError) as error:
        notes.append(f"no rule in float64 ({error})")
        return None


def _stops_by_numbers(program: Any) -> bool:
    """Whether the condition of a `while` looks at floating numbers."""
    equations = [] if program is None else _programs.equations(program)
    conditions = (e.params["cond_jaxpr"] for e in equations if _programs.is_while(e))
    inner = (e for condition in conditions for e in _programs.equations(condition))
    return any(_programs.holds_floats(v) for e in inner for v in e.invars)
