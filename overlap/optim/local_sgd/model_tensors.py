"""Which tensors of a model and its optimizer are averaged, and in which fragments."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from overlap._checks import told
from overlap._torch.compiled import plain_name
from overlap._torch.ddp import data_parallel_parameters
from overlap.errors import ConfigurationError
from overlap.join.group_collectives import all_reduce
from overlap.optim.local_sgd.average import tensors_of

__all__ = ["ModelTensors", "into_fragments", "trained_parameters"]


class ModelTensors:
    """The tensors that ranks average, by name and fragment.

    Args:
        module: the model.
        parameters: its trained parameters, by name.
        optimizer: steps them.
        fragments: the number of fragments.
        buffers: average the model's floating-point buffers, with the first fragment.
        state: average the optimizer's state, with its parameters.

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
        """A fragment's parameters, by name."""
        return {name: self.parameters[name] for name in self.fragments[fragment]}

    def others_of(self, fragment: int) -> dict[str, Tensor]:
        """Buffers and state that are averaged with a fragment; an outer optimizer does not step them."""
        found: dict[str, Tensor] = {}
        if self._has_buffers and fragment == 0:
            found.update((f"buffer {name}", b) for name, b in self._module.named_buffers() if b.is_floating_point())
        if self._has_state:
            for name, parameter in self.parameters_of(fragment).items():
                state = self._optimizer.state.get(parameter, {})
                found.update(
                    (f"{key} of {name}", value)
                    for key, value in sorted(state.items())
                    # Adam's count of steps is a tensor without dimensions.
                    if isinstance(value, Tensor) and value.is_floating_point() and value.ndim
                )
        return found

    def reset_state(self, fragment: int) -> None:
        """Clear the optimizer's state of a fragment."""
        for parameter in self.parameters_of(fragment).values():
            self._optimizer.state.pop(parameter, None)

    def check_others(self, fragment: int, group: dist.ProcessGroup, device: torch.device) -> None:
        """If optimizer state is averaged, check that names, shapes and dtypes are the same on all ranks.

        Issues: one all-reduce of two numbers on ``group``.

        Raises:
            ConfigurationError: on every rank, where they differ.
        """
        if not self._has_state:
            return
        layout = [(name, tuple(t.shape), str(t.dtype)) for name, t in self.others_of(fragment).items()]
        digest = int.from_bytes(hashlib.sha256(repr(layout).encode()).digest()[:6], "big")
        extremes = torch.tensor([digest, -digest], device=device)
        all_reduce(extremes, op=dist.ReduceOp.MAX, group=group)
        if int(extremes[0]) != -int(extremes[1]):
            raise ConfigurationError(
                'optimizer_state="average" needs the same state on every rank, but some parameters have state on some '
                'ranks only, such as those that a rank never used; use "keep" or "reset"'
            )


def into_fragments(parameters: Mapping[str, Tensor], count: int) -> list[list[str]]:
    """Cut the parameters' names, in the model's order, into ``count`` fragments of about as many elements each.

    Raises:
        ConfigurationError: a fragment would have no parameter.
    """
    if count > len(parameters):
        raise ConfigurationError(
            f"fragments={told(count)} leaves some without a parameter: the model has {len(parameters)}; give a smaller "
            "number"
        )
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


def trained_parameters(model: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
    """The parameters of a model, in DDP or not, that require a gradient, by name.

    Raises:
        ConfigurationError: the optimizer has none of them.
    """
    if isinstance(model, DistributedDataParallel):
        named = {name: p for p, name in data_parallel_parameters(model).items()}
    else:
        named = {plain_name(name): p for name, p in model.named_parameters()}
    trained: dict[str, Tensor] = {name: p for name, p in named.items() if p.requires_grad}
    if not {id(p) for p in tensors_of(optimizer.param_groups)} & {id(p) for p in trained.values()}:
        raise ConfigurationError(
            f"the {type(optimizer).__name__} has no parameter of this model; build it from the model's parameters()"
        )
    return trained
