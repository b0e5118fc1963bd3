"""Averages one model, fragment by fragment, between two steps of local SGD."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from overlap.errors import ConfigurationError
from overlap.hooks import StageContext
from overlap.hooks.wires.feedback import check_rank
from overlap.join.group_collectives import all_reduce
from overlap.optim.local_sgd.anchors import Anchors
from overlap.optim.local_sgd.average import Weight, average_parts, into_parts
from overlap.optim.local_sgd.compressed import CompressedMean
from overlap.optim.local_sgd.model_tensors import ModelTensors
from overlap.optim.local_sgd.options import Options
from overlap.optim.local_sgd.outer import OuterOptimizer
from overlap.optim.local_sgd.pending import PendingAverage, Sent
from overlap.optim.local_sgd.schedule import Schedule

__all__ = ["Synchronizer"]


class Synchronizer:
    """Makes the averages of one model, one fragment at a time, when the schedule says so.

    Args:
        schedule: when, and over which ranks.
        tensors: of what.
        options: how.
        anchors: what ranks had in common when the round began, an outer optimizer's where there is one; ``None`` where
            neither that nor a wire needs them.
    """

    def __init__(self, schedule: Schedule, tensors: ModelTensors, options: Options, anchors: Anchors | None) -> None:
        self.schedule = schedule
        self.tensors = tensors
        self.options = options
        self.anchors = anchors
        self.compressed = (
            None if options.wire is None else CompressedMean(options.wire, error_feedback=options.error_feedback)
        )
        self.rounds = 0
        """Averages that the schedule asked for so far; those of :meth:`synchronize` are not counted."""
        self.pending: PendingAverage | None = None
        self.own_steps = [[0] * schedule.levels for _ in range(options.fragments)]
        """Steps of this rank since it last averaged, by fragment and level: its weight under Join."""

    @property
    def outer(self) -> OuterOptimizer | None:
        """Steps with what a round changed, where there is one."""
        return self.anchors if isinstance(self.anchors, OuterOptimizer) else None

    def begin_step(self) -> None:
        """A step begins: begin a round, if it is the round's first."""
        self.schedule.begin_round()
        if self.anchors is not None and self.schedule.is_local and not self.anchors.is_set:
            self.anchors.set_anchors()

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
        if (anchors := self._anchors_at(pending.level)) is None:
            pending.apply()
        else:
            pending.apply(anchors.step, stepped=self.tensors.fragments[pending.fragment])
        self._after_average(pending.fragment)

    def restart(self) -> None:
        """Begin again from step 0, as if all ranks had the same parameters."""
        self._drop_pending()
        self.schedule.restart()
        self.rounds = 0
        self.own_steps = [[0] * len(levels) for levels in self.own_steps]
        if self.anchors is not None:
            self.anchors.restart()
        if self.compressed is not None:
            self.compressed.restart()

    def state_dict(self) -> dict[str, Any]:
        """Tensors and plain values by name, enough to resume in the middle of a round; waits for a pending average."""
        flight = None if self.pending is None else self.pending.state_dict()
        return {
            "step": self.schedule.step,
            "round_end": self.schedule.round_end,
            "rounds": self.rounds,
            "own_steps": [list(levels) for levels in self.own_steps],
            "outer": None if self.outer is None else self.outer.state_dict(),
            "wire": self._wire_state(),
            "flight": flight,
        }

    def _wire_state(self) -> dict[str, Any] | None:
        """The anchors, where they are not the outer optimizer's, and what the wire left out on this rank."""
        if self.compressed is None or self.anchors is None:
            return None
        anchors = self.anchors.state_dict() if self.outer is None else {}
        return {**anchors, **self.compressed.state_dict(), "rank": self._place[0], "ranks": self._place[1]}

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
        wire = state.get("wire") or {}
        self._check_wire_state(wire)
        self.schedule.step, self.schedule.round_end, self.rounds = state["step"], state["round_end"], state["rounds"]
        self.own_steps = [list(levels) for levels in state["own_steps"]]
        if self.anchors is not None:
            self.anchors.load_state_dict(wire if self.outer is None else state["outer"])
        if self.compressed is not None:
            self.compressed.load_state_dict(wire, self.tensors.parameters)
        if (pending := state["flight"]) is not None:
            level = pending.get("level", self.schedule.levels - 1)
            sent = self._sent(pending["unit"], level)
            self.pending = PendingAverage.restored(pending, sent, level=level, device=device)

    def _check_wire_state(self, wire: Mapping[str, Any]) -> None:
        """Raises: ConfigurationError: ``wire`` has what would be lost here, or is another rank's."""
        if self.compressed is None:
            if wire.get("error"):
                raise ConfigurationError(
                    "the state has the error feedback of a wire, which is still to be delivered, and this LocalSGD has "
                    "no wire: give the wire and error_feedback=True of the run that was saved"
                )
            return
        if "error" in wire or "generator" in wire:
            check_rank((wire["rank"], wire["ranks"]), self._place, owner="LocalSGD", kept="error feedback")

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
        anchors, compressed = self._anchors_at(level), self._compressed_at(level)
        if anchors is not None:
            anchors.check_common(group, context.device)
        ranks = self.schedule.ranks_of(level)
        if delay:
            self.pending = PendingAverage(
                self._sent(fragment, level), fragment=fragment, level=level, apply_after=self.schedule.step + delay,
                device=context.device,
            )  # fmt: skip
            self.pending.start(
                context, ranks, weight, compressed=compressed, anchors=None if anchors is None else anchors.values
            )
            return
        self.tensors.check_others(fragment, group, context.device)
        parameters, others = self.tensors.parameters_of(fragment), self.tensors.others_of(fragment)
        names = list(parameters)
        means = list(parameters.values()) if anchors is None else anchors.to_average(names)
        exactly = [*means, *others.values()] if compressed is None else others.values()
        average_parts(into_parts(exactly, dtype=self.options.average_dtype), group, weight=weight)
        if compressed is not None and anchors is not None:
            changed = dict(zip(names, means, strict=True))
            compressed.average(changed, anchors.values, ranks, weight, context=context)
        if anchors is not None:
            anchors.step(names, means)
            anchors.write(names)
        self._after_average(fragment)

    def _anchors_at(self, level: int) -> Anchors | None:
        """The anchors, if an average of ``level`` is one of all ranks, which moves them."""
        return self.anchors if level == self.schedule.levels - 1 else None

    def _compressed_at(self, level: int) -> CompressedMean | None:
        """What sends an average of ``level`` through the wire; smaller groups average in full precision."""
        return self.compressed if level == self.schedule.levels - 1 else None

    def _sent(self, fragment: int, level: int) -> Sent:
        parameters, others = self.tensors.parameters_of(fragment), self.tensors.others_of(fragment)
        dtype = self.options.average_dtype
        if self._compressed_at(level) is None:
            return Sent(exactly={**parameters, **others}, dtype=dtype)
        return Sent(exactly=others, as_changes=parameters, dtype=dtype)

    @property
    def _place(self) -> tuple[int, int]:
        group = self.schedule.group_of(self.schedule.levels - 1)
        return group.rank(), group.size()

    def _after_average(self, fragment: int) -> None:
        if self.options.optimizer_state == "reset":
            self.tensors.reset_state(fragment)


def _weight_by_steps(steps: int, group: dist.ProcessGroup, device: torch.device) -> Weight | None:
    """This rank's weight by the steps that it made; ``None`` where no rank made any.

    Issues: one all-reduce of a number on ``group``.
    """
    total = torch.tensor([steps], device=device)
    all_reduce(total, group=group)
    return Weight(steps, int(total)) if int(total) else None
