"""The gradient checker beside its peers: seconds and evaluations, first and second call.

    python benchmarks/check_grads.py [--large] [--only NAME]

Peers that are not installed are named as not run. torch's slow mode evaluates the function twice
for each input element, so it does not get the large model.
"""

import argparse
import importlib.util
import time

import jax
import jax.numpy as jnp
import jax.test_util
import numpy as np

import clipgrad as cg

SIZES = {"mlp": (64, 64, 10), "large mlp": (700, 700, 700, 10)}


def normal(*shape):
    rng = np.random.default_rng(len(shape))
    return rng.normal(size=shape) / np.sqrt(shape[0] if len(shape) == 2 else 1)


def network(xp, like, widths):
    batch = normal(32, widths[0])
    weights = [normal(a, b) for a, b in zip(widths[:-1], widths[1:], strict=True)]

    def model(*weights):
        x = like(weights[0], batch)
        for weight in weights[:-1]:
            x = xp.tanh(x @ weight)
        return x @ weights[-1]

    return model, weights


def problems(xp, like, convolve, large):
    """Name to (function, arrays to differentiate by)."""
    names = [name for name in SIZES if large or name == "mlp"]
    found = {name: network(xp, like, SIZES[name]) for name in names}
    found["elementwise"] = (lambda x: xp.sin(x) * xp.exp(-x * x), [normal(10_000)])
    found["convolution"] = (convolve, [normal(2, 4, 24, 24), normal(8, 4, 3, 3)])
    return found


def show(name, peer, run):
    for call in ("first", "second"):
        started = time.perf_counter()
        try:
            count = run()
        except Exception as error:
            print(f"{name:12} {peer:30} {type(error).__name__}: {str(error)[:60]}", flush=True)
            return
        seconds = time.perf_counter() - started
        print(f"{name:12} {peer:30} {call:6} {seconds:8.2f} s {count:8} evaluations", flush=True)


def calls_of(check, function):
    calls = []

    def counted(*args):
        calls.append(1)
        return function(*args)

    check(counted)
    return len(calls)


def jax_checkers(name, function, arrays):
    arrays = tuple(jnp.asarray(array, jnp.float32) for array in arrays)
    for mode in ("auto", "full"):
        if mode == "auto" or name != "large mlp":
            check = lambda mode=mode: cg.check_grads(function, arrays, mode=mode)  # noqa: E731
            show(name, f"clipgrad, {mode}", lambda check=check: check().evaluations)
    show(name, "clipgrad, one wrong element", lambda: one_wrong(function, arrays))
    loose = {"rtol": 0.1, "atol": 0.1}
    peers = {
        "jax.test_util.check_grads": lambda f: jax.test_util.check_grads(
            f, arrays, 1, modes=("rev",), **loose
        )
    }
    if importlib.util.find_spec("chex"):
        import chex

        peers["chex.assert_numerical_grads"] = lambda f: chex.assert_numerical_grads(
            f, arrays, 1, **loose
        )
    else:
        print("chex is not installed: chex.assert_numerical_grads was not run")
    for peer, check in peers.items():
        show(name, peer, lambda check=check: calls_of(check, function))


def one_wrong(function, arrays):
    """Halve one element of the gradient and have it named."""

    def backward(residual, g):
        first, *rest = jax.vjp(function, *residual)[1](g)
        return first.at[(-1,) * first.ndim].multiply(0.5), *rest

    wrong = jax.custom_vjp(lambda *args: function(*args))
    wrong.defvjp(lambda *args: (function(*args), args), backward)
    report = cg.check_grads(wrong, arrays, raise_on_failure=False)
    last = str([size - 1 for size in arrays[0].shape])
    if report.failures[0].where != f"args[0]{last}":
        raise AssertionError(f"named {report.failures[0].where}")
    return report.evaluations


def torch_checkers(name, function, arrays):
    import torch

    tensors = [torch.tensor(array, dtype=torch.float64, requires_grad=True) for array in arrays]
    for fast in (False, True):
        check = lambda f, fast=fast: torch.autograd.gradcheck(f, tensors, fast_mode=fast)  # noqa: E731
        mode = "fast" if fast else "slow"
        show(name, f"torch gradcheck, {mode}", lambda check=check: calls_of(check, function))


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--large", action="store_true", help="a model of a million parameters too")
    parser.add_argument("--only", help="one problem")
    options = parser.parse_args()

    def like(array, values):
        return jnp.asarray(values, array.dtype)

    def convolve(x, k):
        return jax.lax.conv(x, k, (1, 1), "SAME")

    for name, (function, arrays) in problems(jnp, like, convolve, options.large).items():
        if options.only in (None, name):
            jax_checkers(name, function, arrays)
    if not importlib.util.find_spec("torch"):
        print("torch is not installed: torch.autograd.gradcheck was not run")
        return
    import torch

    def torch_convolve(x, k):
        return torch.nn.functional.conv2d(x, k, padding=1)

    torch_like = torch.Tensor.new_tensor
    for name, (function, arrays) in problems(torch, torch_like, torch_convolve, False).items():
        if options.only in (None, name):
            torch_checkers(name, function, arrays)


if __name__ == "__main__":
    main()
