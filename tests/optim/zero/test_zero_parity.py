"""The sharded update equals plain DDP and the same optimizer: every form, model, kind of parameter and optimizer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer
from zero_loops import ADAMW, ADAMW_OPTIONS, FORMS, check, plain_run, register, zero_run

from harness import assert_parity, run_ranks, wrap
from harness.models import MLP, Batch, mean_squared_error
from harness.third_party import LAMB, BlockwiseAdamW
from overlap import TrainingLoopError, UnsupportedError, ZeroRedundancyOptimizer, ZeroStep, chain, declare


def _forms(rank: int, world_size: int) -> None:
    reference = plain_run(MLP, rank, ADAMW)
    for form, options in FORMS.items():
        if world_size != 2 and form not in ("interleaved", "deferred, gather in forward", "alone"):
            continue
        for partition in ("element", "parameter"):
            zero_options = {"partition": partition}
            candidate = zero_run(MLP, rank, torch.optim.AdamW, ADAMW_OPTIONS, options, zero_options=zero_options)
            check(candidate, reference, what=f"{form}, {partition}, {world_size} ranks", world_size=world_size)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_every_form_equals_plain_ddp(world_size: int) -> None:
    """tests/loops has models, optimizers and loops of every kind."""
    run_ranks(_forms, world_size)


def _moved(rank: int, world_size: int) -> None:
    for form in ("interleaved", "alone"):
        plain, ddp = (wrap(MLP.model(), **MLP.ddp_options()) for _ in range(2))
        reference = torch.optim.AdamW(plain.parameters(), **ADAMW_OPTIONS)
        zero = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.AdamW, **ADAMW_OPTIONS)
        register(FORMS[form], ddp, zero)
        for step in range(4):
            for parameter in ddp.parameters() if step == 2 else ():
                parameter.data = parameter.data.clone()
            for model, optimizer in ((plain, reference), (ddp, zero)):
                optimizer.zero_grad()
                mean_squared_error(model, MLP.batch(step, rank)).backward()
                optimizer.step()
            assert_parity(list(ddp.parameters()), list(plain.parameters()), what=f"{form}, step {step}")


def test_parameters_that_move_to_other_memory_are_followed() -> None:
    """tests/loops has complex, transposed and tiny ones."""
    run_ranks(_moved, 2)


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


def test_bf16_parameters_are_updated_in_fp32() -> None:
    def forms(rank: int, world_size: int) -> None:
        for form in ("interleaved", "deferred", "alone"):
            _masters(rank, world_size, form)

    run_ranks(forms, 2)


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


def test_every_kernel_equals_plain_ddp_in_low_precision() -> None:
    def dtypes(rank: int, world_size: int) -> None:
        for dtype in (torch.bfloat16, torch.float16):
            _low_precision(rank, world_size, dtype)

    run_ranks(dtypes, 2)


@declare("element")
class Counting(Optimizer):
    """SGD whose rate falls with a count of steps in each group, as schedule-free optimizers have one."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "k": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["k"] += 1
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.add_(parameter.grad, alpha=-group["lr"] / group["k"])


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


PLAIN = torch.optim
# By optimizer: how it is divided.
DIVIDED: dict[str, tuple[type[Optimizer], str, dict[str, Any]]] = {
    "LAMB": (LAMB, "parameter", {}),
    "blockwise AdamW": (BlockwiseAdamW, "parameter", {}),
    "count in a group": (Counting, "element", {}),
    "Adafactor": (PLAIN.Adafactor, "parameter", {}),
}


def _divided(rank: int, world_size: int) -> None:
    for name, (cls, partition, options) in DIVIDED.items():
        zero = ZeroRedundancyOptimizer(MLP.model().parameters(), cls, **options)
        assert zero.partition == partition, name


# By what is refused: the optimizer, its options, and what the error says.
REFUSED: dict[str, tuple[type[Optimizer], dict[str, Any], str]] = {
    "LAMB by element": (LAMB, {"partition": "element"}, "LAMB does not update each element .*partition='parameter'"),
    "blockwise by element": (BlockwiseAdamW, {"partition": "element"}, "each element by itself"),
    "LBFGS": (PLAIN.LBFGS, {}, r"step\(closure\)"),
}


def _refused(rank: int, world_size: int) -> None:
    for name, (cls, options, match) in REFUSED.items():
        with pytest.raises(UnsupportedError, match=match):
            raise AssertionError(name, ZeroRedundancyOptimizer(MLP.model().parameters(), cls, **options))


def test_an_optimizer_is_divided_as_finely_as_it_may_be_or_refused() -> None:
    def both(rank: int, world_size: int) -> None:
        _divided(rank, world_size)
        _refused(rank, world_size)

    run_ranks(both, 1)


def _several_groups(ddp: torch.nn.Module) -> list[dict[str, Any]]:
    """The second of which is so small that one rank has nothing of it."""
    first, second, *others = ddp.parameters()
    return [{"params": [first, *others]}, {"params": [second], "lr": 0.05}]


def _counted(rank: int, world_size: int) -> None:
    reference = plain_run(MLP, rank, Counting, parameters=_several_groups)
    for form in ("interleaved", "deferred", "automatic, deferred", "alone"):
        candidate = zero_run(MLP, rank, Counting, {}, FORMS[form], parameters=_several_groups)
        check(candidate, reference, what=form, world_size=world_size)


def test_a_count_of_steps_equals_plain_ddps_where_a_rank_has_nothing_of_a_group() -> None:
    run_ranks(_counted, 2)


def _selective(rank: int, world_size: int) -> None:
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


def test_names_requires_grad_and_arguments_of_step_reach_the_optimizer() -> None:
    run_ranks(_selective, 2)
