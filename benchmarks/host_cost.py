"""The host's time, its calls and the operators for a bucket on an accelerator, measured without one.

    python -m benchmarks.host_cost [--buckets 48] [--steps 30] [--only TEXT]

Streams do nothing and the process group is PyTorch's fake one, so the code for accelerators runs on tensors of the CPU,
which are so small that launching is all that they cost. Each bucket has the six parameters of one layer. Times are of
the thread, so other work on the machine hardly counts; operators are those that the package issues, collectives
included and views left out: about as many kernels are launched. Hooks written by hand are beside, so that ratios hold
on other machines.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple
from unittest import mock
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

import overlap
from benchmarks.pages import in_columns
from benchmarks.recipes import Maker, Recipe, Update, plain, reduced, sharded, stepped
from overlap import (
    AllReduce,
    Cast,
    ClipGradNorm,
    DivideByCount,
    Int4,
    Int8,
    Log,
    OverlappedOptimizer,
    PowerSGD,
    Quantize,
    SkipNonFinite,
    Stage,
    Step,
    chain,
    route,
)  # fmt: skip
from overlap._torch.c10d import GroupChannel
from overlap._torch.device import DeviceStreams, streams_replaced
from overlap.hooks.engine.registration import registration_of

_PACKAGE = f"{Path(overlap.__file__).parent}/"
ADAMW = Maker(torch.optim.AdamW, {"lr": 1e-3, "fused": True})
_WARM_UP = 20
# Parts of names of operators, besides those whose schema is a view's.
_LAUNCH_NOTHING = ("empty", "_unsafe_view", "promote_types", "_record_function")


class IdleStreams(DeviceStreams):
    """Streams and events that do nothing but count; tensors of the CPU have them, too."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        self.operations = 0
        """New streams and events, records and waits."""

    def has_streams(self, device: torch.device) -> bool:
        return True

    def current_stream(self, device: torch.device) -> Any:
        return self

    def _itself(self, *_: Any, **__: Any) -> Any:
        self.operations += 1
        return self

    def _nothing(self, other: Any = None) -> None:
        self.operations += 1

    new_stream = new_event = _itself
    wait_stream = wait_event = record = synchronize = _nothing

    def record_stream(self, tensor: Tensor, stream: Any) -> None:
        self.operations += 1

    def set_stream(self, stream: Any) -> None:
        pass

    def query(self) -> bool:
        return True

    def future_for(self, device: torch.device) -> torch.futures.Future[Any]:
        return torch.futures.Future()

    def _copied(self, tensor: Tensor, *_: Any) -> Tensor:
        return tensor.clone()

    to_device = _copied


class Operators(TorchDispatchMode):
    """Counts by name the operators that the package issues; those that launch nothing are left out."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name = func.overloadpacket.__name__
        launches = not func.is_view and not any(part in name for part in _LAUNCH_NOTHING)
        if launches and _is_ours(sys._getframe(1)):
            self.counts[name] += 1
        return func(*args, **(kwargs or {}))


def _is_ours(frame: FrameType | None) -> bool:
    while frame is not None and not frame.f_code.co_filename.startswith(_PACKAGE):
        frame = frame.f_back
    return frame is not None


class Layer(nn.Module):
    """Six parameters, of four shapes: a bucket."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(3 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))  # type: ignore[no-any-return]


def _transformed(make_transform: Callable[[], Stage]) -> Recipe:
    def recipe(ddp: DistributedDataParallel, make: Maker) -> Update:
        optimizer = OverlappedOptimizer(make(ddp.parameters()))
        chain(AllReduce(), make_transform(), Step(optimizer)).register(ddp)
        return Update(optimizers=(optimizer,))

    return recipe


def _counted(ddp: DistributedDataParallel, make: Maker) -> Update:
    by_count = DivideByCount()
    chain(by_count, AllReduce()).register(ddp)
    update = plain(ddp, make)

    def clear() -> None:
        update.clear()
        by_count.count(2)  # Of the next batch.

    clear()
    return replace(update, clear=clear)


@dataclass
class _Hook:
    """The work of a hand-written hook on one bucket, as a method that can be timed."""

    on_bucket: Callable[[Any], Any]


_hooks: WeakKeyDictionary[DistributedDataParallel, _Hook] = WeakKeyDictionary()


def _by_hand(make_hook: Callable[[DistributedDataParallel], Callable[[Any], Any]], *, updates: bool = False) -> Recipe:
    def recipe(ddp: DistributedDataParallel, make: Maker) -> Update:
        written = _hooks[ddp] = _Hook(make_hook(ddp))

        def hook(state: object, bucket: Any) -> Any:
            return written.on_bucket(bucket)

        hook.__annotations__.clear()  # DDP compares them with types, and here they are strings.
        ddp.register_comm_hook(None, hook)
        return Update(clear=ddp.zero_grad) if updates else plain(ddp, make)

    return recipe


def _nothing(ddp: DistributedDataParallel) -> Callable[[Any], Any]:
    """DDP's own all-reduce has no result on a fake group."""

    def hook(bucket: Any) -> Any:
        done: torch.futures.Future[Tensor] = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done

    return hook


def _all_reduce(ddp: DistributedDataParallel) -> Callable[[Any], Any]:
    def hook(bucket: Any) -> Any:
        buffer = bucket.buffer().mul_(1 / 8)
        work = dist.all_reduce(buffer, async_op=True)
        assert work is not None
        work.wait()  # As the side stream's.
        done: torch.futures.Future[Tensor] = torch.futures.Future()
        done.set_result(buffer)
        return done

    return hook


def _all_reduce_and_adamw(ddp: DistributedDataParallel) -> Callable[[Any], Any]:
    reduce, one, kept = _all_reduce(ddp), torch.tensor(1.0), dict[int, Any]()

    def hook(bucket: Any) -> Any:
        done, lists = reduce(bucket), kept.get(bucket.index())
        if lists is None or lists[0] is not bucket.buffer():
            parameters = bucket.parameters()
            moments = [[torch.zeros_like(parameter) for parameter in parameters] for _ in range(2)]
            steps = [torch.tensor(0.0) for _ in parameters]
            lists = kept[bucket.index()] = bucket.buffer(), parameters, bucket.gradients(), *moments, [], steps
        torch._foreach_add_(lists[-1], one)
        torch._fused_adamw_(
            *lists[1:],
            amsgrad=False, lr=1e-3, beta1=0.9, beta2=0.999, weight_decay=1e-2, eps=1e-8, maximize=False,
        )  # fmt: skip
        return done

    return hook


def _of_torch(hook: Callable[..., Any]) -> Callable[[DistributedDataParallel], Callable[[Any], Any]]:
    """PyTorch's, which read the result of a collective's future; that of a fake group has none."""
    plain_all_reduce: Any = dist.all_reduce

    class Done(NamedTuple):
        tensor: Tensor

        def get_future(self) -> torch.futures.Future[list[Tensor]]:
            done: torch.futures.Future[list[Tensor]] = torch.futures.Future()
            done.set_result([self.tensor])
            return done

    def all_reduce(tensor: Tensor, **options: Any) -> Done:
        plain_all_reduce(tensor, **options)
        return Done(tensor)

    def with_result(group: Any, bucket: Any) -> Any:
        dist.all_reduce = all_reduce  # type: ignore[assignment]
        try:
            return hook(group, bucket)
        finally:
            dist.all_reduce = plain_all_reduce

    return lambda ddp: partial(with_result, ddp.process_group)


PLAIN = "plain DDP"
BY_HAND, BY_HAND_UPDATED = "a hook: all_reduce", "a hook: all_reduce, AdamW"
# By name: the ranks that the fake group stands for, and the recipe.
HOOKS: dict[str, tuple[int, Recipe]] = {
    BY_HAND: (8, _by_hand(_all_reduce)),
    BY_HAND_UPDATED: (8, _by_hand(_all_reduce_and_adamw, updates=True)),
    "allreduce_hook": (8, _by_hand(_of_torch(default_hooks.allreduce_hook))),
    "bf16_compress_hook": (8, _by_hand(_of_torch(default_hooks.bf16_compress_hook))),
}
METHODS: dict[str, tuple[int, Recipe]] = {
    PLAIN: (8, _by_hand(_nothing)),
    "AllReduce": (8, reduced(AllReduce)),
    "DivideByCount, AllReduce": (8, _counted),
    "Cast(bfloat16)": (8, reduced(lambda: Cast(torch.bfloat16, AllReduce()))),
    "AllReduce, Log": (8, reduced(lambda: chain(AllReduce(), Log(lambda step, norms: None)))),
    "route, AllReduce": (8, reduced(lambda: route({"*.bias": AllReduce(), "*": AllReduce()}))),
    "AllReduce, Step": (8, stepped()),
    "AllReduce, Step, deferred": (8, stepped(deferred=True)),
    "AllReduce, Step, released": (8, stepped(release_gradients=True)),
    "AllReduce, ClipGradNorm, Step": (8, _transformed(lambda: ClipGradNorm(1.0))),
    "AllReduce, SkipNonFinite, Step": (8, _transformed(SkipNonFinite)),
    "ZeroStep, 8 ranks": (8, sharded()),
    "ZeroStep, 64 ranks": (64, sharded()),
    "ZeroStep, in forward": (8, sharded(gather="forward")),
    "PowerSGD(rank=4)": (8, reduced(lambda: PowerSGD(rank=4))),
    "Quantize(Int8()), 8 ranks": (8, reduced(lambda: Quantize(Int8()))),
    "Quantize(Int8()), 64 ranks": (64, reduced(lambda: Quantize(Int8()))),
    "Quantize(Int4()), feedback": (8, reduced(lambda: Quantize(Int4(), error_feedback=True))),
}


def _has_all_to_all(channel: GroupChannel, device: torch.device) -> bool:
    return True  # Not a mock, whose calls would take as long as an operator.


@contextlib.contextmanager
def model_on(
    ranks: int, buckets: int, width: int = 48, streams: IdleStreams | None = None
) -> Iterator[tuple[DistributedDataParallel, Tensor]]:
    """The model and an input, in a default process group of their own, which stands for so many ranks."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        # The fake backend has NCCL's all-to-all.
        with (
            streams_replaced(streams or IdleStreams()),
            mock.patch.object(GroupChannel, "has_all_to_all", _has_all_to_all),
        ):
            torch.manual_seed(0)
            layers = [Layer(width) for _ in range(buckets)]
            cap_mb = sum(parameter.nbytes for parameter in layers[0].parameters()) / 2**20
            ddp = DistributedDataParallel(
                nn.Sequential(*layers), bucket_cap_mb=cap_mb, gradient_as_bucket_view=True
            )  # fmt: skip
            yield ddp, torch.randn(2, width)
    finally:
        dist.destroy_process_group()


@contextlib.contextmanager
def training(
    method: str, buckets: int, width: int = 48, streams: IdleStreams | None = None
) -> Iterator[tuple[DistributedDataParallel, Update, Tensor]]:
    """The model with the method's chain, its update, and an input."""
    ranks, recipe = (HOOKS | METHODS)[method]
    with model_on(ranks, buckets, width, streams) as (ddp, x):
        yield ddp, recipe(ddp, ADAMW), x


def operators(method: str, buckets: int, *, warm_up: int = 4) -> Counter[str]:
    """Those that the package issues in one step, by name."""
    with training(method, buckets) as (ddp, update, x):
        for _ in range(warm_up):
            step(ddp, update, x)
        with Operators() as counted:
            step(ddp, update, x)
        update.finish()
    return counted.counts


def step(ddp: nn.Module, update: Update, x: Tensor) -> None:
    ddp(x).square().mean().backward()
    update.step()
    update.clear()


class Calls(NamedTuple):
    """The calls of a step: functions of the package, functions in C that these call, and operations of streams."""

    python: int
    c: int
    streams: int


@contextlib.contextmanager
def calls_counted() -> Iterator[list[int]]:
    """One number: how many Python calls this thread makes into the package."""
    calls = [0]

    def count(frame: FrameType, event: str, argument: object) -> None:
        calls[0] += event == "call" and frame.f_code.co_filename.startswith(_PACKAGE)

    gc.collect()
    gc.disable()  # It calls back whoever holds weak references.
    sys.setprofile(count)
    try:
        yield calls
    finally:
        sys.setprofile(None)
        gc.enable()


def calls(method: str, buckets: int, *, warm_up: int = 4) -> Calls:
    """Those of one step."""
    counts, streams = {"call": 0, "c_call": 0}, IdleStreams()

    def count(frame: FrameType, event: str, argument: object) -> None:
        if event in counts and frame.f_code.co_filename.startswith(_PACKAGE):
            counts[event] += 1

    with training(method, buckets, streams=streams) as (ddp, update, x):
        for _ in range(warm_up):
            step(ddp, update, x)
        before = streams.operations
        sys.setprofile(count)
        step(ddp, update, x)
        sys.setprofile(None)
        update.finish()
    return Calls(counts["call"], counts["c_call"], streams.operations - before)


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Of a method: quarter quantiles of the times of a bucket and of ``step()``, which other work on the machine
    disturbs least, and the counts of a step by its buckets."""

    bucket_us: float
    step_ms: float
    calls: Calls
    operators: int


def measure(method: str, buckets: int, steps: int) -> Cost:
    with training(method, buckets) as (ddp, update, x):
        for _ in range(_WARM_UP):
            step(ddp, update, x)
        in_buckets_s: list[float] = []
        in_step_s: list[float] = []
        registration = registration_of(ddp)
        hook: Any = _hooks[ddp] if registration is None else registration.runtime
        hook.on_bucket = timed(hook.on_bucket, in_buckets_s)
        timed_step = timed(update.step, in_step_s)
        for _ in range(steps):
            ddp(x).square().mean().backward()
            timed_step()
            update.clear()
        update.finish()
    return Cost(
        bucket_us=1e6 * statistics.quantiles(in_buckets_s)[0],
        step_ms=1e3 * statistics.quantiles(in_step_s)[0],
        calls=calls(method, buckets),
        operators=operators(method, buckets).total(),
    )


def timed(call: Callable[..., Any], took_s: list[float]) -> Callable[..., Any]:
    def run(*args: Any) -> Any:
        start_s = time.thread_time()
        result = call(*args)
        took_s.append(time.thread_time() - start_s)
        return result

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--buckets", type=int, default=48)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--only", default="", metavar="TEXT", help="methods whose name contains it")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = [["", "us", "of the hook", "Python calls", "C calls", "of streams", "operators", "step(), ms", "of plain"]]
    plain_ms = by_hand_us = 0.0
    for method in dict.fromkeys((PLAIN, *HOOKS, *METHODS)):
        if method in (PLAIN, BY_HAND) or options.only in method:
            cost = measure(method, options.buckets, options.steps)
            plain_ms = plain_ms or cost.step_ms
            by_hand_us = cost.bucket_us if method == BY_HAND else by_hand_us
            ratio = f"{cost.bucket_us / by_hand_us:.2f}" if by_hand_us else ""
            counts = [f"{count / options.buckets:.0f}" for count in (*cost.calls, cost.operators)]
            of_step = [f"{cost.step_ms:.2f}", f"{cost.step_ms / plain_ms:.2f}"]
            rows.append([method, f"{cost.bucket_us:.0f}", ratio, *counts, *of_step])
    print(in_columns(rows))


if __name__ == "__main__":
    main()
