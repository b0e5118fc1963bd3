"""Local SGD whose averages go through a wire, beside averages by hand."""

import functools
import gc
import weakref
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from local_loops import local, run, sgd, values_of
from local_wires import beside, errors_of, gathered, sent_bytes
from torch import Tensor, nn

from harness import assert_equal_ranks, assert_parity, on_ranks, play, wrap
from harness.models import MLP
from overlap import (
    Int4,
    Int8,
    LocalSGD,
    TopK,
    UnsupportedError,
    Wire,
)
from overlap.hooks.engine import executors
from overlap.hooks.wires import Codec

PERIOD, STEPS = 3, 14
OUTER = functools.partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True)
OPTIONS: dict[str, dict[str, Any]] = {
    "top 5 %": {"wire": TopK(0.05, chunk=64), "error_feedback": True, "outer": OUTER},
    "int4 with feedback": {"wire": Int4(chunk=64), "error_feedback": True},
    "overlapped": {"wire": Int4(), "error_feedback": True, "overlap": 2},
    "streaming DiLoCo": {"wire": Int4(), "error_feedback": True, "outer": OUTER, "fragments": 2, "overlap": 1},
}


def _by_hand(rank: int, world_size: int) -> None:
    for name, options in OPTIONS.items():
        if world_size > 2 and name != "int4 with feedback":
            continue  # The number of ranks matters to the sum alone.
        for start_step in (0, 2) if name == "streaming DiLoCo" else (0,):
            made, ddp, by_hand = beside(rank, steps=STEPS, period=PERIOD, start_step=start_step, **options)
            assert by_hand.round and by_hand.errors
            assert_parity(errors_of(made), by_hand.errors, what=f"{name}: residuals")
            made.synchronize()
            assert_equal_ranks(values_of(ddp.module).values(), f"{name}, synchronized")


def _bytes(rank: int, world_size: int) -> None:
    """4-bit averages send an eighth of full precision, and the scales."""
    counts = {}
    for name, options in {"fp32": {}, "int8": {"wire": Int8()}, "int4": {"wire": Int4()}}.items():
        ddp = wrap(nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 256)))
        made = LocalSGD(ddp, sgd(ddp.parameters()), 1, 0, **options)  # type: ignore[arg-type]
        ddp(torch.full((2, 256), 1.0 + rank)).sum().backward()
        with sent_bytes() as sent:
            made.step()
        counts[name] = sum(sent.values())
        numel = sum(p.numel() for p in ddp.parameters())
        if options:
            message_bytes = options["wire"].codec(-(-numel // world_size)).message_bytes
            assert sent == dict.fromkeys(("send_recv", "all_gather"), (world_size - 1) * message_bytes), name
    assert counts["int8"] / counts["fp32"] == pytest.approx(0.252, abs=0.003)
    assert counts["int4"] / counts["fp32"] == pytest.approx(0.127, abs=0.003)


def _one_rank(rank: int, world_size: int) -> None:
    plain_run, _, _ = local(MLP, rank, steps=6, build=functools.partial(LocalSGD, period=2, start_step=0))
    build = functools.partial(LocalSGD, period=2, start_step=0, wire=Int4(), error_feedback=True)
    wired, made, _ = local(MLP, rank, steps=6, build=build)
    assert_parity(wired, plain_run, what="one rank: nothing is rounded")
    assert dist.get_world_size() == 1 and made.averager.rounds == 3


# What goes wrong.


@dataclass(frozen=True)
class _RaisesWhenArmed(Wire):
    """Int4, which raises in the second message while it is armed."""

    armed: list[int]

    def codec(self, numel: int) -> Codec:
        if self.armed:
            self.armed[0] -= 1
            if not self.armed[0]:
                self.armed.clear()
                raise ValueError("armed")
        return Int4().codec(numel)

    def __repr__(self) -> str:
        return "_RaisesWhenArmed()"


def _failures(rank: int, world_size: int) -> None:
    for delay in (0, 1):
        wire = _RaisesWhenArmed([])
        build: Any = functools.partial(LocalSGD, period=2, start_step=0, wire=wire, error_feedback=True, overlap=delay)
        _, made, ddp = local(MLP, rank, steps=2 + delay, build=build)
        before = errors_of(made)
        wire.armed.append(1)
        with pytest.raises(ValueError, match="armed"):
            run(MLP, rank, range(2 + delay, 4 + 2 * delay), ddp, made)
        assert not wire.armed
        assert_parity(errors_of(made), before, what=f"overlap {delay}: what was left out, after a failed average")
        run(MLP, rank, range(4), ddp, made)
        made.synchronize()
        assert_equal_ranks(values_of(ddp.module).values(), f"overlap {delay}, after a failed average")


def _is_let_go(rank: int, world_size: int) -> None:
    """An average that failed on the training thread, and that nobody waits for, keeps no model."""
    wire = _RaisesWhenArmed([1])
    with mock.patch.object(executors, "SMALL_BYTES", 2**20):  # A small model has no worker thread.
        ddp = wrap(MLP.model())
        made = LocalSGD(ddp, sgd(ddp.parameters()), period=2, start_step=0, wire=wire, overlap=1)
    run(MLP, rank, range(2), ddp, made)
    assert not wire.armed and made.averager.pending is not None
    model = weakref.ref(ddp)
    del made, ddp
    gc.collect()
    assert model() is None


def _not_finite(rank: int, world_size: int) -> None:
    for delay in (0, 1):
        build: Any = functools.partial(
            LocalSGD, period=2, start_step=0, wire=Int8(), error_feedback=True, overlap=delay
        )
        _, made, ddp = local(MLP, rank, steps=3, build=build)
        before = errors_of(made)
        if rank == 1:
            with torch.no_grad():
                next(ddp.parameters()).view(-1)[0] = float("nan")
        run(MLP, rank, [3] if not delay else [3, 4], ddp, made)
        assert_parity(errors_of(made), before, what=f"overlap {delay}: what was left out")
        assert next(ddp.parameters()).isnan().any(), "on every rank"


class _Mixed(nn.Module):
    """Parameters of several dtypes, one of them empty, and an integer buffer."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
            value = torch.randn(40, generator=generator).to(dtype)
            self.register_parameter(f"of_{dtype}".replace(".", "_"), nn.Parameter(value))
        self.nothing = nn.Parameter(torch.empty(0))
        self.register_buffer("count", torch.tensor([rank]))
        self.register_buffer("mean", torch.full((3,), float(rank)))

    def forward(self, x: Tensor) -> Tensor:
        return sum((p.double() * x[: p.numel()]).sum() for p in self.parameters())  # type: ignore[return-value]


def _dtypes(rank: int, world_size: int) -> None:
    ddp = wrap(_Mixed(rank))
    module = ddp.module
    start = {name: p.detach().double() for name, p in module.named_parameters()}
    with torch.no_grad():
        module.mean.fill_(float(rank))
        module.count.fill_(rank)
    made = LocalSGD(ddp, torch.optim.SGD(ddp.parameters(), lr=0.25), 1, 0, wire=Int8())
    made.zero_grad()
    ddp(torch.full((40,), 1.0 + rank, dtype=torch.float64)).backward()
    own = {name: (p.detach() - 0.25 * p.grad).double() for name, p in module.named_parameters()}
    made.step()
    assert_equal_ranks(values_of(ddp.module).values(), "dtypes")
    for name, p in module.named_parameters():
        mean = sum(gathered(own[name] - start[name])) / world_size + start[name]
        # Int8 rounds twice, by half a step of changes of about 0.5; then the parameter's dtype does.
        rounding = 0.5 / 127 + 2 * torch.finfo(p.dtype).eps * start[name].abs()
        assert (p.detach().double() - mean).abs().le(rounding).all(), name
    assert module.mean.tolist() == [0.5] * 3 and module.count.item() == rank, "buffers are exact, integers kept"


def _others(rank: int, world_size: int) -> None:
    imaginary = wrap(nn.Linear(2, 2, dtype=torch.complex64))
    for option, given in {"wire": Int8(), "outer": OUTER}.items():
        with pytest.raises(UnsupportedError, match="weight is complex: leave them out"):
            LocalSGD(imaginary, torch.optim.SGD(imaginary.parameters(), lr=0.1), **{option: given})  # type: ignore[arg-type]


ONE = {"one rank rounds nothing": _one_rank, "complex parameters are refused": _others}
TWO = {
    "what is sent is the change since the last average": _by_hand,
    "a failed average changes no memory": _failures,
    "a failed average keeps no model": _is_let_go,
    "a parameter that is not finite shows on every rank and enters no memory": _not_finite,
    "parameters of every real dtype": _dtypes,
}
THREE = {"what is sent is the change since the last average": _by_hand, "bytes sent": _bytes}


@on_ranks(1, 2, 3, timeout_s=150)
def test_ranks(rank: int, world_size: int) -> None:
    play({1: ONE, 2: TWO, 3: THREE}[world_size], rank, world_size)
