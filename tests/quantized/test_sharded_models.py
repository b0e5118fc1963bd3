"""FSDP2 shards within a node, and a quantized all-reduce between nodes: the gradients of DDP on all ranks, rounded."""

import copy
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel

from harness import run_ranks
from overlap import Int8, auto_quantize


def _sharded(model: nn.Module, mesh: DeviceMesh, reduce: Callable[[Tensor], None]) -> nn.Module:
    sharded = copy.deepcopy(model)
    for module in (*(one for one in sharded if isinstance(one, nn.Linear)), sharded):
        fully_shard(module, mesh=mesh["shard"])
    for module in sharded.modules():
        if isinstance(module, FSDPModule):
            module.set_all_reduce_hook(reduce)
    return sharded


def _gradients(rank: int, world_size: int) -> list[list[Tensor]]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    nodes = mesh.get_group("replicate")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8))
    quantized = auto_quantize(dist.all_reduce, Int8())

    def reduce(shard: Tensor) -> None:
        dist.all_reduce(shard, group=nodes)
        shard.div_(nodes.size())

    def reduce_quantized(shard: Tensor) -> None:
        quantized(shard, op=dist.ReduceOp.AVG, group=nodes)

    plain = DistributedDataParallel(copy.deepcopy(model))
    models = [plain, _sharded(model, mesh, reduce), _sharded(model, mesh, reduce_quantized)]
    x = torch.randn(16, 64, generator=torch.Generator().manual_seed(rank))
    for one in models:
        one(x).square().mean().backward()
    full: Callable[[Tensor], Tensor] = lambda grad: grad.full_tensor() if hasattr(grad, "full_tensor") else grad  # noqa: E731
    return [[full(p.grad) for p in one.parameters()] for one in models]  # type: ignore[arg-type]


def test_a_quantized_all_reduce_between_nodes_is_the_hook_of_a_sharded_model() -> None:
    for plain, exact, rounded in run_ranks(_gradients, 4):
        for expected, one, other in zip(plain, exact, rounded, strict=True):
            torch.testing.assert_close(one, expected, rtol=1e-5, atol=1e-7)
            error = (other - expected).abs().max() / expected.abs().max()
            assert 0 < error < 3 / 127
