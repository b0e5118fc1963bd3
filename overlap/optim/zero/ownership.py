"""The shards of all parameters of an optimizer."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from overlap.errors import ConfigurationError, UnsupportedError
from overlap.optim.zero.groups import check_same_on_all_ranks, device_of, names_of, pool_of
from overlap.optim.zero.partition import ByElement, ByParameter, Partition
from overlap.optim.zero.shards import Shard

__all__ = ["Ownership"]

# Optimizers that look at a tensor as a whole: its rows and columns, or its norm.
_NEED_WHOLE_TENSORS = ("Adafactor", "Muon", "LBFGS")


class Ownership:
    """Gives out parameters to the ranks of a group, as groups of them come. See [Note: ownership].

    Raises:
        ConfigurationError: ``partition`` or ``master_dtype`` is none.
        UnsupportedError: the optimizer needs whole tensors, and ``partition`` cuts them.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        cls: type[Optimizer],
        partition: str,
        master_dtype: torch.dtype | None,
    ) -> None:
        if partition not in ("element", "parameter"):
            raise ConfigurationError(f"partition is 'element' or 'parameter', got {partition!r}")
        if partition == "element" and any(base.__name__ in _NEED_WHOLE_TENSORS for base in cls.__mro__):
            raise UnsupportedError(f"{cls.__name__} needs whole tensors: use partition='parameter'")
        if master_dtype is not None and not (isinstance(master_dtype, torch.dtype) and master_dtype.is_floating_point):
            raise ConfigurationError(
                f"master_dtype is a floating-point dtype such as torch.float32, got {master_dtype!r}"
            )
        self.shards: dict[int, Shard] = {}
        """The shard of each parameter, by ``id`` of the parameter, in the groups' order."""
        self._group = group
        self._settings = (partition, str(master_dtype))
        self._master_dtype = master_dtype
        ranks = group.size()
        self._partition: Partition = ByParameter(ranks) if partition == "parameter" else ByElement(ranks)

    def add(self, groups: list[dict[str, Any]], *, first_group: int) -> list[dict[str, Any]]:
        """Make the shards of new groups; returns the groups of chunks for this rank's optimizer.

        Raises:
            ConfigurationError: a parameter comes twice, or ranks have different ones.
            UnsupportedError: a parameter cannot be cut.
        """
        names = names_of(groups, first_group=first_group)
        pairs = [(place, p) for place, group in enumerate(groups, start=first_group) for p in group["params"]]
        known = {key: shard.name for key, shard in self.shards.items()}
        for name, (_, parameter) in zip(names, pairs, strict=True):
            if id(parameter) in known:
                raise ConfigurationError(f"{name} is {known[id(parameter)]} once more; pass each parameter once")
            known[id(parameter)] = name
        device_of([*(shard.parameter for shard in self.shards.values()), *(parameter for _, parameter in pairs)])
        check_same_on_all_ranks(groups, names, self._group, self._settings)
        ranges = self._partition.assign([p.numel() for _, p in pairs], [pool_of(place, p) for place, p in pairs])
        made = [
            Shard(
                parameter,
                owned,
                self._group.rank(),
                name=name,
                is_whole=self._partition.is_whole,
                master_dtype=self._master_dtype,
            )
            for name, (_, parameter), owned in zip(names, pairs, ranges, strict=True)
        ]
        self.shards.update((id(shard.parameter), shard) for shard in made)
        return [self._chunks(group) for group in groups]

    def _chunks(self, group: dict[str, Any]) -> dict[str, Any]:
        others = {key: value for key, value in group.items() if key != "param_names"}
        return {
            **others,
            "params": [own for p in group["params"] if (own := self.shards[id(p)].own) is not None],
        }

    @property
    def device(self) -> torch.device:
        """The parameters' device."""
        return device_of([shard.parameter for shard in self.shards.values()])
