"""DDP under a Join."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor, nn
from torch.distributed.algorithms import join as base
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from overlap._torch.autograd import after_all_of_backward
from overlap._torch.c10d import issued
from overlap._torch.join import JoinedDDP, on_notify
from overlap._torch.read_only import AppliedGradient, Attempt, Terms
from overlap.errors import TrainingLoopError, UnsupportedError
from overlap.join.adapters import Call, JoinableAdapter

if TYPE_CHECKING:
    from overlap.join.participation import JoinSession

__all__ = ["DDPAdapter", "ReplayedGradients"]

_LOCKSTEP = (
    'use Join(..., on_exhausted="stop"), which keeps all ranks in step, with `for batch in join.iterate(loader)`'
)


class DDPAdapter(JoinableAdapter):
    """Watches forwards (rebuilt buckets, buffers) and, apart from them, backwards that synchronize gradients.

    So joined ranks replay what happened: forwards without a backward, one backward of several forwards, accumulation
    under ``no_sync``.
    """

    calls = (Call.FORWARD, Call.BACKWARD)
    precedence = 2

    def __init__(self, ddp: DistributedDataParallel, hook: base.JoinHook, *, shadows: bool) -> None:
        super().__init__(ddp, hook)
        self._ddp, self._checks_forward = ddp, shadows
        self._joined = JoinedDDP(ddp)
        self._issued: int | None = None
        # Of this rank's gradients; None until a backward needs it.
        self._weight: float | None = None
        self._expects_backward = False
        # Whether the last forward was under no_sync, and whether .grad has what was added up so since the last
        # synchronized backward.
        self._accumulates = self._has_own = False
        self._backward_hook: Any = None
        self._session: JoinSession | None = None
        for name, module in ddp.module.named_modules():
            if shadows and isinstance(module, nn.SyncBatchNorm):
                raise UnsupportedError(
                    f"{name or 'the model'} is a SyncBatchNorm, whose collectives in forward a rank without inputs "
                    f"cannot answer; {_LOCKSTEP}"
                )
        if shadows and self._joined.has_buffer_hook:
            raise UnsupportedError(f"a hook that was registered on the model synchronizes its buffers; {_LOCKSTEP}")

    def enter(self, session: JoinSession, undo: ExitStack) -> None:
        hook = self._joined.hook_name
        if session.divides_by_count and hook is not None and not hook.startswith("overlap"):
            raise UnsupportedError(
                f"the hook {hook} divides by the number of all ranks, whatever the Join's options; register one of "
                "overlap.hooks, or leave out divide_by_initial_world_size=False"
            )
        self._session = session
        self._expects_backward = self._accumulates = self._has_own = False
        undo.callback(session.gradients.take_back)
        undo.callback(on_notify(self._ddp, torch.compiler.disable(lambda: self._on_forward(session))))
        undo.callback(self._joined.leave)
        undo.callback(self._watch_backward, False)
        self._joined.enter(lambda: session.buffer_source, torch.compiler.disable(self._before_module))
        # What a Join does in a forward does not belong to a compiled one.
        undo.callback(self._ddp.register_forward_hook(torch.compiler.disable(self._after_module)).remove)
        if session.counts_samples:
            # On parameters, not on outputs: those may depend on each other, and be in containers of any kind.
            for parameter in self._trained:
                undo.callback(parameter.register_hook(self._weigh).remove)

    # An active rank.

    def _on_forward(self, session: JoinSession) -> None:
        ddp = self._ddp
        records_gradients = torch.is_grad_enabled()
        has_buffers = bool(ddp.will_sync_module_buffers())
        if not (records_gradients or has_buffers):
            return  # Without collectives there is nothing to replay.
        synchronizes = records_gradients and bool(ddp.require_backward_grad_sync)
        if records_gradients:
            session.gradients.take_back()
            self._weight = None
        # Without collectives there is nothing to replay, and a poll may go on during the forward.
        session.on_call(
            self,
            Call.FORWARD,
            [records_gradients, has_buffers, synchronizes],
            has_collectives=has_buffers or self._joined.may_rebuild,
        )
        if synchronizes:
            self._expects_backward = True
            if session.divides_by_count and self._joined.hook_name is None:
                self._joined.divide_by(lambda: session.divisor)
        self._accumulates = records_gradients and not synchronizes
        self._watch_backward(session.watches_backward or self._accumulates)

    @property
    def _trained(self) -> list[Tensor]:
        return [parameter for parameter in self._ddp.parameters() if parameter.requires_grad]

    def _weigh(self, gradient: Tensor) -> Tensor:
        if self._weight is None:
            assert self._session is not None, "gradients are weighed inside of the block"
            self._weight = self._session.gradient_weight
        return gradient if self._weight == 1.0 else gradient * self._weight

    def _watch_backward(self, is_watched: bool) -> None:
        if is_watched == (self._backward_hook is not None):
            return
        if is_watched:
            self._backward_hook = torch.autograd.graph.register_multi_grad_hook(
                self._trained, self._on_first_gradient, mode="any"
            )
        else:
            self._backward_hook.remove()
            self._backward_hook = None

    def _on_first_gradient(self, gradient: Tensor) -> None:
        session = self._session
        assert session is not None, "backwards are watched inside of the block"
        # Not under no_sync, and only once where a checkpointed backward runs in parts.
        if self._expects_backward:
            self._expects_backward = self._has_own = False
            session.on_call(self, Call.BACKWARD)
            if session.missing:
                after_all_of_backward(lambda: session.gradients.hand_over(self._trained))
        elif self._accumulates:
            self._has_own = True

    def _before_module(self) -> None:
        if self._checks_forward:
            self._issued = issued(self._ddp.process_group)

    def _after_module(self, module: nn.Module, inputs: Any, output: Any) -> None:
        if self._checks_forward:
            self._checks_forward = False
            if self._issued != issued(self._ddp.process_group):
                raise UnsupportedError(
                    "the model issues collectives of its own in forward, which a rank without inputs cannot answer; "
                    f"{_LOCKSTEP}"
                )

    # A rank without inputs.

    def replay(self, call: Call, detail: Sequence[float] | None) -> None:
        session = self._session
        assert session is not None, "a Join replays inside of its block"
        session.gradients.take_back()
        if call is Call.BACKWARD:
            self._replay_backward(session)
            return
        records_gradients, has_buffers, synchronizes = detail or (True, self._ddp.will_sync_module_buffers(), True)
        self._joined.replay_forward(
            records_gradients=bool(records_gradients),
            buffers_from=session.buffer_source if has_buffers else None,
            synchronizes=bool(synchronizes),
        )

    def _replay_backward(self, session: JoinSession) -> None:
        session.replays_own_gradients, self._has_own = self._has_own, False
        try:
            self._joined.replay_backward(
                own_gradients_by=session.divisor if session.replays_own_gradients else None, poll=session.board.poll
            )
        finally:
            session.replays_own_gradients = False


class ReplayedGradients(Terms):
    """Gradients of a backward that ranks without inputs replay: read-only until ``step()``, since those ranks step with
    the mean that backward left. See [Note: applied gradients are read-only]."""

    def __init__(self, missing: Callable[[], list[int]]) -> None:
        self._missing = missing
        self._handed: dict[int, tuple[Tensor, AppliedGradient]] = {}

    def hand_over(self, parameters: Iterable[Tensor]) -> None:
        """A backward is over that ranks without inputs have replayed."""
        for parameter in parameters:
            gradient = parameter.grad
            if gradient is not None and not gradient.is_sparse and not isinstance(gradient, AppliedGradient):
                handed = AppliedGradient(gradient, gradient, weakref.ref(parameter), self)
                self._handed[id(parameter)] = parameter, handed
                parameter.grad = handed

    def before_step(self, optimizer: Optimizer) -> None:
        """Called before ``optimizer`` steps. Raises: TrainingLoopError: the loop has put another gradient there."""
        if self._handed:
            # A step of this rank alone is not replayed: its gradients go back as they are.
            is_alone = getattr(optimizer, "steps_alone", False)
            self.take_back(None if is_alone else (each for group in optimizer.param_groups for each in group["params"]))

    def take_back(self, parameters: Iterable[Tensor] | None = None) -> None:
        """Put ordinary tensors back into ``.grad`` of ``parameters``; by default of all, also of those assigned to."""
        keys = (
            list(self._handed) if parameters is None else [id(each) for each in parameters if id(each) in self._handed]
        )
        for parameter, handed in [self._handed.pop(key) for key in keys]:
            if parameter.grad is handed:
                parameter.grad = handed.plain
            elif parameters is not None:
                self.refuse(handed, Attempt.WRITE)

    def refuse(self, gradient: AppliedGradient, attempt: Attempt) -> NoReturn:
        raise TrainingLoopError(
            "gradients cannot be changed between backward and step() (by clipping or GradScaler, say) while ranks "
            f"{self._missing()} have run out of inputs and step with the mean that backward left: clip with "
            "Step(optimizer, clip_grad_norm=...), ZeroStep(zero, clip_grad_norm=...) or "
            "LocalSGD(..., transforms=[ClipGradNorm(...)]), and leave GradScaler out (bfloat16 needs none)"
        )
