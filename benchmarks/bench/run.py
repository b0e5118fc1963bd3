"""A run: every variant is tried in processes of its own, then those that ran are timed together."""

from __future__ import annotations

import sys
import time
from argparse import Namespace

from benchmarks.bench.report import Report, make_report
from benchmarks.bench.timing import Measurements, profile_model, time_variants, try_variant
from benchmarks.bench.variants import choose, registry, with_baselines
from benchmarks.ranks import Network, RankError, open_network, run_on_ranks

# Kept back for ending the last timing and for drawing.
_CLOSING_S = 10.0
_LEAST_TRIAL_S = 15.0
# Of the memory that is free when the run begins.
_USABLE = 0.7


def bench(settings: Namespace) -> Report:
    """Runs the benchmark of the settings."""
    until = time.time() + settings.time_limit_s - _CLOSING_S
    variants = choose(settings)
    with open_network(settings.ranks, bandwidth=settings.bandwidth, device=settings.device) as network:
        return make_report(settings, network, variants, _measure(settings, network, variants, until))


def _measure(settings: Namespace, network: Network, variants: tuple[str, ...], until: float) -> Measurements:
    longest_s = 2 * network.timeout_s
    found = Measurements(profiles=run_on_ranks(network, profile_model, settings, limit_s=longest_s))
    longest_trial_s = 0.0
    for number, name in enumerate(variants, 1):
        _show(f"trying {name}, {number} of {len(variants)}")
        start = time.monotonic()
        limit_s = longest_s
        if longest_trial_s:
            # Far more than the others took, one with long blocks included: one that hangs should not use up the time.
            blocks = max(1.0, registry()[name].block_steps / 4)
            limit_s = min(longest_s, _LEAST_TRIAL_S + 3 * longest_trial_s * blocks)
        try:
            found.trials[name] = run_on_ranks(network, try_variant, settings, name, limit_s=limit_s)
            longest_trial_s = max(longest_trial_s, time.monotonic() - start)
        except RankError as error:
            found.failures[name] = str(error)
    groups = _timing_groups(found, settings)
    for number, names in enumerate(groups):
        share = len(names) / sum(map(len, groups[number:]))
        _time(found, settings, network, names, time.time() + max(0.0, until - time.time()) * share)
    _show("")
    return found


def _time(found: Measurements, settings: Namespace, network: Network, names: tuple[str, ...], until: float) -> None:
    """Times variants together; one that ends the processes is left out of a new try."""
    alone = [name for name in names if registry()[name].timed_alone]
    while names:
        if alone and time.time() >= until:
            found.failures |= dict.fromkeys(alone, "not timed: the time limit came first")
            return
        left_s = max(0.0, until - time.time())
        _show(f"timing {len(names)} variants, about {left_s:.0f} s")
        limit_s = left_s + 2 * network.timeout_s
        try:
            by_rank = run_on_ranks(network, time_variants, settings, names, until, limit_s=limit_s)
        except RankError as error:
            culprits = {error.during}.intersection(names) or set(names)
            found.failures |= dict.fromkeys(culprits, f"{error} (while timed)")
            # Without the one that was to be timed alone, its baselines have nothing left to show.
            names = () if alone else tuple(name for name in names if name not in culprits)
        else:
            # A step ends when its last rank does: of each block, the longest time.
            blocks = {name: zip(*(one[name] for one in by_rank), strict=True) for name in names}
            found.timings.append({name: list(map(max, times)) for name, times in blocks.items()})
            return


def _timing_groups(found: Measurements, settings: Namespace) -> list[tuple[str, ...]]:
    """Splits the variants into as few groups as memory allows; each has the baselines that it needs.

    A variant that is `timed_alone` has a group of its own, before the others, which then get the time that it saves by
    crashing.
    """
    # The peak of each by itself, which is more than it keeps between its turns.
    memory_bytes = {name: max(one.peak_memory_bytes for one in ranks) for name, ranks in found.trials.items()}
    limit_bytes = min(one.memory_limit_bytes for one in found.profiles)

    def group_of(*names: str) -> tuple[str, ...]:
        half = [registry()[name].baseline_16bit_name(settings) for name in names]
        return tuple(name for name in with_baselines([*names, *half], settings) if name in memory_bytes)

    alone = [name for name in memory_bytes if registry()[name].timed_alone]
    groups: list[tuple[str, ...]] = []
    current: tuple[str, ...] = ()
    for name in (name for name in memory_bytes if name not in alone):
        grown = group_of(*current, name)
        if current and sum(memory_bytes[each] for each in grown) > limit_bytes * _USABLE:
            groups.append(current)
            grown = group_of(name)
        current = grown
    if current:
        groups.append(current)
    return [group_of(name) for name in alone] + groups


def _show(text: str) -> None:
    """A line on a terminal, in place of the one before."""
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)
