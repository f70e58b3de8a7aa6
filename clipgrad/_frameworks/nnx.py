"""Functions of flax NNX models as functions of pytrees, without losing what they change."""

import contextlib
import dataclasses
import operator
from collections.abc import Callable, Iterator
from typing import Any

import jax

import clipgrad._flax as flax
from clipgrad._arrays import check_tree, leaves_with_keys, parts_that
from clipgrad._frameworks.attribute_names import with_names
from clipgrad._frameworks.equinox import equinox_value_and_grad


def with_models(run: Callable[..., Any], fun: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """``run(function, args, kwargs)``, where ``run`` traces ``fun`` as a function of pytrees.

    A pytree is a value: what ``fun`` changes in an NNX model would be lost with the copy that is
    traced. NNX takes the models apart and puts them together again, as for `nnx.jit`, so that the
    caller's models change: values, new variables and other attributes. Then ``run`` gets a `Pure`
    function. Without models, and where flax is not imported, it gets one that does as ``fun``. If
    ``run`` returns ``None`` nothing changes.

    Submodules of the models have names, see `with_names`.
    """
    return with_names(lambda fun: _run_on_tree(run, fun, args, kwargs), fun)


@dataclasses.dataclass(frozen=True)
class Pure:
    """A function of the states of NNX models: what has changed in them, and the result."""

    fun: Callable[..., Any]

    def __call__(self, apart: Any) -> Any:
        args, kwargs = flax.from_tree(apart, is_inner=True)
        before = _contents((args, kwargs))
        result = self.fun(*args, **kwargs)
        after = _contents((args, kwargs))
        same = before[1] == after[1] and all(map(operator.is_, before[0], after[0]))
        if same and not _contents(result)[0]:
            return [], result  # a model of another trace can be read, but not written to
        inputs, result = flax.to_tree(((args, kwargs), result))
        return _models_apart(inputs), result


def _run_on_tree(run: Callable[..., Any], fun: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    if not flax.has_nnx():
        return run(fun, args, kwargs)
    check_tree("args", (args, kwargs))
    with explained(), flax.one_update():
        apart = flax.to_tree((args, kwargs))
        if not _models_apart(apart):
            return run(fun, args, kwargs)
        changed = run(Pure(fun), (apart,), {})
        return changed and flax.from_tree(changed, is_inner=False)[1]


def model_value_and_grad(args: Any) -> Callable[..., Any]:
    """`nnx.value_and_grad` for NNX modules, Equinox's for its modules, or JAX's."""
    return flax.value_and_grad() if objects_in(args) else equinox_value_and_grad(args)


@contextlib.contextmanager
def explained() -> Iterator[None]:
    """Raises a `ValueError` that says what to write instead of NNX's `TraceContextError`."""
    try:
        yield
    except Exception as error:
        if not flax.is_foreign_trace(error):
            raise
        raise ValueError(
            "fun: got a function that changes an NNX model which it closes over, expected one that "
            "takes the model as an argument; write fun(model, ...), and differentiate it with "
            f"nnx.grad or nnx.value_and_grad ({error})"
        ) from error


def models_in(tree: Any) -> list[Any]:
    return parts_that(tree, flax.is_model)


def objects_in(tree: Any) -> list[Any]:
    """The models of NNX in a tree; variables alone, as in an `nnx.State`, are none."""
    return parts_that(tree, flax.is_object)


def paths_of_arrays(tree: Any) -> list[tuple[Any, Any]]:
    """The leaves of a tree with their paths; in a model taken apart they are attribute paths."""
    entries: list[tuple[Any, Any]] = []
    for path, part in leaves_with_keys(tree, flax.is_apart):
        if flax.is_apart(part):
            inside = leaves_with_keys(part)
            entries += [((*path, *map(_as_attribute, keys[2:])), leaf) for keys, leaf in inside]
        else:
            entries.append((path, part))
    return entries


def _as_attribute(key: Any) -> Any:
    """A key of the state of a model, as the attribute or the element that it stands for."""
    name = getattr(key, "key", key)
    if isinstance(name, str):
        return jax.tree_util.GetAttrKey(name)
    return jax.tree_util.SequenceKey(name) if isinstance(name, int) else key


def without_variables(tree: Any) -> Any:
    """The tree with arrays instead of NNX variables, which hold the state of `nnx.Optimizer`."""
    return flax.as_arrays(tree) if parts_that(tree, flax.is_variable) else tree


def _models_apart(tree: Any) -> list[Any]:
    """What stands instead of models in a tree that is taken apart."""
    return parts_that(tree, flax.is_apart)


def _contents(tree: Any) -> tuple[list[Any], Any]:
    return jax.tree.flatten(_models_apart(flax.to_tree(tree, is_tagged=False)))
