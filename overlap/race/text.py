"""A Transformer on text, byte by byte: the documentation that comes with Python, or a file."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from overlap.bench.gpt import GPT, GPTConfig
from overlap.errors import ConfigurationError
from overlap.race.contestants import OptimizerKind
from overlap.race.settings import Settings
from overlap.race.task import Task, digest

__all__ = ["documentation", "split", "text_task"]

_BYTES = 256
_TOKENS = 32
_LAYERS = 2
_HEADS = 4
# One block in ten is held out: neighbours of what is trained on, never the same text.
_BLOCK_BYTES = 2048
_HELD_OUT = 10
_EVALUATED_SEQUENCES = 128
_EVALUATED_TOGETHER = 32


def text_task(settings: Settings) -> Task:
    """The task ``text``: the next byte of Python's documentation, or of the file that ``data`` names."""
    if settings.data is None:
        text, name = documentation(), "Python's documentation (pydoc_data.topics)"
    else:
        text, name = _read(settings.data), Path(settings.data).name
    if len(text) < _HELD_OUT * _BLOCK_BYTES:
        raise ConfigurationError(
            f"data={settings.data!r} has {len(text)} bytes: give at least {_HELD_OUT * _BLOCK_BYTES}"
        )
    train, held_out = (torch.frombuffer(bytearray(part), dtype=torch.uint8) for part in split(text))
    inputs, targets = _sequences(held_out)
    config = GPTConfig(layers=_LAYERS, width=settings.width, heads=_HEADS, vocabulary=_BYTES, tokens=_TOKENS)

    def batches(seed: int, rank: int, ranks: int) -> Iterator[tuple[Tensor, Tensor]]:
        own = settings.batch_size // ranks
        generator = torch.Generator().manual_seed(seed)
        for _ in itertools.count():
            # Every rank draws the whole batch and takes its part.
            starts = torch.randint(len(train) - _TOKENS, (settings.batch_size,), generator=generator)
            windows = train[starts[rank * own :][:own, None] + torch.arange(_TOKENS + 1)].long()
            yield windows[:, :-1], windows[:, 1:].flatten()

    return Task(
        data=f"{len(text):,} bytes of {name} ({digest(text)})",
        model=f"a Transformer of {_LAYERS} layers of width {settings.width} on {_TOKENS} bytes",
        make_model=lambda: _model(config),
        batches=batches,
        evaluate=lambda model: _loss(model, inputs, targets),
        optimizer=OptimizerKind(torch.optim.AdamW, {"lr": 5e-3, "weight_decay": 1e-2, "fused": True}),
    )


def _model(config: GPTConfig) -> GPT:
    """Embeddings do not begin near zero: telling bytes and places apart would then take too many of the few steps."""
    model = GPT(config)
    for weights in (model.embed.weight, model.position):
        nn.init.normal_(weights, std=1 / math.sqrt(config.width))
    return model


def documentation() -> bytes:
    """The reference of the language that ``help()`` shows, 79 topics in Python 3.11, the same wherever that is."""
    try:
        topics: dict[str, str] = import_module("pydoc_data.topics").topics
    except ImportError as error:
        raise ConfigurationError(f"this Python comes without pydoc_data.topics ({error}): give --data FILE") from None
    return "\n\n".join(topics[name] for name in sorted(topics)).encode()


def split(text: bytes) -> tuple[bytes, bytes]:
    """What is trained on and what is held out: every tenth block."""
    blocks = [text[start : start + _BLOCK_BYTES] for start in range(0, len(text), _BLOCK_BYTES)]
    train = b"".join(block for place, block in enumerate(blocks) if place % _HELD_OUT != _HELD_OUT - 1)
    return train, b"".join(blocks[_HELD_OUT - 1 :: _HELD_OUT])


def _sequences(text: Tensor) -> tuple[Tensor, Tensor]:
    """As many sequences as are evaluated, evenly from all of ``text``."""
    count = min(_EVALUATED_SEQUENCES, len(text) // (_TOKENS + 1))
    starts = torch.linspace(0, len(text) - _TOKENS - 1, count).long()
    windows = text[starts[:, None] + torch.arange(_TOKENS + 1)].long()
    return windows[:, :-1], windows[:, 1:]


def _loss(model: nn.Module, inputs: Tensor, targets: Tensor) -> float:
    parts = zip(inputs.split(_EVALUATED_TOGETHER), targets.split(_EVALUATED_TOGETHER), strict=True)
    total = sum(float(cross_entropy(model(some), truth.flatten(), reduction="sum")) for some, truth in parts)
    return total / targets.numel()


def _read(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ConfigurationError(f"data={path!r} cannot be read: {error.strerror}") from None
