"""What cannot go with released gradients is an error that says why; never a crash, never a silent difference."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from release_cases import SGD, STEPPED, gradients, is_released, registered, settle, wrapped

from harness import run_ranks, wrap
from harness.models import MLP
from overlap import (
    AllReduce,
    ConfigurationError,
    OverlappedOptimizer,
    Step,
    TrainingLoopError,
    UnsupportedError,
    ZeroRedundancyOptimizer,
    ZeroStep,
    chain,
)

Loop = Callable[[Any, Any, int], None]


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


# Whoever keeps a gradient, or a bucket.

_KEPT: list[Any] = []


def _with_patience(play: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(play)
    def played(*arguments: Any) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("overlap.optim.release._PATIENCE_S", 0.5)
            play(*arguments)

    return played


def _keeps_the_bucket(bucket: Any) -> None:
    _KEPT.append(bucket)


def _keeps_the_buffer(bucket: Any) -> None:
    _KEPT.append(bucket.buffer)


def _keeps_gradients(bucket: Any) -> None:
    _KEPT.append(bucket.gradients)


def _keeps_a_part(bucket: Any) -> None:
    _KEPT.append(bucket.buffer[:3])


KEEPERS = (_keeps_the_bucket, _keeps_the_buffer, _keeps_gradients, _keeps_a_part)


def _total() -> float:
    total = 0.0
    for kept in _KEPT:
        tensors = kept if isinstance(kept, tuple) else [kept if isinstance(kept, torch.Tensor) else kept.buffer]
        total += sum(float(tensor.sum()) for tensor in tensors)
    return total


@_with_patience
def _kept_in_a_stage(rank: int, world_size: int, when: int) -> None:
    for keep in KEEPERS:
        for place in ("before", "after"):

            def stage(bucket: Any, keep: Any = keep) -> None:
                assert bucket.raw is None, "DDP's own object, whose tensors do not count, is not given away"
                if bucket.step == when and bucket.index == 0:
                    keep(bucket)

            ddp = wrapped()
            optimizer = OverlappedOptimizer(SGD(ddp.parameters()))
            update = Step(optimizer, release_gradients=True)
            chain(
                *([stage] if place == "before" else []), AllReduce(), update, *([stage] * (place == "after"))
            ).register(ddp)
            _trains(ddp, optimizer, rank, steps=when + 1)
            assert isinstance(_total(), float), f"{keep.__name__}: what is kept can be read"
            _outlast_patience()
            with pytest.raises(TrainingLoopError, match="something else refers to it") as raised:
                _backward(ddp, when + 1, rank)
            assert "8." in str(raised.value), "it names a parameter of the first bucket"
            assert isinstance(_total(), float), f"{keep.__name__}: what is kept can be read"
            _KEPT.clear()
            optimizer.step()  # The update had been made, on every rank alike.
            _trains(ddp, optimizer, rank, start=when + 2)
            assert is_released(ddp), "and what nobody keeps any longer is released again"
            _check_same(ddp)


def _outlast_patience() -> None:
    """Keep for longer than a backend may."""
    time.sleep(0.6)


def _check_same(ddp: Any) -> None:
    first = next(ddp.parameters()).detach()
    gathered = [torch.empty_like(first) for _ in range(2)]
    torch.distributed.all_gather(gathered, first)
    assert torch.equal(*gathered)


@pytest.mark.parametrize("when", [1, 3])
def test_what_a_stage_keeps_is_an_error_of_the_next_backward(when: int) -> None:
    run_ranks(_kept_in_a_stage, 2, when)


def _kept_in_the_first_pass(rank: int, world_size: int) -> None:
    for keep in KEEPERS:

        def stage(bucket: Any, keep: Any = keep) -> None:
            if bucket.step == 0:
                keep(bucket)

        ddp = wrapped()
        optimizer = OverlappedOptimizer(SGD(ddp.parameters()))
        chain(stage, AllReduce(), Step(optimizer, release_gradients=True)).register(ddp)
        for step in range(3):
            _trains(ddp, optimizer, rank, steps=1, start=step)
            assert isinstance(_total(), float), f"{keep.__name__}: what is kept can be read"
        _KEPT.clear()
        assert is_released(ddp)


def test_the_bucket_that_ddp_drops_after_the_first_pass_belongs_to_whoever_keeps_it() -> None:
    run_ranks(_kept_in_the_first_pass, 2)


@_with_patience
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
        _backward(ddp, 4, rank)
        optimizer.step()
        _outlast_patience()
        with pytest.raises(TrainingLoopError, match=r"the gradient of 2\.(weight|bias) cannot be released"):
            _backward(ddp, 5, rank)
        assert form == "zero" or bool(torch.isfinite(kept).all())
        del kept
        optimizer.step()
        _trains(ddp, optimizer, rank, start=6)
        assert is_released(ddp)
        _check_same(ddp)


@pytest.mark.parametrize("form", ["interleaved", "zero"])
def test_what_a_loop_keeps_is_an_error(form: str) -> None:
    run_ranks(_kept_by_a_loop, 2, form)


# Loops in which plain DDP would use gradients that are gone.


def _steps_twice(ddp: Any, optimizer: Any, rank: int) -> None:
    _backward(ddp, 0, rank)
    optimizer.step()
    optimizer.step()


def _adds_after_step(ddp: Any, optimizer: Any, rank: int) -> None:
    _backward(ddp, 0, rank)
    optimizer.step()
    (next(ddp.parameters()) * 0.1).sum().backward()
    _backward(ddp, 1, rank)


def _adds_before_step(ddp: Any, optimizer: Any, rank: int) -> None:
    _backward(ddp, 0, rank)
    (next(ddp.parameters()) * 0.1).sum().backward()
    optimizer.step()


def _sets_before_step(ddp: Any, optimizer: Any, rank: int) -> None:
    _backward(ddp, 0, rank)
    for parameter in ddp.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()


def _second_backward(ddp: Any, optimizer: Any, rank: int) -> None:
    _backward(ddp, 0, rank)
    _backward(ddp, 1, rank)


def _discards(ddp: Any, optimizer: Any, rank: int) -> None:
    _backward(ddp, 0, rank)
    optimizer.zero_grad()


def _scales(ddp: Any, optimizer: Any, rank: int) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(ddp(*MLP.batch(0, rank).inputs).square().mean()).backward()
    try:
        scaler.step(optimizer)
    finally:
        for name in ("grad_scale", "found_inf"):  # GradScaler leaves them where step() raises.
            optimizer.__dict__.pop(name, None)


REFUSED: dict[Loop, str] = {
    _steps_twice: "was called again for a backward whose gradients have been applied",
    _adds_after_step: "a backward adds to the gradient of 0.weight, which has been applied: call zero_grad",
    _adds_before_step: "a second backward began before .* and adds to the gradient of 0.weight",
    _sets_before_step: r"the gradient of 0.weight \(and 9 others\) was released in backward",
    _second_backward: "a second backward began before step",
    _discards: "would discard this backward",
    _scales: "GradScaler decides after backward whether to step",
}


def _refused(rank: int, world_size: int, form: str) -> None:
    for loop, message in REFUSED.items():
        ddp = wrapped()
        optimizer = registered(form, ddp, release_gradients=True)
        with pytest.raises(TrainingLoopError, match=message):
            loop(ddp, optimizer, rank)
        for _ in range(3):
            try:
                optimizer.step()
            except TrainingLoopError:
                optimizer.zero_grad()
        _trains(ddp, optimizer, rank, start=2)
        assert is_released(ddp) and not list(gradients(ddp)), loop.__name__
        _check_same(ddp)


@pytest.mark.parametrize("form", STEPPED)
def test_a_loop_that_needs_what_is_gone_is_refused(form: str) -> None:
    run_ranks(_refused, 2, form)


@_with_patience
def _borrowed(rank: int, world_size: int) -> None:
    borrowers: dict[Any, torch.Tensor] = {}
    borrows = False

    def borrow(bucket: Any) -> None:
        for parameter in bucket.parameters if borrows else ():
            borrowers[parameter] = torch.zeros_like(parameter, requires_grad=True)
            borrowers[parameter].grad = parameter.grad

    ddp = wrap(MLP.model(), gradient_as_bucket_view=True)
    optimizer = OverlappedOptimizer(SGD(ddp.parameters()))
    chain(AllReduce(), borrow, Step(optimizer, release_gradients=True)).register(ddp)
    for step in range(6):
        borrows = step in (0, 3)
        if step == 4:
            _outlast_patience()
            with pytest.raises(TrainingLoopError, match="something else refers to it"):
                _backward(ddp, step, rank)
        else:
            _backward(ddp, step, rank)
        assert all(torch.isfinite(one.grad.sum()) for one in borrowers.values() if one.grad is not None)
        if not borrows:
            borrowers.clear()
        optimizer.step()


def test_the_gradient_of_another_tensor_may_not_be_one_that_is_released() -> None:
    run_ranks(_borrowed, 2)


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


def _sparse(rank: int, world_size: int) -> None:
    model = torch.nn.ModuleList([torch.nn.Embedding(8, 16, sparse=True), *(torch.nn.Linear(16, 16) for _ in range(3))])
    ddp = wrap(_InTurn(model), gradient_as_bucket_view=True, find_unused_parameters=True, bucket_cap_mb=0.0005)
    optimizer = OverlappedOptimizer(SGD(ddp.parameters()))
    chain(AllReduce(), Step(optimizer, release_gradients=True)).register(ddp)
    for _ in range(2):
        with pytest.raises(UnsupportedError, match="sparse"):
            ddp(torch.tensor([1, 2])).backward()


class _InTurn(torch.nn.Module):
    def __init__(self, layers: torch.nn.ModuleList) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            inputs = layer(inputs)
        return inputs.square().mean()


def test_sparse_gradients_are_the_same_error_as_without() -> None:
    run_ranks(_sparse, 2)
