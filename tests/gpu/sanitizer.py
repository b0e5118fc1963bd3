"""PyTorch's CUDA sanitizer sees no access to memory that another stream may still be using.

It knows tensors by their address: of two views of one buffer, those that begin at the same place. It sees kernels of
PyTorch's operators, in backward too, and takes a collective for one on the stream that issued it. Events and waits it
sees whoever makes them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from .chains import CHAINS, Chain
from .check import Check
from .training import train

__all__ = ["sanitizer_checks"]

_STEPS = 4


class _Sanitizer(TorchDispatchMode):
    """The sanitizer's own mode, but that no version takes `record_stream` for a kernel that writes."""

    def __init__(self) -> None:
        super().__init__()
        # To import it already makes CUDA call it: only where it is wanted.
        from torch.cuda._sanitizer import cuda_sanitizer

        self._dispatch = cuda_sanitizer.dispatch.__torch_dispatch__

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.record_stream.default:
            return func(*args, **(kwargs or {}))
        return self._dispatch(func, types, args, kwargs)


@dataclass(frozen=True)
class Sanitized:
    chain: str

    def __call__(self, rank: int, world_size: int, device: torch.device) -> None:
        with _Sanitizer():
            train(CHAINS[self.chain], rank, device, steps=_STEPS)


def _by_hand(ddp: Any) -> Sequence[Any]:
    return [torch.optim.AdamW(ddp.parameters(), fused=True)]


def _plain_ddp(rank: int, world_size: int, device: torch.device) -> None:
    with _Sanitizer():
        train(Chain(name="plain DDP", build=_by_hand), rank, device, steps=_STEPS)


def _race_in_one_thread(device: torch.device) -> None:
    stream = torch.cuda.Stream(device)
    tensor = torch.zeros(1000, device=device)
    with torch.cuda.stream(stream):
        tensor.add_(1)  # Nothing has made the stream wait for the zeros.


def _race_in_backward(device: torch.device) -> None:
    stream = torch.cuda.Stream(device)
    tensor = torch.zeros(1000, device=device)

    def touch(gradient: torch.Tensor) -> None:
        with torch.cuda.stream(stream):
            tensor.add_(1)

    x = torch.ones(3, device=device, requires_grad=True)
    x.register_hook(touch)
    x.sum().backward()


_RACES: dict[str, Callable[[torch.device], None]] = {"here": _race_in_one_thread, "in backward": _race_in_backward}


@dataclass(frozen=True)
class FindsARace:
    """Autograd's thread must be watched as well, since stages run there."""

    where: str

    def __call__(self, rank: int, world_size: int, device: torch.device) -> None:
        try:
            with _Sanitizer():
                _RACES[self.where](device)
        except Exception as error:
            if "race" in f"{type(error).__name__} {error}".lower() or "Sanitizer" in type(error).__name__:
                return
            raise
        finally:
            torch.cuda.synchronize(device)
        raise AssertionError("the sanitizer did not see a race that was there")


def sanitizer_checks() -> list[Check]:
    cuda: dict[str, Any] = {"topic": "sanitizer", "devices": ("cuda",)}
    return [
        *(
            Check(name=f"sanitizer: a race {where} is found", run=FindsARace(where), ranks=1, **cuda)
            for where in _RACES
        ),
        Check(name="sanitizer: plain DDP", run=_plain_ddp, **cuda),
        *(Check(name=f"sanitizer: {name}", run=Sanitized(name), **cuda) for name in CHAINS),
    ]
