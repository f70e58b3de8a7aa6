"""70 programs of somebody who had read the pages on zero gradients and not the code.

40 have a gradient that is exactly zero by a mistake, 30 are healthy. Of each cut, the line is
marked in the source by a comment, and the acceptable causes are words of the table in docs/zero.md.
Two lines are marked where the page leaves open which of the two is named. Everything was written
before any of the programs was diagnosed.
"""

import dataclasses
import functools
import inspect

import equinox as eqx
import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

CUTS, HEALTHY = {}, {}


@dataclasses.dataclass
class Cut:
    """What is expected of a program that has a cut."""

    make: object
    leaves: tuple  # parts of the names of the leaves of which one must be named
    causes: set
    place: str  # "findings", "notes" or "either"
    lines: tuple = ()

    def __post_init__(self):
        source, start = inspect.getsourcelines(self.make)
        self.lines = tuple(start + i for i, text in enumerate(source) if "# CUT" in text)


def cut(leaves, *causes, place="findings"):
    def register(make):
        CUTS[make.__name__] = Cut(make, tuple(leaves.split("|")), set(causes), place)
        return make

    return register


def healthy(make):
    HEALTHY[make.__name__] = make
    return make


def normal(*shape, seed=0, scale=0.5):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape) * scale, "float32")


def ints(high, *shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).integers(0, high, shape), "int32")


X, Y = normal(8, 6, scale=1.0), normal(8, 1, seed=1)
KEY = jax.random.key(0)


# Mixture of experts.


@cut("router", "index")
def switch_router_without_gate():
    """The chosen expert is not weighed by its probability."""

    class Switch(nn.Module):
        @nn.compact
        def __call__(self, x):
            probs = nn.softmax(nn.Dense(4, name="router")(x))
            chosen = jnp.argmax(probs, axis=-1)  # CUT
            dispatch = jax.nn.one_hot(chosen, 4)  # CUT
            up = self.param("up", nn.initializers.lecun_normal(), (4, 6, 6))
            return x + jnp.einsum("te,td,edf->tf", dispatch, x, up)

    model = Switch()

    def loss(variables, x):
        return jnp.mean((model.apply(variables, x) - 1.0) ** 2)

    return loss, (model.init(KEY, X), X)


@cut("balance", "index")
def router_bias_only_chooses():
    """The bias of the choice is a parameter, but the weights are without it."""

    def loss(params, x):
        scores = jax.nn.sigmoid(x @ params["router"])
        _, chosen = jax.lax.top_k(scores + params["balance"], 2)  # CUT
        weights = jnp.take_along_axis(scores, chosen, axis=-1)  # CUT
        weights = weights / weights.sum(-1, keepdims=True)
        out = jnp.einsum("td,edf->tef", x, params["experts"])
        out = jnp.take_along_axis(out, chosen[:, :, None], axis=1)
        return jnp.mean((weights[..., None] * out).sum(1) ** 2)

    params = {"router": normal(6, 4), "balance": jnp.zeros(4), "experts": normal(4, 6, 6, seed=2)}
    return loss, (params, X)


@cut("experts", "zero factor", "where", "not read")
def capacity_rounds_to_zero():
    """The capacity of an expert is 8 // 16 = 0, so all tokens are dropped."""
    experts, factor = 16, 1

    def loss(params, x):
        capacity = factor * x.shape[0] // experts
        probs = jax.nn.softmax(x @ params["router"])
        assigned = jax.nn.one_hot(jnp.argmax(probs, -1), experts)
        position = (jnp.cumsum(assigned, axis=0) - 1) * assigned
        kept = assigned * (position < capacity)  # CUT
        combine = probs * kept
        out = jnp.einsum("td,edf->tef", x, params["experts"])
        y = x @ params["skip"] + jnp.einsum("te,tef->tf", combine, out)  # CUT
        return jnp.mean((y - 1.0) ** 2)

    params = {"router": normal(6, 16), "experts": normal(16, 6, 6, seed=2), "skip": normal(6, 6)}
    return loss, (params, X)


@cut("router", "index", "branch")
def switch_of_experts():
    """Each token runs one branch, by the argmax."""

    def loss(params, x):
        branches = [
            lambda t: t @ params["a"],
            lambda t: jnp.tanh(t @ params["b"]),
            lambda t: jax.nn.gelu(t @ params["c"]),
        ]

        def token(t):
            expert = jnp.argmax(t @ params["router"])  # CUT
            return jax.lax.switch(expert, branches, t)  # CUT

        return jnp.mean((jax.vmap(token)(x) - 1.0) ** 2)

    params = {k: normal(6, 6, seed=i) for i, k in enumerate("abc")} | {"router": normal(6, 3)}
    return jax.jit(loss), (params, X)


@cut("router", "cancels", "index")
def gumbel_without_stop_gradient():
    """The soft sample is added and taken away again: the stop_gradient was forgotten."""

    def loss(params, x, key):
        logits = x @ params["router"]
        soft = jax.nn.softmax(logits + jax.random.gumbel(key, logits.shape))
        hard = jax.nn.one_hot(jnp.argmax(soft, -1), 4)
        gate = hard + (soft - soft)  # CUT
        return jnp.mean((gate @ params["codes"] - x) ** 2)

    return loss, ({"router": normal(6, 4), "codes": normal(4, 6, seed=1)}, X, KEY)


# Quantization and straight-through estimators.


@cut("['w']", "cast", "flat")
def int8_weights_without_estimator():
    """A learned step size, as in LSQ, but the weights have no straight-through form."""

    def fake_quant(w, step):
        q = jnp.clip(w / step, -127, 127)
        q = jnp.round(q).astype(jnp.int8)  # CUT
        return q.astype(jnp.float32) * step  # CUT

    def loss(params, x, y):
        w = fake_quant(params["w"], params["step"])
        return jnp.mean((x @ w + params["b"] - y) ** 2)

    return loss, ({"w": normal(6, 1), "step": jnp.array(0.01), "b": jnp.zeros(1)}, X, Y)


@cut("['w']", "custom rule")
def estimator_with_window_in_wrong_units():
    """The backward rule keeps |x| <= 1, but x is already scaled by 127."""

    @jax.custom_vjp
    def ste_round(x):
        return jnp.round(x)

    def forward(x):
        return jnp.round(x), x

    def backward(x, g):
        return (jnp.where(jnp.abs(x) <= 1.0, g, 0.0),)  # CUT

    ste_round.defvjp(forward, backward)

    def loss(params, x, y):
        w = ste_round(params["w"] * 127.0) / 127.0  # CUT
        return jnp.mean((x @ w + params["b"] - y) ** 2)

    return loss, ({"w": 0.5 + jnp.abs(normal(6, 1)), "b": jnp.zeros(1)}, X, Y)


@cut("weight", "flat")
def binary_layer_of_equinox():
    """Sign of the weights, as in BinaryConnect, without its estimator."""

    class Binary(eqx.Module):
        weight: jax.Array
        scale: jax.Array

        def __call__(self, x):
            return self.scale * (jnp.sign(self.weight) @ x)  # CUT

    def loss(model, x, y):
        return jnp.mean((jax.vmap(model)(x) - y) ** 2)

    return eqx.filter_jit(loss), (Binary(normal(1, 6), jnp.ones(1)), X, Y)


@cut("up", "stop_gradient", place="notes")
def estimator_detached_as_a_whole():
    """The parenthesis of the straight-through form is at the wrong place."""

    class Quantized(nnx.Module):
        def __init__(self, rngs):
            self.up = nnx.Linear(6, 8, rngs=rngs)
            self.head = nnx.Linear(8, 1, rngs=rngs)

        def __call__(self, x):
            h = jnp.tanh(self.up(x)) * 4
            h = jax.lax.stop_gradient(h + (jnp.round(h) - h))  # CUT
            return self.head(h)

    def loss(model, x, y):
        return jnp.mean((model(x) - y) ** 2)

    return loss, (Quantized(nnx.Rngs(0)), X, Y)


@cut("['up']|first", "one element", "cancels", "zero factor")
def layer_norm_of_one_feature():
    """A LayerNorm after a layer with one unit gives its bias."""

    class Critic(nn.Module):
        @nn.compact
        def __call__(self, x):
            h = nn.relu(nn.LayerNorm(name="first_norm")(nn.Dense(8, name="up")(x)))
            value = nn.Dense(1, name="value")(h)
            return nn.LayerNorm(name="norm")(value)  # CUT

    model = Critic()

    def loss(variables, x, y):
        return jnp.mean((model.apply(variables, x) - y) ** 2)

    return loss, (model.init(KEY, X), X, Y)


@cut("encoder", "index", "stop_gradient", place="either")
def vq_vae_with_two_equal_terms():
    """No straight-through form, and the commitment term detaches the encoder as well."""

    def loss(params, x):
        z = x @ params["encoder"]
        distance = ((z[:, None] - params["codebook"]) ** 2).sum(-1)
        nearest = jnp.argmin(distance, -1)  # CUT
        q = params["codebook"][nearest]  # CUT
        codebook = jnp.mean((jax.lax.stop_gradient(z) - q) ** 2)  # CUT
        commit = jnp.mean((q - jax.lax.stop_gradient(z)) ** 2)  # CUT
        return jnp.mean((q @ params["decoder"] - x) ** 2) + codebook + 0.25 * commit

    params = {"encoder": normal(6, 3), "codebook": normal(5, 3, seed=3), "decoder": normal(3, 6)}
    return loss, (params, X)


@cut("log_scale", "cast", "flat", "index")
def power_of_two_scale():
    """A block scale that is rounded to a power of two, by ldexp."""

    def loss(params, x):
        exponent = jnp.ceil(params["log_scale"]).astype(jnp.int32)  # CUT
        scale = jnp.ldexp(jnp.ones(6), exponent)  # CUT
        h = jnp.clip(x / scale, -1, 1) * scale
        return jnp.mean((h @ params["w"] - 1.0) ** 2)

    return loss, ({"log_scale": jnp.full(6, 0.3), "w": normal(6, 2)}, X)


# LoRA.


@cut("['a']|['b']", "zero factors")
def lora_with_two_zeros():
    """Both factors begin at zero."""

    def loss(params, x, y):
        base = x @ jax.lax.stop_gradient(params["base"])
        h = base + 2.0 * (x @ params["a"] @ params["b"])  # CUT
        return jnp.mean((h @ params["head"] - y) ** 2)

    params = {
        "base": normal(6, 4),
        "a": jnp.zeros((6, 2)),
        "b": jnp.zeros((2, 4)),
        "head": normal(4, 1),
    }
    return loss, (params, X, Y)


@cut("lora_a|lora_b", "zero factor")
def lora_scale_by_integer_division():
    """Alpha // rank is 0."""
    alpha, rank = 8, 16

    class LoRADense(nn.Module):
        @nn.compact
        def __call__(self, x):
            a = self.param("lora_a", nn.initializers.normal(0.1), (6, rank))
            b = self.param("lora_b", nn.initializers.normal(0.1), (rank, 4))
            scaling = alpha // rank  # CUT
            return nn.Dense(4)(x) + (x @ a @ b) * scaling  # CUT

    model = LoRADense()

    def loss(variables, x):
        return jnp.mean((model.apply(variables, x) - 1.0) ** 2)

    return loss, (model.init(KEY, X), X)


@cut("lora", "cast", "flat")
def lora_merged_in_int8():
    """The sum is cast to the type of the quantized base."""

    class Merged(eqx.Module):
        base: jax.Array
        lora: tuple
        scale: jax.Array

        def __call__(self, x):
            delta = self.lora[0] @ self.lora[1]
            merged = (self.base + delta / self.scale).astype(self.base.dtype)  # CUT
            return x @ (merged * self.scale)  # CUT

    model = Merged(
        ints(100, 6, 4).astype(jnp.int8), (normal(6, 2), normal(2, 4)), jnp.full(4, 0.02)
    )
    return lambda model, x: jnp.mean((model(x) - 1.0) ** 2), (model, X)


# Reinforcement learning.


@cut("policy", "cancels")
def ratio_to_itself():
    """The old log probability is the new one: on-policy, without stop_gradient."""

    def loss(params, obs, actions, returns):
        logp_all = jax.nn.log_softmax(obs @ params["policy"])
        logp = jnp.take_along_axis(logp_all, actions[:, None], 1)[:, 0]
        logp_old = logp
        value = (obs @ params["value"])[:, 0]
        advantage = jax.lax.stop_gradient(returns - value)
        ratio = jnp.exp(logp - logp_old)  # CUT
        actor = -jnp.mean(ratio * advantage)
        return actor + 0.5 * jnp.mean((returns - value) ** 2)

    return loss, ({"policy": normal(6, 3), "value": normal(6, 1)}, X, ints(3, 8), Y[:, 0])


@cut("log_std|mean", "clipped", "where")
def ppo_clips_all():
    """The stored log probabilities are sums, the new ones means: all ratios are beyond 1.2."""

    def loss(params, obs, actions, logp_old, advantage, returns):
        mean, std = obs @ params["mean"], jnp.exp(params["log_std"])
        logp = -0.5 * (((actions - mean) / std) ** 2).mean(-1) - params["log_std"].mean()
        ratio = jnp.exp(logp - logp_old)
        clipped = jnp.clip(ratio, 0.8, 1.2)  # CUT
        actor = -jnp.mean(jnp.minimum(ratio * advantage, clipped * advantage))  # CUT
        return actor + jnp.mean(((obs @ params["value"])[:, 0] - returns) ** 2)

    params = {"mean": normal(6, 2), "log_std": jnp.zeros(2), "value": normal(6, 1)}
    return loss, (params, X, normal(8, 2), jnp.full(8, -9.0), jnp.abs(Y[:, 0]) + 0.1, Y[:, 0])


@cut("policy", "stop_gradient", place="notes")
def reinforce_detaches_log_probability():
    """stop_gradient around the wrong factor."""
    net = hk.without_apply_rng(
        hk.transform(lambda x: (hk.Linear(3, name="policy")(x), hk.Linear(1, name="value")(x)))
    )

    def loss(params, obs, actions, returns):
        logits, value = net.apply(params, obs)
        logp = jax.nn.log_softmax(logits)[jnp.arange(8), actions]
        advantage = returns - value[:, 0]
        actor = -jnp.mean(jax.lax.stop_gradient(logp) * advantage)  # CUT
        return actor + 0.5 * jnp.mean(advantage**2)

    return loss, (net.init(KEY, X), X, ints(3, 8), Y[:, 0])


@cut("score", "one element")
def pooling_over_the_wrong_axis():
    """The softmax of attention pooling is over the last axis, which has length 1."""

    class Pool(nnx.Module):
        def __init__(self, rngs):
            self.score = nnx.Linear(6, 1, rngs=rngs)
            self.head = nnx.Linear(6, 1, rngs=rngs)

        def __call__(self, x):
            weights = nnx.softmax(self.score(jnp.tanh(x)), axis=-1)  # CUT
            return self.head((weights * x).sum(axis=1))

    def loss(model, x):
        return jnp.mean((model(x) - 1.0) ** 2)

    return nnx.jit(loss), (Pool(nnx.Rngs(0)), normal(4, 5, 6))


@cut("policy", "zero factor")
def group_of_one_completion():
    """GRPO: the advantage is normalized over an axis of length 1, so it is 0."""

    def loss(params, tokens, rewards):
        h = params["embed"][tokens].mean(1)
        logp = jax.nn.log_softmax(h @ params["policy"])[:, 0]
        center = rewards.mean(1, keepdims=True)
        advantage = (rewards - center) / (rewards.std(1, keepdims=True) + 1e-4)  # CUT
        objective = jnp.exp(logp - jax.lax.stop_gradient(logp)) * advantage[:, 0]  # CUT
        predicted = (jax.lax.stop_gradient(h) @ params["reward"])[:, 0]
        return -objective.mean() + jnp.mean((predicted - rewards[:, 0]) ** 2)

    params = {"embed": normal(7, 4), "policy": normal(4, 7), "reward": normal(4, 1)}
    return loss, (params, ints(7, 8, 5), normal(8, 1, seed=5))


@cut("value", "zero factor", "where")
def mask_compares_the_wrong_way():
    """The padding mask is false at all steps, for the critic only."""

    def loss(params, obs, lengths, returns):
        steps = jnp.arange(obs.shape[1])
        valid = (steps[None] > lengths[:, None]).astype(jnp.float32)  # CUT
        value = (obs @ params["value"])[..., 0]
        error = optax.losses.huber_loss(value, returns) * valid  # CUT
        entropy = jax.scipy.special.entr(jax.nn.softmax(obs @ params["policy"])).sum(-1)
        return error.sum() / jnp.maximum(valid.sum(), 1.0) - 0.01 * entropy.mean()

    args = normal(4, 5, 6), jnp.array([5, 5, 4, 6]), normal(4, 5, seed=3)
    return loss, ({"policy": normal(6, 3), "value": normal(6, 1)}, *args)


# Integers, comparisons, indices.


@cut("['w']", "cast")
def integer_carry_of_a_scan():
    """The sum over steps is kept in the type of the counter that the carry began with."""

    def loss(params, xs):
        def step(total, x):
            error = ((x @ params["w"]) ** 2).sum()
            return (total + error).astype(total.dtype), error  # CUT

        total, _ = jax.lax.scan(step, jnp.zeros((), jnp.int32), xs)
        return total / xs.shape[0]  # CUT

    return jax.jit(loss), ({"w": normal(6, 4)}, X)


@cut("render", "cast")
def image_in_bytes():
    """The picture is stored as uint8 before the loss reads it."""

    def to_image(x):
        return (jnp.clip(x, 0.0, 1.0) * 255).astype(jnp.uint8)  # CUT

    def loss(params, x, target):
        image = to_image(jax.nn.sigmoid(x @ params["render"]))
        features = (image / 255.0) @ params["features"]  # CUT
        return jnp.mean((features - target) ** 2)

    return loss, ({"render": normal(6, 5), "features": normal(5, 1)}, X, Y)


@cut("threshold", "comparison", "index")
def depth_by_while_loop():
    """A while_loop counts the layers until a learned threshold; the rest is a lookup."""

    class Adaptive(hk.Module):
        def __call__(self, x):
            threshold = hk.get_parameter("threshold", (), init=hk.initializers.Constant(1.2))
            states = [jnp.tanh(hk.Linear(6)(x))]
            for _ in range(3):
                states.append(states[-1] + jnp.tanh(hk.Linear(6)(states[-1])))
            size = jnp.stack([jnp.abs(h).mean() for h in states]).cumsum()

            def goes_on(depth):
                return (depth < 3) & (size[depth] < threshold)  # CUT

            depth = jax.lax.while_loop(goes_on, lambda depth: depth + 1, 0)  # CUT
            return hk.Linear(1)(jnp.stack(states)[depth])  # CUT

    net = hk.without_apply_rng(hk.transform(lambda x: Adaptive()(x)))

    def loss(params, x, y):
        return jnp.mean((net.apply(params, x) - y) ** 2)

    return loss, (net.init(KEY, X), X, Y)


@cut("edges", "comparison", "index", "cast")
def learned_edges_of_bins():
    """Searchsorted is a loop over integers; the edges are only compared."""

    def loss(params, x, y):
        bins = jnp.searchsorted(params["edges"], x[:, 0])  # CUT
        return jnp.mean((params["values"][bins] - y[:, 0]) ** 2)  # CUT

    return loss, ({"edges": jnp.linspace(-1, 1, 5), "values": normal(6)}, X, Y)


@cut("heads", "overwritten")
def exits_are_written_to_one_slot():
    """The output of each layer goes into slot 0: that of the last layer is left."""

    class Stack(eqx.Module):
        layers: eqx.nn.Linear
        heads: eqx.nn.Linear

        def __init__(self, key):
            keys = jax.random.split(key, (2, 4))
            self.layers = eqx.filter_vmap(lambda k: eqx.nn.Linear(6, 6, key=k))(keys[0])
            self.heads = eqx.filter_vmap(lambda k: eqx.nn.Linear(6, 2, key=k))(keys[1])

        def __call__(self, x):
            def layer(carry, both):
                h, exits, i = carry
                linear, head = both
                h = h + jnp.tanh(linear(h))
                exits = exits.at[i // 4].set(head(h))  # CUT
                return (h, exits, i + 1), None

            start = x, jnp.zeros((4, 2)), 0
            return jax.lax.scan(layer, start, (self.layers, self.heads))[0][1]

    def loss(model, x):
        return jnp.mean((jax.vmap(model)(x) - 1.0) ** 2)

    return eqx.filter_jit(loss), (Stack(KEY), X)


@cut("initial", "where")
def reset_of_the_carry():
    """An episode begins at the first step, and the reset writes zeros, not the learned state."""

    def loss(params, xs, is_first):
        def step(h, inputs):
            x, first = inputs
            h = jnp.where(first, jnp.zeros_like(h), h)  # CUT
            h = jnp.tanh(x @ params["in"] + h @ params["rec"])
            return h, h @ params["head"]

        _, out = jax.lax.scan(step, params["initial"], (xs, is_first))
        return jnp.mean((out - 1.0) ** 2)

    params = {
        "initial": normal(4),
        "in": normal(6, 4),
        "rec": normal(4, 4, seed=1),
        "head": normal(4, 1),
    }
    return jax.jit(loss), (params, X, jnp.arange(8) % 4 == 0)


@cut("adapter", "branch")
def branch_of_evaluation():
    """The flag of training was left at false: the adapter is in the other branch."""

    def loss(params, x, flags):
        h = x @ params["up"]
        h = jax.lax.cond(  # CUT
            flags["train"],
            lambda h: h + jnp.tanh(h @ params["adapter"]),
            lambda h: h,
            h,
        )
        return jnp.mean((h @ params["head"] - 1.0) ** 2)

    params = {"up": normal(6, 4), "adapter": normal(4, 4), "head": normal(4, 1)}
    return jax.jit(loss), (params, X, {"train": jnp.array(False), "step": jnp.array(0)})


# Masks, saturation, clips.


@cut("query|key", "where", "saturated")
def attention_mask_inverted():
    """The mask is true at the padding, of which there is none."""

    class Block(nn.Module):
        @nn.compact
        def __call__(self, x, is_padding):
            mask = nn.make_attention_mask(jnp.ones_like(is_padding), is_padding)
            attention = nn.MultiHeadDotProductAttention(num_heads=2, name="attention")
            return x + attention(x, mask=mask)  # CUT

    model, x = Block(), normal(2, 5, 6)
    padding = jnp.zeros((2, 5))

    def loss(variables, x):
        return jnp.mean((model.apply(variables, x, padding) - 1.0) ** 2)

    return jax.jit(loss), (model.init(KEY, x, padding), x)


@cut("up", "dead")
def relu_with_low_bias():
    """All units are off for the whole batch, and only the decay trains them."""

    class MLP(nnx.Module):
        def __init__(self, rngs):
            bias = nnx.initializers.constant(-20.0)
            self.up = nnx.Linear(6, 8, bias_init=bias, rngs=rngs)
            self.skip = nnx.Linear(6, 8, rngs=rngs)
            self.head = nnx.Linear(8, 1, rngs=rngs)

        def __call__(self, x):
            return self.head(nnx.relu(self.up(x)) + self.skip(x))  # CUT

    def loss(model, x, y):
        decay = sum(jnp.sum(w**2) for w in jax.tree.leaves(nnx.state(model, nnx.Param)))
        return jnp.mean((model(x) - y) ** 2) + 1e-4 * decay

    return loss, (MLP(nnx.Rngs(0)), X, Y), {"data": ("x", "y")}


@cut("up", "saturated")
def pixels_from_0_to_255():
    """The inputs are not scaled, so each tanh is 1 or -1."""

    def model(x):
        up = hk.Linear(4, w_init=hk.initializers.RandomNormal(), name="up")
        h = jnp.tanh(up(x))  # CUT
        return hk.Linear(1, name="head")(h)

    net = hk.without_apply_rng(hk.transform(model))
    pixels = ints(256, 8, 64).astype(jnp.float32)

    def loss(params, x, y):
        return jnp.mean((net.apply(params, x) - y) ** 2)

    return loss, (net.init(KEY, pixels), pixels, Y)


@cut("['in']", "custom rule", "zero factor")
def spikes_outside_of_the_surrogate():
    """A surrogate derivative in a window of 0.5, and a membrane that never comes near it."""

    @jax.custom_jvp
    def spike(v):
        return (v > 0).astype(v.dtype)

    @spike.defjvp
    def spike_jvp(primals, tangents):
        (v,), (t,) = primals, tangents
        return spike(v), jnp.where(jnp.abs(v) < 0.5, 1.0, 0.0) * t  # CUT

    def loss(params, xs):
        def step(v, x):
            v = 0.9 * v + x @ params["in"]
            s = spike(v - 30.0)  # CUT
            return v * (1 - jax.lax.stop_gradient(s)), s

        _, spikes = jax.lax.scan(step, jnp.zeros((2, 4)), xs)
        return jnp.mean((spikes.mean(0) @ params["out"] + params["bias"] - 1.0) ** 2)

    params = {"in": normal(6, 4), "out": normal(4, 1), "bias": jnp.zeros(1)}
    return loss, (params, normal(5, 2, 6))


@cut("log_std", "clipped")
def log_std_below_its_bound():
    """The head of the standard deviation begins outside of the clip."""

    class Gaussian(nn.Module):
        @nn.compact
        def __call__(self, x):
            bias = nn.initializers.constant(-30.0)
            log_std = nn.Dense(2, bias_init=bias, name="log_std")(x)
            log_std = jnp.clip(log_std, -20.0, 2.0)  # CUT
            return nn.Dense(2, name="mean")(x), log_std

    model = Gaussian()

    def loss(variables, x):
        mean, log_std = model.apply(variables, x)
        return jnp.mean((mean - 1.0) ** 2) + 1e-3 * log_std.mean()

    return loss, (model.init(KEY, X), X)


@cut("adapter", "underflow")
def float16_without_loss_scale():
    """The cotangent of the cast is below the smallest float16."""

    def loss(params, x):
        h = (x @ params["adapter"]).astype(jnp.float16)  # CUT
        out = h.astype(jnp.float32)  # CUT
        return 1e-6 * jnp.mean(out**2) / 64 + jnp.mean((x @ params["w"]) ** 2)

    return loss, ({"adapter": normal(6, 4, scale=0.1), "w": normal(6, 1)}, X)


# Indices that miss, branches, loops.


@cut("cls", "not read")
def class_token_cut_off():
    """The token is put in front, and the pooling leaves it out."""

    def loss(params, x):
        cls = jnp.broadcast_to(params["cls"], (x.shape[0], 1, 6))
        h = jnp.concatenate([cls, x], axis=1)
        h = jax.nn.gelu(h @ params["up"])
        pooled = h[:, 1:].mean(axis=1)  # CUT
        return jnp.mean((pooled @ params["head"] - 1.0) ** 2)

    params = {"cls": normal(6), "up": normal(6, 8), "head": normal(8, 1)}
    return loss, (params, normal(2, 5, 6))


@cut("message", "not read")
def receivers_beyond_the_nodes():
    """The receivers count nodes of the whole batch: segment_sum drops all of them."""

    def loss(params, nodes, senders, receivers):
        messages = jnp.tanh(nodes[senders] @ params["message"])
        summed = jax.ops.segment_sum(messages, receivers, nodes.shape[0])  # CUT
        return jnp.mean((nodes @ params["update"] + summed) ** 2)

    args = X, ints(8, 10), ints(8, 10, seed=1) + 8
    return loss, ({"message": normal(6, 4), "update": normal(6, 4, seed=1)}, *args)


@cut("prefix", "overwritten")
def cache_write_is_clamped():
    """The cache has no room for the prefix, so the start of the write is clamped to 0."""

    def loss(params, x):
        cache = jnp.zeros((8, 6))
        cache = jax.lax.dynamic_update_slice(cache, params["prefix"], (0, 0))
        cache = jax.lax.dynamic_update_slice(cache, x @ params["k"], (2, 0))  # CUT
        weights = jax.nn.softmax(x @ cache.T)
        return jnp.mean((weights @ cache - 1.0) ** 2)

    return loss, ({"prefix": normal(2, 6), "k": normal(6, 6)}, X)


@cut("['scales']|['w']", "zero factor", "where", "overwritten", "not read")
def layer_of_a_stack_is_dropped():
    """Stochastic depth with a fixed mask: one layer of four never contributes."""

    def loss(params, x, keep):
        @jax.checkpoint
        def layer(h, per_layer):
            w, scale, kept = per_layer
            return h + kept * (scale * jnp.tanh(h @ w)), None  # CUT

        h, _ = jax.lax.scan(layer, x, (params["w"], params["scales"], keep))
        return jnp.mean((h - 1.0) ** 2)

    params = {"w": normal(4, 6, 6), "scales": jnp.ones((4, 6))}
    return loss, (params, X, jnp.array([1.0, 1.0, 0.0, 1.0]))


@cut("local", "cast", "flat")
def integers_are_summed_over_devices():
    """Activations are compressed to int32 for the psum of a row-parallel layer."""
    mesh = Mesh(np.array(jax.devices()[:8]), ("model",))

    def compressed_psum(h):
        q = jnp.round(h * 256.0).astype(jnp.int32)  # CUT
        return jax.lax.psum(q, "model").astype(jnp.float32) / 256.0  # CUT

    @functools.partial(
        jax.shard_map, mesh=mesh, in_specs=(P(None, "model"), P("model", None)), out_specs=P()
    )
    def row_parallel(x, w):
        return compressed_psum(x @ w)

    def loss(params, x):
        return jnp.mean((row_parallel(x, params["local"]) + params["bias"] - 1.0) ** 2)

    return jax.jit(loss), ({"local": normal(16, 4), "bias": jnp.zeros(4)}, normal(8, 16))


@cut("router", "index")
def weight_decay_hides_the_router():
    """Only the decay, which is in the loss, trains the router."""

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            logits = nn.Dense(3, name="router")(x)
            choice = jax.random.categorical(self.make_rng("route"), logits)  # CUT
            embedding = nn.Embed(3, 6, name="kind")(choice)  # CUT
            return nn.Dense(1, name="head")(x + embedding)

    model = Model()
    variables = model.init({"params": KEY, "route": KEY}, X)

    def loss(variables, batch, key):
        x, y = batch
        error = jnp.mean((model.apply(variables, x, rngs={"route": key}) - y) ** 2)
        decay = sum(jnp.sum(w**2) for w in jax.tree.leaves(variables))
        return error + 1e-4 * decay

    return loss, (variables, (X, Y), KEY), {"data": "batch"}


# Healthy programs.


@healthy
def straight_through_round():
    def loss(params, x, y):
        w = params["w"] * 8
        w = (w + jax.lax.stop_gradient(jnp.round(w) - w)) / 8
        return jnp.mean((x @ w - y) ** 2)

    return loss, ({"w": normal(6, 1)}, X, Y)


@healthy
def straight_through_custom_rule():
    @jax.custom_vjp
    def binary(x):
        return jnp.sign(x)

    binary.defvjp(lambda x: (jnp.sign(x), x), lambda x, g: (g * (jnp.abs(x) <= 1),))

    def loss(model, x, y):
        w = jax.tree.map(lambda p: binary(p) if p.ndim == 2 else p, model)
        return jnp.mean((jax.vmap(w)(x) - y) ** 2)

    return loss, (eqx.nn.Linear(6, 1, key=KEY), X, Y)


@healthy
def straight_through_gumbel():
    def loss(params, x, key):
        logits = x @ params["router"]
        soft = jax.nn.softmax((logits + jax.random.gumbel(key, logits.shape)) / 0.5)
        hard = jax.nn.one_hot(jnp.argmax(soft, -1), 4)
        gate = soft + jax.lax.stop_gradient(hard - soft)
        return jnp.mean((gate @ params["codes"] - x) ** 2)

    return loss, ({"router": normal(6, 4), "codes": normal(4, 6, seed=1)}, X, KEY)


@healthy
def lora_first_step():
    class Dense(nn.Module):
        @nn.compact
        def __call__(self, x):
            a = self.param("lora_a", nn.initializers.normal(0.1), (6, 2))
            b = self.param("lora_b", nn.initializers.zeros, (2, 4))
            return nn.Dense(4, name="base")(x) + (x @ a @ b) * 2.0

    model = Dense()
    variables = model.init(KEY, X)

    def loss(variables, x):
        return jnp.mean((model.apply(variables, x) - 1.0) ** 2)

    return loss, (variables, X)


@healthy
def head_of_zeros():
    class Net(nnx.Module):
        def __init__(self, rngs):
            self.up = nnx.Linear(6, 8, rngs=rngs)
            self.mid = nnx.Linear(8, 8, rngs=rngs)
            zeros = nnx.initializers.zeros
            self.head = nnx.Linear(8, 1, kernel_init=zeros, rngs=rngs)

        def __call__(self, x):
            return self.head(nnx.gelu(self.mid(nnx.gelu(self.up(x)))))

    return lambda m, x, y: jnp.mean((m(x) - y) ** 2), (Net(nnx.Rngs(0)), X, Y)


@healthy
def rezero_stack():
    def loss(params, x):
        def layer(h, p):
            return h + p["alpha"] * jnp.tanh(h @ p["w"] + p["b"]), None

        h, _ = jax.lax.scan(jax.checkpoint(layer), x, params["layers"])
        return jnp.mean((h @ params["head"] - 1.0) ** 2)

    layers = {"alpha": jnp.zeros(4), "w": normal(4, 6, 6), "b": jnp.zeros((4, 6))}
    return jax.jit(loss), ({"layers": layers, "head": normal(6, 1)}, X)


@healthy
def adaln_zero():
    """DiT: shift, scale and gate are from a linear layer of zeros."""

    class Block(nn.Module):
        @nn.compact
        def __call__(self, x, c):
            zeros = nn.initializers.zeros
            ada = nn.Dense(18, kernel_init=zeros, name="ada")(nn.silu(c))
            shift, scale, gate = jnp.split(ada, 3, axis=-1)
            h = nn.LayerNorm(use_scale=False, use_bias=False)(x) * (1 + scale) + shift
            return x + gate * nn.Dense(6, name="mlp")(nn.gelu(h))

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x, c):
            x = Block()(Block()(nn.Dense(6, name="patch")(x), c), c)
            return nn.Dense(6, name="final")(x)

    model, c = Model(), normal(8, 3)

    def loss(variables, x, c):
        return jnp.mean((model.apply(variables, x, c) - 1.0) ** 2)

    return loss, (model.init(KEY, X, c), X, c)


@healthy
def embedding_with_absent_rows():
    class Tiny(nn.Module):
        @nn.compact
        def __call__(self, ids):
            h = nn.Embed(50, 6, name="tokens")(ids) + nn.Embed(32, 6, name="positions")(
                jnp.arange(ids.shape[1])
            )
            return nn.Dense(50, name="head")(nn.LayerNorm()(h))

    model, ids = Tiny(), ints(50, 2, 7)

    def loss(variables, ids):
        logits = model.apply(variables, ids[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, ids[:, 1:]).mean()

    return loss, (model.init(KEY, ids), ids)


@healthy
def some_dead_units():
    model = eqx.nn.MLP(6, 1, 16, 2, key=KEY)
    low = jnp.where(jnp.arange(16) < 5, -20.0, 0.0)
    model = eqx.tree_at(lambda m: m.layers[0].bias, model, low)
    return lambda m, x, y: jnp.mean((jax.vmap(m)(x) - y) ** 2), (model, X, Y)


@healthy
def bias_before_batch_norm():
    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            h = nn.BatchNorm(use_running_average=False, name="norm")(nn.Dense(8, name="up")(x))
            return nn.Dense(1, name="head")(nn.relu(h))

    model = Net()
    variables = model.init(KEY, X)

    def loss(params, stats, x, y):
        variables = {"params": params, "batch_stats": stats}
        out, new = model.apply(variables, x, mutable=["batch_stats"])
        return jnp.mean((out - y) ** 2), new

    return loss, (variables["params"], variables["batch_stats"], X, Y), {"has_aux": True}


@healthy
def bias_of_the_keys():
    """Softmax does not see the bias of the keys."""

    class Block(nnx.Module):
        def __init__(self, rngs):
            self.attention = nnx.MultiHeadAttention(2, 6, decode=False, rngs=rngs)
            self.norm = nnx.LayerNorm(6, rngs=rngs)

        def __call__(self, x):
            return x + self.attention(self.norm(x), mask=nnx.make_causal_mask(x[..., 0]))

    def loss(model, x):
        return jnp.mean((model(x) - 1.0) ** 2)

    return nnx.jit(loss), (Block(nnx.Rngs(0)), normal(2, 5, 6))


@healthy
def frozen_backbone():
    net = hk.without_apply_rng(
        hk.transform(
            lambda x: hk.Linear(1, name="head")(
                jax.lax.stop_gradient(jax.nn.relu(hk.Linear(8, name="backbone")(x)))
            )
        )
    )

    def loss(params, x, y):
        return jnp.mean((net.apply(params, x) - y) ** 2)

    return loss, (net.init(KEY, X), X, Y)


@healthy
def byol_with_target():
    def project(p, x):
        z = jnp.tanh(x @ p["w1"]) @ p["w2"]
        return z / jnp.linalg.norm(z, axis=-1, keepdims=True)

    def loss(params, a, b):
        online = project(params["online"], a)
        target = jax.lax.stop_gradient(project(params["target"], b))
        return jnp.mean(jnp.sum((online - target) ** 2, -1))

    def branch(s):
        return {"w1": normal(6, 8, seed=s), "w2": normal(8, 4, seed=s)}

    return loss, ({"online": branch(1), "target": branch(2)}, X, X + 0.1)


@healthy
def actor_critic():
    def loss(params, obs, actions, returns):
        h = jnp.tanh(obs @ params["trunk"])
        logp_all = jax.nn.log_softmax(h @ params["policy"])
        logp = jnp.take_along_axis(logp_all, actions[:, None], 1)[:, 0]
        value = (h @ params["value"])[:, 0]
        advantage = jax.lax.stop_gradient(returns - value)
        entropy = -(jnp.exp(logp_all) * logp_all).sum(-1).mean()
        actor = -(logp * advantage).mean()
        return actor + 0.5 * ((value - returns) ** 2).mean() - 0.01 * entropy

    params = {"trunk": normal(6, 8), "policy": normal(8, 3), "value": normal(8, 1)}
    return loss, (params, X, ints(3, 8), Y[:, 0])


@healthy
def attention_over_one_token():
    class Block(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = x + nn.MultiHeadDotProductAttention(num_heads=2, name="attention")(x)
            return nn.Dense(1)(x)

    model, x = Block(), normal(4, 1, 6)

    def loss(variables, x):
        return jnp.mean((model.apply(variables, x) - 1.0) ** 2)

    return loss, (model.init(KEY, x), x)


@healthy
def first_step_of_an_rnn():
    """One step from a state of zeros: the recurrent weights have no gradient yet."""

    def model(xs):
        core = hk.LSTM(4)
        out, _ = hk.dynamic_unroll(core, xs, core.initial_state(xs.shape[1]))
        return hk.Linear(1)(out[-1])

    net = hk.without_apply_rng(hk.transform(model))
    xs = normal(1, 8, 6)

    def loss(params, xs, y):
        return jnp.mean((net.apply(params, xs) - y) ** 2)

    return loss, (net.init(KEY, xs), xs, Y)


@healthy
def unused_head():
    class Two(eqx.Module):
        trunk: eqx.nn.Linear
        used: eqx.nn.Linear
        other: eqx.nn.Linear

        def __call__(self, x, task="used"):
            return getattr(self, task)(jax.nn.gelu(self.trunk(x)))

    k = jax.random.split(KEY, 3)
    model = Two(
        *(eqx.nn.Linear(a, b, key=i) for a, b, i in zip((6, 8, 8), (8, 1, 3), k, strict=True))
    )
    return lambda m, x, y: jnp.mean((jax.vmap(m)(x) - y) ** 2), (model, X, Y)


@healthy
def probe_only_in_aux():
    def loss(params, x, y):
        h = jnp.tanh(x @ params["w"])
        probe = jax.nn.softmax(jax.lax.stop_gradient(h) @ params["probe"])
        return jnp.mean((h @ params["head"] - y) ** 2), {"probe": probe}

    params = {"w": normal(6, 8), "head": normal(8, 1), "probe": normal(8, 3)}
    return loss, (params, X, Y), {"has_aux": True}


@healthy
def hinge_is_satisfied():
    """All examples are on the right side of the margin: the loss is exactly 0."""

    def loss(params, x, label):
        return jnp.mean(jnp.maximum(0.0, 1.0 - label * (x @ params["w"] + params["b"])))

    w = jnp.array([10.0, 0, 0, 0, 0, 0])
    label = jnp.where(X[:, 0] > 0, 1.0, -1.0)
    x = X.at[:, 0].set(label * 2)
    return loss, ({"w": w, "b": jnp.zeros(())}, x, label)


@healthy
def stationary_point():
    def loss(params, x):
        return jnp.mean((x @ params["w"]) ** 2) + jnp.sum(params["w"] ** 2)

    return loss, ({"w": jnp.zeros((6, 2))}, X)


@healthy
def padded_sequences():
    class Tagger(nnx.Module):
        def __init__(self, rngs):
            self.embed = nnx.Embed(20, 6, rngs=rngs)
            self.rnn = nnx.RNN(nnx.GRUCell(6, 6, rngs=rngs))
            self.head = nnx.Linear(6, 3, rngs=rngs)

        def __call__(self, ids, lengths):
            return self.head(self.rnn(self.embed(ids), seq_lengths=lengths))

    def loss(model, ids, lengths, tags):
        logits = model(ids, lengths)
        mask = jnp.arange(ids.shape[1]) < lengths[:, None]
        ce = optax.softmax_cross_entropy_with_integer_labels(logits, tags)
        return jnp.where(mask, ce, 0.0).sum() / mask.sum()

    args = ints(20, 3, 6), jnp.array([6, 2, 1]), ints(3, 3, 6)
    return loss, (Tagger(nnx.Rngs(0)), *args)


@healthy
def dropout_of_linen():
    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            h = nn.Dropout(0.5, deterministic=False)(nn.relu(nn.Dense(16)(x)))
            return nn.Dense(1)(h)

    model = Net()
    variables = model.init({"params": KEY, "dropout": KEY}, X)

    def loss(variables, x, y, key):
        return jnp.mean((model.apply(variables, x, rngs={"dropout": key}) - y) ** 2)

    return loss, (variables, X, Y, KEY)


@healthy
def top_two_experts():
    """As in Mixtral: a softmax over the two that were chosen; the others have no tokens."""

    def loss(params, x):
        best, chosen = jax.lax.top_k(x @ params["router"], 2)
        weights = jax.nn.softmax(best)
        dense = (jax.nn.one_hot(chosen, 8) * weights[..., None]).sum(1)
        h = jax.nn.silu(jnp.einsum("td,edf->tef", x, params["up"]))
        out = jnp.einsum("te,tef,efd->td", dense, h, params["down"])
        return jnp.mean((x + out - 1.0) ** 2)

    router = normal(6, 8)
    return loss, ({"router": router, "up": normal(8, 6, 4), "down": normal(8, 4, 6)}, X)


@healthy
def ppo_at_its_first_epoch():
    def loss(params, obs, actions, logp_old, advantage):
        logits = jnp.tanh(obs @ params["w"]) @ params["policy"]
        logp = jax.nn.log_softmax(logits)[jnp.arange(8), actions]
        ratio = jnp.exp(logp - logp_old)
        clipped = jnp.clip(ratio, 0.8, 1.2)
        return -jnp.mean(jnp.minimum(ratio * advantage, clipped * advantage))

    params, actions = {"w": normal(6, 8), "policy": normal(8, 3)}, ints(3, 8)
    logits = jnp.tanh(X @ params["w"]) @ params["policy"]
    logp_old = jax.nn.log_softmax(logits)[jnp.arange(8), actions]
    return loss, (params, X, actions, logp_old, Y[:, 0])


@healthy
def vq_vae():
    def loss(params, x):
        z = x @ params["encoder"]
        distance = ((z[:, None] - params["codebook"]) ** 2).sum(-1)
        q = params["codebook"][jnp.argmin(distance, -1)]
        codebook = jnp.mean((jax.lax.stop_gradient(z) - q) ** 2)
        commit = jnp.mean((z - jax.lax.stop_gradient(q)) ** 2)
        through = z + jax.lax.stop_gradient(q - z)
        return jnp.mean((through @ params["decoder"] - x) ** 2) + codebook + 0.25 * commit

    params = {"encoder": normal(6, 3), "codebook": normal(16, 3, seed=3), "decoder": normal(3, 6)}
    return loss, (params, X)


@healthy
def data_parallel_on_eight_devices():
    mesh = Mesh(np.array(jax.devices()[:8]), ("data",))

    def local(params, x, y):
        h = jax.nn.relu(x @ params["up"])
        return jax.lax.pmean(jnp.mean((h @ params["head"] - y) ** 2), "data")

    loss = jax.shard_map(local, mesh=mesh, in_specs=(P(), P("data"), P("data")), out_specs=P())
    return jax.jit(loss), ({"up": normal(6, 8), "head": normal(8, 1)}, X, Y)


@healthy
def loss_scale_in_float16():
    def loss(params, x, y, scale):
        p = jax.tree.map(lambda w: w.astype(jnp.float16), params)
        h = jax.nn.relu(x.astype(jnp.float16) @ p["up"])
        out = (h @ p["head"]).astype(jnp.float32)
        return scale * jnp.mean((out - y) ** 2)

    return loss, ({"up": normal(6, 8), "head": normal(8, 1)}, X, Y, jnp.float32(1024))


@healthy
def generator_of_a_gan():
    """Only the generator is differentiated; the discriminator is an argument."""

    def loss(generator, discriminator, z):
        fake = jnp.tanh(jax.vmap(generator)(z))
        return jnp.mean(jax.nn.softplus(-jax.vmap(discriminator)(fake)))

    keys = jax.random.split(KEY)
    generator = eqx.nn.MLP(3, 6, 8, 1, key=keys[0])
    discriminator = eqx.nn.MLP(6, 1, 8, 1, activation=jax.nn.leaky_relu, key=keys[1])
    return loss, (generator, discriminator, normal(8, 3))


@healthy
def decayed_and_trained():
    """A penalty as well as data, with the data named."""

    def loss(params, batch):
        x, y = batch
        h = x
        for p in params["layers"]:
            h = jax.nn.relu(h @ p["w"] + p["b"])
        decay = sum(jnp.sum(w**2) for w in jax.tree.leaves(params))
        return jnp.mean((h @ params["head"] - y) ** 2) + 1e-4 * decay

    layers = [{"w": normal(6, 6, seed=i), "b": jnp.full(6, 0.1)} for i in range(3)]
    params = {"layers": layers, "head": normal(6, 1)}
    return loss, (params, (X, Y)), {"data": "batch"}


@healthy
def couplings_of_a_flow():
    """Each coupling masks half of the features; scales begin at zero."""

    def loss(params, x):
        log_det = jnp.zeros(x.shape[0])
        for i, p in enumerate(params):
            mask = (jnp.arange(6) % 2 == i % 2).astype(x.dtype)
            h = jnp.tanh((x * mask) @ p["w"])
            scale, shift = jnp.tanh(h @ p["s"]) * (1 - mask), (h @ p["t"]) * (1 - mask)
            x = x * jnp.exp(scale) + shift
            log_det += scale.sum(-1)
        return jnp.mean(0.5 * (x**2).sum(-1) - log_det)

    params = [
        {"w": normal(6, 8, seed=i), "s": jnp.zeros((8, 6)), "t": jnp.zeros((8, 6))}
        for i in range(3)
    ]
    return loss, (params, X)
