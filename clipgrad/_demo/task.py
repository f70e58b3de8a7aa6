"""A task of the demo, and the ways to train that it compares."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import clipgrad as cg

# Of the compiler, for what runs for milliseconds and would compile for seconds if done with care.
QUICK = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}

Metrics = dict[str, Any]
Optimizer = optax.GradientTransformation

PLAIN = "no clipping"
NORM = "gradient clip: norm"
VALUE = "gradient clip: value"
ADAPTIVE = "gradient clip: adaptive"
ERROR = "error clip"
BOTH = "error clip + norm"
IF_FINITE = "optax.apply_if_finite"
ZERO_NANS = "optax.zero_nans"


@dataclasses.dataclass(frozen=True)
class Arm:
    """One way to train: with a gradient clip, an error clip, both or neither.

    Attributes:
      label: its name, one of those above.
      gradient_clip: the rule before the optimizer.
      error_clip: the rule in the backward pass.
      where: which parameters the gradient clip acts on; see `clipgrad.gradient_clip`.
      wrap: what is done to the optimizer besides.
    """

    label: str
    gradient_clip: cg.ClipRule | None = None
    error_clip: cg.ClipRule | None = None
    where: str | None = None
    wrap: Callable[[Optimizer], Optimizer] | None = None

    def optimizer(self, base: Optimizer) -> Optimizer:
        """``base`` behind the gradient clip of this arm."""
        clipped = optax.chain(cg.gradient_clip(self.gradient_clip, where=self.where), base)
        return self.wrap(clipped) if self.wrap else clipped


@dataclasses.dataclass(frozen=True)
class Task:
    """A model, its data and the arms to compare.

    Attributes:
      name: its name on the command line.
      summary: what it shows, in a line.
      goal: what a seed must reach, in words.
      steps: how many training steps it takes.
      optimizer: what all arms train with.
      arms: the ways to train.
      load: the data, a tree of arrays.
      init: the first parameters, of the data and a generator of NumPy.
      sample: the batch, of the data and a PRNG key.
      loss: the loss, of the parameters and a batch; it knows nothing of clipping.
      tag: the name of the variable in it that error clips act on.
      evaluate: the metrics, of the first and the last parameters and the data.
      reached: whether metrics reach the goal.
      recurrent: whether the tagged variable is inside of a scan over time steps.
      note: what the metrics alone don't say, in a line.
      shown: the arms that tell the story: without ``--all`` only they are trained, and only they
        are drawn.
      short: how many steps show it; 0: all.
      options: the compiler's options, for a model that takes longer to compile than to train.
    """

    name: str
    summary: str
    goal: str
    steps: int
    optimizer: Optimizer
    arms: tuple[Arm, ...]
    load: Callable[[], Any]
    init: Callable[[Any, np.random.Generator], Any]
    sample: Callable[[Any, jax.Array], Any]
    loss: Callable[[Any, Any], jax.Array]
    tag: str
    evaluate: Callable[[Any, Any, Any], Metrics]
    reached: Callable[[Metrics], Any]
    recurrent: bool = False
    note: str = ""
    shown: tuple[str, ...] = (PLAIN, NORM, ERROR)
    short: int = 0
    options: Mapping[str, Any] | None = None

    def story(self) -> "Task":
        arms = tuple(arm for arm in self.arms if arm.label in self.shown)
        return dataclasses.replace(self, arms=arms, steps=self.short or self.steps)


def normal(random: np.random.Generator, *shape: int, scale: float) -> np.ndarray:
    return random.normal(scale=scale, size=shape).astype(np.float32)


def zero_weights(*shape: int) -> np.ndarray:
    return np.zeros(shape, np.float32)


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """The mean of -log p(label), in nats."""
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def accuracy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """The share of labels that are right; NaN if the logits are not finite."""
    right = (logits.argmax(-1) == labels).mean()
    return jnp.where(jnp.isfinite(logits).all(), right, jnp.nan)
