"""`overlap estimate`: how long a step takes with each chain, by one formula, before anything is run.

[Note: the estimate]

A step of ``k`` microbatches computes ``k`` forwards and backwards; gradients travel during the last backward, and the
parameters of ``gather="forward"`` during the first forward:

    step = (k - 1) (f + b) + max(f, forward bytes / link) + max(b, b / 4 + backward bytes / link)
           + blocking bytes / link + codec + update

``f`` and ``b`` take ``2 P T`` and ``4 P T`` floating-point operations for ``P`` parameters and ``T`` tokens, or a third
and two thirds of a measured time. ``link`` is that of a machine, shared by its ranks; of ``M`` machines an all-reduce
of ``S`` bytes sends ``2 (M - 1)/M S`` through each. ``codec`` and ``update`` read and write memory. On a CPU, buckets,
codecs and sockets take the processor from the last backward, which is longer by that. The first bucket is ready after a
quarter of backward. Launches and latencies are left out, so a small model on a fast link looks better than it is.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from overlap.errors import ConfigurationError

_GRADIENT_BYTES = 4  # fp32, as DDP sends them.


def _given(default: float | bool | None, words: str) -> Any:
    """A field of a job, which is an option of the command."""
    return field(default=default, metadata={"help": words})


@dataclass(frozen=True, kw_only=True)
class Job:
    """The model and the machines: by default on four machines of eight H100. See [Note: the estimate]."""

    parameters: float = _given(1.3e9, "of the model")
    link_gbit: float = _given(
        100.0, "in Gbit/s and each direction, of a machine; without machines, of a rank, with --ranks-a-machine 1"
    )
    machines: int = _given(4, "that share a link each")
    ranks_a_machine: int = _given(8, "ranks of a machine")
    tokens: int = _given(8192, "of a rank and microbatch")
    microbatches: int = _given(1, "for each synchronization")
    compute_ms: float | None = _given(
        None, "measured forward and backward of a microbatch, in place of tokens and tflops"
    )
    tflops: float = _given(400.0, "of a rank, as reached: 40 %% of an H100 in bf16")
    memory_gb: float = _given(3000.0, "of a rank's memory, in GB/s, as reached")
    update_bytes: float = _given(28.0, "read and written by the optimizer for each parameter: fp32 AdamW 28, SGD 12")
    cpu: bool = _given(False, "ranks compute on a processor core each; with --compute-ms, and --memory-gb 8")


@dataclass(frozen=True, kw_only=True)
class Chain:
    """The communication of a chain, in parts of an all-reduce of fp32 gradients, and its other costs."""

    name: str
    backward: float = 0.0
    """Sent during backward."""
    forward: float = 0.0
    """Sent during the next forward."""
    blocking: float = 0.0
    """Sent while nothing is computed."""
    codec_bytes: float = 0.0
    """Of an accelerator's memory, read and written for each gradient."""
    cpu_ns: float = 7.6
    """On a CPU, the processor's time for each gradient: buckets, codec and sockets, of two ranks on links of 1 Gbit/s.
    By ``python -m benchmarks.estimates --cpu 3`` (AMD EPYC, 2 cores, torch 2.13.0+cpu; medians of six ranks, which
    ranged over 6.8 to 8.8 for DDP, 5.0 to 7.9 for 16 bits, 7.0 to 9.5, 10.6 to 12.8 and 7.6 to 9.0 for the next
    three)."""
    is_sharded: bool = False
    """Whether each rank updates its part of the parameters."""
    is_hybrid: bool = False
    """Whether each rank of a machine reduces between machines, and updates, its part of the parameters (HSDP)."""


CHAINS = (
    Chain(name="DDP", backward=1.0),
    Chain(name="Cast(bfloat16)", backward=0.5, codec_bytes=5, cpu_ns=6.4),
    Chain(name="Quantize(Int8())", backward=0.253, codec_bytes=12, cpu_ns=7.5),
    Chain(name="Quantize(Int4(), error_feedback=True)", backward=0.128, codec_bytes=24, cpu_ns=12.5),
    Chain(name="PowerSGD(rank=4)", backward=1 / 64, codec_bytes=19, cpu_ns=8.2),
    Chain(name="LocalSGD(period=8)", blocking=1 / 8, cpu_ns=Chain.cpu_ns / 8),
    Chain(name="ZeroStep(gather='forward')", backward=0.5, forward=0.5, is_sharded=True),
    Chain(
        name="Quantize(Int8()), ZeroStep(gather='forward')",
        backward=0.253,
        forward=0.5,
        codec_bytes=12,
        is_sharded=True,
    ),
    Chain(name="HSDP", backward=1.0, is_hybrid=True),
    Chain(name="HSDP, Quantize(Int8())", backward=0.253, codec_bytes=12, is_hybrid=True),
)


def step_ms(job: Job, chain: Chain) -> float:
    """The time of a step in ms."""
    link_bytes = job.link_gbit * 1e9 / 8
    all_reduce_s = 2 * (job.machines - 1) / job.machines * job.parameters * _GRADIENT_BYTES / link_bytes
    if job.compute_ms is None:
        forward_s = 2 * job.parameters * job.tokens / (job.tflops * 1e12)
    else:
        forward_s = job.compute_ms / 3e3
    backward_s = 2 * forward_s
    cpu_s = job.parameters * chain.cpu_ns * 1e-9 if job.cpu else 0.0
    last_backward_s = backward_s + cpu_s
    ranks = job.machines * job.ranks_a_machine if chain.is_sharded else 1
    codec_bytes = 0.0 if job.cpu else chain.codec_bytes
    memory_bytes = job.parameters * (codec_bytes + job.update_bytes / ranks)
    if chain.is_hybrid:
        memory_bytes /= job.ranks_a_machine
    seconds = (
        (job.microbatches - 1) * (forward_s + backward_s)
        + max(forward_s, chain.forward * all_reduce_s)
        + max(last_backward_s, last_backward_s / 4 + chain.backward * all_reduce_s)
        + chain.blocking * all_reduce_s
        + memory_bytes / (job.memory_gb * 1e9)
    )
    return seconds * 1e3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The fields of a job."""
    for one in fields(Job):
        name, words = f"--{one.name.replace('_', '-')}", one.metadata["help"]
        if isinstance(one.default, bool):
            parser.add_argument(name, action="store_true", default=argparse.SUPPRESS, help=words)
            continue
        kind, default = (float, argparse.SUPPRESS) if one.default is None else (type(one.default), one.default)
        parser.add_argument(name, type=kind, default=default, help=words)
    parser.epilog = (
        "Launches and latencies are left out. With --cpu it agrees with docs/reports/step-times.md within a quarter."
    )


def run(options: argparse.Namespace, argv: Sequence[str]) -> int:
    """Prints a row for each chain."""
    given = vars(options)
    if bad := [name for name, value in given.items() if value <= 0]:
        raise ConfigurationError(f"--{bad[0].replace('_', '-')} must be more than 0")
    job = Job(**given)
    if job.cpu and job.compute_ms is None:
        raise ConfigurationError("--cpu needs --compute-ms, as measured without communication, and --memory-gb 8 or so")
    plain = step_ms(job, CHAINS[0])
    print(f"{'chain':48}{'ms a step':>10}{'as fast':>9}")
    for chain in CHAINS:
        ms = step_ms(job, chain)
        print(f"{chain.name:48}{ms:10.1f}{plain / ms:8.2f}x")
    return 0
