"""What step() does: clipping, GradScaler, Join, the stage after a reducer, and the names of PyTorch."""

import contextlib
import itertools
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join
from zero_loops import ADAMW_OPTIONS, FORMS, register

import overlap
from benchmarks.host_cost import IdleStreams, model_on
from harness import assert_equal_ranks, assert_parity, on_ranks, plain_step, wrap
from harness.models import MLP, UNUSED_ON_SOME_RANKS, Case, mean_squared_error
from overlap import (
    AllReduce,
    BFloat16,
    Bucket,
    OverlappedOptimizer,
    PeerError,
    PostLocalSGDState,
    Step,
    TrainingLoopError,
    UnsupportedError,
    ZeroRedundancyOptimizer,
    ZeroStep,
    allreduce_hook,
    chain,
    hook_with_zero_step,
    hook_with_zero_step_interleaved,
)
from overlap._torch.device import streams_replaced
from overlap.hooks import PostLocal


@on_ranks(2)
def test_hooks_under_the_names_of_pytorch_update_from_the_first_iteration(rank: int, world_size: int) -> None:
    for wrapper in (hook_with_zero_step, hook_with_zero_step_interleaved):
        plain, ddp = (wrap(MLP.model(), **MLP.ddp_options()) for _ in range(2))
        reference = torch.optim.AdamW(plain.parameters(), **ADAMW_OPTIONS)
        zero = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.AdamW, overlap_with_ddp=True, **ADAMW_OPTIONS)
        ddp.register_comm_hook(None, wrapper(allreduce_hook, ddp, zero))
        schedules = [torch.optim.lr_scheduler.ExponentialLR(one, gamma=0.9) for one in (reference, zero)]
        for step, batch in enumerate(MLP.batches(rank, steps=4)):
            plain_step(plain, reference, batch, mean_squared_error)
            zero.zero_grad()
            mean_squared_error(ddp, batch).backward()
            for schedule in schedules:
                schedule.step()
            assert_parity(list(ddp.parameters()), list(plain.parameters()), what=f"{wrapper.__name__}, step {step}")


@on_ranks(2)
def test_without_hooks_a_frozen_parameter_with_a_gradient_is_stepped_on_every_rank(rank: int, world_size: int) -> None:
    plain, ddp = (wrap(MLP.model(), **MLP.ddp_options()) for _ in range(2))
    reference = torch.optim.AdamW(plain.parameters(), **ADAMW_OPTIONS)
    zero = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.AdamW, **ADAMW_OPTIONS)
    for model, optimizer in ((plain, reference), (ddp, zero)):
        mean_squared_error(model, MLP.batch(0, rank)).backward()
        optimizer.step()
        model.module[0].weight.requires_grad_(False)
        optimizer.step()
    # Plain optimizers step whatever has a gradient, so its new value must reach the other ranks.
    assert torch.equal(ddp.module[0].weight, plain.module[0].weight)


def _made(ddp: Any, form: str) -> ZeroRedundancyOptimizer:
    zero = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9)
    if form == "deferred":
        chain(ZeroStep(zero, deferred=True)).register(ddp)
    return zero


@on_ranks(2)
def test_clipping_zero_by_hand_is_that_of_plain_ddp(rank: int, world_size: int) -> None:
    for form, (norm_type, max_norm) in itertools.product(
        ("deferred", "without a stage"), ((2.0, 0.1), (float("inf"), 0.01))
    ):
        plain, ddp = (wrap(MLP.model(), **MLP.ddp_options()) for _ in range(2))
        reference, zero = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9), _made(ddp, form)
        is_exact = form == "without a stage"  # The optimizer's order is the model's here.
        tolerance = {"rtol": 0.0, "atol": 0.0} if is_exact else {"rtol": 1e-5, "atol": 1e-7}
        for batch in MLP.batches(rank, steps=4):
            reference.zero_grad()
            mean_squared_error(plain, batch).backward()
            expected = torch.nn.utils.clip_grad_norm_(plain.parameters(), max_norm, norm_type)
            reference.step()
            zero.zero_grad()
            mean_squared_error(ddp, batch).backward()
            norm = zero.clip_grad_norm_(max_norm, norm_type)
            zero.step()
            norms = [torch.zeros_like(norm) for _ in range(world_size)]
            torch.distributed.all_gather(norms, norm)
            assert all(torch.equal(norm, other) for other in norms)
            torch.testing.assert_close(norm, expected, **tolerance)
        for ours, theirs in zip(ddp.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs, **tolerance)


@on_ranks(2)
def test_clipping_zero_where_there_is_nothing_to_clip_is_refused(rank: int, world_size: int) -> None:
    ddp = wrap(MLP.model(), **MLP.ddp_options())
    zero = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.SGD, lr=0.1)
    chain(ZeroStep(zero)).register(ddp)
    mean_squared_error(ddp, MLP.batch(0, rank)).backward()
    with pytest.raises(TrainingLoopError, match=r"made in backward: use ZeroStep\(zero, deferred=True\)"):
        zero.clip_grad_norm_(1.0)
    zero.step()
    ddp = wrap(MLP.model(), **MLP.ddp_options())
    zero = _made(ddp, "deferred")
    with pytest.raises(TrainingLoopError, match="between a synchronized backward and step"):
        zero.clip_grad_norm_(1.0)
    loss = mean_squared_error(ddp, MLP.batch(0, rank)) * float("inf")
    loss.backward()
    with pytest.raises(TrainingLoopError, match="so they cannot be clipped"):
        zero.clip_grad_norm_(1.0, error_if_nonfinite=True)


@on_ranks(3)
def test_a_rank_learns_of_a_gradient_that_is_not_finite_on_another(rank: int, world_size: int) -> None:
    """Only one element of one rank is not finite, and that in a chunk that the rank owns itself."""
    ddp = wrap(MLP.model(), **MLP.ddp_options())
    zero = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.SGD, lr=0.1, overlap_with_ddp=True)
    chain(ZeroStep(zero, deferred=True)).register(ddp)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    shard = next(s for s in zero.shards.values() if s.range[0] < s.range[1])
    before = shard.parameter.detach().clone()
    if rank == 1:

        def spoil(grad: torch.Tensor) -> torch.Tensor:
            spoilt = grad.clone()
            spoilt.view(-1)[shard.range[0]] = float("nan")
            return spoilt

        shard.parameter.register_hook(spoil)
    scaler.scale(mean_squared_error(ddp, MLP.batch(0, rank))).backward()
    scaler.step(zero)
    scaler.update()
    assert torch.equal(shard.parameter, before), "the step is skipped on every rank"
    assert scaler.get_scale() == 2.0


BATCHES = (7, 4, 5)


def _train(ddp: Any, optimizer: Any, case: Case, joinables: list[Any], rank: int) -> Any:
    """With plain DDP's loop, whose ``zero_grad()`` and ``step()`` do nothing where nothing is left to do."""
    with Join(joinables):
        for batch in case.batches(rank, steps=BATCHES[rank]):
            plain_step(ddp, optimizer, batch, mean_squared_error)
    return {name: p.detach().clone() for name, p in ddp.module.named_parameters()}


@on_ranks(2, 3)
def test_pytorchs_join_equals_plain_ddp_under_it(rank: int, world_size: int) -> None:
    """tests/loops has ours."""
    plain = wrap(MLP.model(), **MLP.ddp_options())
    # What a joined rank holds is brought up to date by DDP at the end; the reference's state is that of the last.
    reference = _train(plain, torch.optim.AdamW(plain.parameters(), lr=0.01), MLP, [plain], rank)
    for form in FORMS if world_size == 2 else ("interleaved", "deferred", "alone"):
        ddp = wrap(MLP.model(), **MLP.ddp_options())
        zero = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.AdamW, lr=0.01)
        register(form, ddp, zero)
        ours = _train(ddp, zero, MLP, [ddp, zero], rank)
        what = f"{form}, {world_size} ranks"
        if world_size == 2:
            assert_parity(ours, reference, what=what)
        else:
            assert_parity(ours, reference, what=what, rtol=1e-3, atol=1e-4, reason="order of summation")
        zero.consolidate_state_dict(to=None)
        steps = zero.state_dict()["state"][0]["step"]
        assert steps == max(BATCHES[:world_size]), "updated in every step, on every rank"


@on_ranks(2, group_timeout_s=6)
def test_pytorchs_join_is_refused_with_unused_parameters_and_without_zero_outside_of_backward(rank: int) -> None:
    ddp = wrap(UNUSED_ON_SOME_RANKS.model(), **UNUSED_ON_SOME_RANKS.ddp_options())
    zero = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.SGD, lr=0.1)
    register("interleaved", ddp, zero)
    with pytest.raises(UnsupportedError, match=r"PyTorch's Join with find_unused.*overlap\.Join\("):
        _train(ddp, zero, UNUSED_ON_SOME_RANKS, [ddp, zero], rank)
    ddp = wrap(MLP.model(), **MLP.ddp_options())
    zero = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.SGD, lr=0.1)
    register("deferred", ddp, zero)
    match = r"Join\(\[ddp, zero\]\)" if rank == 1 else "rank 1"
    error: Any = TrainingLoopError if rank == 1 else Exception
    with pytest.raises(error, match=match):
        _train(ddp, zero, MLP, [ddp], rank)


def test_a_forward_without_synchronization_before_a_step_that_is_due_is_refused() -> None:
    """On an accelerator, whose host would wait for a comparison."""
    with model_on(8, 2) as (ddp, x):
        zero = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.SGD, lr=0.1)
        chain(AllReduce(), ZeroStep(zero, deferred=True)).register(ddp)
        for _ in range(3):
            with ddp.no_sync():
                ddp(x).sum().backward()
            ddp(x).sum().backward()
            with ddp.no_sync(), pytest.raises(TrainingLoopError, match=r"own gradients to the mean.*after zero\.step"):
                ddp(x)
            with ddp.no_sync(), torch.no_grad():
                ddp(x)
            zero.step()


@on_ranks(2, group_timeout_s=20)
def test_under_join_gathers_have_one_order_beside_parameters_that_are_not_sharded(rank: int, world_size: int) -> None:
    """A bucket with such has a reduction more, so that it may be updated after buckets that have arrived later."""
    for options in ({"gather": "forward"}, {"deferred": True}):
        ddp = wrap(MLP.model(), **MLP.ddp_options())
        *sharded, last = ddp.parameters()
        zero = ZeroRedundancyOptimizer(sharded, torch.optim.AdamW, overlap_with_ddp=True, **ADAMW_OPTIONS)
        plain = torch.optim.SGD([last], lr=0.1)
        chain(ZeroStep(zero, **options)).register(ddp)
        with overlap.Join([ddp, zero, plain]) as join:
            for batch in join.iterate(MLP.batches(rank, steps=4 + rank)):
                zero.zero_grad()
                plain.zero_grad()
                mean_squared_error(ddp, batch).backward()
                zero.step()
                plain.step()
        zero.wait()
        assert_equal_ranks(list(ddp.parameters()), what=str(options))


@on_ranks(2)
def test_a_step_after_its_registration_was_removed_is_an_error(rank: int, world_size: int) -> None:
    ddp = wrap(MLP.model(), **MLP.ddp_options())
    zero = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.AdamW, **ADAMW_OPTIONS)
    registration = chain(ZeroStep(zero, deferred=True)).register(ddp)
    mean_squared_error(ddp, MLP.batch(0, rank)).backward()
    registration.remove()
    with pytest.raises(TrainingLoopError):
        zero.step()


@on_ranks(2, group_timeout_s=20)
def test_collectives_of_updates_behind_one_that_is_left_have_one_order_on_a_rank_that_replays(rank: int) -> None:
    for kind in ("sharded", "sharded, in local passes", "not sharded"):
        options = MLP.ddp_options() | {"find_unused_parameters": kind == "not sharded"}
        ddp = wrap(MLP.model(), **options)
        parameters = list(ddp.parameters())
        optimizer = OverlappedOptimizer(torch.optim.SGD(parameters[::2], lr=0.1))
        other: Any = OverlappedOptimizer(torch.optim.SGD(parameters[1::2], lr=0.1))
        update: Any = Step(other, deferred=True)
        if kind != "not sharded":
            other = ZeroRedundancyOptimizer(parameters[1::2], torch.optim.SGD, lr=0.1, master_dtype=torch.float32)
            update = ZeroStep(other, gather_wire=BFloat16())
        reducer = PostLocal(PostLocalSGDState(None, None, 1, False)) if "local" in kind else AllReduce()
        chain(reducer, Step(optimizer, deferred=True), update).register(ddp)
        with overlap.Join([ddp, optimizer, other]) as join:
            for batch in join.iterate(MLP.batches(rank, steps=2 + 2 * rank)):
                mean_squared_error(ddp, batch).backward()
                optimizer.step()
                other.step()
        assert_equal_ranks(parameters if "local" not in kind else parameters[1::2], what=kind)


@on_ranks(2)
def test_gathers_follow_parameters_that_the_loop_moves(rank: int) -> None:
    for wire, on_streams in ((None, True), (BFloat16(), False)):
        trained = []
        for moves in (False, True):
            ddp = wrap(MLP.model(), **MLP.ddp_options())
            zero = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.SGD, lr=0.1, master_dtype=torch.float32)
            with streams_replaced(IdleStreams()) if on_streams else contextlib.nullcontext():
                registration = chain(ZeroStep(zero, gather_wire=wire)).register(ddp)
                for step, batch in enumerate(MLP.batches(rank, steps=6)):
                    for parameter in ddp.parameters() if moves and step == 4 else ():
                        parameter.data = parameter.data.clone()
                    mean_squared_error(ddp, batch).backward()
                    zero.step()
                registration.remove()
            trained.append([parameter.detach().clone() for parameter in ddp.parameters()])
            assert_equal_ranks(trained[-1], what=f"{wire}, {moves=}")
        assert_parity(trained[1], trained[0], what=f"{wire}")


@on_ranks(2)
def test_a_reducer_that_reduces_in_some_passes_alone_leaves_the_others_to_the_sharded_update(rank: int) -> None:
    for deferred in (False, True):
        trained = []
        for warm_up in (False, True):
            ddp = wrap(MLP.model(), **MLP.ddp_options())
            zero = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.SGD, lr=0.1)
            reducer = PostLocal(PostLocalSGDState(None, None, 3, False)) if warm_up else AllReduce()
            chain(reducer, ZeroStep(zero, deferred=deferred)).register(ddp)
            for batch in MLP.batches(rank, steps=6):
                mean_squared_error(ddp, batch).backward()
                zero.step()
            trained.append(list(ddp.parameters()))
            assert_equal_ranks(trained[-1], what=f"{deferred=}, {warm_up=}")
        for one, other in zip(*trained, strict=True):
            torch.testing.assert_close(one, other)


@on_ranks(2, group_timeout_s=20)
def test_an_error_behind_the_last_collective_of_a_pass_is_told_in_the_step_that_compares_gradients(rank: int) -> None:
    def fail(bucket: Bucket) -> None:
        if (rank, bucket.step, bucket.is_last) == (1, 2, True):
            raise ValueError("the dog ate it")

    ddp, store = wrap(MLP.model(), **MLP.ddp_options()), dist.distributed_c10d._get_default_store()
    zero = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.SGD, lr=0.1)
    chain(AllReduce(), fail, ZeroStep(zero, deferred=True)).register(ddp)
    for step in range(2):
        mean_squared_error(ddp, MLP.batch(step, rank)).backward()
        zero.step()
    loss = mean_squared_error(ddp, MLP.batch(2, rank))
    if rank == 1:
        with pytest.raises(ValueError, match="the dog ate it"):
            loss.backward()
        store.wait(["told"])
        return
    loss.backward()
    start_s = time.monotonic()
    with pytest.raises(PeerError, match="rank 1: ValueError: the dog ate it"):
        zero.step()
    assert time.monotonic() - start_s < 10
    store.set("told", "")
