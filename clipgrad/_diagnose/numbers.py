"""The numbers with which an operation goes wrong, and how they are written."""

from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec


def on_host(tree: Any) -> Any:
    """Results of one compiled program as NumPy arrays, also of parts that other processes hold."""
    parts = [x for x in jax.tree.leaves(tree) if not x.is_fully_addressable]
    away = [x.sharding for x in parts if not x.is_fully_replicated]
    if away:
        whole = NamedSharding(away[0].mesh, PartitionSpec())
        tree = jax.jit(lambda tree: tree, out_shardings=whole)(tree)
    return jax.tree.map(np.asarray, tree)


def short(value: Any) -> str:
    """A number of at most four digits."""
    return f"{np.float64(value):.4g}"
