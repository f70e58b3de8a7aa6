"""Writes the runs of this folder, and the numbers of their parameters and arguments.

Written with torch 2.14.1 on a CPU: PYTHONPATH=. python tests/torch_runs/make.py
"""

import pathlib

import numpy as np
import torch
from clipgrad._compare.run_file import read_run, write_run

import clipgrad.torch
from tests.torch_runs.models import table

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
        run = read_run(path)
        for row in run.header["values"]:
            row[4] = row[4] and pathlib.Path(row[4]).name  # not of one machine
        header = {key: x for key, x in run.header.items() if key != "format"}
        write_run(path, header, run.arrays)
        np.savez_compressed(FOLDER / f"{name}_numbers.npz", **values)


if __name__ == "__main__":
    main()
