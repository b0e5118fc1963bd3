"""The parameters that all ranks had when a round began, and outer optimizers, which step them.

If all ranks began the round at the parameters ``x``, and ``m`` is the mean of what they have at its end, the outer
gradient is ``x - m``. SGD with rate 1 gives the plain average, SGD with momentum is SlowMo (Wang et al. 2019,
https://arxiv.org/abs/1910.00643), and Nesterov momentum is DiLoCo (Douillard et al. 2023,
https://arxiv.org/abs/2311.08105).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from overlap._torch.foreach import copy_all, subtract_from_
from overlap.errors import ConfigurationError
from overlap.optim.local_sgd.averages import wider
from overlap.optim.stepper import check_optimizer, grads_replaced, step_whole
from overlap.ranks.collectives import all_reduce

__all__ = ["Anchors", "MakeOptimizer"]

MakeOptimizer = Callable[[list[Tensor]], Optimizer]

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Anchors:
    """A copy of the parameters that all ranks had when the round began, at least in fp32; it is moved at its end.

    Args:
        parameters: the model's, by name.
        make: makes the outer optimizer of the copies; ``None`` moves them to the mean itself.
    """

    def __init__(self, parameters: Mapping[str, Tensor], make: MakeOptimizer | None) -> None:
        self._parameters = parameters
        self.values = {name: p.detach().to(wider(p.dtype), copy=True) for name, p in parameters.items()}
        """The copies, by name."""
        self.optimizer = None if make is None else _made(make, list(self.values.values()))
        """The outer optimizer, over :attr:`values`."""
        self.is_set = False
        """Whether a round has begun."""
        self._is_common = False

    def begin(self) -> None:
        """Begin the first round at the parameters as they are now, unless it has begun."""
        if not self.is_set:
            copy_all(list(self.values.values()), [parameter.detach() for parameter in self._parameters.values()])
            self.is_set = True

    def check_common(self, group: dist.ProcessGroup, device: torch.device) -> None:
        """In the first average since the anchors were set or loaded, check that all ranks have the same.

        Communication, then: one all-reduce of two numbers per parameter on ``group``.
        """
        if self._is_common:
            return
        values = self.values.values()
        sums = torch.stack([v.view(_BITS[v.dtype.itemsize]).sum(dtype=torch.int64).to(device) for v in values])
        extremes = torch.cat([sums, -sums])
        all_reduce(extremes, op=dist.ReduceOp.MAX, group=group)
        largest, smallest = extremes[: len(sums)], -extremes[len(sums) :]
        if differing := [name for name, size in zip(self.values, (largest - smallest).tolist(), strict=True) if size]:
            raise ConfigurationError(
                f"ranks began the round with different parameters ({', '.join(differing[:3])}"
                f"{', ...' if len(differing) > 3 else ''}); with a wire or an "
                "outer optimizer all ranks must begin with the same: load the same model on every rank, or, in the "
                "middle of a round, each rank's own state"
            )
        self._is_common = True

    @torch.no_grad()
    def step(self, means: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Move the anchors of some parameters, given their means over ranks, which may be overwritten; returns them."""
        moved = {name: self.values[name] for name in means}
        anchors, gradients = list(moved.values()), list(means.values())
        if self.optimizer is None:
            copy_all(anchors, gradients)
            return moved
        subtract_from_(gradients, anchors)
        with grads_replaced(anchors, gradients):
            step_whole(self.optimizer)
        return moved

    @torch.no_grad()
    def load(self, values: Mapping[str, Tensor]) -> None:
        """Go on from the ``values`` of a saved round; without any, the next step begins a round."""
        if values and values.keys() != self.values.keys():
            raise ConfigurationError("the state of local SGD is of a model with other parameters")
        copy_all([self.values[name] for name in values], list(values.values()))
        self.is_set, self._is_common = bool(values), False


def _made(make: MakeOptimizer, values: list[Tensor]) -> Optimizer:
    if isinstance(make, Optimizer) or not callable(make):
        raise ConfigurationError(
            f"outer must be a function that makes an optimizer of tensors, got {type(make).__name__}; give "
            "functools.partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True)"
        )
    try:
        return check_optimizer(make(values))
    except (TypeError, ValueError) as error:
        if isinstance(error, ConfigurationError):
            raise
        raise ConfigurationError(f"outer could not be made from the model's parameters: {error}") from error
