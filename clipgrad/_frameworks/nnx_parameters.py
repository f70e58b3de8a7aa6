"""Parameters with models of flax NNX, apart: trained variables, and their other variables."""

import dataclasses
import functools
import itertools
import operator
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp

import clipgrad._flax as flax
from clipgrad._arrays import is_array, is_clippable
from clipgrad._flax import is_model
from clipgrad._frameworks.attribute_names import with_names
from clipgrad._frameworks.nnx import explained, models_in
from clipgrad._frameworks.parameters import Parameters

_RANDOM = "keys of random numbers"


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["trained", "state"],
    meta_fields=["graph", "structures"],
)
@dataclasses.dataclass(frozen=True)
class Changes:
    """The changes of a function to NNX models, as in `NNXParameters`."""

    trained: list[Any] | None  # the arrays; None if they are the same
    state: list[Any]
    graph: Any
    structures: tuple[Any, Any]


@dataclasses.dataclass(frozen=True, eq=False)
class NNXParameters(Parameters):
    """A tree with models of NNX, taken apart as `nnx.grad` does it."""

    trained: Any  # the tree with an `nnx.State` of arrays instead of each model
    state: list[Any]  # the arrays of the variables of models that are not trained
    graph: Any  # what NNX makes models of, with the variables
    structures: tuple[Any, Any]  # of the variables that are trained, and of the others
    leaves: list[Any]  # of the tree, a model as one
    structure: Any  # of the tree, with models as leaves
    is_trained: Callable[[Any, Any], bool]  # whether a variable at a path is trained

    @classmethod
    def fits(cls, params: Any, wrt: Any) -> bool:
        """Whether there are models, and not only variables, as in an `nnx.State`, to train."""
        models = models_in(params)
        return bool(models) and not _all_trained(models, wrt)

    @classmethod
    def of(cls, params: Any, wrt: Any) -> "NNXParameters":
        """The parameters apart; `ValueError` if nothing in them is trained."""
        leaves, structure = jax.tree.flatten(params, is_leaf=is_model)
        is_trained = trained_variables(wrt)
        graph, trained, state = _split_of(leaves, is_trained)
        if not jax.tree.leaves(trained) and not any(map(is_clippable, leaves)):
            kinds = sorted({type(v).__name__ for _, v in flax.flat_state(state)})
            raise ValueError(
                f"params: got an NNX model without variables that are trained, with "
                f"{', '.join(kinds) or 'none'}, expected nnx.Param; write wrt= as for nnx.grad, "
                "such as wrt=nnx.LoRAParam"
            )
        structures = jax.tree.structure(trained), jax.tree.structure(state)
        empty = cls(None, jax.tree.leaves(state), graph, structures, leaves, structure, is_trained)
        return dataclasses.replace(empty, trained=empty._tree_of(trained, pure=True))

    def whole(self, trained: Any, state: list[Any] | None = None) -> Any:
        """The tree with other arrays; its models are new objects."""
        pieces = list(zip(self.structure.flatten_up_to(trained), self.leaves, strict=True))
        arrays = jax.tree.leaves([piece for piece, x in pieces if is_model(x)])
        state = self.state if state is None else state
        parts = (s.unflatten(x) for s, x in zip(self.structures, (arrays, state), strict=True))
        models = iter(flax.merge(self.graph, *parts))
        return self.structure.unflatten(
            next(models) if is_model(x) else x if piece is None else piece for piece, x in pieces
        )

    def call(self, fun: Callable[..., Any], trained: Any, state: Any, *args: Any) -> Any:
        """The result of ``fun(tree, *args)``, and the `Changes` in the models, or ``None``."""
        with explained():
            return with_names(lambda fun: self._called(fun, trained, state, args), fun)

    def with_changes(self, changes: Changes | None) -> "NNXParameters":
        if changes is None:
            return self
        after = dataclasses.replace(
            self, state=changes.state, graph=changes.graph, structures=changes.structures
        )
        if changes.trained is None:
            return after
        variables = after.structures[0].unflatten(changes.trained)
        return dataclasses.replace(after, trained=after._tree_of(variables, pure=True))

    def with_state(self, state: Any) -> "NNXParameters":
        return dataclasses.replace(self, state=state)

    def has_form_of(self, other: Parameters) -> bool:
        """Whether only values of the state are different."""
        assert isinstance(other, NNXParameters)
        types = [[jax.typeof(x) for x in each.state] for each in (self, other)]
        same = self.graph == other.graph and self.structures == other.structures
        return same and other.trained is self.trained and types[0] == types[1]

    def with_state_of(self, other: Parameters, where: Any) -> "NNXParameters":
        """With the state of other parameters where this is true; not if that has another form."""
        assert isinstance(other, NNXParameters)
        if where is False or self.structures != other.structures:
            return self
        pairs = zip(self.state, other.state, strict=True)
        return self.with_state([x if x is y else jnp.where(where, y, x) for x, y in pairs])

    def with_variables(self, trained: Any) -> Any:
        """A tree like `trained` with variables around the arrays, as `nnx.grad` has them."""
        arrays, count = jax.tree.leaves(trained), self.structures[0].num_leaves
        variables = self.structures[0].unflatten(range(count))
        return jax.tree.structure(self._tree_of(variables, pure=False)).unflatten(arrays)

    def random_states(self, fun: Callable[..., Any], example: Any, count: int) -> dict[int, Any]:
        """The keys of so many examples, as `nnx.split_rngs` makes them, by place in the state.

        They are none if a function of one example draws no random numbers by the state of a model.
        It is a `ValueError` if the function changes something else there.
        """
        changed: list[str] = []

        def run(trained: Any, state: list[Any], example: Any) -> None:
            _, changes = self.call(fun, trained, state, example)
            changed.extend(self._changed(state, changes))

        jax.eval_shape(run, self.trained, self.state, example)
        others = [name for name in changed if name != _RANDOM]
        if others:
            raise ValueError(
                f"params: got an NNX model in which the loss of one example changes "
                f"{', '.join(others[:3])}, expected a loss that does not; for statistics of "
                "batches write model.eval(), and to drop the changes\n"
                "  graph, params, rest = nnx.split(model, nnx.Param, ...)\n"
                "  loss = lambda params, x: loss_fn(nnx.merge(graph, params, rest, copy=True), x)\n"
                "and pass params"
            )
        if not changed:
            return {}
        models = models_in(self.whole(self.trained))
        flax.split_keys(models, count)
        after = self._arrays(models)[1]
        pairs = enumerate(zip(self.state, after, strict=True))
        return {i: new for i, (old, new) in pairs if new is not old}

    def count_random_state(self) -> None:
        """Advances the counts of random numbers in the models as `nnx.split_rngs` does."""
        with explained():
            flax.restore_keys(flax.split_keys(models_in(self.leaves), 1))

    def _changed(self, state: list[Any], changes: Changes | None) -> Iterator[str]:
        """The variables that a function has changed, in words."""
        if changes is None:
            return
        if changes.structures != self.structures or changes.graph != self.graph:
            yield "its attributes or variables"
            return
        if changes.trained is not None:
            yield "its parameters"
        numbered = self.structures[1].unflatten(range(len(state)))
        for path, variable in flax.flat_state(numbered):
            is_random = flax.is_random(variable)
            if any(changes.state[i] is not state[i] for i in jax.tree.leaves(variable)):
                name = f"{type(variable).__name__} at {'/'.join(map(str, path[1:]))!r}"
                yield _RANDOM if is_random else name

    def _called(self, fun: Callable[..., Any], trained: Any, state: list[Any], args: Any) -> Any:
        tree = self.whole(trained, state)
        leaves = jax.tree.leaves(tree, is_leaf=is_model)
        before = self._arrays(leaves)
        result = fun(tree, *args)
        graph, *after = _split_of(leaves, self.is_trained)
        structures, arrays = tuple(map(jax.tree.structure, after)), [*map(jax.tree.leaves, after)]
        pairs = zip(before, arrays, strict=True)
        same = [len(x) == len(y) and all(map(operator.is_, x, y)) for x, y in pairs]
        if graph == self.graph and structures == self.structures and all(same):
            return result, None
        return result, Changes(None if same[0] else arrays[0], arrays[1], graph, structures)

    def _arrays(self, leaves: list[Any]) -> list[list[Any]]:
        return [jax.tree.leaves(part) for part in _split_of(leaves, self.is_trained)[1:]]

    def _tree_of(self, states: Any, pure: bool) -> Any:
        """The tree with parts of a state of all models in their places."""
        numbers = itertools.count()

        def part(x: Any) -> Any:
            if not is_model(x):
                return x if is_clippable(x) else None
            if flax.is_variable(x):  # in the tree itself: it stays one
                return states.get(next(numbers))
            piece = states.get(next(numbers), flax.empty_state())
            return flax.as_arrays(piece) if pure else piece

        return self.structure.unflatten(map(part, self.leaves))


def trained_variables(wrt: Any) -> Callable[[Any, Any], bool]:
    """Whether a variable at a path in its model is trained: integers are not."""
    is_chosen = flax.variable_filter(wrt)
    return lambda path, x: is_chosen(path, x) and all(map(is_clippable, jax.tree.leaves(x)))


def differentiated_inputs(
    arguments: tuple[Any, Any], chosen: Mapping[int | str, Any]
) -> list[bool]:
    """For each array among arguments whether the function is differentiated with respect to it.

    In ``arguments``, the positional and the keyword ones, `with_models` may have taken models
    apart; ``chosen`` has positions, and names of keyword arguments, each with a filter as ``wrt``.
    """
    entries, _ = jax.tree_util.tree_flatten_with_path(arguments, is_leaf=flax.is_apart)
    flags: list[bool] = []
    for path, part in entries:
        argument = path[1].key if path[0].idx else path[1].idx
        is_chosen = argument in chosen
        if flax.is_apart(part):
            wrt = chosen[argument] if is_chosen else None
            flags += _trained_arrays(part.state, is_chosen, wrt)
        elif is_array(part):
            flags.append(is_chosen)
    return flags


def _trained_arrays(state: Any, is_chosen: bool, wrt: Any) -> list[bool]:
    """For each array in a state whether it is trained."""
    leaves, structure = jax.tree.flatten(state)
    trained: set[int] = set()
    if is_chosen:
        is_trained, numbered = trained_variables(wrt), structure.unflatten(range(len(leaves)))
        pairs = zip(_flat(state), _flat(numbered), strict=True)
        for (path, variable), (_, numbers) in pairs:
            trained |= set(jax.tree.leaves(numbers)) if is_trained(path, variable) else set()
    return [i in trained for i, leaf in enumerate(leaves) if is_array(leaf)]


def _flat(state: Any) -> list[tuple[Any, Any]]:
    """The variables of a state with their paths; of one that is a variable itself, this one."""
    return [((), state)] if flax.is_variable(state) else flax.flat_state(state)


def _all_trained(models: list[Any], wrt: Any) -> bool:
    """Whether these are variables, as in an `nnx.State`, that are all trained."""
    is_trained = trained_variables(wrt)
    return all(flax.is_variable(x) and is_trained((), x) for x in models)


def _split_of(leaves: list[Any], is_trained: Callable[[Any, Any], bool]) -> tuple[Any, Any, Any]:
    """The graph of the models among some leaves, their variables that are trained, and others."""

    def chosen(path: Any, variable: Any) -> bool:
        return is_trained(path[1:], variable)  # without the number of the model

    return flax.split(models_in(leaves), chosen, ...)
