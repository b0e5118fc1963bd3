"""What DistributedDataParallel keeps to itself."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch
from torch.nn.parallel import DistributedDataParallel

__all__ = ["GradientSync", "before_final_sync", "data_parallel_parameters", "has_foreign_hook", "refusal"]


def data_parallel_parameters(ddp: DistributedDataParallel) -> dict[torch.Tensor, str]:
    """The parameters that DDP may reduce, with their fully qualified names in the wrapped module.

    Those frozen now are among them: what DDP reduces it settled when it was made. A tied parameter has its first name.
    ``_orig_mod.``, which ``torch.compile`` puts in front, is left out, so that state saved from a compiled model fits
    the same model uncompiled. Private: which parameters DDP ignores.
    """
    return {
        parameter: name.replace("_orig_mod.", "")
        for name, parameter in ddp.module.named_parameters()
        if not hasattr(parameter, "_ddp_ignored")
    }


def has_foreign_hook(ddp: DistributedDataParallel, ours: type) -> str | None:
    """The name of a hook registered with DDP itself, if there is one; a copied model lists hooks that it has not.

    Private: DDP has no public way to ask, and its own refusal of a second hook comes after it has noted that hook.
    """
    if ddp._comm_hooks and not isinstance(ddp._comm_hooks[-1][0], ours):
        hook = ddp._comm_hooks[-1][0]
        return getattr(hook, "__qualname__", repr(hook))
    name = ddp._get_ddp_logging_data().get("comm_hook")
    return str(name) if name else None


def refusal(ddp: DistributedDataParallel) -> str | None:
    """Why ``ddp`` cannot take a hook of ours, if it cannot. Private: the switches of DDP's special modes."""
    if ddp.mixed_precision is not None:
        return (
            "this model was made with DistributedDataParallel(mixed_precision=...), which reduces with a hook of its "
            "own; use torch.autocast, or bf16 gradients with Cast(torch.bfloat16, AllReduce())"
        )
    if getattr(ddp, "_delay_all_reduce_all_params", False) or getattr(ddp, "_delay_all_reduce_params", None):
        return "this model was made with delay_all_reduce_named_params, whose reduction takes no hook; leave it out"
    if getattr(ddp, "_use_python_reducer", False):
        return (
            "torch._dynamo.config.optimize_ddp is 'python_reducer', which never calls DDP's hooks; "
            "set it to 'ddp_optimizer', its default"
        )
    return None


class GradientSync:
    """Lets forwards and backwards of ``ddp`` go with or without the other ranks, buffers included, as ``no_sync`` does.

    Private in all but name: the first attribute is what ``no_sync`` sets for a block of code, and a training loop has
    no block that is as long as a phase of it. The second follows the first one forward later, by DDP itself.
    """

    def __init__(self, ddp: DistributedDataParallel) -> None:
        self._ddp = weakref.ref(ddp)
        self._is_off = False

    def switch(self, *, is_on: bool) -> None:
        """For the next forward and its backward; leaves it to ``no_sync`` where it was never off."""
        ddp = self._ddp()
        if ddp is not None and (self._is_off or not is_on):
            ddp.require_backward_grad_sync = is_on
            ddp.require_forward_param_sync = is_on
        self._is_off = not is_on


def before_final_sync(ddp: DistributedDataParallel, callback: Callable[[], None]) -> Callable[[], None]:
    """Run ``callback`` on every rank when ``Join`` ends, before DDP brings one rank's model to all; returns the undo.

    Private: Join runs the hooks of its joinables in order, and DDP's comes first and leaves no trace of what other
    ranks had.
    """
    alive = weakref.ref(ddp)

    def callback_first(is_last_joiner: bool) -> None:
        callback()
        if (model := alive()) is not None:
            DistributedDataParallel._sync_final_model(model, is_last_joiner)

    def undo() -> None:
        if (model := alive()) is not None:
            model.__dict__.pop("_sync_final_model", None)

    ddp.__dict__["_sync_final_model"] = callback_first
    return undo
