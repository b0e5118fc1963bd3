"""Quantized gradients among ranks: how far from the mean, how many bytes, and what errors leave behind."""

from __future__ import annotations

import functools
import gc
import math
import pickle
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import quantization_hooks as theirs
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

import overlap
from harness import assert_parity, overlapped_step, run_ranks, run_threads, train, wrap
from harness.models import CASES, MLP
from overlap import AllReduce, ConfigurationError, OverlappedOptimizer, RegistrationError, Step, chain, register
from overlap.bench.wire import socket_bytes
from overlap.hooks import GatherQuantized, Quantize

SGD = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)
TOPS = {8: 127, 4: 7}


class Given(nn.Module):
    """A model whose gradients are what it is called with, in buckets of their own."""

    def __init__(self, sizes: Sequence[int], dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.weights = nn.ParameterList([nn.Parameter(torch.ones(size, dtype=dtype)) for size in sizes])

    def forward(self, gradients: Sequence[torch.Tensor]) -> torch.Tensor:
        return sum((w * g).sum() for w, g in zip(self.weights, gradients, strict=True))


def _given(sizes: Sequence[int], stage: Any, dtype: torch.dtype = torch.float32) -> DistributedDataParallel:
    ddp = DistributedDataParallel(Given(sizes, dtype), bucket_cap_mb=1e-6)
    if stage is not None:
        register(ddp, stage)
        # DDP's first pass has one bucket for all.
        _reduced(ddp, [torch.zeros(size, dtype=dtype) for size in sizes])
    return ddp


def _reduced(ddp: DistributedDataParallel, gradients: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    ddp.zero_grad()
    ddp(gradients).backward()
    return [w.grad.detach().clone() for w in ddp.module.weights]


def _of_ranks(world_size: int, sizes: Sequence[int], step: int = 0) -> list[list[torch.Tensor]]:
    """Gradients by rank, the same wherever they are asked for."""
    generator = torch.Generator().manual_seed(step)
    return [[torch.randn(size, generator=generator) for size in sizes] for _ in range(world_size)]


def _equal_everywhere(tensors: Sequence[torch.Tensor]) -> None:
    flat = torch.cat([tensor.flatten() for tensor in tensors]).double()
    gathered = [torch.empty_like(flat) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, flat)
    assert all(torch.equal(other, flat) or other.isnan().any() for other in gathered), "ranks differ"
    assert all(torch.equal(other.isnan(), flat.isnan()) for other in gathered)


# Results -----------------------------------------------------------------------------------------------------


def _results(rank: int, world_size: int) -> None:
    sizes = [1, 7, 300, 1000, 4099]
    of_ranks = _of_ranks(world_size, sizes)
    own = of_ranks[rank]
    means = [torch.stack(gradients).mean(0) for gradients in zip(*of_ranks, strict=True)]
    for bits, top in TOPS.items():
        for rounding, steps in (("nearest", 0.5), ("stochastic", 1.0)):
            ddp = _given(sizes, Quantize(bits=bits, rounding=rounding))
            for step in range(3):
                got = _reduced(ddp, own)
                _equal_everywhere(got)
                for mean, result, *gradients in zip(means, got, *of_ranks, strict=True):
                    # A step of each other rank's chunk, divided before the sum, and one of the sum's.
                    peaks = sum(float(g.abs().max()) for g in gradients) / world_size
                    bound = steps * (peaks + peaks + 2 * steps * peaks / top) / top
                    assert (result - mean).abs().max() <= bound * 1.0001, (bits, rounding, step, len(mean))
                assert any(not torch.equal(result, mean) for mean, result in zip(means, got, strict=True))
    # On one rank's bad value every rank sees the chunk marked; others are as they were.
    ddp = _given(sizes, Quantize())
    for bad in (math.nan, math.inf):
        broken = [g.clone() for g in own]
        if rank == world_size - 1:
            broken[4][0] = bad
        got = _reduced(ddp, broken)
        _equal_everywhere(got)
        assert not got[4][:100].isfinite().any() and got[4][-100:].isfinite().all() and got[3].isfinite().all()
    assert all(result.isfinite().all() for result in _reduced(ddp, own)), "nothing of it is remembered"
    # Zero and what all ranks agree on in one constant are exact; other dtypes keep theirs.
    ddp = _given(sizes, Quantize(bits=4))
    for value in (0.0, 0.3):
        for result in _reduced(ddp, [torch.full((size,), value) for size in sizes]):
            assert_parity(result, torch.full_like(result, value), what=f"{value}", **_last_place(world_size))
    for dtype in (torch.float64, torch.bfloat16, torch.float16):
        got = _reduced(_given(sizes, Quantize(), dtype), [g.to(dtype) for g in own])
        for mean, result in zip(means, got, strict=True):
            assert result.dtype == dtype and (result.double() - mean).abs().max() <= 0.06


def _last_place(world_size: int) -> dict[str, Any]:
    if world_size == 2:
        return {}
    return {"exact": False, "rtol": 1e-6, "reason": "thirds of a value add up to it but for the last place"}


@pytest.mark.parametrize("world_size", [2, 3])
def test_means_are_within_a_step_and_equal_on_all_ranks(world_size: int) -> None:
    run_ranks(_results, world_size)


# Bytes -------------------------------------------------------------------------------------------------------


def _bytes_of_a_step(stage: Any, sizes: Sequence[int]) -> float:
    ddp = _given(sizes, stage)
    gradients = [torch.randn(size) for size in sizes]
    for _ in range(2):
        _reduced(ddp, gradients)
    dist.barrier()
    before = socket_bytes()
    for _ in range(2):
        _reduced(ddp, gradients)
    # Only when all have received is all of it sent.
    dist.barrier()
    sent = (socket_bytes() - before) / 2
    gc.collect()
    return sent


def _bytes(rank: int, world_size: int) -> dict[str, float]:
    sizes = [200_001, 100_003, 50_000]
    plain = _bytes_of_a_step(AllReduce(), sizes)
    assert plain == pytest.approx(2 * 4 * sum(sizes) * (world_size - 1) / world_size, rel=0.02)
    return {
        "8": _bytes_of_a_step(Quantize(bits=8), sizes) / plain,
        "4": _bytes_of_a_step(Quantize(bits=4, error_feedback=True), sizes) / plain,
        "gathered": _bytes_of_a_step(GatherQuantized(512), sizes) / plain,
    }


@pytest.mark.parametrize("world_size", [2, 4])
def test_bytes_sent_are_a_constant_part_of_an_all_reduce(world_size: int) -> None:
    for share in run_ranks(_bytes, world_size):
        assert share["8"] <= 0.27
        assert share["4"] <= 0.15
        # PyTorch's way, whose share grows with the ranks: W/2 times a quarter of the all-reduce.
        assert share["gathered"] == pytest.approx(0.127 * world_size, rel=0.05)


# Error feedback ----------------------------------------------------------------------------------------------


def _feedback(rank: int, world_size: int) -> None:
    sizes = [3, 500, 1300]
    stage = Quantize(bits=4, error_feedback=True)
    ddp = _given(sizes, stage)
    delivered = [torch.zeros(size, dtype=torch.float64) for size in sizes]
    true = [torch.zeros(size, dtype=torch.float64) for size in sizes]
    lost = [torch.zeros(size, dtype=torch.float64) for size in sizes]
    without = _given(sizes, Quantize(bits=4))
    for step in range(12):
        of_ranks = _of_ranks(world_size, sizes, step)
        for total, gradients in zip(true, zip(*of_ranks, strict=True), strict=True):
            total.add_(torch.stack(gradients).double().mean(0))
        for total, result in zip(delivered, _reduced(ddp, of_ranks[rank]), strict=True):
            total.add_(result)
        for total, result in zip(lost, _reduced(without, of_ranks[rank]), strict=True):
            total.add_(result)
    errors = stage.state_dict()["error"]
    assert sorted(errors) == [f"weights.{index}" for index in range(3)]
    for index in range(3):
        held = errors[f"weights.{index}"].double()
        dist.all_reduce(held)
        # Nothing is lost: what was delivered and what the ranks still hold make up what came, but for fp32's own.
        assert torch.allclose(delivered[index] + held, true[index], atol=2e-5)
        assert (delivered[index] - true[index]).norm() < 0.6 * (lost[index] - true[index]).norm()
    # A value that is not finite never gets into the memory, on whatever rank it was.
    broken = _of_ranks(world_size, sizes, 0)[rank]
    if rank == 0:
        broken[2][5] = math.inf
    assert not _reduced(ddp, broken)[2].isfinite().all()
    assert all(error.isfinite().all() for error in stage.state_dict()["error"].values())
    assert all(result.isfinite().all() for result in _reduced(ddp, _of_ranks(world_size, sizes, 1)[rank]))
    # A stage that loads this one's state goes on as this one does.
    saved = pickle.loads(pickle.dumps(stage.state_dict()))
    again = Quantize(bits=4, error_feedback=True)
    other = _given(sizes, again)
    again.load_state_dict(saved)
    gradients = _of_ranks(world_size, sizes, 20)[rank]
    assert_parity(_reduced(other, gradients), _reduced(ddp, gradients), what="after loading")
    with pytest.raises(RegistrationError, match="remembers one model's errors already"):
        register(DistributedDataParallel(Given(sizes)), again)
    again.load_state_dict({"error": {"weights.0": torch.ones(4)}})
    with pytest.raises(ConfigurationError, match=r"error feedback of weights.0 is of shape \(4,\)"):
        _reduced(other, gradients)
    by_hook = DistributedDataParallel(Given(sizes))
    by_hook.register_comm_hook(None, overlap.as_hook(Quantize(error_feedback=True)))
    with pytest.raises(ConfigurationError, match=r"overlap.register\(ddp, hook\)"):
        _reduced(by_hook, gradients)


def test_error_feedback_loses_nothing() -> None:
    run_ranks(_feedback, 2)


def _stochastic_state(rank: int, world_size: int) -> None:
    stage, again = (Quantize(bits=4, rounding="stochastic") for _ in range(2))
    ddp = _given([700], stage)
    gradients = _of_ranks(world_size, [700])[rank]
    _reduced(ddp, gradients)
    other = _given([700], again)
    again.load_state_dict(stage.state_dict())
    assert_parity(_reduced(other, gradients), _reduced(ddp, gradients), what="the random numbers after loading")


# Models ------------------------------------------------------------------------------------------------------


def _train(rank: int, attach: Callable[[Any], Any], case: Any = MLP, steps: int = 6) -> list[Any]:
    ddp = wrap(case.model(), **case.ddp_options())
    attach(ddp)
    return train(ddp, SGD(ddp.parameters()), case.batches(rank, steps=steps), gradients=True)


def _models(rank: int, world_size: int) -> None:
    _stochastic_state(rank, world_size)
    for case in CASES:
        reference = _train(rank, lambda ddp: None, case)
        got = _train(rank, chain(Quantize(error_feedback=True)).register, case)
        assert_parity(
            [record.parameters for record in got],
            [record.parameters for record in reference],
            what=f"8 bits, {case}",
            exact=False,
            rtol=0.02,
            atol=0.03,
            reason="each gradient is off by a 127th of its chunk's peak, or where parameters are bfloat16 by a 256th",
        )
        _equal_everywhere(list(got[-1].parameters.values()))
    # With the update in backward it is the same as with the update behind it.
    ddp = wrap(MLP.model(), **MLP.ddp_options())
    optimizer = OverlappedOptimizer(SGD(ddp.parameters()))
    chain(Quantize(bits=4), Step(optimizer)).register(ddp)
    got = train(ddp, optimizer, MLP.batches(rank, steps=6), step_fn=overlapped_step, gradients=True)
    assert_parity(got, _train(rank, chain(Quantize(bits=4)).register), what="4 bits, updated in backward")


def test_models_train_as_they_do_without() -> None:
    run_ranks(_models, 2)


def _uneven(rank: int, world_size: int) -> None:
    stage = Quantize(error_feedback=True, rounding="stochastic")
    ddp = wrap(MLP.model(), **MLP.ddp_options())
    optimizer = OverlappedOptimizer(SGD(ddp.parameters()))
    chain(stage, Step(optimizer)).register(ddp)
    with Join([ddp]):
        for batch in MLP.batches(rank, steps=4 + 3 * rank):
            nn.functional.mse_loss(ddp(*batch.inputs), batch.target).backward()
            optimizer.step()
    assert all(error.isfinite().all() for error in stage.state_dict()["error"].values())
    _equal_everywhere([p.detach() for p in ddp.parameters()])


def test_a_rank_that_has_run_out_takes_part() -> None:
    run_ranks(_uneven, 2)


def _alone(rank: int, world_size: int) -> None:
    of_ranks = _of_ranks(world_size, [5, 900])
    got = _reduced(_given([5, 900], Quantize(bits=4)), of_ranks[rank])
    if world_size == 1:
        assert_parity(got, of_ranks[0], what="one rank rounds nothing")
    else:
        _equal_everywhere(got)
        assert not torch.equal(got[1], torch.stack([g[1] for g in of_ranks]).mean(0))


def test_one_rank_rounds_nothing() -> None:
    run_threads(_alone, 1)


# Hooks of PyTorch's names --------------------------------------------------------------------------------------


def _as_torch_does(of_ranks: Sequence[torch.Tensor], chunk: int | None) -> torch.Tensor:
    """The arithmetic of PyTorch's hooks by its own functions, with all ranks' gradients at hand."""
    numel = of_ranks[0].numel()
    size = chunk or numel
    total = torch.zeros(-(-numel // size), size)
    for gradient in of_ranks:
        chunks = nn.functional.pad(gradient, (0, total.numel() - numel)).view(-1, size)
        low, high = chunks.amin(1).clamp(max=0), chunks.amax(1).clamp(min=0)
        scale = (high - low) / 255
        zero_point = (-(low / scale).round()).clamp(0, 255)
        integers = theirs._quantize_per_channel_backend(chunks, scale, zero_point)
        total += theirs._dequantize_per_channel_backend(integers, scale, zero_point)
    return total.flatten()[:numel] / len(of_ranks)


def _torch_names(rank: int, world_size: int) -> None:
    sizes = [1, 512, 2000]
    of_ranks = _of_ranks(world_size, sizes)
    for hook, chunk in (
        (overlap.quantization_pertensor_hook, None),
        (overlap.quantization_perchannel_hook, 512),
        (GatherQuantized(100), 100),
    ):
        attach = [functools.partial(register, stage=hook)]
        if not isinstance(hook, GatherQuantized):
            attach += [
                functools.partial(register, stage=hook, state=dist.group.WORLD),
                lambda ddp, hook=hook: ddp.register_comm_hook(None, hook),
                lambda ddp, hook=hook: ddp.register_comm_hook(dist.group.WORLD, hook),
            ]
        for way in attach:
            way(ddp := _given(sizes, None))
            _reduced(ddp, of_ranks[rank])
            got = _reduced(ddp, of_ranks[rank])
            for index, result in enumerate(got):
                expected = _as_torch_does([gradients[index] for gradients in of_ranks], chunk)
                assert_parity(
                    result,
                    expected,
                    what=f"{hook}, {sizes[index]}",
                    exact=False,
                    atol=1e-6,
                    reason="the span of values is halved here before it is divided, so that none is too large",
                )
            _equal_everywhere(got)
        for bad in (math.nan, -math.inf):
            broken = [g.clone() for g in of_ranks[rank]]
            broken[2][0] += bad if rank == 1 else 0.0
            got = _reduced(ddp, broken)
            assert not got[2][:100].isfinite().any() and got[1].isfinite().all()
            assert bool(got[2][-100:].isfinite().all()) == (chunk is not None)
        for extreme in (0.0, 3e38, -3e38, 1e-30):
            got = _reduced(ddp, [torch.full((size,), extreme) for size in sizes])
            assert all(torch.allclose(g, torch.full_like(g, extreme), rtol=1e-5, atol=0.0) for g in got), extreme


def test_hooks_of_torchs_names_do_what_torchs_do() -> None:
    run_ranks(_torch_names, 2)


def test_hooks_pickle_by_name() -> None:
    for name in ("quantization_pertensor_hook", "quantization_perchannel_hook"):
        hook = getattr(overlap, name)
        assert pickle.loads(pickle.dumps(hook)) is hook
    assert repr(overlap.quantization_perchannel_hook.stage()) == "GatherQuantized(512)"
    with pytest.raises(ConfigurationError, match="bucket_size is 0"):
        GatherQuantized(0)
