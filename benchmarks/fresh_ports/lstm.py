"""A tagger with a bidirectional LSTM and attention over its states, beside flax Linen."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.ports import twins
from benchmarks.ports.twins import Bug, Twin

WORDS, WIDTH, HIDDEN, CLASSES, STEPS, BATCH = 20, 14, 18, 5, 7, 6
LENGTHS = twins.integers(13, 3, BATCH)[:, None] + STEPS - 2
TOKENS = twins.integers(14, WORDS - 1, BATCH, STEPS) + 1
TOKENS[np.arange(STEPS) >= LENGTHS] = 0
LABELS = twins.integers(15, CLASSES, BATCH)


def torch_side():
    import torch
    from torch import nn

    class AttentionPool(nn.Module):
        def __init__(self):
            super().__init__()
            self.score = nn.Linear(2 * HIDDEN, 1)

        def forward(self, x, mask):
            scores = self.score(x).squeeze(-1).masked_fill(~mask, float("-inf"))
            return (scores.softmax(-1).unsqueeze(-1) * x).sum(1)

    class Tagger(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(WORDS, WIDTH)
            self.lstm = nn.LSTM(WIDTH, HIDDEN, batch_first=True, bidirectional=True)
            self.norm = nn.LayerNorm(2 * HIDDEN)
            self.pool = AttentionPool()
            self.fc = nn.Linear(3 * HIDDEN, CLASSES)

        def forward(self, tokens):
            x, (h, _) = self.lstm(self.embedding(tokens))
            pooled = self.pool(self.norm(x), tokens != 0)
            return self.fc(torch.cat((pooled, h[0]), -1))

    def loss(module, tokens, labels):
        logits = module(tokens)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return torch.nn.functional.cross_entropy(logits, labels.long(), label_smoothing=0.2)

    torch.manual_seed(4)
    return twins.stirred(Tagger()), loss, (torch.from_numpy(TOKENS), torch.from_numpy(LABELS))


class Pool(nn.Module):
    """Attention over the steps."""

    bug: str = ""

    @nn.compact
    def __call__(self, x, mask):
        scores = nn.Dense(1, name="score")(x)[..., 0]
        scores = jnp.tanh(scores) if self.bug == "score_tanh" else scores
        if self.bug != "pool_without_mask":
            scores = jnp.where(mask, scores, -jnp.inf)
        return (jax.nn.softmax(scores)[..., None] * x).sum(1)


class Tagger(nn.Module):
    """The whole model."""

    bug: str = ""

    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(WORDS, WIDTH, name="embed")(tokens)
        if self.bug == "padding_zeroed":
            x = jnp.where((tokens != 0)[..., None], x, 0)
        zeros = jnp.zeros((len(x), HIDDEN), x.dtype)
        cells = [nn.OptimizedLSTMCell(HIDDEN, name=name) for name in ("forward", "backward")]
        (c, h), forward = nn.RNN(cells[0], return_carry=True, name="rnn")(
            x, initial_carry=(zeros, zeros)
        )
        backward = nn.RNN(
            cells[1], reverse=True, keep_order=self.bug != "order_not_kept", name="rnn_reverse"
        )(x, initial_carry=(zeros, zeros))
        x = nn.LayerNorm(epsilon=1e-5, name="norm")(jnp.concatenate((forward, backward), -1))
        pooled = Pool(self.bug, name="pool")(x, tokens != 0)
        last = c if self.bug == "cell_for_hidden" else h
        last = backward[:, 0] if self.bug == "last_of_backward" else last
        return nn.Dense(CLASSES, name="head")(jnp.concatenate((pooled, last), -1))


def carry(state, bug="", grads=False):
    def cell(suffix):
        out = {}
        for i, gate in enumerate("ifgo"):
            rows = slice(i * HIDDEN, (i + 1) * HIDDEN)
            w, v, b, c = (
                state[f"lstm.{kind}_l0{suffix}"][rows]
                for kind in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
            )
            bias = b if grads else b + c
            out["i" + gate] = {"kernel": w.T}
            out["h" + gate] = {"kernel": v.T, "bias": bias + (bug == "forget_bias") * (gate == "f")}
        return out

    return {
        "embed": {"embedding": state["embedding.weight"]},
        "forward": cell("_reverse" if bug == "directions" else ""),
        "backward": cell("" if bug == "directions" else "_reverse"),
        "norm": twins.norm(state, "norm"),
        "pool": {"score": twins.dense(state, "pool.score")},
        "head": twins.dense(state, "fc"),
    }


def loss(bug=""):
    model = Tagger(bug)

    def loss(params, tokens, labels):
        logits = model.apply({"params": params}, tokens)
        wide = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
        targets = jax.nn.one_hot(labels, CLASSES, dtype=wide.dtype)
        if bug != "smoothing_missing":
            targets = 0.8 * targets + 0.2 / CLASSES
        return -(targets * jax.nn.log_softmax(wide)).sum(-1).mean()

    return loss


BUGS = {
    "forget_bias": Bug(
        ("forward", "forward/hf", "rnn", "rnn/forward", "rnn/forward/hf"),
        "1 added to the bias of the forget gate, as TensorFlow does",
        ("*ward/hf/bias",),
    ),
    "order_not_kept": Bug(
        ("rnn_reverse", "backward", "rnn_reverse/backward", "", "norm"),
        "the states of the reversed pass in its order",
    ),
    "cell_for_hidden": Bug(("", "head"), "the state (c, h) read as torch's (h, c)"),
    "pool_without_mask": Bug(("pool",), "padding takes part in the pool"),
    "smoothing_missing": Bug(("",), "the loss without label smoothing"),
    "score_tanh": Bug(("pool", "pool/score"), "tanh of the scores"),
    "padding_zeroed": Bug(
        ("", "embed", "rnn", "rnn/forward"), "the embedding of padding is zero, torch's is not"
    ),
    "last_of_backward": Bug(("", "head"), "the head reads the last state of the reversed pass"),
    "directions": Bug(
        ("forward", "forward/??", "rnn", "rnn/forward", "rnn/forward/??"),
        "the two directions have each other's weights",
        ("forward/*", "backward/*"),
    ),
}
TWIN = Twin("lstm", torch_side, loss, carry, lambda arrays, state, bug: arrays, BUGS)
