"""Local SGD from one counter of steps, beside plain loops that average by hand."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from local_loops import Values, assign, local, mean_of, plain, run, sgd, values_of
from torch import Tensor, nn

from harness import assert_parity, run_ranks, wrap
from harness.models import BATCH_NORM, MLP, mean_squared_error
from overlap import ConfigurationError, OverlappedOptimizer, RegistrationError, Step
from overlap.optim.local_sgd import LocalSGD
from overlap.optim.local_sgd.model_tensors import into_fragments

START, STEPS, PERIOD = 3, 14, 4


def _with_update(ddp: Any, optimizer: Any, *, deferred: bool) -> LocalSGD:
    wrapped = OverlappedOptimizer(optimizer)
    return LocalSGD(ddp, wrapped, PERIOD, START, update=Step(wrapped, deferred=deferred))


FORMS: dict[str, Callable[[Any, Any], LocalSGD]] = {
    "alone": lambda ddp, o: LocalSGD(ddp, o, PERIOD, START),
    "update in backward": functools.partial(_with_update, deferred=False),
    "deferred update": functools.partial(_with_update, deferred=True),
    "a function as period": lambda ddp, o: LocalSGD(ddp, o, lambda step: PERIOD, START),
}


def _train(rank: int, form: str, steps: int) -> tuple[list[Values], LocalSGD, Any]:
    return local(MLP, rank, steps=steps, build=FORMS[form], zero_grad=form != "update in backward")


# Averages.


def _every_period(rank: int, world_size: int, form: str) -> None:
    def after_step(model: nn.Module, optimizer: Any, count: int) -> None:
        if count % PERIOD == 0:
            assign(model, mean_of(values_of(model)))

    candidate, made, _ = _train(rank, form, STEPS)
    assert_parity(candidate, plain(MLP, rank, steps=STEPS, start_step=START, after_step=after_step), what=form)
    assert made.step_count == STEPS and made.synchronizer.rounds == (STEPS - START) // PERIOD


@pytest.mark.parametrize("form", FORMS)
def test_ranks_average_at_the_end_of_every_period(form: str) -> None:
    run_ranks(_every_period, 2, form)


def _schedule(rank: int, world_size: int) -> None:
    lengths = {3: 2, 5: 5, 10: 1, 11: 3}
    ends = (2, 7, 8, 11)

    def after_step(model: nn.Module, optimizer: Any, count: int) -> None:
        if count in ends:
            assign(model, mean_of(values_of(model)))

    expected = plain(MLP, rank, steps=STEPS, start_step=START, after_step=after_step)
    candidate, _, _ = local(MLP, rank, steps=STEPS, build=lambda ddp, o: LocalSGD(ddp, o, lengths.__getitem__, START))
    assert_parity(candidate, expected, what="a schedule of periods")


def test_a_function_gives_the_length_of_each_round() -> None:
    run_ranks(_schedule, 2)


def _synchronize(rank: int, world_size: int, form: str) -> None:
    _, made, ddp = _train(rank, form, STEPS)
    made.synchronize()
    assert_parity(values_of(ddp.module), mean_of(values_of(ddp.module)), what=form)


@pytest.mark.parametrize("form", FORMS)
def test_synchronize_makes_ranks_equal_within_a_round(form: str) -> None:
    run_ranks(_synchronize, 2, form)


def _average_all(model: nn.Module, optimizer: Any, count: int) -> None:
    if count % PERIOD == 0:
        assign(model, mean_of(values_of(model)))
        for state in optimizer.state.values():
            state["momentum_buffer"].copy_(mean_of({"": state["momentum_buffer"]})[""])


def _reset(model: nn.Module, optimizer: Any, count: int) -> None:
    if count % PERIOD == 0:
        assign(model, mean_of(values_of(model)))
        optimizer.state.clear()


def _optimizer_state(rank: int, world_size: int, option: str) -> None:
    after_step = {"average": _average_all, "reset": _reset}[option]
    reference = plain(BATCH_NORM, rank, steps=10, start_step=0, after_step=after_step)
    build = functools.partial(LocalSGD, period=PERIOD, start_step=0, optimizer_state=option)
    candidate, _, _ = local(BATCH_NORM, rank, steps=10, build=build)
    assert_parity(candidate, reference, what=f"BatchNorm, optimizer state: {option}")


@pytest.mark.parametrize("option", ["average", "reset"])
def test_optimizer_state_is_averaged_or_reset_with_the_parameters(option: str) -> None:
    run_ranks(_optimizer_state, 2, option)


# Plain DDP.


def _before_start(rank: int, world_size: int) -> None:
    ddp = wrap(BATCH_NORM.model(), **BATCH_NORM.ddp_options())
    optimizer = sgd(ddp.parameters())
    reference = []
    for step in range(6):
        optimizer.zero_grad()
        mean_squared_error(ddp, BATCH_NORM.batch(step, rank)).backward()
        optimizer.step()
        reference.append(values_of(ddp.module))
    candidate, made, _ = local(BATCH_NORM, rank, steps=6, build=lambda ddp, o: LocalSGD(ddp, o, 2, 6))
    assert_parity(candidate, reference, what="before start_step")
    assert_parity(made.state_dict()["state"], optimizer.state_dict()["state"], what="optimizer state before start_step")


def test_before_start_step_it_is_plain_ddp() -> None:
    run_ranks(_before_start, 2)


def _period_one(rank: int, world_size: int) -> None:
    def train(ddp: Any, holder: Any) -> list[Values]:
        records = []
        for step in range(30):
            holder.zero_grad()
            batch = MLP.batch(step, rank)
            nn.functional.mse_loss(ddp(batch.inputs[0].double()), batch.target.double()).backward()
            holder.step()
            records.append(values_of(ddp.module))
        return records

    ddp, other = wrap(MLP.model().double()), wrap(MLP.model().double())
    assert_parity(
        train(ddp, LocalSGD(ddp, sgd(ddp.parameters()), 1, 0)),
        train(other, sgd(other.parameters())),
        what="period 1",
        exact=False,
        rtol=1e-9,
        atol=1e-12,
        reason="updates are averaged instead of gradients: rounded in another order, in float64",
    )


def test_period_1_with_a_momentum_is_plain_ddp() -> None:
    run_ranks(_period_one, 2)


def _ddp_sync(rank: int, world_size: int, form: str) -> None:
    _, made, ddp = _train(rank, form, START + 2)
    assert ddp.require_backward_grad_sync == (form in ("update in backward", "deferred update"))
    made.remove()
    assert ddp.require_backward_grad_sync


@pytest.mark.parametrize("form", FORMS)
def test_ddp_is_switched_off_while_ranks_train_alone_without_an_update_in_backward(form: str) -> None:
    run_ranks(_ddp_sync, 2, form)


def _removed(rank: int, world_size: int, form: str) -> None:
    _, made, _ = _train(rank, form, 1)
    made.remove()
    with pytest.raises(RegistrationError, match="make another one"):
        made.step()


@pytest.mark.parametrize("form", FORMS)
def test_step_after_remove_is_refused(form: str) -> None:
    run_ranks(_removed, 2, form)


# An optimizer like others.


def _trained(rank: int, *, prepare: Callable[[LocalSGD, Any], None]) -> tuple[LocalSGD, Any, Any]:
    """Two steps and an average: the first with a closure, the second with a backward under no_sync before it."""
    ddp = wrap(MLP.model(), **MLP.ddp_options())
    inner = sgd(ddp.parameters())
    made = LocalSGD(ddp, inner, period=2, start_step=0)
    prepare(made, ddp)

    def closure() -> Tensor:
        made.zero_grad()
        loss = mean_squared_error(ddp, MLP.batch(0, rank))
        loss.backward()
        return loss

    assert made.step(closure).item() > 0
    with ddp.no_sync():
        mean_squared_error(ddp, MLP.batch(1, rank)).backward()
    mean_squared_error(ddp, MLP.batch(2, rank)).backward()
    made.step()
    return made, ddp, inner


def _accumulated(rank: int, world_size: int) -> None:
    storage: list[int] = []
    made, ddp, _ = _trained(rank, prepare=lambda _, ddp: storage.extend(p.data_ptr() for p in ddp.parameters()))
    assert made.step_count == 2
    assert_parity(values_of(ddp.module), mean_of(values_of(ddp.module)), what="averaged")
    assert [p.data_ptr() for p in ddp.parameters()] == storage


def test_closures_and_accumulation_work_and_parameters_keep_their_storage() -> None:
    run_ranks(_accumulated, 2)


def _hooked(rank: int, world_size: int) -> None:
    calls: list[int] = []
    schedules: list[Any] = []

    def prepare(made: LocalSGD, ddp: Any) -> None:
        made.register_step_post_hook(lambda *_: calls.append(1))
        schedules.append(torch.optim.lr_scheduler.StepLR(made, 1, gamma=0.5))

    made, _, inner = _trained(rank, prepare=prepare)
    schedules[0].step()
    assert calls == [1, 1] and inner.param_groups[0]["lr"] == 0.05 and made.defaults is inner.defaults


def test_schedulers_and_step_hooks_are_those_of_the_wrapped_optimizer() -> None:
    run_ranks(_hooked, 2)


def _copied(rank: int, world_size: int) -> None:
    ddp = wrap(MLP.model())
    with pytest.raises(ConfigurationError, match="save its state_dict"):
        copy.deepcopy(LocalSGD(ddp, sgd(ddp.parameters())))


def test_a_copy_is_refused() -> None:
    run_ranks(_copied, 2)


# Errors.


OUTER = functools.partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True)


def _wrong_arguments(rank: int, world_size: int) -> None:
    others = dist.new_group([0]), dist.new_group([1])
    ddp = wrap(MLP.model())
    cases: list[tuple[dict[str, Any], str]] = [
        ({"period": 0}, "period must be a whole number of at least 1, got 0"),
        ({"period": 2.0}, "got 2.0"),
        ({"period": {}}, "is empty"),
        ({"period": {2: 2, 1: 2}}, "periods of period must ascend"),
        ({"period": {2: 1, 4: 2}, "outer": OUTER}, "need one period"),
        ({"start_step": -1}, "start_step must be a whole number of at least 0, got -1"),
        ({"subgroup": others[1 - rank]}, f"rank {rank} is not in the subgroup"),
        ({"subgroup": "node"}, "machine"),
        ({"overlap": -1}, "overlap must be a whole number"),
        ({"fragments": 100}, "leaves some without a parameter"),
        ({"fragments": 10**9}, "fragments=1000000000 leaves some"),  # It made so many lists.
        ({"optimizer_state": "drop"}, "keep, average, reset"),
        ({"optimizer_state": "average", "overlap": True}, "overlap=True is there to avoid"),
        ({"average_dtype": torch.int32}, "floating-point dtype"),
        ({"outer": torch.optim.SGD([torch.ones(1)])}, "functools.partial"),
        ({"outer": functools.partial(torch.optim.SGD, lr=-1.0)}, "outer could not be made"),
        ({"update": torch.nn.Linear(1, 1)}, "must be a stage that updates"),
        ({"update": Step(sgd(ddp.parameters()))}, "given the same OverlappedOptimizer"),
        ({"optimizer": sgd(nn.Linear(1, 1).parameters())}, "no parameter of this model"),
        ({"optimizer": torch.optim.SGD}, "the class SGD"),
        ({"ddp": ddp.module}, "is not a DistributedDataParallel model"),
    ]
    for options, match in cases:
        with pytest.raises(ConfigurationError, match=match):
            LocalSGD(**{"ddp": ddp, "optimizer": sgd(ddp.parameters()), **options})


def test_parameters_too_unequal_for_the_fragments_are_named() -> None:
    unequal = {"large": torch.zeros(100), "small": torch.zeros(1), "another": torch.zeros(1)}
    with pytest.raises(ConfigurationError, match=r"fragments=3 leaves some without a parameter \(\[0, 1, 2\] param"):
        into_fragments(unequal, 3)


def test_wrong_arguments_are_named() -> None:
    run_ranks(_wrong_arguments, 2)


def _empty_round(rank: int, world_size: int) -> None:
    ddp = wrap(MLP.model())
    made = LocalSGD(ddp, sgd(ddp.parameters()), lambda step: 0, 0)
    with pytest.raises(ConfigurationError, match="period at step 0 must be a whole number of at least 1, got 0"):
        run(MLP, rank, [0], ddp, made)


def test_a_function_that_gives_a_round_no_step_is_refused() -> None:
    run_ranks(_empty_round, 2)


def _momentum_on_one_rank(rank: int, world_size: int) -> None:
    ddp = wrap(MLP.model())
    made = LocalSGD(ddp, sgd(ddp.parameters()), 1, 0, optimizer_state="average")
    made.zero_grad()
    mean_squared_error(ddp, MLP.batch(0, rank)).backward()
    if rank == 1:
        made.zero_grad()
    with pytest.raises(ConfigurationError, match="same state on every rank"):
        made.step()


def test_state_that_some_ranks_lack_is_not_averaged() -> None:
    run_ranks(_momentum_on_one_rank, 2)
