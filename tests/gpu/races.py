"""With streams made late, every chain computes what it computes where there can be no race, in every bit."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from overlap.hooks.collectives import Collective

from .chains import CHAINS
from .check import Check
from .lateness import IN_ORDER, LATE_STAGES, WHERE, Lateness
from .training import train

__all__ = ["race_checks"]


@dataclass(frozen=True)
class NoRace:
    """Exact, since the ranks are two: a sum of two numbers does not depend on the order."""

    chain: str

    def __call__(self, rank: int, world_size: int, device: torch.device) -> dict[str, Any]:
        chain = CHAINS[self.chain]
        figures: dict[str, Any] = {}
        start = time.perf_counter()
        expected = train(chain, rank, device, lateness=Lateness(device, IN_ORDER))
        figures[f"{IN_ORDER}_s"] = time.perf_counter() - start
        assert bool(expected[1].isfinite().all())
        for where in WHERE:
            lateness = Lateness(device, where)
            start = time.perf_counter()
            losses, parameters = train(chain, rank, device, lateness=lateness)
            figures[f"{where}_s"] = time.perf_counter() - start
            assert lateness.delays > 0, f"{where}: nothing was made late, so nothing was tested"
            assert_equal(losses, expected[0], f"{self.chain}, {where}: losses")
            assert_equal(parameters, expected[1], f"{self.chain}, {where}: parameters")
        return figures


def assert_equal(ours: torch.Tensor, theirs: torch.Tensor, what: str) -> None:
    if not torch.equal(ours, theirs):
        differ = int((ours != theirs).sum())
        raise AssertionError(f"{what}: {differ} of {ours.numel()} differ, by up to {(ours - theirs).abs().max():g}")


def _a_missing_wait_is_found(rank: int, world_size: int, device: torch.device) -> None:
    """The same check must fail where nothing waits for collectives, or it would prove nothing."""

    def forget(self: Collective, wait: Any) -> None:
        return finish(self, lambda work: None)

    finish = Collective.finish
    chain = CHAINS["AllReduce, Step"]
    expected = train(chain, rank, device, lateness=Lateness(device, IN_ORDER))
    with patch.object(Collective, "finish", forget):
        wrong = train(chain, rank, device, lateness=Lateness(device, LATE_STAGES))
    same = torch.tensor([float(torch.equal(wrong[1], expected[1]))], device=device)
    dist.all_reduce(same, op=dist.ReduceOp.MIN)
    assert same.item() == 0, "a chain that does not wait for its collectives computed the right numbers"


def race_checks() -> list[Check]:
    control = Check(
        name="races: a missing wait is found", topic="races", run=_a_missing_wait_is_found, devices=("cuda",)
    )
    return [control, *(Check(name=f"races: {name}", topic="races", run=NoRace(name)) for name in CHAINS)]
