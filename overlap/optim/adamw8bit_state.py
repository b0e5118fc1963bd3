"""The state of a parameter under :class:`AdamW8bit`: new, loaded, and whether it fits the options."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from overlap.errors import ConfigurationError
from overlap.optim.dynamic_map import DynamicMap
from overlap.optim.state_blocks import StateBlocks

__all__ = ["FIRST", "MAPS", "SCALE", "SECOND", "check_blocks", "checked_states", "loaded", "new_state"]

FIRST, SECOND = "exp_avg", "exp_avg_sq"
SCALE = "{}_scale"
"""Under what key the scales of a moment are."""
MAPS = {FIRST: DynamicMap(is_signed=True), SECOND: DynamicMap(is_signed=False)}
"""How the codes of each moment are read."""


def new_state(parameter: Tensor, blocks: StateBlocks) -> dict[str, Any]:
    """Of a parameter that has not been updated."""
    state: dict[str, Any] = {"step": torch.zeros((), dtype=torch.float32, device="cpu")}
    is_blocked = parameter.numel() >= blocks.min_numel
    for key in MAPS:
        dtype = torch.uint8 if is_blocked else torch.float32
        state[key] = torch.zeros(parameter.shape, dtype=dtype, device=parameter.device)
    if is_blocked:
        # With scales of zero, codes mean nothing yet.
        count = blocks.count(parameter.numel())
        state.update((key, torch.zeros(count, dtype=torch.float32, device=parameter.device)) for key in blocks.keys)
    return state


def check_blocks(state: Mapping[str, Any], parameter: Tensor, blocks: StateBlocks) -> None:
    """Raises: ConfigurationError: the state has other blocks than the group says, or none where it says so."""
    expected = blocks.count(parameter.numel()) if parameter.numel() >= blocks.min_numel else 0
    scales = [state[key].numel() if key in state else 0 for key in blocks.keys]
    if any(count != expected for count in scales):
        raise ConfigurationError(
            f"the state of a parameter of shape {tuple(parameter.shape)} has {scales[0]} blocks, but with "
            f"{blocks.told} it has {expected}: these options cannot be changed while there is state"
        )


def checked_states(optimizer: Optimizer, given: Mapping[str, Any]) -> dict[Any, Mapping[str, Any]]:
    """The state of each parameter of which there is any, by its key in ``given``.

    Raises:
        ConfigurationError: it is another optimizer's.
    """
    states: dict[Any, Mapping[str, Any]] = {}
    for place, (group, saved) in enumerate(zip(optimizer.param_groups, given["param_groups"], strict=False)):
        blocks = StateBlocks.of(optimizer, saved)
        assert blocks is not None, "the options are those of every group"
        for parameter, key in zip(group["params"], saved["params"], strict=False):
            if not (state := given["state"].get(key)):
                continue
            states[key] = state
            if parameter.numel() == 0 or _fits(state, parameter, blocks):
                continue
            raise ConfigurationError(
                f"the state of a parameter of shape {tuple(parameter.shape)} in group {place} is not AdamW8bit's with "
                f"{blocks.told}: load a state_dict() of this class. "
                "Moments that another optimizer has saved are not encoded; leave 'state' empty to begin with new ones"
            )
    return states


def _fits(state: Mapping[str, Any], parameter: Tensor, blocks: StateBlocks) -> bool:
    scales = [state[key] for key in blocks.keys if key in state]
    if parameter.numel() < blocks.min_numel:
        moments = [state[key] for key in MAPS if key in state]
        are_whole = all(moment.dtype == torch.float32 and moment.shape == parameter.shape for moment in moments)
        return not scales and len(moments) == len(MAPS) and are_whole
    codes = [state[key] for key in MAPS if key in state]
    if len(codes) != len(MAPS) or any(code.dtype != torch.uint8 or code.shape != parameter.shape for code in codes):
        return False
    count = blocks.count(parameter.numel())
    return len(scales) == len(blocks.keys) and all(scale.numel() == count for scale in scales)


def loaded(value: Any, device: torch.device) -> Any:
    """A saved value of a state as the optimizer keeps it: a copy."""
    # Contiguous, whatever the memory format of the parameter that it was saved with.
    return value.detach().to(device, copy=True).contiguous() if isinstance(value, Tensor) else value
