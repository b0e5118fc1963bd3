"""Recording the steps of a training loop."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Self

from torch.nn.parallel import DistributedDataParallel

from overlap._torch.ddp import data_parallel_parameters
from overlap.errors import RegistrationError, TrainingLoopError
from overlap.hooks import AllReduce, Registration, Role, chain
from overlap.hooks.engine.registration import registration_of
from overlap.join.group_collectives import of_all_ranks
from overlap.timeline.clock import clock_for
from overlap.timeline.loop import watching
from overlap.timeline.reading import read_start_ns, read_steps, roles_of, synchronized
from overlap.timeline.recording import Recorder
from overlap.timeline.report import Report
from overlap.timeline.saving import check_path, save_reports
from overlap.timeline.steps import StepReport

__all__ = ["Timeline"]


class Timeline:
    """Records the steps that run inside a ``with`` block: what was computed, sent and updated, and when.

    Afterwards every rank calls :meth:`report`, which prints as a table, and :meth:`save`, for which rank 0 writes.

    A step runs from the start of a forward that records gradients to the start of the next one after its backward;
    under ``no_sync`` every micro-batch is one. A forward under ``torch.no_grad`` ends the step and is not part of any.

    *On the CPU* times are the host's: a collective lasts from its launch to its completion (point-to-point ones: until
    the scheduler has waited for them). *On CUDA* they are those of events on the streams; nothing waits for the device
    before :meth:`report`.

    A model without a registered stage gets ``chain(AllReduce())`` for the length of the block, which reduces bit for
    bit as plain DDP does; then every rank must enter the block, between two steps, and afterwards the model keeps
    a hook that reduces as DDP itself does. With a stage registered, entering issues nothing.

    Args:
        ddp: the model; to compile it, compile the module inside: ``DistributedDataParallel(torch.compile(module))``.

    Raises:
        RegistrationError: ``ddp`` is not a DDP model, has a hook that was not registered with :func:`overlap.register`,
            or is being recorded already.

    >>> with Timeline(ddp) as timeline:
    ...     for x, y in loader:
    ...         loss_fn(ddp(x), y).backward()
    >>> len(timeline.report().steps)  # print(timeline.report()) shows them
    4
    """

    def __init__(self, ddp: DistributedDataParallel) -> None:
        self._ddp = ddp
        self._recorder: Recorder | None = None
        self._roles: dict[str, Role] = {}
        self._title = ""
        self._registration: Registration | None = None
        self._cleanup = ExitStack()
        self._is_recording = False
        self._report: Report | None = None

    def __enter__(self) -> Self:
        if self._recorder is not None:
            raise TrainingLoopError("a Timeline records one block; make another for the next: overlap.Timeline(ddp)")
        with ExitStack() as cleanup:
            registration = self._observed(cleanup)
            self._roles = roles_of(registration.stage)
            self._recorder = Recorder(clock_for(next(iter(data_parallel_parameters(self._ddp))).device))
            registration.observer = self._recorder
            cleanup.callback(setattr, registration, "observer", None)
            cleanup.enter_context(watching(self._ddp, self._recorder))
            self._cleanup = cleanup.pop_all()
        self._is_recording = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._recorder is not None
        self._is_recording = False
        if error is None:
            self._recorder.stop()
        self._cleanup.close()

    def _observed(self, cleanup: ExitStack) -> Registration:
        """What is registered with the model, or a stand-in for DDP's own reduction."""
        registration = registration_of(self._ddp) if isinstance(self._ddp, DistributedDataParallel) else None
        if registration is None:
            registration = chain(AllReduce()).register(self._ddp)
            cleanup.callback(registration.remove)
            self._title = "plain DDP"
            return registration
        if registration.observer is not None:
            raise RegistrationError(
                f"{registration.stage!r} has an observer already ({type(registration.observer).__name__}); "
                "leave that Timeline's block first"
            )
        self._title = repr(registration.stage)
        return registration

    @property
    def steps(self) -> tuple[StepReport, ...]:
        """This rank's own steps; issues nothing, and ``start_ms`` is from the start of the first of them."""
        if self._recorder is None or self._is_recording:
            raise TrainingLoopError("a Timeline has its steps when its `with` block is over")
        return read_steps(self._recorder.steps, self._recorder.clock, self._roles, rank=self._ddp.process_group.rank())

    def report(self) -> Report:
        """The steps of all ranks.

        Every rank calls this (or :meth:`save`) after the block; the first call gathers what the ranks recorded, with
        ``torch.distributed.all_gather_object`` on the model's process group, later ones issue nothing. Ranks of one
        machine share its clock; those of several are compared by their calendars, as well as these agree.

        Raises:
            TrainingLoopError: the block is not over.
        """
        if self._report is None:
            steps = self.steps
            assert self._recorder is not None, "a Timeline that has steps has recorded"
            own = read_start_ns(self._recorder.steps, self._recorder.clock), steps
            everyone = of_all_ranks(own, self._ddp.process_group)
            self._report = Report(title=self._title, ranks=synchronized(everyone))
        return self._report

    def save(self, path: str | Path, *, step: int | None = None) -> None:
        """Write a picture (``.png``, ``.svg``, ``.pdf``) of one step, or a trace (``.json``) of all.

        Every rank calls this, as :meth:`report`; rank 0 writes. Perfetto (ui.perfetto.dev) and chrome://tracing open
        the trace.

        Args:
            path: the file to write.
            step: which step to draw, counted from 0; by default the one that took rank 0 the median time.

        Raises:
            ConfigurationError: the suffix is none of these, there is no such step, or a picture needs matplotlib.
        """
        check_path(path)
        report = self.report()
        if self._ddp.process_group.rank() == 0:
            save_reports({report.title: report}, path, step=step)
