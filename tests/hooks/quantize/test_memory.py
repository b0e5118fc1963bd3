"""What quantized gradients take of memory beside those that are sent as they are: the peak of the resident set."""

from __future__ import annotations

import functools

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from benchmarks.measuring import MemoryMeter
from harness import run_ranks
from overlap import AllReduce, Int4, Int8, Quantize, Stage, TopK, Wire, register

from .given import Given

# Small enough that what autograd needs for one of them hides nothing; a rank's half of them is padded, as mostly.
SIZES = [400_001, *[500_000] * 16]
GRADIENT_BYTES = 4 * sum(SIZES)
CPU = torch.device("cpu")
# Of all gradients: blocks that are encoded at once, what the C library keeps, and what the measurement is off by.
MARGIN = 0.35


def _peaks(rank: int, world_size: int, wire: Wire | None, error_feedback: bool) -> list[int]:
    """The peak above what was there before the model, in bytes: of the first pass, and of later ones."""
    gradients = [torch.randn(size) for size in SIZES]
    meter = MemoryMeter(CPU)
    stage: Stage = AllReduce() if wire is None else Quantize(wire, error_feedback=error_feedback)
    ddp = DistributedDataParallel(Given(SIZES), gradient_as_bucket_view=True)
    register(ddp, stage)
    ddp(gradients).backward()
    peaks = [meter.peak_bytes()]
    # Then DDP cuts its buckets anew, and has them twice for a moment.
    for _ in range(2):
        ddp.zero_grad()
        ddp(gradients).backward()
    MemoryMeter(CPU)  # Sets the peak that the kernel has recorded back.
    for _ in range(2):
        ddp.zero_grad()
        ddp(gradients).backward()
    return [*peaks, meter.peak_bytes()]


@functools.cache
def _plain() -> tuple[int, ...]:
    return _most(run_ranks(_peaks, 2, None, False))


def _most(of_ranks: list[list[int]]) -> tuple[int, ...]:
    return tuple(map(max, zip(*of_ranks, strict=True)))


@pytest.mark.parametrize(
    ("wire", "error_feedback", "sent"),
    [
        (Int4(), False, 0.127),
        (Int8(rounding="stochastic"), True, 0.252),
        (TopK(0.01), True, 0.01),
    ],
    ids=str,
)
def test_the_peak_is_what_the_docstring_says(wire: Wire, error_feedback: bool, sent: float) -> None:
    peaks = _most(run_ranks(_peaks, 2, wire, error_feedback))
    first, later = ((peak - plain) / GRADIENT_BYTES for peak, plain in zip(peaks, _plain(), strict=True))
    # Gloo gathers in memory of its own, as large as what is gathered.
    messages = 2 * sent
    # In the first pass there are no errors of an earlier one.
    assert first <= messages + error_feedback + MARGIN, f"the first pass took {first:.2f} copies"
    assert later <= messages + 2 * error_feedback + MARGIN, f"later passes took {later:.2f} copies"
    if error_feedback:
        assert first >= 0.9 and later >= 1.9, "errors are not in what was measured"
