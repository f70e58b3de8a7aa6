"""Evaluating the gradient of one example with the gradients of leaves left as sums of products."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax.extend.core import JaxprEqn, Literal, Var

from clipgrad._jaxpr import CALLS, JIT, REMAT, Hook, bind, called_program
from clipgrad._per_example.blocks import dense_gradient
from clipgrad._per_example.course import Course, EquationPath, Lost, following, want_leaves, why
from clipgrad._per_example.grams import outer_factors, outer_squares, squares
from clipgrad._per_example.layouts import convolved
from clipgrad._per_example.squares import Squares
from clipgrad._per_example.sums import Contract, Summed
from clipgrad._per_example.terms import CHANGED_CARRY, Products, Unfollowed
from clipgrad._per_example.wanted import WantedGradient, WantRule, Wants, register_wants, wanted

FollowRule = Callable[["Follow", JaxprEqn, list, Wants], Sequence | None]
_RULES: dict[str, FollowRule] = {}
# Equations that add all of their inputs, and those whose rules take sums over examples too.
_ADDING = frozenset(["add", "add_any", "sub", "concatenate"])
_OF_ANYTHING = frozenset([*JIT, *CALLS, "scan", "optimization_barrier"])


def follows(*names: str, wants: WantRule | None) -> Callable[[FollowRule], FollowRule]:
    """Decorates how primitives of these names are applied to, or make, sums of products.

    ``wants`` says which of their inputs may be such sums; ``None``: they only make them.
    """

    def register(function: FollowRule) -> FollowRule:
        _RULES.update(dict.fromkeys(names, function))
        if wants is not None:
            register_wants(names, wants)
        return function

    return register


class Reduction(Protocol):
    """The number or sum that a gradient becomes where no factor is needed any more."""

    def __call__(self, value: Any, want: WantedGradient) -> Any: ...

    def contracted(self, contract: Contract, factors: tuple, want: WantedGradient) -> Any | None:
        """The value of a product of two factors, if it is known without its terms."""
        return None

    def adds(self, want: WantedGradient) -> bool:
        """Whether values are added up over examples here, so that a carry can hold their sum."""
        return False


@dataclasses.dataclass(frozen=True)
class Measuring(Reduction):
    """Measures what is all of a gradient where it arises.

    NaN and inf count as 0 in the leaves ``zero``.
    """

    zero: frozenset[int]
    # Traced once for all leaves of one shape and kind in this pass.
    traced: Callable[[Any], Squares] = dataclasses.field(
        default_factory=lambda: jax.jit(lambda value: _squares(value)), compare=False
    )

    def squares(self, value: Any) -> Squares:
        """The squares of products, or of an array."""
        arrays = outer_factors(value) if isinstance(value, Products) else None
        if arrays is None:
            return self.traced(value)
        return outer_squares([self.traced(x) for x in arrays], arrays)


def _squares(value: Any) -> Squares:
    return squares(value) if isinstance(value, Products) else Squares.of(value)


@dataclasses.dataclass(frozen=True)
class SquaredNorm(Measuring):
    """The squares of a gradient in place of it."""

    def __call__(self, value: Any, want: WantedGradient) -> Any:
        if not want.is_whole or isinstance(value, Squares):
            return value
        if not want.leaves <= self.zero:
            return self.squares(value)
        # What becomes an array later has NaN and inf as 0 there.
        return value if isinstance(value, Products) else Squares.of(value, zero=True)


@dataclasses.dataclass(frozen=True)
class KeptFactors(Measuring):
    """The squares of a gradient beside its products.

    In a scan the Gram matrices are then of one step, which stay in the cache of a processor:
    the norms of four scanned layers took about a quarter of the time of all at once. So
    does an array there, and it need not be read again in another order.
    """

    clipped: frozenset[int] = frozenset()

    def __call__(self, value: Any, want: WantedGradient) -> Any:
        """The products, or the array as one, with the squares of what is all of a gradient."""
        if not want.is_whole or not want.leaves <= self.clipped:
            return value
        if not isinstance(value, Products):
            real = jnp.issubdtype(value.dtype, jnp.floating)
            return self.arrays(Products.of(value), want) if real else value
        known = value.squares is not None
        return value if known else dataclasses.replace(value, squares=self.squares(value))

    def arrays(self, value: Products, want: WantedGradient) -> Products:
        """A gradient whose terms are arrays at places of their own, with their squares."""
        arrays, zero = jax.tree.leaves(value), want.leaves <= self.zero
        alone = len(arrays) == 1 and not zero
        found = self.squares(arrays[0]) if alone else Squares.of(*arrays, zero=zero)
        if zero:
            finite = lambda x: jnp.where(jnp.isfinite(x), x, jnp.zeros_like(x))  # noqa: E731
            value = jax.tree.map(finite, value)
        return dataclasses.replace(value, squares=found)


@dataclasses.dataclass(frozen=True, eq=False)
class Follow(Hook):
    """Keeps what is wanted as `Products`, or as its ``reduction`` where that is possible."""

    wanted: Mapping[Any, WantedGradient]
    reduction: Reduction | None
    course: Course
    varying: frozenset[Var]  # what differs between examples
    around: EquationPath = ()
    # For what is broadcast or cast, the array before it and the axes that it has.
    sources: dict[Any, tuple[Any, tuple[int, ...]]] = dataclasses.field(default_factory=dict)

    @classmethod
    def of(cls, equation: JaxprEqn, wants: Wants, like: "Follow") -> "Follow":
        """A hook for the program of an equation, whose outputs make these gradients."""
        found = wanted(called_program(equation), wants, like.varying)
        return dataclasses.replace(like, wanted=found, around=like.place(equation), sources={})

    def __call__(self, equation: JaxprEqn, inputs: list) -> Sequence | None:
        wants = [self.wanted.get(v) for v in equation.outvars]
        if not any(wants):
            self._remember(equation, inputs)
            if equation.primitive.name == "conv_general_dilated":
                return [convolved(equation, *inputs)]
            return bind(equation, inputs)
        if equation.primitive.name in REMAT:
            return None
        with following(want_leaves(wants)):
            outputs = self._followed(equation, inputs, wants)
            pairs, reduced = zip(outputs, wants, strict=True), self.reduction
            return [v if reduced is None or want is None else reduced(v, want) for v, want in pairs]

    def _followed(self, equation: JaxprEqn, inputs: list, wants: Wants) -> Sequence:
        """The outputs by the rule of the primitive, or as arrays where it has none or fails."""
        place, name = self.place(equation), equation.primitive.name
        if any(isinstance(x, Summed) for x in inputs) and name not in _OF_ANYTHING:
            return self._of_sums(equation, inputs, wants[0])
        # Squares pass where products of one example would become an array.
        if place not in self.course.stops or any(isinstance(x, Squares) for x in inputs):
            try:
                if name not in _RULES:
                    raise Unfollowed(f"computed by {name}")
                if (outputs := _RULES[name](self, equation, inputs, wants)) is not None:
                    return outputs
            except Lost:
                raise
            except Exception as error:
                self.course.stop(place, want_leaves(wants), why(error))
        return bind(equation, [gradient_array(x) for x in inputs])

    def _of_sums(self, equation: JaxprEqn, inputs: list, want: Any) -> list[Summed]:
        """An equation applied to sums over the examples, which stay in float32 or wider."""
        name, reduction = equation.primitive.name, self.reduction
        if name in ("convert_element_type", "reduce_precision"):
            return inputs
        if name in _ADDING and reduction is not None:
            inputs = [reduction(x, want) for x in inputs]
        sums = [x.array for x in inputs if isinstance(x, Summed)]
        wide = max((x.dtype for x in sums), key=lambda dtype: dtype.itemsize)
        if name == "select_n":  # where a weight is NaN, what a mask leaves out is NaN as well
            inputs = [inputs[0], *(x if isinstance(x, Summed) else 0 * sums[0] for x in inputs[1:])]
        changed = {"preferred_element_type": wide} if name == "dot_general" else {}
        return [Summed(x) for x in bind(equation, [_as_wide(x, wide) for x in inputs], **changed)]

    def place(self, equation: JaxprEqn) -> EquationPath:
        return (*self.around, equation.outvars[0])

    def _remember(self, equation: JaxprEqn, inputs: list) -> None:
        """Keeps what an array was before it was broadcast."""
        name, made = equation.primitive.name, next(iter(equation.outvars), None)
        if name == "broadcast_in_dim":
            shape, dimensions = jnp.shape(inputs[0]), equation.params["broadcast_dimensions"]
            whole = equation.params["shape"]
            real = [i for i, n in enumerate(shape) if n == whole[dimensions[i]]]
            small = jnp.reshape(inputs[0], [shape[i] for i in real])
            self.sources[made] = small, tuple(int(dimensions[i]) for i in real)
        elif name in ("convert_element_type", "copy") and _first_operand(equation) in self.sources:
            small, axes = self.sources[_first_operand(equation)]
            aval: Any = equation.outvars[0].aval
            # A cast to integers or booleans changes the numbers.
            self.sources[made] = jnp.asarray(small, aval.dtype), axes

    def source(self, atom: Any, array: Any, shape: Sequence[int]) -> tuple[Any, tuple[int, ...]]:
        """An array without the axes along which it is one number, and the axes that it has."""
        if not isinstance(atom, Literal) and atom in self.sources:
            return self.sources[atom]
        real = [i for i, n in enumerate(jnp.shape(array)) if n == shape[i]]
        return jnp.reshape(array, [shape[i] for i in real]), tuple(real)

    def inside(self, equation: JaxprEqn, step: Any) -> "Follow":
        return Follow.of(equation, [self.wanted.get(v) for v in equation.outvars], self)


def _as_wide(x: Any, wide: Any) -> Any:
    """An array beside sums over the examples, in their dtype if it is of real numbers."""
    x = x.array if isinstance(x, Summed) else x
    return x.astype(wide) if jnp.issubdtype(x.dtype, jnp.floating) else x


def gradient_array(value: Any) -> Any:
    """The gradient itself, in place of products."""
    if not isinstance(value, Products):
        return value
    if value.carried:
        raise Lost(value.carried[0].leaves, CHANGED_CARRY)
    return dense_gradient(value).astype(value.dtype)


def is_plain_array(value: Any) -> bool:
    """Whether this is an array, not a sum of products or of squares."""
    return not isinstance(value, Products | Squares | Summed)


def tie(values: Sequence) -> list:
    """`jax.lax.optimization_barrier` of arrays and sums of products."""
    return list(jax.lax.optimization_barrier(list(values)))


def no_products(aval: Any) -> Products:
    return Products((), tuple(aval.shape), jnp.dtype(aval.dtype))


def _first_operand(equation: JaxprEqn) -> Any:
    atom = equation.invars[0]
    return None if isinstance(atom, Literal) else atom
