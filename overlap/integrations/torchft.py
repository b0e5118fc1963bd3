"""torchft: chains on the replicas of a ``Manager``, whose steps are committed or taken back.

[Note: a step of replicas]

Replicas are jobs of their own that come and go. Before a step torchft's manager finds out which are there (the quorum),
connects them anew if they have changed, and sends the state of one that is up to date to those that are not.
Collectives never raise: the manager notes their errors, and after backward it commits the step or does not.

So a step may leave nothing behind before the commit. The update is deferred: ``step()`` makes it, or does not, and with
it the stages' memory stays or is taken back.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

# The package exports it at run time, but not to type checkers.
from torch._C._distributed_c10d import AllgatherOptions
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from overlap.errors import ConfigurationError, TrainingLoopError, UnsupportedError
from overlap.hooks import PostLocal, Registration, Role, Stage
from overlap.hooks import chain as chain_of
from overlap.hooks.adapters import HookStage
from overlap.hooks.stage import walk
from overlap.integrations._common import Attachment, ChainFor, Recipe, needs
from overlap.optim import LocalSGD, ZeroRedundancyOptimizer
from overlap.optim.optimizer import OptimizerProxy
from overlap.resume import load_state_dict, state_dict

with needs("torchft"):
    from torchft.manager import Manager, WorldSizeMode
    from torchft.process_group import ManagedProcessGroup

__all__ = ["ManagedOptimizer", "prepare"]

_COMMITS = "torchft decides in step() whether a step is committed"
_REFUSED: Mapping[type, str] = {
    ZeroRedundancyOptimizer: (
        "a ZeroRedundancyOptimizer divides its state among replicas, and one that is lost takes its part along: use a "
        "plain optimizer"
    ),
    LocalSGD: f"LocalSGD makes updates between averages, and {_COMMITS}: use torchft.LocalSGD or torchft.DiLoCo",
    PostLocal: f"PostLocal averages parameters, and {_COMMITS}: use torchft.LocalSGD or torchft.DiLoCo",
    HookStage: "a communication hook keeps its memory to itself, so a step cannot be taken back: use a stage",
}


def prepare(
    manager: Manager, model: nn.Module, optimizer: Optimizer, *, chain: ChainFor, **ddp_options: Any
) -> tuple[DistributedDataParallel, ManagedOptimizer]:
    """``model`` in DDP over the replicas of ``manager``, with a chain registered, and the optimizer to step.

    ::

        manager = Manager(ProcessGroupGloo(), None, None, min_replica_size=1, use_async_quorum=False)
        ddp, optimizer = prepare(
            manager, model, torch.optim.SGD(model.parameters(), lr=0.1),
            chain=lambda optimizer: chain(PowerSGD(rank=2), Step(optimizer, deferred=True)),
        )
        while manager.current_step() < 1000:
            optimizer.zero_grad()  # the quorum; a replica that is behind gets the state of another
            loss_fn(ddp(x), y).backward()
            optimizer.step()  # if the step is committed

    The mean is over the replicas that take part in the step. A replica that comes back has the model, the optimizer and
    the stages' memory of another, except errors that are still to be delivered: the other delivers its own.

    Args:
        manager: of a replica group of one process, with ``use_async_quorum=False``.
        model: on the CPU, and not in DDP.
        optimizer: of its parameters.
        chain: as of :func:`overlap.integrations.accelerate.prepare`; its updates are deferred.
        **ddp_options: of DDP, such as ``bucket_cap_mb``.

    Communication: none; the first quorum makes the replicas the same.

    Raises:
        ConfigurationError, UnsupportedError: the manager, model, optimizer or chain does not fit; the message says why.
    """
    _check_manager(manager)
    if any(parameter.device.type != "cpu" for parameter in model.parameters()):
        raise UnsupportedError("the model is not on the CPU, where alone chains on torchft's groups have been tried")
    _refuse(optimizer)
    if ddp_options.get("static_graph"):
        raise ConfigurationError("static_graph=True: DDP would rebuild its buckets after a replica's own first step")
    group = _Replicas(manager)
    # With unused parameters DDP never rebuilds its buckets: those of a replica that comes back are those of the others.
    ddp = DistributedDataParallel(
        model, process_group=group, init_sync=False, find_unused_parameters=True, **ddp_options
    )
    ddp.broadcast_buffers = False  # As in torchft's DDP, each replica has its own. The argument of this name warns.
    vars(ddp)["join_hook"] = _refuse_join
    run = Attachment(Recipe(_checked(chain)), ddp, [optimizer], late=_COMMITS)
    assert run.registration is not None, "a chain was given"
    try:
        return ddp, ManagedOptimizer(manager, run, group, run.registration)
    except BaseException:
        run.remove()
        raise


class ManagedOptimizer(OptimizerProxy):
    """The optimizer that the loop steps; made by :func:`prepare`. It shares everything with that which it wraps.

    Call ``zero_grad()`` before each forward, and ``step()`` after each backward, also after one that has raised.
    """

    def __init__(self, manager: Manager, run: Attachment, group: _Replicas, registration: Registration) -> None:
        self.optimizer = run.optimizers[0]  # It runs the step hooks: step() is not patched.
        self._manager, self._run, self._group, self._registration = manager, run, group, registration
        self._is_between = False  # zero_grad() and step().
        try:
            manager.register_state_dict_fn("overlap", self._heal, self._state)
        except AssertionError as error:
            raise ConfigurationError("this manager has a model already: make a Manager for each model") from error

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Begin a step: wait for the quorum, and get the state of another replica where this one is behind.

        Raises:
            TimeoutError: torchft's, where there is no quorum within its ``quorum_timeout``.
            ConfigurationError: the other replicas have another model, optimizer or chain.
        """
        if self._is_between and self._manager.errored() is not None:
            self.step()  # The loop goes on after an error in backward: this replica votes against the step.
        super().zero_grad(set_to_none)
        self._manager.start_quorum()
        self._is_between = True

    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Make the update if torchft commits the step; otherwise take the stages' memory back, and change nothing.

        Raises:
            RuntimeError: torchft's, after more than its ``max_retries`` steps that were not committed.
            TrainingLoopError: :meth:`zero_grad` has not begun a step.
            UnsupportedError: a closure was given, or a ``GradScaler`` steps.
        """
        if closure is not None or "found_inf" in vars(self):
            raise UnsupportedError(f"{_COMMITS}, so neither a closure nor GradScaler works: use bfloat16, for example")
        if not self._is_between:
            raise TrainingLoopError("call optimizer.zero_grad() before each forward: it begins torchft's step")
        is_committed = False
        try:
            is_committed = self._manager.should_commit()
        finally:
            if not is_committed:
                self._registration.runtime.discard()
            self._is_between = False
        if is_committed:
            self.optimizer.step()
            self._registration.runtime.commit()  # Of a chain without an update.

    # A state is saved as that of the one rank of a run, and loaded by the second of two: it gets all that ranks have
    # alike, and of the errors none.

    def _state(self) -> dict[str, Any]:
        with self._group.seen_as(0, 1):
            return state_dict(self._run.ddp, self.optimizer)

    def _heal(self, state: Mapping[str, Any]) -> None:
        with self._group.seen_as(1, 2):
            load_state_dict(self._run.ddp, self.optimizer, [state])


def _check_manager(manager: Manager) -> None:
    """Raises: UnsupportedError: replicas that do not take part in a step would be in its collectives.

    Private: how the manager was made; torchft's own LocalSGD looks there, too.
    """
    if manager._use_async_quorum:
        raise UnsupportedError(
            "use_async_quorum=True: a replica that is behind would be in collectives before it has the memory of its "
            "stages; use Manager(..., use_async_quorum=False)"
        )
    if manager._replica_world_size_mode is not WorldSizeMode.DYNAMIC:
        raise UnsupportedError(
            "WorldSizeMode.FIXED_WITH_SPARES: stages would take the zeros of spare replicas for gradients; use "
            "WorldSizeMode.DYNAMIC"
        )
    if manager._group_world_size != 1:
        raise UnsupportedError(
            f"world_size={manager._group_world_size}: a DDP on torchft's group has one process a replica; make each "
            "process a replica group of its own"
        )


def _refuse(given: object) -> None:
    """Raises: UnsupportedError: ``given``, an optimizer or a stage, makes steps that cannot be taken back."""
    for refused, reason in _REFUSED.items():
        if isinstance(given, refused):
            raise UnsupportedError(f"{given!r}: {reason}")


def _refuse_join(**options: Any) -> None:
    raise UnsupportedError("Join needs ranks that stay: have a replica without inputs leave, by manager.shutdown()")


def _checked(chain: Any) -> Any:
    """``chain``, or its result, as a stage that :func:`_refuse` does not."""
    if callable(chain) and not isinstance(chain, Stage):
        return lambda optimizer: _checked(chain(optimizer))
    made = chain_of(*chain) if isinstance(chain, (list, tuple)) else chain_of(chain)
    for stage in walk(made):
        _refuse(stage)
        if type(stage).state_dict is not Stage.state_dict and type(stage).discard is Stage.discard:
            raise UnsupportedError(
                f"{stage!r} has memory and no discard(), and {_COMMITS}: write commit() and discard()"
            )
        if stage.role is Role.AVERAGER:
            raise UnsupportedError(f"{stage!r} changes parameters in backward, and {_COMMITS}")
    return made


class _Replicas(ManagedProcessGroup):
    """The replicas of the current quorum, as the process group of a DDP; this one alone before the first."""

    def __init__(self, manager: Manager) -> None:
        super().__init__(manager)
        self.overlap_channel = _Channel(self, manager)
        self._seen_as: tuple[int, int] | None = None

    def size(self) -> int:
        return max(1, self._manager.num_participants()) if self._seen_as is None else self._seen_as[1]

    def rank(self) -> int:
        return (self._manager.participating_rank() or 0) if self._seen_as is None else self._seen_as[0]

    @contextlib.contextmanager
    def seen_as(self, rank: int, ranks: int) -> Iterator[None]:
        """Within it this is ``rank`` of ``ranks``; the manager's own thread, which asks for states, cannot ask it."""
        self._seen_as = rank, ranks
        try:
            yield
        finally:
            self._seen_as = None


class _Channel:
    """The :class:`~overlap._torch.c10d.Channel` of :class:`_Replicas`, whose errors the manager notes."""

    lasts = True

    def __init__(self, group: _Replicas, manager: Manager) -> None:
        self.size, self.rank, self._manager = group.size, group.rank, manager

    def all_reduce(self, tensor: Tensor, op: Any) -> Sequence[Any]:
        return [self._manager.allreduce(tensor, reduce_op=op)]

    def all_gather(self, output: Tensor, input: Tensor) -> Sequence[Any]:
        return self._start("allgather_into_tensor_coalesced", [output], [input], AllgatherOptions())

    def send_recv(self, sends: Sequence[tuple[Tensor, int]], receives: Sequence[tuple[Tensor, int]]) -> Sequence[Any]:
        received = [work for tensor, peer in receives for work in self._start("recv", [tensor], peer, 0)]
        return received + [work for tensor, peer in sends for work in self._start("send", [tensor], peer, 0)]

    def fail(self, error: BaseException) -> None:
        """Have this replica vote against the step, and the others not wait for its next collective."""
        self._manager.report_error(RuntimeError(f"this replica failed in backward: {error!r}"))
        self._manager._pg.abort()

    def _start(self, collective: str, *arguments: Any) -> list[Any]:
        with _errors_noted(self._manager):
            if self._manager.errored() is None:
                return [_Noted(self._manager, getattr(self._manager._pg, collective)(*arguments))]
        return []


class _Noted:
    """A work whose error the manager notes."""

    def __init__(self, manager: Manager, work: dist.Work) -> None:
        self._manager, self._work = manager, work

    def wait(self) -> None:
        with _errors_noted(self._manager):
            self._work.wait()


@contextlib.contextmanager
def _errors_noted(manager: Manager) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        manager.report_error(error)
