"""What may stand around an optimizer of the parameters ``w`` and ``v``."""

import optax

import clipgrad as cg

AROUND = {
    "masked": lambda tx: optax.masked(tx, {"w": True, "v": False}),
    "partition": lambda tx: optax.partition({"a": tx, "b": optax.sgd(0.1)}, {"w": "a", "v": "b"}),
    "inject_hyperparams": lambda tx: optax.inject_hyperparams(
        lambda rate: optax.chain(tx, optax.scale(rate))
    )(rate=1.0),
    "skip_spikes": lambda tx: cg.skip_spikes(tx),
}
