"""What encoding, decoding and reducing cost on the device, with nothing sent."""

from __future__ import annotations

import importlib.util
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.given import Given
from benchmarks.gpu.world import device_of
from benchmarks.simulated import spin
from overlap import (
    AllReduce,
    BFloat16,
    Bucket,
    Cast,
    Float8,
    Float16,
    Int4,
    Int8,
    PowerSGD,
    Quantize,
    Stage,
    TopK,
    Wire,
)
from overlap.hooks import StageContext
from overlap.hooks.stage import walk
from overlap.hooks.wires.chunks import ChunkCodec
from overlap.hooks.wires.kernels import in_form

_WIRES: tuple[Wire, ...] = (
    BFloat16(),
    Int8(),
    Int4(),
    Float8(),
    TopK(0.01),
    Float16(),
    Int8(rounding="stochastic"),
)
_REDUCERS: dict[str, Callable[[], Stage]] = {
    "Cast(bfloat16)": lambda: Cast(torch.bfloat16, AllReduce()),
    "Quantize(Int8())": lambda: Quantize(Int8()),
    "Quantize(Int4(), error_feedback=True)": lambda: Quantize(Int4(), error_feedback=True),
    "Quantize(TopK(0.01), error_feedback=True)": lambda: Quantize(TopK(0.01), error_feedback=True),
    "PowerSGD(rank=4)": lambda: PowerSGD(rank=4),
    "PowerSGD(rank=4, alternate=True)": lambda: PowerSGD(rank=4, alternate=True),
    "PowerSGD(rank=4, wire=Int8())": lambda: PowerSGD(rank=4, wire=Int8()),
}
# The forms of a wire's kernels: by PyTorch's operators, by Triton, by what torch.compile makes of the operators.
_PLAIN, _TRITON, _COMPILED = "plain", "Triton", "torch.compile"
_TO_COMPILE = (Int8(), Int4(), Float8())
_MATRICES = 6
_WARMUP = 3
# Of a GPU's clock, about.
_CYCLES_PER_S = 2e9

_device: torch.device


def cases(given: Given) -> list[str]:
    global _device
    _device = device_of(given)
    some = slice(given.sizes.variants)
    kernels = [f"{wire!r}, {form}" for wire in _WIRES for form in _forms(wire, given)]
    # Last, since they take long: torch.compile writes code for each.
    compiled = [f"{wire!r}, {_COMPILED}" for wire in _TO_COMPILE] if given.sizes.compiled_kernels else []
    return [*kernels[some], *list(_REDUCERS)[some], *compiled]


def _forms(wire: Wire, given: Given) -> tuple[str, ...]:
    """Those that a wire has: casts and a top-k are PyTorch's operators everywhere."""
    has_triton = given.device == "cuda" and importlib.util.find_spec("triton") is not None
    return (_PLAIN, _TRITON) if has_triton and isinstance(wire.codec(1024), ChunkCodec) else (_PLAIN,)


def limit_s(case: str, given: Given) -> float | None:
    """A compiler may take all the time that is left; no other case may."""
    return max(given.left_s, 1.0) if case.endswith(_COMPILED) else None


def run(case: str, given: Given) -> None:
    if case in _REDUCERS:
        _time_reducer(case, given)
        return
    name, form = case.rsplit(", ", 1)
    wire = next(wire for wire in _WIRES if repr(wire) == name)
    if form == _COMPILED:
        _time_compiled(wire, given)
    else:
        _time_wire(wire, form, given)


def _time_wire(wire: Wire, form: str, given: Given) -> None:
    """A message for each of the ranks, encoded at once and decoded at once, as when they exchange a bucket."""
    ranks = given.sizes.simulated_ranks
    codec = wire.codec(given.sizes.kernel_numel // ranks)
    values = torch.randn(ranks, codec.numel, device=_device)
    messages = torch.empty(ranks, codec.message_bytes, dtype=torch.uint8, device=_device)
    out, total = torch.empty_like(values), torch.zeros(codec.numel, device=_device)
    generator = torch.Generator(_device).manual_seed(0) if wire.is_stochastic else None
    with in_form("triton" if form == _TRITON else "plain"):
        encode_ms = _time_ms(lambda: codec.encode_rows(values, messages, generator), given)
        decode_ms = _time_ms(lambda: codec.decode_rows(messages, out), given)
        add_ms = _time_ms(lambda: codec.add_rows(messages, total), given)
    cells = {"bytes": codec.message_bytes / codec.numel / 4}
    _say_of_wire(f"{wire!r}, {form}", values, encode_ms, decode_ms, {**cells, "add up ms": add_ms}, given)


def _time_compiled(wire: Wire, given: Given) -> None:
    """What torch.compile makes of a wire's operators, on numbers that do not share a message's memory."""
    ranks = given.sizes.simulated_ranks
    codec: Any = wire.codec(given.sizes.kernel_numel // ranks)
    values = torch.randn(ranks, codec.chunks, codec.chunk_numel, device=_device)
    fields = tuple(
        torch.empty(ranks, codec.chunks, field.numel, dtype=field.dtype, device=_device) for field in codec.fields
    )
    out = torch.empty_like(values)
    compiled: Callable[[Any], Callable[..., Any]] = torch.compile
    write, read = compiled(codec.write), compiled(codec.read)
    encode_ms = _time_ms(lambda: write(values, fields, None), given)
    decode_ms = _time_ms(lambda: read(fields, out), given)
    _say_of_wire(f"{wire!r}, {_COMPILED}", values, encode_ms, decode_ms, {}, given)


def _say_of_wire(
    name: str, values: Tensor, encode_ms: float, decode_ms: float, cells: Mapping[str, float], given: Given
) -> None:
    table = f"Encoding and decoding {values.nbytes / 1e6:.3g} MB of values, {len(values)} messages"
    megabytes = values.nbytes / 1e6
    times = {
        "encode ms": encode_ms, "encode GB/s": megabytes / encode_ms,
        "decode ms": decode_ms, "decode GB/s": megabytes / decode_ms,
    }  # fmt: skip
    given.row(table, {"wire": name, **times, **cells})


@dataclass(frozen=True)
class _Alone:
    """In place of a process group and its channel: this rank without its peers, from which zeros come."""

    ranks: int

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return self.ranks

    def of(self, group: object) -> _Alone:
        return self

    def next_tag(self) -> int:
        return 0

    def all_reduce(self, tensor: Tensor, op: object) -> list[Any]:
        return []

    def all_gather(self, output: Tensor, input: Tensor) -> list[Any]:
        output.zero_()
        return []

    def send_recv(self, sends: object, receives: Sequence[tuple[Tensor, int]], tag: int) -> list[Any]:
        for tensor, _ in receives:
            tensor.zero_()
        return []


def _time_reducer(name: str, given: Given) -> None:
    """All kernels that a reducer launches for one bucket, but those of the collectives."""
    side = 1
    while _MATRICES * (2 * side) ** 2 <= given.sizes.kernel_numel:
        side *= 2
    parameters = tuple(torch.zeros(side, side, device=_device) for _ in range(_MATRICES))
    names = tuple(f"layer{place}.weight" for place in range(_MATRICES))
    group: Any = _Alone(given.sizes.simulated_ranks)
    stage = _REDUCERS[name]()
    named = dict(zip(parameters, names, strict=True))
    for each in walk(stage):
        each.attach(StageContext(group=group, device=_device, names=named, finds_unused=False))
    views = tuple((one.size(), one.stride(), place * side**2) for place, one in enumerate(parameters))
    gradients = torch.randn(_MATRICES * side**2, device=_device)
    steps = iter(range(10**6))

    @torch.no_grad()
    def reduce() -> None:
        bucket = Bucket(
            index=0, is_last=True, buffer=gradients, parameters=parameters, group=group, divisor=group.size(),
            step=next(steps), fqns=names, views=views,
        )  # fmt: skip
        for each in walk(stage):
            each.before_backward(is_replay=False)
        coroutine: Any = stage(bucket)
        try:
            operation = coroutine.send(None)
            while True:
                operation.launch(group)
                operation = coroutine.send(operation.finish(lambda work: None))
        except StopIteration:
            pass
        for each in walk(stage):
            each.after_backward(failed=False)

    time_ms = _time_ms(reduce, given)
    table = f"Reducing a bucket of {_MATRICES} matrices of {side} x {side}, {group.size()} ranks, without the sending"
    given.row(table, {"reducer": name, "ms": time_ms, "GB/s": gradients.nbytes / time_ms / 1e6})


def _time_ms(work: Callable[[], object], given: Given) -> float:
    """The median time of a call."""
    host_s = 0.0
    for _ in range(_WARMUP):
        start = time.perf_counter()
        work()
        host_s = time.perf_counter() - start
    times_ms = [_timed_ms(work, host_s) for _ in range(given.sizes.kernel_repeats)]
    return round(statistics.median(times_ms), 5)


def _timed_ms(work: Callable[[], object], host_s: float) -> float:
    """The time of a call which the host takes ``host_s`` to launch."""
    if _device.type != "cuda":
        start = time.perf_counter()
        work()
        return 1000 * (time.perf_counter() - start)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    # The device is kept busy while the host launches, so that what is timed is the device's work and no gap. With
    # PowerSGD, which launches a hundred small kernels, that takes some milliseconds.
    spin(round((0.001 + 2 * host_s) * _CYCLES_PER_S))
    begin.record()
    work()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end))
