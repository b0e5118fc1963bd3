"""What a loop does beside backward and step, and what changes nothing that ranks without inputs would miss."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from harness import assert_parity, run_ranks, wrap
from harness.models import MLP, mean_squared_error
from overlap import (
    AllReduce,
    Join,
    LocalSGD,
    OverlappedOptimizer,
    PeerError,
    Step,
    TrainingLoopError,
    ZeroRedundancyOptimizer,
    ZeroStep,
    chain,
)

_BATCHES = (5, 3)
_RATE = 0.05


def _sgd(ddp: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(ddp.parameters(), lr=_RATE, momentum=0.9)


def _step(ddp: Any) -> torch.optim.Optimizer:
    optimizer = OverlappedOptimizer(_sgd(ddp))
    chain(AllReduce(), Step(optimizer)).register(ddp)
    return optimizer


def _deferred(ddp: Any) -> torch.optim.Optimizer:
    optimizer = OverlappedOptimizer(_sgd(ddp))
    chain(AllReduce(), Step(optimizer, deferred=True)).register(ddp)
    return optimizer


def _zero(ddp: Any) -> torch.optim.Optimizer:
    zero = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.SGD, lr=_RATE, momentum=0.9, overlap_with_ddp=True)
    chain(ZeroStep(zero)).register(ddp)
    return zero


def _zero_alone(ddp: Any) -> torch.optim.Optimizer:
    return ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.SGD, lr=_RATE, momentum=0.9)


def _local(ddp: Any) -> Any:
    return LocalSGD(ddp, _sgd(ddp), period=2, start_step=100)


_FORMS: dict[str, Callable[[Any], Any]] = {
    "plain": _sgd, "step": _step, "deferred": _deferred, "zero": _zero, "zero alone": _zero_alone, "local": _local,
}  # fmt: skip
_IN_BACKWARD = ("step", "zero")


class _Loop:
    """A loop with a closure, a scaler, ...; on a rank that has run out it goes on, plainly, with gradients of zero."""

    def __init__(self, rank: int, form: str, what: str) -> None:
        self.rank, self.form, self.what = rank, form, what
        self.ddp = wrap(MLP.model(), **MLP.ddp_options())
        self.optimizer = _FORMS[form](self.ddp)
        self.scaler = torch.amp.GradScaler("cpu", enabled=False)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2) if what == "warmup" else None
        if what == "numpy":
            numpy = pytest.importorskip("numpy")
            self.optimizer.param_groups[0]["lr"] = numpy.float32(_RATE)
        if what == "pre-hook":
            parameters = list(self.ddp.parameters())
            self.optimizer.register_step_pre_hook(lambda *_: [nn.utils.clip_grad_norm_(parameters, 0.1), None][1])

    @property
    def joinables(self) -> list[Any]:
        return [self.ddp, self.optimizer, *([] if self.scheduler is None else [self.scheduler])]

    def run(self, step: int, scale: float = 1.0) -> None:
        def closure() -> Tensor:
            self.optimizer.zero_grad()
            loss = mean_squared_error(self.ddp, MLP.batch(step, self.rank)) * scale
            loss.backward()
            return loss

        if self.what == "warmup":
            self.optimizer.param_groups[0]["lr"] = _RATE * (step + 1)
        if self.what == "momentum":
            self.optimizer.param_groups[0]["dampening"] = 0.1 * step
        if self.what == "closure":
            self.optimizer.step(closure)
            return
        closure()
        if self.what == "norm":
            nn.utils.get_total_norm([parameter.grad for parameter in self.ddp.parameters()])
        if self.what == "scaler":
            self.scaler.step(self.optimizer)
            self.scaler.update()
        else:
            self.optimizer.step()
        if self.scheduler is not None:
            self.scheduler.step()

    def values(self) -> dict[str, Tensor]:
        return {name: value.detach().clone() for name, value in self.ddp.module.named_parameters()}


def _trained(rank: int, world_size: int, what: str, forms: list[str]) -> None:
    plain = _Loop(rank, "plain", what)
    for step in range(max(_BATCHES)):
        plain.run(step, 1.0 if step < _BATCHES[rank] else 0.0)
    for form in forms:
        loop = _Loop(rank, form, what)
        with Join(loop.joinables) as join:
            for step in join.iterate(range(_BATCHES[rank])):
                loop.run(step)
        assert_parity(loop.values(), plain.values(), what=f"{what}, {form}")


@pytest.mark.parametrize("what", ["closure", "scaler", "norm", "pre-hook", "warmup", "numpy", "momentum"])
def test_it_is_followed_where_it_can_be(what: str) -> None:
    forms = [form for form in _FORMS if not (what in ("norm", "pre-hook", "scaler") and form in _IN_BACKWARD)]
    if what == "pre-hook":
        forms = ["plain"]
    run_ranks(_trained, 2, what, forms)


def _calls_again(rank: int, world_size: int) -> None:
    ddp = wrap(MLP.model(), **MLP.ddp_options())
    optimizer = torch.optim.LBFGS(ddp.parameters(), lr=0.1, max_iter=3)

    def closure() -> Any:
        optimizer.zero_grad()
        loss = mean_squared_error(ddp, MLP.batch(0, rank))
        loss.backward()
        return loss

    with Join([ddp, optimizer]) as join:
        for _ in join.iterate(range(2)):
            optimizer.step(closure)


def _adds_a_group(rank: int, world_size: int) -> None:
    ddp = wrap(MLP.model(), **MLP.ddp_options())
    chain(AllReduce()).register(ddp)  # The others learn of the error at once.
    first, *rest = ddp.parameters()
    optimizer = torch.optim.SGD([first], lr=_RATE)
    with Join([ddp, optimizer]) as join:
        for step in join.iterate(range(_BATCHES[rank])):
            if step == max(_BATCHES) - 1:
                optimizer.add_param_group({"params": rest})
            optimizer.zero_grad()
            mean_squared_error(ddp, MLP.batch(step, rank)).backward()
            optimizer.step()


def _refused(rank: int, world_size: int, loop: Callable[[int, int], None], words: str) -> None:
    with pytest.raises((TrainingLoopError, PeerError), match=words):
        loop(rank, world_size)


@pytest.mark.parametrize(
    ("loop", "words"), [(_calls_again, "calls its closure again"), (_adds_a_group, "add_param_group")]
)
def test_what_cannot_be_followed_is_an_error(loop: Callable[[int, int], None], words: str) -> None:
    run_ranks(_refused, 2, loop, words)
