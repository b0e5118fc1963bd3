"""What one stream for the stages of all buckets costs, next to a stream a bucket: a model of queues, no device needed.

The scheduler of the library puts buckets on streams. A stream does what is queued on it in order, and the network what
is launched on it; nothing takes time on the host, and what runs at once does not slow each other down, which flatters
the stream a bucket.

    python benchmarks/stream_order.py
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from overlap.hooks.engine.wavefront import Wavefront

BUCKETS = 20
BACKWARD_MS = 100.0


@dataclass(frozen=True)
class Chain:
    """What a bucket needs, in ms: code, a collective, code, a collective, ..., code."""

    name: str
    code_ms: Sequence[float]
    collectives_ms: Sequence[float]


class Queues:
    """When each queue is free, in ms."""

    def __init__(self) -> None:
        self.network_ms = 0.0
        self.streams_ms: dict[int, float] = {}


class Bucket:
    awaits_whole_pass = False

    def __init__(self, chain: Chain, queues: Queues, stream: int, ready_ms: float) -> None:
        self.is_done = False
        self._chain, self._queues, self._stream = chain, queues, stream
        self._place = 0
        self._behind_ms = ready_ms  # The gradient, then the collective in flight.

    def advance(self) -> None:
        streams_ms = self._queues.streams_ms
        start_ms = max(streams_ms.get(self._stream, 0.0), self._behind_ms)
        streams_ms[self._stream] = start_ms + self._chain.code_ms[self._place]
        if self._place == len(self._chain.collectives_ms):
            self.is_done = True
            return
        self._queues.network_ms = self._behind_ms = (
            max(self._queues.network_ms, streams_ms[self._stream]) + self._chain.collectives_ms[self._place]
        )
        self._place += 1


def pass_ms(chain: Chain, *, is_one_stream: bool) -> float:
    """When the last bucket is done, in ms from the start of backward."""
    queues, wavefront = Queues(), Wavefront()
    for index in range(BUCKETS):
        ready_ms = BACKWARD_MS * (index + 1) / BUCKETS
        bucket = Bucket(chain, queues, 0 if is_one_stream else index, ready_ms)
        wavefront.arrive(bucket, is_last=index == BUCKETS - 1)  # type: ignore[arg-type]
    return max(queues.streams_ms.values())


def main() -> None:
    """Print a table."""
    print("ms a pass; backward alone takes 100 ms and has 20 buckets\n")
    print("| chain | code, ms a bucket | collectives, ms a bucket | a stream a bucket | one stream | more |")
    print("| --- | --- | --- | --- | --- | --- |")
    for speed, network in (("fast", 0.4), ("even", 1.0), ("slow", 3.0)):
        for one in (
            Chain(f"all-reduce, update; {speed} network", (0.05, 0.3), (4.5 * network,)),
            Chain(f"cast, all-reduce, cast, update; {speed} network", (0.15, 0.45), (4.5 * network,)),
            Chain(f"reduce-scatter, update, all-gather; {speed} network", (0.15, 0.3, 0.15), (2.25 * network,) * 2),
            Chain(f"PowerSGD, update; {speed} network", (0.8, 1.2, 0.8), (0.5 * network,) * 2),
            Chain(f"quantize twice, update; {speed} network", (1.0, 1.5, 0.8), (1.2 * network,) * 2),
        ):
            many, single = (pass_ms(one, is_one_stream=is_one) for is_one in (False, True))
            code, collectives = ("+".join(f"{ms:g}" for ms in times) for times in (one.code_ms, one.collectives_ms))
            print(f"| {one.name} | {code} | {collectives} | {many:.1f} | {single:.1f} | {single / many - 1:.1%} |")


if __name__ == "__main__":
    main()
