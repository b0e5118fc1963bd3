"""On how many streams the stages of a model run, and who waits for whom, with streams that only keep a record."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from harness import run_ranks
from harness.models import MLP, mean_squared_error
from overlap import AllReduce, Bucket, LocalSGD, Stage, ZeroRedundancyOptimizer, ZeroStep, chain
from overlap._torch.device import DeviceStreams, current_stream, streams_replaced
from overlap.hooks import StageContext, all_reduce, whole_pass
from overlap.hooks.engine.background import Completion, Item, run_now
from overlap.hooks.engine.executors import executor_for
from overlap.hooks.stage import Role
from overlap.optim import average_parameters


class _Event:
    def __init__(self, streams: _Recorded) -> None:
        self._streams = streams
        self.source = ""

    def query(self) -> bool:
        return True

    def record(self, stream: _Stream) -> None:
        self.source = stream.name


class _Stream:
    def __init__(self, streams: _Recorded, name: str, priority: int) -> None:
        self.name = name
        self.priority = priority
        self._streams = streams

    def wait_stream(self, other: _Stream) -> None:
        self._streams.log.append(f"{self.name} waits for {other.name}")

    def wait_event(self, event: _Event) -> None:
        self._streams.log.append(f"{self.name} waits for an event of {event.source}")


class _Recorded(DeviceStreams):
    """The CPU's tensors, as if they were on a device with streams, of which the training thread's is called "0"."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.made: list[_Stream] = []
        self.held: list[tuple[torch.Tensor, str]] = []
        self._current = self.new_stream(torch.device("cpu"))

    def has_streams(self, device: torch.device) -> bool:
        return True

    def new_stream(self, device: torch.device, *, priority: int = 0) -> Any:
        self.made.append(_Stream(self, str(len(self.made)), priority))
        return self.made[-1]

    def current_stream(self, device: torch.device) -> Any:
        return self._current

    def on_stream(self, stream: Any) -> AbstractContextManager[Any]:
        return self._on(stream)

    @contextlib.contextmanager
    def _on(self, stream: _Stream) -> Iterator[None]:
        before, self._current = self._current, stream
        try:
            yield
        finally:
            self._current = before

    def new_event(self, device: torch.device, *, is_timed: bool) -> Any:
        return _Event(self)

    def record_stream(self, tensor: torch.Tensor, stream: Any) -> None:
        self.held.append((tensor, stream.name))

    def future_for(self, device: torch.device) -> torch.futures.Future[Any]:
        return torch.futures.Future()

    def to_device(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        return tensor.clone()


def _here() -> str:
    name: str = current_stream(torch.device("cpu")).name
    return name


class _Twice(Stage):
    """Reduces in two collectives, and waits for the whole pass between them; notes on which streams it runs."""

    def __init__(self) -> None:
        self.seen: set[str] = set()

    async def __call__(self, bucket: Bucket) -> None:
        for wait in (all_reduce(bucket.buffer), whole_pass(), all_reduce(bucket.buffer)):
            self.seen.add(_here())
            await wait
        self.seen.add(_here())


class _Between(Stage):
    """Runs something between passes, which fails if it is told to."""

    role = Role.TRANSFORM
    is_failing = False
    passes = 0

    def __init__(self) -> None:
        self.seen: set[str] = set()
        self.completion: Completion | None = None

    def attach(self, context: StageContext) -> None:
        self.context = context

    async def __call__(self, bucket: Bucket) -> None:
        pass

    async def _work(self, item: Item) -> None:
        self.seen.add(_here())
        await all_reduce(torch.ones(3))
        if self.is_failing:
            raise RuntimeError("as it was told")
        self.completion.set()

    def after_backward(self, *, failed: bool) -> None:
        self.completion = Completion(self.context.device)
        self.passes += 1
        self.context.background([Item(index=0, step=self.passes - 1)], self._work, on_failure=self.completion.fail)


def _with_streams(check: Callable[[_Recorded], None]) -> None:
    def on_rank(rank: int, world_size: int) -> None:
        streams = _Recorded()
        with streams_replaced(streams):
            check(streams)

    run_ranks(on_rank, 2)


def _model() -> DistributedDataParallel:
    return DistributedDataParallel(MLP.model(), **MLP.ddp_options())


def _backward(ddp: DistributedDataParallel, step: int) -> None:
    mean_squared_error(ddp, MLP.batch(step, dist.get_rank())).backward()


def _stages_share_a_stream(streams: _Recorded) -> None:
    reducer, ddp = _Twice(), _model()
    chain(reducer).register(ddp)
    _backward(ddp, 0)
    assert reducer.seen == {"0"} and not streams.log
    reducer.seen.clear()
    for step in range(1, 4):
        streams.log.clear()
        _backward(ddp, step)
        # At each of several buckets for the training stream, which has the gradients, and never for itself.
        assert set(streams.log) == {"1 waits for 0"} and len(streams.log) > 2
    assert reducer.seen == {"1"}
    assert [stream.priority for stream in streams.made] == [0, -1]


def test_all_stages_of_a_model_run_on_one_stream_after_the_first_pass() -> None:
    _with_streams(_stages_share_a_stream)


def _work_between_passes_is_on_the_stages_stream(streams: _Recorded) -> None:
    between, ddp = _Between(), _model()
    chain(AllReduce(), between).register(ddp)
    _backward(ddp, 0)
    assert between.seen == {"0"} and not streams.log
    between.seen.clear()
    for step in range(1, 4):
        streams.log.clear()
        _backward(ddp, step)
        assert set(streams.log) == {"1 waits for 0"}
        streams.log.clear()
        between.completion.wait()
        assert streams.log == ["0 waits for an event of 1"]
    assert between.seen == {"1"}


def test_work_between_passes_runs_on_the_stream_of_the_stages() -> None:
    _with_streams(_work_between_passes_is_on_the_stages_stream)


def _failures_leave_nothing_behind(streams: _Recorded) -> None:
    between, ddp = _Between(), _model()
    chain(AllReduce(), between).register(ddp)
    _backward(ddp, 0)
    between.is_failing = True
    _backward(ddp, 1)
    # The tensors that it used may now be freed or changed.
    assert streams.log[-1] == "0 waits for 1"
    with pytest.raises(RuntimeError, match="as it was told"):
        between.completion.wait()

    async def fail(item: Item) -> None:
        await all_reduce(torch.ones(3))
        raise RuntimeError("as it was told")

    executor = executor_for(ddp.process_group, torch.device("cpu"))
    with pytest.raises(RuntimeError, match="as it was told"):
        run_now([Item(index=0)], fail, executor)
    assert streams.log[-1] == "0 waits for 2"


def test_the_training_stream_waits_for_what_failed_between_passes() -> None:
    _with_streams(_failures_leave_nothing_behind)


def _memory_is_kept_without_a_wait(streams: _Recorded) -> None:
    ddp = _model()
    zero = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.SGD, lr=0.1, overlap_with_ddp=True)
    chain(ZeroStep(zero, gather="forward")).register(ddp)
    for step in range(4):
        _backward(ddp, step)
        zero.step()
    for parameter in ddp.parameters():
        # Once for each stream that has gathered it, however often it did.
        assert [name for tensor, name in streams.held if tensor is parameter] == ["0", "1"]

    ddp = _model()
    local = LocalSGD(ddp, torch.optim.SGD(ddp.parameters(), lr=0.1), period=2, start_step=0, overlap=True)
    streams.held.clear()
    for step in range(6):  # Without a pass: ranks train alone.
        _backward(ddp, step)
        local.step()
    held = {(name, tensor.numel()) for tensor, name in streams.held}
    assert held == {("2", parameter.numel()) for parameter in ddp.parameters()}, held


def test_what_rides_between_passes_may_be_dropped() -> None:
    _with_streams(_memory_is_kept_without_a_wait)


def _calls_share_a_stream(streams: _Recorded) -> None:
    parameters = [torch.ones(5), torch.ones(7, dtype=torch.float64)]
    for _ in range(3):
        average_parameters(parameters)
    assert len(streams.made) == 2
    assert streams.log == ["1 waits for 0", "0 waits for 1"] * 3
    others = _Recorded()
    with streams_replaced(others):
        average_parameters(parameters)
    assert len(streams.made) == len(others.made) == 2, "the streams of one device are not used with another's"


def test_calls_on_a_group_share_one_stream() -> None:
    _with_streams(_calls_share_a_stream)
