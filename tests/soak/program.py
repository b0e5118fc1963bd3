"""A training program as text, so that what a seed stands for is printed as what was run."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

__all__ = ["LR", "Program", "Promise"]

LR = 0.5
"""Of the plain SGD of chains that round, whose steps then say what was delivered."""


@dataclass(frozen=True)
class Promise:
    """How near a chain is to plain DDP.

    ``exact``: parameters, buffers, losses and states are the same bits. ``summed``: but for an order of summation.
    ``bound``: a mean is off by at most ``error`` times the largest of the gradients. ``factors``: by at most its own
    norm. ``nothing lost``: what is not delivered yet is in the stages' memories. Where new parameters are rounded, too,
    it is ``gather_error`` times the largest change of a parameter.
    """

    kind: str = "exact"
    error: float = 0.0
    gather_error: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Program:
    """What is run; texts see ``ddp``, its parameters in lists ``p`` and the optimizers of the loop ``o``."""

    seed: int
    front: str
    blocks: tuple[str, ...]
    dtype: str
    ddp: dict[str, Any]
    parameters: tuple[str, ...] = ("everything(ddp)",)
    plain: tuple[str, ...]
    made: tuple[str, ...]
    stages: tuple[str, ...] = ()
    """Empty where ``made`` registers by itself."""
    local: tuple[str, ...] = ()
    mean: tuple[str, ...] = ()
    after: tuple[str, ...] = ()
    """Transforms of the chain, which plain DDP makes by hand."""
    is_stepped: bool = True
    """Whether the loop calls ``step()``."""
    steps: int = 3
    micro_batches: int = 1
    zero_grad: str = "before"
    scheduler: str = ""
    clips: str = ""
    """What the loop does between backward and ``step()``."""
    has_closure: bool = False
    is_inline: bool = False
    """Whether stages run on autograd's thread, as those of models as small as these do."""
    averages: int = 0
    """Steps of each rank alone from one average of local SGD to the next."""
    spoils: int = -1
    """The step whose loss is not finite."""
    promise: Promise = field(default_factory=Promise)

    @property
    def is_rounded(self) -> bool:
        return self.promise.kind not in ("exact", "summed")

    def __str__(self) -> str:
        options = "".join(f", {name}={value!r}" for name, value in self.ddp.items())
        blocks = "".join(f", {name!r}" for name in self.blocks)
        loop = [
            f"{self.steps} steps",
            f"{self.micro_batches} batches each",
            f"zero_grad: {self.zero_grad}",
            f"scheduler: {self.scheduler or 'none'}",
            "step()" if self.is_stepped else "no step()",
            *["closure"] * self.has_closure,
            *([self.clips] if self.clips else []),
            *["inline"] * self.is_inline,
            *([f"averages every {self.averages} steps"] if self.averages else []),
            *([f"the loss of step {self.spoils} is not finite"] if self.spoils >= 0 else []),
        ]
        lines = [
            f"# seed {self.seed}; promised: {self.promise}",
            f"ddp = DistributedDataParallel(Net({self.front!r}{blocks}, dtype=torch.{self.dtype}){options})",
            f"p = [{', '.join(self.parameters)}]",
            f"o = [{', '.join(self.made)}]  # plain: {', '.join(self.plain)}",
            *([f"chain({', '.join(self.stages)}).register(ddp)"] if self.stages else []),
            f"# {', '.join(loop)}",
        ]
        return "\n".join(lines)
