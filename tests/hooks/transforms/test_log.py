"""`Log` hands out the norm of each gradient."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

from harness import run_ranks, wrap
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


def _norms(rank: int, world_size: int) -> None:
    for norm_type in (2.0, float("inf")):
        reports: dict[str, list[tuple[int, dict[str, torch.Tensor]]]] = {"local": [], "mean": [], "new": []}

        def log(name: str, norm_type: float = norm_type, reports: Any = reports, **options: Any) -> Log:
            return Log(lambda *report: reports[name].append(report), norm_type=norm_type, **options)

        ddp, by = (wrap(MLP.model(), **MLP.ddp_options()) for _ in range(2))
        optimizer = OverlappedOptimizer(ADAMW(ddp.parameters()))
        chain(log("local"), AllReduce(), log("mean"), Step(optimizer), log("new", every=2)).register(ddp)
        plain = ADAMW(by.parameters())
        for step in range(4):
            batch = MLP.batch(step, rank)
            mean_squared_error(ddp, batch).backward()
            optimizer.step()
            plain.zero_grad()
            with by.no_sync():
                mean_squared_error(by, batch).backward()
            assert _is(reports["local"][-1], step, _by_hand(by, "grad", norm_type))
            plain.zero_grad()
            mean_squared_error(by, batch).backward()
            assert _is(reports["mean"][-1], step, _by_hand(by, "grad", norm_type))
            plain.step()
            if step % 2 == 0:
                assert _is(reports["new"][-1], step, _by_hand(by, "data", norm_type))
        assert [step for step, _ in reports["new"]] == [0, 2]


def _by_hand(ddp: Any, what: str, norm_type: float) -> dict[str, torch.Tensor]:
    return {
        name: torch.linalg.vector_norm(getattr(parameter, what), norm_type)
        for name, parameter in ddp.module.named_parameters()
    }


def _is(report: tuple[int, dict[str, torch.Tensor]], step: int, norms: dict[str, torch.Tensor]) -> bool:
    names_agree = report[0] == step and list(report[1]) == list(norms)
    return names_agree and all(norm.shape == () and torch.equal(norm, norms[name]) for name, norm in report[1].items())


def test_norms_of_local_gradients_of_means_and_of_parameters() -> None:
    run_ranks(_norms, 2)


def _sharded(rank: int, world_size: int) -> None:
    for norm_type in (2.0, 3.0, float("inf")):
        reports: list[tuple[int, dict[str, torch.Tensor]]] = []
        ddp, by = (wrap(MLP.model(), **MLP.ddp_options()) for _ in range(2))
        zero = ZeroRedundancyOptimizer(
            [p for name, p in ddp.named_parameters() if "0.bias" not in name],
            torch.optim.AdamW,
            overlap_with_ddp=True,
            **ADAMW_OPTIONS,
        )
        log = Log(lambda *report, reports=reports: reports.append(report), norm_type=norm_type)
        chain(log, ZeroStep(zero)).register(ddp)
        for step in range(3):
            batch = MLP.batch(step, rank)
            by.module.load_state_dict(ddp.module.state_dict())
            by.zero_grad()
            ddp.module[0].bias.grad = None  # The user's own: no optimizer has it.
            for model in (ddp, by):
                mean_squared_error(model, batch).backward()
            zero.step()
            for name, norm in _by_hand(by, "grad", norm_type).items():
                torch.testing.assert_close(reports[step][1][name], norm, rtol=1e-5, atol=0)


def test_norms_of_gradients_of_which_each_rank_has_a_part() -> None:
    run_ranks(_sharded, 2)


def _joined(rank: int, world_size: int) -> None:
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


def test_a_rank_without_inputs_reports_nothing_and_counts_with_the_others() -> None:
    run_ranks(_joined, 2)


def _to_the_logger(rank: int, world_size: int) -> None:
    lines: list[str] = []

    class Kept(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    logger = logging.getLogger("overlap.hooks.transforms.log")
    logger.addHandler(Kept())
    ddp = wrap(MLP.model(), **MLP.ddp_options())
    chain(AllReduce(), Log()).register(ddp)
    mean_squared_error(ddp, MLP.batch(0, rank)).backward()
    assert not lines, "nothing is written below the level of the logger"
    logger.setLevel(logging.INFO)
    mean_squared_error(ddp, MLP.batch(1, rank)).backward()
    assert len(lines) == 1 and lines[0].startswith("norms of mean gradients, step 1: 0.weight ")


def test_the_default_writes_to_the_logger() -> None:
    run_ranks(_to_the_logger, 2)


def test_wrong_arguments() -> None:
    with pytest.raises(ConfigurationError, match="a function of a step and a dictionary of norms, got int"):
        Log(3)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="every must be a whole number of at least 1, got 0"):
        Log(every=0)
    with pytest.raises(ConfigurationError, match="norm_type must be positive"):
        Log(norm_type=-1)
