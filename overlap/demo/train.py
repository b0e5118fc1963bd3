"""Trains the two runs, in turns of an epoch, so that a change in the machine's load falls on both."""

from __future__ import annotations

import copy
import itertools
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.distributed import ReduceOp, all_reduce
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LRScheduler, OneCycleLR
from tqdm import tqdm

from overlap import Join
from overlap._torchvision import load_torchvision
from overlap.demo.clock import StepClock
from overlap.demo.data import Digits, shard
from overlap.demo.recipes import Recipe, overlapped, plain
from overlap.demo.settings import Settings
from overlap.launch import World

__all__ = ["Run", "accuracy", "batches_of_epoch", "mean_losses", "start_run", "start_runs", "train"]

_CLASSES = 10


@dataclass(frozen=True)
class Run:
    """One of the two trainings, on one rank."""

    name: str
    ddp: DistributedDataParallel
    recipe: Recipe
    scheduler: LRScheduler
    clock: StepClock
    # This rank's, of its own batch before the step; None where it had run out of batches.
    losses: list[Tensor | None] = field(default_factory=list)


def start_runs(settings: Settings, world: World) -> tuple[Run, Run]:
    """The plain and the overlapped run, from the same weights."""
    torch.manual_seed(settings.seed)
    # Convolutions that add in another order each time would differ between two plain runs, too.
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False
    model = load_torchvision().models.resnet18(num_classes=_CLASSES).to(world.device)
    return (
        start_run("plain", copy.deepcopy(model), plain, settings, world),
        start_run("overlapped", model, overlapped, settings, world),
    )


def train(runs: Sequence[Run], digits: Digits, settings: Settings, world: World) -> None:
    """Trains every run on the same batches in the same order."""
    steps = settings.epochs * settings.steps_per_epoch(world.size) * len(runs)
    # A log file gets a line now and then, a terminal a bar that moves.
    interval_s = 0.2 if sys.stderr.isatty() else 15.0
    with tqdm(total=steps, unit="step", disable=not world.is_main, mininterval=interval_s) as progress:
        for epoch in range(settings.epochs):
            for run in runs:
                progress.set_description(f"epoch {epoch + 1}/{settings.epochs}, {run.name:10}", refresh=False)
                _train_epoch(run, digits, epoch, settings, world, progress)
    for run in runs:
        run.recipe.finish()


def batches_of_epoch(digits: Digits, epoch: int, settings: Settings, world: World) -> Iterator[tuple[Tensor, Tensor]]:
    """This rank's batches."""
    return shard(
        digits, epoch=epoch, seed=settings.seed, rank=world.rank, ranks=world.size, batch_size=settings.batch_size
    )


def accuracy(run: Run, digits: Digits) -> float:
    """The share of the test split that this rank's model gets right."""
    model = run.ddp.module.eval()
    with torch.no_grad():
        right = sum(
            int((model(images).argmax(dim=1) == labels).sum())
            for images, labels in zip(digits.test_images.split(90), digits.test_labels.split(90), strict=True)
        )
    return right / len(digits.test_labels)


def mean_losses(run: Run, world: World) -> list[float]:
    """The loss of every step, over all ranks: one all-reduce for all of them, after the training."""
    nothing = torch.zeros((), device=world.device)
    own = torch.stack([nothing if loss is None else loss for loss in run.losses])
    ranks = torch.tensor([loss is not None for loss in run.losses], dtype=own.dtype, device=world.device)
    both = torch.stack([own, ranks])
    all_reduce(both, ReduceOp.SUM)
    return [float(loss) for loss in both[0] / both[1]]


def start_run(
    name: str,
    model: nn.Module,
    build: Callable[[DistributedDataParallel, Settings], Recipe],
    settings: Settings,
    world: World,
) -> Run:
    """A training of ``model``, ready for its first step."""
    ddp = DistributedDataParallel(model, device_ids=[world.device] if world.device.type == "cuda" else None)
    recipe = build(ddp, settings)
    scheduler = OneCycleLR(
        recipe.optimizer,
        max_lr=recipe.optimizer.param_groups[0]["lr"],
        total_steps=settings.epochs * settings.steps_per_epoch(world.size) + 1,
        cycle_momentum=False,
    )
    return Run(name, ddp, recipe, scheduler, StepClock(world.device))


def _train_epoch(run: Run, digits: Digits, epoch: int, settings: Settings, world: World, progress: tqdm[None]) -> None:
    steps = settings.steps_per_epoch(world.size)
    own_steps = settings.steps_of_rank(world.rank, world.size)
    batches = itertools.islice(batches_of_epoch(digits, epoch, settings, world), own_steps)
    if not settings.uneven:
        _train_on(batches, run, progress)
        return
    with Join([run.ddp, run.recipe.optimizer, run.scheduler], lengths=own_steps) as join:
        _train_on(join.iterate(batches), run, progress)
    run.losses.extend([None] * (steps - own_steps))


def _train_on(batches: Iterable[tuple[Tensor, Tensor]], run: Run, progress: tqdm[None]) -> None:
    optimizer = run.recipe.optimizer
    run.clock.start_epoch()
    for images, labels in batches:
        run.clock.mark()
        if run.recipe.zero_grad:
            optimizer.zero_grad()
        loss = cross_entropy(run.ddp(images), labels)
        loss.backward()
        optimizer.step()
        run.scheduler.step()
        # Left where it is: reading it here would wait for the GPU, averaging it for the other ranks.
        run.losses.append(loss.detach())
        progress.update()
    run.clock.mark()
