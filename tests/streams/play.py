"""Plays scenarios under the detector, and mutants of the library in them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from harness.streams import Report, detecting
from overlap.activations import offload

from .loops import Game
from .model import batch, wrapped
from .mutants import MUTANTS, mutated
from .scenario import Scenario
from .scenarios import SCENARIOS

__all__ = ["Outcome", "find", "outcome_of", "outcomes", "play", "play_without_streams", "verdicts"]

_BATCHES = 24


@dataclass(frozen=True)
class Outcome:
    """What came of one scenario on one rank."""

    operators: int
    faults: int
    waits: int
    """Of the host, in the library; those that are declared."""
    error: str = ""
    """What is wrong, if something is."""


def play(scenario: Scenario, rank: int) -> tuple[Report, list[Tensor]]:
    """What the detector reports of ``scenario``, and the parameters and buffers at its end."""
    ddp = wrapped(scenario.model, **scenario.ddp)
    batches = {step: batch(step, rank) for step in range(_BATCHES)}
    offload._copies_of.cache_clear()  # They have a stream of a device that was.
    with detecting() as detector:
        game = Game(ddp, scenario.build(ddp), rank, build=scenario.build, batches=batches)
        with detector.steps():
            scenario.loop(game)
        game.settle()
        for parameter in ddp.parameters():
            parameter.detach().sum()
    offload._copies_of.cache_clear()
    return detector.report, _state(ddp)


def outcomes(rank: int, world_size: int, names: Sequence[str]) -> dict[str, Outcome]:
    """Play scenarios; for :func:`harness.run_ranks`."""
    found = {}
    for name in names:
        found[name] = outcome_of(SCENARIOS[name], rank)
        dist.barrier()
    return found


def outcome_of(scenario: Scenario, rank: int) -> Outcome:
    """Play one scenario on this rank, and again without streams."""
    report, state = play(scenario, rank)
    waits = sum(sync.is_of_library for sync in report.host_syncs)
    error = ""
    try:
        report.check(host_syncs=scenario.host_syncs)
    except AssertionError as raised:
        error = str(raised)
    if scenario.plain is not None or scenario.as_on_host:
        expected = play_without_streams(scenario, rank, is_plain=scenario.plain is not None)
        if not all(map(torch.equal, state, expected)):
            error += "\nparameters or buffers differ from those without streams"
    return Outcome(report.operators, len(report.faults), waits, error)


def play_without_streams(scenario: Scenario, rank: int, *, is_plain: bool) -> list[Tensor]:
    """The same loop, with plain DDP or with the chain on the host."""
    ddp = wrapped(scenario.model, **scenario.ddp)
    build: Any = scenario.plain if is_plain else scenario.build
    game = Game(ddp, build(ddp), rank, is_plain=is_plain, edit=scenario.edit, build=build)
    scenario.loop(game)
    game.settle()
    return _state(ddp)


def _state(ddp: Any) -> list[Tensor]:
    return [tensor.detach().clone() for tensor in (*ddp.parameters(), *ddp.buffers())]


def find(name: str, rank: int = 0) -> str:
    """As what a mutant's scenario finds it: "race", "use after free" or "the host waits"; "" where it does not."""
    mutant = MUTANTS[name]
    scenario = SCENARIOS[mutant.scenario]
    with mutated(mutant):
        report, _ = play(scenario, rank)
    if report.faults:
        return report.faults[0].kind
    try:
        report.check(host_syncs=scenario.host_syncs)
    except AssertionError:
        return "the host waits"
    return ""


def verdicts(rank: int, world_size: int, names: Sequence[str]) -> dict[str, str]:
    """Find mutants; for :func:`harness.run_ranks`."""
    found = {}
    for name in names:
        found[name] = find(name, rank)
        dist.barrier()
    return found
