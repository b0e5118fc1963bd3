"""`Log` reports the norm of each gradient."""

from typing import Any

import pytest
import torch

from harness import on_ranks, wrap
from harness.models import MLP, mean_squared_error
from overlap import (
    AllReduce,
    ConfigurationError,
    Join,
    Log,
    OverlappedOptimizer,
    Step,
    ZeroRedundancyOptimizer,
    ZeroStep,
    chain,
)

from .by_hand import ADAMW, ADAMW_OPTIONS

Report = tuple[int, dict[str, torch.Tensor]]


def _by_hand(ddp: Any, what: str) -> dict[str, torch.Tensor]:
    return {name: getattr(parameter, what).norm() for name, parameter in ddp.module.named_parameters()}


def _is(report: Report, step: int, norms: dict[str, torch.Tensor]) -> bool:
    names_agree = report[0] == step and list(report[1]) == list(norms)
    return names_agree and all(norm.shape == () and torch.equal(norm, norms[name]) for name, norm in report[1].items())


def _norms() -> None:
    """Of local gradients, means and new parameters, bit for bit."""
    rank = torch.distributed.get_rank()
    reports: dict[str, list[Report]] = {"local": [], "mean": [], "new": []}

    def log(name: str) -> Log:
        return Log(lambda *report: reports[name].append(report))

    ddp, by = (wrap(MLP.model(), **MLP.ddp_options()) for _ in range(2))
    optimizer = OverlappedOptimizer(ADAMW(ddp.parameters()))
    chain(log("local"), AllReduce(), log("mean"), Step(optimizer), log("new")).register(ddp)
    plain = ADAMW(by.parameters())
    for step in range(4):
        batch = MLP.batch(step, rank)
        mean_squared_error(ddp, batch).backward()
        optimizer.step()
        plain.zero_grad()
        with by.no_sync():
            mean_squared_error(by, batch).backward()
        assert _is(reports["local"][-1], step, _by_hand(by, "grad"))
        plain.zero_grad()
        mean_squared_error(by, batch).backward()
        assert _is(reports["mean"][-1], step, _by_hand(by, "grad"))
        plain.step()
        assert _is(reports["new"][-1], step, _by_hand(by, "data"))


def _sharded() -> None:
    """Of gradients of which each rank has a part, or all (one parameter is in no optimizer)."""
    rank = torch.distributed.get_rank()
    reports: list[Report] = []
    ddp, by = (wrap(MLP.model(), **MLP.ddp_options()) for _ in range(2))
    trained = [p for name, p in ddp.named_parameters() if "0.bias" not in name]
    zero = ZeroRedundancyOptimizer(trained, torch.optim.AdamW, overlap_with_ddp=True, **ADAMW_OPTIONS)
    chain(Log(lambda *report: reports.append(report)), ZeroStep(zero)).register(ddp)
    for step in range(3):
        by.module.load_state_dict(ddp.module.state_dict())
        by.zero_grad()
        ddp.module[0].bias.grad = None
        for model in (ddp, by):
            mean_squared_error(model, MLP.batch(step, rank)).backward()
        zero.step()
        assert reports[step][0] == step
        for name, norm in _by_hand(by, "grad").items():
            torch.testing.assert_close(reports[step][1][name], norm, rtol=1e-5, atol=0)


def _joined() -> None:
    """A rank without inputs reports nothing, and counts with the others."""
    rank = torch.distributed.get_rank()
    steps: list[int] = []
    ddp = wrap(MLP.model(), **MLP.ddp_options())
    optimizer = OverlappedOptimizer(ADAMW(ddp.parameters()))
    chain(AllReduce(), Log(lambda step, norms: steps.append(step)), Step(optimizer)).register(ddp)
    for _ in range(2):
        with Join([ddp, optimizer]):
            for step in range(4 if rank == 0 else 2):
                mean_squared_error(ddp, MLP.batch(step, rank)).backward()
                optimizer.step()
    assert steps == ([0, 1, 2, 3, 4, 5, 6, 7] if rank == 0 else [0, 1, 4, 5])


@on_ranks(2)
def test_reports_are_the_norms_by_hand(rank: int, world_size: int) -> None:
    for scenario in (_norms, _sharded, _joined):
        scenario()


def test_what_is_no_function_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="a function of a step and a dictionary of norms, got int"):
        Log(3)  # type: ignore[arg-type]
