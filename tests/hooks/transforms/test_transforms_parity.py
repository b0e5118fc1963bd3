"""Each transform, in each place and before each form of update, equals the same thing by hand on plain DDP."""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from harness import Record, assert_parity, run_ranks, wrap
from harness.models import DTYPES, EMPTY, MLP, UNUSED, Case, mean_squared_error
from overlap import (
    AllReduce,
    Bucket,
    ClipGradNorm,
    OverlappedOptimizer,
    Stage,
    Step,
    ZeroRedundancyOptimizer,
    ZeroStep,
    chain,
)
from overlap.hooks import Role, all_reduce
from overlap.hooks.transforms.clip import Clipping, ShardedNorm

from . import by_hand
from .by_hand import TRANSFORMS, after_reducer, before_reducer, reference, with_step, with_zero

FORMS = ("interleaved", "deferred", "automatic", "automatic, deferred")
SUMMATION = "norms of unused parameters, which are zero, are among those added up"


def _mean(rank: int, world_size: int, case: Case, forms: tuple[str, ...]) -> None:
    plain = reference(case, rank)
    for name, (make, edit) in TRANSFORMS.items():
        by = reference(case, rank, mean=edit())
        assert not _same(by, plain), f"{name} by hand does nothing, which shows nothing"
        waits = name == "ClipGradNorm"
        for form in forms if waits else forms[:1]:
            assert_parity(with_step(case, rank, after_reducer(make), form), by, what=f"{name}, {form}, {case}")


def _same(one: list[Record], other: list[Record]) -> bool:
    return all(
        torch.equal(a, b) for a, b in zip(one[-1].parameters.values(), other[-1].parameters.values(), strict=True)
    )


def test_on_the_mean_before_every_form_of_update() -> None:
    run_ranks(_mean, 2, MLP, FORMS)


def test_on_the_mean_of_several_dtypes() -> None:
    run_ranks(_mean, 2, DTYPES, ("interleaved",))


def test_on_the_mean_at_three_ranks() -> None:
    run_ranks(_mean, 3, MLP, ("interleaved",))


def _unused_and_empty(rank: int, world_size: int) -> None:
    for case in (UNUSED, EMPTY):
        for name, (make, edit) in TRANSFORMS.items():
            if case is EMPTY and name == "ClipGradNorm, largest":
                continue  # PyTorch refuses the largest element of nothing.
            candidate = with_step(case, rank, after_reducer(make), "interleaved")
            tolerance: dict[str, Any] = {}
            if case is UNUSED and name == "ClipGradNorm":
                tolerance = {"exact": False, "rtol": 1e-6, "atol": 1e-7, "reason": SUMMATION}
            assert_parity(candidate, reference(case, rank, mean=edit()), what=f"{name}, {case}", **tolerance)


def test_with_unused_and_empty_parameters() -> None:
    run_ranks(_unused_and_empty, 2)


def _local(rank: int, world_size: int, case: Case) -> None:
    for name, (make, edit) in TRANSFORMS.items():
        by = reference(case, rank, local=edit())
        for form in ("interleaved", "deferred") if name == "ClipGradNorm" else ("interleaved",):
            assert_parity(with_step(case, rank, before_reducer(make), form), by, what=f"{name}, {form}, {case}")


@pytest.mark.parametrize("case", [MLP, DTYPES], ids=str)
def test_on_this_ranks_own_gradients(case: Case) -> None:
    run_ranks(_local, 2, case)


def _halve(bucket: Bucket) -> None:
    for parameter in bucket.parameters:
        parameter.mul_(0.5)


async def _halve_together(bucket: Bucket) -> None:
    total = torch.stack([parameter.sum() for parameter in bucket.parameters]).sum().reshape(1)
    await all_reduce(total)
    _halve(bucket)


def _half(ddp: Any) -> None:
    for parameter in ddp.parameters():
        parameter.mul_(0.5)


AFTER: dict[str, tuple[Callable[[], Any], Callable[[], by_hand.Edit]]] = {
    "a function": (lambda: _halve, lambda: _half),
    "an async function": (lambda: _halve_together, lambda: _half),
}


def _updated(rank: int, world_size: int) -> None:
    for name, (make, edit) in AFTER.items():
        by = reference(MLP, rank, updated=edit())

        def build(update: Stage, make: Callable[[], Any] = make) -> Any:
            return chain(AllReduce(), update, make())

        for form in ("interleaved", "automatic, deferred"):
            assert_parity(with_step(MLP, rank, build, form), by, what=f"{name} after an update, {form}")
        parameters = [record.parameters for record in by]
        for partition, options in (("element", {}), ("parameter", {"automatic": True, "deferred": True})):
            candidate = with_zero(MLP, rank, build, options, partition=partition)
            assert_parity(candidate, parameters, what=f"{name} after ZeroStep by {partition}, {options}")


def test_on_new_parameters() -> None:
    run_ranks(_updated, 2)


ZERO_FORMS: tuple[dict[str, Any], ...] = (
    {},
    {"deferred": True},
    {"gather": "forward"},
    {"automatic": True},
    {"automatic": True, "deferred": True},
)


def _zero(rank: int, world_size: int) -> None:
    for name, (make, edit) in TRANSFORMS.items():
        by = [record.parameters for record in reference(MLP, rank, mean=edit())]
        for options in ZERO_FORMS if name == "ClipGradNorm" else ZERO_FORMS[:1]:
            for partition in ("element", "parameter"):
                candidate = with_zero(MLP, rank, after_reducer(make), options, partition=partition)
                assert_parity(candidate, by, what=f"{name} before ZeroStep by {partition}, {options}")


def test_on_the_mean_before_a_sharded_update() -> None:
    run_ranks(_zero, 2)


class _Scattered(Stage):
    """The mean, of which every rank is told a part: what a reduce-scatter leaves."""

    role = Role.REDUCER

    def __init__(self, *, whole: bool) -> None:
        self.whole = whole
        self.places: dict[int, int] = {}

    async def __call__(self, bucket: Bucket) -> None:
        await AllReduce()(bucket)

    def passed(self, bucket: Bucket) -> Bucket:
        rank, ranks = bucket.group.rank(), bucket.group.size()
        parts, offset = [], 0
        for parameter in bucket.parameters:
            place = self.places.setdefault(id(parameter), len(self.places))
            numel = parameter.numel()
            each = numel // ranks
            own = (rank * each, numel if rank == ranks - 1 else (rank + 1) * each)
            if self.whole:
                own = (0, numel) if place % ranks == rank else (0, 0)
            parts.append(bucket.buffer[offset + own[0] : offset + own[1]])
            offset += numel
        return dataclasses.replace(bucket, is_mean=True, owned=tuple(parts))


def _gathered(rank: int, world_size: int, whole: bool) -> None:
    """What the ranks own, put together, is what one of them would have made of all of it."""
    for name, (make, edit) in TRANSFORMS.items():
        if not name.startswith("ClipGradNorm"):
            continue  # A function looks at `bucket.owned` by itself.
        by = wrap(MLP.model(), **MLP.ddp_options())
        ddp = copy.deepcopy(by)
        stage, by_edit, scattered = make(), edit(), _Scattered(whole=whole)
        kept: dict[str, torch.Tensor] = {}

        def keep(bucket: Bucket, kept: dict[str, torch.Tensor] = kept) -> None:
            owned, bucket_names = bucket.owned, bucket.names
            assert owned is not None
            for one, parameter, part in zip(bucket_names, bucket.parameters, owned, strict=True):
                start = int(part.storage_offset()) - int(bucket.gradients[bucket_names.index(one)].storage_offset())
                kept[one] = torch.zeros(parameter.numel())
                kept[one][start : start + part.numel()] = part

        chain(scattered, stage, keep).register(ddp)
        for step in range(4):
            batch = MLP.batch(step, rank)
            for model in (by, ddp):
                model.zero_grad()
                mean_squared_error(model, batch).backward()
            by_edit(by)
            for key, parameter in by.module.named_parameters():
                dist.all_reduce(kept[key])
                assert parameter.grad is not None
                torch.testing.assert_close(kept[key].view_as(parameter), parameter.grad, rtol=1e-5, atol=0)


@pytest.mark.parametrize("whole", [False, True], ids=["element", "parameter"])
def test_on_the_parts_that_a_reduce_scatter_leaves(whole: bool) -> None:
    run_ranks(_gathered, 3, whole)


def _norm(rank: int, world_size: int) -> None:
    ddp = wrap(MLP.model(), **MLP.ddp_options())
    by = wrap(MLP.model(), **MLP.ddp_options())
    chain(AllReduce(), clip := ClipGradNorm(0.05)).register(ddp)
    assert clip.norm is None
    for step in range(4):
        for model in (by, ddp):
            model.zero_grad()
            mean_squared_error(model, MLP.batch(step, rank)).backward()
        norm = torch.nn.utils.clip_grad_norm_(by.parameters(), 0.05)
        assert clip.norm is not None and clip.norm.shape == () and torch.equal(clip.norm, norm)


def test_the_norm_can_be_read() -> None:
    run_ranks(_norm, 2)


def _accumulated(rank: int, world_size: int) -> None:
    """Backwards under no_sync are clipped as one with the one that follows."""
    records = []
    for is_candidate in (False, True):
        ddp = wrap(MLP.model(), **MLP.ddp_options())
        optimizer: Any = by_hand.ADAMW(ddp.parameters())
        if is_candidate:
            optimizer = OverlappedOptimizer(optimizer)
            chain(AllReduce(), ClipGradNorm(0.05), Step(optimizer)).register(ddp)
        for step in range(4):
            optimizer.zero_grad()
            with ddp.no_sync():
                mean_squared_error(ddp, MLP.batch(2 * step, rank)).backward()
            mean_squared_error(ddp, MLP.batch(2 * step + 1, rank)).backward()
            if not is_candidate:
                by_hand.clip_norm(ddp)
            optimizer.step()
        records.append(copy.deepcopy(ddp.module.state_dict()))
    assert_parity(records[1], records[0], what="clipping with accumulation")


def test_accumulated_gradients_are_clipped_once() -> None:
    run_ranks(_accumulated, 2)


def test_the_norm_of_parts_in_float64_is_not_rounded() -> None:
    part = torch.full((3,), 1 / 3, dtype=torch.float64)
    norm = ShardedNorm(Clipping(0.1), [part, part[:0]], [part], part.device)
    torch.testing.assert_close(norm.total, part.norm(), rtol=1e-15, atol=0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128, torch.bfloat16])
def test_the_norm_of_parts_has_the_dtype_of_all_parameters(dtype: torch.dtype) -> None:
    """Also on a rank that has parts of others only."""
    part, elsewhere = torch.ones(3, dtype=torch.bfloat16), torch.ones(3, dtype=dtype)
    norm = ShardedNorm(Clipping(0.1), [part], [part, elsewhere], part.device)
    assert norm.total.dtype == torch.nn.utils.get_total_norm([part, elsewhere]).dtype


class _Narrow(torch.nn.Module):
    """In bfloat16, in which what is rounded in another way shows; its first weight is not contiguous."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.front = torch.nn.Conv2d(3, 6, 3, dtype=torch.bfloat16).to(memory_format=torch.channels_last)
        self.head = torch.nn.Linear(6 * 4, 5, dtype=torch.bfloat16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.head(self.front(x).flatten(1))
        return hidden


def _trains_narrow(rank: int, build: Callable[[Any], Any] | None, edit: Any, partition: str = "") -> list[Any]:
    """The parameters after each step."""
    ddp = wrap(_Narrow(), bucket_cap_mb=25)
    optimizer: Any = by_hand.ADAMW(ddp.parameters())
    if build is not None:
        optimizer = ZeroRedundancyOptimizer(
            ddp.parameters(),
            torch.optim.AdamW,
            overlap_with_ddp=True,
            partition=partition,
            **by_hand.ADAMW_OPTIONS,
        )
        build(optimizer).register(ddp)
    seen = []
    for step in range(4):
        optimizer.zero_grad()
        source = torch.Generator().manual_seed(10 * step + rank)
        images = torch.randn(4, 3, 4, 4, generator=source).bfloat16().to(memory_format=torch.channels_last)
        ddp(images).square().mean().backward()
        if build is None:
            edit(ddp)
        optimizer.step()
        seen.append({name: parameter.detach().clone() for name, parameter in ddp.module.named_parameters()})
    return seen


def _in_bfloat16(rank: int, world_size: int) -> None:
    clips = functools.partial(by_hand.clip_norm, norm_type=float("inf"))
    for name, build, make_edit in (
        ("ClipGradNorm", lambda zero: chain(ClipGradNorm(0.05, float("inf")), ZeroStep(zero)), lambda: clips),
        ("ZeroStep", lambda zero: chain(ZeroStep(zero, clip_grad_norm=0.05, norm_type=float("inf"))), lambda: clips),
    ):
        by = _trains_narrow(rank, None, make_edit())
        for partition in ("element", "parameter"):
            candidate = _trains_narrow(rank, build, None, partition)
            assert_parity(candidate, by, what=f"{name} by {partition}")


def test_parts_in_bfloat16_are_rounded_as_whole_gradients() -> None:
    run_ranks(_in_bfloat16, 2)
