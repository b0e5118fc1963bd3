"""Updates on streams, on two ranks: no race, no wait of the host, and the values are those of plain DDP."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from harness import run_ranks
from harness.streams import STREAMS_BACKEND, Detector, detecting
from overlap import declare
from overlap._torch.device import on_stream
from overlap.optim import subset

from .play import outcome_of
from .updates import UPDATES, OnDefaultStream

CPU = torch.device("cpu")


def _errors(rank: int, world_size: int, kind: str) -> list[str]:
    errors = []
    for name, scenario in UPDATES.items():
        if name.startswith(kind):
            outcome = outcome_of(scenario, rank)
            dist.barrier()
            errors += [f"{name}, rank {rank}: {outcome.error}"] if outcome.error else []
    return errors


@pytest.mark.parametrize("kind", ["default stream", "all transforms", "overflows", "edits", "unused"])
def test_updates_on_streams(kind: str) -> None:
    for errors in run_ranks(_errors, 2, kind, backend=STREAMS_BACKEND, timeout_s=170):
        assert not errors, "\n\n".join(errors)


@pytest.fixture
def detector() -> Iterator[Detector]:
    with detecting() as detector:
        yield detector


def _stream_of(optimizer: torch.optim.Optimizer, detector: Detector) -> str:
    side = detector.new_stream("side")
    with on_stream(side), subset.ordered_after_gradients(optimizer, [torch.zeros(1, device=CPU)]):
        return detector.current_stream.name


def test_the_optimizers_of_torch_and_what_is_derived_from_them_stay_on_the_side_stream(detector: Detector) -> None:
    class Derived(torch.optim.AdamW):
        pass

    class Overrides(torch.optim.AdamW):
        def step(self, closure: Any = None) -> Any:
            return super().step(closure)

    matrix = torch.nn.Parameter(torch.zeros(3, 3))
    for cls in (torch.optim.SGD, torch.optim.AdamW, torch.optim.Adafactor, torch.optim.Muon):
        assert _stream_of(cls([matrix], lr=0.1), detector) == "side"
    assert _stream_of(Derived([matrix]), detector) == "side"
    assert _stream_of(Overrides([matrix]), detector) == "the default stream"
    replaced = torch.optim.SGD([matrix], lr=0.1)
    replaced.step = lambda: None  # type: ignore[method-assign, assignment]
    assert _stream_of(replaced, detector) == "the default stream"


def test_a_declared_class_stays_on_the_side_stream_but_not_those_of_bitsandbytes(detector: Detector) -> None:
    class Mine(torch.optim.Optimizer):
        def __init__(self, params: Any) -> None:
            super().__init__(params, {})

    class Derived(OnDefaultStream):
        pass

    parameter = torch.nn.Parameter(torch.zeros(3))
    assert _stream_of(Mine([parameter]), detector) == "the default stream"
    declare(Mine, "parameter")
    assert _stream_of(Mine([parameter]), detector) == "side"
    for cls in (OnDefaultStream, Derived, declare(Derived, "element")):
        assert _stream_of(cls([parameter]), detector) == "the default stream"


def test_the_streams_wait_for_each_other_even_where_the_step_raises(detector: Detector) -> None:
    side, value = detector.new_stream("side"), torch.zeros(3, device=CPU)
    optimizer = OnDefaultStream([torch.nn.Parameter(torch.zeros(3))])

    def step() -> None:
        with subset.ordered_after_gradients(optimizer, [value]):
            value.add_(1)
            raise RuntimeError("out of memory")

    side.wait_stream(detector.default_stream)
    with on_stream(side):
        value.add_(1)
        with pytest.raises(RuntimeError, match="out of memory"):
            step()
        value.add_(1)
    assert detector.current_stream.name == "the default stream"
    detector.report.check()
