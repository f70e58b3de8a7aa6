"""`clipgrad demo`: two small models on real data, trained without clips, with one, with both."""

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.ad_checkpoint import checkpoint_name

import clipgrad as cg
from clipgrad._chart import empty_chart

# Of the compiler, for what runs for milliseconds and would compile for seconds with care.
QUICK = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
CHUNKS = 10  # equal ones, for one program: how often the progress bar moves
PLAIN, NORM, VALUE = "no clipping", "gradient clip: norm", "gradient clip: value"
ERROR, BOTH = "error clip", "error clip + norm"
IF_FINITE, ZERO_NANS = "optax.apply_if_finite", "optax.zero_nans"
# Okabe and Ito's colors, which color-blind readers can tell apart; gray for their yellow.
COLORS = {
    PLAIN: "#000000", NORM: "#0072B2", VALUE: "#56B4E9", ERROR: "#D55E00", BOTH: "#CC79A7",
    IF_FINITE: "#E69F00", ZERO_NANS: "#8C8C8C",
}  # fmt: skip
TABLE_LINE = "{:24}{:8}{:8}{:20}{}"
# How far up and down from the median a panel reaches: an explosion would flatten all the rest.
UP, DOWN = 1e7, 1e5


class Arm(NamedTuple):
    """One way to train: with a rule before the optimizer, one in the backward pass, or both."""

    label: str
    gradient_clip: cg.ClipRule | None = None
    error_clip: cg.ClipRule | None = None
    wrap: Callable[[optax.GradientTransformation], optax.GradientTransformation] = lambda tx: tx


class Task(NamedTuple):
    """A model, its data, and the ways to train it that are compared.

    Error clips act on `tag`. Without ``--all`` the arms in `shown` are trained, for `short` steps.
    """

    name: str
    summary: str
    goal: str
    note: str
    steps: int
    short: int
    optimizer: optax.GradientTransformation
    arms: tuple[Arm, ...]
    load: Callable[[], Any]
    init: Callable[[Any, np.random.Generator], Any]
    sample: Callable[[Any, jax.Array], Any]
    loss: Callable[[Any, Any], jax.Array]
    tag: str
    evaluate: Callable[[Any, Any, Any], dict[str, Any]]  # of the first and the last parameters
    reached: Callable[[dict[str, Any]], Any]
    recurrent: bool = False
    shown: tuple[str, ...] = (PLAIN, NORM, ERROR)
    options: Any = None  # of the compiler

    def story(self) -> "Task":
        arms = tuple(arm for arm in self.arms if arm.label in self.shown)
        return self._replace(arms=arms, steps=self.short)


def normal(random: np.random.Generator, *shape: int, scale: float) -> np.ndarray:
    return random.normal(scale=scale, size=shape).astype(np.float32)


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()  # in nats


# Blank patches of digits, whose normalization has a NaN gradient.
TRAIN = 1400  # of scikit-learn's 1797 digits, in a fixed order


def load_patches() -> tuple[jax.Array, jax.Array]:
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(labels))
    patches = images[order].reshape(-1, 4, 2, 4, 2).swapaxes(2, 3).reshape(-1, 16, 4) / 16
    return jnp.asarray(patches, jnp.float32), jnp.asarray(labels[order], jnp.int32)


def init_patches(data: Any, random: np.random.Generator) -> Any:
    return {
        "embed": normal(random, 4, 16, scale=1 / 2),
        "hidden": normal(random, 256, 64, scale=1 / 16),
        "hidden_bias": np.zeros((1, 64), np.float32),
        "out": normal(random, 64, 10, scale=1 / 8),
        "out_bias": np.zeros((1, 10), np.float32),
    }


def sample_patches(data: Any, key: jax.Array) -> Any:
    chosen = jax.random.randint(key, (64,), 0, TRAIN)
    return jax.tree.map(lambda x: x[chosen], data)


def patch_logits(params: Any, patches: jax.Array) -> jax.Array:
    h = checkpoint_name(patches @ params["embed"], "patches")
    # The derivative of a norm at 0 is 0/0, and every blank patch is at 0.
    h = h / (jnp.linalg.norm(h, axis=-1, keepdims=True) + 1e-6)
    h = jax.nn.relu(h.reshape(len(h), -1) @ params["hidden"] + params["hidden_bias"])
    return h @ params["out"] + params["out_bias"]


def evaluate_patches(first: Any, params: Any, data: Any) -> dict[str, Any]:
    images, labels = (x[TRAIN:] for x in data)
    logits = patch_logits(params, images)
    right = (logits.argmax(-1) == labels).mean()
    return {
        "accuracy": jnp.where(jnp.isfinite(logits).all(), right, jnp.nan),
        "layer 1 moved": jnp.abs(params["embed"] - first["embed"]).max(),
    }


NORM_CLIP = cg.ClipByGlobalNorm(1.0)
PATCHES_ERROR = cg.ErrorClipByValue(max=1.0, nan=0.0)
BLANK_PATCHES = Task(
    name="blank-patches",
    summary="digits as patches h / (|h| + 1e-6): a blank patch (27%) has a NaN gradient",
    goal="accuracy >= 0.9, all layers trained",
    note="only the error clip trains every layer: with optax.zero_nans the first one never moves",
    steps=300,
    short=150,
    optimizer=optax.adam(3e-3),
    arms=(
        Arm(PLAIN),
        Arm(NORM, NORM_CLIP),
        Arm(VALUE, cg.ClipByValue(1.0)),
        Arm(IF_FINITE, wrap=lambda tx: optax.apply_if_finite(tx, 10**6)),
        Arm(ZERO_NANS, wrap=lambda tx: optax.chain(optax.zero_nans(), tx)),
        Arm(ERROR, error_clip=PATCHES_ERROR),
        Arm(BOTH, NORM_CLIP, PATCHES_ERROR),
    ),
    load=load_patches,
    init=init_patches,
    sample=sample_patches,
    loss=lambda params, batch: cross_entropy(patch_logits(params, batch[0]), batch[1]),
    tag="patches",
    evaluate=evaluate_patches,
    reached=lambda metrics: (metrics["accuracy"] >= 0.9) & (metrics["layer 1 moved"] > 0),
    shown=(NORM, ZERO_NANS, ERROR),
    options=QUICK,
)

# A character RNN on the help texts of the standard library.
TEXT_LENGTH, TEXT_WIDTH, TEST_ROWS = 40, 96, 256


def load_text(length: int = TEXT_LENGTH) -> dict[str, Any]:
    """Rows of numbered characters, and how many characters there are."""
    from pydoc_data.topics import topics

    text = "".join(topics[name] for name in sorted(topics))
    alphabet, numbers = np.unique(list(text), return_inverse=True)
    rows = numbers[: len(text) // (length + 1) * (length + 1)].reshape(-1, length + 1)
    rows = jnp.asarray(np.random.default_rng(0).permutation(rows), jnp.int32)
    return {"train": rows[TEST_ROWS:], "test": rows[:TEST_ROWS], "size": len(alphabet)}


def init_text(data: Any, random: np.random.Generator) -> Any:
    return {
        "embed": normal(random, data["size"], TEXT_WIDTH, scale=0.1),
        "cell": normal(random, TEXT_WIDTH, TEXT_WIDTH, scale=TEXT_WIDTH**-0.5),
        "cell_bias": np.zeros((1, TEXT_WIDTH), np.float32),
        "out": normal(random, TEXT_WIDTH, data["size"], scale=0.05),
        "out_bias": np.zeros((1, 1, data["size"]), np.float32),
    }


def text_loss(params: Any, text: jax.Array) -> jax.Array:
    def cell(h: jax.Array, character: jax.Array) -> tuple[jax.Array, jax.Array]:
        h = checkpoint_name(h, "h")
        h = jnp.tanh(h @ params["cell"] + params["embed"][character] + params["cell_bias"])
        return h, h

    _, h = jax.lax.scan(cell, jnp.zeros((len(text), TEXT_WIDTH)), text[:, :-1].T)
    return cross_entropy(h @ params["out"] + params["out_bias"], text[:, 1:].T)


TEXT_ERROR = cg.ErrorClipByValue(max=3e-4)
CHAR_RNN = Task(
    name="char-rnn",
    summary="a tanh RNN reads Python's help texts, SGD at learning rate 1",
    goal="under 2.5 nats per character of unseen text",
    note="the norm clip wins: begin with it, an error clip does not replace it",
    steps=400,
    short=350,
    optimizer=optax.sgd(1.0),
    arms=(
        Arm(PLAIN),
        Arm(NORM, NORM_CLIP),
        Arm(ERROR, error_clip=TEXT_ERROR),
        Arm(BOTH, NORM_CLIP, TEXT_ERROR),
    ),
    load=load_text,
    init=init_text,
    sample=lambda data, key: jax.random.choice(key, data["train"], (12,)),
    loss=text_loss,
    tag="h",
    evaluate=lambda first, params, data: {"nats per character": text_loss(params, data["test"])},
    reached=lambda metrics: metrics["nats per character"] < 2.5,
    recurrent=True,
    options={"xla_backend_optimization_level": 1},
)
TASKS = {task.name: task for task in (BLANK_PATCHES, CHAR_RNN)}


class Run(NamedTuple):
    """The results of an arm; curves are arrays of shape (seeds, steps)."""

    arm: Arm
    loss: np.ndarray
    norm: np.ndarray  # of the gradients before any gradient clip
    through_time: np.ndarray | None  # the norm of the tagged variable's gradient at each time step
    metrics: dict[str, np.ndarray]
    reached: np.ndarray


def train(task: Task, seeds: int, advance: Callable[[int], Any]) -> Iterator[Run]:
    """Trains the arms of a task one after the other, from the same parameters on the same batches.

    `advance` is told how many steps have been made since the last time.
    """
    data = task.load()
    firsts = [task.init(data, np.random.default_rng(seed)) for seed in range(seeds)]
    params = jax.tree.map(lambda *leaves: jnp.asarray(np.stack(leaves)), *firsts)
    keys = jax.vmap(jax.random.key)(np.arange(seeds))
    one = lambda key, step: task.sample(data, jax.random.fold_in(key, step))  # noqa: E731
    batches = jax.jit(jax.vmap(jax.vmap(one, (None, 0)), (0, None)), compiler_options=QUICK)
    evaluate = jax.jit(jax.vmap(task.evaluate, (0, 0, None)), compiler_options=QUICK)
    size = next(d for d in range(max(1, task.steps // CHUNKS), 0, -1) if task.steps % d == 0)
    for arm in task.arms:
        optimizer = arm.wrap(optax.chain(cg.gradient_clip(arm.gradient_clip), task.optimizer))
        steps = jax.vmap(_training_steps(task, arm, optimizer))
        steps = jax.jit(steps, compiler_options=task.options)
        carry = params, jax.jit(jax.vmap(optimizer.init), compiler_options=QUICK)(params)
        history = []
        for start in range(0, task.steps, size):
            carry, curves = steps(carry, batches(keys, np.arange(start, start + size)))
            history.append(jax.tree.map(np.asarray, curves))
            advance(size)
        loss, norm, time = jax.tree.map(lambda *parts: np.concatenate(parts, axis=1), *history)
        metrics = jax.tree.map(np.asarray, evaluate(params, carry[0], data))
        yield Run(arm, loss, norm, time, metrics, np.asarray(task.reached(metrics)))


def _training_steps(
    task: Task, arm: Arm, optimizer: optax.GradientTransformation
) -> Callable[..., Any]:
    """Some steps of training, from parameters and a state, and what the curves show of each."""
    watched = cg.value_and_grad_with_stats(
        task.loss, error_clip={task.tag: arm.error_clip}, watch=()
    )

    def step(carry: Any, batch: Any) -> Any:
        params, state = carry
        loss, grads, stats = watched(params, batch)
        through_time = stats[task.tag].clipped_norm if task.recurrent else None
        updates, state = optimizer.update(grads, state, params)
        curves = loss, cg.global_norm(grads), through_time
        return (optax.apply_updates(params, updates), state), curves

    return functools.partial(jax.lax.scan, step)


def span(values: np.ndarray) -> str:
    """The range of some numbers, for people: ``0.914..0.930, 2 NaN``."""
    finite = values[np.isfinite(values)]
    if not finite.size:
        return "NaN"
    ends = dict.fromkeys(f"{end:#.3g}".rstrip(".") for end in (finite.min(), finite.max()))
    lost = values.size - finite.size
    return "..".join(ends) + (f", {lost} NaN" if lost else "")


def head(task: Task, run: Run) -> str:
    names = TABLE_LINE.format("", "goal", "finite", "max gradient norm", " | ".join(run.metrics))
    return f"""{task.name}: {task.summary}
goal: {task.goal}  ({len(run.loss)} seeds, {task.steps} steps)
{names}
{"-" * len(names)}"""


def row(run: Run) -> str:
    shares = [f"{x.sum()} of {x.size}" for x in (run.reached, np.isfinite(run.loss[:, -1]))]
    metrics = " | ".join(map(span, run.metrics.values()))
    return TABLE_LINE.format(run.arm.label, *shares, span(run.norm.max(keepdims=True)[0]), metrics)


def report(results: list[tuple[Task, list[Run]]]) -> dict[str, Any]:
    """Versions, and the results of each task and arm; the first axis is that of the seeds."""
    clips = lambda arm: [arm.label, repr(arm.gradient_clip), repr(arm.error_clip)]  # noqa: E731
    shown = lambda run: run._asdict() | {"arm": clips(run.arm), "through_time": None}  # noqa: E731
    return {
        "versions": {module.__name__: module.__version__ for module in (cg, jax, optax, np)},
        "device": jax.devices()[0].device_kind,
        "tasks": {t.name: {run.arm.label: shown(run) for run in runs} for t, runs in results},
    }


def demo_figure(results: list[tuple[Task, list[Run]]]) -> Any:
    """A row for each task: the loss and the gradient norm of its arms, with their outcomes."""
    chart = empty_chart(14, 3.6 * len(results))
    rows = chart.subfigures(len(results), 1, squeeze=False)
    for part, (task, runs) in zip(rows[:, 0], results, strict=True):
        part.suptitle(f"{task.summary}\n{task.note}", fontsize=11)
        runs = [run for run in runs if run.arm.label in task.shown] or runs
        losses, norms = part.subplots(1, 2)
        _draw_curves(losses, "loss", {run.arm.label: run.loss for run in runs})
        of, quantity, up = "norm", "gradient norm before any gradient clip", UP
        if task.recurrent:
            of, quantity, up = "through_time", f"norm of the gradient of {task.tag!r}", np.inf
        _draw_curves(norms, quantity, {run.arm.label: getattr(run, of) for run in runs}, up)
        if task.recurrent:
            norms.set_xlabel("time step (the backward pass goes from right to left)")
        name = next(iter(runs[0].metrics))
        outcomes = [f"{run.arm.label}\n{name} {span(run.metrics[name])}" for run in runs]
        part.legend(losses.lines, outcomes, loc="outside right upper", fontsize=9)
    return chart


def _draw_curves(panel: Any, quantity: str, curves: dict[str, np.ndarray], up: float = UP) -> None:
    """The median of each curve between the least and the largest, and how many end in NaN."""
    panel.set(yscale="log", xlabel="step", ylabel=quantity)
    panel.grid(True, alpha=0.25)
    lost = []
    for label, values in curves.items():
        finite = np.ma.masked_invalid(values.reshape(-1, values.shape[-1]))
        low, middle, high = (of(finite, axis=0) for of in (np.ma.min, np.ma.median, np.ma.max))
        steps = np.arange(1, len(middle) + 1)
        panel.plot(steps, middle, color=COLORS[label], label=label)
        panel.fill_between(steps, low, high, color=COLORS[label], alpha=0.15, linewidth=0)
        if bad := sum(not np.isfinite(seed).all() for seed in values):
            lost.append(f"{label}: NaN in {bad} of {len(values)}")
    every = np.concatenate([np.ravel(values) for values in curves.values()])
    seen = every[np.isfinite(every) & (every > 0)]
    if seen.size:
        middle, highest = np.median(seen), seen.max()
        top = min(highest, up * middle)
        panel.set_ylim(max(seen.min(), middle / DOWN) / 2, top * 2)
        lost += [f"off the scale: up to {highest:.0e}"] if highest > top else []
    panel.set_title("\n".join(lost), loc="right", fontsize=8)
