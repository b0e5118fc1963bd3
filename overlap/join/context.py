"""``Join``: the block in which ranks may run out of inputs at different times."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Any, Self, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms import join as base
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from overlap._checks import as_list, check_ddp, check_flag, described, told
from overlap._torch.compiled import uncompiled
from overlap._torch.fingerprint import fingerprint
from overlap._torch.gloo import has_lost_connection
from overlap._torch.optimizer import unwrapped
from overlap.errors import CollectiveError, ConfigurationError, OverlapError, PeerError, TrainingLoopError
from overlap.join.active import active_join, clear_active_join, set_active_join
from overlap.join.adapters import JoinHookAdapter, OptimizerAdapter, SchedulerAdapter
from overlap.join.board import Agreement, Board, explained
from overlap.join.ddp import DDPAdapter
from overlap.join.event_log import EventLog
from overlap.join.hyperparameters import Hyperparameters
from overlap.join.iterations import Iterations
from overlap.join.loading import batches
from overlap.join.options import JoinOptions, OnExhausted, check_on_exhausted
from overlap.join.replay import Replay
from overlap.join.session import JoinableAdapter, JoinSession

__all__ = ["Join"]

_Batch = TypeVar("_Batch")


class Join(base.Join):
    """Lets ranks have different numbers of batches: one that has run out goes on taking part, with gradients of zero.

    Ranks that have run out replay what the others do: buckets go through the registered hook with gradients of zero,
    hooks of joinables run once for each call that notified the Join, schedulers and plain optimizers step. At the end
    every rank has the parameters and buffers of the highest of those that ran longest.

    An iteration is a batch of :meth:`iterate`; without it, a forward that records gradients, of the model that runs
    first. Where every rank knows how many it will run (``lengths``, or a loader with a length given to
    :meth:`iterate`), they exchange these numbers when the block begins, and iterations issue no collective for joining.
    Otherwise each iteration issues one all-reduce of as many int64 as there are ranks, under way during the previous
    batch (:meth:`iterate`) or the forward (without).

    Args:
        joinables: models, optimizers and other joinables of one process group; also plain ``torch.optim.Optimizer`` and
            LR schedulers, which then step on joined ranks as they do on active ones. Of Accelerate's and Lightning's
            wrappers the optimizer inside is taken.
        enable: ``False`` makes the block do nothing.
        throw_on_early_termination: the same as ``on_exhausted="raise"``.
        lengths: how many iterations this rank will run.
        on_exhausted: what happens when the first rank runs out: ``"shadow"`` lets the others go on, ``"stop"`` ends
            :meth:`iterate` on all ranks at the same iteration, ``"raise"`` raises on all ranks.
        weight_by_samples: weight gradients by the samples in each rank's batch, so that the mean is over samples:
            ``True`` takes the first dimension of a batch's first tensor, a callable is given the batch. Needs
            :meth:`iterate`, and issues the all-reduce in every iteration.
        **kwargs: given to every ``join_hook``. DDP's is ``divide_by_initial_world_size`` (default ``True``): ``False``
            divides by the number of ranks that still have inputs, under every reducer.

    Raises:
        ConfigurationError: no joinable, several process groups, an argument out of range, or other arguments than on
            rank 0, or in another order.
        CollectiveError: another rank does something else there, such as registering a chain, or does not come.
        UnsupportedError: a model with collectives in forward, and ranks that may run out of inputs before others.
        TrainingLoopError: this rank ran more or fewer iterations than it said, or ``on_exhausted="raise"``.
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
        lengths: int | None = None,
        on_exhausted: OnExhausted | None = None,
        weight_by_samples: bool | Callable[[Any], int] = False,
        **kwargs: Any,
    ) -> None:
        check_flag("enable", enable)
        on_exhausted = check_on_exhausted(on_exhausted, throws=throw_on_early_termination)
        if lengths is not None and (isinstance(lengths, bool) or not isinstance(lengths, int) or lengths < 0):
            raise ConfigurationError(
                f"lengths is this rank's number of iterations, len(loader) say, got {told(lengths)}"
            )
        if not isinstance(weight_by_samples, bool) and not callable(weight_by_samples):
            raise ConfigurationError(
                f"weight_by_samples is True, False, or a callable that is given a batch, got {told(weight_by_samples)}"
            )
        if lengths is not None and weight_by_samples is not False:
            raise ConfigurationError("weight_by_samples exchanges the samples in every iteration: leave lengths out")
        joinables = _joinables(joinables)
        self._options = JoinOptions(
            on_exhausted=on_exhausted,
            divides_by_count=not check_flag(
                "divide_by_initial_world_size", kwargs.get("divide_by_initial_world_size", True)
            ),
            counts_samples=weight_by_samples is not False,
        )
        self._lengths, self._enable, self._samples = lengths, enable, weight_by_samples
        self._joinables = joinables = [unwrapped(joinable) for joinable in joinables]
        shadows = enable and on_exhausted == "shadow"
        self._make_adapters = functools.partial(_adapters, joinables, kwargs, shadows=shadows)
        self._adapters = self._make_adapters()
        self._was_entered = False
        self._hyperparameters = Hyperparameters(
            [each for each in joinables if isinstance(each, Optimizer)],
            [each for each in joinables if isinstance(each, LRScheduler)],
        )
        self._group, self._join_device = _group_and_device(joinables)
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
            self._adapters = self._make_adapters()  # A hook of a joinable serves one block.
        self._was_entered = True
        options = f"on_exhausted={self._options.on_exhausted!r} {'without' if self._lengths is None else 'and'} lengths"
        with Agreement(self._group, "enter Join") as agreement:
            lengths = self._agreed(agreement.agree([_described(self._joinables), options, self._lengths]))
        log = EventLog(self._group, agreement.name)
        iterations = Iterations(self._group, self._join_device, log, self._options, lengths=lengths)
        self._session = session = JoinSession(iterations, self._adapters, self._hyperparameters)
        log.board.watch()
        set_active_join(self._group, session)
        self._undo.callback(clear_active_join, self._group)
        try:
            for adapter in self._adapters:
                adapter.enter(session, self._undo)
        except BaseException as error:
            log.board.report(error)
            log.board.leave()
            self._leave()
            raise
        return self

    def _agreed(self, of_ranks: Sequence[Any]) -> list[int] | None:
        """Compare the arguments of all ranks; returns the length of every rank, where they are known."""
        first, first_options, _ = of_ranks[0]
        for rank, (joinables, options, _) in enumerate(of_ranks):
            if (reason := _difference(rank, joinables, first)) is not None:
                raise ConfigurationError(reason)
            if options != first_options:
                raise ConfigurationError(
                    f"rank {rank} enters Join with {options}, but rank 0 with {first_options}: every rank must be "
                    "given the same"
                )
        return None if self._lengths is None else [length for _, _, length in of_ranks]

    def iterate(self, loader: Iterable[_Batch]) -> Iterator[_Batch]:
        """The batches of ``loader``; looks one ahead where its length is not known. Once in a block.

        Raises:
            TrainingLoopError: outside of the block, a second time, after a forward, or where the loader has more or
                fewer batches than its length says.
        """
        if not self._enable:
            yield from loader
            return
        if self._session is None:
            raise TrainingLoopError("join.iterate belongs inside of the block: with Join([...]) as join: ...")
        yield from batches(self._session.iterations, loader, self._samples)

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
        # A PeerError was reported by the rank that caused it; exhausted inputs are raised on every rank.
        is_known = isinstance(failed_with, PeerError) or session.iterations.has_raised_on_all
        if failed_with is not None and not is_known:
            session.board.report(failed_with)
        session.board.leave()
        self._leave()
        if cause is not None:
            raise cause from raised
        if raised is not None and raised is not error:
            raise raised

    def _finish(self, session: JoinSession) -> None:
        """Replay what the others do until all have run out."""
        iterations = session.iterations
        iterations.join()
        is_last_joiner = True
        if self._options.on_exhausted != "stop":
            is_last_joiner = Replay(iterations, self._adapters, self._hyperparameters).run()
            told = iterations.log.exchange_at_end(self._hyperparameters.told())
            self._compare(session, told)
        for adapter in self._adapters:
            adapter.post(is_last_joiner=is_last_joiner)

    def _compare(self, session: JoinSession, told: Sequence[Any]) -> None:
        """Have the hyperparameters of the ranks that ran longest; raises on every rank where that is an error."""
        source = told[session.buffer_source]
        try:
            for each in told:
                self._hyperparameters.follow(each)
        except TrainingLoopError:
            session.iterations.has_raised_on_all = True
            raise
        self._hyperparameters.follow(source)

    def _leave(self) -> None:
        self._session = None
        self._undo.close()


def _joinables(given: Any) -> list[Any]:
    """``given`` as a list; where it holds a compiled model, the model."""
    if isinstance(given, (nn.Module, Optimizer, LRScheduler, base.Joinable)) or (held := as_list(given)) is None:
        raise ConfigurationError(f"joinables is a list, as in Join([ddp, optimizer]), got {described(given)}")
    joinables = [uncompiled(joinable) for joinable in held]
    for place, joinable in enumerate(joinables):
        if any(joinable is other for other in joinables[:place]):
            raise ConfigurationError(f"this {described(joinable)} is given twice: joinables names each once")
    return joinables


def _adapters(joinables: Sequence[Any], kwargs: dict[str, Any], *, shadows: bool) -> list[JoinableAdapter]:
    if not joinables:
        raise ConfigurationError(
            "The join context manager requires at least one joinable, such as a DistributedDataParallel model"
        )
    adapters = [_adapter(joinable, kwargs, shadows=shadows) for joinable in joinables]
    for index, adapter in enumerate(adapters):
        adapter.index = index
    return adapters


def _adapter(joinable: Any, kwargs: dict[str, Any], *, shadows: bool) -> JoinableAdapter:
    if isinstance(joinable, type):
        raise ConfigurationError(f"{described(joinable)} is not a joinable, which is an object: make it first")
    if isinstance(joinable, DistributedDataParallel):
        return DDPAdapter(joinable, joinable.join_hook(**kwargs), shadows=shadows)
    if isinstance(joinable, base.Joinable):
        return JoinHookAdapter(joinable, joinable.join_hook(**kwargs))
    if isinstance(joinable, LRScheduler):
        return SchedulerAdapter(joinable)
    if isinstance(joinable, Optimizer):
        return OptimizerAdapter(joinable)
    if isinstance(joinable, nn.Module):
        check_ddp(joinable)
    raise ConfigurationError(
        f"{described(joinable)} is not a Joinable (nor an optimizer or LR scheduler): Join takes models in "
        "DistributedDataParallel and subclasses of overlap.Joinable"
    )


def _group_and_device(joinables: Sequence[Any]) -> tuple[dist.ProcessGroup, torch.device]:
    able = [joinable for joinable in joinables if isinstance(joinable, base.Joinable)]
    if not able:
        raise ConfigurationError("Join needs a joinable with a process group, such as a DistributedDataParallel model")
    group = able[0].join_process_group
    if any(other.join_process_group is not group for other in able):
        raise ConfigurationError(
            "Using join context manager with multiple process groups: give each group a Join of its own"
        )
    return group, torch.device(able[0].join_device)


def _described(joinables: Sequence[Any]) -> list[list[Any]]:
    """The kind of each joinable, and the elements of each of its parameters, for ranks to compare.

    Where two of this rank look alike, also the values: a fingerprint, for which the host waits for the device. Ranks
    may train apart, so it only tells these two from each other.
    """
    parameters = [_parameters(joinable) for joinable in joinables]
    looks = [
        (described(joinable), [one.numel() for one in own]) for joinable, own in zip(joinables, parameters, strict=True)
    ]
    return [
        [*look, fingerprint(own) if looks.count(look) > 1 else ""] for look, own in zip(looks, parameters, strict=True)
    ]


def _difference(rank: int, own: Sequence[list[Any]], first: Sequence[list[Any]]) -> str | None:
    """How the :func:`_described` of ``rank`` differs from rank 0's; ``None`` where nothing is known to differ.

    Numbers of elements may differ between ranks, and values, too: it is a mistake only where a joinable of rank 0 is
    given in another place.
    """
    names, of_first = [one[0] for one in own], [one[0] for one in first]
    if names != of_first:
        given = f"rank {rank} enters Join with [{', '.join(names)}], but rank 0 with [{', '.join(of_first)}]"
        if sorted(names) == sorted(of_first):
            return f"{given}: give them in the same order on every rank"
        return f"{given}: every rank must be given the same"
    for place, (one, other) in enumerate(zip(own, first, strict=True)):
        if one != other and one in first:
            return (
                f"rank {rank} enters Join with a {one[0]} in place {place} of the list that rank 0 has in place "
                f"{first.index(one)}: give joinables in the same order on every rank"
            )
    return None


def _parameters(joinable: Any) -> list[Tensor]:
    if isinstance(joinable, LRScheduler):
        joinable = joinable.optimizer
    if isinstance(joinable, Optimizer):
        return [one for group in joinable.param_groups for one in group["params"]]
    return list(joinable.parameters()) if isinstance(joinable, nn.Module) else []


def _cause(error: BaseException, board: Board) -> CollectiveError | None:
    """What to raise in place of ``error``, where it is of a collective that did not complete."""
    if isinstance(error, PeerError) or not isinstance(error, RuntimeError):
        return None
    if isinstance(error, OverlapError):
        return board.peer_error() if isinstance(error, CollectiveError) else None
    return board.peer_error() or (explained(error, "failed under Join") if has_lost_connection(error) else None)
