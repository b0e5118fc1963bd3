"""Random arguments of public constructors are taken where right, or refused with an error of ours."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
import torch

from harness import run_ranks
from overlap import ConfigurationError
from soak import options


def test_random_options_are_taken_or_refused_with_errors_of_ours() -> None:
    assert options.try_options(1500) == []


# What longer runs have found: what was called, and the argument that did not end in an error of ours.
FOUND: tuple[tuple[str, dict[str, Any]], ...] = (
    ("LocalSGD", {"fragments": 10**9}),
    ("LocalSGD", {"reducer": 1e308, "start_step": 10**5000}),
    ("auto", {"allow": np.array("auto")}),
    ("auto", {"allow": torch.ones(())}),
    ("auto", {"report": "\ud800"}),
    ("auto_quantize", {"qtype": options.Shy()}),
)


def _try_found(rank: int, ranks: int) -> list[str | None]:
    things = options.things()
    with warnings.catch_warnings(action="ignore"):
        return [options.fault_of(name, things, changed) for name, changed in FOUND]


def test_what_was_found_stays_mended() -> None:
    assert run_ranks(_try_found, 1) == [[None] * len(FOUND)]


def _try_unchecked(rank: int, ranks: int) -> list[str]:
    with pytest.MonkeyPatch.context() as patch:
        made = {one.__name__: (one, lambda of: {}) for one in (_unchecked, _comparing)}
        patch.setattr(options, "MADE", made)
        return options._try(rank, ranks, 800, 0)


def test_an_option_that_is_not_checked_is_seen() -> None:
    (found,) = run_ranks(_try_unchecked, 1)
    assert any(text.startswith("_unchecked(flag=") and "taken, although flag is bool" in text for text in found)
    assert any(text.startswith("_comparing(word=") and ": ValueError: compared" in text for text in found)


def _unchecked(*, flag: bool = False) -> None:
    pass


def _comparing(*, word: str = "x") -> None:
    if word not in ("x", "y"):
        raise ConfigurationError("word is 'x' or 'y'")
