"""When the link is idle in a step with gather="forward": a model of one step from the CPU time of each layer.

    python -m benchmarks.gather_schedule --bandwidth 1gbit --ranks 2 --slowdown 1.35

For each `bucket_cap_mb` of DDP and each least size of a gather's parts it prints the step that the model expects, and
the longest times that the link is idle before a reduction (r) or a gather (g). Three resources do one thing at a time
each: the training thread, the thread of the stages, and the link, which sends and receives at once. Competition for
cores is modelled by `--slowdown` alone; protocols, latencies and DDP's own work are left out.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch import Tensor, nn

from overlap.bench.link import parse_bandwidth
from overlap.bench.workload import workload
from overlap.optim.zero.gather_parts import parts_by_need

_ROUNDS = 8
_STEPS = 6
# Of the thread of the stages, for launching and unpacking what one bucket or part sends.
_HANDLING_S = 0.3e-3
_FINALIZATION_S = 2e-3
_MB = 2**20


@dataclass(frozen=True)
class Layer:
    """A module with parameters of its own."""

    forward_s: float
    backward_s: float
    bytes: int


@dataclass
class Link:
    """Sends one thing after the other."""

    bytes_per_s: float
    free_s: float = 0.0
    rests: list[tuple[float, str]] = field(default_factory=list)

    def send(self, nbytes: float, ready_s: float, name: str) -> float:
        """When it has arrived."""
        start_s = max(self.free_s, ready_s)
        self.rests.append((start_s - self.free_s, name))
        self.free_s = start_s + nbytes / self.bytes_per_s
        return self.free_s


def measured(name: str, slowdown: float) -> tuple[list[Layer], float]:
    """The layers of a model in forward order, and what adding up and updating a byte takes (fused AdamW), in CPU time
    of one thread."""
    work = workload(name)
    torch.manual_seed(0)
    model, (inputs, target) = work.make_model(), work.make_batch(8)
    layers = {key: module for key, module in model.named_modules() if any(True for _ in module.parameters(False))}
    marks: list[tuple[str, str, float]] = []
    for key, module in layers.items():
        module.register_forward_pre_hook(lambda *_, key=key: marks.append(("forward", key, time.thread_time())))
        for parameter in module.parameters(False):
            parameter.register_post_accumulate_grad_hook(
                lambda _, key=key: marks.append(("backward", key, time.thread_time()))
            )
    spent: dict[tuple[str, str], list[float]] = {}
    order: list[str] = []
    for number in range(_ROUNDS):
        marks.clear()
        model.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs), target)
        marks.append(("loss", "", time.thread_time()))
        loss.backward()
        order = [key for kind, key, _ in marks if kind == "forward"]
        if number < 2:
            continue
        this: dict[tuple[str, str], float] = {}
        for (kind, key, start_s), (next_kind, next_key, end_s) in pairwise(marks):
            # A forward is marked where it begins, a gradient where it is there.
            place = (kind, key) if kind == "forward" else (next_kind, next_key)
            this[place] = this.get(place, 0.0) + end_s - start_s
        for place, seconds in this.items():
            spent.setdefault(place, []).append(seconds)
    seconds_of = {place: slowdown * statistics.median(times) for place, times in spent.items()}
    found = [
        Layer(
            seconds_of["forward", key],
            seconds_of["backward", key],
            sum(parameter.nbytes for parameter in layers[key].parameters(False)),
        )
        for key in dict.fromkeys(order)
    ]
    flat = torch.zeros(sum(layer.bytes for layer in found) // 4, requires_grad=True)
    flat.grad = torch.ones_like(flat)
    optimizer = torch.optim.AdamW([flat], fused=True)
    update_s = _cpu_s(optimizer.step) + _cpu_s(lambda: _add(flat))
    return found, slowdown * update_s / flat.nbytes


@torch.no_grad()
def _add(flat: Tensor) -> None:
    assert flat.grad is not None
    flat.grad.add_(flat)


def _cpu_s(run: Callable[[], object]) -> float:
    times = []
    for _ in range(_ROUNDS):
        start_s = time.thread_time()
        run()
        times.append(time.thread_time() - start_s)
    return statistics.median(times[2:])


def buckets_of(layers: Sequence[Layer], cap_mb: float | None) -> list[list[int]]:
    """The layers of each of DDP's buckets, in the order of their gradients; a bucket is full at its size or above."""
    buckets: list[list[int]] = [[]]
    for place in reversed(range(len(layers))):
        full_bytes = _MB * (cap_mb or (1 if len(buckets) == 1 else 25))
        if sum(layers[one].bytes for one in buckets[-1]) >= full_bytes:
            buckets.append([])
        buckets[-1].append(place)
    return buckets


def expected(
    layers: Sequence[Layer],
    update_s_per_byte: float,
    *,
    ranks: int,
    bytes_per_s: float,
    cap_mb: float | None,
    part_mb: float | None,
) -> tuple[float, list[tuple[float, str]]]:
    """Seconds a step when steps have become alike, and when the link is idle in the last one."""
    buckets, link = buckets_of(layers, cap_mb), Link(bytes_per_s)
    share = (ranks - 1) / ranks
    there_s = [0.0] * len(layers)
    now_s = stages_s = 0.0
    ends_s = []
    for _ in range(_STEPS):
        link.rests.clear()
        for place, layer in enumerate(layers):
            now_s = max(now_s, there_s[place]) + layer.forward_s
        ready_s = [0.0] * len(layers)
        for place in reversed(range(len(layers))):
            now_s += layers[place].backward_s
            ready_s[place] = now_s
        under_way: list[tuple[float, int]] = []
        for index, bucket in enumerate([*buckets, []]):
            if bucket:
                nbytes = sum(layers[place].bytes for place in bucket)
                stages_s = max(stages_s, *(ready_s[place] for place in bucket)) + _HANDLING_S
                under_way.append((link.send(share * nbytes, stages_s, f"r{index}"), nbytes))
            while under_way and (len(under_way) > 1 or not bucket):
                arrived_s, nbytes = under_way.pop(0)
                stages_s = max(stages_s, arrived_s) + nbytes / ranks * update_s_per_byte
        now_s = max(now_s, stages_s) + _FINALIZATION_S
        stages_s = now_s
        ends_s.append(now_s)
        parts = [part for bucket in reversed(buckets) for part in _parts(bucket, layers, part_mb)]
        arrivals: list[tuple[float, list[int]]] = []
        for index, part in enumerate([*parts, []]):
            if part:
                stages_s += _HANDLING_S
                nbytes = sum(layers[place].bytes for place in part)
                arrivals.append((link.send(share * nbytes, stages_s, f"g{index}"), part))
            while arrivals and (len(arrivals) > 1 or not part):
                arrived_s, gathered = arrivals.pop(0)
                stages_s = max(stages_s, arrived_s) + _HANDLING_S
                for place in gathered:
                    there_s[place] = stages_s
    return ends_s[-1] - ends_s[-2], sorted(link.rests, reverse=True)


def _parts(bucket: list[int], layers: Sequence[Layer], part_mb: float | None) -> list[list[int]]:
    if part_mb is None:
        return [bucket]
    return [bucket[part] for part in parts_by_need([layers[place].bytes for place in bucket], int(part_mb * _MB))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="resnet18")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--bandwidth", default="1gbit")
    parser.add_argument("--slowdown", type=float, default=1.35, help="of computation, beside a thread by itself")
    options = parser.parse_args()
    torch.set_num_threads(1)
    layers, update_s_per_byte = measured(options.model, options.slowdown)
    bytes_per_s = parse_bandwidth(options.bandwidth)
    compute_ms = 1000 * sum(layer.forward_s + layer.backward_s for layer in layers)
    volume = 2 * (options.ranks - 1) / options.ranks * sum(layer.bytes for layer in layers)
    print(f"computation {compute_ms:.0f} ms, sending {1000 * volume / bytes_per_s:.0f} ms")
    print("| bucket_cap_mb | parts of at least | ms a step | the link is idle, ms |\n| --- | --- | ---: | --- |")
    for cap_mb in (None, 10.0, 4.0, 1.0):
        for part_mb in (None, 4.0, 1.0):
            step_s, rests = expected(
                layers,
                update_s_per_byte,
                ranks=options.ranks,
                bytes_per_s=bytes_per_s,
                cap_mb=cap_mb,
                part_mb=part_mb,
            )
            longest = ", ".join(f"{name} {1000 * rest_s:.0f}" for rest_s, name in rests[:3] if rest_s > 1e-3)
            size = "a bucket" if part_mb is None else f"{part_mb:g} MiB"
            print(f"| {'default' if cap_mb is None else f'{cap_mb:g}'} | {size} | {1000 * step_s:.0f} | {longest} |")


if __name__ == "__main__":
    main()
