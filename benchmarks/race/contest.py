"""What is trained, by which contestants, and how a rank of a race does it.

All contestants have the same model, data, optimizer, learning rate and schedule: nothing is tuned for any of them. To
add one, write its function and its line in `CONTESTANTS`.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import os
import pickle
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from pydoc_data.topics import topics
from typing import IO, Any

import torch
import torch.distributed as dist
import tqdm
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import OneCycleLR

from benchmarks.bench.rank import preload
from benchmarks.bench.settings import RunConfig
from benchmarks.bench.world import FileExchange, die_with_parent, first_failure, open_world, run_job, timeout_s
from benchmarks.measuring import sent_bytes_counter
from benchmarks.models import GPT, GPTConfig, ResNet
from benchmarks.race.results import OK, Cell, Course, Results
from overlap import (
    AllReduce,
    Cast,
    Int4,
    Int8,
    LocalSGD,
    OverlappedOptimizer,
    PowerSGD,
    Quantize,
    Stage,
    Step,
    ZeroRedundancyOptimizer,
    ZeroStep,
    chain,
)  # fmt: skip
from overlap.demo.experiment import load_digits, shard
from overlap.demo.settings import TRAIN_IMAGES

__all__ = ["CONTESTANTS", "Plan", "Task", "load_task", "run_rank", "train"]

# A contestant that hangs is noticed by a collective's timeout; these are for one that hangs elsewhere.
_LEAST_LIMIT_S = 600.0
_LONGEST_STEP_S = 30.0
# Local SGD averages so often, after as many steps of plain DDP as two rounds have.
_LOCAL_PERIOD = 8
_EVALUATED_TOGETHER = 128


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What every rank is told: the course, the link, what is left to train, and where curves are kept."""

    course: Course
    config: RunConfig
    # Contestants and seeds.
    entries: tuple[tuple[str, int], ...]
    results: str

    def save(self) -> Path:
        path = Path(self.config.folder) / "race.pickle"
        path.write_bytes(pickle.dumps(self))
        return path


# The tasks ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Task:
    """A task with its data, loaded."""

    # What was read, with a digest that tells it from other data.
    data: str
    # In words, for the title of a table.
    model: str
    make_model: Callable[[], nn.Module]
    # The batches of a rank, without end: ``batches(seed, rank, ranks)``.
    batches: Callable[[int, int, int], Iterator[tuple[Tensor, Tensor]]]
    # The metric of a model in evaluation mode, on data that it was not trained on.
    evaluate: Callable[[nn.Module], float]
    optimizer: type[Optimizer]
    # The learning rate is the highest of the schedule.
    options: dict[str, Any]


def load_task(name: str, *, width: int, batch_size: int) -> Task:
    """The task ``digits`` or ``text``; the batch is that of all ranks together."""
    return (_digits if name == "digits" else _text)(width, batch_size)


def _digits(width: int, batch_size: int) -> Task:
    images = load_digits(image_size=32, images=TRAIN_IMAGES, device=torch.device("cpu"))

    def batches(seed: int, rank: int, ranks: int) -> Iterator[tuple[Tensor, Tensor]]:
        # Epochs far apart, so that no two seeds share an order.
        for epoch in itertools.count(seed * 10_000):
            yield from shard(images, epoch=epoch, seed=0, rank=rank, ranks=ranks, batch_size=batch_size // ranks)

    def accuracy(model: nn.Module) -> float:
        parts = zip(images.test_images.split(180), images.test_labels.split(180), strict=True)
        return sum(int((model(some).argmax(dim=1) == truth).sum()) for some, truth in parts) / len(images.test_labels)

    return Task(
        data=f"{TRAIN_IMAGES} of scikit-learn's digits ({_digest(images.train_images.numpy().tobytes())})",
        model=f"ResNet-18 of width {width}",
        make_model=lambda: ResNet("resnet18", channels=width, classes=10),
        batches=batches,
        evaluate=accuracy,
        optimizer=torch.optim.SGD,
        options={"lr": 0.05, "momentum": 0.9, "weight_decay": 5e-4, "fused": True},
    )


def _text(width: int, batch_size: int) -> Task:
    """The next byte of the reference of the language that ``help()`` shows, the same wherever that Python is."""
    text = "\n\n".join(topics[name] for name in sorted(topics)).encode()
    # One block in ten is held out: neighbours of the text that is trained on, never the same.
    blocks = [text[start : start + 2048] for start in range(0, len(text), 2048)]
    train = torch.frombuffer(
        bytearray().join(one for place, one in enumerate(blocks) if place % 10 != 9), dtype=torch.uint8
    )
    held_out = torch.frombuffer(bytearray().join(blocks[9::10]), dtype=torch.uint8)
    config = GPTConfig(layers=2, width=width, heads=4, vocabulary=256, tokens=32)

    def windows(data: Tensor, starts: Tensor) -> tuple[Tensor, Tensor]:
        found = data[starts[:, None] + torch.arange(config.tokens + 1)].long()
        return found[:, :-1], found[:, 1:]

    def batches(seed: int, rank: int, ranks: int) -> Iterator[tuple[Tensor, Tensor]]:
        own = batch_size // ranks
        generator = torch.Generator().manual_seed(seed)
        while True:
            # Every rank draws the whole batch and takes its part.
            starts = torch.randint(len(train) - config.tokens, (batch_size,), generator=generator)
            inputs, targets = windows(train, starts[rank * own :][:own])
            yield inputs, targets.flatten()

    def make_model() -> nn.Module:
        # Embeddings do not begin near zero: telling bytes and places apart would then take too many of the few steps.
        model = GPT(config)
        for weights in (model.embed.weight, model.position):
            nn.init.normal_(weights, std=1 / math.sqrt(width))
        return model

    inputs, targets = windows(held_out, torch.linspace(0, len(held_out) - config.tokens - 1, 128).long())

    def loss(model: nn.Module) -> float:
        parts = zip(inputs.split(32), targets.split(32), strict=True)
        total = sum(float(cross_entropy(model(some), truth.flatten(), reduction="sum")) for some, truth in parts)
        return total / targets.numel()

    return Task(
        data=f"{len(text):,} bytes of Python's documentation (pydoc_data.topics) ({_digest(text)})",
        model=f"a Transformer of {config.layers} layers of width {width} on {config.tokens} bytes",
        make_model=make_model,
        batches=batches,
        evaluate=loss,
        optimizer=torch.optim.AdamW,
        options={"lr": 5e-3, "weight_decay": 1e-2, "fused": True},
    )


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:12]


# The contestants ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Entrant:
    """A contestant on one rank, ready for its first step."""

    # The one that the training loop steps and the schedule changes.
    optimizer: Optimizer
    # The loop must clear the gradients; a registered chain does it by itself.
    zero_grad: bool = True
    # Waits for everything that steps have left in flight.
    settle: Callable[[], None] = lambda: None


_Enter = Callable[[DistributedDataParallel, Task], _Entrant]


def _made(ddp: DistributedDataParallel, task: Task) -> Optimizer:
    return task.optimizer(ddp.parameters(), **task.options)


def _plain(ddp: DistributedDataParallel, task: Task) -> _Entrant:
    return _Entrant(_made(ddp, task))


def _torch_fp16(ddp: DistributedDataParallel, task: Task) -> _Entrant:
    ddp.register_comm_hook(ddp.process_group, default_hooks.fp16_compress_hook)
    return _Entrant(_made(ddp, task))


def _chain(reducer: Callable[[], Stage]) -> _Enter:
    def enter(ddp: DistributedDataParallel, task: Task) -> _Entrant:
        optimizer = OverlappedOptimizer(_made(ddp, task))
        chain(reducer(), Step(optimizer)).register(ddp)
        return _Entrant(optimizer, zero_grad=False)

    return enter


def _zero(gather: Any) -> _Enter:
    def enter(ddp: DistributedDataParallel, task: Task) -> _Entrant:
        zero = ZeroRedundancyOptimizer(ddp.parameters(), task.optimizer, overlap_with_ddp=True, **task.options)
        chain(ZeroStep(zero, gather=gather)).register(ddp)
        return _Entrant(zero, zero_grad=False, settle=zero.wait)

    return enter


def _local_sgd(ddp: DistributedDataParallel, task: Task) -> _Entrant:
    return _Entrant(LocalSGD(ddp, _made(ddp, task), period=_LOCAL_PERIOD, start_step=2 * _LOCAL_PERIOD))


# In the order of the table; every ratio is taken to the first.
CONTESTANTS: dict[str, _Enter] = {
    "ddp": _plain,
    "torch-fp16": _torch_fp16,
    "overlap-step": _chain(AllReduce),
    "overlap-fp16": _chain(lambda: Cast(torch.float16, AllReduce())),
    "overlap-int8": _chain(lambda: Quantize(Int8())),
    "overlap-int4": _chain(lambda: Quantize(Int4(), error_feedback=True)),
    "overlap-powersgd-r4": _chain(lambda: PowerSGD(rank=4)),
    "overlap-zero": _zero("backward"),
    "overlap-zero-gather-forward": _zero("forward"),
    "overlap-local-sgd": _local_sgd,
}


# Training -----------------------------------------------------------------------------------------------------------


@dataclass(kw_only=True)
class _Curve:
    """One contestant with one seed; the first point is before the first step.

    ``seconds`` are of training alone, by the slowest rank of each round; ``metric`` is of rank 0's model, and None
    where it was not finite.
    """

    seconds: list[float] = field(default_factory=lambda: [0.0])
    metric: list[float | None] = field(default_factory=list)
    # By this rank.
    sent_bytes: float = 0.0


def train(task: Task, plan: Plan, rank: int, name: str, seed: int) -> _Curve:
    """Trains contestant ``name`` for all its steps; every rank calls it, and rank 0's curve has the metric.

    It trains in rounds of ``evaluate_every`` steps. Before a round all ranks meet, and each starts its clock; when its
    last step is done and nothing is left in flight it stops it. Then rank 0 evaluates its model while the others wait,
    with the clocks stopped, on the same schedule for every contestant. What ranks tell each other about that goes
    through files and is not counted as sent.
    """
    course = plan.course
    with open_world(plan.config, rank, f"{name}-{seed}") as world:
        torch.manual_seed(seed)
        ddp = DistributedDataParallel(task.make_model())
        entrant = CONTESTANTS[name](ddp, task)
        schedule = OneCycleLR(
            entrant.optimizer,
            max_lr=task.options["lr"],
            total_steps=course.steps + 1,
            pct_start=0.2,
            cycle_momentum=False,
        )
        batches = task.batches(seed, rank, course.ranks)
        sent_bytes = sent_bytes_counter(plan.config.link)
        curve = _Curve(metric=[_evaluate(task, ddp.module) if rank == 0 else None])
        for start in range(0, course.steps, course.evaluate_every):
            world.wait_for_ranks(f"start-{start}")
            before_bytes = sent_bytes()
            dist.barrier()
            began = time.perf_counter()
            for inputs, targets in itertools.islice(batches, min(course.evaluate_every, course.steps - start)):
                if entrant.zero_grad:
                    entrant.optimizer.zero_grad()
                cross_entropy(ddp(inputs), targets).backward()
                entrant.optimizer.step()
                schedule.step()
            entrant.settle()
            taken: list[float] = world.files.exchange(
                f"{world.name}-end-{start}", time.perf_counter() - began, timeout_s=timeout_s(plan.config)
            )
            # Every rank is done, so all that this one had to send has left.
            curve.sent_bytes += sent_bytes() - before_bytes
            curve.seconds.append(curve.seconds[-1] + max(taken))
            curve.metric.append(_evaluate(task, ddp.module) if rank == 0 else None)
        # Not before rank 0 has evaluated: a group that is destroyed closes the others' connections.
        world.wait_for_ranks("all-evaluated")
    return curve


def _evaluate(task: Task, model: nn.Module) -> float | None:
    model.eval()
    with torch.no_grad():
        value = task.evaluate(model)
    model.train()
    return value if math.isfinite(value) else None


def run_rank(plan_path: str) -> int:
    """One rank of a race: it trains one contestant and seed after the other, each in a child of its own.

    This process itself touches no process group, so nothing that a contestant does can end the race. Rank 0 adds each
    curve to the results when it is there.
    """
    die_with_parent()
    plan: Plan = pickle.loads(Path(plan_path).read_bytes())
    course = plan.course
    # Its monitor is a thread, and a process that forks should have none.
    tqdm.tqdm.monitor_interval = 0
    preload()
    rank = int(os.environ["RANK"])
    task = load_task(course.task, width=course.width, batch_size=course.batch_size)
    folder = Path(plan.config.folder)
    files = FileExchange(folder=folder, rank=rank, ranks=course.ranks)
    limit_s = _LEAST_LIMIT_S + _LONGEST_STEP_S * course.steps
    bar = tqdm.tqdm(plan.entries, unit="training", file=sys.stderr, disable=rank != 0, leave=False)
    for name, seed in bar:
        bar.set_description(f"seed {seed}, {name}")
        load = round(os.getloadavg()[0], 2)
        label = f"{name}-{seed}"

        def job(terminal: IO[str], name: str = name, seed: int = seed) -> _Curve:
            return train(task, plan, rank, name, seed)

        outcome = run_job(job, folder, f"{label}.{rank}", limit_s=limit_s)
        outcomes = files.exchange(f"{label}-outcome", outcome, timeout_s=limit_s + timeout_s(plan.config))
        if rank != 0:
            continue
        cause = first_failure(outcomes)
        if cause is not None:
            cell = Cell(contestant=name, seed=seed, status=outcomes[cause].failure or "fails", load=load)
        else:
            curves: list[_Curve] = [one.value for one in outcomes]
            cell = Cell(
                contestant=name,
                seed=seed,
                status=OK,
                load=load,
                seconds=tuple(round(one, 4) for one in curves[0].seconds),
                metric=tuple(None if one is None else round(one, 6) for one in curves[0].metric),
                sent_bytes=round(max(one.sent_bytes for one in curves)),
            )
        Results.add(plan.results, course, cell)
    return 0
