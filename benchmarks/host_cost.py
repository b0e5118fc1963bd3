"""The host's time, Python calls and operators for a bucket on an accelerator, measured without one.

    python -m benchmarks.host_cost [--buckets 48] [--steps 30] [--only TEXT]

Streams do nothing and the process group is PyTorch's fake one, so the code for accelerators runs on tensors of the CPU,
which are so small that launching is all that they cost. Each bucket has the six parameters of one layer. Times are of
the thread, so other work on the machine hardly counts; operators are those that the package issues, collectives
included and views left out: about as many kernels are launched.
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
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
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
    Int4,
    Int8,
    OverlappedOptimizer,
    PowerSGD,
    Quantize,
    SkipNonFinite,
    Stage,
    Step,
    chain,
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
    """Streams and events that do nothing; tensors of the CPU have them, too."""

    device = torch.device("cpu")

    def has_streams(self, device: torch.device) -> bool:
        return True

    def _itself(self, *_: Any, **__: Any) -> Any:
        return self

    def _nothing(self, *_: Any, **__: Any) -> None:
        pass

    new_stream = current_stream = new_event = _itself
    record_stream = wait_stream = wait_event = record = synchronize = _nothing

    def on_stream(self, stream: Any) -> Any:
        return contextlib.nullcontext()

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


def _without_chain(ddp: DistributedDataParallel, make: Maker) -> Update:
    """A hook that does nothing: DDP's own all-reduce has no result on a fake group."""

    def hook(state: object, bucket: Any) -> Any:
        done: torch.futures.Future[Tensor] = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done

    hook.__annotations__.clear()  # DDP compares them with types, and here they are strings.
    ddp.register_comm_hook(None, hook)
    return plain(ddp, make)


PLAIN = "plain DDP"
# By name: the ranks that the fake group stands for, and the recipe.
METHODS: dict[str, tuple[int, Recipe]] = {
    PLAIN: (8, _without_chain),
    "AllReduce": (8, reduced(AllReduce)),
    "Cast(bfloat16)": (8, reduced(lambda: Cast(torch.bfloat16, AllReduce()))),
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


@contextlib.contextmanager
def model_on(ranks: int, buckets: int, width: int = 48) -> Iterator[tuple[DistributedDataParallel, Tensor]]:
    """The model and an input, in a default process group of their own, which stands for so many ranks."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        # The fake backend has NCCL's all-to-all.
        with streams_replaced(IdleStreams()), mock.patch.object(GroupChannel, "has_all_to_all", return_value=True):
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
def training(method: str, buckets: int) -> Iterator[tuple[DistributedDataParallel, Update, Tensor]]:
    """The model with the method's chain, its update, and an input."""
    ranks, recipe = METHODS[method]
    with model_on(ranks, buckets) as (ddp, x):
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


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Of a method: the median times of a bucket and of ``step()``, and the counts of a step by its buckets."""

    bucket_us: float
    step_ms: float
    calls: float
    operators: float


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


def measure(method: str, buckets: int, steps: int) -> Cost:
    with training(method, buckets) as (ddp, update, x):
        for _ in range(_WARM_UP):
            step(ddp, update, x)
        with calls_counted() as calls:
            step(ddp, update, x)
        with Operators() as counted:
            step(ddp, update, x)
        in_buckets_s: list[float] = []
        in_step_s: list[float] = []
        if (registration := registration_of(ddp)) is not None:
            runtime = registration.runtime
            runtime.on_bucket = timed(runtime.on_bucket, in_buckets_s)  # type: ignore[method-assign]
        timed_step = timed(update.step, in_step_s)
        for _ in range(steps):
            ddp(x).square().mean().backward()
            timed_step()
            update.clear()
        update.finish()
    return Cost(
        bucket_us=1e6 * statistics.median(in_buckets_s or [0.0]),
        step_ms=1e3 * statistics.median(in_step_s),
        calls=calls[0] / buckets,
        operators=counted.counts.total() / buckets,
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
    rows = [["method", "us a bucket", "calls a bucket", "operators a bucket", "step(), ms", "of plain DDP's"]]
    plain_ms = 0.0
    for method in METHODS:
        if method == PLAIN or options.only in method:
            cost = measure(method, options.buckets, options.steps)
            plain_ms = plain_ms or cost.step_ms
            figures = cost.bucket_us, cost.calls, cost.operators
            rows.append(
                [method, *(f"{one:.0f}" for one in figures), f"{cost.step_ms:.2f}", f"{cost.step_ms / plain_ms:.2f}"]
            )
    print(in_columns(rows))


if __name__ == "__main__":
    main()
