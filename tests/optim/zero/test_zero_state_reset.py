"""A reset of the optimizer's state between steps, by its `state`, is that of plain DDP."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch

from harness import run_ranks, wrap
from harness.models import MLP, mean_squared_error
from overlap import ConfigurationError, TrainingLoopError, ZeroRedundancyOptimizer, ZeroStep, chain


def _assign(optimizer: Any) -> None:
    optimizer.state = defaultdict(dict)


def _set_each(optimizer: Any) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            optimizer.state[parameter] = {}


def _delete_each(optimizer: Any) -> None:
    for parameter in list(optimizer.state):
        del optimizer.state[parameter]


def _pop_the_first(optimizer: Any) -> None:
    optimizer.state.pop(optimizer.param_groups[0]["params"][0])


RESETS: dict[str, Callable[[Any], Any]] = {
    "clear": lambda optimizer: optimizer.state.clear(),
    "assign": _assign,
    "set each": _set_each,
    "delete each": _delete_each,
    "pop one": _pop_the_first,
}
FORMS: dict[str, dict[str, Any] | None] = {
    "interleaved": {},
    "deferred": {"deferred": True},
    "gathered in forward": {"gather": "forward"},
    "without a stage": None,
}


def _reset(rank: int, world_size: int) -> None:
    cases = [(form, "clear", "element") for form in FORMS] + [("interleaved", "assign", "element")]
    cases += [("interleaved", reset, "parameter") for reset in RESETS]
    cases += [("interleaved", reset, "element") for reset in ("set each", "delete each", "pop one")]
    for form, reset, partition in cases:
        plain, ddp = wrap(MLP.model()), wrap(MLP.model())
        reference = torch.optim.AdamW(plain.parameters(), lr=0.01)
        zero = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.AdamW, lr=0.01, partition=partition)
        options = FORMS[form]
        if options is not None:
            chain(ZeroStep(zero, **options)).register(ddp)
        for step, batch in enumerate(MLP.batches(rank, steps=5)):
            for model, optimizer in ((plain, reference), (ddp, zero)):
                optimizer.zero_grad()
                mean_squared_error(model, batch).backward()
                optimizer.step()
                if step == 2:
                    RESETS[reset](optimizer)
        zero.wait()
        for ours, theirs in zip(ddp.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs, msg=lambda text, case=(form, reset, partition): f"{case}: {text}")
        zero.consolidate_state_dict(to=None)
        steps, expected = ({k: float(v["step"]) for k, v in o.state_dict()["state"].items()} for o in (zero, reference))
        assert steps == expected


def test_a_reset_of_zeros_state_is_that_of_plain_ddp() -> None:
    run_ranks(_reset, 2)


def _refused(rank: int, world_size: int) -> None:
    ddp = wrap(MLP.model())
    zero = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.AdamW, lr=0.01)
    chain(ZeroStep(zero)).register(ddp)
    mean_squared_error(ddp, MLP.batch(0, rank)).backward()
    with pytest.raises(TrainingLoopError, match="the update was made in backward"):
        zero.state.clear()
    zero.step()
    parameter = next(ddp.parameters())
    with pytest.raises(ConfigurationError, match=r"zero\.load_state_dict"):
        zero.state[parameter] = {"exp_avg": torch.zeros_like(parameter)}


def test_a_reset_of_zeros_state_that_would_be_another_than_plain_ddps_is_refused() -> None:
    run_ranks(_refused, 2)
