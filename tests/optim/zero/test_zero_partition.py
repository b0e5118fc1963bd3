"""The elements that each rank owns, and the pieces of a bucket."""

import functools
import itertools
from contextlib import nullcontext
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.host_cost import IdleStreams
from harness import on_ranks
from overlap import ZeroRedundancyOptimizer, ZeroStep, chain
from overlap._torch.device import streams_replaced
from overlap.optim.zero.exchange import BucketShards, Rows
from overlap.optim.zero.shards import Owners, Shard, chunk

NUMELS = st.integers(0, 3000)
SIZES = st.lists(NUMELS, min_size=1, max_size=40)
ITEMSIZES = st.sampled_from([1, 2, 4, 8, 16])


@settings(deadline=None)
@given(NUMELS, st.integers(1, 7), ITEMSIZES, st.booleans())
def test_every_element_has_one_owner_and_ranks_own_their_share_and_at_most_a_block(
    numel: int, ranks: int, itemsize: int, on_streams: bool
) -> None:
    chunks = [chunk(numel, itemsize, on_streams=on_streams, rank=rank, ranks=ranks) for rank in range(ranks)]
    assert [element for start, end in chunks for element in range(start, end)] == list(range(numel))
    # Two vectors of 64 bytes, which a CPU's kernel takes at a time.
    block_numel = 1 if on_streams else 128 // itemsize
    assert not any(start % block_numel for start, end in chunks if start < end)
    assert max(end - start for start, end in chunks) < numel / ranks + block_numel
    if on_streams and numel:
        pieces = torch.arange(numel).chunk(ranks)  # As ``torch._chunk_cat`` cuts.
        assert [len(piece) for piece in pieces] == [end - start for start, end in chunks][: len(pieces)]


@settings(deadline=None)
@given(st.lists(st.tuples(NUMELS, st.booleans()), min_size=1, max_size=40), st.integers(1, 7), st.integers(0, 40))
def test_whole_parameters_are_balanced_among_those_that_are_trained_and_those_that_are_not(
    parameters: list[tuple[int, bool]], ranks: int, added_later: int
) -> None:
    tensors = [torch.empty(numel, requires_grad=is_trained) for numel, is_trained in parameters]
    owners = Owners(ranks)
    of_tensor = owners.assign(tensors[added_later:]) | owners.assign(tensors[:added_later])
    for is_trained in (True, False):
        alike = [tensor for tensor in tensors if tensor.requires_grad is is_trained]
        owned = [sum(tensor.numel() for tensor in alike if of_tensor[id(tensor)] == rank) for rank in range(ranks)]
        assert max(owned) - min(owned) <= max((tensor.numel() for tensor in alike), default=0)


@settings(deadline=None)
@given(SIZES, st.integers(1, 5), st.booleans(), st.integers(0, 39), st.integers(0, 4), st.booleans())
def test_a_bucket_is_cut_as_its_parameters_are(
    numels: list[int], ranks: int, is_whole: bool, left_out: int, rank: int, on_streams: bool
) -> None:
    rank %= ranks
    tensors = list(map(torch.zeros, numels))
    owners = Owners(ranks).assign(tensors) if is_whole else {}
    shards = []
    with streams_replaced(IdleStreams()) if on_streams else nullcontext():
        for tensor in tensors:
            owner = owners.get(id(tensor))
            shards.append(Shard(tensor, name="", master_dtype=None, rank=rank, ranks=ranks, owner=owner))
    kept = [None if place == left_out and len(numels) > 1 else shard for place, shard in enumerate(shards)]
    with streams_replaced(IdleStreams()) if on_streams else nullcontext():
        bucket = BucketShards(kept, numels)
    flat = torch.arange(float(sum(numels)))
    starts = [sum(numels[:place]) for place in range(len(numels))]
    own = [
        starts[place] + element
        for place, shard in enumerate(kept)
        if shard is not None
        for element in range(*shard.range)
    ]
    assert torch.cat([*bucket.gradients(flat), flat[:0]]).tolist() == own
    # Each element of a sharded parameter once, with its owner.
    gradients = bucket.gradients_of_all(flat)
    rest = torch.cat([*bucket.rest(flat), flat[:0]]).tolist()
    assert sorted([*torch.cat([*gradients, flat[:0]]).tolist(), *rest]) == flat.tolist()
    by_owner = {
        owner: [*itertools.chain.from_iterable(messages)] for owner, messages in bucket.messages(gradients).items()
    }
    assert sorted(torch.cat([*by_owner.get(rank, []), flat[:0]]).tolist()) == own
    assert sum(part.numel() for parts in by_owner.values() for part in parts) == flat.numel() - len(rest)
    if not on_streams or not bucket.divided:
        return
    rows_of = Rows(bucket, gradients)
    rows = rows_of.pack()
    assert rows.size(1) % 16 == 0
    assert rows_of.in_place is None or torch.equal(rows, rows_of.in_place)
    chunks, places = rows_of.own_chunks(rows)
    assert torch.cat([*chunks, flat[:0]]).tolist() == torch.cat([*places, flat[:0]]).tolist() == own
    expected = flat.clone()
    for shard, gradient in zip(bucket, gradients, strict=True):
        if shard.owner is None:
            gradient.zero_()
    rows_of.unpack(rows)
    assert torch.equal(flat, expected)
    # Memory of its own would belong to the stream that made it, and be used on another.
    kept = [one for value in vars(rows_of).values() for one in (value if isinstance(value, list) else [value])]
    assert {one.untyped_storage().data_ptr() for one in kept if isinstance(one, torch.Tensor)} == {flat.data_ptr()}


@on_ranks(4)
def test_on_streams_rows_in_place_short_chunks_and_fewer_matrices_than_ranks_are_exact() -> None:
    """Rows in place, short chunks, matrices fewer than ranks; every rank feeds the same, so sums are exact."""
    for partition in ("element", "parameter"):
        with streams_replaced(IdleStreams()):
            models = []
            for is_plain in (True, False):
                torch.manual_seed(0)
                model = nn.Sequential(nn.Linear(16, 64, bias=False), nn.Tanh(), nn.Linear(64, 5, bias=False))
                models.append(DistributedDataParallel(model, bucket_cap_mb=0.001))
                ours = functools.partial(
                    ZeroRedundancyOptimizer, optimizer_class=torch.optim.Adam, partition=partition, lr=0.01
                )
                make: Any = functools.partial(torch.optim.Adam, lr=0.01) if is_plain else ours
                optimizer = make(models[-1].parameters())
                if not is_plain:
                    chain(ZeroStep(optimizer)).register(models[-1])
                for step in range(4):
                    optimizer.zero_grad()
                    x = torch.randn(4, 16, generator=torch.Generator().manual_seed(step))
                    models[-1](x).square().mean().backward()
                    optimizer.step()
        for mine, theirs in zip(models[1].parameters(), models[0].parameters(), strict=True):
            assert torch.equal(mine, theirs), (partition, mine.shape)
