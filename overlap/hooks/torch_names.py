"""Hooks under the names, and with the states, of ``torch.distributed.algorithms.ddp_comm_hooks``.

Each can be passed to ``ddp.register_comm_hook``, :func:`overlap.register`, :func:`overlap.chain` and
:func:`overlap.hook_then_optimizer`. The state is a process group, or ``None`` for the model's own group (for the
default group, if the hook is registered with DDP itself, which does not tell). It is read when the first bucket
arrives, so hooks can be configured before ``init_process_group``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from overlap.errors import ConfigurationError
from overlap.hooks.adapters import StageHook, as_stage, check_hook, hook_name
from overlap.hooks.reducers import AllReduce, Cast, NoReduction, OnGroup
from overlap.hooks.stage import Stage


def _example(name: str) -> str:
    return f"""
    >>> registration = overlap.register(ddp, {name})
    >>> loss_fn(ddp(x), y).backward()
    """


def _group_hook(name: str, make: Callable[[], Stage], doc: str) -> StageHook:
    def group_of(state: Any) -> dist.ProcessGroup | None:
        if state is None or isinstance(state, dist.ProcessGroup):
            return state
        raise ConfigurationError(f"the state of {name} is a process group or None, got {type(state).__name__}")

    return StageHook(
        lambda state: OnGroup.of(group_of(state), make()),
        name,
        group_of=group_of,
        doc=f"{doc}\n{_example(name)}",
        module=__name__,
    )


allreduce_hook = _group_hook(
    "allreduce_hook", AllReduce, "The mean over ranks by one all-reduce per bucket; see :class:`AllReduce`."
)
fp16_compress_hook = _group_hook(
    "fp16_compress_hook",
    lambda: Cast(torch.float16),
    "The mean over ranks, sent in ``float16``; see :class:`Cast`.",
)
bf16_compress_hook = _group_hook(
    "bf16_compress_hook",
    lambda: Cast(torch.bfloat16),
    "The mean over ranks, sent in ``bfloat16``, on any backend that can reduce it, also Gloo; see :class:`Cast`.",
)
noop_hook = StageHook(
    lambda state: NoReduction(),
    "noop_hook",
    doc=f"Leaves each rank its own gradient; see :class:`NoReduction`.\n{_example('noop_hook')}",
    module=__name__,
)


def fp16_compress_wrapper(hook: Callable[..., Any]) -> StageHook:
    """A hook that runs ``hook`` on the bucket in ``float16`` and casts the result back; ``hook`` gets its state.

    >>> state = PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2)
    >>> registration = overlap.register(ddp, fp16_compress_wrapper(powerSGD_hook), state)
    >>> loss_fn(ddp(x), y).backward()
    """
    return _cast_hook(hook, torch.float16, "fp16_compress_wrapper")


def bf16_compress_wrapper(hook: Callable[..., Any]) -> StageHook:
    """A hook that runs ``hook`` on the bucket in ``bfloat16`` and casts the result back; ``hook`` gets its state.

    >>> state = PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2)
    >>> registration = overlap.register(ddp, bf16_compress_wrapper(powerSGD_hook), state)
    >>> loss_fn(ddp(x), y).backward()
    """
    return _cast_hook(hook, torch.bfloat16, "bf16_compress_wrapper")


def _cast_hook(hook: Callable[..., Any], dtype: torch.dtype, wrapper: str) -> StageHook:
    check_hook(hook)
    return StageHook(
        lambda state: Cast(dtype, as_stage(hook, state)),
        f"{wrapper}({hook_name(hook)})",
        group_of=hook.group_of if isinstance(hook, StageHook) else lambda state: None,
    )
