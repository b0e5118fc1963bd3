"""``Join``, the block in which ranks may run out of inputs at different times, and how they then repeat the others'
iterations.

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

A poll is a sum over ranks, of as many float64 whatever their number. A call's details and the hyperparameters are
written by one rank alone, so their sum is a broadcast. Only where the number of ranks with inputs changes, or ranks
differ, do they exchange a number each.

A rank that waits in a backward for a rank that does not synchronize gradients would wait for the group's timeout. So
before a backward that synchronizes each rank waits for a poll in which all with inputs were about to do so: the one of
the iteration, if its first forward has said it, or one more (READY). A rank that is not polls next when it begins
another iteration, and all see that ranks differ.

Polls have Gloo connections of their own: on the user's group they would wait for gradients that are under way, and
after a failure leave it out of step.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from datetime import timedelta
from types import TracebackType
from typing import Any, Literal, NoReturn, Self, TypeVar, get_args
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms import join as base
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from overlap._checks import as_list, check_flag, is_one_of, refuse_capture, short_repr, type_name
from overlap._torch.autograd import without_saved_context
from overlap._torch.c10d import GlooChannel, has_lost_connection
from overlap._torch.ddp import data_parallel_parameters, uncompiled
from overlap._torch.join import leads_torch_join
from overlap._torch.optimizer import unwrapped
from overlap.errors import CollectiveError, ConfigurationError, OverlapError, PeerError, TrainingLoopError
from overlap.join.adapters import Adapter, Call, DDPAdapter, Hyperparameters, ReplayedGradients, adapter_of, schedule_of
from overlap.ranks.board import Agreement, Board, as_collective_error

_Batch = TypeVar("_Batch")
OnExhausted = Literal["shadow", "stop"]

# How long to wait for an all-reduce before looking whether another rank has failed.
_PATIENCE = timedelta(seconds=1)
# The first numbers of a poll: of ranks with inputs, of steps, of their squares, and of ranks about to synchronize.
_COUNTS = 4
# Numbers that describe a call: the joinable's place in the list, and three of the adapter's.
_OF_CALL = 4
# Steps are compared up to multiples of this: squares of larger numbers would not add up exactly.
_STEPS_TOLD = 2**16
# Calls whose polls every rank reads, so that all may raise.
_READ_BY_ALL = {Call.BEGIN, Call.READY, Call.LEAVE}
_TO_LEAVE_EARLY = 'to leave early use on_exhausted="stop", and leave on every rank in the same iteration'


class Join(base.Join):
    """Lets ranks have different numbers of batches: one that has run out goes on taking part, with gradients of zero.

    Ranks that have run out replay the others' calls: buckets go through the registered hook with gradients of zero,
    hooks of joinables run once for each call that notified the Join, schedulers and plain optimizers step. At the end
    every rank has the parameters and buffers of the highest of those that ran longest.

    An iteration is a batch of :meth:`iterate`; without it, a forward of the model that runs first. A loop is followed
    if ranks with inputs make the same calls: each iteration issues one all-reduce of some float64 over connections of
    its own, under way during the forward, and so does each further forward before a backward that synchronizes
    gradients; once a rank has run out each call that it replays issues one more.

    Args:
        joinables: models, optimizers and other joinables of one process group; also plain ``torch.optim.Optimizer`` and
            LR schedulers, which then step on joined ranks as they do on active ones. Of Accelerate's and Lightning's
            wrappers the optimizer inside is taken; a wrapper of a scheduler has it as ``.scheduler``.
        enable: ``False`` makes the block do nothing.
        throw_on_early_termination: whether all ranks raise when the first runs out.
        on_exhausted: ``"shadow"`` lets the others go on when the first rank runs out, ``"stop"`` ends :meth:`iterate`
            on all ranks at the same iteration.
        **kwargs: given to every ``join_hook``. DDP's is ``divide_by_initial_world_size`` (default ``True``): ``False``
            divides by the number of ranks that still have inputs, under every reducer.

    Raises:
        ConfigurationError: no joinable, several process groups, an argument out of range, or other arguments than on
            rank 0, or in another order.
        CollectiveError: another rank does something else there, such as registering a chain, or does not come.
        UnsupportedError: a model with collectives in forward.
        TrainingLoopError: a loop that cannot be followed, such as a ``break``, or ranks that are not under ``no_sync``
            in the same iterations; or ``throw_on_early_termination``.
        PeerError: another rank failed; the message has its number.

    >>> optim = OverlappedOptimizer(torch.optim.SGD(ddp.parameters(), lr=0.1))
    >>> scheduler = torch.optim.lr_scheduler.StepLR(optim, step_size=1)
    >>> chain(AllReduce(), Step(optim)).register(ddp)
    <chain(AllReduce(), Step(SGD, interleaved)) registered>
    >>> with Join([ddp, optim, scheduler]) as join:
    ...     for x, y in join.iterate(loader):
    ...         loss_fn(ddp(x), y).backward()
    ...         optim.step()
    ...         scheduler.step()
    """

    def __init__(
        self,
        joinables: Sequence[Any],
        enable: bool = True,
        throw_on_early_termination: bool = False,
        *,
        on_exhausted: OnExhausted = "shadow",
        **kwargs: Any,
    ) -> None:
        self._enable = check_flag("enable", enable)
        self._throws = check_flag("throw_on_early_termination", throw_on_early_termination)
        if not is_one_of(on_exhausted, *get_args(OnExhausted)):
            raise ConfigurationError(
                f"on_exhausted is one of {', '.join(get_args(OnExhausted))}, got {short_repr(on_exhausted)}"
            )
        self._stops = on_exhausted == "stop"
        divides_by_size = kwargs.get("divide_by_initial_world_size", True)
        self.divides_by_count = not check_flag("divide_by_initial_world_size", divides_by_size)
        self.shadows = enable and not self._stops and not self._throws
        self.gradients = ReplayedGradients(self)
        # Whether this rank replays a backward with the gradients that it had accumulated when it ran out.
        self.replays_own_gradients = False
        # Work that stages leave until a replayed backward is over, with DDP's own collective of unused parameters.
        self.after_replay: list[Callable[[], None]] = []
        self._joinables = _checked(joinables)
        self._adapters = [adapter_of(joinable, self, kwargs) for joinable in self._joinables]
        self._group = _group_of(self._joinables)
        if self.shadows:
            _check_trained(self._joinables)
        self._rank, self._size = self._group.rank(), self._group.size()
        self._was_entered = False
        self._undo = ExitStack()
        # Whether an error was raised that every rank raises at the same place.
        self._has_raised_on_all = False
        self._iterations = self._steps = 0
        self._is_iterated = self._is_exhausted = self._has_joined = False
        # Whether this rank has inputs in this iteration, and whether it has still to say so.
        self._has_inputs, self._is_beginning = True, False
        # The models of which this rank has said that it is about to synchronize gradients, and whether all ranks have.
        self._told: dict[Adapter, bool] = {}
        # The adapter that begins iterations, where no loader is iterated.
        self._driver: Adapter | None = None
        # As the last poll said, and the one under way.
        self._active, self._source = [True] * self._size, self._size - 1
        self._pending: _Poll | None = None
        # Nobody waits for it here; kept until the next one.
        self._announced: _Poll | None = None

    # The block.

    def __enter__(self) -> Self:
        if not self._enable:
            return self
        if active_join(self._group) is not None:
            raise TrainingLoopError("a Join is already active on this process group: leave its block first")
        if self._was_entered:
            raise TrainingLoopError(
                "a Join is entered once, for one pass over the data: make another for the next epoch"
            )
        self._was_entered = True
        self._hyperparameters = Hyperparameters(self._joinables)
        with Agreement(self._group, "enter Join") as agreement:
            listed = ", ".join(map(_described, self._joinables))
            given = (
                f"[{listed}], {self._hyperparameters.count} hyperparameters, on_exhausted="
                f'"{"stop" if self._stops else "shadow"}", throw_on_early_termination={self._throws}'
            )
            kept = _kept.get(self._group)
            all_are_connected = agreement.agree([given, kept and kept[0]], _compared)
            self.board = Board(self._group, f"join/{agreement.name}", event="failed under Join")
            if kept is None or not all_are_connected:
                _disconnect(self._group)
                kept = _kept[self._group] = agreement.name, self.board.connect("polls", purpose=" to enter Join")
            self._channel = kept[1]
        self.board.watch()
        _joins[self._group] = self
        self._undo.callback(_joins.pop, self._group)
        try:
            for adapter in self._adapters:
                adapter.enter(self._undo)
        except BaseException as error:
            self.__exit__(type(error), error, error.__traceback__)
            raise
        return self

    def iterate(self, loader: Iterable[_Batch]) -> Iterator[_Batch]:
        """The batches of ``loader``; ends where this rank runs out, or with ``on_exhausted="stop"`` where any does.

        Raises:
            TrainingLoopError: outside of the block, a second time, or after a forward.
        """
        if not self._enable:
            yield from loader
            return
        if active_join(self._group) is not self:
            raise TrainingLoopError("join.iterate belongs inside of the block: with Join([...]) as join: ...")
        if self._is_iterated or self._steps or self._iterations:
            raise TrainingLoopError(
                "join.iterate comes once in a block and before its first forward or step: one Join is one pass over "
                "the data, so open another for the next epoch"
            )
        self._is_iterated, has_begun = True, False
        for batch in loader:
            self._begin(has_inputs=True)
            if self._stops and not all(self._await_poll()):
                break
            has_begun = True
            yield batch
        else:
            if self._stops:
                self._begin(has_inputs=False)
        self._is_exhausted = True
        if self._stops and not has_begun and any(self._await_poll()):
            warnings.warn(
                f'ranks {_without(self._await_poll())} have no batches, so on_exhausted="stop" ends the loop of every '
                "rank before its first: give each rank some",
                UserWarning,
                stacklevel=2,
            )

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if active_join(self._group) is not self:
            return
        raised = error
        try:
            if error is None:
                self._finish()
        except BaseException as own:
            raised = own
        cause = None if raised is None else _cause(raised, self.board)
        failed_with = cause or raised
        if failed_with is None or self._has_raised_on_all:
            self.board.close()
        else:
            if not isinstance(failed_with, PeerError):  # Which the rank that caused it has reported.
                self.board.report(failed_with)
            self.board.close(has_failed=True)
            _disconnect(self._group)  # A poll may be without an answer.
        self._undo.close()
        if cause is not None:
            raise cause from raised
        if raised is not None and raised is not error:
            raise raised

    def _finish(self) -> None:
        """Replay the others' calls until all have run out, then leave alike."""
        joined_at = self._iterations
        if self._stops:
            self._send(Call.LEAVE)
            self._await_poll()
        else:
            if self._is_iterated and not self._is_exhausted:
                raise TrainingLoopError(
                    f"rank {self._rank} left the loop over join.iterate(loader) after {joined_at} batches, by break or "
                    "return, before the loader had ended it: for fewer batches give it "
                    f"join.iterate(itertools.islice(loader, {joined_at})); {_TO_LEAVE_EARLY}"
                )
            self._replay()
            if self._hyperparameters.count:
                self._compare_hyperparameters()
        for adapter in self._adapters:
            if adapter.hook is not None:
                # The last iteration to begin, without any inputs, counts, too.
                adapter.hook.post_hook(is_last_joiner=self._iterations <= joined_at + 1)

    def _compare_hyperparameters(self) -> None:
        """Take over those of the rank that had inputs last. Raises: TrainingLoopError: on all ranks, as they differ."""
        own = self._hyperparameters

        def followed(of_ranks: list[list[float]]) -> list[float]:
            for values in (*of_ranks, of_ranks[self._source]):
                own.follow(values)
            return of_ranks[self._source]

        with Agreement(self._group, "leave Join") as agreement:
            values = own.values()
            try:
                own.follow(agreement.agree(values, followed))
            except TrainingLoopError:
                self._has_raised_on_all = True
                raise

    # Who has inputs in this iteration.

    def _await_poll(self) -> list[bool]:
        """Which ranks have inputs. Sends a poll of this iteration that is due, and waits for one that is under way.

        Raises:
            TrainingLoopError: some have inputs, some have none, and ``throw_on_early_termination``.
        """
        if self._is_beginning:
            self._send(Call.BEGIN)
        if self._pending is not None:
            pending, self._pending = self._pending, None
            self._take(pending)
            if self._throws and any(self._active) and not all(self._active):
                self._raise_on_all()
        return self._active

    @property
    def missing(self) -> list[int]:
        """The ranks that have run out of inputs, and repeat the others' iterations."""
        return _without(self._await_poll()) if self.shadows else []

    def divisor_among(self, ranks: Sequence[int]) -> int:
        """The number by which sums of gradients over ``ranks`` are divided."""
        if not (self.divides_by_count and self.shadows):
            return len(ranks)
        active = self._await_poll()
        return max(1, sum(active[rank] for rank in ranks))  # Where none has inputs, the sum is of zeros.

    @property
    def divisor(self) -> int:
        """The same, of all ranks."""
        return self.divisor_among(range(self._size))

    @property
    def buffer_source(self) -> int:
        """The rank whose buffers the others take over: the highest of those that have inputs, or had them last."""
        self._await_poll()
        return self._source

    def _raise_on_all(self) -> NoReturn:
        self._has_raised_on_all = True
        missing = _without(self._active)
        # The first sentences are PyTorch's, which people match on.
        happened = (
            f"Rank {self._rank} exhausted all inputs."
            if self._rank in missing
            else "Detected at least one rank that exhausted inputs. Throwing across all ranks."
        )
        raise TrainingLoopError(
            f"{happened} Ranks {missing} ran out and others did not, which throw_on_early_termination=True makes an "
            "error on all"
        )

    # An active rank.

    def _begin(self, *, has_inputs: bool) -> None:
        """Begin an iteration; unless ranks end together, the first forward says so, and whether it synchronizes, and
        the result is waited for only where it is needed."""
        self._await_poll()
        self._iterations += 1
        self._has_inputs, self._is_beginning, self._told = has_inputs, True, {}
        if not self.shadows:
            self._await_poll()

    def on_call(
        self, adapter: Adapter, call: Call, detail: Sequence[float] = (), *, has_collectives: bool = True
    ) -> None:
        """Called by ``adapter`` before this rank makes a ``call`` that ranks without inputs replay by its ``detail``;
        one without collectives is not announced to them, and does not wait for them."""
        if self._has_joined:
            return
        refuse_capture("an iteration under Join", "leave the block first")
        if call is not Call.BACKWARD and not self._is_iterated:
            self._begin_without_loader(adapter)
        if self._is_exhausted and self.shadows:
            raise TrainingLoopError(
                f"rank {self._rank} began another forward or step after join.iterate had ended, and ranks that ran out "
                "before could not follow: leave the block first"
            )
        if call is Call.FORWARD:  # Tells the others that an iteration has begun, and that gradients will synchronize.
            about = adapter if detail[-1] and adapter not in self._told else None
            if self._is_beginning or about is not None:
                self._send(Call.BEGIN if self._is_beginning else Call.READY, about)
        elif call is Call.BACKWARD:
            self._await_poll()
            while not self._told.get(adapter):
                self._send(Call.READY, adapter)
                self._await_poll()
            del self._told[adapter]
        is_announced = self.shadows and has_collectives and bool(self.missing)
        self._steps += call is Call.STEP
        if not is_announced:
            return
        described: list[float] = []
        if self._source == self._rank:
            described = [self._adapters.index(adapter), *detail]
            described += [0.0] * (_OF_CALL - len(described))
            described += self._hyperparameters.values()
        self._announced = self._poll(call, described=described)

    def _begin_without_loader(self, adapter: Adapter) -> None:
        if self._stops:
            raise ConfigurationError('on_exhausted="stop" needs `for batch in join.iterate(loader)` around the forward')
        drivers = [each for each in self._adapters if isinstance(each, DDPAdapter)] or self._adapters
        if self._driver is None and adapter in drivers:
            self._driver = adapter
        if adapter is self._driver:
            self._begin(has_inputs=True)

    # A rank that has left its loop.

    def _replay(self) -> None:
        self._has_joined = True
        self._begin(has_inputs=False)
        while any(self._await_poll()):
            call, (index, *detail) = self._take(self._poll(None))
            if call in _READ_BY_ALL:
                self._iterations += call is Call.BEGIN
                continue
            self._hyperparameters.follow(detail[_OF_CALL - 1 :])
            self._steps += call is Call.STEP
            self._adapters[int(index)].replay(call, detail[: _OF_CALL - 1])

    # Polls.

    def _poll(self, call: Call | None, about: Adapter | None = None, *, described: Sequence[float] = ()) -> _Poll:
        steps = self._steps % _STEPS_TOLD
        calls = [call is each for each in Call]
        described = described or [0.0] * (_OF_CALL + self._hyperparameters.count)
        numbers = [self._has_inputs, steps, steps**2, about is not None, *calls, *described]
        return _Poll(self._channel, numbers, call, about)

    def _send(self, call: Call, about: Adapter | None = None) -> None:
        """Poll, after the poll under way; :attr:`active` takes the result. ``about`` is the model that is about to
        synchronize gradients."""
        if call is not Call.BEGIN:
            self._await_poll()
        if about is not None:
            self._told[about] = False
        self._is_beginning = False
        self._pending = self._poll(call, about)

    def _of_ranks(self, number: float) -> list[int]:
        placed = [0.0] * self._size
        placed[self._rank] = number
        return [int(each) for each in _Poll(self._channel, placed).result(self.board.poll)]

    def _take(self, poll: _Poll) -> tuple[Call, Sequence[float]]:
        """Take over who has inputs; returns the call that ranks with inputs make, and its description."""
        numbers = poll.result(self.board.poll)
        active, steps, squares, ready = map(int, numbers[:_COUNTS])
        start = _COUNTS + len(Call)
        calls = [call for call, count in zip(Call, numbers[_COUNTS:start], strict=True) if count]
        if len(calls) > 1:
            self._refuse_apart(calls, poll.call)
        if active != sum(self._active):
            self._active = [bool(each) for each in self._of_ranks(self._has_inputs)] if active else [False] * self._size
            if not self._stops:  # Which ends with all ranks in step.
                self._source = max((rank for rank, each in enumerate(self._active) if each), default=self._source)
        if calls == [Call.BEGIN] and self._size * squares != steps**2:
            raise TrainingLoopError(
                f"ranks {_without(self._active)} ran out of inputs, and the others did something more (a step of an "
                "optimizer or a scheduler) before the forward that would tell them; do it after backward, or use "
                "`for batch in join.iterate(loader)`"
            )
        if poll.about is not None and ready == active:
            self._told[poll.about] = True
        return calls[0], numbers[start:]

    def _refuse_apart(self, calls: Sequence[Call], own: Call | None) -> NoReturn:
        """Raises: TrainingLoopError: ranks make different ``calls`` at the same time; on all, if all read this poll."""
        if not _READ_BY_ALL.issuperset(calls):
            raise TrainingLoopError(
                f"ranks that have inputs make different calls at the same time ({', '.join(c.name for c in calls)}), "
                "and ranks that have run out of inputs cannot repeat both: make the same calls of models, optimizers "
                "and schedulers on every rank"
            )
        of_ranks = self._of_ranks(-1 if own is None else own)
        self._has_raised_on_all = True
        ready, left, begun = (
            [rank for rank, each in enumerate(of_ranks) if each == call]
            for call in (Call.READY, Call.LEAVE, Call.BEGIN)
        )
        if ready:
            raise TrainingLoopError(
                f"ranks {ready} synchronize gradients in backward, and ranks {sorted(left + begun)} do not in the same "
                "iteration, for whom they would wait: have every rank enter no_sync() by the number of the batch "
                "alone, as in `with contextlib.nullcontext() if (i + 1) % 4 == 0 else ddp.no_sync():`, and not by "
                "len(loader) as well, which differs between ranks"
            )
        raise TrainingLoopError(
            f"ranks {left} left the loop after {self._iterations - (own is Call.BEGIN)} iterations, and ranks {begun} "
            f"went on; {_TO_LEAVE_EARLY}"
        )


class _Poll:
    """An all-reduce of ``numbers`` under way, in float64, sent where this rank does ``call``, or is ``about`` to
    synchronize the gradients of a model."""

    def __init__(
        self, channel: GlooChannel, numbers: Sequence[float], call: Call | None = None, about: Adapter | None = None
    ) -> None:
        self.call, self.about = call, about
        self._numbers = torch.tensor(numbers, dtype=torch.float64, device="cpu")
        with without_saved_context():
            (self._work,) = channel.all_reduce(self._numbers, dist.ReduceOp.SUM)

    def result(self, look: Callable[[], None]) -> list[float]:
        """The reduced numbers; calls ``look`` now and then while this rank waits for them."""
        while not self._work.is_completed():
            try:
                self._work.wait(_PATIENCE)
            except RuntimeError:
                look()
        self._work.wait()
        numbers: list[float] = self._numbers.tolist()
        return numbers


_kept: WeakKeyDictionary[dist.ProcessGroup, tuple[str, GlooChannel]] = WeakKeyDictionary()
"""Of each group the connections on which its last Join has polled, and their name; none unless it ended well."""


def _disconnect(group: dist.ProcessGroup) -> None:
    if group in _kept:
        _kept.pop(group)[1].abort()


def _without(active: Sequence[bool]) -> list[int]:
    return [rank for rank, is_active in enumerate(active) if not is_active]


def _checked(given: Any) -> list[Any]:
    """``given`` as a list, with the model of a compiled one, and the optimizer inside of a framework's wrapper."""
    if isinstance(given, (nn.Module, Optimizer, LRScheduler, base.Joinable)) or (held := as_list(given)) is None:
        raise ConfigurationError(f"joinables is a list, as in Join([ddp, optimizer]), got {type_name(given)}")
    if not held:
        raise ConfigurationError(
            "The join context manager requires at least one joinable, such as a DistributedDataParallel model"
        )
    joinables = [unwrapped(uncompiled(joinable)) for joinable in held]
    for place, joinable in enumerate(joinables):
        if any(joinable is other for other in joinables[:place]):
            raise ConfigurationError(f"this {type_name(joinable)} is given twice: joinables names each once")
    return joinables


def _group_of(joinables: Sequence[Any]) -> dist.ProcessGroup:
    able = [joinable for joinable in joinables if isinstance(joinable, base.Joinable)]
    if not able:
        raise ConfigurationError("Join needs a joinable with a process group, such as a DistributedDataParallel model")
    group: dist.ProcessGroup = able[0].join_process_group
    if any(other.join_process_group is not group for other in able):
        raise ConfigurationError(
            "Using join context manager with multiple process groups: give each group a Join of its own"
        )
    return group


def _compared(of_ranks: list[Any]) -> bool:
    """Whether all have the same connections of an earlier Join, where they are given the same."""
    first, kept = of_ranks[0]
    for rank, (given, _) in enumerate(of_ranks):
        if given != first:
            raise ConfigurationError(
                f"rank {rank} enters Join with {given}, but rank 0 with {first}: every rank must be given the same, in "
                "the same order"
            )
    return kept is not None and all(name == kept for _, name in of_ranks)


def _check_trained(joinables: Sequence[Any]) -> None:
    """Raises: ConfigurationError: an optimizer has a parameter of which replayed backwards leave no gradient."""
    models = [each for each in joinables if isinstance(each, DistributedDataParallel)]
    if not all(
        isinstance(each, (DistributedDataParallel, Optimizer)) for each in joinables if isinstance(each, base.Joinable)
    ):
        return  # It may have a model of its own.
    trained = {parameter for model in models for parameter in data_parallel_parameters(model)}
    for optimizer in joinables:
        for parameter in _parameters_of(optimizer):
            if parameter.requires_grad and parameter not in trained:
                raise ConfigurationError(
                    f"{type(optimizer).__name__} has a parameter of shape {tuple(parameter.shape)} that no model in "
                    "this Join synchronizes, and a rank that has run out of inputs would go on applying its last "
                    "gradient: give Join the DistributedDataParallel model that has it, too, or make another optimizer "
                    "of it, which is not given to Join"
                )


def _described(joinable: Any) -> str:
    """Its kind and the number of elements of its parameters, for ranks to compare."""
    schedule = schedule_of(joinable)
    holder = joinable if schedule is None else schedule.optimizer
    parameters = holder.parameters() if isinstance(holder, nn.Module) else _parameters_of(holder)
    return f"{type_name(joinable)} of {sum(one.numel() for one in parameters)} elements"


def _parameters_of(optimizer: Any) -> list[Tensor]:
    groups = optimizer.param_groups if isinstance(optimizer, Optimizer) else ()
    return [parameter for group in groups for parameter in group["params"]]


def _cause(error: BaseException, board: Board) -> CollectiveError | None:
    """The error to raise in place of ``error``, where it is of a collective that did not complete."""
    if isinstance(error, PeerError) or not isinstance(error, RuntimeError):
        return None
    if isinstance(error, OverlapError):
        return board.peer_error() if isinstance(error, CollectiveError) else None
    return board.peer_error() or (
        as_collective_error(error, "failed under Join") if has_lost_connection(error) else None
    )


def refuse_before_model(joinable: base.Joinable, model_joins: Callable[[], bool]) -> None:
    """Called before ``joinable`` notifies its Join; ``model_joins`` says whether its model is in a Join, too.

    Raises:
        ConfigurationError: ``joinable`` comes before the model in PyTorch's ``Join``.
    """
    if leads_torch_join(joinable) and model_joins():
        name = type(joinable).__name__
        raise ConfigurationError(
            f"{name} comes before its model in PyTorch's Join, so a rank that has run out of inputs would issue its "
            f"collectives first, and the others the model's: use Join([ddp, {name}]), or overlap.Join, which takes any "
            "order"
        )


_joins: WeakKeyDictionary[dist.ProcessGroup, Join] = WeakKeyDictionary()
"""Of each group, the Join whose block this process is in."""


def active_join(group: dist.ProcessGroup) -> Join | None:
    """The Join on ``group`` whose block this process is in, or ``None``."""
    return _joins.get(group)


def gradient_divisor(group: dist.ProcessGroup, *, within: dist.ProcessGroup | None = None) -> int:
    """The number by which a sum of gradients over ``group`` is divided.

    That is the group's size, or under ``Join(..., divide_by_initial_world_size=False)`` the number of ranks that still
    have inputs. It is the same on every rank, also on those without inputs. Reducers divide by
    ``bucket.divisor``, which is this, but 1 where another divides: behind ``DivideByCount``, and where FSDP asks for a
    sum (``hooks/meshes.py``).

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


def refuse_once_joined(group: dist.ProcessGroup, call: str) -> None:
    """Called before collectives that a rank without inputs does not replay.

    Raises:
        TrainingLoopError: there is such a rank.
    """
    if (join := active_join(group)) is not None and (missing := join.missing):
        raise TrainingLoopError(
            f"{call} inside of Join: ranks {missing} have run out of inputs and do not repeat this call, so the "
            "others would wait for them; call it after the block"
        )
