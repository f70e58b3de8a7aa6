"""Right functions at ordinary points: none may be rejected. Each maker takes a dtype.

`FUNCTIONS` maps a name to (function, maker of arguments).
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

special, linalg = jax.scipy.special, jax.scipy.linalg


def plain(*shapes, low=None, high=None):
    """Normal numbers, or uniform ones between `low` and `high`."""

    def make(dtype):
        rng = np.random.default_rng(7)
        draw = rng.normal if low is None else lambda size: rng.uniform(low, high, size)
        return tuple(jnp.asarray(draw(size=shape), dtype) for shape in shapes)

    return make


def positive_definite(dtype):
    a = np.random.default_rng(8).normal(size=(4, 4))
    return (jnp.asarray(a @ a.T + 4 * np.eye(4), dtype),)


def system(dtype):
    (a,), rng = positive_definite(dtype), np.random.default_rng(9)
    return a, jnp.asarray(rng.normal(size=(4, 2)), dtype)


def labels(dtype):
    return plain((5, 4))(dtype)[0], jnp.asarray([0, 3, 1, 1, 2])


def targets(dtype):
    x, y = plain((5, 4), (5, 4))(dtype)
    return x, jax.nn.softmax(y)


def symmetric(f):
    return lambda a: f((a + a.T) / 2)


FUNCTIONS = {
    "tanh": (jnp.tanh, plain((3, 4))),
    "power": (jnp.power, plain((5,), (5,), low=0.5, high=2)),
    "arctan2": (jnp.arctan2, plain((5,), (5,))),
    "sinc": (jnp.sinc, plain((5,))),
    "sort": (jnp.sort, plain((7,))),
    "max": (lambda x: jnp.max(x, axis=0), plain((5, 4))),
    "median": (jnp.median, plain((7,))),
    "prod": (jnp.prod, plain((5,))),
    "var": (jnp.var, plain((3, 5))),
    "std of large values": (lambda x: jnp.std(x + 100), plain((6,))),
    "where": (lambda x: jnp.where(x > 0, x * x, jnp.sin(x)), plain((9,))),
    "scatter add": (lambda x, y: x.at[jnp.asarray([0, 0, 2])].add(y), plain((4,), (3,))),
    "einsum": (lambda a, b: jnp.einsum("ij,kj->ik", a, b), plain((3, 4), (2, 4))),
    "convolve": (lambda x, k: jnp.convolve(x, k), plain((7,), (3,))),
    "fft": (lambda x: jnp.abs(jnp.fft.rfft(x)), plain((8,))),
    "interp": (lambda x, f: jnp.interp(x, jnp.arange(4).astype(x.dtype), f), plain((5,), (4,))),
    "relu network": (
        lambda x, w, v: jax.nn.relu(jax.nn.relu(x @ w) @ v),
        plain((6, 8), (8, 16), (16, 3)),
    ),
    "max pooling": (
        lambda x: lax.reduce_window(
            x, np.asarray(-np.inf, x.dtype), lax.max, (2, 2), (2, 2), "VALID"
        ),
        plain((6, 6)),
    ),
    "relu6": (jax.nn.relu6, plain((9,))),
    "softmax": (jax.nn.softmax, plain((3, 5))),
    "logsumexp": (jax.nn.logsumexp, plain((3, 5))),
    "attention": (lambda q, k, v: jax.nn.softmax(q @ k.T / 2) @ v, plain((3, 4), (5, 4), (5, 4))),
    "digamma": (special.digamma, plain((5,), low=0.5, high=5)),
    "erfinv": (special.erfinv, plain((5,), low=-0.9, high=0.9)),
    "xlogy": (special.xlogy, plain((5,), (5,), low=0.5, high=2)),
    "gammainc": (lambda x: special.gammainc(jnp.full_like(x, 2), x), plain((4,), low=0.5, high=3)),
    "i0e": (special.i0e, plain((5,))),
    "cholesky": (symmetric(jnp.linalg.cholesky), positive_definite),
    "eigh values": (symmetric(jnp.linalg.eigvalsh), positive_definite),
    "qr": (lambda a: jnp.linalg.qr(a)[1], positive_definite),
    "svd values": (lambda a: jnp.linalg.svd(a, compute_uv=False), positive_definite),
    "solve": (jnp.linalg.solve, system),
    "slogdet": (lambda a: jnp.linalg.slogdet(a)[1], positive_definite),
    "expm": (lambda a: linalg.expm(a / 64), positive_definite),
    "triangular solve": (lambda a, b: linalg.solve_triangular(a, b, lower=True), system),
    "cross entropy": (optax.softmax_cross_entropy, targets),
    "integer labels": (optax.softmax_cross_entropy_with_integer_labels, labels),
    "huber": (optax.huber_loss, plain((6,), (6,))),
    "cosine similarity": (optax.cosine_similarity, plain((3, 5), (3, 5))),
    "scan": (lambda h, xs: lax.scan(lambda h, x: (jnp.tanh(h + x), h), h, xs), plain((3,), (5, 3))),
    "fori loop": (lambda x: lax.fori_loop(0, 3, lambda i, c: jnp.sin(c), x), plain((3,))),
    "cond": (lambda x: lax.cond(x[0] > 0, jnp.sin, jnp.cos, x), plain((3,))),
    "remat": (jax.checkpoint(lambda x: jnp.sin(jnp.sin(x))), plain((3,))),
    "straight through": (lambda x: x + lax.stop_gradient(jnp.round(x) - x), plain((5,))),
    "straight through in a scan": (
        lambda xs: lax.scan(
            lambda h, x: (jnp.tanh(h + x + lax.stop_gradient(jnp.sign(x) - x)), h), xs[0], xs
        )[1],
        plain((4, 3)),
    ),
    "dropout": (
        lambda x: x * jax.random.bernoulli(jax.random.key(0), 0.5, x.shape).astype(x.dtype),
        plain((8,)),
    ),
    "large values": (lambda x: 1e4 + jnp.sin(x), plain((6,))),
    "saturated": (lambda x: jnp.tanh(10 * x), plain((9,))),
    "tiny": (lambda x: 1e-20 * jnp.sin(x), plain((6,))),
    "huge": (lambda x: 1e20 * jnp.sin(x), plain((6,))),
}


# Beside those above, in float32 only. Left out, since JAX's gradient is not that of the function:
# `random.gamma`, `random.beta`, `random.dirichlet` (implicit, while the sampler rejects and jumps),
# `special.spence` (NaN below 1), and `sparse.linalg.cg` (right for symmetric matrices only).
def own_targets(dtype):
    (x,) = plain((9,))(dtype)
    return x, jax.nn.softmax(x)


MORE = {
    "a softmax and its own targets": (optax.softmax_cross_entropy, own_targets),
    "mod": (jnp.mod, plain((5,), (5,), low=1, high=3)),
    "percentile": (lambda x: jnp.percentile(x, 30), plain((9,))),
    "corrcoef": (jnp.corrcoef, plain((3, 6))),
    "cumulative max": (lax.cummax, plain((6,))),
    "select": (lambda x: jnp.select([x < -0.5, x < 0.5], [x, x * x], jnp.sin(x)), plain((8,))),
    "inverse fft": (lambda x, y: jnp.fft.ifft(lax.complex(x, y)), plain((5,), (5,))),
    "sparse plus": (jax.nn.sparse_plus, plain((9,))),
    "spectral norm": (lambda a: jnp.linalg.norm(a, 2), plain((3, 4))),
    "column norm": (lambda a: jnp.linalg.norm(a, 1), plain((3, 4))),
    "associative scan": (lambda x: lax.associative_scan(jnp.multiply, x), plain((6,))),
    "switch": (lambda x: lax.switch(1, [jnp.sin, jnp.cos], x), plain((4,))),
    "dilated convolution": (
        lambda x, k: lax.conv_general_dilated(x, k, (2, 2), "SAME", rhs_dilation=(2, 2)),
        plain((1, 2, 7, 7), (3, 2, 3, 3)),
    ),
    "batch norm": (
        lambda x, g, b: (
            (x - x.mean(0, keepdims=True)) / jnp.sqrt(x.var(0, keepdims=True) + 1e-5) * g[None]
            + b[None]
        ),
        plain((6, 3), (3,), (3,)),
    ),
    "gumbel softmax": (
        lambda x: jax.nn.softmax(2 * (x + jax.random.gumbel(jax.random.key(0), x.shape, x.dtype))),
        plain((3, 4)),
    ),
}
