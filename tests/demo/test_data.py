"""The digits, and how ranks share them out."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from overlap.demo.data import Digits, load_digits, shard
from overlap.demo.settings import TRAIN_IMAGES


@pytest.fixture(scope="module")
def digits() -> Digits:
    """With the number of each image as its label."""
    loaded = load_digits(image_size=8, images=TRAIN_IMAGES, device=torch.device("cpu"))
    return dataclasses.replace(loaded, train_labels=torch.arange(TRAIN_IMAGES))


def _labels(digits: Digits, rank: int, *, epoch: int = 0) -> list[int]:
    batches = shard(digits, epoch=epoch, seed=0, rank=rank, ranks=2, batch_size=32)
    labels: list[int] = torch.cat([own for _, own in batches]).tolist()
    return labels


def test_images_are_three_channels_from_minus_one_to_one(digits: Digits) -> None:
    assert digits.train_images.shape == (TRAIN_IMAGES, 3, 8, 8)
    assert digits.train_images.min() == -1 and digits.train_images.max() == 1


def test_every_digit_is_in_one_split(digits: Digits) -> None:
    assert len(digits.train_labels) + len(digits.test_labels) == 1797


def test_ranks_share_out_every_image_once(digits: Digits) -> None:
    first, second = _labels(digits, 0), _labels(digits, 1)
    assert len(first) == len(second) == 22 * 32
    assert len(set(first + second)) == len(first + second)


def test_an_epoch_has_an_order_of_its_own_that_is_the_same_in_every_run(digits: Digits) -> None:
    assert _labels(digits, 0) == _labels(digits, 0)
    assert _labels(digits, 0) != _labels(digits, 0, epoch=1)
