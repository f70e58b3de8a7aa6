"""Every topic of the documents that this library grew from is taught at one of these places.

The documents are Paddle's on error clip, gradient clip and gradient check, Composer's method card,
and PyTorch's notes on autograd. A place is a page or a notebook, with a heading.
"""

import ast
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import clipgrad as cg
from clipgrad._errors import docs_text
from tests.pages import (
    DOCS,
    NOTEBOOKS,
    ROOT,
    anchors,
    notebook_cells,
    pytorch_beside_jax,
)

# A document, a place, and the topics that are taught there.
TABLE = """
# Paddle: error clip
exploding.md
    the reason: gradients that explode
2_error_clip#1-what-is-an-error-clip
    the idea: a gradient is clipped before the next gradient operator takes it
2_error_clip#7-which-rules-are-there-and-how-do-i-write-one
    `ErrorClipByValue(max, min)`; without `min` the lower bound is `-max`
2_error_clip#3-how-do-i-clip-one-value
    `None`: no error clip
2_error_clip#6-what-if-every-value-is-to-be-clipped
    an argument of `minimize`, for all gradients
2_error_clip#3-how-do-i-clip-one-value
    an attribute of one variable
coming_from/paddle.md#how-paddle-builds-it-and-what-takes-its-place
    how it is built: the callback for each gradient operator
2_error_clip#2-is-it-not-eight-lines-of-my-own
    how it is built in JAX: a `custom_vjp` of eight lines, and where it fails
2_error_clip#7-which-rules-are-there-and-how-do-i-write-one
    a base class for own clips
# Paddle: gradient clip
3_gradient_clipping#what-does-each-rule-do-to-a-gradient
    by value, by norm, by global norm
coming_from/paddle.md#gradient-clip
    excluded parameters, `need_clip=False`
coming_from/optax.md#some-of-the-parameters
    groups of parameters with a norm of their own
# Paddle: auto gradient check
4_checking_gradients#why-check-by-numbers
    why a backward pass needs a numeric check: three reasons
    the two advantages of a numeric gradient
4_checking_gradients#how-good-is-a-finite-difference
    the theory: Taylor's argument, Stanford's note
4_checking_gradients#how-is-the-whole-gradient-computed
    `get_numerical_gradient` with `delta`
    why an output and an input are named
    the loop over the elements
4_checking_gradients#how-do-i-check-my-own-rule
    three gradients: numeric, of the CPU, of the GPU
    `check_grad`: `no_grad_set` is `no_grad`, `only_cpu` is `devices`
coming_from/paddle.md#gradient-check
    `max_relative_error`, and absolute errors near zero
4_checking_gradients#when-are-two-numbers-the-same
    the published rule of closeness, which is 2 for two equal negative gradients
4_checking_gradients#what-happens-at-a-kink
    inputs that avoid numeric trouble: kinks, saturation
# Composer: gradient clipping
exploding.md
    vanishing and exploding gradients, and where the idea comes from
which_clip.md#where-in-the-chain
    the clip comes after the backward pass and before the step
3_gradient_clipping#what-does-each-rule-do-to-a-gradient
    the formula by value, with a picture
3_gradient_clipping#one-norm-or-one-for-each-leaf
    the formula by norm, in five steps, with a picture
3_gradient_clipping#what-is-large-for-these-weights
    the adaptive formula, with a picture; its units: rows, filters, whole biases
coming_from/composer.md#as-a-function
    the function, `apply_gradient_clipping`
coming_from/composer.md#with-the-trainer
    the trainer with the algorithm `GradientClipping`
coming_from/composer.md#the-events-of-the-trainer
    at which event it runs, `Event.AFTER_TRAIN_BATCH`
coming_from/composer.md#suggested-thresholds
    suggested thresholds, and their context
    adaptive clipping belongs to NF-ResNets and did not help a plain ResNet
which_clip.md#which-threshold
    watch the norms of many updates to choose a threshold
# PyTorch: autograd mechanics
1_autograd#1-how-is-a-computation-recorded
    how the history is recorded
1_autograd#what-is-the-counterpart-of-grad_fn
    `grad_fn` and `next_functions`
    the three tasks of a backward pass: the chain rule, the sum over uses (`add_any`), the leaves
1_autograd#what-happens-to-pythons-control-flow
    Python's control flow in the graph
1_autograd#2-what-are-leaves-and-how-do-i-get-the-gradient-of-an-intermediate-value
    leaves
    the defaults of tensors and of `nn.Parameter`, and of `nnx.Param`
    the whole gradient of an intermediate value, `retain_grad`
1_autograd#5-how-do-i-turn-gradients-off
    excluded parts of a model, fine-tuning
1_autograd#4-what-is-saved-for-the-backward-pass-and-who-decides-that
    saved tensors: saving, packing, moving to the host
    a saved tensor `is` the argument or the result
1_autograd#modes-detach-no_grad-train-eval
    `no_grad`, inference mode
    modes as context managers and decorators: an optimizer's `step`, `nn.init`
    `detach`
    `train()` and `eval()`, which are not modes of autograd
1_autograd#a-training-loop-with-evaluation
    a training loop with evaluation
1_autograd#3-can-i-run-the-backward-pass-twice
    `retain_graph`, a second backward pass
1_autograd#2-what-are-leaves-and-how-do-i-get-the-gradient-of-an-intermediate-value
    hooks on tensors and modules
1_autograd#8-cheat-sheet-what-you-rarely-need
    operations in place and their checks: the version counter, `jax.new_ref`
    kinks; complex numbers: Wirtinger calculus
# PyTorch: extending autograd
1_autograd#6-how-do-i-write-my-own-derivative-rule
    a function with `forward` and `backward`, in four steps
    `save_for_backward`
    what may be saved: a text is a `TypeError`, and goes into `nondiff_argnums`
    a trailing `None` in what `backward` returns
1_autograd#8-cheat-sheet-what-you-rarely-need
    `setup_context`, `mark_dirty`, `mark_non_differentiable`
1_autograd#6-how-do-i-write-my-own-derivative-rule
    arguments that are not tensors
1_autograd#8-cheat-sheet-what-you-rarely-need
    `None` as a gradient
    `needs_input_grad`, `set_materialize_grads`
1_autograd#forward-mode-custom_jvp
    forward mode
1_autograd#do-second-derivatives-work
    double backward, `once_differentiable`
1_autograd#6-how-do-i-write-my-own-derivative-rule
    the example: a linear layer with an optional bias
1_autograd#7-how-do-i-find-out-that-a-rule-is-wrong
    `gradcheck`
    the notes' own `LinearFunction`, which has two wrong gradients
1_autograd#pytorch---jax
    `gradgradcheck`
    `detect_anomaly`, `saved_tensors`, `register_hook`
"""


def rows():
    """Document, topic and place."""
    document = place = None
    for line in TABLE.strip().splitlines():
        if line.startswith("# "):
            document = line[2:]
        elif line.startswith(" "):
            yield document, line.strip(), place
        else:
            place = line


ROWS = list(rows())


@pytest.mark.parametrize("document, topic, place", ROWS)
def test_a_topic_is_taught_at_a_place_that_exists(document, topic, place):
    name, _, anchor = place.partition("#")
    path = ROOT / "notebooks" / f"{name}.ipynb" if name[0].isdigit() else DOCS / name
    assert path.is_file()
    assert not anchor or anchor in anchors(path)


NAMED = [row for row in ROWS if "`" in row[1] and row[2][0].isdigit() and row[0][:7] == "PyTorch"]


@pytest.mark.parametrize("document, topic, place", NAMED)
def test_the_names_of_a_topic_stand_in_its_section(document, topic, place):
    name, _, anchor = place.partition("#")
    lines = docs_text(ROOT / "notebooks" / f"{name}.ipynb").splitlines()
    slug = lambda h: re.sub(r"[^\w\- ]", "", h.lower()).strip().replace(" ", "-")  # noqa: E731
    is_heading = [re.match(r"##+ ", line) for line in lines]
    (start,) = (i for i, h in enumerate(is_heading) if h and slug(lines[i].lstrip("# ")) == anchor)
    level = lines[start].index(" ")
    same = (i for i, h in enumerate(is_heading) if h and i > start and lines[i].index(" ") <= level)
    section = "\n".join(lines[start : next(same, len(lines))])
    for word in re.findall(r"`([^`]+)`", topic):
        assert word.strip("()") in section, word


def test_no_topic_is_left_out():
    documents = [document for document, _, _ in ROWS]
    assert [documents.count(name) for name in dict.fromkeys(documents)] == [9, 3, 11, 11, 19, 15]


# The first notebook, for those who know PyTorch


def test_pytorch_and_jax_stand_side_by_side_from_the_first_cell_on():
    assert notebook_cells(NOTEBOOKS[0], "markdown")[0].count('<table class="two">') == 1
    assert [len(programs) for programs in pytorch_beside_jax()] == [2] * 4
    for program in sum(pytorch_beside_jax(), []):
        assert ast.parse(program) and max(map(len, program.splitlines())) <= 48


@pytest.mark.slow
def test_the_programs_in_the_column_of_jax_run():
    loss, leaves, _, rule = (programs[1] for programs in pytorch_beside_jax())
    names = {"jax": jax, "jnp": jnp, "cg": cg}
    exec(loss, names)
    np.testing.assert_allclose(names["gradient"](0.5, -1.0), [-1.1326, -0.3775], rtol=1e-3)
    names |= {"inputs": jnp.ones((16, 5)), "params": {"w1": jnp.ones((5, 8)), "w2": jnp.ones(8)}}
    exec(leaves, names)
    assert names["of_h"].shape == (16, 8) and jax.tree.map(jnp.shape, names["grads"]) == {
        "w1": (5, 8),
        "w2": (8,),
    }
    exec(rule, names | {"plain_norm": lambda x: jnp.sqrt(jnp.sum(x**2))})


def test_the_reader_builds_the_engine_in_forty_lines_and_predicts_six_times():
    code = notebook_cells(NOTEBOOKS[0], "code")
    (engine,) = (cell for cell in code if "def backward(record" in cell)
    assert sum(bool(line.strip()) for line in engine.splitlines()) <= 40
    text = "\n".join(notebook_cells(NOTEBOOKS[0], "markdown"))
    assert text.count("**Predict, then run.**") == 6


def test_all_notebooks_have_at_most_nine_thousand_words_of_prose():
    texts = ["\n".join(notebook_cells(path, "markdown")) for path in NOTEBOOKS]
    assert sum(len(re.sub(r"```.*?```", "", text, flags=re.S).split()) for text in texts) <= 9000


def test_cells_that_only_test_are_not_shown():
    for path in NOTEBOOKS:
        for cell in json.loads(path.read_text())["cells"]:
            source = "".join(cell["source"])
            tests = source.startswith(("assert ", "np.testing."))
            assert not tests or "remove-cell" in cell["metadata"].get("tags", []), source
