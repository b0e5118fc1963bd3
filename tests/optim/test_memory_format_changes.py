"""A model whose memory format changes: refused while DDP has the old one, exact with DDP built anew."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from memory_formats import CHANNELS_LAST, CONTIGUOUS
from torch.nn.parallel import DistributedDataParallel

from harness import assert_parity, plain_step, run_ranks, wrap
from harness.models import BUCKET_CAP_MB, mean_squared_error
from overlap import (
    AllReduce,
    OverlappedOptimizer,
    PowerSGD,
    Quantize,
    Step,
    TrainingLoopError,
    ZeroRedundancyOptimizer,
    ZeroStep,
    chain,
)

ADAMW = functools.partial(torch.optim.AdamW, lr=0.01, weight_decay=0.1)
Made = tuple[Any, Any]


def _stepped(ddp: Any, **options: Any) -> Made:
    optimizer = OverlappedOptimizer(ADAMW(ddp.parameters()))
    return optimizer, Step(optimizer, **options)


def _zero(ddp: Any, *, partition: str = "element", dtype: Any = None, **options: Any) -> Made:
    zero = ZeroRedundancyOptimizer(
        ddp.parameters(), torch.optim.AdamW, lr=0.01, weight_decay=0.1, partition=partition, master_dtype=dtype
    )
    return zero, ZeroStep(zero, **options)


MAKES: dict[str, Callable[[Any], Made]] = {
    "interleaved": _stepped,
    "deferred": functools.partial(_stepped, deferred=True),
    "ZeRO": _zero,
    "ZeRO deferred": functools.partial(_zero, deferred=True),
    "ZeRO gathered in forward": functools.partial(_zero, gather="forward"),
    "ZeRO by parameter": functools.partial(_zero, partition="parameter"),
    "ZeRO with a master": functools.partial(_zero, dtype=torch.float64),
}


def _run(ddp: Any, optimizer: Any, batches: Any) -> None:
    for batch in batches:
        plain_step(ddp, optimizer, batch, mean_squared_error)
        if isinstance(optimizer, ZeroRedundancyOptimizer):
            optimizer.wait()


def _state(optimizer: Any) -> Any:
    if isinstance(optimizer, ZeroRedundancyOptimizer):
        optimizer.consolidate_state_dict(to=0)
        return optimizer.state_dict() if optimizer.rank == 0 else {}
    return optimizer.state_dict()


def _register(ddp: Any, stage: Any) -> Any:
    return chain(stage).register(ddp) if isinstance(stage, ZeroStep) else chain(AllReduce(), stage).register(ddp)


def _convert_while_training(rank: int, world_size: int, formats: tuple[Any, Any], as_views: bool) -> None:
    before, after = formats
    batches = CONTIGUOUS.batches(rank, steps=9)

    def built(module: Any) -> Any:
        return DistributedDataParallel(module, bucket_cap_mb=BUCKET_CAP_MB, gradient_as_bucket_view=as_views)

    for form, make in MAKES.items():
        if "master" in form:
            continue
        module = CONTIGUOUS.model().to(memory_format=before)
        ddp = built(module)
        optimizer, stage = make(ddp)
        reference = built(CONTIGUOUS.model().to(memory_format=before))
        plain = ADAMW(reference.parameters())
        registration = _register(ddp, stage)
        for model, one in ((ddp, optimizer), (reference, plain)):
            _run(model, one, batches[:4])
            one.zero_grad()  # A model converts its gradients, too, and a sharded one cannot be read.
            model.to(memory_format=after)
        with pytest.raises(TrainingLoopError, match=r"strides.* build DistributedDataParallel anew"):
            _run(ddp, optimizer, batches[4:5])
        registration.remove()
        optimizer.zero_grad()
        again, reference = built(module), built(reference.module)
        _register(again, stage if not isinstance(optimizer, ZeroRedundancyOptimizer) else ZeroStep(optimizer))
        for model, one in ((again, optimizer), (reference, plain)):
            _run(model, one, batches[5:])
        assert_parity(dict(module.named_parameters()), dict(reference.module.named_parameters()), what=form)
        state = _state(optimizer)
        if state:
            assert_parity(state["state"], plain.state_dict()["state"], what=f"state of {form}")


@pytest.mark.parametrize("as_views", [False, True], ids=["copied gradients", "bucket views"])
def test_a_model_turned_channels_last_is_refused_until_ddp_is_built_anew_and_exact_then(as_views: bool) -> None:
    run_ranks(_convert_while_training, 2, (torch.contiguous_format, torch.channels_last), as_views)


def test_a_model_turned_contiguous_is_refused_until_ddp_is_built_anew_and_exact_then() -> None:
    run_ranks(_convert_while_training, 2, (torch.channels_last, torch.contiguous_format), False)


def _convert_without_a_stage(rank: int, world_size: int) -> None:
    # DDP's own, of the strides in its buckets.
    warnings.filterwarnings("ignore", message="Grad strides do not match bucket view strides")
    for options in ({}, {"partition": "parameter"}, {"dtype": torch.float64}):
        ddp, reference = (wrap(CONTIGUOUS.model(), bucket_cap_mb=BUCKET_CAP_MB) for _ in range(2))
        zero = _zero(ddp, **options)[0]
        plain = ADAMW(reference.parameters())
        for place, batch in enumerate(CONTIGUOUS.batches(rank, steps=6)):
            if place in (2, 4):
                for model in (ddp, reference):
                    model.to(memory_format=torch.channels_last if place == 2 else torch.contiguous_format)
            _run(ddp, zero, [batch])
            _run(reference, plain, [batch])
        if "dtype" not in options:
            assert_parity(dict(ddp.named_parameters()), dict(reference.named_parameters()), what=str(options))
        else:
            for one, other in zip(ddp.parameters(), reference.parameters(), strict=True):
                torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_the_state_of_zero_without_a_stage_follows_a_change_of_the_memory_format() -> None:
    run_ranks(_convert_without_a_stage, 2)


def _exchange_checkpoints(rank: int, world_size: int, folder: str) -> None:
    for place, (case, other) in enumerate([(CHANNELS_LAST, CONTIGUOUS), (CONTIGUOUS, CHANNELS_LAST)]):
        ddp = wrap(case.model(), bucket_cap_mb=BUCKET_CAP_MB)
        zero, stage = _zero(ddp)
        _register(ddp, stage)
        _run(ddp, zero, case.batches(rank, steps=3))
        checkpoint = f"{folder}/{place}"
        dcp.save({"optimizer": zero.sharded_state_dict()}, checkpoint_id=checkpoint)
        zero.consolidate_state_dict()
        whole = [zero.state_dict() if rank == 0 else None]
        torch.distributed.broadcast_object_list(whole)
        for how in ("whole", "in pieces", "by parameter"):
            loaded = wrap(other.model(), bucket_cap_mb=BUCKET_CAP_MB)
            loaded.module.load_state_dict(ddp.module.state_dict())
            partition = "parameter" if how == "by parameter" else "element"
            found = _zero(loaded, partition=partition)[0]
            if how == "whole":
                found.load_state_dict(whole[0])
            else:
                found.load_sharded(checkpoint, key="optimizer")
            found.consolidate_state_dict()
            if rank == 0:
                assert_parity(found.state_dict()["state"], whole[0]["state"], what=f"{case} to {other}, {how}")


def test_checkpoints_of_zero_go_between_channels_last_and_contiguous_models(tmp_path: Path) -> None:
    run_ranks(_exchange_checkpoints, 2, str(tmp_path))


def _exchange_memory(rank: int, world_size: int, options: dict[str, Any]) -> None:
    batches = CONTIGUOUS.batches(rank, steps=7)
    for case, other in [(CHANNELS_LAST, CONTIGUOUS), (CONTIGUOUS, CHANNELS_LAST)]:
        ends = []
        for first, second in ((case, case), (case, other)):
            ddp = wrap(first.model(), bucket_cap_mb=BUCKET_CAP_MB)
            stage = PowerSGD(**options)
            chain(stage).register(ddp)
            _run(ddp, torch.optim.SGD(ddp.parameters(), lr=0.1), batches[:4])
            loaded = wrap(second.model(), bucket_cap_mb=BUCKET_CAP_MB)
            loaded.module.load_state_dict(ddp.module.state_dict())
            again = PowerSGD(**options)
            again.load_state_dict(stage.state_dict())
            chain(again).register(loaded)
            _run(loaded, torch.optim.SGD(loaded.parameters(), lr=0.1), batches[4:])
            ends.append(loaded)
        for one, two in zip(ends[0].parameters(), ends[1].parameters(), strict=True):
            torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("alternate", [False, True], ids=["both factors", "alternating"])
def test_the_memory_of_powersgd_goes_between_channels_last_and_contiguous_models(alternate: bool) -> None:
    run_ranks(_exchange_memory, 2, {"rank": 1, "start_step": 0, "min_compression_rate": 1.0, "alternate": alternate})


def _quantize(rank: int, world_size: int) -> None:
    states = []
    for case in (CHANNELS_LAST, CONTIGUOUS):
        ddp = wrap(case.model(), bucket_cap_mb=BUCKET_CAP_MB)
        stage = Quantize(bits=8, error_feedback=True)
        chain(stage).register(ddp)
        loss = mean_squared_error(ddp, case.batch(0, rank))
        loss.backward()
        local = {name: p.grad for name, p in case.model().named_parameters()}
        assert local.keys() == stage.state_dict()["error"].keys()
        states.append({name: p.grad for name, p in ddp.module.named_parameters()})
        for name, parameter in ddp.module.named_parameters():
            assert parameter.grad.stride() == parameter.stride(), name
    for name, gradient in states[0].items():
        # Other elements share a chunk and its scale.
        torch.testing.assert_close(gradient, states[1][name], rtol=0.1, atol=0.01)


def test_quantized_channels_last_gradients_are_those_of_the_contiguous_model() -> None:
    run_ranks(_quantize, 2)
