"""Everything in the README runs: programs, tables, error texts, commands."""

import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import clipgrad as cg

ROOT = pathlib.Path(__file__).parents[1]
TEXT = (ROOT / "README.md").read_text()


pytestmark = pytest.mark.usefixtures("users_promotion")


def section(title):
    return TEXT.split(f"## {title}")[1].split("\n## ")[0]


def rows(title):
    lines = [line for line in section(title).splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_the_programs_run(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    namespace = {}
    for program in re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL):
        exec(program, namespace)
    printed = capsys.readouterr().out.splitlines()
    norm, _, clipped = printed[0].split()
    assert float(norm) > 1 and float(clipped) == pytest.approx(1, rel=1e-6)
    assert printed[1].split() == ["name", "kind", "shape", "dtype", "scans", "sites"]
    assert any(line.startswith("(20,)") for line in printed)
    assert (tmp_path / "norm_per_step.png").read_bytes().startswith(b"\x89PNG")


def test_the_first_program_has_twelve_lines_of_code():
    lines = re.search(r"```python\n(.*?)```", TEXT, re.DOTALL).group(1).splitlines()
    assert sum(bool(line.strip()) for line in lines) == 12


def test_links_lead_somewhere():
    targets = re.findall(r"\]\(([^)#]+)[^)]*\)", TEXT)
    assert targets
    for target in targets:
        assert target.startswith("http") or (ROOT / target).exists(), target


def test_the_pictures_are_there():
    pictures = re.findall(r"!\[.+?\]\((.+?)\)", TEXT)
    assert pictures
    for picture in pictures:
        assert (ROOT / picture).read_bytes().startswith(b"\x89PNG")


def namespace_of_tables():
    grads = {"w": jnp.array([[3.0, 4.0]])}
    names = {"cg": cg, "jax": jax, "optax": optax, "grads": grads, "params": grads}
    return names | {"h": jnp.ones(2), "loss": lambda w, x: w @ x}


COMING_FROM = [row for row in rows("Coming from ...") if row[0] != "from"]


@pytest.mark.parametrize("row", COMING_FROM, ids=lambda row: row[1])
def test_each_line_of_coming_from_runs(row):
    names = namespace_of_tables()
    code = row[2].strip("`")
    exec(code if re.match(r"[\w, ]+ = ", code) else f"result = {code}", names)
    if row[0] == "optax":
        exec(f"theirs = {row[1].strip('`')}", names)
        ours, theirs = names["result"], names["theirs"]
        if hasattr(ours, "update"):
            grads, params = names["grads"], names["params"]
            ours, theirs = (tx.update(grads, tx.init(params), params)[0] for tx in (ours, theirs))
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), ours, theirs)


@pytest.mark.parametrize("row", rows("Rules and places")[1:6], ids=lambda row: row[0])
def test_each_rule_of_the_table_can_be_made_as_it_is_printed(row):
    import inspect

    signature = re.match(r"`(\w+)\((.*?)\)`", row[0])
    actual = inspect.signature(getattr(cg, signature.group(1)))
    printed = [p.strip().split("=")[0] for p in signature.group(2).split(",") if p.strip() != "*"]
    assert list(actual.parameters)[: len(printed)] == printed
    call = row[4].strip("`")
    values = {"max": 1.0, "min": -1.0, "max_norm": 1.0, "threshold": 1.0, "clipping": 0.1}
    assert isinstance(eval(f"cg.{call}", {"cg": cg}, values), optax.GradientTransformation)


FAILURES = {
    "TypeError: rule: got 0.1": lambda: cg.clip_cotangent(jnp.ones(2), 0.1),
    "ValueError: params: got None": lambda: cg.clip_grads(jnp.ones(2), cg.AdaptiveClip()),
    "TypeError: max_norm: got a schedule": lambda: cg.clip_cotangent(
        jnp.ones(2), cg.ClipByNorm(lambda step: 1.0)
    ),
    "ValueError: where: got 'bias'": lambda: cg.clip_grads(
        {"kernel": jnp.ones(2)}, cg.ClipByValue(1.0), where="bias"
    ),
    "TypeError: can't apply forward-mode": lambda: jax.jvp(
        lambda x: cg.clip_cotangent(x, cg.ClipByValue(1.0)), (1.0,), (1.0,)
    ),
}
HEADINGS = re.findall(r"^### `(\w+Error: .*)`$", TEXT, re.MULTILINE)


@pytest.mark.parametrize("heading", HEADINGS, ids=lambda heading: heading[:30])
def test_the_error_texts_of_the_faq_are_real(heading):
    (call,) = [call for start, call in FAILURES.items() if heading.startswith(start)]
    with pytest.raises((TypeError, ValueError)) as caught:
        call()
    assert f"{caught.type.__name__}: {caught.value}".startswith(heading)


def test_every_known_error_text_is_in_the_faq():
    assert len(HEADINGS) == len(FAILURES)


def test_the_commands_name_what_there_is():
    commands = re.findall(r"```sh\n(.*?)\n```", TEXT, re.DOTALL)
    assert len(commands) == 2 and all("\n" not in command for command in commands)
    project = (ROOT / "pyproject.toml").read_text()
    for extra in re.findall(r"\.\[(\w+)\]", TEXT):
        assert f"\n{extra} = [" in project
    assert 'clipgrad = "clipgrad._cli:main"' in project
