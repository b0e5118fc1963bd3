"""The sharded update equals plain DDP and the same optimizer: every form, model, kind of parameter and optimizer."""

import copy
import itertools
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer
from zero_loops import ADAMW_OPTIONS, FORMS, register

from harness import assert_parity, on_ranks, plain_step, wrap
from harness.models import MLP, mean_squared_error
from overlap import TrainingLoopError, ZeroRedundancyOptimizer, ZeroStep, chain, declare

THREE_RANKS: dict[str, Any] = {
    "rtol": 2e-4,
    "atol": 2e-5,
    "reason": "three gradients are added up in ranks' order, Gloo's ring adds them in another",
}


@on_ranks(1, 2, 3)
def test_every_form_equals_plain_ddp(rank: int, world_size: int) -> None:
    """tests/loops has models, optimizers and loops of every kind."""
    forms = FORMS if world_size == 2 else ("interleaved", "deferred, gather in forward", "alone")
    tolerance = THREE_RANKS if world_size > 2 else {}
    for form, partition in itertools.product(forms, ("element", "parameter")):
        plain, ddp = (wrap(MLP.model(), **MLP.ddp_options()) for _ in range(2))
        reference = torch.optim.AdamW(plain.parameters(), **ADAMW_OPTIONS)
        zero = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.AdamW, partition=partition, **ADAMW_OPTIONS)
        register(form, ddp, zero)
        what = f"{form}, {partition}, {world_size} ranks"
        for batch in MLP.batches(rank, steps=4):
            for model, optimizer in ((plain, reference), (ddp, zero)):
                plain_step(model, optimizer, batch, mean_squared_error)
            zero.wait()
            assert_parity(list(ddp.parameters()), list(plain.parameters()), what=what, **tolerance)
        zero.consolidate_state_dict(to=None)
        assert_parity(zero.state_dict(), reference.state_dict(), what=f"state, {what}", **tolerance)


@on_ranks(2)
def test_parameters_that_move_to_other_memory_are_followed(rank: int, world_size: int) -> None:
    """tests/loops has complex, transposed and tiny ones."""
    for form in ("interleaved", "alone"):
        plain, ddp = (wrap(MLP.model(), **MLP.ddp_options()) for _ in range(2))
        reference = torch.optim.AdamW(plain.parameters(), **ADAMW_OPTIONS)
        zero = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.AdamW, **ADAMW_OPTIONS)
        register(form, ddp, zero)
        for step in range(4):
            for parameter in ddp.parameters() if step == 2 else ():
                parameter.data = parameter.data.clone()
            for model, optimizer in ((plain, reference), (ddp, zero)):
                plain_step(model, optimizer, MLP.batch(step, rank), mean_squared_error)
            assert_parity(list(ddp.parameters()), list(plain.parameters()), what=f"{form}, step {step}")


@on_ranks(2)
def test_bf16_parameters_are_updated_in_fp32(rank: int, world_size: int) -> None:
    """The reference keeps fp32 parameters by hand and rounds them into the model's after each step."""
    for form in ("interleaved", "deferred", "alone"):
        model = MLP.model().bfloat16()
        plain, ddp = wrap(copy.deepcopy(model)), wrap(model)
        masters = [p.detach().float() for p in plain.parameters()]
        reference = torch.optim.AdamW(masters, lr=1e-3)
        zero = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.AdamW, lr=1e-3, master_dtype=torch.float32)
        register(form, ddp, zero)
        for step in range(6):
            batch = MLP.batch(step, rank)
            for module in (plain, ddp):
                if form == "alone" or module is plain:
                    module.zero_grad()
                nn.functional.mse_loss(module(batch.inputs[0].bfloat16()).float(), batch.target).backward()
            for master, parameter in zip(masters, plain.parameters(), strict=True):
                assert parameter.grad is not None
                master.grad = parameter.grad.float()
            reference.step()
            with torch.no_grad():
                for master, parameter in zip(masters, plain.parameters(), strict=True):
                    parameter.copy_(master)
            zero.step()
            assert_parity(list(ddp.parameters()), list(plain.parameters()), what=f"{form}, step {step}")
        zero.consolidate_state_dict(to=None)
        state = zero.state_dict()["state"]
        for index, master in enumerate(masters):
            assert torch.equal(state[index]["master_param"], master)
            assert state[index]["exp_avg"].dtype == torch.float32


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


@on_ranks(2)
def test_every_kernel_equals_plain_ddp_in_low_precision(rank: int, world_size: int) -> None:
    for dtype, (name, (cls, options)) in itertools.product((torch.bfloat16, torch.float16), KERNELS.items()):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(37, 29), nn.Tanh(), nn.Linear(29, 71), nn.Tanh(), nn.Linear(71, 5)).to(dtype)
        inputs = torch.randn(4, 37, generator=torch.Generator().manual_seed(rank)).to(dtype)
        plain, ddp = wrap(copy.deepcopy(model), bucket_cap_mb=0.005), wrap(model, bucket_cap_mb=0.005)
        reference = cls(plain.parameters(), **options)  # type: ignore[call-arg]
        zero = ZeroRedundancyOptimizer(ddp.parameters(), cls, overlap_with_ddp=True, **options)  # type: ignore[arg-type]
        chain(ZeroStep(zero)).register(ddp)
        for step in range(3):
            plain.zero_grad()
            plain(inputs).float().square().mean().backward()
            reference.step()
            ddp(inputs).float().square().mean().backward()
            zero.step()
            assert_parity(list(ddp.parameters()), list(plain.parameters()), what=f"{name}, {dtype}, step {step}")


@declare("element")
class Selective(Optimizer):
    """SGD that asks for names and for what is trained, takes an argument, and keeps a global value in its state."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})
        self.state["settings"] = {"largest": torch.full((3,), 7.0)}

    @torch.no_grad()
    def step(self, closure: Any = None, *, scale: float = 1.0) -> None:
        for group in self.param_groups:
            for name, parameter in zip(group["param_names"], group["params"], strict=True):
                if parameter.requires_grad and parameter.grad is not None:
                    factor = 0.5 if name.endswith("bias") else 1.0
                    parameter.add_(parameter.grad, alpha=-group["lr"] * factor * scale)


@on_ranks(2)
def test_names_requires_grad_and_arguments_of_step_reach_the_optimizer(rank: int, world_size: int) -> None:
    plain, ddp = wrap(MLP.model(), **MLP.ddp_options()), wrap(MLP.model(), **MLP.ddp_options())
    reference = Selective(plain.module.named_parameters())
    zero = ZeroRedundancyOptimizer(ddp.module.named_parameters(), Selective, overlap_with_ddp=True)
    assert zero.partition == "element"
    registration = chain(ZeroStep(zero, deferred=True)).register(ddp)
    for step in range(4):
        reference.zero_grad()
        for module in (plain, ddp):
            mean_squared_error(module, MLP.batch(step, rank)).backward()
        reference.step(scale=1.0 + step)
        zero.step(scale=1.0 + step)
        assert_parity(list(ddp.parameters()), list(plain.parameters()), what=f"step {step}")
    zero.consolidate_state_dict(to=None)
    assert_parity(zero.state_dict(), reference.state_dict(), what="state")
    registration.remove()
    chain(ZeroStep(zero)).register(ddp)
    mean_squared_error(ddp, MLP.batch(0, rank)).backward()
    with pytest.raises(TrainingLoopError, match=r"zero\.step\(scale=\.\.\.\): the update was made in backward"):
        zero.step(scale=2.0)
