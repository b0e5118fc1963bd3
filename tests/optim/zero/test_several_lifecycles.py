"""Two updates in one chain, each with a lifecycle of its own: loops that treat them differently."""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import pytest
import torch
from several_loops import (
    ADAMW,
    FORMS,
    Both,
    Schedulers,
    check,
    divided,
    overlapped_pair,
    plain_run,
    several_run,
)
from torch.distributed.algorithms.join import Join as TorchJoin

from harness import assert_parity, overlapped_step, plain_step, run_ranks, wrap
from harness.errors import RankFailed
from harness.models import MLP, UNUSED_ON_SOME_RANKS, mean_squared_error
from overlap import (
    AllReduce,
    CollectiveError,
    ConfigurationError,
    Join,
    OptimizerHookState,
    OverlappedOptimizer,
    Step,
    TrainingLoopError,
    UnsupportedError,
    ZeroRedundancyOptimizer,
    ZeroStep,
    allreduce_hook,
    as_hook,
    chain,
    hook_then_optimizer,
)
from overlap.optim import FunctionalSGD

_INTERLEAVED = ("both interleaved", "both sharded", "sharded beside whole, after a reducer")
_DEFERRED = ("both deferred", "both sharded, both deferred", "sharded beside whole, deferred")


class _Turns:
    """A loop in which each optimizer is stepped, or told to discard, when its turn is."""

    def __init__(self, *, clears: bool) -> None:
        self.steps = 0
        self.clears = clears

    def __call__(self, ddp: Any, both: Any, batch: Any, loss_of: Any) -> torch.Tensor:
        if self.clears:
            both.zero_grad()
        muon, adamw = both.pair
        place, self.steps = self.steps, self.steps + 1
        skipped = adamw if place % 2 else None
        skip = getattr(skipped, "skip_update", contextlib.nullcontext)
        with skip():
            loss = loss_of(ddp, batch)
            loss.backward()
        for optimizer in (muon, adamw):
            if optimizer is skipped:
                optimizer.zero_grad()
            else:
                optimizer.step()
        return loss


class _ClearsByHand:
    """A loop that now and then clears the matrices' gradients by itself, and steps the other optimizer alone."""

    def __init__(self, *, clears: bool) -> None:
        self.steps = 0
        self.clears = clears

    def __call__(self, ddp: Any, both: Any, batch: Any, loss_of: Any) -> torch.Tensor:
        if self.clears:
            both.zero_grad()
        loss = loss_of(ddp, batch)
        loss.backward()
        place, self.steps = self.steps, self.steps + 1
        if place % 2:
            for parameter in divided(ddp)[0]:
                parameter.grad = None
        for optimizer in both.pair[place % 2 :]:
            optimizer.step()
        return loss


def _accumulates(base: Any, ddp: Any, both: Any, batch: Any, loss_of: Any) -> torch.Tensor:
    if base is plain_step:
        both.zero_grad()
    with ddp.no_sync():
        loss_of(ddp, batch).backward()
    return overlapped_step(ddp, both, batch, loss_of)


def _twice(base: Any, ddp: Any, both: Any, batch: Any, loss_of: Any) -> torch.Tensor:
    if base is plain_step:
        both.zero_grad()
    loss_of(ddp, batch).backward()
    return overlapped_step(ddp, both, batch, loss_of)


def _loops(rank: int, world_size: int) -> None:
    reference = plain_run(MLP, rank, step_fn=_Turns(clears=True))
    for name in (*_INTERLEAVED, *_DEFERRED, "the first deferred"):
        check(several_run(MLP, rank, FORMS[name], step_fn=_Turns(clears=False)), reference, what=name, rank=rank)
    reference = plain_run(MLP, rank, step_fn=_ClearsByHand(clears=True))
    for name in _DEFERRED:
        candidate = several_run(MLP, rank, FORMS[name], step_fn=_ClearsByHand(clears=False))
        check(candidate, reference, what=f"cleared by hand, {name}", rank=rank)
    reference = plain_run(MLP, rank, step_fn=functools.partial(_accumulates, plain_step))
    for name in (_INTERLEAVED[1], _DEFERRED[0]):
        loop = functools.partial(_accumulates, overlapped_step)
        check(several_run(MLP, rank, FORMS[name], step_fn=loop), reference, what=f"no_sync, {name}", rank=rank)
    reference = plain_run(MLP, rank, step_fn=functools.partial(_twice, plain_step))
    loop = functools.partial(_twice, overlapped_step)
    check(several_run(MLP, rank, FORMS[_DEFERRED[0]], step_fn=loop), reference, what="twice", rank=rank)
    for name, message in (
        ("the first deferred", r"call optimizer.step\(\) of AdamW after each synchronized backward"),
        (_DEFERRED[1], r"call zero.step\(\) of AdamW after each"),
        (_INTERLEAVED[1], r"call zero.step\(\) of Muon after each"),
    ):
        with pytest.raises(TrainingLoopError, match=message):
            several_run(MLP, rank, FORMS[name], step_fn=loop)
    reference = plain_run(UNUSED_ON_SOME_RANKS, rank)
    for name in ("both interleaved", "both sharded, one deferred", "sharded beside whole"):
        candidate = several_run(UNUSED_ON_SOME_RANKS, rank, FORMS[name])
        check(candidate, reference, what=f"unused parameters, {name}", rank=rank)


def test_each_update_is_skipped_discarded_and_added_to_by_itself() -> None:
    run_ranks(_loops, 2)


def _raise(grad: torch.Tensor) -> torch.Tensor:
    raise ValueError("in the middle of backward")


def _mistakes_of(name: str, rank: int) -> None:
    plain, ddp = (wrap(MLP.model(), **MLP.ddp_options()) for _ in range(2))
    pair = FORMS[name].pair(ddp)
    reference = tuple(one.optimizer for one in overlapped_pair(plain))
    registration = chain(*FORMS[name].stages(*pair)).register(ddp)

    def step(place: int, *, both: bool = True) -> None:
        plain.zero_grad()
        for model, optimizers in ((plain, reference), (ddp, pair)):
            mean_squared_error(model, MLP.batch(place, rank)).backward()
            for optimizer in optimizers if both else optimizers[:1]:
                optimizer.step()

    def assert_same(what: str) -> None:
        for ours, theirs in zip(ddp.parameters(), plain.parameters(), strict=True):
            assert torch.equal(ours, theirs), f"{name}: {what}"

    for place in range(2):
        step(place)
    assert_same("before")
    if "deferred" in name:
        handle = ddp.module[2].weight.register_hook(_raise)
        with pytest.raises(ValueError, match="in the middle"):
            mean_squared_error(ddp, MLP.batch(2, rank)).backward()
        handle.remove()
        assert_same("right after a failure")
        step(2)
        assert_same("a step after a failure")
    step(3, both=False)
    if name != "sharded beside whole, deferred":  # There AdamW is not sharded, and its gradients add up.
        with pytest.raises(TrainingLoopError, match="of AdamW after each synchronized backward"):
            mean_squared_error(ddp, MLP.batch(4, rank)).backward()
    registration.remove()
    ddp.zero_grad()
    mean_squared_error(ddp, MLP.batch(5, rank)).backward()


def _mistakes(rank: int, world_size: int) -> None:
    for name in ("both interleaved", "both sharded, both deferred", "sharded beside whole, deferred"):
        _mistakes_of(name, rank)


def test_a_failure_leaves_both_updates_usable_and_a_forgotten_step_is_named() -> None:
    run_ranks(_mistakes, 2)


def _registered(rank: int, world_size: int) -> None:
    ddp = wrap(MLP.model(), **MLP.ddp_options())
    weights, biases = divided(ddp)
    some = OverlappedOptimizer(torch.optim.SGD(weights, lr=0.1))
    others = OverlappedOptimizer(torch.optim.AdamW([*biases[1:], weights[2]], **ADAMW))
    with pytest.raises(ConfigurationError, match=r"4.weight is a parameter of both Step\(SGD, .*\) and Step\(AdamW, "):
        chain(AllReduce(), Step(some), Step(others)).register(ddp)
    with pytest.raises(ConfigurationError, match="takes all that the model has"):
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


def _through_ddp(rank: int, world_size: int) -> None:
    makes = {
        "nested": (overlapped_pair, _nested),
        "sharded": (
            FORMS["both sharded"].pair,
            lambda first, second: as_hook(chain(ZeroStep(first), ZeroStep(second))),
        ),
    }
    for name, (pair_of, hook_of) in makes.items():
        plain, ddp = (wrap(MLP.model(), **MLP.ddp_options()) for _ in range(2))
        reference, pair = tuple(one.optimizer for one in overlapped_pair(plain)), pair_of(ddp)
        ddp.register_comm_hook(None, hook_of(*pair))
        for place in range(4):
            for model, optimizers in ((plain, reference), (ddp, pair)):
                for optimizer in optimizers:
                    optimizer.zero_grad()
                mean_squared_error(model, MLP.batch(place, rank)).backward()
                for optimizer in optimizers:
                    optimizer.step()
            for ours, theirs in zip(ddp.parameters(), plain.parameters(), strict=True):
                assert torch.equal(ours, theirs), f"{name}, step {place}"
    ddp = wrap(MLP.model(), **MLP.ddp_options())
    both = [OverlappedOptimizer(torch.optim.SGD(ddp.parameters(), lr=0.1)) for _ in range(2)]
    ddp.register_comm_hook(None, as_hook(chain(AllReduce(), *map(Step, both))))
    with pytest.raises(ConfigurationError, match=r"a parameter of shape \(16, 16\) is a parameter of both"):
        mean_squared_error(ddp, MLP.batch(0, rank)).backward()


def _nested(first: Any, second: Any) -> Any:
    return hook_then_optimizer(
        hook_then_optimizer(allreduce_hook, OptimizerHookState(first)), OptimizerHookState(second)
    )


def test_two_updates_in_a_hook_of_ddps_own() -> None:
    run_ranks(_through_ddp, 2)


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
    assert "updates 6 parameters" in str(raised.value)


def _scaled(rank: int, world_size: int) -> None:
    for name in _DEFERRED:
        plain, ddp = (wrap(MLP.model(), **MLP.ddp_options()) for _ in range(2))
        form = FORMS[name]
        pair = form.pair(ddp)
        chain(*form.stages(*pair)).register(ddp)
        reference = tuple(one.optimizer for one in overlapped_pair(plain))
        scalers = [torch.amp.GradScaler("cpu", init_scale=2.0**16, growth_interval=2) for _ in range(2)]
        for place in range(4):
            plain.zero_grad()
            for model, optimizers, scaler in ((plain, reference, scalers[0]), (ddp, pair, scalers[1])):
                loss = scaler.scale(mean_squared_error(model, MLP.batch(place, rank)))
                # Of one optimizer's parameters alone; sharded, they are each another rank's.
                if layer := {1: 2, 3: 4}.get(place, 0) * rank:
                    handle = model.module[layer].bias.register_hook(lambda grad: grad * float("inf"))
                loss.backward()
                if layer:
                    handle.remove()
                for optimizer in optimizers:
                    scaler.step(optimizer)
                scaler.update()
            assert scalers[0].get_scale() == scalers[1].get_scale(), f"{name}, step {place}"
            for ours, theirs in zip(ddp.parameters(), plain.parameters(), strict=True):
                assert torch.equal(ours, theirs), f"{name}, step {place}"


def test_a_scaler_skips_the_optimizer_whose_gradients_are_not_finite() -> None:
    run_ranks(_scaled, 2)


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
