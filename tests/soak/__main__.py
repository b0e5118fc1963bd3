"""`python -m soak --minutes 10`: trials until the time is over. Exit status 0 only if all were clean."""

import argparse
import importlib
import json
import random
import shutil
import sys
import tempfile
import time
from collections import defaultdict
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from .forms import FORMS
from .group import become_subreaper
from .trial import FAULTS, References, Result, drawn, pairs_of, run_trial


def _parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--trials", type=int, help="end after so many trials")
    parser.add_argument("--seed", help="of the campaign; by default drawn, and printed")
    parser.add_argument("--only", action="append", metavar="SEED", help="one trial again, by the seed that was printed")
    parser.add_argument("--form", action="append", choices=list(FORMS), help="only this one; may be given again")
    parser.add_argument("--fault", action="append", choices=list(FAULTS), help="only this one; may be given again")
    parser.add_argument("--pair", action="append", nargs=2, metavar=("FORM", "FAULT"), help="these in turn")
    parser.add_argument("--out", type=Path, default=Path("overlap-soak"), help="folder of what was seen")
    return parser.parse_args()


def _campaign() -> int:
    options = _parsed()
    options.out.mkdir(parents=True, exist_ok=True)
    kept = options.out / "trials.jsonl"
    importlib.import_module("harness._preload")  # What a rank needs, once, before the first fork.
    torch.set_num_threads(1)
    become_subreaper()
    _play(options, kept)
    trials = read(kept)
    (options.out / "report.md").write_text(markdown(trials) + "\n")
    ours = [trial for trial in trials if FORMS[trial["form"]].is_ours]
    clean = sum(not trial["unclean"] for trial in ours)
    print(f"{clean} of {len(ours)} trials clean; {options.out / 'report.md'}", flush=True)
    return 0 if clean == len(ours) > 0 else 1


def _play(options: argparse.Namespace, kept: Path) -> None:
    for pair in options.pair or []:
        if pair[0] not in FORMS or pair[1] not in FAULTS:
            sys.exit(f"--pair {pair}: the forms are {list(FORMS)}, the faults {list(FAULTS)}")
    seed = options.seed or str(random.SystemRandom().randrange(10**6))
    forms = options.form or list(FORMS)
    faults = options.fault or list(FAULTS)
    print(f"seed {seed}", flush=True)
    pairs = pairs_of(forms, faults)
    done = {trial["seed"] for trial in read(kept)}
    seeds = options.only or [f"{seed}:{index}" for index in range(options.trials or 10**6)]
    end_s = time.monotonic() + 60 * options.minutes
    scratch = Path(tempfile.mkdtemp(prefix="overlap-soak-"))  # Not as a context: ranks would clean it up, too.
    try:
        references = References(scratch / "references")
        for place, one in enumerate(seeds):
            if time.monotonic() > end_s:
                break
            if one in done and not options.only:
                continue  # Of a campaign that was ended and goes on.
            result = drawn(one, [options.pair[place % len(options.pair)]] if options.pair else pairs)
            try:
                run_trial(result, scratch / "trial", references)
            except Exception as error:  # One trial that cannot be judged ends no campaign.
                result.unclean.append(f"the trial could not be judged: {type(error).__name__}: {error}"[:2000])
            _note(result, kept, options.out, scratch / "trial")
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _note(result: Result, kept: Path, out: Path, folder: Path) -> None:
    with kept.open("a") as file:
        file.write(json.dumps(asdict(result)) + "\n")
    slowest = "" if result.slowest_s is None else f", error after {result.slowest_s:.2f} s"
    print(
        f"{result.seed} {result.form} | {result.fault} | {result.ranks} ranks, victim {result.victim}: "
        f"{'UNCLEAN' if result.unclean else 'clean'}{'' if result.met else ' (not met)'}{slowest}, "
        f"{result.took_s:.1f} s",
        flush=True,
    )
    for text in result.unclean:
        print(f"    {text}", flush=True)
    if folder.exists():
        shutil.rmtree(out / "unclean" / result.seed, ignore_errors=True)
        shutil.move(folder, out / "unclean" / result.seed)


Trial = dict[str, Any]


def read(path: Path) -> list[Trial]:
    """The trials of a campaign; of two with one seed the later one."""
    lines = path.read_text().splitlines() if path.exists() else []
    return list({trial["seed"]: trial for trial in map(json.loads, lines)}.values())


def markdown(trials: list[Trial]) -> str:
    """A line for each fault and a column for each form: clean / trials, and the slowest error in seconds."""
    cells = defaultdict(list)
    for trial in trials:
        cells[trial["form"], trial["fault"]].append(trial)
    ours = [trial for trial in trials if FORMS[trial["form"]].is_ours]
    forms = [form for form in FORMS if any((form, fault) in cells for fault in FAULTS)]
    first = (
        f"{len(ours)} trials of overlap's forms: {sum(not trial['unclean'] for trial in ours)} clean, "
        f"{sum(trial['resumed_exactly'] for trial in ours)} resumed bit for bit; beside them {len(trials) - len(ours)} "
        "of plain DDP. In a cell: *clean / trials*, and the longest time in seconds from the fault to another rank's "
        "error."
    )
    lines = [first, "", "| fault | " + " | ".join(forms) + " |", "| --- |" + " ---: |" * len(forms)]
    faults = [fault for fault in FAULTS if any((form, fault) in cells for form in forms)]
    lines += [f"| {fault} | {' | '.join(_cell(cells[form, fault]) for form in forms)} |" for fault in faults]
    lines += [f"- {trial['seed']}: {text}" for trial in ours for text in trial["unclean"]]
    return "\n".join(lines)


def _cell(trials: list[Trial]) -> str:
    if not trials:
        return "-"
    slowest_s = max((trial["slowest_s"] for trial in trials if trial["slowest_s"] is not None), default=None)
    clean = sum(not trial["unclean"] for trial in trials)
    return f"{clean}/{len(trials)}" + ("" if slowest_s is None else f", {slowest_s:.1f}")


if __name__ == "__main__":
    sys.exit(_campaign())
