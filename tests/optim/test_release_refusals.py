"""What cannot go with released gradients is an error that says why; never a crash, never a silent difference."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from release_cases import SGD, held_bytes, is_released, registered, settle, wrapped

from harness import run_ranks, wrap
from harness.models import MLP
from overlap import (
    AllReduce,
    ConfigurationError,
    OverlappedOptimizer,
    Step,
    UnsupportedError,
    ZeroRedundancyOptimizer,
    ZeroStep,
    chain,
)


def _backward(ddp: Any, step: int, rank: int) -> None:
    ddp(*MLP.batch(step, rank).inputs).square().mean().backward()


def _trains(ddp: Any, optimizer: Any, rank: int, steps: int = 3, start: int = 0) -> None:
    for step in range(start, start + steps):
        _backward(ddp, step, rank)
        optimizer.step()
    settle(optimizer)


@pytest.mark.parametrize("options", [{"deferred": True}, {"clip_grad_norm": 1.0}], ids=str)
def test_an_update_that_needs_all_gradients_is_refused(options: dict[str, Any]) -> None:
    optimizer = OverlappedOptimizer(SGD(torch.nn.Linear(2, 2).parameters()))
    with pytest.raises(ConfigurationError, match="needs all gradients before the first update"):
        Step(optimizer, release_gradients=True, **options)


def test_only_true_and_false_are_taken() -> None:
    with pytest.raises(ConfigurationError, match="release_gradients is True or False, got 1"):
        Step(SGD(torch.nn.Linear(2, 2).parameters()), release_gradients=1)  # type: ignore[arg-type]


class _Complex(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(4, 4, dtype=torch.complex64)


def _complex_is_refused(rank: int, world_size: int) -> None:
    ddp = wrap(_Complex(), gradient_as_bucket_view=True)
    optimizer = OverlappedOptimizer(SGD(ddp.parameters()))
    zero = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.SGD, lr=0.1)
    for stages in ((AllReduce(), Step(optimizer, release_gradients=True)), (ZeroStep(zero, release_gradients=True),)):
        with pytest.raises(UnsupportedError, match=r"inner\.weight is torch\.complex64"):
            chain(*stages).register(ddp)
    chain(ZeroStep(zero)).register(ddp)


def test_complex_gradients_are_not_released() -> None:
    run_ranks(_complex_is_refused, 2)


def _registration_is_refused(rank: int, world_size: int) -> None:
    ddp = wrap(MLP.model())
    optimizer = OverlappedOptimizer(SGD(ddp.parameters()))
    with pytest.raises(ConfigurationError, match="gradient_as_bucket_view=True"):
        chain(AllReduce(), Step(optimizer, release_gradients=True)).register(ddp)
    zero = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.SGD, lr=0.1)
    with pytest.raises(ConfigurationError, match="gradient_as_bucket_view=True"):
        chain(ZeroStep(zero, release_gradients=True)).register(ddp)
    chain(ZeroStep(zero)).register(ddp)
    _trains(ddp, zero, rank)


def test_buckets_that_ddp_copies_from_are_refused() -> None:
    run_ranks(_registration_is_refused, 2)


def _a_hook(rank: int, world_size: int) -> None:
    from overlap import as_hook

    ddp = wrapped()
    stage = chain(AllReduce(), Step(SGD(ddp.parameters()), release_gradients=True))
    ddp.register_comm_hook(None, as_hook(stage))
    with pytest.raises(ConfigurationError, match="has to know the model's parameters"):
        _backward(ddp, 0, rank)


def test_a_hook_is_refused() -> None:
    run_ranks(_a_hook, 2)


# Memory in use is not released.

KEEPERS: dict[str, Callable[[Any], Any]] = {
    "bucket": lambda bucket: bucket,
    "buffer": lambda bucket: bucket.buffer,
    "gradients": lambda bucket: bucket.gradients,
    "a part": lambda bucket: bucket.buffer[:3],
    "in .grad of another": lambda bucket: _Borrower(bucket.parameters[0]),
}


class _Borrower:
    def __init__(self, parameter: Any) -> None:
        self.tensor = torch.zeros_like(parameter, requires_grad=True)
        self.tensor.grad = parameter.grad


def _sum(kept: Any) -> float:
    """Reads what was kept; a crash where its memory was released."""
    kept = kept.tensor.grad if isinstance(kept, _Borrower) else getattr(kept, "buffer", kept)
    return sum(float(tensor.sum()) for tensor in (kept if isinstance(kept, tuple) else [kept]))


def _kept_in_a_stage(rank: int, world_size: int) -> None:
    for what, keep in KEEPERS.items():
        for when in (0, 1, 3):
            kept: list[Any] = []

            def stage(bucket: Any, keep: Any = keep, when: int = when, kept: list[Any] = kept) -> None:
                assert bucket.raw is None, "DDP's own object, whose tensors do not count, is not given away"
                if bucket.step == when and bucket.index == 0:
                    kept.append(keep(bucket))

            ddp = wrapped()
            optimizer = OverlappedOptimizer(SGD(ddp.parameters()))
            chain(AllReduce(), stage, Step(optimizer, release_gradients=True)).register(ddp)
            for step in range(when + 2):
                _trains(ddp, optimizer, rank, steps=1, start=step)
                assert math.isfinite(sum(map(_sum, kept))), f"{what} of step {when} in step {step}"
            if when:
                assert held_bytes(ddp), f"{what} of step {when}: the memory of one bucket is in use"
            kept.clear()
            _trains(ddp, optimizer, rank, start=when + 2)
            assert is_released(ddp), f"{what} of step {when}: released again when nobody keeps it"
            _check_same(ddp)


def _check_same(ddp: Any) -> None:
    first = next(ddp.parameters()).detach()
    gathered = [torch.empty_like(first) for _ in range(2)]
    torch.distributed.all_gather(gathered, first)
    assert torch.equal(*gathered)


def test_a_bucket_that_a_stage_keeps_has_its_memory_until_it_is_dropped() -> None:
    run_ranks(_kept_in_a_stage, 2)


def _kept_by_a_loop(rank: int, world_size: int, form: str) -> None:
    keeps: list[Callable[[Any], Any]] = [lambda p: p.grad, lambda p: p.grad.view(-1), lambda p: p.grad.detach()[:2]]
    for keep in keeps[:1] if form == "zero" else keeps:  # Of a part there are no views.
        ddp = wrapped()
        optimizer = registered(form, ddp, release_gradients=True)
        _trains(ddp, optimizer, rank)
        with optimizer.skip_update():
            _backward(ddp, 3, rank)
        kept = keep(list(ddp.parameters())[2])
        optimizer.zero_grad()  # The backward is thrown away, what was kept of it is not.
        _trains(ddp, optimizer, rank, steps=2, start=4)
        assert form == "zero" or bool(torch.isfinite(kept).all())
        del kept
        _trains(ddp, optimizer, rank, start=6)
        assert is_released(ddp)
        _check_same(ddp)


@pytest.mark.parametrize("form", ["interleaved", "zero"])
def test_a_gradient_that_a_loop_keeps_has_its_memory_until_it_is_dropped(form: str) -> None:
    run_ranks(_kept_by_a_loop, 2, form)


# Loops in which plain DDP would use gradients that are gone.


class _Branches(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(16, 16), torch.nn.Linear(16, 16)

    def forward(self, inputs: torch.Tensor, uses_second: bool) -> torch.Tensor:
        hidden = self.first(inputs)
        return (self.second(hidden) if uses_second else hidden).square().mean()


def _unused_on_one_rank(rank: int, world_size: int) -> None:
    results = []
    for releases in (False, True):
        torch.manual_seed(0)
        ddp = wrap(_Branches(), gradient_as_bucket_view=True, find_unused_parameters=True, bucket_cap_mb=0.0005)
        optimizer = OverlappedOptimizer(SGD(ddp.parameters()))
        chain(AllReduce(), Step(optimizer, release_gradients=releases)).register(ddp)
        inputs = torch.randn(4, 16, generator=torch.Generator().manual_seed(rank))
        for step in range(4):
            if step % 2:
                with optimizer.skip_update():
                    ddp(inputs, rank == 1).backward()
                # The mean came in a backward without an update, so it is there for step().
                assert ddp.module.second.weight.grad is not None
            else:
                ddp(inputs, True).backward()
            optimizer.step()
        results.append([parameter.detach().clone() for parameter in ddp.parameters()])
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))


def test_the_mean_of_what_this_rank_has_not_used_is_not_released_before_it_is_applied() -> None:
    run_ranks(_unused_on_one_rank, 2)
