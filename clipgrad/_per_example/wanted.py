"""The variables of a program that only make gradients, and so may stay sums of products."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.extend.core import JaxprEqn, Literal, Var

from clipgrad._jaxpr import CALLS, JIT, REMAT, called_program, opened, scan_counts


class Want(NamedTuple):
    """The gradients that a variable makes."""

    leaves: frozenset[int]  # the gradients
    solo: bool  # whether it is all of a gradient, or its squares add up to those of one
    final: bool  # whether it may be summed over examples: what follows is the same for all of them
    repeat: int  # how many of it are added up in the carries of scans


Wants = Sequence[Want | None]
Pass = Callable[[JaxprEqn, Wants, Mapping[Var, JaxprEqn]], Wants]
_PASSES: dict[str, Pass] = {}


def passes(*names: str) -> Callable[[Pass], Pass]:
    """Decorates what says which inputs of these primitives may be sums of products."""

    def register(function: Pass) -> Pass:
        _PASSES.update(dict.fromkeys(names, function))
        return function

    return register


def wanted(program: Any, outputs: Wants) -> dict[Var, Want]:
    """The variables that are used for gradients alone, by changes that factors can follow."""
    jaxpr = opened(program)[0]
    made = {variable: equation for equation in jaxpr.eqns for variable in equation.outvars}
    found: dict[Var, list[Want]] = {}
    spoiled: set[Var] = set()

    def use(atoms: Sequence, wants: Wants) -> None:
        for atom, want in zip(atoms, wants, strict=True):
            if isinstance(atom, Literal):
                continue
            if want is None:
                spoiled.add(atom)
            else:
                found.setdefault(atom, []).append(want)

    def of(variable: Var) -> Want | None:
        uses = found.get(variable, ())
        if not uses or variable in spoiled:
            return None
        leaves = frozenset[int]().union(*(want.leaves for want in uses))
        solo = len(uses) == 1 and uses[0].solo
        final = len(leaves) == 1 and all(want.final for want in uses)
        return Want(leaves, solo, final, max(want.repeat for want in uses))

    use(jaxpr.outvars, outputs)
    for equation in reversed(jaxpr.eqns):
        wants = [of(variable) for variable in equation.outvars]
        nothing: Wants = [None] * len(equation.invars)
        rule = _PASSES.get(equation.primitive.name) if any(wants) else None
        use(equation.invars, rule(equation, wants, made) if rule else nothing)
    return {v: want for v in found if (want := of(v)) is not None}


def joint(want: Want | None) -> Want | None:
    """The want of one of several parts of a gradient."""
    return want and want._replace(solo=False)


def own(want: Want | None) -> Want | None:
    """The want of a variable that an example changes by numbers of its own."""
    return want and want._replace(solo=False, final=False)


def is_zero(atom: Any) -> bool:
    """Whether this is the literal 0."""
    return isinstance(atom, Literal) and jnp.ndim(atom.val) == 0 and bool(atom.val == 0)


def broadcast_of(atom: Any, made: Mapping[Var, JaxprEqn]) -> JaxprEqn | None:
    """The equation that broadcasts an array to this input, if there is one."""
    equation = None if isinstance(atom, Literal) else made.get(atom)
    while equation is not None and equation.primitive.name in ("convert_element_type", "copy"):
        atom = equation.invars[0]
        equation = None if isinstance(atom, Literal) else made.get(atom)
    name = "" if equation is None else equation.primitive.name
    return equation if name == "broadcast_in_dim" else None


@passes("transpose", "reshape", "squeeze", "expand_dims", "copy", "copy_p", "neg", "name")
@passes("reduce_precision", "optimization_barrier")
def _want_unchanged(equation, wants, made):
    return list(wants)


@passes("convert_element_type")
def _want_convert(equation, wants, made):
    kinds = [v.aval.dtype for v in (*equation.invars, *equation.outvars)]
    return list(wants) if all(jnp.issubdtype(k, jnp.floating) for k in kinds) else [None]


@passes("broadcast_in_dim")
def _want_broadcast(equation, wants, made):
    same = equation.invars[0].aval.size == equation.outvars[0].aval.size
    return [wants[0] if same else None] + [None] * (len(equation.invars) - 1)


@passes("pad")
def _want_pad(equation, wants, made):
    edges = equation.params["padding_config"]
    plain = all(low >= 0 and high >= 0 and not inner for low, high, inner in edges)
    return [wants[0] if plain and is_zero(equation.invars[1]) else None, None]


@passes("slice")
def _want_slice(equation, wants, made):
    strides = equation.params["strides"]
    return [joint(wants[0]) if strides is None or set(strides) <= {1} else None]


@passes("add", "add_any", "sub", "concatenate")
def _want_sum(equation, wants, made):
    return [joint(wants[0])] * len(equation.invars)


@passes("reduce_sum")
def _want_reduce(equation, wants, made):
    return [joint(wants[0]) if equation.outvars[0].aval.ndim >= 2 else None]


@passes("mul", "div")
def _want_product(equation, wants, made):
    first, second = equation.invars
    quotient = equation.primitive.name == "div"
    size = equation.outvars[0].aval.size

    def is_small(atom: Any) -> bool:
        return atom.aval.size < size or broadcast_of(atom, made) is not None

    if is_small(second):
        return [own(wants[0]), None]
    return [None, own(wants[0])] if is_small(first) and not quotient else [None, None]


@passes("split")
def _want_split(equation, wants, made):
    present = [want for want in wants if want is not None]
    if len(present) < len(wants):
        return [None]
    leaves = frozenset[int]().union(*(want.leaves for want in present))
    # Whatever the parts are for, the whole is left as it is.
    return [Want(leaves, False, False, max(want.repeat for want in present))]


def is_matrix(variable: Any) -> bool:
    """Whether an array has more than one axis: the gradient of a vector is no product."""
    return sum(n > 1 for n in variable.aval.shape) >= 2


@passes("scatter-add", "scatter_add")
def _want_scatter(equation, wants, made):
    # Rows of an embedding are there anyway; a matrix of a stack may be a product itself.
    several = len(equation.params["dimension_numbers"].update_window_dims) >= 2
    return [own(wants[0]), None, own(wants[0]) if several else None]


@passes("dynamic_update_slice")
def _want_update(equation, wants, made):
    matrix = is_matrix(equation.invars[1])
    rest: list[Want | None] = [None] * (len(equation.invars) - 2)
    return [own(wants[0]), own(wants[0]) if matrix else None, *rest]


@passes(*JIT, *CALLS)
def _want_call(equation, wants, made):
    inner = wanted(called_program(equation), wants)
    return [inner.get(variable) for variable in opened(called_program(equation))[0].invars]


@passes(*REMAT)
def _want_remat(equation, wants, made):
    return [None] * len(equation.invars)


@passes("scan")
def _want_scan(equation, wants, made):
    constants, carried = scan_counts(equation)
    rest = len(equation.invars) - constants - carried
    added = added_carries(equation, wants, range(carried), lambda want: True)
    summed = added_carries(equation, wants, added, lambda want: want.final)
    first = [
        want and want._replace(solo=False, final=i in summed) if i in added else None
        for i, want in enumerate(wants[:carried])
    ]
    return [None] * constants + first + [None] * rest


def added_carries(
    equation: JaxprEqn, wants: Wants, found: Iterable[int], may: Callable[[Want], bool]
) -> set[int]:
    """The carries of a scan that its body only adds to, of those whose wants are allowed."""
    constants, carried = scan_counts(equation)
    program = called_program(equation)
    state = opened(program)[0].invars[constants : constants + carried]
    found = {i for i in found if (want := wants[i]) is not None and may(want)}
    while found:
        flags = [want if i in found else None for i, want in enumerate(wants[:carried])]
        inner = wanted(program, [*flags, *wants[carried:]])
        kept = {i for i in found if (want := inner.get(state[i])) is not None and may(want)}
        if kept == found:
            break
        found = kept
    return found
