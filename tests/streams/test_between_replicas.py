"""A reducer between replicas, called as FSDP calls it on an accelerator: on its stream for all-reduces, behind a
reduce-scatter on another one, with a gradient that is dropped as soon as it is cast."""

from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import overlap
from harness import on_ranks
from harness.streams import STREAMS_BACKEND, detecting

_NUMEL = 72


def _played(rank: int, ranks: int, *, by_hook: bool, reducer: Any, holds: bool = True) -> tuple[str, float]:
    from torch.distributed.fsdp import fully_shard

    from overlap._torch.fsdp import param_groups
    from overlap.hooks import meshes

    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (ranks, 1), mesh_dim_names=("replicate", "shard"))
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(6)))
    for module in model:
        fully_shard(module, mesh=mesh["shard"] if by_hook else mesh)
    fully_shard(model, mesh=mesh["shard"] if by_hook else mesh)
    streams: Any = dist.new_group(backend=STREAMS_BACKEND)  # In place of the mesh's, whose groups need names in C++.
    for unit in () if by_hook else param_groups(model):
        unit.mesh_info.replicate_process_group = streams
    given = torch.randn(_NUMEL, generator=torch.Generator().manual_seed(rank))
    everyone = torch.stack([torch.randn(_NUMEL, generator=torch.Generator().manual_seed(one)) for one in range(ranks)])
    found: list[torch.Tensor] = []
    x = torch.zeros((), requires_grad=True)
    with detecting() as detector, patch.object(meshes, "hold", meshes.hold if holds else lambda tensor: tensor):
        registration: Any = overlap.register(model, reducer, group=streams if by_hook else None)
        scatters, reduces = detector.new_stream("reduce-scatters"), detector.new_stream("all-reduces")

        def backward(gradient: torch.Tensor) -> None:
            # FSDP waits for what the backward before has left; at the end of one, only in the last of a step.
            detector.current_stream.wait_stream(reduces)
            kept.clear()
            for unit in registration.runtime.units:
                scatters.wait_stream(detector.current_stream)
                with detector.on_stream(scatters):
                    flat = given * (1.0 + len(found) % 6)
                reduces.wait_stream(scatters)
                with detector.on_stream(reduces):
                    if by_hook:
                        unit.fsdp._all_reduce_hook(flat)
                    else:
                        dist.all_reduce(flat, op=dist.ReduceOp.AVG, group=unit.fsdp._all_reduce_process_group)
                    found.append(flat.double())
                if not by_hook:
                    kept.append(flat)
                del flat

        kept: list[torch.Tensor] = []
        x.register_hook(backward)
        with detector.steps():
            for _ in range(3):
                model[0].weight.detach()
                (x * 2.0).backward()
        registration.remove()
    try:
        detector.report.check()
        error = ""
    except AssertionError as raised:
        error = str(raised)
    distances = [(one / (1.0 + place % 6) - everyone.mean(0)).abs().max() for place, one in enumerate(found)]
    assert len(found) == 18
    return error, float(max(distances))


REDUCERS = (
    (overlap.AllReduce, 1e-6),
    (lambda: overlap.Quantize(overlap.Int4(), error_feedback=True), 1.0),
    (lambda: overlap.PowerSGD(rank=8, min_compression_rate=0.1), 1e-3),
)


@on_ranks(2)
def test_reducers_run_on_fsdps_stream_without_a_race_or_a_wait_of_the_host(rank: int, world_size: int) -> None:
    for by_hook in (False, True):
        for make, limit in REDUCERS:
            error, distance = _played(rank, world_size, by_hook=by_hook, reducer=make())
            assert not error, error
            assert distance < limit


@on_ranks(2)
def test_a_gradient_that_nobody_keeps_is_found(rank: int, world_size: int) -> None:
    error, _ = _played(rank, world_size, by_hook=True, reducer=overlap.AllReduce(), holds=False)
    assert "use after free" in error
