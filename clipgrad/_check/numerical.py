"""`numerical_grad`: Paddle's ``get_numerical_gradient`` for any tree of arrays."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from clipgrad._arrays import (
    check_arguments,
    explain_call,
    leaf_names,
    leaves_out,
    parameter_names,
)
from clipgrad._check import contract, vectors
from clipgrad._check.behavior import are_on_cpu
from clipgrad._check.checked_function import (
    DONATED,
    CheckedFunction,
    checked_function,
    donated_arguments,
    require_arrays,
)
from clipgrad._check.options import require_delta
from clipgrad._check.points import scale_of
from clipgrad._check.selection import Selector
from clipgrad._check.slopes import Neighborhood
from clipgrad._check.tolerances import ANY_ORDER
from clipgrad._check.user_code import UserError, call_user
from clipgrad._check.verdict import richardson
from clipgrad._check.witnesses import find_neighborhood

STATE = (
    "the function changes state or draws random numbers; pass the state, or the key, as an argument"
)


@explain_call()
def numerical_grad(
    fun: Callable,
    args: tuple,
    kwargs: Mapping[str, Any] | None = None,
    *,
    wrt: Selector | None = None,
    output: Selector | None = None,
    cotangent: Any = None,
    delta: float | None = None,
) -> Any:
    """Computes the gradient of a function by finite differences, element by element.

    Example:
      >>> import jax.numpy as jnp
      >>> import clipgrad as cg
      >>> x = jnp.array([1.0, 2.0])
      >>> print(cg.numerical_grad(lambda x: x**3, (x,), wrt=0).round(6))
      [ 3. 12.]
      >>> print(cg.numerical_grad(lambda x: x**3, (x,), wrt=0, delta=0.5).round(6))
      [ 3.25 12.25]

    Args:
      fun: the function, which takes and returns any trees of arrays. Outputs that are not scalars
        are summed, with the weights ``cotangent``.
      args: the tuple of positional arguments; for one argument write ``(x,)``.
      kwargs: the keyword arguments.
      wrt: the inputs to differentiate by. For the position or name of an argument you get a tree
        like that argument. For a pattern such as ``"params/w"`` you get one array, or a tree if the
        pattern selects several leaves. For several of these you get a tuple. For ``None`` you get a
        tuple of all positional arguments or, if there are none, a dictionary like ``kwargs``.
        Leaves that ``"!"`` leaves out, or that are not floats, become ``None``.
      output: the outputs to sum: a position, key or pattern in the result of ``fun``; ``None``:
        all.
      cotangent: the output weights, a tree like the chosen outputs, or an array for a single
        output; ``None``: the plain sum.
      delta: the distance h by which each element moves, in the units of that element. ``None``: the
        step follows the scale of each element. Paddle's default is 0.005.

    Returns:
      The gradient: NumPy arrays, float64 or complex128, in the structure and shapes of the inputs
      that you chose with ``wrt``.

    Raises:
      TypeError: ``args`` is not a tuple, or an argument is unknown.
      ValueError: there is nothing to differentiate, ``wrt`` or ``output`` is unknown, the cotangent
        has another shape, ``delta`` is not positive, an input is donated or not finite, or a second
        call of the function gives another value.

    For each real number x_i of the inputs, with the cotangent u and the unit vector e_i::

        grad_i = <u, f(x + h e_i) - f(x - h e_i)> / 2h

    With ``delta``, h is delta. Without ``delta``, two steps h are chosen at which extrapolation to
    h = 0 is most precise. The function runs in float64 if possible, whatever its dtype.

    Guarantees:
      * Custom rules are never used.
      * Values under `jax.lax.stop_gradient` stay fixed, as JAX treats them: the gradient of
        ``stop_gradient(x) * x`` is x.
      * The gradient of a complex leaf is the conjugate of d/d(re) + i d/d(im), as JAX defines it.

    References:
      PaddlePaddle, Auto Gradient Checker Design, 2017, which has ``get_numerical_gradient``:
      https://github.com/PaddlePaddle/Paddle/blob/3f5dfc67752d885d2a4bb777fa27cf04d7927e06/doc/design/auto_gradient_check.md.
    """
    check_arguments(fun, args, kwargs)
    require_delta(delta)
    if isinstance(wrt, (list, tuple)) and not any(map(leaves_out, wrt)):
        options = {"output": output, "cotangent": cotangent, "delta": delta}
        return tuple(numerical_grad(fun, args, kwargs, wrt=w, **options) for w in wrt)
    kwargs = dict(kwargs or {})
    require_arrays(args, kwargs)
    function = checked_function(fun, args, kwargs, wrt, None, output)
    covector = vectors.covector_of(cotangent, function.outputs)
    _require_one_value(function)
    here, _ = find_neighborhood(function, [])
    with np.errstate(all="ignore"):
        gradient = _slopes(here, covector, delta)
    return _tree(fun, args, kwargs, wrt, function, gradient)


def _slopes(here: Neighborhood, covector: np.ndarray, delta: float | None) -> np.ndarray:
    """Each element's slope: by Paddle's formula, or by Richardson's extrapolation."""
    scale = np.concatenate([scale_of(x) for x in here.xs])
    elements = [np.array([j]) for j in range(len(scale))]
    if delta is not None:
        scale = np.full(scale.shape, delta)
        sides = here.differences(scale, elements, covector[None], steps=np.ones(1))
        return (sides.ahead + sides.behind)[:, 0, 0] / (2 * delta)
    numeric, _ = richardson(here.differences(scale, elements, covector[None]))
    return numeric[:, 0] / scale


def _require_one_value(function: CheckedFunction) -> None:
    """Raises an error for a function that has another value when it is called again."""
    if donated := donated_arguments(function):
        raise ValueError(DONATED.format(", ".join(donated)))
    try:
        again = call_user(function.fun, function.inputs)
    except UserError as error:
        raise ValueError(
            f"fun: it raises an error when it is called again: {STATE} ({error})"
        ) from error.original
    different = contract.primal(function, again, "again", 0.0 if are_on_cpu(again) else ANY_ORDER)
    if different:
        raise ValueError(
            f"fun: {different[0].where}: {different[0].detail}, at the same point: {STATE}"
        )


def _tree(fun, args: tuple, kwargs: dict, wrt, function: CheckedFunction, gradient) -> Any:
    like = [jax.ShapeDtypeStruct(x.shape, vectors.wide_dtype(x.dtype)) for x in function.inputs]
    leaves = [np.conj(leaf) for leaf in vectors.leaves_of(gradient, like)]
    by_name = dict(zip(function.names, leaves, strict=True))

    def tree_of(arguments, root: str):
        named = [by_name.get(name) for name in leaf_names(root, arguments)]
        return jax.tree.unflatten(jax.tree.structure(arguments), named)

    trees, keywords = tree_of(args, "args"), tree_of(kwargs, "kwargs")
    if wrt is None:
        return trees if args else keywords
    names = parameter_names(fun, len(args))[: len(args)]
    if wrt in names or str(wrt).isdigit():
        return trees[names.index(wrt) if wrt in names else int(wrt)]
    if isinstance(wrt, str) and wrt in keywords:
        return keywords[wrt]
    whole = trees if any(name.startswith("args") for name in by_name) else keywords
    return next(iter(by_name.values())) if len(by_name) == 1 else whole
