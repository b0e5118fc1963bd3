"""Which rank owns which elements, and the groups of parameters that a user passes, compared over the ranks.

[Note: ownership]

A parameter is cut into one range of elements per rank, in the order of its memory. Ranges depend only on the sizes of
the parameters and on the number of ranks, never on DDP's buckets, which can be rebuilt.

By *element*, every rank owns an equal part of every parameter. Ranges start at multiples of 128 bytes: CPU kernels take
two vectors of at most 64 bytes at a time, and the rest at the end of a tensor one element at a time, which rounds
differently in 16-bit types. So each element is treated as it would be in the whole tensor, and results equal those of
the plain optimizer bit for bit (with one thread: several cut a long tensor anywhere). The rest goes to the ranks that
own least so far. By *parameter*, one rank owns all of a parameter; the largest are given first, each to the rank that
owns least so far. Frozen parameters have no state, so they are balanced by themselves.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor

from overlap._checks import as_list
from overlap.errors import ArgumentTypeError, ConfigurationError
from overlap.ranks.board import of_all_ranks

__all__ = [
    "Extent",
    "Partition",
    "Range",
    "check_same_on_all_ranks",
    "copy_options",
    "names_of",
    "options_of",
    "read_groups",
    "with_names",
]

_BLOCK_BYTES = 128
# The keys of a group that are not hyperparameters.
_NOT_OPTIONS = ("params", "param_names")

Range = tuple[int, int]


class Extent(NamedTuple):
    """The size of a parameter."""

    numel: int
    itemsize: int
    """Bytes per element."""
    pool: Hashable = None
    """Parameters of one pool are balanced among themselves: their state has the same size per element."""


class Partition:
    """Assigns elements to ``ranks`` by ``unit``, ``"element"`` or ``"parameter"``. See [Note: ownership]."""

    def __init__(self, unit: str, ranks: int) -> None:
        self.is_whole = unit == "parameter"
        """Whether a parameter is never cut."""
        self._ranks = range(ranks)
        # Bytes that each rank owns, by pool.
        self._owned: defaultdict[Hashable, list[int]] = defaultdict(lambda: [0] * ranks)

    def assign(self, extents: Sequence[Extent]) -> list[tuple[Range, ...]]:
        """One range per rank for each parameter."""
        places = range(len(extents))
        if not self.is_whole:
            return [self._cut(extents[place]) for place in places]
        largest_first = sorted(places, key=lambda place: -extents[place].numel * extents[place].itemsize)
        ranges = {place: self._give(extents[place]) for place in largest_first}
        return [ranges[place] for place in places]

    def _give(self, extent: Extent) -> tuple[Range, ...]:
        owned = self._owned[extent.pool]
        owner = min(self._ranks, key=lambda rank: (owned[rank], rank))
        owned[owner] += extent.numel * extent.itemsize
        return tuple((0, extent.numel) if rank == owner else (0, 0) for rank in self._ranks)

    def _cut(self, extent: Extent) -> tuple[Range, ...]:
        numel, block_numel = extent.numel, max(1, _BLOCK_BYTES // extent.itemsize)
        blocks = -(-numel // block_numel)
        owned = self._owned[extent.pool]
        each, extra = divmod(blocks, len(self._ranks))
        ranges: list[Range] = [(numel, numel)] * len(self._ranks)
        start, given = 0, 0
        # The ranks that own least come first, where the larger ranges are.
        for place, rank in enumerate(sorted(self._ranks, key=lambda rank: (owned[rank], rank))):
            given += each + (place < extra)
            end = numel if given == blocks else given * block_numel
            ranges[rank] = (start, end)
            owned[rank] += (end - start) * extent.itemsize
            start = end
        return tuple(ranges)


def read_groups(params: Any) -> list[dict[str, Any]]:
    """Groups with lists of parameters, from anything that an optimizer takes; named parameters give ``param_names``.

    Raises:
        ConfigurationError: there are no parameters, or something is not a parameter.
    """
    if (given := as_list(params)) is None:
        raise ArgumentTypeError(
            f"params is an iterable of parameters or of groups, got {type(params).__name__}; "
            "pass ddp.parameters(), or [parameter]"
        )
    groups = [dict(group) for group in given] if given and isinstance(given[0], Mapping) else [{"params": given}]
    for place, group in enumerate(groups):
        if "params" not in group:
            raise ConfigurationError(f"group {place} has no 'params', only {sorted(group)}")
        members = [group["params"]] if isinstance(group["params"], Tensor) else list(group["params"])
        if members and all(isinstance(member, tuple) for member in members):
            group["param_names"], members = (list(each) for each in zip(*members, strict=True))
        for position, member in enumerate(members):
            if not isinstance(member, Tensor) or not member.is_leaf:
                kind = "not a leaf, but the result of a computation"
                if not isinstance(member, Tensor):
                    kind = f"a {type(member).__name__}, not a Tensor"
                raise ConfigurationError(f"parameter {position} of group {place} is {kind}")
        group["params"] = members
    if not any(group["params"] for group in groups):
        raise ConfigurationError("params is empty; pass ddp.parameters() (an iterator can be read only once)")
    return groups


def names_of(groups: Sequence[Mapping[str, Any]], *, first_group: int = 0) -> list[str]:
    """The name of each parameter in messages."""
    names: list[str] = []
    for place, group in enumerate(groups, start=first_group):
        given = group.get("param_names")
        names.extend(given or (f"parameter {position} of group {place}" for position in range(len(group["params"]))))
    return names


def with_names(group: dict[str, Any]) -> dict[str, Any]:
    """A group in the form that ``torch.optim`` takes for named parameters."""
    if "param_names" not in group:
        return group
    others = {key: value for key, value in group.items() if key != "param_names"}
    return {**others, "params": list(zip(group["param_names"], group["params"], strict=True))}


def options_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """The hyperparameters of a group."""
    return {key: value for key, value in group.items() if key not in _NOT_OPTIONS}


def copy_options(sources: Sequence[Mapping[str, Any]], targets: Sequence[dict[str, Any]]) -> None:
    """Copy the hyperparameters of each group to its counterpart."""
    for source, target in zip(sources, targets, strict=True):
        target.update(options_of(source))


def check_same_on_all_ranks(
    groups: Sequence[Mapping[str, Any]], names: Sequence[str], group: dist.ProcessGroup, settings: str
) -> None:
    """Compare the parameters, and the ``settings`` by which they are sharded, with those of rank 0.

    Communication: one gather of a few bytes per parameter.

    Raises:
        ConfigurationError: they differ; raised on every rank, with the rank and the first parameter that differs.
    """
    pairs = [(place, p) for place, one in enumerate(groups) for p in one["params"]]
    mine = [
        f"{name} (group {place}) is {tuple(p.shape)} {p.dtype} of strides {p.stride()}"
        f"{'' if p.requires_grad else ', frozen'}"
        for name, (place, p) in zip(names, pairs, strict=True)
    ]
    everyone = of_all_ranks([settings, *mine], group)
    for rank, theirs in enumerate(everyone):
        for there, here in itertools.zip_longest(theirs, everyone[0], fillvalue="no further parameter"):
            if there != here:
                raise ConfigurationError(
                    f"ranks have different parameters or options: {there} on rank {rank}, {here} on rank 0"
                )
