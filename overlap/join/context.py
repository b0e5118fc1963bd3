"""``Join``, the block in which ranks may run out of inputs at different times, and what can be given to it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Any, Literal, Self, TypeVar, get_args

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms import join as base
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from overlap._checks import as_list, check_ddp, check_flag, described, is_one_of, told
from overlap._torch.c10d import has_lost_connection
from overlap._torch.ddp import uncompiled
from overlap._torch.join import leads_torch_join
from overlap._torch.optimizer import unwrapped
from overlap.errors import (
    CollectiveError,
    ConfigurationError,
    OverlapError,
    PeerError,
    TrainingLoopError,
)
from overlap.join.adapters import (
    DDPAdapter,
    Hyperparameters,
    JoinableAdapter,
    JoinHookAdapter,
    OptimizerAdapter,
    SchedulerAdapter,
    schedule_of,
)
from overlap.join.participation import JoinSession, active_join, connect, disconnect, kept_connections, sessions
from overlap.ranks.board import Agreement, Board, explained

__all__ = ["Join", "JoinHook", "Joinable", "refuse_before_model"]

_Batch = TypeVar("_Batch")
OnExhausted = Literal["shadow", "stop", "raise"]


class JoinHook(base.JoinHook):
    """PyTorch's: what a rank without inputs does in place of a call that notifies the Join, and at the end.

    >>> class Silent(JoinHook):
    ...     def main_hook(self):
    ...         "Issue the collectives of one call, the same as ranks with inputs issue."
    ...     def post_hook(self, is_last_joiner):
    ...         "Called once on every rank, when all have run out of inputs."
    """


class Joinable(base.Joinable):
    """PyTorch's: issues collectives, once or more per iteration.

    Before those collectives it calls ``Join.notify_join_context(self)``. A subclass calls ``Joinable.__init__``.

    >>> class Counter(Joinable):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.counted = 0
    ...     def count(self):
    ...         Join.notify_join_context(self)
    ...         ones = torch.ones(1)
    ...         dist.all_reduce(ones)  # how many ranks take part
    ...         self.counted += int(ones)
    ...     def join_hook(self, **kwargs):
    ...         return CounterHook()
    ...     join_device = torch.device("cpu")
    ...     join_process_group = dist.group.WORLD
    >>> class CounterHook(JoinHook):
    ...     def main_hook(self):  # in place of count(), on a rank without inputs
    ...         dist.all_reduce(torch.zeros(1))
    >>> counter = Counter()
    >>> with Join([counter]) as join:
    ...     for x, y in join.iterate(loader):
    ...         counter.count()
    >>> counter.counted
    4
    """


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


class Join(base.Join):
    """Lets ranks have different numbers of batches: one that has run out goes on taking part, with gradients of zero.

    Ranks that have run out replay what the others do: buckets go through the registered hook with gradients of zero,
    hooks of joinables run once for each call that notified the Join, schedulers and plain optimizers step. At the end
    every rank has the parameters and buffers of the highest of those that ran longest.

    An iteration is a batch of :meth:`iterate`; without it, a forward of the model that runs first. Any loop is
    followed: each iteration issues one all-reduce of some float64 over connections of its own, under way during the
    forward, and once a rank has run out each call that it replays issues one more.

    Args:
        joinables: models, optimizers and other joinables of one process group; also plain ``torch.optim.Optimizer`` and
            LR schedulers, which then step on joined ranks as they do on active ones. Of Accelerate's and Lightning's
            wrappers the optimizer inside is taken; a wrapper of a scheduler has it as ``.scheduler``.
        enable: ``False`` makes the block do nothing.
        throw_on_early_termination: the same as ``on_exhausted="raise"``.
        on_exhausted: what happens when the first rank runs out: ``"shadow"`` lets the others go on, ``"stop"`` ends
            :meth:`iterate` on all ranks at the same iteration, ``"raise"`` raises on all ranks.
        **kwargs: given to every ``join_hook``. DDP's is ``divide_by_initial_world_size`` (default ``True``): ``False``
            divides by the number of ranks that still have inputs, under every reducer.

    Raises:
        ConfigurationError: no joinable, several process groups, an argument out of range, or other arguments than on
            rank 0, or in another order.
        CollectiveError: another rank does something else there, such as registering a chain, or does not come.
        UnsupportedError: a model with collectives in forward.
        TrainingLoopError: a loop that cannot be followed, such as a ``break``, or ``on_exhausted="raise"``.
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
        check_flag("enable", enable)
        if check_flag("throw_on_early_termination", throw_on_early_termination) and on_exhausted == "shadow":
            on_exhausted = "raise"
        if not is_one_of(on_exhausted, *get_args(OnExhausted)):
            raise ConfigurationError(
                f"on_exhausted is one of {', '.join(get_args(OnExhausted))}, got {told(on_exhausted)}"
            )
        divides_by_size = kwargs.get("divide_by_initial_world_size", True)
        self._divides_by_count = not check_flag("divide_by_initial_world_size", divides_by_size)
        self._enable, self._on_exhausted = enable, on_exhausted
        self._joinables = joinables = _joinables(joinables)
        shadows = enable and on_exhausted == "shadow"
        self._adapters = [_adapter(joinable, kwargs, shadows=shadows) for joinable in joinables]
        self._was_entered = False
        self._group = _group_of(joinables)
        self._session: JoinSession | None = None
        self._undo = ExitStack()

    @staticmethod
    def notify_join_context(joinable: base.Joinable) -> Any:
        """Tell the active Join, ours or PyTorch's, that ``joinable`` is about to issue an iteration's collectives."""
        return base.Join.notify_join_context(joinable)

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
        hyperparameters = Hyperparameters(
            [each for each in self._joinables if isinstance(each, Optimizer)],
            [each for one in self._joinables if (each := schedule_of(one)) is not None],
        )
        with Agreement(self._group, "enter Join") as agreement:
            listed = ", ".join(map(_described, self._joinables))
            given = f"[{listed}], {hyperparameters.count} hyperparameters, on_exhausted={self._on_exhausted!r}"
            of_ranks = agreement.agree([given, kept_connections(self._group)])
            for rank, (others, _) in enumerate(of_ranks):
                if others != of_ranks[0][0]:
                    raise ConfigurationError(
                        f"rank {rank} enters Join with {others}, but rank 0 with {of_ranks[0][0]}: every rank must be "
                        "given the same, in the same order"
                    )
            board = Board(self._group, f"join/{agreement.name}", event="failed under Join")
            channel = connect(self._group, board, [kept for _, kept in of_ranks], agreement.name)
        self._session = session = JoinSession(
            self._group,
            channel,
            board,
            self._adapters,
            hyperparameters,
            on_exhausted=self._on_exhausted,
            divides_by_count=self._divides_by_count,
        )
        board.watch()
        sessions[self._group] = session
        self._undo.callback(sessions.pop, self._group)
        try:
            for adapter in self._adapters:
                adapter.enter(session, self._undo)
        except BaseException as error:
            self.__exit__(type(error), error, error.__traceback__)
            raise
        return self

    def iterate(self, loader: Iterable[_Batch]) -> Iterator[_Batch]:
        """The batches of ``loader``. Once in a block.

        Raises:
            TrainingLoopError: outside of the block, a second time, or after a forward.
        """
        if not self._enable:
            yield from loader
            return
        if self._session is None:
            raise TrainingLoopError("join.iterate belongs inside of the block: with Join([...]) as join: ...")
        yield from self._session.iterate(loader)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        session = self._session
        if session is None:
            return
        raised = error
        try:
            if error is None:
                self._finish(session)
        except BaseException as own:
            raised = own
        cause = None if raised is None else _cause(raised, session.board)
        failed_with = cause or raised
        if failed_with is None or session.has_raised_on_all:
            session.board.close()
        else:
            if not isinstance(failed_with, PeerError):  # Which the rank that caused it has reported.
                session.board.report(failed_with)
            session.board.close(has_failed=True)
            disconnect(session.group)
        self._session = None
        self._undo.close()
        if cause is not None:
            raise cause from raised
        if raised is not None and raised is not error:
            raise raised

    def _finish(self, session: JoinSession) -> None:
        """Replay what the others do until all have run out."""
        is_last_joiner = session.join()
        if session.on_exhausted != "stop":
            self._have_last_hyperparameters(session)
        for adapter in self._adapters:
            if adapter.hook is not None:
                adapter.hook.post_hook(is_last_joiner)

    def _have_last_hyperparameters(self, session: JoinSession) -> None:
        """Take over those of the rank whose buffers count; raises on every rank where that is an error."""
        own = session.hyperparameters
        of_ranks = session.of_ranks(own.values())
        try:
            for values in (*of_ranks, of_ranks[session.buffer_source]):
                own.follow(values)
        except TrainingLoopError:
            session.has_raised_on_all = True
            raise


def _joinables(given: Any) -> list[Any]:
    """``given`` as a list, with the model of a compiled one, and the optimizer inside of a framework's wrapper."""
    if isinstance(given, (nn.Module, Optimizer, LRScheduler, base.Joinable)) or (held := as_list(given)) is None:
        raise ConfigurationError(f"joinables is a list, as in Join([ddp, optimizer]), got {described(given)}")
    if not held:
        raise ConfigurationError(
            "The join context manager requires at least one joinable, such as a DistributedDataParallel model"
        )
    joinables = [unwrapped(uncompiled(joinable)) for joinable in held]
    for place, joinable in enumerate(joinables):
        if any(joinable is other for other in joinables[:place]):
            raise ConfigurationError(f"this {described(joinable)} is given twice: joinables names each once")
    return joinables


def _adapter(joinable: Any, kwargs: dict[str, Any], *, shadows: bool) -> JoinableAdapter:
    if isinstance(joinable, type):
        raise ConfigurationError(f"{described(joinable)} is not a joinable, which is an object: make it first")
    if isinstance(joinable, DistributedDataParallel):
        return DDPAdapter(joinable, joinable.join_hook(**kwargs), shadows=shadows)
    if isinstance(joinable, base.Joinable):
        return JoinHookAdapter(joinable, joinable.join_hook(**kwargs))
    if schedule_of(joinable) is not None:
        return SchedulerAdapter(joinable)
    if isinstance(joinable, Optimizer):
        return OptimizerAdapter(joinable)
    if isinstance(joinable, nn.Module):
        check_ddp(joinable)
    raise ConfigurationError(
        f"{described(joinable)} is not a Joinable (nor an optimizer or LR scheduler): Join takes models in "
        "DistributedDataParallel and subclasses of overlap.Joinable"
    )


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


def _described(joinable: Any) -> str:
    """Its kind and the number of elements of its parameters, for ranks to compare."""
    schedule = schedule_of(joinable)
    holder = joinable if schedule is None else schedule.optimizer
    parameters: Iterable[Tensor] = ()
    if isinstance(holder, Optimizer):
        parameters = [one for group in holder.param_groups for one in group["params"]]
    elif isinstance(holder, nn.Module):
        parameters = holder.parameters()
    return f"{described(joinable)} of {sum(one.numel() for one in parameters)} elements"


def _cause(error: BaseException, board: Board) -> CollectiveError | None:
    """What to raise in place of ``error``, where it is of a collective that did not complete."""
    if isinstance(error, PeerError) or not isinstance(error, RuntimeError):
        return None
    if isinstance(error, OverlapError):
        return board.peer_error() if isinstance(error, CollectiveError) else None
    return board.peer_error() or (explained(error, "failed under Join") if has_lost_connection(error) else None)
