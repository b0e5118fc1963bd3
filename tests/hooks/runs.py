"""Training runs that differ in what is registered with DDP."""

import functools
from collections.abc import Callable
from typing import Any

import torch

from harness import Record, train, wrap
from harness.models import MLP, Case

SGD = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)

Attach = Callable[[Any], Any]


def run(rank: int, attach: Attach, case: Case = MLP, *, steps: int = 3, **options: Any) -> list[Record]:
    """The records of one training on this rank; `attach` gets the DDP model."""
    ddp = wrap(case.model(), **{**case.ddp_options(), **options})
    attach(ddp)
    return train(ddp, SGD(ddp.parameters()), case.batches(rank, steps=steps), gradients=True)


def plain(ddp: Any) -> None:
    """DDP's own reduction."""


def to_ddp(ddp: Any, hook: Any, state: Any = None) -> None:
    """Registers a hook with DDP itself."""
    ddp.register_comm_hook(state, hook)
