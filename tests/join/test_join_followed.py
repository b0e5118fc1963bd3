"""What a loop does around backward is done on a rank without inputs as well, or is refused there."""

import copy
import itertools
from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from join_loops import FORMS, joined, make, plain_body, train_unevenly, train_with_zero_loss
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from harness import assert_parity, on_ranks, plain_step, wrap
from harness.models import MLP, UNUSED_ON_SOME_RANKS, mean_squared_error
from overlap import (
    AllReduce,
    Join,
    LocalSGD,
    PeerError,
    TrainingLoopError,
    UnsupportedError,
    ZeroRedundancyOptimizer,
    ZeroStep,
    chain,
)
from overlap.hooks.engine import executors

_BATCHES = (6, 3)
_TIMEOUT_S = 20


_SGD: dict[str, float] = {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.1}


# Means over some of the ranks.


@on_ranks(2)
def test_the_divisor_of_a_subgroup_is_the_number_of_its_ranks_with_inputs(rank: int, world_size: int) -> None:
    """Gradients when rank 1 has run out; and of local SGD, whose subgroup is all ranks."""
    found: list[list[Tensor]] = []
    for subgroup in (None, dist.new_group([0, 1])):
        ddp = wrap(MLP.model(), **MLP.ddp_options())
        start_step = 100 if subgroup is None else 0
        local = LocalSGD(ddp, make(ddp, "plain", **_SGD), period=100, start_step=start_step, subgroup=subgroup)
        gradients: list[Tensor] = []
        batches = MLP.batches(rank, steps=2 - rank)
        with joined([ddp, local], batches, "batches", divide_by_initial_world_size=False) as iterated:
            for batch in iterated:
                local.zero_grad()
                mean_squared_error(ddp, batch).backward()
                gradients = [parameter.grad.clone() for parameter in ddp.parameters()]
                local.step()
        found.append(gradients)
    assert_parity(found[1], found[0], what="in a subgroup")


@on_ranks(2, group_timeout_s=_TIMEOUT_S)
def test_the_divisor_where_a_registration_was_removed_or_the_model_copied(rank: int, world_size: int) -> None:
    """Rank 1 runs out after one of two batches; the gradient of each batch is one."""
    models = {name: wrap(nn.Linear(1, 1, bias=False)) for name in ("plain", "removed", "copied", "built-in")}
    for name in ("removed", "copied"):
        registration = chain(AllReduce()).register(models[name])
        if name == "removed":
            registration.remove()
    models["copied"] = copy.deepcopy(models["copied"])
    models["built-in"]._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE)
    for name, ddp in models.items():
        refused = pytest.raises(UnsupportedError, match="divides by the number of all ranks")
        with refused if name == "built-in" else nullcontext():
            with joined([ddp], [torch.ones(1, 1)] * (2 - rank), "batches", divide_by_initial_world_size=False) as ones:
                for one in ones:
                    ddp.zero_grad()
                    ddp(one).sum().backward()
            assert ddp.module.weight.grad.item() == 1, name
    with (
        pytest.raises(UnsupportedError, match=r"once a hook was registered, also after remove\(\)"),
        models["removed"].join(divide_by_initial_world_size=False),
    ):
        models["removed"](torch.ones(1, 1))


# Parameters that no rank used.


@on_ranks(2)
def test_a_parameter_that_nobody_used_is_not_updated(rank: int, world_size: int) -> None:
    """From the fourth step on rank 0 alone has inputs, and every other step leaves the branch unused."""
    case, options = UNUSED_ON_SOME_RANKS, {"lr": 0.01, "weight_decay": 0.5}
    models = []
    for form, told_by in FORMS.items():
        ddp = wrap(case.model(), **case.ddp_options())
        optimizer = make(ddp, form, torch.optim.AdamW, **options)
        models.append(train_unevenly(ddp, optimizer, case, rank, told_by, counts=_BATCHES)["model"])
    for form, model in zip(list(FORMS)[1:], models[1:], strict=True):
        assert_parity(model, models[0], what=form)


@on_ranks(2, group_timeout_s=_TIMEOUT_S)
@mock.patch.object(executors, "SMALL_BYTES", 2**20)
def test_gathers_in_forward_come_after_the_exchange_of_unused_parameters(rank: int, world_size: int) -> None:
    """Of a model without a worker thread. Every second batch is only accumulated; rank 1 runs out after such a one."""
    case, options = UNUSED_ON_SOME_RANKS, {"lr": 0.01, "weight_decay": 0.5}

    def train(make_stages: Any) -> dict[str, Tensor]:
        ddp = wrap(case.model(), **case.ddp_options())
        optimizer, stages = make_stages(ddp)
        if stages:
            chain(*stages).register(ddp)
        with Join([ddp, optimizer]) as join:
            for step, batch in enumerate(join.iterate(case.batches(rank, steps=_BATCHES[rank]))):
                with ddp.no_sync() if step % 2 == 0 else nullcontext():
                    mean_squared_error(ddp, batch).backward()
                if step % 2:
                    optimizer.step()
                    optimizer.zero_grad()
        return {name: value.detach().clone() for name, value in ddp.module.named_parameters()}

    def sharded(ddp: Any, partition: str, reducers: list[Any], deferred: bool) -> Any:
        zero = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.AdamW, partition=partition, **options)
        return zero, [*reducers, ZeroStep(zero, gather="forward", deferred=deferred)]

    expected = train(lambda ddp: (torch.optim.AdamW(ddp.parameters(), **options), []))
    for how in itertools.product(("element", "parameter"), ([], [AllReduce()]), (False, True)):
        assert_parity(train(lambda ddp, how=how: sharded(ddp, *how)), expected, what=str(how))


# Hyperparameters.


@on_ranks(2, group_timeout_s=_TIMEOUT_S)
def test_a_scheduler_that_is_not_given_is_refused_where_ranks_would_part(rank: int, world_size: int) -> None:
    for counts, told_by in (((5, 2), "forwards"), ((3, 2), "batches")):
        ddp = wrap(MLP.model(), process_group=dist.new_group([0, 1]), **MLP.ddp_options())
        optimizer = make(ddp, "interleaved", **_SGD)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        refused = pytest.raises(
            (TrainingLoopError, PeerError), match=r"give every scheduler .*Join\(\[ddp, optimizer, sched"
        )
        with refused, joined([ddp, optimizer], MLP.batches(rank, steps=counts[rank]), told_by) as batches:
            for batch in batches:
                mean_squared_error(ddp, batch).backward()
                optimizer.step()
                scheduler.step()


# What the loop does besides.


@on_ranks(2, group_timeout_s=_TIMEOUT_S)
def test_step_hooks_run_on_a_rank_without_inputs(rank: int, world_size: int) -> None:
    """A moving average in a step post-hook, against a loop in which rank 1 goes on with a loss of zero."""

    def train(form: str, run: Any) -> Any:
        ddp = wrap(MLP.model(), **MLP.ddp_options())
        optimizer = make(ddp, form, lr=0.05)
        average = AveragedModel(ddp.module, multi_avg_fn=get_ema_multi_avg_fn(0.5))
        optimizer.register_step_post_hook(lambda *_: average.update_parameters(ddp.module))
        run(ddp, optimizer)
        return {name: value.clone() for name, value in average.state_dict().items()}

    expected = train("plain", lambda *made: train_with_zero_loss(*made, MLP, rank, body=plain_body, counts=_BATCHES))
    for form, told_by in FORMS.items():
        followed = train(form, lambda *made, by=told_by: train_unevenly(*made, MLP, rank, by, counts=_BATCHES))
        assert_parity(followed, expected, what=form)


# Gradients that were added up under no_sync when the rank ran out.


@on_ranks(2, timeout_s=120)
def test_micro_batches_of_a_rank_that_then_runs_out_are_sent(rank: int, world_size: int) -> None:
    counts = (8, 5)  # Rank 1 runs out after the first of two.

    def train(form: str, told_by: str | None) -> dict[str, Tensor]:
        ddp = wrap(MLP.model(), **MLP.ddp_options())
        optimizer = make(ddp, form, **_SGD)

        def run(batches: Any) -> None:
            for step, batch in enumerate(batches):
                is_first = step % 2 == 0
                if is_first and form == "plain":
                    optimizer.zero_grad()
                with ddp.no_sync() if is_first else nullcontext():
                    (mean_squared_error(ddp, batch) * (step < counts[rank])).backward()
                if not is_first:
                    optimizer.step()

        if told_by is None:
            run(MLP.batches(rank, steps=max(counts)))
        else:
            with joined([ddp, optimizer], MLP.batches(rank, steps=counts[rank]), told_by) as batches:
                run(batches)
        return {name: value.detach().clone() for name, value in ddp.module.named_parameters()}

    expected = train("plain", None)
    for form, told_by in FORMS.items():
        assert_parity(train(form, told_by), expected, what=f"{form}, {told_by}")


# What a loop does to gradients by hand.


@on_ranks(2, group_timeout_s=_TIMEOUT_S)
def test_gradients_that_a_rank_without_inputs_would_step_with_otherwise_are_refused(rank: int, world_size: int) -> None:
    for told_by, scales in (("batches", False), ("forwards", True)):
        ddp = wrap(MLP.model(), process_group=dist.new_group([0, 1]), **MLP.ddp_options())
        optimizer = make(ddp, "plain", **_SGD)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0, enabled=scales)
        expected = "cannot be changed between backward" if rank == 0 else "rank 0.*cannot be changed"
        refused = pytest.raises(TrainingLoopError if rank == 0 else PeerError, match=expected)
        with refused, joined([ddp, optimizer], MLP.batches(rank, steps=4 - 2 * rank), told_by) as batches:
            for batch in batches:
                optimizer.zero_grad()
                scaler.scale(mean_squared_error(ddp, batch)).backward()
                if not scaler.is_enabled():
                    nn.utils.clip_grad_norm_(ddp.parameters(), 1e-3)
                scaler.step(optimizer)
                scaler.update()


# Steps and groups that ranks without inputs cannot follow.


def _adds_a_group(rank: int) -> None:
    ddp = wrap(MLP.model(), **MLP.ddp_options())
    chain(AllReduce()).register(ddp)  # The others learn of the error at once.
    first, *rest = ddp.parameters()
    optimizer = torch.optim.SGD([first], lr=0.05)
    with Join([ddp, optimizer]) as join:
        for step in join.iterate(range(_BATCHES[rank])):
            if step == max(_BATCHES) - 1:
                optimizer.add_param_group({"params": rest})
            plain_step(ddp, optimizer, MLP.batch(step, rank), mean_squared_error)


@on_ranks(2, group_timeout_s=_TIMEOUT_S)
def test_what_cannot_be_followed_is_an_error(rank: int, world_size: int) -> None:
    ddp = wrap(MLP.model(), **MLP.ddp_options())
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    with pytest.raises(UnsupportedError, match=r"call closure\(\) first"), Join([ddp, optimizer]):
        optimizer.step(lambda: 0.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    refused = pytest.raises(UnsupportedError, match=r"StepLR\.step\(\) is given an argument")
    with refused, Join([ddp, optimizer, scheduler]):
        scheduler.step(3)  # type: ignore[arg-type]
    with pytest.raises((TrainingLoopError, PeerError), match="add_param_group"):
        _adds_a_group(rank)


# Calls that all ranks make together.


@on_ranks(2, group_timeout_s=_TIMEOUT_S)
def test_a_call_of_all_ranks_is_refused_once_a_rank_has_run_out(rank: int, world_size: int) -> None:
    for call, form in (("synchronize", "plain"), ("consolidate_state_dict", "zero")):
        ddp = wrap(MLP.model(), process_group=dist.new_group([0, 1]), **MLP.ddp_options())
        made = make(ddp, form, **_SGD)
        if form == "plain":
            made = LocalSGD(ddp, made, period=3, start_step=0)
        expected = rf"{call}.*ranks \[1\] have run out"
        refused = pytest.raises(TrainingLoopError if rank == 0 else PeerError, match=expected)
        with refused, joined([ddp, made], MLP.batches(rank, steps=4 - 2 * rank), "batches") as batches:
            for batch in batches:
                mean_squared_error(ddp, batch).backward()
                made.step()
                getattr(made, call)()
