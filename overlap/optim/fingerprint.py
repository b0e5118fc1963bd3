"""A number that shows whether the values of a tensor have changed.

[Note: edits by value]

An edit of a gradient that was applied would be lost, so it is an error; but a call that leaves every value as it was,
such as ``clip_grad_norm_`` with a limit that does not bind, is not an edit. A version counter tells neither: it counts
calls, several gradients share one where ``.grad`` is a view of DDP's bucket, and ``.data`` and collectives leave it as
it is. So beside the counter the sum of a gradient's memory, taken as 64-bit integers, is noted when backward is over.

Where a counter has moved, the sum is compared. Where none has, it is compared in the first passes after registration
and in a few later ones: a loop that edits through ``.data`` does so from its first step on.

The sum wraps. Scaling is always seen: it adds a multiple of a power of two far below 2**64 for each pair of elements. A
changed sign adds or takes the same, so the sum of a small tensor, in which as many may have been positive as negative,
weighs each element by its place; in one large tensor in hundreds a change of all signs, and in all large ones a
permutation, is not seen. On an accelerator nothing waits for the sum: the verdict is read at a later step.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from functools import cache, lru_cache
from typing import Any

import torch
from torch import Tensor

from overlap._torch.device import current_stream, to_device
from overlap._torch.foreach import flattened

__all__ = ["fingerprint", "fingerprints", "is_sampled", "prepare_fingerprints"]

_FIRST_SAMPLES = 16
_SAMPLE_EVERY = 64

_WORD_BYTES = 8
_SMALL = 8192
_TINY = 2048
# Of ways in which tiny tensors follow each other; each is 8 bytes an element. A loop has a few, or always others.
_SEGMENTS_KEPT = 8
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int32}


def is_sampled(passes: int) -> bool:
    """Whether in this pass, counted from 1, values are compared even where no version has moved."""
    return passes <= _FIRST_SAMPLES or passes % _SAMPLE_EVERY == 0


def prepare_fingerprints(device: torch.device) -> None:
    """Copy to ``device`` what :func:`fingerprint` needs there, for which the host waits once."""
    _weights(device)


@torch.no_grad()
def fingerprint(tensor: Tensor) -> Tensor:
    """The wrapping sum of the memory of ``tensor`` as integers: an ``int64`` scalar on its device."""
    elements = _in_memory_order(tensor.detach())
    integers = elements.view(_INTEGERS[elements.element_size()])
    if integers.numel() <= _SMALL:
        return (integers * _weights(integers.device)[: integers.numel()]).sum()
    if elements.element_size() == _WORD_BYTES:
        return integers.sum(dtype=torch.int64)  # Slower, but of whole words the sum wraps where signs are changed.
    per_word = _WORD_BYTES // elements.element_size()
    if integers.storage_offset() % per_word:
        integers = integers.clone()  # A view as longer integers must begin at a multiple of their length.
    end = integers.numel() // per_word * per_word
    return integers[:end].view(torch.int64).sum() + integers[end:].sum(dtype=torch.int64)


@torch.no_grad()
def fingerprints(tensors: Sequence[Tensor]) -> list[Tensor]:
    """:func:`fingerprint` of each of ``tensors``; those of tiny ones take a few operations for all of them."""
    if _are_tiny_and_alike(tensors):
        lengths = tuple(map(Tensor.numel, tensors))
        return list(_of_segments(flattened(tensors), lengths))
    found = [torch.Tensor()] * len(tensors)
    tiny: defaultdict[tuple[torch.device, torch.dtype], list[int]] = defaultdict(list)
    for place, tensor in enumerate(tensors):
        if 0 < tensor.numel() <= _TINY and not tensor.is_complex():
            tiny[tensor.device, tensor.dtype].append(place)
        else:
            found[place] = fingerprint(tensor)
    for places in tiny.values():
        elements = [_in_memory_order(tensors[place].detach()) for place in places]
        values = _of_segments(flattened(elements), tuple(each.numel() for each in elements))
        for place, value in zip(places, values, strict=True):
            found[place] = value
    return found


def _are_tiny_and_alike(tensors: Sequence[Tensor]) -> bool:
    """Whether all are tiny and contiguous, of one dtype and device."""
    if not tensors or tensors[0].is_complex():
        return False
    kinds = {(tensor.dtype, tensor.device) for tensor in tensors}
    numels = list(map(Tensor.numel, tensors))
    return len(kinds) == 1 and min(numels) > 0 and max(numels) <= _TINY and all(map(Tensor.is_contiguous, tensors))


def _of_segments(elements: Tensor, numels: tuple[int, ...]) -> tuple[Tensor, ...]:
    """The fingerprint of each of the tensors, of so many elements, that follow each other in ``elements``."""
    integers = elements.view(_INTEGERS[elements.element_size()])
    lengths = tuple(numel * max(1, elements.element_size() // 4) for numel in numels)
    weights, ends = _segments(lengths, elements.device, current_stream(elements.device))
    # The sums wrap, and so do their differences.
    sums = (integers * weights).cumsum(0)[ends]
    sums[1:] -= sums[:-1].clone()
    return sums.unbind()


@lru_cache(maxsize=_SEGMENTS_KEPT)
def _segments(lengths: tuple[int, ...], device: torch.device, stream: Any) -> tuple[Tensor, Tensor]:
    """The weights of segments that follow each other, and the place of the last element of each; for one stream."""
    weights = torch.cat([_weights(device)[:length] for length in lengths])
    return weights, to_device(torch.tensor(lengths, device="cpu").cumsum(0).sub_(1), device)


@cache
def _weights(device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(1, 2**30, (_SMALL,), generator=generator, device="cpu").to(device)


def _in_memory_order(tensor: Tensor) -> Tensor:
    """The elements of ``tensor``, 1-D: a view where its memory is dense in a usual layout, else a copy."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    if tensor.is_contiguous():
        return tensor.view(-1)
    if tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last):
        return tensor.permute(0, 2, 3, 1).view(-1)
    if tensor.dim() == 5 and tensor.is_contiguous(memory_format=torch.channels_last_3d):
        return tensor.permute(0, 2, 3, 4, 1).view(-1)
    return tensor.contiguous().view(-1)
