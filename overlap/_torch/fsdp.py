"""Private parts of FSDP2: of ``fully_shard``, and of the ``replicate`` that is built on it.

There is no public way to the gradient of a unit in place of its all-reduce between replicas: the hook of
``set_all_reduce_hook`` runs after that all-reduce. To import this module is to import FSDP, which takes a second.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_common import DDPMeshInfo
from torch.distributed.tensor import DTensor

from overlap.errors import ConfigurationError, RegistrationError, UnsupportedError


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
    """The ``FSDPParamGroup`` of each unit of ``model``, whose parameters FSDP gathers and reduces together. They are
    the sharded ones afterwards."""
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


def group_of_replicas(groups: Sequence[Any], given: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """The ranks with the same shards. Raises: ConfigurationError, RegistrationError: there are none to reduce over."""
    if not groups:
        raise ConfigurationError("no part of the model has parameters that FSDP shards: call fully_shard(model) first")
    if meta := [one for unit in groups for one in unit.fsdp_params if one.sharded_param.is_meta]:
        raise UnsupportedError(
            f"{len(meta)} parameters are on the meta device, without values: call model.to_empty(device=...) and "
            "load a state before registering"
        )
    found = {replicas_of(unit) for unit in groups}
    if any(isinstance(one, ReplicaGroup) for one in found):
        raise RegistrationError("a part of the model has a reducer registered already: .remove() that registration")
    if len(found) > 1:
        raise ConfigurationError(
            "parameters are replicated over different groups of ranks, and one reducer serves one: call fully_shard "
            "with the same mesh for all of them"
        )
    if (own := found.pop()) is not None and given is None:
        return own
    if own is not None:
        raise ConfigurationError("FSDP reduces over the mesh's replicate dimension by itself: leave group= out")
    if given is None:
        raise ConfigurationError(
            "the mesh has no replicate dimension, so there is nothing to reduce between: call fully_shard(model, "
            'mesh=init_device_mesh(device, (replicas, shards), mesh_dim_names=("replicate", "shard"))), or give group='
        )
    if any(unit._all_reduce_hook is not None for unit in groups):
        raise RegistrationError("a part of the model has a hook already: leave set_all_reduce_hook out")
    shards = {rank for unit in groups for rank in dist.get_process_group_ranks(unit.mesh_info.shard_process_group)}
    if common := sorted(shards & set(dist.get_process_group_ranks(given)) - {dist.get_rank()}):
        raise ConfigurationError(
            f"group= has ranks {common}, which have other shards of the same parameters: give the ranks that have the "
            'same shard, mesh.get_group("replicate")'
        )
    return given


def dims_of_replica(mesh: DeviceMesh, replicas: dist.ProcessGroup) -> list[int]:
    """The dimensions of ``mesh`` along which one replica lies."""
    ranks = set(dist.get_process_group_ranks(replicas))
    return [dim for dim in range(mesh.ndim) if not ranks >= set(dist.get_process_group_ranks(mesh.get_group(dim)))]


def groups_of_replica(units: Sequence[Any], replicas: dist.ProcessGroup) -> list[dist.ProcessGroup]:
    """The groups that this rank has in the dimensions along which its replica lies."""
    parameters = (one.sharded_param for unit in units for one in unit.fsdp_params)
    meshes = [one.device_mesh for one in parameters if isinstance(one, DTensor)]
    largest = max(meshes, key=lambda mesh: mesh.ndim, default=None)
    return [] if largest is None else [largest.get_group(dim) for dim in dims_of_replica(largest, replicas)]
