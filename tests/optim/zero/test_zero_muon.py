"""Muon for matrices with AdamW beside it: owners by cost, other dtypes and numbers of ranks, what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from several_loops import ADAMW, FORMS, MUON, check, divided, plain_run, several_run, zero_pair
from torch import nn

from harness import assert_parity, run_ranks, wrap
from harness.errors import RankFailed
from harness.models import FROZEN, MLP, TIED, TRANSFORMER, mean_squared_error
from overlap import ConfigurationError, ZeroRedundancyOptimizer, ZeroStep, chain
from overlap.optim.zero.partition import ByParameter, Extent, orthogonalization_flops


def test_owners_are_balanced_by_the_cost_of_the_orthogonalization() -> None:
    # A square matrix costs more per element than an embedding, which is as wide and far longer.
    shapes = [(8000, 128), *[(512, 512)] * 4]
    extents = [
        Extent(rows * columns, 4, flops=orthogonalization_flops(torch.empty(rows, columns, device="meta"), 5))
        for rows, columns in shapes
    ]
    by_cost = ByParameter(2).assign(extents)
    by_size = ByParameter(2).assign([Extent(rows * columns, 4) for rows, columns in shapes])

    def largest(ranges: Any) -> int:
        return max(sum(e.cost for e, r in zip(extents, ranges, strict=True) if r[rank][1]) for rank in range(2))

    # By size one rank has the embedding, and the other all that costs much.
    assert largest(by_size) > 0.8 * sum(extent.cost for extent in extents)
    assert largest(by_cost) < 0.6 * sum(extent.cost for extent in extents)
    # Five steps of three products, each twice the number of multiplications.
    assert orthogonalization_flops(torch.empty(6, 20), 5) == 5 * 2 * (6 * 20 * 6 + 6 * 6 * 6 + 6 * 6 * 20)
    assert orthogonalization_flops(torch.empty(20), 5) == orthogonalization_flops(torch.empty(3, 3), 0) == 0


def _models(rank: int, world_size: int) -> None:
    for case in (TRANSFORMER, TIED, FROZEN):
        reference = plain_run(case, rank)
        for name in ("both interleaved", "both sharded"):
            check(several_run(case, rank, FORMS[name]), reference, what=f"{case}, {name}", rank=rank)


def test_with_tied_and_frozen_parameters_and_in_a_transformer_it_equals_plain_ddp() -> None:
    run_ranks(_models, 2)


def _many_ranks(rank: int, world_size: int) -> None:
    reference = plain_run(MLP, rank)
    for name in ("both sharded", "both sharded, one deferred", "sharded beside whole"):
        candidate = several_run(MLP, rank, FORMS[name])
        check(candidate, reference, what=name, rank=rank, world_size=world_size)
    everyone: list[Any] = [None] * world_size
    torch.distributed.all_gather_object(everyone, candidate[-1].parameters)
    for other in everyone[1:]:
        assert_parity(other, everyone[0], what="parameters of the ranks")


@pytest.mark.parametrize("world_size", [3, 7])
def test_at_more_ranks_than_matrices_it_equals_plain_ddp_up_to_the_order_of_sums(world_size: int) -> None:
    run_ranks(_many_ranks, world_size)


def _narrow(rank: int, world_size: int) -> None:
    plain, ddp = (wrap(MLP.model().bfloat16(), **MLP.ddp_options()) for _ in range(2))
    matrices, others = divided(plain)
    reference = torch.optim.Muon(matrices, **MUON), torch.optim.AdamW(others, **ADAMW)
    pair = zero_pair(ddp)
    chain(*map(ZeroStep, pair)).register(ddp)
    for place in range(4):
        plain.zero_grad()
        batch = MLP.batch(place, rank)
        for model, optimizers in ((plain, reference), (ddp, pair)):
            nn.functional.mse_loss(model(batch.inputs[0].bfloat16()), batch.target.bfloat16()).backward()
            for optimizer in optimizers:
                optimizer.step()
        for ours, theirs in zip(ddp.parameters(), plain.parameters(), strict=True):
            assert torch.equal(ours, theirs), place


def test_in_bfloat16_it_equals_plain_ddp() -> None:
    run_ranks(_narrow, 2)


def _leg(rank: int, world_size: int, folder: Path, start: int, stop: int) -> dict[str, Any]:
    ddp = wrap(MLP.model(), **MLP.ddp_options())
    pair = zero_pair(ddp)
    chain(*map(ZeroStep, pair)).register(ddp)
    if start:
        model = {"model": ddp.module.state_dict()}
        dcp.load(model, checkpoint_id=str(folder))
        ddp.module.load_state_dict(model["model"])
        for name, zero in zip(("muon", "adamw"), pair, strict=True):
            zero.load_sharded(str(folder), key=name)
    for place in range(start, stop):
        # The same on all ranks, so that the mean is the same at any number of them that is a power of two.
        mean_squared_error(ddp, MLP.batch(place, 0)).backward()
        for zero in pair:
            zero.step()
    if not start:
        parts = {name: zero.sharded_state_dict() for name, zero in zip(("muon", "adamw"), pair, strict=True)}
        dcp.save({"model": ddp.module.state_dict(), **parts}, checkpoint_id=str(folder))
    return {name: parameter.detach().clone() for name, parameter in ddp.module.named_parameters()}


def test_a_state_that_was_saved_at_four_ranks_goes_on_at_two(tmp_path: Path) -> None:
    whole = run_ranks(_leg, 1, tmp_path / "whole", 0, 6)[0]
    run_ranks(_leg, 4, tmp_path / "parts", 0, 3)
    assert_parity(run_ranks(_leg, 2, tmp_path / "parts", 3, 6)[0], whole, what="parameters")


def _refused(rank: int, world_size: int) -> None:
    conv = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(16, 4))
    for parameters in (MLP.model().parameters(), conv.parameters()):
        with pytest.raises(ConfigurationError, match="Muon: Muon only supports 2D parameters"):
            ZeroRedundancyOptimizer(parameters, torch.optim.Muon, **MUON)
    model = MLP.model()
    zero = ZeroRedundancyOptimizer(divided(model)[0], torch.optim.Muon, **MUON)
    with pytest.raises(ConfigurationError, match="Muon only supports 2D"):
        zero.add_param_group({"params": [model[0].bias]})


def test_muon_refuses_what_is_not_a_matrix() -> None:
    run_ranks(_refused, 2)


def _other_steps(rank: int, world_size: int) -> None:
    ZeroRedundancyOptimizer(divided(MLP.model())[0], torch.optim.Muon, ns_steps=5 + rank)


def test_ranks_with_another_number_of_steps_are_told_so() -> None:
    with pytest.raises(RankFailed, match=r"ns_steps=\[6\]"):
        run_ranks(_other_steps, 2)
