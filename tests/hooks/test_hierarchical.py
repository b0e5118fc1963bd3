"""Two levels of reduction: against the same by hand, bytes between machines, and what is refused."""

from __future__ import annotations

import socket
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import overlap
from harness import assert_parity, run_ranks, wrap
from harness.models import Case
from overlap import (
    AllReduce,
    Bucket,
    Cast,
    ConfigurationError,
    Hierarchical,
    Int4,
    Int8,
    PowerSGD,
    Quantize,
    chain,
    register,
    route,
)
from overlap.hooks import all_gather

from .runs import plain, run


class _Odd(nn.Module):
    """Parameters that two ranks cannot halve."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 7)
        self.scale = nn.Parameter(torch.ones(()))
        self.second = nn.Linear(7, 33)
        self.last = nn.Linear(33, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.second(self.first(x).tanh() * self.scale).tanh())


ODD = Case(name="odd", build=_Odd, inputs=lambda generator, step, rank: (torch.randn(4, 16, generator=generator),))


def _by_hand(make_outer: Callable[[], Any], size: int, *, dtype: torch.dtype | None = None) -> Any:
    """Machines of `size` ranks, and `make_outer()` between them, from gradients of all ranks."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    columns = [dist.new_group(list(range(place, ranks, size))) for place in range(size)]
    column, outer = columns[rank % size], make_outer()

    @overlap.reducer
    async def by_hand(bucket: Bucket) -> None:
        own = bucket.buffer.mul_(1 / bucket.divisor).to(dtype or bucket.buffer.dtype)
        gathered = torch.empty(ranks * own.numel(), dtype=own.dtype)
        await all_gather(gathered, own, group=bucket.group)
        first = rank // size * size
        total = sum(gathered.view(ranks, -1)[first : first + size])
        parts, sizes = [], []
        for gradient in bucket.with_buffer(total).gradients:
            each = -(-gradient.numel() // size)
            padded = nn.functional.pad(gradient.flatten(), (0, each * size - gradient.numel()))
            parts.append(padded.view(size, each)[rank % size])
            sizes.append(each)
        flat = torch.cat(parts).to(bucket.buffer.dtype)
        offsets = [sum(sizes[:place]) for place in range(len(sizes))]
        views = tuple((torch.Size([each]), (1,), offset) for each, offset in zip(sizes, offsets, strict=True))
        await outer(replace(bucket, buffer=flat, raw=None, views=views, group=column, divisor=1))
        flat = flat.to(own.dtype)
        rows = torch.empty(ranks * flat.numel(), dtype=flat.dtype)
        await all_gather(rows, flat, group=bucket.group)
        for gradient, each, offset in zip(bucket.gradients, sizes, offsets, strict=True):
            whole = rows.view(ranks, -1)[first : first + size, offset : offset + each].reshape(-1)
            gradient.copy_(whole[: gradient.numel()].view_as(gradient))

    return by_hand


def _levels(rank: int, world_size: int) -> None:
    for size, make in ((2, AllReduce), (2, lambda: Quantize(Int8())), (1, lambda: Cast(torch.bfloat16))):
        outer = make()
        found = run(rank, chain(Hierarchical(outer=outer, machine_size=size)).register, ODD, steps=4)
        reference = run(rank, chain(_by_hand(make, size)).register, ODD, steps=4)
        assert_parity(found, reference, what=f"{outer!r} between machines of {size}")
    inner = Hierarchical(Cast(torch.bfloat16), Quantize(Int8()), machine_size=2)
    reference = run(rank, chain(_by_hand(lambda: Quantize(Int8()), 2, dtype=torch.bfloat16)).register, ODD, steps=3)
    assert_parity(run(rank, chain(inner).register, ODD, steps=3), reference, what="bfloat16 within machines")
    one = run(rank, chain(Hierarchical(outer=Quantize(Int4()))).register, ODD, steps=3)
    assert_parity(one, run(rank, plain, ODD, steps=3), what="one machine, found by its name")


def test_two_levels_equal_the_same_by_hand() -> None:
    run_ranks(_levels, 4, timeout_s=120)


class _Bytes:
    """Counts what this rank sends, by the size of the group."""

    def __init__(self) -> None:
        self.sent: dict[tuple[str, int], int] = {}

    def launched(self, subject: Any, label: str, operation: Any) -> None:
        ranks = tuple(dist.get_process_group_ranks(operation._group))
        key = operation.label, abs(ranks[1] - ranks[0])
        self.sent[key] = self.sent.get(key, 0) + operation.sent_bytes

    def __getattr__(self, name: str) -> Any:
        return lambda *arguments: None


def _bytes(rank: int, world_size: int) -> None:
    ddp = wrap(nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(4))), bucket_cap_mb=1)
    registration = register(ddp, Hierarchical(outer=Quantize(Int4(chunk=512)), machine_size=2))
    registration.observer = observer = _Bytes()
    for _ in range(3):
        observer.sent.clear()
        ddp(torch.randn(2, 64)).square().mean().backward()
    numel = 4 * 64 * 64
    # A rank's part crosses to one other machine: half of it in a message, and as much of the sum.
    values = numel // 2
    sent = values // 2 // 2 + values // 2 // 512 * 4
    assert observer.sent == {
        ("reduce_scatter", 1): numel // 2 * 4,
        ("all_gather", 1): numel // 2 * 4,
        ("send_recv", 2): sent,
        ("all_gather", 2): sent,
    }
    # Of an fp32 all-reduce between the two ranks of the same place, for as many values.
    assert 2 * sent / (values * 4) < 0.13


def test_a_value_crosses_between_machines_once_and_in_few_bits() -> None:
    run_ranks(_bytes, 4)


def _feedback(rank: int, world_size: int) -> None:
    ddp, stage = wrap(ODD.model()), Hierarchical(outer=Quantize(Int4(), error_feedback=True), machine_size=2)
    register(ddp, stage)
    names = {name for name, _ in ODD.model().named_parameters()}
    delivered: dict[str, Any] = dict.fromkeys(names, 0.0)
    given: dict[str, Any] = dict.fromkeys(names, 0.0)
    for step in range(5):
        ddp.zero_grad()
        nn.functional.mse_loss(ddp(*ODD.batch(step, rank).inputs), ODD.batch(step, rank).target).backward()
        alone = ODD.model()
        nn.functional.mse_loss(alone(*ODD.batch(step, rank).inputs), ODD.batch(step, rank).target).backward()
        for (name, parameter), own in zip(ddp.module.named_parameters(), alone.parameters(), strict=True):
            delivered[name] = delivered[name] + parameter.grad.double()
            given[name] = given[name] + own.grad.double() / world_size
    errors = stage.state_dict()["1"]["error"]
    assert set(errors) == names
    for name, parameter in ddp.module.named_parameters():
        assert errors[name].shape == (-(-parameter.numel() // 2),), "a part of each parameter"
        # What all ranks have left out, with what was delivered, is all that went in.
        rows = torch.zeros(2, errors[name].numel())
        rows[rank % 2] = errors[name]
        dist.all_reduce(rows)
        dist.all_reduce(given[name])
        kept = rows.view(-1)[: parameter.numel()].view_as(parameter)
        torch.testing.assert_close(delivered[name] + kept, given[name], rtol=1e-5, atol=1e-6)
        assert kept.abs().sum() > 0
    # A part that is not finite on some ranks changes the memory on none.
    before = stage.state_dict()["1"]["error"]
    handle = ddp.module.last.bias.register_hook(lambda gradient: gradient.index_fill(0, torch.tensor([0]), torch.inf))
    ddp(*ODD.batch(7, rank).inputs).sum().backward()
    handle.remove()
    assert_parity(stage.state_dict()["1"]["error"], before, what="the memory after a pass that is not finite")
    wrong = Hierarchical(outer=Quantize(Int4(), error_feedback=True), machine_size=1)
    wrong.load_state_dict(stage.state_dict())
    with pytest.raises(ConfigurationError, match=r"by rank \d of 4, 2 on each machine, but this is .* 4, 1 on each"):
        register(wrap(ODD.model()), wrong)


def _formats(rank: int, world_size: int) -> None:
    def made(memory_format: torch.memory_format) -> Hierarchical:
        stage = Hierarchical(outer=Quantize(Int4(), error_feedback=True), machine_size=1)
        ddp = wrap(nn.Conv2d(4, 4, 3).to(memory_format=memory_format))
        register(ddp, stage)
        ddp(torch.randn(2, 4, 5, 5).to(memory_format=memory_format)).square().sum().backward()
        return stage

    state = made(torch.channels_last).state_dict()
    made(torch.channels_last).load_state_dict(state)
    with pytest.raises(ConfigurationError, match="other strides: use the memory format of the run"):
        made(torch.contiguous_format).load_state_dict(state)


def test_memory_of_another_memory_format_is_refused() -> None:
    run_ranks(_formats, 2)


def test_memory_of_the_outer_reducer_is_of_parts_of_parameters() -> None:
    run_ranks(_feedback, 4)


def _refused(rank: int, world_size: int) -> None:
    with pytest.raises(ConfigurationError, match="machine_size=2 does not divide the 3 ranks"):
        register(wrap(ODD.model()), Hierarchical(machine_size=2))
    socket.gethostname = lambda: "a" if rank < 2 else "b"
    with pytest.raises(ConfigurationError, match="as many ranks on every machine, but the 2 machines have 2, 1"):
        register(wrap(ODD.model()), Hierarchical())
    group = dist.new_group([0, 1])
    if rank < 2:
        with pytest.raises(ConfigurationError, match="made by all ranks of the job, and this process group has 2 of 3"):
            register(wrap(ODD.model(), process_group=group), Hierarchical(machine_size=1))


def test_machines_of_different_sizes_are_refused_at_registration() -> None:
    run_ranks(_refused, 3)


def _transform(bucket: Bucket) -> None:
    return


def test_what_cannot_work_within_or_between_machines_is_refused() -> None:
    for inner, outer, message in (
        (Cast(torch.bfloat16, Quantize()), None, r"inner reduces exactly .* AllReduce\(\) or Cast\(dtype\)"),
        (None, _transform, "outer reduces between machines, and _transform is not a reducer"),
        (None, chain(_transform, AllReduce()), "_transform cannot work on the flat parts"),
        (None, Cast(torch.bfloat16, PowerSGD()), r"PowerSGD\(.*cannot work on the flat parts"),
        (None, route({"*": AllReduce()}), r"cannot work on the flat parts.*route\({...}\) around"),
    ):
        with pytest.raises(ConfigurationError, match=message):
            Hierarchical(inner, outer)
