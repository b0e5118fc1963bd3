"""PyTorch's names: averagers, ``average_parameters`` and the optimizer of post-local SGD."""

from __future__ import annotations

import warnings
from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from overlap._checks import as_list, check_group, check_whole_number, refuse_capture, type_name
from overlap._torch import classes
from overlap.errors import ConfigurationError
from overlap.optim.local_sgd.inner import AveragingOptimizer
from overlap.optim.local_sgd.means import average

Params = Iterable[Tensor] | Iterable[dict[str, Tensor]]

_USELESS = (
    "averaging parameters after every step sends as much as averaging gradients, without overlapping it with backward: "
    "plain DDP is faster"
)


def average_parameters(params: Params, process_group: dist.ProcessGroup | None = None) -> None:
    """Replace each parameter by its mean over the ranks of ``process_group``, in place, with or without a gradient.

    Args:
        params: parameters, or an optimizer's ``param_groups``; the same on every rank. Integers are left as they are.
        process_group: the default group where ``None``. A rank that is not in it does nothing.

    Communication: one all-reduce for each 8 MB of parameters, on ``process_group``. Needs two such buffers.

    >>> average_parameters(model.parameters(), dist.group.WORLD)
    """
    check_group("process_group", process_group, may_be_outside=True)
    given = as_list(params)
    if not given or not all(isinstance(one, (Tensor, Mapping)) for one in given):
        raise ConfigurationError(
            f"averaging takes parameters, which an iterator yields only once, or an optimizer's param_groups, got "
            f"{type_name(params)}; give model.parameters() or optimizer.param_groups"
        )
    tensors = [tensor for one in given for tensor in ([one] if isinstance(one, Tensor) else one["params"])]
    group = process_group if process_group is not None else dist.group.WORLD
    if group is not None and dist.get_rank(group) >= 0:
        average({str(id(tensor)): tensor.detach() for tensor in tensors}, group).wait()


class ModelAverager(classes.ModelAverager):
    """Averages parameters over ``process_group``, the default one where ``None``, at some steps of the training loop.

    Raises:
        ConfigurationError: ``torch.distributed`` is not initialized, or ``process_group`` is not a process group.

    >>> averager = PeriodicModelAverager(period=4, warmup_steps=100)
    >>> isinstance(averager, ModelAverager)
    True
    """

    def __init__(self, process_group: dist.ProcessGroup | None = None) -> None:
        if not dist.is_initialized():
            raise ConfigurationError("averaging needs torch.distributed.init_process_group first")
        super().__init__(check_group("process_group", process_group, may_be_outside=True))

    @abstractmethod
    def average_parameters(self, params: Params) -> None:
        """Count a training step, and average ``params`` if it is time; to be called after the optimizer's step."""


@classes.PeriodicModelAverager.register
class PeriodicModelAverager(ModelAverager):
    """Averages in the first call after ``warmup_steps`` calls, and in every ``period``-th call from there.

    Parameters are averaged over ``process_group``, the default one where ``None``, as by :func:`average_parameters`.

    >>> averager = PeriodicModelAverager(period=4, warmup_steps=100)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> for x, y in loader:
    ...     loss_fn(model(x), y).backward()
    ...     optimizer.step()
    ...     averager.average_parameters(model.parameters())
    """

    def __init__(self, period: int, warmup_steps: int = 0, process_group: dist.ProcessGroup | None = None) -> None:
        self.period = check_whole_number("period", period, least=1)
        self.warmup_steps = check_whole_number("warmup_steps", warmup_steps, least=0)
        super().__init__(process_group)
        if period == 1:
            warnings.warn(_USELESS, UserWarning, stacklevel=2)

    def average_parameters(self, params: Params) -> None:
        """Average ``params``, parameters or groups of them, if it is time; counts the call."""
        refuse_capture("PeriodicModelAverager.average_parameters()", "call it outside of the capture")
        step, self.step = self.step, self.step + 1
        if step >= self.warmup_steps and (step - self.warmup_steps) % self.period == 0:
            average_parameters(params, self.process_group)


class PostLocalSGDOptimizer(AveragingOptimizer, classes.PostLocalSGDOptimizer):
    """Steps an optimizer, then lets an averager average its parameters if it is time (arXiv 1808.07217).

    As with PyTorch's, register ``post_localSGD_hook`` with DDP, and give its state and the averager the same start;
    :class:`LocalSGD` does all of that from one counter. ``param_groups``, ``state``, ``defaults`` and step hooks are
    the wrapped optimizer's. A step that ``GradScaler`` skips still averages when it is time.

    Args:
        optim: the optimizer, not a class; or a list of several with parameters of their own, stepped in turn.
        averager: decides when to average, and over which ranks.

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
                f"PostLocalSGDOptimizer takes a ModelAverager, got {type_name(averager)}; make one, as in "
                "PeriodicModelAverager(period=8, warmup_steps=1000)"
            )
        super().__init__(optim)
        self.averager = averager

    def _step_and_average(self) -> None:
        self.step_wrapped()
        self.averager.average_parameters(self.param_groups)

    def state_dict(self) -> dict[str, Any]:
        """The wrapped optimizer's, with the averager's ``step`` beside it."""
        return {**self.optim.state_dict(), "step": self.averager.step}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a state that :meth:`state_dict` or the plain optimizer returned; warns where there is no ``step``."""
        self.optim.load_state_dict({key: value for key, value in state_dict.items() if key != "step"})
        if "step" not in state_dict:
            warnings.warn(
                "Loaded state dict does not contain a step counter for an averager. Setting step counter to 0. "
                "The warm-up begins again, too",
                UserWarning,
                stacklevel=2,
            )
        self.averager.step = state_dict.get("step", 0)

    def __repr__(self) -> str:
        return f"PostLocalSGDOptimizer({self.optim!r})"
