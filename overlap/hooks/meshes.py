"""Reducers between the replicas of a model that FSDP2 shards: HSDP, ``replicate``, or a 1-D mesh and a group.

[Note: replicas]

FSDP reduce-scatters the gradient of a unit over the ranks of its shards, and all-reduces the flat part that each of
them gets over the ranks that have the same shard. Here that all-reduce is a reducer's: a unit is a :class:`Bucket`
whose parameters are this rank's shards. On a mesh with a replicate dimension a stand-in takes the place of the process
group that FSDP reduces over, so that FSDP's divide factors, accumulation and streams are its own; on a 1-D mesh it is
FSDP's hook behind the reduce-scatter. Both are called with FSDP's all-reduce stream current, on which all of the stages
runs.

FSDP needs the result when the call returns, so a unit runs to its end there. It cannot go on after an exception: the
first error of a pass is kept, and raised when FSDP's own end of backward is over. Ranks with the other shards of this
replica have gradients and errors of their own; one number, the largest over them, makes all take the step or none.
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any
from weakref import ref

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from overlap._checks import check_device
from overlap._torch import fsdp
from overlap._torch.autograd import after_backward, backward_id
from overlap._torch.ddp import plain_name
from overlap._torch.device import current_stream, has_streams, hold, recorded_event
from overlap.errors import CollectiveError, ConfigurationError, PeerError
from overlap.hooks.adapters import HookStage, as_stage
from overlap.hooks.bucket import Bucket
from overlap.hooks.engine.channels import Channels
from overlap.hooks.engine.executors import Executor, StreamExecutor
from overlap.hooks.engine.registration import (
    Dispatcher,
    Registration,
    check_alike,
    found_dispatcher,
    keep_dispatcher,
)
from overlap.hooks.engine.runtime import Runtime
from overlap.hooks.engine.wavefront import BackwardPass, Task
from overlap.hooks.post_local_sgd import PostLocal
from overlap.hooks.reducers import AllReduce, NoReduction, OnGroup
from overlap.hooks.stage import Role, Stage, StageContext, redistributed, walk, with_contexts
from overlap.ranks.board import Agreement, group_all_reduce

_INSTEAD = {
    Role.TRANSFORM: "it would see a shard of a unit at a time: use torch.nn.utils.clip_grad_norm_ after backward",
    Role.UPDATE: "FSDP owns the parameters: make the step with optimizer.step() after backward",
    Role.REDUCER: "it chooses its ranks by itself: give a reducer such as Cast(torch.bfloat16)",
    Role.AVERAGER: "FSDP owns the parameters, and averaging between steps is for DistributedDataParallel",
}
# Whatever lies beside a gradient, its mean is the same.
_ELEMENTWISE = (AllReduce, NoReduction)
# In a state of a stage: tensors by parameter's name, of the shape of its shard.
_BY_SHARD = ("error", "residuals")
_MARK, _TENSOR = "replica|", "@tensor"
_LOAD = (
    "with a dcp.FileSystemReader, state = {'overlap': registration.state_dict(reader.read_metadata())}; then "
    "dcp.load(state, storage_reader=reader); registration.load_state_dict(state['overlap'])"
)


class _Unit:
    """One of FSDP's units, an ``FSDPParamGroup``: which parameters are in its flat gradient, and where."""

    def __init__(self, held: Any, names: Mapping[Any, str]) -> None:
        self.fsdp = held
        self.names = {one: names[one.sharded_param] for one in held.fsdp_params}
        self.shards = {one: one._sharded_local_tensor.detach() for one in held.fsdp_params}
        self.partial: Tensor | None = None
        """On a 1-D mesh, the sum of gradients of backward passes without an all-reduce."""
        self._trained: list[Any] = []
        self._numel, self._members = 0, dict[str, Any]()

    def members(self, numel: int) -> dict[str, Any]:
        """The parameters of a flat gradient of ``numel`` elements, for a bucket."""
        if self._trained != (now := fsdp.trained(self.fsdp)):
            offset, views = 0, []
            for one in now:  # Rows that pad a shard to the size of the others lie between them, and are zero.
                views.append((one.sharded_size, one.contiguous_sharded_stride, offset))
                offset += one.padded_sharded_param_size.numel()
            fqns, shards = tuple(map(self.names.__getitem__, now)), tuple(map(self.shards.__getitem__, now))
            self._members = {"fqns": fqns, "parameters": shards, "views": tuple(views)}
            self._trained, self._numel = now, offset
        if numel != self._numel:
            names = self._members["fqns"]
            raise ConfigurationError(
                f"some of {', '.join(names[:4])}{', ...' if len(names) > 4 else ''} have no gradient in this backward: "
                "call model.set_reduce_scatter_unused_params(True) before the forward, and FSDP reduces zeros for them"
            )
        return self._members


class ReplicaRuntime(Runtime):
    """Runs a reducer on the units of one FSDP model. See [Note: replicas].

    ``peers`` are groups of ranks that have the other shards of this replica, one for each dimension of the mesh.
    """

    def __init__(self, stage: Stage, context: StageContext, units: list[_Unit], peers: list[dist.ProcessGroup]) -> None:
        super().__init__(stage, context)
        self.units, self.peers = units, peers
        self._has_sums = all(type(one) is AllReduce for one in walk(stage) if not one.children)
        self._is_awaited = False
        self._done: Any = None

    def _new_executor(self, stage: Stage, context: StageContext) -> Executor:
        if has_streams(context.device):
            return StreamExecutor(Channels(context.group), context.device, None)
        return Executor(Channels(context.group, are_private=Channels.can_serve(context.group)))

    def install(self) -> None:
        for unit in self.units:
            if fsdp.replicas_of(unit.fsdp) is None:
                unit.fsdp._all_reduce_hook = partial(self._on_shard, unit)
            else:  # Units have the object in common.
                unit.fsdp.mesh_info = copy.copy(unit.fsdp.mesh_info)
                stand_in = fsdp.ReplicaGroup(self.context.group, partial(self._reduce, unit))
                unit.fsdp.mesh_info.replicate_process_group = stand_in

    def close(self) -> None:
        units, self.units = self.units, []
        for unit in units:
            if fsdp.replicas_of(unit.fsdp) is None:
                unit.fsdp._all_reduce_hook = None
            else:
                unit.fsdp.mesh_info.replicate_process_group = self.context.group
        super().close()

    # A backward.

    def _is_synchronized(self) -> bool:
        return any(unit.fsdp.reduce_grads and unit.fsdp.all_reduce_grads for unit in self.units)

    def _watch_backward(self, graph: int) -> None:
        super()._watch_backward(graph)
        self._is_awaited = True
        # Behind FSDP's own end of backward, where units come whose inputs need no gradients.
        after_backward(self._after, if_dropped=partial(self._after, is_dropped=True))

    def _on_shard(self, unit: _Unit, flat: Tensor) -> None:
        """FSDP's hook, called at each reduce-scatter."""
        hold(flat)  # FSDP made it on the stream of reduce-scatters, and keeps it no longer than until it is cast.
        if not unit.fsdp.all_reduce_grads:  # As in FSDP itself partial sums are kept in the dtype of the reduction.
            unit.partial = flat.clone() if unit.partial is None else unit.partial.add_(flat)
            flat.zero_()
            return
        if unit.partial is not None:
            flat.add_(unit.partial)
            unit.partial = None
        self._reduce(unit, flat, is_sum=unit.fsdp.gradient_divide_factor is not None)

    def _reduce(self, unit: _Unit, flat: Tensor, is_sum: bool) -> None:
        """Reduce the gradient of a unit between replicas, in place. Never raises."""
        if not self._is_awaited:  # No forward of the root was seen.
            self._watch_backward(backward_id())
        if self._pass is None:
            self._pass = self._begin(is_replay=False)
            self._arrived = 0
        current = self._pass
        if current.error is None:  # Else FSDP's own collectives go on, so that no rank waits for another.
            current.executor.submit(partial(self._run, current, unit, flat, is_sum))
        if has_streams(flat.device):
            self._done = recorded_event(flat.device)

    def _run(self, current: BackwardPass, unit: _Unit, flat: Tensor, is_sum: bool) -> None:
        """Run the stages. FSDP asks for the sum where it divides by itself, and else for the mean, which is the
        backend's: Gloo's is the sum, divided, and a sum of ``AllReduce()`` is as exact."""
        divisor = replicas = self.context.group.size()
        if self._has_sums and (is_sum or not (has_streams(flat.device) or flat.dtype == torch.float16)):
            divisor = 1
        at: Any = {"index": self._arrived, "is_last": False, "step": current.step}
        try:
            members = unit.members(flat.numel())
        except ConfigurationError as error:
            current.fail(error)
            return
        self._arrived += 1
        bucket = Bucket(buffer=flat, group=self.context.group, divisor=divisor, **at, **members)
        current.drive(Task(self._pieces, current.executor, bucket, bucket), is_last=True)
        if is_sum and divisor > 1:
            flat.mul_(divisor)
        elif not is_sum and divisor < replicas:
            flat.div_(replicas)

    def _after(self, *, is_dropped: bool = False) -> None:
        """Called when FSDP has set the gradients."""
        self._is_awaited = False
        if (finished := self._pass) is None:
            return
        if self._done is not None:  # FSDP's own wait comes with the last backward of a step alone.
            current_stream(self.context.device).wait_event(self._done)
        if is_dropped:
            self._finish_without_raise(finished)
        else:
            try:
                self._decide(finished)
            except CollectiveError as lost:
                finished.fail(lost)
            self._finish(finished)

    def _decide(self, finished: BackwardPass) -> None:
        """Find whether the gradients of all shards are finite, and whether a rank with another shard has failed."""
        if not self.peers or (has_streams(self.context.device) and not self._called["discard"]):
            return
        verdict = torch.zeros((), device=self.context.device)  # 1: not finite; from 2 on: failed, its own error above.
        if self._largest:
            verdict += self._found_inf()
        if (error := finished.error) is not None:
            is_own = not isinstance(error, CollectiveError)
            verdict.fill_(2 + dist.get_rank() + is_own * dist.get_world_size())
        for group in self.peers:
            group_all_reduce(verdict, op=dist.ReduceOp.MAX, group=group)
        if has_streams(verdict.device):  # Where the host cannot ask.
            self._largest.append(torch.where(verdict == 0, verdict, math.inf))
        elif (found := int(verdict)) >= 2:
            rank = (found - 2) % dist.get_world_size()
            finished.fail(PeerError(f"rank {rank}, which has another shard of this replica, failed: see its error"))
        elif found:
            self._largest.append(torch.tensor(math.inf, device="cpu"))

    def _conclude(self, finished: BackwardPass) -> BaseException | None:
        if finished.error is not None:
            for unit in self.units:
                unit.partial = None
        return super()._conclude(finished)

    def _abandon(self, passes: int) -> None:
        self._is_awaited = False
        super()._abandon(passes)


def register_replicas(
    model: nn.Module, stage: Stage | Callable[..., Any], state: Any, group: dist.ProcessGroup | None
) -> ReplicaRegistration:
    """See :func:`overlap.register`."""
    dispatcher, groups = found_dispatcher(model), fsdp.param_groups(model)
    replicas = fsdp.group_of_replicas(groups, group)
    named = [(one, plain_name(name)) for name, one in model.named_parameters()]
    names = {one: name.replace("_checkpoint_wrapped_module.", "") for one, name in named}
    units = [_Unit(one, names) for one in groups]
    peers, runtime = fsdp.groups_of_replica(groups, replicas), None
    with ExitStack() as stack:
        agreement, *others = [stack.enter_context(Agreement(one, "register a chain")) for one in (replicas, *peers)]
        try:
            made = as_stage(stage, state)
            for one in walk(made):
                is_alone = one.sequence == (one,)
                if is_alone and (one.role is not Role.REDUCER or isinstance(one, HookStage | OnGroup | PostLocal)):
                    raise ConfigurationError(f"{one!r} cannot be registered under FSDP: {_INSTEAD[one.role]}")
            context = StageContext(
                group=replicas,
                device=groups[0].device,
                names={shard: unit.names[one] for unit in units for one, shard in unit.shards.items()},
                finds_unused=False,
                module=ref(model),
            )
            check_device(context.device, replicas)
            runtime = ReplicaRuntime(made, context, units, peers)
            runtime.attach()
            _check_copied(runtime, units)
            check_alike(agreement, runtime)
            for other in others:
                other.agree()
            runtime.open()
        except BaseException as error:
            for each in (agreement, *others):  # Ranks of one group wait for this one, which another has stopped.
                each.report(error)
            with suppress(Exception):  # The other error is the cause.
                if runtime is not None:
                    runtime.close()
            raise
    if dispatcher is None:
        keep_dispatcher(dispatcher := Dispatcher(replicas), model, model)
    runtime.install()
    registration = dispatcher.registration = ReplicaRegistration(runtime, dispatcher, model)
    return registration


def _check_copied(runtime: ReplicaRuntime, units: list[_Unit]) -> None:
    """With tensor parallelism a parameter that is not divided by it has copies, which a reducer that rounds a gradient
    with its neighbours would let diverge. Raises: ConfigurationError."""
    divided = {
        name: sum(not placement.is_replicate() for placement in getattr(one.sharded_param, "placements", ()))
        for unit in units
        for one, name in unit.names.items()
    }
    copied = {name for name, times in divided.items() if times < max(divided.values())}
    for stage, context in with_contexts(runtime.stage, runtime.context):
        if stage.children or isinstance(stage, _ELEMENTWISE):
            continue
        if rounded := sorted(copied & set((context.names or {}).values())):
            rules = ", ".join(f'"{name}": AllReduce()' for name in rounded)
            raise ConfigurationError(
                f"tensor parallelism leaves copies of {', '.join(rounded)}, and {stage!r} would round the gradients of "
                f'each with others beside it: write overlap.route({{{rules}, "*": {stage!r}}})'
            )


class ReplicaRegistration(Registration):
    """A reducer registered with an FSDP model, whose state :mod:`torch.distributed.checkpoint` saves and loads.

    [Note: the state of replicas]

    Replicas have errors of their own, and ranks a shard of each. So errors are one ``DTensor`` for each replica and
    parameter, on the mesh without its replicate dimension, and can be loaded by other numbers of shards. A tensor of
    another shape, such as PowerSGD's factors, is a shard's, and is loaded where there are as many shards. All else is
    a text for each rank.
    """

    def __init__(self, runtime: ReplicaRuntime, dispatcher: Dispatcher, model: nn.Module) -> None:
        super().__init__(runtime, dispatcher, model)
        self._peers, self._group = runtime.peers, runtime.context.group
        members = [(unit.names[one], one, unit.shards[one]) for unit in runtime.units for one in unit.names]
        self._shards: dict[str, Tensor] = {name: shard for name, _, shard in members}
        self._fsdp = {name: one for name, one, _ in members}
        self._place = ".".join(str(peers.rank()) for peers in self._peers)
        """That of this rank in its replica."""

    def state_dict(self, metadata: Any = None) -> dict[str, Any]:
        """The reducer's memory as the last step has left it, for ``dcp.save``; with the ``metadata`` of a checkpoint,
        tensors of its shapes, for ``dcp.load``. Every rank calls it.

        Communication: in each replica one rank reads from the store which parameters have errors, and answers all.
        """
        if metadata is not None:
            return self._empty(metadata.state_dict_metadata)
        tree = self.stage.state_dict()
        errors = {"|".join(path): by_name for path, by_name in _by_shard(tree)}
        dtypes = {path: {name: str(one.dtype) for name, one in errors[path].items()} for path in errors}
        for peers in self._peers:  # A shard may be too small to be compressed, or empty.
            with Agreement(peers, "save the state of a reducer") as agreement:
                dtypes = agreement.agree(dtypes, _united)
        for path, by_name in errors.items():
            for name in filter(dtypes[path].__contains__, self._shards):  # In the same order on all ranks.
                dtype = getattr(torch, dtypes[path][name].removeprefix("torch."))
                by_name[name] = by_name.pop(name, torch.zeros_like(self._shards[name], dtype=dtype))
        made: dict[str, Any] = {}
        head = f"{_MARK}{self._group.rank()}|"
        skeleton = self._flattened(tree, (), head, made)
        made[f"{head}{self._place}"] = json.dumps({"replicas": self._group.size(), "state": skeleton})
        return made

    def _flattened(self, value: Any, path: tuple[str, ...], head: str, made: dict[str, Any]) -> Any:
        if isinstance(value, Tensor):
            is_shard = _is_shard(path)
            key = head + "|".join(path if is_shard else (*path, self._place))
            made[key] = self._whole(path[-1], value) if is_shard else value
            return {_TENSOR: key.removeprefix(head)}
        if isinstance(value, Mapping):
            return {key: self._flattened(one, (*path, key), head, made) for key, one in value.items()}
        return value

    def _whole(self, name: str, local: Tensor) -> Tensor:
        """``local`` as this rank's shard of a tensor of the whole parameter's shape."""
        parameter: Any = self._fsdp[name].sharded_param
        mesh = getattr(parameter, "device_mesh", None)
        if mesh is None or not (dims := fsdp.dims_of_replica(mesh, self._group)):
            return local
        if len(dims) < mesh.ndim:  # FSDP itself wants names.
            mesh = mesh[tuple((mesh.mesh_dim_names or ())[dim] for dim in dims)]
        at: dict[str, Any] = {"shape": parameter.shape, "stride": parameter.stride()}
        return DTensor.from_local(local, mesh, [parameter.placements[dim] for dim in dims], run_check=False, **at)

    def _empty(self, saved: Mapping[str, Any]) -> dict[str, Any]:
        """What this rank loads of the keys that a checkpoint has."""
        keys = {rest: key for key in saved if (rest := key.partition(_MARK)[2])}
        trees = [key.split("|") for key in keys if key.count("|") == 1]
        places = {place for _, place in trees}
        own = self._place if len(places) == math.prod(peers.size() for peers in self._peers) else None
        rank, ranks, made = self._group.rank(), self._group.size(), dict[str, Any]()
        is_same = len({replica for replica, _ in trees}) == ranks
        for rest, key in keys.items():
            replica, *path = rest.split("|")
            is_own = int(replica) % ranks == rank
            if is_same and not is_own:
                continue
            if len(path) == 1:
                if path[0] == (own or min(places)):
                    made[_MARK + rest] = ""
            elif not _is_shard(path):
                if path[-1] == own:
                    made[_MARK + rest] = torch.empty(saved[key].size, dtype=saved[key].properties.dtype, device="cpu")
            elif path[-1] not in self._shards:
                raise ConfigurationError(f"the state has errors of {path[-1]}, which the model does not have")
            elif is_own:
                local = torch.zeros_like(self._shards[path[-1]], dtype=saved[key].properties.dtype)
                made[_MARK + rest] = self._whole(path[-1], local)
        return made

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load what ``dcp.load`` has filled in of :meth:`state_dict` with a checkpoint's metadata, on every rank.

        Errors that are still to be delivered stay the same in sum, at other numbers of replicas and of shards, too;
        factors and random numbers begin anew there.

        Raises:
            ConfigurationError: it is another model's or another stage's, or tensors are missing.
        """
        found = {key.removeprefix(_MARK): value for key, value in state_dict.items() if key.startswith(_MARK)}
        trees = {int(key.split("|")[0]): json.loads(found[key]) for key in found if key.count("|") == 1}
        rank, ranks = self._group.rank(), self._group.size()
        old = next(iter(trees.values()))["replicas"] if trees else 0
        if not trees or sorted(trees) != ([rank] if old == ranks else [*range(old)]):
            raise ConfigurationError(f"the state is not one of this registration, or not complete: {_LOAD}")
        of_all = [self._rebuilt(tree["state"], replica, found) for replica, tree in sorted(trees.items())]
        made = of_all[0] if old == ranks else redistributed(self.stage, of_all, rank=rank, ranks=ranks)
        self.stage.load_state_dict(made)

    def _rebuilt(self, value: Any, replica: int, found: Mapping[str, Any]) -> Any:
        if not isinstance(value, dict):
            return value
        if _TENSOR not in value:
            made = {key: self._rebuilt(one, replica, found) for key, one in value.items()}
            return {key: one for key, one in made.items() if one is not None or key not in self._shards}
        tensor, is_own = found.get(f"{replica}|{value[_TENSOR]}"), replica % self._group.size() == self._group.rank()
        if tensor is None and is_own and _is_shard(value[_TENSOR].split("|")):
            raise ConfigurationError(f"the state lacks {value[_TENSOR]}: {_LOAD}")
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _is_shard(path: Sequence[str]) -> bool:
    """Whether a tensor of a stage's state is of the shape of a parameter's shard."""
    return len(path) > 1 and path[-2] in _BY_SHARD


def _united(of_ranks: list[dict[str, dict[str, str]]]) -> dict[str, dict[str, str]]:
    """The names of all ranks, with their dtypes, by path."""
    paths = dict.fromkeys(path for one in of_ranks for path in one)
    return {path: {name: dtype for one in of_ranks for name, dtype in one.get(path, {}).items()} for path in paths}


def _by_shard(tree: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], dict[str, Tensor]]]:
    """The dictionaries of such tensors, with their paths."""
    for key, value in tree.items() if isinstance(tree, dict) else ():
        if key in _BY_SHARD:
            yield (*path, key), value
        else:
            yield from _by_shard(value, (*path, key))
