"""Groups, clipping, loss scaling, accumulation, reducers before it, whole tensors, wider masters."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import nn
from zero_loops import FORMS, check, plain_run, zero_run

from harness import assert_parity, bucket_calls, overlapped_step, plain_step, run_ranks, wrap
from harness.models import DTYPES, EMPTY, MLP, TRANSFORMER, UNUSED_ON_SOME_RANKS, Batch, Case, mean_squared_error
from overlap import (
    AllReduce,
    Cast,
    TrainingLoopError,
    ZeroRedundancyOptimizer,
    ZeroStep,
    allreduce_hook,
    chain,
    hook_with_zero_step,
    hook_with_zero_step_interleaved,
)

ADAMW_OPTIONS = {"lr": 0.01, "weight_decay": 0.1}
ADAMW = functools.partial(torch.optim.AdamW, **ADAMW_OPTIONS)  # type: ignore[arg-type]
WHOLE = {"partition": "parameter"}


def _two_groups(ddp: nn.Module) -> list[dict[str, Any]]:
    weights = [p for name, p in ddp.named_parameters() if name.endswith("weight")]
    others = [p for name, p in ddp.named_parameters() if not name.endswith("weight")]
    return [{"params": weights, "lr": 0.02}, {"params": others, "weight_decay": 0.0}]


def _cyclic(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=[0.05, 0.1], total_steps=20)


def _groups(rank: int, world_size: int) -> None:
    options: dict[str, Any] = {"parameters": _two_groups, "scheduler": _cyclic}
    reference = plain_run(TRANSFORMER, rank, ADAMW, **options)
    for form in ("interleaved", "deferred", "alone"):
        candidate = zero_run(TRANSFORMER, rank, torch.optim.AdamW, ADAMW_OPTIONS, FORMS[form], **options)
        check(candidate, reference, what=form, world_size=world_size)


def test_two_groups_under_a_scheduler_that_moves_rate_and_momentum() -> None:
    run_ranks(_groups, 2)


def _clip_first(norm_type: float, ddp: nn.Module, optimizer: Any, batch: Batch, loss_of: Any) -> torch.Tensor:
    optimizer.zero_grad()
    loss = loss_of(ddp, batch)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(ddp.parameters(), 0.01, norm_type)
    optimizer.step()
    return loss


def _clipped(rank: int, world_size: int, norm_type: float) -> None:
    reference = plain_run(
        MLP, rank, functools.partial(torch.optim.SGD, lr=0.5), step_fn=functools.partial(_clip_first, norm_type)
    )
    unclipped = plain_run(MLP, rank, functools.partial(torch.optim.SGD, lr=0.5))
    difference = (reference[-1].parameters["0.weight"] - unclipped[-1].parameters["0.weight"]).abs().max()
    assert difference > 1e-2, "clipping must matter"
    for form in ({}, {"automatic": True}, {"gather": "forward"}):
        candidate = zero_run(
            MLP, rank, torch.optim.SGD, {"lr": 0.5}, {"clip_grad_norm": 0.01, "norm_type": norm_type, **form}
        )
        assert_parity(
            [record.parameters for record in candidate],
            [record.parameters for record in reference],
            what=f"{form}",
            exact=False,
            rtol=1e-4,
            atol=1e-6,
            reason="the norm is added up chunk by chunk",
        )


@pytest.mark.parametrize("norm_type", [2.0, float("inf")])
@pytest.mark.parametrize("world_size", [2, 3])
def test_clipping_by_the_global_norm(world_size: int, norm_type: float) -> None:
    run_ranks(_clipped, world_size, norm_type)


def _scaled_run(rank: int, make: Any, bad: tuple[int, int] | None, register: Any) -> tuple[Any, float]:
    ddp = wrap(MLP.model(), **MLP.ddp_options())
    optimizer = make(ddp.parameters())
    register(ddp, optimizer)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3)
    for step in range(7):
        loss = mean_squared_error(ddp, MLP.batch(step, rank))
        if bad == (step, rank):
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        if step % 2:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        if isinstance(optimizer, ZeroRedundancyOptimizer):
            optimizer.wait()
        if not getattr(optimizer, "overlap_with_ddp", False):
            optimizer.zero_grad()
    return {name: p.detach().clone() for name, p in ddp.module.named_parameters()}, scaler.get_scale()


def _register(form: Any, ddp: Any, zero: Any) -> None:
    if form is not None:
        chain(ZeroStep(zero, **form)).register(ddp)


def _scaled(rank: int, world_size: int) -> None:
    for bad in (None, (2, 0), (3, 1)):
        reference, scale = _scaled_run(rank, lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), bad, lambda *_: None)
        for form in ({"deferred": True}, {"deferred": True, "gather": "forward"}, None):
            make = functools.partial(
                ZeroRedundancyOptimizer,
                optimizer_class=torch.optim.SGD,
                lr=0.1,
                momentum=0.9,
                overlap_with_ddp=form is not None,
            )
            candidate, our_scale = _scaled_run(rank, make, bad, functools.partial(_register, form))
            assert_parity(candidate, reference, what=f"{form}, {bad=}")
            assert our_scale == scale


def test_grad_scaler_comes_to_one_verdict_on_all_ranks() -> None:
    run_ranks(_scaled, 2)


def _one_rank_alone_is_not_finite(rank: int, world_size: int) -> float:
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
    return scaler.get_scale()


def test_a_rank_hears_of_a_gradient_that_is_not_finite_elsewhere() -> None:
    assert run_ranks(_one_rank_alone_is_not_finite, 3) == [2.0, 2.0, 2.0]


def _interleaved_scaler(rank: int, world_size: int) -> None:
    ddp = wrap(MLP.model(), **MLP.ddp_options())
    zero = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.SGD, lr=0.1, overlap_with_ddp=True)
    chain(ZeroStep(zero)).register(ddp)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(mean_squared_error(ddp, MLP.batch(0, rank))).backward()
    with pytest.raises(TrainingLoopError, match="deferred=True"):
        scaler.step(zero)


def test_grad_scaler_needs_the_deferred_form() -> None:
    run_ranks(_interleaved_scaler, 2)


def _accumulate(base: Any, ddp: Any, optimizer: Any, batch: Batch, loss_of: Any) -> torch.Tensor:
    if base is plain_step:
        optimizer.zero_grad()
    with ddp.no_sync():
        loss_of(ddp, batch).backward()
    return overlapped_step(ddp, optimizer, batch, loss_of)


def _accumulated(rank: int, world_size: int) -> None:
    for view in (False, True):
        options = {"ddp_options": {"gradient_as_bucket_view": view}}
        reference = plain_run(MLP, rank, ADAMW, step_fn=functools.partial(_accumulate, plain_step), **options)
        for form in ("interleaved", "deferred", "interleaved, gather in forward"):
            candidate = zero_run(
                MLP,
                rank,
                torch.optim.AdamW,
                {"lr": 0.01, "weight_decay": 0.1},
                FORMS[form],
                step_fn=functools.partial(_accumulate, overlapped_step),
                **options,
            )
            check(candidate, reference, what=f"{form}, {view=}", world_size=world_size)


def test_gradients_accumulate_under_no_sync() -> None:
    run_ranks(_accumulated, 2)


def _after_reducers(rank: int, world_size: int) -> None:
    reference = plain_run(MLP, rank, ADAMW)
    arguments = {"lr": 0.01, "weight_decay": 0.1}
    with bucket_calls(AllReduce) as calls:
        for form in ("interleaved", "deferred", "automatic, deferred"):
            candidate = zero_run(MLP, rank, torch.optim.AdamW, arguments, FORMS[form], reducer=AllReduce())
            check(candidate, reference, what=form, world_size=world_size)
        cast = zero_run(MLP, rank, torch.optim.AdamW, arguments, {}, reducer=Cast(torch.float64, AllReduce()))
        check(cast, reference, what="cast", world_size=world_size)
    assert len(calls) > 10


def test_after_a_reducer_each_rank_steps_its_part_of_what_that_left() -> None:
    run_ranks(_after_reducers, 2)


def _under_torch_names(rank: int, world_size: int) -> None:
    reference = plain_run(MLP, rank, ADAMW)
    for wrapper in (hook_with_zero_step, hook_with_zero_step_interleaved):
        ddp = wrap(MLP.model(), **MLP.ddp_options())
        zero = ZeroRedundancyOptimizer(
            ddp.parameters(), torch.optim.AdamW, lr=0.01, weight_decay=0.1, overlap_with_ddp=True
        )
        ddp.register_comm_hook(None, wrapper(allreduce_hook, ddp, zero))
        scheduler = torch.optim.lr_scheduler.ExponentialLR(zero, gamma=0.9)
        for record in reference:
            zero.zero_grad()
            mean_squared_error(ddp, MLP.batch(record.step, rank)).backward()
            scheduler.step()
            ours = {name: p.detach().clone() for name, p in ddp.module.named_parameters()}
            assert_parity(ours, record.parameters, what=f"{wrapper.__name__}, step {record.step}")


def test_the_hooks_of_torchs_names_update_from_the_first_iteration() -> None:
    run_ranks(_under_torch_names, 2)


def _whole(rank: int, world_size: int, case: Case) -> None:
    reference = plain_run(case, rank, ADAMW)
    for form in ("interleaved", "deferred, gather in forward", "alone"):
        candidate = zero_run(
            case,
            rank,
            torch.optim.AdamW,
            {"lr": 0.01, "weight_decay": 0.1},
            FORMS[form],
            zero_options=WHOLE,
        )
        check(candidate, reference, what=f"{form}, {case}", world_size=world_size)


@pytest.mark.parametrize("world_size", [2, 3])
def test_whole_parameters(world_size: int) -> None:
    # At 3 ranks Adam would make much of rounding in the transformer's key biases, whose gradient is zero in theory.
    run_ranks(_whole, world_size, TRANSFORMER if world_size == 2 else MLP)


@pytest.mark.parametrize("case", [DTYPES, EMPTY, UNUSED_ON_SOME_RANKS], ids=str)
def test_whole_parameters_of_other_models(case: Case) -> None:
    run_ranks(_whole, 2, case)


class _Scaled(nn.Module):
    """Has a parameter without dimensions, whose state looks like a number a parameter."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(5, 40)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.scale * self.linear(inputs)  # type: ignore[no-any-return]


class _Unusual(nn.Module):
    """Complex, transposed, permuted, of one element, without dimensions."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.complex = nn.Parameter(torch.randn(7, 5, dtype=torch.complex64))
        self.transposed = nn.Parameter(torch.randn(5, 31).t())
        self.permuted = nn.Parameter(torch.randn(3, 5, 7).permute(2, 0, 1))
        self.one = nn.Parameter(torch.ones(1))
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        magnitudes = (inputs.to(torch.complex64) @ self.complex.t()).abs()
        others = (inputs @ self.transposed.t()).tanh().sum() + (self.permuted * inputs.sum()).tanh().sum()
        return self.scale * self.one * (magnitudes.sum() + others)


def _unusual(rank: int, world_size: int) -> None:
    for form in ("interleaved", "deferred, gather in forward", "automatic, deferred", "alone"):
        options = FORMS[form]
        plain, ddp = wrap(_Unusual(), bucket_cap_mb=1e-4), wrap(_Unusual(), bucket_cap_mb=1e-4)
        reference = torch.optim.AdamW(plain.parameters(), lr=0.01)
        zero = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.AdamW, lr=0.01)
        _register(options, ddp, zero)
        for step in range(4):
            inputs = torch.randn(3, 5, generator=torch.Generator().manual_seed(10 * step + rank))
            for module in (plain, ddp):
                if module is plain or options is None:
                    module.zero_grad()
                module(inputs).sum().backward()
            reference.step()
            if not (options or {}).get("automatic"):
                zero.step()
            zero.wait()
            for (name, ours), theirs in zip(ddp.named_parameters(), plain.parameters(), strict=True):
                assert torch.equal(ours, theirs), f"{form}, step {step}: {name}"
        zero.consolidate_state_dict()
        if rank == 0:
            assert_parity(zero.state_dict()["state"], reference.state_dict()["state"], what=form)


def test_parameters_of_unusual_kinds() -> None:
    run_ranks(_unusual, 2)


def _elementwise(rank: int, world_size: int) -> None:
    inputs = torch.randn(3, 5, generator=torch.Generator().manual_seed(rank))
    for name in ("Adadelta", "Adamax", "ASGD", "NAdam", "RAdam", "Rprop"):
        cls = getattr(torch.optim, name)
        plain, ddp = wrap(_Scaled()), wrap(_Scaled())
        reference = cls(plain.parameters(), lr=0.01)
        zero = ZeroRedundancyOptimizer(ddp.parameters(), cls, lr=0.01, overlap_with_ddp=True)
        chain(ZeroStep(zero)).register(ddp)
        for step in range(5):
            plain.zero_grad()
            plain(inputs).square().mean().backward()
            reference.step()
            ddp(inputs).square().mean().backward()
            zero.step()
            for ours, theirs in zip(ddp.parameters(), plain.parameters(), strict=True):
                assert torch.equal(ours, theirs), f"{name}, step {step}"
            if step == 2:
                # Loads for itself what every rank has.
                zero.load_state_dict(reference.state_dict())
        zero.consolidate_state_dict()
        if rank == 0:
            assert_parity(zero.state_dict()["state"], reference.state_dict()["state"], what=name)


def test_every_elementwise_optimizer_of_pytorch() -> None:
    run_ranks(_elementwise, 2)


def _adafactor(rank: int, world_size: int) -> None:
    reference = plain_run(MLP, rank, functools.partial(torch.optim.Adafactor, lr=0.05))
    for form in ("interleaved", "deferred"):
        candidate = zero_run(MLP, rank, torch.optim.Adafactor, {"lr": 0.05}, FORMS[form], zero_options=WHOLE)
        check(candidate, reference, what=form, world_size=world_size)


def test_an_optimizer_that_needs_whole_tensors() -> None:
    run_ranks(_adafactor, 2)


def _masters(rank: int, world_size: int) -> None:
    """The reference keeps fp32 parameters by hand and rounds them into the model's after each step."""
    model = MLP.model().bfloat16()
    batches = [MLP.batch(step, rank) for step in range(8)]

    def loss_of(ddp: nn.Module, batch: Batch) -> torch.Tensor:
        return nn.functional.mse_loss(ddp(batch.inputs[0].bfloat16()).float(), batch.target)

    plain = wrap(model)
    masters = [p.detach().float() for p in plain.parameters()]
    reference = torch.optim.AdamW(masters, lr=1e-3)
    for form in ("interleaved", "deferred", "alone"):
        ddp = wrap(model)
        zero = ZeroRedundancyOptimizer(
            ddp.parameters(), torch.optim.AdamW, lr=1e-3, master_dtype=torch.float32, overlap_with_ddp=form != "alone"
        )
        if form != "alone":
            chain(ZeroStep(zero, **(FORMS[form] or {}))).register(ddp)
        plain = wrap(model)
        masters = [p.detach().float() for p in plain.parameters()]
        reference = torch.optim.AdamW(masters, lr=1e-3)
        for batch in batches:
            for module in (plain, ddp):
                if form == "alone" or module is plain:
                    module.zero_grad()
                loss_of(module, batch).backward()
            for master, parameter in zip(masters, plain.parameters(), strict=True):
                assert parameter.grad is not None
                master.grad = parameter.grad.float()
            reference.step()
            with torch.no_grad():
                for master, parameter in zip(masters, plain.parameters(), strict=True):
                    parameter.copy_(master)
            zero.step()
            for ours, theirs in zip(ddp.parameters(), plain.parameters(), strict=True):
                assert torch.equal(ours, theirs)
        zero.consolidate_state_dict()
        if rank == 0:
            state = zero.state_dict()["state"]
            for index, master in enumerate(masters):
                assert torch.equal(state[index]["master_param"], master)
                assert state[index]["exp_avg"].dtype == torch.float32


def test_masters_in_fp32_of_bf16_parameters() -> None:
    run_ranks(_masters, 2)


def _some_parameters_are_anothers(rank: int, world_size: int) -> None:
    """Parameters of the model that zero does not have are averaged, and another optimizer steps them."""

    def halves(ddp: nn.Module) -> tuple[list[Any], list[Any]]:
        parameters = list(ddp.parameters())
        return parameters[:5], parameters[5:]

    plain = wrap(MLP.model(), **MLP.ddp_options())
    first, second = halves(plain)
    references = [torch.optim.SGD(first, lr=0.1), torch.optim.AdamW(second, lr=0.01)]
    ddp = wrap(MLP.model(), **MLP.ddp_options())
    first, second = halves(ddp)
    other = torch.optim.SGD(first, lr=0.1)
    zero = ZeroRedundancyOptimizer(second, torch.optim.AdamW, lr=0.01, overlap_with_ddp=True)
    chain(ZeroStep(zero)).register(ddp)
    for step in range(5):
        plain.zero_grad()
        mean_squared_error(plain, MLP.batch(step, rank)).backward()
        for reference in references:
            reference.step()
        other.zero_grad()
        mean_squared_error(ddp, MLP.batch(step, rank)).backward()
        zero.step()
        other.step()
        for ours, theirs in zip(ddp.parameters(), plain.parameters(), strict=True):
            assert torch.equal(ours, theirs), step


def test_what_zero_does_not_have_is_averaged_for_another_optimizer() -> None:
    run_ranks(_some_parameters_are_anothers, 2)


def _added_late(rank: int, world_size: int) -> None:
    plain = wrap(UNUSED_ON_SOME_RANKS.model(), **UNUSED_ON_SOME_RANKS.ddp_options())
    reference = torch.optim.AdamW(plain.module.trunk.parameters(), lr=0.01)
    ddp = wrap(UNUSED_ON_SOME_RANKS.model(), **UNUSED_ON_SOME_RANKS.ddp_options())
    zero = ZeroRedundancyOptimizer(ddp.module.trunk.parameters(), torch.optim.AdamW, lr=0.01, overlap_with_ddp=True)
    chain(ZeroStep(zero)).register(ddp)
    for step in range(6):
        if step == 2:
            reference.add_param_group({"params": list(plain.module.branch.parameters()), "lr": 0.1})
            zero.add_param_group({"params": list(ddp.module.branch.parameters()), "lr": 0.1})
        plain.zero_grad()
        mean_squared_error(plain, UNUSED_ON_SOME_RANKS.batch(step, rank)).backward()
        reference.step()
        ddp.module.branch.zero_grad()
        mean_squared_error(ddp, UNUSED_ON_SOME_RANKS.batch(step, rank)).backward()
        zero.step()
        for ours, theirs in zip(ddp.parameters(), plain.parameters(), strict=True):
            assert torch.equal(ours, theirs), step


def test_a_group_added_later_is_updated_from_the_next_backward_on() -> None:
    run_ranks(_added_late, 2)


def _registered_again(rank: int, world_size: int) -> None:
    """From stage to stage, and to none; what was applied does not come back."""
    for first, second in (
        ("interleaved", "interleaved, gather in forward"),
        ("deferred", "interleaved"),
        ("interleaved", "alone"),
    ):
        plain, ddp = (wrap(MLP.model(), **MLP.ddp_options()) for _ in range(2))
        reference = torch.optim.AdamW(plain.parameters(), **ADAMW_OPTIONS)
        zero = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.AdamW, **ADAMW_OPTIONS)
        registration = chain(ZeroStep(zero, **(FORMS[first] or {}))).register(ddp)
        for step in range(5):
            if step == 3:
                registration.remove()
                _register(FORMS[second], ddp, zero)
            plain.zero_grad()
            mean_squared_error(plain, MLP.batch(step, rank)).backward()
            reference.step()
            if step > 3 and second == "alone":
                zero.zero_grad()
            mean_squared_error(ddp, MLP.batch(step, rank)).backward()
            zero.step()
            zero.wait()
            for ours, theirs in zip(ddp.parameters(), plain.parameters(), strict=True):
                assert torch.equal(ours, theirs), f"{first}, then {second}: step {step}"
        # Alone, whatever has a gradient is stepped, as plain optimizers do, so it must reach the other ranks.
        if second == "alone":
            for model in (plain, ddp):
                model.module[0].weight.requires_grad_(False)
            reference.step()
            zero.step()
            assert torch.equal(ddp.module[0].weight, plain.module[0].weight), "frozen, with a gradient left"


def test_a_stage_that_is_removed_leaves_nothing_behind() -> None:
    run_ranks(_registered_again, 2)
