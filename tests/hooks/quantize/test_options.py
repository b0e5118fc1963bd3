"""What may be given to `Quantize`."""

from __future__ import annotations

import pytest
import torch

from overlap import ConfigurationError, Int4, Int8, Quantize, TopK


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bits": 5}, "bits is 5: give 4 or 8"),
        ({"chunk": 12}, "chunk is 12: give a positive multiple of 8"),
        ({"chunk": 0}, "chunk is 0"),
        ({"chunk": 64.0}, r"chunk is 64\.0"),
        ({"wire": Int4(), "bits": 4, "chunk": 8}, r"bits, chunk: Int4\(\) has options of its own; give them to Int4"),
        ({"wire": Int4(), "rounding": "nearest"}, r"rounding: Int4\(\) has options of its own"),
        ({"wire": 4, "bits": 8}, "the wire is 4 and bits is 8: give one of them"),
        ({"wire": Int8}, r"the wire is the class Int8: give Int8\(\)"),
        ({"wire": 16}, "bits is 16: give 4 or 8"),
        ({"wire": "int8"}, r"the wire is 'int8': give one such as Int8\(\)"),
        ({"rounding": "up"}, "rounding is 'up': give 'nearest' or 'stochastic'"),
    ],
)
def test_bad_options_are_named(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        Quantize(**options)


def test_repr_names_what_is_not_the_default() -> None:
    assert repr(Quantize()) == "Quantize(Int8())"
    assert repr(Quantize(TopK(0.01))) == "Quantize(TopK(0.01))"
    options = "Int4(rounding='stochastic', chunk=64), error_feedback=True"
    assert repr(Quantize(4, chunk=64, rounding="stochastic", error_feedback=True)) == f"Quantize({options})"


def test_errors_are_refused_without_error_feedback() -> None:
    with pytest.raises(ConfigurationError, match=r"make it with error_feedback=True"):
        Quantize().load_state_dict({"error": {"weight": torch.ones(2)}})


def test_unknown_state_is_refused_by_name() -> None:
    with pytest.raises(ConfigurationError, match=r"has no state \['momentum'\]"):
        Quantize().load_state_dict({"momentum": 1})
