"""Parameters of every kind and memory layout, every optimizer of PyTorch, wider masters."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn
from zero_loops import ADAMW, ADAMW_OPTIONS, FORMS, check, plain_run, register, zero_run

from harness import assert_parity, run_ranks, wrap
from harness.models import DTYPES, EMPTY, MLP, TRANSFORMER, UNUSED_ON_SOME_RANKS, Batch, Case
from overlap import ZeroRedundancyOptimizer, ZeroStep, chain

WHOLE = {"partition": "parameter"}


def _whole(rank: int, world_size: int, case: Case) -> None:
    reference = plain_run(case, rank, ADAMW)
    for form in ("interleaved", "deferred, gather in forward", "alone"):
        candidate = zero_run(
            case,
            rank,
            torch.optim.AdamW,
            ADAMW_OPTIONS,
            FORMS[form],
            zero_options=WHOLE,
        )
        check(candidate, reference, what=f"{form}, {case}", world_size=world_size)


@pytest.mark.parametrize("world_size", [2, 3])
def test_whole_parameters_equal_plain_ddp(world_size: int) -> None:
    # At 3 ranks Adam would make much of rounding in the transformer's key biases, whose gradient is zero in theory.
    run_ranks(_whole, world_size, TRANSFORMER if world_size == 2 else MLP)


@pytest.mark.parametrize("case", [DTYPES, EMPTY, UNUSED_ON_SOME_RANKS], ids=str)
def test_whole_parameters_of_several_dtypes_empty_or_unused(case: Case) -> None:
    run_ranks(_whole, 2, case)


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


def _unusual(rank: int, world_size: int, form: str) -> None:
    options = FORMS[form]
    plain, ddp = wrap(_Unusual(), bucket_cap_mb=1e-4), wrap(_Unusual(), bucket_cap_mb=1e-4)
    reference = torch.optim.AdamW(plain.parameters(), lr=0.01)
    zero = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.AdamW, lr=0.01)
    register(options, ddp, zero)
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
            assert torch.equal(ours, theirs), f"step {step}: {name}"
    zero.consolidate_state_dict()
    if rank == 0:
        assert_parity(zero.state_dict()["state"], reference.state_dict()["state"], what=form)


@pytest.mark.parametrize("form", ["interleaved", "deferred, gather in forward", "automatic, deferred", "alone"])
def test_complex_transposed_permuted_and_tiny_parameters(form: str) -> None:
    run_ranks(_unusual, 2, form)


def _channels_last(rank: int, world_size: int, moved_before: int | None, steps: int) -> None:
    def build() -> nn.Module:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(3, 32, 3), nn.ReLU(), nn.Conv2d(32, 16, 3), nn.Flatten())
        return model.to(memory_format=torch.channels_last)

    plain, ddp = wrap(build(), bucket_cap_mb=0.005), wrap(build(), bucket_cap_mb=0.005)
    reference = torch.optim.AdamW(plain.parameters(), lr=0.01)
    zero = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.AdamW, lr=0.01, overlap_with_ddp=True)
    chain(ZeroStep(zero)).register(ddp)
    for step in range(steps):
        inputs = torch.randn(2, 3, 6, 6, generator=torch.Generator().manual_seed(10 * step + rank))
        if step == moved_before:
            for parameter in ddp.parameters():
                parameter.data = parameter.data.clone(memory_format=torch.preserve_format)
        plain.zero_grad()
        plain(inputs).square().mean().backward()
        reference.step()
        ddp(inputs).square().mean().backward()
        zero.step()
        for ours, theirs in zip(ddp.parameters(), plain.parameters(), strict=True):
            assert torch.equal(ours, theirs), step
    zero.consolidate_state_dict()
    if rank == 0:
        ours, theirs = zero.state_dict()["state"], reference.state_dict()["state"]
        assert torch.equal(ours[0]["exp_avg"], theirs[0]["exp_avg"])


def test_channels_last_parameters() -> None:
    run_ranks(_channels_last, 2, None, 3)


def test_parameters_that_are_moved_to_other_memory() -> None:
    run_ranks(_channels_last, 2, 3, 6)


def _adafactor(rank: int, world_size: int) -> None:
    reference = plain_run(MLP, rank, functools.partial(torch.optim.Adafactor, lr=0.05))
    for form in ("interleaved", "deferred"):
        candidate = zero_run(MLP, rank, torch.optim.Adafactor, {"lr": 0.05}, FORMS[form], zero_options=WHOLE)
        check(candidate, reference, what=form, world_size=world_size)


def test_adafactor_steps_whole_parameters() -> None:
    run_ranks(_adafactor, 2)


def _masters(rank: int, world_size: int, form: str) -> None:
    """The reference keeps fp32 parameters by hand and rounds them into the model's after each step."""
    model = MLP.model().bfloat16()

    def loss_of(ddp: nn.Module, batch: Batch) -> torch.Tensor:
        return nn.functional.mse_loss(ddp(batch.inputs[0].bfloat16()).float(), batch.target)

    plain, ddp = wrap(model), wrap(model)
    masters = [p.detach().float() for p in plain.parameters()]
    reference = torch.optim.AdamW(masters, lr=1e-3)
    zero = ZeroRedundancyOptimizer(
        ddp.parameters(), torch.optim.AdamW, lr=1e-3, master_dtype=torch.float32, overlap_with_ddp=form != "alone"
    )
    register(FORMS[form], ddp, zero)
    for step in range(8):
        batch = MLP.batch(step, rank)
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


@pytest.mark.parametrize("form", ["interleaved", "deferred", "alone"])
def test_bf16_parameters_are_updated_in_fp32(form: str) -> None:
    run_ranks(_masters, 2, form)


# The kernels in which 16-bit elements at a tensor's end are rounded as no others are.
KERNELS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, object]]] = {
    f"{cls.__name__} {kernel}": (cls, {"lr": 0.01, "weight_decay": 0.1, "foreach": False, **options, kernel: True})
    for cls, options in (
        (torch.optim.SGD, {"momentum": 0.9}),
        (torch.optim.Adam, {"eps": 1e-4}),
        (torch.optim.AdamW, {"eps": 1e-4}),
    )
    for kernel in ("foreach", "fused")
}


def _low_precision(rank: int, world_size: int, dtype: torch.dtype) -> None:
    def build() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(37, 29), nn.Tanh(), nn.Linear(29, 71), nn.Tanh(), nn.Linear(71, 5)).to(dtype)

    inputs = torch.randn(4, 37, generator=torch.Generator().manual_seed(rank)).to(dtype)
    for name, (cls, options) in KERNELS.items():
        plain, ddp = wrap(build(), bucket_cap_mb=0.005), wrap(build(), bucket_cap_mb=0.005)
        reference = cls(plain.parameters(), **options)  # type: ignore[call-arg]
        zero = ZeroRedundancyOptimizer(ddp.parameters(), cls, overlap_with_ddp=True, **options)  # type: ignore[arg-type]
        registration = chain(ZeroStep(zero)).register(ddp)
        for step in range(4):
            plain.zero_grad()
            plain(inputs).float().square().mean().backward()
            reference.step()
            ddp(inputs).float().square().mean().backward()
            zero.step()
            assert_parity(list(ddp.parameters()), list(plain.parameters()), what=f"{name}, {dtype}, step {step}")
        registration.remove()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_every_kernel_equals_plain_ddp_in_every_precision(dtype: torch.dtype) -> None:
    run_ranks(_low_precision, 2, dtype)
