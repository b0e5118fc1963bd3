"""What is trained: a model, a batch of random data and a loss, sized for a CPU and shaped like the real thing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from overlap.bench.gpt import GPT, GPT_350M, GPTConfig
from overlap.bench.resnet import ResNet

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
