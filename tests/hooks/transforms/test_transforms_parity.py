"""Each transform, in each place and before each form of update, equals the same thing by hand on plain DDP."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from harness import Record, assert_parity, on_ranks, wrap
from harness.models import DTYPES, EMPTY, MLP, UNUSED, mean_squared_error
from overlap import AllReduce, Bucket, ClipGradNorm, Stage, chain
from overlap.hooks import all_reduce
from overlap.hooks.transforms.clip import Clipping

from .by_hand import STEPS, clip_norm, reference, with_step, with_zero

FORMS = ("interleaved", "automatic, deferred")
ZERO_FORMS: tuple[dict[str, Any], ...] = ({}, {"gather": "forward"}, {"automatic": True, "deferred": True})
UNUSED_ARE_SUMMED = {
    "rtol": 1e-6,
    "atol": 1e-7,
    "reason": "norms of unused parameters, which are zero, are among those added up",
}
SUMMED_BY_PARTS = {"rtol": 1e-4, "atol": 1e-6, "reason": "norms of parts are added up"}


def _same(one: list[Record], other: list[Record]) -> bool:
    pairs = zip(one[-1].parameters.values(), other[-1].parameters.values(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


def _parameters(records: list[Record]) -> list[Any]:
    return [record.parameters for record in records]


def _clipped(update: Stage) -> Any:
    return chain(AllReduce(), ClipGradNorm(0.05), update)


def _on_the_mean(rank: int) -> Iterator[tuple[str, Any, Any, dict[str, Any]]]:
    for case in (MLP, DTYPES, UNUSED, EMPTY):
        by = reference(case, rank, mean=clip_norm)
        assert case is EMPTY or not _same(by, reference(case, rank)), "by hand it does nothing, which shows nothing"
        tolerance = UNUSED_ARE_SUMMED if case is UNUSED else {}
        for form in FORMS if case is MLP else FORMS[:1]:
            yield f"{form}, {case}", with_step(case, rank, _clipped, form), by, tolerance


def _on_own_gradients(rank: int) -> Iterator[tuple[str, Any, Any, dict[str, Any]]]:
    by = reference(MLP, rank, local=clip_norm)
    # A hook is called on autograd's thread, also behind a transform that waits for the whole pass.
    for reducer in (AllReduce(), default_hooks.allreduce_hook):
        build = lambda update, reducer=reducer: chain(ClipGradNorm(0.05), reducer, update)  # noqa: E731
        yield f"on own gradients, before {reducer}", with_step(MLP, rank, build, FORMS[0]), by, {}


def _halve(bucket: Bucket) -> None:
    for parameter in bucket.parameters:
        parameter.mul_(0.5)


async def _halve_together(bucket: Bucket) -> None:
    await all_reduce(torch.stack([parameter.sum() for parameter in bucket.parameters]).sum().reshape(1))
    _halve(bucket)


def _half(ddp: Any) -> None:
    for parameter in ddp.parameters():
        parameter.mul_(0.5)


def _on_new_parameters(rank: int) -> Iterator[tuple[str, Any, Any, dict[str, Any]]]:
    by = reference(MLP, rank, updated=_half)
    for function in (_halve, _halve_together):

        def build(update: Stage, function: Callable[..., Any] = function) -> Any:
            return chain(AllReduce(), update, function)

        for form in FORMS:
            yield f"{function.__name__} after an update, {form}", with_step(MLP, rank, build, form), by, {}
        for partition, options in (("element", {}), ("parameter", {"automatic": True, "deferred": True})):
            _, found = with_zero(build, MLP.batches(rank, steps=STEPS), partition=partition, **options)
            yield f"{function.__name__} after ZeroStep by {partition}, {options}", found, _parameters(by), {}


def _before_zero(rank: int) -> Iterator[tuple[str, Any, Any, dict[str, Any]]]:
    by, batches = _parameters(reference(MLP, rank, mean=clip_norm)), MLP.batches(rank, steps=STEPS)
    for options in ZERO_FORMS:
        yield f"before ZeroStep, {options}", with_zero(_clipped, batches, **options)[1], by, {}
    for partition in ("element", "parameter"):
        for options in ZERO_FORMS[:2]:
            # It reduces by itself, so each rank has a part of the mean.
            build = lambda update: chain(ClipGradNorm(0.05), update)  # noqa: E731
            _, found = with_zero(build, batches, partition=partition, **options)
            yield f"before a reduction by {partition}, {options}", found, by, SUMMED_BY_PARTS


@on_ranks(2, timeout_s=240)
def test_every_place_and_form(rank: int, world_size: int) -> None:
    failed = {}
    for matrix in (_on_the_mean, _on_own_gradients, _on_new_parameters, _before_zero):
        for what, found, wanted, tolerance in matrix(rank):
            try:
                assert_parity(found, wanted, what=what, **tolerance)
            except AssertionError as error:
                failed[what] = str(error)
    assert not failed, "\n".join(failed.values())


@on_ranks(3)
def test_the_norm_can_be_read(rank: int, world_size: int) -> None:
    """Of three ranks, also of accumulated gradients."""
    by, ddp = (wrap(MLP.model(), **MLP.ddp_options()) for _ in range(2))
    chain(AllReduce(), clip := ClipGradNorm(0.05)).register(ddp)
    assert clip.norm is None
    for step in range(4):
        for model in (by, ddp):
            model.zero_grad()
            with model.no_sync():
                mean_squared_error(model, MLP.batch(2 * step, rank)).backward()
            mean_squared_error(model, MLP.batch(2 * step + 1, rank)).backward()
        norm = torch.nn.utils.clip_grad_norm_(by.parameters(), 0.05)
        assert clip.norm is not None and clip.norm.shape == () and torch.equal(clip.norm, norm)
        for one, other in zip(ddp.parameters(), by.parameters(), strict=True):
            assert torch.equal(one.grad, other.grad)


def test_the_norm_of_parts_in_float64_is_not_rounded() -> None:
    part = torch.full((3,), 1 / 3, dtype=torch.float64)
    norm = Clipping(0.1).total(Clipping(0.1).partial([part, part[:0]], part.device), [part])
    torch.testing.assert_close(norm, part.norm(), rtol=1e-15, atol=0)


def test_the_norm_of_parts_has_the_dtype_of_all_parameters() -> None:
    """Also on a rank that has parts of others only."""
    for dtype in (torch.float64, torch.complex128, torch.bfloat16):
        part, elsewhere = torch.ones(3, dtype=torch.bfloat16), torch.ones(3, dtype=dtype)
        norm = Clipping(0.1).total(Clipping(0.1).partial([part], part.device), [part, elsewhere])
        assert norm.dtype == torch.nn.utils.get_total_norm([part, elsewhere]).dtype
