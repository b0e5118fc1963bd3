"""Averages that are on their way while training goes on.

[Note: averages in flight]

What is sent is a copy, so parameters may change meanwhile. When the average is taken over, each rank keeps what it has
learnt since: new = average + (current - snapshot). Parameters are only ever written between two steps, by the training
thread, never during a forward or a backward that reads them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from overlap._torch.foreach import copy_all
from overlap.errors import ConfigurationError
from overlap.hooks import StageContext, all_reduce
from overlap.hooks.engine.background import Completion, Item
from overlap.optim.local_sgd.averaging import Packed, Share, pack

__all__ = ["Flight"]

# Of the mean of some named tensors, what is to be the new value, in the same storage or another.
Outcome = Callable[[Sequence[str], list[Tensor]], list[Tensor]]


@dataclass(frozen=True, eq=False, kw_only=True)
class _Leg(Item):
    """Some of the tensors, on their way together."""

    names: list[str]
    part: Packed
    snapshot: Tensor
    mean: Tensor
    completion: Completion = field(repr=False)


class Flight:
    """The average of one synchronization, in flight.

    Args:
        lands_after: the step after which it is taken over.
        unit: which part of the model it is of.
    """

    def __init__(self, *, lands_after: int, unit: int) -> None:
        self.lands_after = lands_after
        self.unit = unit
        self._legs: list[_Leg] = []

    @torch.no_grad()
    def begin(
        self, tensors: Mapping[str, Tensor], *, context: StageContext, group: dist.ProcessGroup, share: Share,
        dtype: torch.dtype | None,
    ) -> None:  # fmt: skip
        """Copy ``tensors`` and average the copies over ``group``, behind all that was begun before."""
        self._pack(tensors, dtype, context)
        for leg in self._legs:
            leg.part.load(into=leg.snapshot)
            leg.mean.copy_(leg.snapshot)
            share.of_(leg.mean)

        async def work(leg: _Leg) -> None:
            await all_reduce(leg.mean, group=group)
            leg.completion.set()

        def fail(error: BaseException) -> None:
            for leg in self._legs:
                leg.completion.fail(error)

        assert context.background is not None, "the runtime gives it to every stage that it attaches"
        context.background(self._legs, work, on_failure=fail)

    def _pack(self, tensors: Mapping[str, Tensor], dtype: torch.dtype | None, context: StageContext) -> None:
        names = {id(tensor): name for name, tensor in tensors.items()}
        for place, (members, part) in enumerate(pack(tensors.values(), dtype=dtype)):
            snapshot = part.empty()
            leg_names = [names[id(member)] for member in members]
            self._legs.append(
                _Leg(
                    index=place,
                    names=leg_names,
                    part=part,
                    snapshot=snapshot,
                    mean=torch.empty_like(snapshot),
                    completion=Completion(context.device),
                )
            )

    @torch.no_grad()
    def land(self, outcome: Outcome | None = None, *, stepped: Sequence[str] = ()) -> None:
        """Wait for the average and take it over; ``outcome`` makes of the means of ``stepped`` what comes instead."""
        self.wait()
        if outcome is not None:
            mean_of = {
                name: view for leg in self._legs for name, view in zip(leg.names, leg.part.views(leg.mean), strict=True)
            }
            means = [mean_of[name] for name in stepped]
            copy_all(means, outcome(stepped, [mean.clone() for mean in means]))
        for leg in self._legs:
            # new = average + (current - snapshot), exactly the average where nothing was learnt meanwhile.
            leg.part.store(leg.part.load().sub_(leg.snapshot).add_(leg.mean))

    def wait(self) -> None:
        """Wait until the average has come."""
        for leg in self._legs:
            leg.completion.wait()

    def state_dict(self) -> dict[str, Any]:
        """What has come and is yet to be taken over, by name; waits for it."""
        self.wait()
        return {
            "lands_after": self.lands_after,
            "unit": self.unit,
            "snapshots": self._by_name(lambda leg: leg.snapshot),
            "means": self._by_name(lambda leg: leg.mean),
        }

    def _by_name(self, flat: Callable[[_Leg], Tensor]) -> dict[str, Tensor]:
        return {
            name: view.clone()
            for leg in self._legs
            for name, view in zip(leg.names, leg.part.views(flat(leg)), strict=True)
        }

    @classmethod
    @torch.no_grad()
    def restored(
        cls,
        state: Mapping[str, Any],
        tensors: Mapping[str, Tensor],
        *,
        context: StageContext,
        dtype: torch.dtype | None,
    ) -> Flight:
        """The flight that :meth:`state_dict` was of, come and yet to be taken over."""
        flight = cls(lands_after=state["lands_after"], unit=state["unit"])
        flight._pack(tensors, dtype, context)
        snapshots, means = state["snapshots"], state["means"]
        if set(snapshots) != {name for leg in flight._legs for name in leg.names}:
            raise ConfigurationError("the average in flight that was saved is of a model with other parameters")
        for leg in flight._legs:
            copy_all(leg.part.views(leg.snapshot), [snapshots[name] for name in leg.names])
            copy_all(leg.part.views(leg.mean), [means[name] for name in leg.names])
            leg.completion.set()
        return flight
