"""Muon for matrices with AdamW beside it: owners by cost, other dtypes and numbers of ranks, what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from several_loops import FORMS, MUON, check, divided, plain_run, several_run
from torch import nn

from harness import run_ranks
from harness.errors import RankFailed
from harness.models import FROZEN, MLP, TIED, TRANSFORMER
from overlap import ConfigurationError, ZeroRedundancyOptimizer
from overlap.optim.zero.partition import ByParameter, Extent, orthogonalization_flops


def test_owners_are_balanced_by_the_cost_of_the_orthogonalization() -> None:
    # A square matrix costs more per element than an embedding, which is as wide and far longer.
    shapes = [(8000, 128), *[(512, 512)] * 4]
    extents = [
        Extent(
            rows * columns, 4, flops=orthogonalization_flops(torch.empty(rows, columns, device="meta"), {"ns_steps": 5})
        )
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
    assert orthogonalization_flops(torch.empty(6, 20), {"ns_steps": 5}) == 5 * 2 * (6 * 20 * 6 + 6 * 6 * 6 + 6 * 6 * 20)
    assert (
        orthogonalization_flops(torch.empty(20), {"ns_steps": 5}) == orthogonalization_flops(torch.empty(3, 3), {}) == 0
    )


def _models(rank: int, world_size: int) -> None:
    for case in (TRANSFORMER, TIED, FROZEN):
        reference = plain_run(case, rank)
        for name in ("both interleaved", "both sharded"):
            check(several_run(case, rank, FORMS[name]), reference, what=f"{case}, {name}", rank=rank)


def test_with_tied_and_frozen_parameters_and_in_a_transformer_it_equals_plain_ddp() -> None:
    run_ranks(_models, 2)


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
