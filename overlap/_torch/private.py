"""The private names of PyTorch that this library uses, in one table. They are looked for when it is imported, so that a
PyTorch without one of them is an error that names it, and not a wrong result later.

A name is there if its owner has it or, as an attribute of instances or a mark that PyTorch sets, if code of the owner
names it. Names that some supported versions lack are not in the table: whoever uses one asks for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from inspect import unwrap
from pkgutil import resolve_name
from types import CodeType
from typing import Any, NamedTuple

import torch


class Use(NamedTuple):
    """Names of one owner, their purpose, and the remedy when PyTorch has them no longer."""

    owner: str
    names: str
    """Separated by spaces."""
    purpose: str
    instead: str
    """For whoever mends the package; no code reads it."""


_BACKWARD = "_current_graph_task_id _current_autograd_node"
_CONTEXT = "_is_key_in_tls _get_obj_in_tls _remove_obj_from_tls _stash_obj_in_tls"
_MANY = "_foreach_add_ _foreach_copy_ _foreach_mul_ _foreach_neg_ _foreach_norm _foreach_sub_ _foreach_zero_"
_FUSED = "_fused_adam_ _fused_adamw_ _fused_sgd_"
_STEP_HOOKS = "_optimizer_step_pre_hooks _optimizer_step_post_hooks"
_STATE_HOOKS = "_optimizer_state_dict_pre_hooks _optimizer_state_dict_post_hooks"
_LOAD_HOOKS = "_optimizer_load_state_dict_pre_hooks _optimizer_load_state_dict_post_hooks"
_GLOBAL_HOOKS = "_global_optimizer_pre_hooks _global_optimizer_post_hooks"
_ANSWERS = "_find_common_rank _check_global_requires_backward_grad_sync"
_BUFFERS = "_assign_modules_buffers _sync_module_buffers"
_REPLAY = (
    "_rebuild_buckets _get_zeros_like_grad_buckets _run_comm_hook _push_all_rebuilt_params _get_local_used_map "
    "_set_forward_pass_work_handle"
)
_OF_DDP = "torch.nn.parallel.DistributedDataParallel"
_TYPES = "Backend GradBucket PrefixStore Store TCPStore Work"

USES = (
    Use("torch._C", _BACKWARD, "which backward the calling thread is in", "record it in hooks of the first gradient"),
    Use("torch._C", _CONTEXT, "works that hold nothing of Python's", "see [Note: works without Python objects]"),
    Use("torch._C", "_storage_Use_Count", "memory that only DDP uses", "refuse release_gradients"),
    Use("torch._C", "_disabled_torch_function_impl", "read-only gradients", "follow DTensor"),
    Use("torch._C", "TensorBase", "gradients of many parameters, set at once", "a loop over the parameters"),
    Use("torch._C", "Future", "futures made in C++", "ask for .wait and .then"),
    Use("torch._C._profiler", "_RecordFunctionFast", "labels of stages", "torch.profiler.record_function"),
    Use("torch._C._profiler", "_ExperimentalConfig", "profiles of all threads", "its public successor"),
    Use("torch.autograd.profiler", "_is_profiler_enabled", "labels of stages", "always record_function"),
    Use("torch._C._distributed_c10d", _TYPES, "types that torch.distributed exports at run time", "torch.distributed"),
    Use("torch", _MANY, "one call for a list of tensors", "a loop over the list"),
    Use("torch", _FUSED, "PyTorch's fused kernels", "the optimizer's own step"),
    Use("torch", "_chunk_cat", "packing on accelerators", "a loop of copies"),
    Use("torch", "_amp_foreach_non_finite_check_and_unscale_", "the kernel of GradScaler", "follow torch.amp"),
    Use("torch.ops.aten", "_to_copy", "Module.to on a gradient", "follow Tensor.to"),
    Use("torch.Tensor", "_version", "changes in place", "none: refuse its users"),
    Use("torch.Tensor", "_base _is_view", "views of a gradient", "compare storages"),
    Use("torch.Tensor", "_make_wrapper_subclass", "read-only gradients", "follow DTensor"),
    Use("torch.UntypedStorage", "_cdata", "storages told apart", "data_ptr(), where there is memory"),
    Use("torch.autograd.Variable", "_execution_engine", "the end of backward", "follow FSDP"),
    Use("torch.utils._pytree", "tree_map_only", "tensors in arguments of an operator", "torch.utils.pytree"),
    Use("torch.nn.Module", "_buffers _parameters _modules", "the parts of a module", "named_buffers() and the like"),
    Use("torch.nn.Module", "_compiled_call_impl", "modules compiled in place", "none: they are refused"),
    Use(
        "torch.optim.Optimizer", _STEP_HOOKS, "step hooks of a wrapped optimizer", "follow Optimizer.profile_hook_step"
    ),
    Use("torch.optim.Optimizer", f"{_STATE_HOOKS} {_LOAD_HOOKS}", "hooks of a class with its own state", "the same"),
    Use("torch.optim.Optimizer", "_patch_step_function", "step hooks of a sharded optimizer", "call them by hand"),
    Use("torch.optim.optimizer", _GLOBAL_HOOKS, "hooks of all optimizers", "run them around each part"),
    Use("torch.optim.Adam", "_init_group", "the state of a parameter before its first step", "step it alone"),
    Use(
        "torch.optim.lr_scheduler.LRScheduler", "_wrapped_by_lr_sched _opt_called", "schedulers' own step", "follow it"
    ),
    Use("torch.distributed.ProcessGroup", "_get_backend", "the backend for a device", "get_backend_config"),
    Use("torch.distributed.ProcessGroup", "_get_sequence_number_for_group", "collectives issued", "none: no check"),
    Use("torch.distributed.distributed_c10d", "_world", "names and stores of groups", "the group's own methods"),
    Use("torch.distributed.distributed_c10d", "_process_group_name", "groups that few ranks make", "split_group"),
    Use("torch.distributed.distributed_c10d", "_coalescing_manager", "one launch for many", "a launch each"),
    Use("torch.distributed.algorithms.join.Joinable", "_join_config", "notified of a Join's calls", "none"),
    Use("torch.distributed.Reducer", _REPLAY, "the replay of a backward under Join", "follow DDP's own join hook"),
    Use("torch.distributed.Reducer", "_reset_state", "forwards after a failed backward", "build DDP anew"),
    Use("torch.nn.parallel.distributed", "_find_tensors", "outputs as DDP looks for them", "torch.utils.pytree"),
    Use(_OF_DDP, _ANSWERS, "the answers of a Join", "let DDP ask"),
    Use(_OF_DDP, _BUFFERS, "the replay of a forward under Join", "follow DDP's own join hook"),
    Use(_OF_DDP, "_build_params_for_reducer", "parameters in the reducer's order", "named_parameters()"),
    Use(_OF_DDP, "_sync_final_model", "the last average before Join copies a model", "average in the last step"),
    Use(_OF_DDP, "_divide_by_initial_world_size", "PyTorch's Join, which reducers do not see", "refuse it"),
    Use(_OF_DDP, "_has_rebuilt_buckets", "the forward that compares buckets", "count forwards"),
    Use(_OF_DDP, "_get_ddp_logging_data _comm_hooks", "the hook that is registered", "none: refuse a second one"),
)
_UNIT = "fsdp_params mesh_info device reduce_grads all_reduce_grads gradient_divide_factor"
_SHARD = "sharded_param sharded_size contiguous_sharded_stride padded_sharded_param_size _sharded_local_tensor"
_OF_FSDP = "torch.distributed.fsdp._fully_shard"
_REDUCED = "follow foreach_reduce"
# Looked for when a chain is registered with a model that FSDP shards: to import FSDP takes a second.
FSDP_USES = (
    Use("torch.distributed.fsdp.FSDPModule", "_get_fsdp_state", "the units of a model", "follow FSDPModule.reshard"),
    Use("torch.distributed.fsdp.FSDPModule", "set_reduce_scatter_unused_params", "a remedy", "PyTorch 2.13"),
    Use(f"{_OF_FSDP}._fsdp_state.FSDPState", "_fsdp_param_groups", "the units of a model", "the same"),
    Use(f"{_OF_FSDP}._fsdp_param_group.FSDPParamGroup", _UNIT, "a unit", _REDUCED),
    Use(f"{_OF_FSDP}._fsdp_param_group.FSDPParamGroup", "_all_reduce_hook", "a 1-D mesh", "set_all_reduce_hook"),
    Use(f"{_OF_FSDP}._fsdp_param.FSDPParam", _SHARD, "shards and where their gradients lie", _REDUCED),
    Use(f"{_OF_FSDP}._fsdp_common.DDPMeshInfo", "replicate_process_group", "HSDP's all-reduce", _REDUCED),
    Use(f"{_OF_FSDP}._fsdp_common.FSDPMeshInfo", "shard_process_group", "the other shards of a replica", _REDUCED),
    Use(
        f"{_OF_FSDP}._fsdp_collectives.foreach_reduce",
        "all_reduce_group all_reduce_hook all_reduce",
        "which of them FSDP calls",
        _REDUCED,
    ),
)
# Of modules that take seconds to import: a test alone looks for these.
LATE_USES = (
    Use("torch._dynamo.eval_frame.OptimizedModule", "_orig_mod", "compiled modules", "follow torch.compile"),
    Use(
        "torch.distributed._composable.replicate._ReplicateState",
        "_ddp _param_names has_initialized lazy_init",
        "the DDP model behind replicate()",
        "refuse it",
    ),
    Use("torch.distributed.checkpoint.filesystem", "_StorageInfo", "one box in memory", "FileSystemWriter.write_data"),
)


def check_private_parts(uses: Iterable[Use] = USES) -> None:
    """Raises: ImportError: this PyTorch lacks some of ``uses``; the message names them and their purposes."""
    missing = [f"{use.owner}.{name} ({use.purpose})" for use in uses for name in _missing(use)]
    if missing:
        raise ImportError(
            f"torch {torch.__version__} lacks private names that overlap uses: {', '.join(missing)}. Install a version "
            "that overlap was tested with: pip install torch==2.13.0"
        )


def _missing(use: Use) -> Iterator[str]:
    try:
        owner = resolve_name(use.owner)
    except (ImportError, AttributeError):
        yield from use.names.split()
        return
    named: set[str] | None = None
    for name in use.names.split():
        if not hasattr(owner, name):
            named = set(_named_in(owner)) if named is None else named
            if name not in named:
                yield name


def _named_in(owner: Any) -> Iterator[str]:
    """The names and strings in the code of a function, or of a class and of its bases, and the fields of a class."""
    classes = getattr(owner, "__mro__", ())
    members = [owner, *(method for cls in classes for method in vars(cls).values())]
    codes = [code for one in members if isinstance(code := getattr(unwrap(one), "__code__", None), CodeType)]
    for cls in classes:
        yield from getattr(cls, "__annotations__", ())
    for code in codes:
        yield from (*code.co_names, *code.co_varnames)
        for constant in code.co_consts:
            if isinstance(constant, CodeType):
                codes.append(constant)
            elif isinstance(constant, str):
                yield constant
