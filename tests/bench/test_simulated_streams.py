"""The simulated link on a device with streams, which are simulated too: who reads what it has written has waited."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from harness.streams import Detector, detecting
from harness.streams.clocks import Stream
from overlap.bench import transfers
from overlap.bench.simulated import SimulatedGroup, SimulatedLink


@contextmanager
def _watched() -> Iterator[Detector]:
    """Nothing spins, and the queue of transfers has one of the detector's streams."""
    transfers._stream_queue.cache_clear()
    with (
        patch.object(transfers, "spin"),
        patch.object(transfers, "_spin_cycles_per_s", return_value=1e9),
        detecting() as detector,
    ):
        yield detector
    transfers._stream_queue.cache_clear()


def _use(device: torch.device, *, waits: bool = True) -> Tensor:
    group: Any = SimulatedGroup(2, SimulatedLink(bandwidth_bytes_per_s=1e9))
    tensor, gathered = torch.ones(4, device=device), torch.zeros(8, device=device)
    tensor.mul_(3)
    works = [group.allreduce([tensor]), group._allgather_base(gathered, torch.full((4,), 6.0, device=device))]
    # What was to be sent is freed while it is sent, and may be lent again.
    torch.zeros(4, device=device)
    if waits:
        for work in works:
            work.wait()
    return gathered.add_(tensor[0])


def test_what_waits_for_a_transfer_reads_what_it_has_written() -> None:
    with _watched() as detector:
        gathered = _use(detector.device)
    detector.report.check()
    assert gathered.tolist() == [12] * 8


@contextmanager
def _without_wait_for_the_caller() -> Iterator[None]:
    with patch.object(Stream, "wait_stream"):
        yield


@contextmanager
def _without_hold() -> Iterator[None]:
    with patch.object(transfers, "hold", lambda tensor: tensor):
        yield


@pytest.mark.parametrize("broken", [_without_wait_for_the_caller, _without_hold], ids=lambda each: each.__name__)
def test_what_a_transfer_forgets_is_found(broken: Any) -> None:
    with _watched() as detector, broken():
        _use(detector.device)
    with pytest.raises(AssertionError):
        detector.report.check()


def test_who_does_not_wait_for_a_transfer_is_found() -> None:
    with _watched() as detector:
        _use(detector.device, waits=False)
    with pytest.raises(AssertionError, match="race"):
        detector.report.check()
