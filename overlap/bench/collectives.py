"""How many bytes a rank sends in a collective, and the total of this process.

Gloo's traffic is counted where it leaves the process (`overlap.bench.wire`). What has no socket to look at, NCCL over
NVLink or a simulated link, is counted here, when the collective is issued.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

from torch import Tensor

from overlap._torch.issued_collectives import IssuedCollectives

Kind = Literal["all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all", "send", "none"]

# What each method of a process group sends, and which of its arguments is the whole tensor.
_VOLUMES: dict[str, tuple[Kind, int]] = {
    "allreduce": ("all_reduce", 0),
    "allreduce_coalesced": ("all_reduce", 0),
    "broadcast": ("broadcast", 0),
    "reduce": ("broadcast", 0),
    "allgather": ("all_gather", 0),
    "allgather_coalesced": ("all_gather", 0),
    "_allgather_base": ("all_gather", 0),
    "allgather_into_tensor_coalesced": ("all_gather", 0),
    "reduce_scatter": ("reduce_scatter", 1),
    "_reduce_scatter_base": ("reduce_scatter", 1),
    "reduce_scatter_tensor_coalesced": ("reduce_scatter", 1),
    "alltoall": ("all_to_all", 1),
    "alltoall_base": ("all_to_all", 1),
    "gather": ("all_to_all", 1),
    "scatter": ("all_to_all", 0),
    "send": ("send", 0),
    "recv": ("none", 0),
    "recv_any_source": ("none", 0),
    "barrier": ("none", 0),
    "monitored_barrier": ("none", 0),
    "check_for_nan": ("none", 0),
}

_sent_bytes_total = 0.0


def sent_bytes(kind: Kind, payload_bytes: float, ranks: int) -> float:
    """Bytes that each rank sends, by the bandwidth-optimal ring algorithms; a broadcast's mean over the ranks.

    `payload_bytes` is the whole tensor: what an all-gather leaves on a rank, what a reduce-scatter takes from one.

    >>> sent_bytes("all_reduce", 1000, 2), sent_bytes("reduce_scatter", 1000, 4)
    (1000.0, 750.0)
    """
    if kind == "none":
        return 0.0
    if kind == "send":
        return float(payload_bytes)
    passes = 2 if kind == "all_reduce" else 1
    return passes * payload_bytes * (ranks - 1) / ranks


def counted_bytes() -> float:
    """Bytes sent so far by this process in collectives that were counted."""
    return _sent_bytes_total


def count(name: str, arguments: Sequence[Any], ranks: int) -> float:
    """Add what a collective sends to the total, and return it.

    Args:
        name: the method of `ProcessGroup`, or the operator in `torch.ops.c10d`, which has an underscore behind it.
        arguments: the method's own, tensors first.
        ranks: how many take part.
    """
    global _sent_bytes_total
    kind, payload = _VOLUMES[name if name in _VOLUMES else name.removesuffix("_")]
    added = 0.0 if kind == "none" else sent_bytes(kind, nbytes(arguments[payload]), ranks)
    _sent_bytes_total += added
    return added


@contextmanager
def counting() -> Iterator[None]:
    """Within it, collectives on PyTorch's own process groups are counted, as they are issued."""
    with IssuedCollectives(count):
        yield


def nbytes(tensors: Any) -> int:
    """Of a tensor, or of all in nested lists."""
    return sum(tensor.nbytes for tensor in flatten(tensors))


def flatten(tensors: Any) -> list[Tensor]:
    """The tensors in nested lists of them; what is neither is left out."""
    if isinstance(tensors, Tensor):
        return [tensors]
    if not isinstance(tensors, list | tuple):
        return []
    return [tensor for entry in tensors for tensor in flatten(entry)]
