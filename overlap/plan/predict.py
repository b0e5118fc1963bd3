"""Every candidate's step time, traffic and memory, from a profile, a link and what its reducer costs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch

from overlap.hooks.engine.executors import is_small
from overlap.optim.zero.shards import least_part_bytes, parts_by_need
from overlap.plan.buckets import cut
from overlap.plan.candidates import METHODS, Candidate, Method
from overlap.plan.clock import Rates
from overlap.plan.dry import BucketCost, Costs, Layout
from overlap.plan.link import Link
from overlap.plan.profile import Profile
from overlap.plan.schedule import BucketWork, Gather, Hop, Schedule, step_ms

__all__ = ["Prediction", "predict", "ranking", "schedule_of"]


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """What a candidate would take."""

    candidate: Candidate
    step_ms: float
    ideal_ms: float
    """The same, if computing and sending did not slow each other down."""
    sent_bytes: int
    """Of each rank, a step."""
    memory_bytes: int
    """Of parameters, gradients, buckets, the optimizer's state and what the method keeps."""


def predict(
    candidate: Candidate, profile: Profile, link: Link, costs: Costs, *, gradient_as_bucket_view: bool = False
) -> Prediction:
    """What ``candidate`` would take, by [Note: the cost model]."""
    method = METHODS[candidate.method]
    layout = cut(profile.parameters, candidate.bucket_cap_mb)
    schedule, sent_bytes = schedule_of(
        method, layout, profile, link, costs, gradient_as_bucket_view=gradient_as_bucket_view
    )
    return Prediction(
        candidate=candidate,
        step_ms=step_ms(schedule),
        ideal_ms=step_ms(replace(schedule, rates=Rates(threads=profile.threads))),
        sent_bytes=sent_bytes,
        memory_bytes=_memory_bytes(method, profile, link.ranks, gradient_as_bucket_view),
    )


def schedule_of(
    method: Method,
    layout: Layout,
    profile: Profile,
    link: Link,
    costs: Costs,
    *,
    gradient_as_bucket_view: bool = False,
) -> tuple[Schedule, int]:
    """The schedule of a step with these buckets, and the bytes that a rank sends in it."""
    copies_ms = 0.0 if gradient_as_bucket_view else profile.copy_ms
    shares = [sum(one.nbytes for one in bucket) / profile.gradient_bytes for bucket in layout]
    # DDP copies each gradient into its bucket on autograd's thread, which delays all that follow.
    ready_ms, copied = [], 0.0
    for bucket, share in zip(layout, shares, strict=True):
        copied += share
        ready_ms.append(max(one.ready_ms for one in bucket) + copied * copies_ms)
    buffers_ms = link.messages.ms(profile.buffers_bytes) if profile.buffers_bytes and link.ranks > 1 else 0.0
    costs_of = [None] * len(layout) if method.reducer is None else costs(method, layout)
    ways = [_way(method, profile, link, share, cost) for share, cost in zip(shares, costs_of, strict=True)]
    is_after = method.update == "after backward"
    schedule = Schedule(
        begin_link_ms=buffers_ms,
        forward_ms=profile.forward_ms,
        backward_ms=max(profile.backward_ms + copies_ms, ready_ms[-1]),
        buckets=tuple(way.bucket(ready) for way, ready in zip(ways, ready_ms, strict=True)),
        gathers=_gathers(layout, profile, link) if method.update == "sharded, gathered in forward" else (),
        # DDP copies what is in the buckets back, when all are through.
        end_ms=copies_ms + (profile.update_ms if is_after else 0.0),
        has_stages=not is_after or method.reducer is not None,
        is_inline=is_small(profile.gradient_bytes, has_one_bucket=len(layout) == 1),
        rates=Rates(
            compute_beside_link=link.compute_rate,
            link_beside_compute=link.send_rate,
            link_delay_ms=link.delay_ms,
            threads=profile.threads,
        ),
    )
    return schedule, round(sum(way.sent_bytes for way in ways))


@dataclass(frozen=True, kw_only=True)
class _Way:
    """What happens to a bucket once it is ready."""

    hops: tuple[Hop, ...]
    sent_bytes: float
    after_ms: float = 0.0

    def bucket(self, ready_ms: float) -> BucketWork:
        return BucketWork(ready_ms=ready_ms, hops=self.hops, after_ms=self.after_ms)


def _way(method: Method, profile: Profile, link: Link, share: float, cost: BucketCost | None) -> _Way:
    nbytes = share * profile.gradient_bytes
    # An all-reduce sends so much twice.
    part_bytes = nbytes * (link.ranks - 1) / link.ranks
    if method.is_sharded:
        return _sharded(method, profile, link, share, part_bytes)
    if cost is None:
        return _Way(hops=(Hop(0.0, link.ms("all_reduce", 2 * part_bytes)),), sent_bytes=2 * part_bytes)
    hops = tuple(
        Hop(before_ms, link.ms(kind, sent_bytes))
        for before_ms, kind, sent_bytes in zip(cost.before_ms, cost.kinds, cost.sent_bytes, strict=True)
    )
    update_ms = share * profile.update_ms if method.update == "in backward" else 0.0
    return _Way(
        hops=_with_more_first(hops, profile.handover_ms),
        sent_bytes=sum(cost.sent_bytes),
        after_ms=cost.after_ms + update_ms,
    )


def _sharded(method: Method, profile: Profile, link: Link, share: float, part_bytes: float) -> _Way:
    """Each rank scales the bucket, adds up its part, updates it, and gathers the others' parts."""
    scale_ms = share * profile.copy_ms
    scatter = Hop(profile.handover_ms + scale_ms, link.ms("reduce_scatter", part_bytes))
    own_ms = scale_ms * (link.ranks - 1) / link.ranks + share * profile.update_ms / link.ranks
    if method.update == "sharded":
        return _Way(hops=(scatter, Hop(own_ms, link.ms("all_gather", part_bytes))), sent_bytes=2 * part_bytes)
    return _Way(hops=(scatter,), after_ms=own_ms, sent_bytes=2 * part_bytes)


def _gathers(layout: Layout, profile: Profile, link: Link) -> tuple[Gather, ...]:
    """Those of the parts that the library makes of each bucket, the last bucket's first."""
    least_bytes = least_part_bytes(torch.device(profile.device))
    parts = [
        bucket[places]
        for bucket in reversed(layout)
        for places in parts_by_need([p.nbytes for p in bucket], least_bytes)
    ]
    share = (link.ranks - 1) / link.ranks
    return tuple(
        Gather(min(p.needed_ms for p in part), link.ms("all_gather", share * sum(p.nbytes for p in part)))
        for part in parts
    )


def _with_more_first(hops: tuple[Hop, ...], more_ms: float) -> tuple[Hop, ...]:
    """``hops`` with more to compute before the first."""
    if not hops:
        return hops
    return (replace(hops[0], compute_ms=hops[0].compute_ms + more_ms), *hops[1:])


def _memory_bytes(method: Method, profile: Profile, ranks: int, as_view: bool) -> int:
    gradients = profile.gradient_bytes
    state = profile.state_bytes / ranks if method.is_sharded else profile.state_bytes
    # Parameters and gradients; buckets, where gradients are no views of them.
    return round((2 if as_view else 3) * gradients + profile.buffers_bytes + state + method.extra_bytes(gradients))


def ranking(
    candidates: Iterable[Candidate],
    profile: Profile,
    link: Link,
    costs: Costs,
    *,
    gradient_as_bucket_view: bool = False,
) -> list[Prediction]:
    """Predictions, the fastest first; of equals plain DDP is first, then the order of ``candidates``.

    Of candidates of one method whose buckets are the same only the first is kept, and of compressors that are not
    the fastest of them with DDP's own buckets only these.
    """
    found: dict[tuple[str, tuple[int, ...]], Prediction] = {}

    def look_at(candidate: Candidate) -> None:
        key = candidate.method, tuple(len(bucket) for bucket in cut(profile.parameters, candidate.bucket_cap_mb))
        if key not in found:
            found[key] = predict(candidate, profile, link, costs, gradient_as_bucket_view=gradient_as_bucket_view)

    listed = list(candidates)
    for candidate in listed:
        if candidate.bucket_cap_mb is None or not METHODS[candidate.method].compresses:
            look_at(candidate)
    # To run a compressor takes long: other sizes of buckets are tried for the best one alone.
    compressors = [one for one in found.values() if METHODS[one.candidate.method].compresses]
    best = min(compressors, key=lambda one: one.step_ms, default=None)
    for candidate in listed:
        if best is not None and candidate.method == best.candidate.method:
            look_at(candidate)
    return sorted(found.values(), key=lambda one: (one.step_ms, not one.candidate.is_plain))
