"""Who owns which elements: arithmetic without tensors."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from overlap.optim.zero.partition import ByElement, ByParameter, Extent, Layout

SIZES = st.lists(st.integers(0, 3000), min_size=1, max_size=40)
ITEMSIZES = st.sampled_from([1, 2, 4, 8, 16])


def _extents(numels: list[int], itemsize: int = 4) -> list[Extent]:
    return [Extent(numel, itemsize) for numel in numels]


@given(SIZES, st.integers(1, 7), st.sampled_from([ByElement, ByParameter]), ITEMSIZES)
def test_every_element_has_one_owner(numels: list[int], ranks: int, kind: Any, itemsize: int) -> None:
    for numel, ranges in zip(numels, kind(ranks).assign(_extents(numels, itemsize)), strict=True):
        owned = [index for start, end in ranges for index in range(start, end)]
        assert sorted(owned) == list(range(numel))
        # Two vectors of 64 bytes, which a kernel takes at a time.
        assert not any(start * itemsize % 128 for start, end in ranges if start < end)


@given(SIZES, st.integers(1, 7), ITEMSIZES)
def test_ranks_own_the_same_up_to_two_blocks(numels: list[int], ranks: int, itemsize: int) -> None:
    everyone = ByElement(ranks).assign(_extents(numels, itemsize))
    owned = [sum(ranges[rank][1] - ranges[rank][0] for ranges in everyone) for rank in range(ranks)]
    assert (max(owned) - min(owned)) * itemsize <= 2 * 128


@given(st.lists(st.tuples(st.integers(0, 3000), st.booleans()), min_size=1, max_size=40), st.integers(1, 7))
def test_whole_parameters_are_balanced_up_to_the_largest_and_frozen_ones_by_themselves(
    parameters: list[tuple[int, bool]], ranks: int
) -> None:
    everyone = ByParameter(ranks).assign([Extent(numel, 4, is_trained) for numel, is_trained in parameters])
    for is_trained in (True, False):
        alike = [place for place, (_, trained) in enumerate(parameters) if trained is is_trained]
        owned = [sum(everyone[place][rank][1] for place in alike) for rank in range(ranks)]
        assert max(owned) - min(owned) <= max((parameters[place][0] for place in alike), default=0)


@given(SIZES, st.integers(1, 5), st.booleans(), st.integers(0, 39))
def test_flat_and_packed_order_are_cut_into_the_same_pieces(
    numels: list[int], ranks: int, is_even: bool, left_out: int
) -> None:
    assigned = ByElement(ranks).assign(_extents(numels))
    ranges = tuple(None if place == left_out and len(numels) > 1 else owned for place, owned in enumerate(assigned))
    layout = Layout(ranges=ranges, numels=tuple(numels), is_even=is_even)
    flat_lengths, flat_chosen = layout.flat_cuts
    packed_lengths, packed_chosen = layout.packed_cuts
    assert sum(flat_lengths) == sum(numels) and sum(packed_lengths) == layout.packed_numel
    lengths = [piece.numel for piece in layout.pieces]
    assert [flat_lengths[place] for place in flat_chosen] == lengths
    assert [packed_lengths[place] for place in packed_chosen] == lengths
    starts = [sum(numels[: piece.place]) + piece.start for piece in layout.pieces]
    assert [sum(flat_lengths[:place]) for place in flat_chosen] == starts
    for rank in range(ranks):
        segment = layout.segment(rank)
        for place in packed_chosen[layout.of_rank(rank)]:
            assert segment.start <= sum(packed_lengths[:place]) < segment.stop
