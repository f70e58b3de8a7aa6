"""Runs of PyTorch models, for `clipgrad.compare`; the only module that needs torch."""

# pyright: reportAttributeAccessIssue=false, reportMissingImports=false

import collections
import functools
import os
import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

try:
    import torch
except ImportError as error:
    raise ImportError(
        "clipgrad.torch needs PyTorch, which is not installed; write pip install torch"
    ) from error

from clipgrad._compare import (
    THE_LOSS,
    TORCH,
    Edge,
    Numbers,
    Record,
    Row,
    check_path,
    save_record,
    turned_sketches,
)

__all__ = ["save_run"]

_OURS = os.path.abspath(__file__), os.path.dirname(torch.__file__) + os.sep
_FUSED = ("qkv", "in_proj", "c_attn", "kv_proj", "gate_up", "fused", "w12", "w13")


def save_run(
    module: torch.nn.Module,
    loss_fn: Callable[..., torch.Tensor],
    args: tuple,
    path: str | os.PathLike,
) -> None:
    """Runs a PyTorch model and its gradient, and writes a file to `compare` with a JAX loss.

    Example:
      .. code-block:: python

         clipgrad.torch.save_run(model.eval(), lambda m, x: m(x).mean(), (x,), "torch.npz")
         print(cg.compare("torch.npz", jax_loss, (params, x)))

    Args:
      module: the model, in the mode (train or eval) that you want to compare.
      loss_fn: ``loss_fn(module, *args)``, which returns a scalar tensor.
      args: the tuple of all further arguments of ``loss_fn``; for one argument write ``(x,)``.
      path: the file to write, such as ``"torch.npz"``.

    Returns:
      None: the run is in the file.

    Raises:
      TypeError: an argument has another type than above.
      ValueError: the loss is not a floating scalar, or depends on no parameter.

    Guarantees:
      * You do not edit the model: hooks see the inputs, outputs and cotangents of each module.
        Gradients, buffers, the mode and the random state stay as they are.
      * For each array, the file has a sketch with 515 numbers, among them the norm and the largest
        magnitude, for every order of the axes (up to 24). So `compare` does not mistake another
        layout, such as NHWC for NCHW, for a difference.
      * A recurrent ``torch.nn`` module has a value for each step and, if it is bidirectional, for
        each direction, ``lstm[+]`` and ``lstm[-]``. The file also has layers of a ``ModuleList`` as
        one stack, and fused weights, such as ``qkv``, in parts.
    """
    _check_call(module, loss_fn, args, path)
    buffers = {name: buffer.detach().clone() for name, buffer in module.named_buffers()}
    record = Record(framework=TORCH)
    for i, arg in enumerate(args):
        for x in _tensors_of(arg):
            _add(record, _tensor_row("argument", f"args[{i}]", x, view="argument"))
    watch = _Watch(module, record)
    try:
        with torch.enable_grad(), torch.random.fork_rng():
            loss = loss_fn(module, *args)
            gradients = _torch_gradients(module, loss)
    finally:
        watch.close()
        with torch.no_grad():
            for name, buffer in module.named_buffers():
                buffer.copy_(buffers[name])
    _add(record, _tensor_row("output", THE_LOSS, loss.reshape(())))
    nodes: dict[str, int] = {}
    for name, x, gradient, wholes in _parameters(module, gradients):
        kinds = {"view": "parameter", "turned": "stack" if "*" in name else "all"}
        nodes[name] = _add(record, _tensor_row("argument", name, x, **kinds))
        record.edges += [Edge(nodes[whole], nodes[name]) for whole in wholes]
        if gradient is not None:
            _add(record, _tensor_row("gradient", name, gradient, **kinds), nodes[name])
    for name, x in buffers.items():
        if x.is_floating_point():
            _add(record, _tensor_row("argument", name, x, view="buffer"))
    record.circumstances, record.notes = _torch_facts(module, loss)
    save_record(record, path)


def _add(record: Record, row: Row, node: int | None = None) -> int:
    """Add a row, in the order in which rows are seen."""
    row.position = (len(record.rows), 0, 0, *row.position[3:])
    return record.add(row, node)


def _check_call(module: Any, loss_fn: Any, args: Any, path: Any) -> None:
    if not isinstance(module, torch.nn.Module):
        raise TypeError(f"module: got {type(module).__name__}, expected a torch.nn.Module")
    if not callable(loss_fn):
        raise TypeError(
            f"loss_fn: got {loss_fn!r}, expected a function of the module and of args that returns "
            "a scalar, such as lambda model, x: model(x).mean()"
        )
    if not isinstance(args, tuple):
        raise TypeError(
            f"args: got {type(args).__name__}, expected a tuple; for one argument write (x,)"
        )
    check_path(path)


def _torch_gradients(module: torch.nn.Module, loss: Any) -> dict[str, Any]:
    """The gradient of each parameter; those that the parameters hold stay as they are."""
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or not loss.is_floating_point():
        what = f"shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss)
        raise ValueError(f"loss_fn: got {what}, expected a floating scalar; write .mean()")
    moving = {name: x for name, x in module.named_parameters() if x.requires_grad}
    if not moving or not loss.requires_grad:
        raise ValueError("loss_fn: the loss depends on no parameter of module that requires_grad")
    grads = torch.autograd.grad(loss, list(moving.values()), allow_unused=True)
    return dict(zip(moving, grads, strict=True))


def _torch_facts(module: torch.nn.Module, loss: torch.Tensor) -> tuple[dict[str, Any], list[str]]:
    modes = {part.training for part in module.modules()}
    mode = "train and eval" if len(modes) > 1 else "train" if True in modes else "eval"
    dropped = [
        name
        for name, part in module.named_modules()
        if isinstance(part, torch.nn.modules.dropout._DropoutNd) and part.training and part.p
    ]
    note = f"torch ran {', '.join(dropped)} in training mode, with random dropout; write "
    notes = [note + "model.eval() before save_run, or set p=0"] if dropped else []
    return {"torch": torch.__version__, "device": str(loss.device), "mode": mode}, notes


class _Watch:
    """Hooks on every module, which see values when they are computed."""

    def __init__(self, module: torch.nn.Module, record: Record) -> None:
        self._record = record
        self._known: dict[int, tuple[Any, int, Any]] = {}
        self._handles: list[Any] = []
        for name, part in module.named_modules():
            enters = functools.partial(self._enters, name)
            leaves = functools.partial(self._leaves, name)
            self._handles.append(part.register_forward_pre_hook(enters, with_kwargs=True))
            self._handles.append(part.register_forward_hook(leaves))

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()

    def _enters(self, name: str, module: torch.nn.Module, args: tuple, kwargs: dict) -> None:
        for x in _tensors_of((args, kwargs)):
            self._note(name, "enters", module, x)

    def _leaves(self, name: str, module: torch.nn.Module, args: tuple, outputs: Any) -> None:
        del args
        for x in _tensors_of(outputs):
            self._note(name, "module", module, x)
        if isinstance(module, torch.nn.RNNBase) and isinstance(outputs[0], torch.Tensor):
            axis, halves = 1 if module.batch_first else 0, outputs[0].chunk(2, -1)
            self._note_steps(name, module, outputs[0], axis)
            for way, half in zip("+-" * module.bidirectional, halves, strict=False):
                self._note(f"{name}[{way}]", "module", module, half)
                self._note_steps(f"{name}[{way}]", module, half, axis)
        for part, x in _fused_parts(name, module, outputs, -1):
            self._note(part, "module", module, x)

    def _note(self, name: str, view: str, module: Any, x: Any) -> None:
        if not x.is_floating_point() and not x.is_complex():
            return
        number = self._add(name, view, module, x, self._sketches(x))
        if x.requires_grad and view == "module":
            x.register_hook(functools.partial(self._keep, number))

    def _note_steps(self, name: str, module: Any, x: Any, axis: int) -> None:
        """Note the value at each step, as one row."""
        steps = x.unbind(axis)
        sketches = np.stack([turned_sketches(_numpy_of(step), "all") for step in steps])
        around = {"around": (len(steps),), "position": (0, 0, 0, 0, 0)}
        self._add(name, "module", module, steps[0], sketches, **around)

    def _add(self, name: str, view: str, module: Any, x: Any, sketch: Any, **more: Any) -> int:
        more |= {"line": _calling_line(), "owner": type(module).__name__}
        return _add(self._record, _tensor_row("value", name, x, view=view, sketch=sketch, **more))

    def _sketches(self, x: torch.Tensor) -> Any:
        """The sketches of a tensor; what leaves a module mostly enters another as it is."""
        known, version, sketches = self._known.get(id(x), (lambda: None, 0, None))
        if known() is not x or version != x._version:
            sketches = turned_sketches(_numpy_of(x), "all")
            self._known[id(x)] = weakref.ref(x), x._version, sketches
        return sketches

    def _keep(self, number: int, cotangent: torch.Tensor) -> None:
        row = self._record.rows[number]
        _add(self._record, _tensor_row("cotangent", row.name, cotangent, view=row.view), number)


def _calling_line() -> str:
    """The innermost line that is neither of torch nor of this file."""
    frame: Any = sys._getframe(1)
    while frame and os.path.abspath(frame.f_code.co_filename).startswith(_OURS):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}" if frame else ""


def _parameters(
    module: torch.nn.Module, gradients: dict[str, Any]
) -> Iterator[tuple[str, torch.Tensor, Any, tuple[str, ...]]]:
    """The parameters, each with its gradient and the names of those that it is made of.

    Fused ones are there in parts, too, those of layers in a list as a stack, and of recurrent
    modules the sums of two biases, of which others have one.
    """
    known = dict(module.named_parameters())
    for name, x in known.items():
        yield name, x, gradients.get(name), ()
    for name, x in known.items():
        owner, gradient = module.get_submodule(name.rpartition(".")[0]), gradients.get(name)
        yield from _parameter_parts(name, owner, x, gradient, (name,))
        hidden = name.replace("bias_ih", "bias_hh")
        if "bias_ih" in name and hidden in known:
            both, wholes = f"{name}+{hidden.rpartition('.')[2]}", (name, hidden)
            yield both, x + known[hidden], gradient, wholes
            yield from _parameter_parts(both, owner, x + known[hidden], gradient, wholes)
    for stack, names in _stacks(known).items():
        grads = [g for n in names if (g := gradients.get(n)) is not None]
        gradient = torch.stack(grads) if len(grads) == len(names) else None
        yield stack, torch.stack([known[n].detach() for n in names]), gradient, tuple(names)


def _parameter_parts(
    name: str, owner: Any, x: Any, gradient: Any, wholes: tuple[str, ...]
) -> Iterator[tuple[str, Any, Any, tuple[str, ...]]]:
    for axis in {0, x.ndim - 1}:
        grads = dict(_fused_parts(name, owner, gradient, axis))
        for part, piece in _fused_parts(name, owner, x, axis):
            yield part, piece, grads.get(part), wholes


def _fused_parts(name: str, module: Any, x: Any, axis: int) -> list[tuple[str, torch.Tensor]]:
    """The parts of a fused array along an axis, in two, three and four."""
    is_recurrent = isinstance(module, torch.nn.RNNBase | torch.nn.RNNCellBase)
    is_fused = is_recurrent and axis >= 0 or any(f in name for f in _FUSED)
    if not is_fused or not isinstance(x, torch.Tensor) or not x.ndim:
        return []
    length = x.shape[axis]
    sizes = [length // n for n in (2, 3, 4) if length % n == 0 and length > n]
    return [
        (f"{name}[{i}:{i + size}]", x.narrow(axis, i, size))
        for size in sizes
        for i in range(0, length, size)
    ]


def _stacks(known: dict[str, torch.nn.Parameter]) -> dict[str, list[str]]:
    """The names of parameters that differ in one number alone, and that have one shape."""
    stacks: dict[str, list[str]] = collections.defaultdict(list)
    for name in known:
        segments = name.split(".")
        for i, segment in enumerate(segments):
            if segment.isdigit():
                stacks[".".join([*segments[:i], "*", *segments[i + 1 :]])].append(name)
    several = {stack: names for stack, names in stacks.items() if len(names) > 1}
    return {s: names for s, names in several.items() if len({known[n].shape for n in names}) == 1}


def _tensors_of(tree: Any) -> Iterator[torch.Tensor]:
    """The tensors in tuples, lists and dictionaries."""
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, dict | tuple | list):
        for part in tree.values() if isinstance(tree, dict) else tree:
            yield from _tensors_of(part)


def _tensor_row(kind: str, name: str, x: torch.Tensor, **more: Any) -> Row:
    """The row of a tensor, with a sketch for each order of its axes."""
    fields: dict[str, Any] = {"turned": "all"} | more
    sketch = fields.pop("sketch", None)
    if sketch is None:
        sketch = turned_sketches(_numpy_of(x), fields["turned"])
    numbers = Numbers(sketch=sketch)
    return Row(kind, name, tuple(x.shape), _dtype(x), numbers=numbers, **fields)


def _numpy_of(x: torch.Tensor) -> Any:
    """A tensor in NumPy, which has no bfloat16."""
    x = x.detach().cpu()
    is_narrow = x.is_floating_point() and x.dtype not in (torch.float32, torch.float64)
    return (x.to(torch.float32) if is_narrow else x).resolve_conj().numpy()


def _dtype(x: torch.Tensor) -> str:
    return str(x.dtype).removeprefix("torch.")
