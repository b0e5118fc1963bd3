"""Who gets what from `state_dict()`, and that what frameworks and DCP do with an optimizer works on ours."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)

from harness import assert_parity, run_ranks, wrap
from harness.models import MLP, mean_squared_error
from overlap import ConfigurationError, TrainingLoopError, ZeroRedundancyOptimizer, ZeroStep, chain, load_state_dict
from overlap import state_dict as overlap_state_dict

ADAM: dict[str, Any] = {"lr": 0.01, "amsgrad": True}
PARTITIONS = ("element", "parameter")


def _zero(ddp: Any, partition: str = "element", cls: Any = torch.optim.Adam, **arguments: Any) -> Any:
    zero = ZeroRedundancyOptimizer(
        ddp.parameters(), cls, partition=partition, overlap_with_ddp=True, **(arguments or ADAM)
    )
    chain(ZeroStep(zero)).register(ddp)
    return zero


def _train(ddp: Any, optimizer: Any, start: int, stop: int) -> None:
    # Every rank feeds the same: the mean is then the same at any number of ranks (that is a power of 2).
    for step in range(start, stop):
        mean_squared_error(ddp, MLP.batch(step, 0)).backward()
        optimizer.step()


def _parameters(ddp: Any) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in ddp.module.named_parameters()}


def _who_has_it(rank: int, world_size: int) -> None:
    ddp = wrap(MLP.model(), **MLP.ddp_options())
    zero = _zero(ddp)
    fresh = zero.state_dict()
    assert fresh["state"] == {} and fresh["param_groups"][0]["params"] == list(range(10)), "known without a gather"
    zero.load_state_dict(fresh)
    assert zero.state_dict() == fresh
    _train(ddp, zero, 0, 1)
    with pytest.raises(TrainingLoopError, match=rf"not consolidated.*consolidate_state_dict\(to={rank}\)"):
        zero.state_dict()
    zero.consolidate_state_dict(to=1)
    assert bool(zero.state_dict()) is (rank == 1)
    zero.consolidate_state_dict(to=0)
    mine = zero.state_dict()
    assert len(mine["state"]) == 10, "the second consolidation takes nothing from rank 1"
    mine["state"].clear()
    mine["param_groups"][0]["params"].clear()
    assert len(zero.state_dict()["state"]) == len(zero.state_dict()["param_groups"][0]["params"]) == 10
    zero.param_groups[0]["lr"] = 0.5
    assert zero.state_dict()["param_groups"][0]["lr"] == 0.5
    with pytest.raises(ConfigurationError, match="empty on ranks to which it was not consolidated"):
        zero.load_state_dict({})
    _train(ddp, zero, 1, 2)
    for _ in range(2):
        with pytest.raises(TrainingLoopError, match="was not consolidated since it last changed"):
            zero.state_dict()
    zero.consolidate_state_dict(to=None)
    state = zero.state_dict()
    assert all(float(of_one["step"]) == 2 for of_one in state["state"].values())
    for load in (
        lambda: zero.load_state_dict(state),
        lambda: load_state_dict(ddp, zero, overlap_state_dict(ddp, zero)),
    ):
        load()
        with pytest.raises(TrainingLoopError, match="was not consolidated since it last changed"):
            zero.state_dict()
        zero.consolidate_state_dict(to=None)


def test_state_dict_is_whole_or_empty_where_it_was_consolidated_elsewhere_and_never_stale() -> None:
    run_ranks(_who_has_it, 2)


def _hooks(rank: int, world_size: int) -> None:
    ddp = wrap(MLP.model(), **MLP.ddp_options())
    zero = _zero(ddp)
    seen: list[str] = []
    zero.register_state_dict_pre_hook(lambda optimizer: seen.append("before saving"))
    zero.register_state_dict_post_hook(lambda optimizer, state_dict: {**state_dict, "note": 7})
    zero.register_load_state_dict_pre_hook(lambda optimizer, state_dict: seen.append(f"note {state_dict.pop('note')}"))
    zero.register_load_state_dict_post_hook(lambda optimizer: seen.append("after loading"))
    _train(ddp, zero, 0, 1)
    zero.consolidate_state_dict(to=None)
    zero.load_state_dict(zero.state_dict())
    assert seen == ["before saving", "note 7", "after loading"]


def test_hooks_of_state_dicts_run() -> None:
    run_ranks(_hooks, 2)


def _as_frameworks_do(rank: int, world_size: int, folder: Path, partition: str) -> None:
    """Each saves at step 3 and goes on; a second run loads and must end where the first one does."""
    ends: list[Any] = []
    saved: dict[str, Any] = {}
    ddp = wrap(MLP.model(), **MLP.ddp_options())
    zero = _zero(ddp, partition)
    # Accelerate loads the state of a new optimizer into it; Lightning and the HF Trainer do nothing of the kind.
    zero.load_state_dict(zero.state_dict())
    _train(ddp, zero, 0, 3)
    weights = copy.deepcopy(ddp.module.state_dict())
    # Lightning's strategy: consolidate for rank 0, which saves.
    zero.consolidate_state_dict()
    saved["lightning"] = zero.state_dict() if rank == 0 else {}
    # Accelerate: every rank asks, the main process saves. The HF Trainer: only the main process asks.
    saved["accelerate"] = zero.state_dict()
    saved["hf"] = zero.state_dict() if rank == 0 else {}
    assert bool(saved["accelerate"]) is (rank == 0)
    if rank == 0:
        torch.save(saved, folder / f"{partition}.pt")
    torch.distributed.barrier()
    _train(ddp, zero, 3, 6)
    ends.append(_parameters(ddp))
    loaded = torch.load(folder / f"{partition}.pt", weights_only=True)
    for name in saved:
        again = wrap(MLP.model(), **MLP.ddp_options())
        again.module.load_state_dict(weights)
        optimizer = _zero(again, partition)
        optimizer.load_state_dict(loaded[name])
        _train(again, optimizer, 3, 6)
        assert_parity(_parameters(again), ends[0], what=f"{name}, {partition}")


@pytest.mark.parametrize("partition", PARTITIONS)
def test_what_lightning_accelerate_and_the_hf_trainer_save_goes_on_exactly(tmp_path: Path, partition: str) -> None:
    run_ranks(_as_frameworks_do, 2, tmp_path, partition)


# What is passed to the functions of `torch.distributed.checkpoint.state_dict`.
DCP_OPTIONS: dict[str, StateDictOptions] = {
    "default": StateDictOptions(),
    "full": StateDictOptions(full_state_dict=True),
    "full, on the CPU": StateDictOptions(full_state_dict=True, cpu_offload=True),
    "broadcast": StateDictOptions(full_state_dict=True, broadcast_from_rank0=True),
    "flat": StateDictOptions(flatten_optimizer_state_dict=True),
}


def _by_dcp(rank: int, world_size: int, partition: str) -> None:
    ddp = wrap(MLP.model(), **MLP.ddp_options())
    zero = _zero(ddp, partition)
    _train(ddp, zero, 0, 3)
    saved = {name: copy.deepcopy(get_state_dict(ddp, zero, options=options)) for name, options in DCP_OPTIONS.items()}
    _train(ddp, zero, 3, 6)
    for name, options in DCP_OPTIONS.items():
        again = wrap(MLP.model(), **MLP.ddp_options())
        optimizer = _zero(again, partition)
        # With an offload to the CPU rank 0 alone gets the state, but every rank is to load it.
        weights, state = copy.deepcopy(saved["full" if options.cpu_offload else name])
        if options.broadcast_from_rank0:
            # PyTorch does not broadcast the weights of a DDP model: the ranks fall out of step.
            again.module.load_state_dict(weights)
            set_optimizer_state_dict(again, optimizer, state if rank == 0 else {}, options=copy.copy(options))
        else:
            set_state_dict(
                again, optimizer, model_state_dict=weights, optim_state_dict=state, options=copy.copy(options)
            )
        _train(again, optimizer, 3, 6)
        assert_parity(_parameters(again), _parameters(ddp), what=f"{name}, {partition}")


@pytest.mark.parametrize("partition", PARTITIONS)
def test_the_state_dict_functions_of_dcp_resume_exactly(partition: str) -> None:
    run_ranks(_by_dcp, 2, partition)


def _as_a_stateful(rank: int, world_size: int, folder: Path) -> None:
    ddp = wrap(MLP.model(), **MLP.ddp_options())
    zero = _zero(ddp)
    _train(ddp, zero, 0, 3)
    dcp.save({"model": ddp.module, "optimizer": zero}, checkpoint_id=folder)
    _train(ddp, zero, 3, 6)
    again = wrap(MLP.model(), **MLP.ddp_options())
    optimizer = _zero(again)
    dcp.load({"model": again.module, "optimizer": optimizer}, checkpoint_id=folder)
    _train(again, optimizer, 3, 6)
    assert_parity(_parameters(again), _parameters(ddp), what="saved and loaded as an object")


def test_dcp_saves_and_loads_the_optimizer_itself(tmp_path: Path) -> None:
    run_ranks(_as_a_stateful, 2, tmp_path)


def _made_for_loading(rank: int, world_size: int) -> None:
    """Asking a new optimizer for its state by name makes the state, but neither steps nor waits for another rank."""
    for partition in PARTITIONS:
        ddp = wrap(MLP.model(), **MLP.ddp_options())
        zero = _zero(ddp, partition, torch.optim.AdamW, lr=0.1, weight_decay=0.5)
        before = _parameters(ddp)
        state = get_optimizer_state_dict(ddp, zero)
        assert_parity(_parameters(ddp), before, what=partition)
        assert len(state["state"]) == 10 and zero.param_groups[0]["lr"] == 0.1
        assert all(p.grad is None for p in ddp.parameters())


def test_a_new_optimizer_gives_dcp_its_state_without_a_step() -> None:
    run_ranks(_made_for_loading, 2)
