"""Plays scenarios under the detector, and mutants of the library in them."""

from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor

from harness import run_ranks
from harness.streams import STREAMS_BACKEND, Report, detecting

from .loops import Game
from .model import wrapped
from .mutants import MUTANTS, mutated
from .scenarios import SCENARIOS, Scenario


@dataclass(frozen=True)
class Outcome:
    """What came of one scenario on one rank."""

    operators: int
    error: str = ""
    """What is wrong, if something is."""


def played() -> dict[str, Outcome]:
    """Every scenario on two ranks: what is wrong on either, and the other figures of rank 0."""
    first, second = run_ranks(_outcomes, 2, backend=STREAMS_BACKEND, timeout_s=170)
    return {name: first[name] if first[name].error or not second[name].error else second[name] for name in SCENARIOS}


def _outcomes(rank: int, world_size: int) -> dict[str, Outcome]:
    found = {}
    for name, scenario in SCENARIOS.items():
        found[name] = _outcome_of(scenario, rank)
        dist.barrier()
    return found


def _outcome_of(scenario: Scenario, rank: int) -> Outcome:
    report, state = _play(scenario, rank)
    error = ""
    try:
        report.check()
    except AssertionError as raised:
        error = str(raised)
    if scenario.plain is not None or scenario.as_on_host:
        ddp = wrapped(scenario.model, **scenario.ddp)
        game = Game.of(ddp, rank)
        game.is_plain = scenario.plain is not None
        game.optimizers = (scenario.plain or scenario.build)(ddp)
        scenario.loop(game)
        game.settle()
        if not all(one.equal(other) for one, other in zip(state, _state(ddp), strict=True)):
            error += "\nparameters or buffers differ from those without streams"
    return Outcome(report.operators, error)


def _play(scenario: Scenario, rank: int) -> tuple[Report, list[Tensor]]:
    """What the detector reports of ``scenario``, and the parameters and buffers at its end."""
    ddp = wrapped(scenario.model, **scenario.ddp)
    game = Game.of(ddp, rank)  # Made before: what it has is the device's.
    with detecting() as detector:
        game.optimizers = scenario.build(ddp)
        with detector.steps():
            scenario.loop(game)
        game.settle()
        for parameter in ddp.parameters():
            parameter.detach().sum()
    return detector.report, _state(ddp)


def _state(ddp: Any) -> list[Tensor]:
    return [tensor.detach().clone() for tensor in (*ddp.parameters(), *ddp.buffers())]


def find(name: str, rank: int = 0) -> str:
    """As what a mutant's scenario finds it: "race", "use after free" or "the host waits"; "" where it does not."""
    mutant = MUTANTS[name]
    scenario = SCENARIOS[mutant.scenario]
    with mutated(mutant):
        report, _ = _play(scenario, rank)
    if report.faults:
        return report.faults[0].kind
    try:
        report.check()
    except AssertionError:
        return "the host waits"
    return ""


def found_in_ranks() -> dict[str, str]:
    """The mutants that take two ranks, and as what one of them finds each."""
    ranks = run_ranks(_verdicts, 2, backend=STREAMS_BACKEND, timeout_s=120)
    return {name: next((one[name] for one in ranks if one[name]), "") for name in ranks[0]}


def _verdicts(rank: int, world_size: int) -> dict[str, str]:
    found = {}
    for name in (name for name, mutant in MUTANTS.items() if mutant.in_ranks):
        found[name] = find(name, rank)
        dist.barrier()
    return found
