"""Which ranks still have inputs, and how a rank without inputs repeats the others' iterations.

[Note: iterations under Join]

A rank that has run out must issue the collectives that the others issue, in their order.

*Known lengths* (``Join(..., lengths=n)``, or a loader with a length given to ``join.iterate``). Ranks have exchanged
their numbers of iterations, and each iteration is the same: for every joinable in the order of the list, a recorded
forward and a synchronized backward of a model, or one ``step()`` of anything else. A rank without inputs repeats that
as often as the longest rank goes on. No collective is added. Each active rank compares its own calls with that list in
its first iteration, and again from the iteration after which a rank may leave; a loop that differs is refused.

*Polled* (otherwise). An iteration begins with one small all-reduce in which each rank says whether it has inputs.
While all have inputs, that is all. Once a rank is missing, each call (a forward with collectives, a backward, a step)
is preceded by an all-reduce of the same size, in which the highest of the ranks with inputs describes the call. Active
ranks do not wait for it. So any loop is followed, call by call::

    active ranks                              a rank without inputs
    ------------                              ---------------------
    poll: 1, an iteration begins              poll: 0
    poll: a forward that synchronizes         poll -> adapter.replay(FORWARD)
    poll: a backward                          poll -> adapter.replay(BACKWARD)
    poll: a step, with learning rates         poll -> adapter.replay(STEP)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from datetime import timedelta
from typing import Any, NoReturn, TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from overlap._checks import refuse_capture
from overlap._torch.device import has_streams, on_stream, recorded_event, stream_of, to_device, to_host
from overlap.errors import ConfigurationError, TrainingLoopError, UnsupportedError
from overlap.join.adapters import Call, Hyperparameters, JoinableAdapter, ReplayedGradients
from overlap.ranks.board import Board

__all__ = [
    "JoinSession",
    "active_join",
    "gradient_divisor",
    "refuse_once_joined",
    "sessions",
]

_Batch = TypeVar("_Batch")
_Replayed = Iterator[tuple[JoinableAdapter, Call, Sequence[float] | None]]

# How long to wait for an all-reduce before looking whether another rank has failed.
_PATIENCE = timedelta(seconds=1)
# Numbers that describe a call: its kind, the joinable's place in the list, and three of the adapter's.
_OF_CALL = 5
_LEAVE_LENGTHS_OUT = "leave lengths out: Join([...]) without lengths=, and join.iterate(iter(loader))"
_TO_LEAVE_EARLY = 'to leave early use on_exhausted="stop", and leave on every rank in the same iteration'


class JoinSession:
    """One rank in the block of a Join. See [Note: iterations under Join].

    Args:
        board: where the ranks of ``group`` report failures.
        adapters: of the joinables, in the order of the list.
        lengths: how many iterations each rank will run, where the Join was given that.
        on_exhausted: the Join's option.
        divides_by_count: whether gradients are divided by the number of ranks that have inputs, not by that of all.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        device: torch.device,
        board: Board,
        adapters: Sequence[JoinableAdapter],
        hyperparameters: Hyperparameters,
        lengths: Sequence[int] | None,
        *,
        on_exhausted: str,
        divides_by_count: bool,
    ) -> None:
        self.group, self.rank, self.device, self.board = group, group.rank(), device, board
        self.adapters, self.hyperparameters = adapters, hyperparameters
        self.on_exhausted, self.shadows = on_exhausted, on_exhausted == "shadow"
        self.divides_by_count = divides_by_count
        self.gradients = ReplayedGradients(lambda: self.missing)
        self.replays_own_gradients = False
        """Whether this rank replays a backward with the gradients that it had accumulated when it ran out."""
        self.has_raised_on_all = False
        """Whether an error was raised that every rank raises at the same place."""
        self.iteration = -1
        self.steps = 0
        """How many steps, not forwards and backwards, this rank has made or replayed."""
        self._is_iterated = self._is_exhausted = self._has_joined = False
        # The adapter that begins iterations, where no loader is iterated.
        self._driver: JoinableAdapter | None = None
        self._way: _Known | _Polled = _Polled(self) if lengths is None else _Known(self, lengths)

    # Who has inputs in this iteration.

    @property
    def missing(self) -> list[int]:
        """The ranks that have run out of inputs, and replay."""
        return _without(self._way.active) if self.shadows else []

    @property
    def divisor(self) -> int:
        """The number by which sums of gradients are divided."""
        return self.divisor_among(range(self.group.size()))

    def divisor_among(self, ranks: Sequence[int]) -> int:
        """The same, for sums over ``ranks`` only."""
        if not self.divides_by_count:
            return len(ranks)
        active = self._way.active
        return max(1, sum(active[rank] for rank in ranks))  # Where none has inputs, the sum is of zeros.

    @property
    def buffer_source(self) -> int:
        """The rank whose buffers the others take over: the highest of those that have inputs, or had them last."""
        # With "stop" all ranks have inputs in every iteration that is run.
        return self.group.size() - 1 if self.on_exhausted == "stop" else self._way.source

    def raise_if_exhausted(self) -> None:
        """Raises: TrainingLoopError: some ranks have inputs, some have none, and ``on_exhausted="raise"``."""
        missing = _without(self._way.active)
        if self.on_exhausted != "raise" or not 0 < len(missing) < self.group.size():
            return
        self.has_raised_on_all = True
        # The first sentences are PyTorch's, which people match on.
        happened = (
            f"Rank {self.rank} exhausted all inputs."
            if self.rank in missing
            else "Detected at least one rank that exhausted inputs. Throwing across all ranks."
        )
        raise TrainingLoopError(
            f"{happened} Ranks {missing} ran out after {self.iteration} iterations or more and others did not, which "
            'on_exhausted="raise" makes an error on all'
        )

    # An active rank.

    def iterate(self, loader: Iterable[_Batch]) -> Iterator[_Batch]:
        """The batches of ``loader``; ends where this rank runs out, or with ``on_exhausted="stop"`` where any does."""
        if self._is_iterated or self.steps or self.iteration >= 0:
            raise TrainingLoopError(
                "join.iterate comes once in a block and before its first forward or step: one Join is one pass over "
                "the data, so open another for the next epoch"
            )
        self._is_iterated = True
        if isinstance(self._way, _Polled):
            models = sum(Call.BACKWARD in adapter.calls for adapter in self.adapters)
            length = None if self.shadows and models > 1 else _length(loader)
            lengths = self.board.gather("join.iterate", length, purpose=" to join.iterate")
            if None not in lengths:
                self._way = _Known(self, lengths)
        stops = self.on_exhausted == "stop"
        for batch in loader:
            self._way.begin(has_inputs=True)
            if stops and not all(self._way.active):
                break
            yield batch
        else:
            if stops:
                self._way.begin(has_inputs=False)
        self._is_exhausted = True

    def on_call(
        self, adapter: JoinableAdapter, call: Call, detail: Sequence[float] = (), *, has_collectives: bool = True
    ) -> None:
        """Called before an active rank makes a ``call`` that ranks without inputs replay with ``detail``."""
        if self._has_joined:
            return
        refuse_capture("an iteration under Join", "leave the block first")
        if call is not Call.BACKWARD and not self._is_iterated:
            self._begin_without_loader(adapter, records=call is Call.STEP or bool(detail[0]))
        if not self.shadows:
            return
        if self._is_exhausted:
            raise TrainingLoopError(
                f"rank {self.rank} began another forward or step after join.iterate had ended, and ranks that ran out "
                "before could not follow: leave the block first"
            )
        self.steps += call is Call.STEP
        self._way.on_call(adapter, call, detail, has_collectives=has_collectives)

    def _begin_without_loader(self, adapter: JoinableAdapter, *, records: bool) -> None:
        if self.on_exhausted == "stop":
            raise ConfigurationError('on_exhausted="stop" needs `for batch in join.iterate(loader)` around the forward')
        if self._driver is None and adapter.precedence == max(each.precedence for each in self.adapters):
            self._driver = adapter
        if adapter is self._driver and (records or isinstance(self._way, _Polled)):
            self._way.begin(has_inputs=True)

    @property
    def watches_backward(self) -> bool:
        """Whether backwards of this iteration must be reported."""
        return self.shadows and not self._has_joined and self._way.is_watched

    def after_step(self) -> None:
        """Called when an optimizer or a scheduler has stepped, which may have changed hyperparameters."""
        if isinstance(self._way, _Known):
            self._way.expect_hyperparameters()

    # A rank that has left its loop.

    def join(self) -> bool:
        """Repeat the others' calls until all ranks have run out; returns whether this rank was among the last."""
        ran, joined_at = self.iteration + 1, self.iteration
        if self.on_exhausted == "stop":
            of_ranks = self.board.gather("left", ran, purpose=" to the end of the loop")
            if len(set(of_ranks)) > 1:
                raise TrainingLoopError(f"ranks left the loop after {of_ranks} iterations; {_TO_LEAVE_EARLY}")
            return True
        if isinstance(self._way, _Known):
            self._way.leave(ran)
        elif self._is_iterated and not self._is_exhausted:
            raise TrainingLoopError(
                f"rank {self.rank} left join.iterate(loader) after {ran} batches while it had more; {_TO_LEAVE_EARLY}"
            )
        self._has_joined = True
        for adapter, call, detail in self._way.replayed():
            self.steps += call is Call.STEP
            adapter.replay(call, detail)
        return self.iteration == joined_at


class _Known:
    """Every rank said in advance how many iterations it will run, and each of them is regular."""

    def __init__(self, session: JoinSession, lengths: Sequence[int]) -> None:
        self._session, self._lengths = session, lengths
        self._own = lengths[session.rank]
        self._regular = [(adapter, call) for adapter in session.adapters for call in adapter.calls]
        # How many of these calls this rank has made in this iteration.
        self._made = 0
        self._is_uneven = session.shadows and min(lengths) != max(lengths)
        self.is_watched = self._is_uneven
        """Whether this iteration is compared with a regular one. Before the first there are no calls."""
        self.expect_hyperparameters()

    @property
    def active(self) -> list[bool]:
        """Which ranks have inputs; before the first iteration as in the first."""
        return [length > max(self._session.iteration, 0) for length in self._lengths]

    @property
    def source(self) -> int:
        """The highest rank that has inputs."""
        active = self.active
        return max((rank for rank, is_active in enumerate(active) if is_active), default=len(active) - 1)

    # Active.

    def begin(self, *, has_inputs: bool) -> None:
        session = self._session
        self._end()
        session.iteration += 1
        if (session.iteration < self._own) != has_inputs:
            self._refuse_number("begins another" if has_inputs else f"its loader had {session.iteration}")
        session.raise_if_exhausted()
        is_watched = self._is_uneven and (session.iteration == 0 or session.iteration >= min(self._lengths) - 1)
        if is_watched and not self.is_watched and session.iteration > 0:
            self.expect_hyperparameters()
        self._made, self.is_watched = 0, is_watched

    def on_call(
        self, adapter: JoinableAdapter, call: Call, detail: Sequence[float], *, has_collectives: bool = True
    ) -> None:
        """Compare the call with a regular iteration."""
        if not self.is_watched:
            return
        if self._made == len(self._regular) or self._regular[self._made] != (adapter, call):
            self._refuse(_in_words(adapter, call))
        if call is Call.FORWARD and not all(detail[::2]):
            self._refuse(f"{_in_words(adapter, call)} under {'no_sync()' if detail[0] else 'no_grad()'}")
        self._made += 1
        if call is not Call.BACKWARD:
            self._check_hyperparameters()

    def expect_hyperparameters(self) -> None:
        """From here on ranks without inputs have the values that this rank has."""
        self._hyperparameters = self._session.hyperparameters.values() if self._is_uneven else []

    def leave(self, ran: int) -> None:
        """Called when this rank has left its loop after ``ran`` iterations."""
        self._end()
        if ran < self._own:
            self._refuse_number(f"left the block after {ran}; {_TO_LEAVE_EARLY}")

    def _refuse_number(self, found: str) -> NoReturn:
        raise TrainingLoopError(
            f"rank {self._session.rank} said that it would run {self._own} iterations (batches of join.iterate, or "
            f"forwards that record gradients), but {found}"
        )

    def _end(self) -> None:
        if self.is_watched and self._session.iteration >= 0:
            if self._made < len(self._regular):
                self._refuse("its end")
            self._check_hyperparameters()

    def _refuse(self, found: str) -> NoReturn:
        due = "its end" if self._made == len(self._regular) else _in_words(*self._regular[self._made])
        listed = ", ".join(adapter.name for adapter in self._session.adapters)
        raise UnsupportedError(
            f"iteration {self._session.iteration} of rank {self._session.rank} has {found} where {due} is due: under "
            "Join with known lengths, ranks without inputs repeat a recorded forward, a synchronized backward and one "
            f"step() of each joinable, in the order of the list [{listed}]. Give the joinables in the loop's order, or "
            f"{_LEAVE_LENGTHS_OUT}"
        )

    def _check_hyperparameters(self) -> None:
        if (change := self._session.hyperparameters.changed_since(self._hyperparameters)) is not None:
            raise UnsupportedError(
                f"{change} in iteration {self._session.iteration} of rank {self._session.rank}, which ranks without "
                "inputs do not learn where lengths are known: give every scheduler of an optimizer that is given to "
                "Join to it, too, as in Join([ddp, optimizer, scheduler]); where the loop itself sets the value, "
                f"{_LEAVE_LENGTHS_OUT}"
            )

    # Without inputs.

    def replayed(self) -> _Replayed:
        session = self._session
        if not session.shadows and min(self._lengths) != max(self._lengths):
            session.iteration = min(self._lengths)
            session.raise_if_exhausted()
        for session.iteration in range(self._own, max(self._lengths)):
            yield from ((adapter, call, None) for adapter, call in self._regular)


class _Polled:
    """Ranks ask each other by small all-reduces on the group: in every iteration who has inputs, and while one has none
    also before each call.

    Each is of float64: whether every rank has inputs, every rank's number of steps, the call, and the hyperparameters.
    The last two are written by one rank alone, so a sum is a broadcast.
    """

    is_watched = True

    def __init__(self, session: JoinSession) -> None:
        self._session, self._size = session, session.group.size()
        self._active, self._source = [True] * self._size, self._size - 1
        self._pending: _Poll | None = None
        # Nobody waits for it here; kept until the next one.
        self._described: _Poll | None = None

    @property
    def active(self) -> list[bool]:
        """Which ranks have inputs; waits for those of this iteration, if they are under way."""
        if self._pending is not None:
            pending, self._pending = self._pending, None
            self._take(pending.result(self._session.board.poll))
            self._session.raise_if_exhausted()
        return self._active

    @property
    def source(self) -> int:
        """The highest rank that has inputs, or had them last."""
        self.active  # noqa: B018
        return self._source

    # Active.

    def begin(self, *, has_inputs: bool) -> None:
        """Begin an iteration; unless ranks end together, the result is waited for only where it is needed."""
        self._session.iteration += 1
        self._ask(has_inputs=has_inputs)
        if not self._session.shadows:
            self.active  # noqa: B018

    def on_call(
        self, adapter: JoinableAdapter, call: Call, detail: Sequence[float], *, has_collectives: bool = True
    ) -> None:
        """Describe the call to ranks without inputs, where there are any."""
        session = self._session
        if not has_collectives or not session.missing:
            return
        described: list[float] = []
        if session.buffer_source == session.rank:
            described = [call, session.adapters.index(adapter), *detail]
            described += [0.0] * (_OF_CALL - len(described))
            described += session.hyperparameters.values()
        self._described = self._poll(described, has_inputs=True)

    # Without inputs.

    def replayed(self) -> _Replayed:
        session = self._session
        self._ask(has_inputs=False)
        if not any(self.active):
            return
        session.iteration += 1
        while any(self._active):
            call, index, *detail = self._take(self._poll(has_inputs=False).result(session.board.poll))
            if call == Call.BEGIN:
                session.iteration += any(self._active)
            else:
                session.hyperparameters.follow(detail[_OF_CALL - 2 :])
                yield session.adapters[int(index)], Call(int(call)), detail[: _OF_CALL - 2]

    # Both.

    def _ask(self, *, has_inputs: bool) -> None:
        self.active  # noqa: B018
        self._pending = self._poll(has_inputs=has_inputs)

    def _poll(self, described: Sequence[float] = (), *, has_inputs: bool) -> _Poll:
        session = self._session
        of_ranks = [0.0] * (2 * self._size)
        of_ranks[session.rank], of_ranks[self._size + session.rank] = has_inputs, session.steps
        described = described or [0.0] * (_OF_CALL + session.hyperparameters.count)
        return _Poll(session.group, session.device, [*of_ranks, *described])

    def _take(self, numbers: Sequence[float]) -> Sequence[float]:
        """Take over who has inputs; returns the description of a call, of zeros where an iteration begins."""
        size = self._size
        self._active = [bool(number) for number in numbers[:size]]
        self._source = max((rank for rank in range(size) if self._active[rank]), default=self._source)
        if numbers[2 * size] == Call.BEGIN and len(set(numbers[size : 2 * size])) > 1:
            raise TrainingLoopError(
                f"ranks {_without(self._active)} ran out of inputs, and the others did something more (a step of an "
                "optimizer or a scheduler) before the forward that would tell them; do it after backward, or use "
                "`for batch in join.iterate(loader)`"
            )
        return numbers[2 * size :]


class _Poll:
    """An all-reduce under way, a sum of ``numbers`` in float64.

    On an accelerator it has a stream of its own: the host, which waits for the result, must not wait for a backward.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device, numbers: Sequence[float]) -> None:
        self._copied: Any = None
        with on_stream(stream_of(group, device, "polls")) if has_streams(device) else nullcontext():
            self._numbers = to_device(torch.tensor(numbers, dtype=torch.float64, device="cpu"), device)
            work = dist.all_reduce(self._numbers, group=group, async_op=True)
            assert work is not None
            self._work = work
            if has_streams(device):
                work.wait()
                self._numbers = to_host(self._numbers)
                self._copied = recorded_event(device)

    def result(self, look: Callable[[], None]) -> list[float]:
        """The sums; calls ``look`` now and then while the host waits for them."""
        if self._copied is not None:
            self._copied.synchronize()
        else:
            while not self._work.is_completed():
                try:
                    self._work.wait(_PATIENCE)
                except RuntimeError:
                    look()
            self._work.wait()
        numbers: list[float] = self._numbers.tolist()
        return numbers


def _without(active: Sequence[bool]) -> list[int]:
    """The ranks that have no inputs."""
    return [rank for rank, is_active in enumerate(active) if not is_active]


def _in_words(adapter: JoinableAdapter, call: Call) -> str:
    return f"a {call.name.lower()} of {adapter.name}"


def _length(loader: Iterable[Any]) -> int | None:
    try:
        return len(loader)  # type: ignore[arg-type]
    except TypeError:
        return None  # A generator, or a loader over an iterable dataset.


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
