"""What a process group written in Python is made of."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

# The package exports these at run time, but not to type checkers.
from torch._C._distributed_c10d import FileStore, HashStore, Work

__all__ = ["CustomGroup", "FutureWork", "FileStore", "HashStore", "spin"]

# Any: C++ calls a subclass with signatures that are not among the declared overloads of ProcessGroup's methods.
CustomGroup: Any = dist.ProcessGroup


class FutureWork(Work):
    """The ``Work`` of a collective that is done when ``future`` is; the future's value is the list of tensors.

    PyTorch's own wrapper of a future, ``_create_work_from_future``, cannot be waited for with a timeout.
    """

    def __init__(self, future: torch.futures.Future[Any]) -> None:
        super().__init__()
        self._future = future

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Block the thread or, on CUDA, make the current stream wait. ``timeout`` is ignored: a future has none."""
        self._future.wait()
        return True

    def get_future(self) -> torch.futures.Future[Any]:
        return self._future

    def is_completed(self) -> bool:
        return self._future.done()

    def is_success(self) -> bool:
        return self._future.done()

    def result(self) -> list[torch.Tensor]:
        tensors: list[torch.Tensor] = self._future.value()
        return tensors


def spin(cycles: int) -> None:
    """Keep the current CUDA stream busy for a number of clock cycles. Private: PyTorch has it for its tests."""
    torch.cuda._sleep(cycles)
