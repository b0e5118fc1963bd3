"""The largest difference between two runs."""

from __future__ import annotations

import math

import pytest
import torch

from overlap.demo.parity import largest_difference


@pytest.mark.parametrize(
    ("other", "difference"),
    [
        ({"weight": torch.tensor([1.0, 2.0]), "step": 3, "empty": None}, 0.0),
        ({"weight": torch.tensor([1.0, 2.5]), "step": 3, "empty": None}, 0.5),
        ({"weight": torch.tensor([1.0, 2.0]), "step": 4, "empty": None}, 1.0),
        ({"weight": torch.tensor([1.0, math.nan]), "step": 3, "empty": None}, math.inf),
        ({"weight": torch.tensor([1.0]), "step": 3, "empty": None}, math.inf),
        ({"weight": torch.tensor([1.0, 2.0]), "step": 3, "empty": 0.0}, math.inf),
        ({"weight": torch.tensor([1.0, 2.0])}, math.inf),
    ],
)
def test_the_largest_difference_is_infinite_where_something_is_missing_or_not_finite(
    other: dict[str, object], difference: float
) -> None:
    one = {"weight": torch.tensor([1.0, 2.0]), "step": 3, "empty": None}
    assert largest_difference(one, other) == difference
