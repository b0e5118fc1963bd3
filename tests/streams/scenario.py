"""What a scenario is: a chain, a loop and a model, and what must come of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from . import loops
from .loops import Loop
from .model import Net

__all__ = ["Build", "Make", "Scenario"]

Build = Callable[[Any], list[Any]]
"""Registers a chain on a DDP model and returns the optimizers of the loop."""
Make = Callable[[], Any]
"""Makes a stage: each rank, and each play of a scenario, has its own."""


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """``build(ddp)`` registers a chain and returns the optimizers of the loop."""

    build: Build
    loop: Loop = loops.trains
    model: type[Net] = Net
    ddp: dict[str, Any] = field(default_factory=dict)
    """Options of ``DistributedDataParallel``."""
    plain: Build | None = None
    """Optimizers with which plain DDP gives the same parameters, in every bit."""
    edit: Callable[[Any], Any] = lambda ddp: None
    """What plain DDP does between backward and step."""
    as_on_host: bool = True
    """Whether the same chain without streams gives the same parameters, in every bit; looked at without ``plain``."""
    host_syncs: tuple[str, ...] = ()
    """Where the host waits for the device, as in :meth:`harness.streams.Report.check`."""
