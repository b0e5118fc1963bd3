"""Ranks that call other collectives, or with tensors of other sizes, get an error that says so, and can go on."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from harness import run_ranks
from overlap import CollectiveError, DQuantType, auto_quantize
from overlap.quantized import same_calls

_TIMEOUT_S = 20
_SENT_AS = DQuantType.FP16


def _all_reduce(numel: int) -> None:
    auto_quantize(dist.all_reduce, _SENT_AS)(torch.ones(numel))


def _all_gather(numel: int) -> None:
    outputs = [torch.empty(numel) for _ in range(dist.get_world_size())]
    auto_quantize(dist.all_gather, _SENT_AS)(outputs, torch.ones(numel))


def _reduce_scatter(numel: int) -> None:
    auto_quantize(dist.reduce_scatter, _SENT_AS)(torch.empty(numel), [torch.ones(numel)] * dist.get_world_size())


def _differ(rank: int, world_size: int) -> None:
    _all_reduce(8)
    cases: list[tuple[Callable[[int], Any], tuple[int, int, int], int]] = [
        (_all_reduce, (9, 9, 12), 1),
        (_all_gather, (9, 9, 12), world_size),
        (_reduce_scatter, (9, 9, 12), 1),
        (_all_reduce, (8, 8, 10), 1),  # New to one rank alone,
        (_all_reduce, (11, 8, 11), 1),  # and to all but one.
    ]
    for call, sizes, factor in cases:
        start_s = time.monotonic()
        with pytest.raises(CollectiveError) as raised:
            call(sizes[rank])
        assert time.monotonic() - start_s < _TIMEOUT_S / 2
        for peer, numel in enumerate(sizes):
            told = rf"rank {peer}: (SUM )?{call.__name__[1:]} with a result of {factor * numel} elements, as"
            assert re.search(told, str(raised.value)), str(raised.value)
    with pytest.raises(CollectiveError, match=r"rank 0: SUM all_reduce.*; rank 1: SUM reduce_scatter"):
        _reduce_scatter(9) if rank == 1 else _all_reduce(9)
    tensor = torch.full((7,), float(rank))
    auto_quantize(dist.all_reduce, _SENT_AS)(tensor)
    assert tensor.tolist() == [3.0] * 7


def test_calls_that_differ_are_an_error_on_every_rank_that_names_ranks_and_sizes() -> None:
    run_ranks(_differ, 3, group_timeout_s=_TIMEOUT_S)


def _compared(rank: int, world_size: int) -> None:
    numbers: list[int] = []
    compare = same_calls.SameCalls._compare
    same_calls.SameCalls._compare = lambda calls, number, call: (  # type: ignore[method-assign]
        numbers.append(number),
        compare(calls, number, call),
    )[-1]
    store = dist.distributed_c10d._get_default_store()
    for numel in (4, 4, 5, 4, 5):
        _all_reduce(numel)
    assert numbers == [0, 2]
    dist.barrier()
    assert not store.check([f"overlap/quantized/{number}/{rank}" for number in numbers])


def test_calls_are_compared_once() -> None:
    run_ranks(_compared, 2)


def _alone(rank: int, world_size: int) -> None:
    _all_reduce(3)
    if rank == 0:
        with pytest.raises(CollectiveError, match=r"in 2 s: ranks \[1\] did not come to call a quantized"):
            _all_reduce(4)


def test_a_rank_that_calls_none_is_named() -> None:
    run_ranks(_alone, 2, group_timeout_s=2)
