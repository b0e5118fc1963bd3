"""On an accelerator: parity on NCCL, and a host that never waits inside a hook."""

from __future__ import annotations

import functools
import os
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from harness import assert_parity, overlapped_step, plain_step, run_ranks, train
from harness.models import MLP, Batch, mean_squared_error
from overlap import AllGather, AllReduce, Cast, Join, OverlappedOptimizer, Step, UnsupportedError, chain

pytestmark = pytest.mark.gpu

ADAMW = functools.partial(torch.optim.AdamW, lr=0.01, weight_decay=0.1)
# NCCL refuses two ranks on one GPU unless it takes them for ranks of two hosts.
SHARED_GPU = {"NCCL_SOCKET_IFNAME": "lo", "NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1"}


def _device(rank: int) -> torch.device:
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def _wrapped(rank: int, **options: Any) -> DistributedDataParallel:
    device = _device(rank)
    return DistributedDataParallel(
        MLP.model().to(device), device_ids=[device.index], **{**MLP.ddp_options(), **options}
    )


def _batches(rank: int, steps: int) -> list[Batch]:
    device = _device(rank)
    return [
        Batch(tuple(x.to(device) for x in batch.inputs), batch.target.to(device))
        for batch in MLP.batches(rank, steps=steps)
    ]


def _parity(rank: int, world_size: int, implementation: dict[str, bool]) -> None:
    _share_gpu(rank, world_size)
    batches = _batches(rank, 10)
    make = functools.partial(ADAMW, **implementation)
    ddp = _wrapped(rank)
    reference = train(ddp, make(ddp.parameters()), batches, step_fn=plain_step)
    for deferred in (False, True):
        ddp = _wrapped(rank)
        optimizer = OverlappedOptimizer(make(ddp.parameters()))
        chain(AllReduce(), Step(optimizer, deferred=deferred)).register(ddp)
        candidate = train(ddp, optimizer, batches, step_fn=overlapped_step)
        assert_parity(candidate, reference, what=f"NCCL, {implementation}, {deferred=}")
    # A plain optimizer, whose deferred update needs the gradients of all streams at once.
    ddp = _wrapped(rank)
    plain = make(ddp.parameters())
    chain(AllReduce(), Step(plain, deferred=True)).register(ddp)
    candidate = train(ddp, plain, batches, step_fn=_no_step)
    assert_parity(candidate, reference, what=f"NCCL, {implementation}, in backward")


def _no_step(ddp: nn.Module, optimizer: Any, batch: Batch, loss_of: Any) -> torch.Tensor:
    loss: torch.Tensor = loss_of(ddp, batch)
    loss.backward()
    return loss


def _share_gpu(rank: int, world_size: int) -> None:
    if torch.cuda.device_count() < world_size:
        os.environ["NCCL_HOSTID"] = f"host{rank}"


def _env(world_size: int) -> dict[str, str]:
    return SHARED_GPU if torch.cuda.device_count() < world_size else {}


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize(
    "implementation", [{"foreach": True}, {"fused": True}, {"foreach": False}], ids=["foreach", "fused", "for-loop"]
)
def test_updates_in_backward_on_nccl_equal_plain_ddp(world_size: int, implementation: dict[str, bool]) -> None:
    run_ranks(
        _parity, world_size, implementation, backend="nccl", env=_env(world_size), timeout_s=170, group_timeout_s=120
    )


def _reducers(rank: int, world_size: int) -> None:
    _share_gpu(rank, world_size)
    batches = _batches(rank, 6)
    ddp = _wrapped(rank)
    reference = train(ddp, ADAMW(ddp.parameters()), batches)
    for stage in (AllGather(), Cast(torch.float32)):
        ddp = _wrapped(rank)
        chain(stage).register(ddp)
        assert_parity(train(ddp, ADAMW(ddp.parameters()), batches), reference, what=f"NCCL, {stage!r}")


def test_reducers_on_nccl_equal_plain_ddp() -> None:
    run_ranks(_reducers, 2, backend="nccl", env=_env(2), timeout_s=170, group_timeout_s=120)


def _no_host_wait(rank: int, world_size: int) -> None:
    from torch.profiler import ProfilerActivity, profile

    batches = _batches(rank, 8)
    ddp = _wrapped(rank)
    optimizer = OverlappedOptimizer(ADAMW(ddp.parameters(), fused=True))
    chain(Cast(torch.bfloat16, AllReduce()), Step(optimizer)).register(ddp)
    for batch in batches[:4]:
        nn.functional.mse_loss(ddp(*batch.inputs), batch.target).backward()
        optimizer.step()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        for batch in batches[4:]:
            loss = nn.functional.mse_loss(ddp(*batch.inputs), batch.target)
            torch.cuda.set_sync_debug_mode("error")  # PyTorch's own synchronizing calls raise from here on.
            loss.backward()
            optimizer.step()
            torch.cuda.set_sync_debug_mode("default")
    events = list(profiler.events() or [])
    stages = [event for event in events if event.name.startswith("overlap::")]
    assert {event.name.split("[")[0] for event in stages} >= {
        "overlap::Step(AdamW, interleaved)",
        "overlap::all_reduce",
    }
    waits = {"cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize"}
    for stage in stages:
        inside = [
            event.name
            for event in events
            if event.name in waits
            and event.thread == stage.thread
            and stage.time_range.start <= event.time_range.start <= stage.time_range.end
        ]
        assert not inside, f"{stage.name} made the host wait: {inside}"


def test_the_host_never_waits_in_a_hook() -> None:
    run_ranks(_no_host_wait, 1, backend="nccl", timeout_s=120, group_timeout_s=100)


def _refuses_unused(rank: int, world_size: int) -> None:
    ddp = _wrapped(rank, find_unused_parameters=True)
    optimizer = OverlappedOptimizer(ADAMW(ddp.parameters()))
    with pytest.raises(UnsupportedError, match="deferred=True"):
        chain(AllReduce(), Step(optimizer)).register(ddp)
    chain(AllReduce(), Step(optimizer, deferred=True)).register(ddp)
    train(ddp, optimizer, _batches(rank, 4), step_fn=overlapped_step)


def test_interleaved_updates_that_would_stop_the_host_are_refused() -> None:
    run_ranks(_refuses_unused, 1, backend="nccl", timeout_s=120, group_timeout_s=100)


def _uneven(rank: int, world_size: int) -> list[Any]:
    ended = []
    for known in (True, False):
        ddp = _wrapped(rank)
        optimizer = OverlappedOptimizer(ADAMW(ddp.parameters()))
        chain(AllReduce(), Step(optimizer)).register(ddp)
        batches = _batches(rank, 6 - 2 * rank)
        with Join([ddp, optimizer], divide_by_initial_world_size=False) as join:
            for batch in join.iterate(batches if known else iter(batches)):
                overlapped_step(ddp, optimizer, batch, mean_squared_error)
        ended.append({name: parameter.detach().cpu() for name, parameter in ddp.module.named_parameters()})
    assert_parity(ended[1], ended[0], what="told ahead against known")
    return ended


def test_ranks_that_run_out_at_different_times_end_alike_whether_lengths_are_known_or_not() -> None:
    first, second = run_ranks(_uneven, 2, backend="nccl", env=SHARED_GPU, timeout_s=120)
    assert_parity(second, first, what="rank 1 against rank 0")
