"""The page for coding agents: its names are public, and its commands run and write what it says."""

import json
import re
import shlex

import pytest

import clipgrad as cg
from clipgrad._commands.cli import main
from tests.package.test_docs import ROOT

TEXT = (ROOT / "AGENTS.md").read_text()
MODELS = """
import jax.numpy as jnp

def loss(w, x):
    return jnp.sum(jnp.log(x @ w))

def other_loss(w, x):
    return jnp.sum(jnp.log(x @ w + 1))

def make_args():
    return jnp.ones(2), jnp.array([[1.0, 2.0], [0.0, 0.0]])
"""


def rows():
    table = TEXT.split("|---|---|---|---|\n")[1].split("\n\n")[0]
    return [re.split(r" ?\| ?", line.strip("|").strip()) for line in table.splitlines()]


def test_it_is_short_and_each_row_is_a_call_with_its_limits():
    assert len(TEXT.split()) <= 400
    assert all(len(row) == 4 and "cg." in row[1] and row[3].startswith("that ") for row in rows())


@pytest.mark.slow
def test_its_names_are_public_and_its_fields_exist():
    assert set(re.findall(r"cg\.(\w+)", TEXT)) <= set(cg.__all__)
    healthy = lambda w: (w**2).sum()  # noqa: E731
    args = (cg.types.ClipStats.zero().norm + 1.0,)
    results = {
        "cg.diagnose": cg.diagnose(healthy, args),
        "cg.compare": cg.compare(healthy, healthy, args),
        "cg.check_grads": cg.check_grads(healthy, args, raise_on_failure=False),
    }
    finding = cg.diagnose(lambda w: cg.global_norm(w * 0) + (w * 0) ** 0.5, args).findings[0]
    for _, call, fields, limits in rows():
        for name, result in results.items():
            if name in call:
                for field in re.findall(r"`\.(\w+)", fields + limits):
                    assert hasattr(result, field) or hasattr(finding, field), field


@pytest.mark.slow
def test_its_commands_run_and_write_json(monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models.py").write_text(MODELS)
    (commands,) = re.findall(r"```sh\n(.*?)```", TEXT, re.DOTALL)
    codes = {}
    for command in commands.splitlines():
        name, *words = shlex.split(command)
        assert name == "clipgrad"
        codes[words[0]] = main(words)
        assert capsys.readouterr().err == ""
    assert codes == {"diagnose": 1, "compare": 1, "check": 1, "help": 0}
    for path in tmp_path.glob("*.json"):
        data = json.loads(path.read_text(), parse_constant=pytest.fail)
        assert data["ok"] is False
    assert len([*tmp_path.glob("*.json")]) == 3
