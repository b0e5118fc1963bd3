"""DDP under a Join."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.algorithms import join as base
from torch.nn.parallel import DistributedDataParallel

from overlap._torch.autograd import after_all_of_backward
from overlap._torch.c10d import issued
from overlap._torch.join import on_notify
from overlap._torch.joined_ddp import JoinedDDP, missing_names
from overlap.errors import UnsupportedError
from overlap.join.session import JoinableAdapter, JoinSession

__all__ = ["DDPAdapter"]

_LOCKSTEP = (
    'use Join(..., on_exhausted="stop"), which keeps all ranks in step, with `for batch in join.iterate(loader)`'
)


class DDPAdapter(JoinableAdapter):
    """Watches forwards (rebuilt buckets, buffers) and, apart from them, backwards that synchronize gradients.

    So joined ranks replay what happened: forwards without a backward, one backward of several forwards, accumulation
    under ``no_sync``.
    """

    precedence = 2

    def __init__(self, ddp: DistributedDataParallel, hook: base.JoinHook, *, shadows: bool) -> None:
        self._ddp, self._hook, self._checks_forward = ddp, hook, shadows
        self._joined = JoinedDDP(ddp)
        self._expects_backward = False
        self._watches_backward = False
        self._issued: int | None = None
        self._weight = 1.0
        # Whether the last forward was under no_sync, and whether .grad has what was added up so since the last
        # synchronized backward.
        self._accumulates = self._has_own = False
        self._session: JoinSession | None = None
        self._check(shadows=shadows)

    def _check(self, *, shadows: bool) -> None:
        if missing := missing_names(self._ddp):
            raise UnsupportedError(
                f"DistributedDataParallel of torch {torch.__version__} lacks {', '.join(missing)}, which Join needs; "
                "use torch.distributed.algorithms.join.Join"
            )
        if not shadows:
            return
        for name, module in self._ddp.module.named_modules():
            if isinstance(module, nn.SyncBatchNorm):
                raise UnsupportedError(
                    f"{name or 'the model'} is a SyncBatchNorm, whose collectives in forward a rank without inputs "
                    f"cannot answer; {_LOCKSTEP}"
                )
        if self._joined.has_buffer_hook:
            raise UnsupportedError(f"a hook that was registered on the model synchronizes its buffers; {_LOCKSTEP}")

    def enter(self, session: JoinSession, undo: ExitStack) -> None:
        hook = self._joined.hook_name
        if session.options.divides_by_count and hook is not None and not hook.startswith("overlap"):
            raise UnsupportedError(
                f"the hook {hook} divides by the number of all ranks whatever Join is told; register one of "
                "overlap.hooks, or leave out divide_by_initial_world_size=False"
            )
        self._session = session
        self._expects_backward = self._watches_backward = self._accumulates = self._has_own = False
        undo.callback(session.gradients.take_back)
        undo.callback(on_notify(self._ddp, torch.compiler.disable(lambda: self._on_forward(session, undo))))
        undo.callback(self._joined.leave)
        self._joined.enter(lambda: session.buffer_source, torch.compiler.disable(self._before_module))
        # What a Join does in a forward does not belong to a compiled one.
        undo.callback(self._ddp.register_forward_hook(torch.compiler.disable(self._after_module)).remove)
        if session.options.counts_samples:
            # On parameters, not on outputs: those may depend on each other, and be in containers of any kind.
            for parameter in self._trained:
                undo.callback(parameter.register_hook(self._weigh).remove)

    def replay(self, detail: Any) -> None:
        if self._session is not None:
            self._session.gradients.take_back()
        records_gradients, buffers_from, synchronizes = detail
        self._joined.replay_forward(
            records_gradients=records_gradients, buffers_from=buffers_from, synchronizes=synchronizes
        )

    def replay_backward(self) -> None:
        session, has_own = self._session, self._has_own
        assert session is not None, "a Join replays inside of its block"
        session.gradients.take_back()
        session.replays_own_gradients, self._has_own = has_own, False
        try:
            self._joined.replay_backward(own_gradients_by=session.divisor if has_own else None)
        finally:
            session.replays_own_gradients = False

    def post(self, *, is_last_joiner: bool) -> None:
        self._hook.post_hook(is_last_joiner)

    def _on_forward(self, session: JoinSession, undo: ExitStack) -> None:
        ddp = self._ddp
        records_gradients = torch.is_grad_enabled()
        has_buffers = bool(ddp.will_sync_module_buffers())
        if records_gradients:
            session.gradients.take_back()
        if not (records_gradients or has_buffers):
            return  # Without collectives there is nothing to replay.
        synchronizes = records_gradients and bool(ddp.require_backward_grad_sync)

        def detail() -> list[Any]:
            return [records_gradients, session.buffer_source if has_buffers else None, synchronizes]

        delay_write = not (has_buffers or self._joined.may_rebuild)
        session.on_event(self, detail, begins_iteration=records_gradients, delay_write=delay_write)
        if records_gradients:
            self._weight = session.gradient_weight
        if synchronizes:
            self._expects_backward = True
            if session.options.divides_by_count and self._joined.hook_name is None:
                self._joined.divide_by(lambda: session.divisor)
        self._accumulates = records_gradients and not synchronizes
        if (session.needs_backward_events or self._accumulates) and not self._watches_backward:
            self._watches_backward = True
            on_gradient = self._on_gradient(session)
            handle = torch.autograd.graph.register_multi_grad_hook(self._trained, on_gradient, mode="any")
            undo.callback(handle.remove)

    @property
    def _trained(self) -> list[Tensor]:
        return [parameter for parameter in self._ddp.parameters() if parameter.requires_grad]

    def _weigh(self, gradient: Tensor) -> Tensor:
        return gradient if self._weight == 1.0 else gradient * self._weight

    def _on_gradient(self, session: JoinSession) -> Callable[[Tensor], None]:
        def on_first_gradient(gradient: Tensor) -> None:
            # Not under no_sync, and only once where a checkpointed backward runs in parts.
            if self._expects_backward:
                self._expects_backward = self._has_own = False
                session.on_backward(self)
                if session.missing:
                    after_all_of_backward(lambda: session.gradients.hand_over(self._trained))
            elif self._accumulates:
                self._has_own = True

        return on_first_gradient

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
