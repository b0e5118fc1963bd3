"""Chains in which gradients are released, failures, and removal: each the same as without, bit for bit."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from release_cases import (
    ADAMW,
    FORMS,
    SGD,
    has_gradient,
    is_released,
    registered,
    release_of,
    settle,
    storages,
    wrapped,
)

from bucket_functions import centralize, clip_value, scale
from harness import assert_parity, run_ranks
from harness.models import MLP, Case, mean_squared_error
from overlap import (
    AllReduce,
    ClipGradNorm,
    Int4,
    Int8,
    Log,
    OverlappedOptimizer,
    PeerError,
    PowerSGD,
    Quantize,
    SkipNonFinite,
    Step,
    ZeroRedundancyOptimizer,
    ZeroStep,
    as_stage,
    chain,
)
from overlap.hooks.engine.registration import registration_of

Seen = list[Any]


class Run:
    """One training run; ``note`` records what is there."""

    def __init__(self, rank: int, *, releases: bool, case: Case = MLP, **options: Any) -> None:
        self.rank, self.case = rank, case
        self.options: dict[str, Any] = {"release_gradients": releases}
        self.ddp = wrapped(case, **options)
        self.seen: Seen = []
        self.optimizers: list[Any] = []

    def loss(self, step: int) -> torch.Tensor:
        return mean_squared_error(self.ddp, self.case.batch(step, self.rank))

    def train(self, steps: int = 5, start: int = 0) -> None:
        for step in range(start, start + steps):
            self.loss(step).backward()
            self.update()

    def update(self) -> None:
        for optimizer in self.optimizers:
            if not isinstance(optimizer, torch.optim.SGD):  # Of the automatic forms.
                optimizer.step()
        self.note()

    def note(self) -> None:
        for optimizer in self.optimizers:
            settle(optimizer)
        states = [getattr(optimizer, "optim", optimizer).state_dict() for optimizer in self.optimizers]  # Of this rank.
        self.seen.append(copy.deepcopy((dict(self.ddp.module.state_dict()), states)))


def _both(rank: int, play: Callable[[Run], None], what: str, **options: Any) -> None:
    """Play with and without; and gradients must have been released."""
    plain, ours = Run(rank, releases=False, **options), Run(rank, releases=True, **options)
    play(plain)
    play(ours)
    assert_parity(ours.seen, plain.seen, what=f"{what}, rank {rank}")
    if registration_of(ours.ddp) is not None and storages(ours.ddp):
        assert is_released(ours.ddp), f"{what}: nothing was released at the end"


# Chains.

Build = Callable[[Run], list[Any]]


def _stepped(*before: Callable[[], Any], after: tuple[Callable[[], Any], ...] = (), make: Any = SGD) -> Build:
    def build(run: Run) -> list[Any]:
        optimizer = OverlappedOptimizer(make(run.ddp.parameters()))
        stages = [*(one() for one in before), Step(optimizer, **run.options), *(one() for one in after)]
        chain(*stages).register(run.ddp)
        return [optimizer]

    return build


def _zero(*before: Callable[[], Any], after: tuple[Callable[[], Any], ...] = (), **options: Any) -> Build:
    def build(run: Run) -> list[Any]:
        zero = ZeroRedundancyOptimizer(run.ddp.parameters(), torch.optim.AdamW, lr=0.01)
        chain(*(one() for one in before), ZeroStep(zero, **run.options, **options), *(one() for one in after)).register(
            run.ddp
        )
        return [zero]

    return build


def _halves(run: Run) -> tuple[list[Any], list[Any]]:
    parameters = list(run.ddp.parameters())
    return [p for p in parameters if p.ndim == 2], [p for p in parameters if p.ndim != 2]


def _one_sharded_one_not(run: Run) -> list[Any]:
    matrices, rest = _halves(run)
    first = ZeroRedundancyOptimizer(matrices, torch.optim.Muon, lr=0.02)
    second = OverlappedOptimizer(ADAMW(rest))
    chain(ZeroStep(first, **run.options), Step(second, **run.options)).register(run.ddp)
    return [first, second]


def _norms() -> Log:
    return Log(lambda step, norms: None)


def _hook(state: Any, bucket: Any) -> Any:
    work = torch.distributed.all_reduce(bucket.buffer(), async_op=True)
    return work.get_future().then(lambda done: done.value()[0].div_(torch.distributed.get_world_size()))


CHAINS: dict[str, Build] = {
    "4 bits, feedback": _stepped(lambda: Quantize(Int4(), error_feedback=True)),
    "factors": _stepped(lambda: PowerSGD(rank=1, min_compression_rate=1.0)),
    "a hook": _stepped(lambda: as_stage(_hook)),
    "transforms": _stepped(
        lambda: scale(2.0),
        AllReduce,
        lambda: scale(0.5),
        lambda: clip_value(0.1),
        lambda: centralize,
        _norms,
        after=(_norms,),
    ),
    "skipping": _stepped(AllReduce, SkipNonFinite),
    "one sharded, one not": _one_sharded_one_not,
    "sharded, wires": _zero(reduce_wire=Int4(), gather_wire=Int8(), error_feedback=True),
    "sharded, clipped, skipping": _zero(lambda: ClipGradNorm(0.05), SkipNonFinite, after=(_norms,)),
}


def _chains(rank: int, world_size: int, names: list[str]) -> None:
    for name in names:

        def play(run: Run, name: str = name) -> None:
            torch.manual_seed(0)
            run.optimizers = CHAINS[name](run)
            run.train(6)

        _both(rank, play, name)


@pytest.mark.parametrize("names", [list(CHAINS)[place::3] for place in range(3)], ids=", ".join)
def test_a_chain_is_the_same(names: list[str]) -> None:
    run_ranks(_chains, 2, names)


def _in_part(rank: int, world_size: int) -> None:
    """A bucket with a parameter that no update has is kept, and its gradient stays readable."""
    run = Run(rank, releases=True)
    matrices, rest = _halves(run)
    optimizer = OverlappedOptimizer(SGD([*matrices, *rest[:-1]]))
    chain(AllReduce(), Step(optimizer, **run.options)).register(run.ddp)
    for step in range(4):
        rest[-1].grad = None
        run.loss(step).backward()
        assert rest[-1].grad is not None and rest[-1].grad.any()
        assert step == 0 or not has_gradient(matrices[0])
        optimizer.step()
    kept = [storage.nbytes() for storage in storages(run.ddp) if storage.nbytes()]
    assert len(kept) == 1 and len(storages(run.ddp)) > 2

    run = Run(rank, releases=True)
    *most, weight, bias = run.ddp.parameters()
    both = OverlappedOptimizer(SGD(most)), OverlappedOptimizer(ADAMW([weight, bias]))
    chain(AllReduce(), Step(both[0], **run.options), Step(both[1])).register(run.ddp)
    run.optimizers = list(both)
    run.train(4)
    assert weight.grad is not None and bias.grad is not None, "of an update that releases nothing"
    assert not any(map(has_gradient, most))


def test_what_no_update_releases_is_kept() -> None:
    run_ranks(_in_part, 2)


# Uneven inputs.


# Failures and ends.


class _FailsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> torch.Tensor:
        raise ValueError("broken on purpose")


def _fails(rank: int, world_size: int, form: str) -> None:
    def is_broken() -> Any:
        # The first rank to fail closes its connections: another may learn of that before it comes to the same place.
        return pytest.raises((ValueError, PeerError), match=r"ValueError: broken on purpose|^broken on purpose")

    for kind in ("stage", "stage of one rank", "model", "optimizer"):
        run = Run(rank, releases=True)
        run.optimizers = [registered(form, run.ddp, **run.options)]
        run.train(3)
        registration = registration_of(run.ddp)
        assert registration is not None
        module = run.ddp.module
        if kind.startswith("stage"):
            stages = list(registration.stage.sequence)
            original = type(stages[-1]).__call__

            async def broken(self: Any, bucket: Any, original: Any = original, kind: str = kind) -> None:
                if bucket.index == 2 and (kind == "stage" or rank == 1):
                    raise ValueError("broken on purpose")
                await original(self, bucket)

            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(type(stages[-1]), "__call__", broken)
                with is_broken():
                    run.loss(3).backward()
        elif kind == "model":
            handle = module[4].register_forward_pre_hook(lambda _, inputs: _FailsInBackward.apply(*inputs))
            with is_broken():
                run.loss(3).backward()
            handle.remove()
        else:
            inner = getattr(run.optimizers[0], "optim", getattr(run.optimizers[0], "optimizer", run.optimizers[0]))
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(type(inner), "step", _raises)
                with is_broken():
                    run.loss(3).backward()
        run.train(3, start=4)
        gc.collect()  # The exception refers to its frames, and they to it.
        run.train(1, start=7)
        assert is_released(run.ddp), kind


def _raises(self: Any, closure: Any = None) -> Any:
    raise ValueError("broken on purpose")


@pytest.mark.parametrize("form", FORMS)
def test_a_model_trains_on_after_a_failure(form: str) -> None:
    run_ranks(_fails, 2, form)


def _removes(rank: int, world_size: int, form: str) -> None:
    def play(run: Run) -> None:
        run.optimizers = [registered(form, run.ddp, **run.options)]
        run.train(3)
        registration = registration_of(run.ddp)
        assert registration is not None
        found = list(release_of(run.ddp)._memories.values()) if run.options["release_gradients"] else []
        registration.remove()
        assert all(not memory.is_empty for memory in found) and (not found or len(found) > 2)
        del found  # It refers to what DDP has of earlier passes.
        optimizer = SGD(run.ddp.parameters())
        run.optimizers = []
        for step in range(3, 6):
            optimizer.zero_grad()
            run.loss(step).backward()
            assert all(p.grad is not None for p in run.ddp.parameters())
            optimizer.step()
            run.note()
        assert not any(parameter._backward_hooks for parameter in run.ddp.parameters())
        run.optimizers = [registered(form, run.ddp, **run.options)]
        run.train(3, start=6)

    _both(rank, play, f"{form}, removed")


@pytest.mark.parametrize("form", FORMS)
def test_a_model_is_as_before_when_the_registration_is_removed(form: str) -> None:
    run_ranks(_removes, 2, form)
