"""State of every kind is saved and loaded as the plain optimizer's, by every way to save, at any number of ranks."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.optim import Optimizer

import overlap
from harness import assert_parity, on_ranks, plain_step, run_ranks, wrap
from harness.models import DTYPES, EMPTY, MLP, Case, mean_squared_error
from harness.third_party import BlockwiseAdamW
from overlap import (
    ConfigurationError,
    TrainingLoopError,
    UnsupportedError,
    ZeroRedundancyOptimizer,
    ZeroStep,
    chain,
    declare,
    load_state_dict,
)
from overlap import state_dict as overlap_state_dict


@declare("element")
class Misdeclared(BlockwiseAdamW):
    """Its blocks depend on where a parameter is cut."""


@declare("element")
class Varied(Optimizer):
    """SGD with a bit of everything in its state."""

    def __init__(self, params: Any, lr: float = 0.1, has_table: bool = False) -> None:
        super().__init__(params, {"lr": lr, "betas": (0.9, 0.99), "has_table": has_table})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        settings = self.state["settings"]
        settings["table"] = torch.arange(5.0)
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                count = state.setdefault("count", torch.tensor(2**24 + 1))
                state.setdefault("wide", torch.zeros_like(parameter, dtype=torch.float64))
                state.setdefault("signs", torch.zeros_like(parameter, dtype=torch.int8))
                state.setdefault("names", {"kind": "sgd", "bounds": [0.5, 1]})
                state.setdefault("nothing", None)
                if group["has_table"]:
                    state.setdefault("codes", torch.arange(7, dtype=torch.uint8))
                if count > 2**24 + 2:  # Lazily, at the third step.
                    state.setdefault("late", parameter.grad.abs())
                count += 1
                state["wide"] += parameter.grad
                state["signs"].copy_(parameter.grad.sign())
                factor = 1.0 + int(count - 2**24) * 0.5
                parameter.add_(state["wide"].to(parameter.dtype) + state["signs"], alpha=-group["lr"] * factor * 0.1)


def _train(ddp: Any, optimizer: Any, start: int, stop: int, case: Case = MLP) -> None:
    # Every rank feeds the same: the mean is then the same at any number of ranks (that is a power of 2).
    for batch in case.batches(0, steps=stop - start, start=start):
        plain_step(ddp, optimizer, batch, mean_squared_error)


def _whole(optimizer: Any) -> dict[str, Any]:
    if isinstance(optimizer, ZeroRedundancyOptimizer):
        optimizer.consolidate_state_dict(to=None)
    whole: dict[str, Any] = optimizer.state_dict()
    return whole


def _leg(rank: int, world_size: int, folder: Path, stop: int) -> None:
    for name, (cls, options, case, partitions) in RESUMED.items():
        (folder / name).mkdir(exist_ok=True)
        _leg_of(rank, case, cls, options, partitions[stop // 2 - 1], folder / name, stop)


def _leg_of(rank: int, case: Case, cls: Any, options: dict[str, Any], partition: str, folder: Path, stop: int) -> None:
    """Two steps up to `stop`, from the checkpoint before; saved, and compared with plain DDP from the beginning."""
    ddp = wrap(case.model(), **case.ddp_options())
    zero = ZeroRedundancyOptimizer(ddp.parameters(), cls, partition=partition, **options)
    if stop > 2:
        overlap.load(folder / str(stop - 2), ddp, zero)
    _train(ddp, zero, stop - 2, stop, case)
    overlap.save(folder / str(stop), ddp, zero)
    whole = _whole(zero)
    if rank == 0:
        torch.save(whole, folder / "optimizer.pt")
        torch.load(folder / "optimizer.pt", weights_only=True)
    reference = wrap(case.model(), **case.ddp_options())
    has_masters = "master_dtype" in options  # tests/optim/zero/test_zero_parity.py keeps them by hand.
    plain = (functools.partial(ZeroRedundancyOptimizer, optimizer_class=cls) if has_masters else cls)(
        reference.parameters(), **options
    )
    _train(reference, plain, 0, stop, case)
    assert_parity(list(ddp.parameters()), list(reference.parameters()), what=f"step {stop}")
    assert_parity(whole, _whole(plain), what=f"state at step {stop}")


# The optimizer, the model, and the partition at 2 ranks, then 4, then 2 again.
RESUMED: dict[str, tuple[Any, dict[str, Any], Case, tuple[str, str, str]]] = {
    "varied, by element": (Varied, {}, MLP, ("element", "element", "element")),
    "varied, by parameter": (Varied, {"has_table": True}, MLP, ("parameter", "parameter", "parameter")),
    "amsgrad, changed": (torch.optim.Adam, {"amsgrad": True}, EMPTY, ("element", "parameter", "element")),
    "fp32 masters": (
        torch.optim.Adam,
        {"lr": 1e-3, "master_dtype": torch.float32},
        DTYPES,
        ("element", "element", "element"),
    ),
}


def test_state_of_every_kind_is_that_of_plain_ddp_and_resumes_exactly(tmp_path: Path) -> None:
    for ranks, stop in zip((2, 4, 2), (2, 4, 6), strict=True):
        run_ranks(_leg, ranks, tmp_path, stop)


@on_ranks(2)
def test_a_value_per_block_is_refused_at_the_first_step_by_element_and_at_loading(rank: int, world_size: int) -> None:
    ddp = wrap(MLP.model(), **MLP.ddp_options())
    zero = ZeroRedundancyOptimizer(ddp.parameters(), Misdeclared, partition="element", overlap_with_ddp=True)
    chain(ZeroStep(zero, deferred=True)).register(ddp)
    mean_squared_error(ddp, MLP.batch(0, 0)).backward()
    with pytest.raises(
        UnsupportedError, match=r"Misdeclared: state 'absmax1' of .* \(2,\) .* 128 elements.*partition='parameter'"
    ):
        zero.step()
    plain = BlockwiseAdamW(wrap(MLP.model()).parameters())
    for parameter in plain.param_groups[0]["params"]:
        parameter.grad = torch.ones_like(parameter)
    plain.step()
    with pytest.raises(UnsupportedError, match=r"state 'absmax1' of parameter 0 of group 0 .*partition='parameter'"):
        zero.load_state_dict(plain.state_dict())


ADAM: dict[str, Any] = {"lr": 0.01, "amsgrad": True}


def _zero(ddp: Any) -> Any:
    zero = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.Adam, overlap_with_ddp=True, **ADAM)
    chain(ZeroStep(zero)).register(ddp)
    return zero


@on_ranks(2)
def test_state_dict_is_whole_or_empty_where_it_was_consolidated_elsewhere_and_never_stale(
    rank: int, folder: Path
) -> None:
    ddp = wrap(MLP.model(), **MLP.ddp_options())
    zero = _zero(ddp)
    fresh = zero.state_dict()
    assert fresh["state"] == {} and fresh["param_groups"][0]["params"] == list(range(10)), "known without a gather"
    zero.load_state_dict(fresh)
    assert zero.state_dict() == fresh
    dcp.save({"optimizer": torch.optim.Adam(MLP.model().parameters())}, checkpoint_id=folder)
    with pytest.raises(CheckpointException, match=r"Missing key.*overlap\.load\(folder, ddp, zero\)"):
        dcp.load({"optimizer": zero}, checkpoint_id=folder)
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


@on_ranks(2)
def test_hooks_of_state_dicts_run(rank: int, world_size: int) -> None:
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


@on_ranks(2)
def test_a_state_that_does_not_fit_is_refused(rank: int, folder: Path) -> None:
    ddp = wrap(MLP.model())
    model = ddp.module
    zero = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam)
    _train(ddp, zero, 0, 1)
    overlap.save(folder, ddp, zero)
    fewer = ZeroRedundancyOptimizer(list(model.parameters())[:4], torch.optim.Adam)
    plain = torch.optim.SGD(list(model.parameters())[:4], lr=1.0)
    refused: list[tuple[Callable[[], None], str]] = [
        (lambda: overlap.load(folder / "nowhere", ddp, zero), "nowhere has no whole checkpoint"),
        (lambda: overlap.load(folder, ddp, fewer), "of other parameters: group 0 adds 4.weight"),
        (lambda: zero.load_state_dict(plain.state_dict()), r"groups of \[4\]"),
        (lambda: zero.load_state_dict(model.state_dict()), "not a state_dict of an optimizer"),
    ]
    for load, match in refused:
        with pytest.raises(ConfigurationError, match=match):
            load()
