"""The gradient checker beside its peers.

All must accept the right gradient. Which of them find an element that is half of what it should
be is not a matter of time, and is recorded as well.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jax.test_util
import numpy as np

import clipgrad as cg
from benchmarks import timing
from benchmarks.rows import OURS, PEER, Absent, Row, Scale, Side, optional

TITLE = "Checking a gradient"
# A random direction in float32 is often off by more than the defaults of these checkers.
LOOSE = {"rtol": 0.1, "atol": 0.1, "modes": ("rev",)}


class Problem(NamedTuple):
    """A function of the arrays to differentiate by, for JAX and for torch."""

    function: Callable[[Any], Callable]  # of `xp`
    arrays: list[np.ndarray]
    too_slow: str = ""  # why torch's slow mode, which takes each element by itself, is not run


class JaxOps:
    """What the problems use, in JAX."""

    sin, exp, tanh = jnp.sin, jnp.exp, jnp.tanh

    @staticmethod
    def like(array: jax.Array, values: np.ndarray) -> jax.Array:
        """These values in the type of the array."""
        return jnp.asarray(values, array.dtype)

    @staticmethod
    def convolve(x: jax.Array, k: jax.Array) -> jax.Array:
        """Of the same size."""
        return jax.lax.conv(x, k, (1, 1), "SAME")


class TorchOps:
    """What the problems use, in torch."""

    def __init__(self, torch: Any) -> None:
        self.sin, self.exp, self.tanh = torch.sin, torch.exp, torch.tanh
        self.like = torch.Tensor.new_tensor
        self.convolve = lambda x, k: torch.nn.functional.conv2d(x, k, padding=1)


def normal(*shape: int) -> np.ndarray:
    rng = np.random.default_rng(len(shape))
    return rng.normal(size=shape) / np.sqrt(shape[0] if len(shape) == 2 else 1)


def network(widths: list[int], too_slow: str = "") -> Problem:
    batch = normal(32, widths[0])

    def of(xp: Any) -> Callable:
        def model(*weights: Any) -> Any:
            x = xp.like(weights[0], batch)
            for weight in weights[:-1]:
                x = xp.tanh(x @ weight)
            return x @ weights[-1]

        return model

    return Problem(
        of, [normal(a, b) for a, b in zip(widths[:-1], widths[1:], strict=True)], too_slow
    )


def problems(scale: Scale) -> dict[str, Problem]:
    large = scale(700, 4)
    kernels = [normal(2, 4, scale(12, 4), scale(12, 4)), normal(8, 4, 3, 3)]
    return {
        "MLP of 5k": network([scale(64, 4), scale(64, 4), 10]),
        "10,000 elements": Problem(
            lambda xp: lambda x: xp.sin(x) * xp.exp(-x * x),
            [normal(scale(10_000, 4))],
            "it stores 10,000 x 10,000 slopes: over 100 s and 5 GB",
        ),
        "convolution 3x3": Problem(lambda xp: xp.convolve, kernels),
        "MLP of 1M": network([large, large, large, 10], "it evaluates twice for each weight"),
    }


def side(
    name: str, kind: str, check: Callable, right: Callable, wrong: Callable | None = None
) -> Side:
    """A checker; ``check(function)`` returns after it accepts, and raises otherwise.

    Each time it gets a function that it has not seen, as a user's is. Without a wrong function, for
    a checker that takes too long, its only run is also the one that is timed.
    """
    facts: dict[str, Any] = {}
    calls: list[int] = []
    known: list[dict[str, float]] = []

    def counted(*args: Any) -> Any:
        calls.append(1)
        return right(*args)

    def verdict() -> np.ndarray:
        taken = {"run": timing.seconds(lambda: check(counted))}
        facts["calls of the function"] = len(calls)
        if wrong is None:
            known.append(taken)
        else:
            facts["finds a halved element"] = not accepts(check, wrong)
        return np.ones(1)

    def sample() -> dict[str, float]:
        if known:
            return known[0]
        return {"run": timing.seconds(lambda: check(lambda *args: right(*args)))}

    return Side(name, kind, sample, verdict, facts)


def accepts(check: Callable, function: Callable) -> bool:
    """Whether a checker finds nothing wrong."""
    try:
        check(function)
    except Exception as error:  # GradcheckError of torch is a RuntimeError
        if "radient" in str(error) or "acobian" in str(error) or isinstance(error, AssertionError):
            return False
        raise
    return True


def halved(function: Callable) -> Callable:
    """The function with half of what the last element of its first gradient should be."""

    def backward(residual: tuple, g: Any) -> tuple:
        first, *rest = jax.vjp(function, *residual)[1](g)
        return first.at[(-1,) * first.ndim].multiply(0.5), *rest

    wrong = jax.custom_vjp(lambda *args: function(*args))
    wrong.defvjp(lambda *args: (function(*args), args), backward)
    return wrong


def torch_halved(torch: Any, function: Callable) -> Callable:
    """The same in torch, by a hook on the first argument."""

    def wrong(first: Any, *rest: Any) -> Any:
        mask = torch.ones_like(first)
        mask[(-1,) * first.ndim] = 0.5
        scaled = first * mask + (first * (1 - mask)).detach()
        return function(scaled, *rest)

    return wrong


def jax_sides(problem: Problem) -> list[Side | Absent]:
    arrays = tuple(jnp.asarray(array, jnp.float32) for array in problem.arrays)
    right = problem.function(JaxOps)
    wrong = halved(right)

    def of_jax(function: Callable) -> None:
        jax.test_util.check_grads(function, arrays, 1, **LOOSE)

    def of_chex(chex: Any) -> Side:
        def check(function: Callable) -> None:
            chex.assert_numerical_grads(function, arrays, 1, **LOOSE)

        return side("chex.assert_numerical_grads", PEER, check, right, wrong)

    return [
        side("clipgrad", OURS, lambda function: cg.check_grads(function, arrays), right, wrong),
        side("jax.test_util.check_grads", PEER, of_jax, right, wrong),
        optional("chex.assert_numerical_grads", "chex", of_chex),
    ]


def torch_side(problem: Problem, fast: bool) -> Side | Absent:
    name = f"torch gradcheck, {'fast' if fast else 'slow'}"
    if problem.too_slow and not fast:
        return Absent(name, problem.too_slow)

    def make(torch: Any) -> Side:
        tensors = [torch.tensor(a, dtype=torch.float64, requires_grad=True) for a in problem.arrays]
        right = problem.function(TorchOps(torch))

        def check(function: Callable) -> None:
            torch.autograd.gradcheck(function, tensors, fast_mode=fast)

        return side(name, PEER, check, right, torch_halved(torch, right) if fast else None)

    return optional(name, "torch", make)


def rows(scale: Scale) -> list[Row]:
    """Each problem."""

    def sides(problem: Problem) -> list[Side | Absent]:
        return [*jax_sides(problem), torch_side(problem, True), torch_side(problem, False)]

    return [
        Row(name, lambda p=problem: sides(p), budget=10.0)
        for name, problem in problems(scale).items()
    ]
