"""The page about streams for the docs; ``python tests/streams`` plays everything and writes it."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path

from harness import run_ranks, start_server
from harness.streams import STREAMS_BACKEND, one_process

from .mutants import MUTANTS
from .play import Outcome, find, outcomes, verdicts
from .scenarios import SCENARIOS, TOPICS

__all__ = ["PAGE", "main", "named"]

PAGE = Path(__file__).resolve().parents[2] / "docs" / "reports" / "streams.md"
_BEGIN = "<!-- below: written by `python tests/streams` -->\n"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python tests/streams", description=__doc__)
    parser.add_argument("--play", metavar="WORD", help="play the scenarios and mutants with this in their names only")
    word = parser.parse_args().play
    start_server()
    played = {
        topic: _played([name for name in found if word is None or word in name]) for topic, found in TOPICS.items()
    }
    found_as = _found([name for name in MUTANTS if word is None or word in name])
    errors = [f"{name}: {one.error}" for found in played.values() for name, one in found.items() if one.error]
    errors += [f"not found as {MUTANTS[name].found_as}: {name}" for name in found_as if not found_as[name]]
    print("\n\n".join(errors) or "all is right")
    if word is None and not errors:
        PAGE.write_text(PAGE.read_text().partition(_BEGIN)[0] + _BEGIN + _tables(played, found_as))
    return 1 if errors else 0


def _played(names: list[str]) -> dict[str, Outcome]:
    """Of both ranks: what is wrong on either, and the other figures of rank 0."""
    if not names:
        return {}
    first, second = run_ranks(outcomes, 2, names, backend=STREAMS_BACKEND, timeout_s=600)
    return {name: first[name] if first[name].error or not second[name].error else second[name] for name in names}


def _found(names: list[str]) -> dict[str, str]:
    with one_process(2):
        found = {name: find(name) for name in names if not MUTANTS[name].in_ranks}
    if in_ranks := [name for name in names if MUTANTS[name].in_ranks]:
        ranks = run_ranks(verdicts, 2, in_ranks, backend=STREAMS_BACKEND, timeout_s=600)
        found |= {name: next((one[name] for one in ranks if one[name]), "") for name in in_ranks}
    return {name: found[name] if found[name] == MUTANTS[name].found_as else "" for name in names}


def _tables(played: Mapping[str, Mapping[str, Outcome]], found_as: Mapping[str, str]) -> str:
    everything = [one for found in played.values() for one in found.values()]
    lines = [
        "",
        "| scenarios | of them | operators and collectives checked | faults | waits of the host |",
        "| --- | --: | --: | --: | --: |",
    ]
    for topic, found in [*played.items(), ("together", {str(place): one for place, one in enumerate(everything)})]:
        numbers = [sum(getattr(one, field) for one in found.values()) for field in ("operators", "faults", "waits")]
        lines.append(f"| {topic} | {len(found)} | {' | '.join(map(str, numbers))} |")
    lines += ["", "Where the host waits, and nowhere else:", "", "| scenario | place |", "| --- | --- |"]
    for name, scenario in SCENARIOS.items():
        lines += [f"| {name} | `{place}` |" for place in scenario.host_syncs]
    lines += [
        "",
        f"## Faults put in on purpose\n\n{len(found_as)} mutants, all found:\n",
        "| fault | where | scenario | found as |",
        "| --- | --- | --- | --- |",
    ]
    for name, kind in found_as.items():
        lines.append(f"| {name} | `{MUTANTS[name].where}` | {MUTANTS[name].scenario} | {kind} |")
    lines += ["", "## All scenarios", ""]
    lines += [f"- {topic}: {'; '.join(found)}" for topic, found in played.items()]
    return "\n".join(lines) + "\n"


def named(page: str) -> tuple[set[str], set[str]]:
    """The scenarios and the mutants that a page names."""
    tables, _, listed = page.partition("## All scenarios\n")
    scenarios = {name for line in listed.splitlines() if ": " in line for name in line.partition(": ")[2].split("; ")}
    faults = tables.partition("## Faults put in on purpose")[2].splitlines()
    return scenarios, {line.split(" | ")[0].removeprefix("| ") for line in faults if line.startswith("| ")} - {
        "fault",
        "---",
    }


if __name__ == "__main__":
    sys.exit(main())
