"""Runs one stage for one model, from one backward pass to the next."""

from __future__ import annotations

import math
import operator
import warnings
import weakref
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from overlap._checks import refuse_capture
from overlap._torch.autograd import after_backward, after_gradients, backward_id, if_abandoned, without_saved_context
from overlap._torch.c10d import GradBucket, stride_of
from overlap._torch.ddp import OutsideOfBuckets, forget_unfinished_backward, has_all_buckets, is_to_rebuild, tensors_in
from overlap._torch.device import has_streams, hold, is_capturing
from overlap.errors import ConfigurationError, TrainingLoopError, UnsupportedError, hide_internal_frames
from overlap.hooks.bucket import Bucket, renew
from overlap.hooks.collectives import Operation, all_reduce
from overlap.hooks.engine.executors import BucketFuture, Executor, StreamExecutor, model_executor
from overlap.hooks.engine.wavefront import (
    BackwardPass,
    Completion,
    Piece,
    Subject,
    Task,
    run_between_passes,
    run_items,
)
from overlap.hooks.stage import (
    Plan,
    Role,
    Stage,
    StageContext,
    UpdateStage,
    check_names,
    check_order,
    planner,
    updates_of,
    walk,
    with_contexts,
)
from overlap.join import gradient_divisor

NO_LAST_BUCKET = (
    "with static_graph=True DDP has a bucket for each dtype in its first backward, and does not say which is the last: "
    "use find_unused_parameters=True, or parameters of one dtype"
)
_SPARSE = (
    "this gradient is sparse, and stages work on dense ones: build the embedding with sparse=False, or leave this "
    "model to plain DDP"
)
_INSTEAD_OF_CAPTURE = (
    "capture the model alone, by torch.cuda.make_graphed_callables before DistributedDataParallel wraps it or "
    "torch.compile(mode='reduce-overhead'), or leave the registration out"
)
_OUTSIDE = (
    "{names} require a gradient, but DistributedDataParallel reduces only the parameters that did when it was made, so "
    "the gradients of these would differ between ranks. After adding or unfreezing parameters, .remove() what register "
    "returned, make ddp = DistributedDataParallel(ddp.module), and register again"
)
_UNNAMED = (
    "bucket {index} has a parameter of shape {shape} that was not in the model when the chain was registered, so it "
    "has no name. Tensor parallelism makes the parameters of a module anew in each forward: register before the first "
    "forward of DistributedDataParallel. Where a parameter was replaced, make DistributedDataParallel anew"
)
_ABANDONED = "backward ended with an error outside of the stages, which that rank has raised"

T = TypeVar("T", bound=Subject)


class AbandonedBackwardError(RuntimeError):
    """Stands for an error of the model's own in backward, where only autograd knows it."""


class _KnownBucket(NamedTuple):
    """The parameters of one of DDP's buckets, the same in every pass unless the model or its buckets change."""

    parameters: tuple[Tensor, ...]
    strides: list[tuple[int, ...]]
    fqns: tuple[str, ...] | None
    refusal: str | None
    """Why stages must not use it."""


class _KeptBucket(NamedTuple):
    """One of DDP's buckets with the task that runs its plans, which are those of a later pass, too, where buffer,
    divisor and strides are the same. See [Note: plans]."""

    bucket: Bucket
    renewed: Sequence[Bucket]
    """The buckets that plans were made with: this one, and those that stages pass on."""
    strides: list[tuple[int, ...]]
    task: Task
    has_coroutines: bool
    future: BucketFuture
    """Completed, for DDP, which waits for the stages' stream and not for each bucket; see :meth:`Runtime.on_bucket`."""


class Runtime:
    """Runs one stage for one model.

    On CPU tensors with Gloo a worker thread runs the stage over separate connections, so that waiting does not hold up
    autograd. For a small model (see [Note: small models]), with a communication hook, on accelerators, and with other
    backends, it runs on autograd's thread, where the order of collectives is the program's own.
    """

    def __init__(self, stage: Stage, context: StageContext) -> None:
        self.stage = stage
        self._is_ready = False
        """Whether the stages are attached: a hook learns of the model from the first bucket."""
        self._is_unfinished = False
        """Whether the last backward ended with an error of the model's own, which DDP has still to forget."""
        # Magnitudes of results of the pass under way, the same on all ranks.
        self._largest: list[Tensor] = []
        # The backward whose end is watched, what begins that from an output of the model, and what watches the buckets.
        self._graph = -1
        self._on_gradient = partial(_on_gradient, weakref.ref(self))
        self._on_accumulation = partial(_on_accumulation, weakref.ref(self))
        self._watchers: list[Any] = []
        self._model: Callable[[], DistributedDataParallel | None] = context.ddp or (lambda: None)
        self.executor = self._new_executor(stage, context)
        self.context = replace(
            context,
            background=self.background,
            report=self.report,
            note_unfinished=self._note_unfinished,
            watch=self._watchers.append,
            replan=self._forget_plans,
            learns_of_steps=any(one.tells_of_steps for one in walk(stage)),
            commit=self.commit,
            discard=self.discard,
            note_largest=self._largest.append,
        )
        self._pass: BackwardPass | None = None
        self.passes = 0
        """Backward passes that have begun."""
        self._attached: list[Stage] = []
        # Those that do something then.
        self._called: dict[str, list[Stage]] = {
            method: []
            for method in (
                "before_forward",
                "before_gradients",
                "before_backward",
                "after_backward",
                "commit",
                "discard",
            )
        }
        # The chain as coroutines, and the method of each stage that may offer a plan instead.
        self._pieces: list[Piece] = []
        self._planners: list[Callable[[Bucket], Plan | None]] = []
        self.updates: Sequence[UpdateStage] = ()
        """Those of the chain."""
        # By the bucket's index.
        self._known: dict[int, _KnownBucket] = {}
        self._reduced: Collection[Tensor] = ()
        """The parameters that DDP reduces, which only the buckets of a backward tell for certain."""
        self._knows_reduced = self._has_warned = False
        self._kept: dict[int, _KeptBucket] = {}
        # As the parameters were at registration or, registered as a hook, when their gradients first arrived.
        self._strides = {id(parameter): parameter.stride() for parameter in context.names or ()}
        worker = self.executor.worker
        self._end = weakref.finalize(self, self.executor.channels.abort if worker is None else worker.stop)
        self._end.atexit = False

    def _new_executor(self, stage: Stage, context: StageContext) -> Executor:
        return model_executor(stage, self._model(), context.group, context.device, f"overlap-{id(self):x}")

    def attach(self) -> None:
        """Attach the stages. Raises: ConfigurationError: one refuses the model, its position or its names."""
        sequence = self.stage.sequence
        check_order(sequence)
        for stage, context in with_contexts(self.stage, self.context):
            check_names(stage)
            stage.attach(context)
            stage.is_registered = True
            self._attached.append(stage)
        for stage in self._attached:
            stage.check_together(sequence)
        for method in self._called:
            default = getattr(Stage, method)
            self._called[method] = [one for one in self._attached if getattr(type(one), method) is not default]
        self._pieces = [Piece(repr(stage), stage, output_bucket=stage.output_bucket) for stage in sequence]
        self._planners = [planner(stage) for stage in sequence]
        self.updates = updates_of(sequence)
        _check_disjoint(self.updates, self.context.names)
        # Until they are known, all that DDP may reduce; an averager is made for those that are trained then.
        is_averaged = self.stage.role is Role.AVERAGER
        self._reduced = {p for p in self.context.names or () if p.requires_grad or not is_averaged}

    def open(self) -> None:
        """Connect to the other ranks. Raises: CollectiveError: another rank did not arrive in time."""
        self._is_ready = True
        self.executor.channels.open()

    def close(self) -> None:
        """Detach the stages, end the thread and close its connections, all of it whatever a stage raises; raises the
        first of these errors in the end. A second call detaches again those stages that have raised."""
        self._forget_unfinished()  # For plain DDP, or for the next registration.
        attached, self._attached = self._attached, []
        errors: list[BaseException] = []
        for stage in attached:
            try:
                stage.detach()
                stage.is_registered = False
            except BaseException as error:
                error.add_note(f"raised by {stage!r} when the registration was removed")
                self._attached.append(stage)
                errors.append(error)
        self._watchers.clear()
        self._known.clear()
        self._kept.clear()
        channels, worker = self.executor.channels, self.executor.worker
        if self._end.detach() is None or worker is None:
            channels.abort()
        else:
            # After the jobs of a backward that ended before all buckets had arrived: they use the connections, too.
            worker.stop(channels.abort)
        if errors:
            raise errors[0]

    def _forget_plans(self) -> None:
        self._kept.clear()

    def _note_unfinished(self) -> None:
        self._is_unfinished = True

    def _forget_unfinished(self) -> None:
        if self._is_unfinished and (model := self._model()) is not None:
            forget_unfinished_backward(model)
        self._is_unfinished = False

    def report(self, error: BaseException) -> None:
        """Report an error of the training loop to the other ranks; the next pass connects again."""
        self.executor.submit(partial(self.executor.channels.report, error))
        if self.executor.worker is not None:
            self.executor.worker.wait_until_idle()

    def commit(self, found_inf: Tensor | None = None, *, others: Callable[[Tensor], bool] | None = None) -> None:
        """The step is made, unless ``found_inf`` is not zero: see :meth:`Stage.commit`. It is not the step of
        parameters for which ``others`` is true."""
        if self._called["commit"]:
            if found_inf is not None:
                self.discard(found_inf, others=others)
            names = self._names_of(others)
            for stage in self._called["commit"]:
                stage.commit(others=names)

    def discard(self, found_inf: Tensor | None = None, *, others: Callable[[Tensor], bool] | None = None) -> None:
        """The step is not made; where ``found_inf`` is given, only if it is not zero."""
        if not self._called["discard"]:
            return
        if found_inf is not None and has_streams(found_inf.device):
            found_inf = hold(found_inf).reshape(()).to(torch.bool)
        elif found_inf is not None:
            if not found_inf:
                return
            found_inf = None
        names = self._names_of(others)
        for stage in self._called["discard"]:
            stage.discard(found_inf=found_inf, others=names)

    def _names_of(self, others: Callable[[Tensor], bool] | None) -> Collection[str]:
        return () if others is None else {name for one, name in (self.context.names or {}).items() if others(one)}

    def before_forward(self, outside: OutsideOfBuckets) -> None:
        """Called before a forward that records gradients.

        Raises:
            UnsupportedError: a CUDA graph is being captured.
            TrainingLoopError: a stage refuses a step of the loop, or DDP does not reduce a parameter that is trained.
        """
        if is_capturing(self.context.device):
            self._refuse_capture()
        if self._is_unfinished:
            self._forget_unfinished()
        if not self.context.learns_of_steps:
            self.commit()  # The loop has made the step by itself.
        try:
            self._check_outside(outside)
            for stage in self._called["before_forward"]:
                stage.before_forward()
        except TrainingLoopError as error:
            self.report(error)
            hide_internal_frames(error)
            raise
        if self.passes == 1:
            self._meet_before_rebuilding()

    def after_forward(self, outputs: Any) -> None:
        """Called after a forward: a backward that ends with an error before its first bucket is to be noticed, too."""
        synchronizes = self._is_synchronized()
        if not (synchronizes or self._called["before_gradients"]):
            return
        on_gradient = self._on_gradient if synchronizes else self._on_accumulation
        for tensor in tensors_in(outputs):
            if (node := tensor.grad_fn) is not None:
                node.register_prehook(on_gradient)

    def _is_synchronized(self) -> bool:
        """Whether the backward of the forward that has just ended reduces gradients."""
        return (model := self._model()) is not None and model.require_backward_grad_sync

    def _check_outside(self, outside: OutsideOfBuckets) -> None:
        """Refuses parameters that require a gradient and are in no bucket, which with a reducer alone is a warning."""
        if (model := self._model()) is None or not (trained := outside.trained(model, self._reduced)):
            return
        message = _OUTSIDE.format(names=", ".join(trained[:3]) + (", ..." if len(trained) > 3 else ""))
        if self.updates or self.stage.role >= Role.UPDATE:
            raise TrainingLoopError(message)
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(message, UserWarning, stacklevel=2)

    def _meet_before_rebuilding(self) -> None:
        """Wait for the other ranks before the forward in which DDP compares its new buckets with theirs, once.

        That is a collective in C++, which does not notice that a rank has failed: one that was refused in its first
        ``step()``, say. Under Join ranks without inputs go there without a forward.
        """
        model, are_private = self._model(), self.executor.channels.are_private
        if are_private and model is not None and is_to_rebuild(model) and not self.context.is_joining():
            run_between_passes(self.background, all_reduce(torch.zeros(1, device="cpu"), group=self.context.group))

    def on_bucket(self, raw: GradBucket) -> BucketFuture:
        """The hook that DDP calls for each bucket, in order: on autograd's thread, or in a replay on the caller's."""
        graph, index = backward_id(), raw.index()
        is_replay = graph == -1
        if not is_replay and graph != self._graph:  # Where no forward was seen.
            self._watch_backward(graph)
        if self._pass is None or index == 0:
            self._pass = self._begin(is_replay=is_replay)
        current, executor, refusal = self._pass, self._pass.executor, None
        kept = self._kept.get(index) if current.is_plain else None
        # DDP makes another buffer together with its list of parameters; while it is kept no other has its identity.
        if kept is not None and raw.buffer() is kept.bucket.buffer:
            bucket = kept.bucket
            renew(kept.renewed, current.step)
            if kept.has_coroutines:  # They may keep what they are given, and a plan does not look at it again.
                bucket = kept.task.subject = kept.task.given = bucket.with_changes(raw=raw)
        else:
            bucket, kept, refusal = self._changed_bucket(raw, current, is_replay)
        if executor.observer is not None:
            executor.observer.arrived(bucket)
        task = Task(self._pieces, executor, bucket, current.lent(bucket)) if kept is None else kept.task
        future = current.expect(bucket) if kept is None or not current.joins_once else kept.future
        if bucket.is_last and not is_replay:
            after_backward(partial(self._finish, current), if_dropped=partial(self._finish_without_raise, current))
            if current.joins_once:
                # DDP's finalization reads the means and the loop the parameters. It is queued when this returns, so it
                # runs behind this: the training stream waits for the stages of all buckets by one event, in place of
                # one for each of their futures. On this thread the last bucket's own are all launched by then.
                after_gradients(executor.join)
        if refusal is not None:
            executor.submit(partial(current.fail, refusal))
        elif current.error is None:
            executor.submit(partial(current.drive, task, is_last=bucket.is_last))
        if bucket.is_last and is_replay:
            current.wait()
            self._finish(current)
        return future

    def _changed_bucket(
        self, raw: GradBucket, current: BackwardPass, is_replay: bool
    ) -> tuple[Bucket, _KeptBucket | None, Exception | None]:
        """A bucket for which no task is kept, a task to keep where the pass is plain, and why it is refused, if so."""
        index, parameters = raw.index(), raw.parameters()
        known, strides = self._known.get(index), list(map(stride_of, parameters))
        # The length comes with the strides.
        if known is None or strides != known.strides or not all(map(operator.is_, parameters, known.parameters)):
            known = self._note_bucket(index, parameters, strides)
        bucket = Bucket(
            index=index,
            is_last=raw.is_last(),
            buffer=raw.buffer(),
            parameters=known.parameters,
            group=self.context.group,
            divisor=current.divisor,
            step=current.step,
            is_replay=is_replay,
            raw=raw,
            fqns=known.fqns,
        )
        if bucket.is_last and not self._knows_reduced:
            self._knows_reduced = True
            if (model := self._model()) is not None and has_all_buckets(model):
                self._reduced = {parameter for one in self._known.values() for parameter in one.parameters}
        if bucket.buffer.is_sparse:
            refusal = UnsupportedError(_SPARSE)
            refusal.add_note(f"raised for {bucket.describe()}")
            return bucket, None, refusal
        if known.refusal is not None and not is_replay:
            return bucket, None, TrainingLoopError(known.refusal)
        if not current.is_plain:
            return bucket, None, None
        try:
            kept = self._kept[index] = self._keep(bucket, strides, current)
        except Exception as error:
            error.add_note(f"raised when {self.stage!r} made plans, {bucket.describe()}")
            return bucket, None, error
        return bucket, kept, None

    def _keep(self, bucket: Bucket, strides: list[tuple[int, ...]], current: BackwardPass) -> _KeptBucket:
        """Make the plans of ``bucket``. See [Note: plans]."""
        pieces: list[Piece] = []
        given, renewed, coroutines = bucket, [bucket], 0
        for whole, plan in zip(self._pieces, self._planners, strict=True):
            if planned := plan(given):
                pieces += [Piece(whole.label, code, is_planned=True) for code in planned]
                pieces[-1] = pieces[-1]._replace(output_bucket=whole.output_bucket)
                renewed.append(given)
            else:
                pieces.append(whole)
                coroutines = len(pieces)
            given = given if whole.output_bucket is None else whole.output_bucket(given)
        # Plans have their buckets, so the last coroutine passes it on to none.
        first = max(0, coroutines - 1)
        pieces[first:] = [piece._replace(output_bucket=None) for piece in pieces[first:]]
        future = BucketFuture()
        future.set_result(bucket.buffer)
        task = Task(pieces, current.executor, bucket, bucket)
        return _KeptBucket(bucket, tuple(dict.fromkeys(renewed)), strides, task, coroutines > 0, future)

    def _note_bucket(self, index: int, parameters: Sequence[Tensor], strides: list[tuple[int, ...]]) -> _KnownBucket:
        """Refuses parameters that had other strides when DDP laid out its buckets, or that are not in the model."""
        names, refusal = self.context.names, None
        fqns = None if names is None else tuple(names.get(parameter, "") for parameter in parameters)
        if fqns is not None and not all(fqns):
            shape = tuple(parameters[fqns.index("")].shape)
            refusal = _UNNAMED.format(index=index, shape=shape)
        for place, (parameter, now) in enumerate(zip(parameters, strides, strict=True)):
            before = self._strides.setdefault(id(parameter), now)
            axes = zip(parameter.shape, before, now, strict=True)
            # The stride of a dimension of one element does not matter.
            if any(length != 1 and one != other for length, one, other in axes):
                refusal = refusal or (
                    f"{_by_shape(parameter) if fqns is None else fqns[place]} has strides {now}, but had {before} when "
                    "the model was registered, and DistributedDataParallel still lays out its gradient in that way: "
                    "after model.to(memory_format=...) build DistributedDataParallel anew and register again"
                )
        known = self._known[index] = _KnownBucket(tuple(parameters), strides, fqns, refusal)
        return known

    def background(
        self, items: Sequence[T], work: Callable[[T], Coroutine[Operation, Any, None]]
    ) -> dict[T, Completion]:
        """Run ``work`` on each of ``items`` after all work begun before; with a worker thread, returns at once.

        Called on the training thread between backward passes, at the same place on every rank.
        """
        executor = self.executor.for_pass(items[0].step if items else -1)
        completions = {item: Completion(self.context.device) for item in items}

        def job() -> None:
            try:
                run_items(items, work, executor, lambda item: completions[item].set())
            except BaseException as error:
                executor.join()  # What was queued before the failure uses tensors that may now be freed or changed.
                executor.channels.fail(error)
                for completion in completions.values():
                    completion.fail(error)

        executor.submit(job)
        return completions

    @without_saved_context()
    def _begin(self, *, is_replay: bool) -> BackwardPass:
        if (stale := self._pass) is not None:
            self._kept.clear()  # Those that are in flight are closed.
            error = RuntimeError("a new backward began before all buckets had arrived")
            self.executor.submit(partial(stale.fail, error))
            stale.wait()
            self.discard()
        watchers = () if is_replay else self._watchers
        begun = BackwardPass(
            self.passes,
            self.executor.for_pass(self.passes),
            divisor=gradient_divisor(self.context.group),
            # After its first pass DDP builds other buckets; a replay and a watcher have other memory in each. A hook
            # that is registered with DDP itself may be called by another one, which waits for its futures.
            is_plain=self.passes > 0 and not (is_replay or watchers or self.context.names is None),
            watchers=watchers,
        )
        self.passes += 1
        self._kept = {
            index: kept
            for index, kept in self._kept.items()
            if kept.bucket.divisor == begun.divisor and [*map(stride_of, kept.bucket.parameters)] == kept.strides
        }
        self._largest.clear()
        if not self.context.learns_of_steps and (is_replay or self.context.names is None):
            self.commit()  # No forward was seen.
        try:
            is_inline = self.context.names is None or isinstance(self.executor, StreamExecutor)
            if is_inline and is_capturing(self.context.device):
                self._refuse_capture()  # Registered as a hook, it is not called before forwards.
            if not self._is_ready:  # Registered as a hook: the model was not known before its first bucket.
                self.attach()
                self.open()
            if len(self.updates) > 1:  # The loop may have added parameters to an optimizer.
                _check_disjoint(self.updates, self.context.names)
            for stage in self._called["before_backward"]:
                stage.before_backward(is_replay=is_replay)
        except Exception as error:
            error.add_note(f"raised by {self.stage!r} before the first bucket of step {begun.step}")
            begun.fail(error)
        return begun

    def _refuse_capture(self) -> None:
        refuse_capture(repr(self.stage), _INSTEAD_OF_CAPTURE, self.context.device)

    def _finish(self, finished: BackwardPass) -> None:
        """Called on the training thread when DDP has set the gradients; raises the error of a failed pass."""
        if (error := self._conclude(finished)) is not None:
            hide_internal_frames(error)
            raise error

    def _finish_without_raise(self, finished: BackwardPass) -> None:
        """Called in place of :meth:`_finish` where backward raises the error of another model's pass."""
        if self._pass is finished:
            self._conclude(finished)

    def _conclude(self, finished: BackwardPass) -> BaseException | None:
        """Notify every stage that the pass is over; returns the error with which it ended, or else a stage's own."""
        self._pass = None
        error = finished.error
        if error is not None:
            self._kept.clear()
        for watcher in self._watchers:
            watcher.over(failed=error is not None)
        if error is None and self._largest:
            self.discard(self._found_inf())
        for stage in self._called["after_backward"]:
            try:
                note = stage.after_backward(failed=error is not None)
            except Exception as raised:
                raised.add_note(f"raised by {stage!r} after step {finished.step}")
                error = error or raised
                continue
            if note and error is not None:
                error.add_note(note)
        if error is not None:
            self.discard()
        # On any rank: DDP cannot finish this backward.
        self._is_unfinished = error is not None and _ABANDONED in str(error)
        return error

    def _found_inf(self) -> Tensor:
        """Whether a result of the pass is not finite."""
        return ~(torch.cat([hold(one).view(-1) for one in self._largest]) < math.inf).all()

    def _watch_backward(self, graph: int) -> None:
        self._graph = graph
        for stage in self._called["before_gradients"]:
            stage.before_gradients(synchronizes=True)
        if_abandoned(partial(self._abandon, self.passes))

    def _abandon(self, passes: int) -> None:
        """Called where autograd gives up a backward that ``passes`` had preceded: the other ranks wait for collectives
        that this one will not launch. Where no bucket has arrived yet, the pass begins, in order to fail as any."""
        if self._pass is None and (self.passes != passes or self._is_unfinished):
            return  # It is over, or was refused, which leaves no trace.
        abandoned = self._pass or self._begin(is_replay=False)
        error, worker = AbandonedBackwardError(_ABANDONED), self.executor.worker
        # The worker may itself wait for another rank, and polls this board meanwhile.
        if worker is not None and (board := self.executor.channels.board) is not None:
            board.report(error)
        self.executor.submit(partial(abandoned.fail, error))
        if worker is not None:
            worker.wait_until_idle()
        self._conclude(abandoned)
        self._note_unfinished()


def _on_gradient(alive: weakref.ref[Runtime], gradients: Any) -> None:
    """Called where a backward reaches an output of the model. The graph must not keep the runtime."""
    runtime, graph = alive(), backward_id()
    if runtime is not None and graph != runtime._graph:
        runtime._watch_backward(graph)


def _on_accumulation(alive: weakref.ref[Runtime], gradients: Any) -> None:
    """As :func:`_on_gradient`, of a forward under ``no_sync``."""
    if (runtime := alive()) is not None:
        for stage in runtime._called["before_gradients"]:
            stage.before_gradients(synchronizes=False)


def _check_disjoint(updates: Sequence[UpdateStage], names: Mapping[Tensor, str] | None) -> None:
    """Raises: ConfigurationError: two updates have a parameter of the model in common."""
    holders: dict[Tensor, UpdateStage] = {}
    for update in updates:
        for parameter in update.updated:
            if names is not None and parameter not in names:
                continue
            if (other := holders.setdefault(parameter, update)) is not update:
                raise ConfigurationError(
                    f"{_by_shape(parameter) if names is None else names[parameter]} is a parameter of both {other!r} "
                    f"and {update!r}, which would both update it: give each optimizer parameters of its own"
                )


def _by_shape(parameter: Tensor) -> str:
    return f"a parameter of shape {tuple(parameter.shape)}"
