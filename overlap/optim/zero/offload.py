"""The sharded update on the CPU, for parameters of an accelerator.

[Note: state on the CPU]

With ``offload=True`` what this rank's optimizer steps, and so its state, is in the CPU's memory. A bucket's update is a
trip there and back: what this rank owns of the mean gradients and of the parameters is copied down behind the
reduction, on its stream; a thread waits for the copy, steps, and rounds to the parameters' dtype; the new values are
copied up, and gathered.

The parameters come down with the gradients, though the optimizer has its own copy: so what other code has written to
them counts, as it does without offload, and nothing has to be compared on the device. Without a wider ``master_dtype``
the copy *is* what came down; a master takes over the elements that it does not round to.

An update in backward must hold up neither autograd's thread, which queues the rest of backward, nor the order of
collectives, which must not depend on when a rank's CPU is done. So what is waited for is waited for on a thread of the
optimizer's own while backward goes on, and copies up and gathers come at the end of backward, bucket by bucket: there
the training thread waits for what of the updates is left. What the loop's ``step()`` updates is waited for there.

All that travels is in pinned memory, one message for the gradients of a bucket and one for its values each way. The
optimizer's copy and state never travel, and need not be pinned.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

from overlap._torch.device import recorded_event, to_device, to_host
from overlap._torch.foreach import copy_all, flattened
from overlap.errors import ConfigurationError
from overlap.hooks.engine.worker import Worker
from overlap.optim.zero.sharding import Shard

__all__ = ["Offload", "Pairs", "check_on_host"]

# What goes down and comes up at once where there are no buckets: about the size of DDP's.
_TRIP_BYTES = 25 * 2**20

Pairs = Sequence[tuple[Shard, Tensor]]
"""Shards with the flat gradients of what this rank owns of them."""
Step = Callable[[Pairs], None]


def check_on_host(optimizer: Optimizer) -> None:
    """Raises: ConfigurationError: ``optimizer`` has an option that is for parameters on an accelerator alone."""
    if any(group.get("capturable") for group in optimizer.param_groups):
        raise ConfigurationError(
            f"offload=True steps {type(optimizer).__name__} on the CPU, and capturable=True is for steps on an "
            "accelerator: leave out one of them"
        )


class Offload:
    """Makes the updates of one optimizer on the CPU. See [Note: state on the CPU].

    Args:
        step: steps what the optimizer has of some shards with gradients in the CPU's memory.
    """

    def __init__(self, step: Step) -> None:
        self._step = step
        self._worker: Worker | None = None
        self._updates: dict[int, _Update] = {}

    def update(self, pairs: Pairs, found_inf: Tensor | None, *, at_once: bool) -> None:
        """Update, and bring the new values up on the current stream; the host waits.

        Args:
            pairs: gradients on the device.
            found_inf: one number on the device; where it is not zero the update changes nothing.
            at_once: step all of them in one call, even if there are none.
        """
        trips = _trips(pairs)
        verdict = _Verdict(found_inf)
        for together in [trips] if at_once else [[trip] for trip in trips]:
            _Update(together, verdict, self._step).make()
            for trip in together:
                trip.bring_up()

    def begin(self, place: int, pairs: Pairs, found_inf: Tensor | None) -> None:
        """Begin an update behind what is queued on the current stream; the host does not wait.

        :meth:`finish` must follow for the same ``place``, a number.
        """
        update = self._updates[place] = _Update(_trips(pairs), _Verdict(found_inf), self._step)
        if self._worker is None:
            self._worker = Worker(f"overlap-offload-{id(self):x}", abandon=lambda: None)
            weakref.finalize(self, self._worker.stop)
        self._worker.submit(update.run)

    def finish(self, place: int) -> None:
        """If an update of ``place`` was begun, wait for it on the host, and bring its values up on the current stream.

        Raises:
            Exception: that of the optimizer's ``step``.
        """
        if (update := self._updates.pop(place, None)) is not None:
            update.wait()
            for trip in update.trips:
                trip.bring_up()

    def forget(self) -> None:
        """Wait for updates that were begun, and bring nothing up: the pass has failed."""
        updates, self._updates = self._updates, {}
        for update in updates.values():
            update.is_over.wait()


class _Verdict:
    """Whether an update is to change nothing, on its way to the CPU."""

    def __init__(self, found_inf: Tensor | None) -> None:
        self._found_inf = None if found_inf is None else to_host(found_inf.reshape(1))
        self._arrived = None if found_inf is None else recorded_event(found_inf.device)

    @property
    def stops(self) -> bool:
        """The host waits for it."""
        if self._found_inf is None or self._arrived is None:
            return False
        self._arrived.synchronize()
        return bool(self._found_inf)


class _Update:
    """One call of the optimizer's step, with what some trips bring."""

    def __init__(self, trips: Sequence[_Trip], verdict: _Verdict, step: Step) -> None:
        self.trips = trips
        self.is_over = threading.Event()
        self._verdict = verdict
        self._step = step
        self._error: BaseException | None = None

    def make(self) -> None:
        """Wait for the trips, and step; the new values are ready to go up."""
        for trip in self.trips:
            trip.wait()
        if self._verdict.stops:
            return
        self._step([pair for trip in self.trips for pair in trip.pairs])
        for trip in self.trips:
            trip.round()

    def run(self) -> None:
        """:meth:`make`, on another thread."""
        try:
            self.make()
        except BaseException as error:
            self._error = error
        finally:
            self.is_over.set()

    def wait(self) -> None:
        """Wait for :meth:`run`, and raise its error."""
        self.is_over.wait()
        if self._error is not None:
            raise self._error


class _Trip:
    """Gradients and values of some shards, of one dtype each, on their way down, and new values on their way up."""

    def __init__(self, pairs: Pairs) -> None:
        gradients = [gradient for _, gradient in pairs]
        self._shards = [shard for shard, _ in pairs]
        self._views = [shard.views[shard.rank] for shard in self._shards]
        self._device = self._views[0].device
        self._gradients = to_host(flattened(gradients))
        self._values = to_host(flattened(self._views))
        self._arrived = recorded_event(self._device)

    def wait(self) -> None:
        """Let the host wait until all is there, and the optimizer's copies take over what the parameters hold."""
        self._arrived.synchronize()
        for shard, value in zip(self._shards, self._cut(self._values), strict=True):
            shard.take_values(value)

    @property
    def pairs(self) -> Pairs:
        """The gradients, in the CPU's memory."""
        return list(zip(self._shards, self._cut(self._gradients), strict=True))

    def round(self) -> None:
        """Round what was stepped to the parameters' dtype."""
        for shard, value in zip(self._shards, self._cut(self._values), strict=True):
            assert shard.own is not None, "what is stepped is owned"
            shard.shaped(value).copy_(shard.own)

    def bring_up(self) -> None:
        """Copy the values to the device and write the parameters, on the current stream; the host does not wait."""
        copy_all(self._views, self._cut(to_device(self._values, self._device)))

    def _cut(self, flat: Tensor) -> Sequence[Tensor]:
        return flat.split_with_sizes([view.numel() for view in self._views])


def _trips(pairs: Pairs) -> list[_Trip]:
    """The trips of these gradients, begun: one dtype each, in order, and of about a bucket's size."""
    parts: list[list[tuple[Shard, Tensor]]] = []
    dtypes: tuple[torch.dtype, torch.dtype] | None = None
    part_bytes = 0
    for shard, gradient in pairs:
        found = gradient.dtype, shard.parameter.dtype
        if found != dtypes or part_bytes >= _TRIP_BYTES:
            parts.append([])
            dtypes, part_bytes = found, 0
        parts[-1].append((shard, gradient))
        part_bytes += gradient.nbytes
    return [_Trip(part) for part in parts]
