"""The optimizer of what this rank owns: which parts of the parameters that are, and how they are stepped."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from overlap.join.meeting import Meeting
from overlap.optim.probe import Verdict
from overlap.optim.subset import SubsetStepper
from overlap.optim.veto import Veto
from overlap.optim.zero.division import Experiments, check_division, choose_partition, make_optimizer
from overlap.optim.zero.parameter_groups import check_members, copy_options
from overlap.optim.zero.sharding import Ownership, Shard, flatten
from overlap.optim.zero.state import check_new_state

__all__ = ["LocalOptimizer"]


class LocalOptimizer:
    """An optimizer of the user's class that holds this rank's parts of the parameters, and steps them.

    Args:
        cls: its class.
        groups: of whole parameters.
        defaults: the arguments of ``cls``.
        process_group: the ranks that divide the parameters.
        partition: how, ``"element"`` or ``"parameter"``; ``None`` finds out.
        master_dtype: of copies of narrower parameters.
        meeting: where the ranks meet before their first collective.
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
        meeting: Meeting,
        on_change: Callable[[], None],
    ) -> None:
        self._experiments = Experiments(cls, defaults, master_dtype=master_dtype)
        self.separability = self._experiments.separability_of(groups)
        """How ``cls`` may be stepped."""
        self.partition = choose_partition(cls, self.separability, partition)
        self.ownership = Ownership(process_group, self.partition, master_dtype)
        orthogonalizes = self._experiments.orthogonalizes(groups)
        meeting.come()
        chunks = self.ownership.add(groups, first_group=0, orthogonalizes=orthogonalizes)
        self.optim = make_optimizer(cls, chunks, defaults)
        """The optimizer itself."""
        self._stepper = SubsetStepper(self.optim)
        self.param_groups: list[dict[str, Any]] = []
        """The groups of whole parameters, as the loop sees them; their hyperparameters count."""
        self._on_change = on_change
        self.step_arguments: Mapping[str, Any] = {}
        """Arguments of the optimizer's ``step``."""
        self.steps_together = True
        """Whether all parameters are stepped in one call, and not bucket by bucket."""
        self.publishes = True
        """Whether :meth:`update` writes the parameters; a gather of differences does by itself."""
        self._state_sizes: dict[int, int] = {}

    @property
    def shards(self) -> Mapping[int, Shard]:
        """The shard of each parameter, by ``id`` of the parameter, in the groups' order."""
        return self.ownership.shards

    def check_addition(self, group: dict[str, Any]) -> None:
        """Raises: UnsupportedError: with this group, too, the work cannot be divided as it is."""
        found = self._experiments.separability_of([*self.param_groups, group])
        check_division(type(self.optim), found, self.partition)

    def add(self, group: dict[str, Any]) -> None:
        """Add this rank's parts of the parameters of a group, after the others; call it on every rank."""
        groups = self.param_groups
        (chunks,) = self.ownership.add(
            [group],
            first_group=len(groups),
            orthogonalizes=self._experiments.orthogonalizes([*groups, group])[-1:],
        )
        self.optim.add_param_group(chunks)

    @torch.no_grad()
    def begin(self) -> None:
        """Begin a step: take note of parameters that were moved or changed since the last one.

        Raises:
            ConfigurationError: parameters were put into the groups, or taken out, by hand.
        """
        check_members(self.param_groups, self.shards)
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
        copy_options(self.param_groups, self.optim.param_groups)
        # What step() does once, whatever it steps, is then done on ranks and in groups without a gradient, too.
        is_whole = self.steps_together and self.separability.in_turn.verdict is not Verdict.SEPARABLE
        self._stepper.step(chunks, matching, is_whole=is_whole, **self.step_arguments)
        copy_options(self.optim.param_groups, self.param_groups)
        if self.partition == "element":
            check_new_state(self.optim, shards, self._state_sizes)

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
