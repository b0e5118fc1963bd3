"""How DDP cuts gradients into buckets, after the first pass."""

from __future__ import annotations

from collections.abc import Sequence

from overlap.plan.profile import ParameterTimes

__all__ = ["FIRST_BUCKET_MB", "cut"]

_MB = 2**20
_DEFAULT_MB = 25.0
# Made only where DDP is not told a size.
FIRST_BUCKET_MB = 1.0


def cut(parameters: Sequence[ParameterTimes], bucket_cap_mb: float | None) -> tuple[tuple[ParameterTimes, ...], ...]:
    """The buckets of ``parameters``, which are in the order in which gradients become ready.

    A bucket is closed by the parameter with which it reaches the limit. Those of different dtypes are apart.

    >>> from overlap.plan.profile import ParameterTimes
    >>> all = [ParameterTimes(name=name, shape=(2**18,), ready_ms=0, needed_ms=0) for name in "abc"]
    >>> [[one.name for one in bucket] for bucket in cut(all, None)]
    [['a'], ['b', 'c']]
    >>> [[one.name for one in bucket] for bucket in cut(all, 2)]
    [['a', 'b'], ['c']]
    """
    whole = _DEFAULT_MB if bucket_cap_mb is None else bucket_cap_mb
    first = FIRST_BUCKET_MB if bucket_cap_mb is None else bucket_cap_mb
    closed: list[tuple[ParameterTimes, ...]] = []
    open_of: dict[str, list[ParameterTimes]] = {}
    held_bytes = dict.fromkeys((one.dtype for one in parameters), 0)
    limits = {one.dtype: [first, whole] for one in parameters}
    for one in parameters:
        open_of.setdefault(one.dtype, []).append(one)
        held_bytes[one.dtype] += one.nbytes
        limit = limits[one.dtype]
        if held_bytes[one.dtype] >= limit[0] * _MB:
            closed.append(tuple(open_of.pop(one.dtype)))
            held_bytes[one.dtype] = 0
            limits[one.dtype] = limit[1:] or limit
    closed += [tuple(held) for held in open_of.values()]
    return tuple(sorted(closed, key=lambda bucket: max(one.ready_ms for one in bucket)))
