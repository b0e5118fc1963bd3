"""Real images that come with scikit-learn: 1,797 handwritten digits of 8 x 8 pixels, in 17 shades."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import interpolate

__all__ = ["Digits", "load_digits", "shard"]

# One split for every seed, so that the accuracies of runs can be compared.
_SPLIT_SEED = 0
_TEST_SHARE = 0.2
_DARKEST = 16


@dataclass(frozen=True)
class Digits:
    """Images (N, 3, size, size) in float32 from -1 to 1, and labels (N,) in int64 from 0 to 9."""

    train_images: Tensor
    train_labels: Tensor
    test_images: Tensor
    test_labels: Tensor


def load_digits(*, image_size: int, images: int, device: torch.device) -> Digits:
    """Loads the digits onto a device, enlarged, with as many of each digit in the test split as its share."""
    from sklearn import datasets, model_selection

    pixels, labels = datasets.load_digits(return_X_y=True)
    train_pixels, test_pixels, train_labels, test_labels = model_selection.train_test_split(
        pixels, labels, test_size=_TEST_SHARE, stratify=labels, random_state=_SPLIT_SEED
    )
    return Digits(
        train_images=_images(train_pixels[:images], image_size).to(device),
        train_labels=torch.as_tensor(train_labels[:images]).to(device),
        test_images=_images(test_pixels, image_size).to(device),
        test_labels=torch.as_tensor(test_labels).to(device),
    )


def shard(
    digits: Digits, *, epoch: int, seed: int, rank: int, ranks: int, batch_size: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """One rank's batches of an epoch: the same in every run, and every rank has as many."""
    order = torch.randperm(len(digits.train_labels), generator=torch.Generator().manual_seed(seed + epoch))
    for start in range(0, len(order) - batch_size * ranks + 1, batch_size * ranks):
        own = order[start + rank * batch_size :][:batch_size].to(digits.train_labels.device)
        yield digits.train_images[own], digits.train_labels[own]


def _images(pixels: object, size: int) -> Tensor:
    shades = torch.as_tensor(pixels, dtype=torch.float32).reshape(-1, 1, 8, 8)
    enlarged = interpolate(shades / (_DARKEST / 2) - 1, size=(size, size), mode="bilinear", align_corners=False)
    return enlarged.repeat(1, 3, 1, 1)  # The model takes three colours.
