"""Averages tensors over ranks, in place; local SGD and the averagers have this one path.

**In full precision** a large tensor that is contiguous in memory is averaged where it is; the others are packed
together into flat buffers, averaged there, and copied back. Two such parts are in flight at a time, so that one packs
or unpacks while the other is being sent. So the memory needed beside the model is two buffers of a few megabytes,
whatever the model's size. Tensors keep their storage.

**Through a wire** travels the change since a beginning that all ranks had in common, the anchor::

    mean = anchor + mean over ranks of decoded (change + errors that earlier averages left out)

The mean is the same on all ranks, bit for bit, and is the next anchor. A wire rounds relative to the largest values of
a chunk, and changes are much smaller than parameters.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from overlap._torch.device import hold
from overlap._torch.foreach import all_finite, copy_all
from overlap.hooks import StageContext, all_reduce
from overlap.hooks.engine.executors import executor_for
from overlap.hooks.engine.wavefront import BackgroundTask, Completion, run_now
from overlap.hooks.wires import QuantizedSum, StageMemory, Wire

# About so much is packed together for one collective.
_PACKED_BYTES = 8 * 2**20
# A collective costs about as much as copying a megabyte twice: smaller tensors are packed.
_IN_PLACE_BYTES = 2**20


@dataclass
class Running:
    """An average that may still be under way."""

    wire: WiredMean | None = None
    completions: dict[BackgroundTask, Completion] = field(default_factory=dict)
    are_finite: list[Tensor] = field(default_factory=list)
    """Of each mean through the wire."""

    def wait(self) -> None:
        """Wait until the means are there; the current stream may use them. Raises the error of one that failed."""
        for completion in self.completions.values():
            completion.wait()
        if self.wire is not None and self.are_finite:
            self.wire.memory.discard(~torch.stack([hold(one) for one in self.are_finite]).all())
            self.wire.memory.commit()
            self.are_finite.clear()


@torch.no_grad()
def average(
    tensors: Mapping[str, Tensor],
    group: dist.ProcessGroup,
    weight: tuple[int, int] | None = None,
    *,
    widens: bool = False,
    wire: WiredMean | None = None,
    context: StageContext | None = None,
) -> Running:
    """Replace ``tensors`` by their means over the ranks of ``group``, in place; the same tensors on every rank.

    Integers are left as they are. Tensors must not be used before :meth:`Running.wait` has returned.

    Args:
        tensors: by name.
        group: all of its ranks call this.
        weight: this rank counts for the first number, all together for the second; alike where ``None``.
        widens: sum half precision in fp32.
        wire: carries those of ``tensors`` that it has an anchor of; the others are averaged in full precision.
        context: average in the background, on the connections of this registration; where ``None``, on
            ``group`` itself, before this returns.

    Communication, for about each 8 MB, or for a slice of a large tensor: one all-reduce, or a sum through the wire.
    """
    weight = weight or (1, group.size())
    by_device: dict[torch.device, list[_Part]] = {}
    for part in _into_parts(tensors, widens=widens, wired=() if wire is None else wire.anchors):
        by_device.setdefault(part.device, []).append(part)
    running = Running(wire)
    if wire is not None:
        wire.memory.discard()  # Of an average that has failed.
        wire.memory.begin()

    async def work(part: _Part) -> None:
        tensors = list(part.members.values())
        for tensor in tensors:
            hold(tensor)  # The average may be dropped before it is there.
        flat = tensors[0].view(-1) if part.is_in_place else _packed(tensors, part.dtype)
        if wire is not None and part.is_wired:
            await wire.mean(flat, part.members, group, weight, running.are_finite)
        else:
            _scale_(flat, weight)
            await all_reduce(flat, group=group)
        if not part.is_in_place:
            copy_all(tensors, _views(flat, tensors))

    for device, parts in by_device.items():
        if context is None or context.background is None or context.device != device:
            run_now(parts, work, executor_for(group, device))
        else:
            running.completions.update(context.background(parts, work))
    return running


@dataclass(frozen=True, eq=False, kw_only=True)
class _Part(BackgroundTask):
    """Tensors of one dtype that travel together, or one that is averaged where it is."""

    members: dict[str, Tensor]
    """By name."""
    device: torch.device
    dtype: torch.dtype
    """In which they are summed."""
    is_wired: bool
    is_in_place: bool


def _into_parts(tensors: Mapping[str, Tensor], *, widens: bool, wired: Collection[str]) -> list[_Part]:
    """Pack ``tensors`` into parts, the same on every rank; those in ``wired`` apart from the others."""
    # Packed ones first: they are copied back while others are sent, and not when there is nothing left to send.
    packed: list[dict[str, Tensor]] = []
    in_place: list[dict[str, Tensor]] = []
    open_packs: dict[tuple[torch.dtype, torch.device, bool], dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
        if not real.is_floating_point() or not real.numel():
            continue
        is_summed_as_it_is = name not in wired and (not widens or wider(real.dtype) == real.dtype)
        if is_summed_as_it_is and real.is_contiguous() and real.nbytes >= _IN_PLACE_BYTES:
            in_place.append({name: real})
            continue
        key = real.dtype, real.device, name in wired
        if key not in open_packs:
            packed.append(open_packs.setdefault(key, {}))
        open_packs[key][name] = real
        if sum(each.nbytes for each in open_packs[key].values()) >= _PACKED_BYTES:
            del open_packs[key]
    parts: list[_Part] = []
    for members in [*packed, *in_place]:
        name, tensor = next(iter(members.items()))
        parts.append(
            _Part(
                index=len(parts),
                members=members,
                device=tensor.device,
                dtype=wider(tensor.dtype) if widens else tensor.dtype,
                is_wired=name in wired,
                is_in_place=len(parts) >= len(packed),
            )
        )
    return parts


def _scale_(flat: Tensor, weight: tuple[int, int]) -> None:
    """Scale this rank's tensor in place, so that the sum over ranks is the mean."""
    own, total = weight
    if own == 0:
        flat.zero_()  # Multiplying infinities by 0 would give NaN.
    elif own == 1:
        flat.div_(total)
    else:
        flat.mul_(own / total)


def wider(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which averages of ``dtype`` are kept: at least fp32."""
    return torch.promote_types(dtype, torch.float32)


def _packed(tensors: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    flat = torch.empty(sum(tensor.numel() for tensor in tensors), dtype=dtype, device=tensors[0].device)
    copy_all(_views(flat, tensors), tensors)
    return flat


def _views(flat: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Views of ``flat``, one per tensor of ``like``, with its shape."""
    pieces = flat.split([tensor.numel() for tensor in like])
    return [piece.view(tensor.shape) for piece, tensor in zip(pieces, like, strict=True)]


class WiredMean:
    """The mean over ranks through a wire, as changes since anchors.

    Args:
        wire: how changes travel.
        anchors: the values that all ranks had in common, by name.
        error_feedback: add the errors of one mean to the next. Takes an fp32 copy of the tensors.
        owner: named in messages about saved errors.
    """

    def __init__(self, wire: Wire, anchors: Mapping[str, Tensor], *, error_feedback: bool, owner: object) -> None:
        self.wire = wire
        self.anchors = anchors
        self.memory = StageMemory(owner, error_feedback=error_feedback, wire=wire)
        """This rank's rounding errors and random numbers, whose step is an average."""

    async def mean(
        self,
        flat: Tensor,
        members: Mapping[str, Tensor],
        group: dist.ProcessGroup,
        weight: tuple[int, int],
        are_finite: list[Tensor],
    ) -> None:
        """Replace ``flat``, this rank's values of ``members`` packed, by their mean, and note whether it is finite. One
        rank alone rounds nothing."""
        memory = self.memory
        if group.size() == 1 and not memory.values():
            return
        # Differences of half-precision numbers are taken in fp32.
        names = list(members)
        anchor = _packed([self.anchors[name] for name in names], wider(flat.dtype))
        change = (flat - anchor).float()
        _scale_(change, weight)
        views = _views(change, list(members.values()))
        memory.add_errors(names, views)
        total = torch.empty_like(change)
        generator = memory.generator.for_rank(group.rank(), flat.device)
        await QuantizedSum(change.numel(), wire=self.wire, generator=generator, group=group)(change, out=total)
        if memory.has_feedback:
            memory.put(names, views)
        are_finite.append(all_finite(total))
        flat.copy_(anchor.add_(total))
