"""Programs with a leaf whose gradient is exactly zero, and programs without a fault.

Each is a function of ``p``, a dictionary of parameters, and of ``x``, four numbers. A cut is marked
by its cause, by the leaf that it cuts and by ``# cut`` in its line; that of a row of a table is the
line of its function. Causes in `NOTED` are notes.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

from tests.helpers import key_of, line_of

X = np.array([0.3, -0.7, 1.1, 0.9], np.float32)
W = np.array([0.5, -0.3, 0.8, 1.2], np.float32)
NONE = np.zeros(4, np.float32)
MATRIX = np.linspace(-1, 1, 16, dtype=np.float32).reshape(4, 4)
KEY = key_of(0)
NOTED = {"stop_gradient", "unused", "trains later", "stationary", "constant zeros", "random"}


@dataclasses.dataclass(frozen=True)
class Cut:
    """A program whose leaf is cut.

    Attributes:
      function: the program.
      params: its parameters.
      cause: of the finding, or of the note.
      leaf: the path of the leaf in the parameters, as in ``['w']``.
      line: where it is cut.
    """

    function: Callable[[Any, Any], Any]
    params: Any
    cause: str
    leaf: str
    line: int | None

    @property
    def name(self) -> str:
        """The name of the function."""
        return self.function.__name__


CUTS: list[Cut] = []
HEALTHY: list[tuple[Callable[[Any, Any], Any], Any]] = []


def cut(cause, params=None, leaf="['w']", table=CUTS, at=None):
    """Puts a program into the table; the mark may be in what it calls."""

    def register(function):
        parameters = {"w": W} if params is None else params
        table.append(Cut(function, parameters, cause, leaf, line_of(at or function, "# cut")))
        return function

    return register


def healthy(params=None, table=HEALTHY):
    """Puts a program without a fault into the table."""

    def register(function):
        table.append((function, {"w": W} if params is None else params))
        return function

    return register


def summed(name, of, params):
    """The sum of a function of ``w``, ``x`` and maybe ``v``, as a program."""

    def program(p, x):
        return jnp.sum(of(p["w"], x, *([p["v"]] if "v" in p else [])))

    program.__name__ = name
    return program


def params_of(of, params=None):
    """The parameters of a function, by its arguments; `W` for those that are not given."""
    return dict.fromkeys("wv" if of.__code__.co_argcount == 3 else "w", W) | (params or {})


def cuts(**rows):
    """Puts functions into the table by their names: each its cause, itself, and parameters."""
    for name, (cause, of, *params) in rows.items():
        parameters = params_of(of, *params)
        CUTS.append(
            Cut(
                summed(name, of, parameters), parameters, cause, "['w']", of.__code__.co_firstlineno
            )
        )


@jax.custom_vjp
def with_zeros(w):
    """A kernel without a backward pass."""
    return w * 2


with_zeros.defvjp(lambda w: (w * 2, w), lambda w, g: (jnp.zeros_like(w),))


@jax.custom_jvp
def without_tangent(w):
    """A kernel whose tangent is zero."""
    return w * 0.5


without_tangent.defjvp(lambda primals, tangents: (without_tangent(*primals), tangents[0] * 0.0))
FIRST, LAST = np.eye(4, dtype=np.float32)[[0, 3]]
PAIR, BEYOND, FILL = np.array([1, 2]), np.array([4, 6]), {"mode": "fill", "fill_value": 0.0}
SEGMENTS = {"segment_ids": np.array([7, 8, 9, 10]), "num_segments": 4}

# Cuts of structure.
cuts(
    cast_to_int=("cast", lambda w, x: w.astype(jnp.int32) * x),
    bits=("bitcast", lambda w, x: lax.bitcast_convert_type(w, jnp.int32) * x),
    threshold=("comparison", lambda w, x: (x > w) * x),
    predicate=("comparison", lambda w, x: lax.cond(w[0] > 0, lambda: 3, lambda: 2) * x),
    argmax_index=("index", lambda w, x: x[jnp.argmax(w)]),
    searched=("index", lambda w, x: jnp.searchsorted(jnp.linspace(0.0, 1.0, 5), w) * x),
    rounded=("flat", lambda w, x: jnp.round(w * 8) / 8 * x),
    floor_divided=("flat", lambda w, x: (w // 0.25) * x),
    detached_here=("stop_gradient", lambda w, x: lax.stop_gradient(w) ** 2 * x),
    zeros_of_a_vjp=("custom rule", lambda w, x: with_zeros(w) * x),
    zeros_of_a_jvp=("custom rule", lambda w, x: without_tangent(w) * x),
    overwritten=("overwritten", lambda w, x, v: (w * x).at[:].set(v)),
)
# Cuts of numbers.
cuts(
    dead_layer=("dead", lambda w, x, v: jax.nn.relu(w @ x + v) * x, {"w": MATRIX, "v": NONE - 9}),
    relu6_above=("saturated", lambda w, x: jax.nn.relu6(w + 9.0) * x),
    sigmoid_saturated=("saturated", lambda w, x: jax.nn.sigmoid(w + 200.0) * x),
    softmax_saturated=("saturated", lambda w, x: jax.nn.softmax((w + 1e4) * FIRST) @ x),
    sum_of_a_softmax=("cancels", lambda w, x: jax.nn.softmax(w), {"w": NONE + 1}),
    clipped=("clipped", lambda w, x: jnp.clip(w + 7.0, -1.0, 1.0) * x),
    where_other_side=("where", lambda w, x: jnp.where(x > 100.0, w, x)),
    selected=("where", lambda w, x: lax.select(x < 50.0, x, w * x)),
    mask_all_false=("where", lambda w, x: jnp.where(jnp.arange(4) >= 4, w * x, 0.0)),
    zero_coefficient=("zero factor", lambda w, x: (x[0] * 0.0) * jnp.sum(w**2)),
    matrix_of_a_dead_input=("zero factor", lambda w, x: w @ jax.nn.relu(x - 9), {"w": MATRIX}),
    both_zero=("zero factors", lambda w, x, v: w * v, {"w": NONE, "v": NONE}),
    disjoint_masks=("zero factor", lambda w, x: (w * FIRST) * LAST),
    another_part=("not read", lambda w, x, v: jnp.concatenate([w, v])[4 + jnp.argsort(x)]),
    never_largest=("not read", lambda w, x, v: jnp.max(jnp.stack([w - 50.0, v]), axis=0) * x),
    smaller_than_all=("not read", lambda w, x: jnp.ones(4).at[PAIR].max(w[:2] - 9) * x),
    clamped_start=("not read", lambda w, x: lax.dynamic_update_slice(x, w[:2], (9,))[:2]),
    dropped_segments=("out of range", lambda w, x: jax.ops.segment_sum(w, **SEGMENTS) @ x),
    filled_with_zeros=("out of range", lambda w, x: w.at[BEYOND].get(**FILL) * x[:2], {"w": NONE}),
    filled_where_it_counts=(
        "out of range",
        lambda w, x: w.at[np.array([0, 7])].get(**FILL) @ LAST[2:],
    ),
    column_taken=("out of range", lambda w, x: jnp.take(w, 4, 1, **FILL) * x, {"w": MATRIX}),
    written_beyond=("out of range", lambda w, x: x.at[BEYOND].set(w[:2], mode="drop")),
    largest_beyond=("out of range", lambda w, x: x.at[BEYOND].max(w[:2] * 9) * x),
    one_beyond=("not read", lambda w, x: x.at[np.array([3, 7])].set(w[:2], mode="drop")[:2]),
    branch_not_taken=("branch", lambda w, x: lax.cond(x[0] > 9.0, lambda: w * x, lambda: x)),
    half_cast=("underflow", lambda w, x: 1e-12 * w.astype(jnp.float16).astype(jnp.float32)),
    single_product=("underflow", lambda w, x: w * 1e-30 * 1e-30),
    softmax_over_one=("one element", lambda w, x: jax.nn.softmax(lax.top_k(w * x, 1)[0])),
    minus_itself=("cancels", lambda w, x: (lambda y: y - y)(w * x)),
)
# What may be meant.
cuts(
    lora_at_first=("trains later", lambda w, x, v: v * (w * x), {"v": NONE}),
    square_at_zero=("stationary", lambda w, x: w**2, {"w": NONE}),
    initial_state=("constant zeros", lambda w, x, v: w @ jnp.zeros(4) + v * x, {"w": MATRIX}),
)


def clean(tree):
    """A helper that hides what it does."""
    return jax.tree.map(lambda leaf: lax.stop_gradient(leaf), tree)  # cut


@cut("stop_gradient", at=clean)
def detached_in_a_helper(p, x):
    return jnp.sum(clean({"a": p["w"]})["a"] * x)


@cut("unused", {"w": W, "v": W})
def unused(p, x):
    return jnp.sum(p["v"] * x)


@cut("cancels")
def norm_over_one(p, x):
    y = (p["w"] * x)[:, None]
    centred = y - jnp.mean(y, axis=-1, keepdims=True)  # cut
    return jnp.sum(centred / jnp.sqrt(jnp.mean(centred**2, -1, keepdims=True) + 1e-6)) + x[0]


# Beside something that is detached.


@cut("cast")
def quantized_by_a_detached_scale(p, x):
    scale = lax.stop_gradient(jnp.max(jnp.abs(p["w"]))) / 127
    whole = jnp.round(p["w"] / scale).astype(jnp.int8)  # cut
    return jnp.sum(whole.astype(jnp.float32) * scale * x)


@cut("flat", {"w": MATRIX, "v": MATRIX})
def keys_behind_a_detached_term(p, x):
    keys = p["w"] @ x
    rounded = jnp.round(9 * keys)  # cut
    return jnp.sum(jnp.sin((p["v"] @ x) * rounded - lax.stop_gradient(jnp.sum(keys**2))))


@cut("index", {"w": MATRIX, "v": MATRIX})
def router_beside_a_detached_balance(p, x):
    logits = p["w"] @ x
    best = jnp.argmax(logits)  # cut
    return jnp.sum(p["v"][best] * x) + jnp.sum(lax.stop_gradient(jax.nn.softmax(logits)) * x)


# Layers that are dropped at random.


cuts(
    dropped_by_a_product=("random", lambda w, x: (w * x) * jax.random.bernoulli(KEY, 0.0)),
    dropped_by_a_choice=(
        "random", lambda w, x: jnp.where(jax.random.bernoulli(KEY, 0.0), w * x, x)
    ),
    dropped_by_a_branch=(
        "random", lambda w, x: lax.cond(jax.random.bernoulli(KEY, 0.0), lambda: w * x, lambda: x)
    ),
)  # fmt: skip


# -- Inside of programs.


def quantize(w, x):
    return jnp.round(9 * w) * x  # cut


def dies(w, x):
    return jax.nn.relu(w * x - 40.0)  # cut


def over_devices(function, *arrays):
    """Maps a function over all devices; each gets one number of each array."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("data",))
    spread = [jnp.tile(a, (2, 1)).reshape(-1)[: jax.device_count()] for a in arrays]
    specs = tuple(P("data") for _ in arrays)
    return jax.shard_map(function, mesh=mesh, in_specs=specs, out_specs=P())(*spread)


def scanned(f):
    return lambda w, x: lax.scan(lambda h, now: (f(w, now) + 0.5 * h, None), x, x)[0]


def twice(f, w, x):
    return lax.scan(lambda h, _: (h + f(w, x), None), x, length=2)[0]


INSIDE = {
    "jit": jax.jit,
    "scan": scanned,
    "cond": lambda f: lambda w, x: lax.cond(x[0] > 0, f, lambda w, x: w * x, w, x),
    "branches": lambda f: lambda w, x: lax.cond(x[0] < 0, f, f, w, x),  # which are one program
    "remat": jax.checkpoint,
    "vmap": jax.vmap,
    "loops": lambda f: jax.jit(lambda w, x: twice(scanned(jax.checkpoint(f)), w, x)),
    "mesh": lambda f: (
        lambda w, x: over_devices(lambda w, x: lax.psum(jnp.sum(f(w, x) + x), "data"), w, x)
    ),
}
for _name, _of in INSIDE.items():
    for _cause, _body in (("flat", quantize), ("dead", dies)):
        _own = summed(f"{_cause}_in_{_name}", _of(_body), {"w": W})
        CUTS.append(Cut(_own, {"w": W}, _cause, "['w']", line_of(_body, "# cut")))


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


# -- Programs without a fault.


def centred(y):
    return (y - jnp.mean(y)) * lax.rsqrt(jnp.var(y) + 1e-6)


def through(y, value):
    """The straight-through form."""
    return y + lax.stop_gradient(value - y)


def routed(best, experts):
    gates, chosen = best
    return gates[:, None] * experts[chosen]


def attended(h, q, k, mask=True):
    return jax.nn.softmax(jnp.where(mask, (h @ q) @ (h @ k).T, -jnp.inf))


@jax.custom_vjp
def through_rule(w):
    return jnp.sign(w)


through_rule.defvjp(lambda w: (jnp.sign(w), None), lambda _, g: (g,))


CAUSAL, UNITS = np.tril(np.ones((4, 4), bool)), np.array([-9, 0.5, 0.5, -9], np.float32)
SQUARE, BOTH, KEEP = {"w": MATRIX}, {"w": MATRIX, "v": MATRIX}, np.array([1, 0, 1], np.float32)
ROWS = {"w": np.ones((9, 4), np.float32)}


def right(table, **rows):
    """Puts functions without a fault into the table, some with parameters of their own."""
    for name, row in rows.items():
        of, *params = row if isinstance(row, tuple) else (row,)
        parameters = params_of(of, *params)
        table.append((summed(name, of, parameters), parameters))


right(
    HEALTHY,
    layers=(lambda w, x, v: jax.nn.relu(v @ jax.nn.relu(w @ x) + 0.1) @ x, BOTH),
    attention=(lambda w, x, v: attended(jnp.outer(x, x), w, v, CAUSAL) @ jnp.sin(v), BOTH),
    rnn=(lambda w, x, v: scanned(lambda w, t: jnp.tanh(w @ (x * t)))(w, x) @ v, BOTH),
    straight_through_rule=lambda w, x: through_rule(w) * x,
    absent_rows=(lambda w, x: w[np.array([1, 5])] * x[None], ROWS),
    one_row_beyond=lambda w, x: w.at[np.array([1, 7])].get(**FILL) * x[:2],
    one_written_beyond=lambda w, x: x.at[np.array([1, 7])].set(w[:2], mode="drop") ** 2,
    some_dead_units=(lambda w, x: jax.nn.relu(w @ x + UNITS), SQUARE),
    layer_norm=(lambda w, x, v: jnp.tanh(centred(w @ x) * v) * x, SQUARE),
    scan_that_forgets=lambda w, x: lax.scan(lambda h, k: (h * k + w, None), x, KEEP)[0] * x,
    on_a_mesh=lambda w, x: INSIDE["mesh"](lambda w, x: jnp.tanh(w * x))(w, x),
    solve=(lambda w, x: jnp.linalg.solve(w @ w.T + jnp.eye(4), x), SQUARE),
    dropout=(lambda w, x: jnp.where(jax.random.bernoulli(KEY, 0.5, (4,)), w @ x, 0.0), SQUARE),
    experts=(lambda w, x, v: routed(lax.top_k(jax.nn.softmax(w @ x), 2), v) * x[None], BOTH),
    target_network=lambda w, x, v: (w @ x - lax.stop_gradient(v @ x)) ** 2 + 0.01 * jnp.sum(v**2),
)


@healthy({"w": MATRIX, "b": W})
def bias_before_a_norm(p, x):
    y = jnp.outer(x, x) @ p["w"] + p["b"][None]
    y = y - jnp.mean(y, axis=0, keepdims=True)
    return jnp.sum(jnp.sin(y))


def merged(table):
    """One loss of all programs of a table, and its parameters."""
    functions = {function.__name__: function for function, _ in table}
    params = {function.__name__: parameters for function, parameters in table}

    def loss(params, x):
        return sum(function(params[name], x) for name, function in functions.items())

    return loss, params


# -- Cuts of some of the layers of a scan.


# Of stacked layers: the leaf ends in the layers.

LAYERS: list[Cut] = []
STACK = np.stack([np.eye(4, dtype=np.float32)] * 4)
KEPT = np.array([1, 1, 0, 1], np.float32)


def stacked(cause, which, start=lambda x: x, result=jnp.sum, params=None, table=LAYERS, **options):
    """Puts a scan over stacked layers into the table, by the function of one layer."""

    def register(layer):
        def program(p, x):
            of_layer = p["w"], jnp.arange(4), jnp.asarray(KEPT)
            step = lambda h, of_layer: (layer(h, *of_layer, x), None)  # noqa: E731
            return result(lax.scan(step, start(x), of_layer, **options)[0])

        program.__name__, of_layer = layer.__name__, {"w": STACK} if params is None else params
        table.append(Cut(program, of_layer, cause, which, line_of(layer, "# cut")))

    return register


@stacked("dead", "1, 3", params={"w": STACK * np.float32([1, -1, 1, -1])[:, None, None]})
def dead_layer_of_a_scan(h, w, t, keep, x):
    return h + jax.nn.relu(w @ jnp.abs(x))  # cut


@stacked("zero factor", "2")
def dropped_layer(h, w, t, keep, x):
    return h + keep * jnp.tanh(w @ h)  # cut


@stacked("overwritten", "0, 1, 2", jnp.diag, lambda exits: jnp.sum(jnp.sin(exits - 1.0)))
def exits_in_one_slot(exits, w, t, keep, x):
    return exits.at[t // 4].set(w @ x)  # cut


@stacked("overwritten", "0, 1, 2", lambda x: (x, 0.0), lambda carry: sum(map(jnp.sum, carry)))
def replaced_in_the_carry(carry, w, t, keep, x):
    balance = jnp.sum(jax.nn.softmax(w @ x) ** 2)  # cut
    return carry[0] * 0.9, balance


@stacked("overwritten", "1, 2, 3", reverse=True)
def replaced_from_the_last(h, w, t, keep, x):
    return jnp.tanh(w @ x)  # cut


@stacked("where", "0, 1, 2")
def chosen_for_the_carry(h, w, t, keep, x):
    return jnp.where(t == 3, jnp.tanh(w @ x), h)  # cut


@cut("zero factor", {"w": np.stack([STACK[0, :, :3]] * 4, -1)}, "2", LAYERS)
def layers_along_the_last_of_two_axes_of_one_length(p, x):
    def layer(h, of_layer):
        w, keep = of_layer
        return h + keep * jnp.tanh(w @ h[:3]), None  # cut

    return jnp.sum(lax.scan(layer, x, (jnp.moveaxis(p["w"], 2, 0), jnp.asarray(KEPT)))[0])


# Without a finding: which layers have no gradient may be meant, or all of them have one.

NOTED_LAYERS: list[Cut] = []


@cut("", {"w": STACK}, "0, 1, 2", NOTED_LAYERS)
def only_the_last_output(p, x):
    def layer(h, w):
        return h, w @ x + jax.nn.relu(w @ x - 99.0)

    return jnp.sum(lax.scan(layer, x, p["w"])[1][-1])


@stacked("stop_gradient", "0, 1, 2", table=NOTED_LAYERS)
def frozen_below(h, w, t, keep, x):
    return jnp.tanh(w @ lax.stop_gradient(h))  # cut


@cut("", {"w": STACK}, "", NOTED_LAYERS)
def added_in_the_carry(p, x):
    def layer(carry, w):
        exits, i, total = carry
        return (exits.at[i].set(w @ x), i + 1, total + jnp.sum(w @ x)), None

    exits, _, total = lax.scan(layer, (jnp.zeros((4, 4)), 0, 0.0), p["w"])[0]
    return jnp.sum(exits**2) + total


# -- Known limits: what has a gradient beside the cut, or is cut at inner layers alone, is silent.


def only_a_penalty_trains(p, x):
    return jnp.sum(jnp.round(p["w"]) * x) + 0.1 * jnp.sum(p["w"] ** 2)


def a_part_of_a_fused_kernel(p, x):
    q, k = jnp.split(p["w"], 2)
    return jnp.sum(q * jnp.round(9 * k))


def an_inner_layer_of_nested_scans(p, x):
    def layer(h, of_layer):
        w, j = of_layer
        return h + jnp.where(j == 1, jnp.round(w @ h), jnp.tanh(w @ h)), None

    def stage(h, of_layer):
        return lax.scan(layer, h, (of_layer, jnp.arange(2)))[0], None

    return jnp.sum(lax.scan(stage, x, p["w"])[0])


SILENT = [
    (only_a_penalty_trains, {"w": W}),
    (a_part_of_a_fused_kernel, {"w": W}),
    (an_inner_layer_of_nested_scans, {"w": np.stack([STACK[:2]] * 3)}),
]
