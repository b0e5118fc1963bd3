"""Private state of modules: of DistributedDataParallel, and of compiled ones."""

from __future__ import annotations

import operator
import sys
import weakref
from collections.abc import Callable, Collection, Iterable
from typing import Any, TypeGuard

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.distributed import _find_tensors

# Compiled modules.


def uncompiled(module: object) -> object:
    """The module that ``torch.compile`` was given to make ``module``, or ``module`` itself."""
    while type(module).__name__ == "OptimizedModule" and hasattr(module, "_orig_mod"):
        module = module._orig_mod
    return module


def plain_name(name: str) -> str:
    """The name that a parameter or buffer has where no part of the model is compiled."""
    return name.replace("_orig_mod.", "")


def is_compiled(module: nn.Module) -> bool:
    """Whether ``module`` was made by ``torch.compile(...)``, or was compiled in place."""
    return hasattr(module, "_orig_mod") or is_compiled_in_place(module)


def is_compiled_in_place(module: nn.Module) -> bool:
    """Whether ``module.compile()`` was called."""
    return module._compiled_call_impl is not None


# DistributedDataParallel.


def data_parallel_parameters(ddp: DistributedDataParallel) -> dict[Tensor, str]:
    """The parameters that DDP may reduce, with their fully qualified names in the wrapped module.

    Includes parameters that are frozen now: DDP decided which it reduces when it was made. A tied parameter has its
    first name. ``_orig_mod.``, which ``torch.compile`` adds, is left out, so that state saved from a compiled model
    fits the same model uncompiled. DDP looks for ignored ones as ``module.name``, so it reduces those of the root.
    """
    real = _real_names.get(ddp, {})
    return {
        parameter: real.get(name, plain_name(name))
        for name, parameter in ddp.module.named_parameters()
        if "." not in name or name not in ddp.parameters_to_ignore
    }


# Of a DDP model that has the parameters of another module in a list.
_real_names: weakref.WeakKeyDictionary[nn.Module, dict[str, str]] = weakref.WeakKeyDictionary()


def is_sharded(module: object) -> TypeGuard[nn.Module]:
    """Whether ``fully_shard``, or the ``replicate`` that is built on it, was called with ``module``."""
    fsdp = sys.modules.get("torch.distributed.fsdp")  # To import it takes a second.
    return fsdp is not None and isinstance(module, fsdp.FSDPModule)


def replicated_by(module: Any) -> DistributedDataParallel | None:
    """The DDP model behind a ``module`` that the ``replicate`` that is built on DDP was called with."""
    replicate = sys.modules.get("torch.distributed._composable.replicate")
    if replicate is None or not isinstance(module, replicate.DDP):
        return None
    state = replicate.replicate.state(module)
    if not state.has_initialized:
        state.lazy_init()  # As before the first forward.
    ddp: DistributedDataParallel = state._ddp
    _real_names[ddp] = {str(place): plain_name(name) for place, name in enumerate(state._param_names)}
    return ddp


class OutsideOfBuckets:
    """The parameters of a DDP model that its buckets do not have, looked up again where modules or parameters were
    added or modules replaced.

    Only the model itself may refer to it: it refers to the model's modules, and the garbage collector does not see the
    references of DDP's reducer.
    """

    _requires_grad = operator.attrgetter("requires_grad")

    def __init__(self) -> None:
        # The dictionaries of each module, and their contents when the parameters were looked up.
        self._children: list[dict[str, Any]] = []
        self._parameters: list[dict[str, Any]] = []
        self._noted: tuple[list[dict[str, Any]], list[int]] | None = None
        self._reduced: Collection[Tensor] = ()
        self._outside: dict[Tensor, str] = {}

    def trained(self, ddp: DistributedDataParallel, reduced: Collection[Tensor]) -> list[str]:
        """The names of those that require a gradient; the buckets have those that are ``reduced``, one object while
        that is the same.

        Called in every forward, so all that it does where nothing has changed runs in C.
        """
        if self._reduced is not reduced or self._noted != (self._children, list(map(len, self._parameters))):
            self._reduced = reduced
            modules = list(ddp.module.modules())
            self._children = [module._modules for module in modules]
            self._parameters = [module._parameters for module in modules]
            self._noted = list(map(dict, self._children)), list(map(len, self._parameters))
            # Tensor parallelism makes the parameters of the module anew in every forward, from those in the buckets.
            self._outside = {
                parameter: name
                for parameter, name in data_parallel_parameters(ddp).items()
                if parameter not in reduced and not hasattr(parameter, "_st_info")
            }
        if not any(map(self._requires_grad, self._outside)):
            return []
        return [name for parameter, name in self._outside.items() if parameter.requires_grad]


def tensors_in(outputs: Any) -> Iterable[Tensor]:
    """The tensors in the result of a forward, as DDP itself looks for them."""
    return (outputs,) if isinstance(outputs, Tensor) else _find_tensors(outputs)


def hook_name(ddp: DistributedDataParallel) -> str | None:
    """The name of the hook that DDP calls for each bucket, also of a built-in one; a copy of the model calls none,
    though it lists those of the original."""
    name = ddp._get_ddp_logging_data().get("comm_hook")
    return str(name) if name else None


def registered_hook(ddp: DistributedDataParallel) -> tuple[Any, Any] | None:
    """The hook registered with DDP itself, and its state."""
    return ddp._comm_hooks[-1] if ddp._comm_hooks else None


def refusal(ddp: DistributedDataParallel) -> str | None:
    """Why a stage cannot be registered with ``ddp``, if it cannot."""
    if ddp.mixed_precision is not None:
        return (
            "this model was made with DistributedDataParallel(mixed_precision=...), which reduces with its own "
            "hook; use torch.autocast, or bf16 gradients with Cast(torch.bfloat16, AllReduce())"
        )
    if getattr(ddp, "_delay_all_reduce_all_params", False) or getattr(ddp, "_delay_all_reduce_params", None):
        return "this model was made with delay_all_reduce_named_params, whose reduction takes no hook; leave it out"
    if getattr(ddp, "_use_python_reducer", False):
        return (
            "torch._dynamo.config.optimize_ddp is 'python_reducer', which never calls DDP's hooks; "
            "set it to 'ddp_optimizer', its default"
        )
    return None


def forget_unfinished_backward(ddp: DistributedDataParallel) -> None:
    """Let ``ddp`` run forward again after a backward that ended with an error; call it on every rank.

    Buckets are then rebuilt, which is a collective.
    """
    ddp.reducer._reset_state()


def is_to_rebuild(ddp: DistributedDataParallel) -> bool:
    """Whether the forward after the first backward of ``ddp`` has still to come, and compares buckets between ranks.

    DDP does so unless it looks for unused parameters in every backward.
    """
    return not ddp._has_rebuilt_buckets and (ddp.static_graph or not ddp.find_unused_parameters)


def has_all_buckets(ddp: DistributedDataParallel) -> bool:
    """Whether each backward reduces all parameters; with an option of torch 2.13 only those that a rank has used."""
    return not getattr(ddp, "skip_all_reduce_unused_params", False)


def backward_may_synchronize(ddp: DistributedDataParallel) -> bool:
    """Whether the last forward of ``ddp``, also one without gradients, has prepared a backward with the other ranks."""
    return bool(ddp.require_forward_param_sync)


def before_final_sync(ddp: DistributedDataParallel, callback: Callable[[], None]) -> Callable[[], None]:
    """Run ``callback`` on every rank when ``Join`` ends, before DDP copies one rank's model to all ranks.

    Returns a function that undoes this. Join runs the hooks of its joinables in order, and DDP's comes first and
    overwrites the models of the other ranks.
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
