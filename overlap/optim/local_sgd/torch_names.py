"""Averagers and the optimizer of post-local SGD, under PyTorch's names."""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch.optim import Optimizer

from overlap._checks import check_group, check_whole_number, described, refuse_capture
from overlap._torch import classes
from overlap.errors import ConfigurationError
from overlap.hooks.wires import Wire
from overlap.optim.local_sgd.averaging_optimizer import AveragingOptimizer
from overlap.optim.local_sgd.compressed import Ranks
from overlap.optim.local_sgd.model_averaging import Params, WiredAverager, average_parameters
from overlap.optim.local_sgd.schedule import check_hierarchy, due_group, make_groups, make_ranks

__all__ = ["HierarchicalModelAverager", "ModelAverager", "PeriodicModelAverager", "PostLocalSGDOptimizer"]

_USELESS = (
    "averaging parameters after every step sends as much as averaging gradients, without overlapping it with backward: "
    "plain DDP is faster"
)


@classes.ModelAverager.register
class ModelAverager(ABC):
    """Averages parameters at some steps of the training loop.

    Args:
        process_group: the ranks to average over; the default group where ``None``.

    Raises:
        ConfigurationError: ``torch.distributed`` is not initialized.

    >>> averager = PeriodicModelAverager(period=4, warmup_steps=100)
    >>> isinstance(averager, ModelAverager)
    True
    """

    def __init__(self, process_group: dist.ProcessGroup | None = None) -> None:
        if not dist.is_initialized():
            raise ConfigurationError("averaging needs torch.distributed.init_process_group first")
        given = check_group("process_group", process_group, may_be_outside=True)
        self.process_group: dist.ProcessGroup = given if given is not None else dist.group.WORLD  # type: ignore[assignment]
        self.step = 0
        """Calls of :meth:`average_parameters` so far."""

    @abstractmethod
    def average_parameters(self, params: Params) -> None:
        """Count a training step, and average ``params`` if it is time; to be called after the optimizer's step."""

    def state_dict(self) -> dict[str, Any]:
        """``step``, and with a wire what this rank keeps from one average to the next."""
        return {"step": self.step}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take over what :meth:`state_dict` gave."""
        self.step = state_dict["step"]


class _ThroughAWire(ModelAverager):
    """An averager that may send averages through a wire."""

    def __init__(self, process_group: dist.ProcessGroup | None, wire: Wire | None, *, error_feedback: bool) -> None:
        super().__init__(process_group)
        self._wired = WiredAverager(wire, error_feedback=error_feedback)
        self._ranks = Ranks(self.process_group)

    def state_dict(self) -> dict[str, Any]:
        wired = self._wired.state_dict(self._ranks)
        return {**super().state_dict(), **({"wire": wired} if wired else {})}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        self._wired.load_state_dict(state_dict.get("wire", {}), self._ranks)
        super().load_state_dict(state_dict)


@classes.PeriodicModelAverager.register
class PeriodicModelAverager(_ThroughAWire):
    """Averages in the first call after ``warmup_steps`` calls, and in every ``period``-th call from there.

    Parameters are averaged in place, whether or not they have a gradient; see :func:`average_parameters`.

    Args:
        period: calls from one average to the next.
        warmup_steps: calls before the first average.
        process_group: the ranks to average over; the default group where ``None``.
        wire: how averages travel after the first, which is in full precision: as changes since the last average, of
            which each rank keeps a copy. Ranks have the same parameters after each, bit for bit.
        error_feedback: add what the wire left out of one average to the next; takes an fp32 copy of the parameters.

    Issues, when it is time: one all-reduce for each 8 MB of parameters, on ``process_group``; with ``wire`` a send and
    a receive with every other rank and an all-gather.

    Raises:
        ConfigurationError: ``period`` is below 1, or ``warmup_steps`` below 0, or ``wire`` is not a wire; or with a
            wire :meth:`average_parameters` is given other parameters than before.

    >>> averager = PeriodicModelAverager(period=4, warmup_steps=100)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> for x, y in loader:
    ...     loss_fn(model(x), y).backward()
    ...     optimizer.step()
    ...     averager.average_parameters(model.parameters())
    """

    def __init__(
        self,
        period: int,
        warmup_steps: int = 0,
        process_group: dist.ProcessGroup | None = None,
        *,
        wire: Wire | None = None,
        error_feedback: bool = False,
    ) -> None:
        self.period = check_whole_number("period", period, least=1)
        self.warmup_steps = check_whole_number("warmup_steps", warmup_steps, least=0)
        super().__init__(process_group, wire, error_feedback=error_feedback)
        if period == 1:
            warnings.warn(_USELESS, UserWarning, stacklevel=2)

    def average_parameters(self, params: Params) -> None:
        """Average ``params``, parameters or groups of them, if it is time; counts the call."""
        refuse_capture(f"{type(self).__name__}.average_parameters()", "call it outside of the capture")
        if self.step >= self.warmup_steps and (self.step - self.warmup_steps) % self.period == 0:
            self._wired.average(params, self._ranks)
        self.step += 1


@classes.HierarchicalModelAverager.register
class HierarchicalModelAverager(_ThroughAWire):
    """Averages often within small groups and less often within large ones (Lin et al. 2018, arXiv 1808.07217).

    Of the periods that divide the number of calls so far, the longest decides which group averages. Each group has
    consecutive ranks.

    Args:
        period_group_size_dict: the group size for each period, both ascending; the last size is that of
            ``process_group``.
        warmup_steps: calls before the first average.
        process_group: all ranks that average; the default group where ``None``. Every rank of the job is in it.
        wire: how averages of all ranks travel between the largest of the smaller groups, such as machines, after the
            first, which is in full precision: as changes since the last average of all ranks, of which each rank keeps
            a copy. Within these groups, and where only they average, all is in full precision. Ranks have the same
            parameters after an average of all, bit for bit.
        error_feedback: add what the wire left out of one average to the next; takes an fp32 copy of the parameters.

    Issues: at construction, the collectives of making groups; when it is time, one all-reduce for each 8 MB of
    parameters on one group. With ``wire``, when all ranks average: a reduce-scatter and an all-gather within this
    rank's group in fp32, and through the wire a send and a receive of its part with a rank of every other group and an
    all-gather with these.

    Raises:
        ConfigurationError: periods or sizes are below 1, do not ascend, or sizes do not divide each other; or
            ``process_group`` lacks ranks of the job.

    >>> averager = HierarchicalModelAverager(period_group_size_dict={4: 1}, warmup_steps=100)
    >>> averager.average_parameters(model.parameters())
    """

    def __init__(
        self,
        period_group_size_dict: Mapping[int, int] | None = None,
        warmup_steps: int = 0,
        process_group: dist.ProcessGroup | None = None,
        *,
        wire: Wire | None = None,
        error_feedback: bool = False,
    ) -> None:
        self.warmup_steps = check_whole_number("warmup_steps", warmup_steps, least=0)
        super().__init__(process_group, wire, error_feedback=error_feedback)
        given = {} if period_group_size_dict is None else period_group_size_dict
        sizes = check_hierarchy("period_group_size_dict", given, self.process_group)
        self.period_process_group_dict = make_groups(sizes, self.process_group)
        """This rank's group for each period."""
        if wire is not None:
            self._ranks = make_ranks(list(self.period_process_group_dict.values()), self.process_group)
        if max(sizes) == 1:
            warnings.warn(_USELESS, UserWarning, stacklevel=2)

    def average_parameters(self, params: Params) -> None:
        """Average ``params``, parameters or groups of them, if it is time; counts the call."""
        refuse_capture(f"{type(self).__name__}.average_parameters()", "call it outside of the capture")
        if self.step >= self.warmup_steps:
            group = due_group(self.period_process_group_dict, self.step)
            if group is self.process_group:
                self._wired.average(params, self._ranks)
            elif group is not None:
                average_parameters(params, group)
        self.step += 1


class PostLocalSGDOptimizer(AveragingOptimizer, classes.PostLocalSGDOptimizer):
    """Steps an optimizer, then lets an averager average its parameters if it is time (arXiv 1808.07217).

    As with PyTorch's, register ``post_localSGD_hook`` with DDP, and give its state and the averager the same start;
    :class:`LocalSGD` does all of that from one counter. ``param_groups``, ``state``, ``defaults`` and step hooks are
    the wrapped optimizer's. A step that ``GradScaler`` skips still averages when it is time.

    Args:
        optim: the optimizer, not a class; or a list of several with parameters of their own, stepped in turn.
        averager: says when to average, and over which ranks.

    Issues: what ``averager`` issues, in :meth:`step`.

    Raises:
        ConfigurationError: ``optim`` is not an optimizer, or ``averager`` is not a ModelAverager.

    >>> averager = PeriodicModelAverager(period=4, warmup_steps=2)
    >>> optimizer = PostLocalSGDOptimizer(torch.optim.SGD(ddp.parameters(), lr=0.1), averager)
    >>> registration = overlap.register(ddp, post_localSGD_hook, PostLocalSGDState(None, None, start_localSGD_iter=2))
    >>> for x, y in loader:
    ...     optimizer.zero_grad()
    ...     loss_fn(ddp(x), y).backward()
    ...     optimizer.step()
    """

    def __init__(self, optim: Optimizer | Sequence[Optimizer], averager: ModelAverager) -> None:
        if not hasattr(averager, "average_parameters") or not hasattr(averager, "step") or isinstance(averager, type):
            raise ConfigurationError(
                f"PostLocalSGDOptimizer takes a ModelAverager, got {described(averager)}; make one, as in "
                "PeriodicModelAverager(period=8, warmup_steps=1000)"
            )
        super().__init__(optim)
        self.averager = averager

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update, then average if it is time; returns the closure's result.

        Raises:
            UnsupportedError: a CUDA graph is being captured.
        """
        refuse_capture("PostLocalSGDOptimizer.step()", "call it outside of the capture")
        loss = self.step_wrapped(closure)
        self.averager.average_parameters(self.param_groups)
        return loss

    def state_dict(self) -> dict[str, Any]:
        """The wrapped optimizer's, with the averager's ``step`` beside it, and what it keeps for its wire."""
        wire = _wire_of(self.averager)
        return {**self.optim.state_dict(), "step": self.averager.step, **({"wire": wire} if wire else {})}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take over what :meth:`state_dict` or the plain optimizer gave; warns where there is no ``step``."""
        self.optim.load_state_dict({key: value for key, value in state_dict.items() if key not in ("step", "wire")})
        if "step" not in state_dict:
            warnings.warn(
                "Loaded state dict does not contain a step counter for an averager. Setting step counter to 0. "
                "The warm-up begins again, too",
                UserWarning,
                stacklevel=2,
            )
        step = state_dict.get("step", 0)
        if isinstance(self.averager, ModelAverager):
            self.averager.load_state_dict({"step": step, "wire": state_dict.get("wire", {})})
        else:
            self.averager.step = step

    def __repr__(self) -> str:
        return f"PostLocalSGDOptimizer({self.optim!r})"


def _wire_of(averager: object) -> dict[str, Any]:
    """What an averager keeps from one average through its wire to the next; PyTorch's keep nothing."""
    wire: dict[str, Any] = averager.state_dict().get("wire", {}) if isinstance(averager, ModelAverager) else {}
    return wire
