"""A Hypothesis strategy: trees of gradients."""

import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st

shapes = st.sampled_from([(), (1,), (7,), (0,), (3, 4), (1, 5), (2, 3, 4), (2, 1, 3, 2)])
exponents = st.sampled_from([-30, -12, -3, 0, 2, 9, 20, 30])


@st.composite
def trees(draw, min_rank=0, scales=exponents):
    """A dictionary of float32 arrays whose leaves may differ in scale by many orders."""
    tree = {}
    for name in draw(st.lists(st.sampled_from("abcde"), unique=True, max_size=4)):
        shape = draw(shapes.filter(lambda s: len(s) >= min_rank))
        seed = draw(st.integers(0, 2**16))
        values = np.random.default_rng(seed).normal(size=shape) * 10.0 ** draw(scales)
        tree[name] = jnp.asarray(values, jnp.float32)
    return tree
