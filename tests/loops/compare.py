"""Plays loops with all forms in one world of ranks, and says of each cell of the table what became of it."""

import contextlib
import datetime
import pickle
import tempfile
import traceback
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_leaves

from harness import WorldError, assert_parity, run_ranks
from overlap import OverlapError

from .corpus import Expected, Loop, load
from .forms import FORMS, PLAIN, Form, forms_of
from .run import NotOffered, Record, play

_WORLD_SIZE = 2
_WAIT_FOR_PEER_S = 8.0
_CELL_S = 5.0
_HANGS = "hangs or dies"
_TOLD = "another rank of the group failed first"

Cell = tuple[str, str]
"""Names of a loop and a form."""


@dataclass(frozen=True)
class Outcome:
    """What a form did with a loop: ``exact``, ``refused`` (and how the error begins), or a fault."""

    kind: str
    words: str = ""
    details: str = ""

    def __str__(self) -> str:
        return f"{self.kind}: {self.words}" if self.words else self.kind


def is_as_expected(outcome: Outcome, expected: Expected | None) -> bool:
    """Whether a cell came out as it was declared, ``None`` being exact."""
    if expected is None:
        return outcome.kind == "exact"
    if expected.kind == "refused":
        return outcome.kind == "refused" and outcome.words.startswith(expected.words)
    if expected.is_a_race:
        return outcome.kind != _HANGS
    return outcome.kind not in ("exact", "refused", _HANGS)


def outcomes(loops: Iterable[str], forms: Sequence[Form] = FORMS) -> dict[Cell, Outcome]:
    """What becomes of each cell; one in which a rank hangs or dies costs the others a new world."""
    found: dict[Cell, Outcome] = {}
    all_loops = load()
    cells = [(name, form.name) for name in loops for form in forms_of(all_loops[name].topic) if form in forms]
    while missing := [cell for cell in cells if cell not in found]:
        ranks, error = _world(missing)
        for cell in missing:
            said = [rank[cell] for rank in ranks if cell in rank]
            if len(said) < _WORLD_SIZE:
                found[cell] = Outcome(_HANGS, "; ".join(map(str, said)) or error.partition("\n")[0], error)
                break
            found[cell] = _agreed(said)
            if any(outcome.kind == "fails" for outcome in said):
                break  # Collectives may have been left behind.
    return found


def _world(cells: Sequence[Cell]) -> tuple[list[dict[Cell, Outcome]], str]:
    """What each rank says of the cells that it has been through, and why the world ended early."""
    error = ""
    with tempfile.TemporaryDirectory(prefix="loops-") as folder:
        try:
            run_ranks(
                _play_all,
                _WORLD_SIZE,
                cells,
                Path(folder),
                timeout_s=30 + _CELL_S * len({loop for loop, _ in cells}),
                group_timeout_s=_WAIT_FOR_PEER_S,
            )
        except WorldError as failure:
            error = str(failure)
        ranks = [_read(Path(folder) / f"rank{rank}") for rank in range(_WORLD_SIZE)]
    return ranks, error


def _agreed(said: Sequence[Outcome]) -> Outcome:
    if len({outcome.kind for outcome in said}) == 1:
        # Which rank raises, and which is told of it, may depend on timing.
        return next((outcome for outcome in said if not outcome.words.startswith(_TOLD)), said[0])
    return Outcome("disagrees", "; ".join(f"rank {rank}: {outcome}" for rank, outcome in enumerate(said)))


def _play_all(rank: int, world_size: int, cells: Sequence[Cell], folder: Path) -> None:
    torch.set_num_threads(1)
    loops = load()
    forms = {form.name: form for form in FORMS}
    # Of its own, so that collectives that a form leaves behind in the default group do not confuse it.
    control = dist.new_group(timeout=datetime.timedelta(seconds=_WAIT_FOR_PEER_S))
    played, reference = "", []
    for name, form in cells:
        if played != name:
            try:
                played, reference = name, play(loops[name], PLAIN)
                _check_replicas(reference[-1], control)
            except Exception as error:
                raise RuntimeError(f"the loop {name!r} does not run plain") from error
        outcome = outcome_of(loops[name], forms[form], reference)
        with (folder / f"rank{rank}").open("ab") as file:
            pickle.dump(((name, form), outcome), file)
        dist.barrier(control)
        if outcome.kind == "fails":
            return


def outcome_of(loop: Loop, form: Form, reference: list[Record]) -> Outcome:
    """What became of one cell on this rank, beside the plain run."""
    try:
        records = play(loop, form)
    except OverlapError as error:
        refused = Outcome("refused", _words(error))
        is_declared = is_as_expected(refused, loop.expected.get(form.name))
        return refused if is_declared else replace(refused, details=traceback.format_exc())
    except NotOffered as error:
        return Outcome("not offered", str(error))
    except Exception as error:
        return Outcome("fails", f"{type(error).__name__}: {_words(error)}", traceback.format_exc())
    try:
        for step, (ours, theirs) in enumerate(zip(records, reference, strict=True)):
            assert_parity(ours, {key: theirs[key] for key in ours}, what=f"at yield {step}")
    except (AssertionError, ValueError) as error:
        return Outcome("differs", _words(error))
    return Outcome("exact")


def _check_replicas(record: Record, group: Any) -> None:
    """The ranks of the plain run end with the same parameters, so those of a form that is exact do, too."""
    sums = torch.stack([value.abs().double().sum() for value in tree_leaves(record["parameters"])])
    first = sums.clone()
    dist.broadcast(first, 0, group=group)
    assert torch.equal(first, sums), "the replicas of the plain run differ"


def _words(error: BaseException) -> str:
    return " ".join(str(error).split())[:250]


def _read(file: Path) -> dict[Cell, Outcome]:
    found: dict[Cell, Outcome] = {}
    if file.exists():
        with file.open("rb") as stream, contextlib.suppress(EOFError):
            while True:
                cell, outcome = pickle.load(stream)
                found[cell] = outcome
    return found
