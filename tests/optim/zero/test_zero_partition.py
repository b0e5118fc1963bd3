"""The elements that each rank owns, and the pieces of a bucket."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from overlap.optim.zero.exchange import BucketShards
from overlap.optim.zero.shards import Partition, Shard

NUMELS = st.integers(0, 3000)
SIZES = st.lists(NUMELS, min_size=1, max_size=40)
UNITS = st.sampled_from(["element", "parameter"])
DTYPES = {1: torch.int8, 2: torch.float16, 4: torch.float32, 8: torch.float64, 16: torch.complex128}
ITEMSIZES = st.sampled_from(list(DTYPES))


@settings(deadline=None)
@given(st.lists(st.tuples(NUMELS, st.booleans()), min_size=1, max_size=40), st.integers(1, 7), UNITS, ITEMSIZES)
def test_every_element_has_one_owner_and_ranks_own_alike_in_each_pool(
    parameters: list[tuple[int, bool]], ranks: int, unit: str, itemsize: int
) -> None:
    tensors = [torch.empty(numel, dtype=DTYPES[itemsize]) for numel, _ in parameters]
    everyone = Partition(unit, ranks).assign(tensors, [pool for _, pool in parameters])
    for (numel, _), ranges in zip(parameters, everyone, strict=True):
        assert sorted(index for start, end in ranges for index in range(start, end)) == list(range(numel))
        # Two vectors of 64 bytes, which a kernel takes at a time.
        assert not any(start * itemsize % 128 for start, end in ranges if start < end)
    for pool in (True, False):
        alike = [place for place, (_, its) in enumerate(parameters) if its is pool]
        owned = [sum(end - start for start, end in (everyone[place][r] for place in alike)) for r in range(ranks)]
        # Up to two such blocks, or the largest parameter.
        largest = max((parameters[place][0] for place in alike), default=0)
        assert (max(owned) - min(owned)) * itemsize <= (2 * 128 if unit == "element" else largest * itemsize)


@settings(deadline=None)
@given(SIZES, st.integers(1, 5), UNITS, st.integers(0, 39), st.integers(0, 4))
def test_flat_and_packed_order_are_cut_into_the_same_pieces(
    numels: list[int], ranks: int, unit: str, left_out: int, rank: int
) -> None:
    rank %= ranks
    tensors = list(map(torch.zeros, numels))
    shards = [
        Shard(tensor, ranges, rank, name="", is_whole=unit == "parameter", dtype=torch.float32)
        for tensor, ranges in zip(tensors, Partition(unit, ranks).assign(tensors, [0] * len(tensors)), strict=True)
    ]
    kept = [None if place == left_out and len(numels) > 1 else shard for place, shard in enumerate(shards)]
    bucket = BucketShards(kept, numels, rank)
    flat = torch.arange(sum(numels))
    packed = torch.full((bucket.packed_numel,), -1)
    for piece, place in zip(bucket.packed_of(flat), bucket.cut_packed(packed), strict=True):
        assert piece.numel() == place.numel()
        place.copy_(piece)
    # Each element of a sharded parameter once, in the segment of its owner.
    rest = torch.cat([*bucket.rest(flat), flat[:0]]).tolist()
    assert sorted([*packed[packed >= 0].tolist(), *rest]) == flat.tolist()
    starts = [sum(numels[:place]) for place in range(len(numels))]
    own = [
        starts[place] + element
        for place, shard in enumerate(kept)
        if shard is not None
        for element in range(*shard.range)
    ]
    assert [number for number in packed[bucket.segments[rank]].tolist() if number >= 0] == own
    assert torch.cat([*bucket.gradients(flat), flat[:0]]).tolist() == own
