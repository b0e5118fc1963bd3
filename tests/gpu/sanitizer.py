"""PyTorch's CUDA sanitizer sees no access to memory that another stream may still be using.

It knows tensors by their address: of two views of one buffer, those that begin at the same place. It sees kernels of
PyTorch's operators, in backward too, and takes a collective for one on the stream that issued it. Events and waits it
sees whoever makes them.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from streams.scenarios import Scenario


class Sanitizer(TorchDispatchMode):
    """The sanitizer's own mode, but that no version takes `record_stream` for a kernel that writes."""

    def __init__(self) -> None:
        super().__init__()
        # To import it already makes CUDA call it, which slows all down: it comes last in its processes.
        from torch.cuda._sanitizer import cuda_sanitizer

        self._dispatch = cuda_sanitizer.dispatch.__torch_dispatch__

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.record_stream.default:
            return func(*args, **(kwargs or {}))
        return self._dispatch(func, types, args, kwargs)


def _race_in_one_thread(device: torch.device) -> None:
    stream = torch.cuda.Stream(device)
    tensor = torch.zeros(1000, device=device)
    with torch.cuda.stream(stream):
        tensor.add_(1)  # Nothing has made the stream wait for the zeros.


def _race_in_backward(device: torch.device) -> None:
    """Autograd's thread must be watched as well, since stages run there."""
    stream = torch.cuda.Stream(device)
    tensor = torch.zeros(1000, device=device)

    def touch(gradient: torch.Tensor) -> None:
        with torch.cuda.stream(stream):
            tensor.add_(1)

    x = torch.ones(3, device=device, requires_grad=True)
    x.register_hook(touch)
    x.sum().backward()


def a_race_is_found(scenario: Scenario, rank: int, device: torch.device) -> None:
    """The control: a race that is there is seen, in the loop's thread and in autograd's."""
    races: tuple[Callable[[torch.device], None], ...] = (_race_in_one_thread, _race_in_backward)
    for race in races:
        try:
            with Sanitizer():
                race(device)
        except Exception as error:
            if "race" not in f"{error}".lower() and "Sanitizer" not in type(error).__name__:
                raise
        else:
            raise AssertionError(f"the sanitizer did not see {race.__name__}")
        finally:
            torch.cuda.synchronize(device)
