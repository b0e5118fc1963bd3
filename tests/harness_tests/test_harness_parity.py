"""`assert_parity` passes what is the same, names what differs, and refuses comparisons that cannot fail."""

from typing import Any

import pytest
import torch

from harness import assert_parity


def test_the_first_difference_is_named_and_the_others_are_counted() -> None:
    reference = {"a": [torch.tensor([1.25, 2.0, float("nan")])], "b": (0.5, None)}
    assert_parity({**reference, "a": [reference["a"][0].clone()]}, reference, what="w")
    candidate = {"a": [torch.tensor([1.0, 2.5, float("nan")])], "b": (0.25,)}
    with pytest.raises(AssertionError, match=r"w should be exactly equal[\s\S]*\(2 more differ\)") as caught:
        assert_parity(candidate, reference, what="w")
    assert "['a'][0]: max abs difference 0.5, 2 of 3 elements, first at (0,): 1.0 against 1.25" in str(caught.value)


@pytest.mark.parametrize(
    ("candidate", "reference"),
    [
        (torch.tensor([1.2]), torch.tensor([1.0])),
        (1.2, 1.0),
        (torch.tensor([2]), torch.tensor([1])),
        (torch.tensor([1.0]), torch.tensor([float("inf")])),
        (torch.tensor([1.0]), torch.tensor([float("nan")])),
        (torch.ones(2), torch.ones(2, dtype=torch.float64)),
        (torch.ones(2), torch.ones(1, 2)),
        ({"a": 1}, {"a": 1, "b": 2}),
    ],
)
def test_what_no_tolerance_allows_fails_with_its_reason(candidate: Any, reference: Any) -> None:
    options: dict[str, Any] = {"rtol": 0.1, "reason": "another order of summation"}
    assert_parity([1.05, torch.tensor([1.05])], [1.0, torch.tensor([1.0])], what="w", **options)
    with pytest.raises(AssertionError, match="another order of summation"):
        assert_parity(candidate, reference, what="w", **options)


def test_a_comparison_that_cannot_fail_is_refused() -> None:
    tensor = torch.ones(1)
    with pytest.raises(ValueError, match="needs a reason"):
        assert_parity(tensor, tensor.clone(), what="w", atol=0.1)
    with pytest.raises(ValueError, match="nothing to compare"):
        assert_parity([{}, torch.ones(0)], [{}, torch.ones(0)], what="w")
    with pytest.raises(ValueError, match="compared with itself"):
        assert_parity({"a": tensor}, {"a": tensor}, what="w")
