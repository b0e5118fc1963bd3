"""`python -m soak.slopes`: does anything grow in 20,000 steps of each form? Exit status 0 only if nothing does.

Lines are fitted by least squares. A slope counts where it is more than three of its standard errors, and where what it
adds over the run is more than the measure's bound.
"""

import argparse
import ctypes
import gc
import itertools
import math
import resource
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import overlap
from harness import plain_step, run_ranks
from harness.models import MLP, mean_squared_error

from .forms import FORMS, Form

STEPS = 20_000
_SAMPLES = 200
_BATCHES = 16
_SHORTER_BY = 2  # Under Join the last rank has so many steps less in each block.
_SIGNIFICANT = 3.0  # Standard errors.
_WARM_UP = 0.2  # The part of the run that is left out: caches fill, buckets are cut anew.
_MOST_CORRELATED = 0.95

# What must not grow by more than this over the run, in the order in which `_held` returns it.
BOUNDS = {"memory, KiB": 2048, "Python blocks": 400, "threads": 0.5, "descriptors": 0.5, "store keys": 4}
Leak = Callable[[int, dist.Store], object]
"""Called after each step with its number and the group's store."""


@dataclass(frozen=True, kw_only=True)
class Slope:
    """A line through samples: how much more there is after a step, with its standard error."""

    per_step: float
    error: float
    grows: bool


def slopes_of(form: str, *, steps: int, samples: int, leak: Leak | None = None) -> tuple[float, dict[str, Slope]]:
    """Milliseconds a step of ``steps`` on two ranks, and for each measure the slope on the rank where it grows most."""
    begun_s = time.monotonic()
    args = form, steps // samples, samples, leak
    # PyTorch's flight recorder keeps the last 2,000 collectives, and grows until it has as many.
    ranks = run_ranks(_run, 2, *args, timeout_s=60 + steps / 5, env={"TORCH_FR_BUFFER_SIZE": "0"})
    step_ms = 1000 * (time.monotonic() - begun_s) / steps
    places = [steps // samples * (1 + sample) for sample in range(samples)]
    found = {}
    for column, (name, bound) in enumerate(BOUNDS.items()):
        both = [fitted(places, [row[column] for row in rows], bound) for rows in ranks]
        found[name] = max(both, key=lambda slope: (slope.grows, slope.per_step))
    return step_ms, found


def fitted(steps: Sequence[float], values: Sequence[float], bound: float) -> Slope:
    """The line of least squares through all but the first samples.

    Its standard error allows for residuals of which one is like the one before, as those of a process's memory are: by
    their first correlation there are fewer independent ones.
    """
    kept = slice(int(_WARM_UP * len(steps)), None)
    steps, values = steps[kept], values[kept]
    line = statistics.linear_regression(steps, values)
    residuals = [value - line.slope * step - line.intercept for step, value in zip(steps, values, strict=True)]
    squares = sum(residual**2 for residual in residuals)
    center = statistics.fmean(steps)
    error = math.sqrt(squares / (len(steps) - 2) / sum((step - center) ** 2 for step in steps))
    neighbours = sum(one * other for one, other in itertools.pairwise(residuals))
    correlation = min(max(neighbours / squares, 0.0), _MOST_CORRELATED) if squares else 0.0
    widened = error * math.sqrt((1 + correlation) / (1 - correlation))
    grows = line.slope > _SIGNIFICANT * widened and line.slope * steps[-1] > bound
    return Slope(per_step=line.slope, error=widened, grows=grows)


def _run(rank: int, ranks: int, name: str, steps: int, samples: int, leak: Leak | None) -> list[list[float]]:
    store = dist.distributed_c10d._get_default_store()
    form = FORMS[name]
    built = form.made()
    batches = [MLP.batch(step, rank) for step in range(_BATCHES)]
    # Made once: a list of samples would grow, too.
    found = torch.zeros(samples, len(BOUNDS), dtype=torch.float64)
    for block in range(samples):
        for place, batch in enumerate(_block(form, built, rank, ranks, steps, batches)):
            plain_step(built.ddp, built.optimizer, batch, mean_squared_error)
            if leak is not None:
                leak(block * steps + place, store)
        overlap.state_dict(built.ddp, built.optimizer)  # And nothing is in flight any more.
        dist.barrier()  # What the others wrote in the store is there.
        found[block] = torch.tensor(_held(store), dtype=torch.float64)
    # DDP's reducers must not be the last to hold the group: they wait for its threads with the GIL held, and a thread
    # needs the GIL to let go of a backward's collective.
    del built
    gc.collect()
    return found.tolist()


def _block(form: Form, built: Any, rank: int, ranks: int, steps: int, batches: list[Any]) -> Iterator[Any]:
    """The batches of some steps; under Join, one block of it."""
    own = steps - (_SHORTER_BY if form.is_joined and rank == ranks - 1 else 0)
    loader = (batches[step % _BATCHES] for step in range(own))
    if not form.is_joined:
        yield from loader
        return
    with overlap.Join([built.ddp, built.optimizer]) as join:
        yield from join.iterate(loader)


def _held(store: dist.Store) -> tuple[float, ...]:
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # Memory that is free and was not given back is not held.
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    threads, descriptors = (sum(1 for _ in Path(f"/proc/self/{what}").iterdir()) for what in ("task", "fd"))
    memory = pages * resource.getpagesize() / 1024
    return memory, sys.getallocatedblocks(), threads, descriptors, store.num_keys()


def _row(form: str, step_ms: float, slopes: dict[str, Slope]) -> str:
    cells = [f"{1000 * slope.per_step:.2g} ± {1000 * slope.error:.2g}" for slope in slopes.values()]
    marked = [f"**{cell}**" if slope.grows else cell for cell, slope in zip(cells, slopes.values(), strict=True)]
    return f"| {form} | {step_ms:.1f} | {' | '.join(marked)} |"


def _main() -> int:
    parser = argparse.ArgumentParser(prog="python -m soak.slopes", description=__doc__)
    parser.add_argument("--steps", type=int, default=STEPS)
    options = parser.parse_args()
    print("Growth in 1,000 steps ± its standard error, on the rank where it is larger; in bold: what grows.\n")
    print(f"| form | ms a step | {' | '.join(BOUNDS)} |\n| --- |{' ---: |' * (1 + len(BOUNDS))}")
    has_grown = False
    for form in FORMS:
        step_ms, slopes = slopes_of(form, steps=options.steps, samples=min(_SAMPLES, options.steps // 20))
        print(_row(form, step_ms, slopes), flush=True)
        has_grown |= any(slope.grows for slope in slopes.values())
    return int(has_grown)


if __name__ == "__main__":
    sys.exit(_main())
