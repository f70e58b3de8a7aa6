"""`clipgrad check module:function`: the gradient check on the command line."""

import argparse
import contextlib
import functools
import inspect
from typing import Any

import jax

from clipgrad._check import CHECKS, GradCheckReport, check_grads
from clipgrad._commands.arguments import position_or_name
from clipgrad._commands.command_output import plain, require_folder, write_json
from clipgrad._commands.function import (
    FAILED,
    PASSED,
    add_command,
    add_function,
    arguments,
    load,
)
from clipgrad._devices import PLATFORMS

CHECK_EXAMPLES = (
    "models:loss --args models:example_args --order 2",
    'models:norm --args "f32[8,16], f32[16]" --device cpu,gpu',
)
# Arguments of `check_grads` by these names: what is shown for a value, its type, and the help.
OPTIONS: dict[str, tuple[str, type, str]] = {
    "order": ("{1,2}", int, "2 also checks the second derivative"),
    "mode": (
        "{auto,full}",
        str,
        "auto: single elements where rule and plain autodiff differ, the rest together; full: each "
        "element by itself",
    ),
    "max_relative_error": ("ERROR", float, "Paddle's tolerance, such as 0.005"),
    "tolerance": ("ERROR", float, "the relative error that the backward may have"),
    "min_verified": ("SHARE", float, "the least share of elements to verify, such as 0.9"),
    "time_budget": ("SECONDS", float, "after which what is left is not verified"),
    "points": ("N", int, "number of points to check"),
    "seed": ("N", int, "seed of everything random"),
}
REPORT_FIELDS = (
    "ok",
    "notes",
    "not_run",
    "evaluations",
    "seconds",
    "precision",
    "devices",
    "verified",
)


def add_check_parser(subparsers: Any) -> None:
    about = "Check the gradient of a function against finite differences."
    codes = "passed", "the gradient is wrong, or nothing was verified"
    parser = add_command(subparsers, "check", about, run_check, CHECK_EXAMPLES, codes)
    add = parser.add_argument_group("what to check").add_argument
    add_function(add)
    add = functools.partial(add, metavar="PATH", type=position_or_name)
    paths = "by position, name or path; you can repeat it"
    add("--wrt", action="append", help=f"an input to check, {paths}")
    add("--no-grad", action="append", help=f"an input to leave out, {paths}")
    add("--output", help="the output to check, by position, key or path")
    add = parser.add_argument_group("how to check").add_argument
    for name, (shown, kind, words) in OPTIONS.items():
        default = inspect.signature(check_grads).parameters[name].default
        words += f" (default: {default})" if default else ""
        flag = f"--{name.replace('_', '-')}"
        add(flag, default=default, metavar=shown, type=kind, help=words)
    words = f"checks to switch off, such as vmap,jit; some of {', '.join(CHECKS)}"
    several = functools.partial(add, type=lambda text: text.split(","))
    several("--skip", metavar="CHECKS", action="extend", default=[], help=words)
    words = f"some of {', '.join(PLATFORMS)}, such as cpu,gpu (all)"
    several("--device", metavar="KINDS", help=words)
    add("--x64", action="store_true", help="enable 64-bit types first")
    parser.add_argument("--json", metavar="FILE", help="also write the report to this file")


def run_check(options: argparse.Namespace) -> int:
    require_folder(options.json)
    with jax.enable_x64(True) if options.x64 else contextlib.nullcontext():
        function = load(options.function)
        report = check_grads(
            function,
            arguments(options.function, function, options.args, options.seed),
            wrt=options.wrt,
            no_grad=options.no_grad,
            output=options.output,
            devices=options.device,
            raise_on_failure=False,
            skip=options.skip,
            **{name: getattr(options, name) for name in OPTIONS},
        )
    print(report)
    write_json(options.json, report_as_json(report))
    return PASSED if report.ok else FAILED


def report_as_json(report: GradCheckReport) -> dict[str, Any]:
    failures = [failure._asdict() for failure in report.failures]
    failures = [{name: x for name, x in row.items() if name != "ratio"} for row in failures]
    return plain({"failures": failures} | {name: getattr(report, name) for name in REPORT_FIELDS})
