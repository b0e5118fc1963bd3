"""Random programs beside plain DDP: a few dozens of what `make soak` plays 1,000 of."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from harness import run_ranks
from overlap.hooks import AllReduce, Quantize
from overlap.hooks.wires.feedback import ErrorFeedback
from soak.playing import play
from soak.program import Program
from soak.programs import draw
from soak.random_programs import faults, play_programs


def test_random_programs_do_what_is_promised_of_them() -> None:
    outcomes = play_programs(range(40))
    assert not (found := faults(outcomes)), "\n\n".join(found)
    kinds = Counter(outcome.kind for outcome in outcomes.values())
    assert kinds["holds"] >= 28, kinds


def test_a_seed_is_always_the_same_program() -> None:
    assert [str(draw(seed)) for seed in range(50)] == [str(draw(seed)) for seed in range(50)]


def _seeds(fits: Callable[[Program], bool], count: int = 3) -> list[int]:
    return [seed for seed in range(5000) if fits(draw(seed))][:count]


async def _reduces_half(self: Any, bucket: Any) -> None:
    bucket.buffer.mul_(0.5)
    await _all_reduce(self, bucket)


async def _rounds_more(self: Any, bucket: Any) -> None:
    await _quantize(self, bucket)
    bucket.buffer.mul_(0.9)


_all_reduce, _quantize = AllReduce.__call__, Quantize.__call__


def _forgets(self: Any, *arguments: Any) -> None:
    """Keeps nothing of what was left out."""


# What is broken: where, by what, and which programs show it.
MUTANTS: dict[str, tuple[type, str, Any, Callable[[Program], bool]]] = {
    "half of the mean": (
        AllReduce,
        "__call__",
        _reduces_half,
        lambda program: (
            program.stages[:2] == ("AllReduce()", "Step(o[0])") and "SGD" in program.plain[0] and not program.clips
        ),
    ),
    "a larger error": (
        Quantize,
        "__call__",
        _rounds_more,
        lambda program: program.stages[:1] == ("Quantize(Int8())",) and program.promise.kind == "bound",
    ),
    "no error feedback": (
        ErrorFeedback,
        "hold",
        _forgets,
        lambda program: program.stages[:1] == ("Quantize(Int4(), error_feedback=True)",),
    ),
}


def _broken(rank: int, ranks: int, name: str, seeds: Sequence[int]) -> list[str]:
    owner, method, instead, _ = MUTANTS[name]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, method, instead)
        return [play(draw(seed)).kind for seed in seeds]


@pytest.mark.parametrize("name", MUTANTS)
def test_a_broken_promise_is_seen(name: str) -> None:
    seeds = _seeds(MUTANTS[name][3])
    for kinds in run_ranks(_broken, 2, name, seeds):
        assert "differs" in kinds and "holds" not in kinds
