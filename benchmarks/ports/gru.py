"""A tagger of two recurrent layers: torch's GRUCell in a loop, then GRU, beside flax Linen."""

import flax.linen as nn
import jax.numpy as jnp

from benchmarks.ports import twins
from benchmarks.ports.twins import Bug, Twin

# As many examples as steps, so that the two axes can be confused.
WORDS, WIDTH, HIDDEN, CLASSES, STEPS, BATCH = 20, 16, 24, 5, 8, 8
TOKENS, LABELS = twins.integers(1, WORDS, BATCH, STEPS), twins.integers(2, CLASSES, BATCH)


def torch_side():
    import torch
    from torch import nn

    class Tagger(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(WORDS, WIDTH)
            self.cell = nn.GRUCell(WIDTH, HIDDEN)
            self.gru = nn.GRU(HIDDEN, HIDDEN, batch_first=True)
            self.fc = nn.Linear(HIDDEN, CLASSES)

        def forward(self, tokens):
            x = self.embedding(tokens)
            h = x.new_zeros(len(x), HIDDEN)
            states = []
            for t in range(x.shape[1]):
                h = self.cell(x[:, t], h)
                states.append(h)
            y, _ = self.gru(torch.stack(states, 1))
            return self.fc(y[:, -1])

    torch.manual_seed(0)
    args = torch.from_numpy(TOKENS), torch.from_numpy(LABELS)
    return twins.stirred(Tagger()), lambda m, x, y: twins.torch_cross_entropy(m(x), y), args


class Cell(nn.Module):
    """The gated unit, written out."""

    features: int
    bug: str = ""

    @nn.compact
    def __call__(self, h, x):
        def of(name, bias=True):
            return nn.Dense(self.features, use_bias=bias, name=name)

        r = nn.sigmoid(of("ir")(x) + of("hr", False)(h))
        z = nn.sigmoid(of("iz")(x) + of("hz", False)(h))
        if self.bug == "reset_before":
            n = nn.tanh(of("in")(x) + of("hn")(r * h))
        else:
            squash = nn.sigmoid if self.bug == "candidate_sigmoid" else nn.tanh
            n = squash(of("in")(x) + r * of("hn")(h))
        h = (1 - z) * h + z * n if self.bug == "update_reversed" else (1 - z) * n + z * h
        return h, h


class Tagger(nn.Module):
    """Embedding, two recurrent layers, and a head on the last state."""

    bug: str = ""

    @nn.compact
    def __call__(self, tokens):
        tokens = tokens - 1 if self.bug == "tokens_shifted" else tokens
        x = nn.Embed(WORDS, WIDTH, name="embed")(tokens)
        h = jnp.zeros((len(x), HIDDEN), x.dtype)
        axis = 0 if self.bug == "time_major" else 1
        scan = nn.scan(
            Cell,
            variable_broadcast="params",
            split_rngs={"params": False},
            in_axes=axis,
            out_axes=axis,
        )
        last, x = scan(HIDDEN, self.bug, name="encoder")(h, x)
        h = last if self.bug == "decoder_carry" else h
        if self.bug == "reversed":
            x = x[:, ::-1]
        x = nn.RNN(nn.GRUCell(HIDDEN, name="decoder"))(x, initial_carry=h)
        return nn.Dense(CLASSES, name="head")(x[:, -2 if self.bug == "last_step" else -1])


def carry(state, bug="", grads=False):
    def gates(name, suffix, order="rzn"):
        parts = {}
        for i, gate in enumerate(order):
            rows = slice(i * HIDDEN, (i + 1) * HIDDEN)
            of_x, of_h = (
                state[f"{name}.bias_ih{suffix}"][rows],
                state[f"{name}.bias_hh{suffix}"][rows],
            )
            bias = of_x if gate == "n" or grads or lost else of_x + of_h
            parts["i" + gate] = {"kernel": state[f"{name}.weight_ih{suffix}"][rows].T, "bias": bias}
            parts["h" + gate] = {"kernel": state[f"{name}.weight_hh{suffix}"][rows].T}
            if gate == "n":
                parts["hn"]["bias"] = of_h
        return parts

    lost = bug == "hidden_bias_lost"
    encoder = gates("cell", "", "zrn" if bug == "gates_order" else "rzn")
    lost = False
    decoder = gates("gru", "_l0")
    if bug == "candidate_bias":
        encoder["in"]["bias"] = encoder["in"]["bias"] + encoder["hn"]["bias"]
        encoder["hn"]["bias"] = 0 * encoder["hn"]["bias"]
    if bug == "input_and_hidden":
        for gate in "rzn":
            of_x, of_h = decoder["i" + gate], decoder["h" + gate]
            of_x["kernel"], of_h["kernel"] = of_h["kernel"], of_x["kernel"]
    return {
        "embed": {"embedding": state["embedding.weight"]},
        "encoder": encoder,
        "decoder": decoder,
        "head": twins.dense(state, "fc"),
    }


def loss(bug=""):
    model = Tagger(bug)

    def loss(params, tokens, labels):
        return twins.cross_entropy(model.apply({"params": params}, tokens), labels)

    return loss


CELL = ("encoder", *(f"encoder/{gate}" for gate in ("ir", "iz", "hr", "hz")))
LEAVES = tuple(f"encoder/{gate}/kernel" for gate in ("ir", "iz", "hr", "hz"))
BUGS = {
    "gates_order": Bug(CELL, "torch's gates r, z, n read as z, r, n", LEAVES),
    "reset_before": Bug(("encoder", "encoder/hn"), "the reset gate before the product"),
    "update_reversed": Bug(("encoder",), "the update gate keeps the new state"),
    "hidden_bias_lost": Bug(
        ("encoder", "encoder/ir", "encoder/iz"),
        "one of the two biases of r and z is not carried over",
        ("encoder/ir/bias", "encoder/iz/bias"),
    ),
    "time_major": Bug(("encoder",), "the recurrence runs over the examples"),
    "last_step": Bug(("", "head"), "the head reads the last state but one"),
    "tokens_shifted": Bug(("", "embed"), "the words counted from 0, torch's from 1"),
    "input_and_hidden": Bug(
        ("decoder", "decoder/??", "RNN_0", "RNN_0/decoder", "RNN_0/decoder/??"),
        "the decoder's kernels of input and state exchanged",
        ("decoder/??/kernel",),
    ),
    "decoder_carry": Bug(
        ("", "decoder", "RNN_0", "RNN_0/decoder"),
        "the decoder begins with the encoder's last state",
    ),
    "candidate_sigmoid": Bug(("encoder",), "the candidate by sigmoid beside torch's tanh"),
    "candidate_bias": Bug(
        ("encoder", "encoder/in", "encoder/hn"),
        "both biases of the candidate outside the reset gate",
        ("encoder/in/bias", "encoder/hn/bias"),
    ),
}

TWINS = [Twin("gru", torch_side, loss, carry, lambda arrays, state, bug: arrays, BUGS)]
