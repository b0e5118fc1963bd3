"""Small models: stages on autograd's thread, without a worker."""

import threading
from typing import Any
from unittest import mock

import torch
from step_loops import backward, registered
from torch.nn.parallel import DistributedDataParallel

from harness import assert_parity, on_ranks, wrap
from harness.models import MLP
from overlap import AllReduce, OverlappedOptimizer, Step, chain
from overlap.hooks.engine import executors
from overlap.hooks.engine.executors import runs_inline
from overlap.hooks.engine.registration import registration_of

INLINE = {"OVERLAP_SMALL_MODEL_BYTES": str(2**20)}


def _has_no_thread(rank: int) -> None:
    for form in ("interleaved", "deferred", "zero", "zero deferred"):
        ddp = wrap(MLP.model(), **MLP.ddp_options())
        optimizer = registered(form, ddp)
        for step in range(3):
            backward(ddp, step, rank)
            optimizer.step()
        registration = registration_of(ddp)
        assert registration is not None
        names = [one.name for one in threading.enumerate()]
        assert f"overlap-{id(registration.runtime):x}" not in names, form


def _model(*widths: int, dtype: torch.dtype = torch.float32, **options: Any) -> DistributedDataParallel:
    layers = [torch.nn.Linear(width, width, bias=False) for width in widths]
    return DistributedDataParallel(torch.nn.Sequential(*layers[:-1], layers[-1].to(dtype)), **options)


def _which() -> None:
    with mock.patch.object(executors, "SMALL_BYTES", 0):
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


@on_ranks(2, env=INLINE)
def test_a_small_model_has_no_thread_and_which_models_are_small(rank: int, world_size: int) -> None:
    """The parity of inline passes is shown by the inline forms of the corpus and of the lifecycle."""
    _has_no_thread(rank)
    _which()


@on_ranks(2, env=INLINE)
def test_a_backward_under_autocast_does_not_have_the_update_under_it(rank: int, world_size: int) -> None:
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
