"""What of a model is averaged, by name, and in which fragments."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from overlap.errors import ConfigurationError

__all__ = ["Content", "into_fragments"]


class Content:
    """The tensors of a model and its optimizer that ranks have in common.

    Args:
        module: the model.
        parameters: those that are trained, by name.
        optimizer: what steps them.
        fragments: how many parts are averaged in turn.
        buffers: whether the model's floating-point buffers belong to it; they come with the first fragment.
        state: whether the optimizer's state does.

    Raises:
        ConfigurationError: there are fewer parameters than fragments.
    """

    def __init__(
        self, module: nn.Module, parameters: Mapping[str, Tensor], optimizer: Optimizer, *, fragments: int,
        buffers: bool, state: bool,
    ) -> None:  # fmt: skip
        self.parameters = dict(parameters)
        self.fragments = into_fragments(self.parameters, fragments)
        self._module = module
        self._optimizer = optimizer
        self._has_buffers = buffers
        self._has_state = state

    def parameters_of(self, fragment: int) -> dict[str, Tensor]:
        """The parameters of a fragment."""
        return {name: self.parameters[name] for name in self.fragments[fragment]}

    def others_of(self, fragment: int) -> dict[str, Tensor]:
        """Buffers and state that are averaged with a fragment's parameters; an outer optimizer leaves them alone."""
        found: dict[str, Tensor] = {}
        if self._has_buffers and fragment == 0:
            found.update((f"buffer {name}", b) for name, b in self._module.named_buffers() if b.is_floating_point())
        if self._has_state:
            for name, parameter in self.parameters_of(fragment).items():
                state = self._optimizer.state.get(parameter, {})
                found.update(
                    (f"{key} of {name}", value)
                    for key, value in sorted(state.items())
                    # Counts, which Adam keeps as tensors, are no averages.
                    if isinstance(value, Tensor) and value.is_floating_point() and value.ndim
                )
        return found

    def reset_state(self, fragment: int) -> None:
        """Let the optimizer forget what it remembers of a fragment."""
        for parameter in self.parameters_of(fragment).values():
            self._optimizer.state.pop(parameter, None)

    def check_others(self, fragment: int, group: dist.ProcessGroup, device: torch.device) -> None:
        """Make sure that all ranks have the same state to average, where they average some.

        Issues: one all-reduce of two numbers on ``group``.

        Raises:
            ConfigurationError: on every rank, where they have not.
        """
        if not self._has_state:
            return
        layout = [(name, tuple(t.shape), str(t.dtype)) for name, t in self.others_of(fragment).items()]
        digest = int.from_bytes(hashlib.sha256(repr(layout).encode()).digest()[:6], "big")
        extremes = torch.tensor([digest, -digest], device=device)
        dist.all_reduce(extremes, op=dist.ReduceOp.MAX, group=group)
        if int(extremes[0]) != -int(extremes[1]):
            raise ConfigurationError(
                'optimizer_state="average" needs the same state on every rank, but some parameters have state on some '
                'ranks only, such as those that a rank never used; use "keep" or "reset"'
            )


def into_fragments(parameters: Mapping[str, Tensor], count: int) -> list[list[str]]:
    """Names in ``count`` runs of about as many elements each, in the model's order.

    Raises:
        ConfigurationError: there are not so many parameters.
    """
    total = sum(parameter.numel() for parameter in parameters.values())
    fragments: list[list[str]] = [[] for _ in range(count)]
    before = 0
    for name, parameter in parameters.items():
        middle = before + parameter.numel() / 2
        fragments[min(count - 1, int(count * middle / max(1, total)))].append(name)
        before += parameter.numel()
    if not all(fragments):
        sizes: Sequence[int] = [len(fragment) for fragment in fragments]
        raise ConfigurationError(
            f"fragments={count} leaves some without a parameter ({sizes} parameters each): the model's parameters are "
            "too few or too unequal; give a smaller number"
        )
    return fragments
