"""How many bytes ranks send: counted on sockets and at the collectives."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from harness import run_ranks
from overlap._torch.c10d import GroupChannel
from overlap.bench.collectives import count, counted_bytes, counting, sent_bytes
from overlap.bench.settings import RunConfig, Settings
from overlap.bench.wire import socket_bytes
from overlap.bench.world import open_world

_NUMEL = 400_000
_DEVICE = torch.device("cpu")


def _all_reduce(rank: int, size: int) -> None:
    dist.all_reduce(torch.ones(_NUMEL))


def _all_gather(rank: int, size: int) -> None:
    dist.all_gather([torch.empty(_NUMEL) for _ in range(size)], torch.ones(_NUMEL))


def _exchange(rank: int, size: int) -> None:
    """As the wires do: a message to every other rank and one from it."""
    others = [other for other in range(size) if other != rank]
    sends = [(torch.full((_NUMEL,), float(rank)), other) for other in others]
    receives = [(torch.empty(_NUMEL), other) for other in others]
    for work in GroupChannel(dist.group.WORLD).send_recv(sends, receives, tag=0):
        work.wait()
    assert all(bool((tensor == other).all()) for tensor, other in receives)


# Per rank, for tensors of N bytes at W ranks.
_COLLECTIVES: dict[str, tuple[Callable[[int, int], None], Callable[[int], float]]] = {
    "all_reduce": (_all_reduce, lambda size: 2 * (size - 1) / size),
    "all_gather": (_all_gather, lambda size: size - 1),
    "messages": (_exchange, lambda size: size - 1),
}


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("name", _COLLECTIVES)
def test_sockets_and_collectives_count_the_same(name: str, ranks: int) -> None:
    collective, expected_share = _COLLECTIVES[name]

    def measure(rank: int, world_size: int) -> tuple[float, float]:
        collective(rank, world_size)
        dist.barrier()
        before = socket_bytes(), counted_bytes()
        with counting():
            for _ in range(2):
                collective(rank, world_size)
        # Only when all have received is all of it sent; a barrier sends a few bytes itself.
        dist.barrier()
        return (socket_bytes() - before[0]) / 2, (counted_bytes() - before[1]) / 2

    expected = 4 * _NUMEL * expected_share(ranks)
    for on_sockets, at_collectives in run_ranks(measure, ranks):
        assert on_sockets == pytest.approx(expected, rel=0.02)
        assert at_collectives == expected


def test_what_ddp_sends_in_backward_is_counted_and_what_follows_is_not() -> None:
    def measure(rank: int, world_size: int) -> float:
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(100, 10))
        before = counted_bytes()
        with counting():
            model(torch.ones(1, 100)).sum().backward()
        model(torch.ones(1, 100)).sum().backward()
        return counted_bytes() - before

    assert run_ranks(measure, 2) == [4 * (100 * 10 + 10)] * 2


def test_every_collective_that_pytorch_has_can_be_counted() -> None:
    names = {name.split(".")[0] for name in torch._C._dispatch_get_all_op_names() if name.startswith("c10d::")}
    assert len(names) > 15
    tensors = [torch.ones(2)]
    for name in names:
        count(name.removeprefix("c10d::"), (tensors, tensors), 2)


@contextmanager
def _as_on_nccl() -> Iterator[list[str]]:
    """Gloo with a rule of NCCL's: of messages that are not started together, the first may wait for the second.

    Yields how the messages were started.
    """
    started: list[str] = []
    group = dist.ProcessGroup
    send, recv = group.send, group.recv
    together: list[Any] | None = None

    def start(self: Any, device: torch.device) -> None:
        nonlocal together
        together = []

    def end(self: Any, device: torch.device) -> Any:
        nonlocal together
        works, together = together or [], None
        started.append(f"{len(works)} together")
        return _All(works)

    def noted(call: Callable[..., Any]) -> Callable[..., Any]:
        def message(self: Any, *args: Any) -> Any:
            if together is None:
                raise RuntimeError("this would hang on NCCL")
            together.append(call(self, *args))
            return None

        return message

    backend = type(dist.group.WORLD._get_backend(_DEVICE))
    with (
        patch.object(backend, "supports_coalescing", True),
        patch.multiple(group, _start_coalescing=start, _end_coalescing=end, send=noted(send), recv=noted(recv)),
    ):
        yield started


class _All:
    def __init__(self, works: list[Any]) -> None:
        self._works = works

    def wait(self) -> None:
        for work in self._works:
            work.wait()


def test_messages_that_are_counted_are_still_started_together() -> None:
    def exchange(rank: int, world_size: int) -> tuple[list[str], float]:
        with _as_on_nccl() as started:
            with pytest.raises(RuntimeError, match="would hang"):
                dist.isend(torch.ones(2), dst=1 - rank)
            before = counted_bytes()
            with counting():
                _exchange(rank, world_size)
            return started, counted_bytes() - before

    assert run_ranks(exchange, 2) == [(["2 together"], 4.0 * _NUMEL)] * 2


def test_variants_get_process_groups_of_pytorchs_own_type(tmp_path: Path) -> None:
    """Of a group of any other type, PyTorch does not start messages together."""

    def kind(rank: int, world_size: int, folder: str) -> str:
        settings = Settings(model="mlp", device="cpu", ranks=world_size)
        config = RunConfig(settings=settings, variants=(), folder=folder, link="direct", deadline=0.0)
        with open_world(config, rank, "kind") as world:
            group = world.training_setup().group
            dist.barrier(group)  # A rank that leaves earlier closes connections that another one is still making.
            return str(type(group) is dist.ProcessGroup)

    assert run_ranks(kind, 2, str(tmp_path), backend=None) == ["True"] * 2


def test_volumes_of_the_other_collectives() -> None:
    assert sent_bytes("all_gather", 400, 4) == sent_bytes("reduce_scatter", 400, 4) == 300
    assert sent_bytes("all_reduce", 400, 4) == 600
    assert sent_bytes("send", 400, 4) == 400
    assert sent_bytes("none", 400, 4) == 0
