"""The same models in PyTorch, whose examples Opacus and fastDP clip."""

import contextlib
import io
from collections.abc import Callable
from typing import Any

import jax
import torch
from torch import nn
from torch.nn import functional

from benchmarks import timing
from benchmarks.per_example_models import Model, images_first
from benchmarks.rows import FLOOR, PEER, Absent, Side, optional

# Both divide by the norm + 1e-6, and sum in another order.
RTOL = 1e-3
Losses = Callable[..., torch.Tensor]


class MLP(nn.Module):
    """Tanh layers and a linear one."""

    def __init__(self, widths: list[int]) -> None:
        super().__init__()
        pairs = zip(widths[:-1], widths[1:], strict=True)
        self.layers = nn.ModuleList(nn.Linear(n, m, bias=False) for n, m in pairs)

    def forward(self, x: Any, y: Any) -> Any:
        """The losses of the examples."""
        for layer in self.layers[:-1]:
            x = torch.tanh(layer(x))
        return ((self.layers[-1](x) - y) ** 2).mean(-1)


class CNN(nn.Module):
    """Three convolutions, the mean over the image, and a dense layer."""

    def __init__(self, widths: list[int]) -> None:
        super().__init__()
        pairs = enumerate(zip(widths[:-1], widths[1:], strict=True))
        self.layers = nn.ModuleList(nn.Conv2d(n, m, 3, 1 + (i > 0), 1) for i, (n, m) in pairs)
        self.head = nn.Linear(widths[-1], 10, bias=False)

    def forward(self, x: Any, label: Any) -> Any:
        """The losses of the examples."""
        for layer in self.layers:
            x = torch.relu(layer(x))
        return functional.cross_entropy(self.head(x.mean((2, 3))), label.long(), reduction="none")


class Normed(nn.Module):
    """A convolution and a group norm."""

    def __init__(self, inputs: int, outputs: int, side: int = 3, stride: int = 1) -> None:
        super().__init__()
        self.kernel = nn.Conv2d(inputs, outputs, side, stride, side // 2, bias=False)
        self.norm = nn.GroupNorm(4, outputs)

    def forward(self, x: Any) -> Any:
        """The normed result."""
        return self.norm(self.kernel(x))


class Block(nn.Module):
    """Two layers and the way around them."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        stride = 1 + (inputs != outputs)
        self.first = Normed(inputs, outputs, stride=stride)
        self.second = Normed(outputs, outputs)
        self.project = Normed(inputs, outputs, 1, stride) if stride > 1 else nn.Identity()

    def forward(self, x: Any) -> Any:
        """The sum of both ways."""
        return torch.relu(self.second(torch.relu(self.first(x))) + self.project(x))


class ResNet(nn.Module):
    """ResNet-18's form with group norm."""

    def __init__(self, width: int, stages: tuple[int, ...]) -> None:
        super().__init__()
        self.stem = Normed(3, width)
        widths = [width] + [width * factor for factor in stages]
        pairs = zip(widths[:-1], widths[1:], strict=True)
        self.blocks = nn.Sequential(*[Block(n, m) for n, m in pairs])
        self.head = nn.Linear(widths[-1], 10, bias=False)

    def forward(self, x: Any, label: Any) -> Any:
        """The losses of the examples."""
        x = self.blocks(torch.relu(self.stem(x))).mean((2, 3))
        return functional.cross_entropy(self.head(x), label.long(), reduction="none")


class Layer(nn.Module):
    """Attention of one head and an MLP, each behind a norm."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width, eps=1e-6)
        for name in ("query", "key", "value", "out"):
            setattr(self, name, nn.Linear(width, width, bias=False))
        self.norm2 = nn.LayerNorm(width, eps=1e-6)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Any) -> Any:
        """The next values at all positions."""
        y = self.norm1(x)
        query, key, value = self.query(y), self.key(y), self.value(y)
        scores = torch.softmax(query @ key.transpose(1, 2) * query.shape[-1] ** -0.5, -1)
        x = x + self.out(scores @ value)
        return x + self.down(functional.gelu(self.up(self.norm2(x)), approximate="tanh"))


class Transformer(nn.Module):
    """Layers one after the other; PyTorch keeps what they compute."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(*[Layer(width) for _ in range(layers)])

    def forward(self, x: Any) -> Any:
        """The losses of the examples."""
        return (self.layers(x) ** 2).mean((1, 2))


class LSTM(nn.Module):
    """Opacus's LSTM, since nothing can hook into PyTorch's own."""

    def __init__(self, width: int) -> None:
        super().__init__()
        from opacus.layers import DPLSTM

        self.lstm = DPLSTM(width, width, bias=False, batch_first=True)

    def forward(self, x: Any) -> Any:
        """The losses of the examples."""
        return (self.lstm(x)[0][:, -1] ** 2).mean(-1)


class LanguageModel(nn.Module):
    """An embedding, layers, and a head, which may be the embedding."""

    def __init__(self, tokens: int, width: int, layers: int, tied: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(tokens, width)
        self.layers = nn.Sequential(*[Layer(width) for _ in range(layers)])
        self.head = nn.Linear(width, tokens, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, ids: Any) -> Any:
        """The losses of the examples."""
        logits = self.head(self.layers(self.embedding(ids[:, :-1].long())))
        labels = ids[:, 1:].long()
        return functional.cross_entropy(logits.mT, labels, reduction="none").mean(-1)


def twin(model: Model) -> nn.Module:
    """The module with the model's weights."""
    module = globals()[model.twin](**model.sizes)
    weights = model.to_torch(model.params)
    with torch.no_grad():
        for parameter, weight in zip(module.parameters(), weights, strict=True):
            parameter.copy_(torch.from_numpy(weight))
    return module


def _side(name: str, kind: str, call: Callable[[], list[torch.Tensor]]) -> Side | Absent:
    """A side, or what the library says when it can't run the model."""
    try:
        call()
    except (NotImplementedError, AttributeError, ValueError, RuntimeError) as error:
        return Absent(name, f"refuses the model: {str(error).splitlines()[0][:100]}")
    numbers = (lambda: [g.numpy().copy() for g in call()]) if kind == PEER else None
    facts = {"threads": torch.get_num_threads()}
    return Side(name, kind, timing.running(call), numbers, facts, RTOL)


def plain(model: Model, batch: Any) -> Side | Absent:
    """The gradient of the sum of all losses, without a clip."""
    module, inputs = twin(model), list(map(torch.from_numpy, images_first(batch)))

    def call() -> list[torch.Tensor]:
        module.zero_grad()
        module(*inputs).sum().backward()
        return [p.grad for p in module.parameters()]

    return _side("torch, no clip", FLOOR, call)


def opacus_hooks(model: Model, batch: Any) -> Side | Absent:
    """Opacus as it is by default: each layer makes the gradients of all examples."""

    def make(grad_sample: Any) -> Side | Absent:
        from opacus.optimizers import DPOptimizer

        inputs = list(map(torch.from_numpy, images_first(batch)))
        module = grad_sample.GradSampleModule(twin(model), loss_reduction="sum")
        params = list(module.parameters())
        optimizer = DPOptimizer(
            torch.optim.SGD(params, lr=0.0),
            noise_multiplier=0.0,
            max_grad_norm=model.limit,
            expected_batch_size=len(inputs[0]),
            loss_reduction="sum",
        )

        def call() -> list[torch.Tensor]:
            optimizer.zero_grad()
            module(*inputs).sum().backward()
            optimizer.clip_and_accumulate()
            return [p.summed_grad for p in params]

        return _side("Opacus", PEER, call)

    return optional("Opacus", "opacus.grad_sample", make)


def opacus_ghost(model: Model, batch: Any) -> Side | Absent:
    """Opacus's ghost clipping: norms first, then the gradient of the weighted losses."""

    def make(clipping: Any) -> Side | Absent:
        inputs = list(map(torch.from_numpy, images_first(batch)))
        module = clipping.GradSampleModuleFastGradientClipping(
            twin(model), loss_reduction="sum", max_grad_norm=model.limit, use_ghost_clipping=True
        )
        optimizer = torch.optim.SGD(module.parameters(), lr=0.0)

        def call() -> list[torch.Tensor]:
            optimizer.zero_grad()
            losses = module(*inputs)
            clipping.DPTensorFastGradientClipping(module, optimizer, losses, "sum").backward()
            module.enable_hooks()
            return [p.grad for p in module.parameters()]

        return _side("Opacus, ghost", PEER, call)

    return optional("Opacus, ghost", "opacus.utils.fast_gradient_clipping_utils", make)


def fast_dp(model: Model, batch: Any) -> Side | Absent:
    """FastDP's book-keeping, in which plain gradients are made of the first layer alone."""

    def make(library: Any) -> Side | Absent:
        inputs = list(map(torch.from_numpy, images_first(batch)))
        module = twin(model)
        first = next(name for name, _ in module.named_parameters())
        with contextlib.redirect_stdout(io.StringIO()):
            library.PrivacyEngine(
                module,
                batch_size=len(inputs[0]),
                sample_size=len(inputs[0]),
                epochs=1,
                noise_multiplier=0.0,
                max_grad_norm=model.limit,
                clipping_fn="Abadi",
                loss_reduction="sum",
                origin_params=[first],
            )

        def call() -> list[torch.Tensor]:
            for p in module.parameters():
                p.__dict__.pop("private_grad", None)
            module(*inputs).sum().backward()
            return [p.private_grad for p in module.parameters()]

        return _side("fastDP", PEER, call)

    if model.twin == "LSTM" or model.sizes.get("tied"):
        return Absent("fastDP", "it has no LSTM and no weights that two layers share")
    return optional("fastDP", "fastDP", make)


def sides(model: Model, batch: Any) -> list[Side | Absent]:
    """All of them; JAX's own are on the CPU as well."""
    if jax.default_backend() != "cpu":
        return [Absent("Opacus", "torch is timed beside JAX on the CPU only")]
    return [make(model, batch) for make in (opacus_hooks, opacus_ghost, fast_dp, plain)]
