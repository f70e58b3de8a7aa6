"""A state-space model as Mamba, with a loop over steps, beside Equinox with ``jax.lax.scan``."""

import equinox as eqx
import jax
import jax.numpy as jnp

from benchmarks.ports import twins
from benchmarks.ports.twins import Bug, Twin

WORDS, WIDTH, INNER, STATES, RANK, TAPS, DEPTH, STEPS, BATCH = 30, 18, 36, 4, 3, 4, 1, 7, 3
TOKENS = twins.integers(23, WORDS, BATCH, STEPS + 1)


def torch_side():
    import torch
    from torch import nn
    from torch.nn import functional as F

    class RMSNorm(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(WIDTH))

        def forward(self, x):
            wide = x.to(torch.promote_types(x.dtype, torch.float32))
            wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)
            return wide.to(x.dtype) * self.weight

    class MambaBlock(nn.Module):
        def __init__(self):
            super().__init__()
            self.in_proj = nn.Linear(WIDTH, 2 * INNER, bias=False)
            self.conv1d = nn.Conv1d(INNER, INNER, TAPS, groups=INNER, padding=TAPS - 1)
            self.x_proj = nn.Linear(INNER, RANK + 2 * STATES, bias=False)
            self.dt_proj = nn.Linear(RANK, INNER)
            rates = torch.arange(1, STATES + 1).float().repeat(INNER, 1)
            self.A_log = nn.Parameter(rates.log())
            self.D = nn.Parameter(torch.ones(INNER))
            self.out_proj = nn.Linear(INNER, WIDTH, bias=False)

        def forward(self, x):
            steps = x.shape[1]
            x, z = self.in_proj(x).chunk(2, -1)
            x = F.silu(self.conv1d(x.transpose(1, 2))[:, :, :steps].transpose(1, 2))
            dt, B, C = self.x_proj(x).split((RANK, STATES, STATES), -1)
            dt = F.softplus(self.dt_proj(dt))
            A = -torch.exp(self.A_log)
            h, ys = x.new_zeros(len(x), INNER, STATES), []
            for t in range(steps):
                decay = torch.exp(dt[:, t, :, None] * A)
                h = decay * h + (dt[:, t] * x[:, t])[:, :, None] * B[:, t, None]
                ys.append((h * C[:, t, None]).sum(-1))
            return self.out_proj((torch.stack(ys, 1) + self.D * x) * F.silu(z))

    class ResidualBlock(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.mixer = RMSNorm(), MambaBlock()

        def forward(self, x):
            return x + self.mixer(self.norm(x))

    class Mamba(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(WORDS, WIDTH)
            self.layers = nn.ModuleList(ResidualBlock() for _ in range(DEPTH))
            self.norm_f = RMSNorm()
            self.lm_head = nn.Linear(WIDTH, WORDS, bias=False)

        def forward(self, tokens):
            x = self.embedding(tokens)
            for layer in self.layers:
                x = layer(x)
            return self.lm_head(self.norm_f(x))

    torch.manual_seed(9)
    module = twins.stirred(Mamba())
    with torch.no_grad():
        for layer in module.layers:
            layer.mixer.x_proj.weight.mul_(6)
    args = torch.from_numpy(TOKENS[:, :-1].copy()), torch.from_numpy(TOKENS[:, 1:].copy())
    return module, lambda m, x, y: twins.torch_cross_entropy(m(x), y), args


class Mixer(eqx.Module):
    """The selective state space of one sequence."""

    inputs: eqx.nn.Linear
    conv: eqx.nn.Conv1d
    select: eqx.nn.Linear
    rate: eqx.nn.Linear
    a_log: jax.Array
    skip: jax.Array
    outputs: eqx.nn.Linear
    bug: str = eqx.field(static=True)

    def __init__(self, bug):
        key = jax.random.key(0)
        # Half of SAME's padding stands behind.
        pad = (TAPS // 2 - 1, TAPS // 2) if bug == "conv_not_causal" else (TAPS - 1, 0)
        self.inputs = eqx.nn.Linear(WIDTH, 2 * INNER, use_bias=False, key=key)
        self.conv = eqx.nn.Conv1d(INNER, INNER, TAPS, padding=(pad,), groups=INNER, key=key)
        self.select = eqx.nn.Linear(INNER, RANK + 2 * STATES, use_bias=False, key=key)
        self.rate = eqx.nn.Linear(RANK, INNER, key=key)
        self.a_log, self.skip = jnp.zeros((INNER, STATES)), jnp.ones(INNER)
        self.outputs = eqx.nn.Linear(INNER, WIDTH, use_bias=False, key=key)
        self.bug = bug

    def __call__(self, x):
        with jax.named_scope("inputs"):
            x, z = jnp.split(jax.vmap(self.inputs)(x), 2, -1)
        with jax.named_scope("conv"):
            x = self.conv(x.T).T
        x = jax.nn.silu(x)
        with jax.named_scope("select"):
            dt, b, c = jnp.split(jax.vmap(self.select)(x), (RANK, RANK + STATES), -1)
        if self.bug == "b_and_c":
            b, c = c, b
        with jax.named_scope("rate"):
            dt = jax.vmap(self.rate)(dt)
        if self.bug == "bias_twice":
            dt = dt + self.rate.bias
        dt = jax.nn.softplus(dt)
        a = -self.a_log if self.bug == "rate_not_exponential" else -jnp.exp(self.a_log)

        def step(h, now):
            x, dt, b, c = now
            h = jnp.exp(dt[:, None] * a) * h + (dt * x)[:, None] * b
            return h, h @ c

        _, y = jax.lax.scan(step, jnp.zeros((INNER, STATES), x.dtype), (x, dt, b, c))
        gate = jax.nn.silu(z)
        y = y * gate + self.skip * x if self.bug == "skip_not_gated" else (y + self.skip * x) * gate
        with jax.named_scope("outputs"):
            return jax.vmap(self.outputs)(y)


class Block(eqx.Module):
    """A norm and the mixer."""

    norm: eqx.nn.RMSNorm
    mixer: Mixer

    def __init__(self, bug):
        self.norm = eqx.nn.RMSNorm(WIDTH, eps=1e-5, use_bias=False)
        self.mixer = Mixer(bug)

    def __call__(self, x):
        with jax.named_scope("norm"):
            h = jax.vmap(self.norm)(x)
        with jax.named_scope("mixer"):
            return x + self.mixer(h)


class Mamba(eqx.Module):
    """The whole model, for one sequence."""

    token: eqx.nn.Embedding
    blocks: list[Block]
    norm: eqx.nn.RMSNorm
    head: eqx.nn.Linear

    def __init__(self, bug=""):
        key = jax.random.key(0)
        self.token = eqx.nn.Embedding(WORDS, WIDTH, key=key)
        self.blocks = [Block(bug) for _ in range(DEPTH)]
        self.norm = eqx.nn.RMSNorm(WIDTH, eps=1e-5, use_bias=False)
        self.head = eqx.nn.Linear(WIDTH, WORDS, use_bias=False, key=key)

    def __call__(self, tokens):
        with jax.named_scope("token"):
            x = jax.vmap(self.token)(tokens)
        for i, block in enumerate(self.blocks):
            with jax.named_scope(f"block{i}"):
                x = block(x)
        with jax.named_scope("norm"):
            x = jax.vmap(self.norm)(x)
        with jax.named_scope("head"):
            return jax.vmap(self.head)(x)


def carry(state, bug="", grads=False):
    def leaves(model):
        out = [model.token.weight]
        for block in model.blocks:
            m = block.mixer
            out += [block.norm.weight, m.inputs.weight, m.conv.weight, m.conv.bias]
            out += [m.select.weight, m.rate.weight, m.rate.bias]
            out += [m.a_log, m.skip, m.outputs.weight]
        return [*out, model.norm.weight, model.head.weight]

    names = "norm.weight", "mixer.in_proj.weight", "mixer.conv1d.weight", "mixer.conv1d.bias"
    names += "mixer.x_proj.weight", "mixer.dt_proj.weight", "mixer.dt_proj.bias"
    names += "mixer.A_log", "mixer.D", "mixer.out_proj.weight"
    names = [f"layers.{i}.{name}" for i in range(DEPTH) for name in names]
    new = [state[name] for name in ("embedding.weight", *names, "norm_f.weight", "lm_head.weight")]
    model = Mamba(bug)
    # Equinox keeps the bias of a convolution as a column.
    new = [jnp.asarray(x).reshape(y.shape) for x, y in zip(new, leaves(model), strict=True)]
    return eqx.tree_at(leaves, model, new)


def loss(bug=""):
    def loss(model, tokens, labels):
        return twins.cross_entropy(jax.vmap(model)(tokens), labels)

    return loss


MIXER = "block0/mixer"
BUGS = {
    "conv_not_causal": Bug((MIXER + "/conv", MIXER), "the convolution sees what comes"),
    "b_and_c": Bug((MIXER, MIXER + "/select"), "the parts of a projection as dt, C, B"),
    "bias_twice": Bug((MIXER, MIXER + "/rate"), "the bias of dt is added again before softplus"),
    "rate_not_exponential": Bug((MIXER,), "A is -A_log, not -exp(A_log)"),
    "skip_not_gated": Bug((MIXER,), "the skip by D is added behind the gate"),
}
TWIN = Twin("mamba", torch_side, loss, carry, lambda arrays, state, bug: arrays, BUGS)
