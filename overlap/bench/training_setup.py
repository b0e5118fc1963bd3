"""What a variant is built from: the model, the data, the process group and the optimizers that all variants share."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from overlap.bench.settings import Settings
from overlap.bench.workload import Workload

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
