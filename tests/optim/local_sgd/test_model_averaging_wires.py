"""Averagers and average_parameters through a wire."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
import torch.distributed as dist
from local_loops import mean_of, sgd, values_of
from local_wires import gathered, sent_bytes, sum_by_hand
from torch import Tensor, nn

from harness import assert_parity, run_ranks
from harness.models import MLP, mean_squared_error
from overlap import ConfigurationError, Int4, Int8, UnsupportedError
from overlap.optim.local_sgd import (
    HierarchicalModelAverager,
    PeriodicModelAverager,
    PostLocalSGDOptimizer,
    average_parameters,
)


def flat_of(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def _step(model: nn.Module, optimizer: Any, step: int, rank: int) -> None:
    optimizer.zero_grad()
    mean_squared_error(model, MLP.batch(step, rank)).backward()
    optimizer.step()


def _periodic(rank: int, world_size: int) -> None:
    """The first average is exact, later ones send changes; saved and loaded in the middle of a round."""
    model, reference = MLP.model(), MLP.model()
    averager = PeriodicModelAverager(2, 1, wire=Int4(), error_feedback=True)
    optimizer, plain = PostLocalSGDOptimizer(sgd(model.parameters()), averager), sgd(reference.parameters())
    anchor = error = torch.empty(0)
    for step in range(9):
        _step(model, optimizer, step, rank)
        _step(reference, plain, step, rank)
        if step == 1:
            assert_parity(
                values_of(model), mean_of(values_of(reference)), what="the first average", exact=False, rtol=1e-5,
                atol=1e-7, reason="Gloo adds three and more in another order",
            )  # fmt: skip
            reference.load_state_dict(model.state_dict())
            anchor = flat_of(model)
            error = torch.zeros_like(anchor)
        elif step % 2:
            summands = gathered((flat_of(reference) - anchor) / world_size + error)
            total, errors = sum_by_hand(Int4(), summands)
            anchor, error = anchor + total, errors[rank]
            nn.utils.vector_to_parameters(anchor.clone(), reference.parameters())
        assert_parity(values_of(model), values_of(reference), what=f"step {step}")
        for other in gathered(flat_of(model)) if step % 2 else ():
            assert_parity(other, flat_of(model), what=f"step {step}: ranks")
        if step == 5:
            file = io.BytesIO()
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    saved = torch.load(io.BytesIO(file.getvalue()), weights_only=True)
    resumed = MLP.model(seed=4)
    resumed.load_state_dict(saved["model"])
    again = PeriodicModelAverager(2, 1, wire=Int4(), error_feedback=True)
    optimizer = PostLocalSGDOptimizer(sgd(resumed.parameters()), again)
    optimizer.load_state_dict(saved["optimizer"])
    for step in range(6, 9):
        _step(resumed, optimizer, step, rank)
    assert_parity(values_of(resumed), values_of(model), what="resumed")
    with pytest.raises(ConfigurationError, match="give it the wire"):
        PeriodicModelAverager(2, 1).load_state_dict(averager.state_dict())
    with pytest.raises(ConfigurationError, match="one averager for each set of parameters"):
        averager.average_parameters([torch.ones(3)])


@pytest.mark.parametrize("world_size", [2, 3])
def test_the_periodic_averager_sends_changes(world_size: int) -> None:
    run_ranks(_periodic, world_size)


def _hierarchical(rank: int, world_size: int) -> None:
    """Exact within pairs, 4 bits between them; averaging again changes nothing."""
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    model = MLP.model()
    optimizer = sgd(model.parameters())
    averager = HierarchicalModelAverager({1: 2, 2: 4}, wire=Int4(), error_feedback=True)
    anchor, left_out = torch.empty(0), torch.empty(0)
    for step in range(7):
        _step(model, optimizer, step, rank)
        own = flat_of(model)
        with sent_bytes() as sent:
            averager.average_parameters(model.parameters())
        average = flat_of(model)
        if step % 2:
            assert_parity(average, mean_of({"": own}, pairs[rank // 2])[""], what=f"step {step}: pairs")
            continue
        mean = mean_of({"": own})[""]
        if step == 0:
            anchor, left_out = mean, torch.zeros_like(mean)
            assert_parity(average, mean, what="the first average")
            continue
        for other in gathered(average):
            assert_parity(other, average, what=f"step {step}: all ranks")
        part = -(-own.numel() // 2)
        message_bytes = Int4().codec(-(-part // 2)).message_bytes
        assert sent["send_recv"] == message_bytes and sent["all_gather"] == message_bytes + 4 * part
        errors: dict[str, Tensor] = averager.state_dict()["wire"]["error"]
        before, left_out = left_out, sum(gathered(torch.cat([error.flatten() for error in errors.values()])))
        assert_parity(
            average + left_out, mean + before, what=f"step {step}: what arrived and what was left out", exact=False,
            rtol=1e-5, atol=1e-6, reason="sums in another order",
        )  # fmt: skip
        assert 0 < (average - mean).norm() < 0.5 * (mean - anchor).norm(), "changes are rounded"
        anchor = average
    # What changes are left is delivered, and then averaging changes nothing at all.
    for _ in range(30):
        averager.step = 2
        averager.average_parameters(model.parameters())
    assert (flat_of(model) - anchor - left_out).norm() < 1e-5, "no drift"


def test_the_hierarchical_averager_is_exact_within_groups_and_sends_few_bits_between_them() -> None:
    run_ranks(_hierarchical, 4)


def _function(rank: int, world_size: int) -> None:
    generator = torch.Generator().manual_seed(rank)
    for wire, top in ((Int8(), 127), (Int4(), 7)):
        tensors = [torch.randn(30, 7, generator=generator), torch.randn(11, generator=generator).bfloat16()]
        tensors += [torch.tensor([rank, 7]), torch.randn(5, generator=generator).double()]
        own = [tensor.clone() for tensor in tensors]
        average_parameters(tensors, wire=wire)
        for place, (value, before) in enumerate(zip(tensors, own, strict=True)):
            if not value.is_floating_point():
                assert value.tolist() == before.tolist(), "integers are kept"
                continue
            everyone = gathered(before)
            peak = max(one.abs().max() for one in everyone).double()
            error = (value.double() - sum(one.double() for one in everyone) / world_size).abs().max()
            rounding = peak * torch.finfo(value.dtype).eps
            assert 0 < error <= peak / top + rounding, f"{wire}, tensor {place}"
            for other in gathered(value):
                assert_parity(other, value, what=f"{wire}, tensor {place}")
    with pytest.raises(ConfigurationError, match=r"the class Int8; give a wire such as Int8\(\)"):
        average_parameters([torch.ones(2)], wire=Int8)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match=r"dtype is torch.float64, and what a wire carries"):
        average_parameters([torch.ones(2)], wire=Int8(), dtype=torch.float64)
    with pytest.raises(UnsupportedError, match="parameter 0 is complex64: leave wire out"):
        average_parameters([torch.ones(2, dtype=torch.complex64)], wire=Int8())
    solo: Any = [dist.new_group([one]) for one in range(world_size)][rank]
    alone = own[0].clone()
    average_parameters([alone], solo, wire=Int4())
    assert_parity(alone, own[0], what="a group of one")


def test_average_parameters_rounds_parameters_alike_on_all_ranks() -> None:
    run_ranks(_function, 3)
