"""A link that only exists in arithmetic: one process stands for all ranks, and collectives take the time they would.

Each collective takes `bytes / bandwidth + latency`, one after the other as on a real link (`transfers`), while the
computation goes on. Every simulated rank has this process's data, so sums are multiplied and gathers repeat it. But
what this process sends to another rank in a message is what that rank keeps, so what comes from there cannot be known:
it is zeros. Its numbers are called simulated.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from overlap._torch.custom_group import CustomGroup, FutureWork
from overlap.bench.collectives import count, flatten
from overlap.bench.transfers import transfer_queue

SIMULATED_BACKEND = "overlap-simulated"


@dataclass(kw_only=True)
class SimulatedLink:
    """How fast the link between simulated ranks is; a change holds from the next collective on."""

    bandwidth_bytes_per_s: float
    # Of each collective, or of all messages that are started together.
    latency_s: float = 0.0


class SimulatedGroup(CustomGroup):  # type: ignore[misc]
    """A process group of `size` ranks in one process; see the module's docstring.

    The methods are those that `ProcessGroup` dispatches to from C++ (DDP's reducer) and from `torch.distributed`.
    Operations between `_start_coalescing` and `_end_coalescing` share one latency and one `Work`.
    """

    def __init__(self, size: int, link: SimulatedLink) -> None:
        super().__init__(0, size)
        self._size = size
        self._link = link
        self._coalesced: list[_Transfer] | None = None

    def size(self) -> int:
        return self._size

    def getBackendName(self) -> str:  # noqa: N802 - the name that C++ looks up
        return SIMULATED_BACKEND

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> Any:
        return self._perform("allreduce", partial(self._reduce, opts), tensors)

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> Any:
        return self._perform("allreduce_coalesced", partial(self._reduce, opts), tensors)

    def reduce(self, tensors: list[Tensor], opts: Any = None) -> Any:
        # On the ranks that do not receive the sum, a tensor may hold anything: here it holds the sum.
        return self._perform("reduce", partial(self._reduce, opts), tensors)

    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> Any:
        return self._perform("broadcast", _nothing, tensors)

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> Any:
        return self._perform("allgather", _fill_each, outputs, inputs)

    def allgather_coalesced(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> Any:
        return self._perform("allgather_coalesced", _fill_by_rank, outputs, inputs)

    def allgather_into_tensor_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Any:
        return self._perform("allgather_into_tensor_coalesced", self._repeat, outputs, inputs)

    def _allgather_base(self, output: Tensor, input: Tensor, opts: Any = None) -> Any:
        return self._perform("_allgather_base", self._repeat, [output], [input])

    def reduce_scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None) -> Any:
        return self._perform("reduce_scatter", partial(self._reduce_first, opts), outputs, inputs)

    def reduce_scatter_tensor_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Any:
        return self._perform("reduce_scatter_tensor_coalesced", partial(self._reduce_chunk, opts), outputs, inputs)

    def _reduce_scatter_base(self, output: Tensor, input: Tensor, opts: Any = None) -> Any:
        return self._perform("_reduce_scatter_base", partial(self._reduce_chunk, opts), [output], [input])

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Any:
        return self._perform("alltoall", _fill_from_first, outputs, inputs)

    def alltoall_base(
        self, output: Tensor, input: Tensor, output_sizes: list[int], input_sizes: list[int], opts: Any = None
    ) -> Any:
        rows = input_sizes[0] if input_sizes else len(input) // self._size
        return self._perform("alltoall_base", partial(_fill_rows, rows), [output], [input])

    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> Any:
        return self._perform("gather", _fill_each, outputs, inputs)

    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None) -> Any:
        return self._perform("scatter", _take_first, outputs, inputs)

    def send(self, tensors: list[Tensor], dst: int, tag: int = 0) -> Any:
        return self._perform("send", _nothing, tensors)

    def recv(self, tensors: list[Tensor], src: int, tag: int = 0) -> Any:
        return self._perform("recv", _clear, tensors)

    def recv_anysource(self, tensors: list[Tensor], tag: int = 0) -> Any:
        return self._perform("recv", _clear, tensors)

    def barrier(self, opts: Any = None) -> Any:
        return self._perform("barrier", _nothing, [])

    # PyTorch 2.13 renamed these; both names are dispatched to.
    all_gather_single = _allgather_base
    all_gather_single_coalesced = allgather_into_tensor_coalesced
    reduce_scatter_single = _reduce_scatter_base
    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced
    all_to_all_single = alltoall_base

    def _start_coalescing(self, device: torch.device) -> None:
        self._coalesced = []

    def _end_coalescing(self, device: torch.device) -> Any:
        transfers, self._coalesced = self._coalesced or [], None
        return self._put(transfers)

    def _perform(self, name: str, act: Callable[..., None], results: Sequence[Any], *others: Sequence[Any]) -> Any:
        """Count and send what the collective sends; then `act` does to its tensors what it does where every rank has
        the same. `results` are what its `Work` returns."""
        transfer = _Transfer(
            duration_s=count(name, (results, *others), self._size) / self._link.bandwidth_bytes_per_s,
            # What a peer sends takes its time on that peer's link.
            latency_s=0.0 if name == "recv" else self._link.latency_s,
            act=partial(act, results, *others),
            results=list(results),
            tensors=flatten([results, *others]),
        )
        if self._coalesced is None:
            return self._put([transfer])
        self._coalesced.append(transfer)
        return None

    def _put(self, transfers: Sequence[_Transfer]) -> FutureWork:
        duration_s = sum(one.duration_s for one in transfers) + max((one.latency_s for one in transfers), default=0.0)
        tensors = [tensor for one in transfers for tensor in one.tensors]
        results = [result for one in transfers for result in one.results]

        @torch.no_grad()
        def act() -> None:
            for one in transfers:
                one.act()

        return FutureWork(transfer_queue(tensors).put(duration_s, act, tensors, results))

    def _reduce(self, opts: Any, tensors: list[Tensor]) -> None:
        operation = getattr(opts, "reduceOp", dist.ReduceOp.SUM)
        # Not `in`: an operation of a call's options is equal to a name only when it stands on the left.
        if operation == dist.ReduceOp.SUM:
            for tensor in tensors:
                tensor.mul_(self._size)
        elif not any(operation == one for one in (dist.ReduceOp.AVG, dist.ReduceOp.MAX, dist.ReduceOp.MIN)):
            raise NotImplementedError("a simulated link cannot reduce so: it knows SUM, AVG, MIN and MAX")

    def _reduce_first(self, opts: Any, outputs: list[Tensor], inputs: list[list[Tensor]]) -> None:
        _take_first(outputs, inputs)
        self._reduce(opts, outputs)

    def _reduce_chunk(self, opts: Any, outputs: list[Tensor], inputs: list[Tensor]) -> None:
        for output, tensor in zip(outputs, inputs, strict=True):
            output.view(-1).copy_(tensor.reshape(self._size, -1)[0])
        self._reduce(opts, outputs)

    def _repeat(self, outputs: list[Tensor], inputs: list[Tensor]) -> None:
        for output, tensor in zip(outputs, inputs, strict=True):
            output.view(self._size, -1).copy_(tensor.reshape(1, -1).expand(self._size, -1))


@dataclass(frozen=True, kw_only=True)
class _Transfer:
    duration_s: float
    latency_s: float
    act: Callable[[], None]
    results: list[Any]
    tensors: list[Tensor]


def _nothing(*_: Any) -> None:
    """The ranks have equal data: there is nothing to change."""


def _clear(tensors: list[Tensor]) -> None:
    for tensor in tensors:
        tensor.zero_()


def _fill(outputs: list[Tensor], tensor: Tensor) -> None:
    for output in outputs:
        output.copy_(tensor)


def _fill_each(outputs: list[list[Tensor]], inputs: list[Tensor]) -> None:
    for copies, tensor in zip(outputs, inputs, strict=True):
        _fill(copies, tensor)


def _fill_by_rank(outputs: list[list[Tensor]], inputs: list[Tensor]) -> None:
    for of_rank in outputs:
        for output, tensor in zip(of_rank, inputs, strict=True):
            output.copy_(tensor)


def _take_first(outputs: list[Tensor], inputs: list[list[Tensor]]) -> None:
    for output, parts in zip(outputs, inputs, strict=True):
        output.copy_(parts[0])


def _fill_from_first(outputs: list[Tensor], inputs: list[Tensor]) -> None:
    """What every rank has for this one is what this one has for itself."""
    _fill(outputs, inputs[0])


def _fill_rows(rows: int, outputs: list[Tensor], inputs: list[Tensor]) -> None:
    for output, tensor in zip(outputs, inputs, strict=True):
        output.view(-1, *tensor[:rows].shape).copy_(tensor[:rows].unsqueeze(0))


def register_simulated_backend(link: SimulatedLink) -> None:
    """Make `init_process_group(SIMULATED_BACKEND, rank=0)` join ranks, all of them this process, by `link`."""

    def create(store: Any, rank: int, size: int, timeout: timedelta) -> SimulatedGroup:
        return SimulatedGroup(size, link)

    dist.Backend.register_backend(SIMULATED_BACKEND, create, devices=["cpu", "cuda"])
