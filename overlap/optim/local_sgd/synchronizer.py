"""Averages one model, fragment by fragment, between two steps of local SGD."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from overlap._checks import check_whole_number
from overlap.errors import ConfigurationError
from overlap.hooks import StageContext
from overlap.optim.local_sgd.average import Weight, average_parts, into_parts
from overlap.optim.local_sgd.model_tensors import ModelTensors
from overlap.optim.local_sgd.outer import OuterOptimizer
from overlap.optim.local_sgd.pending import PendingAverage
from overlap.optim.local_sgd.schedule import Schedule

__all__ = ["Options", "Synchronizer"]

_STATES = ("keep", "average", "reset")


@dataclass(frozen=True, kw_only=True)
class Options:
    """How a model is averaged; see :class:`LocalSGD`.

    Raises:
        ConfigurationError: a value is out of range, or two do not fit together.
    """

    overlap: int
    fragments: int
    average_buffers: bool
    optimizer_state: str
    average_dtype: torch.dtype | None

    def __post_init__(self) -> None:
        # overlap=True means one step.
        check_whole_number("overlap", int(self.overlap) if isinstance(self.overlap, bool) else self.overlap, least=0)
        check_whole_number("fragments", self.fragments, least=1)
        if self.optimizer_state not in _STATES:
            raise ConfigurationError(
                f"optimizer_state must be one of {', '.join(_STATES)}, got {self.optimizer_state!r}"
            )
        if self.overlap and self.optimizer_state == "average":
            raise ConfigurationError(
                'optimizer_state="average" needs all ranks to stop and average, which overlap=True is there to avoid; '
                'use "keep" or "reset"'
            )
        dtype = self.average_dtype
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise ConfigurationError(
                f"average_dtype must be a floating-point dtype such as torch.float32, got {dtype!r}"
            )

    @property
    def delay(self) -> int:
        """Steps from the beginning of an average to its end."""
        return int(self.overlap)

    @property
    def summary(self) -> str:
        """What differs from the defaults, in the same words on every rank."""
        parts = [f"overlap {self.delay}"] if self.overlap else []
        parts += [f"{self.fragments} fragments"] if self.fragments > 1 else []
        parts += [] if self.average_buffers else ["buffers kept"]
        parts += [f"state {self.optimizer_state}"] if self.optimizer_state != "keep" else []
        parts += [f"in {str(self.average_dtype).removeprefix('torch.')}"] if self.average_dtype is not None else []
        return "".join(f", {part}" for part in parts)


class Synchronizer:
    """Makes the averages of one model, one fragment at a time, when the schedule says so.

    Args:
        schedule: when, and over which ranks.
        tensors: of what.
        options: how.
        outer: steps with what a round changed, where there is one.
    """

    def __init__(
        self, schedule: Schedule, tensors: ModelTensors, options: Options, outer: OuterOptimizer | None
    ) -> None:
        self.schedule = schedule
        self.tensors = tensors
        self.options = options
        self.outer = outer
        self.rounds = 0
        """Averages that the schedule asked for so far; those of :meth:`synchronize` are not counted."""
        self.pending: PendingAverage | None = None
        self.own_steps = [[0] * schedule.levels for _ in range(options.fragments)]
        """Steps of this rank since it last averaged, by fragment and level: its weight under Join."""

    def begin_step(self) -> None:
        """A step begins: begin a round, if it is the round's first."""
        self.schedule.begin_round()
        if self.outer is not None and self.schedule.is_local and not self.outer.is_anchored:
            self.outer.set_anchors()

    def end_step(self, context: StageContext, *, is_own: bool, is_joining: bool) -> None:
        """This rank (or under ``Join`` only others) made a step: average if it is time."""
        self.begin_step()
        if is_own and self.schedule.is_local:
            self.own_steps = [[steps + 1 for steps in levels] for levels in self.own_steps]
        level = self.schedule.count()
        step = self.schedule.step
        if self.pending is not None and step >= self.pending.apply_after:
            self.apply_pending()
        if level is not None:
            fragment = self.rounds % self.options.fragments
            self._average(fragment, level, context, delay=self.options.delay, is_joining=is_joining)
            self.rounds += 1
        elif is_joining and step == self.schedule.start_step:
            self._bring_joined_up_to_date(context, is_own=is_own)

    def synchronize(self, context: StageContext, *, is_joining: bool) -> None:
        """Average every fragment that was stepped since its last average, over all ranks, and begin a new round."""
        self.apply_pending()
        if not self.schedule.is_local:
            return
        for fragment, steps in enumerate(self.own_steps):
            # Under Join ranks differ in the number of their steps.
            if steps[-1] or is_joining:
                self._average(fragment, self.schedule.levels - 1, context, delay=0, is_joining=is_joining)
        self.schedule.round_end = None

    def apply_pending(self) -> None:
        """Wait for the pending average and apply it, if there is one."""
        pending, self.pending = self.pending, None
        if pending is None:
            return
        if self.outer is None:
            pending.apply()
        else:
            pending.apply(self.outer.step, stepped=self.tensors.fragments[pending.fragment])
        self._after_average(pending.fragment)

    def restart(self) -> None:
        """Begin again from step 0, as if all ranks had the same parameters."""
        self._drop_pending()
        self.schedule.restart()
        self.rounds = 0
        self.own_steps = [[0] * len(levels) for levels in self.own_steps]
        if self.outer is not None:
            self.outer.restart()

    def state_dict(self) -> dict[str, Any]:
        """Tensors and plain values by name, enough to resume in the middle of a round; waits for a pending average."""
        return {
            "step": self.schedule.step,
            "round_end": self.schedule.round_end,
            "rounds": self.rounds,
            "own_steps": [list(levels) for levels in self.own_steps],
            "outer": None if self.outer is None else self.outer.state_dict(),
            "flight": None if self.pending is None else self.pending.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any], device: torch.device) -> None:
        """Take over what :meth:`state_dict` gave.

        Raises:
            ConfigurationError: it is of other settings, or of another model.
        """
        self._drop_pending()
        if [len(levels) for levels in state["own_steps"]] != [len(levels) for levels in self.own_steps]:
            raise ConfigurationError("the state is of local SGD with another number of fragments or of levels")
        if (state["outer"] is None) != (self.outer is None):
            saved, here = ("with an", "none") if self.outer is None else ("without an", "one")
            raise ConfigurationError(f"the state was saved {saved} outer optimizer, and this one has {here}")
        self.schedule.step, self.schedule.round_end, self.rounds = state["step"], state["round_end"], state["rounds"]
        self.own_steps = [list(levels) for levels in state["own_steps"]]
        if self.outer is not None:
            self.outer.load_state_dict(state["outer"])
        if (pending := state["flight"]) is not None:
            fragment = pending["unit"]
            tensors = {**self.tensors.parameters_of(fragment), **self.tensors.others_of(fragment)}
            self.pending = PendingAverage.restored(pending, tensors, dtype=self.options.average_dtype, device=device)

    def _drop_pending(self) -> None:
        if self.pending is not None:
            self.pending.wait()
            self.pending = None

    def _average(self, fragment: int, level: int, context: StageContext, *, delay: int, is_joining: bool) -> None:
        """Average one fragment with the ranks of a level."""
        self.apply_pending()
        group = self.schedule.group_of(level)
        steps = self.own_steps[fragment][level]
        weight = _weight_by_steps(steps, group, context.device) if is_joining else Weight(1, group.size())
        self.own_steps[fragment][: level + 1] = [0] * (level + 1)
        if weight is None:
            return
        parameters, others = self.tensors.parameters_of(fragment), self.tensors.others_of(fragment)
        dtype = self.options.average_dtype
        if delay:
            self.pending = PendingAverage(
                {**parameters, **others}, fragment=fragment, apply_after=self.schedule.step + delay, dtype=dtype,
                device=context.device,
            )  # fmt: skip
            self.pending.start(context, group, weight)
            return
        self.tensors.check_others(fragment, group, context.device)
        names = list(parameters)
        means = list(parameters.values()) if self.outer is None else self.outer.to_average(names)
        average_parts(into_parts([*means, *others.values()], dtype=dtype), group, weight=weight)
        if self.outer is not None:
            self.outer.step(names, means)
            self.outer.write(names)
        self._after_average(fragment)

    def _after_average(self, fragment: int) -> None:
        if self.options.optimizer_state == "reset":
            self.tensors.reset_state(fragment)

    def _bring_joined_up_to_date(self, context: StageContext, *, is_own: bool) -> None:
        """When local SGD starts, give ranks that have run out of inputs what the others have, who are equal."""
        group = self.schedule.group_of(self.schedule.levels - 1)
        weight = _weight_by_steps(int(is_own), group, context.device)
        if weight is not None and weight.total < group.size():
            average_parts(into_parts(self.tensors.parameters.values()), group, weight=weight)


def _weight_by_steps(steps: int, group: dist.ProcessGroup, device: torch.device) -> Weight | None:
    """This rank's weight by the steps that it made; ``None`` where no rank made any.

    Issues: one all-reduce of a number on ``group``.
    """
    total = torch.tensor([steps], device=device)
    dist.all_reduce(total, group=group)
    return Weight(steps, int(total)) if int(total) else None
