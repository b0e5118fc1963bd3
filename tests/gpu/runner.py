"""Runs checks on two ranks. (Not in `__main__`, whose functions no other process can load.)"""

import tempfile
import warnings
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from harness import RankDied, RankFailed, RankHung, WorldError, run_ranks

from .checks import CHECKS

_WORLD_S = 90.0
_OUTCOMES: dict[type[WorldError], str] = {RankFailed: "failed", RankDied: "died", RankHung: "hung"}


@dataclass(frozen=True, kw_only=True)
class Result:
    """What came of a check: ``passed``, ``failed``, ``died``, ``hung`` or ``skipped``; ``detail`` says why."""

    name: str
    topic: str
    outcome: str
    detail: str = ""


def run_subject(subject: str, device: str) -> list[Result]:
    """Runs the checks of one subject in one world of two ranks; a failure costs those behind it."""
    _, topics = CHECKS[subject]
    results: dict[str, Result] = {}

    def add(topic: str, outcome: str, detail: str = "") -> None:
        results[topic] = Result(name=f"{topic}: {subject}", topic=topic, outcome=outcome, detail=detail[-4000:])

    for topic, check in topics.items():
        if check.needs_gpu and device == "cpu":
            add(topic, "skipped", "it needs a GPU")
    if len(results) < len(topics):
        with tempfile.TemporaryDirectory(prefix="overlap-checks-") as folder:
            passed = Path(folder) / "passed"
            backend = "nccl" if device == "cuda" else "gloo"
            error: WorldError | None = None
            try:
                run_ranks(_run, 2, subject, device, passed, backend=backend, timeout_s=_WORLD_S, group_timeout_s=30)
            except WorldError as failure:
                error = failure
            done = passed.read_text().splitlines() if passed.exists() else []
        for topic in topics:
            if topic in done:
                add(topic, "passed")
            elif topic not in results and error is not None:
                add(topic, _OUTCOMES[type(error)], str(error))
                break
    for topic in topics:
        if topic not in results:
            add(topic, "skipped", "another check of this subject failed")
    return [results[topic] for topic in topics]


def _run(rank: int, world_size: int, subject: str, device_type: str, passed: Path) -> None:
    warnings.simplefilter("default")  # Of an unknown installation.
    device = torch.device("cuda", torch.cuda.current_device()) if device_type == "cuda" else torch.device("cpu")
    scenario, topics = CHECKS[subject]
    for topic, check in topics.items():
        if check.needs_gpu and device_type == "cpu":
            continue
        check.run(scenario, rank, device)
        if device_type == "cuda":
            torch.cuda.synchronize(device)
        dist.barrier()  # It has passed where it has on both ranks.
        if rank == 0:
            with passed.open("a") as file:
                file.write(f"{topic}\n")


def summary(results: list[Result]) -> str:
    """A line for each topic, and one for each check that did not pass."""
    lines = []
    for topic in dict.fromkeys(result.topic for result in results):
        counts = Counter(result.outcome for result in results if result.topic == topic)
        lines.append(f"{topic}: " + ", ".join(f"{count} {outcome}" for outcome, count in counts.items()))
    bad = [result for result in results if result.outcome not in ("passed", "skipped")]
    return "\n".join([*lines, *(f"\n{result.name} {result.outcome}: {result.detail}" for result in bad)])
