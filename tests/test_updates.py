"""What a training loop may do around an update in backward: schedulers, groups, checkpoints, accumulation, clipping."""

from __future__ import annotations

import copy
import dataclasses
import functools
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR, ReduceLROnPlateau, StepLR
from torch.optim.optimizer import register_optimizer_step_post_hook

from harness import assert_parity, overlapped_step, plain_step, run_ranks, run_threads, train, wrap
from harness.models import DTYPES, MLP, UNUSED, Batch, Case
from overlap import (
    AllReduce,
    ConfigurationError,
    OptimizerHookState,
    OverlappedOptimizer,
    Registration,
    RegistrationError,
    Step,
    TrainingLoopError,
    UnsupportedError,
    allreduce_hook,
    chain,
    hook_then_optimizer,
    register,
)
from overlap.optim import FunctionalAdam, FunctionalSGD

Make = Callable[[Any], torch.optim.Optimizer]
SGD = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)
ADAMW = functools.partial(torch.optim.AdamW, lr=0.01, weight_decay=0.1)


def _overlapped(case: Case, make: Make, **step_options: Any) -> tuple[Any, OverlappedOptimizer, Registration]:
    ddp = wrap(case.model(), **case.ddp_options())
    optimizer = OverlappedOptimizer(make(ddp.parameters()))
    return ddp, optimizer, chain(AllReduce(), Step(optimizer, **step_options)).register(ddp)


def _plain(case: Case, make: Make) -> tuple[Any, torch.optim.Optimizer]:
    ddp = wrap(case.model(), **case.ddp_options())
    return ddp, make(ddp.parameters())


def _schedulers(rank: int, world_size: int) -> None:
    schedulers: dict[str, Callable[[Any], Any]] = {
        "StepLR": lambda o: StepLR(o, 2, gamma=0.5),
        "OneCycleLR": lambda o: OneCycleLR(o, max_lr=0.2, total_steps=12),  # Cycles momentum, too.
        "LambdaLR": lambda o: LambdaLR(o, lambda epoch: 1 / (1 + epoch)),
        "ReduceLROnPlateau": _PlateauEveryStep,
    }
    batches = MLP.batches(rank, steps=8)
    for name, scheduler in schedulers.items():
        ddp, optimizer = _plain(MLP, SGD)
        reference = train(ddp, optimizer, batches, scheduler=scheduler)
        ddp, overlapped, _ = _overlapped(MLP, SGD)
        candidate = train(ddp, overlapped, batches, step_fn=overlapped_step, scheduler=scheduler)
        assert_parity(candidate, reference, what=name)
        # A scheduler that was given the wrapped optimizer changes the same groups.
        ddp, overlapped, _ = _overlapped(MLP, SGD)
        inner = overlapped.optimizer
        candidate = train(
            ddp, overlapped, batches, step_fn=overlapped_step, scheduler=functools.partial(_other, scheduler, inner)
        )
        assert_parity(candidate, reference, what=f"{name} on the wrapped optimizer")


def _other(scheduler: Callable[[Any], Any], optimizer: Any, overlapped: Any) -> Any:
    return scheduler(optimizer)


class _PlateauEveryStep:
    """The plateau scheduler with a loss that never falls."""

    def __init__(self, optimizer: Any) -> None:
        self.scheduler = ReduceLROnPlateau(optimizer, factor=0.5, patience=1)

    def step(self) -> None:
        self.scheduler.step(1.0)


def test_lr_schedulers_act_on_updates_in_backward() -> None:
    run_ranks(_schedulers, 2)


def _two_groups(parameters: Any) -> torch.optim.Optimizer:
    parameters = list(parameters)
    return torch.optim.AdamW(
        [{"params": parameters[:3], "lr": 0.03, "weight_decay": 0.0}, {"params": parameters[3:]}], lr=0.01
    )


def _groups_and_added_group(rank: int, world_size: int) -> None:
    batches = MLP.batches(rank, steps=6)

    def first_half(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(list(parameters)[:4], lr=0.1, momentum=0.9)

    ddp, optimizer = _plain(MLP, _two_groups)
    reference = train(ddp, optimizer, batches)
    ddp, overlapped, _ = _overlapped(MLP, _two_groups)
    assert_parity(train(ddp, overlapped, batches, step_fn=overlapped_step), reference, what="two groups")

    records = []
    for make_pair in (_plain, _overlapped):
        ddp, optimizer, *_ = make_pair(MLP, first_half)
        step_fn = plain_step if make_pair is _plain else overlapped_step
        ddp.zero_grad()
        before = train(ddp, optimizer, batches[:3], step_fn=step_fn, min_buckets=1)
        ddp.zero_grad()  # What the optimizer has no group for yet keeps its gradient, as with any optimizer.
        optimizer.add_param_group({"params": list(ddp.parameters())[4:], "lr": 0.01})
        records.append(before + train(ddp, optimizer, batches[3:], step_fn=step_fn))
    assert_parity(records[1], records[0], what="a group added on the way")


def test_groups_keep_their_own_hyperparameters_and_can_be_added() -> None:
    run_ranks(_groups_and_added_group, 2)


def _resume(rank: int, world_size: int, deferred: bool) -> None:
    """Plain, overlapped, plain again, by way of state dicts; and never anything but plain."""
    batches = MLP.batches(rank, steps=9)
    ddp, optimizer = _plain(MLP, ADAMW)
    reference = train(ddp, optimizer, batches)

    ddp, optimizer = _plain(MLP, ADAMW)
    records = train(ddp, optimizer, batches[:3])
    model_state, state = copy.deepcopy(ddp.module.state_dict()), copy.deepcopy(optimizer.state_dict())
    ddp, overlapped, _ = _overlapped(MLP, ADAMW, deferred=deferred)
    ddp.module.load_state_dict(model_state)
    overlapped.load_state_dict(state)
    records += _renumbered(train(ddp, overlapped, batches[3:6], step_fn=overlapped_step), 3)
    model_state, state = copy.deepcopy(ddp.module.state_dict()), copy.deepcopy(overlapped.state_dict())
    ddp, optimizer = _plain(MLP, ADAMW)
    ddp.module.load_state_dict(model_state)
    optimizer.load_state_dict(state)
    records += _renumbered(train(ddp, optimizer, batches[6:]), 6)
    # A scheduler made anew notes the rate that it starts from; that is no part of the update.
    for record in (*records, *reference):
        for group in record.optimizer["param_groups"]:
            group.pop("initial_lr", None)
    assert_parity(records, reference, what="plain, overlapped and plain in turn")


def _renumbered(records: list[Any], start: int) -> list[Any]:
    return [dataclasses.replace(record, step=record.step + start) for record in records]


@pytest.mark.parametrize("deferred", [False, True], ids=["interleaved", "deferred"])
def test_state_dicts_go_both_ways_between_plain_and_overlapped(deferred: bool) -> None:
    run_ranks(_resume, 2, deferred)


def _accumulating_step(ddp: Any, optimizer: Any, batch: Batch, loss_of: Any) -> torch.Tensor:
    with ddp.no_sync():
        loss_of(ddp, batch).backward()
        loss_of(ddp, batch).mul(0.5).backward()
    loss = loss_of(ddp, batch)
    loss.backward()
    optimizer.step()
    return loss


def _accumulating_plain(ddp: Any, optimizer: Any, batch: Batch, loss_of: Any) -> torch.Tensor:
    optimizer.zero_grad()
    return _accumulating_step(ddp, optimizer, batch, loss_of)


def _accumulation(rank: int, world_size: int) -> None:
    batches = MLP.batches(rank, steps=6)
    ddp, optimizer = _plain(MLP, SGD)
    reference = train(ddp, optimizer, batches, step_fn=_accumulating_plain, gradients=True)
    for deferred in (False, True):
        ddp, overlapped, _ = _overlapped(MLP, SGD, deferred=deferred)
        candidate = train(ddp, overlapped, batches, step_fn=_accumulating_step, gradients=True)
        assert_parity(candidate, reference, what=f"accumulation, {deferred=}, gradients included")


def test_no_sync_accumulates_and_updates_once() -> None:
    run_ranks(_accumulation, 2)


def _clearing(rank: int, world_size: int, view: bool) -> None:
    ddp = wrap(MLP.model(), gradient_as_bucket_view=view, **MLP.ddp_options())
    optimizer = OverlappedOptimizer(SGD(ddp.parameters()))
    chain(AllReduce(), Step(optimizer)).register(ddp)
    inside: list[bool] = []
    ddp.module.register_forward_pre_hook(lambda *_: inside.append(all(p.grad is None for p in ddp.parameters())))
    for step in range(4):
        output = ddp(*MLP.batch(step, rank).inputs)
        output.square().mean().backward()
        assert all(p.grad is not None for p in ddp.parameters()), "readable after backward"
        optimizer.step()
        optimizer.step()  # Nothing is left to do, so nothing is done twice.
        with torch.no_grad():
            ddp(*MLP.batch(step, rank).inputs)  # An evaluation leaves the gradients for who wants to log them.
        assert all(p.grad is not None for p in ddp.parameters())
    assert inside[::2] == [True] * 4, "cleared before the next forward"


@pytest.mark.parametrize("view", [False, True])
def test_gradients_can_be_read_after_backward_and_are_gone_at_the_next_forward(view: bool) -> None:
    run_ranks(_clearing, 2, view)


def _clipping_step(ddp: Any, optimizer: Any, batch: Batch, loss_of: Any, *, norm_type: float) -> torch.Tensor:
    optimizer.zero_grad()
    loss = loss_of(ddp, batch)
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(ddp.parameters(), 0.05, norm_type=norm_type)
    assert norm > 0.05, "a clip that does nothing shows nothing"
    optimizer.step()
    return loss


def _step_in_backward(ddp: Any, optimizer: Any, batch: Batch, loss_of: Any) -> torch.Tensor:
    loss: torch.Tensor = loss_of(ddp, batch)
    loss.backward()
    return loss


def _clipping(rank: int, world_size: int, case: Case) -> None:
    batches = case.batches(rank, steps=6)
    for norm_type in (2.0, float("inf")):
        plain = functools.partial(_clipping_step, norm_type=norm_type)
        ddp, optimizer = _plain(case, SGD)
        reference = train(ddp, optimizer, batches, step_fn=plain, gradients=True)
        ddp, overlapped, _ = _overlapped(case, SGD, clip_grad_norm=0.05, norm_type=norm_type)
        candidate = train(ddp, overlapped, batches, step_fn=overlapped_step, gradients=True)
        assert_parity(candidate, reference, what=f"clipping in step(), {norm_type=}")
        # A plain optimizer: the whole deferred update happens with the last bucket.
        ddp, optimizer = _plain(case, SGD)
        chain(AllReduce(), Step(optimizer, clip_grad_norm=0.05, norm_type=norm_type)).register(ddp)
        candidate = train(ddp, optimizer, batches, step_fn=_step_in_backward, gradients=True)
        assert_parity(candidate, reference, what=f"clipping in backward, {norm_type=}")


@pytest.mark.parametrize("case", [MLP, DTYPES, UNUSED], ids=str)
def test_clipping_equals_clip_grad_norm(case: Case) -> None:
    run_ranks(_clipping, 2, case)


def _scaled_step(
    ddp: Any, optimizer: Any, batch: Batch, loss_of: Any, *, scaler: Any, poison: list[bool], how: str
) -> torch.Tensor:
    if how == "plain" or how.startswith("plain"):
        optimizer.zero_grad()
    loss: torch.Tensor = loss_of(ddp, batch)
    if poison.pop(0):
        loss = loss * float("inf")
    scaler.scale(loss).backward()
    if how.endswith("clip"):
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(ddp.parameters(), 0.05)
    scaler.step(optimizer)
    scaler.update()
    return loss.nan_to_num(0, 0, 0)


def _grad_scaler(rank: int, world_size: int) -> None:
    batches = MLP.batches(rank, steps=7)
    for implementation in ({"foreach": True}, {"fused": True}, {"foreach": False}):
        make = functools.partial(torch.optim.AdamW, lr=0.01, **implementation)
        for variant in ("", "-clip"):

            def run(pair: Any, how: str) -> list[Any]:
                ddp, optimizer, *_ = pair
                scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
                # The second and the fifth step overflow, on one rank alone.
                poison = [rank == 1 and step in (1, 4) for step in range(7)]
                step_fn = functools.partial(_scaled_step, scaler=scaler, poison=poison, how=how)
                return train(ddp, optimizer, batches, step_fn=step_fn)

            reference = run(_plain(MLP, make), "plain" + variant)
            candidate = run(_overlapped(MLP, make, deferred=True), "overlapped" + variant)
            assert_parity(candidate, reference, what=f"GradScaler, {implementation}, {variant}")
        if variant:
            candidate = run(_overlapped(MLP, make, clip_grad_norm=0.05), "overlapped")
            assert_parity(candidate, reference, what=f"GradScaler, {implementation}, clipping in step()")

    ddp, optimizer, _ = _overlapped(MLP, SGD)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(ddp(*batches[0].inputs).sum()).backward()
    with pytest.raises(TrainingLoopError, match="deferred=True"):
        scaler.step(optimizer)


def test_grad_scaler_skips_whole_steps_and_unscales() -> None:
    run_ranks(_grad_scaler, 2)


def _subset(rank: int, world_size: int) -> None:
    batches = MLP.batches(rank, steps=6)
    ddp, optimizer = _plain(MLP, SGD)
    reference = train(ddp, optimizer, batches, gradients=True)

    # An overlapped optimizer updates the rest in step().
    ddp = wrap(MLP.model(), **MLP.ddp_options())
    overlapped = OverlappedOptimizer(SGD(ddp.parameters()))
    state = OptimizerHookState(overlapped, params=list(ddp.parameters())[:3])
    register(ddp, hook_then_optimizer(allreduce_hook, state))
    candidate = train(ddp, overlapped, batches, step_fn=overlapped_step, gradients=True)
    assert_parity(candidate, reference, what="a subset in backward, the rest in step()")

    # With a plain one the rest keep their averaged gradients, and another optimizer may take them.
    ddp = wrap(MLP.model(), **MLP.ddp_options())
    in_backward, rest = list(ddp.parameters())[:3], list(ddp.parameters())[3:]
    register(ddp, hook_then_optimizer(allreduce_hook, OptimizerHookState(SGD(in_backward), params=in_backward)))
    others = SGD(rest)
    for batch, record in zip(batches, reference, strict=True):
        others.zero_grad()
        for group in others.param_groups:
            group["lr"] = 0.1
        loss = nn.functional.mse_loss(ddp(*batch.inputs), batch.target)
        loss.backward()
        if record.step == 0:
            averaged = {name: p.grad.clone() for name, p in ddp.module.named_parameters()}
            assert_parity(averaged, record.gradients, what="averaged gradients of all")
        others.step()
    plain = _plain(MLP, SGD)
    final = train(*plain, batches, scheduler=lambda o: LambdaLR(o, lambda _: 1.0))[-1]
    assert_parity(dict(ddp.module.named_parameters()), final.parameters, what="two optimizers, one in backward")


def test_a_subset_is_updated_and_the_rest_keep_their_mean() -> None:
    run_ranks(_subset, 2)


def _hook_alone(rank: int, world_size: int) -> None:
    """PyTorch's way: the hook goes to DDP itself, the optimizer is plain, and nobody calls step()."""
    batches = MLP.batches(rank, steps=6)
    constant = functools.partial(LambdaLR, lr_lambda=lambda _: 1.0)
    ddp, optimizer = _plain(MLP, SGD)
    reference = [record.parameters for record in train(ddp, optimizer, batches, scheduler=constant)]
    for make in (SGD, functools.partial(FunctionalSGD, lr=0.1, momentum=0.9)):
        ddp = wrap(MLP.model(), **MLP.ddp_options())
        hook = hook_then_optimizer(allreduce_hook, OptimizerHookState(make(ddp.parameters())))
        ddp.register_comm_hook(None, hook)
        parameters = []
        for batch in batches:
            ddp.zero_grad()
            nn.functional.mse_loss(ddp(*batch.inputs), batch.target).backward()
            parameters.append({name: p.detach().clone() for name, p in ddp.module.named_parameters()})
        assert_parity(parameters, reference, what=f"registered with DDP itself, {make.func.__name__}")


def test_the_hook_works_when_registered_with_ddp_itself() -> None:
    run_ranks(_hook_alone, 2)


class Lion(torch.optim.Optimizer):
    """A third-party optimizer, as its paper has it."""

    def __init__(self, params: Any, lr: float = 0.01, betas: tuple[float, float] = (0.9, 0.99)) -> None:
        super().__init__(params, {"lr": lr, "betas": betas})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            first, second = group["betas"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                momentum = self.state[parameter].setdefault("momentum", torch.zeros_like(parameter))
                parameter.sub_(group["lr"] * momentum.lerp(parameter.grad, 1 - first).sign())
                momentum.lerp_(parameter.grad, 1 - second)


class Counts(Lion):
    """Counts its steps in its group, as some third-party optimizers do."""

    def step(self, closure: Any = None) -> None:
        super().step()
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1
            group["lr"] = 0.01 / group["k"]


def _third_party(rank: int, world_size: int) -> None:
    batches = MLP.batches(rank, steps=6)
    for make, options in ((Lion, {}), (Lion, {"deferred": True}), (Counts, {"deferred": True})):
        constant = functools.partial(LambdaLR, lr_lambda=lambda _: 1.0) if make is Lion else _NoScheduler
        ddp, optimizer = _plain(MLP, make)
        reference = train(ddp, optimizer, batches, scheduler=constant)
        ddp, overlapped, _ = _overlapped(MLP, make, **options)
        candidate = train(ddp, overlapped, batches, step_fn=overlapped_step, scheduler=constant)
        assert_parity(candidate, reference, what=f"{make.__name__} {options}")
    ddp, overlapped, _ = _overlapped(MLP, Counts)
    with pytest.raises(UnsupportedError, match=r"Counts\.step\(\) changes '(k|lr)' .*deferred=True"):
        train(ddp, overlapped, batches, step_fn=overlapped_step, scheduler=_NoScheduler)


class _NoScheduler:
    def __init__(self, optimizer: Any) -> None:
        pass

    def step(self) -> None:
        pass


def test_third_party_optimizers_are_stepped_or_sent_to_the_deferred_mode() -> None:
    run_ranks(_third_party, 2)


def _step_hooks(rank: int, world_size: int) -> None:
    ddp, overlapped, _ = _overlapped(MLP, SGD)
    calls: list[str] = []
    overlapped.register_step_pre_hook(lambda *_: calls.append("pre"))
    overlapped.optimizer.register_step_post_hook(lambda *_: calls.append("post"))
    handle = register_optimizer_step_post_hook(lambda *_: calls.append("global"))
    train(ddp, overlapped, MLP.batches(rank, steps=3), step_fn=overlapped_step)
    handle.remove()
    assert calls == ["pre", "post", "global"] * 3, "once a step, not once a bucket"


def test_step_hooks_run_once_a_step() -> None:
    run_ranks(_step_hooks, 2)


def _version_counter(rank: int, world_size: int, implementation: dict[str, Any]) -> None:
    """A weight that a later node of the same backward needs must not change unnoticed."""

    class Reuses(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.early, self.late = nn.Linear(16, 16), nn.Linear(16, 16)
            self.middle = nn.Sequential(*(nn.Linear(16, 16) for _ in range(4)))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            # `late` gets its gradient first, but the backward of an earlier product still needs its weight.
            hidden = self.early(x) @ self.late.weight.detach()
            hidden.register_hook(lambda grad: time.sleep(0.2))  # Time enough for the update of `late`.
            return self.late(self.middle(hidden))

    ddp = wrap(Reuses())
    optimizer = OverlappedOptimizer(torch.optim.AdamW(ddp.parameters(), **implementation))
    chain(AllReduce(), Step(optimizer)).register(ddp)
    ddp(torch.ones(4, 16)).sum().backward()  # One bucket, updated when all is done.
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        ddp(torch.ones(4, 16)).sum().backward()


@pytest.mark.parametrize("implementation", [{"foreach": False}, {"foreach": True}, {"fused": True}], ids=str)
def test_an_updated_weight_that_backward_still_needs_is_autograds_error(implementation: dict[str, Any]) -> None:
    run_ranks(_version_counter, 2, implementation)


def test_optimizers_that_cannot_ride_in_backward_are_refused_by_name() -> None:
    layer = nn.Linear(2, 2)
    with pytest.raises(UnsupportedError, match="LBFGS evaluates the model again"):
        Step(torch.optim.LBFGS(layer.parameters()))
    with pytest.raises(UnsupportedError, match="SparseAdam works on sparse"):
        OverlappedOptimizer(torch.optim.SparseAdam(layer.parameters()))
    with pytest.raises(ConfigurationError, match=r"expected a torch\.optim\.Optimizer, got 'adam'"):
        OverlappedOptimizer("adam")  # type: ignore[arg-type]
    overlapped = OverlappedOptimizer(SGD(layer.parameters()))
    with pytest.raises(ConfigurationError, match="already"):
        OverlappedOptimizer(overlapped)
    with pytest.raises(ConfigurationError, match="clip_grad_norm must be positive, got -1"):
        Step(overlapped, clip_grad_norm=-1)
    with pytest.raises(ConfigurationError, match="params is empty"):
        Step(overlapped, params=[])
    with pytest.raises(ConfigurationError, match="does not have"):
        Step(overlapped, params=[torch.nn.Parameter(torch.ones(1))])


def _misfits(rank: int, world_size: int) -> None:
    ddp = wrap(MLP.model(), **MLP.ddp_options())
    with pytest.raises(ConfigurationError, match="no parameter of this model; build it from"):
        chain(AllReduce(), Step(SGD(MLP.model().parameters()))).register(ddp)
    outside = nn.Parameter(torch.ones(1))
    with pytest.raises(ConfigurationError, match="1 parameters of the SGD are not in this model"):
        chain(AllReduce(), Step(SGD([*ddp.parameters(), outside]))).register(ddp)
    # An overlapped optimizer updates what is outside in step(), every time that it has a gradient.
    optimizer = OverlappedOptimizer(torch.optim.SGD([*ddp.parameters(), outside], lr=0.5))
    chain(AllReduce(), Step(optimizer)).register(ddp)
    for step in range(3):
        outside.grad = None
        ddp(*MLP.batch(step, rank).inputs).sum().backward()
        (outside * 1.0).sum().backward()
        optimizer.step()
    assert outside.item() == -0.5


def test_optimizer_and_model_must_fit() -> None:
    run_threads(_misfits, 2)


def test_functional_optimizers_equal_their_torch_counterparts() -> None:
    from overlap import optim

    arguments: dict[str, dict[str, Any]] = {"SGD": {"lr": 0.1, "momentum": 0.9, "nesterov": True}}
    for name in ("SGD", "Adam", "AdamW", "Adagrad", "Adadelta", "Adamax", "RMSprop", "Rprop"):
        options = arguments.get(name, {"lr": 0.01})
        ours, theirs = MLP.model(), MLP.model()
        plain = getattr(torch.optim, name)(theirs.parameters(), **options)
        functional = getattr(optim, f"Functional{name}")(ours.parameters(), **options)
        one_by_one = MLP.model()
        lazy = getattr(optim, f"Functional{name}")(**options)
        for step in range(4):
            generator = torch.Generator().manual_seed(step)
            gradients = [torch.randn(p.shape, generator=generator) for p in theirs.parameters()]
            gradients[1] = None if step == 2 else gradients[1]
            for parameter, gradient in zip(theirs.parameters(), gradients, strict=True):
                parameter.grad = gradient
            plain.step()
            functional.step(gradients)
            for parameter, gradient in zip(one_by_one.parameters(), gradients, strict=True):
                lazy.step_param(parameter, gradient)
            for optimizer in (plain, functional, lazy):
                optimizer.param_groups[0]["lr"] *= 0.5  # Read at every step.
        assert_parity(ours.state_dict(), theirs.state_dict(), what=f"Functional{name}.step")
        assert_parity(one_by_one.state_dict(), theirs.state_dict(), what=f"Functional{name}.step_param")
        assert_parity(functional.state_dict(), plain.state_dict(), what=f"state of Functional{name}")
    with pytest.raises(ConfigurationError, match="10 parameters but was given 1 gradients"):
        FunctionalAdam(MLP.model().parameters()).step([None])
    with pytest.raises(ConfigurationError, match=r"FunctionalSGD: .*momentun"):
        FunctionalSGD(MLP.model().parameters(), lr=0.1, momentun=0.9)


def test_an_overlapped_optimizer_copies_and_pickles_like_the_wrapped_one() -> None:
    import pickle

    layer = nn.Linear(2, 2)
    overlapped = OverlappedOptimizer(ADAMW(layer.parameters()))
    for parameter in layer.parameters():
        parameter.grad = torch.ones_like(parameter)
    overlapped.step()
    for copied in (copy.deepcopy(overlapped), pickle.loads(pickle.dumps(overlapped))):
        assert_parity(copied.state_dict(), overlapped.state_dict(), what="a copy's state")
        assert copied.defaults == overlapped.defaults
    assert "AdamW" in repr(overlapped)


def _removed(rank: int, world_size: int, deferred: bool) -> None:
    ddp, overlapped, registration = _overlapped(MLP, SGD, deferred=deferred)
    batches = MLP.batches(rank, steps=9)
    plain_ddp, plain = _plain(MLP, SGD)
    reference = train(plain_ddp, plain, batches, scheduler=_NoScheduler)
    records = train(ddp, overlapped, batches[:3], step_fn=overlapped_step, scheduler=_NoScheduler)
    registration.remove()
    overlapped.step()  # Nothing new: nothing is applied again.
    records += _renumbered(train(ddp, overlapped, batches[3:6], step_fn=plain_step, scheduler=_NoScheduler), 3)
    overlapped.zero_grad()
    chain(AllReduce(), Step(overlapped, deferred=not deferred)).register(ddp)
    records += _renumbered(train(ddp, overlapped, batches[6:], step_fn=overlapped_step, scheduler=_NoScheduler), 6)
    assert_parity(records, reference, what="registered, removed, registered in the other mode")


@pytest.mark.parametrize("deferred", [False, True], ids=["interleaved", "deferred"])
def test_a_removed_update_leaves_an_optimizer_that_steps(deferred: bool) -> None:
    run_ranks(_removed, 2, deferred)


def _functional_without_parameters(rank: int, world_size: int) -> None:
    batches = MLP.batches(rank, steps=5)
    reference = train(*_plain(MLP, SGD), batches, scheduler=_NoScheduler)[-1].parameters
    for register_with in (register, lambda ddp, hook: ddp.register_comm_hook(None, hook)):
        ddp = wrap(MLP.model(), **MLP.ddp_options())
        functional = FunctionalSGD([], lr=0.1, momentum=0.9, _allow_empty_param_list=True)
        register_with(ddp, hook_then_optimizer(allreduce_hook, OptimizerHookState(functional)))
        for batch in batches:
            ddp.zero_grad()
            nn.functional.mse_loss(ddp(*batch.inputs), batch.target).backward()
        assert_parity(dict(ddp.module.named_parameters()), reference, what="a functional optimizer of none at first")


def test_a_functional_optimizer_takes_the_parameters_that_come() -> None:
    run_ranks(_functional_without_parameters, 2)


def _one_step_two_models(rank: int, world_size: int) -> None:
    first, second = (wrap(MLP.model(), **MLP.ddp_options()) for _ in range(2))
    optimizer = OverlappedOptimizer(SGD([*first.parameters(), *second.parameters()]))
    plan = chain(AllReduce(), Step(optimizer, clip_grad_norm=1e-9))
    plan.register(first)
    with pytest.raises(RegistrationError, match="serves a model already; make a Step for each model"):
        plan.register(second)
    before = [p.detach().clone() for p in first.parameters()]
    first(*MLP.batch(0, rank).inputs).sum().backward()
    optimizer.step()
    for ours, old in zip(first.parameters(), before, strict=True):
        torch.testing.assert_close(ours, old, atol=1e-8, rtol=0)  # Still clipped: the refusal changed nothing.


def test_a_step_serves_one_model() -> None:
    run_ranks(_one_step_two_models, 2)


def _frozen_after_wrapping(rank: int, world_size: int) -> None:
    for make in (_plain, _overlapped):
        case = dataclasses.replace(MLP, find_unused_parameters=True)
        ddp = wrap(case.model(), **case.ddp_options())
        for parameter in list(ddp.parameters())[:2]:
            parameter.requires_grad_(False)
        optimizer: Any = SGD(ddp.parameters())
        if make is _overlapped:
            optimizer = OverlappedOptimizer(optimizer)
            chain(AllReduce(), Step(optimizer)).register(ddp)
        step_fn = overlapped_step if make is _overlapped else plain_step
        records = train(ddp, optimizer, case.batches(rank, steps=4), step_fn=step_fn)
        if make is _plain:
            reference = records
    assert_parity(records, reference, what="frozen between wrapping and registering")

    model = MLP.model()
    model[0].requires_grad_(False)
    ddp = wrap(model, **MLP.ddp_options())
    optimizer = OverlappedOptimizer(SGD(ddp.parameters()))
    chain(AllReduce(), Step(optimizer)).register(ddp)
    ddp.module[0].requires_grad_(True)  # DDP has settled what it reduces, so ranks would part here.
    ddp(*MLP.batch(0, rank).inputs).sum().backward()
    with pytest.raises(TrainingLoopError, match=r"not reduced over ranks \(0\.weight and 1 others"):
        optimizer.step()


def test_parameters_frozen_and_unfrozen_after_wrapping() -> None:
    run_ranks(_frozen_after_wrapping, 2)


class CountsInState(Lion):
    """Counts its steps outside of its groups, in one of several ways."""

    where = "state"

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.tensor, self.box = torch.zeros(()), {"n": 0}

    def step(self, closure: Any = None) -> None:
        if self.where == "state":
            self.state["n"] = self.state.get("n", 0) + 1
        elif self.where == "tensor":
            self.tensor += 1
        else:
            self.box["n"] += 1
        super().step()


@pytest.mark.parametrize("where", ["state", "tensor", "box"])
def test_shared_counters_are_found_wherever_they_are(where: str) -> None:
    from overlap.optim.subset import SubsetStepper

    model = MLP.model()
    optimizer = CountsInState(model.parameters())
    optimizer.where = where
    stepper = SubsetStepper(optimizer)
    first, *rest = model.parameters()
    stepper.begin()
    stepper.step([first], [torch.ones_like(first)])
    with pytest.raises(UnsupportedError, match="deferred=True"):
        stepper.step(rest, [torch.ones_like(parameter) for parameter in rest])


def test_parameters_that_change_groups_take_the_new_groups_hyperparameters() -> None:
    from overlap.optim.subset import SubsetStepper

    first, second = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([{"params": [first], "lr": 1.0}, {"params": [second], "lr": 0.5}])
    stepper = SubsetStepper(optimizer)
    groups = optimizer.param_groups
    groups[0]["params"], groups[1]["params"] = groups[1]["params"], groups[0]["params"]
    stepper.begin()
    stepper.step([first, second], [torch.ones(1), torch.ones(1)])
    assert (first.item(), second.item()) == (-0.5, -1.0)


def _clipping_in_vain(rank: int, world_size: int) -> None:
    ddp = wrap(MLP.model(), **MLP.ddp_options())
    chain(AllReduce(), Step(optimizer := SGD(ddp.parameters()))).register(ddp)
    ddp(*MLP.batch(0, rank).inputs).sum().backward()
    optimizer.zero_grad(set_to_none=False)  # Setting to zero is not needed, and does no harm.
    ddp(*MLP.batch(1, rank).inputs).sum().backward()
    torch.nn.utils.clip_grad_norm_(ddp.parameters(), 1e-3)
    with pytest.raises(TrainingLoopError, match=r"changed after backward.*deferred=True"):
        ddp(*MLP.batch(2, rank).inputs)
    with pytest.raises(ConfigurationError, match=r"clip_grad_norm=1\.0 needs the norm of all"):
        Step(optimizer, deferred=False, clip_grad_norm=1.0)


def test_clipping_what_was_applied_is_an_error_with_a_plain_optimizer_too() -> None:
    run_ranks(_clipping_in_vain, 2)


def _distributed_checkpoint(rank: int, world_size: int) -> None:
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    ddp, overlapped, _ = _overlapped(MLP, ADAMW)
    train(ddp, overlapped, MLP.batches(rank, steps=3), step_fn=overlapped_step)
    model_state, optimizer_state = copy.deepcopy(get_state_dict(ddp, overlapped))
    ddp, fresh, _ = _overlapped(MLP, ADAMW)
    set_state_dict(ddp, fresh, model_state_dict=model_state, optim_state_dict=optimizer_state)
    assert_parity(fresh.state_dict()["state"], overlapped.state_dict()["state"], what="state by way of DCP")
    train(ddp, fresh, MLP.batches(rank, steps=2), step_fn=overlapped_step, min_buckets=1)


def test_torchs_distributed_checkpoint_loads_into_a_fresh_optimizer() -> None:
    run_ranks(_distributed_checkpoint, 2)


def _forward_before_step(rank: int, world_size: int) -> None:
    reference_ddp, plain = _plain(MLP, SGD)
    ddp = wrap(MLP.model(), **MLP.ddp_options())
    overlapped = OverlappedOptimizer(SGD(ddp.parameters()))
    chain(AllReduce(), Step(overlapped, params=list(ddp.parameters())[:3])).register(ddp)
    for step in range(4):
        plain.zero_grad()
        for model, optimizer in ((reference_ddp, plain), (ddp, overlapped)):
            model(*MLP.batch(step, rank).inputs).square().mean().backward()
            if model is ddp:
                model(*MLP.batch(step, rank).inputs)
            optimizer.step()
    assert_parity(ddp.module.state_dict(), reference_ddp.module.state_dict(), what="a forward between")


def test_a_forward_between_backward_and_step_loses_nothing() -> None:
    run_ranks(_forward_before_step, 2)


MORE_OPTIMIZERS: dict[str, Make] = {
    "Adafactor": functools.partial(torch.optim.Adafactor, lr=0.01),
    "NAdam": functools.partial(torch.optim.NAdam, lr=0.01, decoupled_weight_decay=True, weight_decay=0.1),
    "RAdam": functools.partial(torch.optim.RAdam, lr=0.01),
    "ASGD": functools.partial(torch.optim.ASGD, lr=0.01, t0=2),
    "Adamax": functools.partial(torch.optim.Adamax, lr=0.01),
    "Adadelta": functools.partial(torch.optim.Adadelta, lr=0.1),
    "Rprop": functools.partial(torch.optim.Rprop, lr=0.01),
    "RMSprop, centered": functools.partial(torch.optim.RMSprop, lr=0.01, centered=True, momentum=0.5),
    "AdamW, maximize": functools.partial(torch.optim.AdamW, lr=0.01, maximize=True),
    "Adagrad, decay": functools.partial(torch.optim.Adagrad, lr=0.1, lr_decay=0.1, weight_decay=0.01),
}


def _more_optimizers(rank: int, world_size: int) -> None:
    batches = MLP.batches(rank, steps=4)
    for name, make in MORE_OPTIMIZERS.items():
        reference = train(*_plain(MLP, make), batches)
        for deferred in (False, True):
            ddp, overlapped, _ = _overlapped(MLP, make, deferred=deferred)
            candidate = train(ddp, overlapped, batches, step_fn=overlapped_step)
            assert_parity(candidate, reference, what=f"{name}, {deferred=}")


def test_the_other_optimizers_of_torch() -> None:
    run_ranks(_more_optimizers, 2)
