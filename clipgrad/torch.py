"""Runs of PyTorch models, for `clipgrad.compare`; the only module that needs torch."""

# pyright: reportAttributeAccessIssue=false, reportMissingImports=false

import collections
import functools
import os
import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Any

try:
    import torch
except ImportError as error:
    raise ImportError(
        "clipgrad.torch needs PyTorch, which is not installed; write pip install torch"
    ) from error

from clipgrad._compare import PortEntry, PortRun, check_path, layouts, write_port

__all__ = ["save_run"]

_OURS = os.path.abspath(__file__), os.path.dirname(torch.__file__) + os.sep
_FUSED = ("qkv", "in_proj", "c_attn", "kv_proj", "gate_up", "fused", "w12", "w13")


def save_run(
    module: torch.nn.Module,
    loss_fn: Callable[..., torch.Tensor],
    args: tuple,
    path: str | os.PathLike,
) -> None:
    """Runs a torch model and its gradient, and writes a file that `compare` sets beside JAX.

    The model is not edited: hooks see what enters and leaves each module, and the cotangents.
    Gradients, buffers, the mode and the state of random numbers stay as they are.

    Guarantees:
      * Of each array a sketch of 515 numbers, with its norm and its largest magnitude, is written
        in every order of its axes, up to 24, so that layouts such as NCHW and NHWC can be told from
        differences.
      * A recurrent module of ``torch.nn`` has a value for each step, and for each direction if it
        is bidirectional, ``lstm[+]`` and ``lstm[-]``. Layers in a ``ModuleList`` are
        written also as one stack, and fused weights, such as ``qkv``, also in parts.

    Args:
      module: the model, in the mode, train or eval, that is compared.
      loss_fn: a function of the module and of ``args`` that returns a scalar.
      args: the tuple of further arguments of ``loss_fn``.
      path: where to write the file, such as ``"torch.npz"``.

    Returns:
      None: the run is in the file.

    Raises:
      TypeError: an argument is not of the type above.
      ValueError: the loss is not a floating scalar, or depends on no parameter.

    Example:
      .. code-block:: python

         clipgrad.torch.save_run(model.eval(), lambda m, x: m(x).mean(), (x,), "torch.npz")
         print(cg.compare("torch.npz", jax_loss, (params, x)))
    """
    _check_call(module, loss_fn, args, path)
    buffers = {name: buffer.detach().clone() for name, buffer in module.named_buffers()}
    named = ((f"args[{i}]", x) for i, arg in enumerate(args) for x in _tensors_of(arg))
    arguments = [_leaf_entry(name, "argument", x) for name, x in named]
    watch = _Watch(module)
    try:
        with torch.enable_grad(), torch.random.fork_rng():
            loss = loss_fn(module, *args)
            gradients = _torch_gradients(module, loss)
    finally:
        watch.close()
        with torch.no_grad():
            for name, buffer in module.named_buffers():
                buffer.copy_(buffers[name])
    leaves = [*_parameters(module, gradients), *arguments]
    leaves += [
        _leaf_entry(name, "buffer", x) for name, x in buffers.items() if x.is_floating_point()
    ]
    run = watch.values, leaves, _numpy_of(loss).reshape(()), _dtype(loss)
    write_port(path, PortRun(*run, _torch_facts(module, loss)))


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
    found = torch.autograd.grad(loss, list(moving.values()), allow_unused=True)
    return dict(zip(moving, found, strict=True))


def _torch_facts(module: torch.nn.Module, loss: torch.Tensor) -> dict[str, Any]:
    modes = {own.training for own in module.modules()}
    mode = "train and eval" if len(modes) > 1 else "train" if True in modes else "eval"
    dropped = [
        name
        for name, own in module.named_modules()
        if isinstance(own, torch.nn.modules.dropout._DropoutNd) and own.training and own.p
    ]
    known = {"torch": torch.__version__, "device": str(loss.device)}
    return known | {"mode": mode, "dropout": dropped}


class _Watch:
    """Hooks on every module, which see values when they are computed.

    Attributes:
      values: what enters and leaves the modules, in order, with the cotangents that are known.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self.values: list[PortEntry] = []
        self._known: dict[int, tuple[Any, int, Any]] = {}
        self._handles: list[Any] = []
        for name, own in module.named_modules():
            enters = functools.partial(self._enters, name)
            leaves = functools.partial(self._leaves, name)
            self._handles.append(own.register_forward_pre_hook(enters, with_kwargs=True))
            self._handles.append(own.register_forward_hook(leaves))

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
            for i, x in enumerate(outputs[0].unbind(axis)):
                self._note(name, "module", module, x, (i,))
            for way, half in zip("+-" * module.bidirectional, halves, strict=False):
                self._note(f"{name}[{way}]", "module", module, half)
                for i, x in enumerate(half.unbind(axis)):
                    self._note(f"{name}[{way}]", "module", module, x, (i,))
        for part, x in _fused_parts(name, module, outputs, -1):
            self._note(part, "module", module, x)

    def _note(self, name: str, kind: str, module: Any, x: Any, steps: tuple[int, ...] = ()) -> None:
        if not x.is_floating_point() and not x.is_complex():
            return
        number, owner, signed = len(self.values), type(module).__name__, self._signed(x)
        self.values.append(PortEntry(name, kind, owner, steps, *_calling_line(), signed, None))
        if x.requires_grad and not steps and kind == "module":
            x.register_hook(functools.partial(self._keep, number))

    def _signed(self, x: torch.Tensor) -> Any:
        """The signatures of a tensor; what leaves a module mostly enters another as it is."""
        known, version, signed = self._known.get(id(x), (lambda: None, 0, None))
        if known() is not x or version != x._version:
            signed = _layouts_of(x)
            self._known[id(x)] = weakref.ref(x), x._version, signed
        return signed

    def _keep(self, number: int, cotangent: torch.Tensor) -> None:
        self.values[number] = self.values[number]._replace(cotangent=_layouts_of(cotangent))


def _calling_line() -> tuple[str | None, int | None]:
    """The innermost line that is neither of torch nor of this file."""
    frame: Any = sys._getframe(1)
    while frame and os.path.abspath(frame.f_code.co_filename).startswith(_OURS):
        frame = frame.f_back
    return (frame.f_code.co_filename, frame.f_lineno) if frame else (None, None)


def _parameters(module: torch.nn.Module, gradients: dict[str, Any]) -> Iterator[PortEntry]:
    """The parameters; fused ones in parts, too, and those of layers in a list as a stack."""
    known = dict(module.named_parameters())
    for name, x in known.items():
        own = module.get_submodule(name.rpartition(".")[0])
        gradient, owner = gradients.get(name), type(own).__name__
        yield _leaf_entry(name, "parameter", x, gradient, owner)
        for axis in {0, x.ndim - 1}:
            parts, grads = (_fused_parts(name, own, t, axis) for t in (x, gradient))
            for (part, own_part), (_, own_grad) in zip(parts, grads, strict=False):
                yield _leaf_entry(part, "parameter", own_part, own_grad, owner)
    for stack, names in _stacks(known).items():
        owner = type(module.get_submodule(names[0].rpartition(".")[0])).__name__
        grads = [g for n in names if (g := gradients.get(n)) is not None]
        gradient = torch.stack(grads) if len(grads) == len(names) else None
        own = torch.stack([known[n].detach() for n in names])
        yield _leaf_entry(stack, "parameter", own, gradient, owner)


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
    found: dict[str, list[str]] = collections.defaultdict(list)
    for name in known:
        segments = name.split(".")
        for i, segment in enumerate(segments):
            if segment.isdigit():
                found[".".join([*segments[:i], "*", *segments[i + 1 :]])].append(name)
    several = {stack: names for stack, names in found.items() if len(names) > 1}
    return {s: names for s, names in several.items() if len({known[n].shape for n in names}) == 1}


def _tensors_of(tree: Any) -> Iterator[torch.Tensor]:
    """The tensors in tuples, lists and dictionaries."""
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, dict | tuple | list):
        for own in tree.values() if isinstance(tree, dict) else tree:
            yield from _tensors_of(own)


def _leaf_entry(name: str, kind: str, x: Any, gradient: Any = None, owner: str = "") -> PortEntry:
    is_stack = "*" in name
    cotangent = None if gradient is None else _layouts_of(gradient, is_stack)
    return PortEntry(name, kind, owner, (), None, None, _layouts_of(x, is_stack), cotangent)


def _layouts_of(x: torch.Tensor, is_stack: bool = False) -> Any:
    return layouts(_numpy_of(x), _dtype(x), is_stack)


def _numpy_of(x: torch.Tensor) -> Any:
    """A tensor in NumPy, which has no bfloat16."""
    x = x.detach().cpu()
    is_narrow = x.is_floating_point() and x.dtype not in (torch.float32, torch.float64)
    return (x.to(torch.float32) if is_narrow else x).resolve_conj().numpy()


def _dtype(x: torch.Tensor) -> str:
    return str(x.dtype).removeprefix("torch.")
