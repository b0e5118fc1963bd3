"""A chain without an update is one line in a script: the loop, its optimizer, clip and scaler stay as they are."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from harness import assert_parity, run_ranks
from overlap import (
    AllGather,
    AllReduce,
    BFloat16,
    Cast,
    Float8,
    Float16,
    Int4,
    Int8,
    PowerSGD,
    Quantize,
    Stage,
    TopK,
    chain,
    route,
)

_STEPS, _SPOILED = 4, 2
"""Steps, of which in one the loss of rank 1 overflows."""


def _bf16_by_hand(state, bucket):  # type: ignore[no-untyped-def]
    compressed = bucket.buffer().to(torch.bfloat16).div_(dist.get_world_size())
    work = dist.all_reduce(compressed, async_op=True)
    return work.get_future().then(lambda future: bucket.buffer().copy_(future.value()[0]))


# By name: the reducer, and the hook of PyTorch's own that it equals bit for bit; None stands for plain DDP.
EQUAL: dict[str, tuple[Callable[[], Stage], Any]] = {
    "AllReduce": (AllReduce, None),
    "AllGather": (AllGather, None),
    "route of AllReduce": (lambda: route({"*.weight": AllReduce(), "*": AllGather()}), None),
    "Cast(float16)": (lambda: Cast(torch.float16), default_hooks.fp16_compress_hook),
    "Cast(bfloat16)": (lambda: Cast(torch.bfloat16), _bf16_by_hand),
}
# By name: the reducer, and how far its mean may be from plain DDP's in its first step, relative to its norm.
CLOSE: dict[str, tuple[Callable[[], Stage], float]] = {
    "Quantize(Int8)": (lambda: Quantize(Int8()), 0.02),
    "Quantize(Int4)": (lambda: Quantize(Int4(), error_feedback=True), 0.3),
    "Quantize(Float8)": (lambda: Quantize(Float8()), 0.1),
    "Quantize(Float16)": (lambda: Quantize(Float16()), 0.002),
    "Quantize(BFloat16)": (lambda: Quantize(BFloat16()), 0.01),
    "Quantize(TopK)": (lambda: Quantize(TopK(0.5), error_feedback=True), 0.7),
    "PowerSGD": (lambda: PowerSGD(rank=8, min_compression_rate=0), 0.9),
    "route of PowerSGD and Int8": (lambda: route({"0.*": PowerSGD(rank=8), "*": Quantize(Int8())}), 0.9),
}


class _Loop:
    """The script, without the line."""

    def __init__(self, rank: int) -> None:
        torch.manual_seed(0)
        self.rank = rank
        self.model = nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 32))
        self.ddp = DistributedDataParallel(self.model, bucket_cap_mb=4e-3)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
        self.first: Tensor = torch.empty(0)
        """The reduced gradients of the first step."""

    def train(self) -> list[Any]:
        seen: list[Any] = []
        for place in range(_STEPS):
            generator = torch.Generator().manual_seed(10 * place + self.rank)
            x, y = torch.randn(8, 32, generator=generator), torch.randn(8, 32, generator=generator)
            self.optimizer.zero_grad()
            loss = nn.functional.mse_loss(self.ddp(x), y)
            if place == _SPOILED and self.rank == 1:
                loss = loss * float("inf")
            self.scaler.scale(loss).backward()
            if place == 0:
                self.first = torch.cat([parameter.grad.flatten() for parameter in self.model.parameters()])
            seen.append(_finish(self.model, self.optimizer, self.scaler))
        return seen


def _finish(model: nn.Module, optimizer: Any, scaler: Any) -> Any:
    """From backward to the end of a step; returns what there is then."""
    scaler.unscale_(optimizer)
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    scaler.step(optimizer)
    scaler.update()
    return norm, scaler.get_scale(), copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())


def _distance(loop: _Loop, plain: _Loop) -> float:
    return float((loop.first - plain.first).norm() / plain.first.norm())


def _check(name: str, make: Callable[[], Stage], hook: Any, most: float | None, plain: _Loop, seen: list[Any]) -> None:
    loop = _Loop(plain.rank)
    chain(make()).register(loop.ddp)  # The only new line.
    got = loop.train()
    others: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(others, got)
    assert_parity(others[1], others[0], what=f"{name}: rank 1 and rank 0")
    before, spoiled = (got[place][2] for place in (_SPOILED - 1, _SPOILED))
    assert_parity(spoiled, before, what=f"{name}: the step that GradScaler skips")
    if most is not None:
        assert 0 < _distance(loop, plain) <= most, f"{name}: {_distance(loop, plain)} from plain DDP's mean"
        return
    if hook is not None:
        reference = _Loop(plain.rank)
        reference.ddp.register_comm_hook(None, hook)
        seen = reference.train()
    assert_parity(got, seen, what=f"{name}, beside {'plain DDP' if hook is None else hook.__name__}")


def _one_line(rank: int, world_size: int) -> list[str]:
    plain = _Loop(rank)
    seen = plain.train()
    assert seen[_SPOILED][1] < seen[_SPOILED - 1][1], "GradScaler has skipped no step"
    faults = []
    for name, (make, beside) in {**EQUAL, **CLOSE}.items():
        hook, most = (beside, None) if name in EQUAL else (None, beside)
        try:
            _check(name, make, hook, most, plain, seen)
        except AssertionError as error:
            faults.append(f"{name}: {error}")
    return faults


def test_every_reducer_is_one_line_in_a_loop_with_its_own_optimizer_clip_and_scaler() -> None:
    assert run_ranks(_one_line, 2, timeout_s=120) == [[], []]
