"""The contestants of a race, and the training of one of them on every rank.

All contestants have the same model, data, optimizer, learning rate and schedule: nothing is tuned for any of them. To
add one, write its line in `CONTESTANTS`.
"""

from __future__ import annotations

import itertools
import math
import time
from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import OneCycleLR

from benchmarks.measuring import sent_bytes_counter
from benchmarks.race.results import OK, Cell, Course
from benchmarks.race.tasks import Task, load_task
from benchmarks.ranks import Network, RankError, World, run_on_ranks
from benchmarks.recipes import Recipe, local_sgd, plain, sharded, stepped, torch_hook
from overlap import AllReduce, Cast, Int4, Int8, PowerSGD, Quantize

# A contestant that hangs is noticed by a collective's timeout; these are for one that hangs elsewhere.
_LEAST_LIMIT_S = 600.0
_LONGEST_STEP_S = 30.0

# In the order of the table; every ratio is taken to the first.
CONTESTANTS: dict[str, Recipe] = {
    "ddp": plain,
    "torch-fp16": torch_hook(default_hooks.fp16_compress_hook),
    "overlap-step": stepped(),
    "overlap-fp16": stepped(lambda: Cast(torch.float16, AllReduce())),
    "overlap-int8": stepped(lambda: Quantize(Int8())),
    "overlap-int4": stepped(lambda: Quantize(Int4(), error_feedback=True)),
    "overlap-powersgd-r4": stepped(lambda: PowerSGD(rank=4)),
    "overlap-powersgd-r16": stepped(lambda: PowerSGD(rank=16)),
    "overlap-powersgd-r32": stepped(lambda: PowerSGD(rank=32)),
    # As is advised, after a quarter of these trainings.
    "overlap-powersgd-r4-late": stepped(lambda: PowerSGD(rank=4, start_step=32)),
    "overlap-powersgd-r16-late": stepped(lambda: PowerSGD(rank=16, start_step=32)),
    "overlap-powersgd-r32-late": stepped(lambda: PowerSGD(rank=32, start_step=32)),
    "overlap-zero": sharded(gather="backward"),
    "overlap-zero-gather-forward": sharded(gather="forward"),
    # It begins after as many steps of plain DDP as two rounds have.
    "overlap-local-sgd": local_sgd(period=8, start_step=16),
}


@dataclass(kw_only=True)
class _Curve:
    """One training, as a rank has seen it: a point before the first step, and one after every round."""

    # Of training alone, each round's.
    seconds: list[float] = field(default_factory=list)
    # Of rank 0's model, and None where it was not finite.
    metric: list[float | None] = field(default_factory=list)
    # By this rank.
    sent_bytes: float = 0.0


def race(network: Network, course: Course, name: str, seed: int, load: float) -> Cell:
    """One training of a contestant, in processes of its own."""
    limit_s = _LEAST_LIMIT_S + _LONGEST_STEP_S * course.steps
    try:
        curves: list[_Curve] = run_on_ranks(network, _train, course, name, seed, limit_s=limit_s)
    except RankError as error:
        return Cell(contestant=name, seed=seed, status=str(error), load=load)
    # A round is as long as on its slowest rank.
    rounds_s = [max(times) for times in zip(*(one.seconds for one in curves), strict=True)]
    return Cell(
        contestant=name,
        seed=seed,
        status=OK,
        load=load,
        seconds=tuple(round(one, 4) for one in itertools.accumulate(rounds_s, initial=0.0)),
        metric=tuple(None if one is None else round(one, 6) for one in curves[0].metric),
        sent_bytes=round(max(one.sent_bytes for one in curves)),
    )


def _train(world: World, course: Course, name: str, seed: int) -> _Curve:
    """Trains in rounds of ``evaluate_every`` steps.

    Before a round all ranks meet, and each starts its clock; it stops when its last step is done and nothing is left in
    flight. Then rank 0 evaluates its model while the others wait, with the clocks stopped, on the same schedule for
    every contestant.
    """
    task = load_task(course.task, width=course.width, batch_size=course.batch_size)
    torch.manual_seed(seed)
    ddp = DistributedDataParallel(task.make_model())
    make = task.make
    if course.learning_rate is not None:
        make = replace(make, options={**make.options, "lr": course.learning_rate})
    update = CONTESTANTS[name](ddp, make)
    schedule = OneCycleLR(
        update.optimizers[0],
        max_lr=make.options["lr"],
        total_steps=course.steps + 1,
        pct_start=0.2,
        cycle_momentum=False,
    )
    batches = task.batches(seed, world.rank, course.ranks)
    sent_bytes = sent_bytes_counter(world.network.kind)
    curve = _Curve()
    for start in range(0, course.steps, course.evaluate_every):
        curve.metric.append(_evaluate(task, ddp.module) if world.rank == 0 else None)
        world.meet()
        before_bytes = sent_bytes()
        dist.barrier()
        began = time.perf_counter()
        for inputs, targets in itertools.islice(batches, min(course.evaluate_every, course.steps - start)):
            update.clear()
            cross_entropy(ddp(inputs), targets).backward()
            update.step()
            schedule.step()
        update.finish()
        curve.seconds.append(time.perf_counter() - began)
        # When every rank is done, all that this one had to send has left.
        world.meet()
        curve.sent_bytes += sent_bytes() - before_bytes
    curve.metric.append(_evaluate(task, ddp.module) if world.rank == 0 else None)
    # A group that is destroyed closes the others' connections.
    world.meet()
    return curve


def _evaluate(task: Task, model: nn.Module) -> float | None:
    model.eval()
    with torch.no_grad():
        value = task.evaluate(model)
    model.train()
    return value if math.isfinite(value) else None
