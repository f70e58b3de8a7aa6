"""More rows of `diagnose_zoo`: programs whose values, VJPs or callbacks go wrong."""

import jax
import jax.numpy as jnp
import numpy as np

from tests.diagnose.diagnose_zoo import HEALTHY, LOW, NOTED, SICK, normal, sick
from tests.helpers import array, line_of

__all__ = ["HEALTHY", "NOTED", "SICK"]

INF, NAN = jnp.inf, jnp.nan
NUMBERS = array([1.0, 0.0, 2.0])
ONES, PAIR, MATRIX = array(np.ones(3)), array([1.0, 100.0]), array(np.ones((3, 2)))
HALF_BAD = array([1.0, NAN])
BOUND = "bound its argument, as in jnp.exp(jnp.minimum(x, "
INSIDE = "keep its input inside: jnp.clip(x, jnp.finfo(x.dtype).eps - 1, "
MASKED = "mask the divisor y: with ok = y != 0, jnp.where(ok, x / jnp.where(ok, y, 1.0), 0.0)"
FILE = "tests/diagnose/diagnose_numbers.py"


# -- Arguments and constants that are not finite.


@sick(
    "value", "argument", HALF_BAD, MATRIX,
    says=["1 of 2 elements of args[0] are not finite before the loss uses them",
          "earlier one: diagnose its capture or checkpoint (", "clipgrad help my_run_blew_up"],
)  # fmt: skip
@sick(
    "value",
    "argument",
    array(np.ones(2)),
    array(np.full((3, 2), NAN)),
    name="data",
    says="args[1]",
    never="capture",
)
def parameters(w, x):
    return jnp.sum((x @ w) ** 2)


@sick("value", "argument", {"w": HALF_BAD, "b": 1.0}, says="1 of 2 elements of args[0]['w']")
def leaf_of_an_argument(p):
    return jnp.sum(p["w"] + p["b"])


@sick("value", "sub", array(np.ones(2)), array([-INF, -INF]), says="(args[1] contains inf)")
def mask_that_is_an_argument(x, mask):
    return jnp.sum(jax.nn.softmax(x + mask) ** 2)  # here


@sick("value", None, array(np.ones(2)), says="a constant that is not finite")
def constant_of_a_where(x):
    return jnp.sum(jnp.where(x > 1, x, -INF))


@sick("value", "mul", array(np.ones(1)), step=0, says="a constant that is not finite")
def constant_of_a_scan(x):
    constant = np.array([np.nan], np.float32)
    return jax.lax.scan(lambda c, _: (c * constant, None), x, None, length=4)[0].sum()


# -- Where the line is.


@sick("value", "log", NUMBERS, others=("vjp",), name="value_before_vjp")
def value_and_vjp(x):
    root = jnp.sum(jnp.sqrt(2 * x)) + jnp.sum(jnp.sqrt(x))
    log = jnp.sum(jnp.log(x))  # here
    return root + log + jnp.sum(jnp.log(jax.lax.stop_gradient(2 * x)))


@sick("vjp", "sqrt", array(np.zeros(3)), says=["in norm (jax/", "sqrt at 0", f"{FILE}:"])
def second_use_of_a_function_of_a_library(x):
    first = jnp.linalg.norm(x + 1)
    second = jnp.linalg.norm(x)  # here
    return first + second


@sick("vjp", "sqrt", array([1.0, 0.0, 0.0, 1.0]))
def beside_a_nan_that_is_masked(x):
    norm = jnp.linalg.norm(x[:2] * x[2:])  # here
    root = jnp.sqrt(jnp.where(x > 0, x, 0.0))
    return norm + jnp.sum(jnp.where(x > 0, root, 0.0))


@sick("vjp", "sqrt", array(np.zeros((3, 4))), says="sqrt at 0", never="batching")
def under_vmap(x):
    return jnp.sum(jax.vmap(lambda row: jnp.sum(jnp.sqrt(row)))(x))  # here


def root(x):
    return jnp.sqrt(x)  # here


def rooted(x, **options):
    return jax.lax.scan(lambda total, x: (total + root(x), None), 0.0, x, **options)[0]


ROOTED = {
    "nested": lambda x: jax.lax.scan(lambda t, row: (t + rooted(row), None), 0.0, x)[0],
    "reversed": lambda x: rooted(x[0], reverse=True),
    "branch": lambda x: jax.lax.cond(x[0, 0] > 0, lambda x: rooted(x[0]), lambda x: 0.0, x),
    "map": lambda x: jnp.sum(jax.lax.map(root, x[0])),
}
for _name, _loss in ROOTED.items():
    for _bad, _kind in ((0.0, "vjp"), (-1.0, "value")):
        sick(_kind, "sqrt", array([[1, _bad, 1, 1], [1] * 4, [1] * 4]), at=root, step=1,
             name=f"{_kind}_in_{_name}")(_loss)  # fmt: skip


@jax.custom_vjp
def bad_rule(x):
    return x


def bad_backward(x, g):  # the rule
    return (jnp.sin(g) / (x - x),)


bad_rule.defvjp(lambda x: (x, x), bad_backward)


@jax.custom_jvp
def bad_tangent(x):
    return x * x


@bad_tangent.defjvp
def rule_of_bad_tangent(primals, tangents):
    slope = 1 / (primals[0] - 2)  # the rule
    return bad_tangent(*primals), slope * tangents[0]


def by_rule_of(rule, operands):
    where = f"tests/diagnose/diagnose_numbers.py:{line_of(rule, '# the rule')}"
    return f"into NaN or inf, since its div at {operands} ({where}) is not finite"


@sick("vjp", "bad_rule", ONES, says=(by_rule_of(bad_backward, "0.8415, 0"),
      "cg.check_grads compares it with numerical slopes"))  # fmt: skip
def rule_of_the_users(x):
    return jnp.sum(bad_rule(2 * x))  # here


@sick("vjp", "bad_tangent", ONES, array([[1.0]] * 3), step=2,
      good=(array([3.0] * 3), array([[1.0]] * 3)),
      says=by_rule_of(rule_of_bad_tangent, "1, 0"))  # fmt: skip
def rule_of_a_tangent_in_a_scan(x, steps):
    step = lambda total, k: (total + jnp.sum(bad_tangent(2 * k * x)), None)  # noqa: E731
    return jax.lax.scan(step, 0.0, steps)[0]


# -- What the numbers tell.


@sick("vjp", "div", 1e-30, says="; the backward pass computes 1 / x ** 2, which overflows")
def division(x):
    return 1 / x  # here


@sick("vjp", "atan2", 0.0, says="; the backward pass computes 0 / 0")
def angle(x):
    return jnp.arctan2(x, x)  # here


@sick("value", "log", array(-0.3), others=None, never=["jnp.where", "log_softmax"])
@sick(
    "value", "log", array(-0.3, LOW), others=None, never=["jnp.where", "65504"], name="log_in_half"
)
def logarithm_of_a_negative_number(x):
    return jnp.log(x).astype(jnp.float32)  # here


@sick("vjp", "eigh", array(np.eye(3)), says="two of them are equal: ")
def equal_eigenvalues(a):
    return jnp.sum(jnp.linalg.eigh(a)[1] * jnp.arange(9.0).reshape(3, 3))  # here


@sick(
    "value", None, array(np.ones((2, 2))), says=["solve", "the matrix may be singular"], others=None
)
def singular_matrix(a):
    return jnp.linalg.solve(a, jnp.ones(2)).sum()


TABLE = {"table": array(np.ones((10, 4))), "scale": array(np.ones((1, 1, 4)))}


def looked_up(params, ids, keep):
    with jax.named_scope("embed"):
        rows = jnp.take(params["table"], ids, axis=0)  # here
    return jnp.sum(jnp.where(keep, rows * params["scale"], 0.0))


for _bad, _index in ((10, 10), (-11, -1)):  # a negative one counts from the end
    _ids = np.array([[3, 9], [_bad, 0]])
    _texts = f"gather of index {_index} on axis 0 of float32[10, 4]", "correct the indices"
    for _keep, _finding in ((True, ("value", "gather")), (False, ("vjp", "mul"))):
        _line = line_of(looked_up, "# here" if _keep else "jnp.sum")
        _mask = array((_ids != _bad)[..., None] | _keep, bool)
        sick(*_finding, TABLE, _ids, _mask, says=_texts, line=_line, others=None,
             name=f"index_{_bad}_{_finding[0]}")(looked_up)  # fmt: skip


def attention(params, x, mask, keep):
    with jax.named_scope("attention"):
        q, k, v = (x @ params[name] for name in "qkv")
        scores = jnp.where(mask, q @ k.swapaxes(-1, -2), -INF)
        out = jax.nn.softmax(scores) @ v
    return jnp.sum(jnp.where(keep, out, 0.0) ** 2)


MASK = np.tril(np.ones((2, 4, 4), bool)) & (np.arange(4) > 0)  # of the first row nothing is left
sick(
    "vjp", None, dict(zip("qkv", map(array, np.asarray(normal(3, 4, 4))), strict=True)),
    normal(2, 4, 4), MASK,
    MASK.any(-1, keepdims=True), module="attention",
    says=[f"in softmax ({FILE}:{line_of(attention, 'softmax')})", "select a finite mask",
          "a row whose elements are all masked holds only -inf",
          "; the softmax is over axis 2 of float32[2, 4, 4]"],
)(attention)  # fmt: skip


# -- Overflows: the operation, and what makes NaN of its inf.


def overflows(operation, then, **options):
    texts = [f"and {then} (", "turns its inf into NaN"]
    return sick("value", operation, PAIR, says=texts, others=None, **options)


@overflows("exp", "sub")
def difference(x):
    first = jnp.exp(x)  # here
    second = jnp.exp(2 * x)
    return jnp.sum(first - second)


@overflows("integer_pow", "sub")
def centred_in_half(x):
    x = (3 * x).astype(LOW) ** 2  # here
    return jnp.sum((x - x.mean()).astype(jnp.float32))


@overflows("dot_general", "sin")
def sine_of_a_product(x):
    return jnp.sum(jnp.sin((1e30 * x)[None] @ (1e30 * x)[:, None]))  # here


@overflows("div", "mul")
def pole(x):
    return jnp.sum(0 * (1 / (x - 100)))  # here


@overflows("log", "mul")
def entropy(x):
    return jnp.sum((x - x) * jnp.log(x - x))  # here


@overflows("exp", "div", step=2)
def ratio_in_a_scan(x):
    def step(h, x):
        h = h * jnp.exp(x)  # here
        return h / (1 + h), None

    return jax.lax.scan(step, 1.0, jnp.stack([x[0], x[0], x[1]]))[0]


@sick("value", "exp", PAIR, name="difference_without_another_finding")
def difference_of_equals(x):
    return jnp.sum(jnp.exp(x) - jnp.exp(x))


@sick("value", "log", PAIR)
def product_of_a_bad_value(x):
    return jnp.sum(x) * jnp.sum(jnp.log(jax.lax.stop_gradient(x) - 200))  # here


@sick("value", "sub", array(np.ones(2)), never="turns its inf")
def mask_by_a_logarithm(x):
    return jax.nn.softmax(x + jnp.log(jnp.zeros(2))).sum()  # here


@sick("value", "sub", array(np.ones(2)), never="turns its inf")
def masked_throughout(x):
    return jax.nn.softmax(jnp.where(x > 1e9, x, -INF)).sum()  # here


# -- Values that are hidden, whose derivative is not.


BOUNDED = {
    "minimum": lambda r: jnp.minimum(r, 2.0),
    "where": lambda r: jnp.where(r > 2, 2.0, r),
    "clip": lambda r: jnp.clip(r, 0.0, 2.0),
    "division": lambda r: 1 / (1 + r),
    "tanh": jnp.tanh,
    "twice": lambda r: jnp.minimum(jnp.clip(r, 0.8, 9.0), r),
}


def hidden_by(name, bounded, dtype):
    def loss(x):
        return jnp.sum(bounded(jnp.exp(x))).astype(jnp.float32)  # here

    x = array([0.5, 300.0, 1.0], dtype)
    texts = ["the VJP of exp at 300", BOUND, "since its value is not finite there"]
    good = (array([0.5, 2.0, 1.0], dtype),)
    register = sick("vjp", "exp", x, name=f"hidden_by_{name}", says=texts, good=good)
    register(jax.jit(loss) if name in ("where", "division") else loss)


for _row, _dtype in zip(BOUNDED.items(), (jnp.float32, LOW, jnp.bfloat16) * 2, strict=True):
    hidden_by(*_row, _dtype)


@sick("vjp", "mul", array(np.ones(2)), says=f"reads the result of log at -1 ({FILE}:")
def read_by_a_vjp(x):
    logs = jnp.log(-x)
    return jnp.sum(jnp.where(x < 0, logs * x, x))  # here


DELAYS = {"tau": array(0.8), "size": array(-2.0)}


@sick(
    "vjp", "mul", DELAYS, array(np.linspace(-4000.0, 500.0, 10)), others=None,
    says=["since it reads the result of exp at ", ", which is not finite", BOUND,
          "jnp.where(ok, jnp.exp(jnp.where(ok, x, 0.0)), 0.0)"],
)  # fmt: skip
def delays(params, times):
    decay = jnp.exp(-times / 10 ** params["tau"])
    return jnp.sum(jnp.where(times > 0, 10 ** params["size"] * decay, 0.0) ** 2)  # here


def double_where_in_a_scan(of, bad):
    def step(total, x):
        return total + jnp.where(x != bad, of(x), 0.0), None

    return lambda x: jax.lax.scan(step, 0.0, x)[0]


for _operation, _of, _bad, _advice in (
    ("div", lambda x: 1 / x, 0.0, MASKED),
    ("asin", jnp.arcsin, 2.0, INSIDE),
    ("sinh", jnp.sinh, 200.0, BOUND),
):
    sick(
        "vjp", _operation, array([1.0, _bad]), step=1, name=f"hidden_{_operation}",
        says=["since its value is not finite there", _advice],
    )(double_where_in_a_scan(_of, _bad))  # fmt: skip


# -- Cotangents that overflow.


FLAT = array(np.full(3, 1e-3), LOW)


def half_of(says, kind="vjp"):
    texts = f"{says} exceeds 65504, the largest float16; multiply the loss by a smaller scale"
    return sick(kind, None, FLAT, 1.0, says=texts, good=(FLAT, 1e-4))


@half_of("the cotangent 1e+05")
@jax.jit
def cast(x, scale):
    return jnp.sum(x.astype(jnp.float32)) * 1e5 * scale


@half_of("a cotangent")
def multiplied(x, scale):
    return jnp.sum((x * LOW(300)).astype(jnp.float32)) * 300 * scale


@half_of("a cotangent", "sum")
def used_twice(x, scale):
    y = x * 1
    return (y.astype(jnp.float32).sum() + (2 * y).astype(jnp.float32).sum()) * 3e4 * scale


HEALTHY["cast_of_bfloat16"] = lambda: (cast, (FLAT.astype(jnp.bfloat16), 1.0))


@sick("vjp", "mul", 1e-10, says="a cotangent exceeds 3.4028e+38, the largest float32")
def factors_that_the_compiler_joins(x):
    return x * 1e30 * 1e10  # here


def twice(y):
    return 2e38 * jnp.sin(y) + 2e38 * jnp.tan(y)


def summed(operation, says="", **expected):
    texts = ["the cotangents of its uses are finite, but their sum is not", says]
    return sick("sum", operation, array(0.0), says=texts, **expected)


@summed("argument", "args[0] is used")
def sums_in_a_scan(x):
    return jax.lax.scan(lambda t, _: (t + 1e38 * jnp.sin(x), None), 0.0, None, length=5)[0]


@summed("argument", "args[0] is used")
def uses_of_an_argument(x):
    return twice(x)


@summed("argument", "args[0] is used")
def uses_in_a_branch(x):
    return jax.lax.cond(x < 1, twice, lambda x: x, x)


@summed("mul")
@jax.jit
def uses_in_a_jit(x):
    y = 2.0 * x  # here
    return 2e38 * jnp.sin(y) + jax.jit(jnp.tan)(y) * 2e38


@summed("scan", step=0)
def uses_of_what_a_scan_carries(x):
    return jax.lax.scan(lambda c, _: (twice(c), None), x, None, length=1)[0]


@summed("sub")
def uses_behind_a_rule(x):
    return twice(jax.nn.relu(x + 1.0) - (2.0 * x + 1))  # here


@summed("add")
def uses_of_a_sum_and_of_its_part(x):
    part = jnp.sinh(x)
    y = part + jnp.arctan(2.0 * x)  # here
    return twice(y) + part


@summed("add", step=1)
def uses_of_a_sum_in_a_scan(x):
    def step(total, _):
        y = jnp.sinh(x) + jnp.arctan(2.0 * x)  # here
        return total + twice(y), None

    return jax.lax.scan(step, 0.0, None, length=2)[0]


# -- Beside what has no derivative.


def loop(y):
    return jax.lax.while_loop(lambda c: jnp.sum(c) < 100, lambda c: 2 * c, y)


def gamma(x, data):
    noise = jax.random.gamma(jax.random.key(0), 1 + jnp.abs(data))
    return jnp.sum(jnp.sqrt(x) * jax.lax.stop_gradient(noise))


NOT_DIFFERENTIATED = {
    "a_loop_on_data": lambda x, data: jnp.sum(jnp.sqrt(x) * loop(3 * data)),
    "a_loop_on_a_stopped_gradient": lambda x, data: jnp.sum(
        jnp.sqrt(x) * loop(jax.lax.stop_gradient(3 + x))
    ),
    "no_rule": lambda x, data: jnp.sum(jnp.sqrt(x) * jnp.nextafter(2 * data, 3 * data)),
    "a_sampler": gamma,
}
for _name, _loss in NOT_DIFFERENTIATED.items():
    sick("vjp", "sqrt", array([1.0, 0.0, 1.0]), ONES, name=f"beside_{_name}", good=(ONES, ONES))(
        _loss
    )


# -- Callbacks that raise, as a check or a solver does.


class SolverError(RuntimeError):
    """Raised by the callback."""


def refuse(a):
    if not np.all(np.isfinite(a)) or np.linalg.matrix_rank(a) < 2:
        raise SolverError("The matrix is singular.\nMore of it. And more")
    return np.True_


def solve(a):
    """A solver that raises from a callback: of a singular matrix, and of one with NaN."""
    result, fixed = jax.ShapeDtypeStruct((), bool), jax.lax.stop_gradient(a)
    fine = jax.pure_callback(refuse, result, fixed, vmap_method="sequential")  # here
    return jnp.where(fine, jnp.linalg.solve(a, jnp.ones(2)).sum(), 0.0)


FINE = array([n * np.eye(2) for n in (1, 2, 3)])
SINGULAR = array([np.eye(2), np.ones((2, 2)), 3 * np.eye(2)])


def raises(operation="pure_callback", at=solve, says="its operands are finite", **options):
    texts = ["raises SolverError: The matrix is singular", says]
    return sick("raises", operation, SINGULAR, at=at, says=texts, never=["More", "Traceback"],
                good=(FINE,), **options)  # fmt: skip


@raises(module="fit")
def solver(a):
    with jax.named_scope("fit"):
        return solve(a[1])


raises(module="fit", name="solver_in_a_jit")(jax.jit(solver))


@raises(step=1)
def solver_in_a_scan(a):
    return jax.lax.scan(lambda total, row: (total + solve(row), row), 0.0, a)[0]


@raises(step=1)  # the first that raises comes before another one
def solver_in_a_reversed_scan(a):
    a = jnp.concatenate([a[1:2], a[1:]])
    return jax.lax.scan(lambda total, row: (total + solve(row), None), 0.0, a, reverse=True)[0]


@raises()
def solver_in_a_branch(a):
    return jax.lax.cond(a[0, 0, 0] > 0, lambda a: solve(a[1]), lambda a: a[1].sum(), a)


@raises()
def solver_in_a_loop(a):
    def body(state):
        return state[0] + 1, state[1] + jax.lax.stop_gradient(solve(a[state[0]]))

    count, total = jax.lax.while_loop(lambda state: state[0] < 3, body, (0, 0.0))
    return total + a.sum()


@jax.custom_vjp
def by_rule(a):
    return a.sum()


by_rule.defvjp(lambda a: (a.sum(), a), lambda a, g: (g * a * solve(a),))


@raises("by_rule", None, says="")
def solver_in_a_rule(a):
    return by_rule(a[1])  # here


@sick("raises", None, FINE, says="its operands are finite")
def raised_in_the_matrix_of_a_linear_solve(a):
    def matvec(v):
        refused = lambda v: refuse(np.zeros((2, 2))) * v  # noqa: E731
        return jax.pure_callback(refused, jax.ShapeDtypeStruct(v.shape, v.dtype), v)

    fixed = jax.lax.stop_gradient(a[0, 0])
    solution = jax.lax.custom_linear_solve(matvec, fixed, lambda f, b: f(b))  # here
    return solution.sum() + a.sum()


@sick("raises", None, FINE, says="its operands are finite")
def raised_by_jax_of_another_shape(a):
    x = a[0, 0, 0]
    called = jax.pure_callback(lambda x: np.ones(3), jax.ShapeDtypeStruct((), a.dtype), x)  # here
    return jax.lax.stop_gradient(called) + a.sum()


@sick("raises", None, FINE, says="its operands are finite")
def first_of_two_callbacks(a):
    result, fixed = jax.ShapeDtypeStruct((), bool), jax.lax.stop_gradient(a[1])
    first = jax.pure_callback(lambda a: refuse(0 * a), result, fixed)  # here
    return jnp.where(first & jax.pure_callback(lambda a: 1 / 0, result, fixed), 0.0, a.sum())


# -- What ends finite.


def where(ok, of, x, other):
    """The double `where`, and the single one if the other number is no better."""
    return jnp.sum(jnp.where(ok, of(jnp.where(ok, x, other)), 0.0))


def infinities(x):
    masks = jax.nn.softmax(x + jnp.log(jnp.array([0.0, 1.0]))) + jnp.minimum(x, INF)
    best = jnp.max(jnp.where(x > 1, -INF, x))
    return masks.sum() + best + jnp.sum(1 / (1 + jnp.exp(100 * jax.lax.stop_gradient(x))))


FINITE = {
    "double_where": lambda x: where(x > 0, jnp.sqrt, x, 1.0),
    "mask": lambda x: jnp.sum(jax.nn.softmax(jnp.where(x > 0, x, -INF)) ** 2),
    "gradient_that_a_mask_drops": lambda x: where(x > 0, jnp.sqrt, x, 0.0),
    "stopped": lambda x: jnp.sum(jnp.floor(jnp.sqrt(x)) + x + jax.lax.stop_gradient(jnp.sqrt(x))),
    "rules": lambda x: jnp.sum(jax.nn.relu(x) + jax.nn.silu(x)) + jax.nn.logsumexp(-100.0 * x),
    "infinities": lambda x: infinities(x[::2]),
    "scan_without_steps": lambda x: jax.lax.scan(
        lambda c, y: (c * y, None), x, jnp.ones((0, 3))
    )[0].sum(),
}  # fmt: skip
HEALTHY |= {name: (lambda loss=loss: (loss, (NUMBERS,))) for name, loss in FINITE.items()}
HEALTHY["mask_that_is_an_argument"] = lambda: (
    mask_that_is_an_argument, (jnp.array([0.3, 0.5, 0.7]), jnp.array([0.0, 0.0, -INF]))
)  # fmt: skip


@jax.custom_vjp
def good_rule(x):
    return jnp.sqrt(x)


good_rule.defvjp(lambda x: (jnp.sqrt(x), x), lambda x, g: (g * 0.5,))


def of_a_callback(x):
    constant = jax.pure_callback(lambda: np.float32(1), jax.ShapeDtypeStruct((), jnp.float32))
    return x + constant


NOTED |= {
    "rule": (lambda: (lambda x: jnp.sum(good_rule(x)), (jnp.zeros(3),)),
             "good_rule has a custom VJP"),
    "callback": (lambda: (of_a_callback, (1.0,)), "pure_callback is measured as one operation"),
}  # fmt: skip
