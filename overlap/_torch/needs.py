"""Every private name of PyTorch's that this package uses, so that it can be told which version of PyTorch lacks one.

A test compares this table with the code.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import profiler
from torch.distributed import distributed_c10d
from torch.nn.parallel import DistributedDataParallel
from torch.optim import optimizer as torch_optimizer

__all__ = ["NEEDS", "Need", "missing_names", "samples"]


@dataclass(frozen=True)
class Need:
    """What the library does, and the private names without which it cannot; the first part is one of :func:`samples`.

    Without what is ``optional`` it can do: a flag of a mode that it refuses, or a faster way.
    """

    purpose: str
    names: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()


NEEDS = (
    Need(
        "registration with DDP",
        ("ddp._comm_hooks", "ddp._get_ddp_logging_data", "ddp.reducer", "reducer._reset_state"),
        ("ddp._delay_all_reduce_all_params", "ddp._delay_all_reduce_params", "ddp._use_python_reducer"),
    ),
    Need(
        "the end of backward",
        (
            "torch.autograd.Variable._execution_engine.queue_callback",
            "torch._C._current_autograd_node",
            "torch._C._current_graph_task_id",
        ),
    ),
    Need(
        "ends of scripts on Gloo",
        (),
        (
            "torch._C._get_obj_in_tls",
            "torch._C._is_key_in_tls",
            "torch._C._remove_obj_from_tls",
            "torch._C._stash_obj_in_tls",
        ),
    ),
    Need("gradients that were changed", ("tensor._version",)),
    Need(
        "gradients that are read-only",
        ("torch.Tensor._make_wrapper_subclass", "torch._C._disabled_torch_function_impl"),
    ),
    Need(
        "process groups",
        ("group._get_backend", "group._get_sequence_number_for_group", "c10d._world.pg_map"),
    ),
    Need(
        "connections of its own, on Gloo",
        ("backend._allgather_base", "backend._reduce_scatter_base"),
        ("backend._get_sequence_number_for_group", "backend.options._devices"),
    ),
    Need(
        "Join",
        (
            "ddp._join_config",
            "ddp._divide_by_initial_world_size",
            "ddp._has_rebuilt_buckets",
            "ddp._find_common_rank",
            "ddp._check_global_requires_backward_grad_sync",
            "ddp._assign_modules_buffers",
            "ddp._build_params_for_reducer",
            "ddp._sync_module_buffers",
            "ddp._sync_final_model",
            "reducer._get_local_used_map",
            "reducer._get_zeros_like_grad_buckets",
            "reducer._push_all_rebuilt_params",
            "reducer._rebuild_buckets",
            "reducer._run_comm_hook",
            "reducer._set_forward_pass_work_handle",
        ),
    ),
    Need(
        "updates in parts",
        (
            "optimizer._patch_step_function",
            "optimizer._optimizer_step_pre_hooks",
            "optimizer._optimizer_step_post_hooks",
            "torch_optimizer._global_optimizer_pre_hooks",
            "torch_optimizer._global_optimizer_post_hooks",
        ),
    ),
    Need(
        "state of optimizers",
        (
            "optimizer._optimizer_state_dict_pre_hooks",
            "optimizer._optimizer_state_dict_post_hooks",
            "optimizer._optimizer_load_state_dict_pre_hooks",
            "optimizer._optimizer_load_state_dict_post_hooks",
        ),
    ),
    Need(
        "kernels over lists of tensors",
        (
            "torch._foreach_norm",
            "torch._foreach_mul_",
            "torch._foreach_copy_",
            "torch._foreach_add_",
            "torch._foreach_neg_",
        ),
    ),
    Need("gathers in the next forward", ("module._parameters", "module._compiled_call_impl")),
    Need(
        "memory that is given back",
        ("storage._cdata", "torch._C._storage_Use_Count"),
    ),
    Need(
        "labels in profiles",
        ("profiler._is_profiler_enabled",),
        ("torch._C._profiler._RecordFunctionFast", "torch._C._profiler._ExperimentalConfig"),
    ),
)


def samples(ddp: DistributedDataParallel, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """What names begin with, from a model in a process group and its optimizer."""
    ddp.join_hook()  # Sets what DDP has only from its first Join on.
    tensor = next(ddp.parameters())
    group: dist.ProcessGroup = ddp.process_group
    return {
        "torch": torch,
        "ddp": ddp,
        "reducer": ddp.reducer,
        "group": group,
        "backend": group._get_backend(torch.device("cpu")) if hasattr(group, "_get_backend") else None,
        "c10d": distributed_c10d,
        "tensor": tensor,
        "storage": tensor.untyped_storage(),
        "optimizer": optimizer,
        "torch_optimizer": torch_optimizer,
        "module": nn.Linear(1, 1, device="cpu"),
        "profiler": profiler,
    }


def missing_names(names: tuple[str, ...], objects: Mapping[str, Any]) -> list[str]:
    """Those of ``names`` that this version of PyTorch lacks."""
    return [name for name in names if not _exists(name, objects)]


def _exists(name: str, objects: Mapping[str, Any]) -> bool:
    first, *rest = name.split(".")
    value = objects[first]
    for part in rest:
        if not hasattr(value, part):
            return False
        value = getattr(value, part)
    return True
