"""Several updates in one chain: what is refused, and their common reduction; tests/compositions has their parity."""

import contextlib
from typing import Any

import pytest
import torch
from torch.distributed.algorithms.join import Join as TorchJoin

from harness import assert_parity, on_ranks, wrap
from harness.models import MLP, mean_squared_error
from overlap import (
    AllReduce,
    Cast,
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


@on_ranks(2)
def test_a_parameter_of_two_updates_is_an_error_that_names_it(rank: int, world_size: int) -> None:
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
    chain(AllReduce(), Step(some), Step(fine)).register(ddp)
    plain = wrap(MLP.model(), **MLP.ddp_options())
    for model in (plain, ddp):
        mean_squared_error(model, MLP.batch(0, rank)).backward()
    assert torch.equal(ddp.module[0].bias.grad, plain.module[0].bias.grad)
    some.step()
    fine.step()
    fine.add_param_group({"params": [weights[3]]})
    with pytest.raises(ConfigurationError, match=r"6.weight is a parameter of both"):
        mean_squared_error(ddp, MLP.batch(1, rank)).backward()


@on_ranks(2)
def test_pytorchs_join_replays_what_is_done_in_backward_and_refuses_the_rest(rank: int, world_size: int) -> None:
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


@on_ranks(1)
def test_a_chain_gets_the_reduction_of_its_sharded_update_where_others_need_the_mean() -> None:
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


@on_ranks(2)
def test_a_reduction_without_its_update_is_an_error_at_registration(rank: int, world_size: int) -> None:
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
