"""Parameters gathered through a wire: the same on all ranks, from masters that are never rounded."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from zero_loops import ADAMW_OPTIONS

import overlap
from benchmarks.host_cost import IdleStreams
from harness import on_ranks, plain_step, wrap
from harness.models import MLP, mean_squared_error
from overlap import BFloat16, ConfigurationError, Int4, Int8, TopK, ZeroRedundancyOptimizer, ZeroStep, chain
from overlap._torch.device import streams_replaced

FORMS: list[dict[str, Any]] = [{}, {"gather": "forward"}, {"deferred": True}, {"deferred": True, "gather": "forward"}]


def _made(wire: Any, **form: Any) -> tuple[Any, ZeroRedundancyOptimizer, Any]:
    ddp = wrap(MLP.model(), **MLP.ddp_options())
    zero = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.AdamW, master_dtype=torch.float32, **ADAMW_OPTIONS)
    return ddp, zero, chain(ZeroStep(zero, gather_wire=wire, **form)).register(ddp)


def _of_rank_0(tensors: Any) -> list[torch.Tensor]:
    copies = [tensor.detach().clone() for tensor in tensors]
    for copy in copies:
        dist.broadcast(copy, 0)
    return copies


def _masters(zero: ZeroRedundancyOptimizer) -> list[torch.Tensor]:
    return [shard.own.detach().clone() for shard in zero.shards.values() if shard.own is not None]


@on_ranks(2, 3)
def test_ranks_are_equal_and_updates_go_on_from_masters(rank: int, world_size: int) -> None:
    for form in FORMS:
        losses = {}
        for wire in (None, BFloat16(), Int8()):
            ddp, zero, _ = _made(wire, **form)
            for step, batch in enumerate(MLP.batches(rank, steps=6)):
                losses[wire] = plain_step(ddp, zero, batch, mean_squared_error)
                zero.wait()
                if wire is None and step == 0:
                    exact = [parameter.detach().clone() for parameter in ddp.parameters()]
                assert all(map(torch.equal, _of_rank_0(ddp.parameters()), ddp.parameters())), (form, wire, step)
                if wire is not None and step == 0:
                    # Gradients of the first step are those of the exact parameters.
                    shards = zero.shards.values()
                    of_exact = [one.view(-1)[slice(*s.range)] for one, s in zip(exact, shards, strict=True)]
                    assert all(map(torch.equal, _masters(zero), of_exact)), (form, wire)
                    if wire == BFloat16():
                        assert all(
                            torch.equal(p, e.bfloat16().float()) for p, e in zip(ddp.parameters(), exact, strict=True)
                        )
                before = _masters(zero)
                zero.begin()
                assert all(map(torch.equal, _masters(zero), before)), "decoded values are no edits of the loop"
            if wire is not None:
                assert not all(torch.equal(s.view, s.own) for s in zero.shards.values() if s.own is not None)
                torch.testing.assert_close(losses[wire], losses[None], rtol=0.05, atol=0.05)
                with torch.no_grad():
                    for parameter in ddp.parameters():
                        parameter.fill_(0.3)  # An edit, alike on all ranks.
                zero.begin()
                assert all((master == 0.3).all() for master in _masters(zero)), (form, wire)


@on_ranks(2)
def test_the_code_for_accelerators_sends_the_same(rank: int, world_size: int) -> None:
    def trained() -> list[torch.Tensor]:
        ddp, zero, _ = _made(Int8())
        for batch in MLP.batches(rank, steps=3):
            plain_step(ddp, zero, batch, mean_squared_error)
        assert all(map(torch.equal, _of_rank_0(ddp.parameters()), ddp.parameters()))
        return [parameter.detach().clone() for parameter in ddp.parameters()]

    with streams_replaced(IdleStreams()):
        on_streams = trained()
    for one, other in zip(on_streams, trained(), strict=True):  # Rows are cut elsewhere, so scales are others.
        torch.testing.assert_close(one, other, rtol=0.02, atol=0.02)


@on_ranks(2)
def test_a_run_resumes_exactly(rank: int, folder: Path) -> None:
    ddp, zero, registration = _made(Int8(), gather="forward")
    batches = list(MLP.batches(rank, steps=6))
    for batch in batches[:3]:
        plain_step(ddp, zero, batch, mean_squared_error)
    overlap.save(folder, ddp, zero)
    for batch in batches[3:]:
        plain_step(ddp, zero, batch, mean_squared_error)
    zero.wait()
    resumed, other, again = _made(Int8(), gather="forward")
    overlap.load(folder, resumed, other)
    for batch in batches[3:]:
        plain_step(resumed, other, batch, mean_squared_error)
    other.wait()
    assert all(map(torch.equal, resumed.parameters(), ddp.parameters()))
    assert all(map(torch.equal, _masters(other), _masters(zero)))
    # Without a wire updates go on from the masters, too, and parameters are theirs.
    registration.remove()
    chain(ZeroStep(zero)).register(ddp)
    plain_step(ddp, zero, batches[0], mean_squared_error)
    assert all(torch.equal(s.view, s.own) for s in zero.shards.values() if s.own is not None)
    again.remove()


@on_ranks(3)
def test_ranks_that_run_out_of_inputs_take_part(rank: int, world_size: int) -> None:
    for form in FORMS[:3]:
        ddp, zero, _ = _made(Int8(), **form)
        with overlap.Join([ddp, zero]):
            for batch in list(MLP.batches(rank, steps=5))[: 3 + rank]:
                plain_step(ddp, zero, batch, mean_squared_error)
        zero.wait()
        assert all(map(torch.equal, _of_rank_0(ddp.parameters()), ddp.parameters())), form


@on_ranks(1)
def test_it_is_refused_without_masters_by_parameter_and_for_other_wires(rank: int, world_size: int) -> None:
    ddp = wrap(MLP.model(), **MLP.ddp_options())
    plain, masters, whole = (
        ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.AdamW, **options)
        for options in ({}, {"master_dtype": torch.float32}, {"partition": "parameter", "master_dtype": torch.float32})
    )
    for zero, wire, match in (
        (plain, Int8(), r"has no master .* use ZeroRedundancyOptimizer\(\.\.\., master_dtype=torch.float32\)"),
        (whole, Int8(), "partition='parameter' sends whole ones"),
        (masters, TopK(0.1), r"such as BFloat16\(\) or Int8\(\), got TopK"),
        (masters, Int4(rounding="stochastic"), "rounds to nearest"),
        (masters, torch.bfloat16, "got torch.bfloat16"),
    ):
        with pytest.raises(ConfigurationError, match=match):
            ZeroStep(zero, gather_wire=wire)
    chain(ZeroStep(masters, gather_wire=Int8())).register(ddp)
    added = torch.nn.Parameter(torch.zeros(2, dtype=torch.complex64))
    with pytest.raises(ConfigurationError):
        masters.add_param_group({"params": [added]})
