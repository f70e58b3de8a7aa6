"""A name that is clipped or watched has a cotangent, or is an error: in and beside while loops.

But for `error_clip_by_name`, whose function need not be differentiated.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name

import clipgrad as cg
from tests.helpers import array, assert_close
from tests.rows import each_value

X = array([0.5, 1.0, 2.0])
RULE = cg.ErrorClipByValue(0.01)


@pytest.fixture(autouse=True, scope="module")
def programs():
    """Gives back the compiled programs, hundreds that no other test runs."""
    yield
    jax.clear_caches()


def loop(step, x, times=3):
    """A loop that can't be differentiated in reverse, of values that are not differentiated."""
    more, body = lambda c: c[0] < times, lambda c: (c[0] + 1, step(c[1]))
    return lax.while_loop(more, body, (0, lax.stop_gradient(x)))[1]


def scan(step, x):
    return lax.scan(lambda c, _: (step(c), None), x, length=2)[0]


def only(x, tag):
    return x * loop(lambda c: tag(2 * c), x)


def in_the_condition(x, tag):
    halved = lambda c: tag(c).sum() < 9  # noqa: E731
    return x * lax.while_loop(halved, lambda c: 2 * c, lax.stop_gradient(x))


def while_in_scan(x, tag):
    return scan(lambda c: c * loop(lambda c: tag(2 * c), c), x)


def rule_in_while(x, tag):
    @jax.custom_vjp
    def rule(x):
        return tag(2 * x)

    rule.defvjp(lambda x: (rule(x), None), lambda _, g: (2 * g,))
    return x * loop(rule, x)


NEVER = [only, in_the_condition, while_in_scan, rule_in_while]


def partly(x, tag):
    return tag(3 * only(x, tag))


def partly_in_a_scan(x, tag):
    return scan(lambda c: tag(c * loop(lambda c: tag(2 * c), c)), x)


def before_the_loop(x, tag):
    h = tag(2 * x)
    return h * loop(lambda c: 2 * c, h)


SOMEWHERE = [partly, partly_in_a_scan, before_the_loop]


def in_a_scope(x):
    with jax.named_scope("in"):
        return 1.0 * x


NAMES = {"tag": lambda x: checkpoint_name(x, "in"), "module": in_a_scope}


def loss_of(program, kind):
    def loss(x, factor=1.0):
        return jnp.sum(factor * program(x, NAMES[kind]))

    return loss


def stepped(loss, rule, name):
    step = cg.train_step(loss, optax.sgd(1.0), error_clip={name: rule})
    state, metrics = step(step.init(X), array(np.ones(())))
    return X - state.params, metrics["error_clip"]


def with_stats(loss, **options):
    return cg.value_and_grad_with_stats(loss, **options)(X)[1:]


CALLERS = {
    "by name": lambda loss, n: (jax.grad(cg.error_clip_by_name(loss, {n: RULE}))(X), None),
    "rules": lambda loss, n: with_stats(loss, error_clip={n: RULE}, watch=()),
    "train_step": lambda loss, n: stepped(loss, RULE, n),
    "watch": lambda loss, n: with_stats(loss, watch=[n]),
}
NONE = r"got 'in?\*?', which (tags|names) a value in a while loop, expected one with a cotangent"


kinds = pytest.mark.parametrize("kind", NAMES)
each_caller = pytest.mark.parametrize("caller", CALLERS)


def some(programs):
    return pytest.mark.parametrize("program", programs, ids=lambda f: f.__name__)


@each_value
@some(NEVER)
@each_caller
@kinds
def test_a_name_that_is_only_in_while_loops_is_an_error_but_where_nothing_is_differentiated(
    program, caller, kind
):
    for name in ("in", "i*"):
        loss = loss_of(program, kind)
        if caller == "by name":
            assert_close(CALLERS[caller](loss, name)[0], jax.grad(loss)(X), rtol=1e-6)
        else:
            with pytest.raises(ValueError, match=NONE):
                CALLERS[caller](loss, name)


@each_value
@some(SOMEWHERE)
@each_caller
@kinds
def test_a_name_that_is_elsewhere_too_is_clipped_and_watched_there(program, caller, kind):
    name = "in" if kind == "tag" else "i*"
    grads, stats = CALLERS[caller](loss_of(program, kind), name)
    rule = None if caller == "watch" else RULE
    by_hand = lambda x: jnp.sum(program(x, lambda x: cg.clip_cotangent(x, rule)))  # noqa: E731
    assert_close(grads, jax.grad(by_hand)(X), rtol=1e-5)
    if stats is not None:
        assert set(stats) == {"in"} and np.all(np.asarray(stats["in"].size) == X.size)
    if rule is not None:
        assert np.any(np.abs(grads - jax.grad(lambda x: jnp.sum(program(x, lambda x: x)))(X)) > 1)


@each_value
@some([*NEVER, *SOMEWHERE])
@kinds
def test_without_a_choice_names_with_cotangents_are_watched(program, kind):
    def loss(x):
        with jax.named_scope("net"):
            return loss_of(program, kind)(x) ** 2

    names = {name.name for name in cg.list_names(loss, (X,)) if name.cotangent}
    assert any("in" in name.split("/") for name in names) == (program in SOMEWHERE)
    stats = cg.value_and_grad_with_stats(loss)(X)[2]
    assert set(stats) == (names & {"in"} or names)
    assert all(np.all(np.asarray(s.size) > 0) for s in stats.values())
    if program in NEVER:
        with pytest.raises(ValueError, match="a function whose names have no cotangents to watch"):
            cg.value_and_grad_with_stats(loss_of(program, kind))(X)
