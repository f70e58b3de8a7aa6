"""Parameters taken apart: what is differentiated, the state that a call changes, and all else."""

import abc
from collections.abc import Callable
from typing import Any, Self


class Parameters(abc.ABC):
    """A tree of parameters, apart; the methods put it together again.

    A class below it is a kind of parameters: plain trees, models of NNX, modules of Equinox. It
    says which trees it is for (`fits`), takes one apart (`of`), and calls a function with the whole
    (`call`). Only a kind whose calls change a state of the model overrides the methods behind
    that; what they return here is right where there is none.

    Attributes:
      trained: what is differentiated: a tree of arrays.
      state: the arrays that a call may change, and that are not trained; ``None``: there are none.
    """

    trained: Any
    state: Any

    @classmethod
    @abc.abstractmethod
    def fits(cls, params: Any, wrt: Any) -> bool:
        """Whether a tree is of this kind; ``wrt`` is the filter of what is trained, or ``None``."""

    @classmethod
    @abc.abstractmethod
    def of(cls, params: Any, wrt: Any) -> Self:
        """The tree apart; `ValueError` for one that would not be trained as it looks."""

    @abc.abstractmethod
    def whole(self, trained: Any) -> Any:
        """The tree with other trained arrays, as the user has it."""

    @abc.abstractmethod
    def call(
        self, fun: Callable[..., Any], trained: Any, state: Any, *args: Any
    ) -> tuple[Any, Any]:
        """The result of ``fun(tree, *args)``, and what it changed in the tree, or ``None``."""

    def with_changes(self, changes: Any) -> "Parameters":
        """The parameters after a call that changed this."""
        return self

    def with_state(self, state: Any) -> "Parameters":
        """The parameters with another state."""
        return self

    def with_state_of(self, other: "Parameters", where: Any) -> "Parameters":
        """The parameters with the state of others where this is true, as after a skipped step."""
        return self

    def has_form_of(self, other: "Parameters") -> bool:
        """Whether others, after a call, are the same but for values of the state."""
        return other is self

    def with_variables(self, trained: Any) -> Any:
        """A tree like ``trained`` as the framework's own ``grad`` returns it."""
        return trained

    def random_states(self, fun: Callable[..., Any], example: Any, count: int) -> dict[int, Any]:
        """The keys of so many examples by place in the state, if a function of one draws any."""
        return {}

    def count_random_state(self) -> None:
        """Notes in the user's models that random numbers were drawn."""
        return
