"""ResNet-18 on images: scikit-learn's digits, or CIFAR-10 from a folder."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from overlap._torchvision import load_torchvision
from overlap.bench.resnet import ResNet
from overlap.demo.data import Digits, load_digits, shard
from overlap.demo.settings import TRAIN_IMAGES
from overlap.errors import ConfigurationError
from overlap.race.contestants import OptimizerKind
from overlap.race.settings import Settings
from overlap.race.task import Task, digest

__all__ = ["image_task"]

_CLASSES = 10
_IMAGE_SIZE = 32
_EVALUATED_TOGETHER = 180


def image_task(settings: Settings) -> Task:
    """The task ``digits`` or ``cifar``."""
    if settings.task == "digits":
        images = load_digits(image_size=_IMAGE_SIZE, images=TRAIN_IMAGES, device=torch.device("cpu"))
        data = f"{len(images.train_labels)} of scikit-learn's digits"
    else:
        assert settings.data is not None
        images = _load_cifar(settings.data)
        data = f"{len(images.train_labels)} images of CIFAR-10"
    if settings.batch_size > len(images.train_labels):
        raise ConfigurationError(
            f"batch_size={settings.batch_size} is more than the {len(images.train_labels)} images to train on"
        )

    def batches(seed: int, rank: int, ranks: int) -> Iterator[tuple[Tensor, Tensor]]:
        # Epochs far apart, so that no two seeds share an order.
        for epoch in itertools.count(seed * 10_000):
            yield from shard(
                images, epoch=epoch, seed=0, rank=rank, ranks=ranks, batch_size=settings.batch_size // ranks
            )

    return Task(
        data=f"{data} ({digest(images.train_images.numpy().tobytes())})",
        model=f"ResNet-18 of width {settings.width}",
        make_model=lambda: ResNet("resnet18", channels=settings.width, classes=_CLASSES),
        batches=batches,
        evaluate=lambda model: _accuracy(model, images.test_images, images.test_labels),
        optimizer=OptimizerKind(torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "weight_decay": 5e-4, "fused": True}),
    )


def _accuracy(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    parts = zip(images.split(_EVALUATED_TOGETHER), labels.split(_EVALUATED_TOGETHER), strict=True)
    right = sum(int((model(some).argmax(dim=1) == truth).sum()) for some, truth in parts)
    return right / len(labels)


def _load_cifar(folder: str) -> Digits:
    datasets = load_torchvision().datasets
    try:
        train, test = (datasets.CIFAR10(folder, train=is_train, download=False) for is_train in (True, False))
    except (RuntimeError, OSError) as error:
        raise ConfigurationError(
            f"data={folder!r} holds no CIFAR-10 in Python's format (cifar-10-batches-py): {error}"
        ) from None
    return Digits(_pixels(train), torch.as_tensor(train.targets), _pixels(test), torch.as_tensor(test.targets))


def _pixels(dataset: Any) -> Tensor:
    return torch.as_tensor(dataset.data).permute(0, 3, 1, 2).float().div_(127.5).sub_(1).contiguous()
