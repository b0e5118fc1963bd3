"""One rank of a race: it trains one contestant and seed after the other, each in a child of its own.

This process itself touches no process group, so nothing that a contestant does can end the race.
"""

from __future__ import annotations

import os
import pickle
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO

import tqdm

from overlap.bench.file_exchange import FileExchange
from overlap.bench.job import die_with_parent, first_failure, run_job
from overlap.bench.rank import preload
from overlap.bench.settings import RunConfig
from overlap.bench.world import timeout_s
from overlap.race.loading import load_task
from overlap.race.results import OK, Cell, Course, Results
from overlap.race.settings import Settings
from overlap.race.training import Curve, train

__all__ = ["Plan", "run_rank"]

# A contestant that hangs is noticed by a collective's timeout; these are for one that hangs elsewhere.
_LEAST_LIMIT_S = 600.0
_LONGEST_STEP_S = 30.0


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What every rank is told: the options, the link, what is left to train, and where curves are kept."""

    settings: Settings
    config: RunConfig
    course: Course
    entries: tuple[tuple[str, int], ...]
    results: str

    def save(self) -> Path:
        path = Path(self.config.folder) / "race.pickle"
        path.write_bytes(pickle.dumps(self))
        return path

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        plan: Plan = pickle.loads(Path(path).read_bytes())
        return plan


def run_rank(plan_path: str) -> int:
    """What `python -m overlap race` starts once per rank; rank 0 adds each curve to the results when it is there."""
    die_with_parent()
    plan = Plan.load(plan_path)
    # Its monitor is a thread, and a process that forks should have none.
    tqdm.tqdm.monitor_interval = 0
    preload()
    rank = int(os.environ["RANK"])
    task = load_task(plan.settings)
    folder = Path(plan.config.folder)
    files = FileExchange(folder=folder, rank=rank, ranks=plan.settings.ranks)
    limit_s = _LEAST_LIMIT_S + _LONGEST_STEP_S * plan.settings.steps
    bar = tqdm.tqdm(plan.entries, unit="training", file=sys.stderr, disable=rank != 0, leave=False)
    for name, seed in bar:
        bar.set_description(f"seed {seed}, {name}")
        load = os.getloadavg()[0]
        label = f"{name}-{seed}"

        def job(terminal: IO[str], name: str = name, seed: int = seed) -> Curve:
            return train(task, plan.settings, plan.config, rank, name, seed)

        outcome = run_job(job, folder, f"{label}.{rank}", limit_s=limit_s)
        outcomes = files.exchange(f"{label}-outcome", outcome, timeout_s=limit_s + timeout_s(plan.config))
        if rank == 0:
            cause = first_failure(outcomes)
            status = OK if cause is None else outcomes[cause].failure or "fails"
            curves: list[Curve] = [] if cause is not None else [one.value for one in outcomes]
            Results.add(plan.results, plan.course, _cell(name, seed, curves, status, load))
    return 0


def _cell(name: str, seed: int, curves: list[Curve], status: str, load: float) -> Cell:
    cell = partial(Cell, contestant=name, seed=seed, status=status, load=round(load, 2))
    if not curves:
        return cell()
    return cell(
        seconds=tuple(round(one, 4) for one in curves[0].seconds),
        metric=tuple(None if one is None else round(one, 6) for one in curves[0].metric),
        sent_bytes=round(max(one.sent_bytes for one in curves)),
    )
