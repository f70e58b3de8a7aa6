"""Random chains of views and changes of weights, several in one loss, and where weights are used.

A chain is drawn from a seed. One loss has several of them, since each program is compiled once for
all methods; weights are shared by some chains, joined and cut.
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np

SIZES, MOST, ROWS, EXAMPLES = (1, 2, 3, 4, 6, 8), 720, 2, 4
CHANGES = {}


def change(function):
    """Registers what draws one change of an array of a shape: a function of it and an example."""
    CHANGES[function.__name__] = function
    return function


def factors(rng, size):
    """A shape of this size."""
    shape = []
    while size > 1 and len(shape) < 3:
        divisors = [n for n in range(1, size + 1) if size % n == 0]
        shape.append(int(rng.choice(divisors)))
        size //= shape[-1]
    return (*shape, size)


@change
def reshape(rng, shape):
    new = factors(rng, math.prod(shape))
    return lambda w, x: w.reshape(new)


@change
def transpose(rng, shape):
    order = rng.permutation(len(shape))
    return lambda w, x: jnp.transpose(w, order)


@change
def cut(rng, shape):
    bounds = [sorted(rng.choice(n + 1, 2, replace=False)) for n in shape]
    steps = rng.integers(1, 3, len(shape)) if rng.random() < 0.2 else [1] * len(shape)
    place = tuple(slice(a, b, s) for (a, b), s in zip(bounds, steps, strict=True))
    return lambda w, x: w[place]


@change
def pad(rng, shape):
    inner = int(rng.random() < 0.2)
    low = -1 if rng.random() < 0.2 else 0
    edges = [tuple(map(int, (*rng.integers(low, 3, 2), inner))) for _ in shape]
    edges = [
        (a, b, i) if a + b + n > 0 else (0, 0, 0) for (a, b, i), n in zip(edges, shape, strict=True)
    ]
    return lambda w, x: jax.lax.pad(w, jnp.zeros((), w.dtype), edges)


@change
def twice(rng, shape):
    axis = int(rng.integers(len(shape)))
    return lambda w, x: jnp.concatenate([w, jnp.flip(w, axis) if axis else 2 * w], axis)


@change
def split(rng, shape):
    axis = int(np.argmax(shape))
    at = int(rng.integers(shape[axis])) + 1
    return lambda w, x: jnp.concatenate(jnp.split(w, [at], axis)[::-1], axis)


@change
def flip(rng, shape):
    axis = int(rng.integers(len(shape)))
    return lambda w, x: jnp.flip(w, axis)


@change
def new_axis(rng, shape):
    axis, count = int(rng.integers(len(shape) + 1)), int(rng.integers(1, 3))
    return lambda w, x: jnp.repeat(jnp.expand_dims(w, axis), count, axis)


@change
def sum_over(rng, shape):
    axis = int(rng.integers(len(shape)))
    return lambda w, x: jnp.sum(w, axis) if w.ndim > 1 else w


@change
def scaled(rng, shape):
    axis = int(rng.integers(len(shape)))
    row = rng.normal(size=[n if i == axis else 1 for i, n in enumerate(shape)])
    return lambda w, x: w * jnp.asarray(row, w.dtype)


@change
def scaled_by_the_example(rng, shape):
    return lambda w, x: -w * x[0, 0]


@change
def masked(rng, shape):
    mask = rng.random(shape) < 0.6
    return lambda w, x: jnp.where(mask, w, jnp.zeros_like(w))


@change
def rows(rng, shape):
    chosen = rng.integers(shape[0], size=int(rng.integers(1, 4)))
    return lambda w, x: w[jnp.asarray(chosen, jnp.int32)]


@change
def row_of_the_example(rng, shape):
    rest = [jnp.int32(0)] * (len(shape) - 1)
    return lambda w, x: jax.lax.dynamic_slice(w, [jnp.int32(x[0, 0] > 0), *rest], (1, *w.shape[1:]))


@change
def half_stopped(rng, shape):
    axis = int(np.argmax(shape))
    at = shape[axis] // 2

    def apply(w, x):
        first, last = jnp.split(w, [at], axis)
        return jnp.concatenate([jax.lax.stop_gradient(first), last], axis)

    return apply


@change
def carried(rng, shape):
    """The weight is the initial carry of a scan that also scales it."""
    return lambda w, x: jax.lax.scan(lambda h, _: (h * x[0, 1] + 0.5 * w, None), w, length=2)[0]


@change
def nonlinear(rng, shape):
    return lambda w, x: jnp.tanh(w)


@change
def inside(rng, shape):
    wrap = [jax.jit, jax.checkpoint][int(rng.integers(2))]
    body = CHANGES[str(rng.choice(["reshape", "transpose", "cut", "pad", "twice"]))](rng, shape)
    return lambda w, x: wrap(body)(w, x)


def chain(rng, shape):
    """Some changes of a weight of this shape, and the shape that comes out."""
    x = jax.ShapeDtypeStruct((ROWS, MOST), jnp.float32)
    found, names = [], []
    for _ in range(int(rng.integers(1, 6))):
        name = str(rng.choice(sorted(CHANGES)))
        step = CHANGES[name](rng, shape)
        new = jax.eval_shape(step, jax.ShapeDtypeStruct(shape, jnp.float32), x).shape
        if new and 0 < math.prod(new) <= MOST:
            shape, found, names = new, [*found, step], [*names, name]
    return found, shape, names


def used(rng, shape):
    """What a loss does with an array of this shape: mostly a product of rows."""
    kind = rng.random()
    if kind < 0.2:
        return lambda v, x: jnp.sum(jnp.sin(v * x[0, : math.prod(shape)].reshape(shape)))
    inner = factors(rng, math.prod(shape))[0]
    count = 1 if kind < 0.5 else ROWS
    return lambda v, x: jnp.sum(jnp.tanh(x[:count, :inner] @ v.reshape(inner, -1)))


def program(seed, count=6):
    """A loss of that many chains, its parameters and a batch; and the names of the changes."""
    rng = np.random.default_rng(seed)
    shapes = [
        tuple(int(n) for n in rng.choice(SIZES, int(rng.integers(1, 4)))) for _ in range(count)
    ]
    found = []
    for i, shape in enumerate(shapes):
        steps, new, names = chain(rng, shape)
        # Some chains begin with the weight of another one, so that two of them are added up.
        found.append((f"w{i}", steps, used(rng, new), names))
        if rng.random() < 0.4:
            steps, new, names = chain(rng, shape)
            found.append((f"w{i}", steps, used(rng, new), names))

    def loss(p, x):
        total = 0.0
        for name, steps, use, _ in found:
            total += use(functools.reduce(lambda w, step: step(w, x), steps, p[name]), x)
        return total

    params = {
        f"w{i}": jnp.asarray(rng.normal(size=shape), jnp.float32) for i, shape in enumerate(shapes)
    }
    batch = jnp.asarray(rng.normal(size=(EXAMPLES, ROWS, MOST)) / 2, jnp.float32)
    return loss, params, batch, [(name, *names) for name, _, _, names in found]
