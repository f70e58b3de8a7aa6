"""`numerical_grad`: Paddle's ``get_numerical_gradient`` for any tree of arrays."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

import clipgrad._trees as _trees
from clipgrad._check.evaluation import choose
from clipgrad._check.options import require_delta, with_hints
from clipgrad._check.points import make_point
from clipgrad._check.search import Judge
from clipgrad._check.subject import CheckSubject, make_subject, require_arrays
from clipgrad._check.tolerances import make_tolerance
from clipgrad._jaxpr import kept_lightly


@with_hints
def numerical_grad(
    fun: Callable,
    args: tuple,
    *,
    wrt: _trees.Selector | None = None,
    output: _trees.Selector | None = None,
    cotangent: Any = None,
    delta: float | None = None,
) -> Any:
    """Differentiate the sum of an output numerically, element by element.

    For each real number x_i of the inputs, with u the cotangent and e_i a unit vector::

        grad_i = <u, f(x + h e_i) - f(x - h e_i)> / 2h

    extrapolated from two steps h that are powers of two times the scale of x_i; with ``delta``,
    the formula above with h = delta. The function is evaluated in float64 if
    possible, for every dtype of its inputs. Its own VJP is never used.

    Guarantees:
      * The result has the structure and shapes of the differentiated inputs, in NumPy's float64
        (complex128), the precision of the measurement.
      * A complex leaf's gradient follows JAX's convention, the conjugate of d/d(re) + i d/d(im).

    Args:
      fun: the function; it takes and returns any trees of arrays.
      args: the tuple of its positional arguments.
      wrt: the inputs to differentiate with respect to: the position or name of an argument gives
        its tree, the path of a leaf such as ``params/w`` gives its array, several give a tuple.
        None gives the tuple of all arguments. Leaves that are not floats become None.
      output: which outputs to sum: a position, key or path in the result of ``fun``; None for all.
      cotangent: weights of the outputs, a tree like the chosen outputs or an array for a single
        one; None for the plain sum.
      delta: an absolute step; Paddle's default is 0.005.

    Returns:
      The gradient.

    Raises:
      TypeError: ``args`` is not a tuple, or an argument is unknown.
      ValueError: nothing to differentiate, an unknown ``wrt`` or ``output``, a cotangent of another
        shape, a ``delta`` that is not positive, or an input that is not finite.

    Example:
      >>> import jax.numpy as jnp
      >>> import clipgrad as cg
      >>> x = jnp.array([1.0, 2.0])
      >>> print(cg.numerical_grad(lambda x: x**3, (x,), wrt=0).round(6))
      [ 3. 12.]
      >>> print(cg.numerical_grad(lambda x: x**3, (x,), wrt=0, delta=0.5).round(6))
      [ 3.25 12.25]

    References:
      PaddlePaddle, Auto Gradient Checker Design, 2017, which has ``get_numerical_gradient``:
      https://github.com/PaddlePaddle/Paddle/blob/3f5dfc67752d885d2a4bb777fa27cf04d7927e06/doc/design/auto_gradient_check.md.
    """
    require_delta(delta)
    if isinstance(wrt, (list, tuple)):
        return tuple(
            numerical_grad(fun, args, wrt=w, output=output, cotangent=cotangent, delta=delta)
            for w in wrt
        )
    require_arrays(args, {})
    subject = make_subject(fun, args, None, wrt, None, output)
    covector = _covector(subject, cotangent)
    with kept_lightly():
        differences, _ = choose(subject, covector[None], [])
    tolerance = make_tolerance(subject.ranges, ["float64"] * len(subject.inputs))
    nothing = np.zeros((1, int(_trees.offsets(subject.inputs)[-1])))
    point = make_point(subject, subject.inputs, (nothing, None, None), 0, delta)
    judge = Judge(differences, point, nothing, None, tolerance, delta)
    return _tree(
        fun, args, wrt, subject, judge.elements(np.arange(nothing.size), judged=False).numeric
    )


def _covector(subject: CheckSubject, cotangent: Any) -> np.ndarray:
    """JAX pairs a cotangent with dy by the real part of their product, without conjugation."""
    ones = [np.ones(y.shape) for y in subject.outputs]
    leaves = ones if cotangent is None else jax.tree.leaves(cotangent)
    shapes = [np.shape(leaf) for leaf in leaves]
    if shapes != [y.shape for y in subject.outputs]:
        raise ValueError(
            f"cotangent: got the shapes {shapes}, expected those of the chosen outputs, "
            f"{[y.shape for y in subject.outputs]}"
        )
    pairs = zip(map(np.asarray, leaves), subject.outputs, strict=True)
    return _trees.to_numpy([np.conj(u).astype(_trees.wide_dtype(y.dtype)) for u, y in pairs])


def _tree(fun, args: tuple, wrt, subject: CheckSubject, gradient: np.ndarray) -> Any:
    like = [jax.ShapeDtypeStruct(x.shape, _trees.wide_dtype(x.dtype)) for x in subject.inputs]
    leaves = [np.conj(leaf) for leaf in _trees.from_rows(gradient, like)]
    found = dict(zip(subject.names, leaves, strict=True))
    leaves = [found.get(name) for name in _trees.leaf_names(args, "args")]
    tree = jax.tree.unflatten(jax.tree.structure(args), leaves)
    if wrt is None:
        return tree
    names = _trees.parameter_names(fun, len(args))
    if wrt in names or str(wrt).isdigit():
        return tree[names.index(wrt) if wrt in names else int(wrt)]
    return next(iter(found.values())) if len(found) == 1 else tree
