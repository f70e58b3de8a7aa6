"""Scores a checker of gradients on programs that nobody had shown it.

    python -m benchmarks.held_out {clipgrad,jax,torch} [--dtype float32] [--only NAME ...]
        [--programs {programs,lazy,sequences}]

Each program of `held_out_programs` is judged once, with the default settings of the checker. The
verdicts and the CPU seconds of each go to benchmarks/held_out.json, beside those of other
checkers; those of the two later lists, `held_out_lazy` and `held_out_sequences`, go to files of
their names. The programs of a sequence are judged one after the other from both ends, and nothing
is forgotten in between.

Those of clipgrad are kept as "clipgrad today"; its first ones, from before anything was mended,
stay. The gradients of JAX are PyTorch's for its checker by a ``torch.autograd.Function``,
which can't be differentiated twice: programs of second order are left out there.
"""

import argparse
import json
import pathlib
import signal
import time
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import held_out_lazy, held_out_sequences
from benchmarks.held_out_programs import CASES, SPECIAL, Case

RESULTS = pathlib.Path(__file__).with_suffix(".json")
PASSES, FAILS, LEFT_OUT = "passes", "fails", "left out"
LONGEST = 360  # seconds for one program, after which there is no verdict


def is_float(x: Any) -> bool:
    """Whether a leaf is differentiated."""
    dtype = getattr(x, "dtype", None)
    return dtype is not None and jnp.issubdtype(dtype, jnp.inexact)


def in_float64(x: Any) -> Any:
    """A leaf with 64 bits for each real number."""
    if not is_float(x):
        return x
    return np.asarray(x, np.complex128 if jnp.iscomplexobj(x) else np.float64)


def of_floats(case: Case, args: tuple) -> tuple[Callable[..., list], list]:
    """The function of the leaves that are differentiated, and these."""
    leaves, structure = jax.tree.flatten(tuple(args[i] for i in case.argnums))
    places = [i for i, leaf in enumerate(leaves) if is_float(leaf)]

    def fun(*floats: Any) -> list:
        whole = list(leaves)
        for i, value in zip(places, floats, strict=True):
            whole[i] = value
        given = dict(zip(case.argnums, structure.unflatten(whole), strict=True))
        outputs = case.fun(*(given.get(i, arg) for i, arg in enumerate(args)))
        return [y for y in jax.tree.leaves(outputs) if is_float(y)]

    return fun, [leaves[i] for i in places]


def by_clipgrad(case: Case, args: tuple) -> str:
    """`clipgrad.check_grads`."""
    import clipgrad as cg

    report = cg.check_grads(
        case.fun, args, wrt=case.argnums, order=case.order, raise_on_failure=False
    )
    return PASSES if report.ok else FAILS


def by_jax(case: Case, args: tuple) -> str:
    """`jax.test_util.check_grads` in reverse mode."""
    from jax.test_util import check_grads

    fun, floats = of_floats(case, args)
    try:
        check_grads(fun, tuple(map(jnp.asarray, floats)), case.order, modes=("rev",))
    except AssertionError:
        return FAILS
    return PASSES


def by_torch(case: Case, args: tuple) -> str:
    """`torch.autograd.gradcheck`, whose complex gradients are the conjugates of JAX's."""
    import torch
    from torch.autograd.gradcheck import GradcheckError

    if case.order == 2:
        return LEFT_OUT
    fun, floats = of_floats(case, args)
    values = jax.jit(fun)
    pulled_back = jax.jit(lambda xs, cotangents: jax.vjp(fun, *xs)[1](cotangents))

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *xs):
            ctx.xs = [jnp.asarray(x.detach().numpy()) for x in xs]
            ctx.ys = values(*ctx.xs)
            return tuple(torch.from_numpy(np.array(y)) for y in ctx.ys)

        @staticmethod
        def backward(ctx, *cotangents):
            given = [np.array(c.detach().resolve_conj().numpy()) for c in cotangents]
            pairs = zip(given, ctx.ys, strict=True)
            found = pulled_back(ctx.xs, [jnp.conj(jnp.asarray(c, y.dtype)) for c, y in pairs])
            return tuple(torch.from_numpy(np.array(jnp.conj(g))) for g in found)

    try:
        torch.autograd.gradcheck(
            Function.apply, [torch.from_numpy(np.array(x)).requires_grad_() for x in floats]
        )
    except GradcheckError:
        return FAILS
    return PASSES


CHECKERS = {"clipgrad": by_clipgrad, "jax": by_jax, "torch": by_torch}


class LateError(Exception):
    """A program took too long."""


def judged(build: Callable[[], Case], checker: str, dtype: str) -> dict[str, Any]:
    """The verdict on one program."""
    case, started = build(), time.process_time()
    args = jax.tree.map(in_float64, case.args) if dtype == "float64" else case.args
    signal.alarm(LONGEST)
    try:
        verdict = CHECKERS[checker](case, args)
    except Exception as error:  # noqa: BLE001  an error of any kind is a verdict too
        verdict = f"raises {type(error).__name__}"
    signal.alarm(0)
    seconds = round(time.process_time() - started, 2)
    return {"wrong": case.wrong, "verdict": verdict, "seconds": seconds}


def judged_in_sequence(members: list, checker: str, dtype: str) -> dict[str, dict[str, Any]]:
    """The verdicts on programs that are judged one after the other."""
    found = {}
    for member in members:
        args, started = member.args, time.process_time()
        if dtype == "float64":
            args = jax.tree.map(_float32_in_float64, args)
        try:
            if member.before is not None:
                member.before()
            verdict = _verdict_on_member(member, checker, args)
        except Exception as error:  # noqa: BLE001  an error of any kind is a verdict too
            verdict = f"raises {type(error).__name__}"
        seconds = round(time.process_time() - started, 2)
        found[member.name] = {"wrong": member.wrong, "verdict": verdict, "seconds": seconds}
    return found


def _float32_in_float64(x: Any) -> Any:
    return in_float64(x) if getattr(x, "dtype", None) == np.float32 else x


def _verdict_on_member(member: Any, checker: str, args: tuple) -> str:
    import clipgrad as cg

    if checker != "clipgrad":
        if member.slopes is not None or set(member.options) - {"skip"}:
            return LEFT_OUT
        places = tuple(range(len(args)))
        return CHECKERS[checker](Case(member.name, member.wrong, member.fun, args, places), args)
    if member.slopes is not None:
        found = np.asarray(cg.numerical_grad(member.fun, args, wrt=0))
        return PASSES if np.allclose(found, member.slopes, rtol=1e-3) else FAILS
    report = cg.check_grads(member.fun, args, raise_on_failure=False, **member.options)
    return PASSES if report.ok else FAILS


def sequences(checker: str, dtype: str, only: list[str]) -> dict[str, dict[str, Any]]:
    """The verdicts on all sequences, each from its beginning and from its end."""
    verdicts = {}
    for make in held_out_sequences.SEQUENCES:
        if not any(part in make.__name__ for part in only):
            continue
        for end, members in (("on", make()), ("back", make()[::-1])):
            for name, verdict in judged_in_sequence(members, checker, dtype).items():
                verdicts[f"{make.__name__}/{name}/{end}"] = verdict
                print(make.__name__, name, end, verdict, flush=True)
    return verdicts


def score(verdicts: dict[str, Any]) -> dict[str, int]:
    """How many wrong programs were missed, and how many right ones were not accepted.

    Of those right ones that a checker may not be able to tell, ``unclear`` were not accepted.
    """
    seen = {name: v for name, v in verdicts.items() if v["verdict"] != LEFT_OUT}
    wrong = [v["verdict"] for v in seen.values() if v["wrong"]]
    right = [v["verdict"] for name, v in seen.items() if not v["wrong"] and name not in SPECIAL]
    return {
        "wrong": len(wrong),
        "missed": wrong.count(PASSES),
        "raised on wrong": sum(v.startswith("raises") for v in wrong),
        "right": len(right),
        "refused": right.count(FAILS),
        "raised on right": sum(v.startswith("raises") for v in right),
        "unclear": sum(seen[name]["verdict"] != PASSES for name in SPECIAL if name in seen),
    }


def main() -> None:
    """Judges the programs and keeps the verdicts."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("checker", choices=CHECKERS)
    parser.add_argument("--dtype", choices=["float32", "float64"], default="float32")
    lists = ["programs", "lazy", "sequences"]
    parser.add_argument("--programs", choices=lists, default="programs")
    parser.add_argument("--only", nargs="+", default=[""], help="parts of names")
    options = parser.parse_args()
    jax.config.update("jax_enable_x64", options.dtype == "float64")
    jax.config.update("jax_num_cpu_devices", 4)  # for the sequences on meshes
    warnings.simplefilter("ignore")

    def late(*_: Any) -> None:
        raise LateError

    signal.signal(signal.SIGALRM, late)
    if options.programs == "sequences":
        verdicts = sequences(options.checker, options.dtype, options.only)
    else:
        builds = held_out_lazy.CASES if options.programs == "lazy" else CASES
        verdicts = {}
        for build in builds:
            if any(part in build.__name__ for part in options.only):
                verdicts[build.__name__] = judged(build, options.checker, options.dtype)
                print(build.__name__, verdicts[build.__name__], flush=True)
                jax.clear_caches()
    print(score(verdicts))
    if options.only == [""]:
        is_first = options.programs == "programs"
        own = RESULTS if is_first else RESULTS.with_stem(f"held_out_{options.programs}")
        kept = json.loads(own.read_text()) if own.exists() else {}
        name = "clipgrad today" if options.checker == "clipgrad" else options.checker
        kept[f"{name}, {options.dtype}"] = verdicts
        own.write_text(json.dumps(kept, indent=1) + "\n")


if __name__ == "__main__":
    main()
