"""Every variant: a row of the table, the way it trains, and the row that it is compared with.

Most are a line: a recipe with a name. One that needs more than a model and an update is a function with
`@variant(...)` above it, which builds its training loop.
"""

from __future__ import annotations

import contextlib
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, quantization_hooks
from torch.nn.parallel import DistributedDataParallel

from benchmarks.models import WORKLOADS
from benchmarks.recipes import (
    Maker,
    Recipe,
    Update,
    local_sgd,
    plain,
    sharded,
    stepped,
    stepped_by_loop,
    torch_hook,
    torch_hook_then_optimizer,
    torch_powersgd,
    torch_zero,
)
from overlap import (
    AllReduce,
    Cast,
    Float8,
    Int4,
    Int8,
    Join,
    PowerSGD,
    Quantize,
    TopK,
    optim,
)  # fmt: skip
from overlap.errors import ConfigurationError

# A small step keeps random labels from blowing up the weights.
LEARNING_RATE = 1e-4
OPTIMIZERS = {
    "sgd": Maker(torch.optim.SGD, {"lr": LEARNING_RATE, "momentum": 0.9}),
    "sgd-fused": Maker(torch.optim.SGD, {"lr": LEARNING_RATE, "momentum": 0.9, "fused": True}),
    "adamw": Maker(torch.optim.AdamW, {"lr": LEARNING_RATE, "foreach": False}),
    "adamw-fused": Maker(torch.optim.AdamW, {"lr": LEARNING_RATE, "fused": True}),
}


@dataclass(frozen=True, kw_only=True)
class TrainingLoop:
    """A variant that is built: `step()` trains one step.

    `block(steps)` is entered before a block of so many steps and left after it, both untimed. `finish()` waits for
    the work that steps have left in flight.
    """

    step: Callable[[], None]
    block: Callable[[int], AbstractContextManager[object]] = nullcontext
    finish: Callable[[], None] = lambda: None


@dataclass(kw_only=True)
class TrainingSetup:
    """One variant's own process group, and the same weights and the same batch as every other variant's.

    With a group of its own, a variant that leaves collectives half done does not break the others.
    """

    settings: Namespace
    device: torch.device
    # The variant's own, or that of `--optimizer`.
    optimizer_name: str
    group: dist.ProcessGroup = field(init=False)
    batch: tuple[Tensor, Tensor] = field(init=False)

    def __post_init__(self) -> None:
        """Makes a process group: every rank must make its setups in the same order."""
        self.group = dist.new_group()
        torch.manual_seed(self.settings.seed + 1 + dist.get_rank(self.group))
        inputs, target = WORKLOADS[self.settings.model].make_batch(self.settings.batch_size)
        self.batch = inputs.to(self.device), target.to(self.device)

    @property
    def make(self) -> Maker:
        """The variant's optimizer."""
        return OPTIMIZERS[self.optimizer_name]

    def model(self) -> nn.Module:
        torch.manual_seed(self.settings.seed)
        with self.device:
            return WORKLOADS[self.settings.model].make_model()

    def ddp(self) -> DistributedDataParallel:
        return DistributedDataParallel(
            self.model(),
            process_group=self.group,
            bucket_cap_mb=self.settings.bucket_cap_mb,
            gradient_as_bucket_view=self.settings.gradient_as_bucket_view,
        )

    def loss(self, module: nn.Module) -> Tensor:
        """Forward on this rank's batch."""
        inputs, target = self.batch
        dtype = WORKLOADS[self.settings.model].autocast
        with torch.autocast(self.device.type, dtype, enabled=dtype is not None and self.device.type != "cpu"):
            return nn.functional.cross_entropy(module(inputs), target)

    def loop(self, module: nn.Module, update: Update, **options: Any) -> TrainingLoop:
        """A training loop of a model with its update."""

        def step() -> None:
            update.clear()
            self.loss(module).backward()
            update.step()

        return TrainingLoop(step=step, finish=update.finish, **options)


COMPUTE_ONLY = "compute-only"
FloorKind = Literal["compute", "bucketed", "streamed"]
Build = Callable[[TrainingSetup], TrainingLoop]


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One row of the table."""

    # Its name in the table and on the command line.
    name: str
    build: Build
    # The one it steps with; by default that of `--optimizer`.
    optimizer: str | None = None
    # The variant its ratio is taken to; by default plain DDP with the same kind of optimizer.
    baseline: str | None = None
    # Which bound holds: "bucketed" where all buckets must be reduced before the step ends, "streamed" where
    # communication may go on at any time, "compute" where there is none.
    floor: FloorKind = "bucketed"
    # Steps timed together, for a variant whose steps differ (one average in eight, say).
    block_steps: int = 1
    # Untimed steps before them, for one that leaves work in flight to the next step.
    lead_in_steps: int = 0
    # It may crash at any step, so it is timed with its baselines and no other variant.
    timed_alone: bool = False

    def optimizer_name(self, settings: Namespace) -> str:
        return self.optimizer or settings.optimizer

    def baseline_name(self, settings: Namespace) -> str:
        if self.baseline is not None:
            return self.baseline
        # AdamW rows are compared with the fastest plain AdamW, whichever kernel they use themselves.
        optimizer = self.optimizer_name(settings)
        return f"ddp-{optimizer}" if optimizer.startswith("sgd") else "ddp-adamw-fused"

    def baseline_16bit_name(self, settings: Namespace) -> str:
        """PyTorch's own hook that halves the bytes, with the same kind of optimizer."""
        return "torch-fp16" if self.optimizer_name(settings).startswith("sgd") else "torch-fp16-adamw"


_VARIANTS: dict[str, Variant] = {}


def registry() -> Mapping[str, Variant]:
    """Every variant by name, in the order of the table."""
    return _VARIANTS


def variant(name: str, **fields: Any) -> Callable[[Build], Build]:
    """Makes a row with these fields of the decorated function, which builds its training loop."""

    def add(build: Build) -> Build:
        _VARIANTS[name] = Variant(name=name, build=build, **fields)
        return build

    return add


def _row(name: str, recipe: Recipe, **fields: Any) -> None:
    """Makes a row of a recipe."""

    @variant(name, **fields)
    def build(setup: TrainingSetup) -> TrainingLoop:
        ddp = setup.ddp()
        return setup.loop(ddp, recipe(ddp, setup.make))


# DDP as everyone uses it, and the computation alone -----------------------------------------------------------------


@variant(COMPUTE_ONLY, baseline="ddp-sgd", floor="compute")
def _compute_only(setup: TrainingSetup) -> TrainingLoop:
    """Forward and backward without communication or update: every other row is compared with it."""
    ddp = setup.ddp()

    def step() -> None:
        ddp.zero_grad()
        with ddp.no_sync():
            setup.loss(ddp).backward()

    return TrainingLoop(step=step)


for _name in OPTIMIZERS:
    _row(f"ddp-{_name}", plain, optimizer=_name)


# The update in backward ---------------------------------------------------------------------------------------------

_row("torch-hook-then-optimizer-adamw", torch_hook_then_optimizer, optimizer="adamw")
_row("overlap-step-adamw", stepped(), optimizer="adamw-fused")
_row("overlap-step-adamw-deferred", stepped(deferred=True), optimizer="adamw-fused")


# The update sharded -------------------------------------------------------------------------------------------------


def _sharded_rows(name: str, *, optimizer: str, **options: Any) -> None:
    """Two rows: with the gathers in backward, and in the next forward."""
    _row(name, sharded(gather="backward", **options), optimizer=optimizer)
    # A step leaves its gathers to the next forward, so several steps in a row are timed.
    in_row: dict[str, Any] = {"floor": "streamed", "block_steps": 4, "lead_in_steps": 1}
    _row(f"{name}-gather-forward", sharded(gather="forward", **options), optimizer=optimizer, **in_row)


_row("torch-zero-sgd", torch_zero, optimizer="sgd")
_row("torch-zero-adamw", torch_zero, optimizer="adamw")
_sharded_rows("overlap-zero-sgd", optimizer="sgd")
_sharded_rows("overlap-zero-adamw", optimizer="adamw-fused")


# Gradients in fewer bytes -------------------------------------------------------------------------------------------

_row("torch-fp16", torch_hook(default_hooks.fp16_compress_hook))
_row("torch-fp16-adamw", torch_hook(default_hooks.fp16_compress_hook), optimizer="adamw-fused")
_row("overlap-fp16", stepped(lambda: Cast(torch.float16, AllReduce())))
_row("torch-bf16", torch_hook(default_hooks.bf16_compress_hook))
_row("overlap-bf16", stepped(lambda: Cast(torch.bfloat16, AllReduce())))
_row(
    "torch-powersgd-r4",
    torch_powersgd,
    # On Gloo its collectives reach the ranks in different orders now and then, and abort the process.
    timed_alone=True,
)
_row("overlap-powersgd-r4", stepped(lambda: PowerSGD(rank=4)))
_row("overlap-powersgd-r4-alternate", stepped(lambda: PowerSGD(rank=4, alternate=True)))
_row("overlap-powersgd-r4-int8", stepped(lambda: PowerSGD(rank=4, wire=Int8())))
_row("torch-quantize8", torch_hook(quantization_hooks.quantization_pertensor_hook))
_row("overlap-quantize8", stepped(lambda: Quantize(Int8())))
_row("overlap-quantize4", stepped(lambda: Quantize(Int4())))
_row("overlap-quantize4-feedback", stepped(lambda: Quantize(Int4(), error_feedback=True)))
_row("overlap-float8", stepped(lambda: Quantize(Float8())))
_row("overlap-topk1-feedback", stepped(lambda: Quantize(TopK(0.01), error_feedback=True)))


# Parameters averaged now and then -----------------------------------------------------------------------------------

_PERIOD = 8


@variant("torch-averager", floor="streamed", block_steps=_PERIOD)
def _torch_averager(setup: TrainingSetup) -> TrainingLoop:
    from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager

    return _averaged(setup, PeriodicModelAverager)


@variant("overlap-averager", floor="streamed", block_steps=_PERIOD)
def _overlap_averager(setup: TrainingSetup) -> TrainingLoop:
    return _averaged(setup, optim.PeriodicModelAverager)


def _averaged(setup: TrainingSetup, make: Callable[..., Any]) -> TrainingLoop:
    """Both libraries' averager of that name, called behind each step."""
    model = setup.model()
    averager = make(period=_PERIOD, warmup_steps=0, process_group=setup.group)
    local = setup.loop(model, stepped_by_loop(setup.make(model.parameters())))

    def step() -> None:
        local.step()
        averager.average_parameters(model.parameters())

    return TrainingLoop(step=step)


def _local_sgd_row(name: str, **options: Any) -> None:
    recipe = local_sgd(period=_PERIOD, start_step=0, **options)
    _row(name, recipe, floor="streamed", block_steps=_PERIOD)


_local_sgd_row("overlap-local-sgd")
_local_sgd_row("overlap-local-sgd-overlap", overlap=True)
_local_sgd_row("overlap-local-sgd-int4", wire=Int4(), error_feedback=True)


# Ranks that may run out of inputs at different steps ----------------------------------------------------------------


@variant("torch-join", block_steps=4)
def _torch_join(setup: TrainingSetup) -> TrainingLoop:
    from torch.distributed.algorithms.join import Join as TorchJoin

    ddp = setup.ddp()
    return setup.loop(ddp, plain(ddp, setup.make), block=lambda steps: TorchJoin([ddp]))


@variant("overlap-join", block_steps=4)
def _overlap_join(setup: TrainingSetup) -> TrainingLoop:
    ddp = setup.ddp()
    loop = setup.loop(ddp, plain(ddp, setup.make))
    batches: Iterator[int] = iter(())

    @contextlib.contextmanager
    def block(steps: int) -> Iterator[None]:
        nonlocal batches
        with Join([ddp]) as join:
            batches = join.iterate(range(steps))
            # The first waits for the other ranks: once per loop, so it is not part of a step.
            next(batches)
            yield

    def step() -> None:
        loop.step()
        next(batches, None)

    return TrainingLoop(step=step, block=block)


def choose(settings: Namespace) -> tuple[str, ...]:
    """The variants to run: those asked for or all, with the baselines they are compared to."""
    known = registry()
    unknown = [name for name in settings.variants if name not in known]
    if unknown:
        raise ConfigurationError(f"variants has {', '.join(unknown)}; known are {', '.join(known)}")
    return with_baselines(settings.variants or known, settings)


def with_baselines(names: Iterable[str], settings: Namespace) -> tuple[str, ...]:
    """`names`, the baselines of their ratios, and compute-only, in the order of the table."""
    known = registry()
    wanted = {COMPUTE_ONLY, *names}
    wanted |= {known[name].baseline_name(settings) for name in wanted}
    return tuple(name for name in known if name in wanted)
