"""Parameter groups, groups added later, and parameters that another optimizer has."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from harness import run_ranks, wrap
from harness.models import MLP, UNUSED_ON_SOME_RANKS, mean_squared_error
from overlap import ConfigurationError, ZeroRedundancyOptimizer, ZeroStep, chain


def _some_parameters_are_anothers(rank: int, world_size: int) -> None:
    """Parameters of the model that zero does not have are averaged, and another optimizer steps them."""

    def halves(ddp: nn.Module) -> tuple[list[Any], list[Any]]:
        parameters = list(ddp.parameters())
        return parameters[:5], parameters[5:]

    plain = wrap(MLP.model(), **MLP.ddp_options())
    first, second = halves(plain)
    references = [torch.optim.SGD(first, lr=0.1), torch.optim.AdamW(second, lr=0.01)]
    ddp = wrap(MLP.model(), **MLP.ddp_options())
    first, second = halves(ddp)
    other = torch.optim.SGD(first, lr=0.1)
    zero = ZeroRedundancyOptimizer(second, torch.optim.AdamW, lr=0.01, overlap_with_ddp=True)
    chain(ZeroStep(zero)).register(ddp)
    for step in range(5):
        plain.zero_grad()
        mean_squared_error(plain, MLP.batch(step, rank)).backward()
        for reference in references:
            reference.step()
        other.zero_grad()
        mean_squared_error(ddp, MLP.batch(step, rank)).backward()
        zero.step()
        other.step()
        for ours, theirs in zip(ddp.parameters(), plain.parameters(), strict=True):
            assert torch.equal(ours, theirs), step


def test_parameters_that_zero_does_not_have_are_averaged_for_another_optimizer() -> None:
    run_ranks(_some_parameters_are_anothers, 2)


def _added_late(rank: int, world_size: int) -> None:
    plain = wrap(UNUSED_ON_SOME_RANKS.model(), **UNUSED_ON_SOME_RANKS.ddp_options())
    reference = torch.optim.AdamW(plain.module.trunk.parameters(), lr=0.01)
    ddp = wrap(UNUSED_ON_SOME_RANKS.model(), **UNUSED_ON_SOME_RANKS.ddp_options())
    zero = ZeroRedundancyOptimizer(ddp.module.trunk.parameters(), torch.optim.AdamW, lr=0.01, overlap_with_ddp=True)
    chain(ZeroStep(zero)).register(ddp)
    for step in range(6):
        if step == 2:
            reference.add_param_group({"params": list(plain.module.branch.parameters()), "lr": 0.1})
            zero.add_param_group({"params": list(ddp.module.branch.parameters()), "lr": 0.1})
        plain.zero_grad()
        mean_squared_error(plain, UNUSED_ON_SOME_RANKS.batch(step, rank)).backward()
        reference.step()
        ddp.module.branch.zero_grad()
        mean_squared_error(ddp, UNUSED_ON_SOME_RANKS.batch(step, rank)).backward()
        zero.step()
        for ours, theirs in zip(ddp.parameters(), plain.parameters(), strict=True):
            assert torch.equal(ours, theirs), step


def test_a_group_added_later_is_updated_from_the_next_backward_on() -> None:
    run_ranks(_added_late, 2)


def _taken_out_by_hand(rank: int, world_size: int, options: dict[str, Any] | None) -> None:
    ddp = wrap(MLP.model(), **MLP.ddp_options())
    zero = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.AdamW, lr=0.01, overlap_with_ddp=options is not None)
    if options is not None:
        chain(ZeroStep(zero, **options)).register(ddp)
    zero.param_groups[0]["params"].pop()

    def update() -> None:
        mean_squared_error(ddp, MLP.batch(0, rank)).backward()
        zero.step()

    with pytest.raises(ConfigurationError, match=r"by hand.*zero\.add_param_group.*requires_grad_\(False\)"):
        update()


@pytest.mark.parametrize("options", [None, {}, {"deferred": True}], ids=str)
def test_parameters_taken_out_of_a_group_by_hand_are_refused(options: dict[str, Any] | None) -> None:
    run_ranks(_taken_out_by_hand, 2, options)
