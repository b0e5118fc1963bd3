"""What the corpus says of a form that is right, of one that is wrong, and of one that raises."""

from __future__ import annotations

from typing import Any

from harness import run_ranks
from overlap.errors import TrainingLoopError

from .compare import outcome_of
from .corpus import load
from .forms import PLAIN, Form
from .run import Run, play


def _twice_the_rate(run: Run, ddp: Any, params: Any) -> Any:
    optimizer = run.plain_optimizer(params)
    for group in optimizer.param_groups:
        group["lr"] *= 2
    return optimizer


def _raises(error: Exception) -> Any:
    def build(run: Run, ddp: Any, params: Any) -> Any:
        raise error

    return build


_FORMS = (
    PLAIN,
    Form(name="twice the rate", made="", build=_twice_the_rate),
    Form(name="refuses", made="", build=_raises(TrainingLoopError("no: do that"))),
    Form(name="fails", made="", build=_raises(RuntimeError("autograd says"))),
)


def _kinds(rank: int, world_size: int) -> list[str]:
    loop = load()["the usual loop"]
    reference = play(loop, PLAIN)
    return [str(outcome_of(loop, form, reference)).partition(" at ")[0] for form in _FORMS]


def test_a_cell_is_exact_refused_or_a_fault() -> None:
    expected = ["exact", "differs:", "refused: no: do that", "fails: RuntimeError: autograd says"]
    assert run_ranks(_kinds, 2) == [expected, expected]
