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
from overlap.hooks import Bucket, Site, all_reduce
from overlap.hooks.gate import Gate
from overlap.optim.local_sgd.averaging import Packed, Share, bare_buckets, pack

__all__ = ["Flight"]

# Of the mean of some named tensors, what is to be the new value, in the same storage or another.
Outcome = Callable[[Sequence[str], list[Tensor]], list[Tensor]]


@dataclass
class _Leg:
    """Some of the tensors, on their way together."""

    names: list[str]
    part: Packed
    snapshot: Tensor
    mean: Tensor
    gate: Gate = field(repr=False)


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
        self, tensors: Mapping[str, Tensor], *, site: Site, group: dist.ProcessGroup, share: Share,
        dtype: torch.dtype | None,
    ) -> None:  # fmt: skip
        """Copy ``tensors`` and average the copies over ``group``, behind all that was begun before."""
        self._pack(tensors, dtype, site)
        for leg in self._legs:
            leg.part.load(into=leg.snapshot)
            leg.mean.copy_(leg.snapshot)
            share.of_(leg.mean)
        buckets = bare_buckets(len(self._legs), torch.empty(0, device=site.device), group)
        leg_of = dict(zip(buckets, self._legs, strict=True))

        async def work(bucket: Bucket) -> None:
            leg = leg_of[bucket]
            await all_reduce(leg.mean, group=group)
            leg.gate.open()

        def fail(error: BaseException) -> None:
            for leg in self._legs:
                leg.gate.fail(error)

        assert site.ride is not None, "the runtime gives it to every stage that it attaches"
        site.ride(work, buckets, on_failure=fail)

    def _pack(self, tensors: Mapping[str, Tensor], dtype: torch.dtype | None, site: Site) -> None:
        names = {id(tensor): name for name, tensor in tensors.items()}
        for members, part in pack(tensors.values(), dtype=dtype):
            snapshot = part.empty()
            leg_names = [names[id(member)] for member in members]
            self._legs.append(_Leg(leg_names, part, snapshot, torch.empty_like(snapshot), Gate(site.device)))

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
            leg.gate.wait()

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
        cls, state: Mapping[str, Any], tensors: Mapping[str, Tensor], *, site: Site, dtype: torch.dtype | None
    ) -> Flight:
        """The flight that :meth:`state_dict` was of, come and yet to be taken over."""
        flight = cls(lands_after=state["lands_after"], unit=state["unit"])
        flight._pack(tensors, dtype, site)
        snapshots, means = state["snapshots"], state["means"]
        if set(snapshots) != {name for leg in flight._legs for name in leg.names}:
            raise ConfigurationError("the average in flight that was saved is of a model with other parameters")
        for leg in flight._legs:
            copy_all(leg.part.views(leg.snapshot), [snapshots[name] for name in leg.names])
            copy_all(leg.part.views(leg.mean), [means[name] for name in leg.names])
            leg.gate.open()
        return flight
