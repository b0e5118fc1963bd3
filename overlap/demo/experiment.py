"""What every rank of the demo does: train both runs, compare them, and on rank 0 present the outcome."""

from __future__ import annotations

from overlap.demo.data import Digits, load_digits
from overlap.demo.parity import compare
from overlap.demo.report import Outcome, Report
from overlap.demo.settings import Settings
from overlap.demo.train import Run, accuracy, mean_losses, start_runs, train
from overlap.launch import World, init_ranks

__all__ = ["present", "run_experiment", "train_and_compare"]

_FAILED = 1


def run_experiment(settings: Settings) -> int:
    """Trains twice and returns the exit code: 0 if the two runs agree as far as they must."""
    with init_ranks(settings.device) as world:
        report = train_and_compare(settings, world)
    return present(report) if world.is_main else 0


def train_and_compare(settings: Settings, world: World) -> Report:
    """Trains both runs on every rank of ``world``; what rank 0 reports is the outcome."""
    digits = load_digits(image_size=settings.image_size, images=settings.images, device=world.device)
    plain, overlapped = start_runs(settings, world)
    if world.is_main:
        print(_heading(settings, world))
        print(f"plain:      {plain.recipe.description}\noverlapped: {overlapped.recipe.description}", flush=True)
    train([plain, overlapped], digits, settings, world)
    return Report(
        settings=settings,
        world=world,
        parity=compare(plain, overlapped),
        plain=_outcome(plain, digits, world),
        overlapped=_outcome(overlapped, digits, world),
        exact=overlapped.recipe.exact,
    )


def _outcome(run: Run, digits: Digits, world: World) -> Outcome:
    losses = mean_losses(run, world)
    # DDP broadcasts the running statistics of rank 0, so its model is evaluated.
    share = accuracy(run, digits) if world.is_main else 0.0
    return Outcome(run.recipe.description, share, run.clock.median_ms(), losses)


def _heading(settings: Settings, world: World) -> str:
    size, steps = settings.image_size, settings.steps_per_epoch(world.size)
    return (
        f"ResNet-18 on {settings.images} handwritten digits of {size}x{size} pixels, optimizer {settings.optimizer}\n"
        f"ranks: {world.size} on {world.device.type} ({world.backend}); epochs: {settings.epochs} of {steps} steps; "
        f"batch: {settings.batch_size} images a rank" + _shares(settings, world)
    )


def _shares(settings: Settings, world: World) -> str:
    if not settings.uneven:
        return ""
    steps = ", ".join(str(settings.steps_of_rank(rank, world.size)) for rank in range(world.size))
    return f"\nuneven: ranks run {steps} steps an epoch, under Join"


def present(report: Report) -> int:
    """Prints and saves what came out, and returns the exit code."""
    plot = report.settings.output / "loss.png"
    report.write_plot(plot)
    print(f"\n{report.table()}\n\n{report.verdict()}\nLoss curves: {plot}", flush=True)
    if report.settings.json is not None:
        report.write_json(report.settings.json)
        print(f"Results: {report.settings.json}")
    return 0 if report.passed else _FAILED
