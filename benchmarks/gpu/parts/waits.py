"""How often a step makes the host wait for the device, chain by chain."""

from __future__ import annotations

import contextlib
import gc
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, record_function

from benchmarks.gpu.given import Given
from benchmarks.gpu.world import checks_of_gpu, join_ranks
from overlap._torch.device import synchronize

_PLAIN = "plain DDP"
# The first steps make the handles of libraries, communicators and the memory that later ones use again.
_WARMUP = range(4)
_WATCHED = range(4, 7)
_STEP = "one step"
# What waits for the device, in the names of CUDA's runtime and its driver's.
_SYNCHRONIZES = (
    "StreamSynchronize",
    "DeviceSynchronize",
    "EventSynchronize",
    "CtxSynchronize",
    "cudaMemcpy",
    "cudaFree",
    "cudaHostAlloc",
)
_LAUNCHES = ("cudaLaunchKernel", "cuLaunchKernel")
_READS = "aten::_local_scalar_dense"

_device: torch.device


def cases(given: Given) -> list[str]:
    global _device
    _device = join_ranks(given)
    # Under a Join the ranks tell each other who is left, which the host reads.
    names = [name for name, chain in checks_of_gpu("chains").CHAINS.items() if not chain.join]
    count = min(given.sizes.counted_chains, len(names))
    return [_PLAIN, *(names[place * len(names) // count] for place in range(count))]


def run(case: str, given: Given) -> None:
    chains = checks_of_gpu("chains")
    chain = chains.Chain(name=_PLAIN, build=_by_hand) if case == _PLAIN else chains.CHAINS[case]
    training = checks_of_gpu("training").Training.of(chain, given.rank, _device)
    _steps(training, _WARMUP)
    training.parameters()
    row: dict[str, Any] = {"chain": case}
    if given.device == "cuda":
        row |= _reported(training)
    row |= _traced(training, given)
    training.parameters()
    dist.barrier()
    given.row("", row)
    del training
    gc.collect()


def _by_hand(ddp: Any) -> list[Any]:
    return [torch.optim.AdamW(ddp.parameters(), fused=True)]


def _steps(training: Any, numbers: range, watched: AbstractContextManager[Any] | None = None) -> None:
    # A batch comes from pageable memory, which the host waits for: it is made before the steps.
    batches = [training.batch(number) for number in numbers]
    synchronize(_device)
    with watched or contextlib.nullcontext():
        for number, batch in zip(numbers, batches, strict=True):
            with record_function(_STEP):
                training.step(number, batch)


def _reported(training: Any) -> dict[str, Any]:
    """What PyTorch itself calls a synchronization, and where it was called from."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        _steps(training, _WATCHED, _sync_debug_mode("warn"))
    found = [one for one in caught if "synchronizing CUDA operation" in str(one.message)]
    places = Counter(f"{Path(one.filename).name}:{one.lineno}" for one in found)
    return {"reported": len(found) / len(_WATCHED), "where": ", ".join(place for place, _ in places.most_common(3))}


@contextlib.contextmanager
def _sync_debug_mode(mode: str) -> Iterator[None]:
    torch.cuda.set_sync_debug_mode(mode)
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def _traced(training: Any, given: Given) -> dict[str, Any]:
    """What the profiler saw of the host's calls within the steps, on all threads."""
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if given.device == "cuda" else [])]
    profiler = profile(activities=activities)
    _steps(training, _WATCHED, profiler)
    events = list(profiler.events() or [])
    steps = [event.time_range for event in events if event.name == _STEP and event.device_type.name == "CPU"]
    # The profiler's own waits lie outside of the steps.
    inside = [event for event in events if any(step.start <= event.time_range.start <= step.end for step in steps)]
    row: dict[str, Any] = {"values read": sum(event.name == _READS for event in inside) / len(_WATCHED)}
    if given.device == "cuda":
        launches = sum(event.name.startswith(_LAUNCHES) for event in inside)
        if not launches:
            given.wrong("the profiler saw no kernel launched: it cannot have seen a wait either")
        found = Counter(event.name for event in inside if event.name.endswith(_SYNCHRONIZES))
        row |= {"runtime": sum(found.values()) / len(_WATCHED), "calls": ", ".join(found)}
        row["launches"] = launches / len(_WATCHED)
    return row
