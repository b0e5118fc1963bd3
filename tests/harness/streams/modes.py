"""The modes that show the detector each ATen operator, and each function of PyTorch's Python side that needs a look."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors
from torch.utils._python_dispatch import TorchDispatchMode

from overlap._torch.read_only import GuardedGradient

if TYPE_CHECKING:
    from .detector import Detector


class OperatorMode(TorchDispatchMode):
    """Sees every ATen operator that runs on this thread, those of C++ and of autograd included."""

    def __init__(self, detector: Detector) -> None:
        super().__init__()
        self._detector = detector

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if any(issubclass(each, GuardedGradient) for each in types):
            return NotImplemented  # It comes here again with the tensors inside.
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        self._detector.called(func, args, kwargs, result)
        return result


# They make a tensor of the host and copy it to the device, which the host waits for.
_FROM_DATA = {torch.tensor, torch.as_tensor, torch.scalar_tensor}


class FunctionMode(TorchFunctionMode):
    """Tells the host's memory from the device's, and sees what reads memory without an operator."""

    def __init__(self, detector: Detector) -> None:
        super().__init__()
        self._detector = detector
        self._makers = _device_constructors()
        self._special: dict[Any, Callable[..., Any]] = {
            Tensor.tolist: self._read,
            Tensor.numpy: self._read,
            Tensor.__array__: self._read,
            Tensor.cpu: self._to_pageable,
            Tensor.to: self._to,
        }

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in self._makers:
            return self._made(func, args, kwargs)
        special = self._special.get(func)
        return func(*args, **kwargs) if special is None else special(func, args, kwargs)

    @contextlib.contextmanager
    def in_backward(self) -> Iterator[None]:
        """Within it what backward calls is seen, too: PyTorch calls a function without the mode that handles it."""
        run_backward = torch.autograd._engine_run_backward

        def run(*args: Any, **kwargs: Any) -> Any:
            with self:
                return run_backward(*args, **kwargs)

        with mock.patch.object(torch.autograd, "_engine_run_backward", run):
            yield

    def _made(self, func: Any, args: Any, kwargs: Any) -> Any:
        result = func(*args, **kwargs)
        is_new = not any(isinstance(value, Tensor) for value in (*args, kwargs.get("out")))
        if not isinstance(result, Tensor) or not is_new:
            return result
        device = kwargs.get("device")
        # A literal "cpu" asks for the host; the device is handed on as an object.
        if device is None or isinstance(device, str):
            self._detector.make_host_memory(result, is_pinned=bool(kwargs.get("pin_memory")))
        elif func in _FROM_DATA:
            self._detector.host.synchronize(
                f"torch.{func.__name__}(..., device=...)", self._detector.current_stream.present()
            )
        return result

    def _read(self, func: Any, args: Any, kwargs: Any) -> Any:
        self._detector.read_by_host(args[0], f"tensor.{func.__name__}()")
        return func(*args, **kwargs)

    def _to_pageable(self, func: Any, args: Any, kwargs: Any) -> Any:
        self._detector.read_by_host(args[0], "tensor.cpu()")
        return self._detector.make_host_memory(args[0].detach().clone(), is_pinned=False)

    def _to(self, func: Any, args: Any, kwargs: Any) -> Any:
        tensor, targets = args[0], [*args[1:], *kwargs.values()]
        if "cpu" in [target for target in targets if isinstance(target, str)]:
            return self._to_pageable(func, args, kwargs) if not self._is_host(tensor) else func(*args, **kwargs)
        to_device = any(isinstance(target, torch.device) for target in targets)
        if not (to_device and tensor.device.type == "cpu" and self._is_host(tensor)):
            return func(*args, **kwargs)
        # Host and device are one here, so that PyTorch would return the tensor itself.
        converted = func(*args, **kwargs)
        result = torch.empty_strided(converted.size(), converted.stride(), dtype=converted.dtype)
        is_non_blocking = bool(kwargs.get("non_blocking"))
        return result.copy_(converted, non_blocking=is_non_blocking)

    def _is_host(self, tensor: Tensor) -> bool:
        return self._detector.memory(tensor).is_host
