"""On NCCL the sharded update equals plain DDP in every form; streams wait for gathers during the next forward."""

from __future__ import annotations

import functools
import os

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel
from zero_loops import FORMS, OPTIMIZERS

from harness import assert_parity, run_ranks
from harness.models import MLP, Batch, mean_squared_error
from overlap import ZeroRedundancyOptimizer, ZeroStep, chain

pytestmark = pytest.mark.gpu

# NCCL refuses two ranks on one GPU unless it takes them for ranks of two hosts.
SHARED_GPU = {"NCCL_SOCKET_IFNAME": "lo", "NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1"}


def _wrapped(device: torch.device) -> DistributedDataParallel:
    return DistributedDataParallel(MLP.model().to(device), device_ids=[device.index], **MLP.ddp_options())


def _batch(step: int, rank: int, device: torch.device) -> Batch:
    batch = MLP.batch(step, rank)
    return Batch(tuple(x.to(device) for x in batch.inputs), batch.target.to(device))


def _matrix(rank: int, world_size: int, partition: str, implementation: dict[str, bool]) -> None:
    if torch.cuda.device_count() < world_size:
        os.environ["NCCL_HOSTID"] = f"host{rank}"
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    cls, arguments = OPTIMIZERS["adamw"]
    make = functools.partial(cls, **arguments, **implementation)
    for form, options in FORMS.items():
        plain, ddp = _wrapped(device), _wrapped(device)
        reference = make(plain.parameters())
        zero = ZeroRedundancyOptimizer(
            ddp.parameters(),
            cls,
            overlap_with_ddp=options is not None,
            partition=partition,
            **arguments,
            **implementation,
        )
        if options is not None:
            chain(ZeroStep(zero, **options)).register(ddp)
        for step in range(6):
            batch = _batch(step, rank, device)
            plain.zero_grad()
            expected = mean_squared_error(plain, batch)
            expected.backward()
            reference.step()
            if options is None:
                zero.zero_grad()
            loss = mean_squared_error(ddp, batch)
            loss.backward()
            if options is None or not options.get("automatic"):
                zero.step()
            assert_parity(loss.detach(), expected.detach(), what=f"{form}, {partition}, loss of step {step}")
        zero.wait()
        ours, theirs = (
            {name: p.detach().clone() for name, p in model.module.named_parameters()} for model in (ddp, plain)
        )
        assert_parity(ours, theirs, what=f"{form}, {partition}")


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize(
    ("partition", "implementation"),
    [("element", {"fused": True}), ("parameter", {"foreach": True})],
    ids=["element, fused", "parameter, foreach"],
)
def test_every_form_equals_plain_ddp_on_nccl(world_size: int, partition: str, implementation: dict[str, bool]) -> None:
    env = SHARED_GPU if torch.cuda.device_count() < world_size else {}
    run_ranks(
        _matrix,
        world_size,
        partition,
        implementation,
        backend="nccl",
        env=env,
        timeout_s=170,
        group_timeout_s=120,
    )
