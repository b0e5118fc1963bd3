"""Local SGD among processes that may be lost and rejoin."""

from __future__ import annotations

import logging
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from types import TracebackType
from typing import Any, Self

import torch
from torch import nn
from torch.optim import Optimizer

from overlap._checks import check_whole_number, refuse_capture
from overlap._torch.c10d import Store
from overlap.errors import ConfigurationError, TrainingLoopError
from overlap.join.membership import Membership
from overlap.join.views import View, ViewFailed
from overlap.optim.local_sgd.average import Weight
from overlap.optim.local_sgd.averaging_optimizer import AveragingOptimizer
from overlap.optim.local_sgd.elastic_checks import (
    check_store,
    checked_limits,
    checked_model,
    checked_period,
    layout_of,
)
from overlap.optim.local_sgd.elastic_exchange import ElasticExchange
from overlap.optim.local_sgd.model_copies import ModelCopies
from overlap.optim.local_sgd.model_tensors import ModelTensors, trained_parameters
from overlap.optim.local_sgd.options import Options
from overlap.optim.local_sgd.outer import MakeOptimizer, OuterOptimizer
from overlap.optim.local_sgd.several import name_of

__all__ = ["ElasticLocalSGD"]

_log = logging.getLogger(__name__)

_KEY = "elastic_local_sgd"
_PREFIX = "overlap/elastic"


class ElasticLocalSGD(AveragingOptimizer):
    """Local SGD, or DiLoCo with ``outer``, of processes that may be lost at any time and may rejoin.

    Each process trains alone, and all average every ``period`` steps. The others notice at the average that a process
    is lost, and go on without it. An average is all or nothing: if one is lost meanwhile, the others repeat it
    from parameters that it has not changed. A process that starts later joins at an average, and gets the parameters,
    buffers, optimizer states and the step of the others.

    It needs neither a process group nor DDP: processes find each other in ``store``, and average over Gloo. The
    ``with`` block joins the group, and leaves it at its end or on an exception::

        store = dist.TCPStore(host, 29500, is_master=False)  # Hosted by a process that does not train.
        local = ElasticLocalSGD(model, torch.optim.AdamW(model.parameters()), store, world_size=4, period=100)
        with local:
            while local.step_count < 10_000:
                local.zero_grad(); loss_fn(model(x), y).backward(); local.step()

    Args:
        model: the model itself, not in DDP. When the group forms all get the parameters of one of them.
        optimizer: of this process, on the model's parameters; or a list of several.
        store: where processes meet, such as a ``TCPStore``. It must outlive them all; each run has a prefix of its own
            in it: ``dist.PrefixStore("run 1", store)``.
        world_size: how many processes form the group. Later it may be smaller or larger.
        period: steps from one average to the next; a function, the same in every process, is called with the step at
            which a round begins and returns the round's length.
        outer: a function from a list of tensors to an optimizer of them, which steps with what a round changed as its
            gradient.
        min_size: with fewer, an average waits for processes to join, up to ``join_timeout``.
        timeout: how long, in seconds or as a ``timedelta``, an average waits for a process that runs but is late,
            before it goes on without it; and how long an average may take.
        join_timeout: how long a process waits to join.
        heartbeat_timeout: how long a process may send no heartbeat, which a thread sends, before it counts as lost. The
            end of a process on the same machine is noticed at once.
        average_buffers: average floating-point buffers too, such as BatchNorm's statistics.
        average_dtype: sum in this dtype where it is wider than a parameter's: ``torch.float32`` for half precision.

    Each process has the same weight in an average. Needs a copy of the model in host memory while it averages.

    Issues, when processes average: one all-reduce for about each 8 MB of parameters, on connections of its own; if
    processes join, also broadcasts to them.

    Raises:
        ConfigurationError: an argument is out of range, or two do not fit together.
        UnsupportedError: ``outer`` does not work with this model.

    >>> sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> with ElasticLocalSGD(model, sgd, dist.HashStore(), world_size=1, period=2) as local:
    ...     while local.step_count < 4:
    ...         local.zero_grad()
    ...         loss_fn(model(x), y).backward()
    ...         local.step()
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | Sequence[Optimizer],
        store: Store,
        *,
        world_size: int,
        period: int | Callable[[int], int] = 8,
        outer: MakeOptimizer | None = None,
        min_size: int = 1,
        timeout: float | timedelta = timedelta(minutes=10),
        join_timeout: float | timedelta = timedelta(minutes=30),
        heartbeat_timeout: float | timedelta = timedelta(seconds=30),
        average_buffers: bool = True,
        average_dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(optimizer)
        self._module = checked_model(model)
        self._period = checked_period(period)
        limits = checked_limits(world_size, min_size, timeout, join_timeout, heartbeat_timeout)
        check_store(store)
        options = Options(
            overlap=False, fragments=1, average_buffers=average_buffers, optimizer_state="keep",
            average_dtype=average_dtype, wire=None, error_feedback=False,
        )  # fmt: skip
        parameters = trained_parameters(self._module, self.optim)
        self._dtype = average_dtype
        self._tensors = ModelTensors(
            self._module, parameters, self.optim, fragments=1, buffers=average_buffers, state=False
        )
        self._outer = None if outer is None else OuterOptimizer(outer, parameters, average_dtype)
        self._summary = f"period {getattr(period, '__qualname__', period)}{options.summary}"
        self._step_count = 0
        self._round: tuple[int, int] | None = None
        """The steps at which the current one began and ends."""
        signature = f"{self!r}, {layout_of(self._module)}"
        self._membership = Membership(store, _PREFIX, limits, signature)
        self._exchange = ElasticExchange(store, _PREFIX, self._membership.agreement, limits)
        self._join_timeout_s = limits.join_timeout_s

    @property
    def step_count(self) -> int:
        """Training steps so far, those of the group: it jumps ahead when this process joins."""
        return self._step_count

    @property
    def outer(self) -> Optimizer | None:
        """The outer optimizer, to schedule its learning rate."""
        return None if self._outer is None else self._outer.optimizer

    @property
    def members(self) -> tuple[int, ...]:
        """The processes of the group since the last average, by numbers that are never used again; empty outside of
        the block."""
        view = self._membership.view
        return () if view is None else tuple(sorted(view.everyone))

    @property
    def world_size(self) -> int:
        """How many :attr:`members` there are."""
        return len(self.members)

    @property
    def rank(self) -> int:
        """The place of this process among :attr:`members`; it changes when others are lost.

        Raises:
            TrainingLoopError: outside of the block.
        """
        self._check_is_member("rank")
        return self.members.index(self._membership.number)

    def __enter__(self) -> Self:
        """Enter the group: wait for ``world_size`` processes, or where the group trains already for its next average.

        Raises:
            ConfigurationError: the group has other settings or another model.
            CollectiveError: it does not come to that in ``join_timeout``, or the store is gone.
            TrainingLoopError: this process is in the group already.
        """
        if self._membership.view is not None:
            raise TrainingLoopError("this process is in the group already: enter `with local:` once")
        try:
            self._join()
        except BaseException as error:
            self._leave(error)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Leave the group; the others go on at once, without waiting for this process."""
        self._leave(error)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update this process's parameters, then average if it is time; returns the closure's result.

        If the others have gone on without this process because it was late, it waits for their next average and takes
        over their model; its own updates since its last average are lost.

        Raises:
            TrainingLoopError: outside of the block.
            CollectiveError: fewer than ``min_size`` are left, the store is gone, or averages fail again and again.
            UnsupportedError: a CUDA graph is being captured.
        """
        refuse_capture("ElasticLocalSGD.step()", "call it outside of the capture")
        self._check_is_member("step()")
        loss = self.step_wrapped(closure)
        self._step_count += 1
        assert self._round is not None, "a member is in a round"
        if self._step_count >= self._round[1]:
            self._average()
        return loss

    def synchronize(self) -> None:
        """Average now, and begin a new round; changes nothing right after an average. Every process calls it.

        Raises:
            TrainingLoopError, CollectiveError: as :meth:`step`.
        """
        self._check_is_member("synchronize()")
        assert self._round is not None, "a member is in a round"
        if self._step_count > self._round[0]:
            self._average()

    def _check_is_member(self, what: str) -> None:
        if self._membership.view is None:
            raise TrainingLoopError(f"{what} works inside of the block: with local: ... (an ElasticLocalSGD)")

    def _join(self) -> None:
        self._membership.enter(self._step_count)
        deadline_s = time.monotonic() + self._join_timeout_s
        while not self._take_part(self._membership.await_view(deadline_s)):
            pass

    def _leave(self, error: BaseException | None) -> None:
        reason = "" if error is None else " ".join(f"{type(error).__name__}: {error}".split())
        self._membership.leave(reason)
        self._exchange.close()

    def _average(self) -> None:
        while (view := self._membership.gather()) is not None:
            if self._take_part(view):
                return
        _log.warning(
            "process %d came too late to the average after step %d, and the others have gone on: its round is lost, "
            "and it waits for their next average",
            self._membership.number, self._step_count,
        )  # fmt: skip
        self._membership.leave("it came too late to an average")
        self._exchange.close()
        self._join()

    def _take_part(self, view: View) -> bool:
        """Make the average of ``view``, or receive it; ``False`` if it failed, and then nothing was changed."""
        exchange, number, before = self._exchange, self._membership.number, self.members
        copies, given = None, None
        try:
            exchange.begin(view)
            if number in view.members:
                copies = ModelCopies(self._tensors, self._dtype)
                copies.scale_(Weight(1, len(view.members)))
                exchange.sum(view, copies.flat)
            if number in view.receivers:
                given = exchange.take(view)
            elif number == view.source and view.receivers:
                means = [] if copies is None else copies.flat
                model, optimizer = self._module.state_dict(), self.state_dict()
                exchange.give(view, {"model": model, "optimizer": optimizer, "means": means})
            self._membership.commit(view)
        except ViewFailed as failure:
            exchange.close()
            _log.warning("the average after step %d is made again: %s", self._step_count, failure)
            return False
        exchange.end()
        if given is not None:
            self._module.load_state_dict(given["model"])
            self._load(given["optimizer"])
            if given["means"]:
                copies = ModelCopies(self._tensors, self._dtype)
                copies.take(given["means"])
        if copies is not None:
            copies.store(self._outer)
        self._begin_round(is_after_average=bool(view.members))
        if before:
            self._tell_of_changes(before)
        return True

    def _tell_of_changes(self, before: tuple[int, ...]) -> None:
        lost = [one for one in before if one not in self.members]
        new = [f"process {one} came in" for one in self.members if one not in before]
        if changes := [*map(self._membership.agreement.liveness.why, lost), *new]:
            _log.warning("from step %d on the group is %s: %s", self._step_count, self.members, "; ".join(changes))

    def _begin_round(self, *, is_after_average: bool) -> None:
        if self._outer is not None and not self._outer.is_set:
            self._outer.set_anchors()
        if not is_after_average and self._round is not None:
            return  # One that was saved.
        step = self._step_count
        length = self._period(step) if callable(self._period) else self._period
        self._round = step, step + check_whole_number(f"period at step {step}", length, least=1)

    def state_dict(self) -> dict[str, Any]:
        """The wrapped optimizer's, which a plain optimizer loads too, with an ``elastic_local_sgd`` entry.

        With the model's it is all that a run needs: one process saves it, best right after an average.
        """
        outer = None if self._outer is None else self._outer.state_dict()
        return {**self.optim.state_dict(), _KEY: {"step": self._step_count, "round": self._round, "outer": outer}}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take over what :meth:`state_dict` gave, before the block. When the group forms, all get the model and the
        state of the process with the most steps.

        Raises:
            ConfigurationError: it is of other settings, or of another model.
            TrainingLoopError: inside of the block.
        """
        if self._membership.view is not None:
            raise TrainingLoopError("inside of the block the state is the group's: load it before `with local:`")
        self._load(state_dict)

    def _load(self, state_dict: Mapping[str, Any]) -> None:
        own = state_dict.get(_KEY)
        if own is not None and (own["outer"] is None) != (self._outer is None):
            saved, here = ("with an", "none") if self._outer is None else ("without an", "one")
            raise ConfigurationError(f"the state was saved {saved} outer optimizer, and this one has {here}")
        self.optim.load_state_dict({key: value for key, value in state_dict.items() if key != _KEY})
        if own is None:
            warnings.warn("the state has no step of local SGD: it begins at step 0", UserWarning, stacklevel=3)
            return
        self._step_count, self._round = own["step"], own["round"] and tuple(own["round"])
        if self._outer is not None:
            self._outer.load_state_dict(own["outer"])

    def __repr__(self) -> str:
        outer = "" if self._outer is None else f", outer {type(self._outer.optimizer).__name__}"
        return f"ElasticLocalSGD({name_of(self.optim)}, {self._summary}{outer})"
