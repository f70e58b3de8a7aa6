"""The arguments of a run: copies, since a function may donate them."""

import contextlib
from collections.abc import Iterator
from typing import Any

import jax

from clipgrad._jaxpr import kept_lightly
from clipgrad._trees import is_array


def copied(tree: Any) -> Any:
    """The tree with copies of its arrays, with the same types and layouts."""
    return jax.tree.map(lambda x: x.copy() if is_array(x) else x, tree)


@contextlib.contextmanager
def settings_of_runs() -> Iterator[None]:
    """JAX's own ways of finding NaN and of forbidding transfers: off."""
    with (
        jax.debug_nans(False),
        jax.debug_infs(False),
        jax.transfer_guard("allow"),
        kept_lightly(),
    ):
        yield
