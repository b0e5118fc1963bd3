"""Small models: stages on autograd's thread, without a worker, and the same parameters bit for bit."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from harness import assert_parity, overlapped_step, run_ranks, wrap
from harness.models import MLP, mean_squared_error
from overlap import (
    AllReduce,
    OverlappedOptimizer,
    Step,
    ZeroRedundancyOptimizer,
    ZeroStep,
    chain,
)
from overlap.hooks.engine.executors import limit_replaced, runs_inline
from overlap.hooks.engine.registration import registration_of

INLINE = {"OVERLAP_SMALL_MODEL_BYTES": str(2**20)}
STEPS = 6

make_adamw = functools.partial(torch.optim.AdamW, lr=0.05, weight_decay=0.1)


def _replicated(ddp: Any, **form: Any) -> Any:
    optimizer = OverlappedOptimizer(make_adamw(ddp.parameters()))
    chain(AllReduce(), Step(optimizer, **form)).register(ddp)
    return optimizer


def _sharded(ddp: Any, **form: Any) -> Any:
    zero = ZeroRedundancyOptimizer(
        ddp.parameters(), torch.optim.AdamW, lr=0.05, weight_decay=0.1, overlap_with_ddp=True
    )
    chain(ZeroStep(zero, **form)).register(ddp)
    return zero


FORMS: dict[str, Callable[[Any], Any]] = {
    "interleaved": _replicated,
    "deferred": functools.partial(_replicated, deferred=True),
    "sharded": _sharded,
    "sharded, gather in forward": functools.partial(_sharded, gather="forward"),
}


def _trained(ddp: Any, optimizer: Any, batches: Any) -> dict[str, Any]:
    """The losses of all steps, and the parameters at the end."""
    losses = []
    for batch in batches:
        optimizer.zero_grad()
        losses.append(overlapped_step(ddp, optimizer, batch, mean_squared_error).detach())
    if isinstance(optimizer, ZeroRedundancyOptimizer):
        optimizer.wait()
    return {"losses": losses, **{name: value.detach().clone() for name, value in ddp.module.named_parameters()}}


def _threads_of(ddp: Any) -> list[str]:
    registration = registration_of(ddp)
    assert registration is not None
    return [one.name for one in threading.enumerate() if one.name == f"overlap-{id(registration.runtime):x}"]


def _equals_plain_ddp(rank: int, world_size: int, name: str, bucket_view: bool) -> None:
    options = {**MLP.ddp_options(), "gradient_as_bucket_view": bucket_view}
    batches = MLP.batches(rank, steps=STEPS)
    ddp = wrap(MLP.model(), **options)
    reference = _trained(ddp, make_adamw(ddp.parameters()), batches)
    ddp = wrap(MLP.model(), **options)
    optimizer = FORMS[name](ddp)
    assert _threads_of(ddp) == []
    assert_parity(_trained(ddp, optimizer, batches), reference, what=name)


@pytest.mark.parametrize("bucket_view", [False, True])
@pytest.mark.parametrize("name", FORMS)
def test_an_inline_pass_equals_plain_ddp(name: str, bucket_view: bool) -> None:
    run_ranks(_equals_plain_ddp, 2, name, bucket_view, env=INLINE)


def _model(*widths: int, dtype: torch.dtype = torch.float32, **options: Any) -> DistributedDataParallel:
    layers = [torch.nn.Linear(width, width, bias=False) for width in widths]
    return DistributedDataParallel(torch.nn.Sequential(*layers[:-1], layers[-1].to(dtype)), **options)


def _which(rank: int, world_size: int) -> None:
    with limit_replaced(0):
        assert not runs_inline(_model(4))
    assert runs_inline(_model(256, 256))
    assert not runs_inline(_model(512, 512))
    assert runs_inline(_model(1024))
    assert runs_inline(_model(512, 512, bucket_cap_mb=4))
    assert not runs_inline(_model(512, 512, bucket_cap_mb=1))
    assert not runs_inline(_model(512, 512, dtype=torch.bfloat16, bucket_cap_mb=4))
    frozen = _model(512, 512)
    frozen.module[0].requires_grad_(False)
    assert runs_inline(frozen)


def test_which_models_are_small() -> None:
    run_ranks(_which, 2, env=INLINE)


def _under_autocast(rank: int, world_size: int) -> None:
    losses: dict[str, list[torch.Tensor]] = {}
    for way in ("plain", "overlapped"):
        ddp = wrap(MLP.model())
        # Its step multiplies matrices, which autocast would do in bfloat16.
        optimizer: Any = torch.optim.Adafactor(ddp.parameters(), lr=0.05)
        if way == "overlapped":
            optimizer = OverlappedOptimizer(optimizer)
            chain(AllReduce(), Step(optimizer)).register(ddp)
        for step in range(4):
            with torch.autocast("cpu", torch.bfloat16):
                ddp(*MLP.batch(step, rank).inputs).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        losses[way] = [parameter.detach().clone() for parameter in ddp.parameters()]
    assert_parity(losses["overlapped"], losses["plain"], what="Adafactor")


@pytest.mark.parametrize("env", [{}, INLINE], ids=["worker", "inline"])
def test_a_backward_under_autocast_does_not_have_the_update_under_it(env: dict[str, str]) -> None:
    run_ranks(_under_autocast, 2, env=env)
