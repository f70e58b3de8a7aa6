"""Runs that torch writes; README's command does not install torch."""

import pathlib
import re
import subprocess
import sys

import numpy as np
import pytest

from clipgrad._compare.file import load_record
from clipgrad._compare.sketches import turned_sketches

pytestmark = pytest.mark.slow
torch = pytest.importorskip("torch")


@pytest.fixture(scope="module")
def table():
    from tests.compare.torch_runs.models import table

    return table()


@pytest.mark.parametrize("name", ["mlp", "gru", "conv_train", "conv_eval", "layers", "decoder"])
def test_the_files_of_this_repository_are_what_torch_writes(name, table, tmp_path):
    import clipgrad.torch
    from tests.compare.torch_runs.make import FOLDER

    module, loss, args = table[name]
    before = {key: x.clone() for key, x in module.state_dict().items()}
    state = torch.random.get_rng_state()
    clipgrad.torch.save_run(module, loss, args, tmp_path / "run.npz")
    assert all(torch.equal(x, before[key]) for key, x in module.state_dict().items())
    assert all(p.grad is None and not p._backward_hooks for p in module.parameters())
    assert not any(mine._forward_hooks or mine._forward_pre_hooks for mine in module.modules())
    assert torch.equal(state, torch.random.get_rng_state())
    mine, other = load_record(tmp_path / "run.npz"), load_record(FOLDER / f"{name}.npz")
    known, there = (
        [(row.kind, row.name, row.view, row.owner, row.shape, row.node) for row in run.rows]
        for run in (mine, other)
    )
    assert known == there
    for a, b in zip(mine.rows, other.rows, strict=True):
        np.testing.assert_allclose(a.numbers.sketch, b.numbers.sketch, rtol=1e-3, atol=1e-5)
    assert (tmp_path / "run.npz").stat().st_size < 200_000


def test_a_run_has_what_torch_computes(table, tmp_path):
    import clipgrad.torch

    module, loss, args = table["mlp"]
    clipgrad.torch.save_run(module, loss, args, tmp_path / "run.npz")
    run = load_record(tmp_path / "run.npz")
    with torch.enable_grad():
        h = module.fc1(args[0])
        n = module.norm(h)
        rest = torch.nn.functional.gelu(n)
        out = module.fc3(torch.tanh(rest + module.fc2(rest)))
        value = loss(lambda x: out, *args)
    by_name = {(row.kind, row.name, row.view): row for row in run.rows}
    for name, x in (("fc1", h), ("norm", n), ("fc3", out)):
        grad = torch.autograd.grad(value, x, retain_graph=True)[0]
        for kind, expected in (("value", x), ("cotangent", grad)):
            theirs = turned_sketches(expected.detach().numpy(), "all")
            sketch = by_name[kind, name, "module"].numbers.sketch
            np.testing.assert_allclose(sketch, theirs, rtol=1e-4, atol=1e-6)
    (output,) = (row for row in run.rows if row.kind == "output")
    theirs = turned_sketches(value.detach().numpy(), "all")
    np.testing.assert_allclose(output.numbers.sketch, theirs, rtol=1e-6)
    assert ".py:" in by_name["value", "fc2", "enters"].line
    assert run.circumstances["mode"] == "train" and not run.notes


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"module": 3}, TypeError, "module: got int, expected a torch.nn.Module"),
        ({"loss_fn": 3}, TypeError, "loss_fn: got 3, expected a function of the module"),
        ({"args": [3]}, TypeError, r"args: got list, expected a tuple; for one argument write \(x"),
        ({"path": 3}, TypeError, "path: got 3, expected the path of a file"),
        (
            {"loss_fn": lambda m, *a: m(a[0])},
            ValueError,
            r"shape \(6, 4\), expected a floating sca",
        ),
        ({"loss_fn": lambda m, *a: a[0].sum()}, ValueError, "the loss depends on no parameter of"),
    ],
)
def test_wrong_usage_is_said(change, error, message, table, tmp_path):
    import clipgrad.torch

    names = ("module", "loss_fn", "args", "path")
    arguments = dict(zip(names, (*table["mlp"], tmp_path / "run.npz"), strict=True)) | change
    with pytest.raises(error, match=message):
        clipgrad.torch.save_run(**arguments)


def test_fused_weights_and_dropout_are_noted(tmp_path):
    import clipgrad.torch

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.qkv, self.drop = torch.nn.Linear(4, 12), torch.nn.Dropout(0.5)
            self.cell = torch.nn.GRUCell(12, 5)

        def forward(self, x):
            return self.cell(self.drop(self.qkv(x))).mean()

    clipgrad.torch.save_run(Model(), lambda m, x: m(x), (torch.randn(2, 4),), tmp_path / "run.npz")
    run = load_record(tmp_path / "run.npz")
    assert "torch ran drop in training mode" in run.notes[0]
    names = [row.name for row in run.rows]
    assert {"qkv[4:8]", "qkv.weight[8:12]", "cell.weight_ih[5:10]"} <= {*names}
    assert {"cell.bias_ih+bias_hh", "cell.bias_ih+bias_hh[0:5]"} <= {*names}
    assert "cell[0:5]" not in names  # its output is of no gates


def test_each_direction_of_a_recurrent_module_is_a_value_with_its_steps(tmp_path):
    import clipgrad.torch

    module, x = torch.nn.LSTM(3, 2, batch_first=True, bidirectional=True), torch.ones(4, 5, 3)
    clipgrad.torch.save_run(module, lambda m, x: m(x)[0].sum(), (x,), tmp_path / "run.npz")
    rows = [row for row in load_record(tmp_path / "run.npz").rows if row.kind == "value"]
    for way in ("[+]", "[-]"):
        shapes = [(row.steps, row.shape) for row in rows if row.name == way]
        assert shapes == [((), (4, 5, 2)), ((5,), (4, 2))]


def test_without_torch_the_import_says_what_to_install():
    program = "import sys; sys.modules['torch'] = None; import clipgrad.torch"
    process = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (
        "clipgrad.torch needs PyTorch, which is not installed; write pip install" in process.stderr
    )


def test_the_page_on_ports_runs_and_finds_what_it_says(tmp_path, monkeypatch, capsys):
    pytest.importorskip("flax")
    page = (pathlib.Path(__file__).parents[2] / "docs" / "port.md").read_text()
    program = "".join(re.findall(r"```py\n(.*?)```", page, re.DOTALL))
    assert len(program.splitlines()) <= 12
    monkeypatch.chdir(tmp_path)
    exec(compile(program, "port.md", "exec"), {})
    assert "value: the values differ from here on: Sequential/layers_1" in capsys.readouterr().out
    exec(compile(program.replace("LayerNorm()", "LayerNorm(epsilon=1e-5)"), "port.md", "exec"), {})
    assert "no difference beyond rounding" in capsys.readouterr().out


def test_the_programs_of_the_first_notebook_give_what_jax_gives():
    """The first and the last of its programs that stand beside JAX's."""
    from tests.pages import pytorch_beside_jax

    first, _, _, last = (programs[0] for programs in pytorch_beside_jax())
    names = {"torch": torch}
    exec(first, names)
    assert [names["w"].grad.item(), names["b"].grad.item()] == pytest.approx(
        [-1.1326, -0.3775], rel=1e-3
    )
    exec(last, names)
    for point, slopes in {(0.0, 0.0): (0, 0), (3.0, 4.0): (0.6, 0.8)}.items():
        x = torch.tensor(point, requires_grad=True)
        names["norm"](x).backward()
        assert x.grad.tolist() == pytest.approx(slopes)
