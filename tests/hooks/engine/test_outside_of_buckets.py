"""Parameters that require a gradient and are in no bucket of DDP's: added, or unfrozen, after it was made."""

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import overlap
from harness import assert_parity, on_ranks, wrap
from overlap import (
    AllReduce,
    Int8,
    LocalSGD,
    OverlappedOptimizer,
    Quantize,
    Step,
    TrainingLoopError,
    ZeroRedundancyOptimizer,
    ZeroStep,
    chain,
)

FORMS = ("interleaved", "deferred", "automatic", "zero", "local")


class _Heads(nn.Module):
    def __init__(self, frozen: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Linear(8, 8).requires_grad_(not frozen)
        self.heads = nn.ModuleList([nn.Linear(8, 2)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        z = self.body(x).relu()
        return sum((head(z) for head in self.heads), torch.zeros(()))


def _added(module: Any) -> None:
    module.heads.append(nn.Linear(8, 2))


def _inserted(module: Any) -> None:
    module.heads.insert(0, nn.Linear(8, 2))


def _unfrozen(module: Any) -> None:
    module.body.requires_grad_(True)


CHANGES: dict[str, tuple[Callable[[Any], None], str]] = {
    "added": (_added, "heads.1.weight, heads.1.bias require a gradient"),
    "inserted": (_inserted, "heads.0.weight, heads.0.bias require a gradient"),
    "unfrozen": (_unfrozen, "body.weight, body.bias require a gradient"),
}


def _registered(form: str, ddp: Any) -> tuple[Any, Any]:
    """The loop's optimizer, whose ``step`` is to be called, and the registration."""
    if form == "plain":
        return torch.optim.SGD(ddp.parameters(), lr=0.1), None
    if form == "zero":
        zero = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.SGD, lr=0.1)
        return zero, chain(ZeroStep(zero, gather="forward")).register(ddp)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    if form == "local":
        local = LocalSGD(ddp, optimizer, period=2, start_step=0)
        return local, local
    if form == "automatic":
        return None, chain(AllReduce(), Step(optimizer)).register(ddp)
    optimizer = OverlappedOptimizer(optimizer)
    return optimizer, chain(AllReduce(), Step(optimizer, deferred=form == "deferred")).register(ddp)


def _step(ddp: Any, optimizer: Any, rank: int, seed: int) -> None:
    ddp.zero_grad()
    ddp(torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * seed + rank))).square().mean().backward()
    if optimizer is not None:
        optimizer.step()


def _refused(rank: int, form: str, change: str) -> None:
    ddp = wrap(_Heads(frozen=change == "unfrozen"))
    optimizer, registration = _registered(form, ddp)
    for seed in range(3):
        _step(ddp, optimizer, rank, seed)
    if form == "zero":
        optimizer.wait()  # For the gather.
    edit, message = CHANGES[change]
    torch.manual_seed(1)
    edit(ddp.module)
    before = {name: parameter.clone() for name, parameter in ddp.module.named_parameters()}
    for _ in range(2):
        with pytest.raises(TrainingLoopError, match=rf"{message}.*ddp = DistributedDataParallel\(ddp.module\)"):
            _step(ddp, optimizer, rank, 3)
    assert_parity(dict(ddp.module.named_parameters()), before, what="parameters after the refusal")
    # The remedy.
    registration.remove()
    ddp = wrap(ddp.module)
    reference = wrap(copy.deepcopy(ddp.module))
    optimizer, registration = _registered(form, ddp)
    plain, _ = _registered("plain", reference)
    for seed in range(4, 6) if form != "local" else ():
        _step(ddp, optimizer, rank, seed)
        _step(reference, plain, rank, seed)
    ddp(torch.zeros(1, 8))  # Ends a gather.
    assert_parity(
        dict(ddp.module.named_parameters()), dict(reference.module.named_parameters()), what=f"{form}, {change}"
    )


def _unfrozen_before_the_first_forward(rank: int) -> None:
    for form in ("interleaved", "deferred", "automatic", "zero"):
        ddp = wrap(_Heads(frozen=True))
        optimizer, _ = _registered(form, ddp)
        _unfrozen(ddp.module)
        with pytest.raises(TrainingLoopError, match="unfreeze parameters"):
            _step(ddp, optimizer, rank, 0)


def _warned(rank: int) -> None:
    for edit, message in CHANGES.values():
        ddp = wrap(_Heads(frozen=edit is _unfrozen))
        chain(AllReduce()).register(ddp)
        _step(ddp, None, rank, 0)
        edit(ddp.module)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for seed in range(3):
                _step(ddp, None, rank, seed)
        assert [message in str(one.message) for one in caught] == [True]


def _allowed(rank: int) -> None:
    """Frozen when the chain is registered and not when DDP was made; frozen additions; parameters that DDP ignores."""
    for form in FORMS[:4]:
        module: Any = _Heads(frozen=False)
        nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, ["heads.1.weight"])
        ddp = wrap(module, find_unused_parameters=True)
        module.body.requires_grad_(False)
        optimizer, _ = _registered(form, ddp)
        module.body.requires_grad_(True)
        _step(ddp, optimizer, rank, 0)
        module.heads.append(nn.Linear(8, 2).requires_grad_(False))
        module.body.requires_grad_(False)
        _step(ddp, optimizer, rank, 1)
        module.body.requires_grad_(True)
        _step(ddp, optimizer, rank, 2)


@on_ranks(2)
def test_parameters_that_ddp_does_not_reduce_are_refused_by_name_or_with_a_reducer_alone_warned_of(rank: int) -> None:
    for form in FORMS:
        for change in CHANGES:
            _refused(rank, form, change)
    _unfrozen_before_the_first_forward(rank)
    _warned(rank)
    _allowed(rank)


@on_ranks(4)
def test_with_tensor_parallelism_a_chain_is_registered_before_a_forward_or_refused(rank: int, world_size: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    for is_late in (False, True):
        torch.manual_seed(0)
        plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
        module = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.LayerNorm(8))
        ddp = nn.parallel.DistributedDataParallel(parallelize_module(module, mesh["tp"], plan), device_mesh=mesh["dp"])
        x = torch.full((2, 8), float(mesh.get_local_rank("dp")))
        if is_late:
            ddp(x).sum().backward()
        chain(Quantize(Int8(), error_feedback=True)).register(ddp)
        if is_late:
            with pytest.raises(TrainingLoopError, match=r"bucket 0 has a parameter of shape .* has no name"):
                ddp(x).sum().backward()
            continue
        for _ in range(3):
            ddp.zero_grad()
            ddp(x).sum().backward()
        assert len(overlap.state_dict(ddp)["stages"]["state"]["0"]["error"]) == 6
