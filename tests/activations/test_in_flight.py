"""How much of a device's memory copies hold, and who waits for whom, on streams that note what they are told."""

from __future__ import annotations

import dis
import gc
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from activations.fake_streams import FakeStreams
from harness import assert_parity
from overlap import ConfigurationError, TrainingLoopError
from overlap._torch.device import streams_replaced
from overlap.activations import limit_offload_in_flight, offload_wrapper, offloaded_bytes, store
from overlap.activations.store import Store, Stored, store_of
from overlap.activations.transfers import Transfers

CPU = torch.device("cpu")
NUMEL, NBYTES = 256, 1024


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeStreams]:
    """The CPU has streams, and no store yet."""
    monkeypatch.setattr(store, "_stores", {})
    with streams_replaced(fake := FakeStreams()):
        yield fake


def _put(to: Store, count: int) -> list[Stored]:
    """Stored tensors of 1 KB, full of their numbers, that nothing else holds."""
    return [to.put(torch.full((NUMEL,), float(number))) for number in range(count)]


def test_the_computation_waits_for_the_oldest_copies_out_when_more_is_held_than_allowed(streams: FakeStreams) -> None:
    to = Store(CPU)
    to.in_flight_bytes = 3 * NBYTES
    kept = _put(to, 3)
    assert not streams.called("wait")
    kept += _put(to, 2)
    # Event n is recorded behind copy n. The memory is of another stream's making as far as the store knows.
    assert [wait[:2] for wait in streams.called("wait")] == [("main", 0), ("main", 1)]
    assert to.leaving.held_bytes == 3 * NBYTES


def test_one_tensor_may_be_on_its_way_however_large(streams: FakeStreams) -> None:
    to = Store(CPU)
    to.in_flight_bytes = 0
    first = to.put(torch.ones(NUMEL))
    assert not streams.called("wait")
    second = to.put(torch.ones(NUMEL))
    assert streams.called("wait") == [("main", 0)]
    assert (first.nbytes, second.nbytes) == (NBYTES, NBYTES)


def test_memory_that_several_tensors_share_counts_once(streams: FakeStreams) -> None:
    to = Store(CPU)
    whole = torch.ones(4 * NUMEL)
    kept = [to.put(whole), to.put(whole.view(2, -1)), *map(to.put, whole.chunk(4))]
    assert to.leaving.held_bytes == 4 * NBYTES
    del kept[1:]
    gc.collect()
    assert to.leaving.held_bytes == 4 * NBYTES
    kept.clear()
    assert to.leaving.held_bytes == 0


def test_backward_fetches_ahead_within_the_bound_and_copies_nothing_twice(streams: FakeStreams) -> None:
    to = Store(CPU)
    to.in_flight_bytes = 0
    stored = _put(to, 9)
    to.in_flight_bytes = 3 * NBYTES
    before = streams.recorded
    ahead = []
    while stored:
        one = stored.pop()
        number = float(len(stored))
        assert_parity(one.fetch(), torch.full((NUMEL,), number), what="what was stored")
        ahead.append(to.returning.held_bytes // NBYTES)
    # The last one is still on its way out, and used where it is.
    assert ahead == [3, 3, 3, 3, 3, 3, 2, 1, 0]
    assert streams.recorded - before == 8


def test_tensors_of_one_node_are_fetched_in_their_order_and_not_again(streams: FakeStreams) -> None:
    to = Store(CPU)
    to.in_flight_bytes = 0
    stored = _put(to, 8)
    to.in_flight_bytes = 4 * NBYTES
    before = streams.recorded
    for pair in range(6, -1, -2):
        for number in (pair, pair + 1):
            assert stored[number].fetch()[0] == number
        del stored[pair:]
    assert streams.recorded - before == 7
    assert len(to.returning) == 0


def test_the_computation_waits_for_what_it_fetches_and_for_nothing_else(streams: FakeStreams) -> None:
    to = Store(CPU)
    to.in_flight_bytes = 0
    stored = _put(to, 3)
    streams.calls.clear()
    first = stored[1].fetch()
    # The memory may be a third stream's, which must not reuse it before the computation is done with it.
    assert ("record", "main", first.data_ptr()) in streams.calls
    assert streams.called("wait") == [("main", 3)], "and not for what is fetched ahead"
    assert stored[0].fetch()[0] == 0 and first[0] == 1
    assert streams.called("wait") == [("main", 4)]


def test_what_has_not_left_yet_is_used_where_it_is(streams: FakeStreams) -> None:
    to = Store(CPU)
    tensors = [torch.full((NUMEL,), float(number)) for number in range(3)]
    stored = [to.put(tensor) for tensor in tensors]
    assert [stored.pop().fetch().data_ptr() for _ in range(3)] == [tensor.data_ptr() for tensor in tensors[::-1]]
    assert streams.recorded == 3 and not streams.called("wait")


def test_a_copy_that_nobody_waits_for_keeps_its_memory_until_it_is_done(streams: FakeStreams) -> None:
    to = Store(CPU)
    out = to.put(torch.ones(NUMEL))
    address = to.leaving.get(out.number).tensor.data_ptr()
    del out
    assert streams.called("record") == [("stream 1", address)], "on its way out"
    to.in_flight_bytes = 0
    stored = _put(to, 3)
    stored[1].fetch()
    address = to.returning.get(stored[0].number).tensor.data_ptr()
    streams.calls.clear()
    del stored[0]
    assert ("stream 1", address) in streams.called("record"), "fetched ahead"
    stored.clear()
    assert (to.leaving.held_bytes, to.returning.held_bytes, to.lent_bytes) == (0, 0, 0)


def test_a_tensor_changed_in_place_on_its_way_out_is_an_error_and_later_is_none(streams: FakeStreams) -> None:
    to = Store(CPU)
    to.in_flight_bytes = 0
    late, early, there = (torch.ones(NUMEL) for _ in range(3))
    stored_late = to.put(late)
    stored_early = to.put(early)
    early.add_(1)
    stored_there = to.put(there)
    there.add_(1)
    late.add_(1)  # The computation has waited for its copy.
    assert stored_late.fetch()[0] == 1
    for stored in (stored_early, stored_there, stored_early):
        with pytest.raises(TrainingLoopError, match=r"shape \(256,\) that backward needs was changed in place"):
            stored.fetch()
    del stored, stored_late, stored_early, stored_there
    assert not to._changed


def test_fetching_ahead_stops_where_there_is_no_memory_for_it(
    streams: FakeStreams, monkeypatch: pytest.MonkeyPatch
) -> None:
    to = Store(CPU)
    to.in_flight_bytes = 0
    stored = _put(to, 4)
    empty, calls = torch.empty_strided, []

    def out_of_memory(*args: object, **options: object) -> Tensor:
        calls.append(args)
        if len(calls) == 2:
            raise torch.OutOfMemoryError("none left")
        return empty(*args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(torch, "empty_strided", out_of_memory)
    assert [stored[number].fetch()[0].item() for number in (2, 1, 0)] == [2, 1, 0]


class _Copies(TorchDispatchMode):
    """Notes what is copied, and on which stream other work is done."""

    def __init__(self, streams: FakeStreams) -> None:
        super().__init__()
        self.streams, self.copies, self.work = streams, 0, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        stream = self.streams.current_stream(CPU).name
        if func is torch.ops.aten.copy_.default and stream != "main":
            to, source = args[:2]
            assert to.dtype == source.dtype and to.stride() == source.stride(), "takes a temporary"
            assert torch.empty_like(source, device="meta").stride() == source.stride(), "is not dense"
            assert not any((to.is_conj(), source.is_conj(), to.is_neg(), source.is_neg())), "changed before it is there"
            self.copies += 1
        elif func is torch.ops.aten.clone.default:
            self.work.append(stream)
        return func(*args, **(kwargs or {}))


def _tensors() -> dict[str, tuple[Tensor, int]]:
    """Tensors, and how often each is made dense before it is copied."""
    values, numbers = torch.randn(24, 20), torch.randn(24, 20, dtype=torch.complex64)
    return {
        "contiguous": (values, 0),
        "no dimension": (torch.tensor(3.0), 0),
        "transposed": (values.t(), 0),
        "channels last": (torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last), 0),
        "a chunk": (values[4:9], 0),
        "with gaps": (values[:, ::2], 1),
        "transposed with gaps": (values.t()[::2], 1),
        "expanded": (values[:1, :4].expand(5, 4), 1),
        "conjugated": (numbers.conj(), 1),
        "conjugated and transposed": (numbers.t().conj(), 1),
        "negated": (numbers.conj().imag, 1),
        "negated and dense": (numbers[:1, :1].conj().imag, 1),
        "bfloat16": (values.bfloat16(), 0),
        "bool": (values > 0, 0),
        "complex128": (numbers.to(torch.complex128).t(), 0),
        "float8": (values.to(torch.float8_e4m3fn), 0),
    }


@pytest.mark.parametrize("name", _tensors())
def test_every_copy_is_of_equally_dense_tensors_without_a_pending_sign(streams: FakeStreams, name: str) -> None:
    tensor, packed = _tensors()[name]
    to = Store(CPU)
    to.in_flight_bytes = 0
    with _Copies(streams) as seen:
        stored = to.put(tensor)
        other = to.put(torch.ones(1))  # The first is no longer on its way.
        back = stored.fetch()
    assert other.nbytes == 4
    assert (seen.copies, seen.work) == (3, ["main"] * packed)
    assert back.dtype == tensor.dtype and back.shape == tensor.shape
    assert torch.equal(back, tensor) if back.dtype != torch.float8_e4m3fn else torch.equal(back.float(), tensor.float())
    assert back.data_ptr() != tensor.data_ptr()


def test_gradients_are_equal_and_nothing_is_held_after_backward(streams: FakeStreams) -> None:
    plain = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Dropout(0.5)) for _ in range(6)))
    x = torch.randn(16, 32)
    results = []
    for module in (plain, offload_wrapper(plain, min_bytes=0)):
        for nbytes in (0, 4000, 10**9):
            limit_offload_in_flight(nbytes, "cpu")
            torch.manual_seed(0)
            plain.zero_grad()
            module(x).square().sum().backward()
            results.append([p.grad.clone() for p in plain.parameters()])
    for result in results[1:]:
        assert_parity(result, results[0], what="offloaded")
    held = store_of(CPU)
    assert (offloaded_bytes("cpu"), held.leaving.held_bytes, held.returning.held_bytes) == (0, 0, 0)


def test_a_forward_without_backward_keeps_nothing(streams: FakeStreams) -> None:
    block = offload_wrapper(nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh()), min_bytes=0)
    out = block(torch.randn(16, 32)).sum()
    assert offloaded_bytes("cpu") > 0
    del out
    held = store_of(CPU)
    assert (offloaded_bytes("cpu"), held.leaving.held_bytes) == (0, 0)


@pytest.mark.parametrize("wrong", [-1, 0.5, "1 GB", None])
def test_a_bound_that_is_not_a_number_of_bytes_is_refused(wrong: object) -> None:
    with pytest.raises(ConfigurationError, match="nbytes must be a whole number of at least 0, got"):
        limit_offload_in_flight(wrong, "cpu")  # type: ignore[arg-type]


def _lines(function: Callable[..., Any]) -> set[int]:
    return {line for _, line in dis.findlinestarts(function.__code__) if line}


@pytest.mark.parametrize("line", sorted(_lines(Transfers._let_go) | _lines(Transfers.take) | _lines(Store.forget)))
def test_what_comes_back_in_the_middle_of_the_bookkeeping_is_counted_once(streams: FakeStreams, line: int) -> None:
    to = Store(CPU)
    kept = [to.put(half) for half in torch.ones(2 * NUMEL).chunk(2)]  # They share their memory.
    one = kept.pop()

    def drop_the_other(frame: FrameType, event: str, _: Any) -> Any:
        # As the collector may, wherever the program is.
        if (event, frame.f_lineno) == ("line", line) and frame.f_globals["__name__"].startswith("overlap.activations"):
            kept.clear()
        return drop_the_other

    before = sys.gettrace()
    sys.settrace(drop_the_other)
    try:
        del one
    finally:
        sys.settrace(before)
    kept.clear()
    assert (to.leaving.held_bytes, to.lent_bytes, to.free_bytes) == (0, 0, 2 * NBYTES)
