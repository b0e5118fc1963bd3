"""One rank of a benchmark: it tries every variant in a child, then times those that ran together.

This process itself touches neither a process group nor a GPU, so nothing that a variant does can end the run.
"""

from __future__ import annotations

import importlib
import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any

import tqdm

from benchmarks.bench.settings import RunConfig
from benchmarks.bench.timing import (
    PROFILE,
    Measurements,
    profile_model,
    running_variant_path,
    time_variants,
    timing_groups,
    try_variant,
)
from benchmarks.bench.variants import registry
from benchmarks.bench.world import FileExchange, die_with_parent, first_failure, run_job, timeout_s

# Kept back for ending the last timing and for drawing.
_CLOSING_S = 10.0
_LEAST_TRIAL_S = 15.0
_TOO_LATE = "not timed: the time limit came first"


def run_rank(config_path: str) -> int:
    """What `python -m benchmarks.bench` starts once per rank; rank 0 leaves the measurements in the run's folder."""
    die_with_parent()
    config = RunConfig.load(config_path)
    # Its monitor is a thread, and a process that forks should have none.
    tqdm.tqdm.monitor_interval = 0
    preload()
    rank = int(os.environ["RANK"])
    measurements = _Supervisor(config, rank).run()
    if rank == 0:
        measurements.save(config.folder)
    return 0


class _Supervisor:
    def __init__(self, config: RunConfig, rank: int) -> None:
        self._config = config
        self._rank = rank
        self._files = FileExchange(folder=Path(config.folder), rank=rank, ranks=config.processes)
        self._limit_s = 2 * timeout_s(config)
        self._timings = 0
        # Of the trials that ended well so far.
        self._longest_trial_s = 0.0

    def run(self) -> Measurements:
        measurements = Measurements()
        profile = _silent(profile_model, self._config, self._rank)
        values, failure = self._on_every_rank(PROFILE, profile, self._limit_s)
        if failure is not None:
            raise RuntimeError(f"the model cannot be profiled: {failure.reason}")
        measurements.profiles = values
        bar = tqdm.tqdm(self._config.variants, unit="variant", file=sys.stderr, disable=self._rank != 0, leave=False)
        for name in bar:
            bar.set_description(f"trying {name}")
            start = time.monotonic()
            job = _silent(try_variant, self._config, self._rank, name)
            values, failure = self._on_every_rank(name, job, self._trial_limit_s(name))
            if failure is None:
                measurements.trials[name] = values
                self._longest_trial_s = max(self._longest_trial_s, time.monotonic() - start)
            else:
                measurements.failures[name] = failure.reason
        groups = self._timing_groups(measurements)
        for number, names in enumerate(groups):
            self._time(measurements, names, share=len(names) / sum(map(len, groups[number:])))
        return measurements

    def _timing_groups(self, measurements: Measurements) -> list[tuple[str, ...]]:
        trials = measurements.trials
        peaks = {name: max(one.peak_memory_bytes for one in ranks) for name, ranks in trials.items()}
        limit_bytes = min(one.memory_limit_bytes for one in measurements.profiles)
        return timing_groups(peaks, limit_bytes, self._config.settings)

    def _time(self, measurements: Measurements, names: tuple[str, ...], *, share: float) -> None:
        """Times `names` together for this share of the time left; one that ends the child is left out of a new try."""
        alone = [name for name in names if registry()[name].timed_alone]
        while names:
            self._timings += 1
            label = f"timing{self._timings}"
            left_s = self._config.deadline - _CLOSING_S - time.time()
            # Ranks read the clock at different times: rank 0's reading holds for all.
            ((until, late), *_) = self._files.exchange(
                f"{label}-until", [time.time() + max(0.0, left_s) * share, left_s < 0], timeout_s=self._limit_s
            )
            if alone and late:
                measurements.failures |= dict.fromkeys(alone, _TOO_LATE)
                return
            job = partial(time_variants, self._config, self._rank, label, names, until)
            values, failure = self._on_every_rank(label, job, max(0.0, left_s) + self._limit_s)
            if failure is None:
                measurements.timings.append(_slowest(values))
                return
            culprits = {failure.variant}.intersection(names) or set(names)
            measurements.failures |= dict.fromkeys(culprits, f"{failure.reason} (while timed)")
            # Without the one that was to be timed alone, its baselines have nothing left to show.
            names = () if alone else tuple(name for name in names if name not in culprits)

    def _on_every_rank(
        self, label: str, job: Callable[[IO[str]], Any], limit_s: float
    ) -> tuple[list[Any], _Failure | None]:
        """Runs `job` in a child of every rank; returns what each returned, or the failure that came first."""
        outcome = run_job(job, Path(self._config.folder), f"{label}.{self._rank}", limit_s=limit_s)
        running = running_variant_path(self._config, self._rank)
        variant = running.read_text() if running.exists() else ""
        # A rank may see its end at once, and another only when its collective times out.
        reported = self._files.exchange(f"{label}-outcome", (outcome, variant), timeout_s=limit_s + 30)
        outcomes = [one for one, _ in reported]
        cause = first_failure(outcomes)
        if cause is None:
            return [one.value for one in outcomes], None
        return [], _Failure(outcomes[cause].failure or "", reported[cause][1])

    def _trial_limit_s(self, name: str) -> float:
        """Far more than the variants before it took: one that hangs should not use up the others' time."""
        if not self._longest_trial_s:
            return self._limit_s
        # A variant with long blocks takes more steps in its trial.
        return _LEAST_TRIAL_S + 3 * self._longest_trial_s * max(1.0, registry()[name].block_steps / 4)


def _silent(job: Callable[..., Any], *args: Any) -> Callable[[IO[str]], Any]:
    """`job(*args)` for `run_job`; it shows nothing on the terminal."""
    return lambda terminal: job(*args)


@dataclass(frozen=True)
class _Failure:
    reason: str
    # The one that was running on the rank that failed first.
    variant: str


def _slowest(by_rank: list[dict[str, list[float]]]) -> dict[str, list[float]]:
    """A step ends when its last rank does: of each sample, the longest."""
    first = by_rank[0]
    return {name: [max(times) for times in zip(*(one[name] for one in by_rank), strict=True)] for name in first}


def preload() -> None:
    """Imports here what every child would otherwise import for itself, seconds each."""
    wanted = [
        "torch._dynamo",
        "torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook",
        "torch.distributed.algorithms.model_averaging.averagers",
        "torch.distributed.optim",
    ]
    for name in wanted:
        # What cannot be imported fails again in the variant that needs it, and is reported there.
        with suppress(ImportError):
            importlib.import_module(name)
