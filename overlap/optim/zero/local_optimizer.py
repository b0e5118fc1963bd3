"""The optimizer of what this rank owns: which parts of the parameters that are, and how they are stepped."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from overlap._checks import is_one_of, told
from overlap._torch.optimizer import own_step
from overlap.errors import ConfigurationError, OverlapError, UnsupportedError
from overlap.join.board import Agreement
from overlap.optim.declared import Unit, check_one_eps, check_unit
from overlap.optim.subset import SubsetStepper, check_optimizer
from overlap.optim.veto import Veto
from overlap.optim.zero.parameter_groups import check_members, copy_options, is_narrower
from overlap.optim.zero.sharding import Ownership, Shard, flatten
from overlap.optim.zero.state import check_new_state
from overlap.optim.zero.update_cost import orthogonalization_steps

__all__ = ["LocalOptimizer"]


class LocalOptimizer:
    """An optimizer of the user's class that holds this rank's parts of the parameters, and steps them.

    Args:
        cls: its class.
        groups: of whole parameters.
        defaults: the arguments of ``cls``.
        process_group: the ranks that divide the parameters.
        partition: how, ``"element"`` or ``"parameter"``; ``None``: in the unit in which ``cls`` updates.
        master_dtype: of copies of narrower parameters.
        agreement: by which the ranks come to their first collective together.
        on_change: called before the state changes.
    """

    def __init__(
        self,
        cls: type[Optimizer],
        groups: list[dict[str, Any]],
        defaults: dict[str, Any],
        process_group: dist.ProcessGroup,
        *,
        partition: str | None,
        master_dtype: torch.dtype | None,
        agreement: Agreement,
        on_change: Callable[[], None],
    ) -> None:
        self._cls, self._defaults, self._master_dtype = cls, defaults, master_dtype
        orthogonalizes = self._tried(groups)
        self.partition = _partition(check_unit(cls, instead=_INSTEAD), cls, partition)
        self.ownership = Ownership(process_group, self.partition, master_dtype)
        agreement.agree()
        chunks = self.ownership.add(groups, first_group=0, orthogonalizes=orthogonalizes)
        self.optim = _made(cls, chunks, defaults)
        """The optimizer itself."""
        self._stepper = SubsetStepper(self.optim)
        self.param_groups: list[dict[str, Any]] = []
        """The groups of whole parameters, as the loop sees them; their hyperparameters count."""
        self._on_change = on_change
        self.step_arguments: Mapping[str, Any] = {}
        """Arguments of the optimizer's ``step``."""
        self.publishes = True
        """Whether :meth:`update` writes the parameters; a gather of differences does by itself."""
        self._state_sizes: dict[int, int] = {}

    @property
    def shards(self) -> Mapping[int, Shard]:
        """The shard of each parameter, by ``id`` of the parameter, in the groups' order."""
        return self.ownership.shards

    def check_addition(self, group: dict[str, Any]) -> None:
        """Raises: ConfigurationError: the optimizer does not take this group."""
        self._tried([group])

    def add(self, group: dict[str, Any]) -> None:
        """Add this rank's parts of the parameters of a group, after the others; call it on every rank."""
        orthogonalizes = self._tried([group])
        (chunks,) = self.ownership.add([group], first_group=len(self.param_groups), orthogonalizes=orthogonalizes)
        self.optim.add_param_group(chunks)

    @torch.no_grad()
    def begin(self) -> None:
        """Begin a step: take note of parameters that were moved or changed since the last one.

        Raises:
            ConfigurationError: parameters were put into the groups, or taken out, by hand.
        """
        check_members(self.param_groups, self.shards)
        copy_options(self.param_groups, self.optim.param_groups)
        self._stepper.begin()
        for shard in self.shards.values():
            shard.refresh()

    @torch.no_grad()
    def update(self, pairs: Sequence[tuple[Shard, Tensor]], veto: Veto) -> None:
        """Step what this rank owns of each shard with its flat gradient, and write the parameters, unless a gather of
        differences is going to. Where ``veto`` is left to the device, it changes nothing there."""
        with veto.passed_to(self.optim):
            self.step_owned(pairs)
        if self.publishes:
            for shard, _ in pairs:
                shard.publish()

    def step_owned(self, pairs: Sequence[tuple[Shard, Tensor]]) -> None:
        """Step what this rank owns of each shard, where the optimizer has it, with its flat gradient."""
        self._on_change()
        shards = [shard for shard, _ in pairs]
        chunks = [shard.own for shard in shards if shard.own is not None]
        shaped = [shard.shaped(gradient) for shard, gradient in pairs]
        matching = [g if g.dtype == own.dtype else g.to(own.dtype) for g, own in zip(shaped, chunks, strict=True)]
        self._stepper.step(chunks, matching, **self.step_arguments)
        if self.partition == "element":
            check_new_state(self.optim, shards, self._state_sizes)

    def finish(self) -> None:
        """End a step: the groups, as its parts have left them, are then the same on all ranks."""
        # Not all options: the loop may have changed others since the step began, for the next one.
        for place, values in self._stepper.finish(**self.step_arguments).items():
            self.param_groups[place].update(values)

    @torch.no_grad()
    def make_state(self) -> None:
        """Let the optimizer make the state of this rank's part by a step on zeros, which changes no parameter."""
        self.begin()
        owned = [shard for shard in self.shards.values() if shard.own is not None and shard.parameter.requires_grad]
        values = [shard.own.clone() for shard in owned if shard.own is not None]
        self.step_owned([(shard, flatten(torch.zeros_like(shard.own))) for shard in owned if shard.own is not None])
        for shard, value in zip(owned, values, strict=True):
            if shard.own is not None:
                shard.own.copy_(value)

    def _tried(self, groups: Sequence[Mapping[str, Any]]) -> list[int]:
        """Make the optimizer of one element of each parameter, before ranks exchange anything; returns for each group
        in how many steps it orthogonalizes matrices.

        Raises:
            ConfigurationError: the class does not take the arguments.
            UnsupportedError: it needs a closure or sparse gradients, or has a ``step()`` of its own.
        """
        few = [{**group, "params": [self._one_element_of(p) for p in group["params"]]} for group in groups]
        tried = check_optimizer(_made(self._cls, few, self._defaults))
        if own_step(tried) is not None:
            raise UnsupportedError(
                f"{self._cls.__name__} replaces step() on its object, which a sharded update would not call; use "
                f"{_INSTEAD}"
            )
        check_one_eps(tried, instead=_INSTEAD)
        return [orthogonalization_steps(group) for group in tried.param_groups]

    def _one_element_of(self, parameter: Tensor) -> Tensor:
        dtype = self._master_dtype if is_narrower(parameter, self._master_dtype) else parameter.dtype
        return torch.zeros(
            (1,) * parameter.dim(), dtype=dtype, device=parameter.device, requires_grad=parameter.requires_grad
        )


_INSTEAD = "chain(AllReduce(), Step(OverlappedOptimizer(optimizer), deferred=True))"


def _made(cls: type[Optimizer], groups: Any, defaults: Mapping[str, Any]) -> Optimizer:
    """``cls(groups, **defaults)``.

    Raises:
        ConfigurationError: ``cls`` does not take the arguments.
    """
    try:
        return cls(groups, **defaults)
    except OverlapError:
        raise
    except Exception as error:
        raise ConfigurationError(f"{cls.__name__}: {error}") from error


def _partition(unit: Unit, cls: type[Optimizer], partition: object) -> str:
    """How ``cls`` is divided, which updates in ``unit``.

    Raises:
        ConfigurationError: there is no such ``partition``.
        UnsupportedError: it is finer than ``unit``.
    """
    if partition is None:
        return unit
    if not is_one_of(partition, "element", "parameter"):
        raise ConfigurationError(f"partition is 'element' or 'parameter', got {told(partition)}")
    if partition == "element" and unit == "parameter":
        raise UnsupportedError(
            f"{cls.__name__} does not update each element by itself: use partition='parameter', or leave partition out"
        )
    return str(partition)
