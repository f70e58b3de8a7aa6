"""Programs with a leaf whose gradient is exactly zero, and programs without a fault.

Each is a function of ``p``, a dictionary of parameters, and of ``x``, four numbers. A cut is marked
by its cause, by the leaf that it cuts and by ``# cut`` in its line; causes in `NOTED` are notes.
"""

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import PartitionSpec as P

X = np.array([0.3, -0.7, 1.1, 0.9], np.float32)
W = np.array([0.5, -0.3, 0.8, 1.2], np.float32)
NONE = np.zeros(4, np.float32)
MATRIX = np.linspace(-1, 1, 16, dtype=np.float32).reshape(4, 4)
KEY = jax.random.key(0)
NOTED = {"stop_gradient", "unused", "trains later", "stationary", "constant zeros"}


@dataclasses.dataclass(frozen=True)
class Cut:
    """A program whose leaf is cut.

    Attributes:
      function: the program.
      params: its parameters.
      cause: of the finding, or of the note.
      leaf: the path of the leaf in the parameters, as in ``['w']``.
    """

    function: Callable[[Any, Any], Any]
    params: Any
    cause: str
    leaf: str

    @property
    def name(self) -> str:
        """The name of the function."""
        return self.function.__name__

    @property
    def line(self) -> int | None:
        """The line with the mark, or None."""
        function = inspect.unwrap(self.function)
        lines, first = inspect.getsourcelines(function)
        marked = [first + i for i, line in enumerate(lines) if "# cut" in line]
        return marked[0] if marked else LINES.get(self.name)


CUTS: list[Cut] = []
HEALTHY: list[tuple[Callable[[Any, Any], Any], Any]] = []
LINES: dict[str, int] = {}  # of marks outside of the functions


def cut(cause, params=None, leaf="['w']", table=CUTS):
    """Puts a program into the table."""

    def register(function):
        table.append(Cut(function, {"w": W} if params is None else params, cause, leaf))
        return function

    return register


def healthy(params=None, table=HEALTHY):
    """Puts a program without a fault into the table."""

    def register(function):
        table.append((function, {"w": W} if params is None else params))
        return function

    return register


def marked_in(helper, *names):
    """The mark of some programs is in a function that they call."""
    lines, first = inspect.getsourcelines(helper)
    line = next(first + i for i, text in enumerate(lines) if "# cut" in text)
    LINES.update(dict.fromkeys(names, line))


# -- Cuts of structure.


@cut("cast")
def cast_to_int(p, x):
    count = p["w"].astype(jnp.int32)  # cut
    return jnp.sum(count * x)


@cut("cast")
def cast_to_bool(p, x):
    gate = p["w"].astype(bool)  # cut
    return jnp.sum(gate * x)


@cut("bitcast")
def bits(p, x):
    carrier = lax.bitcast_convert_type(p["w"], jnp.int32)  # cut
    return jnp.sum(lax.bitcast_convert_type(carrier, jnp.float32) * x)


@cut("comparison")
def threshold(p, x):
    return jnp.sum((x > p["w"]) * x)  # cut


@cut("comparison")
def predicate(p, x):
    scale = lax.cond(p["w"][0] > 0, lambda: 3, lambda: 2)  # cut
    return scale * jnp.sum(x)


@cut("comparison")
def equality(p, x):
    same = p["w"] == x  # cut
    return jnp.sum(jnp.where(same, x, 2 * x))


@cut("comparison")
def finite(p, x):
    return jnp.sum(jnp.isfinite(p["w"]) * x)  # cut


@cut("index")
def argmax_index(p, x):
    return x[jnp.argmax(p["w"])]  # cut


@cut("index")
def argmax_one_hot(p, x):
    chosen = jnp.argmax(p["w"] * x)  # cut
    return jax.nn.one_hot(chosen, 4) @ x


@cut("index")
def top_k_indices(p, x):
    _, indices = lax.top_k(p["w"], 2)  # cut
    return jnp.sum(x[indices])


@cut("index")
def argsort_order(p, x):
    order = jnp.argsort(p["w"])  # cut
    return x[order] @ x


@cut("index")
def searched(p, x):
    edges = jnp.linspace(0.0, 1.0, 5)
    place = jnp.searchsorted(edges, p["w"])  # cut
    return jnp.sum(place * x)


@cut("index")
def digitized(p, x):
    return jnp.sum(jnp.digitize(p["w"], jnp.linspace(0.0, 1.0, 5)) * x)  # cut


@cut("flat")
def rounded(p, x):
    return jnp.sum(jnp.round(p["w"] * 8) / 8 * x)  # cut


@cut("flat")
def floored(p, x):
    whole = jnp.floor(p["w"])  # cut
    return jnp.sum(whole * x)


@cut("flat")
def ceiled(p, x):
    return jnp.sum(x * jnp.ceil(p["w"]))  # cut


@cut("flat")
def signs(p, x):
    direction = jnp.sign(p["w"])  # cut
    return jnp.sum(direction * x)


@cut("flat")
def floor_divided(p, x):
    return jnp.sum((p["w"] // 0.25) * x)  # cut


def clean(tree):
    """A helper that hides what it does."""
    return jax.tree.map(lambda leaf: lax.stop_gradient(leaf), tree)  # cut


@cut("stop_gradient")
def detached_in_a_helper(p, x):
    return jnp.sum(clean({"a": p["w"]})["a"] * x)


@cut("stop_gradient")
def detached_here(p, x):
    fixed = lax.stop_gradient(p["w"])  # cut
    return jnp.sum(fixed**2 * x)


marked_in(clean, "detached_in_a_helper")


@jax.custom_vjp
def with_zeros(w):
    """A kernel without a backward pass."""
    return w * 2


with_zeros.defvjp(lambda w: (w * 2, w), lambda w, g: (jnp.zeros_like(w),))


@cut("custom rule")
def zeros_of_a_vjp(p, x):
    return jnp.sum(with_zeros(p["w"]) * x)  # cut


@cut("custom rule", {"w": W, "v": W})
def none_of_a_vjp(p, x):
    @jax.custom_vjp
    def kernel(w, v):
        return w * v

    kernel.defvjp(lambda w, v: (w * v, w), lambda w, g: (None, g * w))
    return jnp.sum(kernel(p["w"], p["v"]) * x)  # cut


@cut("custom rule")
def zeros_of_a_jvp(p, x):
    @jax.custom_jvp
    def quantized(w):
        return w * 0.5

    quantized.defjvp(lambda primals, tangents: (quantized(*primals), tangents[0] * 0.0))
    return jnp.sum(quantized(p["w"]) * x)  # cut


@cut("unused", {"w": W, "v": W})
def unused(p, x):
    return jnp.sum(p["v"] * x)


@cut("unused", {"w": W, "v": W})
def replaced(p, x):
    y = p["w"] * x
    y = p["v"] * x
    return jnp.sum(y)


@cut("overwritten", {"w": W, "v": W})
def overwritten(p, x):
    y = p["w"] * x
    y = y.at[:].set(p["v"])  # cut
    return jnp.sum(y)


@cut("overwritten", {"w": W, "v": W})
def updated_throughout(p, x):
    return jnp.sum(lax.dynamic_update_slice(p["w"], p["v"], (0,)) * x)  # cut


@cut("cancels")
def ratio_to_itself(p, x):
    logp = jnp.log(p["w"] ** 2)
    return jnp.sum(jnp.exp(logp - logp) * x)  # cut


# -- Cuts of numbers.


@cut("dead")
def dead_relu(p, x):
    hidden = jax.nn.relu(p["w"] * x - 5.0)  # cut
    return jnp.sum(hidden) + jnp.sum(x)


@cut("dead")
def dead_maximum(p, x):
    return jnp.sum(jnp.maximum(p["w"] - 3.0, 0.0)) + jnp.sum(x)  # cut


@cut("dead", {"w": MATRIX, "b": NONE - 9})
def dead_layer(p, x):
    y = p["w"] @ x + p["b"]
    return jnp.sum(jax.nn.relu(y) * x) + 1.0  # cut


@cut("saturated")
def relu6_above(p, x):
    return jnp.sum(jax.nn.relu6(p["w"] + 9.0) * x)  # cut


@cut("saturated")
def sigmoid_saturated(p, x):
    gate = jax.nn.sigmoid(p["w"] + 200.0)  # cut
    return jnp.sum(gate * x)


@cut("saturated")
def tanh_saturated(p, x):
    return jnp.sum(jnp.tanh(p["w"] * 10 + 70.0) * x)  # cut


@cut("saturated")
def exp_underflow(p, x):
    return jnp.sum(jnp.exp(p["w"] - 300.0) * x) + 1.0  # cut


@cut("saturated")
def softmax_saturated(p, x):
    logits = p["w"] * jnp.array([1.0, 0.0, 0.0, 0.0]) + jnp.array([1e4, 0.0, 0.0, 0.0])
    return jax.nn.softmax(logits) @ x  # cut


@cut("cancels", {"w": np.ones(4, np.float32)})
def sum_of_a_softmax(p, x):
    return jnp.sum(jax.nn.softmax(p["w"])) + x[0]  # cut


@cut("clipped")
def clipped(p, x):
    return jnp.sum(jnp.clip(p["w"] + 7.0, -1.0, 1.0) * x)  # cut


@cut("clipped")
def minimum(p, x):
    return jnp.sum(jnp.minimum(p["w"] + 7.0, 1.0) * x)  # cut


@cut("clipped")
def lax_clamp(p, x):
    return jnp.sum(lax.clamp(2.0, p["w"], 3.0) * x)  # cut


@cut("where")
def where_other_side(p, x):
    y = jnp.where(x > 100.0, p["w"], x)  # cut
    return jnp.sum(y)


@cut("where")
def mask_all_false(p, x):
    mask = jnp.arange(4) >= 4
    return jnp.sum(jnp.where(mask, p["w"] * x, 0.0)) + jnp.sum(x)  # cut


@cut("where")
def selected(p, x):
    return jnp.sum(lax.select(x < 50.0, x, p["w"] * x))  # cut


@cut("zero factor")
def mask_times(p, x):
    mask = (x > 10.0).astype(jnp.float32)
    return jnp.sum(p["w"] * mask) + jnp.sum(x)  # cut


@cut("zero factor")
def zero_coefficient(p, x):
    weight = x[0] * 0.0
    return weight * jnp.sum(p["w"] ** 2) + jnp.sum(x)  # cut


@cut("zero factor", {"w": MATRIX})
def matrix_of_a_dead_input(p, x):
    hidden = jax.nn.relu(x - 10.0)
    return jnp.sum(p["w"] @ hidden) + jnp.sum(x)  # cut


@cut("zero factor", {"w": MATRIX})
def below_the_triangle(p, x):
    return jnp.sum(jnp.zeros((4, 4)) * p["w"]) + jnp.sum(x)  # cut


@cut("zero factors", {"a": NONE, "b": NONE}, "['a']")
def both_zero(p, x):
    return jnp.sum(p["a"] * p["b"]) + jnp.sum(x)  # cut


@cut("zero factors", {"down": np.zeros((4, 2), np.float32), "up": np.zeros((2, 4), np.float32)},
     "['up']")  # fmt: skip
def lora_of_zeros(p, x):
    return jnp.sum(x @ p["down"] @ p["up"]) + jnp.sum(x)  # cut


@cut("zero factor")
def disjoint_masks(p, x):
    first, last = jnp.array([1.0, 1.0, 0.0, 0.0]), jnp.array([0.0, 0.0, 1.0, 1.0])
    y = p["w"] * first  # cut
    return jnp.sum(y * last) + jnp.sum(x)


@cut("not read")
def filled_gather(p, x):
    return jnp.take(p["w"], jnp.array([90, 91]), mode="fill", fill_value=0.0).sum() + x[0]  # cut


@cut("not read", {"w": W, "v": W})
def another_part(p, x):
    table = jnp.concatenate([p["w"], p["v"]])  # cut
    return jnp.sum(table[4 + jnp.argsort(x)] * x)


@cut("not read", {"w": W, "v": W})
def never_largest(p, x):
    both = jnp.stack([p["w"] - 50.0, p["v"]])  # cut
    return jnp.sum(jnp.max(both, axis=0) * x)


@cut("not read")
def dropped_segments(p, x):
    sums = jax.ops.segment_sum(p["w"], jnp.array([7, 8, 9, 10]), num_segments=4)  # cut
    return sums @ x + x[0]


@cut("branch")
def branch_not_taken(p, x):
    return lax.cond(x[0] > 9.0, lambda: jnp.sum(p["w"] * x), lambda: jnp.sum(x))  # cut


@cut("branch")
def switch_not_taken(p, x):
    branches = [lambda w: jnp.sum(x), lambda w: w @ x, lambda w: 2 * (w @ x)]
    return lax.switch((x[0] > 5.0).astype(int), branches, p["w"])  # cut


@cut("underflow")
def half_product(p, x):
    half = p["w"].astype(jnp.float16) * jnp.float16(1e-4)  # cut
    return jnp.sum(half * jnp.float16(1e-5)).astype(jnp.float32) + x[0]


@cut("underflow")
def half_cast(p, x):
    wide = p["w"].astype(jnp.float16).astype(jnp.float32)  # cut
    return jnp.sum(wide * x) * 1e-12


@cut("underflow")
def single_product(p, x):
    return jnp.sum(p["w"] * 1e-30 * 1e-30) + x[0]  # cut


@cut("one element")
def softmax_over_one(p, x):
    best, _ = lax.top_k(p["w"] * x, 1)
    return jnp.sum(jax.nn.softmax(best)) * jnp.sum(x)  # cut


@cut("one element")
def log_softmax_over_one(p, x):
    return jnp.sum(jax.nn.log_softmax((p["w"] * x)[:, None], axis=-1))  # cut


@cut("cancels")
def softmax_by_hand(p, x):
    logits = p["w"][:, None]
    logits = logits - logits.max(-1, keepdims=True)
    gates = jnp.exp(logits) / jnp.exp(logits).sum(-1, keepdims=True)  # cut
    return jnp.sum(gates * x[:, None])


@cut("cancels")
def norm_over_one(p, x):
    y = (p["w"] * x)[:, None]
    centred = y - jnp.mean(y, axis=-1, keepdims=True)  # cut
    return jnp.sum(centred / jnp.sqrt(jnp.mean(centred**2, -1, keepdims=True) + 1e-6)) + x[0]


@cut("cancels")
def minus_itself(p, x):
    y = p["w"] * x
    return jnp.sum(y - y) + x[0]  # cut


# -- Inside of programs.


@cut("flat")
def in_jit(p, x):
    @jax.jit
    def quantize(w):
        return jnp.round(w)  # cut

    return jnp.sum(quantize(p["w"]) * x)


@cut("dead")
def in_scan(p, x):
    def step(h, now):
        h = jax.nn.relu(p["w"] * now - 40.0) + 0.5 * h  # cut
        return h, None

    return jnp.sum(lax.scan(step, x, x)[0])


@cut("zero factor", leaf="['w']")
def at_a_step_of_scan(p, x):
    def step(h, keep):
        return h * keep + 1.0, None  # cut

    return jnp.sum(lax.scan(step, p["w"], jnp.array([1.0, 1.0, 0.0, 1.0, 1.0]))[0] * x)


@cut("comparison")
def in_while(p, x):
    def again(state):
        return state[0] < p["w"][2] * 10  # cut

    count, total = lax.while_loop(again, lambda s: (s[0] + 1.0, s[1] + x), (0.0, x))
    return jnp.sum(total)


@cut("clipped")
def in_cond(p, x):
    def taken(w):
        return jnp.clip(w + 9.0, 0.0, 1.0)  # cut

    return jnp.sum(lax.cond(x[0] > 0, taken, lambda w: w, p["w"]) * x)


@cut("flat")
def in_remat(p, x):
    @jax.checkpoint
    def block(w):
        return jnp.floor(jnp.tanh(w) * 4)  # cut

    return jnp.sum(block(p["w"]) * x)


@cut("flat")
def in_vmap(p, x):
    def row(w, x):
        return jnp.sign(w) * x  # cut

    return jnp.sum(jax.vmap(row)(p["w"], x))


@cut("custom rule")
def in_vmap_of_a_rule(p, x):
    return jnp.sum(jax.vmap(with_zeros)(p["w"]) * x)  # cut


@cut("dead")
def in_loops(p, x):
    def block(w, now):
        return jax.nn.relu(w * now - 30.0)  # cut

    def inner(h, now):
        return h + jax.checkpoint(block)(p["w"], now), None

    def outer(h, _):
        return lax.scan(inner, h, x)[0], None

    return jnp.sum(jax.jit(lambda h: lax.scan(outer, h, length=2)[0])(x))


@cut("cast")
def in_fori(p, x):
    def body(_, total):
        return total + p["w"].astype(jnp.int32) * x  # cut

    return jnp.sum(lax.fori_loop(0, 3, body, x))


def over_devices(function, *arrays):
    """Maps a function over all devices; each gets one number of each array."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("data",))
    spread = [jnp.tile(a, (2, 1)).reshape(-1)[: jax.device_count()] for a in arrays]
    specs = tuple(P("data") for _ in arrays)
    return jax.shard_map(function, mesh=mesh, in_specs=specs, out_specs=P())(*spread)


@cut("flat")
def floor_on_a_mesh(p, x):
    def shard(w, x):
        return lax.psum(jnp.sum(jnp.floor(w) * x), "data")  # cut

    return over_devices(shard, p["w"], x)


@cut("dead")
def dead_on_a_mesh(p, x):
    def shard(w, x):
        y = jax.nn.relu(w * x - 20.0)  # cut
        return lax.psum(jnp.sum(y + x), "data")

    return over_devices(shard, p["w"], x)


@cut("zero factor")
def masked_on_a_mesh(p, x):
    def shard(w, x):
        mask = jnp.where(lax.axis_index("data") >= 99, 1.0, 0.0)
        return lax.psum(jnp.sum(w * mask + x), "data")  # cut

    return over_devices(shard, p["w"], x)


# -- What may be meant.


@cut("trains later", {"w": W, "v": NONE})
def lora_at_first(p, x):
    return jnp.sum(p["v"] * (p["w"] * x)) + jnp.sum(x)  # cut


@cut("trains later", {"w": MATRIX, "v": NONE})
def zero_head(p, x):
    return jnp.tanh(p["w"] @ x) @ p["v"] + x[0]  # cut


@cut("trains later", {"w": W, "v": np.zeros((), np.float32)})
def rezero(p, x):
    return jnp.sum(x + p["v"] * jnp.tanh(p["w"] * x))  # cut


@cut("stationary", {"w": NONE})
def square_at_zero(p, x):
    return jnp.sum(p["w"] ** 2) + x[0]  # cut


@cut("stationary", {"w": NONE})
def cube_at_zero(p, x):
    return jnp.sum(p["w"] ** 3 * x)  # cut


@cut("constant zeros", {"w": MATRIX, "v": MATRIX})
def initial_state(p, x):
    state = jnp.zeros(4)
    return jnp.sum(jnp.tanh(p["w"] @ state + p["v"] @ x))  # cut


# -- Programs without a fault.


@healthy({"a": MATRIX, "b": MATRIX, "c": W})
def layers(p, x):
    return jax.nn.relu(p["a"] @ jax.nn.relu(p["b"] @ x) + p["c"]) @ x


@healthy({"k": np.ones((3, 1, 1), np.float32)})
def convolution(p, x):
    y = lax.conv_general_dilated(x[None, :, None], p["k"], (1,), "SAME",
                                 dimension_numbers=("NWC", "WIO", "NWC"))  # fmt: skip
    return jnp.sum(y**2)


@healthy({"q": MATRIX, "k": MATRIX, "v": MATRIX})
def attention(p, x):
    h = jnp.outer(x, x)
    logits = (h @ p["q"]) @ (h @ p["k"]).T
    logits = jnp.where(jnp.tril(jnp.ones((4, 4), bool)), logits, -jnp.inf)
    return jnp.sum(jax.nn.softmax(logits) @ (h @ p["v"]) * h)


@healthy({"q": MATRIX, "k": MATRIX, "v": MATRIX})
def attention_over_one_token(p, x):
    h = x[None]
    logits = (h @ p["q"]) @ (h @ p["k"]).T
    return jnp.sum(jax.nn.softmax(logits) @ (h @ p["v"]) * h)


@healthy({"a": MATRIX, "b": MATRIX})
def rnn(p, x):
    def step(h, now):
        h = jnp.tanh(p["a"] @ h + p["b"] @ (now * x))
        return h, h

    return jnp.sum(lax.scan(step, jnp.zeros(4), x)[1])


@healthy({"a": MATRIX, "b": MATRIX})
def one_step_of_an_rnn(p, x):
    def step(h, now):
        return jnp.tanh(p["a"] @ h + p["b"] @ now), None

    return jnp.sum(lax.scan(step, jnp.zeros(4), x[None])[0])


@healthy()
def straight_through(p, x):
    w = p["w"]
    return jnp.sum((w + lax.stop_gradient(jnp.round(w) - w)) * x)


@healthy()
def straight_through_rule(p, x):
    @jax.custom_vjp
    def sign(w):
        return jnp.sign(w)

    sign.defvjp(lambda w: (jnp.sign(w), None), lambda _, g: (g,))
    return jnp.sum(sign(p["w"]) * x)


@healthy({"table": np.ones((9, 4), np.float32)})
def absent_rows(p, x):
    return jnp.sum(p["table"][jnp.array([1, 5])] * x[None])


@healthy({"w": MATRIX, "b": np.array([-9, 0.5, 0.5, -9], np.float32)})
def some_dead_units(p, x):
    return jnp.sum(jax.nn.relu(p["w"] @ x + p["b"])) + x[0]


@healthy({"w": MATRIX, "b": W})
def bias_before_a_norm(p, x):
    y = jnp.outer(x, x) @ p["w"] + p["b"][None]
    y = y - jnp.mean(y, axis=0, keepdims=True)
    return jnp.sum(jnp.sin(y))


@healthy({"w": MATRIX, "s": W})
def layer_norm(p, x):
    y = p["w"] @ x
    y = (y - jnp.mean(y)) * lax.rsqrt(jnp.var(y) + 1e-6)
    return jnp.sum(jnp.tanh(y * p["s"]) * x)


@healthy({"w": MATRIX})
def cross_entropy(p, x):
    logits = p["w"] @ x
    return optax.softmax_cross_entropy_with_integer_labels(logits, jnp.int32(2))


@healthy()
def log_sum_exp(p, x):
    return jax.nn.logsumexp(p["w"] * x)


@healthy()
def top_k_values(p, x):
    values, indices = lax.top_k(p["w"], 2)
    return jnp.sum(jax.nn.softmax(values) * x[indices])


@healthy({"gate": MATRIX, "experts": np.ones((4, 4), np.float32)})
def experts(p, x):
    gates, chosen = lax.top_k(jax.nn.softmax(p["gate"] @ x), 2)
    return jnp.sum(gates[:, None] * p["experts"][chosen] * x[None])


@healthy()
def gumbel(p, x):
    noise = jax.random.gumbel(KEY, (4,))
    soft = jax.nn.softmax(p["w"] + noise)
    hard = jax.nn.one_hot(jnp.argmax(soft), 4)
    return (hard + soft - lax.stop_gradient(soft)) @ x


@healthy({"w": W, "v": np.full((), 0.5, np.float32)})
def rezero_that_trains(p, x):
    return jnp.sum(x + p["v"] * jnp.tanh(p["w"] * x))


@healthy()
def partly_masked(p, x):
    return jnp.sum(jnp.where(x > 0, p["w"], x))


@healthy()
def partly_clipped(p, x):
    return jnp.sum(jnp.clip(p["w"], 0.0, 1.0) * x)


@healthy()
def taken(p, x):
    return lax.cond(x[0] > 0, lambda w: w @ x, lambda w: jnp.sum(x), p["w"])


@healthy()
def scan_that_forgets(p, x):
    def step(h, keep):
        return h * keep + p["w"], None

    return jnp.sum(lax.scan(step, x, jnp.array([1.0, 0.0, 1.0]))[0] * x)


@healthy({"w": np.stack([MATRIX, MATRIX, MATRIX])})
def remat_layers(p, x):
    def layer(h, w):
        return jnp.tanh(w @ h), None

    return jnp.sum(lax.scan(jax.checkpoint(layer), x, p["w"])[0])


@healthy()
def mapped(p, x):
    return jnp.sum(jax.vmap(lambda w, x: jnp.tanh(w * x))(p["w"], x))


@healthy()
def rule_of_their_own(p, x):
    @jax.custom_jvp
    def f(w):
        return jnp.sin(w)

    f.defjvp(lambda primals, tangents: (f(*primals), jnp.cos(primals[0]) * tangents[0]))
    return jnp.sum(f(p["w"]) * x)


@healthy()
def on_a_mesh(p, x):
    return over_devices(lambda w, x: lax.psum(jnp.sum(jnp.tanh(w * x)), "data"), p["w"], x)


@healthy()
def fori(p, x):
    return jnp.sum(lax.fori_loop(0, 3, lambda i, h: jnp.tanh(h * p["w"]), x))


@healthy({"w": MATRIX})
def solve(p, x):
    return jnp.sum(jnp.linalg.solve(p["w"] @ p["w"].T + jnp.eye(4), x))


@healthy({"w": MATRIX})
def cholesky(p, x):
    factor = jnp.linalg.cholesky(p["w"] @ p["w"].T + jnp.eye(4))
    return jnp.sum(factor @ x)


@healthy()
def spectrum(p, x):
    return jnp.sum(jnp.abs(jnp.fft.fft(p["w"] + x)) ** 2)


@healthy()
def sorted_values(p, x):
    return jnp.sort(p["w"]) @ x


@healthy()
def quantized_through(p, x):
    scale = lax.stop_gradient(jnp.max(jnp.abs(p["w"])))
    w = p["w"] / scale
    w = w + lax.stop_gradient(jnp.round(w * 127) / 127 - w)
    return jnp.sum(w * scale * x)


@healthy({"w": MATRIX})
def dropout(p, x):
    keep = jax.random.bernoulli(KEY, 0.5, (4,))
    return jnp.sum(jnp.where(keep, p["w"] @ x, 0.0) * x)


@healthy({"w": W, "v": W})
def penalty(p, x):
    return jnp.sum(p["v"] * p["w"] * x) + 0.1 * optax.tree.norm(p) ** 2


@healthy()
def huber(p, x):
    return jnp.sum(optax.huber_loss(p["w"], x, delta=0.1))


@healthy({"w": W, "v": W})
def target_network(p, x):
    target = lax.stop_gradient(jnp.sum(p["v"] * x))
    return (p["w"] @ x - target) ** 2 + 0.01 * jnp.sum(p["v"] ** 2)


@healthy({"kernel": MATRIX, "g": W})
def weight_norm(p, x):
    kernel = p["kernel"] / jnp.linalg.norm(p["kernel"], axis=0, keepdims=True) * p["g"][None]
    return jnp.sum(jnp.tanh(x @ kernel))


@healthy({"w": MATRIX})
def mean_pool(p, x):
    mask = jnp.array([1.0, 1.0, 0.0, 0.0])
    h = jnp.outer(x, x) @ p["w"]
    return jnp.sum(h * mask[:, None]) / jnp.sum(mask)


def merged(table):
    """One loss of all programs of a table, and its parameters."""
    functions = {function.__name__: function for function, _ in table}
    params = {function.__name__: own for function, own in table}

    def loss(params, x):
        return sum(function(params[name], x) for name, function in functions.items())

    return loss, params


# -- Cuts of a part: a penalty is left, or some of the layers of a scan are cut.


def penalized_router(p, x):
    chosen = jnp.argmax(p["w"] * x)  # cut
    return jnp.sum(p["v"] * jax.nn.one_hot(chosen, 4) * x) + 0.1 * jnp.sum(p["w"] ** 2)


def penalized_in_scan(p, x):
    def step(h, now):
        return h + jax.nn.relu(p["w"] * now - 30.0), None  # cut

    return jnp.sum(lax.scan(step, p["v"] * x, x)[0]) + 0.1 * jnp.sum(p["w"] ** 2)


def penalized_weights_in_eighths(p, x):
    weights = jnp.round(p["w"] * 8) / 8  # cut
    return jnp.sum((weights * x - p["v"]) ** 2) + 0.1 * jnp.sum(p["w"] ** 2)


def rounded_penalty(p, x):
    return jnp.sum(jnp.tanh(p["v"] * x)) + jnp.sum((p["w"] - jnp.round(p["w"])) ** 2)


def penalized_and_trained(p, x):
    return jnp.sum(jnp.tanh(p["w"] * x) * p["v"]) + 0.1 * jnp.sum(p["w"] ** 2 + p["v"] ** 2)


def partly_rounded(p, x):
    return jnp.sum((p["w"] + jnp.round(p["v"])) * x) + jnp.sum(p["v"] * x) ** 2


# Of stacked layers: the leaf ends in the layers.

LAYERS: list[Cut] = []
STACK = np.stack([np.eye(4, dtype=np.float32)] * 4)
KEPT = np.array([1, 1, 0, 1], np.float32)


def stacked(cause, which, params=None):
    """Puts a program of stacked layers into the table."""
    return cut(cause, {"w": STACK} if params is None else params, which, LAYERS)


@stacked("dead", "1, 3", {"w": STACK * np.array([1, -1, 1, -1], np.float32)[:, None, None]})
def dead_layer_of_a_scan(p, x):
    def layer(h, w):
        return h + jax.nn.relu(w @ jnp.abs(x)), None  # cut

    return jnp.sum(lax.scan(layer, x, p["w"])[0])


@stacked("zero factor", "2")
def dropped_layer(p, x):
    def layer(h, own):
        return h + own[1] * jnp.tanh(own[0] @ h), None  # cut

    return jnp.sum(lax.scan(layer, x, (p["w"], jnp.asarray(KEPT)))[0])


@stacked("overwritten", "0, 1, 2")
def exits_in_one_slot(p, x):
    def layer(carry, w):
        exits, i = carry
        return (exits.at[i // 4].set(w @ x), i + 1), None  # cut

    return jnp.sum(jnp.sin(lax.scan(layer, (jnp.zeros((4, 4)), 0), p["w"])[0][0] - 1.0))


@stacked("overwritten", "0, 1, 2")
def replaced_in_the_carry(p, x):
    def layer(carry, w):
        balance = jnp.sum(jax.nn.softmax(w @ x) ** 2)  # cut
        return (carry[0] * 0.9, balance), None

    return sum(map(jnp.sum, lax.scan(layer, (x, 0.0), p["w"])[0]))


@stacked("overwritten", "1, 2, 3")
def replaced_from_the_last(p, x):
    def layer(carry, w):
        return jnp.tanh(w @ x), None  # cut

    return jnp.sum(lax.scan(layer, x, p["w"], reverse=True)[0])


@stacked("where", "0, 1, 2")
def chosen_for_the_carry(p, x):
    def layer(carry, own):
        w, i = own
        return jnp.where(i == 3, jnp.tanh(w @ x), carry), None  # cut

    return jnp.sum(lax.scan(layer, x, (p["w"], jnp.arange(4)))[0])


@stacked("overwritten", "0, 1, 2")
def set_as_a_whole(p, x):
    def layer(carry, w):
        return carry.at[:].set(jnp.tanh(w @ x)), None  # cut

    return jnp.sum(lax.scan(layer, x, p["w"])[0])


@stacked("flat", "(0, 1), (2, 1)", {"w": np.stack([STACK[:2]] * 3)})
def nested_layers(p, x):
    def layer(h, own):
        w, i, j = own
        y = jnp.tanh(w.astype(jnp.float32) @ h)
        rounded = jnp.round(y)  # cut
        return h + jnp.where((j == 1) & (i != 1), 0.0, y) + rounded, None

    def stage(h, own):
        return lax.scan(layer, h, (own[0], jnp.full(2, own[1]), jnp.arange(2)))[0], None

    return jnp.sum(lax.scan(stage, x, (p["w"], jnp.arange(3)))[0])


# Without a finding: which layers have no gradient may be meant, or all of them have one.

NOTED_LAYERS: list[Cut] = []


@cut("", {"w": STACK}, "0, 1, 2", NOTED_LAYERS)
def only_the_last_output(p, x):
    def layer(h, w):
        return h, w @ x + jax.nn.relu(w @ x - 99.0)

    return jnp.sum(lax.scan(layer, x, p["w"])[1][-1])


@cut("stop_gradient", {"w": STACK}, "0, 1, 2", NOTED_LAYERS)
def frozen_below(p, x):
    def layer(h, w):
        return jnp.tanh(w @ lax.stop_gradient(h)), None  # cut

    return jnp.sum(lax.scan(layer, x, p["w"])[0])


@cut("", {"w": STACK}, "", NOTED_LAYERS)
def added_in_the_carry(p, x):
    def layer(carry, w):
        exits, i, total = carry
        return (exits.at[i].set(w @ x), i + 1, total + jnp.sum(w @ x)), None

    exits, _, total = lax.scan(layer, (jnp.zeros((4, 4)), 0, 0.0), p["w"])[0]
    return jnp.sum(exits**2) + total


# -- Cuts of a part of an axis: the leaf is as in the index of the message.

PARTS: list[Cut] = []
WHOLE: list = []
FUSED = np.sin(np.arange(24, dtype=np.float32)).reshape(4, 6)
TABLE = np.cos(np.arange(36, dtype=np.float32)).reshape(9, 4)


def part(cause, leaf, params=None):
    """Puts a program into the table of parts."""
    return cut(cause, {"w": FUSED} if params is None else params, leaf, PARTS)


whole = functools.partial(healthy, table=WHOLE)


def together(*parts):
    return jnp.sum(jnp.sin(jnp.prod(jnp.stack(parts), axis=0)))


@part("flat", "['w'][:, 2:4]")
def split_and_rounded(p, x):
    q, k, v = jnp.split(x @ p["w"], 3)
    return together(q, jnp.round(9 * k), v)  # cut


@part("stop_gradient", "['w'][:, 4:6]")
def sliced_and_detached(p, x):
    y = x @ p["w"]
    return together(y[:2], y[2:4], lax.stop_gradient(y[4:]))  # cut


@part("comparison", "['w'][:, 0:2]")
def reshaped_and_compared(p, x):
    q, k, v = (x @ p["w"]).reshape(3, 2)
    return together(q > 0, k, v)  # cut


@part("cast", "['w'][:, [1, 4]]")
def interleaved_and_cast(p, x):
    y = (x @ p["w"]).reshape(2, 3)
    carrier = (9 * y[:, 1]).astype(jnp.int32)  # cut
    return together(y[:, 0], carrier, y[:, 2])


@part("index", "['w'][:, 0:4]")
def router_beside_a_value(p, x):
    y = x @ p["w"]
    chosen = jnp.argmax(y[:4])  # cut
    return x[chosen] * jnp.sum(y[4:] ** 2)


@part("custom rule", "['b'][3]", {"w": FUSED, "b": FUSED[0]})
def one_column_through_a_rule(p, x):
    y = x @ p["w"] + p["b"]
    return jnp.sum(jnp.sin(y[:3])) + with_zeros(y[3]) + jnp.sum(y[4:] ** 2)  # cut


@part("flat", "['w'][:, 0:3]")
def gate_of_a_scan(p, x):
    def step(h, now):
        gate, new = jnp.split(now @ p["w"], 2, axis=-1)
        return h * jnp.floor(9 * gate) + jnp.tanh(new), None  # cut

    return jnp.sum(lax.scan(step, jnp.ones(3), jnp.outer(x, x))[0])


@part("dead", "['w'][:, 2:4]")
def split_and_dead(p, x):
    q, k, v = jnp.split(x @ p["w"], 3)
    return together(q, 1 + jax.nn.relu(k - 99), v)  # cut


@part("dead", "['w'][1]", {"w": np.stack([MATRIX] * 3)})
def layer_of_a_list(p, x):
    for i in range(3):
        h = p["w"][i] @ x
        x = x + (jnp.tanh(h) if i != 1 else jax.nn.relu(h - 99))  # cut
    return jnp.sum(x)


@part("zero factor", "['w'][2]", {"w": np.stack([MATRIX] * 3)})
def expert_without_a_token(p, x):
    gates = jax.nn.one_hot(jnp.array([0, 1]), 3)
    y = [gates[:, i, None] * jnp.tanh(p["w"][i] @ x) for i in range(3)]  # cut
    return jnp.sum(sum(y))


@whole({"w": FUSED})
def fused(p, x):
    return together(*jnp.split(x @ p["w"], 3))


@whole({"w": FUSED})
def straight_through_part(p, x):
    q, k, v = jnp.split(x @ p["w"], 3)
    return together(q, k + lax.stop_gradient(jnp.round(k) - k), v)


@whole({"w": FUSED, "b": np.array([-99, -99, 5, 5, 5, 5], np.float32)})
def dead_units_before_parts(p, x):
    h = jax.nn.relu(x @ p["w"] + p["b"])
    q, k, v = jnp.split(h + jnp.flip(h), 3)
    return together(q, k, v) + jnp.sum(q > 1)


@whole({"words": TABLE, "places": TABLE[:8], "out": TABLE[::-1].copy()})
def language_model(p, x):
    """Absent words, places beyond the end, a causal mask, and words that are padding."""
    h = p["words"][jnp.array([1, 5, 5, 2])] + p["places"][:4]
    scores = jnp.where(jnp.tril(jnp.ones((4, 4), bool)), h @ h.T, -jnp.inf)
    logits = (jax.nn.softmax(scores) @ h @ p["out"].T)[:, :7]
    return -jnp.sum(jax.nn.log_softmax(logits) * jax.nn.one_hot(jnp.arange(4), 7))


@whole({"w": FUSED, "b": np.array([0, -99, 0, 0, -99, 0], np.float32), "v": FUSED})
def dead_units(p, x):
    return jnp.sum(p["v"] @ jax.nn.relu(x @ p["w"] + p["b"]) * x)


@whole({"a": FUSED, "b": FUSED})
def heads_of_classes(p, x):
    chosen = jax.nn.one_hot(2, 6)
    return jnp.sum((x @ p["a"]) * chosen) + jnp.max(x @ p["b"])
