"""`clipgrad check module:function`: the gradient check on the command line."""

import argparse
import contextlib
import dataclasses
import json
from typing import Any

import jax

from clipgrad._check import CHECKS, GradCheckReport, Options, check_grads
from clipgrad._commands.function import (
    FAILED,
    PASSED,
    add_command,
    add_function,
    arguments,
    load,
)
from clipgrad._commands.result import plain_fields
from clipgrad._devices import PLATFORMS

CHECK_EPILOG = """\
examples:
  clipgrad check models:loss --args models:example_args --order 2
  clipgrad check models:norm --args "f32[8,16], f32[16]" --device cpu,gpu

exit code:
  0  passed
  1  the gradient is wrong, or nothing was verified
  2  the check could not run; one line says why
"""

# The words of each of `Options` on the command line.
WORDS: dict[str, dict[str, Any]] = {
    "order": {"metavar": "{1,2}", "type": int, "help": "2 also checks the second derivative"},
    "mode": {
        "metavar": "{auto,full}",
        "help": "auto: single elements where rule and plain AD differ, the rest together; full: "
        "each element by itself",
    },
    "max_relative_error": {
        "metavar": "ERROR",
        "type": float,
        "help": "Paddle's tolerance, such as 0.005",
    },
    "tolerance": {
        "metavar": "ERROR",
        "type": float,
        "help": "the relative error that the backward may have",
    },
    "min_verified": {
        "metavar": "SHARE",
        "type": float,
        "help": "the least share of elements to verify, such as 0.9",
    },
    "time_budget": {
        "metavar": "SECONDS",
        "type": float,
        "help": "after which what is left is not verified",
    },
    "points": {"metavar": "N", "type": int, "help": "number of points to check"},
    "seed": {"metavar": "N", "type": int, "help": "seed of everything random"},
    "skip": {
        "metavar": "CHECKS",
        "action": "extend",
        "type": lambda text: text.split(","),
        "help": f"checks to switch off, such as vmap,jit; some of {', '.join(CHECKS)}",
    },
}


def add_check_parser(subparsers: Any) -> None:
    about = "Check the gradient of a function against finite differences."
    parser = add_command(subparsers, "check", about, CHECK_EPILOG, run_check)
    add = parser.add_argument_group("what to check").add_argument
    add_function(add)
    paths = "by position, name or path; you can repeat it"
    add("--wrt", metavar="PATH", action="append", help=f"an input to check, {paths}")
    add("--no-grad", metavar="PATH", action="append", help=f"an input to leave out, {paths}")
    add("--output", metavar="PATH", help="the output to check, by position, key or path")
    how = parser.add_argument_group("how to check").add_argument
    for option in dataclasses.fields(Options):
        words = dict(WORDS[option.name])
        if option.default:
            words["help"] += f" (default: {option.default})"
        how(f"--{option.name.replace('_', '-')}", default=argparse.SUPPRESS, **words)
    how("--device", metavar="KINDS", help=f"some of {', '.join(PLATFORMS)}, such as cpu,gpu (all)")
    how("--x64", action="store_true", help="enable 64-bit types first")
    parser.add_argument("--json", metavar="FILE", help="also write the report to this file")


def run_check(options: argparse.Namespace) -> int:
    report = _command_report(options)
    print(report)
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump(report_as_json(report), file, indent=2)
    return PASSED if report.ok else FAILED


def _command_report(options: argparse.Namespace) -> GradCheckReport:
    given = {
        f.name: getattr(options, f.name) for f in dataclasses.fields(Options) if f.name in options
    }
    seed = Options(**given).seed
    with jax.enable_x64(True) if options.x64 else contextlib.nullcontext():
        function = load(options.function)
        args, kwargs = arguments("check", options.function, function, options.args, seed)
        return check_grads(
            function,
            args,
            kwargs,
            wrt=_selectors(options.wrt),
            no_grad=_selectors(options.no_grad),
            output=_selector(options.output),
            devices=options.device.split(",") if options.device else None,
            raise_on_failure=False,
            **given,
        )


def report_as_json(report: GradCheckReport) -> dict[str, Any]:
    failures = [plain_fields(f, [n for n in f._fields if n != "ratio"]) for f in report.failures]
    names = ("ok", "notes", "not_run", "evaluations", "seconds", "precision", "devices", "verified")
    return {"failures": failures} | plain_fields(report, names)


def _selectors(texts: list[str] | None) -> list[int | str] | None:
    return [_selector(text) for text in texts] if texts else None


def _selector(text: str | None) -> Any:
    return int(text) if text is not None and text.isdigit() else text
