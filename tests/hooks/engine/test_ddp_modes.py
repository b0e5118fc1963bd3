"""The update in backward under DDP's other options, compiled models, several models, uneven inputs."""

from __future__ import annotations

import functools
import gc
import threading
import time
import weakref
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from harness import assert_parity, overlapped_step, plain_step, run_ranks, train, wrap
from harness.models import MLP, TRANSFORMER, UNUSED, Batch, Case
from overlap import AllReduce, Cast, OverlappedOptimizer, Step, TrainingLoopError, chain, register
from overlap._torchvision import load_torchvision

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


def _options(rank: int, world_size: int) -> None:
    for deferred in (False, True):
        _pair(MLP, rank, deferred=deferred, static_graph=True)
        _pair(UNUSED, rank, deferred=deferred, static_graph=True, find_unused_parameters=False)
        _pair(MLP, rank, deferred=deferred, find_unused_parameters=True, gradient_as_bucket_view=True)
    _pair(TRANSFORMER, rank, static_graph=True, gradient_as_bucket_view=True)


def test_static_graph_unused_parameters_and_bucket_views() -> None:
    run_ranks(_options, 2)


class _Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x


def _activation_checkpointing(rank: int, world_size: int) -> None:
    """The block is computed again in backward, with weights of buckets that have been updated or not: never mixed."""
    _pair(Case(name="checkpointed", build=_Checkpointed, inputs=MLP.inputs), rank)


def test_activation_checkpointing() -> None:
    run_ranks(_activation_checkpointing, 2)


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


def _two_models(rank: int, world_size: int) -> None:
    """Two models, one loss and one backward, then two optimizers; one of them shared in a second round."""

    def run(overlapped: bool, shared: bool) -> list[Any]:
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

    for shared in (False, True):
        assert_parity(run(True, shared), run(False, shared), what=f"two models, {shared=}")


def test_two_models_in_one_process_and_one_backward() -> None:
    run_ranks(_two_models, 2)


def _uneven(rank: int, world_size: int) -> None:
    """DDP's own join: a rank that has run out replays the stages, update included."""
    case = MLP
    for make in (
        Step,  # A plain optimizer: everything in backward.
        lambda optimizer: Step(OverlappedOptimizer(optimizer)),
        lambda optimizer: Step(optimizer, clip_grad_norm=0.5),
    ):
        ddp = wrap(case.model(), **case.ddp_options())
        step = make(SGD(ddp.parameters()))
        chain(AllReduce(), step).register(ddp)
        with ddp.join():
            for batch in case.batches(rank, steps=3 + 4 * rank):
                nn.functional.mse_loss(ddp(*batch.inputs), batch.target).backward()
                if not step._is_automatic:
                    step.optimizer.step()
        ours = {
            "parameters": {name: p.detach().clone() for name, p in ddp.module.named_parameters()},
            "momentum": step.optimizer.state_dict()["state"],
        }

        ddp = wrap(case.model(), **case.ddp_options())
        optimizer = SGD(ddp.parameters())
        with ddp.join():
            for batch in case.batches(rank, steps=3 + 4 * rank):
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


def test_uneven_inputs_under_ddps_own_join() -> None:
    run_ranks(_uneven, 2)


def _images(generator: torch.Generator, step: int, rank: int) -> tuple[Any, ...]:
    return (torch.randn(2, 3, 32, 32, generator=generator),)


def _resnet18() -> nn.Module:
    return load_torchvision().models.resnet18(num_classes=16)


RESNET18 = Case(name="resnet18", build=_resnet18, inputs=_images)


def _resnet(rank: int, world_size: int) -> None:
    batches = RESNET18.batches(rank, steps=10)
    for make, channels_last in ((SGD, False), (functools.partial(torch.optim.AdamW, fused=True), True)):
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
    run_ranks(_resnet, 2, timeout_s=120)


def _several_forwards(rank: int, world_size: int) -> None:
    """Two forwards before one backward, and an evaluation in between."""

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

    # A forward that records gradients and leads nowhere takes nothing away from a deferred update.
    ddp = wrap(MLP.model(), **MLP.ddp_options())
    optimizer = OverlappedOptimizer(SGD(ddp.parameters()))
    chain(AllReduce(), Step(optimizer, deferred=True)).register(ddp)
    ddp(*batches[0].inputs).sum().backward()
    ddp(*batches[0].inputs)
    assert all(p.grad is not None for p in ddp.parameters())
    before = [p.detach().clone() for p in ddp.parameters()]
    optimizer.step()
    assert all(not torch.equal(p, old) for p, old in zip(ddp.parameters(), before, strict=True))


def test_several_forwards_and_evaluations() -> None:
    run_ranks(_several_forwards, 2)


def _leaves_nothing(rank: int, world_size: int) -> None:
    """A model that is dropped takes its chain, its optimizer and its worker thread with it."""
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


def test_nothing_outlives_the_model() -> None:
    run_ranks(_leaves_nothing, 2)


def _on_one_rank(rank: int, world_size: int) -> None:
    _pair(MLP, rank)
    ddp = DistributedDataParallel(MLP.model())
    optimizer = OverlappedOptimizer(SGD(ddp.parameters()))
    register(ddp, chain(AllReduce(), Step(optimizer)))
    for _ in range(2):
        ddp(*MLP.batch(0, 0).inputs).sum().backward()
        if _ == 0:
            with pytest.raises(TrainingLoopError):
                ddp(*MLP.batch(0, 0).inputs).sum().backward()
        else:
            optimizer.step()


def test_a_world_of_one() -> None:
    run_ranks(_on_one_rank, 1)
