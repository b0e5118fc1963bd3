"""The two sides of a random program: plain DDP, and the chain."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from overlap import LocalSGD, OverlapError, ZeroRedundancyOptimizer

from .by_hand import MEAN, NEW, local_hook, names_of_texts
from .networks import Net, batch, loss_of
from .program import Program

__all__ = ["Outcome", "Side", "guarded", "words"]


@dataclass(frozen=True)
class Outcome:
    """``holds``, ``refused`` (and how the error begins), ``not plain`` (plain DDP does not run it), or a fault."""

    kind: str
    words: str = ""
    details: str = ""

    @property
    def is_fault(self) -> bool:
        return self.kind not in ("holds", "refused", "not plain")


class Side:
    """One of the two runs: plain DDP, or the chain's."""

    def __init__(self, program: Program, *, is_plain: bool, largest: Tensor | None = None) -> None:
        self.program, self.is_plain = program, is_plain
        self._registration: Any = None
        self.optimizers: list[Any] = []
        torch.manual_seed(0)
        net = Net(program.front, *program.blocks, dtype=getattr(torch, program.dtype))
        self.ddp: Any = DistributedDataParallel(net, **program.ddp)
        names = {**names_of_texts(), "ddp": self.ddp}
        names["p"] = [eval(text, names) for text in program.parameters]
        made = program.plain if is_plain else program.made
        names["o"] = self.optimizers
        self.optimizers += [eval(text, names) for text in made]
        self.stages: list[Any] = []
        if is_plain:
            if program.local or largest is not None:
                self.ddp.register_comm_hook(largest, local_hook(program.local))
        elif program.stages:
            self.stages = [eval(text, names) for text in program.stages]
            self._registration = names["chain"](*self.stages).register(self.ddp)
        self.schedulers = [
            eval(program.scheduler.format("o[0]"), {**names, "o": [one]})
            for one in self.optimizers
            if program.scheduler
        ]
        self._by_hand = [MEAN[text]() for text in program.mean] if is_plain else []
        self._names = names

    @property
    def trained(self) -> list[Tensor]:
        return [parameter for parameter in self.ddp.parameters() if parameter.requires_grad]

    def close(self) -> None:
        for one in (self._registration, *self.optimizers):
            if one is not None and (one is self._registration or isinstance(one, LocalSGD)):
                one.remove()

    def settle(self) -> None:
        """Wait for parameters that are on their way."""
        for one in self.optimizers:
            if isinstance(one, ZeroRedundancyOptimizer):
                one.wait()

    def backward(self, step: int) -> Tensor:
        """Forward and backward of the batches of a step; the last one synchronizes."""
        program, count = self.program, self.program.micro_batches
        total = torch.zeros(())
        for micro in range(count):
            number = step * count + micro
            x, y = batch(program.front, number, dist.get_rank(), rows=4 if number % 3 else 3)
            torch.manual_seed(number)  # Of dropout.
            is_alone = self.is_plain and program.averages
            with nullcontext() if micro == count - 1 and not is_alone else self.ddp.no_sync():
                loss = loss_of(self.ddp, x, y) / count
                if step == program.spoils:
                    loss = loss * float("inf")
                loss.backward()
            total = total + loss.detach()
        return total

    def zero_grad(self) -> None:
        how = self.program.zero_grad
        if how == "model":
            self.ddp.zero_grad()
            return
        for one in self.optimizers:
            one.zero_grad(set_to_none=how != "to zero")

    @property
    def _clears(self) -> bool:
        """Whether the loop does; a chain that updates clears gradients itself."""
        program = self.program
        leaves_out = program.zero_grad == "left out" and not self.is_plain
        return not (leaves_out and program.stages and any("Step(" in stage for stage in program.stages))

    def step(self, number: int) -> Tensor:
        """One step of the training loop."""
        program = self.program
        if program.zero_grad != "after" and self._clears and not program.has_closure:
            self.zero_grad()
        if program.has_closure and not (self.is_plain and program.mean):
            loss: Tensor = self.optimizers[0].step(lambda: self._closure(number))
        else:
            loss = self._closure(number) if program.has_closure else self.backward(number)
            self._update(number)
        if self.is_plain:
            self._after(number)
        for scheduler in self.schedulers:
            scheduler.step()
        if program.zero_grad == "after":
            self.zero_grad()
        return loss

    def _closure(self, number: int) -> Tensor:
        self.zero_grad()
        return self.backward(number)

    def _update(self, number: int) -> None:
        program = self.program
        verdicts = [act(self.trained) for act in self._by_hand]
        if program.clips:
            eval(program.clips, self._names)
        if (program.is_stepped or self.is_plain) and False not in verdicts:
            for one in self.optimizers:
                one.step()

    def _after(self, number: int) -> None:
        program = self.program
        with torch.no_grad():
            for text in program.after:
                NEW[text](self.trained)
            if program.averages and (number + 1) % program.averages == 0:
                for parameter in self.trained:
                    mean = parameter.detach().contiguous().clone()
                    if mean.numel():
                        dist.all_reduce(mean)
                    parameter.copy_(mean.div_(dist.get_world_size()))


def guarded(run: Callable[[Side], Any], program: Program) -> tuple[Outcome | None, Any]:
    """What ``run`` gives for the chain's side of a program, or what became of it."""
    try:
        with ExitStack() as registered:
            side = Side(program, is_plain=False)
            registered.callback(side.close)
            return None, run(side)
    except OverlapError as error:
        kind, cause = "refused", error
    except AssertionError as error:
        kind, cause = "differs", error
    except Exception as error:
        kind, cause = "fails", error
    return Outcome(kind, f"{type(cause).__name__}: {words(cause)}", "".join(traceback.format_exception(cause))), None


def words(error: BaseException) -> str:
    return " ".join(str(error).split())[:300]
