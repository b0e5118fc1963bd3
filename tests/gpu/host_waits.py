"""In a step the host waits for the GPU in no chain: it only launches.

Seen in two ways. PyTorch's own waiting calls (`.item()`, a copy to pageable memory) raise under
`torch.cuda.set_sync_debug_mode`. All calls of the CUDA runtime that wait, whoever makes them, are in the profiler's
trace; those within one of the library's labels are the library's. Both are shown a wait that is there.
"""

import json
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from overlap import AllReduce
from streams.loops import Game, trains
from streams.model import wrapped
from streams.scenarios import Scenario, step

_LABEL = "overlap::"


def waits_within(events: Sequence[Mapping[str, Any]]) -> dict[str, list[str]]:
    """The waiting calls in a Chrome trace that begin within the library's ranges of the host, by name.

    A range is that of its thread: other threads may wait meanwhile.

    Raises:
        AssertionError: there is no such range, or no call of the CUDA runtime at all, so nothing was seen.
    """
    # The same labels are in the trace a second time, around what the GPU did for them.
    labels = ("cpu_op", "user_annotation")
    ranges = [event for event in events if event.get("cat") in labels and str(event["name"]).startswith(_LABEL)]
    calls = [event for event in events if event.get("cat") in ("cuda_runtime", "cuda_driver")]
    assert ranges, f"the trace has no range {_LABEL}...: nothing was watched"
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


def no_host_wait(scenario: Scenario, rank: int, device: torch.device) -> None:
    game = _warm(scenario, rank, device)
    with _waits_raise():
        trains(game)
    waits = waits_within(traced(lambda: trains(game)))
    assert not waits, f"the host waits: {waits}"


def _warm(scenario: Scenario, rank: int, device: torch.device) -> Game:
    """Behind the first steps, which make the handles of libraries, communicators and the memory that is used again."""
    ddp = wrapped(scenario.model, device, **scenario.ddp)
    game = Game.of(ddp, rank)
    game.optimizers = scenario.build(ddp)
    trains(game)
    torch.cuda.synchronize(device)
    return game


@contextmanager
def _waits_raise() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def _reads_a_value(bucket: Any) -> None:
    bucket.buffer[0].item()


def a_wait_is_found(scenario: Scenario, rank: int, device: torch.device) -> None:
    """The control: a stage that reads a value is seen both ways."""
    game = _warm(Scenario(build=step(AllReduce, lambda: _reads_a_value)), rank, device)
    assert waits_within(traced(lambda: trains(game))), "the profiler did not show that a stage read a value"
    try:
        with _waits_raise():
            trains(game)
    except Exception as error:
        if "synchroniz" not in f"{error}{error.__cause__}":
            raise
    else:
        raise AssertionError("set_sync_debug_mode did not show that a stage read a value")
