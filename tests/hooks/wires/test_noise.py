"""The noise that values are rounded with: which numbers, how evenly, and whose."""

from __future__ import annotations

import pytest
import torch

from overlap.hooks.wires.formats import add_noise_, draw

CPU = torch.device("cpu")
BITS = pytest.mark.parametrize("bits", [16, 13])


def _generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@BITS
def test_it_is_odd_numbers_evenly_around_zero(bits: int) -> None:
    drawn = draw(1, 1_000_000, CPU, _generator(), bits=bits).double()
    largest = 2 ** (bits - 1) - 1
    assert (drawn.remainder(2) == 1).all()
    assert drawn.min() >= -largest and drawn.max() <= largest
    assert drawn.max() > 0.99 * largest and drawn.min() < -0.99 * largest
    assert drawn.unique().numel() > 0.99 * 2 ** (bits - 1)
    # Of four numbers from 64 bits each is as the others: five sigma of the mean of numbers that lie evenly.
    for place in range(4):
        of_place = drawn[0, place::4]
        assert abs(of_place.mean()) <= 5 * largest / (3 * of_place.numel()) ** 0.5
        assert (of_place.var() / (largest**2 / 3) - 1).abs() < 0.02
    pairs = torch.corrcoef(drawn.view(-1, 4).T)
    assert (pairs - torch.eye(4)).abs().max() < 0.01


@BITS
def test_whole_numbers_with_it_are_rounded_to_what_they_were(bits: int) -> None:
    top = 2 ** (24 - bits) - 1
    whole = torch.arange(-top, top + 1.0).repeat(200)[None]
    noisy = add_noise_(whole.clone(), _generator(), bits=bits)
    assert (noisy != whole).all()
    assert torch.equal(noisy.round(), whole)


def test_a_row_has_the_numbers_that_it_has_alone() -> None:
    for numel in (1, 5, 8, 4097):
        together, alone = _generator(), _generator()
        rows = draw(3, numel, CPU, together)
        assert rows.shape == (3, numel)
        assert all(torch.equal(row[None], draw(1, numel, CPU, alone)) for row in rows)
        assert torch.equal(together.get_state(), alone.get_state())
