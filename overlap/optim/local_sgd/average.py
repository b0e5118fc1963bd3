"""Averaging tensors over ranks, in place.

A large tensor that is contiguous in memory is averaged where it is, in slices; the others are packed together into flat
buffers, averaged there, and copied back. Two such parts are in flight at a time, so that one packs or unpacks while the
other is being sent. So the memory needed beside the model is two buffers of a few megabytes, whatever the model's size.
Parameters keep their storage.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from overlap._checks import as_list, described
from overlap._torch.foreach import copy_all
from overlap.errors import ConfigurationError
from overlap.hooks import all_reduce
from overlap.hooks.engine.background import Item, run_now
from overlap.hooks.engine.executors import executor_for

__all__ = [
    "Packed",
    "Part",
    "Slice",
    "Weight",
    "average_parts",
    "into_parts",
    "pack",
    "pack_named",
    "tensors_of",
    "wider",
]

# About so much is packed together for one collective.
_PACKED_BYTES = 8 * 2**20
# A collective costs about as much as copying a megabyte twice: smaller tensors are packed.
_IN_PLACE_BYTES = 2**20
_SLICE_BYTES = 64 * 2**20


@dataclass(frozen=True)
class Slice:
    """A piece of one tensor, averaged where it is."""

    flat: Tensor

    def load(self) -> Tensor:
        """What to average, shape ``(numel,)``."""
        return self.flat

    def store(self, mean: Tensor) -> None:
        """Nothing to do: the mean is there already."""


@dataclass(frozen=True)
class Packed:
    """Tensors of one dtype that are averaged together, in ``dtype``."""

    tensors: tuple[Tensor, ...]
    dtype: torch.dtype

    @property
    def numel(self) -> int:
        return sum(tensor.numel() for tensor in self.tensors)

    def empty(self) -> Tensor:
        """A new flat tensor for all of them, shape ``(numel,)``."""
        return torch.empty(self.numel, dtype=self.dtype, device=self.tensors[0].device)

    def load(self, *, into: Tensor | None = None) -> Tensor:
        """A copy of all of them, shape ``(numel,)``."""
        flat = self.empty() if into is None else into
        copy_all(self.views(flat), self.tensors)
        return flat

    def views(self, flat: Tensor) -> list[Tensor]:
        """Views of ``flat``, one per tensor, with its shape."""
        pieces = flat.split([tensor.numel() for tensor in self.tensors])
        return [piece.view(tensor.shape) for piece, tensor in zip(pieces, self.tensors, strict=True)]

    def store(self, mean: Tensor) -> None:
        """Copy the mean, shape ``(numel,)``, into the tensors."""
        copy_all(self.tensors, self.views(mean))


Part = Slice | Packed


def into_parts(tensors: Iterable[Tensor], *, dtype: torch.dtype | None = None) -> list[Part]:
    """Cut and pack ``tensors`` into parts, one per collective; the same on every rank that gives the same tensors.

    Integers are left out, and a tensor that is given twice is taken once. Tensors are averaged in ``dtype`` where it is
    wider than their own.
    """
    parts: list[Part] = []
    small: list[Tensor] = []
    for tensor in map(_real, {id(tensor): tensor for tensor in tensors}.values()):
        is_averaged_in_place = tensor.is_contiguous() and wider(tensor.dtype, dtype) == tensor.dtype
        if tensor.nbytes >= _IN_PLACE_BYTES and is_averaged_in_place and tensor.is_floating_point():
            parts.extend(Slice(piece) for piece in tensor.view(-1).split(_SLICE_BYTES // tensor.element_size()))
        else:
            small.append(tensor)
    # Packed ones first: they are copied back while others are sent, and not when there is nothing left to send.
    return [*(part for _, part in pack(small, dtype=dtype)), *parts]


def pack(tensors: Iterable[Tensor], *, dtype: torch.dtype | None = None) -> list[tuple[list[Tensor], Packed]]:
    """Pack all of ``tensors``, large ones too; returns the packed tensors with each pack. Integers are left out."""
    full: list[list[Tensor]] = []
    open_ones: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for tensor in tensors:
        if not (tensor.is_floating_point() or tensor.is_complex()) or not tensor.numel():
            continue
        members = open_ones.setdefault((tensor.dtype, tensor.device), [])
        members.append(tensor)
        if sum(member.nbytes for member in members) >= _PACKED_BYTES:
            full.append(open_ones.pop((tensor.dtype, tensor.device)))
    packed = [(members, tuple(map(_real, members))) for members in [*full, *open_ones.values()]]
    return [(members, Packed(real, wider(real[0].dtype, dtype))) for members, real in packed]


def pack_named(tensors: Mapping[str, Tensor], *, dtype: torch.dtype | None = None) -> list[tuple[list[str], Packed]]:
    """As :func:`pack`, with the names of the tensors in each pack."""
    names = {id(tensor): name for name, tensor in tensors.items()}
    return [([names[id(member)] for member in members], part) for members, part in pack(tensors.values(), dtype=dtype)]


def wider(own: torch.dtype, asked: torch.dtype | None) -> torch.dtype:
    """``asked`` where it is wider than ``own``, else ``own``."""
    return own if asked is None or asked.itemsize <= own.itemsize else asked


def _real(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor.detach()


@dataclass(frozen=True)
class Weight:
    """How much this rank counts for in a mean: ``own`` of ``total``, the sum over all ranks."""

    own: int
    total: int

    def scale_(self, flat: Tensor) -> None:
        """Scale this rank's tensor in place, so that the sum over ranks is the mean."""
        if self.own == 0:
            flat.zero_()  # Multiplying infinities by 0 would give NaN.
        elif self.own == 1:
            flat.div_(self.total)
        else:
            flat.mul_(self.own / self.total)


@dataclass(frozen=True, eq=False, kw_only=True)
class _PartItem(Item):
    part: Part


@torch.no_grad()
def average_parts(parts: Sequence[Part], group: dist.ProcessGroup, *, weight: Weight | None = None) -> None:
    """Average ``parts`` over ``group``, in place; returns when the current stream may use them.

    Ranks count alike where ``weight`` is ``None``.

    Issues: one all-reduce per part on ``group``.
    """
    taken = weight or Weight(1, group.size())
    by_device: dict[torch.device, list[Part]] = {}
    for part in parts:
        tensor = part.flat if isinstance(part, Slice) else part.tensors[0]
        by_device.setdefault(tensor.device, []).append(part)

    async def work(item: _PartItem) -> None:
        flat = item.part.load()
        taken.scale_(flat)
        await all_reduce(flat, group=group)
        item.part.store(flat)

    for device, mine in by_device.items():
        items = [_PartItem(index=place, part=part) for place, part in enumerate(mine)]
        run_now(items, work, executor_for(group, device))


def tensors_of(params: Iterable[Tensor] | Iterable[dict[str, Tensor]]) -> list[Tensor]:
    """The parameters in ``params``, which holds parameters or an optimizer's ``param_groups``.

    Raises:
        ConfigurationError: ``params`` holds something else.
    """
    if isinstance(params, Optimizer):
        raise ConfigurationError(
            "averaging takes parameters or groups of them, got an optimizer: give its param_groups"
        )
    given: list[Any] | None = [params] if isinstance(params, Tensor) else as_list(params)
    if isinstance(params, nn.Module) or given is None:
        raise ConfigurationError(f"averaging takes parameters, got {described(params)}; give model.parameters()")
    if not given and isinstance(params, Iterator):
        raise ConfigurationError(
            "averaging was given an iterator that has nothing left: it can be read only once, so call "
            "model.parameters() each time"
        )
    found: list[Tensor] = []
    for entry in given:
        if isinstance(entry, Tensor):
            found.append(entry)
        elif isinstance(entry, Mapping) and "params" in entry:
            found.extend(entry["params"])
        else:
            raise ConfigurationError(
                f"averaging takes parameters or an optimizer's param_groups, but was given {type(entry).__name__}"
            )
    return found
