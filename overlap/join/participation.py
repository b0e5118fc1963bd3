"""Which ranks still have inputs, and how a rank without inputs repeats the others' iterations.

[Note: iterations under Join]

A rank that has run out must issue the collectives that the others issue, in their order. So an iteration begins with
one small all-reduce in which each rank says whether it has inputs. While all have, that is all. Once a rank is missing,
each call (a forward with collectives, a backward, a step) is preceded by an all-reduce of the same size, in which the
highest of the ranks with inputs describes the call. Active ranks do not wait for it. So any loop is followed, call by
call::

    active ranks                              a rank without inputs
    ------------                              ---------------------
    poll: 1, an iteration begins              poll: 0
    poll: a forward that synchronizes         poll -> adapter.replay(FORWARD)
    poll: a backward                          poll -> adapter.replay(BACKWARD)
    poll: a step, with learning rates         poll -> adapter.replay(STEP)

A poll is of float64: whether every rank has inputs, every rank's number of steps, the call, and the hyperparameters.
The last two are written by one rank alone, so a sum is a broadcast. Polls have Gloo connections of their own: on the
user's group they would wait for gradients that are under way, and after a failure leave it out of step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta
from typing import NoReturn, TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from overlap._checks import refuse_capture
from overlap._torch.autograd import without_saved_context
from overlap._torch.c10d import GlooChannel
from overlap.errors import ConfigurationError, TrainingLoopError
from overlap.join.adapters import Call, Hyperparameters, JoinableAdapter, ReplayedGradients
from overlap.ranks.board import Board

__all__ = [
    "JoinSession",
    "active_join",
    "connect",
    "disconnect",
    "gradient_divisor",
    "kept_connections",
    "refuse_once_joined",
    "sessions",
]

_Batch = TypeVar("_Batch")

# How long to wait for an all-reduce before looking whether another rank has failed.
_PATIENCE = timedelta(seconds=1)
# Numbers that describe a call: its kind, the joinable's place in the list, and three of the adapter's.
_OF_CALL = 5
_TO_LEAVE_EARLY = 'to leave early use on_exhausted="stop", and leave on every rank in the same iteration'


class JoinSession:
    """One rank in the block of a Join. See [Note: iterations under Join].

    Args:
        channel: for polls.
        board: where the ranks of ``group`` report failures.
        adapters: of the joinables, in the order of the list.
        on_exhausted: the Join's option.
        divides_by_count: whether gradients are divided by the number of ranks that have inputs, not by that of all.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        channel: GlooChannel,
        board: Board,
        adapters: Sequence[JoinableAdapter],
        hyperparameters: Hyperparameters,
        *,
        on_exhausted: str,
        divides_by_count: bool,
    ) -> None:
        self.group, self.rank, self.size, self.board = group, group.rank(), group.size(), board
        self.adapters, self.hyperparameters = adapters, hyperparameters
        self.on_exhausted, self.shadows = on_exhausted, on_exhausted == "shadow"
        self.divides_by_count = divides_by_count
        self.gradients = ReplayedGradients(lambda: self.missing)
        self.replays_own_gradients = False
        """Whether this rank replays a backward with the gradients that it had accumulated when it ran out."""
        self.has_raised_on_all = False
        """Whether an error was raised that every rank raises at the same place."""
        self.iteration = -1
        self._channel, self._steps = channel, 0
        self._is_iterated = self._is_exhausted = self._has_joined = False
        # The adapter that begins iterations, where no loader is iterated.
        self._driver: JoinableAdapter | None = None
        # As the last poll said, and the one under way.
        self._active, self._source = [True] * self.size, self.size - 1
        self._pending: _Poll | None = None
        # Nobody waits for it here; kept until the next one.
        self._described: _Poll | None = None

    # Who has inputs in this iteration.

    @property
    def active(self) -> list[bool]:
        """Which ranks have inputs; waits for those of this iteration, if they are under way.

        Raises:
            TrainingLoopError: some have inputs, some have none, and ``on_exhausted="raise"``.
        """
        if self._pending is not None:
            pending, self._pending = self._pending, None
            self._take(pending.result(self.board.poll))
            if self.on_exhausted == "raise" and any(self._active) and not all(self._active):
                self._raise_exhausted(_without(self._active))
        return self._active

    @property
    def missing(self) -> list[int]:
        """The ranks that have run out of inputs, and replay."""
        return _without(self.active) if self.shadows else []

    @property
    def divisor(self) -> int:
        """The number by which sums of gradients are divided."""
        return self.divisor_among(range(self.size))

    def divisor_among(self, ranks: Sequence[int]) -> int:
        """The same, for sums over ``ranks`` only."""
        if not self.divides_by_count:
            return len(ranks)
        active = self.active
        return max(1, sum(active[rank] for rank in ranks))  # Where none has inputs, the sum is of zeros.

    @property
    def buffer_source(self) -> int:
        """The rank whose buffers the others take over: the highest of those that have inputs, or had them last."""
        self.active  # noqa: B018
        return self._source

    def _raise_exhausted(self, missing: list[int]) -> NoReturn:
        self.has_raised_on_all = True
        # The first sentences are PyTorch's, which people match on.
        happened = (
            f"Rank {self.rank} exhausted all inputs."
            if self.rank in missing
            else "Detected at least one rank that exhausted inputs. Throwing across all ranks."
        )
        raise TrainingLoopError(
            f'{happened} Ranks {missing} ran out and others did not, which on_exhausted="raise" makes an error on all'
        )

    # An active rank.

    def iterate(self, loader: Iterable[_Batch]) -> Iterator[_Batch]:
        """The batches of ``loader``; ends where this rank runs out, or with ``on_exhausted="stop"`` where any does."""
        if self._is_iterated or self._steps or self.iteration >= 0:
            raise TrainingLoopError(
                "join.iterate comes once in a block and before its first forward or step: one Join is one pass over "
                "the data, so open another for the next epoch"
            )
        self._is_iterated = True
        stops = self.on_exhausted == "stop"
        for batch in loader:
            self._begin(has_inputs=True)
            if stops and not all(self.active):
                break
            yield batch
        else:
            if stops:
                self._begin(has_inputs=False)
        self._is_exhausted = True

    def _begin(self, *, has_inputs: bool) -> None:
        """Begin an iteration; unless ranks end together, the poll is waited for only where its result is needed."""
        self.iteration += 1
        self._ask(has_inputs=has_inputs)
        if not self.shadows:
            self.active  # noqa: B018

    def on_call(
        self, adapter: JoinableAdapter, call: Call, detail: Sequence[float] = (), *, has_collectives: bool = True
    ) -> None:
        """Called before an active rank makes a ``call`` that ranks without inputs replay with ``detail``."""
        if self._has_joined:
            return
        refuse_capture("an iteration under Join", "leave the block first")
        if call is not Call.BACKWARD and not self._is_iterated:
            self._begin_without_loader(adapter)
        if not self.shadows:
            return
        if self._is_exhausted:
            raise TrainingLoopError(
                f"rank {self.rank} began another forward or step after join.iterate had ended, and ranks that ran out "
                "before could not follow: leave the block first"
            )
        self._steps += call is Call.STEP
        if not has_collectives or not self.missing:
            return
        described: list[float] = []
        if self._source == self.rank:
            described = [call, self.adapters.index(adapter), *detail]
            described += [0.0] * (_OF_CALL - len(described))
            described += self.hyperparameters.values()
        self._described = self._poll(described, has_inputs=True)

    def _begin_without_loader(self, adapter: JoinableAdapter) -> None:
        if self.on_exhausted == "stop":
            raise ConfigurationError('on_exhausted="stop" needs `for batch in join.iterate(loader)` around the forward')
        if self._driver is None and adapter.precedence == max(each.precedence for each in self.adapters):
            self._driver = adapter
        if adapter is self._driver:
            self._begin(has_inputs=True)

    # A rank that has left its loop.

    def join(self) -> bool:
        """Repeat the others' calls until all ranks have run out; returns whether this rank was among the last."""
        ran, joined_at = self.iteration + 1, self.iteration
        if self.on_exhausted == "stop":
            counts = [int(count) for (count,) in self.of_ranks([ran])]
            if len(set(counts)) > 1:
                raise TrainingLoopError(f"ranks left the loop after {counts} iterations; {_TO_LEAVE_EARLY}")
            return True
        if self._is_iterated and not self._is_exhausted:
            raise TrainingLoopError(
                f"rank {self.rank} left join.iterate(loader) after {ran} batches while it had more; {_TO_LEAVE_EARLY}"
            )
        self._has_joined = True
        self._ask(has_inputs=False)
        self.iteration += any(self.active)
        while any(self._active):
            call, index, *detail = self._take(self._poll(has_inputs=False).result(self.board.poll))
            if call == Call.BEGIN:
                self.iteration += any(self._active)
                continue
            self.hyperparameters.follow(detail[_OF_CALL - 2 :])
            self._steps += call == Call.STEP
            self.adapters[int(index)].replay(Call(int(call)), detail[: _OF_CALL - 2])
        return self.iteration == joined_at

    # Polls.

    def _ask(self, *, has_inputs: bool) -> None:
        self.active  # noqa: B018
        self._pending = self._poll(has_inputs=has_inputs)

    def _poll(self, described: Sequence[float] = (), *, has_inputs: bool) -> _Poll:
        of_ranks = [0.0] * (2 * self.size)
        of_ranks[self.rank], of_ranks[self.size + self.rank] = has_inputs, self._steps
        described = described or [0.0] * (_OF_CALL + self.hyperparameters.count)
        return _Poll(self._channel, [*of_ranks, *described])

    def of_ranks(self, numbers: Sequence[float]) -> list[list[float]]:
        """The ``numbers`` of every rank, which are as many on each."""
        count = len(numbers)
        placed = [0.0] * (self.size * count)
        placed[self.rank * count : (self.rank + 1) * count] = numbers
        sums = _Poll(self._channel, placed).result(self.board.poll)
        return [sums[rank * count : (rank + 1) * count] for rank in range(self.size)]

    def _take(self, numbers: Sequence[float]) -> Sequence[float]:
        """Take over who has inputs; returns the description of a call, of zeros where an iteration begins."""
        size = self.size
        self._active = [bool(number) for number in numbers[:size]]
        if self.on_exhausted != "stop":  # Which ends with all ranks in step.
            self._source = max((rank for rank in range(size) if self._active[rank]), default=self._source)
        if numbers[2 * size] == Call.BEGIN and len(set(numbers[size : 2 * size])) > 1:
            raise TrainingLoopError(
                f"ranks {_without(self._active)} ran out of inputs, and the others did something more (a step of an "
                "optimizer or a scheduler) before the forward that would tell them; do it after backward, or use "
                "`for batch in join.iterate(loader)`"
            )
        return numbers[2 * size :]


class _Poll:
    """An all-reduce under way, a sum of ``numbers`` in float64."""

    def __init__(self, channel: GlooChannel, numbers: Sequence[float]) -> None:
        self._numbers = torch.tensor(numbers, dtype=torch.float64, device="cpu")
        with without_saved_context():
            (self._work,) = channel.all_reduce(self._numbers, dist.ReduceOp.SUM)

    def result(self, look: Callable[[], None]) -> list[float]:
        """The sums; calls ``look`` now and then while this rank waits for them."""
        while not self._work.is_completed():
            try:
                self._work.wait(_PATIENCE)
            except RuntimeError:
                look()
        self._work.wait()
        numbers: list[float] = self._numbers.tolist()
        return numbers


_kept: WeakKeyDictionary[dist.ProcessGroup, tuple[str, GlooChannel]] = WeakKeyDictionary()
"""Of each group the connections for polls, and their name."""


def kept_connections(group: dist.ProcessGroup) -> str:
    """The name of the connections on which the last Join on ``group`` has polled; empty unless it ended well."""
    return _kept[group][0] if group in _kept else ""


def connect(group: dist.ProcessGroup, board: Board, kept_by_ranks: Sequence[str], name: str) -> GlooChannel:
    """The connections for polls: those that every rank has kept, or else new ones under ``name``."""
    if kept_by_ranks[0] and len(set(kept_by_ranks)) == 1:
        return _kept[group][1]
    disconnect(group)
    channel = board.connect("polls", purpose=" to enter Join")
    _kept[group] = name, channel
    return channel


def disconnect(group: dist.ProcessGroup) -> None:
    """Close the connections for polls, if there are any: a poll may be without an answer."""
    if group in _kept:
        _kept.pop(group)[1].abort()


def _without(active: Sequence[bool]) -> list[int]:
    """The ranks that have no inputs."""
    return [rank for rank, is_active in enumerate(active) if not is_active]


sessions: WeakKeyDictionary[dist.ProcessGroup, JoinSession] = WeakKeyDictionary()
"""Of each group, the Join whose block this process is in."""


def active_join(group: dist.ProcessGroup) -> JoinSession | None:
    """The Join on ``group`` whose block this process is in, or ``None``."""
    return sessions.get(group)


def gradient_divisor(group: dist.ProcessGroup, *, within: dist.ProcessGroup | None = None) -> int:
    """The number by which a sum of gradients over ``group`` is divided.

    That is the group's size, or under ``Join(..., divide_by_initial_world_size=False)`` the number of ranks that still
    have inputs. It is the same on every rank, also on those without inputs. Every reducer divides by
    ``bucket.divisor``, which is set from here alone.

    Args:
        group: the ranks whose gradients are added up.
        within: the group that the model trains on, where ``group`` is a part of it.

    >>> from overlap.join import gradient_divisor
    >>> gradient_divisor(dist.group.WORLD)
    1
    """
    if (join := active_join(group)) is not None:
        return join.divisor
    if within is None or (join := active_join(within)) is None:
        return group.size()
    whole, part = dist.get_process_group_ranks(within), dist.get_process_group_ranks(group)
    return join.divisor_among([whole.index(rank) for rank in part if rank in whole])


def refuse_once_joined(group: dist.ProcessGroup, what: str) -> None:
    """Called before collectives that a rank without inputs does not replay.

    Raises:
        TrainingLoopError: there is such a rank.
    """
    if (join := active_join(group)) is not None and (missing := join.missing):
        raise TrainingLoopError(
            f"{what} inside of Join: ranks {missing} have run out of inputs and are not told of the call, so the "
            "others would wait for them; call it after the block"
        )
