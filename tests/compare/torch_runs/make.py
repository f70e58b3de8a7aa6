"""Writes the runs of this folder, and the numbers of their parameters and arguments.

Written with torch 2.13.0 on a CPU: PYTHONPATH=. python tests/compare/torch_runs/make.py
"""

import pathlib

import numpy as np
import torch

import clipgrad.torch
from clipgrad._compare.file import load_record, save_record
from tests.compare.torch_runs.models import table

FOLDER = pathlib.Path(__file__).parent


def numbers(model, args):
    """The parameters, buffers and arguments, as float32 and int32."""
    named = [*model.state_dict().items(), *((f"args.{i}", x) for i, x in enumerate(args))]
    return {
        name: x.detach().numpy().astype(np.int32)
        if not x.is_floating_point()
        else x.detach().float().numpy()
        for name, x in named
    }


def main():
    torch.set_num_threads(1)
    for name, (model, loss, args) in table().items():
        values = numbers(model, args)
        path = FOLDER / f"{name}.npz"
        clipgrad.torch.save_run(model, loss, args, path)
        run = load_record(path)
        for row in run.rows:
            row.line = pathlib.Path(row.line).name  # not of one machine
        save_record(run, path)
        np.savez_compressed(FOLDER / f"{name}_numbers.npz", **values)


if __name__ == "__main__":
    main()
