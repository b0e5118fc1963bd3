"""Replacing DDP's own reduction by a stage, and going back to it."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import warnings
import weakref
from collections.abc import Callable
from functools import partial
from types import TracebackType
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from overlap._checks import check_device, digest
from overlap._torch.autograd import without_saved_context
from overlap._torch.c10d import GradBucket
from overlap._torch.ddp import OutsideOfBuckets, data_parallel_parameters, hook_name, refusal
from overlap._torch.device import has_streams
from overlap._torch.join import is_joining, torch_join_divides_by_count
from overlap.errors import (
    CollectiveError,
    ConfigurationError,
    RegistrationError,
    TrainingLoopError,
    UnsupportedError,
)
from overlap.hooks.adapters import as_stage
from overlap.hooks.engine.executors import BucketFuture
from overlap.hooks.engine.runtime import NO_LAST_BUCKET, Runtime
from overlap.hooks.stage import Stage, StageContext
from overlap.join import gradient_divisor
from overlap.ranks.board import Agreement, PerRank, add_peer_note
from overlap.ranks.machines import note_place, places

_ONE_QUEUE = "CUDA_DEVICE_MAX_CONNECTIONS"


class Dispatcher:
    """The hooks of the current registration: those around a forward, and DDP's communication hook, which DDP takes once
    and keeps. Without a registration it reduces as DDP itself does, and refuses what it cannot know, a divisor of
    PyTorch's Join. A copy of the model has no communication hook, and a dispatcher without a group."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.__name__ = self.__qualname__ = "overlap"
        self._group = group
        self.registration: Registration | None = None
        self._in_flight: list[tuple[dist.Work, torch.Tensor, BucketFuture]] = []

    def before_forward(self, outside: OutsideOfBuckets, module: torch.nn.Module, inputs: Any) -> None:
        if self._group is None or not torch.is_grad_enabled():
            return
        if isinstance(module, DistributedDataParallel) and torch_join_divides_by_count(module):
            raise UnsupportedError(
                "divide_by_initial_world_size=False does nothing under PyTorch's Join once a hook was registered, also "
                "after remove(); use `with overlap.Join([ddp], divide_by_initial_world_size=False)`"
            )
        if self.registration is not None:
            self.registration.before_forward(outside)

    def after_forward(self, module: torch.nn.Module, inputs: Any, outputs: Any) -> None:
        """Also where the forward raised: DDP's own collectives there, of buffers and of the order of its buckets, fail
        with an error that names no rank."""
        if torch.compiler.is_compiling() or self.registration is None:
            return  # To look at outputs would have the compiler read their ``.grad``, which warns.
        runtime = self.registration.runtime
        if outputs is not None:
            runtime.after_forward(outputs)
        elif (error := sys.exception()) is not None:
            add_peer_note(error, runtime.executor.channels.board)

    # Without annotations: DDP compares them with its own types, and here they would be strings.
    def __call__(self, state, bucket):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN204
        if self.registration is not None:
            return self.registration.runtime.on_bucket(bucket)
        return self._reduce(bucket)

    def __reduce__(self) -> Any:
        return Dispatcher, ()

    @without_saved_context()
    def _reduce(self, bucket: GradBucket) -> BucketFuture:
        assert self._group is not None, "the model is no copy"
        buffer = bucket.buffer().mul_(1 / gradient_divisor(self._group))
        work = dist.all_reduce(buffer, group=self._group, async_op=True)
        assert work is not None
        if has_streams(buffer.device):
            reduced: BucketFuture = work.get_future().then(lambda future: future.value()[0])
            return reduced
        # Without a callback: see [Note: works without Python objects]. DDP waits for none before it has them all.
        if bucket.index() == 0:
            self._in_flight.clear()  # Of a backward that ended with an error.
        future = BucketFuture()
        self._in_flight.append((work, buffer, future))
        if bucket.is_last():
            in_flight, self._in_flight = self._in_flight, []
            for work, buffer, reduced in in_flight:
                work.wait()
                reduced.set_result(buffer)
        return future


_dispatchers: weakref.WeakKeyDictionary[nn.Module, Dispatcher] = weakref.WeakKeyDictionary()


class Registration:
    """A stage registered with a model; after :meth:`remove` the model reduces as plain DDP again.

    As a block it reports an exception of the loop to the other ranks, which would wait for this one in a collective,
    and removes the registration in the end::

        with chain(AllReduce(), Step(optimizer)).register(ddp):
            for x, y in loader:
                ...

    >>> registration = chain(AllReduce()).register(ddp)
    >>> registration.is_active
    True
    >>> registration.remove()
    >>> registration.is_active
    False
    """

    def __init__(self, runtime: Runtime, dispatcher: Dispatcher, model: nn.Module) -> None:
        self.runtime = runtime
        self.stage = runtime.stage
        self._dispatcher = dispatcher
        # Code of stages does not belong to a compiled forward.
        self.before_forward = torch.compiler.disable(runtime.before_forward)
        self._handle = model.register_forward_hook(dispatcher.after_forward, always_call=True)

    @property
    def is_active(self) -> bool:
        """Whether :meth:`remove` has not been called."""
        return self._dispatcher.registration is self

    def remove(self) -> None:
        """Remove the stage; call it on every rank, between two steps.

        All is removed, also where a stage raises, as where it still waits for a gather that has failed; that error is
        raised in the end. A second call does nothing but what a stage could not do in the first.
        """
        if self.is_active:
            self._dispatcher.registration = None  # Another may have taken its place since.
        self._handle.remove()
        self.runtime.close()

    def discard(self) -> None:
        """Discard the last backward of a chain without an update: call it, on every rank, where the loop leaves out the
        ``step()`` of its own optimizer, before the next forward. Stages then remember nothing of that batch.

        Raises:
            TrainingLoopError: the chain has an update, whose optimizer's ``zero_grad()`` says it; or under ``Join``.
        """
        reason = ""
        if self.runtime.context.learns_of_steps:
            reason = f"{self.stage!r} has an update: call zero_grad() of its optimizer in place of step()"
        elif self.runtime.context.is_joining():
            reason = "under Join ranks that have run out of inputs are not told of it: leave the call out"
        if reason:
            raise TrainingLoopError(f"registration.discard(): {reason}")
        self.runtime.discard()

    def report(self, error: BaseException) -> None:
        """Report that this rank has failed: the waits of the others raise a ``PeerError`` that names it. Then call
        :meth:`remove`, or continue on every rank."""
        if self.is_active:
            self.runtime.report(error)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            try:
                if error is not None and not isinstance(error, CollectiveError | GeneratorExit):
                    self.report(error)
            finally:
                self.remove()
        except Exception as own:
            if error is None:
                raise
            error.add_note(f"when the block was left, this was raised, too: {type(own).__name__}: {own}")

    def __repr__(self) -> str:
        return f"<{self.stage!r} {'registered' if self.is_active else 'removed'}>"


def register_ddp(
    ddp: DistributedDataParallel, stage: Stage | Callable[..., Any], state: Any, called: nn.Module | None = None
) -> Registration:
    """See :func:`overlap.register`; ``called`` is the module that the loop calls, if it is not ``ddp``."""
    with Agreement(ddp.process_group, "register a chain") as agreement:
        return _register(ddp, stage, state, agreement, ddp if called is None else called)


def _register(
    ddp: DistributedDataParallel,
    stage: Stage | Callable[..., Any],
    state: Any,
    agreement: Agreement,
    called: nn.Module,
) -> Registration:
    made = as_stage(stage, state)
    if not made.reduces and not any(child.reduces for child in made.children):
        raise ConfigurationError(f"{made!r} has no reducer; register chain(AllReduce(), {made.as_code})")
    named, alive = data_parallel_parameters(ddp), weakref.ref(ddp)
    if any(hasattr(parameter, "_in_backward_optimizers") for parameter in named):
        raise RegistrationError(
            "_apply_optimizer_in_backward has put optimizers on this model's parameters, for which DDP needs its hook: "
            "leave it out, and use chain(AllReduce(), Step(OverlappedOptimizer(torch.optim.SGD("
            "ddp.parameters(), lr=0.1)))).register(ddp)"
        )
    if meta := [name for parameter, name in named.items() if parameter.is_meta]:
        raise UnsupportedError(
            f"{', '.join(meta[:3])}{', ...' if len(meta) > 3 else ''}: on the meta device, without values; call "
            'model.to_empty(device="cpu") and model.load_state_dict(state) before DistributedDataParallel(model)'
        )
    check_device(next(iter(named)).device, ddp.process_group)
    dtypes = sorted({str(parameter.dtype) for parameter in named if parameter.requires_grad})
    if ddp.static_graph and len(dtypes) > 1:
        # DDP's first backward then has one bucket for each dtype, and all of them have the number 0.
        raise UnsupportedError(f"the model has parameters of {' and '.join(dtypes)}: {NO_LAST_BUCKET}")
    dispatcher = _dispatcher_of(ddp, called)
    context = StageContext(
        group=ddp.process_group,
        device=next(iter(named)).device,
        names=named,
        finds_unused=ddp.find_unused_parameters or ddp.static_graph,
        module=weakref.ref(ddp.module),
        ddp=alive,
        is_joining=lambda: (model := alive()) is not None and is_joining(model),
    )
    if has_streams(context.device) and os.environ.get(_ONE_QUEUE) == "1":
        warnings.warn(
            f"{_ONE_QUEUE}=1 puts all streams of a GPU into one queue, so nothing overlaps: unset {_ONE_QUEUE}",
            UserWarning,
            stacklevel=2,
        )
    runtime = Runtime(made, context)
    try:
        runtime.attach()
        check_alike(agreement, runtime)
        runtime.open()
    except BaseException:
        with contextlib.suppress(Exception):  # The other error is the cause.
            runtime.close()
        raise
    dispatcher.registration = Registration(runtime, dispatcher, called)
    return dispatcher.registration


def check_alike(agreement: Agreement, runtime: Runtime) -> None:
    """Compare what all ranks register. Raises: CollectiveError: a rank registers something else than rank 0."""
    names = runtime.context.names or {}
    parts = [(name, tuple(parameter.shape), str(parameter.dtype)) for parameter, name in names.items()]
    layout = f"a model of {len(parts)} parameters (names, shapes and dtypes: {digest(parts)})"
    settings = [dict(update.settings) for update in runtime.updates]
    own = [f"{runtime.stage.signature} for {layout}", settings, socket.gethostname()]
    note_place(runtime.context.group, agreement.agree(own, _compared))


def _compared(described: list[Any]) -> PerRank:
    """The place of each rank, if all are alike."""
    first, of_first, _ = described[0]
    for rank, (signature, of_rank, _) in enumerate(described):
        if signature != first:
            raise CollectiveError(
                f"rank {rank} registers {signature}, but rank 0 registers {first}; every rank must run the same "
                "stages for the same model"
            )
        for there, here in zip(of_first, of_rank, strict=True):
            for name in {**there, **here}:
                if there.get(name) != here.get(name):
                    raise CollectiveError(
                        f"{name} is {here.get(name)} on rank {rank}, but {there.get(name)} on rank 0, so the ranks' "
                        "parameters would diverge: make the optimizer with the same arguments on every rank"
                    )
    return places([host for _, _, host in described])


def registration_of(model: nn.Module) -> Registration | None:
    """The current registration of ``model``."""
    dispatcher = _dispatchers.get(model)
    return None if dispatcher is None else dispatcher.registration


def found_dispatcher(model: nn.Module) -> Dispatcher | None:
    """That of ``model``, if it has one. Raises: RegistrationError: with a registration that is not removed."""
    dispatcher = _dispatchers.get(model)
    if dispatcher is not None and dispatcher.registration is not None:
        raise RegistrationError(
            f"this model has {dispatcher.registration.stage!r} registered already; "
            "first call .remove() on what register returned, or make one chain of both"
        )
    return dispatcher


def keep_dispatcher(dispatcher: Dispatcher, model: nn.Module, called: nn.Module) -> None:
    """Make it that of ``model``; before each forward of ``called``, the module that the loop calls, it comes first if
    that is another one: its own hook prepares ``model``."""
    called.register_forward_pre_hook(
        partial(dispatcher.before_forward, OutsideOfBuckets()), prepend=called is not model
    )
    _dispatchers[model] = dispatcher


def _dispatcher_of(ddp: DistributedDataParallel, called: nn.Module) -> Dispatcher:
    if (dispatcher := found_dispatcher(ddp)) is not None:
        return dispatcher
    if (reason := refusal(ddp)) is not None:
        raise RegistrationError(reason)
    if (name := hook_name(ddp)) is not None:
        raise RegistrationError(
            f"this model has the communication hook {name} already, and DDP takes one only; make a new "
            "DistributedDataParallel and register a chain with the hook in it: chain(as_stage(hook, state), ...)"
        )
    dispatcher = Dispatcher(ddp.process_group)
    ddp.register_comm_hook(None, dispatcher)
    keep_dispatcher(dispatcher, ddp, called)
    return dispatcher
