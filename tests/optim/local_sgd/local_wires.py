"""Averages through a wire written down plainly, to compare with; and the bytes that are sent."""

import functools
import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from local_loops import Values, assign, local, mean_of, plain, values_of
from torch import Tensor, nn

from harness import assert_parity
from harness.models import MLP
from harness.wires import summed
from overlap import LocalSGD
from overlap.hooks.collectives import Collective
from overlap.hooks.wires import Wire
from overlap.optim.local_sgd.averager import into_fragments


def gathered(flat: Tensor) -> list[Tensor]:
    everyone = [torch.empty_like(flat) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, flat)
    return everyone


def errors_of(made: LocalSGD) -> dict[str, Tensor]:
    errors: dict[str, Tensor] = made.state_dict()["local_sgd"]["wire"]["error"]
    return errors


class ByHand:
    """Each rank averages all ranks' changes by itself; for ``plain(after_step=...)``."""

    def __init__(
        self, start: Values, *, wire: Wire | None = None, period: int, error_feedback: bool = False, outer: Any = None,
        fragments: Sequence[Sequence[str]], overlap: int = 0,
    ) -> None:  # fmt: skip
        self.wire, self.period, self.delay, self.fragments = wire, period, overlap, fragments
        self.anchors = {name: value.clone() for name, value in start.items()}
        self.errors = {name: torch.zeros_like(value) for name, value in start.items()} if error_feedback else None
        self.outer = None if outer is None else outer(list(self.anchors.values()))
        self.round = 0
        self.pending: tuple[int, Sequence[str], Values, Values] | None = None

    def after_step(self, model: nn.Module, optimizer: Any, count: int) -> None:
        if self.pending is not None and count >= self.pending[0]:
            self._apply(model)
        if count % self.period:
            return
        names = self.fragments[self.round % len(self.fragments)]
        self.round += 1
        snapshot = {name: values_of(model)[name] for name in names}
        means = self._means(names, snapshot)
        if self.delay:
            self.pending = (count + self.delay, names, snapshot, means)
        else:
            assign(model, self._stepped(names, means))

    def _apply(self, model: nn.Module) -> None:
        assert self.pending is not None
        (_, names, snapshot, means), self.pending = self.pending, None
        current, new = values_of(model), self._stepped(names, means)
        assign(model, {name: (current[name] - snapshot[name]) + new[name] for name in names})

    def _means(self, names: Sequence[str], values: Values) -> Values:
        if self.wire is None:
            return mean_of(values)
        ranks = dist.get_world_size()
        changes = torch.cat([(values[name] - self.anchors[name]).flatten() for name in names]) / ranks
        if self.errors is not None:
            changes += torch.cat([self.errors[name].flatten() for name in names])
        total, left_out = summed(self.wire, gathered(changes))
        sizes = [values[name].numel() for name in names]
        for name, error in zip(names, left_out[dist.get_rank()].split(sizes), strict=True):
            if self.errors is not None:
                self.errors[name] = error.view_as(values[name])
        return {
            name: self.anchors[name] + change.view_as(values[name])
            for name, change in zip(names, total.split(sizes), strict=True)
        }

    def _stepped(self, names: Sequence[str], means: Values) -> Values:
        if self.outer is None:
            for name in names:
                self.anchors[name].copy_(means[name])
        else:
            for name, anchor in self.anchors.items():
                anchor.grad = anchor - means[name] if name in means else None
            self.outer.step()
        return {name: self.anchors[name].detach().clone() for name in names}


def beside(
    rank: int, *, steps: int, period: int, start_step: int, fragments: int = 1, **options: Any
) -> tuple[LocalSGD, Any, ByHand]:
    """Trains by ``LocalSGD`` and by hand with the same options, and compares the parameters after each step."""
    build: Any = functools.partial(LocalSGD, period=period, start_step=start_step, fragments=fragments, **options)
    candidate, made, ddp = local(MLP, rank, steps=steps, build=build)
    before = plain(MLP, rank, steps=start_step, start_step=start_step, after_step=lambda *_: None)
    start = before[-1] if before else values_of(MLP.model())
    parts = into_fragments(start, fragments)
    assert len(parts) == fragments and sorted(itertools.chain(*parts)) == sorted(start)
    by_hand = ByHand(start, period=period, fragments=parts, **options)
    expected = plain(MLP, rank, steps=steps, start_step=start_step, after_step=by_hand.after_step)
    assert_parity(candidate, expected, what=f"from step {start_step}, {fragments} fragments, {options}")
    return made, ddp, by_hand


@contextmanager
def sent_bytes() -> Iterator[Counter[str]]:
    """Counts what this process sends through overlap, by kind of collective, until it is closed."""
    original = Collective.launch
    counted: Counter[str] = Counter()

    def counting(self: Collective, channels: Any) -> None:
        original(self, channels)
        counted[self.label] += self.sent_bytes

    Collective.launch = counting  # type: ignore[method-assign]
    try:
        yield counted
    finally:
        Collective.launch = original  # type: ignore[method-assign]
