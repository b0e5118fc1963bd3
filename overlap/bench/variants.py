"""The rows of the benchmark, PyTorch's own beside ours. To add one, write its `@variant` function here.

Each function takes a `Site` and returns what trains one step. What fails to import, build or run becomes a row whose
status says so, so nothing here checks whether a backend can do what is asked of it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from overlap.bench.registry import COMPUTE_ONLY, variant
from overlap.bench.site import Prepared, Site

_PERIOD = 8


@variant(COMPUTE_ONLY, baseline="ddp-sgd", floor="compute")
def compute_only(site: Site) -> Prepared:
    """Forward and backward without communication or update: what every other row is held against."""
    ddp = site.ddp()

    def step() -> None:
        ddp.zero_grad()
        with ddp.no_sync():
            site.loss(ddp).backward()

    return Prepared(step=step)


# Plain DDP --------------------------------------------------------------------------------------------------


@variant("ddp-sgd", optimizer="sgd")
def ddp_sgd(site: Site) -> Prepared:
    return _plain_ddp(site, "sgd")


@variant("ddp-sgd-fused", optimizer="sgd-fused")
def ddp_sgd_fused(site: Site) -> Prepared:
    return _plain_ddp(site, "sgd-fused")


@variant("ddp-adamw", optimizer="adamw")
def ddp_adamw(site: Site) -> Prepared:
    return _plain_ddp(site, "adamw")


@variant("ddp-adamw-fused", optimizer="adamw-fused")
def ddp_adamw_fused(site: Site) -> Prepared:
    return _plain_ddp(site, "adamw-fused")


def _plain_ddp(site: Site, optimizer: str) -> Prepared:
    ddp = site.ddp()
    return site.plain(ddp, site.optimizer(optimizer, ddp.parameters()))


# The update in backward -------------------------------------------------------------------------------------


@variant("torch-hook-then-optimizer-adamw", optimizer="adamw")
def torch_hook_then_optimizer_adamw(site: Site) -> Prepared:
    from torch.distributed.algorithms.ddp_comm_hooks import optimizer_overlap_hooks as hooks
    from torch.distributed.optim import as_functional_optim

    ddp = site.ddp()
    functional = as_functional_optim(torch.optim.AdamW, lr=site.learning_rate)
    state = hooks._OptimizerHookState(functional)
    ddp.register_comm_hook(site.group, hooks._hook_then_optimizer(default_hooks.allreduce_hook, state))

    def step() -> None:
        ddp.zero_grad()
        site.loss(ddp).backward()

    return Prepared(step=step)


@variant("overlap-step-adamw", optimizer="adamw-fused")
def overlap_step_adamw(site: Site) -> Prepared:
    from overlap.hooks import AllReduce

    return _overlapped(site, "adamw-fused", AllReduce())


# The update sharded -----------------------------------------------------------------------------------------


@variant("torch-zero-sgd", optimizer="sgd")
def torch_zero_sgd(site: Site) -> Prepared:
    return _torch_zero(site, torch.optim.SGD, momentum=0.9)


@variant("torch-zero-adamw", optimizer="adamw")
def torch_zero_adamw(site: Site) -> Prepared:
    return _torch_zero(site, torch.optim.AdamW)


def _torch_zero(site: Site, kind: type[torch.optim.Optimizer], **options: Any) -> Prepared:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    ddp = site.ddp()
    zero = ZeroRedundancyOptimizer(ddp.parameters(), kind, process_group=site.group, lr=site.learning_rate, **options)
    return site.plain(ddp, zero)


@variant("torch-zero-interleaved-adamw", optimizer="adamw", backends=("nccl",))
def torch_zero_interleaved_adamw(site: Site) -> Prepared:
    from torch.distributed.algorithms.ddp_comm_hooks.ddp_zero_hook import hook_with_zero_step_interleaved
    from torch.distributed.optim import ZeroRedundancyOptimizer

    ddp = site.ddp()
    zero = ZeroRedundancyOptimizer(
        ddp.parameters(),
        torch.optim.AdamW,
        process_group=site.group,
        lr=site.learning_rate,
        overlap_with_ddp=True,
    )
    ddp.register_comm_hook(None, hook_with_zero_step_interleaved(default_hooks.allreduce_hook, ddp, zero))
    return site.plain(ddp, zero)


@variant("overlap-zero-sgd", optimizer="sgd")
def overlap_zero_sgd(site: Site) -> Prepared:
    return _overlapped_zero(site, torch.optim.SGD, momentum=0.9)


# A step leaves its gathers to the next forward, so steps are timed in their stride.
@variant("overlap-zero-sgd-gather-forward", optimizer="sgd", floor="streamed", block_steps=4, lead_in_steps=1)
def overlap_zero_sgd_gather_forward(site: Site) -> Prepared:
    return _overlapped_zero(site, torch.optim.SGD, gather="forward", momentum=0.9)


@variant("overlap-zero-adamw", optimizer="adamw-fused")
def overlap_zero_adamw(site: Site) -> Prepared:
    return _overlapped_zero(site, torch.optim.AdamW, fused=True)


# A step leaves its gathers to the next forward, so steps are timed in their stride.
@variant("overlap-zero-adamw-gather-forward", optimizer="adamw-fused", floor="streamed", block_steps=4, lead_in_steps=1)
def overlap_zero_adamw_gather_forward(site: Site) -> Prepared:
    return _overlapped_zero(site, torch.optim.AdamW, gather="forward", fused=True)


def _overlapped_zero(
    site: Site, kind: type[torch.optim.Optimizer], *, gather: str = "backward", **options: Any
) -> Prepared:
    from overlap import chain
    from overlap.optim import ZeroRedundancyOptimizer, ZeroStep

    ddp = site.ddp()
    zero = ZeroRedundancyOptimizer(
        ddp.parameters(), kind, process_group=site.group, overlap_with_ddp=True, lr=site.learning_rate, **options
    )
    chain(ZeroStep(zero, gather=gather)).register(ddp)

    def step() -> None:
        site.loss(ddp).backward()
        zero.step()

    return Prepared(step=step, finish=zero.wait)


# Gradients compressed ---------------------------------------------------------------------------------------


@variant("torch-fp16")
def torch_fp16(site: Site) -> Prepared:
    return _torch_hook(site, default_hooks.fp16_compress_hook, site.group)


@variant("overlap-fp16")
def overlap_fp16(site: Site) -> Prepared:
    return _overlapped_cast(site, torch.float16)


@variant("torch-bf16")
def torch_bf16(site: Site) -> Prepared:
    return _torch_hook(site, default_hooks.bf16_compress_hook, site.group)


@variant("overlap-bf16")
def overlap_bf16(site: Site) -> Prepared:
    return _overlapped_cast(site, torch.bfloat16)


# On Gloo its collectives reach the ranks in different orders now and then, and abort the process.
@variant("torch-powersgd-r4", apart=True)
def torch_powersgd_r4(site: Site) -> Prepared:
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as powersgd

    # Its earliest start: compressed from the third step on.
    state = powersgd.PowerSGDState(site.group, matrix_approximation_rank=4, start_powerSGD_iter=2)
    return _torch_hook(site, powersgd.powerSGD_hook, state)


@variant("overlap-powersgd-r4")
def overlap_powersgd_r4(site: Site) -> Prepared:
    return _overlapped_powersgd(site)


@variant("overlap-powersgd-r4-alternate")
def overlap_powersgd_r4_alternate(site: Site) -> Prepared:
    return _overlapped_powersgd(site, alternate=True)


@variant("overlap-powersgd-r4-auto")
def overlap_powersgd_r4_auto(site: Site) -> Prepared:
    # It measures in the third step and decides; the steps before that warm up anyway.
    return _overlapped_powersgd(site, bypass="auto")


@variant("torch-quantize8")
def torch_quantize8(site: Site) -> Prepared:
    from torch.distributed.algorithms.ddp_comm_hooks.quantization_hooks import quantization_pertensor_hook

    return _torch_hook(site, quantization_pertensor_hook, site.group)


@variant("overlap-quantize8")
def overlap_quantize8(site: Site) -> Prepared:
    return _overlapped_quantize(site, 8)


@variant("overlap-quantize4")
def overlap_quantize4(site: Site) -> Prepared:
    return _overlapped_quantize(site, 4)


# Fewer steps synchronized, and uneven inputs ----------------------------------------------------------------


@variant("torch-averager", floor="streamed", block_steps=_PERIOD)
def torch_averager(site: Site) -> Prepared:
    from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager

    model = site.model()
    optimizer = site.optimizer(site.settings.optimizer, model.parameters())
    averager = PeriodicModelAverager(period=_PERIOD, warmup_steps=0, process_group=site.group)
    local = site.plain(model, optimizer)

    def step() -> None:
        local.step()
        averager.average_parameters(model.parameters())

    return Prepared(step=step)


@variant("overlap-averager", floor="streamed", block_steps=_PERIOD)
def overlap_averager(site: Site) -> Prepared:
    from overlap.optim import PeriodicModelAverager

    model = site.model()
    optimizer = site.optimizer(site.settings.optimizer, model.parameters())
    averager = PeriodicModelAverager(period=_PERIOD, warmup_steps=0, process_group=site.group)
    local = site.plain(model, optimizer)

    def step() -> None:
        local.step()
        averager.average_parameters(model.parameters())

    return Prepared(step=step)


@variant("overlap-local-sgd", floor="streamed", block_steps=_PERIOD)
def overlap_local_sgd(site: Site) -> Prepared:
    return _local_sgd(site)


@variant("overlap-local-sgd-overlap", floor="streamed", block_steps=_PERIOD)
def overlap_local_sgd_overlap(site: Site) -> Prepared:
    return _local_sgd(site, overlap=True)


def _local_sgd(site: Site, **options: Any) -> Prepared:
    from overlap.optim import LocalSGD

    ddp = site.ddp()
    optimizer = site.optimizer(site.settings.optimizer, ddp.parameters())
    return site.plain(ddp, LocalSGD(ddp, optimizer, period=_PERIOD, start_step=0, **options))


@variant("torch-join", block_steps=4)
def torch_join(site: Site) -> Prepared:
    from torch.distributed.algorithms.join import Join

    ddp = site.ddp()
    plain = site.plain(ddp, site.optimizer(site.settings.optimizer, ddp.parameters()))
    return Prepared(step=plain.step, running=lambda steps: Join([ddp]))


@variant("overlap-join", block_steps=4)
def overlap_join(site: Site) -> Prepared:
    """Every rank has said how many steps it runs."""
    return _joined(site, told_ahead=True)


@variant("overlap-join-unknown", block_steps=4)
def overlap_join_unknown(site: Site) -> Prepared:
    """Ranks learn of each iteration from an all-reduce under the one before."""
    return _joined(site, told_ahead=False)


# What several of them share ---------------------------------------------------------------------------------


def _torch_hook(site: Site, hook: Any, state: object) -> Prepared:
    """One of PyTorch's communication hooks, with the optimizer after backward as PyTorch has it."""
    ddp = site.ddp()
    ddp.register_comm_hook(state, hook)
    return site.plain(ddp, site.optimizer(site.settings.optimizer, ddp.parameters()))


def _joined(site: Site, *, told_ahead: bool) -> Prepared:
    """The plain loop over a loader that knows its length, or over a stream that does not."""
    from overlap import Join, UnsupportedError

    if site.settings.simulate:
        raise UnsupportedError("Join meets every rank when its block begins, and a simulated link has one process")
    ddp = site.ddp()
    plain = site.plain(ddp, site.optimizer(site.settings.optimizer, ddp.parameters()))
    batches: Iterator[int] = iter(())

    @contextlib.contextmanager
    def running(steps: int) -> Iterator[None]:
        nonlocal batches
        with Join([ddp]) as join:
            batches = join.iterate(range(steps) if told_ahead else iter(range(steps)))
            # The first meets the other ranks: once a loop, and so no part of a step.
            next(batches)
            yield

    def step() -> None:
        plain.step()
        next(batches, None)

    return Prepared(step=step, running=running)


def _overlapped_cast(site: Site, dtype: torch.dtype) -> Prepared:
    from overlap.hooks import AllReduce, Cast

    return _overlapped(site, site.settings.optimizer, Cast(dtype, AllReduce()))


def _overlapped_powersgd(site: Site, **options: Any) -> Prepared:
    from overlap.hooks import PowerSGD

    return _overlapped(site, site.settings.optimizer, PowerSGD(rank=4, **options))


def _overlapped_quantize(site: Site, bits: int) -> Prepared:
    from overlap.hooks import Quantize

    return _overlapped(site, site.settings.optimizer, Quantize(bits=bits))


def _overlapped(site: Site, optimizer: str, reducer: Any) -> Prepared:
    """One of our reducers, with the update in backward."""
    from overlap import chain
    from overlap.optim import OverlappedOptimizer, Step

    ddp: DistributedDataParallel = site.ddp()
    overlapped = OverlappedOptimizer(site.optimizer(optimizer, ddp.parameters()))
    chain(reducer, Step(overlapped)).register(ddp)

    def step() -> None:
        site.loss(ddp).backward()
        overlapped.step()

    return Prepared(step=step)
