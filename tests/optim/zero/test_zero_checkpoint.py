"""State that is saved and loaded goes on exactly, at any number of ranks, and fits the plain optimizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from harness import assert_parity, run_ranks, run_threads, wrap
from harness.models import EMPTY, MLP, Case, mean_squared_error
from overlap import ConfigurationError, ZeroRedundancyOptimizer, ZeroStep, chain

KINDS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "adam": (torch.optim.Adam, {"lr": 0.01, "amsgrad": True}),
    "sgd-momentum": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
}


def _groups(module: nn.Module) -> list[dict[str, Any]]:
    parameters = list(module.parameters())
    return [{"params": parameters[:3], "lr": 0.05}, {"params": parameters[3:]}]


def _zero(ddp: Any, kind: str, **options: Any) -> ZeroRedundancyOptimizer:
    cls, arguments = KINDS[kind]
    zero = ZeroRedundancyOptimizer(_groups(ddp.module), cls, overlap_with_ddp=True, **arguments, **options)
    chain(ZeroStep(zero)).register(ddp)
    return zero


def _step(ddp: Any, case: Case, step: int) -> None:
    # Every rank feeds the same: the mean is then the same at any number of ranks (that is a power of 2).
    mean_squared_error(ddp, case.batch(step, 0)).backward()


def _leg(
    rank: int, world_size: int, case: Case, kind: str, folder: Path, start: int, stop: int, options: dict[str, Any]
) -> dict[str, Any]:
    """Trains from the checkpoint before `start`, if there is one, to `stop` and saves there."""
    ddp = wrap(case.model(), **case.ddp_options())
    zero = _zero(ddp, kind, **options)
    if start:
        model = ddp.module.state_dict()
        dcp.load({"model": model}, checkpoint_id=folder / str(start))
        ddp.module.load_state_dict(model)
        zero.load_sharded(folder / str(start), key="optimizer")
    for step in range(start, stop):
        _step(ddp, case, step)
        zero.step()
    state = {"model": ddp.module.state_dict(), "optimizer": zero.sharded_state_dict()}
    dcp.save(state, checkpoint_id=folder / str(stop))
    zero.consolidate_state_dict(to=world_size - 1)
    return {
        "parameters": {name: p.detach().clone() for name, p in ddp.module.named_parameters()},
        "state": zero.state_dict() if rank == world_size - 1 else None,
    }


def _uninterrupted(rank: int, world_size: int, case: Case, kind: str, steps: int) -> dict[str, Any]:
    cls, arguments = KINDS[kind]
    module = case.model()
    optimizer = cls(_groups(module), **arguments)
    for step in range(steps):
        optimizer.zero_grad()
        _step(module, case, step)
        optimizer.step()
    return {"parameters": dict(module.named_parameters()), "state": optimizer.state_dict()}


@pytest.mark.parametrize(
    ("kind", "case", "partitions"),
    [
        ("adam", MLP, ("element", "element", "element")),
        ("sgd-momentum", MLP, ("element", "parameter", "element")),
        ("adam", EMPTY, ("element", "element", "parameter")),
        ("adam", EMPTY, ("parameter", "element", "element")),
    ],
    ids=["adam", "momentum, by parameter between", "empty parameter", "by parameter first"],
)
def test_resume_is_exact_at_4_ranks_then_2_then_3(
    tmp_path: Path, kind: str, case: Case, partitions: tuple[str, ...]
) -> None:
    start = 0
    for ranks, stop, partition in zip((4, 2, 3), (3, 5, 7), partitions, strict=True):
        results = run_ranks(_leg, ranks, case, kind, tmp_path, start, stop, {"partition": partition})
        (reference,) = run_ranks(_uninterrupted, 1, case, kind, stop)
        ours = {"parameters": results[-1]["parameters"], "state": results[-1]["state"]}
        reference["parameters"] = {name: p.detach() for name, p in reference["parameters"].items()}
        tolerance: dict[str, Any] = {"exact": True}
        if ranks == 3:
            reason = "a third of a number three times is not the number"
            tolerance = {"exact": False, "rtol": 1e-4, "atol": 1e-5, "reason": reason}
        assert_parity(ours, reference, what=f"{ranks} ranks, step {stop}", **tolerance)
        start = stop


def _resumed(rank: int, world_size: int, kind: str, options: dict[str, Any]) -> dict[str, bool]:
    """Whether the plain optimizer and a new one of ours, loaded with the whole state, go on as the one that saved."""
    ddp = wrap(MLP.model(), **MLP.ddp_options())
    zero = _zero(ddp, kind, **options)
    for step in range(3):
        _step(ddp, MLP, step)
        zero.step()
    states = []
    for to in range(world_size):
        zero.consolidate_state_dict(to)
        states += [zero.state_dict()] if rank == to else []
    (full,) = states
    cls, arguments = KINDS[kind]
    module = MLP.model()
    module.load_state_dict(ddp.module.state_dict())
    plain = cls(_groups(module), **arguments)
    plain.load_state_dict(full)
    again = wrap(module, **MLP.ddp_options())
    loaded = _zero(again, kind, **options)
    loaded.load_state_dict(full)
    same = {"plain": True, "ours": True, "options": loaded.param_groups[0]["lr"] == full["param_groups"][0]["lr"]}
    for step in range(3, 6):
        plain.zero_grad()
        _step(module, MLP, step)
        plain.step()
        for one, optimizer in ((ddp, zero), (again, loaded)):
            _step(one, MLP, step)
            optimizer.step()
        for theirs, ours, reloaded in zip(module.parameters(), ddp.parameters(), again.parameters(), strict=True):
            same["plain"] &= torch.equal(theirs, ours)
            same["ours"] &= torch.equal(theirs, reloaded)
    return same


def _every_resumed(rank: int, world_size: int) -> None:
    for kind in KINDS:
        for partition in ("element", "parameter"):
            same = _resumed(rank, world_size, kind, {"partition": partition})
            assert all(same.values()), (kind, partition, same)


def test_the_plain_optimizer_and_a_new_one_go_on_with_the_whole_state() -> None:
    run_ranks(_every_resumed, 2)


def _masters(rank: int, world_size: int, folder: Path, start: int, stop: int) -> list[torch.Tensor]:
    ddp = wrap(MLP.model().bfloat16())
    zero = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.Adam, lr=1e-3, master_dtype=torch.float32)
    if start:
        model = ddp.module.state_dict()
        dcp.load({"model": model}, checkpoint_id=folder / str(start))
        ddp.module.load_state_dict(model)
        zero.load_sharded(folder / str(start))
    for step in range(start, stop):
        zero.zero_grad()
        ddp(MLP.batch(step, 0).inputs[0].bfloat16()).float().square().mean().backward()
        zero.step()
    dcp.save({"model": ddp.module.state_dict(), **zero.sharded_state_dict()}, checkpoint_id=folder / str(stop))
    return [p.detach().clone() for p in ddp.parameters()]


def test_resume_is_exact_with_fp32_masters(tmp_path: Path) -> None:
    whole = run_ranks(_masters, 2, tmp_path / "a", 0, 8)
    run_ranks(_masters, 4, tmp_path / "b", 0, 4)
    halves = run_ranks(_masters, 2, tmp_path / "b", 4, 8)
    assert_parity(halves, whole, what="4 ranks, then 2")


def _saved(folder: Path) -> ZeroRedundancyOptimizer:
    zero = ZeroRedundancyOptimizer(MLP.model().parameters(), torch.optim.Adam)
    dcp.save({"optimizer": zero.sharded_state_dict()}, checkpoint_id=folder)
    return zero


def _wrong_key(rank: int, world_size: int, folder: Path) -> None:
    zero = _saved(folder)
    with pytest.raises(ConfigurationError, match="key='optim'"):
        zero.load_sharded(folder, key="optim")


def _no_checkpoint(rank: int, world_size: int, folder: Path) -> None:
    zero = _saved(folder)
    with pytest.raises(ConfigurationError, match=r"nowhere is not a checkpoint"):
        zero.load_sharded(folder / "nowhere", key="optimizer")


def _fewer_parameters(rank: int, world_size: int, folder: Path) -> None:
    _saved(folder)
    other = ZeroRedundancyOptimizer(list(MLP.model().parameters())[:4], torch.optim.Adam)
    with pytest.raises(ConfigurationError, match=r"\[10\] parameters, but this optimizer has \[4\]"):
        other.load_sharded(folder, key="optimizer")


def _other_shapes(rank: int, world_size: int, folder: Path) -> None:
    _saved(folder)
    small = ZeroRedundancyOptimizer([nn.Parameter(torch.zeros(8)) for _ in range(10)], torch.optim.Adam)
    with pytest.raises(ConfigurationError, match=r"shape in the checkpoint is \[16, 16\], here \[8\]"):
        small.load_sharded(folder, key="optimizer")


@pytest.mark.parametrize("scenario", [_wrong_key, _no_checkpoint, _fewer_parameters, _other_shapes])
def test_a_sharded_checkpoint_that_does_not_fit_is_refused(tmp_path: Path, scenario: Any) -> None:
    run_ranks(scenario, 2, tmp_path)


def _plain_of_fewer_parameters(rank: int, world_size: int) -> None:
    parameters = list(MLP.model().parameters())
    zero = ZeroRedundancyOptimizer(parameters, torch.optim.Adam)
    with pytest.raises(ConfigurationError, match=r"groups of \[4\]"):
        zero.load_state_dict(torch.optim.SGD(parameters[:4], lr=1.0).state_dict())


def _state_of_a_model(rank: int, world_size: int) -> None:
    model = MLP.model()
    zero = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam)
    with pytest.raises(ConfigurationError, match="not a state_dict of an optimizer"):
        zero.load_state_dict(model.state_dict())


@pytest.mark.parametrize("scenario", [_plain_of_fewer_parameters, _state_of_a_model])
def test_a_state_dict_that_does_not_fit_is_refused(scenario: Any) -> None:
    run_threads(scenario, 2)
