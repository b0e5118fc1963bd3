"""A rank keeps its share of the state, and no temporary is larger than a bucket."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks.host_cost import IdleStreams
from harness import bucket_sizes_bytes, on_ranks, wrap
from overlap import ZeroRedundancyOptimizer, ZeroStep, chain
from overlap._torch.device import streams_replaced
from overlap.optim.zero import exchange
from overlap.optim.zero.exchange import Rows


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


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


def _count(zero: ZeroRedundancyOptimizer, patch: pytest.MonkeyPatch) -> Allocations:
    """Count what is allocated between collectives, in updates, reductions and gathers."""
    allocations = Allocations()

    def counted(function: Any) -> Any:
        def call(*arguments: Any) -> Any:
            with allocations:
                return function(*arguments)

        return call

    def counted_plan(name: str) -> Any:
        made = getattr(exchange, name)
        return lambda *arguments: tuple(map(counted, made(*arguments)))

    for name in ("reduction", "gathering"):
        patch.setattr(exchange, name, counted_plan(name))
    patch.setattr(zero, "update", counted(zero.update))
    for stage in zero.updates:
        assert stage.context is not None
        stage.context.replan()
    return allocations


@dataclass(frozen=True)
class Memory:
    """What two steps allocated beside a model of `parameter_bytes`, and what is kept."""

    parameters: int
    parameter_bytes: int
    state_bytes: int
    has_copies: bool
    bucket_bytes: int
    largest_bytes: int
    peak_bytes: int


def _measured(rank: int, world_size: int, form: dict[str, Any] | None, patch: pytest.MonkeyPatch) -> Memory:
    exchange._LARGE_NUMEL = 1000
    exchange._LEAST_BYTES = 30_000
    torch.manual_seed(0)
    layers = [nn.Linear(64, 64) for _ in range(20)]
    model = nn.Sequential(*(layer for linear in layers for layer in (linear, nn.Tanh())))
    ddp = wrap(model, bucket_cap_mb=0.03)
    zero = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.Adam, overlap_with_ddp=form is not None)
    if form is not None:
        chain(ZeroStep(zero, **form)).register(ddp)
    for step in range(4):
        if step == 2:
            zero.wait()  # The buckets are final.
            allocations = _count(zero, patch)
        if form is None:
            zero.zero_grad()
        ddp(torch.randn(2, 64)).sum().backward()
        zero.step()
    zero.wait()
    owning = [shard for shard in zero.shards.values() if shard.own is not None]
    assert len(owning) == len(zero.shards), "every rank has a chunk of every parameter"
    return Memory(
        parameters=len(zero.shards),
        parameter_bytes=sum(p.nbytes for p in model.parameters()),
        state_bytes=sum(v.nbytes for state in zero.optim.state.values() for v in state.values() if v.ndim),
        has_copies=any(_address(shard.own) != _address(shard.parameter) for shard in owning),
        bucket_bytes=max(bucket_sizes_bytes(ddp)),
        largest_bytes=allocations.largest_bytes,
        peak_bytes=allocations.peak_bytes,
    )


@on_ranks(2, 4)
def test_a_rank_keeps_its_share_of_the_state_and_no_temporary_is_larger_than_a_bucket(
    rank: int, world_size: int
) -> None:
    for form in ({}, {"deferred": True}, {"gather": "forward"}, None) if world_size == 2 else ({}, None):
        with pytest.MonkeyPatch.context() as patch:
            memory = _measured(rank, world_size, form, patch)
        assert memory.parameter_bytes > 9 * memory.bucket_bytes, "or there would be nothing to see"
        share = 2 * memory.parameter_bytes / world_size
        blocks_bytes = 2 * 128 * memory.parameters  # Of each parameter's two moments.
        assert abs(memory.state_bytes - share) <= blocks_bytes and not memory.has_copies, form
        assert 0 < memory.largest_bytes <= memory.bucket_bytes, f"{form}: no temporary is larger than a bucket"
        assert memory.peak_bytes <= 3 * memory.bucket_bytes, f"{form}: as many at once as buckets under way"


def _first_pass(rank: int, world_size: int, at_once_bytes: int) -> tuple[int, list[torch.Tensor]]:
    """The largest workspace of a pass with one bucket of all parameters, and what it has made of them."""
    with pytest.MonkeyPatch.context() as patch, streams_replaced(IdleStreams()):
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(40, 40) for _ in range(8)), nn.Linear(40, 40).requires_grad_(False))
        ddp = wrap(model)
        trained = [parameter for parameter in ddp.parameters() if parameter.requires_grad]
        # The model's other parameters are averaged.
        zero = ZeroRedundancyOptimizer([*trained[:4], *trained[6:]], torch.optim.SGD, lr=0.1, overlap_with_ddp=True)
        chain(ZeroStep(zero)).register(ddp)
        taken: list[int] = []
        new_rows = Rows.new

        def watched(self: Rows) -> torch.Tensor:
            taken.append((rows := new_rows(self)).nbytes)
            return rows

        patch.setattr(Rows, "new", watched)
        patch.setattr(exchange, "_LEAST_BYTES_ON_STREAMS", at_once_bytes)
        patch.setattr(ZeroStep, "gathering", lambda *_: ())  # So that only the reduction needs workspace.
        ddp(torch.randn(4, 40, generator=torch.Generator().manual_seed(rank))).square().mean().backward()
        zero.step()
    return max(taken), [tensor.detach().clone() for tensor in trained]


@on_ranks(3)
def test_a_bucket_of_the_whole_model_is_reduced_in_parts(rank: int, world_size: int) -> None:
    whole_bytes, expected = _first_pass(rank, world_size, 2**20)
    part_bytes, found = _first_pass(rank, world_size, 8 * 1024)
    assert part_bytes < whole_bytes / 2
    assert all(map(torch.equal, found, expected))


def _in_rows(rank: int, world_size: int, row_bytes: int) -> tuple[int, list[torch.Tensor]]:
    """The memory for what other ranks send, and what two passes have made of the parameters."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exchange, "_ROW_BYTES", row_bytes)
        patch.setattr(exchange, "_LARGE_NUMEL", 100)  # Weights travel by themselves, biases packed.
        torch.manual_seed(0)
        ddp = wrap(nn.Sequential(*(nn.Linear(40, 40) for _ in range(8))))
        zero = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.SGD, lr=0.1, overlap_with_ddp=True)
        registration = chain(ZeroStep(zero)).register(ddp)
        for step in range(2):
            ddp(torch.randn(4, 40, generator=torch.Generator().manual_seed(2 * step + rank))).square().mean().backward()
            zero.step()
    memory = registration.runtime.executor.channels.for_group(None).sum_memory
    return sum(place.numel() for place in memory), [parameter.detach().clone() for parameter in ddp.parameters()]


@on_ranks(3)
def test_what_other_ranks_send_takes_two_rows_however_large_a_bucket_is(rank: int, world_size: int) -> None:
    row_bytes = 1600
    _, expected = _in_rows(rank, world_size, 2**20)
    held_bytes, found = _in_rows(rank, world_size, row_bytes)
    assert 0 < held_bytes <= 2 * row_bytes
    assert all(map(torch.equal, found, expected))
