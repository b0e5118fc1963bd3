"""Reads and checks the parameters that a user passes, and compares them with those of the other ranks."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from overlap._checks import as_list, told
from overlap.errors import ArgumentTypeError, ConfigurationError
from overlap.join.group_collectives import of_all_ranks

__all__ = [
    "check_class",
    "check_covered",
    "check_members",
    "check_master_dtype",
    "check_same_group",
    "check_same_on_all_ranks",
    "copy_options",
    "device_of",
    "is_narrower",
    "names_of",
    "options_of",
    "read_groups",
    "with_names",
]

# The keys of a group that are not hyperparameters.
_NOT_OPTIONS = ("params", "param_names")


def read_groups(params: Any) -> list[dict[str, Any]]:
    """Groups with lists of parameters, from anything that an optimizer takes; named parameters give ``param_names``.

    Raises:
        ConfigurationError: there are no parameters, or something is not a parameter.
    """
    if (given := as_list(params)) is None:
        raise ArgumentTypeError(
            f"params is an iterable of parameters or of groups, got {type(params).__name__}; "
            "pass ddp.parameters(), or [parameter]"
        )
    groups = [dict(group) for group in given] if given and isinstance(given[0], Mapping) else [{"params": given}]
    for place, group in enumerate(groups):
        _read_group(place, group)
    if not any(group["params"] for group in groups):
        raise ConfigurationError("params is empty; pass ddp.parameters() (an iterator can be read only once)")
    return groups


def _read_group(place: int, group: dict[str, Any]) -> None:
    if "params" not in group:
        raise ConfigurationError(f"group {place} has no 'params', only {sorted(group)}")
    members = [group["params"]] if isinstance(group["params"], Tensor) else list(group["params"])
    if members and all(isinstance(member, tuple) for member in members):
        group["param_names"] = [name for name, _ in members]
        members = [parameter for _, parameter in members]
    for position, member in enumerate(members):
        if not isinstance(member, Tensor):
            raise ConfigurationError(
                f"parameter {position} of group {place} is a {type(member).__name__}, not a Tensor"
            )
        if not member.is_leaf:
            raise ConfigurationError(
                f"parameter {position} of group {place} is not a leaf, but the result of a computation"
            )
    group["params"] = members


def names_of(groups: Sequence[Mapping[str, Any]], *, first_group: int = 0) -> list[str]:
    """The name of each parameter in messages."""
    names: list[str] = []
    for place, group in enumerate(groups, start=first_group):
        given = group.get("param_names")
        names.extend(
            given[position] if given else f"parameter {position} of group {place}"
            for position in range(len(group["params"]))
        )
    return names


def check_class(optimizer_class: object) -> type[Optimizer]:
    """``optimizer_class`` itself, if it is a subclass of ``Optimizer``.

    Raises:
        ConfigurationError: it is not.
    """
    if isinstance(optimizer_class, Optimizer):
        raise ConfigurationError(
            f"optimizer_class is a class, but got an object: pass torch.optim.{type(optimizer_class).__name__} and its "
            "arguments as keywords"
        )
    if not (isinstance(optimizer_class, type) and issubclass(optimizer_class, Optimizer)):
        raise ConfigurationError(
            f"optimizer_class is a subclass of torch.optim.Optimizer such as torch.optim.AdamW, got "
            f"{told(optimizer_class)}"
        )
    return optimizer_class


def check_master_dtype(master_dtype: object) -> None:
    """Raises: ConfigurationError: it is neither ``None`` nor a floating-point dtype."""
    if master_dtype is not None and not (isinstance(master_dtype, torch.dtype) and master_dtype.is_floating_point):
        raise ConfigurationError(
            f"master_dtype is a floating-point dtype such as torch.float32, got {told(master_dtype)}"
        )


def is_narrower(parameter: Tensor, master_dtype: torch.dtype | None) -> bool:
    """Whether a parameter gets a master in ``master_dtype``."""
    dtype = parameter.dtype
    return master_dtype is not None and dtype.is_floating_point and master_dtype.itemsize > dtype.itemsize


def check_same_on_all_ranks(
    groups: Sequence[Mapping[str, Any]], names: Sequence[str], group: dist.ProcessGroup, settings: tuple[Any, ...]
) -> None:
    """Compare the parameters, and how they are sharded, with those of rank 0.

    Communication: one gather of a few bytes per parameter.

    Raises:
        ConfigurationError: they differ; raised on every rank, with the rank and the first parameter that differs.
    """
    mine = [
        (name, place, tuple(p.shape), p.stride(), str(p.dtype), p.requires_grad)
        for name, (place, p) in zip(
            names, ((place, p) for place, one in enumerate(groups) for p in one["params"]), strict=True
        )
    ]
    everyone = of_all_ranks((settings, mine), group)
    for rank, (other_settings, theirs) in enumerate(everyone):
        if other_settings != everyone[0][0]:
            raise ConfigurationError(f"rank {rank} shards with {other_settings}, but rank 0 with {everyone[0][0]}")
        if theirs == everyone[0][1]:
            continue
        reference = everyone[0][1]
        place = next(
            (place for place, pair in enumerate(zip(theirs, reference, strict=False)) if pair[0] != pair[1]),
            min(len(theirs), len(reference)),
        )
        raise ConfigurationError(
            f"ranks have different parameters: {_told(theirs, place)} on rank {rank}, "
            f"{_told(reference, place)} on rank 0"
        )


def check_covered(model: Mapping[Tensor, str], parameters: Sequence[Tensor], names: Sequence[str]) -> None:
    """Raises: ConfigurationError: one of ``parameters`` requires a gradient, but is not in ``model``."""
    outside = [
        name
        for name, parameter in zip(names, parameters, strict=True)
        if parameter.requires_grad and parameter not in model
    ]
    if outside:
        raise ConfigurationError(
            f"{len(outside)} of {len(parameters)} parameters of the ZeroRedundancyOptimizer are not trained by "
            f"this model, the first is {outside[0]}: build it from this model's ddp.parameters()"
        )


def check_members(groups: Sequence[Mapping[str, Any]], known: Collection[int]) -> None:
    """Raises: ConfigurationError: ``groups`` do not have the parameters that are ``known``, by ``id``."""
    if {id(parameter) for group in groups for parameter in group["params"]} != set(known):
        raise ConfigurationError(
            "parameters were put into zero.param_groups, or taken out of it, by hand, and each rank holds the state of "
            "its part of those that it knows: add with zero.add_param_group, and freeze with requires_grad_(False)"
        )


def check_same_group(model: dist.ProcessGroup, zero: dist.ProcessGroup) -> None:
    """Raises: ConfigurationError: the two groups have different ranks."""
    theirs, ours = dist.get_process_group_ranks(model), dist.get_process_group_ranks(zero)
    if theirs != ours:
        raise ConfigurationError(
            f"the model is on ranks {theirs}, but the ZeroRedundancyOptimizer on ranks {ours}: give both the same "
            "process_group"
        )


def _told(described: Sequence[tuple[Any, ...]], place: int) -> str:
    if place >= len(described):
        return f"only {len(described)} parameters"
    name, group, shape, strides, dtype, requires_grad = described[place]
    return f"{name} (group {group}) is {shape} {dtype} of strides {strides}{'' if requires_grad else ', frozen'}"


def copy_options(sources: Sequence[Mapping[str, Any]], targets: Sequence[dict[str, Any]]) -> None:
    """Copy the hyperparameters of each group to its counterpart."""
    for source, target in zip(sources, targets, strict=True):
        target.update(options_of(source))


def options_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """The hyperparameters of a group."""
    return {key: value for key, value in group.items() if key not in _NOT_OPTIONS}


def device_of(parameters: Sequence[Tensor]) -> torch.device:
    """The device of all parameters.

    Raises:
        ConfigurationError: they are on more than one device.
    """
    devices = {parameter.device for parameter in parameters}
    if len(devices) > 1:
        raise ConfigurationError(
            f"the parameters are on several devices, {sorted(map(str, devices))}; ZeRO needs all on one device"
        )
    return devices.pop()


def with_names(group: dict[str, Any]) -> dict[str, Any]:
    """A group in the form that ``torch.optim`` takes for named parameters."""
    if "param_names" not in group:
        return group
    others = {key: value for key, value in group.items() if key != "param_names"}
    return {**others, "params": list(zip(group["param_names"], group["params"], strict=True))}
