"""The variables of a program that only make gradients, and so may stay sums of products."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.extend.core import JaxprEqn, Literal, Var

from clipgrad._jaxpr import called_program, opened, scan_counts


class WantedGradient(NamedTuple):
    """The gradients that a variable makes."""

    leaves: frozenset[int]  # the gradients
    is_whole: bool  # whether it is all of a gradient, or its squares add up to one's
    # Whether it may be summed over examples: what follows is linear, the same for all of them.
    is_summable: bool
    steps: int  # how many of it are added up in the carries of scans
    is_contracted: bool = False  # whether it is multiplied with a matrix, and never an array itself


Wants = Sequence[WantedGradient | None]


class Variables(NamedTuple):
    """Facts about the variables of a program."""

    made: Mapping[Var, JaxprEqn]  # the equation that makes each
    varying: frozenset[Var]  # those that differ between examples, in programs inside as well
    used: set[Var]  # those that something uses, as far as this is known

    def is_shared(self, atom: Any) -> bool:
        """Whether this is the same for all examples."""
        return isinstance(atom, Literal) or atom not in self.varying

    def is_broadcast(self, atom: Any) -> bool:
        """Whether this is a smaller array along some axes."""
        return _broadcast_of(atom, self.made) is not None


WantRule = Callable[[JaxprEqn, Wants, Variables], Wants]
_WANT_RULES: dict[str, WantRule] = {}


def register_wants(names: Sequence[str], rule: WantRule) -> None:
    """Registers what says which inputs of these primitives may be sums of products."""
    _WANT_RULES.update(dict.fromkeys(names, rule))


def wanted(program: Any, outputs: Wants, varying: frozenset[Var]) -> dict[Var, WantedGradient]:
    """The variables that are used for gradients alone, by changes that factors can follow.

    The variables ``varying`` differ between examples.
    """
    jaxpr = opened(program)[0]
    made = {variable: equation for equation in jaxpr.eqns for variable in equation.outvars}
    found: dict[Var, list[WantedGradient]] = {}
    spoiled: set[Var] = set()
    variables = Variables(made, varying, set())

    def use(atoms: Sequence, wants: Wants) -> None:
        for atom, want in zip(atoms, wants, strict=True):
            if isinstance(atom, Literal):
                continue
            variables.used.add(atom)
            if want is None:
                spoiled.add(atom)
            else:
                found.setdefault(atom, []).append(want)

    def of(variable: Var) -> WantedGradient | None:
        uses = found.get(variable, ())
        if not uses or variable in spoiled:
            return None
        return _together(uses)

    use(jaxpr.outvars, outputs)
    for equation in reversed(jaxpr.eqns):
        wants = [of(variable) for variable in equation.outvars]
        nothing: Wants = [None] * len(equation.invars)
        rule = _WANT_RULES.get(equation.primitive.name) if any(wants) else None
        use(equation.invars, rule(equation, wants, variables) if rule else nothing)
    return {v: want for v in found if (want := of(v)) is not None}


def _together(wants: Sequence[WantedGradient]) -> WantedGradient:
    """The want of a variable with these uses."""
    return WantedGradient(
        frozenset[int]().union(*(want.leaves for want in wants)),
        len(wants) == 1 and wants[0].is_whole,
        all(want.is_summable for want in wants),
        max(want.steps for want in wants),
        any(want.is_contracted for want in wants),
    )


def joint(want: WantedGradient | None) -> WantedGradient | None:
    """The want of one of several parts of a gradient."""
    return want and want._replace(is_whole=False)


def own(want: WantedGradient | None) -> WantedGradient | None:
    """The want of a variable that an example changes by numbers of its own."""
    return want and want._replace(is_whole=False, is_summable=False)


def is_zero(atom: Any) -> bool:
    """Whether this is the literal 0."""
    return isinstance(atom, Literal) and jnp.ndim(atom.val) == 0 and bool(atom.val == 0)


def _broadcast_of(atom: Any, made: Mapping[Var, JaxprEqn]) -> JaxprEqn | None:
    """The equation that broadcasts an array to this input, if there is one."""
    equation = None if isinstance(atom, Literal) else made.get(atom)
    while equation is not None and equation.primitive.name in ("convert_element_type", "copy"):
        atom = equation.invars[0]
        equation = None if isinstance(atom, Literal) else made.get(atom)
    name = "" if equation is None else equation.primitive.name
    return equation if name == "broadcast_in_dim" else None


def want_unchanged(equation: Any, wants: Wants, variables: Variables) -> Wants:
    """A change of place, sign or name."""
    return list(wants)


def want_converted(equation: Any, wants: Wants, variables: Variables) -> Wants:
    """A change from one floating dtype to another."""
    kinds = [v.aval.dtype for v in (*equation.invars, *equation.outvars)]
    return list(wants) if all(jnp.issubdtype(k, jnp.floating) for k in kinds) else [None]


def want_broadcast(equation: Any, wants: Wants, variables: Variables) -> Wants:
    """A broadcast that repeats nothing."""
    same = equation.invars[0].aval.size == equation.outvars[0].aval.size
    return [wants[0] if same else None] + [None] * (len(equation.invars) - 1)


def want_padded(equation: Any, wants: Wants, variables: Variables) -> Wants:
    """Zeros around it, and in between."""
    kept = all(low >= 0 and high >= 0 for low, high, _ in equation.params["padding_config"])
    want = wants[0] if kept else joint(wants[0])
    return [want if is_zero(equation.invars[1]) else None, None]


def want_part(equation: Any, wants: Wants, variables: Variables) -> Wants:
    """A part of it; or one of several that are added, or put side by side."""
    return [joint(wants[0])] * len(equation.invars)


def want_reduced(equation: Any, wants: Wants, variables: Variables) -> Wants:
    """A sum over axes, of which two are left."""
    return [joint(wants[0]) if equation.outvars[0].aval.ndim >= 2 else None]


def want_product(equation: Any, wants: Wants, variables: Variables) -> Wants:
    """A product with what is smaller, one number along some axes, or the same for all examples."""
    first, second = equation.invars
    if _may_multiply(second, first, equation, variables):
        return [_multiplied_by(wants[0], second, variables), None]
    if equation.primitive.name == "mul" and _may_multiply(first, second, equation, variables):
        return [None, _multiplied_by(wants[0], first, variables)]
    return [None, None]


def want_selected(equation: Any, wants: Wants, variables: Variables) -> Wants:
    """Some of its elements, and zeros."""
    which, *cases = equation.invars
    zeros = [_is_zeros(case, variables) for case in cases]
    places = [i for i, zero in enumerate(zeros) if not zero]
    nothing: list[WantedGradient | None] = [None] * len(equation.invars)
    if len(places) == 1 and _may_multiply(which, cases[places[0]], equation, variables):
        nothing[1 + places[0]] = _multiplied_by(wants[0], which, variables)
    return nothing


def _may_multiply(array: Any, gradient: Any, equation: Any, variables: Variables) -> bool:
    """Whether the array may be a factor beside those of the gradient."""
    if array.aval.size < equation.outvars[0].aval.size or variables.is_broadcast(array):
        return True
    return variables.is_shared(array) and not variables.is_shared(gradient)


def _multiplied_by(
    want: WantedGradient | None, array: Any, variables: Variables
) -> WantedGradient | None:
    return joint(want) if variables.is_shared(array) else own(want)


def _is_zeros(atom: Any, variables: Variables) -> bool:
    """Whether this is 0, or an array of it."""
    equation = _broadcast_of(atom, variables.made)
    return is_zero(atom) or equation is not None and is_zero(equation.invars[0])


def want_contracted(equation: Any, wants: Wants, variables: Variables) -> Wants:
    """A product with a matrix that is the same for all examples."""
    first, second = (variables.is_shared(atom) for atom in equation.invars)
    want = joint(wants[0])
    inner = want and want._replace(is_contracted=True)
    return [None if first or not second else inner, None if second or not first else inner]


def want_split(equation: Any, wants: Wants, variables: Variables) -> Wants:
    """A whole of which every part is wanted."""
    return [None if None in wants else _want_of_parts(wants)]


def want_unstacked(equation: Any, wants: Wants, variables: Variables) -> Wants:
    """A stack of which every layer is wanted that is used: others are not trained."""
    pairs = zip(equation.outvars, wants, strict=True)
    spoiled = any(want is None and variable in variables.used for variable, want in pairs)
    return [None if spoiled else _want_of_parts([want for want in wants if want is not None])]


def _want_of_parts(wants: Sequence[Any]) -> WantedGradient:
    """The want of a whole, which is left as it is, whatever its parts are for."""
    return _together(wants)._replace(is_whole=False, is_contracted=False)


def is_matrix(array: Any) -> bool:
    """Whether an array of this shape has more than one axis: a vector's gradient is no product."""
    return sum(n > 1 for n in array.shape) >= 2


def want_scattered(equation: Any, wants: Wants, variables: Variables) -> Wants:
    """Rows that are added at an index."""
    # Rows of an embedding are there anyway; a matrix of a stack may be a product itself.
    several = len(equation.params["dimension_numbers"].update_window_dims) >= 2
    return [own(wants[0]), None, own(wants[0]) if several else None]


def want_updated(equation: Any, wants: Wants, variables: Variables) -> Wants:
    """A slice that is written at an index."""
    matrix = is_matrix(equation.invars[1].aval)
    rest: list[WantedGradient | None] = [None] * (len(equation.invars) - 2)
    return [own(wants[0]), own(wants[0]) if matrix else None, *rest]


def want_called(equation: Any, wants: Wants, variables: Variables) -> Wants:
    """The inputs of a program, by what it does with them."""
    inner = wanted(called_program(equation), wants, variables.varying)
    return [inner.get(variable) for variable in opened(called_program(equation))[0].invars]


def want_scan(equation: Any, wants: Wants, variables: Variables) -> Wants:
    """The carries of a scan that its body only adds to."""
    constants, carried = scan_counts(equation)
    rest = len(equation.invars) - constants - carried
    varying = variables.varying
    added = added_carries(equation, wants, range(carried), lambda want: True, varying)
    summed = added_carries(equation, wants, added, lambda want: want.is_summable, varying)
    first = [
        want and want._replace(is_whole=False, is_summable=i in summed) if i in added else None
        for i, want in enumerate(wants[:carried])
    ]
    return [None] * constants + first + [None] * rest


def added_carries(
    equation: JaxprEqn,
    wants: Wants,
    found: Iterable[int],
    may: Callable[[WantedGradient], bool],
    varying: frozenset[Var],
) -> set[int]:
    """The carries of a scan that its body only adds to, of those whose wants are allowed."""
    constants, carried = scan_counts(equation)
    program = called_program(equation)
    state = opened(program)[0].invars[constants : constants + carried]
    found = {i for i in found if (want := wants[i]) is not None and may(want)}
    while found:
        flags = [want if i in found else None for i, want in enumerate(wants[:carried])]
        inner = wanted(program, [*flags, *wants[carried:]], varying)
        kept = {i for i in found if (want := inner.get(state[i])) is not None and may(want)}
        if kept == found:
            break
        found = kept
    return found
