"""The norm of a whole tree."""

from typing import Any

import jax

from clipgrad._norms import AxisName, tree_norm


def global_norm(tree: Any, ord: float = 2, axis_name: AxisName = None) -> jax.Array:
    r"""The norm of all leaves of a tree as one vector, $(\sum_i |g_i|^p)^{1/p}$.

    Guarantees:
      * Squares are summed in float32, in float64 if a leaf is float64, never in a dtype that is
        narrower, and the result has that dtype.
      * A finite tree whose squares over- or underflow still has the right norm.
      * On a float32 tree in the ordinary range it equals ``optax.tree.norm`` bit by bit.
      * Its derivative is finite everywhere; at zero it is 0.
      * An empty tree has norm 0 for every ``ord``. ``None``, integer, boolean, ``float0`` and
        PRNG-key leaves count nowhere; complex leaves count with their absolute values.
      * NaN anywhere gives NaN; otherwise inf anywhere gives inf.

    Args:
      tree: a pytree of gradients.
      ord: the order $p$, a number in (0, inf].
      axis_name: inside `jax.shard_map`, `jax.pmap` or ``jax.vmap(axis_name=...)``, the name or
        names of the mapped axes that the tree is spread over. Where `jax.shard_map` tracks what
        varies (its default), a leaf that is the same on all devices is counted once; elsewhere
        every leaf counts as spread. Without it, the norm there is that of the part on each device.
        Under `jax.jit` it is not needed.

    Returns:
      A scalar array, float32 or float64.

    Raises:
      ValueError: if ``ord`` is not in (0, inf], or ``axis_name`` is not a mapped axis here.

    Example:
      >>> import clipgrad as cg, jax.numpy as jnp
      >>> cg.global_norm({"w": jnp.array([3.0]), "b": jnp.array([4.0], jnp.bfloat16)})
      Array(5., dtype=float32)
      >>> cg.global_norm(jnp.full(4, 300.0, jnp.float16))    # 4 * 300 ** 2 is inf in float16
      Array(600., dtype=float32)
    """
    return tree_norm(tree, ord, axis_name).value
