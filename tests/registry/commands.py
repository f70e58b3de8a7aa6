"""The commands: for each option words with which it changes the output, a file or the exit code."""

from tests.registry.analysis import BATCH, X, Y, with_aux
from tests.registry.analysis import cubic as cubic
from tests.registry.analysis import doubled as doubled
from tests.registry.analysis import half as half
from tests.registry.analysis import half_and_sum as half_and_sum
from tests.registry.analysis import named as named
from tests.registry.analysis import nearly as nearly
from tests.registry.analysis import of_batch as of_batch
from tests.registry.analysis import renamed as renamed
from tests.registry.analysis import root as root
from tests.registry.analysis import root_with_aux as root_with_aux
from tests.registry.analysis import stopped as stopped
from tests.registry.training import loss as loss

named_aux, doubled_aux = with_aux(named), with_aux(doubled)


def make_one():
    return (X,)


def make_two():
    return X * X, Y


def make_zeros():
    return X * 0 - 1, Y


def make_batch():
    return BATCH[0] * 0 + 1, 0 * BATCH


def restored(capture):
    return capture.params, {"x": BATCH[:, :2], "y": BATCH[:, 0]}


def raising(x):
    raise RuntimeError("of the user")


CHECK, RIGHT = "HERE:half --args HERE:make_one", "HERE:cubic --args HERE:make_one"
# For each command a call, and for each option what it adds to that call, or to another one.
COMMANDS = {
    "check": {
        "--args": ("--args HERE:make_zeros", "HERE:root"),
        "--wrt": ("--wrt 0", "HERE:root --args HERE:make_two"),
        "--no-grad": ("--no-grad 0", "HERE:root --args HERE:make_two"),
        "--output": ("--output b", "HERE:half_and_sum --args HERE:make_one"),
        "--order": ("--order 2", CHECK),
        "--mode": ("--mode full", RIGHT),
        "--max-relative-error": (
            "--max-relative-error 1e-3",
            "HERE:nearly --args HERE:make_one --tolerance .5",
        ),
        "--tolerance": ("--tolerance 0.5", "HERE:nearly --args HERE:make_one"),
        "--min-verified": ("--min-verified 1.5", CHECK),
        "--time-budget": ("--time-budget 1e-9", CHECK),
        "--points": ("--points 1", RIGHT),
        "--seed": ("--seed 3", CHECK),
        "--skip": ("--skip vmap,jit,linearity", CHECK),
        "--device": ("--device gpu", CHECK),
        "--x64": ("--x64", "HERE:half --args f64[2]"),
        "--json": ("--json FOLDER/report.json", CHECK),
        "--traceback": ("--traceback", "HERE:raising --args HERE:make_one"),
    },
    "diagnose": {
        "--args": ("--args HERE:make_two", "HERE:root --args HERE:make_zeros"),
        "--capture": ("--capture CAPTURE", "HERE:loss --args HERE:restored"),
        "--argnums": ("--argnums 1", "HERE:root --args HERE:make_zeros"),
        "--examples": ("--examples batch", "HERE:of_batch --args HERE:make_batch"),
        "--has-aux": ("--has-aux", "HERE:root_with_aux --args HERE:make_one"),
        "--out": ("--out FOLDER", "HERE:root --args HERE:make_zeros"),
        "--json": ("--json FOLDER/found.json", "HERE:root --args HERE:make_zeros"),
        "--traceback": ("--traceback", "HERE:raising --args HERE:make_one"),
    },
    "compare": {
        "--args": ("--args HERE:make_two", "HERE:root HERE:stopped --args HERE:make_one"),
        "--other-args": (
            "--other-args HERE:make_zeros",
            "HERE:named HERE:named --args HERE:make_two",
        ),
        "--argnums": ("--argnums 0", "HERE:root HERE:stopped --args HERE:make_two"),
        "--steps": ("--steps", "HERE:root HERE:stopped --args HERE:make_two"),
        "--has-aux": ("--has-aux", "HERE:named_aux HERE:doubled_aux --args HERE:make_one"),
        "--name": (
            "--name first=one --name second=two",
            "HERE:named HERE:renamed --args HERE:make_one",
        ),
        "--rtol": ("--rtol 10", "HERE:named HERE:doubled --args HERE:make_one"),
        "--out": ("--out FOLDER", "HERE:named HERE:doubled --args HERE:make_one"),
        "--json": ("--json FOLDER/found.json", "HERE:named HERE:doubled --args HERE:make_one"),
        "--traceback": ("--traceback", "HERE:raising HERE:named --args HERE:make_one"),
    },
}
