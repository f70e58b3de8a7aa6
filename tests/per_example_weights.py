"""Random chains of views and changes of weights, several in one loss, and what uses the weights.

A chain is drawn from a seed. One loss has several of them, since each program is compiled once for
all methods; weights are shared by some chains, joined and cut.

The uses have `jax.numpy.arctan` where one expects tanh. JAX computes the derivative of tanh as 1
minus its square, of which nothing is left where it is near 1: such a gradient of 1.8e-9 is right to
1e-7 even in float64. The derivative of arctan is 1 over a sum, and right to its last digits.
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np

FEW, SIZES, MOST, ROWS, EXAMPLES = (1, 2, 3), (6, 9, 12, 16, 20, 24), 1200, 2, 4
CHANGES, USES = {}, {}
# What products are followed through, if the arrays are large enough; two thirds of the changes.
FOLLOWED = ["reshape", "transpose", "cut", "pad", "twice", "split", "rows", "inside", "scaled"]
OF_THE_EXAMPLE = {"scaled_by_the_example", "carried"}


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
    bounds = [(rng.integers(n // 2 + 1), n // 2 + 1 + rng.integers(n // 2 + 1)) for n in shape]
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
    return lambda w, x: jnp.concatenate([w, 2 * w], axis)


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
    chosen = rng.integers(shape[0], size=int(rng.integers(1, shape[0] + 2)))
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
def summed_up(rng, shape):
    axis = int(rng.integers(len(shape)))
    return lambda w, x: jnp.cumsum(w, axis) / shape[axis]


@change
def nonlinear(rng, shape):
    return lambda w, x: jnp.tanh(w)


@change
def inside(rng, shape):
    wrap = [jax.jit, jax.checkpoint][int(rng.integers(2))]
    body = CHANGES[str(rng.choice(["reshape", "transpose", "cut", "pad", "twice"]))](rng, shape)
    return lambda w, x: wrap(body)(w, x)


def matrix(rng, shape):
    """How many rows an array has as a matrix: its first axes, or any of its factors."""
    if len(shape) > 1 and rng.random() < 0.8:
        return math.prod(shape[: int(rng.integers(1, len(shape)))])
    return factors(rng, math.prod(shape))[0]


def chain(rng, shape, share):
    """Some changes of a weight of this shape, and the shape that comes out."""
    x = jax.ShapeDtypeStruct((ROWS, MOST), jnp.float32)
    found, names = [], []
    for _ in range(int(rng.integers(1, 3 + int(5 * share)))):
        name = str(rng.choice(sorted(CHANGES) if rng.random() < share else FOLLOWED))
        step = CHANGES[name](rng, shape)
        new = jax.eval_shape(step, jax.ShapeDtypeStruct(shape, jnp.float32), x).shape
        if new and 0 < math.prod(new) <= MOST:
            shape, found, names = new, [*found, step], [*names, name]
    return found, shape, names


# What a loss does with the array that comes out of a chain, and an example, of (ROWS, MOST).


def use(function):
    """Registers what draws a function of an array of a shape and an example, and gives a number."""
    USES[function.__name__] = function
    return function


@use
def element_wise(rng, shape):
    return lambda v, x: jnp.sum(jnp.sin(v * x[0, : math.prod(shape)].reshape(shape)))


@use
def product(rng, shape):
    inner, count = matrix(rng, shape), int(rng.integers(1, ROWS + 1))
    return lambda v, x: jnp.sum(jnp.arctan(x[:count, :inner] @ v.reshape(inner, -1)))


@use
def product_of_groups(rng, shape):
    count = shape[0] if len(shape) > 1 and shape[0] < 4 else 1
    inner = matrix(rng, shape if count == 1 else shape[1:])

    def apply(v, x):
        x = x[:, : count * inner].reshape(ROWS, count, inner)
        return jnp.sum(jnp.arctan(jnp.einsum("tgi,gio->gto", x, v.reshape(count, inner, -1))))

    return apply


@use
def convolution(rng, shape):
    taps = max(n for n in range(1, 7) if shape[0] % n == 0)
    channels = matrix(rng, (shape[0] // taps, *shape[1:]))
    outputs = math.prod(shape) // taps // channels
    positions = int(rng.integers(1, 6 if channels < 100 else 2))
    stride, dilation = (int(n) for n in rng.integers(1, 3, 2))

    def apply(v, x):
        # Where nothing is inf or NaN: on a CPU XLA makes one convolution of those of all examples
        # in float64, with zeros between them, in `vmap(grad)` too.
        x = x[0, MOST - positions * channels :].reshape(1, positions, channels)
        kernel = v.reshape(taps, channels, outputs)
        edges = (int(dilation * (taps - 1)), 1)
        dims = ("NHC", "HIO", "NHC")
        options = {"rhs_dilation": (dilation,), "dimension_numbers": dims}
        made = jax.lax.conv_general_dilated(x, kernel, (stride,), [edges], **options)
        return jnp.sum(jnp.arctan(made))

    return apply


@use
def embedding(rng, shape):
    """Rows at ids of the example, some of them out of range."""
    count = matrix(rng, shape)

    return lambda v, x: rows_at_ids(v.reshape(count, -1), x)


@use
def first_state(rng, shape):
    def apply(v, x):
        step = lambda h, x: (jnp.arctan(h * x), None)  # noqa: E731
        return jnp.sum(jax.lax.scan(step, v, x[:, 3])[0])

    return apply


@use
def scanned(rng, shape):
    """Steps that each take their part of it, and all of it."""
    length = shape[0] if len(shape) > 1 and shape[0] < 13 else 1
    inner = matrix(rng, shape[1:] if length > 1 else shape)

    def apply(v, x):
        layers = v.reshape(length, inner, -1)

        def step(h, w):
            h = jnp.arctan(h + (x[:, :inner] @ w) @ jnp.swapaxes(layers[0], 0, 1))
            return h, jnp.sum(h @ w)

        h, found = jax.lax.scan(step, x[:, :inner], layers)
        return jnp.sum(h) + jnp.sum(found)

    return apply


def shape_of(rng):
    """The shape of a weight of two axes, or of three of which one is short."""
    shape = [int(n) for n in rng.choice(SIZES, 2)]
    if rng.random() < 0.4:
        shape.insert(int(rng.integers(3)), int(rng.choice(FEW)))
    return tuple(shape)


def plain_product(rng):
    count = int(rng.integers(1, ROWS + 1))
    return lambda v, x: jnp.sum(jnp.arctan(x[:count, : v.shape[0]] @ v))


def rows_at_ids(v, x):
    ids = jnp.int32(jnp.floor(x[-1, -4:] * v.shape[0]))
    found = v.at[ids].get(mode="fill", fill_value=0.0)
    return jnp.sum(jnp.sin(found * x[-1, : v.shape[1]][None]))


def overlapping(rng, shape):
    """Two or three uses of parts of a weight that overlap: the products have cross terms.

    If the parts have all rows, the first use is an embedding.
    """
    found, all_rows = [], bool(rng.integers(2))
    for turn in range(int(rng.integers(2, 4))):
        first, last = (
            [int(n) for n in rng.integers(0, [size // 3 + 1, size // 3 + 1])] for size in shape
        )
        rows = slice(None) if all_rows else slice(first[0], shape[0] - first[1])
        place = rows, slice(last[0], shape[1] - last[1])
        if all_rows and turn == 0:
            steps, name, use = [], "rows at ids", rows_at_ids
        else:
            steps, name = [lambda w, x: w.T] * int(rng.integers(2)), "plain product"
            use = plain_product(rng)
        found.append(([lambda w, x, place=place: w[place], *steps], use, ["part", name]))
    return found


def program(seed, count=6):
    """A loss of that many weights, each in one chain or two; its parameters and a batch; the names.

    Of three weights one is only cut and moved, one is changed seldom and one often. Of one more
    weight parts that overlap are used.
    """
    rng = np.random.default_rng(seed)
    shapes = [shape_of(rng) for _ in range(count)]
    everything = sorted(USES)
    products = [name for name in everything if name not in ("element_wise", "first_state")]
    found = []
    for i, shape in enumerate(shapes):
        share = (0, 0.15, 0.7)[i % 3]
        for turn in range(1 + int(rng.random() < 0.3)):  # two chains of one weight are added up
            steps, new, names = chain(rng, shape, share)
            some = products if share < 0.5 else everything
            name = some[(seed + i + turn) % len(some)]
            if name == "convolution" and OF_THE_EXAMPLE & set(names):  # there XLA makes one as well
                name = "product"
            found.append((f"w{i}", steps, USES[name](rng, new), [*names, name]))
    shapes.append((24, 16))
    own = np.random.default_rng([seed, count])
    found += [(f"w{count}", *chain) for chain in overlapping(own, shapes[-1])]

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


def poisoned(seed, batch):
    """The batch with inf or NaN in the second example, at a place that few or many chains read."""
    rng = np.random.default_rng(seed)
    place = 1, int(rng.integers(ROWS)), int(rng.choice([0, 1, 2, 3, 5, 20, 60]))
    return batch.at[place].set(float(rng.choice([np.inf, -np.inf, np.nan])))
