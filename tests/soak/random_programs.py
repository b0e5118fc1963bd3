"""Plays random programs in worlds of two ranks; a rank that hangs or dies costs the others of its world a new one."""

from __future__ import annotations

import datetime
import pickle
import tempfile
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from harness import WorldError, run_ranks

from .playing import play
from .programs import draw
from .sides import Outcome

__all__ = ["faults", "play_programs", "told"]

_RANKS = 2
_AT_ONCE = 40
_WAIT_FOR_PEER_S = 10.0
_PROGRAM_S = 5.0


def play_programs(seeds: Iterable[int]) -> dict[int, Outcome]:
    """What became of the program of each seed, on both ranks."""
    found: dict[int, Outcome] = {}
    seeds = list(seeds)
    while missing := [seed for seed in seeds if seed not in found][:_AT_ONCE]:
        ranks, error = _world(missing)
        for seed in missing:
            said = [rank[seed] for rank in ranks if seed in rank]
            if len(said) < _RANKS:
                found[seed] = Outcome("hangs or dies", "; ".join(map(_short, said)), error)
                break
            found[seed] = _agreed(said)
            if any(outcome.kind == "fails" for outcome in said):
                break  # Collectives may have been left behind.
    return found


def _agreed(said: Sequence[Outcome]) -> Outcome:
    if len({outcome.kind for outcome in said}) == 1:
        return said[0]
    return Outcome("ranks disagree", "; ".join(map(_short, said)), "\n".join(outcome.details for outcome in said))


def _short(outcome: Outcome) -> str:
    return f"{outcome.kind}: {outcome.words}"


def _world(seeds: Sequence[int]) -> tuple[list[dict[int, Outcome]], str]:
    """What each rank says of the programs that it has been through, and why the world ended early."""
    error = ""
    with tempfile.TemporaryDirectory(prefix="programs-") as folder:
        try:
            run_ranks(
                _play_all,
                _RANKS,
                seeds,
                Path(folder),
                timeout_s=30 + _PROGRAM_S * len(seeds),
                group_timeout_s=_WAIT_FOR_PEER_S,
            )
        except WorldError as failure:
            error = str(failure)
        files = [Path(folder) / f"rank{rank}" for rank in range(_RANKS)]
        return [pickle.loads(file.read_bytes()) if file.exists() else {} for file in files], error


def _play_all(rank: int, ranks: int, seeds: Sequence[int], folder: Path) -> None:
    torch.set_num_threads(1)
    # Of its own, so that collectives that a program leaves behind in the default group do not confuse it.
    control = dist.new_group(timeout=datetime.timedelta(seconds=_WAIT_FOR_PEER_S))
    found: dict[int, Outcome] = {}
    for seed in seeds:
        found[seed] = outcome = play(draw(seed))
        (folder / f"rank{rank}").write_bytes(pickle.dumps(found))
        dist.barrier(control)
        if outcome.kind == "fails":
            return


def faults(outcomes: Mapping[int, Outcome]) -> list[str]:
    """Each program of which a promise does not hold, with what became of it."""
    return [
        f"{draw(seed)}\n# python -m soak.fuzz --program {seed}: {_short(outcome)}\n{outcome.details}"
        for seed, outcome in outcomes.items()
        if outcome.is_fault
    ]


def told(outcomes: Mapping[int, Outcome]) -> str:
    """How many of each kind of promise held, and why how many were refused."""
    held = Counter(draw(seed).promise.kind for seed, outcome in outcomes.items() if outcome.kind == "holds")
    kinds = Counter(outcome.kind for outcome in outcomes.values())
    refused = Counter(outcome.words[:70] for outcome in outcomes.values() if outcome.kind in ("refused", "not plain"))
    lines = [f"{len(outcomes)} programs: {dict(kinds)}; held: {dict(held)}"]
    return "\n".join([*lines, *(f"    {count:4d} {words}" for words, count in refused.most_common())])
