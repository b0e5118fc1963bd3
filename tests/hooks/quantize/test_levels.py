"""On two machines of two ranks each, gradients are summed within a machine and encoded between machines."""

import socket

import torch
import torch.distributed as dist

from harness import assert_equal_ranks, assert_parity, on_ranks
from harness.wires import summed
from overlap import Int4, Int8, PowerSGD, Quantize

from .given import given, of_ranks, reduced

SIZES = [1, 300, 2001]


@on_ranks(4)
def test_sums_on_two_machines(rank: int, world_size: int) -> None:
    socket.gethostname = lambda: "ab"[rank // 2]
    ddp = given(SIZES, Quantize(Int8()))
    gradients = of_ranks(world_size, SIZES)
    for place, found in enumerate(reduced(ddp, gradients[rank])):
        means = [own[place] * (1 / world_size) for own in gradients]
        padded_numel = world_size * Int8().codec(-(-SIZES[place] // world_size)).numel
        machines = [
            torch.nn.functional.pad(means[first] + means[first + 1], (0, padded_numel - SIZES[place]))
            for first in (0, 2)
        ]
        halves = zip(*(machine.chunk(2) for machine in machines), strict=True)
        expected = torch.cat([summed(Int8(), half)[0] for half in halves])[: SIZES[place]]
        assert_parity(found, expected, what=f"{SIZES[place]} values")
    stage = Quantize(Int4(), error_feedback=True)
    ddp = given(SIZES, stage)
    delivered, total = [torch.zeros(size) for size in SIZES], [torch.zeros(size) for size in SIZES]
    for step in range(4):
        gradients = of_ranks(world_size, SIZES, step)
        got = reduced(ddp, gradients[rank])
        assert_equal_ranks(got)
        for place, one in enumerate(got):
            delivered[place] += one
            total[place] += sum(own[place] for own in gradients) / world_size
    for place, error in enumerate(stage.state_dict()["error"].values()):
        dist.all_reduce(error)
        torch.testing.assert_close(delivered[place] + error, total[place], rtol=1e-5, atol=1e-5)
    assert_equal_ranks(reduced(given([64], PowerSGD(wire=Int8())), [torch.ones(64)]))
