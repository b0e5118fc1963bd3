"""A reducer for each parameter: against plain DDP, against one reducer for all, and what is refused."""

import functools
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import overlap
from harness import assert_parity, on_ranks, wrap
from harness.models import DTYPES, MLP, TRANSFORMER, UNUSED_ON_SOME_RANKS, mean_squared_error
from overlap import (
    AllReduce,
    Bucket,
    Cast,
    ConfigurationError,
    Int4,
    PowerSGD,
    Quantize,
    RegistrationError,
    Step,
    as_stage,
    chain,
    register,
    route,
)

from .runs import SGD, plain, run


def _is_wide(name: str, parameter: Tensor) -> bool:
    return parameter.numel() > 16


def _is_vector(name: str, parameter: Tensor) -> bool:
    return parameter.ndim <= 1


def _sees_means(bucket: Bucket) -> None:
    assert bucket.is_mean and bucket.raw is not None


@on_ranks(2)
def test_exact_reducers_by_parameter_equal_plain_ddp_bit_for_bit(rank: int, world_size: int) -> None:
    # Two kinds in nearly every bucket, in runs and in several pieces.
    for case, rules in (
        (MLP, {"*.bias": AllReduce(), "*": Cast(torch.float32)}),
        (DTYPES, {_is_vector: AllReduce(), "*": AllReduce()}),
        (UNUSED_ON_SOME_RANKS, {_is_wide: Cast(torch.float32), _is_vector: AllReduce(), "*": AllReduce()}),
    ):
        options = {"gradient_as_bucket_view": case is MLP}
        found = run(rank, chain(route(rules), _sees_means).register, case, **options)
        assert_parity(found, run(rank, plain, case, **options), what=f"{case}, {rules}")


class _Recorded(AllReduce):
    """The exact mean, which notes what it was given."""

    def __init__(self) -> None:
        self.given: list[Bucket] = []

    async def __call__(self, bucket: Bucket) -> None:
        self.given.append(bucket)
        await super().__call__(bucket)


@on_ranks(2)
def test_a_bucket_is_split_without_copying_what_lies_in_one_run(rank: int, world_size: int) -> None:
    # One bucket: 1.bias, 1.weight, 0.bias, 0.weight, each with an own place.
    ddp = wrap(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), bucket_cap_mb=1)
    wholes: list[Bucket] = []

    def see(bucket: Bucket) -> None:
        wholes.append(bucket)

    first, second, alone = _Recorded(), _Recorded(), _Recorded()
    chain(see, route({"1.weight": alone, "*.bias": first, "*": second})).register(ddp)
    for _ in range(3):
        ddp(torch.ones(2, 4)).sum().backward()
    whole = wholes[-1]
    start = whole.buffer.untyped_storage().data_ptr()
    assert alone.given[-1].buffer.untyped_storage().data_ptr() == start, "what lies in one run is not copied"
    assert first.given[-1].buffer.untyped_storage().data_ptr() != start, "what lies in several is packed"
    for reducer in (first, second, alone):
        given = reducer.given[-1]
        assert given.index == whole.index and given.is_last and given.divisor == 2
        assert given.buffer.numel() == sum(p.numel() for p in given.parameters)
    only = _Recorded()
    seen = wrap(nn.Linear(4, 4))
    chain(route({"*": only})).register(seen)
    seen(torch.ones(2, 4)).sum().backward()
    assert only.given[0].raw is not None, "a bucket of one kind is DDP's own"


@on_ranks(2)
def test_compressing_reducers_by_parameter_equal_the_same_by_hand(rank: int, world_size: int) -> None:
    # PowerSGD reduces vectors exactly itself, and keeps its memory by name.
    factors = functools.partial(PowerSGD, rank=1, min_compression_rate=1)
    by_rule = chain(route({_is_vector: AllReduce(), "*": factors()})).register
    reference = run(rank, chain(factors()).register, TRANSFORMER)
    with mock.patch.object(PowerSGD, "_plan", autospec=True, side_effect=PowerSGD._plan) as called:
        assert_parity(run(rank, by_rule, TRANSFORMER), reference, what="PowerSGD")
    assert len({call.args[1].index for call in called.call_args_list}) > 2


class _Fails(AllReduce):
    async def __call__(self, bucket: Bucket) -> None:
        if bucket.step == 2:
            raise ValueError("boom")
        await super().__call__(bucket)


@on_ranks(2)
def test_a_failure_or_a_nan_of_one_reducer_leaves_the_memory_of_the_others(rank: int, world_size: int) -> None:
    ddp = wrap(MLP.model())
    feedback = Quantize(Int4(), error_feedback=True)
    register(ddp, route({"*.bias": _Fails(), "*": feedback}))
    for step in range(4):
        before = feedback.state_dict().get("error", {})
        if step == 2:
            with pytest.raises(ValueError, match="boom") as caught:
                mean_squared_error(ddp, MLP.batch(step, rank)).backward()
            assert (
                "raised in stage _Fails(), bucket" in caught.value.__notes__[0] and "bias" in caught.value.__notes__[0]
            )
            assert_parity(feedback.state_dict()["error"], before, what="the memory of another reducer")
        else:
            mean_squared_error(ddp, MLP.batch(step, rank)).backward()
    # A result of one reducer that is not finite: nothing of the pass is kept by the others, on any rank.
    before = feedback.state_dict()["error"]
    ddp.module[8].bias.register_hook(lambda gradient: gradient * (float("nan") if rank == 1 else 1.0))
    mean_squared_error(ddp, MLP.batch(9, rank)).backward()
    assert ddp.module[8].bias.grad.isnan().any() and ddp.module[0].weight.grad.isfinite().all()
    assert_parity(feedback.state_dict()["error"], before, what="memory after another reducer's NaN")


@on_ranks(2)
def test_what_does_not_fit_the_model_is_refused_at_registration(rank: int, world_size: int) -> None:
    def attached(rules: Any, *, model: nn.Module | None = None) -> None:
        register(wrap(MLP.model() if model is None else model), route(rules))

    with pytest.raises(ConfigurationError, match=r'matches the parameter 0.bias of shape \(16,\).*"\*": AllReduce\(\)'):
        attached({"*.weight": AllReduce()})
    with pytest.raises(ConfigurationError, match=r"rule '\*.wieght' of route.*no parameter.*0.weight, 0.bias"):
        attached({"*.wieght": AllReduce(), "*": AllReduce()})
    with pytest.raises(ConfigurationError, match=r"rule _is_wide .*first to match no parameter.*further to the front"):
        attached({"*.weight": AllReduce(), _is_wide: Cast(torch.float32), "*": AllReduce()})
    attached({"*.weight": AllReduce(), "*.bias": Cast(torch.float32), "*": AllReduce()})  # Nothing may be left for "*".
    ddp, stage = wrap(MLP.model()), route({"*": AllReduce()})
    register(ddp, stage)
    with pytest.raises(RegistrationError, match="registered with a model already"):
        register(wrap(MLP.model()), stage)
    by_hook = wrap(MLP.model())
    by_hook.register_comm_hook(None, overlap.as_hook(route({"*": AllReduce()})))
    with pytest.raises(ConfigurationError, match=r"needs the parameters' names.*overlap.register"):
        mean_squared_error(by_hook, MLP.batch(0, rank)).backward()
    with pytest.raises(overlap.CollectiveError, match=r"(?s)rank 1 registers route.*but rank 0 registers route"):
        attached({"*.bias" if rank == 0 else "*.weight": AllReduce(), "*": Cast(torch.float32)})


async def _transform(bucket: Bucket) -> None:
    return


def test_what_is_not_a_reducer_by_rule_is_refused() -> None:
    post_local = overlap.hooks.PostLocal(overlap.hooks.PostLocalSGDState(None, None, 3))
    for rules, message in (
        ([AllReduce()], "reducers by rule"),
        ({nn.Linear: AllReduce()}, r"function \(name, parameter\) -> bool, got"),
        ({"*": 3}, "3 is not a stage"),
        ({"*": _transform}, "is not a reducer.*@overlap.reducer"),
        ({"*": Step(SGD(nn.Linear(2, 2).parameters()))}, "is not a reducer.*updates come after"),
        ({"*": chain(_transform, AllReduce())}, "the transform _transform.*some of the parameters"),
        ({"*": route({"*": AllReduce()})}, r"one route\({...}\)"),
        ({"*": Cast(torch.bfloat16, as_stage(lambda state, bucket: None))}, "calls a communication hook"),
        ({"*": post_local}, r"PostLocal\(state, route"),
    ):
        with pytest.raises(ConfigurationError, match=message):
            route(rules)


@on_ranks(2)
def test_state_is_kept_by_reducer_and_fits_the_same_rules_only(rank: int, world_size: int) -> None:
    def made(rule: str = "*.weight") -> Any:
        ddp, stage = wrap(MLP.model()), route({rule: Quantize(Int4(), error_feedback=True), "*": AllReduce()})
        register(ddp, stage)
        return ddp, stage

    ddp, stage = made()
    for step in range(3):
        mean_squared_error(ddp, MLP.batch(step, rank)).backward()
    state = overlap.state_dict(ddp)
    assert set(state["stages"]["state"]) == {"0"}
    moved, _ = made("*[02].weight")
    with pytest.raises(ConfigurationError, match=r"parameters that the model does not have \(.*4.weight.*\)"):
        overlap.load_state_dict(moved, None, state)
    early = route({"*.bias": Quantize(Int4(), error_feedback=True), "*": AllReduce()})
    early.load_state_dict(stage.state_dict())
    with pytest.raises(ConfigurationError, match=r"parameters that the model does not have"):
        register(wrap(MLP.model()), early)
