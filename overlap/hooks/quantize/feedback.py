"""What quantization left out, to be added in the next step (Seide et al., 2014; Karimireddy et al., 2019)."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from overlap._torch.foreach import copy_all
from overlap.errors import ConfigurationError
from overlap.hooks.bucket import Bucket

__all__ = ["ErrorFeedback"]


class ErrorFeedback:
    """A memory in fp32 for each parameter, by its name, so that it outlives any change of DDP's buckets."""

    def __init__(self) -> None:
        self._memory: dict[str, Tensor] = {}

    def add_to(self, bucket: Bucket) -> None:
        """Add to ``bucket``, in fp32, what earlier steps left out of it.

        Raises:
            ConfigurationError: a memory that was loaded is of another shape than the parameter's gradient.
        """
        for name, gradient in zip(bucket.names, bucket.gradients, strict=True):
            memory = self._memory.get(name)
            if memory is None:
                continue
            if memory.shape != gradient.shape:
                raise ConfigurationError(
                    f"the error feedback of {name} is of shape {tuple(memory.shape)}, its gradient of "
                    f"{tuple(gradient.shape)}: the state that was loaded is another model's"
                )
            if memory.device != gradient.device:
                memory = self._memory[name] = memory.to(gradient.device)
            gradient.add_(memory)

    def keep(self, bucket: Bucket) -> None:
        """Remember ``bucket``, in fp32, as what this step left out; where it is not finite, what was there stays."""
        kept = []
        for name, gradient in zip(bucket.names, bucket.gradients, strict=True):
            if name not in self._memory:
                self._memory[name] = torch.zeros_like(gradient)
            memory = self._memory[name]
            kept.append(torch.where(gradient.isfinite(), gradient, memory))
        copy_all([self._memory[name] for name in bucket.names], kept)

    def state_dict(self) -> dict[str, Tensor]:
        return {name: memory.clone() for name, memory in self._memory.items()}

    def load_state_dict(self, state_dict: Mapping[str, Tensor]) -> None:
        self._memory = {name: memory.to(torch.float32, copy=True) for name, memory in state_dict.items()}
