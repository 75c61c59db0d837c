"""Torch models with the shapes of those in ``families.py``, for the comparison with Opacus."""

from collections.abc import Callable
from itertools import pairwise
from typing import NamedTuple

import torch
from opacus.layers import DPLSTM
from torch import nn
from torch.nn import functional as F


class TorchFamily(NamedTuple):
    """One model at one batch size; ``twin`` is the same function, built from layers that Opacus supports."""

    model: nn.Module
    twin: nn.Module
    names: list[str]  # the model's parameters, in the order of the twin's
    x: torch.Tensor
    y: torch.Tensor


class MeanPool(nn.Module):
    """Mean over the last two axes (an image) or the one before the last (a text)."""

    def __init__(self, *axes: int):
        super().__init__()
        self.axes = axes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.mean(self.axes)


class Positions(nn.Module):
    """Adds a learned vector to every position."""

    def __init__(self, length: int, width: int):
        super().__init__()
        self.weight = nn.Parameter(0.02 * torch.randn(length, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.weight


class Block(nn.Module):
    """A pre-norm transformer block, built from layers that Opacus's ghost clipping supports."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))
        self.dense = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norms[0](x)
        q, k, v = (f(h).unflatten(-1, (self.heads, -1)).transpose(1, 2) for f in (self.query, self.key, self.value))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(-2))
        return x + self.dense(self.norms[1](x))


class LSTMClassifier(nn.Module):
    """Classifies the last state of an LSTM (torch's or Opacus's) over embedded tokens."""

    def __init__(self, lstm: Callable[..., nn.Module], vocabulary: int = 10_000, size: int = 64, outputs: int = 2):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, size)
        self.lstm = lstm(size, size, batch_first=True)
        self.head = nn.Linear(size, outputs)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(self.embedding(tokens))[0][:, -1])


def _tokens(vocabulary: int, *shape: int) -> torch.Tensor:
    # Zipf-distributed, because the words of a text repeat.
    weights = 1 / torch.arange(1, vocabulary + 1) ** 1.3
    return torch.multinomial(weights.repeat(shape[0], 1), shape[1], replacement=True)


def _same(model: nn.Module, x: torch.Tensor, classes: int) -> TorchFamily:
    names = [name for name, _ in model.named_parameters()]
    return TorchFamily(model, model, names, x, torch.randint(classes, (len(x),)))


def mlp(widths: tuple[int, ...] = (784, 1024, 1024), outputs: int = 10, batch: int = 256) -> TorchFamily:
    hidden = [m for a, b in pairwise(widths) for m in (nn.Linear(a, b), nn.ReLU())]
    return _same(nn.Sequential(*hidden, nn.Linear(widths[-1], outputs)), torch.randn(batch, widths[0]), outputs)


def cnn() -> TorchFamily:
    sizes = ((3, 32, 1), (32, 64, 2), (64, 64, 2), (64, 128, 2))
    layers = [m for a, b, s in sizes for m in (nn.Conv2d(a, b, 3, stride=s, padding=1), nn.ReLU())]
    return _same(nn.Sequential(*layers, MeanPool(-1, -2), nn.Linear(128, 10)), torch.randn(128, 3, 32, 32), 10)


def transformer(length: int) -> TorchFamily:
    layers = [nn.Embedding(5_000, 128), Positions(length, 128), Block(128, 4), Block(128, 4), MeanPool(-2)]
    return _same(nn.Sequential(*layers, nn.Linear(128, 2)), _tokens(5_000, 32, length), 2)


def lstm(length: int = 128, batch: int = 64) -> TorchFamily:
    """An LSTM classifier. Torch's LSTM is one library call; Opacus needs its own, which is a Python loop."""
    model, twin = LSTMClassifier(nn.LSTM), LSTMClassifier(DPLSTM)
    inside = [f"lstm.{kind}_{part}_l0" for part in ("ih", "hh") for kind in ("weight", "bias")]
    names = ["embedding.weight", *inside, "head.weight", "head.bias"]
    own = dict(model.named_parameters())
    with torch.no_grad():
        for p, name in zip(twin.parameters(), names, strict=True):
            p.copy_(own[name])
    return TorchFamily(model, twin, names, _tokens(10_000, batch, length), torch.randint(2, (batch,)))


MODELS: dict[str, Callable[[], TorchFamily]] = {
    "MLP 784-1024-1024-10, B 256": mlp,
    "CNN 4 conv, B 128": cnn,
    "Transformer T 64, B 32": lambda: transformer(64),
    "LSTM T 128, B 64": lstm,
}
