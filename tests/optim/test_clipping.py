"""Clipping by the library is `clip_grad_norm_(ddp.parameters(), c)` bit for bit, whatever the optimizer's groups."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join as TorchJoin

from harness import on_ranks, wrap
from harness.models import MLP, Batch, Case, mean_squared_error
from overlap import (
    AllReduce,
    ClipGradNorm,
    Join,
    OverlappedOptimizer,
    Step,
    ZeroRedundancyOptimizer,
    ZeroStep,
    chain,
)

STEPS = 8
C = 0.01
BATCHES = (4, 2)
SGD: dict[str, Any] = {"lr": 0.1, "momentum": 0.9}


def _many() -> nn.Sequential:
    layers = [nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16), nn.Tanh()) for _ in range(8)]
    return nn.Sequential(*layers, nn.Linear(16, 16))


MANY = Case(name="many", build=_many, inputs=MLP.inputs)


def _groups(ddp: nn.Module) -> list[dict[str, Any]]:
    """Decay for matrices alone, as most training scripts have it: another order than the model's."""
    every = list(ddp.parameters())
    matrices, others = [p for p in every if p.ndim > 1], [p for p in every if p.ndim <= 1]
    return [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]


def _step(ddp: Any, norm_type: float, **options: Any) -> Any:
    optimizer = OverlappedOptimizer(torch.optim.SGD(_groups(ddp), **SGD))
    chain(AllReduce(), ClipGradNorm(C, norm_type), Step(optimizer, **options)).register(ddp)
    return optimizer


def _zero(ddp: Any, norm_type: float, *, in_chain: bool = True, **options: Any) -> Any:
    zero = ZeroRedundancyOptimizer(_groups(ddp), torch.optim.SGD, **SGD)
    before = [AllReduce(), *[ClipGradNorm(C, norm_type)] * in_chain]
    chain(*before, ZeroStep(zero, **options)).register(ddp)
    return None if options.get("automatic") else zero


FORMS: dict[str, Callable[..., Any]] = {
    "Step": _step,
    "Step, deferred": functools.partial(_step, deferred=True),
    "ZeroStep": _zero,
    "ZeroStep, deferred, automatic": functools.partial(_zero, deferred=True, automatic=True),
    "zero.clip_grad_norm_": functools.partial(_zero, in_chain=False, deferred=True),
}
"""Each registers a chain, and returns what the loop steps, if anything."""


def _clip(ddp: Any, norm_type: float) -> Tensor:
    norm = torch.nn.utils.clip_grad_norm_(ddp.parameters(), C, norm_type)
    assert norm > C, "a clip that does not bind shows nothing"
    return norm


def _plain(batches: Sequence[Batch], norm_type: float) -> tuple[list[list[Tensor]], int]:
    """The parameters after each step, and in how many steps the optimizer's order of summation gives another norm."""
    ddp, other_norms = wrap(MANY.model(), **MANY.ddp_options()), 0
    optimizer = torch.optim.SGD(_groups(ddp), **SGD)
    records = []
    for batch in batches:
        optimizer.zero_grad()
        mean_squared_error(ddp, batch).backward()
        gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        in_its_order = torch.nn.utils.get_total_norm(gradients, norm_type)
        other_norms += not torch.equal(_clip(ddp, norm_type), in_its_order)
        optimizer.step()
        records.append([parameter.detach().clone() for parameter in ddp.parameters()])
    return records, other_norms


def _differing_steps(name: str, batches: Sequence[Batch], norm_type: float, reference: list[list[Tensor]]) -> int:
    ddp = wrap(MANY.model(), **MANY.ddp_options())
    optimizer = FORMS[name](ddp, norm_type)
    differing = 0
    for batch, expected in zip(batches, reference, strict=True):
        mean_squared_error(ddp, batch).backward()
        if name == "zero.clip_grad_norm_":
            optimizer.clip_grad_norm_(C, norm_type)
        if optimizer is not None:
            optimizer.step()
        differing += any(not torch.equal(ours, theirs) for ours, theirs in zip(ddp.parameters(), expected, strict=True))
    return differing


@on_ranks(2)
def test_every_form_sums_in_the_models_order_and_not_in_the_optimizers(rank: int, world_size: int) -> None:
    for norm_type, steps in ((2.0, STEPS), (float("inf"), 3)):
        batches = MANY.batches(rank, steps=steps)
        reference, other_norms = _plain(batches, norm_type)
        assert other_norms > 0 or norm_type == float("inf"), "the order of summation shows in no step"
        for name in FORMS:
            assert _differing_steps(name, batches, norm_type, reference) == 0, f"{name}, {norm_type=}"


@on_ranks(2)
def test_with_uneven_inputs(rank: int, world_size: int) -> None:
    """A rank without inputs, which has no `.grad`, clips as the others."""
    plain = wrap(MANY.model(), **MANY.ddp_options())
    reference = torch.optim.SGD(_groups(plain), **SGD)
    with TorchJoin([plain]):
        for step in range(BATCHES[rank]):
            reference.zero_grad()
            mean_squared_error(plain, MANY.batch(step, rank)).backward()
            torch.nn.utils.clip_grad_norm_(plain.parameters(), C)
            reference.step()
    for name in ("Step", "Step, deferred", "ZeroStep"):
        ddp = wrap(MANY.model(), **MANY.ddp_options())
        optimizer = FORMS[name](ddp, 2.0)
        with Join([ddp, optimizer]):
            for step in range(BATCHES[rank]):
                mean_squared_error(ddp, MANY.batch(step, rank)).backward()
                optimizer.step()
        for ours, theirs in zip(ddp.parameters(), plain.parameters(), strict=True):
            assert torch.equal(ours, theirs), name
