"""The elements that each rank owns, and the pieces of a bucket."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st

from overlap.optim.zero.partition import ByElement, ByParameter, Extent
from overlap.optim.zero.shards import BucketShards, Shard

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


@given(SIZES, st.integers(1, 5), st.sampled_from([ByElement, ByParameter]), st.integers(0, 39), st.integers(0, 4))
def test_flat_and_packed_order_are_cut_into_the_same_pieces(
    numels: list[int], ranks: int, kind: Any, left_out: int, rank: int
) -> None:
    rank %= ranks
    shards = [
        Shard(torch.zeros(numel), ranges, rank, name="", is_whole=kind.is_whole, master_dtype=None)
        for numel, ranges in zip(numels, kind(ranks).assign(_extents(numels)), strict=True)
    ]
    kept = [None if place == left_out and len(numels) > 1 else shard for place, shard in enumerate(shards)]
    bucket = BucketShards(kept, numels, rank, 16)
    flat = torch.arange(sum(numels))
    packed = torch.full((bucket.packed_numel,), -1)
    pieces, packed_pieces = bucket.cut_flat(flat), bucket.cut_packed(packed)
    assert [piece.numel() for piece in pieces] == [piece.numel() for piece in packed_pieces]
    for piece, place in zip(pieces, packed_pieces, strict=True):
        place.copy_(piece)
    # Each element of a sharded parameter once, in the segment of its owner.
    rest = torch.cat([*bucket.rest(flat), flat[:0]]).tolist()
    found = packed[packed >= 0].tolist()
    assert sorted([*found, *rest]) == flat.tolist()
    starts = [sum(numels[:place]) for place in range(len(numels))]
    own = [
        starts[place] + element
        for place, shard in enumerate(kept)
        if shard is not None
        for element in range(*shard.range)
    ]
    assert [number for number in packed[bucket.segment].tolist() if number >= 0] == own
    assert torch.cat([*bucket.gradients(flat), flat[:0]]).tolist() == own
