"""This library proved with its own checker, and the checker kept apart from the rest."""

import ast
import pathlib
import re

import jax
import numpy as np
import pytest

import clipgrad as cg
from clipgrad._commands import selftest
from tests.rows import this_turn

pytestmark = pytest.mark.slow

CHECK = pathlib.Path(cg.__file__).parent / "_check"
CASES = {case.name: case for case in selftest.cases()}
OF_NORMS = [name for name in CASES if re.match("meta-gradient|global_norm", name)]


@pytest.mark.parametrize("name", CASES)
def test_every_vjp_of_the_library_passes(name):
    _, function, args, order = CASES[name]
    cg.check_grads(function, args, order=order)


@pytest.mark.parametrize("devices", ["one"], indirect=True)
@pytest.mark.parametrize("name", this_turn(OF_NORMS))
def test_every_vjp_of_a_norm_passes_on_one_device(name, devices):
    """On one device a CPU's norms are other programs, as of most users."""
    _, function, args, order = CASES[name]
    cg.check_grads(function, args, order=order)


def test_a_clipped_vjp_is_the_composition_of_vjp_and_rule():
    for law in selftest.laws():
        for a, b in zip(*map(jax.tree.leaves, (law.left, law.right)), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6, err_msg=law.name)


@pytest.mark.parametrize("path", sorted(CHECK.glob("*.py")), ids=lambda path: path.name)
def test_the_checker_imports_nothing_of_the_clips(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("clipgrad"):
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            allowed = node.module.startswith("clipgrad._check") or names == {"clipgrad._programs"}
            shared = (
                "_compat",
                "_sharding",
                "_devices",
                "_errors",
                "_programs",
                "_program",
                "_arrays",
                "_names",  # the lines of rules and of stopped values
            )
            allowed |= node.module in [f"clipgrad.{name}" for name in shared]
            assert allowed, f"{path.name} imports {names}"
        if isinstance(node, ast.Import | ast.ImportFrom):
            assert "jax._src" not in ast.unparse(node)


def test_the_cases_hold_every_custom_rule_of_the_library():
    rules = {}  # by the function that has the rule
    for path in CHECK.parent.rglob("*.py"):
        if CHECK in path.parents or path.name == "selftest.py":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef):
                owners = [ast.unparse(d).removesuffix(".defjvp") for d in node.decorator_list]
                pairs = zip(owners, node.decorator_list, strict=True)
                rules |= {
                    rule_name: node.name for rule_name, d in pairs if rule_name != ast.unparse(d)
                }
            elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(".defvjp"):
                rules[ast.unparse(node.func).removesuffix(".defvjp")] = ast.unparse(node.args[1])
    # These pass a cotangent on: where rules are traced, in the probes of `diagnose`, at the taps of
    # `compare` and at the weights of each example.
    passed_on = {"watched", "_identity", "tapped", "tapped_whole", "tap"}
    proved = {
        "_clipped_identity", "_differentiable_norms", "looped", "call", "quotient", "scaled_to",
    }  # fmt: skip
    assert rules.keys() == passed_on | proved
    programs = [str(jax.make_jaxpr(case.function)(*case.args)) for case in CASES.values()]
    for owner in proved:
        assert any(re.search(rf"={rules[owner]}\b", program) for program in programs), owner


@pytest.mark.parametrize("place", ["clip_cotangent", "error_clip"])
@pytest.mark.parametrize("how", ["jit", "scan", "remat", "vmap"])
def test_clips_that_are_off_are_proved_under_every_transformation(place, how):
    assert f"{place} under {how}, off" in CASES
    assert f"{place} under {how}, every rule infinite" in CASES
    infinite = {type(rule) for rule in selftest.INFINITE}
    # No threshold turns these off.
    always = {cg.AdaptiveClip, cg.AutoNorm}
    assert infinite == {type(rule) for rule in selftest.ACTIVE} - always
