"""Reducers and the hooks of PyTorch's names, against PyTorch's own."""

from __future__ import annotations

import copy
import functools
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

import overlap
from harness import assert_parity, run_ranks, run_threads, train, wrap
from harness.models import DTYPES, MLP, TRANSFORMER
from overlap import (
    AllGather,
    AllReduce,
    Cast,
    ConfigurationError,
    NoReduction,
    OverlappedOptimizer,
    RegistrationError,
    Stage,
    Step,
    as_hook,
    as_stage,
    chain,
    register,
)

SGD = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)


def _train(rank: int, attach: Callable[[Any], Any], case: Any = MLP, steps: int = 5, **options: Any) -> list[Any]:
    ddp = wrap(case.model(), **{**case.ddp_options(), **options})
    attach(ddp)
    return train(ddp, SGD(ddp.parameters()), case.batches(rank, steps=steps), gradients=True)


def _plain_world_sizes(rank: int, world_size: int) -> None:
    for case in (MLP, DTYPES, TRANSFORMER):
        reference = _train(rank, lambda ddp: None, case)
        assert_parity(_train(rank, chain(AllReduce()).register, case), reference, what=f"AllReduce, {case}")
        gathered = _train(rank, chain(AllGather()).register, case)
        if world_size == 2:
            assert_parity(gathered, reference, what=f"AllGather, {case}")
        else:
            reason = "sums over ranks are taken in another order than the all-reduce's"
            for ours, plain in zip(gathered, reference, strict=True):
                assert_parity(
                    ours.gradients,
                    plain.gradients,
                    what=f"AllGather, {case}",
                    exact=False,
                    rtol=0.02,  # One part in 256 for a bfloat16 gradient, and what five steps make of it.
                    atol=1e-3,
                    reason=reason,
                )


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_all_reduce_equals_plain_ddp_bit_for_bit_at_any_world_size(world_size: int) -> None:
    run_ranks(_plain_world_sizes, world_size)


def _names_of_torch(rank: int, world_size: int) -> None:
    """Each hook of a PyTorch name does what PyTorch's does, however it is registered."""
    pairs: dict[str, Any] = {
        "allreduce_hook": default_hooks.allreduce_hook,
        "fp16_compress_hook": default_hooks.fp16_compress_hook,
    }
    for name, theirs in pairs.items():
        ours = getattr(overlap, name)
        reference = _train(rank, functools.partial(_register_with_ddp, hook=theirs))
        for way in (
            functools.partial(register, stage=ours),
            functools.partial(register, stage=ours, state=dist.group.WORLD),
            chain(ours).register,
            functools.partial(_register_with_ddp, hook=ours),
            functools.partial(_register_with_ddp, hook=ours, state=dist.group.WORLD),
        ):
            assert_parity(_train(rank, way), reference, what=name)
    # PyTorch's bf16 hook refuses Gloo; the same arithmetic by hand is the reference.
    reference = _train(rank, functools.partial(_register_with_ddp, hook=_bf16_by_hand))
    for hook in (overlap.bf16_compress_hook, overlap.bf16_compress_wrapper(overlap.allreduce_hook)):
        for attach in (functools.partial(register, stage=hook), functools.partial(_register_with_ddp, hook=hook)):
            assert_parity(_train(rank, attach), reference, what=repr(hook))
    wrapped = overlap.fp16_compress_wrapper(default_hooks.allreduce_hook)
    theirs = default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook)
    reference = _train(rank, functools.partial(_register_with_ddp, hook=theirs))
    assert_parity(_train(rank, functools.partial(register, stage=wrapped)), reference, what="a foreign hook in fp16")


def _register_with_ddp(ddp: Any, hook: Any, state: Any = None) -> None:
    ddp.register_comm_hook(state, hook)


def _bf16_by_hand(state, bucket):  # type: ignore[no-untyped-def]
    compressed = bucket.buffer().to(torch.bfloat16).div_(dist.get_world_size())
    work = dist.all_reduce(compressed, async_op=True)
    return work.get_future().then(lambda future: bucket.buffer().copy_(future.value()[0]))


def test_hooks_of_torchs_names_equal_torchs() -> None:
    run_ranks(_names_of_torch, 2)


def _no_reduction(rank: int, world_size: int) -> None:
    reference = MLP.model()
    nn.functional.mse_loss(reference(*MLP.batch(0, rank).inputs), MLP.batch(0, rank).target).backward()
    for attach in (
        lambda ddp: register(ddp, overlap.noop_hook),
        lambda ddp: chain(NoReduction()).register(ddp),
        lambda ddp: ddp.register_comm_hook(None, overlap.noop_hook),
    ):
        (record,) = _train(rank, attach, steps=1)
        own = {name: p.grad for name, p in reference.named_parameters()}
        assert_parity(record.gradients, own, what="each rank's own gradient")


def test_no_reduction_leaves_each_rank_its_own_gradient() -> None:
    run_ranks(_no_reduction, 2)


def _cast_composes(rank: int, world_size: int) -> None:
    reference = _train(rank, chain(Cast(torch.bfloat16)).register)
    assert_parity(
        _train(rank, chain(Cast(torch.bfloat16, Cast(torch.bfloat16, AllReduce()))).register),
        reference,
        what="a cast to what it is already",
    )
    half = _train(rank, chain(Cast(torch.float16)).register, DTYPES)
    for record in half:
        for gradient in record.gradients.values():
            assert torch.isfinite(gradient).all()
    plain = _train(rank, lambda ddp: None)
    assert_parity(
        [record.parameters for record in reference],
        [record.parameters for record in plain],
        what="bf16 gradients",
        exact=False,
        rtol=0.0,
        atol=0.02,
        reason="bfloat16 keeps 8 bits of each gradient",
    )
    assert not torch.equal(reference[-1].parameters["0.weight"], plain[-1].parameters["0.weight"]), "it did round"


def _complex(rank: int, world_size: int) -> None:
    """DDP holds complex gradients as pairs of real numbers; parameters stay complex."""
    records = []
    for make in (lambda ddp, sgd: sgd, _overlapped):
        torch.manual_seed(0)
        ddp = wrap(nn.Sequential(*(nn.Linear(8, 8, dtype=torch.complex64) for _ in range(3))))
        optimizer = make(ddp, SGD(ddp.parameters()))
        for step in range(4):
            optimizer.zero_grad()
            ddp(torch.full((2, 8), complex(step, rank + 1), dtype=torch.complex64)).abs().sum().backward()
            optimizer.step()
        records.append({name: p.detach().clone() for name, p in ddp.module.named_parameters()})
    assert_parity(records[1], records[0], what="complex parameters")
    ddp = wrap(nn.Linear(8, 8, dtype=torch.complex64))
    register(ddp, overlap.bf16_compress_hook)
    ddp(torch.ones(2, 8, dtype=torch.complex64)).abs().sum().backward()
    assert ddp.module.weight.grad.imag.abs().sum() > 0, "no part is lost"


def _overlapped(ddp: Any, optimizer: Any) -> OverlappedOptimizer:
    overlapped = OverlappedOptimizer(optimizer)
    chain(AllReduce(), Step(overlapped)).register(ddp)
    return overlapped


def test_complex_parameters() -> None:
    run_ranks(_complex, 2)


def test_cast_composes_and_keeps_to_its_precision() -> None:
    run_ranks(_cast_composes, 2)


class _CallableHook:
    def __call__(self, process_group: Any, gradients: Any) -> torch.futures.Future[torch.Tensor]:
        return default_hooks.allreduce_hook(process_group, gradients)


def _string_annotated(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    return default_hooks.allreduce_hook(state, bucket)


def _any_callable(rank: int, world_size: int) -> None:
    reference = _train(rank, lambda ddp: None)
    hooks = {
        "a function with string annotations": _string_annotated,
        "a lambda with other names": lambda s, b: _string_annotated(s, bucket=b),
        "a callable instance": _CallableHook(),
        "a partial": functools.partial(default_hooks._compress_hook, torch.float32),
        "varargs": lambda *arguments: _string_annotated(arguments[0], arguments[1]),
    }
    for name, hook in hooks.items():
        for attach in (
            functools.partial(register, stage=hook),
            functools.partial(register, stage=hook, state=dist.group.WORLD),
            lambda ddp: chain(hook).register(ddp),  # noqa: B023
        ):
            assert_parity(_train(rank, attach), reference, what=name)

    async def mean(bucket: overlap.Bucket) -> None:
        bucket.buffer.mul_(1 / bucket.divisor)
        await overlap.hooks.all_reduce(bucket.buffer, group=bucket.group)

    class Plain:
        async def __call__(self, bucket: overlap.Bucket) -> None:
            await mean(bucket)

    for stage in (mean, Plain()):
        assert_parity(_train(rank, functools.partial(register, stage=stage)), reference, what=repr(stage))
    hook = as_hook(chain(AllReduce()))
    assert_parity(_train(rank, functools.partial(_register_with_ddp, hook=hook)), reference, what="as_hook")
    # One hook object, as PyTorch's are: several models at once.
    assert_parity(_train(rank, functools.partial(_register_with_ddp, hook=hook)), reference, what="as_hook again")


def test_any_callable_is_accepted_as_a_hook() -> None:
    run_ranks(_any_callable, 2)


def _foreign_hook_then_step(rank: int, world_size: int) -> None:
    """PyTorch's PowerSGD, where it works (one bucket), followed by our update."""
    options = {"bucket_cap_mb": 25}

    def state() -> Any:
        return powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=2)

    batches = MLP.batches(rank, steps=6)
    ddp = wrap(MLP.model(), **options)
    ddp.register_comm_hook(state(), powerSGD_hook.powerSGD_hook)
    reference = train(ddp, SGD(ddp.parameters()), batches, min_buckets=1)
    ddp = wrap(MLP.model(), **options)
    optimizer = OverlappedOptimizer(SGD(ddp.parameters()))
    chain(as_stage(powerSGD_hook.powerSGD_hook, state()), Step(optimizer)).register(ddp)
    assert_parity(train(ddp, optimizer, batches, min_buckets=1), reference, what="PyTorch's PowerSGD, then Step")


def test_a_foreign_hook_chains_with_an_update() -> None:
    run_ranks(_foreign_hook_then_step, 2)


def _groups(rank: int, world_size: int) -> None:
    """Models on subgroups, and ranks that are in different numbers of groups."""
    mine = None
    for ranks in ((0, 1), (2, 3), (0, 1, 2)):
        group = dist.new_group(list(ranks))
        if rank in ranks and mine is None:
            mine = group
    assert mine is not None
    place = rank % 2
    reference = _train(place, lambda ddp: None, process_group=mine)
    assert_parity(_train(place, chain(AllReduce()).register, process_group=mine), reference, what="a subgroup")
    by_state = _train(place, lambda ddp: ddp.register_comm_hook(mine, overlap.allreduce_hook), process_group=mine)
    assert_parity(by_state, reference, what="a subgroup as the hook's state")
    # The state wins over the model's own group: each rank trains alone here, but the hook reduces over the pair.
    other = _train(place, lambda ddp: register(ddp, overlap.allreduce_hook, mine))
    assert_parity(other, reference, what="a group in the state, another of the model")


def test_process_groups_of_models_and_of_states() -> None:
    run_ranks(_groups, 4)


def test_what_cannot_be_chained_is_refused_with_the_remedy() -> None:
    layer = nn.Linear(2, 2)
    step = Step(SGD(layer.parameters()))
    with pytest.raises(ConfigurationError, match="at least one stage"):
        chain()
    with pytest.raises(ConfigurationError, match=r"Step\(SGD, interleaved\) needs a reducer .*chain\(AllReduce"):
        chain(step)
    with pytest.raises(ConfigurationError, match=r"AllReduce\(\) \(reducer\) cannot follow Step"):
        chain(AllReduce(), step, AllReduce())
    with pytest.raises(ConfigurationError, match="cannot follow"):
        chain(AllReduce(), AllGather())
    with pytest.raises(ConfigurationError, match=r"AllReduce is a class.*AllReduce\(\.\.\.\)"):
        chain(AllReduce)
    with pytest.raises(ConfigurationError, match="3 is not a stage"):
        chain(3)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match=r"floating-point torch.dtype .*got torch.int8"):
        Cast(torch.int8)
    with pytest.raises(ConfigurationError, match="wraps a reducer"):
        Cast(torch.float16, step)
    with pytest.raises(ConfigurationError, match=r"cannot be called with \(state, bucket\)"):
        as_stage(lambda only_one: None)
    with pytest.raises(ConfigurationError, match="process group or None, got str"):
        as_stage(overlap.allreduce_hook, "nccl")
    with pytest.raises(ConfigurationError, match="no state to load"):
        AllReduce().load_state_dict({"a": 1})
    assert repr(chain(chain(Cast(torch.bfloat16)), step)) == (
        "chain(Cast(bfloat16, AllReduce()), Step(SGD, interleaved))"
    )


def _registering(rank: int, world_size: int) -> None:
    with pytest.raises(RegistrationError, match="Linear is not a DistributedDataParallel model"):
        register(nn.Linear(2, 2), AllReduce())  # type: ignore[arg-type]
    ddp = wrap(MLP.model(), **MLP.ddp_options())
    registration = chain(AllReduce()).register(ddp)
    with pytest.raises(RegistrationError, match=r"has chain\(AllReduce\(\)\) registered already.*remove"):
        chain(AllReduce()).register(ddp)
    with pytest.raises(ConfigurationError, match="keeps its own state"):
        register(ddp, AllReduce(), state=1)
    registration.remove()
    registration.remove()
    assert "removed" in repr(registration)

    taken = wrap(MLP.model(), **MLP.ddp_options())
    taken.register_comm_hook(None, default_hooks.allreduce_hook)
    with pytest.raises(RegistrationError, match="has the communication hook allreduce_hook already"):
        chain(AllReduce()).register(taken)
    builtin = wrap(MLP.model(), **MLP.ddp_options())
    builtin._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE)
    with pytest.raises(RegistrationError, match="communication hook"):
        chain(AllReduce()).register(builtin)

    # In and out and in again, the model trains as plain DDP does.
    batches = MLP.batches(rank, steps=9)
    reference = train(plain := wrap(MLP.model(), **MLP.ddp_options()), SGD(plain.parameters()), batches)
    optimizer = SGD(ddp.parameters())
    schedule: Any = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.9)
    for step, batch in enumerate(batches):
        if step % 3 == 0:
            registration = chain(AllReduce()).register(ddp)
        if step % 3 == 2:
            registration.remove()
        optimizer.zero_grad()
        nn.functional.mse_loss(ddp(*batch.inputs), batch.target).backward()
        optimizer.step()
        schedule.step()
        parameters = dict(ddp.module.named_parameters())
        assert_parity(parameters, reference[step].parameters, what=f"step {step}")


def test_registering_twice_with_foreign_hooks_and_removing() -> None:
    run_ranks(_registering, 2)


class _Memory(Stage):
    """The mean, and how often each parameter was seen."""

    def __init__(self) -> None:
        self.seen: dict[str, int] = {}

    async def __call__(self, bucket: overlap.Bucket) -> None:
        for name in bucket.names:
            self.seen[name] = self.seen.get(name, 0) + 1
        await AllReduce()(bucket)

    def state_dict(self) -> dict[str, Any]:
        return dict(self.seen)

    def load_state_dict(self, state_dict: Any) -> None:
        self.seen = dict(state_dict)


def _state_by_name(rank: int, world_size: int) -> None:
    plan = chain(_Memory(), Step(SGD((ddp := wrap(MLP.model(), **MLP.ddp_options())).parameters())))
    plan.register(ddp)
    for step in range(3):
        ddp(*MLP.batch(step, rank).inputs).sum().backward()
    names = [name for name, _ in MLP.model().named_parameters()]
    assert plan.state_dict() == {"0": dict.fromkeys(names, 3)}, "by name, however often buckets are rebuilt"
    again = chain(_Memory())
    again.load_state_dict(plan.state_dict())
    assert again.state_dict() == plan.state_dict()
    with pytest.raises(ConfigurationError, match=r"\['7'\] for a chain of 1 stages"):
        again.load_state_dict({"7": {}})
    by_hook = wrap(MLP.model(), **MLP.ddp_options())
    by_hook.register_comm_hook(None, as_hook(_Memory()))
    with pytest.raises(ConfigurationError, match=r"overlap.register\(ddp, hook\)"):
        by_hook(*MLP.batch(0, rank).inputs).sum().backward()


def test_memory_is_kept_by_parameter_name() -> None:
    run_ranks(_state_by_name, 2)


def _inline(rank: int, world_size: int) -> None:
    reference = _train(rank, lambda ddp: None)
    for stage in (AllReduce(), AllGather(), Cast(torch.float32)):
        assert_parity(_train(rank, chain(stage).register), reference, what=f"{stage!r} on autograd's thread")


def test_without_gloo_stages_run_on_autograds_thread() -> None:
    run_threads(_inline, 2)


def test_hooks_pickle_by_name() -> None:
    for name in (
        "allreduce_hook",
        "allgather_then_aggregate_hook",
        "fp16_compress_hook",
        "bf16_compress_hook",
        "noop_hook",
    ):
        hook = getattr(overlap, name)
        assert pickle.loads(pickle.dumps(hook)) is hook
    wrapped = pickle.loads(pickle.dumps(overlap.fp16_compress_wrapper(overlap.allreduce_hook)))
    assert repr(wrapped.stage(None)) == "Cast(float16, AllReduce())"
    with pytest.raises(TypeError, match="belongs to one model"):
        pickle.dumps(as_hook(AllReduce()))


def _copies(rank: int, world_size: int) -> None:
    """A copy of a registered model is a model of its own, with nothing registered."""
    ddp = wrap(MLP.model(), **MLP.ddp_options())
    optimizer = OverlappedOptimizer(SGD(ddp.parameters()))
    chain(AllReduce(), Step(optimizer)).register(ddp)
    for step in range(2):
        ddp(*MLP.batch(step, rank).inputs).sum().backward()
        optimizer.step()
    copied = copy.deepcopy(ddp)
    copied(*MLP.batch(0, rank).inputs)
    assert all(p.grad is not None for p in ddp.parameters()), "the copy's forward clears nothing of the original"
    assert_parity(copied.module.state_dict(), ddp.module.state_dict(), what="a copy")
    again = OverlappedOptimizer(SGD(copied.parameters()))
    chain(AllReduce(), Step(again)).register(copied)
    copied(*MLP.batch(2, rank).inputs).sum().backward()
    again.step()


def test_a_model_with_a_registration_can_be_copied() -> None:
    run_ranks(_copies, 2)
