"""Batches that are sharded over Explicit mesh axes, followed with these axes left to XLA."""

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


def with_auto_axes(of_some: Callable[[Any, Any], Any], place: Callable[[Any, Any], Any]) -> Any:
    """A function of parameters and examples in which XLA shards what is in between.

    Products of factors sum over a sharded axis, for which types would want the sharding of each
    result. ``place`` gives these of the outputs, from those of sums and of what each example has.
    """

    def run(params: Any, examples: Any) -> Any:
        if not is_explicit(examples):
            return of_some(params, examples)
        found = [s for x in jax.tree.leaves(examples) if (s := explicit_sharding(x)) is not None]
        mesh = found[0].mesh
        first = next((s.spec[0] for s in found if s.spec[0] is not None), None)
        kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
        axes = tuple(name for name, kind in kinds if kind == AxisType.Explicit)
        places = place(NamedSharding(mesh, P()), NamedSharding(mesh, P(first)))
        options: dict[str, Any] = {"axes": axes, "out_sharding": places}
        mapped: Callable[..., Any] = jax.sharding.auto_axes(of_some, **options)
        return mapped(params, examples)

    return run


def without_shardings(tree: Any) -> Any:
    """The shapes and dtypes of a tree whose types name shardings."""
    if not is_explicit(tree):
        return tree
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x)), tree)
