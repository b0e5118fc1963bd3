"""Released gradients: no bit of any update changes, no memory is kept, and none is released that somebody reads.

A matrix runs in one world of ranks and names the cell that fails. Random loops are in ``lifecycle``, others in the
corpus of loops.
"""

import functools
import gc
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from step_loops import ADAMW, SGD, registered, settle
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.measuring import MemoryMeter
from harness import assert_equal_ranks, assert_parity, on_ranks, plain_step, train, wrap
from harness.models import DTYPES, MLP, TIED, UNUSED_ON_SOME_RANKS, Case, mean_squared_error
from overlap import (
    AllReduce,
    ClipGradNorm,
    ConfigurationError,
    Int4,
    OverlappedOptimizer,
    PeerError,
    Quantize,
    SkipNonFinite,
    Step,
    TrainingLoopError,
    UnsupportedError,
    ZeroRedundancyOptimizer,
    ZeroStep,
    as_hook,
    chain,
)
from overlap.hooks.engine.registration import registration_of
from overlap.hooks.stage import walk
from overlap.optim.release import GradientRelease
from overlap.optim.update import Update

RELEASED = {"release_gradients": True}


def release_of(ddp: Any) -> GradientRelease:
    """What gives back the memory of a registered model's gradients: one for all of its updates."""
    registration = registration_of(ddp)
    assert registration is not None
    found = {stage.release for stage in walk(registration.stage) if isinstance(stage, Update)} - {None}
    (release,) = found
    assert release is not None
    return release


def held_bytes(ddp: Any) -> list[int]:
    """The memory of each of DDP's buckets that have been seen."""
    return [memory._storage.nbytes() for memory in release_of(ddp)._memories.values()]


def kept_buckets(ddp: Any, most: int) -> int:
    """How many of DDP's buckets have memory, once the backend drops the tensors of collectives that are done."""
    release, deadline_s = release_of(ddp), time.monotonic() + 5
    while (kept := sum(map(bool, held_bytes(ddp)))) > most and time.monotonic() < deadline_s:
        time.sleep(0.001)
        with release._lock:
            release._empty_done()  # As the next forward does.
    return kept


def is_released(ddp: Any) -> bool:
    """Whether DDP's buckets have no memory."""
    return bool(held_bytes(ddp)) and not kept_buckets(ddp, most=0)


def wrapped(case: Case = MLP, **options: Any) -> Any:
    return wrap(case.model(), **{**case.ddp_options(), "gradient_as_bucket_view": True, **options})


def has_gradient(parameter: Any) -> bool:
    """Whether there are values; a gradient that was released is a stand-in without."""
    return getattr(parameter.grad, "plain", parameter.grad) is not None


def backward(ddp: Any, step: int, rank: int, case: Case = MLP) -> None:
    mean_squared_error(ddp, case.batch(step, rank)).backward()


def trains(ddp: Any, optimizer: Any, rank: int, steps: range, case: Case = MLP) -> None:
    for step in steps:
        backward(ddp, step, rank, case)
        if not isinstance(optimizer, torch.optim.SGD):  # That of the automatic form.
            optimizer.step()
        settle(optimizer)


# Parity, and memory.


def _step(ddp: Any, optimizer: Any, batch: Any, loss_of: Any, *, form: str) -> Tensor:
    """The loop without ``zero_grad``; looks whether there is anything to release, and whether it has gone."""
    loss: Tensor = loss_of(ddp, batch)
    loss.backward()
    assert not any(map(has_gradient, ddp.parameters())) and is_released(ddp)
    if "automatic" not in form:
        optimizer.step()
    settle(optimizer)
    if form.startswith("zero"):
        optimizer.consolidate_state_dict(to=None)
    return loss


CELLS: list[tuple[str, Case, dict[str, Any]]] = [
    ("automatic", MLP, {}),
    ("zero in forward", MLP, {}),
    ("zero by parameter", MLP, {}),
    ("interleaved", TIED, {}),
    ("zero", DTYPES, {}),
    ("interleaved", MLP, {"static_graph": True}),
    ("zero", UNUSED_ON_SOME_RANKS, {}),
]


@on_ranks(2, timeout_s=120)
def test_updates_equal_plain_ddps(rank: int, world_size: int) -> None:
    for form, case, options in CELLS:
        batches = case.batches(rank, steps=5)
        reference = wrapped(case, **options)
        expected = train(reference, ADAMW(reference.parameters()), batches, step_fn=plain_step)
        ddp = wrapped(case, **options)
        optimizer = registered(form, ddp, ADAMW, **RELEASED)
        found = train(ddp, optimizer, batches, step_fn=functools.partial(_step, form=form))
        assert len(held_bytes(ddp)) >= 2, "parity over one bucket shows little"
        assert_parity(found, expected, what=f"{form}, {case}, {options}, rank {rank}")


def _same(what: str, trained: Callable[[dict[str, Any]], Any]) -> None:
    """Compares what ``trained`` returns with the update's options, a model, with and without release."""
    kept, released = trained({}), trained(RELEASED)
    assert is_released(released), what
    assert_parity(*([parameter.detach() for parameter in ddp.parameters()] for ddp in (released, kept)), what=what)


@on_ranks(2)
def test_a_chain_is_the_same(rank: int, world_size: int) -> None:
    def quantized(options: dict[str, Any]) -> Any:
        ddp = wrapped()
        optimizer = OverlappedOptimizer(SGD(ddp.parameters()))
        chain(Quantize(Int4(), error_feedback=True), Step(optimizer, **options)).register(ddp)
        trains(ddp, optimizer, rank, range(4))
        return ddp

    def clipped(options: dict[str, Any]) -> Any:
        ddp = wrapped()
        zero = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.AdamW, lr=0.01)
        chain(ClipGradNorm(0.05), SkipNonFinite(), ZeroStep(zero, **options)).register(ddp)
        trains(ddp, zero, rank, range(4))
        return ddp

    _same("4 bits, feedback", quantized)
    _same("clipped, skipping", clipped)


@on_ranks(2)
def test_what_no_update_releases_is_kept(rank: int, world_size: int) -> None:
    """A bucket with a parameter that no update has, or one that releases nothing, is kept and stays readable."""
    ddp = wrapped()
    *most, weight, bias = ddp.parameters()
    both = OverlappedOptimizer(SGD(most[:-1])), OverlappedOptimizer(ADAMW([weight, bias]))
    chain(AllReduce(), Step(both[0], **RELEASED), Step(both[1])).register(ddp)
    for step in range(4):
        most[-1].grad = None
        backward(ddp, step, rank)
        assert most[-1].grad.any() and weight.grad.any()
        assert step == 0 or not has_gradient(most[0])
        for optimizer in both:
            optimizer.step()
    assert 1 <= kept_buckets(ddp, most=3) <= 3 < len(held_bytes(ddp))


_WIDTH, _LAYERS = 512, 24


def _peak(width: int, **options: Any) -> int:
    torch.manual_seed(0)
    gc.collect()  # The model before this one would be freed only while this one is measured.
    meter = MemoryMeter(torch.device("cpu"))
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(_LAYERS)))
    ddp = DistributedDataParallel(model, gradient_as_bucket_view=True, bucket_cap_mb=1)
    optimizer = registered("zero", ddp, SGD, **options)
    inputs = torch.randn(4, width)
    for step in range(3):
        if step == 2:  # The first pass has one bucket, and the second is the first that has others.
            Path("/proc/self/clear_refs").write_text("5")  # The recorded peak is what is resident now.
            for layer in model:  # Computing takes longer than reducing, as in models of use.
                layer.bias.register_hook(lambda gradient: time.sleep(0.02))
        ddp(inputs).square().mean().backward()
        optimizer.step()
        settle(optimizer)
    return meter.peak_bytes()


@on_ranks(2)
def test_gradients_do_not_add_to_the_peak() -> None:
    for options in ({}, RELEASED):
        _peak(16, **options)  # Imports at first use are not measured.
    torch.set_num_threads(1)
    saved, model_bytes = _peak(_WIDTH) - _peak(_WIDTH, **RELEASED), _LAYERS * (_WIDTH * _WIDTH + _WIDTH) * 4
    # Of the gradients all but a few buckets, of which the model has 24.
    assert saved > model_bytes * 0.4, f"{saved / 2**20:.0f} of {model_bytes / 2**20:.0f} MiB"


# Which buckets get memory, and when.


@on_ranks(2)
def test_a_backward_under_no_sync_fills_no_bucket(rank: int, world_size: int) -> None:
    for form, case in (("interleaved", MLP), ("zero", UNUSED_ON_SOME_RANKS)):
        ddp = wrapped(case)
        optimizer = registered(form, ddp, **RELEASED)
        trains(ddp, optimizer, rank, range(3), case)
        for start in (3, 6):
            for step in range(start, start + 2):
                with ddp.no_sync():
                    backward(ddp, step, rank, case)
                assert is_released(ddp), f"{form}, {case}: gradients under no_sync are not in the buckets"
                assert any(parameter.grad is not None for parameter in ddp.parameters())
            trains(ddp, optimizer, rank, range(start + 2, start + 3), case)


def _loss(ddp: Any, step: int, rank: int) -> Tensor:
    loss: Tensor = mean_squared_error(ddp, MLP.batch(step, rank))
    return loss


def _directly(ddp: Any, step: int, rank: int) -> Tensor:
    batch = MLP.batch(step, rank)
    return torch.nn.functional.mse_loss(ddp.forward(*batch.inputs), batch.target)


def _another_between(ddp: Any, step: int, rank: int) -> Tensor:
    loss = _loss(ddp, step, rank)
    with torch.no_grad():
        _loss(ddp, step + 1, rank)
    return loss


def _module_between(ddp: Any, step: int, rank: int) -> Tensor:
    torch.autograd.grad(ddp.module(*MLP.batch(step, rank).inputs).sum(), list(ddp.parameters()))
    return _loss(ddp, step, rank)


@on_ranks(2)
def test_whatever_forward_a_synchronized_backward_has_its_buckets_are_filled(rank: int, world_size: int) -> None:
    """Forwards of which the registration is not notified, and others between a forward and its backward."""
    for loss in (_directly, _another_between, _module_between):

        def trained(options: dict[str, Any], loss: Any = loss) -> Any:
            ddp = wrapped()
            optimizer = registered("interleaved", ddp, **options)
            for step in range(5):
                loss(ddp, step, rank).backward()
                optimizer.step()
                optimizer.zero_grad()
            return ddp

        _same(loss.__name__, trained)


# Failures and ends.


@on_ranks(2)
def test_a_model_trains_on_after_a_failure_and_is_as_before_when_the_registration_is_removed(rank: int) -> None:
    for form in ("interleaved", "zero in forward"):
        ddp = wrapped()
        optimizer = registered(form, ddp, **RELEASED)
        trains(ddp, optimizer, rank, range(3))
        registration = registration_of(ddp)
        assert registration is not None
        update = type(registration.stage.sequence[-1])

        async def broken(self: Any, bucket: Any, original: Any = update.__call__) -> None:
            if bucket.index == 2 and rank == 1:
                raise ValueError("broken on purpose")
            await original(self, bucket)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(update, "__call__", broken)
            with pytest.raises((ValueError, PeerError), match="broken on purpose") as caught:
                backward(ddp, 3, rank)
        assert rank == 0 or any("load a checkpoint" in note for note in caught.value.__notes__)
        del caught
        trains(ddp, optimizer, rank, range(4, 7))
        gc.collect()  # The exception refers to its frames, and they to it.
        trains(ddp, optimizer, rank, range(7, 8))
        assert is_released(ddp), form
        memories = list(release_of(ddp)._memories.values())
        registration.remove()
        assert not any(memory.is_empty for memory in memories)
        assert not any(parameter._backward_hooks for parameter in ddp.parameters())


@on_ranks(2)
def test_a_model_is_collected_whatever_its_gradients_are(rank: int, world_size: int) -> None:
    """Also between backward and step(), where gradients are read-only."""
    for form, options in (("interleaved", {}), ("automatic", RELEASED), ("zero in forward", RELEASED)):
        ddp = wrapped()
        optimizer = registered(form, ddp, **options)
        trains(ddp, optimizer, rank, range(2))
        backward(ddp, 2, rank)
        settle(optimizer)
        parameter = weakref.ref(next(ddp.parameters()))
        kept = next(ddp.parameters()).grad if options else None  # Without, it would be a view of DDP's bucket.
        del ddp, optimizer
        for _ in range(100):  # The worker may be at the end of the last backward.
            gc.collect()
            if parameter() is None:
                break
            time.sleep(0.05)
        assert parameter() is None, f"{form}, {options}"
        if kept is not None:
            with pytest.raises(TrainingLoopError, match="of a model that no longer exists"):
                kept.sum()
        torch.distributed.barrier()


# Refusals.


def test_an_update_that_needs_all_gradients_is_refused() -> None:
    optimizer = OverlappedOptimizer(SGD(nn.Linear(2, 2).parameters()))
    with pytest.raises(ConfigurationError, match="needs all gradients before the first update"):
        Step(optimizer, release_gradients=True, deferred=True)


@on_ranks(2)
def test_a_model_whose_gradients_cannot_be_released_is_refused(rank: int, world_size: int) -> None:
    for ddp, error, match in (
        (
            wrap(nn.Linear(4, 4, dtype=torch.complex64), gradient_as_bucket_view=True),
            UnsupportedError,
            r"weight is torch\.complex64",
        ),
        (wrap(MLP.model()), ConfigurationError, "gradient_as_bucket_view=True"),
    ):
        zero = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.SGD, lr=0.1)
        replicated = AllReduce(), Step(OverlappedOptimizer(SGD(ddp.parameters())), **RELEASED)
        for stages in (replicated, (ZeroStep(zero, **RELEASED),)):
            with pytest.raises(error, match=match):
                chain(*stages).register(ddp)
        chain(ZeroStep(zero)).register(ddp)
    ddp = wrapped()
    ddp.register_comm_hook(None, as_hook(chain(AllReduce(), Step(SGD(ddp.parameters()), **RELEASED))))
    with pytest.raises(ConfigurationError, match="has to know the model's parameters"):
        backward(ddp, 0, rank)


# Memory in use is not released.


KEEPERS: dict[str, Callable[[Any], Tensor]] = {
    "bucket": lambda bucket: bucket.buffer,
    "a part": lambda bucket: bucket.buffer[:3],
    "a gradient": lambda bucket: bucket.parameters[0].grad,
}


@on_ranks(2)
def test_a_bucket_that_a_stage_keeps_has_its_memory_until_it_is_dropped(rank: int, world_size: int) -> None:
    for what, keep in KEEPERS.items():
        for when in (0, 3):
            kept: list[Tensor] = []

            def stage(bucket: Any, keep: Any = keep, when: int = when, kept: list[Tensor] = kept) -> None:
                assert bucket.raw is None, "DDP's own object, whose tensors do not count, is not given away"
                if bucket.step == when and bucket.index == 0:
                    kept.append(keep(bucket))

            ddp = wrapped()
            optimizer = OverlappedOptimizer(SGD(ddp.parameters()))
            chain(AllReduce(), stage, Step(optimizer, **RELEASED)).register(ddp)
            for step in range(when + 2):
                trains(ddp, optimizer, rank, range(step, step + 1))
                # A crash where its memory was released.
                assert all(bool(one.isfinite().all()) for one in kept), what
            assert not when or any(held_bytes(ddp)), f"{what} of step {when}: the memory of one bucket is in use"
            kept.clear()
            trains(ddp, optimizer, rank, range(when + 2, when + 5))
            assert is_released(ddp), f"{what} of step {when}: released again when nobody keeps it"
            assert_equal_ranks(ddp.parameters())


@on_ranks(2)
def test_the_mean_of_what_this_rank_has_not_used_is_not_released_before_it_is_applied(rank: int) -> None:
    def trained(options: dict[str, Any]) -> Any:
        ddp = wrapped(UNUSED_ON_SOME_RANKS)
        optimizer = registered("interleaved", ddp, **options)
        for step in range(4):
            if step % 2:
                with optimizer.skip_update():
                    backward(ddp, step, rank, UNUSED_ON_SOME_RANKS)
                # The mean came in a backward without an update, so it is there for step().
                assert ddp.module.branch.weight.grad is not None
            else:
                backward(ddp, step, rank, UNUSED_ON_SOME_RANKS)
            optimizer.step()
        backward(ddp, 4, rank, UNUSED_ON_SOME_RANKS)
        return ddp

    _same("unused", trained)
