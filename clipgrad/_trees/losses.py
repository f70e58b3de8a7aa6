"""Results of loss functions: the loss alone, or with auxiliary results beside it."""

from typing import Any

from clipgrad._trees.trees import described


def loss_and_aux(name: str, result: Any, has_aux: bool) -> tuple[Any, Any]:
    """The loss, and what is beside it or None; `ValueError` if ``has_aux`` says otherwise."""
    if has_aux and (not isinstance(result, tuple) or len(result) != 2):
        raise ValueError(
            f"{name}: got {described(result)} from it, expected (loss, aux) for has_aux=True; "
            "leave has_aux out if it returns the loss alone"
        )
    value, aux = result if has_aux else (result, None)
    if isinstance(value, tuple):
        raise ValueError(
            f"{name}: got a tuple from it, expected a scalar; write has_aux=True for (loss, aux)"
        )
    return value, aux
