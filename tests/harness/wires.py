"""What each wire makes of values, and what a sum over ranks through it gives, with all ranks' values at hand."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from overlap import BFloat16, Float8, Float16, Int4, Int8, TopK, Wire


def chunked(wire: Wire, values: Tensor) -> Tensor:
    """Padded with zeros to chunks of equal size, a multiple of 8 and at most the wire's."""
    count = math.ceil(values.numel() / wire.chunk)
    size = math.ceil(values.numel() / count / 8) * 8
    return pad(values, (0, count * size - values.numel())).view(count, size)


def received(wire: Wire, values: Tensor) -> Tensor:
    """`values` as they are decoded, with their padding if there is any."""
    if isinstance(wire, Float16 | BFloat16):
        return values.to(wire.dtype).float()
    chunks = chunked(wire, values)
    if isinstance(wire, TopK):
        kept = max(1, round(wire.density * chunks.size(1)))
        smallest = chunks.abs().sort(dim=1, descending=True).values[:, kept - 1 : kept]
        return torch.where(chunks.abs() >= smallest, chunks.bfloat16().float(), torch.tensor(0.0)).flatten()
    top = {Float8: 448, Int8: 127, Int4: 7}[type(wire)]
    peak = chunks.abs().amax(1, keepdim=True)
    step = peak / top + torch.finfo(torch.float32).tiny
    scaled = chunks / step
    numbers = scaled.to(torch.float8_e4m3fn).float() if isinstance(wire, Float8) else scaled.round()
    return (numbers * step).flatten()


def summed(wire: Wire, by_rank: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """The sum over ranks, and the part of its error that each rank made."""
    ranks, numel = len(by_rank), by_rank[0].numel()
    part_numel = received(wire, torch.ones(math.ceil(numel / ranks))).numel()
    padded = [pad(values, (0, ranks * part_numel - numel)).view(ranks, part_numel) for values in by_rank]
    result, errors = torch.empty(ranks, part_numel), [torch.empty(ranks, part_numel) for _ in range(ranks)]
    for owner in range(ranks):
        total = padded[owner][owner].clone()
        for distance in range(1, ranks):
            sender = (owner + distance) % ranks
            sent = received(wire, padded[sender][owner])
            errors[sender][owner] = padded[sender][owner] - sent
            total += sent
        result[owner] = received(wire, total)
        errors[owner][owner] = total - result[owner]
    return result.flatten()[:numel], [error.flatten()[:numel] for error in errors]
