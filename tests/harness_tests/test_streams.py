"""The detector of races finds each kind, and says nothing of what is right."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from harness import run_ranks
from harness.streams import STREAMS_BACKEND, Detector, detecting, one_process
from harness.streams.detector import active
from overlap._torch.device import (
    current_stream,
    future_for,
    hold,
    new_stream,
    on_stream,
    recorded_event,
    synchronize,
    to_device,
)
from overlap.hooks.transforms.clip import Clipping

DEVICE = torch.device("cpu")


def _two_streams(*, forward: bool = True, back: bool = True) -> None:
    """A side stream changes what the current one has made, and the current one reads it."""
    values, side = torch.zeros(8, device=DEVICE), new_stream(DEVICE)
    if forward:
        side.wait_stream(current_stream(DEVICE))
    with on_stream(side):
        values.add_(1)
    if back:
        current_stream(DEVICE).wait_stream(side)
    values.sum()


def _overlapping(*, first: slice, second: slice) -> None:
    values, side = torch.zeros(8, device=DEVICE), new_stream(DEVICE)
    side.wait_stream(current_stream(DEVICE))
    values[first].add_(1)
    with on_stream(side):
        values[second].add_(1)


def _columns() -> None:
    """Views that have no byte in common though their ranges overlap."""
    values, side = torch.zeros(4, 4, device=DEVICE), new_stream(DEVICE)
    side.wait_stream(current_stream(DEVICE))
    values[:, 0].add_(1)
    with on_stream(side):
        torch._foreach_mul_([values[:, 1], values[:, 3]], 2.0)
        torch.add(values[:, 1], 1, out=values[:, 2])


def _both_read() -> None:
    values, side = torch.zeros(8, device=DEVICE), new_stream(DEVICE)
    side.wait_stream(current_stream(DEVICE))
    values.sum()
    with on_stream(side):
        values.sum()


def _events(*, early: bool) -> None:
    values, side = torch.zeros(8, device=DEVICE), new_stream(DEVICE)
    side.wait_stream(current_stream(DEVICE))
    with on_stream(side):
        before = recorded_event(DEVICE)
        values.add_(1)
        after = recorded_event(DEVICE)
    current_stream(DEVICE).wait_event(before if early else after)
    values.sum()


def _transitively() -> None:
    values, first, second = torch.zeros(8, device=DEVICE), new_stream(DEVICE), new_stream(DEVICE)
    first.wait_stream(current_stream(DEVICE))
    with on_stream(first):
        values.add_(1)
    second.wait_stream(first)
    current_stream(DEVICE).wait_stream(second)
    values.sum()


def _through_the_host() -> None:
    """What the host has waited for is done before all that it queues from then on."""
    values, side = torch.zeros(8, device=DEVICE), new_stream(DEVICE)
    side.wait_stream(current_stream(DEVICE))
    with on_stream(side):
        values.add_(1)
    synchronize(DEVICE)
    values.sum()


def _frees(*, holds: bool = False, waits: bool = False, allocates: bool = True) -> None:
    """A side stream reads what the current one has made and freed."""
    values, side = torch.zeros(8, device=DEVICE), new_stream(DEVICE)
    side.wait_stream(current_stream(DEVICE))
    with on_stream(side):
        values.sum()
        if holds:
            hold(values)
    del values
    if waits:
        current_stream(DEVICE).wait_stream(side)
    if allocates:
        torch.zeros(8, device=DEVICE)


def _frees_for_two(*, holds: bool = True) -> None:
    """The allocator is told of a stream that has waited for another one's read."""
    values, side, other = torch.zeros(8, device=DEVICE), new_stream(DEVICE), new_stream(DEVICE)
    side.wait_stream(current_stream(DEVICE))
    with on_stream(side):
        values.sum()
    other.wait_stream(side)
    if holds:
        hold(values, other)
    del values
    torch.zeros(8, device=DEVICE)


def _pinned() -> torch.Tensor:
    detector = active()
    assert detector is not None
    return detector.make_host_memory(torch.zeros(4), is_pinned=True)


def _copies(*, waits: bool) -> None:
    answers = _pinned()
    answers.copy_(torch.ones(4, device=DEVICE), non_blocking=True)
    copied = recorded_event(DEVICE)
    if waits:
        copied.synchronize()
    answers.tolist()


def _fills_again(*, waits: bool) -> None:
    """The host writes into pinned memory that a copy may still read."""
    values = torch.zeros(4, device=DEVICE)
    buffer = _pinned()
    buffer.fill_(1)
    values.copy_(buffer, non_blocking=True)
    if waits:
        synchronize(DEVICE)
    buffer.fill_(2)


def _host_memory() -> None:
    """A number on the host is read there, and goes along with a kernel."""
    step = torch.tensor(3.0)
    step.add_(1)
    assert step.item() == 4
    torch.zeros(4, device=DEVICE).mul_(step)


def _to_the_device() -> None:
    places = to_device(torch.tensor([0, 2]), DEVICE)
    torch.ones(4, device=DEVICE)[places].add_(1)


def _future(*, has_devices: bool = True, waits: bool = True) -> None:
    values, side = torch.zeros(8, device=DEVICE), new_stream(DEVICE)
    future = future_for(DEVICE) if has_devices else torch.futures.Future()
    side.wait_stream(current_stream(DEVICE))
    with on_stream(side):
        values.add_(1)
        future.set_result(values)
    (future.wait() if waits else values).sum()


def _then() -> None:
    values, side = torch.zeros(8, device=DEVICE), new_stream(DEVICE)
    future = future_for(DEVICE)
    following = future.then(lambda done: done.value().mul_(2))
    side.wait_stream(current_stream(DEVICE))
    with on_stream(side):
        future.set_result(values.add_(1))
    assert following.wait().sum() == 16


def _collective(*, waits: bool = True, side: bool = False) -> None:
    values = torch.ones(8, device=DEVICE)
    work = dist.all_reduce(values, async_op=True)
    if side:
        with on_stream(new_stream(DEVICE)):
            work.wait()
    elif waits:
        work.wait()
    assert values.sum() == 16


def _held_by_a_work(*, waits: bool) -> None:
    """A work keeps its tensors; they go with it, which must have been waited for."""
    work = dist.all_reduce(torch.ones(8, device=DEVICE), async_op=True)
    if waits:
        work.wait()
    torch.ones(8, device=DEVICE)
    del work
    torch.ones(8, device=DEVICE)


def _message() -> None:
    sent, received = torch.ones(4, device=DEVICE), torch.ones(4, device=DEVICE)
    peers = [dist.P2POp(dist.isend, sent, 1), dist.P2POp(dist.irecv, received, 1)]
    for work in dist.batch_isend_irecv(peers):
        work.wait()
    received.add_(1)


RIGHT: dict[str, Callable[[], None]] = {
    "both wait": _two_streams,
    "halves": lambda: _overlapping(first=slice(0, 4), second=slice(4, 8)),
    "columns": _columns,
    "both read": _both_read,
    "an event": lambda: _events(early=False),
    "transitively": _transitively,
    "through the host": _through_the_host,
    "held": lambda: _frees(holds=True),
    "waited for": lambda: _frees(waits=True),
    "held for a stream that waited": _frees_for_two,
    "freed, never lent again": lambda: _frees(allocates=False),
    "a number on the host": _host_memory,
    "a copy to the device": _to_the_device,
    "a device's future": _future,
    "a callback": _then,
    "a collective": _collective,
    "held by a work": lambda: _held_by_a_work(waits=True),
    "messages": _message,
}

WRONG: dict[str, tuple[Callable[[], None], str]] = {
    "the side stream does not wait": (lambda: _two_streams(forward=False), "race"),
    "the current stream does not wait": (lambda: _two_streams(back=False), "race"),
    "one byte in common": (lambda: _overlapping(first=slice(0, 5), second=slice(4, 8)), "race"),
    "an event recorded too early": (lambda: _events(early=True), "race"),
    "not held": (_frees, "use after free"),
    "not held for a stream that waited": (lambda: _frees_for_two(holds=False), "use after free"),
    "pinned memory read before the copy": (lambda: _copies(waits=False), "race"),
    "pinned memory written before the copy": (lambda: _fills_again(waits=False), "race"),
    "a future without device": (lambda: _future(has_devices=False), "race"),
    "a future not waited for": (lambda: _future(waits=False), "race"),
    "a collective not waited for": (lambda: _collective(waits=False), "race"),
    "a collective waited for elsewhere": (lambda: _collective(side=True), "race"),
    "a work dropped": (lambda: _held_by_a_work(waits=False), "use after free"),
}

WAITS: dict[str, Callable[[], None]] = {
    "item": lambda: torch.ones(1, device=DEVICE).item(),
    "tolist": lambda: torch.ones(1, device=DEVICE).tolist(),
    "if": lambda: bool(torch.ones(1, device=DEVICE) > 0),
    "cpu": lambda: torch.ones(1, device=DEVICE).cpu().add_(1),
    "equal": lambda: torch.equal(torch.ones(1, device=DEVICE), torch.ones(1, device=DEVICE)),
    "nonzero": lambda: torch.ones(3, device=DEVICE).nonzero(),
    "a mask": lambda: torch.ones(3, device=DEVICE)[torch.ones(3, device=DEVICE) > 0],
    "data": lambda: torch.tensor([1.0], device=DEVICE),
    "to the device": lambda: torch.tensor([1.0]).to(DEVICE),
    "an event": lambda: _copies(waits=True),
    "all": lambda: synchronize(DEVICE),
    "a barrier": dist.barrier,
}


@pytest.fixture(scope="module", autouse=True)
def _group():
    with one_process(2):
        yield


def _watched(example: Callable[[], object]) -> Detector:
    with detecting() as detector, detector.steps():
        example()
    return detector


@pytest.mark.parametrize("name", RIGHT)
def test_what_is_right_is_silent(name: str) -> None:
    report = _watched(RIGHT[name]).report
    assert report.operators > 1
    assert not report.faults, report.faults[0]


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_found(name: str) -> None:
    example, kind = WRONG[name]
    detector = _watched(example)
    assert {fault.kind for fault in detector.report.faults} == {kind}
    assert "test_streams.py" in str(detector.report.faults[0])
    with pytest.raises(AssertionError, match=kind):
        detector.report.check()


@pytest.mark.parametrize("name", WAITS)
def test_where_the_host_waits_is_noted(name: str) -> None:
    report = _watched(WAITS[name]).report
    assert len(report.host_syncs) == 1
    report.check(host_syncs=[report.host_syncs[0].place])
    assert report.host_syncs[0].place.startswith("tests/harness_tests/test_streams.py")


def test_a_wait_that_is_declared_and_never_happens_is_an_error() -> None:
    report = _watched(_two_streams).report
    with pytest.raises(AssertionError, match="never waits"):
        report.check(host_syncs=["overlap/optim"])


def _asks_whether_norms_are_finite() -> None:
    Clipping(1.0, error_if_nonfinite=True).clip_([torch.ones(1, device=DEVICE)])


def test_what_the_library_makes_the_host_wait_for_is_to_be_declared() -> None:
    report = _watched(lambda: torch.ones(1, device=DEVICE).item()).report
    report.check()
    report = _watched(_asks_whether_norms_are_finite).report
    with pytest.raises(AssertionError, match="the host waits"):
        report.check()
    report.check(host_syncs=["overlap/hooks/transforms/clip.py:scale_"])


def _ddp_alone(rank: int, world_size: int) -> None:
    """DDP's own copies and its broadcast of buffers, with a hook that is right and one that is not."""
    for has_devices in (True, False):
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1))
        ddp = DistributedDataParallel(model)
        x = torch.full((2, 4), rank + 1.0).cumsum(0)
        with detecting() as detector:
            ddp.register_comm_hook(None, _hook if has_devices else _hook_without_devices)
            for _ in range(3):
                ddp(x).sum().backward()
        assert bool(detector.report.faults) != has_devices, detector.report.faults[:1]
        mean = [torch.empty_like(ddp.module[2].weight) for _ in range(world_size)]
        dist.all_gather(mean, ddp.module[2].weight.grad)
        assert torch.equal(*mean)


def _hook(state, bucket):
    return dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(lambda done: done.value()[0].div_(2))


def _hook_without_devices(state, bucket):
    dist.all_reduce(bucket.buffer().div_(2), async_op=True)
    future = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


def test_ddp_between_two_ranks() -> None:
    run_ranks(_ddp_alone, 2, backend=STREAMS_BACKEND)
