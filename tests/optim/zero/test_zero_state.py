"""State of every kind is saved and loaded as the plain optimizer's, or refused where ranks cannot put it together."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.optim import Optimizer

from harness import assert_parity, run_ranks, wrap
from harness.models import MLP, mean_squared_error
from harness.third_party import BlockwiseAdamW
from overlap import UnsupportedError, ZeroRedundancyOptimizer, ZeroStep, chain, declare


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


def _train(ddp: Any, optimizer: Any, start: int, stop: int) -> None:
    # Every rank feeds the same: the mean is then the same at any number of ranks (that is a power of 2).
    for step in range(start, stop):
        optimizer.zero_grad()
        mean_squared_error(ddp, MLP.batch(step, 0)).backward()
        optimizer.step()


def _whole(zero: ZeroRedundancyOptimizer) -> dict[str, Any]:
    zero.consolidate_state_dict(to=None)
    return zero.state_dict()


def _leg(rank: int, world_size: int, cls: Any, options: dict[str, Any], folder: Path, start: int, stop: int) -> Any:
    ddp = wrap(MLP.model(), **MLP.ddp_options())
    zero = ZeroRedundancyOptimizer(ddp.parameters(), cls, **options)
    if start:
        saved = torch.load(folder / "model.pt", weights_only=True)
        ddp.module.load_state_dict(saved)
        zero.load_sharded(folder / str(start))
    _train(ddp, zero, start, stop)
    dcp.save(zero.sharded_state_dict(), checkpoint_id=folder / str(stop))
    whole = _whole(zero)
    if rank == 0:
        torch.save(ddp.module.state_dict(), folder / "model.pt")
        torch.save(whole, folder / "optimizer.pt")
        torch.load(folder / "optimizer.pt", weights_only=True)
    reference = wrap(MLP.model(), **MLP.ddp_options())
    plain = cls(reference.parameters(), **{key: value for key, value in options.items() if key != "partition"})
    _train(reference, plain, 0, stop)
    assert_parity(list(ddp.parameters()), list(reference.parameters()), what=f"step {stop}")
    assert_parity(whole, plain.state_dict(), what=f"state at step {stop}")
    return whole


@pytest.mark.parametrize(
    ("cls", "options"),
    [
        (Varied, {"partition": "element"}),
        (Varied, {"partition": "parameter", "has_table": True}),
        (BlockwiseAdamW, {}),
    ],
    ids=["varied, by element", "varied, by parameter", "blockwise"],
)
def test_state_of_every_kind_is_that_of_plain_ddp_and_resumes_exactly(
    tmp_path: Path, cls: Any, options: dict[str, Any]
) -> None:
    run_ranks(_leg, 2, cls, options, tmp_path, 0, 4)
    run_ranks(_leg, 4, cls, options, tmp_path, 4, 6)


def _exchanged(rank: int, world_size: int) -> None:
    """A plain optimizer's state goes into ours, and ours into a plain one."""
    for partition in ("element", "parameter"):
        ddp, again = wrap(MLP.model(), **MLP.ddp_options()), wrap(MLP.model(), **MLP.ddp_options())
        plain = Varied(ddp.parameters())
        _train(ddp, plain, 0, 4)
        zero = ZeroRedundancyOptimizer(again.parameters(), Varied, partition=partition)
        again.load_state_dict(ddp.state_dict())
        zero.load_state_dict(copy.deepcopy(plain.state_dict()))
        ours, theirs = _whole(zero)["state"], plain.state_dict()["state"]
        for index in range(10):
            # PyTorch loads moments in the parameter's dtype, since nothing says in which one they were made.
            theirs[index]["wide"] = theirs[index]["wide"].float()
        assert_parity(ours, theirs, what=partition)


def test_state_of_every_kind_is_loaded_from_the_plain_optimizer() -> None:
    run_ranks(_exchanged, 2)


def _blockwise_by_element(rank: int, world_size: int) -> None:
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


def test_a_value_per_block_is_refused_at_the_first_step_by_element_and_at_loading() -> None:
    run_ranks(_blockwise_by_element, 2)


@declare("element")
class MisdeclaredNorm(torch.optim.SGD):
    """Keeps a norm of each parameter, or of each chunk of it."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is not None:
                self.state[parameter]["norm"] = parameter.grad.norm()
                parameter.add_(parameter.grad, alpha=-0.1)


@declare("element")
class MisdeclaredTotal(torch.optim.SGD):
    """Keeps a total of all gradients."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        total = self.state["total"].get("sum", 0.0)
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is not None:
                total += float(parameter.grad.sum())
        self.state["total"]["sum"] = total


def _different(rank: int, world_size: int) -> None:
    for cls, match in (
        (
            MisdeclaredNorm,
            r"state 'norm' of .* differs between ranks: rank 0 has .*partition='parameter'",
        ),
        (MisdeclaredTotal, r"MisdeclaredTotal: state 'total' which belongs to no parameter, differs between ranks"),
    ):
        module = MLP.model()
        zero = ZeroRedundancyOptimizer(module.parameters(), cls, partition="element")
        _train(module, zero, 0, 1)
        for save in (zero.consolidate_state_dict, zero.sharded_state_dict):
            with pytest.raises(UnsupportedError, match=match):
                save()


def test_a_value_that_differs_between_ranks_is_refused_on_every_rank() -> None:
    run_ranks(_different, 2)


class _Scalars(nn.Module):
    """A parameter without dimensions, one of one element, and one that is cut."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.temperature = nn.Parameter(torch.tensor(0.5))
        self.shift = nn.Parameter(torch.tensor([0.1]))
        self.linear = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * self.temperature + self.shift


def _scalars(rank: int, world_size: int, folder: Path) -> None:
    """State per element and per parameter look alike there; both are those of the plain optimizer."""
    for cls, options in ((torch.optim.NAdam, {}), (torch.optim.Adagrad, {"lr": 0.1}), (torch.optim.ASGD, {"lr": 0.1})):
        plain, ddp, again = wrap(_Scalars()), wrap(_Scalars()), wrap(_Scalars())
        reference = cls(plain.parameters(), **options)
        zero = ZeroRedundancyOptimizer(ddp.parameters(), cls, **options)
        chain(ZeroStep(zero)).register(ddp)
        loaded = ZeroRedundancyOptimizer(again.parameters(), cls, **options)
        for step in range(6):
            for model, optimizer in ((plain, reference), (ddp, zero), *([(again, loaded)] if step >= 3 else ())):
                optimizer.zero_grad()
                model(torch.full((4, 16), 0.1 * (rank + step))).square().mean().backward()
                optimizer.step()
            if step == 2:
                again.load_state_dict(ddp.state_dict())
                loaded.load_state_dict(copy.deepcopy(reference.state_dict()))
                dcp.save(zero.sharded_state_dict(), checkpoint_id=folder / cls.__name__)
                loaded.load_sharded(folder / cls.__name__)
            assert_parity(list(ddp.parameters()), list(plain.parameters()), what=f"{cls.__name__}, step {step}")
        assert_parity(list(again.parameters()), list(plain.parameters()), what=f"{cls.__name__}, loaded")
        for one in (zero, loaded):
            assert_parity(_whole(one), reference.state_dict(), what=f"{cls.__name__}, state")


def test_parameters_of_one_element_have_the_state_of_the_plain_optimizer(tmp_path: Path) -> None:
    run_ranks(_scalars, 2, tmp_path)
