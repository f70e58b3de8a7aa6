"""All that the library asks of flax: no other file names what flax has.

flax is never imported here. A program with a model of it has imported it; in any other its classes
have no objects, and what takes a model is not called.
"""

import sys
from collections.abc import Sequence
from typing import Any

# Marks what this library takes apart, for flax.
_TAG = "clipgrad"


def _nnx() -> Any:
    """The module `flax.nnx`, or None."""
    return sys.modules.get("flax.nnx")


def _is_of(x: Any, *names: str) -> bool:
    """Whether this is an object of one of some classes of `flax.nnx`."""
    nnx = _nnx()
    return nnx is not None and isinstance(x, tuple(getattr(nnx, name, ()) for name in names))


def has_nnx() -> bool:
    """Whether the program has imported `flax.nnx`."""
    return _nnx() is not None


def has_linen() -> bool:
    """Whether the program has imported `flax.linen`."""
    return "flax.linen" in sys.modules


def boxes() -> tuple[type, ...]:
    """The classes that hold an array beside what is known of it."""
    names = ("flax.nnx", "Variable"), ("flax.core.meta", "AxisMetadata")
    kinds = (getattr(sys.modules.get(module), name, None) for module, name in names)
    return tuple(kind for kind in kinds if kind is not None)


def is_model(x: Any) -> bool:
    """Whether this is a model or a variable of NNX: ``is_leaf`` for trees in which these stay."""
    return _is_of(x, "Pytree", "Variable")


def is_object(x: Any) -> bool:
    """Whether this is a model of NNX, and not a variable alone."""
    return _is_of(x, "Pytree")


def is_variable(x: Any) -> bool:
    return _is_of(x, "Variable")


def is_random(x: Any) -> bool:
    """Whether this is a variable with a key of random numbers, or a count of them."""
    return _is_of(x, "RngState")


def is_diff_state(x: Any) -> bool:
    """Whether this is an argument of `nnx.grad` with the variables to differentiate."""
    return _is_of(x, "DiffState")


def is_apart(x: Any) -> bool:
    """Whether this stands instead of a model in what `to_tree` returns."""
    return _is_of(x, "NodeStates")


def is_module(x: Any) -> bool:
    return _is_of(x, "Module")


def module_class() -> type:
    """The class of all modules of NNX."""
    return _nnx().Module


def is_foreign_trace(error: BaseException) -> bool:
    """Whether NNX has raised an error for a model that another trace has made."""
    return isinstance(error, getattr(sys.modules.get("flax.errors"), "TraceContextError", ()))


def one_update() -> Any:
    """A context in which models that are taken apart and put together again stay the same."""
    return _nnx().update_context(_TAG)


def to_tree(tree: Any, is_tagged: bool = True) -> Any:
    """A tree with the states of models instead of them; `from_tree` undoes it if it is tagged."""
    return _nnx().to_tree(tree, **({"ctxtag": _TAG} if is_tagged else {}))


def from_tree(tree: Any, is_inner: bool) -> Any:
    """The tree with models; ``is_inner``: inside of the function that is traced."""
    return _nnx().from_tree(tree, ctxtag=_TAG, is_inner=is_inner)


def parts_of(model: Any) -> list[tuple[Any, Any]]:
    """All that is in a model, with the path of each."""
    return list(_nnx().iter_graph(model))


def split(models: Any, *filters: Any) -> Any:
    """The graph of models, and a state of the variables that each filter selects, or of all."""
    return _nnx().split(models, *filters)


def merge(graph: Any, *states: Any) -> Any:
    """New models of a graph and states."""
    return _nnx().merge(graph, *states)


def flat_state(state: Any) -> list[tuple[Any, Any]]:
    """The variables of a state with their paths."""
    return list(_nnx().to_flat_state(state))


def from_flat_state(pairs: Sequence[tuple[Any, Any]]) -> Any:
    """The state of variables with their paths."""
    return _nnx().from_flat_state(pairs)


def empty_state() -> Any:
    return _nnx().State({})


def as_arrays(tree: Any) -> Any:
    """A tree with arrays instead of variables."""
    return _nnx().as_pure(tree)


def variable_filter(wrt: Any) -> Any:
    """A function of path and variable for a filter, by default of parameters; `TypeError` else."""
    try:
        return _nnx().filterlib.to_predicate(_nnx().Param if wrt is None else wrt)
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"wrt: got {wrt!r}, expected a filter of flax NNX, such as nnx.Param or nnx.LoRAParam"
        ) from error


def split_keys(models: Any, count: int) -> Any:
    """Splits each key of random numbers into so many; `restore_keys` takes what is returned."""
    return _nnx().split_rngs(models, splits=count)


def restore_keys(backups: Any) -> None:
    _nnx().restore_rngs(backups)


def value_and_grad() -> Any:
    return _nnx().value_and_grad
