"""`assert_parity` passes what is the same, names what differs, and refuses comparisons that cannot fail."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from harness import assert_parity

LOOSE: dict[str, Any] = {"what": "w", "exact": False, "atol": 0.1, "reason": "another order of summation"}


def test_the_same_passes() -> None:
    value = {"a": [torch.tensor([1.0, float("nan")])], "b": (0.9, float("nan"), None, "x", True, 3)}
    assert_parity({**value, "a": [value["a"][0].clone()]}, value, what="values")


@pytest.mark.parametrize(
    ("candidate", "reference", "message"),
    [
        (torch.tensor([1.0]), torch.tensor([float("nan")]), "max abs difference"),
        (torch.tensor([float("inf")]), torch.tensor([1.0]), "max abs difference inf"),
        (torch.tensor([True]), torch.tensor([False]), "1 of 1 differ"),
        (torch.ones(2), torch.ones(2, dtype=torch.float64), "dtype torch.float32 against torch.float64"),
        (torch.ones(2), torch.ones(1, 2), "shape (2,) against (1, 2)"),
        (torch.ones(1), 1.0, "Tensor against float"),
        ({"a": 1}, {"a": 1, "b": 2}, "lacks [\"'b'\"] and adds []"),
        ([1, 2], [1], "length 2 against 1"),
        ([1], {"a": 1}, "list against dict"),
        ({"a": {"b": 1.5}}, {"a": {"b": 1.0}}, "['a']['b']: 1.5 against 1.0, difference 0.5"),
        ({"a": None}, {"a": torch.ones(1)}, "NoneType against Tensor"),
    ],
)
def test_a_difference_is_named(candidate: Any, reference: Any, message: str) -> None:
    with pytest.raises(AssertionError) as caught:
        assert_parity(candidate, reference, what="the answer")
    assert str(caught.value).startswith("the answer should be exactly equal")
    assert message in str(caught.value)


def test_the_first_difference_is_measured_and_the_others_are_counted() -> None:
    candidate = {"a": torch.tensor([1.0, 2.5, 0.0]), "b": torch.ones(1)}
    reference = {"a": torch.tensor([1.25, 2.0, 0.0]), "b": torch.zeros(1)}
    with pytest.raises(AssertionError) as caught:
        assert_parity(candidate, reference, what="w")
    assert "['a']: max abs difference 0.5, 2 of 3 elements, first at (0,): 1.0 against 1.25" in str(caught.value)
    assert "(1 more differ)" in str(caught.value)


def test_a_tolerance_allows_floats_to_differ() -> None:
    assert_parity(torch.tensor([1.05]), torch.tensor([1.0]), **LOOSE)
    assert_parity([1.05], [1.0], **LOOSE)


@pytest.mark.parametrize(
    ("candidate", "reference", "more"),
    [
        (torch.tensor([1.2]), torch.tensor([1.0]), {}),
        ([1.2], [1.0], {}),
        (torch.tensor([2]), torch.tensor([1]), {"atol": 5}),
        (torch.tensor([float("nan")]), torch.tensor([float("inf")]), {"rtol": 1.0}),
        (torch.tensor([1.0]), torch.tensor([float("inf")]), {"rtol": 1.0}),
    ],
)
def test_beyond_a_tolerance_and_for_integers_and_infinity_it_fails_with_its_reason(
    candidate: Any, reference: Any, more: dict[str, float]
) -> None:
    with pytest.raises(AssertionError, match="another order of summation"):
        assert_parity(candidate, reference, **{**LOOSE, **more})


@pytest.mark.parametrize(
    ("options", "lacks"),
    [
        ({"exact": False, "atol": 0.1}, "reason"),
        ({"rtol": 0.1, "reason": "r"}, "exact=False"),
        ({"exact": False, "reason": "r"}, "above 0"),
    ],
)
def test_a_tolerance_needs_its_reason(options: dict[str, Any], lacks: str) -> None:
    with pytest.raises(ValueError, match=lacks):
        assert_parity(torch.ones(1), torch.zeros(1), what="w", **options)


@pytest.mark.parametrize("nothing", [{}, [], [{}], torch.ones(0)])
def test_nothing_to_compare_is_an_error(nothing: Any) -> None:
    with pytest.raises(ValueError, match="nothing to compare"):
        assert_parity(nothing, nothing, what="w")


def test_a_tensor_compared_with_itself_is_an_error() -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(ValueError, match="compared with itself"):
        assert_parity(model.state_dict(), model.state_dict(), what="w")
