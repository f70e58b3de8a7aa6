"""`numerical_grad`: Paddle's ``get_numerical_gradient`` for any tree of arrays."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from clipgrad._arrays import check_arguments, explain_call, leaves_out, parameter_names
from clipgrad._check import vectors
from clipgrad._check.options import require_delta
from clipgrad._check.points import scale_of
from clipgrad._check.selection import Selector, leaf_names
from clipgrad._check.subject import CheckSubject, make_subject, require_arrays
from clipgrad._check.verdict import settled
from clipgrad._check.witnesses import find_evaluation


@explain_call()
def numerical_grad(
    fun: Callable,
    args: tuple,
    *,
    wrt: Selector | None = None,
    output: Selector | None = None,
    cotangent: Any = None,
    delta: float | None = None,
) -> Any:
    """Differentiate the sum of an output numerically, element by element.

    For each real number x_i of the inputs, with u the cotangent and e_i a unit vector::

        grad_i = <u, f(x + h e_i) - f(x - h e_i)> / 2h

    extrapolated from the two steps h at which it is known best; with ``delta``, for h = delta. The
    function is evaluated in float64 if possible, for every dtype. Its own VJP is never used.

    Guarantees:
      * The result has the structure and shapes of the differentiated inputs, in NumPy's float64
        (complex128), the precision of the measurement.
      * A complex leaf's gradient follows JAX's convention, the conjugate of d/d(re) + i d/d(im).

    Args:
      fun: the function; it takes and returns any trees of arrays.
      args: the tuple of its positional arguments.
      wrt: the inputs to differentiate with respect to: the position or name of an argument gives
        its tree, a pattern such as ``params/w`` gives the array of the leaf that it selects, or of
        several a tree; several of these give a tuple. None gives the tuple of all arguments, and
        with ``!`` what is left out becomes None, as do leaves that are not floats.
      output: which outputs to sum: a position, key or pattern in the result of ``fun``; None for
        all.
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
    check_arguments(fun, args)
    require_delta(delta)
    if isinstance(wrt, (list, tuple)) and not any(map(leaves_out, wrt)):
        return tuple(
            numerical_grad(fun, args, wrt=w, output=output, cotangent=cotangent, delta=delta)
            for w in wrt
        )
    require_arrays(args, {})
    subject = make_subject(fun, args, None, wrt, None, output)
    covector = _covector(subject, cotangent)
    evaluation, _ = find_evaluation(subject, [])
    with np.errstate(all="ignore"):
        gradient = _slopes(evaluation, subject, covector, delta)
    return _tree(fun, args, wrt, subject, gradient)


def _slopes(evaluation, subject: CheckSubject, covector, delta: float | None) -> np.ndarray:
    """Each element's slope: by Paddle's formula, or as the ladder settles."""
    scale = np.concatenate([scale_of(x) for x in subject.inputs])
    elements = [np.array([j]) for j in range(len(scale))]
    if delta is not None:
        scale = np.full(scale.shape, delta)
        sides = evaluation.ladder(scale, elements, covector[None], steps=np.ones(1))
        return (sides.ahead + sides.behind)[:, 0, 0] / (2 * delta)
    numeric, _ = settled(evaluation.ladder(scale, elements, covector[None]))
    return numeric[:, 0] / scale


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
    return vectors.to_numpy([np.conj(u).astype(vectors.wide_dtype(y.dtype)) for u, y in pairs])


def _tree(fun, args: tuple, wrt, subject: CheckSubject, gradient: np.ndarray) -> Any:
    like = [jax.ShapeDtypeStruct(x.shape, vectors.wide_dtype(x.dtype)) for x in subject.inputs]
    leaves = [np.conj(leaf) for leaf in vectors.leaves_of(gradient, like)]
    found = dict(zip(subject.names, leaves, strict=True))
    leaves = [found.get(name) for name in leaf_names(args, "args")]
    tree = jax.tree.unflatten(jax.tree.structure(args), leaves)
    if wrt is None:
        return tree
    names = parameter_names(fun, len(args))
    if wrt in names or str(wrt).isdigit():
        return tree[names.index(wrt) if wrt in names else int(wrt)]
    return next(iter(found.values())) if len(found) == 1 else tree
