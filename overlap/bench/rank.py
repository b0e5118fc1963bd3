"""One rank of a benchmark: it tries every variant in a child, then lets those that ran race, and writes down both.

This process itself touches neither a process group nor a GPU, so nothing that a variant does can end the run.
"""

from __future__ import annotations

import importlib
import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import IO, Any

import tqdm

from overlap._torchvision import load_torchvision
from overlap.bench.job import Outcome, common_cause, die_with_parent, run_job
from overlap.bench.race import journal_path, plan_races, race
from overlap.bench.registry import registry, with_baselines
from overlap.bench.settings import Plan
from overlap.bench.trial import PROFILE, profile_step, try_variant
from overlap.bench.world import Meeting, timeout_s

RESULTS = "results"
# Kept back for leaving races and for drawing.
_CLOSING_S = 10.0
_LEAST_TRIAL_S = 15.0
_TOO_LATE = "not timed: the time limit came first"


@dataclass(kw_only=True)
class Findings:
    """What all ranks together found out; lists are by rank."""

    ground: list[dict[str, Any]] = field(default_factory=list)
    trials: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)
    # Samples of each race by variant: of each block, the time of its slowest rank.
    races: list[dict[str, list[float]]] = field(default_factory=list)


def run_rank(plan_path: str) -> int:
    """What `python -m overlap bench` starts once per rank; rank 0 leaves the findings in the plan's folder."""
    die_with_parent()
    plan = Plan.load(plan_path)
    # Its monitor is a thread, and a process that forks should have none.
    tqdm.tqdm.monitor_interval = 0
    _preload(plan)
    rank = int(os.environ["RANK"])
    findings = _Supervisor(plan, rank).run()
    if rank == 0:
        Meeting(folder=Path(plan.folder), rank=0, ranks=1).exchange(RESULTS, asdict(findings), timeout_s=1)
    return 0


class _Supervisor:
    def __init__(self, plan: Plan, rank: int) -> None:
        self._plan = plan
        self._rank = rank
        self._meeting = Meeting(folder=Path(plan.folder), rank=rank, ranks=plan.processes)
        self._limit_s = 2 * timeout_s(plan)
        self._tries = 0
        # Of the trials that ended well so far.
        self._longest_trial_s = 0.0

    def run(self) -> Findings:
        findings = Findings()
        values, failed = self._together(PROFILE, self._profile, self._limit_s)
        if failed is not None:
            raise RuntimeError(f"the model cannot be profiled: {failed.reason}")
        findings.ground = values
        bar = tqdm.tqdm(self._plan.variants, unit="variant", file=sys.stderr, disable=self._rank != 0, leave=False)
        for name in bar:
            bar.set_description(f"trying {name}")
            start = time.monotonic()
            values, failed = self._together(name, partial(self._try, name), self._trial_limit_s(name))
            if failed is None:
                findings.trials[name] = values
                self._longest_trial_s = max(self._longest_trial_s, time.monotonic() - start)
            else:
                findings.failures[name] = failed.reason
        races = self._races(findings)
        for number, names in enumerate(races):
            self._race(findings, names, share=len(names) / sum(map(len, races[number:])))
        return findings

    def _races(self, findings: Findings) -> list[tuple[str, ...]]:
        peaks = {name: max(int(one["peak_memory_bytes"]) for one in ranks) for name, ranks in findings.trials.items()}
        limit_bytes = min(int(one["memory_limit_bytes"]) for one in findings.ground)
        baselines = partial(with_baselines, settings=self._plan.settings)
        return plan_races(peaks, limit_bytes, baselines, [name for name in peaks if registry()[name].apart])

    def _race(self, findings: Findings, names: tuple[str, ...], *, share: float) -> None:
        """Races `names` for this share of the time left; one that takes the race down is left out of the next try."""
        apart = any(registry()[name].apart for name in names)
        while names:
            self._tries += 1
            label = f"race{self._tries}"
            left_s = self._plan.deadline - _CLOSING_S - time.time()
            # Each rank has a clock reading of its own: rank 0's holds for all.
            ((until, late), *_) = self._meeting.exchange(
                f"{label}-until", [time.time() + max(0.0, left_s) * share, left_s < 0], timeout_s=self._limit_s
            )
            if apart and late:
                findings.failures |= {name: _TOO_LATE for name in names if registry()[name].apart}
                return
            job = partial(race, self._plan, self._rank, label, names, until)
            values, failed = self._together(label, job, max(0.0, left_s) + self._limit_s)
            if failed is None:
                findings.races.append(_slowest(values))
                return
            culprits = {failed.journal}.intersection(names) or set(names)
            findings.failures |= dict.fromkeys(culprits, f"{failed.reason} (while timed)")
            # Without the one that raced apart, its baselines have nothing left to show.
            names = () if apart else tuple(name for name in names if name not in culprits)

    def _together(self, label: str, job: Callable[[IO[str]], Any], limit_s: float) -> tuple[list[Any], _Failed | None]:
        """Runs `job` in a child of every rank; returns what each returned, or the failure that came first."""
        outcome = run_job(job, Path(self._plan.folder), f"{label}.{self._rank}", limit_s=limit_s)
        journal = journal_path(self._plan, self._rank)
        words = journal.read_text() if journal.exists() else ""
        # A rank may see its end at once, and another only when its collective times out.
        said = self._meeting.exchange(f"{label}-outcome", [asdict(outcome), words], timeout_s=limit_s + 30)
        outcomes = [Outcome(**one) for one, _ in said]
        cause = common_cause(outcomes)
        if cause is None:
            return [one.value for one in outcomes], None
        return [], _Failed(outcomes[cause].failure or "", said[cause][1])

    def _trial_limit_s(self, name: str) -> float:
        """Far more than the variants before it took: one that hangs should not use up the others' time."""
        if not self._longest_trial_s:
            return self._limit_s
        # A variant with long blocks takes more steps in its trial.
        return _LEAST_TRIAL_S + 3 * self._longest_trial_s * max(1.0, registry()[name].block_steps / 4)

    def _profile(self, terminal: IO[str]) -> Any:
        return profile_step(self._plan, self._rank)

    def _try(self, name: str, terminal: IO[str]) -> Any:
        return try_variant(self._plan, self._rank, name)


@dataclass(frozen=True)
class _Failed:
    reason: str
    # The variant that was running on the rank that failed first.
    journal: str


def _slowest(by_rank: list[dict[str, list[float]]]) -> dict[str, list[float]]:
    """A step ends when its last rank does: of each sample, the longest."""
    first = by_rank[0]
    return {name: [max(times) for times in zip(*(one[name] for one in by_rank), strict=True)] for name in first}


def _preload(plan: Plan) -> None:
    """Imports here what every child would otherwise import for itself, seconds each."""
    wanted = [
        "torch._dynamo",
        "torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook",
        "torch.distributed.algorithms.model_averaging.averagers",
        "torch.distributed.optim",
        "overlap.bench.variants",
        "overlap.optim",
    ]
    for name in wanted:
        # What cannot be imported fails again in the variant that needs it, and is told there.
        with suppress(ImportError):
            importlib.import_module(name)
    if plan.settings.model.startswith("resnet"):
        load_torchvision()
