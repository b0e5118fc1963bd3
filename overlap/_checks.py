"""Checks of arguments, and how messages name the value that was given instead."""

from __future__ import annotations

import math
from collections.abc import Iterable
from hashlib import sha256
from importlib.util import find_spec
from numbers import Integral, Real
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from overlap._torch.c10d import backend_name
from overlap._torch.ddp import is_sharded, uncompiled
from overlap._torch.device import has_stream_api, is_capturing
from overlap.errors import ConfigurationError, UnsupportedError

_LONGEST_TOLD = 200


def as_list(value: object) -> list[Any] | None:
    """The items of ``value``; ``None`` where it cannot be iterated over, or is a tensor, whose rows are not meant."""
    return list(value) if isinstance(value, Iterable) and not isinstance(value, Tensor) else None


def check_ddp(model: object, *, error: type[Exception] = ConfigurationError) -> DistributedDataParallel:
    """The ``DistributedDataParallel`` model that ``model`` is, or that ``torch.compile`` was given to make it.

    Raises:
        error: it is not; the message names the argument to give instead.
    """
    plain = uncompiled(model)
    if isinstance(plain, DistributedDataParallel):
        return plain
    raise error(f"{type_name(model)} is not a DistributedDataParallel model; {_instead_of(plain)}")


def _instead_of(model: object) -> str:
    if isinstance(model, type):
        return "give the model itself: ddp = DistributedDataParallel(model)"
    if not isinstance(model, nn.Module):
        return "give the model itself, as in ddp = DistributedDataParallel(model)"
    for name, part in model.named_modules():
        if isinstance(part, DistributedDataParallel):
            return f"the one inside of it is its .{name}: give that"
        if name and is_sharded(part):
            return f"its .{name} is sharded: call fully_shard(model) for the root, too, and give that"
    kinds = {cls.__name__ for cls in type(model).__mro__}
    if kinds & {"FullyShardedDataParallel", "FSDPModule"}:
        return "FSDP shards parameters and reduces gradients by itself: use one of the two, not both"
    if isinstance(model, DataParallel):
        return "use DistributedDataParallel in its place, with one process per device"
    return "wrap it first: ddp = DistributedDataParallel(model)"


def check_device(device: torch.device, group: dist.ProcessGroup) -> None:
    """Raises: UnsupportedError: ``device`` is an accelerator without streams, or ``group`` has no backend for it."""
    if device.type == "cpu":
        return
    if not has_stream_api(device):
        raise UnsupportedError(
            f"the model is on {device}, which has no streams for stages to run on: train on the CPU, model.to('cpu'), "
            "or on an accelerator with streams, such as CUDA or XPU"
        )
    if backend_name(group, device) == "none":
        raise UnsupportedError(
            f"the model is on {device}, and its process group has no backend for {device.type}: "
            f"init_process_group('cpu:gloo,cuda:nccl') for CUDA, say, or model.to('cpu')"
        )


def check_group(name: str, group: object, *, may_be_outside: bool = False) -> dist.ProcessGroup | None:
    """``group`` itself, if it is a process group or ``None``.

    Raises:
        ConfigurationError: it is something else, or this rank is not in it, unless it ``may_be_outside``; the message
            calls it ``name``.
    """
    if group is None:
        return None
    is_outside = group is dist.GroupMember.NON_GROUP_MEMBER
    if not is_outside and not isinstance(group, dist.ProcessGroup):
        raise ConfigurationError(
            f"{name} is a process group such as torch.distributed.new_group returns, or None, got {type_name(group)}"
        )
    if not may_be_outside and (is_outside or dist.get_rank(group) < 0):  # type: ignore[arg-type]
        raise ConfigurationError(
            f"this rank is not in the group that it was given as {name}; give it one that it is in"
        )
    return group  # type: ignore[return-value]


def check_whole_number(name: str, value: object, *, least: int) -> int:
    """``value`` as an ``int``, if it is a whole number of at least ``least``.

    Raises:
        ConfigurationError: it is not; the message calls it ``name``.
    """
    if isinstance(value, bool) or not isinstance(value, Integral) or value < least:
        raise ConfigurationError(
            f"{name} must be a whole number of at least {short_repr(least)}, got {short_repr(value)}"
        )
    return int(value)


def as_number(value: object) -> float | None:
    """``value`` as a ``float``; ``None`` where it is not a number, as flags and tensors are not."""
    return None if isinstance(value, bool) or not isinstance(value, Real) else float(value)


def check_number(name: str, value: object, *, above: float | None = None) -> float:
    """``value`` as a ``float``, if it is a finite number, and greater than ``above`` where that is given.

    Raises:
        ConfigurationError: it is not; the message calls it ``name``.
    """
    number = as_number(value)
    if number is None or not math.isfinite(number):
        raise ConfigurationError(f"{name} must be a finite number, got {short_repr(value)}")
    if above is not None and not number > above:
        raise ConfigurationError(f"{name} must be greater than {above:g}, got {short_repr(value)}")
    return number


def check_flag(name: str, value: object) -> bool:
    """``value`` itself, if it is ``True`` or ``False``.

    Raises:
        ConfigurationError: it is something else, whose truth is not asked for; the message calls it ``name``.
    """
    if not isinstance(value, bool):
        raise ConfigurationError(f"{name} is True or False, got {short_repr(value)}")
    return value


def is_one_of(value: object, *words: str | None) -> bool:
    """Whether ``value`` is one of ``words``. Only strings and ``None`` are compared, since arrays compare element by
    element."""
    return value in words if value is None or isinstance(value, str) else False


def refuse_capture(call: str, instead: str, device: torch.device | None = None) -> None:
    """Refuse ``call``, which acts on the host in each step anew, in a CUDA graph; ``instead`` is the remedy.

    Raises:
        UnsupportedError: a CUDA graph is being captured on the current stream of ``device``, the accelerator where
            ``None``.
    """
    if is_capturing(device):
        raise UnsupportedError(
            f"a CUDA graph is being captured, and {call} cannot be in it: a graph repeats the kernels of one step, and "
            f"this acts on the host in each step anew; {instead}"
        )


def short_repr(value: object) -> str:
    """``value`` in a message, as it would be typed; its class where that is long."""
    typed = repr(value)
    return typed if len(typed) <= _LONGEST_TOLD else f"an object of {type_name(value)}"


def type_name(value: object) -> str:
    """The class of ``value`` in a message, and whose it is where both PyTorch and this library have one of the name."""
    cls = value if isinstance(value, type) else type(value)
    name = f"PyTorch's {cls.__name__}" if cls.__module__.startswith("torch.distributed.") else cls.__name__
    return f"the class {name}" if isinstance(value, type) else name


def digest(value: object) -> str:
    """Eight digits that tell values apart by their ``repr``, the same on every rank."""
    return sha256(repr(value).encode()).hexdigest()[:8]


def require_extra(extra: str, *modules: str) -> None:
    """Checks that the modules of a pip extra can be imported, without importing them.

    Raises:
        ConfigurationError: naming the missing modules and the extra that brings them.
    """
    missing = [name for name in modules if find_spec(name) is None]
    if missing:
        raise ConfigurationError(f"{', '.join(missing)} not installed: pip install '.[{extra}]' in a clone of overlap")
