"""Runs one stage for one model, from one backward pass to the next."""

from __future__ import annotations

import contextlib
import enum
import hashlib
import inspect
import operator
import threading
import weakref
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from overlap._checks import refuse_capture
from overlap._torch.autograd import after_backward, backward_id, by_default, if_abandoned, without_saved_context
from overlap._torch.c10d import GradBucket, stride_of
from overlap._torch.ddp import is_to_rebuild
from overlap._torch.device import is_capturing
from overlap._torch.fingerprint import fingerprint
from overlap.errors import CollectiveError, ConfigurationError, TrainingLoopError, UnsupportedError
from overlap.hooks.bucket import Bucket
from overlap.hooks.collectives import Operation, all_reduce
from overlap.hooks.context import BucketWatcher, StageContext
from overlap.hooks.engine.background import Item, run_and_wait, run_items
from overlap.hooks.engine.backward_pass import AbandonedBackwardError, BackwardPass
from overlap.hooks.engine.channels import PrivateChannels
from overlap.hooks.engine.executors import BucketFuture, Subject, model_executor
from overlap.hooks.engine.wavefront import Part
from overlap.hooks.places import check_pass, check_places
from overlap.hooks.stage import Role, Stage, walk, with_contexts
from overlap.join import gradient_divisor
from overlap.join.board import Agreement, is_reported

__all__ = ["NO_LAST_BUCKET", "Runtime"]

NO_LAST_BUCKET = (
    "with static_graph=True DDP has a bucket for each dtype in its first backward, and does not say which is the last: "
    "use find_unused_parameters=True, or parameters of one dtype"
)

T = TypeVar("T", bound=Subject)


class _KnownBucket(NamedTuple):
    """One of DDP's buckets, as it is in every pass unless the model or DDP's buckets change."""

    parameters: tuple[Tensor, ...]
    strides: list[tuple[int, ...]]
    fqns: tuple[str, ...] | None
    refusal: str | None
    """Why stages must not use it."""


_INSTEAD_OF_CAPTURE = (
    "capture the model alone, by torch.cuda.make_graphed_callables before DistributedDataParallel wraps it or "
    "torch.compile(mode='reduce-overhead'), or leave the registration out"
)


class _Phase(enum.Enum):
    """Where a runtime stands with its model between passes."""

    NEW = "new"
    """No stage is attached: a hook is told of the model by the first bucket."""
    READY = "ready"
    """Stages are attached, and DDP has finished its last backward."""
    FAILED = "failed"
    """The last backward failed, which all ranks are told, and no forward has begun since."""
    UNFINISHED = "unfinished"
    """The last backward ended with an error of the model's own, and DDP forgets it before the next forward."""


class Runtime:
    """Runs one stage for one model.

    On CPU tensors with Gloo a worker thread runs the stage over separate connections, so that waiting does not hold up
    autograd. For a small model (see [Note: small models]), on accelerators, and with other backends, it runs on
    autograd's thread, where the order of collectives is the program's own.
    """

    def __init__(
        self,
        stage: Stage,
        context: StageContext,
        *,
        forget_unfinished_backward: Callable[[], None] = lambda: None,
    ) -> None:
        self.stage = stage
        self._phase = _Phase.NEW
        self._forget_unfinished_backward = forget_unfinished_backward
        self._watched = -1
        self._watchers: list[BucketWatcher] = []
        model = None if context.ddp is None else context.ddp()
        self.executor, self._worker = model_executor(model, context.group, context.device, f"overlap-{id(self):x}")
        self._context = replace(
            context,
            background=self.background,
            tell=self.tell,
            note_unfinished=lambda: self._note_end(_Phase.UNFINISHED),
            watch=self._watchers.append,
        )
        self._pass: BackwardPass | None = None
        self._steps = 0
        # Those to detach; and once all are attached, all of them and those that run one after another.
        self._attached: list[Stage] = []
        self._stages: Sequence[Stage] = ()
        self._parts: list[Part] = []
        self._starts_on_autograd_thread = False
        self.division = Division()
        """Which update has which parameters."""
        # By the bucket's place in the pass.
        self._known: dict[int, _KnownBucket] = {}
        # As the parameters were at registration or, registered as a hook, when their gradients first came.
        self._strides = {id(parameter): parameter.stride() for parameter in context.names or ()}
        self._end = weakref.finalize(self, self.executor.channels.abort if self._worker is None else self._worker.stop)
        self._end.atexit = False

    def open(self, agreement: Agreement | None = None) -> None:
        """Attach the stages, check in an ``agreement`` that all ranks run the same, and connect to them.

        Raises:
            ConfigurationError: a stage refuses the model.
            CollectiveError: another rank did not come in time, or registers something else.
        """
        check_places(self.stage.sequence)
        for stage, context in with_contexts(self.stage, self._context):
            stage.attach(context)
            self._attached.append(stage)
        for stage in self._attached:
            stage.check_together(self.stage.sequence)
        self._stages = tuple(self._attached)
        self._parts[:] = [Part(repr(stage), _coroutine_function(stage), stage.passed) for stage in self.stage.sequence]
        self._starts_on_autograd_thread = self.stage.starts_on_autograd_thread
        self.division = Division.of(self.stage.sequence, self._context.names)
        if agreement is not None:
            described = agreement.agree(_description(self.stage, self._context, self.division))
            if (reason := _difference(described, self._context)) is not None:
                raise CollectiveError(reason)
        self._phase = _Phase.READY
        self.executor.channels.open()

    def close(self) -> None:
        """Detach the stages, end the thread and close its connections."""
        if self._phase is _Phase.UNFINISHED:
            self._forget_unfinished_backward()  # For plain DDP, or for the next registration.
        for stage in self._attached:
            stage.detach()
        self._attached.clear()
        self._watchers.clear()
        self._known.clear()
        self._end.detach()
        if self._worker is None:
            self.executor.channels.abort()
        else:
            # After the jobs of a backward that ended before all buckets had come: they use the connections, too.
            self._worker.stop(self.executor.channels.abort)

    def report(self, error: BaseException) -> None:
        """Tell the other ranks of an error outside of a backward; the next pass connects again.

        Not where they have been told already: to tell more this rank would connect, and wait for ranks that may have
        left.
        """
        if not (self._has_failed or is_reported(error)):
            self._after_all(lambda: self.executor.channels.fail(error))

    def tell(self, error: BaseException) -> None:
        """As :meth:`report`, of an error of the training loop that other ranks may be about to raise, too."""
        self._after_all(lambda: self.executor.channels.tell(error))

    def _after_all(self, job: Callable[[], None]) -> None:
        """Do ``job`` behind all that has been begun."""
        with contextlib.suppress(CollectiveError):  # The group has been destroyed.
            self.executor.submit(job)
        if self._worker is not None:
            self._worker.wait_until_idle()

    @property
    def _has_failed(self) -> bool:
        """Whether the last backward failed, which all ranks are told, and no forward has begun since."""
        return self._phase in (_Phase.FAILED, _Phase.UNFINISHED)

    def before_forward(self) -> None:
        """Called before a forward that records gradients.

        Raises:
            UnsupportedError: a CUDA graph is being captured.
            TrainingLoopError: a stage refuses what the loop has done.
        """
        self._refuse_capture()
        is_unfinished = self._phase is _Phase.UNFINISHED
        if self._has_failed:
            self._phase = _Phase.READY
        if is_unfinished:
            self._forget_unfinished_backward()
        try:
            for stage in self._stages:
                stage.before_forward()
        except TrainingLoopError as error:
            self.tell(error)
            raise
        self._meet_before_rebuilding()

    def _meet_before_rebuilding(self) -> None:
        """Wait for the other ranks before the forward in which DDP compares its new buckets with theirs, once.

        It does so by a collective in C++, where nothing looks whether a rank has failed: one that is refused in its
        first ``step()``, say. Under Join ranks without inputs go there without a forward.
        """
        model = None if self._context.ddp is None else self._context.ddp()
        has_own_channels = isinstance(self.executor.channels, PrivateChannels)
        if not has_own_channels or self._steps != 1 or model is None or not is_to_rebuild(model):
            return
        if not self._context.is_joining():
            run_and_wait(self.background, [Item(index=0)], self._meet, self._context.device)

    async def _meet(self, item: Item) -> None:
        await all_reduce(torch.zeros(1), group=self._context.group)

    def on_bucket(self, raw: GradBucket) -> BucketFuture:
        """The hook that DDP calls for each bucket, in order: on autograd's thread, or on the training thread when a
        rank without inputs takes part with zeros (a replay, outside of any backward)."""
        graph, index = backward_id(), raw.index()
        is_replay = graph == -1
        if self._pass is None or index == 0:
            self._pass = self._begin(is_replay=is_replay)
        current = self._pass
        if not is_replay and graph != self._watched:
            self._watched = graph
            if_abandoned(partial(self._abandon, current))
        known = self._known_bucket(index, raw.parameters())
        bucket = Bucket(
            index=index,
            is_last=raw.is_last(),
            buffer=raw.buffer(),
            parameters=known.parameters,
            group=self._context.group,
            divisor=current.divisor,
            step=current.step,
            is_replay=is_replay,
            raw=raw,
            fqns=known.fqns,
        )
        executor = current.executor
        future = executor.new_future()
        if executor.observer is not None:
            executor.observer.arrived(bucket)
        executor.begin()
        if bucket.is_last and not is_replay:
            after_backward(partial(self._finish, current), if_dropped=partial(self._finish_unheard, current))
        refusal: Exception | None = None
        if bucket.buffer.is_sparse:
            refusal = _sparse(bucket)
        elif known.refusal is not None and not is_replay:
            refusal = TrainingLoopError(known.refusal)
        task = current.admit(bucket, future)
        if task is not None:
            if self._starts_on_autograd_thread and refusal is None:
                with by_default(self._context.device), without_saved_context():
                    task.start()
            executor.submit(partial(current.drive, task, bucket.is_last, refusal))
        if bucket.is_last and is_replay:
            current.wait()
            self._finish(current)
        return future

    def _known_bucket(self, index: int, parameters: Sequence[Tensor]) -> _KnownBucket:
        """The bucket as noted in an earlier pass; noted anew if its parameters or their strides have changed."""
        strides = list(map(stride_of, parameters))
        known = self._known.get(index)
        # The length comes with the strides.
        if known is None or strides != known.strides or not all(map(operator.is_, parameters, known.parameters)):
            names = self._context.names
            fqns = None if names is None else tuple(names.get(parameter, "unknown") for parameter in parameters)
            refusal = next(filter(None, map(self._refusal, parameters, fqns or [None] * len(parameters))), None)
            known = self._known[index] = _KnownBucket(tuple(parameters), strides, fqns, refusal)
        return known

    def _refusal(self, parameter: Tensor, name: str | None) -> str | None:
        """The error where ``parameter`` had other strides when DDP laid out its buckets, which are still so."""
        before, now = self._strides.setdefault(id(parameter), parameter.stride()), parameter.stride()
        # The stride of a dimension of one element does not matter.
        if all(length == 1 or one == other for length, one, other in zip(parameter.shape, before, now, strict=True)):
            return None
        what = name or f"a parameter of shape {tuple(parameter.shape)}"
        return (
            f"{what} has strides {now}, but had {before} when the model was registered, and DistributedDataParallel "
            "still lays out its gradient in that way: after model.to(memory_format=...) build DistributedDataParallel "
            "anew and register again"
        )

    def background(
        self,
        items: Sequence[T],
        work: Callable[[T], Coroutine[Operation, Any, None]],
        *,
        on_failure: Callable[[BaseException], None],
    ) -> None:
        """Run ``work`` on each of ``items`` after all work begun before; with a worker thread, returns at once.

        Called on the training thread between backward passes, at the same place on every rank.
        """
        executor = self.executor.of(items[0].step if items else -1)
        executor.begin()

        def job() -> None:
            try:
                run_items(items, work, executor)
            except BaseException as error:
                executor.join()  # What was queued before the failure uses tensors that may now be freed or changed.
                executor.channels.fail(error)
                on_failure(error)

        executor.submit(job)

    @without_saved_context()
    def _begin(self, *, is_replay: bool) -> BackwardPass:
        if self._pass is not None:
            stale = self._pass
            self.executor.submit(lambda: stale.fail(RuntimeError("a new backward began before all buckets had come")))
            stale.wait()
        executor = self.executor.of(self._steps)
        begun = BackwardPass(
            self._steps,
            self._parts,
            executor,
            divisor=gradient_divisor(self._context.group),
            watchers=() if is_replay else self._watchers,
        )
        self._steps += 1
        try:
            self._refuse_capture()  # Registered as a hook, it is not called before forwards.
            if self._phase is _Phase.NEW:  # Registered as a hook: the model was not known before its first bucket.
                self.open()
            if self.division.is_of_several:  # The loop may have added parameters to an optimizer.
                self.division = Division.of(self.stage.sequence, self._context.names)
            for stage in self._stages:
                stage.before_backward(is_replay=is_replay)
            check_pass(self.stage.sequence)
        except Exception as error:
            error.add_note(f"raised by {self.stage!r} before the first bucket of step {begun.step}")
            begun.fail(error)
        return begun

    def _refuse_capture(self) -> None:
        if is_capturing(self._context.device):
            refuse_capture(repr(self.stage), _INSTEAD_OF_CAPTURE, self._context.device)

    def _finish(self, finished: BackwardPass) -> None:
        """Called on the training thread when DDP has set the gradients; raises the error of a failed pass."""
        error = self._conclude(finished)
        if error is not None:
            raise error

    def _finish_unheard(self, finished: BackwardPass) -> None:
        """Called in place of :meth:`_finish` where backward raises what another model's pass has failed with."""
        if self._pass is finished:
            self._conclude(finished)

    def _conclude(self, finished: BackwardPass) -> BaseException | None:
        """Tell every stage that the pass is over; the error with which it ended, or else a stage's own."""
        self._pass = None
        error = finished.error
        for watcher in self._watchers:
            watcher.over(failed=error is not None)
        for stage in self._stages:
            try:
                note = stage.after_backward(failed=error is not None)
            except Exception as raised:
                raised.add_note(f"raised by {stage!r} after step {finished.step}")
                error = error or raised
                continue
            if note and error is not None:
                error.add_note(note)
        if AbandonedBackwardError.caused(error):
            self._note_end(_Phase.UNFINISHED)
        else:
            self._note_end(_Phase.READY if finished.error is None else _Phase.FAILED)
        return error

    def _note_end(self, phase: _Phase) -> None:
        if self._phase is not _Phase.NEW:
            self._phase = phase

    def _abandon(self, abandoned: BackwardPass) -> None:
        """Called where autograd gives up a pass, for an error that it is about to raise: tell the other ranks at once.

        They wait for collectives that this rank will not launch.
        """
        if self._pass is not abandoned:
            return
        error = AbandonedBackwardError()
        # The worker may itself wait for another rank, and looks here meanwhile.
        if self._worker is not None and (board := self.executor.channels.board) is not None:
            board.report(error)
        is_over = threading.Event()

        def end() -> None:
            abandoned.fail(error)
            is_over.set()

        self.executor.submit(end)
        is_over.wait()
        self._conclude(abandoned)
        self._note_end(_Phase.UNFINISHED)


def _coroutine_function(stage: Stage) -> Callable[[Bucket], Coroutine[Operation, Any, None]]:
    """``stage``; where it is a plain function that returns an awaitable, a coroutine function that awaits it."""
    if inspect.iscoroutinefunction(type(stage).__call__):
        return stage

    async def run(bucket: Bucket) -> None:
        await stage(bucket)

    return run


def _sparse(bucket: Bucket) -> UnsupportedError:
    error = UnsupportedError(
        "this gradient is sparse, and stages work on dense ones: build the embedding with sparse=False, or leave this "
        "model to plain DDP"
    )
    error.add_note(f"raised for {bucket.describe()}")
    return error


@dataclass(frozen=True)
class Division:
    """The parameters of each update of a chain, and those that none has, which keep their averaged ``.grad``."""

    shares: tuple[tuple[str, tuple[str, ...]], ...] = ()
    """The text of each update and the names of its parameters."""
    rest: tuple[str, ...] = ()

    @staticmethod
    def of(stages: Sequence[Stage], names: Mapping[Tensor, str] | None) -> Division:
        """How ``stages`` divide the parameters of a model, by name.

        Raises:
            ConfigurationError: two updates have a parameter in common.
        """
        updates = [stage for stage in stages if stage.role is Role.UPDATE]
        holders: dict[int, Stage] = {}
        shares = []
        for update in updates:
            mine = [parameter for parameter in update.updated if names is None or parameter in names]
            for parameter in mine:
                if (other := holders.setdefault(id(parameter), update)) is not update:
                    raise ConfigurationError(
                        f"{_name(parameter, names)} is a parameter of both {other!r} and {update!r}, which would both "
                        "update it: give each optimizer parameters of its own"
                    )
            shares.append((repr(update), tuple(_name(parameter, names) for parameter in mine)))
        rest = [name for parameter, name in (names or {}).items() if id(parameter) not in holders] if updates else []
        return Division(tuple(shares), tuple(rest))

    @property
    def is_of_several(self) -> bool:
        """Whether there is more than one update."""
        return len(self.shares) > 1

    @property
    def signature(self) -> str:
        """The part that must be the same on every rank, as text."""
        if not str(self):
            return ""
        return f"{self} ({hashlib.sha256(repr((self.shares, self.rest)).encode()).hexdigest()[:8]})"

    def __str__(self) -> str:
        """The plan in words; nothing where one update has all parameters."""
        if not (self.is_of_several or self.rest):
            return ""
        shares = [f"{update} updates {_listed(names)}" for update, names in self.shares]
        return "; ".join(["", *shares, *([f"no update has {_listed(self.rest)}"] if self.rest else [])])


def _name(parameter: Tensor, names: Mapping[Tensor, str] | None) -> str:
    return f"a parameter of shape {tuple(parameter.shape)}" if names is None else names[parameter]


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(names[:4])
    return f"{len(names)} parameters ({shown}{', ...' if len(names) > 4 else ''})" if len(names) != 1 else shown


class _Registered(NamedTuple):
    layout: str
    fingerprints: Sequence[str]
    """Of each rank."""


_registered: weakref.WeakKeyDictionary[dist.ProcessGroup, list[_Registered]] = weakref.WeakKeyDictionary()


def _description(stage: Stage, context: StageContext, division: Division) -> tuple[str, str, dict[str, str]]:
    """What must be the same on every rank: the signature, a fingerprint of the parameters, and settings by name."""
    settings = {name: value for each in walk(stage) for name, value in each.settings.items()}
    signature = f"{stage.signature} for {context.model_in_words}{division.signature}"
    return signature, fingerprint(context.names or ()), settings


def _difference(described: Sequence[tuple[str, str, dict[str, str]]], context: StageContext) -> str | None:
    """How a rank's registration differs from rank 0's, as far as that can be known; the same text on every rank.

    [Note: models of one layout]

    Signatures say nothing of two models that differ only in their values: a generator's two copies, say. DDP has made
    these equal on all ranks, so values tell one model from another. They may differ between ranks all the same, under
    local SGD for one, and that is no mistake. So it is an error only where a rank registers what rank 0 registered at
    another place.

    Args:
        described: the :func:`_description` of each rank.
        context: of this registration.
    """
    signatures, fingerprints, settings = zip(*described, strict=True)
    for rank, signature in enumerate(signatures):
        if signature != signatures[0]:
            return (
                f"rank {rank} registers {signature}, but rank 0 registers {signatures[0]}; "
                "every rank must run the same stages for the same model"
            )
    for rank, values in enumerate(settings):
        for name in (name for name in {**settings[0], **values} if settings[0].get(name) != values.get(name)):
            return (
                f"{name} is {values.get(name)} on rank {rank}, but {settings[0].get(name)} on rank 0, so the ranks' "
                "parameters would part: make the optimizer with the same arguments on every rank"
            )
    if not context.names:
        return None
    layout, past = context.model_in_words, _registered.setdefault(context.group, [])
    past.append(_Registered(layout, fingerprints))
    alike = [each.fingerprints for each in past if each.layout == layout]
    for rank in range(len(fingerprints)):
        if (places := _other_place([each[rank] for each in alike], [each[0] for each in alike])) is not None:
            return (
                f"rank {rank} registers as number {places[0]} of {layout} what rank 0 registers as number {places[1]}; "
                "register models in the same order on every rank"
            )
    return None


def _other_place(own: Sequence[str], of_rank_0: Sequence[str]) -> tuple[int, int] | None:
    """The places, counted from 1, at which a rank and rank 0 have registered one model, the last of them now.

    Args:
        own: the fingerprints of what the rank has registered so far, in order.
        of_rank_0: those of rank 0.
    """
    if own[-1] == of_rank_0[-1]:
        return None
    for place, (mine, theirs) in enumerate(zip(own[:-1], of_rank_0[:-1], strict=True), start=1):
        if mine != theirs and theirs == own[-1]:
            return len(own), place
        if mine != theirs and mine == of_rank_0[-1]:
            return place, len(own)
    return None
