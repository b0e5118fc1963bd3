"""Two updates in one chain, each with a lifecycle of its own: loops that treat them differently."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from several_loops import (
    ADAMW,
    FORMS,
    Both,
    Schedulers,
    divided,
    overlapped_pair,
)
from torch.distributed.algorithms.join import Join as TorchJoin

from harness import assert_parity, run_ranks, wrap
from harness.errors import RankFailed
from harness.models import MLP, mean_squared_error
from overlap import (
    AllReduce,
    CollectiveError,
    ConfigurationError,
    Join,
    OverlappedOptimizer,
    Step,
    UnsupportedError,
    ZeroRedundancyOptimizer,
    ZeroStep,
    chain,
)
from overlap.optim import FunctionalSGD

_INTERLEAVED = ("both interleaved", "both sharded", "sharded beside whole, after a reducer")
_DEFERRED = ("both deferred", "both sharded, both deferred", "sharded beside whole, deferred")


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


def _joined(rank: int, world_size: int) -> None:
    def loop(ddp: Any, pair: Any, joinables: list[Any]) -> None:
        schedulers = Schedulers(Both(pair)).schedulers
        # A rank that has run out updates what it owns with its own rates.
        with Join([*joinables, *schedulers]):
            for place in range(3 + 2 * rank):
                for optimizer in pair:
                    optimizer.zero_grad()
                mean_squared_error(ddp, MLP.batch(place, rank)).backward()
                for one in (*pair, *schedulers):
                    one.step()

    plain = wrap(MLP.model(), **MLP.ddp_options())
    loop(plain, tuple(one.optimizer for one in overlapped_pair(plain)), [plain])
    expected = {name: p.detach().clone() for name, p in plain.module.named_parameters()}
    for name in (*_INTERLEAVED, *_DEFERRED, "both sharded, gather in forward"):
        ddp = wrap(MLP.model(), **MLP.ddp_options())
        pair = FORMS[name].pair(ddp)
        chain(*FORMS[name].stages(*pair)).register(ddp)
        loop(ddp, pair, [ddp, *pair])
        assert_parity({n: p.detach() for n, p in ddp.module.named_parameters()}, expected, what=name)


def _joined_by_torch(rank: int, world_size: int) -> None:
    for name in ("both sharded", "both sharded, both deferred"):
        plain, ddp = (wrap(MLP.model(), **MLP.ddp_options()) for _ in range(2))
        pair = FORMS[name].pair(ddp)
        chain(*FORMS[name].stages(*pair)).register(ddp)
        reference = tuple(one.optimizer for one in overlapped_pair(plain))
        is_refused = "both deferred" in name
        runs = [(ddp, pair, pair[::-1])] if is_refused else [(plain, reference, ()), (ddp, pair, pair[::-1])]
        told = pytest.raises(UnsupportedError, match="in which order") if is_refused else contextlib.nullcontext()
        with told:
            for model, optimizers, joinables in runs:
                with TorchJoin([model, *joinables]):
                    for place in range(2 + 2 * rank):
                        for optimizer in optimizers:
                            optimizer.zero_grad()
                        mean_squared_error(model, MLP.batch(place, rank)).backward()
                        for optimizer in optimizers:
                            optimizer.step()
            for ours, theirs in zip(ddp.parameters(), plain.parameters(), strict=True):
                assert torch.equal(ours, theirs), name


def test_pytorchs_join_replays_what_is_done_in_backward_and_refuses_the_rest() -> None:
    run_ranks(_joined_by_torch, 2)


def test_both_updates_go_on_for_ranks_that_have_run_out_of_inputs() -> None:
    run_ranks(_joined, 2)
