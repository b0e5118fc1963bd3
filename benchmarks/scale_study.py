"""Which chain wins where, on paper: 8 to 1,024 ranks, 1 to 400 Gbit/s, ring, tree and two levels, as one map.

    python benchmarks/scale_study.py [--picture docs/images/scale-map.png] [--into docs/auto.md] [--sigma 0.05]

Nothing is measured: the schedules are those of `overlap.auto`, what goes into them is assumed, and `ASSUMPTIONS` says
what. With `--into` the assumptions and a table take the place of what is between two comments there.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import NormalDist

import torch

from overlap.bench.workload import workload
from overlap.plan.candidates import METHODS, Candidate, Method
from overlap.plan.dry import BucketCost, Layout
from overlap.plan.link import Link
from overlap.plan.predict import predict
from overlap.plan.profile import ParameterTimes, Profile

BEGIN, END = "<!-- scale study: written by benchmarks/scale_study.py -->", "<!-- end of scale study -->"
RANKS = (8, 16, 32, 64, 128, 256, 512, 1024)
GBITS = (1, 2.5, 5, 10, 25, 50, 100, 200, 400)
SIZES_MB = (None, 50.0)
LATENCY_S, GPUS_A_MACHINE, INNER_BYTES_PER_S = 5e-6, 8, 150e9
MEMORY_BYTES_PER_MS = 1e9  # An accelerator's memory, 1 TB/s.
LAUNCH_MS = 0.02
LOW_RANK = 4
# How often a compressor reads or writes all gradients, and how many kernels it launches a bucket.
PASSES = {"16-bit": (3.0, 2), "8-bit": (5.0, 6), "low-rank": (6.0, 12), "exact": (2.0, 1)}
UPDATE_BYTES = 28  # Of AdamW in fp32, a parameter.


@dataclass(frozen=True)
class Network:
    """A panel's column."""

    title: str
    algorithm: str
    ranks_a_machine: int = 1


NETWORKS = (
    Network("ring, one GPU a link", "ring"),
    Network("tree, one GPU a link", "tree"),
    Network(f"two levels: {GPUS_A_MACHINE} GPUs a link", "ring", GPUS_A_MACHINE),
)
# The model of the benchmark, and the computation of a step that is assumed.
MODELS = {"resnet50": ("ResNet-50, 100 ms a step", 100.0), "gpt-350m": ("GPT of 355 M, 300 ms a step", 300.0)}
ALL_KINDS, EXACT = ("exact", "16-bit", "8-bit", "low-rank"), ("exact",)
COLORS = {
    "ddp": "#d9d9d9", "step": "#a6cee3", "zero": "#4a90c2", "zero-forward": "#1f5a99", "bf16": "#b2df8a",
    "fp16": "#b2df8a", "int8": "#f2cf3c", f"powersgd-{LOW_RANK}": "#d98cb3",
}  # fmt: skip
ASSUMPTIONS = (
    "A step computes 100 ms (ResNet-50) or 300 ms (GPT), a third of it forward; all parameters have equal shares.",
    (
        f"A message takes {1e6 * LATENCY_S:g} us; a ring makes 2(W-1) of them for an all-reduce, a tree 2 log2 W. Links"
        " are full duplex, never shared with others, and reach their speed at any size."
    ),
    (
        f"Two levels: {GPUS_A_MACHINE} GPUs reduce among each other at {8 * INNER_BYTES_PER_S / 1e9:g} Gbit/s, then "
        "each sends an eighth over the machine's link, whose speed is on the axis."
    ),
    "Sending takes nothing from computing. Stages run on a stream of their own, at half speed beside the backward.",
    (
        "A compressor reads or writes all gradients 3 (16-bit), 5 (8-bit) or 6 times (low rank) at 1 TB/s, and "
        "launches 2, 6 or 12 kernels of 20 us a bucket. AdamW moves 28 bytes a parameter."
    ),
    (
        "Stragglers: each rank's computation is drawn anew each step from a log-normal distribution, and all wait for "
        "the slowest: the expected maximum of W draws stands for the computation."
    ),
    "Accuracy is not looked at: low rank and 8 bits may need more steps to the same loss.",
)


def straggler_factor(ranks: int, sigma: float) -> float:
    """About the expected maximum of so many log-normal draws with median 1 (Blom's approximation)."""
    return math.exp(sigma * NormalDist().inv_cdf((ranks - 0.375) / (ranks + 0.25)))


@cache
def profile(model: str, ranks: int, sigma: float) -> Profile:
    with torch.device("meta"):
        named = list(workload(model).make_model().named_parameters())
    compute_ms = MODELS[model][1] * straggler_factor(ranks, sigma)
    forward_ms, backward_ms = compute_ms / 3, compute_ms * 2 / 3
    count = len(named)
    parameters = tuple(
        ParameterTimes(
            name=name,
            shape=tuple(parameter.shape),
            needed_ms=forward_ms * place / count,
            ready_ms=backward_ms * (count - place) / count,
        )
        for place, (name, parameter) in reversed(list(enumerate(named)))
    )
    numel = sum(one.numel for one in parameters)
    return Profile(
        forward_ms=forward_ms,
        backward_ms=backward_ms,
        update_ms=UPDATE_BYTES * numel / MEMORY_BYTES_PER_MS,
        copy_ms=2 * 4 * numel / MEMORY_BYTES_PER_MS,
        parameters=parameters,
        state_bytes=8 * numel,
        handover_ms=LAUNCH_MS,
        threads=0.5,
        device="paper",
    )


def costs_for(ranks: int) -> Callable[[Method, Layout], Sequence[BucketCost]]:
    """What a reducer computes and sends, by the assumptions."""

    def costs(method: Method, layout: Layout) -> Sequence[BucketCost]:
        return [_cost(method, bucket, ranks) for bucket in layout]

    return costs


def _cost(method: Method, bucket: Sequence[ParameterTimes], ranks: int) -> BucketCost:
    nbytes = sum(one.nbytes for one in bucket)
    passes, kernels = PASSES[method.kind]
    half_ms = (passes * nbytes / MEMORY_BYTES_PER_MS + kernels * LAUNCH_MS) / 2
    share = (ranks - 1) / ranks
    if method.kind == "low-rank":
        rest = sum(one.nbytes for one in bucket if len(one.shape) < 2)
        factors = [4 * LOW_RANK * (one.shape[0] + one.numel // one.shape[0]) for one in bucket if len(one.shape) > 1]
        # The first factors go with what is not compressed, then the second.
        halves = 2 * share * (sum(factors) / 2 + rest), share * sum(factors)
        return BucketCost(
            before_ms=(half_ms, half_ms / 2), kinds=("all_reduce",) * 2, sent_bytes=tuple(map(int, halves)),
            after_ms=half_ms / 2,
        )  # fmt: skip
    if method.kind == "8-bit":
        # A reduce-scatter and a gather of messages.
        part = int(share * nbytes / 4)
        return BucketCost(before_ms=(half_ms, half_ms / 2), kinds=("messages",) * 2, sent_bytes=(part, part),
                          after_ms=half_ms / 2)  # fmt: skip
    sent = int(2 * share * nbytes * (0.5 if method.kind == "16-bit" else 1.0))
    return BucketCost(before_ms=(half_ms,), kinds=("all_reduce",), sent_bytes=(sent,), after_ms=half_ms)


@cache
def winner(
    model: str, network: Network, ranks: int, gbit: float, kinds: Sequence[str], sigma: float
) -> tuple[str, float]:
    """The fastest method, and its step as a part of plain DDP's; of methods within 1 % the first in the list wins."""
    link = Link.on_paper(
        ranks=ranks,
        bandwidth_bytes_per_s=gbit * 1e9 / 8,
        latency_s=LATENCY_S,
        algorithm=network.algorithm,
        ranks_a_machine=network.ranks_a_machine,
        inner_bandwidth_bytes_per_s=INNER_BYTES_PER_S,
    )
    own, costs = profile(model, ranks, sigma), costs_for(ranks)
    plain_ms = predict(Candidate("ddp"), own, link, costs).step_ms
    best, best_ms = "ddp", plain_ms
    for method in METHODS.values():
        if method.kind not in kinds or method.name == "fp16" or method.name.endswith("-deferred"):
            continue
        ms = min(predict(Candidate(method.name, size), own, link, costs).step_ms for size in SIZES_MB)
        if ms < 0.99 * best_ms:
            best, best_ms = method.name, ms
    return best, best_ms / plain_ms


def draw(path: Path, sigma: float) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch, Rectangle

    figure = Figure(figsize=(15, 19), dpi=100, layout="constrained")
    FigureCanvasAgg(figure)
    lines = [(model, kinds) for model in MODELS for kinds in (EXACT, ALL_KINDS)]
    grid = figure.subplots(len(lines), len(NETWORKS), sharex=True, sharey=True)
    for row, (model, kinds) in zip(grid, lines, strict=True):
        for axes, network in zip(row, NETWORKS, strict=True):
            for y, ranks in enumerate(RANKS):
                for x, gbit in enumerate(GBITS):
                    name, ratio = winner(model, network, ranks, gbit, kinds, sigma)
                    axes.add_patch(Rectangle((x - 0.5, y - 0.5), 1, 1, color=COLORS[name], ec="white", lw=1))
                    dark = name in ("zero", "zero-forward")
                    axes.text(x, y, f"{ratio:.2f}", ha="center", va="center", fontsize=8,
                              color="white" if dark else "#222222")  # fmt: skip
            axes.set_xlim(-0.5, len(GBITS) - 0.5)
            axes.set_ylim(-0.5, len(RANKS) - 0.5)
            axes.set_xticks(range(len(GBITS)), [f"{gbit:g}" for gbit in GBITS])
            axes.set_yticks(range(len(RANKS)), [str(ranks) for ranks in RANKS])
            what = "exact methods" if kinds == EXACT else "all methods"
            axes.set_title(f"{MODELS[model][0]}; {what}\n{network.title}", fontsize=10)
            axes.set_xlabel("Gbit/s of a link")
            axes.set_ylabel("ranks")
            axes.tick_params(labelbottom=True, labelleft=True, length=0)
    known = {name: color for name, color in COLORS.items() if name != "fp16"}
    names = {
        "ddp": "plain DDP",
        "step": "step in backward",
        "zero": "sharded",
        "zero-forward": "sharded, gather in forward",
        "bf16": "16-bit",
        "int8": "8-bit",
        f"powersgd-{LOW_RANK}": "low rank",
    }
    figure.legend(handles=[Patch(color=color, label=names[name]) for name, color in known.items()],
                  loc="outside lower center", ncols=len(known), frameon=False, fontsize=10)  # fmt: skip
    figure.suptitle(
        "ON PAPER, not measured: which chain is fastest, and its step as a part of plain DDP's", fontsize=14
    )
    figure.savefig(path)


def text(sigma: float) -> str:
    lines = [
        "| ranks, link | ResNet-50, exact | ResNet-50, all | GPT, exact | GPT, all |",
        "| --- | --- | --- | --- | --- |",
    ]
    for ranks, gbit, network in (
        (32, 10, NETWORKS[0]), (64, 10, NETWORKS[0]), (64, 100, NETWORKS[0]), (1024, 10, NETWORKS[0]),
        (1024, 10, NETWORKS[1]), (64, 10, NETWORKS[2]), (1024, 400, NETWORKS[2]),
    ):  # fmt: skip
        found = [winner(model, network, ranks, gbit, kinds, sigma) for model in MODELS for kinds in (EXACT, ALL_KINDS)]
        cells = " | ".join(f"`{name}` {ratio:.2f}" for name, ratio in found)
        lines.append(f"| {ranks} at {gbit} Gbit/s, {network.title} | {cells} |")
    spread = []
    for other in (0.0, 0.05, 0.2):
        name, ratio = winner("resnet50", NETWORKS[0], 64, 10, EXACT, other)
        spread.append(f"{other:g}: x{straggler_factor(64, other):.2f}, `{name}` {ratio:.2f}")
    told = (
        f"The log-normal's sigma is {sigma:g}. What stragglers change, ResNet-50 on 64 ranks at 10 Gbit/s, exact "
        f"(sigma: computation of the slowest, winner): {'; '.join(spread)}."
    )
    return "\n".join([*lines, "", told, "", "Assumed:", "", *(f"- {one}" for one in ASSUMPTIONS)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--picture", type=Path, default=Path("docs/images/scale-map.png"))
    parser.add_argument("--into", type=Path)
    parser.add_argument("--sigma", type=float, default=0.05)
    options = parser.parse_args()
    draw(options.picture, options.sigma)
    words = text(options.sigma)
    print(words)
    if options.into is not None:
        page = options.into.read_text()
        before, _, rest = page.partition(BEGIN)
        options.into.write_text(f"{before}{BEGIN}\n{words}\n{END}{rest.partition(END)[2]}")


if __name__ == "__main__":
    main()
