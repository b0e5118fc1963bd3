"""Where a simulated group's values come from: other ranks, or this process itself."""

import contextlib
import tempfile
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from .group import STREAMS_BACKEND, StreamGroup, StreamWork

_ONE_PROCESS = "simulated-streams-in-one-process"


def _create(store: Any, rank: int, size: int, timeout: timedelta) -> StreamGroup:
    return StreamGroup(rank, size, dist.ProcessGroupGloo(store, rank, size, timeout))


dist.Backend.register_backend(STREAMS_BACKEND, _create, devices=["cpu"])


class _EqualRanks:
    """Moves the values of one process that stands for ranks with equal data. Messages are zeros."""

    def __init__(self, size: int) -> None:
        self._size = size

    def allreduce(self, tensors: Sequence[Tensor], opts: Any = None) -> Any:
        if getattr(opts, "reduceOp", dist.ReduceOp.SUM) == dist.ReduceOp.SUM:
            for tensor in tensors:
                tensor.mul_(self._size)
        return _DONE

    def broadcast(self, tensors: Sequence[Tensor], opts: Any = None) -> Any:
        return _DONE

    def allgather(self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any = None) -> Any:
        for parts, tensor in zip(outputs, inputs, strict=True):
            for part in parts:
                part.copy_(tensor)
        return _DONE

    def _allgather_base(self, output: Tensor, input: Tensor, opts: Any = None) -> Any:
        output.view(self._size, -1).copy_(input.reshape(1, -1).expand(self._size, -1))
        return _DONE

    def _reduce_scatter_base(self, output: Tensor, input: Tensor, opts: Any = None) -> Any:
        output.view(-1).copy_(input.reshape(self._size, -1)[0] * self._size)
        return _DONE

    def send(self, tensors: Sequence[Tensor], dst: int, tag: int) -> Any:
        return _DONE

    def recv(self, tensors: Sequence[Tensor], src: int, tag: int) -> Any:
        with _disable_current_modes():
            for tensor in tensors:
                tensor.zero_()
        return _DONE


_DONE = StreamWork(None, None, (), ())


@contextlib.contextmanager
def one_process(size: int) -> Iterator[None]:
    """Within it this process is rank 0 of ``size`` ranks that all have its data: the default group."""

    def create(*_: Any) -> StreamGroup:
        return StreamGroup(0, size, _EqualRanks(size), name="fake")

    dist.Backend.register_backend(_ONE_PROCESS, create, devices=["cpu"])
    with tempfile.TemporaryDirectory() as folder:
        store = dist.FileStore(f"{folder}/store", 1)
        dist.init_process_group(_ONE_PROCESS, store=store, rank=0, world_size=size)
        try:
            yield
        finally:
            dist.destroy_process_group()
