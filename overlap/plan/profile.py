"""What a step computes, as numbers that can be saved and used for other links and numbers of ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

__all__ = ["ParameterTimes", "Profile"]

_VERSION = 1


@dataclass(frozen=True, kw_only=True)
class ParameterTimes:
    """One trainable parameter: when the forward first reads it, and when backward has its gradient."""

    name: str
    shape: tuple[int, ...]
    dtype: str = "float32"
    needed_ms: float
    """From the start of the forward."""
    ready_ms: float
    """From the start of the backward."""

    @cached_property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def torch_dtype(self) -> torch.dtype:
        dtype = getattr(torch, self.dtype)
        assert isinstance(dtype, torch.dtype)
        return dtype

    @cached_property
    def nbytes(self) -> int:
        return self.numel * self.torch_dtype.itemsize


@dataclass(frozen=True, kw_only=True)
class Profile:
    """A step without communication, on one rank."""

    forward_ms: float
    """With the loss."""
    backward_ms: float
    update_ms: float
    """A whole step of the optimizer."""
    copy_ms: float
    """Copying all gradients once, as DDP does into its buckets and back."""
    parameters: tuple[ParameterTimes, ...]
    """In the order in which their gradients become ready."""
    buffers_bytes: int = 0
    """Of buffers that DDP broadcasts before each forward."""
    state_bytes: int = 0
    """Of the optimizer's state."""
    handover_ms: float = 0.05
    """From autograd's thread to the worker's, once a bucket."""
    threads: float = 1.0
    """The speed of each of two threads that compute at the same time, as a share of its speed alone."""
    device: str = "cpu"
    where: str = ""
    """What it was measured on."""

    @cached_property
    def gradient_bytes(self) -> int:
        return sum(one.nbytes for one in self.parameters)

    @property
    def compute_ms(self) -> float:
        return self.forward_ms + self.backward_ms

    def in_words(self) -> str:
        """On one line."""
        parts = f"forward {self.forward_ms:.2f} ms, backward {self.backward_ms:.2f} ms, update {self.update_ms:.2f} ms"
        return f"{parts}, {self.gradient_bytes / 1e6:.2f} MB of gradients"

    @classmethod
    def of_json(cls, values: dict[str, object]) -> Profile:
        fields = dict(values)
        if (version := fields.pop("version", None)) != _VERSION:
            raise ValueError(f"version {version}, and this is version {_VERSION}")
        listed = fields.pop("parameters")
        assert isinstance(listed, list)
        parameters = tuple(ParameterTimes(**{**one, "shape": tuple(one["shape"])}) for one in listed)
        if not parameters:
            raise ValueError("it has no parameters")
        return cls(parameters=parameters, **fields)  # type: ignore[arg-type]

    @staticmethod
    def slowest(profiles: Sequence[Profile]) -> Profile:
        """Of those of all ranks, the one that the others wait for; the first of equals."""
        return max(profiles, key=lambda profile: profile.compute_ms + profile.update_ms)
