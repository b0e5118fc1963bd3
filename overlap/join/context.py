"""The block in which ranks may run out of inputs at different times."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import TracebackType
from typing import Any, Literal, Self
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed.algorithms import join as base
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from overlap._torch.c10d import group_timeout
from overlap._torch.join import notify
from overlap.errors import CollectiveError, ConfigurationError, OverlapError, PeerError, TrainingLoopError
from overlap.join.active import active_join, clear_active_join, set_active_join
from overlap.join.course import Course
from overlap.join.ddp import DDPMember
from overlap.join.failures import FailureStore
from overlap.join.loading import batches
from overlap.join.member import HookMember, Member, OptimizerMember, SchedulerMember
from overlap.join.script import Script

__all__ = ["Join"]

OnExhausted = Literal["shadow", "stop", "raise"]
_WAYS = ("shadow", "stop", "raise")

# How many Joins this process has entered on a group: the same on every rank, so it can name the keys they meet under.
_entered: WeakKeyDictionary[dist.ProcessGroup, Iterator[int]] = WeakKeyDictionary()


class Join:
    """Lets ranks have different numbers of batches: who has run out goes on taking part, with zeros.

    ::

        with Join([ddp, optim, scheduler]) as join:
            for x, y in join.iterate(loader):
                loss_fn(ddp(x), y).backward()
                optim.step()
                scheduler.step()

    On ranks that have run out, what the others do is done again: buckets go through the registered hook with gradients
    of zero, hooks of joinables run once for each call that notified the Join, schedulers and plain optimizers step. At
    the end every rank has the parameters and buffers of the highest of those that ran longest.

    An iteration is a batch of :meth:`iterate`; without it, a forward that records gradients, of the model that runs
    first. Where every rank knows how many it will run (``lengths``, or a loader with a length given to
    :meth:`iterate`), they tell each other when the block begins, and no iteration pays for joining. Otherwise each
    iteration has one all-reduce of as many numbers as there are ranks, under way while the batch before it is computed
    (:meth:`iterate`) or the forward (without).

    Args:
        joinables: models, optimizers and other joinables of one process group; also plain ``torch.optim.Optimizer`` and
            LR schedulers, which then step on joined ranks as they do on active ones.
        enable: whether to do anything.
        throw_on_early_termination: the same as ``on_exhausted="raise"``.
        lengths: how many iterations this rank will run.
        on_exhausted: what happens when the first rank runs out: ``"shadow"`` lets the others go on, ``"stop"`` ends
            :meth:`iterate` on all ranks at the same iteration, ``"raise"`` raises on all ranks.
        weight_by_samples: weigh the ranks' gradients by the samples in their batches, so that the mean is over samples:
            ``True`` takes the first dimension of a batch's first tensor, a callable is given the batch. Needs
            :meth:`iterate`, and the all-reduce an iteration.
        **kwargs: given to every ``join_hook``. DDP's is ``divide_by_initial_world_size`` (default ``True``): ``False``
            divides by the number of ranks that still have inputs, under every reducer.

    Raises:
        ConfigurationError: no joinable, several process groups, an argument out of range, or ranks that disagree.
        UnsupportedError: a model with collectives in forward, and ranks that may run out of inputs before others.
        TrainingLoopError: this rank ran more or fewer iterations than it said, or ``on_exhausted="raise"``.
        PeerError: another rank failed; names it.
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
        self._on_exhausted = _check_way(on_exhausted, throws=throw_on_early_termination)
        if lengths is not None and (isinstance(lengths, bool) or not isinstance(lengths, int) or lengths < 0):
            raise ConfigurationError(f"lengths is this rank's number of iterations, len(loader) say, got {lengths!r}")
        if lengths is not None and weight_by_samples:
            raise ConfigurationError("weight_by_samples asks in every iteration anyway: leave lengths out")
        self._lengths, self._enable, self._samples = lengths, enable, weight_by_samples
        self._divides_by_count = not kwargs.get("divide_by_initial_world_size", True)
        self._members = _members(joinables, kwargs, shadows=enable and self._on_exhausted == "shadow")
        self._group, self._device = _group_and_device(joinables)
        self._course: Course | None = None

    @staticmethod
    def notify_join_context(joinable: base.Joinable) -> Any:
        """Tell the Join in force, ours or PyTorch's, that ``joinable`` is about to issue an iteration's collectives."""
        return notify(joinable)

    def __enter__(self) -> Self:
        if not self._enable:
            return self
        if active_join(self._group) is not None:
            raise TrainingLoopError("a Join is in force on this process group already: leave its block first")
        key = str(next(_entered.setdefault(self._group, itertools.count())))
        script = Script(self._group, key, group_timeout(self._group, self._device))
        lengths = self._meet(script)
        self._course = course = Course(
            self._group,
            self._device,
            script,
            self._members,
            on_exhausted=self._on_exhausted,
            divides_by_count=self._divides_by_count,
            counts_samples=bool(self._samples),
        )
        if lengths is not None:
            course.know(lengths)
        set_active_join(self._group, course)
        try:
            for member in self._members:
                member.enter(course)
        except BaseException as error:
            script.failures.report(error)
            self._leave()
            raise
        return self

    def _meet(self, script: Script) -> list[int] | None:
        """Compare what ranks were given; every rank's length, where they know."""
        mine = [[type(member).__name__ for member in self._members], self._on_exhausted, self._lengths is None]
        told = script.exchange("Join", [mine, self._lengths])
        for rank, (theirs, _) in enumerate(told):
            if theirs != told[0][0]:
                raise ConfigurationError(
                    f"rank {rank} enters Join with {theirs} (joinables, on_exhausted, whether without lengths), "
                    f"but rank 0 with {told[0][0]}; every rank must be given the same"
                )
        return None if self._lengths is None else [length for _, length in told]

    def iterate(self, loader: Iterable[Any]) -> Iterator[Any]:
        """The batches of ``loader``, looking one ahead where its length is not known; once in a block.

        Raises:
            TrainingLoopError: outside of the block, a second time, after a forward, or where the loader has more or
                fewer batches than its length says.
        """
        if not self._enable:
            yield from loader
            return
        if self._course is None:
            raise TrainingLoopError("join.iterate belongs inside of the block: with Join([...]) as join: ...")
        yield from batches(self._course, loader, self._samples)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        course = self._course
        if course is None:
            return
        try:
            if error is not None:
                _raise_cause(error, course.failures)
            else:
                self._finish(course)
        except BaseException as raised:
            error = raised
            raise
        finally:
            # What another rank caused is its own to report, and that inputs are exhausted every rank finds out.
            if error is not None and not isinstance(error, PeerError) and not course.has_thrown:
                course.failures.report(error)
            self._leave()

    def _finish(self, course: Course) -> None:
        is_last_joiner = course.finish()
        for member in self._members:
            member.post(is_last_joiner=is_last_joiner)

    def _leave(self) -> None:
        self._course = None
        clear_active_join(self._group)
        for member in self._members:
            member.leave()


def _check_way(way: OnExhausted | None, *, throws: bool) -> OnExhausted:
    if way is None:
        return "raise" if throws else "shadow"
    if way not in _WAYS:
        raise ConfigurationError(f"on_exhausted is one of {', '.join(_WAYS)}, got {way!r}")
    if throws and way != "raise":
        raise ConfigurationError(f"throw_on_early_termination=True is on_exhausted='raise', but that is {way!r}")
    return way


def _members(joinables: Sequence[Any], kwargs: dict[str, Any], *, shadows: bool) -> list[Member]:
    if not joinables:
        raise ConfigurationError("Join needs at least one joinable, such as a DistributedDataParallel model")
    members: list[Member] = []
    for joinable in joinables:
        if isinstance(joinable, DistributedDataParallel):
            members.append(DDPMember(joinable, joinable.join_hook(**kwargs), shadows=shadows))
        elif isinstance(joinable, base.Joinable):
            members.append(HookMember(joinable, joinable.join_hook(**kwargs)))
        elif isinstance(joinable, LRScheduler):
            members.append(SchedulerMember(joinable))
        elif isinstance(joinable, Optimizer):
            members.append(OptimizerMember(joinable))
        else:
            raise ConfigurationError(
                f"{type(joinable).__name__} is no Joinable (and no optimizer or LR scheduler): Join takes models in "
                "DistributedDataParallel and subclasses of overlap.Joinable"
            )
    for index, member in enumerate(members):
        member.index = index
    return members


def _group_and_device(joinables: Sequence[Any]) -> tuple[dist.ProcessGroup, torch.device]:
    able = [joinable for joinable in joinables if isinstance(joinable, base.Joinable)]
    if not able:
        raise ConfigurationError("Join needs a joinable with a process group, such as a DistributedDataParallel model")
    group = able[0].join_process_group
    if any(other.join_process_group is not group for other in able):
        raise ConfigurationError("using Join with several process groups: give each of them its own Join")
    return group, torch.device(able[0].join_device)


def _raise_cause(error: BaseException, failures: FailureStore) -> None:
    """Where ``error`` is a collective that did not come back for a rank that failed, raise what names the rank."""
    is_collective = isinstance(error, CollectiveError) or (
        isinstance(error, RuntimeError) and not isinstance(error, OverlapError)
    )
    if isinstance(error, PeerError) or not is_collective:
        return
    if (failure := failures.read()) is not None:
        raise PeerError(f"another rank failed under Join: {failure}") from error
