"""Random schedules, chains, programs and options. `python -m soak.fuzz --schedules 10000` plays more of each."""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist

from harness import run_ranks, wrap
from harness.models import MLP, mean_squared_error
from overlap import Bucket, Stage, chain
from overlap.hooks import AllReduce, Role, all_reduce
from overlap.hooks.engine.wavefront import Wavefront

from .options import try_options
from .random_programs import faults, play_programs, told


class _Scheduled:
    """A bucket that issues its collectives; `|` waits for the whole pass, `!` fails."""

    def __init__(self, name: int, plan: str, log: list[tuple[int, str]]) -> None:
        self.name, self.is_done = name, False
        self._left, self._log, self._current = list(plan), log, ""

    @property
    def awaits_whole_pass(self) -> bool:
        return self._current == "|"

    def advance(self) -> None:
        assert not self.is_done, "a bucket that is done is not advanced"
        self._current = self._left.pop(0) if self._left else "."
        self._log.append((self.name, self._current))
        if self._current == "!":
            raise RuntimeError(f"bucket {self.name} fails")
        self.is_done = self._current == "."


def play_schedules(count: int, seed: int = 0) -> None:
    """Plays `count` random passes and checks the order's invariants; raises AssertionError with the schedule."""
    rng = random.Random(seed)
    for _ in range(count):
        plans = ["".join(rng.choices("123||", k=rng.randrange(6))) for _ in range(rng.randint(1, 10))]
        failing = rng.randrange(len(plans)) if rng.random() < 0.2 else None
        if failing is not None:
            cut = rng.randint(0, len(plans[failing]))
            plans[failing] = plans[failing][:cut] + "!" + plans[failing][cut:]
        _check_schedule(plans, failing)


def _check_schedule(plans: list[str], failing: int | None) -> None:
    what = f"{plans=}"
    logs = []
    for _ in range(2):  # Two ranks.
        log: list[tuple[int, str]] = []
        wavefront = Wavefront()
        try:
            for name, plan in enumerate(plans):
                wavefront.arrive(_Scheduled(name, plan, log), is_last=name == len(plans) - 1)  # type: ignore[arg-type]
            assert failing is None, f"{what}: the failure was swallowed"
            assert not wavefront.active, f"{what}: {len(wavefront.active)} buckets are not done"
        except RuntimeError:
            assert failing is not None, what
        logs.append(log)
    log = logs[0]
    assert logs[1] == log, what
    for name, plan in enumerate(plans):
        own = [entry for at, entry in log if at == name]
        whole = [*plan, "."]
        assert own == (whole if failing is None else whole[: len(own)]), f"{what}: bucket {name} issued {own}"
    first = [next(i for i, (at, _) in enumerate(log) if at == name) for name in range(len({at for at, _ in log}))]
    assert first == sorted(first), f"{what}: buckets begin in the order in which they come"
    if failing is None:
        _check_releases(log, plans, what)


def _check_releases(log: list[tuple[int, str]], plans: list[str], what: str) -> None:
    """Nothing goes on after its first `|` before every bucket has come and is done or awaits it, too."""
    waits = {name: "|" in plan for name, plan in enumerate(plans)}
    ready = [
        next(i for i, (at, entry) in enumerate(log) if at == name and entry == ("|" if waits[name] else "."))
        for name in waits
    ]
    for name, is_waiting in waits.items():
        if is_waiting:
            released = next(i for i, (at, _) in enumerate(log) if at == name and i > ready[name])
            assert released > max(ready), (
                f"{what}: bucket {name} goes on at {released}, the last is ready at {max(ready)}"
            )


class _Noisy(Stage):
    """Issues a random number of collectives with delays of this rank's own, and writes down their order."""

    role = Role.TRANSFORM

    def __init__(self, seed: int, rank: int, log: list[Any]) -> None:
        self._seed, self._log = seed, log
        self._delays = random.Random(f"{seed}-{rank}")

    async def __call__(self, bucket: Bucket) -> None:
        for place in range(random.Random(f"{self._seed}-{bucket.index}").randrange(4)):
            time.sleep(self._delays.choice((0, 0, 0, 0.002)))
            mark = torch.full((3,), float(1000 * self._seed + 10 * bucket.index + place))
            self._log.append((self._seed, bucket.step, bucket.index, place))
            expected = mark * dist.get_world_size()
            await all_reduce(mark, group=bucket.group)
            assert torch.equal(mark, expected), "a collective met another one"


def _noisy_chains(rank: int, ranks: int, count: int, seed: int) -> list[Any]:
    log: list[Any] = []
    for number in range(seed, seed + count):
        rng = random.Random(number)
        ddp, plain = wrap(MLP.model(), **MLP.ddp_options()), wrap(MLP.model(), **MLP.ddp_options())
        before, after = (
            [_Noisy(10 * number + place, rank, log) for place in range(at, at + rng.randrange(3))] for at in (0, 5)
        )
        chain(*before, AllReduce(), *after).register(ddp)
        for step in range(3):
            for one in (ddp, plain):
                one.zero_grad()
                mean_squared_error(one, MLP.batch(step, rank)).backward()
            for ours, theirs in zip(ddp.parameters(), plain.parameters(), strict=True):
                assert torch.equal(ours.grad, theirs.grad), f"chain {number}, step {step}"
    return log


def play_chains(count: int, seed: int = 0) -> int:
    """Random stages around an all-reduce on two ranks with delays; returns how many collectives were compared."""
    first, second = run_ranks(_noisy_chains, 2, count, seed, timeout_s=60 + count)
    assert first == second, "the ranks issued their collectives in different orders"
    return len(first)


def _main() -> int:
    parser = argparse.ArgumentParser(prog="python -m soak.fuzz", description=__doc__)
    parser.add_argument("--schedules", type=int, default=10_000)
    parser.add_argument("--chains", type=int, default=50)
    parser.add_argument("--programs", type=int, default=1_000)
    parser.add_argument("--program", type=int, action="append", metavar="SEED", help="this one alone; may be repeated")
    parser.add_argument("--options", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    options = parser.parse_args()
    if options.program:
        return _play(options.program)
    print(f"seed {options.seed}", flush=True)
    play_schedules(options.schedules, options.seed)
    print(f"{options.schedules} schedules: the invariants hold", flush=True)
    print(f"{options.chains} chains: {play_chains(options.chains, options.seed)} collectives in one order", flush=True)
    found = try_options(options.options, options.seed)
    print(f"{options.options} random options: {len(found)} errors that are not overlap's")
    print("\n".join(found), flush=True)
    first = 10_000 * options.seed
    return 1 if _play(range(first, first + options.programs)) or found else 0


def _play(seeds: Iterable[int]) -> int:
    outcomes = play_programs(seeds)
    print(told(outcomes))
    print("\n\n".join(found := faults(outcomes)), flush=True)
    return len(found)


if __name__ == "__main__":
    sys.exit(_main())
