"""Several updates in one chain, each of its own parameters with its own lifecycle, and their common reduction."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed.algorithms.join import Join as TorchJoin
from torch.optim.lr_scheduler import StepLR

from harness import assert_parity, run_ranks, wrap
from harness.errors import RankFailed
from harness.models import MLP, Batch, mean_squared_error
from overlap import (
    AllReduce,
    Cast,
    CollectiveError,
    ConfigurationError,
    OverlappedOptimizer,
    ReduceScatter,
    Step,
    UnsupportedError,
    ZeroRedundancyOptimizer,
    ZeroStep,
    chain,
)
from overlap.hooks import Transform
from overlap.optim import FunctionalSGD

MUON: dict[str, Any] = {"lr": 0.02, "weight_decay": 0.1}
ADAMW: dict[str, Any] = {"lr": 0.01, "weight_decay": 0.1}


def divided(ddp: Any) -> tuple[list[torch.nn.Parameter], list[torch.nn.Parameter]]:
    """The matrices, and all other parameters."""
    parameters = list(ddp.parameters())
    return [p for p in parameters if p.ndim == 2], [p for p in parameters if p.ndim != 2]


def plain_pair(ddp: Any) -> tuple[Any, Any]:
    matrices, others = divided(ddp)
    return torch.optim.Muon(matrices, **MUON), torch.optim.AdamW(others, **ADAMW)


def zero_pair(ddp: Any) -> tuple[Any, Any]:
    matrices, others = divided(ddp)
    return (
        ZeroRedundancyOptimizer(matrices, torch.optim.Muon, **MUON),
        ZeroRedundancyOptimizer(others, torch.optim.AdamW, **ADAMW),
    )


def mixed_pair(ddp: Any) -> tuple[Any, Any]:
    return zero_pair(ddp)[0], OverlappedOptimizer(plain_pair(ddp)[1])


# The pair, and the stages that update with it; tests/compositions has those in which both have one form.
FORMS: dict[str, tuple[Callable[[Any], tuple[Any, Any]], Callable[[Any, Any], list[Any]]]] = {
    "one deferred": (zero_pair, lambda m, a: [ZeroStep(m), ZeroStep(a, deferred=True)]),
    "gather in forward": (zero_pair, lambda m, a: [ZeroStep(m, gather="forward"), ZeroStep(a, gather="forward")]),
    "one automatic": (zero_pair, lambda m, a: [ZeroStep(m, automatic=True, deferred=True), ZeroStep(a)]),
    "beside whole, deferred": (mixed_pair, lambda m, a: [ZeroStep(m, deferred=True), Step(a, deferred=True)]),
    "beside whole, after a reducer": (mixed_pair, lambda m, a: [AllReduce(), ZeroStep(m), Step(a)]),
}


def _parity(rank: int, world_size: int) -> None:
    for name, (pair, stages) in FORMS.items():
        plain, ddp = (wrap(MLP.model(), **MLP.ddp_options()) for _ in range(2))
        reference, ours = plain_pair(plain), pair(ddp)
        registration = chain(*stages(*ours)).register(ddp)
        schedulers = [StepLR(one, 2, gamma=0.5) for one in (reference[0], ours[0])]
        is_automatic = name == "one automatic"
        for step in range(5):
            for model, pair_of in ((plain, reference), (ddp, ours)):
                for optimizer in pair_of:
                    optimizer.zero_grad()
                mean_squared_error(model, MLP.batch(step, rank)).backward()
                for optimizer in pair_of[is_automatic and model is ddp :]:
                    optimizer.step()
            for scheduler in schedulers:
                scheduler.step()
        registration.remove()
        assert_parity(list(ddp.parameters()), list(plain.parameters()), what=name)
        ours[0].consolidate_state_dict(to=None)
        assert_parity(ours[0].state_dict()["state"], reference[0].state_dict()["state"], what=f"state, {name}")


def test_two_optimizers_equal_the_same_two_on_plain_ddp() -> None:
    run_ranks(_parity, 2)


def _registered(rank: int, world_size: int) -> None:
    ddp = wrap(MLP.model(), **MLP.ddp_options())
    weights, biases = divided(ddp)
    some = OverlappedOptimizer(torch.optim.SGD(weights, lr=0.1))
    others = OverlappedOptimizer(torch.optim.AdamW([*biases[1:], weights[2]], **ADAMW))
    with pytest.raises(ConfigurationError, match=r"4.weight is a parameter of both Step\(SGD, .*\) and Step\(AdamW, "):
        chain(AllReduce(), Step(some), Step(others)).register(ddp)
    with pytest.raises(ConfigurationError, match=r"0.weight is a parameter of both"):
        chain(AllReduce(), Step(some), Step(FunctionalSGD([], lr=0.1))).register(ddp)
    zero = ZeroRedundancyOptimizer(weights[1:], torch.optim.AdamW, **ADAMW)
    with pytest.raises(ConfigurationError, match=r"2.weight is a parameter of both ZeroStep\(AdamW, .* and Step"):
        chain(ZeroStep(zero), Step(some)).register(ddp)
    fine = OverlappedOptimizer(torch.optim.AdamW(biases[1:], **ADAMW))
    registration = chain(AllReduce(), Step(some), Step(fine)).register(ddp)
    assert "Step(SGD, interleaved) updates 5 parameters (0.weight, " in repr(registration)
    assert repr(registration).endswith("no update has 0.bias>")
    plain = wrap(MLP.model(), **MLP.ddp_options())
    for model in (plain, ddp):
        mean_squared_error(model, MLP.batch(0, rank)).backward()
    assert torch.equal(ddp.module[0].bias.grad, plain.module[0].bias.grad)
    some.step()
    fine.step()
    fine.add_param_group({"params": [weights[3]]})
    with pytest.raises(ConfigurationError, match=r"6.weight is a parameter of both"):
        mean_squared_error(ddp, MLP.batch(1, rank)).backward()


def test_a_parameter_of_two_updates_is_an_error_that_names_it() -> None:
    run_ranks(_registered, 2)


def _divided_otherwise(rank: int, world_size: int) -> None:
    ddp = wrap(MLP.model(), **MLP.ddp_options())
    weights, biases = divided(ddp)
    first, second = (weights, biases) if rank == 0 else ([*weights, biases[0]], biases[1:])
    some, others = (OverlappedOptimizer(torch.optim.SGD(p, lr=0.1)) for p in (first, second))
    chain(AllReduce(), Step(some), Step(others)).register(ddp)


def test_ranks_that_divide_parameters_otherwise_are_told_so() -> None:
    with pytest.raises(RankFailed) as raised:
        run_ranks(_divided_otherwise, 2)
    assert CollectiveError.__name__ in str(raised.value)
    assert "is 6 parameters (" in str(raised.value)


def _joined_by_torch(rank: int, world_size: int) -> None:
    for is_deferred in (False, True):
        plain, ddp = (wrap(MLP.model(), **MLP.ddp_options()) for _ in range(2))
        reference, pair = plain_pair(plain), zero_pair(ddp)
        chain(*(ZeroStep(one, deferred=is_deferred) for one in pair)).register(ddp)
        runs = [(ddp, pair, pair[::-1])] if is_deferred else [(plain, reference, ()), (ddp, pair, pair[::-1])]
        told = pytest.raises(UnsupportedError, match="in which order") if is_deferred else contextlib.nullcontext()
        with told:
            for model, optimizers, joinables in runs:
                with TorchJoin([model, *joinables]):
                    for place in range(2 + 2 * rank):
                        for optimizer in optimizers:
                            optimizer.zero_grad()
                        mean_squared_error(model, MLP.batch(place, rank)).backward()
                        for optimizer in optimizers:
                            optimizer.step()
            assert_parity(list(ddp.parameters()), list(plain.parameters()), what="joined by PyTorch")


def test_pytorchs_join_replays_what_is_done_in_backward_and_refuses_the_rest() -> None:
    run_ranks(_joined_by_torch, 2)


class _Looks(Transform):
    """A transform that keeps what it sees of each bucket."""

    def __init__(self, *, needs_mean: bool = True) -> None:
        super().__init__()
        self.needs_mean = needs_mean
        self.seen: list[Any] = []

    async def __call__(self, bucket: Any) -> None:
        self.seen.append((bucket, bucket.buffer.clone()))


def _kinds(*stages: Any) -> list[str]:
    return [type(stage).__name__ for stage in chain(*stages).sequence]


def _inserted(rank: int, world_size: int) -> None:
    ddp = wrap(MLP.model(), **MLP.ddp_options())
    muon, adamw = zero_pair(ddp)
    whole = OverlappedOptimizer(torch.optim.AdamW(divided(ddp)[1], **ADAMW))
    mean, own = _Looks(), _Looks(needs_mean=False)
    assert _kinds(ZeroStep(muon)) == ["ZeroStep"]
    assert _kinds(own, ZeroStep(muon), mean) == ["_Looks", "ZeroStep", "_Looks"]
    assert _kinds(AllReduce(), mean, ZeroStep(muon)) == ["AllReduce", "_Looks", "ZeroStep"]
    assert _kinds(own, mean, own, ZeroStep(muon)) == ["_Looks", "ReduceScatter", "_Looks", "_Looks", "ZeroStep"]
    assert _kinds(own, ZeroStep(muon), ZeroStep(adamw)) == ["_Looks", "ReduceScatter", "ZeroStep", "ZeroStep"]
    assert _kinds(ZeroStep(muon), Step(whole)) == ["ReduceScatter", "ZeroStep", "Step"]
    assert _kinds(Step(whole), ZeroStep(muon)) == ["ReduceScatter", "Step", "ZeroStep"]
    assert _kinds(chain(ZeroStep(muon)), chain(ZeroStep(adamw))) == ["ReduceScatter", "ZeroStep", "ZeroStep"]
    assert chain(ZeroStep(muon), ZeroStep(adamw)).sequence[0].zeros == (muon, adamw)
    assert repr(ReduceScatter(muon, adamw)) == "ReduceScatter(Muon, AdamW)"
    assert "Muon by parameter, AdamW by element" in ReduceScatter(muon, adamw).signature


def _refused(rank: int, world_size: int) -> None:
    ddp = wrap(MLP.model(), **MLP.ddp_options())
    muon, adamw = zero_pair(ddp)
    for zeros, message in (
        ((), "takes the optimizers"),
        ((muon, muon), "each once, got 2"),
        ((ddp,), "ReduceScatt"),
    ):
        with pytest.raises(ConfigurationError, match=message):
            ReduceScatter(*zeros)
    for stage, message in (
        (
            chain(ReduceScatter(muon, adamw), ZeroStep(muon)),
            "part of the mean for AdamW, but no ZeroStep of it follows",
        ),
        (chain(Cast(torch.float64, ReduceScatter(muon)), ZeroStep(muon)), "which a stage around it cannot know"),
        (ReduceScatter(muon), "no ZeroStep of it follows"),
    ):
        with pytest.raises(ConfigurationError, match=message):
            stage.register(ddp) if hasattr(stage, "register") else chain(stage).register(ddp)
    # The model and the optimizers are as before.
    chain(ZeroStep(muon), ZeroStep(adamw)).register(ddp)
    mean_squared_error(ddp, MLP.batch(0, rank)).backward()
    muon.step()
    adamw.step()


def test_a_chain_gets_the_reduction_of_its_sharded_update_where_others_need_the_mean() -> None:
    run_ranks(_inserted, 1)


def test_a_reduction_without_its_update_is_an_error_at_registration() -> None:
    run_ranks(_refused, 2)


def _clipped(rank: int, world_size: int) -> None:
    plain, ddp = (wrap(MLP.model(), **MLP.ddp_options()) for _ in range(2))
    muon, adamw = zero_pair(ddp)
    matrices, others = divided(plain)
    chain(ZeroStep(muon, deferred=True), ZeroStep(adamw, clip_grad_norm=0.02)).register(ddp)

    def backward(model: Any, batch: Batch) -> None:
        mean_squared_error(model, batch).backward()

    reference = torch.optim.Muon(matrices, **MUON), torch.optim.AdamW(others, **ADAMW)
    for step in range(4):
        plain.zero_grad()
        backward(plain, MLP.batch(step, rank))
        backward(ddp, MLP.batch(step, rank))
        expected = torch.nn.utils.clip_grad_norm_(matrices, 0.03)
        torch.nn.utils.clip_grad_norm_(others, 0.02)
        total = muon.clip_grad_norm_(0.03)
        torch.testing.assert_close(total, expected)
        assert float(total) > 0.03
        for optimizer in (*reference, muon, adamw):
            optimizer.step()
        for ours, theirs in zip(ddp.parameters(), plain.parameters(), strict=True):
            # The ranks' parts of the norm are summed in float64, and Muon works in bfloat16.
            torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)


def test_each_sharded_update_clips_by_the_norm_of_its_own_parameters() -> None:
    run_ranks(_clipped, 2)
