"""Public reports of NaN and zero gradients, rebuilt small: does a diagnosis name the line?

How they were found: six searches of GitHub's issues on 2026-11-29 ("gradient is nan where sqrt norm
at zero", "grad returns nan but function value is finite", "NaN gradients eigh svd degenerate",
"where gradient nan even though branch not selected", "gradient nan power arctan2 arccos logsumexp",
"grad returns all zeros round argmax"): each issue of JAX or Haiku among their hits whose excerpt
has a program that still gives such a gradient with JAX 0.10.2. A line that makes it has ``# here``.
"""

import inspect
import pathlib
import re
import traceback

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import clipgrad as cg
from tests.helpers import array

pytestmark = pytest.mark.usefixtures("users_promotion")

REPORTS = {}


def report(issue, *args):
    def register(loss):
        REPORTS[issue] = loss, args
        return loss

    return register


@report("jax-ml/jax#347", array([[1.0, 2.0], [3.0, 4.0], [0.0, 0.0]]))
def distances_beyond_a_half(x):
    distance = jnp.sqrt(jnp.sum(x**2, axis=1))  # here
    return jnp.sum(jnp.where(distance > 0.5, distance, 1.0))


@report("jax-ml/jax#669", array(np.diag([1, 1 + 1e-9, 1 - 1e-9])))
def eigenvectors_of_nearly_the_identity(x):
    _, vectors = jnp.linalg.eigh(x)  # here
    return jnp.sum(vectors)


@report("jax-ml/jax#1052", array([3.0, 0.0, -5.0]))
def angles_but_the_middle_one(a):
    angle = jnp.arctan2(a, a)  # here
    return jnp.sum(jnp.where(jnp.array([False, True, False]), 0.0, angle))


@report("jax-ml/jax#2311", array(np.eye(3)))
def singular_vectors_of_equal_values(x):
    u, _, v = jnp.linalg.svd(x)  # here
    return jnp.sum(u) + jnp.sum(v * jnp.arange(3.0))


@report("jax-ml/jax#2377", 1.0)
def norm_of_nothing(w):
    size = jnp.linalg.norm(jnp.zeros(()) * w)  # here
    return (size - 1.0) ** 2


@report("jax-ml/jax#4177", array(np.zeros(2)))
def squared_norm(x):
    return jnp.linalg.norm(x) ** 2  # here


@report("jax-ml/jax#4646", array(np.diag([4.0, 1.0, 1.0])))
def one_element_of_an_eigenvector(m):
    vectors = jnp.linalg.eigh(m)[1]  # here
    return vectors[0, 2]


@report("jax-ml/jax#7205", 0.3)
def share_within_bounds(x):
    beyond = 100.0 - (jnp.linspace(-1.0, 1.0, 5) + x)
    below = 1 / (1 + jnp.exp(-100.0 * -beyond))  # here
    return jnp.mean(1 - below)


@report("jax-ml/jax#8247", 2.0)
def quotients_without_infinities(x):
    quotient = x / jnp.linspace(-1.0, 1.0, 21).at[10].set(0.0)  # here
    return jnp.sum(jnp.nan_to_num(quotient, posinf=0.0))


@report("jax-ml/jax#9040", array([jnp.nan, 1, 2, 3, 4]))  # here: the argument
def mean_of_squares_without_nan(x):
    return jnp.nanmean(x**2)  # here


@report("jax-ml/jax#11716", array([1.0, 1.0]))
def deviation_of_equal_numbers(x):
    return jnp.std(x)  # here


@report("jax-ml/jax#15798", array(np.zeros(4)))
def angle_of_equal_distributions(logits):
    p = jnp.sqrt(jax.nn.softmax(logits))
    return jnp.arccos(jnp.vdot(p, jnp.full(4, 0.5)))  # here


@report("jax-ml/jax#21723", 0.0)
def squared_norm_of_a_number(x):
    return jnp.linalg.norm(x) ** 2  # here


@report("jax-ml/jax#29152", array([6.0, 7.0, 8.0]))
def logarithms_of_cosines(x):
    return jnp.sum(x * jnp.log(jnp.cos(x)))  # here


@report("google-deepmind/dm-haiku#442", {"w": array([[0.5, -1.0], [2.0, 1.0]])})
def distance_to_chosen_classes(params):
    logits = jnp.array([[1.0, 2.0], [3.0, -1.0], [0.5, 0.5]]) @ params["w"]
    chosen = jnp.argmax(logits, axis=1)  # here
    return jnp.mean((chosen - jnp.array([0.0, 1.0, 1.0])) ** 2)


def lines_of(loss):
    """The lines with the mark."""
    lines, first = inspect.getsourcelines(loss)
    return [first + i for i, line in enumerate(lines) if "# here" in line]


@pytest.mark.parametrize(
    "issue",
    [pytest.param(i, marks=() if i[-3:] == "347" else pytest.mark.slow) for i in REPORTS],
)
def test_the_first_finding_of_a_public_report_is_at_the_line_that_makes_it(issue):
    loss, args = REPORTS[issue]
    diagnosis = cg.diagnose(loss, args)
    finding = diagnosis.findings[0]
    assert finding.file == __file__ and finding.line in lines_of(loss), diagnosis


def is_named_by_jax(loss, args):
    """Whether the trace of `jax.debug_nans` of a jit-compiled gradient has such a line."""
    with jax.debug_nans(True):
        try:
            jax.block_until_ready(jax.jit(jax.grad(loss))(*args))
        except FloatingPointError:
            trace = traceback.format_exc()
            return any(f"line {line}, in {loss.__name__}" in trace for line in lines_of(loss))
    return None  # nothing is NaN


README = " ".join((pathlib.Path(__file__).parents[2] / "README.md").read_text().split())
COUNTED = re.search(
    r"the line in (\d+) of (\d+) public reports of NaN, under `jit`; `diagnose` in (\d+) of (\d+)",
    README,
)


def test_the_readme_counts_these_reports():
    assert COUNTED and COUNTED[3] == COUNTED[4] == str(len(REPORTS))


@pytest.mark.slow
def test_the_readme_says_in_how_many_of_these_the_trace_of_jax_has_the_line():
    named = [is_named_by_jax(loss, args) for loss, args in REPORTS.values()]
    assert [named.count(True), len(named) - named.count(None)] == [int(COUNTED[1]), int(COUNTED[2])]
