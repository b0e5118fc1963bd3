"""The tasks of a race: a model, its data and its metric."""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pydoc_data.topics import topics

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from benchmarks.models import GPT, ResNet
from benchmarks.recipes import Maker
from overlap.demo import TRAIN_IMAGES, load_digits, shard

# Of the Transformer.
_LAYERS, _TOKENS = 2, 32


@dataclass(frozen=True, kw_only=True)
class Task:
    """A task with its data, loaded."""

    # In words, with a digest that tells it from other data.
    data: str
    # In words, for the title of a table.
    model: str
    make_model: Callable[[], nn.Module]
    # The batches of a rank, without end: ``batches(seed, rank, ranks)``.
    batches: Callable[[int, int, int], Iterator[tuple[Tensor, Tensor]]]
    # The metric of a model in evaluation mode, on data that it was not trained on.
    evaluate: Callable[[nn.Module], float]
    # The optimizer; its learning rate is the highest of the schedule.
    make: Maker


def load_task(name: str, *, width: int, batch_size: int) -> Task:
    """The task ``digits`` or ``text``; the batch is that of all ranks together."""
    return (_digits if name == "digits" else _text)(width, batch_size)


def _digits(width: int, batch_size: int) -> Task:
    images = load_digits(image_size=32, images=TRAIN_IMAGES, device=torch.device("cpu"))

    def batches(seed: int, rank: int, ranks: int) -> Iterator[tuple[Tensor, Tensor]]:
        # Epochs far apart, so that no two seeds share an order.
        for epoch in itertools.count(seed * 10_000):
            yield from shard(images, epoch=epoch, seed=0, rank=rank, ranks=ranks, batch_size=batch_size // ranks)

    def accuracy(model: nn.Module) -> float:
        parts = zip(images.test_images.split(180), images.test_labels.split(180), strict=True)
        return sum(int((model(some).argmax(dim=1) == truth).sum()) for some, truth in parts) / len(images.test_labels)

    return Task(
        data=f"{TRAIN_IMAGES} of scikit-learn's digits ({_digest(images.train_images.numpy().tobytes())})",
        model=f"ResNet-18 of width {width}",
        make_model=lambda: ResNet("resnet18", channels=width, classes=10),
        batches=batches,
        evaluate=accuracy,
        make=Maker(torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "weight_decay": 5e-4, "fused": True}),
    )


def _text(width: int, batch_size: int) -> Task:
    """The next byte of the reference of the language that ``help()`` shows, the same wherever that Python is."""
    text = "\n\n".join(topics[name] for name in sorted(topics)).encode()
    # One block in ten is held out: neighbours of the text that is trained on, never the same.
    blocks = [text[start : start + 2048] for start in range(0, len(text), 2048)]
    train = torch.frombuffer(
        bytearray().join(one for place, one in enumerate(blocks) if place % 10 != 9), dtype=torch.uint8
    )
    held_out = torch.frombuffer(bytearray().join(blocks[9::10]), dtype=torch.uint8)

    def windows(data: Tensor, starts: Tensor) -> tuple[Tensor, Tensor]:
        found = data[starts[:, None] + torch.arange(_TOKENS + 1)].long()
        return found[:, :-1], found[:, 1:]

    def batches(seed: int, rank: int, ranks: int) -> Iterator[tuple[Tensor, Tensor]]:
        own = batch_size // ranks
        generator = torch.Generator().manual_seed(seed)
        while True:
            # Every rank draws the whole batch and takes its part.
            starts = torch.randint(len(train) - _TOKENS, (batch_size,), generator=generator)
            inputs, targets = windows(train, starts[rank * own :][:own])
            yield inputs, targets.flatten()

    def make_model() -> nn.Module:
        # Embeddings do not begin near zero: telling bytes and places apart would then take too many of the few steps.
        model = GPT(layers=_LAYERS, width=width, heads=4, vocabulary=256, tokens=_TOKENS)
        for weights in (model.embed.weight, model.position):
            nn.init.normal_(weights, std=1 / math.sqrt(width))
        return model

    inputs, targets = windows(held_out, torch.linspace(0, len(held_out) - _TOKENS - 1, 128).long())

    def loss(model: nn.Module) -> float:
        parts = zip(inputs.split(32), targets.split(32), strict=True)
        total = sum(float(cross_entropy(model(some), truth.flatten(), reduction="sum")) for some, truth in parts)
        return total / targets.numel()

    return Task(
        data=f"{len(text):,} bytes of Python's documentation (pydoc_data.topics) ({_digest(text)})",
        model=f"a Transformer of {_LAYERS} layers of width {width} on {_TOKENS} bytes",
        make_model=make_model,
        batches=batches,
        evaluate=loss,
        make=Maker(torch.optim.AdamW, {"lr": 5e-3, "weight_decay": 1e-2, "fused": True}),
    )


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:12]
