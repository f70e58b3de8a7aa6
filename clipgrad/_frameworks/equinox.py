"""Equinox models as parameters: their floating arrays, apart from all else that they hold."""

import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax

from clipgrad._arrays import combine, instances, is_float_array, partition, parts_that


def equinox_module_class() -> Any:
    """The class of all modules of Equinox, or None if the program has not imported it."""
    return getattr(sys.modules.get("equinox"), "Module", None)


def is_equinox(x: Any) -> bool:
    return isinstance(x, equinox_module_class() or ())


def has_modules(tree: Any) -> bool:
    return bool(parts_that(tree, is_equinox))


def equinox_value_and_grad(args: Any) -> Callable[..., Any]:
    """`jax.value_and_grad`, or if there are Equinox modules what ``eqx.filter_grad`` does."""
    return _filtered if has_modules(args) else jax.value_and_grad


def _filtered(
    fun: Callable[..., Any],
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    allow_int: bool = True,  # there are no integers among what is differentiated
) -> Callable[..., Any]:
    is_one = not isinstance(argnums, Sequence)
    positions = (argnums,) if is_one else tuple(argnums)

    def run(*args: Any) -> Any:
        arrays, rests = zip(*(partition(args[i], is_float_array) for i in positions), strict=True)

        def of_arrays(*arrays: Any) -> Any:
            whole = list(args)
            for i, tree, rest in zip(positions, arrays, rests, strict=True):
                whole[i] = combine(tree, rest)
            return fun(*whole)

        chosen = 0 if is_one else tuple(range(len(positions)))
        return jax.value_and_grad(of_arrays, chosen, has_aux)(*arrays)

    return run


def check_no_state(params: Any) -> None:
    """Raises `ValueError` for an ``equinox.nn.State``, which a gradient would train."""
    nn = getattr(sys.modules.get("equinox"), "nn", None)
    if instances(params, getattr(nn, "State", ())):
        raise ValueError(
            "params: got an equinox.nn.State among the parameters, which is not trained, expected "
            "the model alone; write loss_fn(model, batch) that takes the state from the batch, "
            "(state, x), and returns the new one as aux: (loss, state)"
        )
