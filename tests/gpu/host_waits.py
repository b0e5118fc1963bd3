"""In a step the host waits for the GPU in no chain: it only launches.

Seen in two ways. PyTorch's own waiting calls (`.item()`, a copy to pageable memory) raise under
`torch.cuda.set_sync_debug_mode`. All calls of the CUDA runtime that wait, whoever makes them, are in the profiler's
trace; those within one of the library's labels are the library's. Both are shown a wait that is there.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from overlap import AllReduce, OverlappedOptimizer, Step
from overlap import chain as chained

from .chains import CHAINS, Chain
from .check import Check
from .training import Training

__all__ = ["host_wait_checks", "traced", "waits_within"]

# The first steps make the handles of libraries, communicators and the memory that later ones use again.
_WARM_STEPS = 4
_WATCHED_STEPS = 2
_LABEL = "overlap::"


def waits_within(events: Sequence[Mapping[str, Any]], label: str = _LABEL) -> dict[str, list[str]]:
    """The waiting calls in a Chrome trace that begin within the host's ranges whose name begins with `label`, by name.

    A range is that of its thread: other threads may wait meanwhile.

    Raises:
        AssertionError: there is no such range, or no call of the CUDA runtime at all, so nothing was seen.
    """
    # The same labels are in the trace a second time, around what the GPU did for them.
    labels = ("cpu_op", "user_annotation")
    ranges = [event for event in events if event.get("cat") in labels and str(event["name"]).startswith(label)]
    calls = [event for event in events if event.get("cat") in ("cuda_runtime", "cuda_driver")]
    assert ranges, f"the trace has no range {label}...: nothing was watched"
    assert calls, "the trace has no call of the CUDA runtime: nothing was watched"
    found: dict[str, list[str]] = {}
    for call in calls:
        for each in ranges:
            is_within = each["ts"] <= call["ts"] <= each["ts"] + each["dur"] and each["tid"] == call["tid"]
            if is_within and _waits(str(call["name"])):
                found.setdefault(str(each["name"]), []).append(str(call["name"]))
    return found


def _waits(call: str) -> bool:
    # To free memory waits for the device as well.
    return call.endswith("Synchronize") or call in ("cudaMemcpy", "cudaFree")


@dataclass(frozen=True)
class NoHostWait:
    chain: str

    def __call__(self, rank: int, world_size: int, device: torch.device) -> dict[str, Any]:
        chain = CHAINS[self.chain]
        training = _warm(chain, rank, device)
        # DDP itself waits at the end of a pass in which a parameter was not used.
        with _waits_pass() if chain.has_unused else _waits_raise():
            _steps(training, range(_WARM_STEPS, _WARM_STEPS + _WATCHED_STEPS))
        events = traced(lambda: _steps(training, range(_WARM_STEPS, _WARM_STEPS + _WATCHED_STEPS)))
        waits = waits_within(events)
        assert not waits, f"{self.chain} made the host wait: {waits}"
        return {"ranges": sum(str(event.get("name", "")).startswith(_LABEL) for event in events)}


def _warm(chain: Chain, rank: int, device: torch.device) -> Training:
    training = Training.of(chain, rank, device)
    _steps(training, range(_WARM_STEPS))
    torch.cuda.synchronize(device)
    return training


def _steps(training: Training, numbers: range) -> None:
    # A batch comes from pageable memory, which the host waits for: the loop's, and not the library's.
    with _waits_pass():
        batches = [training.batch(number) for number in numbers]
    for number, batch in zip(numbers, batches, strict=True):
        training.step(number, batch)


@contextmanager
def _sync_debug_mode(mode: str) -> Iterator[None]:
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode(mode)
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


def _waits_raise() -> Any:
    return _sync_debug_mode("error")


def _waits_pass() -> Any:
    return _sync_debug_mode("default")


def traced(call: Callable[[], None]) -> list[dict[str, Any]]:
    """The events of a Chrome trace of `call`, and of what it gave the GPU to do."""
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        call()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events: list[dict[str, Any]] = json.loads(path.read_text())["traceEvents"]
    return events


def _reads_a_value(bucket: Any) -> None:
    bucket.buffer[0].item()


def _that_waits(ddp: Any) -> list[Any]:
    optimizer = OverlappedOptimizer(torch.optim.SGD(ddp.parameters(), lr=0.01))
    chained(AllReduce(), _reads_a_value, Step(optimizer)).register(ddp)
    return [optimizer]


def _a_wait_that_is_there_is_found(rank: int, world_size: int, device: torch.device) -> dict[str, Any]:
    chain = Chain(name="a chain that waits", build=_that_waits)
    training = _warm(chain, rank, device)
    waits = waits_within(traced(lambda: _steps(training, range(_WARM_STEPS, _WARM_STEPS + 1))))
    assert waits, "the profiler did not show that a stage read a value"
    assert _raises_where_the_host_waits(training), "set_sync_debug_mode did not show that a stage read a value"
    return {"found": waits}


def _raises_where_the_host_waits(training: Training) -> bool:
    try:
        with _waits_raise():
            _steps(training, range(_WARM_STEPS, _WARM_STEPS + 1))
    except Exception as error:
        if "synchroniz" not in f"{error}{error.__cause__}":
            raise
        return True
    return False


def host_wait_checks() -> list[Check]:
    control = Check(
        name="host waits: one that is there is found",
        topic="host waits",
        run=_a_wait_that_is_there_is_found,
        devices=("cuda",),
        ranks=1,
    )
    # Under a Join the ranks tell each other who is left, which the host reads.
    watched = [name for name, chain in CHAINS.items() if not chain.join]
    return [
        control,
        *(
            Check(name=f"host waits: {name}", topic="host waits", run=NoHostWait(name), devices=("cuda",))
            for name in watched
        ),
    ]
