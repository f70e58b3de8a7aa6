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


def symmetric(f):
    return lambda a: f((a + a.T) / 2)


FUNCTIONS = {
    "tanh": (jnp.tanh, plain((3, 4))),
    "power": (jnp.power, plain((5,), (5,), low=0.5, high=2)),
    "sinc": (jnp.sinc, plain((5,))),
    "sort": (jnp.sort, plain((7,))),
    "max": (lambda x: jnp.max(x, axis=0), plain((5, 4))),
    "median": (jnp.median, plain((7,))),
    "var": (jnp.var, plain((3, 5))),
    "std of large values": (lambda x: jnp.std(x + 100), plain((6,))),
    "scatter add": (lambda x, y: x.at[jnp.asarray([0, 0, 2])].add(y), plain((4,), (3,))),
    "fft": (lambda x: jnp.abs(jnp.fft.rfft(x)), plain((8,))),
    "interp": (lambda x, f: jnp.interp(x, jnp.arange(4).astype(x.dtype), f), plain((5,), (4,))),
    "relu network": (
        lambda x, w, v: jax.nn.relu(jax.nn.relu(x @ w) @ v),
        plain((6, 8), (8, 16), (16, 3)),
    ),
    "softmax": (jax.nn.softmax, plain((3, 5))),
    "logsumexp": (jax.nn.logsumexp, plain((3, 5))),
    "attention": (lambda q, k, v: jax.nn.softmax(q @ k.T / 2) @ v, plain((3, 4), (5, 4), (5, 4))),
    "i0e": (special.i0e, plain((5,))),
    "cholesky": (symmetric(jnp.linalg.cholesky), positive_definite),
    "eigh values": (symmetric(jnp.linalg.eigvalsh), positive_definite),
    "qr": (lambda a: jnp.linalg.qr(a)[1], positive_definite),
    "solve": (jnp.linalg.solve, system),
    "expm": (lambda a: linalg.expm(a / 64), positive_definite),
    "integer labels": (optax.softmax_cross_entropy_with_integer_labels, labels),
    "huber": (optax.huber_loss, plain((6,), (6,))),
    "scan": (lambda h, xs: lax.scan(lambda h, x: (jnp.tanh(h + x), h), h, xs), plain((3,), (5, 3))),
    "remat": (jax.checkpoint(lambda x: jnp.sin(jnp.sin(x))), plain((3,))),
    "straight through": (lambda x: x + lax.stop_gradient(jnp.round(x) - x), plain((5,))),
    "straight through in a scan": (
        lambda xs: lax.scan(
            lambda h, x: (jnp.tanh(h + x + lax.stop_gradient(jnp.sign(x) - x)), h), xs[0], xs
        )[1],
        plain((4, 3)),
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
    "cumulative max": (lax.cummax, plain((6,))),
    "inverse fft": (lambda x, y: jnp.fft.ifft(lax.complex(x, y)), plain((5,), (5,))),
}
