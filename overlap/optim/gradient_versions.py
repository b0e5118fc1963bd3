"""Telling whether a gradient is still what the library left in ``.grad``."""

from __future__ import annotations

import weakref
from collections.abc import Iterable

from torch import Tensor

from overlap._torch.autograd import version

__all__ = ["GradientVersions"]


class GradientVersions:
    """The tensors in ``.grad`` of some parameters, and how often each had been changed in place, at one moment."""

    def __init__(self, parameters: Iterable[Tensor] = ()) -> None:
        self._noted: dict[int, tuple[weakref.ref[Tensor], int]] = {
            id(parameter): (weakref.ref(parameter.grad), version(parameter.grad))
            for parameter in parameters
            if parameter.grad is not None
        }

    def hold(self, parameter: Tensor) -> bool:
        """Whether ``parameter.grad`` is the tensor that it was, with what it held, or ``None`` as it was."""
        noted = self._noted.get(id(parameter))
        if noted is None or parameter.grad is None:
            return noted is None and parameter.grad is None
        return parameter.grad is noted[0]() and noted[1] == version(parameter.grad)

    def hold_another_tensor(self, parameter: Tensor) -> bool:
        """Whether ``parameter.grad`` is a tensor that was not there then, such as one from a backward of the user's."""
        noted = self._noted.get(id(parameter))
        return parameter.grad is not None and (noted is None or parameter.grad is not noted[0]())
