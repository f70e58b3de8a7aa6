"""Parameters and batches sharded over Explicit mesh axes, with these axes left to XLA."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from clipgrad._compat import explicit_sharding


def is_explicit(tree: Any) -> bool:
    """Whether the type of an array names the mesh axes that it is sharded over."""
    return any(explicit_sharding(x) is not None for x in jax.tree.leaves(tree))


def with_auto_axes(
    of_some: Callable[[Any, Any], Any], place: Callable[[Any, Any], Any]
) -> Callable[[Any, Any], Any]:
    """A function of parameters and examples in which XLA shards what is in between.

    Products of factors sum over a sharded axis, for which types would want the sharding of each
    result. ``place`` gives the shardings of the outputs from two: the shardings of the parameters,
    which sums have as well, and the sharding of what each example has.
    """

    def run(params: Any, examples: Any) -> Any:
        if not is_explicit((params, examples)):
            return of_some(params, examples)
        found = _explicit_shardings((params, examples))
        mesh = found[0].mesh
        kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
        axes = tuple(name for name, kind in kinds if kind == AxisType.Explicit)
        of_params = jax.tree.map(lambda p: explicit_sharding(p) or NamedSharding(mesh, P()), params)
        places = place(of_params, NamedSharding(mesh, P(axis_of_examples(examples))))
        options: dict[str, Any] = {"axes": axes, "out_sharding": places}
        mapped: Callable[..., Any] = jax.sharding.auto_axes(of_some, **options)
        return mapped(params, examples)

    return run


def axis_of_examples(examples: Any) -> Any:
    """The Explicit mesh axis, or several, of the examples; ``None`` if they have none."""
    shardings = _explicit_shardings(examples)
    return next((s.spec[0] for s in shardings if s.spec[0] is not None), None)


def shares_axes(params: Any, examples: Any) -> bool:
    """Whether a parameter is sharded over an Explicit mesh axis of the examples."""
    own = _axes(axis_of_examples(examples))
    return any(own & _axes(part) for s in _explicit_shardings(params) for part in s.spec)


def without_shardings(tree: Any) -> Any:
    """The shapes and dtypes of a tree whose types name shardings."""
    if not is_explicit(tree):
        return tree
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x)), tree)


def _axes(part: Any) -> set[str]:
    """The mesh axes in a part of a spec."""
    return set() if part is None else {part} if isinstance(part, str) else set(part)


def _explicit_shardings(tree: Any) -> list[NamedSharding]:
    found = [explicit_sharding(x) for x in jax.tree.leaves(tree)]
    return [sharding for sharding in found if sharding is not None]
