"""What compressing the gradients of ResNet-18 takes of one core, without any sending.

    python benchmarks/compressor_cost.py [--rounds 20] [--rank 4] [--only powersgd wires]

Everything takes turns within one process and on one thread, so a busy machine slows all of it alike; medians and
quartiles of CPU time are printed, as a table for a page. PowerSGD's stage runs on buckets as DDP cuts them, on a rank
that is alone, so its collectives do nothing. Beside it stands the same arithmetic written down without a library,
matrix by matrix, and the least that any form of it must do to memory: read gradients and residuals, and write both.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import overlap
from overlap._torchvision import load_torchvision
from overlap.hooks import StageContext

_FIRST_BUCKET_BYTES, _BUCKET_BYTES = 2**20, 25 * 2**20
_WIRES = (overlap.Int8(), overlap.Int4(), overlap.Float8(), overlap.BFloat16(), overlap.Float16(), overlap.TopK(0.01))


@dataclass(frozen=True, eq=False)
class Alone:
    """Has the rank and the size of a process group."""

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return 1


def shapes() -> list[torch.Size]:
    """Of ResNet-18's gradients, in the order in which backward has them."""
    model: torch.nn.Module = load_torchvision().models.resnet18(num_classes=10)
    return [parameter.shape for parameter in reversed(list(model.parameters()))]


def cut(all_shapes: Sequence[torch.Size]) -> list[list[torch.Size]]:
    """Into buckets, as DDP does."""
    buckets: list[list[torch.Size]] = [[]]
    limit, held = _FIRST_BUCKET_BYTES, 0
    for shape in all_shapes:
        if held >= limit:
            buckets.append([])
            limit, held = _BUCKET_BYTES, 0
        buckets[-1].append(shape)
        held += 4 * shape.numel()
    return buckets


def powersgd(options: dict[str, Any], buckets: Sequence[Sequence[torch.Size]]) -> Callable[[], None]:
    """A pass of the stage over all buckets."""
    stage = overlap.PowerSGD(**options)
    group: Any = Alone()
    parameters = [[torch.zeros(shape) for shape in bucket] for bucket in buckets]
    names = {p: f"{place}.{at}" for place, bucket in enumerate(parameters) for at, p in enumerate(bucket)}
    stage.attach(StageContext(group=group, device=torch.device("cpu"), names=names, finds_unused=False))
    made = []
    for index, own in enumerate(parameters):
        views, offset = [], 0
        for parameter in own:
            views.append((parameter.size(), parameter.stride(), offset))
            offset += parameter.numel()
        made.append(
            overlap.Bucket(
                index=index,
                is_last=index == len(parameters) - 1,
                buffer=torch.randn(offset),
                parameters=tuple(own),
                group=group,
                divisor=1,
                step=0,
                fqns=tuple(names[parameter] for parameter in own),
                views=tuple(views),
            )
        )

    def run() -> None:
        stage.before_backward(is_replay=False)
        for bucket in made:
            coroutine: Any = stage(bucket)
            try:
                while True:
                    coroutine.send(None)
            except StopIteration:
                pass
        stage.after_backward(failed=False)

    return run


def lean(rank: int, buckets: Sequence[Sequence[torch.Size]]) -> Callable[[], None]:
    """The same arithmetic of the matrices alone."""
    matrices = [shape for bucket in buckets for shape in bucket if len(shape) > 1]
    sizes = [(shape[0], shape.numel() // shape[0]) for shape in matrices]
    gradients = [torch.randn(size) for size in sizes]
    residuals = [torch.zeros(size) for size in sizes]
    bases = [torch.randn(rank, cols) for _, cols in sizes]

    def run() -> None:
        for place, (m, residual) in enumerate(zip(gradients, residuals, strict=True)):
            m.add_(residual)
            p = torch.linalg.qr(m @ bases[place].T)[0].T
            q = p @ m
            torch.addmm(m, p.T, q, alpha=-1, out=residual)
            torch.mm(p.T, q, out=m)
            bases[place] = q / q.norm(dim=1, keepdim=True)

    return run


def memory_alone(buckets: Sequence[Sequence[torch.Size]]) -> Callable[[], None]:
    """What must be read and written: the sum, the sum again for the other factor, and both results."""
    numel = sum(shape.numel() for bucket in buckets for shape in bucket)
    gradient, residual = torch.randn(numel), torch.zeros(numel)

    def run() -> None:
        gradient.add_(residual)
        gradient.sum()
        residual.copy_(gradient)
        gradient.zero_()

    return run


def wires(numel: int) -> dict[str, Callable[[], None]]:
    """Encoding and decoding `numel` values."""
    values, out = torch.randn(numel), torch.empty(numel)
    found: dict[str, Callable[[], None]] = {}
    for wire in _WIRES:
        codec = wire.codec(numel)
        message = torch.empty(1, codec.message_bytes, dtype=torch.uint8)
        generator = torch.Generator().manual_seed(0)

        def encode(codec: Any = codec, message: Tensor = message, generator: Any = None) -> None:
            codec.encode_rows(values[None], message, generator)

        def decode(codec: Any = codec, message: Tensor = message) -> None:
            codec.decode_rows(message, out[None])

        encode()
        stochastic = dataclasses.replace(wire, rounding="stochastic")
        found[f"{wire!r}, encode"] = encode
        found[f"{stochastic!r}, encode"] = lambda encode=encode, generator=generator: encode(generator=generator)
        found[f"{wire!r}, decode"] = decode
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--rank", type=int, default=4, help="of PowerSGD's factors")
    parser.add_argument("--only", nargs="*", choices=["powersgd", "wires"], default=["powersgd", "wires"])
    options = parser.parse_args()
    torch.set_num_threads(1)
    buckets = cut(shapes())
    numel = sum(shape.numel() for bucket in buckets for shape in bucket)
    timed: dict[str, Callable[[], None]] = {}
    if "powersgd" in options.only:
        rank = options.rank
        timed[f"PowerSGD(rank={rank})"] = powersgd({"rank": rank}, buckets)
        timed[f"PowerSGD(rank={rank}, alternate=True)"] = powersgd({"rank": rank, "alternate": True}, buckets)
        timed[f"PowerSGD(rank={rank}, error_dtype=torch.bfloat16)"] = powersgd(
            {"rank": rank, "error_dtype": torch.bfloat16}, buckets
        )
        timed[f"rank {rank} without a library, matrix by matrix"] = lean(rank, buckets)
        timed["reading and writing alone"] = memory_alone(buckets)
    if "wires" in options.only:
        timed.update(wires(numel))
    measured_ms = measure(timed, options.rounds)
    print(f"| {numel / 1e6:.1f} million values, one thread | CPU ms | p25 - p75 |\n| --- | ---: | ---: |")
    for name, found_ms in measured_ms.items():
        p25_ms, median_ms, p75_ms = statistics.quantiles(found_ms, n=4)
        print(f"| {name} | {median_ms:.1f} | {p25_ms:.1f} - {p75_ms:.1f} |")


@torch.no_grad()
def measure(timed: dict[str, Callable[[], None]], rounds: int) -> dict[str, list[float]]:
    """CPU time in ms of each round of each, after two to warm up."""
    measured_ms: dict[str, list[float]] = {name: [] for name in timed}
    for number in range(rounds + 2):
        for name, run in timed.items():
            start_s = time.process_time()
            run()
            if number >= 2:
                measured_ms[name].append(1e3 * (time.process_time() - start_s))
    return measured_ms


if __name__ == "__main__":
    main()
