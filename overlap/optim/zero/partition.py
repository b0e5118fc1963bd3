"""Which rank owns which elements, and the parameters that a user passes for that, compared over the ranks.

[Note: ownership]

A parameter is cut into one range of elements per rank, in the order of its memory. Ranges depend only on the sizes of
the parameters and on the number of ranks, never on DDP's buckets. So buckets can be rebuilt, and a state that was saved
at one number of ranks can be loaded at another.

By *element*, every rank owns an equal part of every parameter. Ranges start at multiples of 128 bytes: CPU kernels take
two vectors of at most 64 bytes at a time, and what is left at the end of a tensor one element at a time, which rounds
differently in 16-bit types. So each element is treated as it would be in the whole tensor, and results equal those of
the plain optimizer bit for bit. Where a tensor's memory begins makes no difference, since kernels load unaligned
vectors; but threads do, which cut a long tensor anywhere. What does not divide evenly goes to the ranks that own least
so far: over a whole model the totals of the ranks differ by some hundreds of bytes. By *parameter*, one rank owns all
of a parameter; those that cost most to update are given first, each to the rank with the least work so far. An update
costs what it reads and writes, and of matrices that are orthogonalized (see :func:`orthogonalization_flops`) the
arithmetic, which grows faster than the matrix. Parameters that are frozen have no state, so they are balanced by
themselves.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from overlap._checks import as_list, told
from overlap.errors import ArgumentTypeError, ConfigurationError
from overlap.hooks.segments import round_up
from overlap.join.group_collectives import of_all_ranks

__all__ = [
    "ByElement",
    "ByParameter",
    "Extent",
    "Layout",
    "Partition",
    "Piece",
    "Range",
    "check_class",
    "check_covered",
    "check_master_dtype",
    "check_members",
    "check_same_group",
    "check_same_on_all_ranks",
    "copy_options",
    "device_of",
    "is_narrower",
    "names_of",
    "options_of",
    "orthogonalization_flops",
    "orthogonalization_steps",
    "read_groups",
    "with_names",
]

_BLOCK_BYTES = 128
# What a matrix product computes, about, while memory moves a byte of a parameter, its gradient and its state.
_FLOPS_PER_BYTE = 32
# The keys of a group that are not hyperparameters.
_NOT_OPTIONS = ("params", "param_names")

Range = tuple[int, int]


@dataclass(frozen=True)
class Extent:
    """What the division needs to know of a parameter."""

    numel: int
    itemsize: int
    """Bytes per element."""
    is_trained: bool = True
    pool: Hashable = None
    """Parameters of one pool have state of the same size per element, so equal numbers are equal sizes."""
    flops: int = 0
    """Arithmetic of one update beyond reading and writing each element a few times."""

    @property
    def size_bytes(self) -> int:
        return self.numel * self.itemsize

    @property
    def cost(self) -> int:
        """Of one update, in floating-point operations."""
        return self.size_bytes * _FLOPS_PER_BYTE + self.flops

    @property
    def block_numel(self) -> int:
        """Where ranges begin, in elements."""
        return max(1, _BLOCK_BYTES // self.itemsize)

    @property
    def blocks(self) -> int:
        """How many may be given to ranks."""
        return -(-self.numel // self.block_numel)


class Partition(Protocol):
    """Gives ranges to ranks, and remembers what it gave, to keep the ranks even."""

    is_whole: bool
    """Whether a parameter is never cut."""

    def assign(self, extents: Sequence[Extent]) -> list[tuple[Range, ...]]:
        """One range per rank for each parameter."""
        ...


class ByElement:
    """Equal ranges of every parameter."""

    is_whole = False

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._owned: dict[Hashable, list[int]] = {}

    def assign(self, extents: Sequence[Extent]) -> list[tuple[Range, ...]]:
        return [self._cut(extent) for extent in extents]

    def _cut(self, extent: Extent) -> tuple[Range, ...]:
        numel, block_numel = extent.numel, extent.block_numel
        pool = (extent.pool, extent.itemsize, extent.is_trained)
        owned = self._owned.setdefault(pool, [0] * self._ranks)
        each, extra = divmod(extent.blocks, self._ranks)
        ranges: list[Range] = [(numel, numel)] * self._ranks
        start, given = 0, 0
        # The ranks that own least come first, where the larger ranges are.
        for place, rank in enumerate(sorted(range(self._ranks), key=lambda rank: (owned[rank], rank))):
            given += each + (place < extra)
            end = numel if given == extent.blocks else given * block_numel
            ranges[rank] = (start, end)
            owned[rank] += end - start
            start = end
        return tuple(ranges)


class ByParameter:
    """Whole parameters, balanced by what their updates cost and, where that is equal, by size."""

    is_whole = True

    def __init__(self, ranks: int) -> None:
        self._ranks = range(ranks)
        self._owned = {True: [(0, 0)] * ranks, False: [(0, 0)] * ranks}
        """Cost and bytes, of trained parameters and of frozen ones."""

    def assign(self, extents: Sequence[Extent]) -> list[tuple[Range, ...]]:
        ranges: dict[int, tuple[Range, ...]] = {}
        for place in sorted(range(len(extents)), key=lambda place: (-extents[place].cost, place)):
            extent = extents[place]
            owned = self._owned[extent.is_trained]
            owner = min(self._ranks, key=lambda rank: (owned[rank], rank))
            owned[owner] = owned[owner][0] + extent.cost, owned[owner][1] + extent.size_bytes
            ranges[place] = tuple((0, extent.numel) if rank == owner else (0, 0) for rank in self._ranks)
        return [ranges[place] for place in range(len(extents))]


@dataclass(frozen=True)
class Piece:
    """The range of one parameter that one rank owns, never empty."""

    place: int
    """Which parameter, in the layout's order."""
    rank: int
    start: int
    end: int

    @property
    def numel(self) -> int:
        return self.end - self.start


@dataclass(frozen=True)
class Layout:
    """The parameters of a bucket in the two orders that a sharded update needs.

    *Flat*: parameter after parameter, as in DDP's bucket. *Packed*: rank after rank, so that what a rank owns is one
    segment that a collective can send; segments are padded to one length if ``is_even``, a multiple of
    ``segment_multiple`` elements.
    """

    ranges: tuple[tuple[Range, ...] | None, ...]
    """The ranges of each parameter; ``None`` for one that is not sharded, which the packed order leaves out."""
    numels: tuple[int, ...]
    is_even: bool
    segment_multiple: int = 1

    @cached_property
    def ranks(self) -> int:
        return next(len(ranges) for ranges in self.ranges if ranges is not None)

    @cached_property
    def pieces(self) -> tuple[Piece, ...]:
        """All pieces in packed order."""
        return tuple(
            Piece(place, rank, *ranges[rank])
            for rank in range(self.ranks)
            for place, ranges in enumerate(self.ranges)
            if ranges is not None and ranges[rank][0] < ranges[rank][1]
        )

    def part(self, places: slice) -> Layout:
        """The layout of some of the parameters by themselves."""
        return replace(self, ranges=self.ranges[places], numels=self.numels[places])

    def of_rank(self, rank: int) -> slice:
        """Where the pieces of ``rank`` are among :attr:`pieces`."""
        return self.by_rank[rank]

    @cached_property
    def by_rank(self) -> tuple[slice, ...]:
        """:meth:`of_rank`, of each rank."""
        counts = [sum(piece.rank == rank for piece in self.pieces) for rank in range(self.ranks)]
        ends = list(itertools.accumulate(counts))
        return tuple(slice(end - count, end) for end, count in zip(ends, counts, strict=True))

    @cached_property
    def owned_numels(self) -> tuple[int, ...]:
        """How many elements each rank owns."""
        return tuple(sum(piece.numel for piece in self.pieces if piece.rank == rank) for rank in range(self.ranks))

    @cached_property
    def gathered_numels(self) -> tuple[int, ...]:
        """How many elements each rank sends in a gather: as many as the others if ``is_even``."""
        return (max(self.owned_numels),) * self.ranks if self.is_even else self.owned_numels

    @cached_property
    def segment_numels(self) -> tuple[int, ...]:
        """The length of each rank's segment, padding included."""
        multiple = self.segment_multiple if self.is_even else 1
        return tuple(round_up(numel, multiple) for numel in self.gathered_numels)

    def segment(self, rank: int) -> slice:
        """Where the segment of ``rank`` is in a packed buffer."""
        start = sum(self.segment_numels[:rank])
        return slice(start, start + self.segment_numels[rank])

    @cached_property
    def packed_numel(self) -> int:
        return sum(self.segment_numels)

    @cached_property
    def packed_cuts(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The lengths that cut a packed buffer, and the places of the pieces among the cuts, in the pieces' order."""
        lengths: list[int] = []
        chosen: list[int] = []
        for rank in range(self.ranks):
            for piece in self.pieces[self.of_rank(rank)]:
                chosen.append(len(lengths))
                lengths.append(piece.numel)
            lengths.append(self.segment_numels[rank] - sum(p.numel for p in self.pieces[self.of_rank(rank)]))
        return tuple(lengths), tuple(chosen)

    @cached_property
    def flat_cuts(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """As :attr:`packed_cuts`, of a flat buffer."""
        lengths: list[int] = []
        found: dict[tuple[int, int], int] = {}
        for place, (ranges, numel) in enumerate(zip(self.ranges, self.numels, strict=True)):
            if ranges is None:
                lengths.append(numel)
                continue
            for start, end, rank in sorted((start, end, rank) for rank, (start, end) in enumerate(ranges)):
                if start < end:
                    found[place, rank] = len(lengths)
                    lengths.append(end - start)
        return tuple(lengths), tuple(found[piece.place, piece.rank] for piece in self.pieces)


def orthogonalization_steps(options: Mapping[str, Any]) -> int:
    """How many Newton-Schulz steps an optimizer with these options of a group takes for each matrix; 0 for none.

    ``torch.optim.Muon`` and most others of the kind call the option ``ns_steps``.
    """
    steps = options.get("ns_steps", 0)
    return steps if isinstance(steps, int) else 0


def orthogonalization_flops(parameter: Tensor, steps: int) -> int:
    """The arithmetic of ``steps`` Newton-Schulz steps on ``parameter``, as a matrix of its first dimension by the rest.

    Of ``X``, which has ``m`` rows and ``n >= m`` columns, one step multiplies ``A = X X^T``, ``A A`` and ``A X``:
    ``4 m^2 n + 2 m^3`` floating-point operations (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/).

    >>> import torch
    >>> orthogonalization_flops(torch.empty(100, 10), steps=5)
    210000
    """
    if steps == 0 or parameter.dim() < 2 or parameter.numel() == 0:
        return 0
    rows = parameter.shape[0]
    columns = parameter.numel() // rows
    m, n = min(rows, columns), max(rows, columns)
    return steps * (4 * m * m * n + 2 * m**3)


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
        _read_group(place, group)
    if not any(group["params"] for group in groups):
        raise ConfigurationError("params is empty; pass ddp.parameters() (an iterator can be read only once)")
    return groups


def _read_group(place: int, group: dict[str, Any]) -> None:
    if "params" not in group:
        raise ConfigurationError(f"group {place} has no 'params', only {sorted(group)}")
    members = [group["params"]] if isinstance(group["params"], Tensor) else list(group["params"])
    if members and all(isinstance(member, tuple) for member in members):
        group["param_names"] = [name for name, _ in members]
        members = [parameter for _, parameter in members]
    for position, member in enumerate(members):
        if not isinstance(member, Tensor):
            raise ConfigurationError(
                f"parameter {position} of group {place} is a {type(member).__name__}, not a Tensor"
            )
        if not member.is_leaf:
            raise ConfigurationError(
                f"parameter {position} of group {place} is not a leaf, but the result of a computation"
            )
    group["params"] = members


def names_of(groups: Sequence[Mapping[str, Any]], *, first_group: int = 0) -> list[str]:
    """The name of each parameter in messages."""
    names: list[str] = []
    for place, group in enumerate(groups, start=first_group):
        given = group.get("param_names")
        names.extend(
            given[position] if given else f"parameter {position} of group {place}"
            for position in range(len(group["params"]))
        )
    return names


def check_class(optimizer_class: object) -> type[Optimizer]:
    """``optimizer_class`` itself, if it is a subclass of ``Optimizer``.

    Raises:
        ConfigurationError: it is not.
    """
    if isinstance(optimizer_class, Optimizer):
        raise ConfigurationError(
            f"optimizer_class is a class, but got an object: pass torch.optim.{type(optimizer_class).__name__} and its "
            "arguments as keywords"
        )
    if not (isinstance(optimizer_class, type) and issubclass(optimizer_class, Optimizer)):
        raise ConfigurationError(
            f"optimizer_class is a subclass of torch.optim.Optimizer such as torch.optim.AdamW, got "
            f"{told(optimizer_class)}"
        )
    return optimizer_class


def check_master_dtype(master_dtype: object) -> None:
    """Raises: ConfigurationError: it is neither ``None`` nor a floating-point dtype."""
    if master_dtype is not None and not (isinstance(master_dtype, torch.dtype) and master_dtype.is_floating_point):
        raise ConfigurationError(
            f"master_dtype is a floating-point dtype such as torch.float32, got {told(master_dtype)}"
        )


def is_narrower(parameter: Tensor, master_dtype: torch.dtype | None) -> bool:
    """Whether a parameter gets a master in ``master_dtype``."""
    dtype = parameter.dtype
    return master_dtype is not None and dtype.is_floating_point and master_dtype.itemsize > dtype.itemsize


def check_same_on_all_ranks(
    groups: Sequence[Mapping[str, Any]], names: Sequence[str], group: dist.ProcessGroup, settings: tuple[Any, ...]
) -> None:
    """Compare the parameters, and how they are sharded, with those of rank 0.

    Communication: one gather of a few bytes per parameter.

    Raises:
        ConfigurationError: they differ; raised on every rank, with the rank and the first parameter that differs.
    """
    mine = [
        (name, place, tuple(p.shape), p.stride(), str(p.dtype), p.requires_grad)
        for name, (place, p) in zip(
            names, ((place, p) for place, one in enumerate(groups) for p in one["params"]), strict=True
        )
    ]
    everyone = of_all_ranks((settings, mine), group)
    for rank, (other_settings, theirs) in enumerate(everyone):
        if other_settings != everyone[0][0]:
            raise ConfigurationError(f"rank {rank} shards with {other_settings}, but rank 0 with {everyone[0][0]}")
        if theirs == everyone[0][1]:
            continue
        reference = everyone[0][1]
        place = next(
            (place for place, pair in enumerate(zip(theirs, reference, strict=False)) if pair[0] != pair[1]),
            min(len(theirs), len(reference)),
        )
        raise ConfigurationError(
            f"ranks have different parameters: {_told(theirs, place)} on rank {rank}, "
            f"{_told(reference, place)} on rank 0"
        )


def check_covered(model: Mapping[Tensor, str], parameters: Sequence[Tensor], names: Sequence[str]) -> None:
    """Raises: ConfigurationError: one of ``parameters`` requires a gradient, but is not in ``model``."""
    outside = [
        name
        for name, parameter in zip(names, parameters, strict=True)
        if parameter.requires_grad and parameter not in model
    ]
    if outside:
        raise ConfigurationError(
            f"{len(outside)} of {len(parameters)} parameters of the ZeroRedundancyOptimizer are not trained by "
            f"this model, the first is {outside[0]}: build it from this model's ddp.parameters()"
        )


def check_members(groups: Sequence[Mapping[str, Any]], known: Collection[int]) -> None:
    """Raises: ConfigurationError: ``groups`` do not have the parameters that are ``known``, by ``id``."""
    if {id(parameter) for group in groups for parameter in group["params"]} != set(known):
        raise ConfigurationError(
            "parameters were put into zero.param_groups, or taken out of it, by hand, and each rank holds the state of "
            "its part of those that it knows: add with zero.add_param_group, and freeze with requires_grad_(False)"
        )


def check_same_group(model: dist.ProcessGroup, zero: dist.ProcessGroup) -> None:
    """Raises: ConfigurationError: the two groups have different ranks."""
    theirs, ours = dist.get_process_group_ranks(model), dist.get_process_group_ranks(zero)
    if theirs != ours:
        raise ConfigurationError(
            f"the model is on ranks {theirs}, but the ZeroRedundancyOptimizer on ranks {ours}: give both the same "
            "process_group"
        )


def _told(described: Sequence[tuple[Any, ...]], place: int) -> str:
    if place >= len(described):
        return f"only {len(described)} parameters"
    name, group, shape, strides, dtype, requires_grad = described[place]
    return f"{name} (group {group}) is {shape} {dtype} of strides {strides}{'' if requires_grad else ', frozen'}"


def copy_options(sources: Sequence[Mapping[str, Any]], targets: Sequence[dict[str, Any]]) -> None:
    """Copy the hyperparameters of each group to its counterpart."""
    for source, target in zip(sources, targets, strict=True):
        target.update(options_of(source))


def options_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """The hyperparameters of a group."""
    return {key: value for key, value in group.items() if key not in _NOT_OPTIONS}


def device_of(parameters: Sequence[Tensor]) -> torch.device:
    """The device of all parameters.

    Raises:
        ConfigurationError: they are on more than one device.
    """
    devices = {parameter.device for parameter in parameters}
    if len(devices) > 1:
        raise ConfigurationError(
            f"the parameters are on several devices, {sorted(map(str, devices))}; ZeRO needs all on one device"
        )
    return devices.pop()


def with_names(group: dict[str, Any]) -> dict[str, Any]:
    """A group in the form that ``torch.optim`` takes for named parameters."""
    if "param_names" not in group:
        return group
    others = {key: value for key, value in group.items() if key != "param_names"}
    return {**others, "params": list(zip(group["param_names"], group["params"], strict=True))}
