"""The fix that a finding suggests cures the program, in each precision.

Each row is a program that is sick at a point, the fix that its finding names, and the program with
that fix, where `f` in the fix is the function of the program.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import clipgrad as cg
from tests.helpers import array
from tests.rows import crossed, first_row

pytestmark = pytest.mark.usefixtures("users_promotion")

MASKED = "with ok = x > 0, jnp.where(ok, f(jnp.where(ok, x, 1.0)), 0.0)"
SAFE_NORM = (
    "with ok = jnp.sum(x * x) > 0, jnp.where(ok, jnp.linalg.norm(jnp.where(ok, x, 1.0)), 0.0)"
)
INSIDE = "jnp.clip(x, jnp.finfo(x.dtype).eps - 1, 1 - jnp.finfo(x.dtype).eps)"
ABOVE = "jnp.acosh(jnp.maximum(x, 1 + jnp.finfo(x.dtype).eps))"
NO_VARIANCE = "jnp.sqrt(jnp.var(x) + 1e-6)"
FINITE_MASK = "jnp.where(mask, x, jnp.finfo(x.dtype).min)"
BOUNDED = "jnp.exp(jnp.minimum(x, jnp.log(jnp.finfo(x.dtype).max) - 1))"
MASKED_SUM = "jax.nn.logsumexp(jnp.where(mask, x, -jnp.inf))"
MASKED_DIVISOR = "with ok = y != 0, jnp.where(ok, x / jnp.where(ok, y, 1.0), 0.0)"
PROGRAMS = {  # the program, the elements of x, the fix
    "sqrt": ("f(x)", jnp.sqrt, [0.0, 0.5], MASKED),
    "pow": ("f(x)", lambda x: x**0.3, [0.0, 0.5], MASKED),
    "log": ("jnp.where(x > 0, f(x), 0.0)", jnp.log, [0.0, 0.5], MASKED),
    "exp": ("jnp.where(x < 9, jnp.exp(x), 0.0)", None, [300.0, 0.5], BOUNDED),
    "norm": ("jnp.linalg.norm(x)", None, [0.0, 0.0], SAFE_NORM),
    "std": ("jnp.std(x)", None, [0.5, 0.5], NO_VARIANCE),
    "log of softmax": ("jnp.log(jax.nn.softmax(x))", None, [-200.0, 0.0], "jax.nn.log_softmax"),
    "mask": ("jax.nn.softmax(jnp.where(mask, x, -jnp.inf))", None, [0.3, 0.5], FINITE_MASK),
    "logsumexp": (MASKED_SUM, None, [0.3, 0.5], FINITE_MASK),
    "divisor": ("x / (x - x[0])", None, [0.0, 0.5], MASKED_DIVISOR),
    "acos": ("jnp.acos(x)", None, [1.0, 0.3], f"jnp.acos({INSIDE})"),
    "asin": ("jnp.asin(x)", None, [-1.0, 0.3], f"jnp.asin({INSIDE})"),
    "atanh": ("jnp.atanh(x)", None, [1.0, 0.3], INSIDE),
    "arccosh": ("jnp.arccosh(x)", None, [1.0, 1.5], ABOVE),
}


def cured(program, fix):
    """The program with the fix in it."""
    if fix is FINITE_MASK:
        return program.replace("jnp.where(mask, x, -jnp.inf)", fix)
    if fix is BOUNDED:
        return program.replace("jnp.exp(x)", fix)
    if fix is INSIDE:
        return program.replace("x", fix)
    if fix is MASKED_DIVISOR:
        code = fix.removeprefix("with ok = y != 0, ")
        return f"(lambda y: (lambda ok: {code})(y != 0))(x - x[0])"
    if "with ok = " in fix:
        condition, code = fix.removeprefix("with ok = ").split(", ", 1)
        return f"(lambda ok: {code})({condition})"
    return f"{fix}(x)" if "(" not in fix else fix


def loss_of(program, function):
    names = {"jnp": jnp, "jax": jax, "f": function, "mask": array(np.zeros(2), bool)}
    return lambda x: jnp.sum(eval(program, names | {"x": x}) * jnp.asarray([0.5, 0.25], x.dtype))


DTYPES = [jnp.float32, jnp.bfloat16, jnp.float16]


@crossed(2)
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: d.__name__)
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_finding_has_the_fix(name, dtype):
    program, function, at, fix = PROGRAMS[name]
    diagnosis = cg.diagnose(loss_of(program, function), (array(at, dtype),))
    assert fix in diagnosis.findings[0].message


@pytest.mark.slow
@first_row
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: d.__name__)
def test_the_fix_of_a_finding_cures_the_program(dtype):
    losses = {n: loss_of(cured(of, fix), fun) for n, (of, fun, _, fix) in PROGRAMS.items()}
    points = {name: jnp.array(at, dtype) for name, (_, _, at, _) in PROGRAMS.items()}
    healthy = cg.diagnose(lambda x: sum(of(x[name]) for name, of in losses.items()), (points,))
    # Where a mask leaves nothing, the gradient is zero.
    zeros = [f.cause for f in healthy.findings if f.kind != "underflow"]  # as float16 may
    assert zeros == ["where"], str(healthy)
