"""What is trained: models sized for a CPU and shaped like the real thing, on random data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention


@dataclass(frozen=True, kw_only=True)
class GPTConfig:
    """Its size. No dropout: every variant takes the same path through the same numbers."""

    layers: int
    width: int
    heads: int
    vocabulary: int
    """A multiple of 64, for the matrix units."""
    tokens: int
    """In a sequence."""


# 355 M parameters, "GPT-2 medium".
GPT_350M = GPTConfig(layers=24, width=1024, heads=16, vocabulary=50304, tokens=1024)


class GPT(nn.Module):
    """Tokens of shape ``(n, config.tokens)`` to logits of shape ``(n * config.tokens, config.vocabulary)``."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.embed = nn.Embedding(config.vocabulary, config.width)
        self.position = nn.Parameter(torch.zeros(config.tokens, config.width))
        self.blocks = nn.Sequential(*(_Layer(config.width, config.heads) for _ in range(config.layers)))
        self.norm = nn.LayerNorm(config.width)
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


_CLASSES = 10
_IMAGE = (3, 64, 64)
_VOCABULARY = 4096
_TOKENS = 64
_FEATURES = 512


@dataclass(frozen=True, kw_only=True)
class Workload:
    """`make_model()` builds the model, `make_batch(size)` an input and its target."""

    make_model: Callable[[], nn.Module]
    make_batch: Callable[[int], tuple[Tensor, Tensor]]
    # What autocast computes in on a GPU; None computes in fp32.
    autocast: torch.dtype | None = None


class LanguageModel(nn.Module):
    """A plain Transformer encoder over tokens with an untied head: 5.3 M parameters."""

    def __init__(self, *, width: int = 256, layers: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(_VOCABULARY, width)
        self.position = nn.Parameter(torch.zeros(_TOKENS, width))
        # Without dropout every variant takes the same path through the same numbers.
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, _VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.encoder(self.embed(tokens) + self.position)
        return self.head(hidden).flatten(0, 1)  # type: ignore[no-any-return]


def workload(name: str) -> Workload:
    """The workload called `name` on the command line."""
    if name == "mlp":
        return Workload(make_model=_mlp, make_batch=_feature_batch)
    if name == "mlp-batchnorm":
        return Workload(make_model=_mlp_with_batch_norm, make_batch=_feature_batch)
    if name == "transformer":
        return Workload(make_model=LanguageModel, make_batch=_token_batch)
    if name == "gpt-350m":
        return gpt_workload(GPT_350M)
    return Workload(make_model=partial(ResNet, name), make_batch=_image_batch)


def gpt_workload(config: GPTConfig) -> Workload:
    """A language model on random sequences."""

    def make_batch(size: int) -> tuple[Tensor, Tensor]:
        shape = size, config.tokens
        return torch.randint(config.vocabulary, shape), torch.randint(config.vocabulary, shape).flatten()

    return Workload(make_model=partial(GPT, config), make_batch=make_batch, autocast=torch.bfloat16)


def _mlp() -> nn.Module:
    """Four layers, 0.8 M parameters."""
    return nn.Sequential(
        nn.Linear(_FEATURES, _FEATURES), nn.ReLU(),
        nn.Linear(_FEATURES, _FEATURES), nn.ReLU(),
        nn.Linear(_FEATURES, _FEATURES), nn.ReLU(),
        nn.Linear(_FEATURES, _CLASSES),
    )  # fmt: skip


def _mlp_with_batch_norm() -> nn.Module:
    """The same with what DDP broadcasts in each forward: running means and variances."""
    layers = [
        layer
        for _ in range(3)
        for layer in (nn.Linear(_FEATURES, _FEATURES), nn.BatchNorm1d(_FEATURES), nn.ReLU())
    ]  # fmt: skip
    return nn.Sequential(*layers, nn.Linear(_FEATURES, _CLASSES))


def _feature_batch(size: int) -> tuple[Tensor, Tensor]:
    return torch.randn(size, _FEATURES), torch.randint(_CLASSES, (size,))


def _image_batch(size: int) -> tuple[Tensor, Tensor]:
    return torch.randn(size, *_IMAGE), torch.randint(_CLASSES, (size,))


def _token_batch(size: int) -> tuple[Tensor, Tensor]:
    return torch.randint(_VOCABULARY, (size, _TOKENS)), torch.randint(_VOCABULARY, (size * _TOKENS,))
