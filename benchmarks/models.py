"""Models to train, sized for a CPU and shaped like the real thing, with random data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

_CLASSES = 10
_FEATURES = 512


class GPT(nn.Module):
    """Tokens of shape ``(n, tokens)`` to logits of shape ``(n * tokens, vocabulary)``.

    No dropout: every variant takes the same path through the same numbers.
    """

    def __init__(self, *, layers: int, width: int, heads: int, vocabulary: int, tokens: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.position = nn.Parameter(torch.zeros(tokens, width))
        self.blocks = nn.Sequential(*(_Layer(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        nn.init.normal_(self.embed.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.norm(self.blocks(self.embed(tokens) + self.position))
        return nn.functional.linear(hidden, self.embed.weight).flatten(0, 1)


class _Layer(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self._heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.attention = nn.Linear(width, 3 * width)
        self.projection = nn.Linear(width, width)
        self.feed_forward = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(approximate="tanh"), nn.Linear(4 * width, width)
        )

    def forward(self, hidden: Tensor) -> Tensor:
        batch, tokens, width = hidden.shape
        heads = self.attention(self.attention_norm(hidden)).view(batch, tokens, 3, self._heads, -1)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        attended = scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.projection(attended.transpose(1, 2).reshape(batch, tokens, width))
        return hidden + self.feed_forward(hidden)  # type: ignore[no-any-return]


# Name -> blocks of each of the four stages, and whether they are bottlenecks.
RESNETS = {"resnet18": ((2, 2, 2, 2), False), "resnet50": ((3, 4, 6, 3), True)}
_EXPANSION = 4


class ResNet(nn.Module):
    """The network called ``name``: images of shape ``(n, 3, height, width)`` to logits of shape ``(n, classes)``.

    ``channels`` are those of the first stage, doubled in each that follows.
    """

    def __init__(self, name: str, *, channels: int = 64, classes: int = 1000) -> None:
        super().__init__()
        depths, is_deep = RESNETS[name]
        self.stem = nn.Sequential(
            *_convolution(3, channels, 7, stride=2), nn.ReLU(), nn.MaxPool2d(3, stride=2, padding=1)
        )
        blocks: list[nn.Module] = []
        widths = [channels * 2**stage for stage in range(len(depths))]
        for stage, (depth, width) in enumerate(zip(depths, widths, strict=True)):
            for place in range(depth):
                out = width * _EXPANSION if is_deep else width
                blocks.append(_Residual(channels, width, out, stride=2 if stage and not place else 1))
                channels = out
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(channels, classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.blocks(self.stem(images)).mean(dim=(2, 3)))  # type: ignore[no-any-return]


class _Residual(nn.Module):
    """Two convolutions of 3 x 3; or one, between two of 1 x 1, where it hands on more channels than it works on."""

    def __init__(self, channels: int, width: int, out: int, *, stride: int) -> None:
        super().__init__()
        if out > width:
            layers = [
                *_convolution(channels, width, 1), nn.ReLU(),
                *_convolution(width, width, 3, stride=stride), nn.ReLU(),
                *_convolution(width, out, 1),
            ]  # fmt: skip
        else:
            layers = [*_convolution(channels, width, 3, stride=stride), nn.ReLU(), *_convolution(width, out, 3)]
        self.layers = nn.Sequential(*layers)
        self.shortcut = nn.Sequential(*_convolution(channels, out, 1, stride=stride) if channels != out else ())

    def forward(self, hidden: Tensor) -> Tensor:
        return torch.relu(self.layers(hidden) + self.shortcut(hidden))


def _convolution(channels: int, out: int, size: int, *, stride: int = 1) -> list[nn.Module]:
    return [nn.Conv2d(channels, out, size, stride, size // 2, bias=False), nn.BatchNorm2d(out)]


@dataclass(frozen=True, kw_only=True)
class Workload:
    """`make_model()` builds the model, `make_batch(size)` an input and its target."""

    make_model: Callable[[], nn.Module]
    make_batch: Callable[[int], tuple[Tensor, Tensor]]
    # Of autocast on a GPU; None computes in fp32.
    autocast: torch.dtype | None = None


def _classified(make_model: Callable[[], nn.Module], *shape: int, **options: Any) -> Workload:
    """Random inputs of this shape, and classes."""

    def make_batch(size: int) -> tuple[Tensor, Tensor]:
        return torch.randn(size, *shape), torch.randint(_CLASSES, (size,))

    return Workload(make_model=make_model, make_batch=make_batch, **options)


def _photographs() -> Workload:
    """ResNet-50 on images of 224 x 224, in the layout that GPUs convolve fastest."""

    def make_model() -> nn.Module:
        return ResNet("resnet50").to(memory_format=torch.channels_last)  # type: ignore[call-overload, no-any-return]

    def make_batch(size: int) -> tuple[Tensor, Tensor]:
        images = torch.randn(size, 3, 224, 224).contiguous(memory_format=torch.channels_last)
        return images, torch.randint(_CLASSES, (size,))

    return Workload(make_model=make_model, make_batch=make_batch, autocast=torch.bfloat16)


def _language(layers: int, width: int, vocabulary: int, tokens: int) -> Workload:
    """A language model with heads of 64 features, on random sequences."""
    make_model = partial(GPT, layers=layers, width=width, heads=width // 64, vocabulary=vocabulary, tokens=tokens)

    def make_batch(size: int) -> tuple[Tensor, Tensor]:
        shape = size, tokens
        return torch.randint(vocabulary, shape), torch.randint(vocabulary, shape).flatten()

    return Workload(make_model=make_model, make_batch=make_batch, autocast=torch.bfloat16)


def _mlp(*, batch_norm: bool) -> nn.Module:
    """Four layers, 0.8 M parameters; BatchNorm adds buffers, which DDP broadcasts in each forward."""
    layers: list[nn.Module] = []
    for _ in range(3):
        norm = [nn.BatchNorm1d(_FEATURES)] if batch_norm else []
        layers += [nn.Linear(_FEATURES, _FEATURES), *norm, nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(_FEATURES, _CLASSES))


WORKLOADS = {
    "resnet18": _classified(partial(ResNet, "resnet18"), 3, 64, 64),
    "resnet50": _classified(partial(ResNet, "resnet50"), 3, 64, 64),
    "resnet50-224": _photographs(),
    "resnet-small": _classified(partial(ResNet, "resnet18", channels=8), 3, 32, 32),
    "transformer": _language(layers=4, width=256, vocabulary=4096, tokens=64),
    "gpt-small": _language(layers=2, width=64, vocabulary=512, tokens=32),
    "gpt-25m": _language(layers=6, width=512, vocabulary=16384, tokens=64),
    "gpt-100m": _language(layers=12, width=768, vocabulary=16384, tokens=64),
    "gpt-350m": _language(layers=24, width=1024, vocabulary=50304, tokens=1024),
    "gpt-1.3b": _language(layers=24, width=2048, vocabulary=50304, tokens=1024),
    "mlp": _classified(partial(_mlp, batch_norm=False), _FEATURES),
    "mlp-batchnorm": _classified(partial(_mlp, batch_norm=True), _FEATURES),
}
