"""Thousands of steps of one form on two ranks, and samples of what may grow on the way."""

from __future__ import annotations

import datetime
import gc
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import overlap
from harness import run_ranks
from harness.models import MLP, mean_squared_error

from .forms import FORMS, Built, Form

Sample = dict[str, float]
"""What a rank holds, by name, at one step: `step`, and each of `slopes.MEASURES`; `time` in seconds."""
Leak = Callable[[int, dist.Store], object]
"""Called after each step with its number and the group's store."""

_NAMES = ("step", "time", "CPU time", "memory", "Python blocks", "threads", "descriptors", "store keys")
_SHORTER_BY = 2  # Under Join the last rank has so many steps less in each block.
_BATCHES = 16
_REFERENCE_STEPS = 40
_TIMEOUT_S = 120


def samples_of(form: str, *, steps: int, samples: int, leak: Leak | None = None) -> list[list[Sample]]:
    """The samples of each of two ranks, which make `steps` steps, and so many samples, evenly spread."""
    with tempfile.TemporaryDirectory(prefix="overlap-slopes-") as folder:
        return run_ranks(_run, 2, form, steps // samples, samples, leak, folder, backend=None, timeout_s=60 + steps / 5)


def _run(rank: int, ranks: int, name: str, steps: int, samples: int, leak: Leak | None, folder: str) -> list[Sample]:
    store = _store(rank, Path(folder))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    form = FORMS[name]
    built = form.made()
    batches = [MLP.batch(step, rank) for step in range(_BATCHES)]
    reference = FORMS["plain DDP"].made()
    # Made once: a list of samples would grow, too.
    found = torch.zeros(samples, len(_NAMES), dtype=torch.float64)
    for block in range(samples):
        begun_s, begun_cpu_s = time.perf_counter(), time.process_time()
        for place, batch in enumerate(_block(form, built, rank, ranks, steps, batches)):
            _train(built, batch)
            if leak is not None:
                leak(block * steps + place, store)
        took_s, took_cpu_s = time.perf_counter() - begun_s, time.process_time() - begun_cpu_s
        overlap.state_dict(built.ddp, built.optimizer)  # And nothing is in flight any more.
        dist.barrier()  # What the others wrote in the store is there.
        held = _held(store)
        cpu_time = took_cpu_s / steps / _cpu_s(reference, batches)
        sample = [(block + 1) * steps, took_s / steps, cpu_time, *held]
        found[block] = torch.tensor(sample, dtype=torch.float64)
    # DDP's reducers must not be the last to hold the group: they wait for its threads with the GIL held, and a thread
    # needs the GIL to let go of a backward's collective.
    del built, reference
    gc.collect()
    dist.destroy_process_group()
    return [dict(zip(_NAMES, row, strict=True)) for row in found.tolist()]


def _cpu_s(reference: Built, batches: list[Any]) -> float:
    """The CPU time of a step of plain DDP, now: a machine changes its speed in the course of minutes."""
    dist.barrier()
    begun_s = time.process_time()
    for step in range(_REFERENCE_STEPS):
        _train(reference, batches[step % _BATCHES])
    return (time.process_time() - begun_s) / _REFERENCE_STEPS


def _train(built: Built, batch: Any) -> None:
    built.optimizer.zero_grad()
    mean_squared_error(built.ddp, batch).backward()
    built.optimizer.step()


def _block(form: Form, built: Built, rank: int, ranks: int, steps: int, batches: list[Any]) -> Iterator[Any]:
    """The batches of some steps; under Join, one block of it."""
    own = steps - (_SHORTER_BY if form.join and rank == ranks - 1 else 0)
    loader = (batches[step % _BATCHES] for step in range(own))
    if form.join is None:
        yield from loader
        return
    with overlap.Join([built.ddp, built.optimizer], lengths=own if form.join == "known" else None) as join:
        yield from join.iterate(loader)


def _store(rank: int, folder: Path) -> dist.Store:
    """The usual one, hosted by rank 0, which tells the other its port."""
    timeout = datetime.timedelta(seconds=_TIMEOUT_S)
    told = folder / "port"
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, None, True, timeout, wait_for_workers=False)
        told.with_suffix(".part").write_text(str(store.port))
        told.with_suffix(".part").rename(told)
        return store
    deadline_s = time.monotonic() + _TIMEOUT_S
    while not told.exists() and time.monotonic() < deadline_s:
        time.sleep(0.005)
    return dist.TCPStore("127.0.0.1", int(told.read_text()), None, False, timeout, wait_for_workers=False)


def _held(store: dist.Store) -> tuple[int, ...]:
    """In the order of the names."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    threads, descriptors = (sum(1 for _ in Path(f"/proc/self/{what}").iterdir()) for what in ("task", "fd"))
    return pages * resource.getpagesize(), sys.getallocatedblocks(), threads, descriptors, store.num_keys()
