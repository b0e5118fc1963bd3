"""How many bytes a rank sends in a collective, and a process group that adds them up.

Gloo's traffic is counted where it leaves the process (`overlap.bench.wire`). What has no socket to look at, NCCL
over NVLink or a simulated link, is counted here, when the collective is issued.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any, Literal

import torch.distributed as dist
from torch import Tensor

from overlap._torch.custom_group import CustomGroup

Kind = Literal["all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all", "send", "barrier"]

COUNTED_BACKEND = "overlap-counted"
_sent_bytes_total = 0.0


def sent_bytes(kind: Kind, payload_bytes: float, ranks: int) -> float:
    """Bytes that each rank sends, by the bandwidth-optimal ring algorithms; a broadcast's mean over the ranks.

    `payload_bytes` is the whole tensor: what an all-gather leaves on a rank, what a reduce-scatter takes from one.

    >>> sent_bytes("all_reduce", 1000, 2), sent_bytes("reduce_scatter", 1000, 4)
    (1000.0, 750.0)
    """
    if kind == "barrier":
        return 0.0
    if kind == "send":
        return float(payload_bytes)
    passes = 2 if kind == "all_reduce" else 1
    return passes * payload_bytes * (ranks - 1) / ranks


def counted_bytes() -> float:
    """Bytes sent so far by this process through counting process groups."""
    return _sent_bytes_total


def nbytes(*tensors: Tensor) -> int:
    return sum(tensor.nbytes for tensor in tensors)


class CountingGroup(CustomGroup):  # type: ignore[misc]
    """A process group that counts what each collective sends and leaves the work to `perform`.

    The methods are those that `ProcessGroup` dispatches to from C++ (DDP's reducer) and from `torch.distributed`.
    """

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self._size = size

    def perform(self, name: str, kind: Kind, payload_bytes: int, *args: Any) -> Any:
        """Do collective `name` with `args` (tensors first, options last) and return its `Work`."""
        raise NotImplementedError

    def size(self) -> int:
        return self._size

    def getBackendName(self) -> str:  # noqa: N802 - the name that C++ looks up
        return COUNTED_BACKEND

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> Any:
        return self._count("allreduce", "all_reduce", nbytes(*tensors), tensors, opts)

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> Any:
        return self._count("allreduce_coalesced", "all_reduce", nbytes(*tensors), tensors, opts)

    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> Any:
        return self._count("broadcast", "broadcast", nbytes(*tensors), tensors, opts)

    def reduce(self, tensors: list[Tensor], opts: Any = None) -> Any:
        return self._count("reduce", "broadcast", nbytes(*tensors), tensors, opts)

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> Any:
        payload = sum(nbytes(*output) for output in outputs)
        return self._count("allgather", "all_gather", payload, outputs, inputs, opts)

    def _allgather_base(self, output: Tensor, input: Tensor, opts: Any = None) -> Any:
        return self._count("_allgather_base", "all_gather", nbytes(output), output, input, opts)

    def reduce_scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None) -> Any:
        payload = sum(nbytes(*parts) for parts in inputs)
        return self._count("reduce_scatter", "reduce_scatter", payload, outputs, inputs, opts)

    def _reduce_scatter_base(self, output: Tensor, input: Tensor, opts: Any = None) -> Any:
        return self._count("_reduce_scatter_base", "reduce_scatter", nbytes(input), output, input, opts)

    def alltoall_base(
        self, output: Tensor, input: Tensor, output_sizes: list[int], input_sizes: list[int], opts: Any = None
    ) -> Any:
        args = (output, input, output_sizes, input_sizes, opts)
        return self._count("alltoall_base", "all_to_all", nbytes(input), *args)

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Any:
        return self._count("alltoall", "all_to_all", nbytes(*inputs), outputs, inputs, opts)

    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> Any:
        return self._count("gather", "all_to_all", nbytes(*inputs), outputs, inputs, opts)

    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None) -> Any:
        return self._count("scatter", "all_to_all", nbytes(*outputs), outputs, inputs, opts)

    def send(self, tensors: list[Tensor], dst: int, tag: int = 0) -> Any:
        return self._count("send", "send", nbytes(*tensors), tensors, dst, tag)

    def recv(self, tensors: list[Tensor], src: int, tag: int = 0) -> Any:
        return self._count("recv", "barrier", 0, tensors, src, tag)

    def barrier(self, opts: Any = None) -> Any:
        return self._count("barrier", "barrier", 0, opts)

    # PyTorch 2.13 renamed the two; both names are dispatched to.
    all_gather_single = _allgather_base
    reduce_scatter_single = _reduce_scatter_base
    all_to_all_single = alltoall_base

    def _count(self, name: str, kind: Kind, payload_bytes: int, *args: Any) -> Any:
        global _sent_bytes_total
        _sent_bytes_total += sent_bytes(kind, payload_bytes, self._size)
        return self.perform(name, kind, payload_bytes, *args)


class ForwardingGroup(CountingGroup):
    """Counts, and hands each collective on to a real backend."""

    def __init__(self, rank: int, size: int, backend: Any) -> None:
        super().__init__(rank, size)
        self._inner = backend

    def perform(self, name: str, kind: Kind, payload_bytes: int, *args: Any) -> Any:
        # Options that the caller left out are left to the backend's own default.
        return getattr(self._inner, name)(*(args[:-1] if args[-1] is None else args))


def register_counted_backend(make: Callable[[Any, int, int, timedelta], Any]) -> None:
    """Make `init_process_group(COUNTED_BACKEND)` count, over what `make(store, rank, size, timeout)` returns."""

    def create(store: Any, rank: int, size: int, timeout: timedelta) -> ForwardingGroup:
        return ForwardingGroup(rank, size, make(store, rank, size, timeout))

    dist.Backend.register_backend(COUNTED_BACKEND, create, devices=["cpu", "cuda"])
