"""Options out of range, and states that do not fit."""

from typing import Any

import pytest

from overlap import ConfigurationError, PowerSGD, RegistrationError

from .lockstep import World


@pytest.mark.parametrize(
    ("options", "names_it"),
    [
        ({"rank": 0}, "rank.*at least 1, got 0"),
        ({"min_compression_rate": float("nan")}, "min_compression_rate.*got nan"),
        ({"wire": 8}, r"wire must be a Wire such as Int8\(\), or None, got 8"),
        ({"alternate": True, "warm_start": False}, "alternate=True.*warm_start=False"),
    ],
)
def test_options_out_of_range_are_named(options: dict[str, Any], names_it: str) -> None:
    with pytest.raises(ConfigurationError, match=names_it):
        PowerSGD(**options)


def test_repr_has_the_options_that_are_not_defaults() -> None:
    assert repr(PowerSGD(rank=4)) == "PowerSGD(rank=4)"
    assert repr(PowerSGD(rank=1, alternate=True, start_step=3)) == "PowerSGD(rank=1, start_step=3, alternate=True)"


def test_one_memory_serves_one_model() -> None:
    stage = PowerSGD()
    World([stage], [(4, 4)])
    with pytest.raises(RegistrationError, match=r"registered already.*remove"):
        World([stage], [(4, 4)])
