"""Gaussian noise."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from overlap._checks import check_number, described
from overlap.errors import ConfigurationError
from overlap.hooks.bucket import Bucket
from overlap.hooks.context import StageContext
from overlap.hooks.transforms.transform import Place, WholePassTransform

__all__ = ["AddNoise"]


class AddNoise(WholePassTransform):
    """Adds Gaussian noise of standard deviation ``std`` (Neelakantan et al. 2015, https://arxiv.org/abs/1511.06807).

    In every pass, when all buckets have come, it draws for each parameter in the order of ``ddp.named_parameters()``,
    ``torch.randn(parameter.shape, generator=generator)`` in the parameter's dtype, whatever the buckets, and also where
    this rank has no inputs or only a part of the gradient. So a loop can do the same by hand::

        for parameter in ddp.parameters():
            parameter.grad.add_(torch.randn(parameter.shape, generator=generator), alpha=std)

    The generator makes the noise the same on all ranks: after the reducer they must be in the same state, or replicas
    would drift apart, and before it each rank may have one of its own. After an update the noise is added to the new
    parameters. A pass that fails leaves the generator as it was.

    Args:
        generator: on the model's device; its state is saved with the chain.
        std: a positive number.

    Issues: nothing. Changes: ``bucket.buffer`` (after an update, the parameters), and the generator. Memory: one
    parameter; after a reduce-scatter two, where one is not contiguous.

    Raises:
        ConfigurationError: an argument is wrong; or, at registration, the generator is on another device, the order of
            parameters is not known, or the stage stands before a communication hook.
        CollectiveError: at registration, ranks have generators in different states, where they must be the same.

    >>> AddNoise(torch.Generator().manual_seed(0), std=0.01)
    AddNoise(std=0.01)
    """

    def __init__(self, generator: torch.Generator, *, std: float = 1.0) -> None:
        super().__init__()
        if not isinstance(generator, torch.Generator):
            raise ConfigurationError(
                f"generator must be a torch.Generator, the same on all ranks, as in "
                f"AddNoise(torch.Generator().manual_seed(0), std=0.01); got {described(generator)}"
            )
        self.generator = generator
        self.std = check_number("std", std, above=0)
        self._before: Tensor | None = None

    @property
    def signature(self) -> str:
        if self._place is None or self._place is Place.LOCAL:
            return repr(self)
        digest = hashlib.sha256(self.generator.get_state().numpy().tobytes()).hexdigest()[:8]
        return f"{self!r} with its generator in state {digest}"

    @property
    def needs_mean(self) -> bool:
        return True

    @property
    def commutes_with_scaling(self) -> bool:
        return self._place is Place.UPDATED

    def attach(self, context: StageContext) -> None:
        if context.names is None:
            raise ConfigurationError(
                f"{self!r} draws in the order of the model's parameters, which a hook registered with "
                "ddp.register_comm_hook is not told: use overlap.register"
            )
        if self.generator.device.type != context.device.type:
            raise ConfigurationError(
                f"the generator of {self!r} is on {self.generator.device}, and the model on {context.device}: make it "
                f"with torch.Generator({str(context.device)!r})"
            )
        super().attach(context)

    def before_backward(self, *, is_replay: bool) -> None:
        super().before_backward(is_replay=is_replay)
        self._before = self.generator.get_state()

    async def act(self, buckets: Sequence[Bucket]) -> None:
        starts = {} if self.place is Place.UPDATED else _starts_of_parts(buckets)
        for parameter, seen in self.in_order(buckets):
            noise = torch.randn(
                parameter.shape, generator=self.generator, dtype=parameter.dtype, device=parameter.device
            )
            if (start := starts.get(id(parameter))) is not None:
                _add_part_(seen, noise, parameter, start, alpha=self.std)
                continue
            if noise.is_complex() and not seen.is_complex():
                noise = torch.view_as_real(noise)
            seen.add_(noise, alpha=self.std)

    def after_backward(self, *, failed: bool) -> None:
        if failed and self._before is not None:
            self.generator.set_state(self._before)
        self._before = None

    def state_dict(self) -> dict[str, Any]:
        """The generator's state."""
        return {"generator": self.generator.get_state()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load what :meth:`state_dict` returned.

        Raises:
            ConfigurationError: it is something else.
        """
        if set(state_dict) != {"generator"}:
            raise ConfigurationError(f"{self!r} loads the state of a generator, but was given {sorted(state_dict)}")
        self.generator.set_state(state_dict["generator"].cpu())

    def __repr__(self) -> str:
        return f"AddNoise(std={self.std:g})"


def _starts_of_parts(buckets: Sequence[Bucket]) -> dict[int, int]:
    """Where in its parameter each part begins that this rank owns, by the parameter's ``id``."""
    starts = {}
    for bucket in buckets:
        offset = int(bucket.buffer.storage_offset())
        for parameter, part in zip(bucket.parameters, bucket.owned or [None] * len(bucket.parameters), strict=True):
            width = 2 if parameter.is_complex() and not bucket.buffer.is_complex() else 1
            if part is not None:
                starts[id(parameter)] = (int(part.storage_offset()) - offset) // width
            offset += parameter.numel() * width
    return starts


def _add_part_(part: Tensor, noise: Tensor, parameter: Tensor, start: int, *, alpha: float) -> None:
    """Add to a flat ``part`` of a gradient the noise of its elements, in their order in memory, from ``start`` on.

    In 16 bits PyTorch rounds a sum of tensors that lie in memory in different ways another way, so where the
    ``parameter`` is not contiguous the sum is that of whole tensors, as by hand.
    """
    end = start + part.numel()
    if parameter.is_contiguous():
        part.add_(noise.view(-1)[start:end], alpha=alpha)
        return
    whole = torch.zeros_like(parameter, dtype=part.dtype, requires_grad=False)
    flat = whole.as_strided((whole.numel(),), (1,))
    flat[start:end] = part
    whole.add_(noise, alpha=alpha)
    part.copy_(flat[start:end])
