"""Tensor parallelism inside of FSDP and of DDP, and the ``replicate`` that is built on DDP."""

import functools
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable.replicate import replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import overlap
from harness import on_ranks
from overlap.ranks.board import of_all_ranks

from .given import assert_same, local, mesh_of, raised_by, values

PLAN = {"first": ColwiseParallel(), "second": RowwiseParallel()}


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.norm = nn.Linear(6, 8), nn.Linear(8, 6), nn.LayerNorm(6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.second(torch.tanh(self.first(x))))


def _parallel(mesh: Any) -> nn.Module:
    torch.manual_seed(0)
    return parallelize_module(Mlp(), mesh["tp"], PLAN)


def _trained(model: Any, steps: int = 3) -> list[Any]:
    optimizer, found = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), []
    for step in range(steps):
        # The two ranks of tensor parallelism have the same inputs.
        generator = torch.Generator().manual_seed(100 * step + dist.get_rank() // 2)
        optimizer.zero_grad()
        model(torch.randn(4, 6, generator=generator)).pow(2).sum().backward()
        optimizer.step()
        found.append(values(model))
    return found


@on_ranks(8)
def test_tensor_parallelism_inside_of_fsdp(rank: int) -> None:
    from torch.distributed.fsdp import fully_shard

    mesh = mesh_of((2, 2, 2), ("replicate", "shard", "tp"))

    def made() -> Any:
        model = _parallel(mesh)
        for module in (model.norm, model):
            fully_shard(module, mesh=mesh["replicate", "shard"])
        return model

    native, model = made(), made()
    overlap.register(model, overlap.AllReduce())
    assert_same(_trained(native), _trained(model))
    # Copies of a parameter stay equal, or it is refused.
    model, int8 = made(), overlap.Quantize(overlap.Int8(), error_feedback=True)
    text = raised_by(functools.partial(overlap.register, model, int8))
    assert "copies of norm.bias, norm.weight, second.bias" in text and "overlap.route({" in text, text
    remedy = text.split("write ")[1].replace(repr(int8), "int8")
    names = {"overlap": overlap, "AllReduce": overlap.AllReduce, "int8": int8}
    registration = overlap.register(model, eval(remedy, names))
    _trained(model)
    assert all(
        one == local(model.norm.weight).sum()
        for one in of_all_ranks(local(model.norm.weight).sum(), mesh.get_group("tp"))
    )
    state = registration.state_dict()
    (error,) = (value for key, value in state.items() if key.endswith("error|first.weight"))
    assert error.shape == model.first.weight.shape and error.device_mesh.ndim == 2


@on_ranks(4)
def test_tensor_parallelism_inside_of_ddp() -> None:
    mesh = mesh_of((2, 2), ("dp", "tp"))

    def made() -> Any:
        return DistributedDataParallel(_parallel(mesh), device_mesh=mesh["dp"])

    plain, ddp, late = made(), made(), made()
    overlap.register(ddp, overlap.AllReduce())
    assert_same(_trained(plain), _trained(ddp))
    # Registered after a forward, a parameter has no name.
    late(torch.ones(1, 6)).sum().backward()
    text = raised_by(lambda: (overlap.register(late, overlap.Quantize()), late(torch.ones(1, 6)).sum().backward()))
    assert "has no name" in text and "register before the first forward" in text


@on_ranks(2)
def test_replicate_on_ddp_is_served_by_its_ddp_with_real_names(rank: int) -> None:
    def made() -> Any:
        torch.manual_seed(0)
        return replicate(Mlp(), bucket_cap_mb=0.0001)

    mesh, found = mesh_of((2,), ("dp",)), []
    for with_chain in (False, True):
        model = made()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        names: list[str] = []
        if with_chain:
            optimizer = overlap.OverlappedOptimizer(optimizer)
            note = lambda bucket, names=names: names.extend(bucket.names)  # noqa: E731
            registration = overlap.chain(overlap.AllReduce(), note, overlap.Step(optimizer)).register(model)
        steps = []
        for step in range(4):
            optimizer.zero_grad()
            for is_last in (False, True):
                model.set_requires_gradient_sync(is_last)
                model(torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * step + rank))).sum().backward()
            optimizer.step()
            steps.append([local(one) for one in model.parameters()])
        found.append(steps)
    assert_same(*found)
    assert set(names) == {name for name, _ in model.named_parameters()} and mesh.size() == dist.get_world_size()
    registration.remove()
    feedback = overlap.Quantize(overlap.Int4(), error_feedback=True)
    overlap.register(model, feedback)
    model(torch.randn(4, 6)).sum().backward()
    model(torch.randn(4, 6))
    assert set(feedback.state_dict()["error"]) == set(names)
