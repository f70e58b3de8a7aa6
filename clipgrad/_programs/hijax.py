"""JAX's high-level operations as its plain ones.

With its flags ``JAX_REMAT3``, ``JAX_CUSTOM_VJP3`` and ``JAX_CUSTOM_JVP3``, and for `custom_root` by
default, JAX 0.12 writes an operation as an object of the class `jax.experimental.hijax.HiPrim` in
the parameters of one primitive. A tag and a `jax.checkpoint` are read as the plain primitives that
they are without the flags; all others are functions with rules of their own, whose program is what
their method `expand` computes.
"""

import functools
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import ClosedJaxpr, JaxprEqn, Primitive, jaxpr_as_fun
from jax.extend.core import primitives as jax_primitives

# The parameters of the object of a tag, and of the one of a `jax.checkpoint`.
_OF_TAGS = {"name"}
_OF_REMAT = {"jaxpr", "policy", "prevent_cse"}

_EXPANDED: weakref.WeakKeyDictionary[Any, dict] = weakref.WeakKeyDictionary()


@functools.cache
def _high_class() -> type | tuple[()]:
    """The class of these objects; no class before JAX 0.12."""
    from jax.experimental import hijax

    return getattr(hijax, "HiPrim", ())


def high_operation(equation: JaxprEqn) -> Any:
    """The object of an equation that stands for an operation of JAX's or of a user's, or None."""
    if len(equation.params) != 1:
        return None
    (operation,) = equation.params.values()
    return operation if isinstance(operation, _high_class()) else None


def plain_equation(equation: JaxprEqn) -> JaxprEqn:
    """The equation of a tag or a `jax.checkpoint` as it is without flags; others as they are."""
    params = getattr(high_operation(equation), "params", {})
    if params.keys() == _OF_TAGS:
        return equation.replace(primitive=jax_primitives.name_p, params=dict(params))
    if params.keys() != _OF_REMAT:
        return equation
    jaxpr = getattr(params["jaxpr"], "jaxpr", params["jaxpr"])
    plain = params | {"jaxpr": jaxpr, "differentiated": False}
    return equation.replace(primitive=jax_primitives.remat_p, params=plain)


def bound_as_written(
    primitive: Primitive, params: Mapping[str, Any], inputs: Sequence
) -> list | None:
    """The results of a tag or a `jax.checkpoint` as JAX writes them now; None where that is plain.

    With its flag, what becomes of a plain equation is one of its objects again.
    """
    if not getattr(jax.config, "jax_remat3", False):
        return None
    if primitive is jax_primitives.name_p:
        return [checkpoint_name(inputs[0], params["name"])]
    if primitive is not jax_primitives.remat_p or params["differentiated"]:
        return None
    run = jaxpr_as_fun(ClosedJaxpr(params["jaxpr"], ()))
    options = {name: params[name] for name in ("policy", "prevent_cse")}
    return jax.checkpoint(lambda *inputs: run(*inputs), **options)(*inputs)


def expanded_program(equation: JaxprEqn) -> Any:
    """The program of the operation of an equation, or None if JAX knows no such program."""
    operation = high_operation(equation)
    if operation is None:
        return None
    known, types = _EXPANDED.setdefault(operation, {}), tuple(v.aval for v in equation.invars)
    if types not in known:
        known[types] = _expanded(operation)
    return known[types]


def _expanded(operation: Any) -> Any:
    try:
        program = jax.make_jaxpr(operation.expand)(*operation.in_avals)
    except Exception:  # of types that are no arrays
        return None
    return _only_called(program)


def _only_called(program: Any) -> Any:
    """The program that a program of one call calls."""
    jaxpr = getattr(program, "jaxpr", program)
    (call,) = jaxpr.eqns if len(jaxpr.eqns) == 1 else (None,)
    inner = call.params.get("call_jaxpr") if call else None
    is_whole = call and [*call.invars] == [*jaxpr.invars] and [*call.outvars] == [*jaxpr.outvars]
    return inner if inner is not None and is_whole else program


def with_plain_equations(jaxpr: Any, plain_params: Callable[[JaxprEqn], dict[str, Any]]) -> Any:
    """A jaxpr with its equations as `plain_equation` has them; itself if it has them.

    ``plain_params`` are the parameters of an equation in which programs change in the same way.
    """
    if not _high_class():
        return jaxpr
    equations = []
    for equation in jaxpr.eqns:
        plain = plain_equation(equation)
        inner = plain_params(plain)
        equations.append(plain.replace(params=plain.params | inner) if inner else plain)
    is_plain = all(plain is old for plain, old in zip(equations, jaxpr.eqns, strict=True))
    return jaxpr if is_plain else jaxpr.replace(eqns=equations)
