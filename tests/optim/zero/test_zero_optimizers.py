"""Which optimizers may be divided among ranks, and how, is found out; those that may equal plain DDP."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import Optimizer
from zero_loops import FORMS, check, plain_run, zero_run

from harness import assert_parity, run_ranks, wrap
from harness.models import MLP, mean_squared_error
from harness.third_party import LAMB, SGLD, BlockwiseAdamW, ClippedLAMB, CountingSGD, Lion, Prodigy
from overlap import TrainingLoopError, UnsupportedError, ZeroRedundancyOptimizer, ZeroStep, chain, declare


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
    "Lion": (Lion, "element", {}),
    "LAMB": (LAMB, "parameter", {}),
    "blockwise AdamW": (BlockwiseAdamW, "parameter", {}),
    "count in a group": (Counting, "element", {}),
    "Adafactor": (PLAIN.Adafactor, "parameter", {}),
    "Muon": (PLAIN.Muon, "parameter", {}),
    "SGD": (PLAIN.SGD, "element", {"momentum": 0.9}),
    "Adam": (PLAIN.Adam, "element", {}),
    "AdamW": (PLAIN.AdamW, "element", {}),
    "Adagrad": (PLAIN.Adagrad, "element", {}),
    "Adadelta": (PLAIN.Adadelta, "element", {}),
    "Adamax": (PLAIN.Adamax, "element", {}),
    "ASGD": (PLAIN.ASGD, "element", {}),
    "NAdam": (PLAIN.NAdam, "element", {}),
    "RAdam": (PLAIN.RAdam, "element", {}),
    "RMSprop": (PLAIN.RMSprop, "element", {}),
    "Rprop": (PLAIN.Rprop, "element", {}),
}


def _parameters(cls: type[Optimizer], module: torch.nn.Module) -> list[Tensor]:
    return [p for p in module.parameters() if cls is not PLAIN.Muon or p.dim() == 2]


def _divided(rank: int, world_size: int) -> None:
    for name, (cls, partition, options) in DIVIDED.items():
        zero = ZeroRedundancyOptimizer(_parameters(cls, MLP.model()), cls, **options)
        assert zero.partition == partition, name


def test_an_optimizer_is_divided_as_finely_as_it_may_be() -> None:
    run_ranks(_divided, 2)


# By what is refused: the optimizer, its options, and what the error says.
REFUSED: dict[str, tuple[type[Optimizer], dict[str, Any], str]] = {
    "Prodigy": (Prodigy, {}, "Prodigy is neither known nor declared"),
    "Prodigy by parameter": (Prodigy, {"partition": "parameter"}, "Prodigy is neither known nor declared"),
    "global-norm LAMB": (ClippedLAMB, {}, r"\(LAMB is, but ClippedLAMB overrides its (begin|update)\)"),
    "count in an object": (CountingSGD, {}, "CountingSGD is neither known nor declared"),
    "LAMB by element": (LAMB, {"partition": "element"}, "LAMB does not update each element .*partition='parameter'"),
    "blockwise by element": (BlockwiseAdamW, {"partition": "element"}, "each element by itself"),
    "SGLD": (SGLD, {}, "SGLD is neither known nor declared"),
    "Adafactor by element": (PLAIN.Adafactor, {"partition": "element"}, "partition='parameter'"),
    "Muon by element": (PLAIN.Muon, {"partition": "element"}, "partition='parameter'"),
    "LBFGS": (PLAIN.LBFGS, {}, r"step\(closure\)"),
    "SparseAdam": (PLAIN.SparseAdam, {}, "sparse gradients"),
}


def _refused(rank: int, world_size: int) -> None:
    for name, (cls, options, match) in REFUSED.items():
        with pytest.raises(UnsupportedError, match=match):
            raise AssertionError(name, ZeroRedundancyOptimizer(_parameters(cls, MLP.model()), cls, **options))


def test_an_optimizer_that_ranks_cannot_divide_is_refused() -> None:
    run_ranks(_refused, 2)


def _equal(rank: int, world_size: int, cls: type[Optimizer], forms: list[str], groups: Callable[..., Any]) -> None:
    reference = plain_run(MLP, rank, cls, parameters=groups)
    for form in forms:
        candidate = zero_run(MLP, rank, cls, {}, FORMS[form], parameters=groups)
        check(candidate, reference, what=f"{cls.__name__}, {form}", world_size=world_size)


def _several_groups(ddp: torch.nn.Module) -> list[dict[str, Any]]:
    """The second of which is so small that one rank has nothing of it."""
    first, second, *others = ddp.parameters()
    return [{"params": [first, *others]}, {"params": [second], "lr": 0.05}]


def test_a_count_of_steps_equals_plain_ddps_where_a_rank_has_nothing_of_a_group() -> None:
    run_ranks(
        _equal, 2, Counting, ["interleaved", "deferred", "automatic", "automatic, deferred", "alone"], _several_groups
    )


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
