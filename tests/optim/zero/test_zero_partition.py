"""Who owns what: the arithmetic by itself, memory counted, gathers that ride."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from harness import bucket_sizes_bytes, run_ranks, wrap
from harness.models import MLP, TRANSFORMER, Case, mean_squared_error
from overlap import ZeroRedundancyOptimizer, ZeroStep, chain
from overlap.optim.zero import exchange, without_hooks
from overlap.optim.zero.exchange import Workspace
from overlap.optim.zero.partition import ByElement, ByParameter, Layout

SIZES = st.lists(st.integers(0, 3000), min_size=1, max_size=40)


@given(SIZES, st.integers(1, 7), st.sampled_from([ByElement, ByParameter]))
def test_every_element_has_one_owner(numels: list[int], ranks: int, kind: Any) -> None:
    for numel, ranges in zip(numels, kind(ranks).assign(numels, [0] * len(numels)), strict=True):
        owned = [index for start, end in ranges for index in range(start, end)]
        assert sorted(owned) == list(range(numel))
        assert not any(start % 16 for start, end in ranges if start < end)


@given(SIZES, st.integers(1, 7))
def test_ranks_own_as_much_but_for_some_elements(numels: list[int], ranks: int) -> None:
    everyone = ByElement(ranks).assign(numels, [0] * len(numels))
    owned = [sum(ranges[rank][1] - ranges[rank][0] for ranges in everyone) for rank in range(ranks)]
    assert max(owned) - min(owned) <= 32


@given(SIZES, st.integers(1, 7))
def test_whole_parameters_are_balanced(numels: list[int], ranks: int) -> None:
    everyone = ByParameter(ranks).assign(numels, [0] * len(numels))
    owned = [sum(ranges[rank][1] - ranges[rank][0] for ranges in everyone) for rank in range(ranks)]
    assert max(owned) - min(owned) <= max(numels)


@given(SIZES, st.integers(1, 5), st.booleans(), st.integers(0, 39))
def test_a_layout_cuts_both_orders_alike(numels: list[int], ranks: int, is_even: bool, left_out: int) -> None:
    assigned = ByElement(ranks).assign(numels, [0] * len(numels))
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


def test_a_workspace_keeps_as_many_buffers_as_were_in_use_at_once() -> None:
    workspace, like = Workspace(), torch.empty(0)
    for numel in (10, 100, 50, 1000, 7):
        first, second = workspace.take(numel, like), workspace.take(numel, like)
        assert first.numel() == numel and first.data_ptr() != second.data_ptr()
        workspace.give(first)
        workspace.give(second)
    assert workspace.held_bytes == 2 * 1000 * 4


def _state_bytes(zero: ZeroRedundancyOptimizer) -> int:
    return sum(v.nbytes for state in zero.optim.state.values() for v in state.values() if v.ndim)


def _memory(rank: int, world_size: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 33, 3),
        nn.BatchNorm2d(33),
        nn.ReLU(),
        nn.Conv2d(33, 70, 3),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(70, 257),
        nn.Linear(257, 131),
    )
    ddp = wrap(model, bucket_cap_mb=0.1)
    zero = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.Adam, overlap_with_ddp=True)
    chain(ZeroStep(zero)).register(ddp)
    inputs = torch.randn(2, 3, 8, 8)
    for _ in range(3):
        ddp(inputs).sum().backward()
        zero.step()
    whole = sum(p.nbytes for p in model.parameters())
    assert abs(_state_bytes(zero) - 2 * whole / world_size) <= 0.01 * 2 * whole / world_size
    # Between steps nothing else is kept but the buffers of the two or three buckets that were under way at once: small
    # pieces go out packed, and as much comes in.
    assert zero.exchange.workspace.held_bytes <= 3 * 2 * max(bucket_sizes_bytes(ddp))
    for shard in zero.shards.values():
        assert shard.own is not None, "every rank has a chunk of every parameter"
        assert shard.own.untyped_storage().data_ptr() == shard.parameter.untyped_storage().data_ptr()


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_a_rank_keeps_its_share_of_the_state(world_size: int) -> None:
    run_ranks(_memory, world_size)


class Allocations(TorchDispatchMode):
    """Counts the bytes of tensors that operations make, on whichever thread enters it."""

    def __init__(self) -> None:
        super().__init__()
        self.largest_bytes = 0
        self.peak_bytes = 0
        self._alive: dict[StorageWeakRef, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {_storage(tensor) for tensor in tree_leaves((args, kwargs)) if isinstance(tensor, torch.Tensor)}
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and _storage(tensor) not in given:
                nbytes = tensor.untyped_storage().nbytes()
                self._alive[StorageWeakRef(tensor.untyped_storage())] = nbytes
                self.largest_bytes = max(self.largest_bytes, nbytes)
        self._alive = {storage: nbytes for storage, nbytes in self._alive.items() if not storage.expired()}
        self.peak_bytes = max(self.peak_bytes, sum(self._alive.values()))
        return result


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


class Counted:
    """A coroutine of a stage whose every stretch between two waits is counted."""

    def __init__(self, coroutine: Any, allocations: Allocations) -> None:
        self._coroutine, self._allocations = coroutine, allocations

    def __await__(self) -> Any:
        while True:
            try:
                with self._allocations:
                    operation = self._coroutine.send(None)
            except StopIteration:
                return
            yield operation


def _count(zero: ZeroRedundancyOptimizer) -> Allocations:
    allocations = Allocations()
    reduce, gather, update = zero.exchange.reduce, zero.exchange.gather, zero.update

    async def counted_reduce(bucket: Any, plan: Any) -> None:
        await Counted(reduce(bucket, plan), allocations)

    async def counted_gather(bucket: Any, plan: Any) -> None:
        await Counted(gather(bucket, plan), allocations)

    def counted_update(pairs: Any) -> None:
        with allocations:
            update(pairs)

    object.__setattr__(zero.exchange, "reduce", counted_reduce)
    object.__setattr__(zero.exchange, "gather", counted_gather)
    zero.update = counted_update  # type: ignore[method-assign]
    return allocations


def _temporaries(rank: int, world_size: int) -> None:
    exchange._LARGE_NUMEL = 1000
    without_hooks._BUCKET_BYTES = 30_000
    for options in ({}, {"deferred": True}, {"gather": "forward"}, None):
        torch.manual_seed(0)
        layers = [nn.Linear(64, 64) for _ in range(20)]
        model = nn.Sequential(*(layer for linear in layers for layer in (linear, nn.Tanh())))
        ddp = wrap(model, bucket_cap_mb=0.03)
        zero = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.Adam, overlap_with_ddp=options is not None)
        if options is not None:
            chain(ZeroStep(zero, **options)).register(ddp)
        for step in range(4):
            if step == 2:
                # The buckets are final; what the first one needed, of the whole model, is not kept.
                zero.wait()
                held_bytes = zero.exchange.workspace.held_bytes
                zero.exchange.workspace.forget()
                allocations = _count(zero)
            if options is None:
                zero.zero_grad()
            ddp(torch.randn(2, 64)).sum().backward()
            zero.step()
        zero.wait()
        bucket_bytes = max(bucket_sizes_bytes(ddp))
        assert sum(p.nbytes for p in model.parameters()) > 9 * bucket_bytes, "or there would be nothing to see"
        assert held_bytes <= 3 * bucket_bytes, f"{options}: {held_bytes} bytes are kept"
        assert 0 < allocations.largest_bytes <= bucket_bytes, f"{options}: {allocations.largest_bytes} bytes at once"
        # As many live together as there are buckets under way.
        assert allocations.peak_bytes <= 3 * bucket_bytes, f"{options}: {allocations.peak_bytes} bytes together"


@pytest.mark.parametrize("world_size", [2, 4])
def test_no_temporary_is_larger_than_a_bucket(world_size: int) -> None:
    run_ranks(_temporaries, world_size)


def _channels_last_and_moved(rank: int, world_size: int) -> None:
    def build() -> nn.Module:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(3, 32, 3), nn.ReLU(), nn.Conv2d(32, 16, 3), nn.Flatten())
        return model.to(memory_format=torch.channels_last)

    plain, ddp = wrap(build(), bucket_cap_mb=0.005), wrap(build(), bucket_cap_mb=0.005)
    reference = torch.optim.AdamW(plain.parameters(), lr=0.01)
    zero = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.AdamW, lr=0.01, overlap_with_ddp=True)
    chain(ZeroStep(zero)).register(ddp)
    for step in range(6):
        inputs = torch.randn(2, 3, 6, 6, generator=torch.Generator().manual_seed(10 * step + rank))
        if step == 3:
            for parameter in ddp.parameters():
                parameter.data = parameter.data.clone(memory_format=torch.preserve_format)
        plain.zero_grad()
        plain(inputs).square().mean().backward()
        reference.step()
        ddp(inputs).square().mean().backward()
        zero.step()
        for ours, theirs in zip(ddp.parameters(), plain.parameters(), strict=True):
            assert torch.equal(ours, theirs), step
    zero.consolidate_state_dict()
    if rank == 0:
        ours, theirs = zero.state_dict()["state"], reference.state_dict()["state"]
        assert torch.equal(ours[0]["exp_avg"], theirs[0]["exp_avg"])


def test_channels_last_parameters_also_when_they_are_moved() -> None:
    run_ranks(_channels_last_and_moved, 2)


class SlowGather:
    """Holds the exchange's gather up, so that a missing wait would show."""

    def __init__(self, zero: ZeroRedundancyOptimizer) -> None:
        import time

        inner = zero.exchange.gather

        async def gather(bucket: Any, plan: Any) -> None:
            time.sleep(0.01)
            await inner(bucket, plan)

        object.__setattr__(zero.exchange, "gather", gather)


def _riding(rank: int, world_size: int, case: Case, deferred: bool) -> None:
    plain = wrap(case.model(), **case.ddp_options())
    reference = torch.optim.AdamW(plain.parameters(), lr=0.01)
    ddp = wrap(case.model(), **case.ddp_options())
    zero = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.AdamW, lr=0.01, overlap_with_ddp=True)
    registration = chain(ZeroStep(zero, gather="forward", deferred=deferred)).register(ddp)
    SlowGather(zero)
    for step in range(6):
        batch = case.batch(step, rank)
        plain.zero_grad()
        expected = mean_squared_error(plain, batch)
        expected.backward()
        reference.step()
        loss = mean_squared_error(ddp, batch)
        assert torch.equal(loss, expected), f"step {step}: the forward used old parameters"
        loss.backward()
        zero.step()
        if step == 2:
            for model in (plain, ddp):
                model.eval()
            with torch.no_grad():
                assert torch.equal(mean_squared_error(ddp, batch), mean_squared_error(plain, batch))
            for model in (plain, ddp):
                model.train()
        if step == 3:
            state = ddp.module.state_dict()
            assert all(torch.equal(state[name], value) for name, value in plain.module.state_dict().items())
        if step == 4:
            zero.wait()
            assert all(torch.equal(a, b) for a, b in zip(ddp.parameters(), plain.parameters(), strict=True))
    registration.remove()
    assert all(torch.equal(a, b) for a, b in zip(ddp.parameters(), plain.parameters(), strict=True))


@pytest.mark.parametrize("deferred", [False, True])
@pytest.mark.parametrize("case", [MLP, TRANSFORMER], ids=str)
def test_gathers_that_ride_are_waited_for_by_whoever_needs_them(case: Case, deferred: bool) -> None:
    run_ranks(_riding, 2, case, deferred)


def _a_gather_fails(rank: int, world_size: int) -> None:
    ddp = wrap(MLP.model(), **MLP.ddp_options())
    zero = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.SGD, lr=0.1, overlap_with_ddp=True)
    chain(ZeroStep(zero, gather="forward")).register(ddp)
    good = zero.exchange.gather

    async def bad(bucket: Any, plan: Any) -> None:
        raise ValueError("lost")

    for step in range(5):
        if step == 2:
            zero.wait()
            object.__setattr__(zero.exchange, "gather", bad)
        mean_squared_error(ddp, MLP.batch(step, rank)).backward()
        if step == 2:
            with pytest.raises(ValueError, match="lost"):
                zero.wait()
            object.__setattr__(zero.exchange, "gather", good)
        zero.step()


def test_a_gather_that_fails_is_raised_by_who_waits() -> None:
    run_ranks(_a_gather_fails, 2)


def _copied(rank: int, world_size: int) -> None:
    ddp = wrap(MLP.model(), **MLP.ddp_options())
    zero = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.SGD, lr=0.1, overlap_with_ddp=True)
    chain(ZeroStep(zero, gather="forward")).register(ddp)
    for step in range(3):
        mean_squared_error(ddp, MLP.batch(step, rank)).backward()
        zero.step()
    zero.wait()
    twin, pickled = copy.deepcopy(ddp.module), pickle.loads(pickle.dumps(ddp.module))
    for other in (twin, pickled):
        assert torch.equal(other(*MLP.batch(0, 0).inputs), ddp.module(*MLP.batch(0, 0).inputs))


def test_a_model_whose_gathers_ride_can_be_copied() -> None:
    run_ranks(_copied, 2)


def _observed(rank: int, world_size: int) -> list[str]:
    ddp = wrap(MLP.model(), **MLP.ddp_options())
    zero = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.SGD, lr=0.1, overlap_with_ddp=True)
    registration = chain(ZeroStep(zero, gather="forward")).register(ddp)
    launched: list[tuple[str, int]] = []

    class Log:
        def launched(self, bucket: Any, label: str, operation: Any) -> None:
            launched.append((operation.label, bucket.index))

        def __getattr__(self, name: str) -> Any:
            return lambda *args: None

    for step in range(4):
        if step == 3:
            zero.wait()
            registration.observer = Log()  # type: ignore[assignment]
        mean_squared_error(ddp, MLP.batch(step, rank)).backward()
        zero.step()
    zero.wait()
    buckets = len(bucket_sizes_bytes(ddp))
    assert [index for _, index in launched] == [*range(buckets), *reversed(range(buckets))]
    return [label for label, _ in launched]


def test_gathers_that_ride_come_after_the_pass_with_the_first_layers_first() -> None:
    first, second = run_ranks(_observed, 2)
    half = len(first) // 2
    assert first == second == ["send_recv"] * 2 * half
