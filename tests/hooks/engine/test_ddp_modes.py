"""Chains with an update equal plain DDP under DDP's options, compiled, with several models and with uneven inputs."""

from __future__ import annotations

import functools
import gc
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from harness import assert_parity, overlapped_step, plain_step, run_ranks, train, wrap
from harness.models import MLP, TRANSFORMER, UNUSED, Batch, Case
from overlap import AllReduce, Cast, OverlappedOptimizer, Step, TrainingLoopError, chain, register
from overlap.demo.experiment import load_torchvision

SGD = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.01)


def _pair(case: Case, rank: int, *, steps: int = 6, deferred: bool = False, **ddp_options: Any) -> None:
    batches = case.batches(rank, steps=steps)
    options = {**case.ddp_options(), **ddp_options}
    ddp = wrap(case.model(), **options)
    reference = train(ddp, SGD(ddp.parameters()), batches)
    ddp = wrap(case.model(), **options)
    optimizer = OverlappedOptimizer(SGD(ddp.parameters()))
    chain(AllReduce(), Step(optimizer, deferred=deferred)).register(ddp)
    candidate = train(ddp, optimizer, batches, step_fn=overlapped_step)
    assert_parity(candidate, reference, what=f"{case}, {ddp_options}, {deferred=}")


def _equals_plain_ddp(rank: int, world_size: int, case: Case, deferred: bool, options: dict[str, Any]) -> None:
    _pair(case, rank, deferred=deferred, **options)


DEFERRED = pytest.mark.parametrize("deferred", [False, True], ids=["interleaved", "deferred"])


@DEFERRED
def test_a_static_graph(deferred: bool) -> None:
    run_ranks(_equals_plain_ddp, 2, MLP, deferred, {"static_graph": True})


@DEFERRED
def test_a_static_graph_with_unused_parameters(deferred: bool) -> None:
    run_ranks(_equals_plain_ddp, 2, UNUSED, deferred, {"static_graph": True, "find_unused_parameters": False})


@DEFERRED
def test_a_search_for_unused_parameters_with_gradients_as_bucket_views(deferred: bool) -> None:
    options = {"find_unused_parameters": True, "gradient_as_bucket_view": True}
    run_ranks(_equals_plain_ddp, 2, MLP, deferred, options)


def test_a_transformers_static_graph_with_gradients_as_bucket_views() -> None:
    run_ranks(_equals_plain_ddp, 2, TRANSFORMER, False, {"static_graph": True, "gradient_as_bucket_view": True})


class _Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x


def test_activation_checkpointing() -> None:
    # A block is computed again in backward, with its weights either all updated or all not.
    run_ranks(_equals_plain_ddp, 2, Case(name="checkpointed", build=_Checkpointed, inputs=MLP.inputs), False, {})


def _compiled(rank: int, world_size: int, inner: bool) -> None:
    def make(overlapped: bool) -> tuple[Any, Any]:
        torch._dynamo.reset()
        torch.manual_seed(0)
        # Large enough for several of the smallest buckets that the compiler's splitting takes.
        module: Any = nn.Sequential(*(nn.Linear(600, 600) for _ in range(3)))
        ddp: Any = wrap(torch.compile(module, backend="aot_eager") if inner else module, bucket_cap_mb=1)
        optimizer: Any = SGD(ddp.parameters())
        if overlapped:
            optimizer = OverlappedOptimizer(optimizer)
            chain(AllReduce(), Step(optimizer)).register(ddp)
        return ddp if inner else torch.compile(ddp, backend="aot_eager"), optimizer

    records = []
    for overlapped in (False, True):
        model, optimizer = make(overlapped)
        parameters = []
        for step in range(4):
            if not overlapped:
                optimizer.zero_grad()
            model(torch.full((2, 600), step + rank + 1.0)).square().mean().backward()
            optimizer.step()
            parameters.append([p.detach().clone() for p in model.parameters()])
        records.append(parameters)
    assert_parity(records[1], records[0], what=f"compiled, {inner=}")


@pytest.mark.parametrize("inner", [True, False], ids=["inside DDP", "around DDP"])
def test_compiled_models(inner: bool) -> None:
    run_ranks(_compiled, 2, inner)


def _two_models(rank: int, world_size: int, shared: bool) -> None:
    """Two models, one loss and one backward, then an optimizer for each or one for both."""

    def run(overlapped: bool) -> list[Any]:
        first, second = (wrap(MLP.model(seed=seed), **MLP.ddp_options()) for seed in (0, 1))
        parameters = [list(first.parameters()), list(second.parameters())]
        optimizers: list[Any] = [SGD([*parameters[0], *parameters[1]])] if shared else [SGD(p) for p in parameters]
        if overlapped:
            optimizers = [OverlappedOptimizer(optimizer) for optimizer in optimizers]
            chain(AllReduce(), Step(optimizers[0])).register(first)
            chain(AllReduce(), Step(optimizers[-1])).register(second)
        states = []
        for step in range(5):
            for optimizer in optimizers if not overlapped else ():
                optimizer.zero_grad()
            batch = MLP.batch(step, rank)
            (first(*batch.inputs) - second(*batch.inputs)).square().mean().backward()
            for optimizer in optimizers:
                optimizer.step()
            states.append([p.detach().clone() for group in parameters for p in group])
        return states

    assert_parity(run(True), run(False), what=f"two models, {shared=}")


@pytest.mark.parametrize("shared", [False, True], ids=["an optimizer for each", "one optimizer"])
def test_two_models_in_one_process_and_one_backward(shared: bool) -> None:
    run_ranks(_two_models, 2, shared)


def _uneven_batches(rank: int) -> list[Batch]:
    return MLP.batches(rank, steps=3 + 4 * rank)


def _joined(rank: int, world_size: int, make: Callable[[Any], Step]) -> None:
    ddp = wrap(MLP.model(), **MLP.ddp_options())
    step = make(SGD(ddp.parameters()))
    chain(AllReduce(), step).register(ddp)
    with ddp.join():
        for batch in _uneven_batches(rank):
            nn.functional.mse_loss(ddp(*batch.inputs), batch.target).backward()
            if not step.is_automatic:
                step.optimizer.step()
    ours = {
        "parameters": {name: p.detach().clone() for name, p in ddp.module.named_parameters()},
        "momentum": step.optimizer.state_dict()["state"],
    }

    ddp = wrap(MLP.model(), **MLP.ddp_options())
    optimizer = SGD(ddp.parameters())
    with ddp.join():
        for batch in _uneven_batches(rank):
            optimizer.zero_grad()
            nn.functional.mse_loss(ddp(*batch.inputs), batch.target).backward()
            if step.clipping is not None:
                torch.nn.utils.clip_grad_norm_(ddp.parameters(), 0.5)
            optimizer.step()
    assert_parity(ours["parameters"], dict(ddp.module.named_parameters()), what=f"{step!r}: parameters")
    if rank == world_size - 1:  # PyTorch leaves the optimizer state of a rank that ran out behind.
        assert_parity(ours["momentum"], optimizer.state_dict()["state"], what=f"{step!r}: momentum")
    everyone: list[Any] = [None] * world_size
    torch.distributed.all_gather_object(everyone, ours)
    assert_parity(everyone[0], everyone[1], what=f"{step!r}: the same on every rank")


@pytest.mark.parametrize(
    "make",
    [
        Step,
        lambda optimizer: Step(OverlappedOptimizer(optimizer)),
        lambda optimizer: Step(optimizer, clip_grad_norm=0.5),
    ],
    ids=["plain optimizer", "overlapped optimizer", "clipping"],
)
def test_under_ddps_own_join_a_rank_without_inputs_replays_the_update(make: Callable[[Any], Step]) -> None:
    run_ranks(_joined, 2, make)


def _images(generator: torch.Generator, step: int, rank: int) -> tuple[Any, ...]:
    return (torch.randn(2, 3, 32, 32, generator=generator),)


def _resnet18() -> nn.Module:
    return load_torchvision().models.resnet18(num_classes=16)


RESNET18 = Case(name="resnet18", build=_resnet18, inputs=_images)


def _resnet(rank: int, world_size: int, make: Callable[..., Any], channels_last: bool) -> None:
    batches = RESNET18.batches(rank, steps=10)
    records = []
    model = RESNET18.model()
    if channels_last:  # Gradients then have strides of their own within the bucket.
        model = model.to(memory_format=torch.channels_last)
    for overlapped in (False, True):
        ddp = wrap(model, bucket_cap_mb=4)
        optimizer: Any = make(ddp.parameters(), lr=0.01)
        if overlapped:
            optimizer = OverlappedOptimizer(optimizer)
            chain(AllReduce(), Step(optimizer)).register(ddp)
        step_fn = overlapped_step if overlapped else plain_step
        records.append(train(ddp, optimizer, batches, step_fn=step_fn, min_buckets=3)[-1])
    assert_parity(records[1], records[0], what=f"resnet18, {channels_last=}")


def test_resnet18_of_torchvision() -> None:
    run_ranks(_resnet, 2, SGD, False, timeout_s=120)


def test_resnet18_of_torchvision_with_channels_last_and_a_fused_optimizer() -> None:
    run_ranks(_resnet, 2, functools.partial(torch.optim.AdamW, fused=True), True, timeout_s=120)


def _several_forwards(rank: int, world_size: int) -> None:
    def step_fn(ddp: Any, optimizer: Any, batch: Batch, loss_of: Any) -> torch.Tensor:
        loss: torch.Tensor = loss_of(ddp, batch) + loss_of(ddp, batch).square()
        with torch.no_grad():
            ddp(*batch.inputs)
        loss.backward()
        optimizer.step()
        return loss

    def plain(ddp: Any, optimizer: Any, batch: Batch, loss_of: Any) -> torch.Tensor:
        optimizer.zero_grad()
        return step_fn(ddp, optimizer, batch, loss_of)

    batches = MLP.batches(rank, steps=5)
    ddp = wrap(MLP.model(), **MLP.ddp_options())
    reference = train(ddp, SGD(ddp.parameters()), batches, step_fn=plain)
    ddp = wrap(MLP.model(), **MLP.ddp_options())
    optimizer = OverlappedOptimizer(SGD(ddp.parameters()))
    chain(AllReduce(), Step(optimizer)).register(ddp)
    assert_parity(train(ddp, optimizer, batches, step_fn=step_fn), reference, what="two forwards, one backward")


def test_two_forwards_before_one_backward_and_an_evaluation_in_between() -> None:
    run_ranks(_several_forwards, 2)


def _unused_forward(rank: int, world_size: int) -> None:
    inputs = MLP.batch(0, rank).inputs
    ddp = wrap(MLP.model(), **MLP.ddp_options())
    optimizer = OverlappedOptimizer(SGD(ddp.parameters()))
    chain(AllReduce(), Step(optimizer, deferred=True)).register(ddp)
    ddp(*inputs).sum().backward()
    ddp(*inputs)
    assert all(p.grad is not None for p in ddp.parameters())
    before = [p.detach().clone() for p in ddp.parameters()]
    optimizer.step()
    assert all(not torch.equal(p, old) for p, old in zip(ddp.parameters(), before, strict=True))


def test_a_forward_without_a_backward_takes_nothing_away_from_a_deferred_update() -> None:
    run_ranks(_unused_forward, 2)


def _leaves_nothing(rank: int, world_size: int) -> None:
    threads = threading.active_count()
    for _ in range(3):
        ddp = wrap(MLP.model(), **MLP.ddp_options())
        optimizer = OverlappedOptimizer(SGD(ddp.parameters()))
        chain(Cast(torch.bfloat16), Step(optimizer)).register(ddp)
        for step in range(3):
            ddp(*MLP.batch(step, rank).inputs).sum().backward()
            optimizer.step()
        gone = [weakref.ref(ddp), weakref.ref(optimizer), weakref.ref(next(ddp.parameters()))]
        del ddp, optimizer
        deadline_s = time.monotonic() + 5
        while any(ref() is not None for ref in gone) and time.monotonic() < deadline_s:
            time.sleep(0.05)  # The worker may still be on its way out of the last bucket.
            gc.collect()
        assert [ref() for ref in gone] == [None] * 3
    for thread in threading.enumerate():
        if thread.name.startswith("overlap-"):
            thread.join(timeout=5)
    assert threading.active_count() == threads


def test_a_dropped_model_takes_its_chain_its_optimizer_and_its_worker_thread_with_it() -> None:
    run_ranks(_leaves_nothing, 2)


def test_a_world_of_one() -> None:
    run_ranks(_equals_plain_ddp, 1, MLP, False, {})


def _second_backward(rank: int, world_size: int) -> None:
    ddp = DistributedDataParallel(MLP.model())
    optimizer = OverlappedOptimizer(SGD(ddp.parameters()))
    register(ddp, chain(AllReduce(), Step(optimizer)))
    ddp(*MLP.batch(0, 0).inputs).sum().backward()
    with pytest.raises(TrainingLoopError):
        ddp(*MLP.batch(0, 0).inputs).sum().backward()
    ddp(*MLP.batch(0, 0).inputs).sum().backward()
    optimizer.step()


def test_a_second_backward_without_a_step_is_an_error_in_a_world_of_one() -> None:
    run_ranks(_second_backward, 1)
