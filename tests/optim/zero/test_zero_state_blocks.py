"""State in blocks, divided among ranks: the update is the whole optimizer's, and cuts are between blocks."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from zero_loops import FORMS, check, plain_run, zero_run

from harness import assert_parity, overlapped_step, run_ranks, train, wrap
from harness.models import MLP, Case, mean_squared_error
from overlap import (
    AllReduce,
    ConfigurationError,
    Int8,
    OverlappedOptimizer,
    Step,
    UnsupportedError,
    ZeroRedundancyOptimizer,
    ZeroStep,
    chain,
)
from overlap.optim import AdamW8bit
from overlap.optim.zero.partition import ByElement, Extent

# So small that the weights of these models, of 256 elements, have four blocks, and their biases none.
OPTIONS: dict[str, Any] = {"lr": 0.01, "weight_decay": 0.1, "block_numel": 64, "min_numel": 64}


def _optimizer(parameters: Any) -> AdamW8bit:
    return AdamW8bit(parameters, **OPTIONS)


@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_ranges_begin_between_blocks_and_none_is_short(ranks: int) -> None:
    partition = ByElement(ranks)
    numels = (5000, 100_000, 4096, 50, 0, 8191, 300_001)
    extents = [Extent(numel, 4, cut_multiple=4096 if numel >= 4096 else 1) for numel in numels]
    owned = [0] * ranks
    for extent, ranges in zip(extents, partition.assign(extents), strict=True):
        parts = sorted(part for part in ranges if part[0] < part[1])
        assert sum(end - start for start, end in parts) == extent.numel
        assert all(one[1] == other[0] for one, other in itertools.pairwise(parts))
        assert all(start % extent.cut_multiple == 0 for start, _ in parts)
        assert all(end - start >= extent.cut_multiple for start, end in parts)
        owned = [total + end - start for total, (start, end) in zip(owned, ranges, strict=True)]
    assert max(owned) - min(owned) < 2 * 4096


def _forms(rank: int, world_size: int, partition: str) -> None:
    reference = plain_run(MLP, rank, _optimizer)
    assert any(value.dtype == torch.uint8 for value in reference[0].optimizer["state"][0].values())
    for name, form in FORMS.items():
        candidate = zero_run(MLP, rank, AdamW8bit, OPTIONS, form, zero_options={"partition": partition})
        check(candidate, reference, what=f"{partition}, {name}", world_size=world_size)


@pytest.mark.parametrize("partition", ["element", "parameter"])
def test_sharded_it_equals_plain_ddp_bit_for_bit(partition: str) -> None:
    run_ranks(_forms, 2, partition)


def _replicated(rank: int, world_size: int) -> None:
    reference = plain_run(MLP, rank, _optimizer)
    for options in ({}, {"deferred": True}):
        ddp = wrap(MLP.model(), **MLP.ddp_options())
        optimizer = OverlappedOptimizer(_optimizer(ddp.parameters()))
        chain(AllReduce(), Step(optimizer, **options)).register(ddp)
        candidate = train(ddp, optimizer, MLP.batches(rank, steps=len(reference)), step_fn=overlapped_step)
        check(candidate, reference, what=f"Step, {options}", world_size=world_size)


def test_in_backward_it_equals_plain_ddp_bit_for_bit() -> None:
    run_ranks(_replicated, 2)


def _divided(rank: int, world_size: int) -> None:
    model = nn.Linear(256, 64)
    zero = ZeroRedundancyOptimizer(model.parameters(), AdamW8bit)
    assert zero.partition == "element"
    weight, bias = (zero.shards[id(parameter)] for parameter in model.parameters())
    assert weight.range == ((0, 8192), (8192, 16384))[rank] and bias.range == ((0, 32), (32, 64))[rank]
    # Two parts would not both have 4,096 elements, from which on moments have blocks.
    undivided = ZeroRedundancyOptimizer([nn.Parameter(torch.zeros(5000))], AdamW8bit)
    assert [shard.ranges for shard in undivided.shards.values()] == [((0, 5000), (5000, 5000))]
    model(torch.ones(1, 256)).sum().backward()
    zero.step()
    state = zero.state[model.weight]
    assert state["exp_avg"].dtype == torch.uint8 and state["exp_avg_scale"].shape == (32,)
    # A reset and a state that is put back are no change of the shapes.
    zero.state[model.weight] = zero.state.pop(model.weight)
    assert zero.optim.state[weight.own]["exp_avg_scale"].shape == (32,)


def test_parameters_are_cut_between_blocks_and_small_ones_anywhere() -> None:
    run_ranks(_divided, 2)


def _mixed(rank: int, world_size: int) -> None:
    """Parameters in bf16 with masters, and wires, whose true weights are updated."""
    for options, form in (({"master_dtype": torch.float32}, {}), ({}, {"gather_wire": Int8()})):
        ddp = wrap(MLP.model().bfloat16(), **MLP.ddp_options())
        zero = ZeroRedundancyOptimizer(ddp.parameters(), AdamW8bit, **OPTIONS, **options)
        chain(ZeroStep(zero, **form)).register(ddp)
        batch = MLP.batch(0, rank)
        losses = []
        for _ in range(8):
            loss = nn.functional.mse_loss(ddp(batch.inputs[0].bfloat16()), batch.target.bfloat16())
            loss.backward()
            zero.step()
            losses.append(float(loss.detach()))
        assert losses[-1] < 0.9 * losses[0], (options, losses)


def test_it_updates_masters_and_true_weights() -> None:
    run_ranks(_mixed, 2)


def _images(model: nn.Module) -> tuple[nn.Module, torch.Tensor]:
    return model.to(memory_format=torch.channels_last), torch.randn(
        2, 8, 6, 6, generator=torch.Generator().manual_seed(1)
    )


def _channels_last(rank: int, world_size: int, folder: Path) -> None:
    def build() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Conv2d(8, 16, 3), nn.Flatten(), nn.Linear(256, 4))

    module, images = _images(build())
    with pytest.raises(UnsupportedError, match=r"parameter 0 of group 0 .* use .*partition='parameter'"):
        ZeroRedundancyOptimizer(module.parameters(), AdamW8bit, **OPTIONS)
    # Whole parameters may be in any order, and their state goes to those that are cut.
    zero = ZeroRedundancyOptimizer(module.parameters(), AdamW8bit, partition="parameter", **OPTIONS)
    plain = _images(build())[0]
    optimizer = _optimizer(plain.parameters())
    for model, one in ((module, zero), (plain, optimizer)):
        for _ in range(3):
            one.zero_grad()
            model(images).square().sum().backward()
            one.step()
    assert_parity(list(module.parameters()), [p.detach() for p in plain.parameters()], what="channels last")
    dcp.save({"optimizer": zero.sharded_state_dict()}, checkpoint_id=folder)
    usual = build()
    usual.load_state_dict(module.state_dict())
    cut = ZeroRedundancyOptimizer(usual.parameters(), AdamW8bit, **OPTIONS)
    cut.load_sharded(folder, key="optimizer")
    cut.consolidate_state_dict(to=None)
    assert_parity(cut.state_dict()["state"], optimizer.state_dict()["state"], what="loaded into the usual format")
    # A model that changes its format after it was cut.
    usual.to(memory_format=torch.channels_last)
    usual(images).square().sum().backward()
    with pytest.raises(UnsupportedError, match="not a range of its elements"):
        cut.step()


def test_other_memory_formats_are_updated_whole(tmp_path: Path) -> None:
    run_ranks(_channels_last, 2, tmp_path)


def _trained(ddp: Any, zero: Any, case: Case, steps: range) -> None:
    for step in steps:
        zero.zero_grad()
        mean_squared_error(ddp, case.batch(step, 0)).backward()
        zero.step()


def _other_blocks(rank: int, world_size: int, folder: Path) -> None:
    ddp = wrap(MLP.model(), **MLP.ddp_options())
    zero = ZeroRedundancyOptimizer(ddp.parameters(), AdamW8bit, **OPTIONS)
    _trained(ddp, zero, MLP, range(2))
    dcp.save({"optimizer": zero.sharded_state_dict()}, checkpoint_id=folder)
    zero.consolidate_state_dict(to=None)
    saved = zero.state_dict()
    for options in ({"block_numel": 128, "min_numel": 128}, {"block_numel": 64, "min_numel": 4096}):
        other = ZeroRedundancyOptimizer(ddp.parameters(), AdamW8bit, **{**OPTIONS, **options})
        match = "is divided for block_numel=.* was saved with block_numel=64 and min_numel=64"
        with pytest.raises(ConfigurationError, match=match):
            other.load_sharded(folder, key="optimizer")
        with pytest.raises(ConfigurationError, match=match):
            other.load_state_dict(saved)
        # Whole parameters need no cut.
        whole = ZeroRedundancyOptimizer(ddp.parameters(), AdamW8bit, partition="parameter", **{**OPTIONS, **options})
        whole.load_sharded(folder, key="optimizer")
        whole.consolidate_state_dict(to=None)
        assert_parity(whole.state_dict()["state"], saved["state"], what=f"{options}")
    # Smaller blocks, cut where the others are.
    finer = ZeroRedundancyOptimizer(ddp.parameters(), AdamW8bit, **{**OPTIONS, "block_numel": 64, "min_numel": 64})
    finer.load_state_dict(saved)
    plain = _optimizer(MLP.model().parameters())
    plain.load_state_dict(saved)
    adamw = torch.optim.AdamW(plain.param_groups[0]["params"])
    for parameter in adamw.param_groups[0]["params"]:
        parameter.grad = torch.ones_like(parameter)
    adamw.step()
    with pytest.raises(ConfigurationError, match="are not encoded"):
        finer.load_state_dict(adamw.state_dict())


def test_blocks_of_other_options_are_refused_where_parameters_are_cut(tmp_path: Path) -> None:
    run_ranks(_other_blocks, 2, tmp_path)


def _disagree(rank: int, world_size: int) -> None:
    with pytest.raises(ConfigurationError, match=r"rank 1 shards with .*numel=64.* but rank 0 with .*numel=128"):
        ZeroRedundancyOptimizer(MLP.model().parameters(), AdamW8bit, block_numel=64 if rank else 128)


def test_ranks_that_disagree_on_blocks_are_told() -> None:
    run_ranks(_disagree, 2)
