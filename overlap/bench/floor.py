"""The least time a step can take: the computation that was measured, and the bytes that were sent over the link.

Bucket i is ready at r_i and takes t_i on the one link, so it is reduced at c_i = max(c_(i-1), r_i) + t_i. A step whose
buckets must all be reduced takes at least max(compute, c_last) and the update of the last bucket; one whose
communication may go on at any time takes at least the longer of computing and sending.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from overlap.bench.variant import FloorKind


@dataclass(frozen=True, kw_only=True)
class StepProfile:
    """One step without communication, as recorded by a hook that only reads the clock; times from its start."""

    compute_ms: float
    # When each bucket's last gradient was there, in the order that DDP issues them.
    ready_ms: tuple[float, ...]
    bucket_bytes: tuple[int, ...]
    # A whole update, by optimizer.
    update_ms: dict[str, float]

    def __post_init__(self) -> None:
        if len(self.ready_ms) != len(self.bucket_bytes) or not self.ready_ms:
            raise ValueError(
                f"ready_ms has {len(self.ready_ms)} entries and bucket_bytes {len(self.bucket_bytes)}: "
                "one each per bucket, at least one"
            )

    def scaled_to(self, compute_ms: float) -> StepProfile:
        """The same step at another speed of the machine: profile and timing may see it differently loaded."""
        factor = compute_ms / self.compute_ms
        return replace(
            self,
            compute_ms=compute_ms,
            ready_ms=tuple(ready * factor for ready in self.ready_ms),
            update_ms={name: update * factor for name, update in self.update_ms.items()},
        )


def floor_ms(
    kind: FloorKind,
    profile: StepProfile,
    *,
    optimizer: str,
    sent_bytes: float,
    bandwidth_bytes_per_s: float,
) -> float:
    """The bound for a variant that sends `sent_bytes` per step; each bucket has its share of them."""
    sending_ms = 1000 * sent_bytes / bandwidth_bytes_per_s
    update_ms = profile.update_ms[optimizer]
    if kind == "compute":
        return profile.compute_ms
    if kind == "streamed":
        return max(profile.compute_ms + update_ms, sending_ms)
    total_bytes = sum(profile.bucket_bytes)
    reduced_ms = 0.0
    for ready_ms, bucket_bytes in zip(profile.ready_ms, profile.bucket_bytes, strict=True):
        reduced_ms = max(reduced_ms, ready_ms) + sending_ms * bucket_bytes / total_bytes
    last_update_ms = update_ms * profile.bucket_bytes[-1] / total_bytes
    return max(profile.compute_ms, reduced_ms) + last_update_ms
