"""One trial: a group meets its fault, is checked, and a new group resumes and must end with the same bits."""

import random
import re
import shutil
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness import assert_parity

from . import checkpoints
from .forms import FORMS, Form
from .group import Outcome, play
from .rank import SHORTER_BY, STEPS, Plan

TIMEOUT_S = 8.0
SHORT_TIMEOUT_S = 3.0  # Where the fault is only known by it.
SLACK_S = 3.0  # Of a machine with other work.
_NAMES = re.compile(r"\branks? \[?\d|\bpeer\b|\[[\d.:a-f]+\]:\d+|no rank has reported an error", re.IGNORECASE)
_ABORTS = ("terminate called", "Fatal Python error", "Exception ignored in", "Segmentation fault", "Aborted")


@dataclass(frozen=True, kw_only=True)
class Fault:
    """What happens to one rank, the victim."""

    name: str
    victim_ends: bool = True  # Without an error of its own: killed.
    is_sent: bool = False  # By the parent, a moment after the step has begun.
    waits_for_timeout: bool = False  # Nobody can know before the group's timeout is over.
    needs_stages: bool = False
    needs_equal_steps: bool = False  # Under Join any number of steps is allowed.

    def applies(self, form: Form) -> bool:
        return (form.has_stages or not self.needs_stages) and not (form.is_joined and self.needs_equal_steps)


_ALL = (
    Fault(name="none", victim_ends=False),
    Fault(name="SIGKILL", is_sent=True),
    Fault(name="SIGTERM", is_sent=True),
    Fault(name="SIGTERM, handled", is_sent=True, victim_ends=False),
    Fault(name="SIGSTOP", is_sent=True, victim_ends=False, waits_for_timeout=True),
    Fault(name="exception in a stage", victim_ends=False, needs_stages=True),
    Fault(name="exception in the loss", victim_ends=False),
    Fault(name="exception in the loader", victim_ends=False),
    Fault(name="out of memory", victim_ends=False),
    Fault(name="full disk", victim_ends=False),
    Fault(name="killed in a save", victim_ends=True),
    Fault(name="another plan", victim_ends=False, needs_stages=True),
    Fault(name="a step more", victim_ends=False, waits_for_timeout=True, needs_equal_steps=True),
)
FAULTS = {fault.name: fault for fault in _ALL}


@dataclass
class Result:
    """What a trial showed; one line of the campaign's file."""

    seed: str
    form: str
    fault: str
    ranks: int
    victim: int
    fault_step: int
    delay_s: float
    destroys: bool
    met: bool = True  # The fault came before the run was over.
    unclean: list[str] = field(default_factory=list)
    slowest_s: float | None = None  # From the fault to a survivor's error.
    errors: list[str] = field(default_factory=list)
    resumed_from: int | None = None
    resumed_exactly: bool = False
    stalled_s: float = 0.0  # While the failing group ran.
    took_s: float = 0.0


def pairs_of(forms: list[str], faults: list[str]) -> list[tuple[str, str]]:
    """Each form with each fault that applies to it."""
    return [(form, fault) for form in forms for fault in faults if FAULTS[fault].applies(FORMS[form])]


def drawn(seed: str, pairs: list[tuple[str, str]]) -> Result:
    """The trial that `seed` stands for, among these forms and faults."""
    rng = random.Random(seed)
    form, fault = rng.choices(pairs, [_weight(*pair) for pair in pairs])[0]
    ranks = rng.choice((2, 2, 3, 4))
    last = STEPS - (SHORTER_BY if FORMS[form].is_joined else 0)
    step = rng.randrange(1, last)
    if fault == "exception in a stage" and form.startswith("LocalSGD"):
        step = rng.randrange(1, 4)  # Later there are no gradients to reduce.
    return Result(
        seed=seed, form=form, fault=fault, ranks=ranks, victim=rng.randrange(ranks), fault_step=step,
        delay_s=round(rng.uniform(0, 0.03), 4), destroys=rng.random() < 0.5,
    )  # fmt: skip


def _weight(form: str, fault: str) -> float:
    # Those that wait for the group's timeout take four times as long as the others.
    is_slow = FAULTS[fault].waits_for_timeout
    return (0.4 if is_slow else 1.0) * (1.0 if FORMS[form].is_ours else 0.3)


class References:
    """How runs end that never failed, each made once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def end(self, form: Form, ranks: int, resumes_from: int | None) -> Path:
        """The folder with the end of every rank.

        DDP cuts its buckets anew after the first step. How some forms round depends on them, and so does the order in
        which three or more ranks are summed. There the reference is a run that was ended and resumed, too.
        """
        at = resumes_from if form.rounds_by_bucket or ranks > 2 else None
        folder = self._folder / f"{form.name}-{ranks}-{at}".replace(" ", "_").replace(",", "")
        if (folder / "made").exists():
            return folder
        shutil.rmtree(folder, ignore_errors=True)
        if at is not None:
            self._made(Plan(form=form.name, ranks=ranks, folder=folder, stops_after=at, timeout_s=60, is_quick=True))
        self._made(Plan(form=form.name, ranks=ranks, folder=folder, resumes_from=at, timeout_s=60, is_quick=True))
        (folder / "made").touch()
        return folder

    def _made(self, plan: Plan) -> None:
        outcome = play(plan)
        if any(outcome.statuses):
            raise RuntimeError(
                f"the reference of {plan.form} on {plan.ranks} ranks failed:\n" + "\n".join(outcome.logs)
            )


def run_trial(result: Result, folder: Path, references: References) -> None:
    """Plays the trial in `folder`, which is left there if it is unclean."""
    begun_s = time.monotonic()
    form, fault = FORMS[result.form], FAULTS[result.fault]
    folder.mkdir(parents=True)
    descriptors = _open_descriptors()
    _fail(result, form, fault, folder, references)
    _resume(result, form, folder, references)
    if (now := _open_descriptors()) != descriptors:
        result.unclean.append(f"the parent's descriptors went from {descriptors} to {now}")
    if not result.unclean:
        shutil.rmtree(folder)
    result.took_s = round(time.monotonic() - begun_s, 2)


def _fail(result: Result, form: Form, fault: Fault, folder: Path, references: References) -> None:
    timeout_s = SHORT_TIMEOUT_S if fault.waits_for_timeout else TIMEOUT_S
    plan = Plan(
        form=form.name, ranks=result.ranks, folder=folder, timeout_s=timeout_s, fault=fault.name, victim=result.victim,
        fault_step=result.fault_step, delay_s=result.delay_s, destroys=result.destroys,
        stopped_s=1.5 * timeout_s if fault.name == "SIGSTOP" else 0.0,
    )  # fmt: skip
    outcome = play(plan, signal.Signals[fault.name.split(",")[0]] if fault.is_sent else None)
    _check(result, form, fault, plan, outcome, references)


def _check(result: Result, form: Form, fault: Fault, plan: Plan, outcome: Outcome, references: References) -> None:
    unclean = result.unclean
    result.stalled_s = round(outcome.stalled_s, 2)
    unclean += [f"rank {rank} hung" for rank in outcome.hung]
    unclean += [f"processes left: {outcome.strays}"] if outcome.strays else []
    victim = outcome.reports[result.victim]
    result.met = fault.name in ("none", "another plan", "a step more") or "fault_s" in victim
    if fault.is_sent:
        result.met = outcome.sent_s is not None and victim.get("done_s", float("inf")) > outcome.sent_s
    fault_s = outcome.sent_s or victim.get("fault_s") or victim.get("started_s") or 0.0
    for rank, (status, said) in enumerate(zip(outcome.statuses, outcome.reports, strict=True)):
        is_victim = rank == result.victim
        who = f"rank {rank}{' (the victim)' if is_victim else ''}"
        if rank in outcome.hung:
            continue
        if status < 0 and not (is_victim and fault.victim_ends):
            unclean.append(f"{who} ended with {signal.Signals(-status).name}{_tail(outcome.logs[rank])}")
        found = [sign for sign in _ABORTS if sign in outcome.logs[rank]]
        unclean += [f"{who} printed {found}{_tail(outcome.logs[rank])}"] if found and status >= 0 else []
        unclean += [f"{who} left {what}: {names}" for what, names in said.get("left", {}).items()]
        if status >= 0 and "error" not in said and "done_s" not in said:
            unclean.append(f"{who} ended with status {status} and said nothing{_tail(outcome.logs[rank])}")
        if "done_s" in said:
            _check_end(result, form, plan, rank, references)
        if "error" in said:
            from_s = outcome.continued_s if is_victim and outcome.continued_s else fault_s
            _check_error(result, fault, plan, who, is_victim, said, from_s)
    if fault.name == "none":
        failed = [rank for rank, said in enumerate(outcome.reports) if "error" in said]
        unclean += [f"ranks {failed} failed without a fault"] if failed else []


def _check_error(
    result: Result, fault: Fault, plan: Plan, who: str, is_victim: bool, said: dict[str, Any], from_s: float
) -> None:
    error = said["error"]
    text = " ".join([error["message"], *error["notes"]])
    is_own = is_victim and error["type"].split(".")[-1] in _OWN.get(fault.name, ())
    if is_own:
        return
    result.errors.append(f"{who}: {error['type']}: {text[:400]}")
    took_s = said["error_s"] - from_s
    if not is_victim or fault.name == "SIGSTOP":
        result.slowest_s = round(max(result.slowest_s or 0.0, took_s), 2)
    if not (error["is_ours"] or error["type"].startswith(("torch.", "builtins.RuntimeError"))):
        result.unclean.append(f"{who} ended in an error of nobody's: {error['type']}: {text[:400]}")
    elif not _NAMES.search(text):
        result.unclean.append(f"{who}'s error names no rank and no peer: {error['type']}: {text[:400]}")
    if took_s > plan.timeout_s + SLACK_S + result.stalled_s:
        result.unclean.append(f"{who} learned of it after {took_s:.1f} s; the timeout is {plan.timeout_s:g} s")


_OWN = {
    "SIGTERM, handled": ("SystemExit",),
    "exception in a stage": ("Planned",),
    "exception in the loss": ("Planned",),
    "exception in the loader": ("Planned",),
    "out of memory": ("RuntimeError", "MemoryError"),
    "full disk": ("OSError", "RuntimeError"),
}


def _check_end(result: Result, form: Form, plan: Plan, rank: int, references: References) -> None:
    """A rank that finished although another failed has not learned something else."""
    if result.fault == "a step more" and rank == result.victim:
        return
    difference = _difference(plan.folder, references.end(form, plan.ranks, None), rank)
    if difference:
        result.unclean.append(f"rank {rank} finished with another result: {difference}")


def _resume(result: Result, form: Form, folder: Path, references: References) -> None:
    at = checkpoints.latest_step(folder, result.ranks)
    result.resumed_from = at
    for rank in range(result.ranks):  # Keep how the failed group ended.
        for kind in (f"rank-{rank}.log", f"report-{rank}.json"):
            if (folder / kind).exists():
                (folder / kind).rename(folder / f"failed-{kind}")
    is_quick = result.delay_s < 0.024  # In four of five.
    plan = Plan(
        form=form.name, ranks=result.ranks, folder=folder, resumes_from=at, timeout_s=60, is_quick=is_quick
    )  # fmt: skip
    outcome = play(plan)
    differences = [
        f"the resumed rank {rank} ended with status {status}{_tail(outcome.logs[rank])}"
        for rank, status in enumerate(outcome.statuses)
        if status
    ]
    for rank, said in enumerate(outcome.reports):
        left = said.get("left", {})
        result.unclean += [f"resumed rank {rank} left {what}: {names}" for what, names in left.items()]
    if not differences:
        reference = references.end(form, result.ranks, at)
        found = (_difference(folder, reference, rank) for rank in range(result.ranks))
        differences = [f"rank {rank} resumed to another result: {text}" for rank, text in enumerate(found) if text]
    result.resumed_exactly = not differences
    result.unclean += differences


def _difference(folder: Path, reference: Path, rank: int) -> str:
    """Of everything that `overlap.state_dict` holds; nothing if it is the same bit for bit."""
    ours, theirs = (checkpoints.load(where / f"end-{rank}.pt") for where in (folder, reference))
    try:
        assert_parity(ours, theirs, what="end")
    except AssertionError as error:
        return str(error)[:300]
    return ""


def _tail(log: str) -> str:
    return f": ...{log.strip()[-600:]}" if log.strip() else ""


def _open_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))
