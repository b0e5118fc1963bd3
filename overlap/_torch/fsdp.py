"""Private parts of FSDP2: of ``fully_shard``, and of the ``replicate`` that is built on it.

There is no public way to the gradient of a unit in place of its all-reduce between replicas: the hook of
``set_all_reduce_hook`` runs after that all-reduce. To import this module is to import FSDP, which takes a second.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from overlap.errors import UnsupportedError

try:
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.fsdp._fully_shard._fsdp_collectives import foreach_reduce
    from torch.distributed.fsdp._fully_shard._fsdp_common import DDPMeshInfo
    from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
    from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState
except ImportError as error:
    raise UnsupportedError(f"torch {torch.__version__}: chains on FSDP2 are not possible, {error}") from error

__all__ = ["DTensor", "DeviceMesh", "ReplicaGroup", "missing_parts", "param_groups", "replicas_of", "trained"]

PARTS: dict[Any, tuple[str, ...]] = {
    FSDPModule: ("_get_fsdp_state", "set_reduce_scatter_unused_params"),
    FSDPState: ("_fsdp_param_groups",),
    FSDPParamGroup: (
        *("fsdp_params", "mesh_info", "device", "reduce_grads", "all_reduce_grads", "gradient_divide_factor"),
        *("_all_reduce_hook", "_all_reduce_process_group"),
    ),
    FSDPParam: (
        *("sharded_param", "sharded_size", "contiguous_sharded_stride", "padded_sharded_param_size"),
        "_sharded_local_tensor",
    ),
    DDPMeshInfo: ("replicate_process_group",),
    foreach_reduce: ("all_reduce_group", "all_reduce_hook", "all_reduce"),
}
"""What this module and ``hooks/meshes.py`` use, by owner: attributes, or names in a function."""


def missing_parts(parts: Mapping[Any, tuple[str, ...]] = PARTS) -> list[str]:
    """Those of ``parts`` that this PyTorch does not have."""
    return [f"{owner.__name__}.{name}" for owner, names in parts.items() for name in names if name not in _known(owner)]


def _known(owner: Any) -> set[str]:
    """The names of a class's attributes, also of those that its methods set, or the names in a function."""
    members = [owner] if inspect.isfunction(owner) else vars(owner).values()
    codes = [
        code
        for one in members
        if callable(one) and (code := getattr(inspect.unwrap(one), "__code__", None)) is not None
    ]
    named = (name for code in codes for name in (*code.co_names, *code.co_varnames))
    return {*dir(owner), *getattr(owner, "__annotations__", ()), *named}


if missing := missing_parts():
    raise UnsupportedError(
        f"torch {torch.__version__} has no {', '.join(missing)}, which chains on FSDP2 need: use torch 2.13, or "
        "register the chain with DistributedDataParallel"
    )


class ReplicaGroup(dist.ProcessGroup):
    """Stands for the ranks of ``group``, over which FSDP all-reduces the gradient of a unit; calls ``reduce`` with the
    flat gradient, and whether its sum is asked for, in place of its mean."""

    def __init__(self, group: dist.ProcessGroup, reduce: Callable[[Tensor, bool], None]) -> None:
        super().__init__(group.rank(), group.size())  # type: ignore[call-arg]
        self.group, self._reduce = group, reduce

    def allreduce(self, tensors: Any, opts: Any = None) -> None:  # type: ignore[override]
        """The only collective that FSDP issues here."""
        self._reduce(tensors[0], opts.reduceOp == dist.ReduceOp.SUM)


def param_groups(model: nn.Module) -> list[Any]:
    """The ``FSDPParamGroup`` of each unit of ``model``: what FSDP gathers and reduces together. Parameters are the
    sharded ones afterwards."""
    modules = [module for module in model.modules() if isinstance(module, FSDPModule)]
    for module in modules:
        module.reshard()
    states = dict.fromkeys(module._get_fsdp_state() for module in modules)
    return [group for state in states for group in state._fsdp_param_groups]


def replicas_of(unit: Any) -> dist.ProcessGroup | None:
    """The ranks that have the same shards of the parameters of ``unit``, over which FSDP reduces."""
    return unit.mesh_info.replicate_process_group if isinstance(unit.mesh_info, DDPMeshInfo) else None


def trained(unit: Any) -> list[Any]:
    """The ``FSDPParam`` of each trainable parameter, in the order in which their gradients lie in the flat one."""
    return [one for one in unit.fsdp_params if one.sharded_param.requires_grad]
