"""From two versions of a loss, or of a training step, to the first place where they differ."""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax

from clipgrad._compare.comparison import GradientComparison
from clipgrad._compare.gradients import compare_gradients
from clipgrad._compare.rounding import WIDER_DTYPES, compare_dtypes
from clipgrad._compare.steps import compare_steps
from clipgrad._error_clip import check_call
from clipgrad._jaxpr import kept_lightly


def compare(
    fun: Callable[..., Any],
    other: Callable[..., Any] | str,
    args: tuple,
    kwargs: Mapping[str, Any] | None = None,
    *,
    other_args: tuple | None = None,
    argnums: int | Sequence[int] | None = 0,
    has_aux: bool = False,
    names: Mapping[str, str] | None = None,
    rtol: float | None = None,
) -> GradientComparison:
    r"""Finds the first place where two versions of a loss, or of a training step, differ.

    Each version is traced once and runs in one compiled program, unedited. Of each named value (a
    tag, or what leaves a module or a step of a scan) and of its cotangent only 256 sums with random
    signs leave the program: the norm of the difference of two such sketches is the norm of the
    difference of the values, to about 10 %. So a comparison has the memory of a gradient.

    A place differs if its relative difference is above four roundings of its dtype, and above what
    rounding does there: the program of ``fun`` runs eight more times with each result, each term of
    a sum and each constant moved by one rounding of its own type, in bfloat16 by bfloat16's.

    Guarantees:
      * Places are in the order of computation, steps of scans included.
      * A "value" finding is the first named value that differs. It names the common module of the
        operations between the named values before, which agree, and this one.
      * If all values agree, a "vjp" finding is the first cotangent in backward order that differs;
        it names the module of the operations that use the value, such as one with a wrong rule.
      * If all cotangents agree too, each leaf whose gradient differs is a "grads" finding.
      * If outputs and gradients agree, there are no findings: what differs inside is a note.
      * NaN and inf are equal where both versions have the same. A mask of -1e9 hides nothing.
      * Places that rounding moves by more than 10 % are judged by differences of four times that
        alone, and are notes else. What could not be matched is in ``unmatched``. If no gradient
        (or output of a step) could be judged, that is a finding of kind "not judged", and ``ok``
        is false.
      * With ``argnums=None`` the functions are run as they are, on copies of the arguments, so they
        may donate them. The outputs are compared by path, integers, booleans and keys exactly; an
        "output" finding comes before the findings of outputs that are computed from it, and has the
        factor between the versions, if one explains the difference.
      * With the name of a dtype as ``other``, findings are of kind "rounding": the modules at which
        the error of values grows most (of cotangents, if it grows at no value), and each leaf
        whose gradient is more than ``rtol`` (0.05) rounding error; ``ok`` says that there is no
        such leaf. Each leaf is judged by its own size; an overflow is a finding. The gradient is
        traced before it is widened, so custom rules stay.

    Args:
      fun: the first version, a function that returns a scalar, or ``(scalar, aux)``. With
        ``argnums=None`` it may return any tree.
      other: the second version, a function of the same arguments; or ``"float32"`` or
        ``"float64"``: ``fun`` and its gradient evaluated in this type.
      args: the tuple of arguments.
      kwargs: keyword arguments of both versions.
      other_args: the arguments of ``other``, if they are of other types, trees or layouts.
      argnums: the positions of the arguments to differentiate, or ``None`` for whole steps.
      has_aux: whether the functions return ``(scalar, aux)``; aux is not compared.
      names: names of values in ``other`` by their names in ``fun``, where they differ:
        ``{"encoder/Dense_*": "enc/linear*"}``. The start of a path stands for all that is below. In
        ``{"layers_*": "layers"}``, the modules are matched with the steps of a scan, in order.
      rtol: a relative tolerance, in place of the measured one.

    Returns:
      A `GradientComparison`; ``print`` it.

    Raises:
      TypeError: an argument is not of the type above, or is traced: it is called inside of
        `jax.jit`.
      ValueError: a loss is not a floating scalar, ``argnums`` is out of range, a name of
        ``names`` is of no value in its version, or two steps have no output in common.

    Example:
      >>> import clipgrad as cg, jax, jax.numpy as jnp
      >>> def loss(w, x, scale=1.0):
      ...     with jax.named_scope("hidden"):
      ...         h = jnp.tanh(x @ w) * scale
      ...     return jnp.mean(h**2)
      >>> args = jnp.ones((3, 2)), jnp.ones((4, 3))
      >>> found = cg.compare(loss, lambda w, x: loss(w, x, scale=1.1), args)
      >>> found.ok, found.findings[0].kind, found.findings[0].module
      (False, 'value', 'hidden')
    """
    check_call(fun, args, kwargs)
    _check_comparison(other, other_args, argnums, names, rtol)
    if has_aux and argnums is None:
        raise ValueError(
            "has_aux: got True with argnums=None, expected False; all outputs are compared"
        )
    given, named = args if other_args is None else other_args, dict(kwargs or {})
    with contextlib.ExitStack() as settings:
        for setting in _settings_of_runs():
            settings.enter_context(setting)
        if isinstance(other, str):
            assert argnums is not None  # checked
            return compare_dtypes(fun, other, args, named, argnums, has_aux, rtol)
        if argnums is None:
            return compare_steps(fun, other, args, named, given, rtol)
        return compare_gradients(fun, other, args, named, given, argnums, has_aux, names, rtol)


def _settings_of_runs() -> Iterator[Any]:
    """JAX's own ways of finding NaN and of forbidding transfers: off."""
    yield from (jax.debug_nans(False), jax.debug_infs(False), jax.transfer_guard("allow"))
    yield kept_lightly()


def _check_comparison(other: Any, other_args: Any, argnums: Any, names: Any, rtol: Any) -> None:
    if isinstance(other, str):
        _check_dtype(other, other_args, argnums, names)
    elif not callable(other):
        raise TypeError(
            f"other: got {other!r}, expected a function of the same arguments, or the name of a "
            f"dtype, one of {', '.join(WIDER_DTYPES)}"
        )
    if other_args is not None and not isinstance(other_args, tuple):
        raise TypeError(
            f"other_args: got {type(other_args).__name__}, expected a tuple; for one argument "
            "write (x,)"
        )
    is_named = names is None or isinstance(names, Mapping)
    if not is_named or not all(isinstance(x, str) for pair in (names or {}).items() for x in pair):
        raise TypeError(
            f"names: got {names!r}, expected a mapping from names in fun to names in other, such "
            'as {"layers_*": "layers"}'
        )
    if rtol is not None and not (isinstance(rtol, int | float) and 0 <= rtol < float("inf")):
        raise ValueError(f"rtol: got {rtol!r}, expected a tolerance of at least 0, such as 1e-3")
    if names and argnums is None:
        raise ValueError(
            "names: got names of values, expected None with argnums=None, which compares outputs"
        )


def _check_dtype(other: str, other_args: Any, argnums: Any, names: Any) -> None:
    if other not in WIDER_DTYPES:
        raise ValueError(
            f"other: got {other!r}, expected the name of a wider dtype, one of "
            f"{', '.join(WIDER_DTYPES)}, or a function"
        )
    for name, given in (("other_args", other_args), ("names", names)):
        if given is not None:
            raise ValueError(
                f"{name}: got {given!r} with other={other!r}, expected None; both runs are of fun"
            )
    if argnums is None:
        raise ValueError(
            f"argnums: got None with other={other!r}, expected positions of arguments to "
            "differentiate; to compare whole steps, write a function with wider arguments"
        )
