"""Every variant: a row of the table, the way it trains, and the row that it is compared with.

A variant is a function with `@variant(...)` above it that builds its training loop, or one line where it is one of our
reducers (`_ours`), of PyTorch's hooks (`_torch_hook`), of sharded updates or of local SGD.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook, quantization_hooks
from torch.nn.parallel import DistributedDataParallel

from benchmarks.bench.settings import Settings
from benchmarks.models import Workload
from overlap import (
    AllReduce,
    Cast,
    Float8,
    Int4,
    Int8,
    Join,
    OverlappedOptimizer,
    PowerSGD,
    Quantize,
    Stage,
    Step,
    TopK,
    UnsupportedError,
    ZeroRedundancyOptimizer,
    ZeroStep,
    chain,
    optim,
)  # fmt: skip
from overlap.errors import ConfigurationError

LEARNING_RATE = 1e-4


@dataclass(frozen=True, kw_only=True)
class TrainingLoop:
    """A variant that is built: `step()` trains one step.

    `block(steps)` is entered before a block of so many steps and left after it, both untimed. `finish()` waits for
    what steps have left in flight.
    """

    step: Callable[[], None]
    block: Callable[[int], AbstractContextManager[object]] = nullcontext
    finish: Callable[[], None] = lambda: None


@dataclass(kw_only=True)
class TrainingSetup:
    """One variant's own process group, and the same weights and the same batch as every other variant's.

    With a group of its own, a variant that leaves collectives half done does not break the others.
    """

    settings: Settings
    workload: Workload
    device: torch.device
    group: dist.ProcessGroup
    # Whether this process stands for all ranks.
    is_simulated: bool
    # The variant's own, or that of `--optimizer`.
    optimizer_name: str
    _batch: tuple[Tensor, Tensor] = field(init=False)

    def __post_init__(self) -> None:
        torch.manual_seed(self.settings.seed + 1 + dist.get_rank(self.group))
        inputs, target = self.workload.make_batch(self.settings.batch_size)
        self._batch = inputs.to(self.device), target.to(self.device)

    def model(self) -> nn.Module:
        torch.manual_seed(self.settings.seed)
        return self.workload.make_model().to(self.device)

    def ddp(self) -> DistributedDataParallel:
        return DistributedDataParallel(
            self.model(),
            process_group=self.group,
            bucket_cap_mb=self.settings.bucket_cap_mb,
            gradient_as_bucket_view=self.settings.gradient_as_bucket_view,
        )

    def loss(self, module: nn.Module) -> Tensor:
        """Forward on this rank's batch."""
        inputs, target = self._batch
        dtype = self.workload.autocast
        with torch.autocast(self.device.type, dtype, enabled=dtype is not None and self.device.type != "cpu"):
            return nn.functional.cross_entropy(module(inputs), target)

    def optimizer(self, parameters: Iterable[Tensor], name: str | None = None) -> torch.optim.Optimizer:
        """The variant's optimizer, or `name`; a small step keeps random labels from blowing up the weights."""
        name = name or self.optimizer_name
        if name.startswith("sgd"):
            return torch.optim.SGD(parameters, lr=LEARNING_RATE, momentum=0.9, fused=name == "sgd-fused")
        if name == "adamw":
            return torch.optim.AdamW(parameters, lr=LEARNING_RATE, foreach=False)
        return torch.optim.AdamW(parameters, lr=LEARNING_RATE, fused=True)

    def plain_loop(self, module: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> TrainingLoop:
        """The training loop that everyone writes: zero, forward, backward, step."""
        chosen = optimizer or self.optimizer(module.parameters())

        def step() -> None:
            chosen.zero_grad()
            self.loss(module).backward()
            chosen.step()

        return TrainingLoop(step=step)


COMPUTE_ONLY = "compute-only"
FloorKind = Literal["compute", "bucketed", "streamed"]
Build = Callable[[TrainingSetup], TrainingLoop]


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One row of the table."""

    # What it is called, in the table and on the command line.
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
    # Where it can run at all; what a backend merely refuses becomes a row that says so.
    backends: tuple[str, ...] = ("gloo", "nccl")

    def optimizer_name(self, settings: Settings) -> str:
        return self.optimizer or settings.optimizer

    def baseline_name(self, settings: Settings) -> str:
        if self.baseline is not None:
            return self.baseline
        # AdamW rows are compared with the fastest plain AdamW, whichever kernel they use themselves.
        optimizer = self.optimizer_name(settings)
        return f"ddp-{optimizer}" if optimizer.startswith("sgd") else "ddp-adamw-fused"

    def baseline_16bit_name(self, settings: Settings) -> str:
        """PyTorch's own hook that halves the bytes, with the same kind of optimizer."""
        return "torch-fp16" if self.optimizer_name(settings).startswith("sgd") else "torch-fp16-adamw"


_VARIANTS: dict[str, Variant] = {}


def variant(name: str, **fields: Any) -> Callable[[Build], Build]:
    """Makes a row with these fields of the decorated function, which builds its training loop."""

    def add(build: Build) -> Build:
        _VARIANTS[name] = Variant(name=name, build=build, **fields)
        return build

    return add


def registry() -> Mapping[str, Variant]:
    """Every variant by name, in the order of the table."""
    return _VARIANTS


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


# The lowest line is the first row.
@variant("ddp-adamw-fused", optimizer="adamw-fused")
@variant("ddp-adamw", optimizer="adamw")
@variant("ddp-sgd-fused", optimizer="sgd-fused")
@variant("ddp-sgd", optimizer="sgd")
def _plain_ddp(setup: TrainingSetup) -> TrainingLoop:
    return setup.plain_loop(setup.ddp())


# The update in backward ---------------------------------------------------------------------------------------------


@variant("torch-hook-then-optimizer-adamw", optimizer="adamw")
def _torch_hook_then_optimizer_adamw(setup: TrainingSetup) -> TrainingLoop:
    from torch.distributed.algorithms.ddp_comm_hooks import optimizer_overlap_hooks as hooks
    from torch.distributed.optim import as_functional_optim

    ddp = setup.ddp()
    functional = as_functional_optim(torch.optim.AdamW, lr=LEARNING_RATE)
    state = hooks._OptimizerHookState(functional)
    ddp.register_comm_hook(setup.group, hooks._hook_then_optimizer(default_hooks.allreduce_hook, state))

    def step() -> None:
        ddp.zero_grad()
        setup.loss(ddp).backward()

    return TrainingLoop(step=step)


def _ours(name: str, reducer: Callable[[], Stage], *, optimizer: str | None = None, **options: Any) -> None:
    """A row: one of our reducers, with the update in backward."""

    @variant(name, optimizer=optimizer)
    def build(setup: TrainingSetup) -> TrainingLoop:
        ddp = setup.ddp()
        overlapped = OverlappedOptimizer(setup.optimizer(ddp.parameters()))
        chain(reducer(), Step(overlapped, **options)).register(ddp)
        return _stepped(setup, ddp, [overlapped])


def _stepped(setup: TrainingSetup, ddp: nn.Module, optimizers: Sequence[Any]) -> TrainingLoop:
    def step() -> None:
        setup.loss(ddp).backward()
        for optimizer in optimizers:
            optimizer.step()

    return TrainingLoop(step=step)


_ours("overlap-step-adamw", AllReduce, optimizer="adamw-fused")
_ours("overlap-step-adamw-deferred", AllReduce, optimizer="adamw-fused", deferred=True)


# The update sharded -------------------------------------------------------------------------------------------------


@variant("torch-zero-adamw", optimizer="adamw")
@variant("torch-zero-sgd", optimizer="sgd")
def _torch_zero(setup: TrainingSetup) -> TrainingLoop:
    from torch.distributed.optim import ZeroRedundancyOptimizer as TorchZero

    kind, options = _kind(setup)
    ddp = setup.ddp()
    return setup.plain_loop(ddp, TorchZero(ddp.parameters(), kind, process_group=setup.group, **options))


@variant("torch-zero-interleaved-adamw", optimizer="adamw", backends=("nccl",))
def _torch_zero_interleaved_adamw(setup: TrainingSetup) -> TrainingLoop:
    from torch.distributed.algorithms.ddp_comm_hooks.ddp_zero_hook import hook_with_zero_step_interleaved
    from torch.distributed.optim import ZeroRedundancyOptimizer as TorchZero

    kind, options = _kind(setup)
    ddp = setup.ddp()
    zero = TorchZero(ddp.parameters(), kind, process_group=setup.group, overlap_with_ddp=True, **options)
    ddp.register_comm_hook(None, hook_with_zero_step_interleaved(default_hooks.allreduce_hook, ddp, zero))
    return setup.plain_loop(ddp, zero)


def _overlapped_zero(name: str, *, optimizer: str, **stage: Any) -> None:
    """Two rows: the sharded update with its gathers in backward, and in the next forward."""
    for gather in ("backward", "forward"):
        # A step leaves its gathers to the next forward, so several steps in a row are timed.
        in_row: dict[str, Any] = {"floor": "streamed", "block_steps": 4, "lead_in_steps": 1}
        fields = in_row if gather == "forward" else {}

        @variant(f"{name}-gather-forward" if gather == "forward" else name, optimizer=optimizer, **fields)
        def build(setup: TrainingSetup, gather: Any = gather) -> TrainingLoop:
            kind, options = _kind(setup)
            ddp = setup.ddp()
            zero = ZeroRedundancyOptimizer(
                ddp.parameters(), kind, process_group=setup.group, overlap_with_ddp=True, **options
            )
            chain(ZeroStep(zero, gather=gather, **stage)).register(ddp)
            return TrainingLoop(step=_stepped(setup, ddp, [zero]).step, finish=zero.wait)


def _kind(setup: TrainingSetup) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
    """The variant's optimizer as a sharded optimizer takes it."""
    if setup.optimizer_name.startswith("sgd"):
        return torch.optim.SGD, {"lr": LEARNING_RATE, "momentum": 0.9}
    fused = {"fused": True} if setup.optimizer_name == "adamw-fused" else {}
    return torch.optim.AdamW, {"lr": LEARNING_RATE, **fused}


_overlapped_zero("overlap-zero-sgd", optimizer="sgd")
_overlapped_zero("overlap-zero-adamw", optimizer="adamw-fused")
_overlapped_zero(
    "overlap-zero-adamw-int4-int8", optimizer="adamw-fused", reduce_wire=Int4(), gather_wire=Int8(), error_feedback=True
)


# Two updates: Muon for matrices and AdamW for the rest --------------------------------------------------------------


@variant("ddp-muon", baseline="ddp-muon", optimizer="adamw-fused")
def _ddp_muon(setup: TrainingSetup) -> TrainingLoop:
    ddp = setup.ddp()
    muon, adamw = (kind(parameters, lr=LEARNING_RATE) for kind, parameters in _matrices_and_rest(ddp))

    def step() -> None:
        ddp.zero_grad()
        setup.loss(ddp).backward()
        muon.step()
        adamw.step()

    return TrainingLoop(step=step)


@variant("overlap-step-muon", baseline="ddp-muon", optimizer="adamw-fused")
def _overlap_step_muon(setup: TrainingSetup) -> TrainingLoop:
    ddp = setup.ddp()
    both = [OverlappedOptimizer(kind(found, lr=LEARNING_RATE)) for kind, found in _matrices_and_rest(ddp)]
    chain(AllReduce(), *map(Step, both)).register(ddp)
    return _stepped(setup, ddp, both)


@variant("overlap-zero-muon", baseline="ddp-muon", optimizer="adamw-fused")
def _overlap_zero_muon(setup: TrainingSetup) -> TrainingLoop:
    ddp = setup.ddp()
    both = [
        ZeroRedundancyOptimizer(found, kind, process_group=setup.group, overlap_with_ddp=True, lr=LEARNING_RATE)
        for kind, found in _matrices_and_rest(ddp)
    ]
    chain(*map(ZeroStep, both)).register(ddp)
    return _stepped(setup, ddp, both)


def _matrices_and_rest(ddp: nn.Module) -> list[tuple[Any, list[Tensor]]]:
    parameters: list[Tensor] = list(ddp.parameters())
    matrices = [parameter for parameter in parameters if parameter.ndim == 2]
    rest = [parameter for parameter in parameters if parameter.ndim != 2]
    return [(torch.optim.Muon, matrices), (torch.optim.AdamW, rest)]


# Gradients in fewer bytes -------------------------------------------------------------------------------------------


def _torch_hook(
    name: str, hook: Any, state: Callable[[TrainingSetup], object] = lambda setup: setup.group, **fields: Any
) -> None:
    """A row: one of PyTorch's communication hooks, with the optimizer after backward as PyTorch has it."""

    @variant(name, **fields)
    def build(setup: TrainingSetup) -> TrainingLoop:
        ddp = setup.ddp()
        ddp.register_comm_hook(state(setup), hook)
        return setup.plain_loop(ddp)


_torch_hook("torch-fp16", default_hooks.fp16_compress_hook)
_torch_hook("torch-fp16-adamw", default_hooks.fp16_compress_hook, optimizer="adamw-fused")
_ours("overlap-fp16", lambda: Cast(torch.float16, AllReduce()))
_torch_hook("torch-bf16", default_hooks.bf16_compress_hook)
_ours("overlap-bf16", lambda: Cast(torch.bfloat16, AllReduce()))
_torch_hook(
    "torch-powersgd-r4",
    powerSGD_hook.powerSGD_hook,
    # Its earliest start: compressed from the third step on.
    lambda setup: powerSGD_hook.PowerSGDState(setup.group, matrix_approximation_rank=4, start_powerSGD_iter=2),
    # On Gloo its collectives reach the ranks in different orders now and then, and abort the process.
    timed_alone=True,
)
_ours("overlap-powersgd-r4", lambda: PowerSGD(rank=4))
_ours("overlap-powersgd-r4-alternate", lambda: PowerSGD(rank=4, alternate=True))
_ours("overlap-powersgd-r4-int8", lambda: PowerSGD(rank=4, wire=Int8()))
_torch_hook("torch-quantize8", quantization_hooks.quantization_pertensor_hook)
_ours("overlap-quantize8", lambda: Quantize(Int8()))
_ours("overlap-quantize4", lambda: Quantize(Int4()))
_ours("overlap-quantize4-feedback", lambda: Quantize(Int4(), error_feedback=True))
_ours("overlap-float8", lambda: Quantize(Float8()))
_ours("overlap-topk1-feedback", lambda: Quantize(TopK(0.01), error_feedback=True))


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
    local = setup.plain_loop(model)

    def step() -> None:
        local.step()
        averager.average_parameters(model.parameters())

    return TrainingLoop(step=step)


def _local_sgd(name: str, **options: Any) -> None:
    @variant(name, floor="streamed", block_steps=_PERIOD)
    def build(setup: TrainingSetup) -> TrainingLoop:
        ddp = setup.ddp()
        optimizer = setup.optimizer(ddp.parameters())
        return setup.plain_loop(ddp, optim.LocalSGD(ddp, optimizer, period=_PERIOD, start_step=0, **options))


_local_sgd("overlap-local-sgd")
_local_sgd("overlap-local-sgd-overlap", overlap=True)
_local_sgd("overlap-local-sgd-int4", wire=Int4(), error_feedback=True)


# Ranks that may run out of inputs at different steps ----------------------------------------------------------------


@variant("torch-join", block_steps=4)
def _torch_join(setup: TrainingSetup) -> TrainingLoop:
    from torch.distributed.algorithms.join import Join as TorchJoin

    ddp = setup.ddp()
    plain = setup.plain_loop(ddp)
    return TrainingLoop(step=plain.step, block=lambda steps: TorchJoin([ddp]))


@variant("overlap-join", block_steps=4)
def _overlap_join(setup: TrainingSetup) -> TrainingLoop:
    """Every rank knows how many steps it runs."""
    return _joined(setup, lengths_known=True)


@variant("overlap-join-unknown", block_steps=4)
def _overlap_join_unknown(setup: TrainingSetup) -> TrainingLoop:
    """Ranks learn of each iteration from an all-reduce under the one before."""
    return _joined(setup, lengths_known=False)


def _joined(setup: TrainingSetup, *, lengths_known: bool) -> TrainingLoop:
    """The plain loop over a loader that knows its length, or over a stream that does not."""
    if setup.is_simulated:
        raise UnsupportedError("Join talks to every rank when its block begins, and a simulated link has one process")
    ddp = setup.ddp()
    plain = setup.plain_loop(ddp)
    batches: Iterator[int] = iter(())

    @contextlib.contextmanager
    def block(steps: int) -> Iterator[None]:
        nonlocal batches
        with Join([ddp]) as join:
            batches = join.iterate(range(steps) if lengths_known else iter(range(steps)))
            # The first waits for the other ranks: once per loop, so it is not part of a step.
            next(batches)
            yield

    def step() -> None:
        plain.step()
        next(batches, None)

    return TrainingLoop(step=step, block=block)


def choose(settings: Settings, backend: str) -> tuple[str, ...]:
    """The variants to run: those asked for or all that fit `backend`, with the baselines they are compared to."""
    known = registry()
    unknown = [name for name in settings.variants if name not in known]
    if unknown:
        raise ConfigurationError(f"variants has {', '.join(unknown)}; known are {', '.join(known)}")
    asked = settings.variants or tuple(name for name, one in known.items() if backend in one.backends)
    return with_baselines(asked, settings)


def with_baselines(names: Iterable[str], settings: Settings) -> tuple[str, ...]:
    """`names`, what their ratios are taken to, and compute-only, in the order of the table."""
    known = registry()
    wanted = {COMPUTE_ONLY, *names}
    wanted |= {known[name].baseline_name(settings) for name in wanted}
    return tuple(name for name in known if name in wanted)
