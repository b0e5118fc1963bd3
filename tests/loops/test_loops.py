"""Every loop of the corpus does with every form of update what it declares: exact, unless it says otherwise."""

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from harness import run_ranks
from overlap.errors import TrainingLoopError

from .compare import Cell, Outcome, is_as_expected, outcome_of, outcomes
from .corpus import LOOPS, load
from .forms import PLAIN, Form
from .run import Run, play
from .table import PAGE, page

load()


@pytest.fixture(scope="module")
def worlds(request: pytest.FixtureRequest) -> Iterator[dict[str, Future[dict[Cell, Outcome]]]]:
    """All loops of each topic that is tested; a world of ranks waits for half of its time, so two run at once."""
    played: dict[str, Future[dict[Cell, Outcome]]] = {}
    with ThreadPoolExecutor(2) as pool:
        for item in request.session.items:
            if isinstance(item, pytest.Function) and item.module is request.module and "name" in item.fixturenames:
                topic = LOOPS[item.callspec.params["name"]].topic
                if topic not in played:
                    names = [name for name, loop in LOOPS.items() if loop.topic == topic]
                    played[topic] = pool.submit(outcomes, names)
        yield played
        pool.shutdown(cancel_futures=True)


@pytest.mark.parametrize("name", LOOPS)
def test_a_loop_does_with_every_form_what_it_declares(
    name: str, worlds: dict[str, Future[dict[Cell, Outcome]]]
) -> None:
    loop = LOOPS[name]
    found = {form: outcome for (of, form), outcome in worlds[loop.topic].result().items() if of == name}
    faults = [
        f"{form}: {outcome}\n    declared: {loop.expected.get(form, 'exact')}\n{outcome.details}"
        for form, outcome in found.items()
        if not is_as_expected(outcome, loop.expected.get(form))
    ]
    assert not faults, "\n".join([f"{name}:", *faults])


def test_the_page_shows_what_the_loops_declare() -> None:
    assert PAGE.read_text() == page(), "run `python tests/loops`"


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
    loop = LOOPS["the usual loop"]
    reference = play(loop, PLAIN)
    return [str(outcome_of(loop, form, reference)).partition(" at ")[0] for form in _FORMS]


def test_a_cell_is_exact_refused_or_a_fault() -> None:
    expected = ["exact", "differs:", "refused: no: do that", "fails: RuntimeError: autograd says"]
    assert run_ranks(_kinds, 2) == [expected, expected]
