"""What ranks learn apart, and its averages: all that happens between two steps of local SGD."""

from __future__ import annotations

import torch
import torch.distributed as dist

from overlap.hooks import StageContext
from overlap.optim.local_sgd.averaging import Share, average, into_parts
from overlap.optim.local_sgd.content import Content
from overlap.optim.local_sgd.flight import Flight
from overlap.optim.local_sgd.options import Options
from overlap.optim.local_sgd.outer import Outer
from overlap.optim.local_sgd.schedule import Schedule

__all__ = ["Averages"]


class Averages:
    """Makes the averages of one model, one fragment of it at a time, when the schedule says so.

    Args:
        schedule: when, and over which ranks.
        content: of what.
        options: how.
        outer: steps with what a round changed, where there is one.
    """

    def __init__(self, schedule: Schedule, content: Content, options: Options, outer: Outer | None) -> None:
        self.schedule = schedule
        self.content = content
        self.options = options
        self.outer = outer
        self.count = 0
        """Averages so far, those that :meth:`synchronize` made aside."""
        self.flight: Flight | None = None
        self.own_steps = [[0] * schedule.levels for _ in range(options.fragments)]
        """Steps that this rank made since it last averaged, by fragment and level: what it counts for under Join."""

    def prepare(self) -> None:
        """A step begins."""
        self.schedule.begin_round()
        if self.outer is not None and self.schedule.is_local and not self.outer.is_anchored:
            self.outer.anchor()

    def advance(self, context: StageContext, *, is_own: bool, is_joining: bool) -> None:
        """A step has been made, by this rank or (under ``Join``) by others: average if it is time."""
        self.prepare()
        if is_own and self.schedule.is_local:
            self.own_steps = [[steps + 1 for steps in levels] for levels in self.own_steps]
        level = self.schedule.count()
        step = self.schedule.step
        if self.flight is not None and step >= self.flight.lands_after:
            self.land()
        if level is not None:
            unit = self.count % self.options.fragments
            self._average(unit, level, context, delay=self.options.delay, is_joining=is_joining)
            self.count += 1
        elif is_joining and step == self.schedule.start_step:
            self._catch_up(context, is_own=is_own)

    def synchronize(self, context: StageContext, *, is_joining: bool) -> None:
        """Average now all that ranks learnt apart."""
        self.land()
        if not self.schedule.is_local:
            return
        for unit, steps in enumerate(self.own_steps):
            # Under Join ranks differ in the steps that they made.
            if steps[-1] or is_joining:
                self._average(unit, self.schedule.levels - 1, context, delay=0, is_joining=is_joining)
        self.schedule.round_end = None

    def land(self) -> None:
        """Take the average in flight over."""
        flight, self.flight = self.flight, None
        if flight is None:
            return
        if self.outer is None:
            flight.land()
        else:
            flight.land(self.outer.step, stepped=self.content.fragments[flight.unit])
        self._after_average(flight.unit)

    def restart(self) -> None:
        """Begin again from step 0, with nothing learnt apart."""
        self.schedule.step, self.schedule.round_end, self.count = 0, None, 0
        self.own_steps = [[0] * len(levels) for levels in self.own_steps]
        if self.outer is not None:
            self.outer.restart()

    def _average(self, unit: int, level: int, context: StageContext, *, delay: int, is_joining: bool) -> None:
        """Average one fragment of the model with the ranks of a level."""
        self.land()
        group = self.schedule.group_of(level)
        share = _share(self.own_steps[unit][level], group, context, is_joining=is_joining)
        self.own_steps[unit][: level + 1] = [0] * (level + 1)
        if share is None:
            return
        parameters, others = self.content.parameters_of(unit), self.content.others_of(unit)
        dtype = self.options.average_dtype
        if delay:
            self.flight = Flight(lands_after=self.schedule.step + delay, unit=unit)
            self.flight.begin({**parameters, **others}, context=context, group=group, share=share, dtype=dtype)
            return
        self.content.check_others(unit, group, context.device)
        means = list(parameters.values())
        if self.outer is not None:
            means = self.outer.gradients_in(list(parameters))
        average(into_parts([*means, *others.values()], dtype=dtype), group, share=share)
        if self.outer is not None:
            self.outer.step(list(parameters), means)
            self.outer.write(list(parameters))
        self._after_average(unit)

    def _after_average(self, unit: int) -> None:
        if self.options.optimizer_state == "reset":
            self.content.reset_state(unit)

    def _catch_up(self, context: StageContext, *, is_own: bool) -> None:
        """When local SGD starts, ranks that have run out by then get what the others have, who are equal."""
        group = self.schedule.group_of(self.schedule.levels - 1)
        share = _share(int(is_own), group, context, is_joining=True)
        if share is not None and share.total < group.size():
            average(into_parts(self.content.parameters.values()), group, share=share)


def _share(weight: int, group: dist.ProcessGroup, context: StageContext, *, is_joining: bool) -> Share | None:
    """What this rank counts for: as much as others, or under ``Join`` its steps; ``None`` where nobody made any."""
    if not is_joining:
        return Share(1, group.size())
    total = torch.tensor([weight], device=context.device)
    dist.all_reduce(total, group=group)
    return Share(weight, int(total)) if int(total) else None
