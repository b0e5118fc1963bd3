"""What may be given to `Quantize`."""

from __future__ import annotations

import pytest
import torch

from overlap import ConfigurationError, Int8, Quantize


def test_what_is_not_a_wire_is_refused() -> None:
    for given, message in ((Int8, r"give Int8\(\)"), (8, r"the wire is 8: give one such as Int8\(\)")):
        with pytest.raises(ConfigurationError, match=message):
            Quantize(given)


def test_errors_are_refused_without_error_feedback() -> None:
    with pytest.raises(ConfigurationError, match=r"make it with error_feedback=True"):
        Quantize().load_state_dict({"error": {"weight": torch.ones(2)}})


def test_unknown_state_is_refused_by_name() -> None:
    with pytest.raises(ConfigurationError, match=r"has no state \['momentum'\]"):
        Quantize().load_state_dict({"momentum": 1})
