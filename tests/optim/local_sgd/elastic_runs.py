"""Processes that train elastically, and the same run with process groups that are known beforehand."""

from __future__ import annotations

import contextlib
import copy
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from harness import RankDied, run_ranks
from overlap import ElasticLocalSGD
from overlap.optim.local_sgd.elastic_exchange import ElasticExchange

PERIOD = 3
OUTER = partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True)
Values = dict[str, Tensor]
Records = dict[int, Values]


_seeding = threading.Lock()


def model_of() -> nn.Module:
    """The same for every caller; threads take turns, as they have one generator."""
    with _seeding:
        torch.manual_seed(5)
        return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 4))


def sgd(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def one_step(model: nn.Module, optimizer: Any, rank: int, step: int) -> None:
    x = torch.randn(6, 8, generator=torch.Generator().manual_seed(1000 * rank + step))
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()


def values_of(model: nn.Module) -> Values:
    """Without the count of batches, which each process keeps."""
    return {name: value.clone() for name, value in model.state_dict().items() if value.is_floating_point()}


def client(port: int) -> dist.TCPStore:
    return dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)


@contextlib.contextmanager
def hosted() -> Iterator[int]:
    """The port of a store that outlives all ranks."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    yield store.port
    del store


def elastic(model: nn.Module, store: Any, **options: Any) -> ElasticLocalSGD:
    settings = {
        "world_size": 3, "period": PERIOD, "timeout": 30, "join_timeout": 30, "heartbeat_timeout": 10,
    }  # fmt: skip
    return ElasticLocalSGD(model, sgd(model), store, **{**settings, **options})


def wait_for(condition: Callable[[], bool], seconds: float = 30) -> None:
    deadline_s = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline_s, "the test waits in vain"
        time.sleep(0.002)


def numbers_taken(store: Any) -> int:
    return store.add("overlap/elastic/numbers", 0)


def is_there(store: Any, number: int) -> bool:
    """Whether process ``number`` is ready to be taken in."""
    return store.check([f"overlap/elastic/process/{number}"])


def is_left_out(store: Any, number: int) -> bool:
    """Whether the last average was made without process ``number``."""
    return number not in json.loads(store.get("overlap/elastic/members"))


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def train(
    rank: int,
    port: int,
    until: int,
    *,
    before: Callable[[ElasticLocalSGD, Any], None] = lambda local, store: None,
    is_in_turn: bool = True,
    **options: Any,
) -> tuple[Records, list[tuple[int, ...]]]:
    """Trains as process number ``rank``, if ``is_in_turn``; returns what it has after each average, and who was in the
    group then."""
    store = client(port)
    if is_in_turn:
        wait_for(lambda: numbers_taken(store) == rank)
    model = model_of()
    local = elastic(model, store, **options)
    records: Records = {}
    groups = []
    with local:
        records[local.step_count] = values_of(model)
        while local.step_count < until:
            before(local, store)
            one_step(model, local, rank, local.step_count)
            if local.step_count % PERIOD == 0:
                records[local.step_count] = values_of(model)
                groups.append(local.members)
    return records, groups


@contextlib.contextmanager
def at(name: str, action: Callable[[], None]) -> Iterator[None]:
    """Within it, ``action`` is called before this step of an average, such as ``"sum"``; ``"summed"``, after it."""
    method = {"summed": "sum"}.get(name, name)
    original = getattr(ElasticExchange, method)

    def changed(*arguments: Any) -> Any:
        if name != "summed":
            action()
        result = original(*arguments)
        if name == "summed":
            action()
        return result

    setattr(ElasticExchange, method, changed)
    try:
        yield
    finally:
        setattr(ElasticExchange, method, original)


def results_of(fn: Callable[..., Any], ranks: int, *args: Any) -> list[Any]:
    """Of all ranks; the exception of one that failed, and ``None`` of one that was killed."""
    with hosted() as port:
        found = run_ranks(fn, ranks, port, *args, backend=None, return_exceptions=True, timeout_s=90)
    return [None if isinstance(one, RankDied) else one for one in found]


# The reference --------------------------------------------------------------------------------------------------


def _reference(rank: int, world_size: int, rounds: Sequence[tuple[int, ...]], is_diloco: bool) -> Records:
    """Rounds whose members are known: each trains, and they average over a group of PyTorch's."""
    model = model_of()
    optimizer = sgd(model)
    groups = {members: dist.new_group(list(members)) for members in dict.fromkeys(rounds)}
    anchors = [parameter.detach().clone() for parameter in model.parameters()]
    outer = OUTER(anchors)
    records = {0: values_of(model)}
    for index, members in enumerate(rounds):
        if rank in members:
            for step in range(index * PERIOD, (index + 1) * PERIOD):
                one_step(model, optimizer, rank, step)
            state = copy.deepcopy(optimizer.state_dict())
            means = _means([p.detach() for p in model.parameters()], groups[members], len(members))
            buffers = [b for b in model.buffers() if b.is_floating_point()]
            with torch.no_grad():
                for buffer, mean in zip(buffers, _means(buffers, groups[members], len(members)), strict=True):
                    buffer.copy_(mean)
                if is_diloco:
                    for anchor, mean in zip(anchors, means, strict=True):
                        anchor.grad = anchor - mean
                    outer.step()
                    means = anchors
                for parameter, mean in zip(model.parameters(), means, strict=True):
                    parameter.copy_(mean)
        else:
            state = None
        coming = [one for one in (rounds[index + 1] if index + 1 < len(rounds) else ()) if one not in members]
        if coming:
            given = [copy.deepcopy((model.state_dict(), state, anchors, outer.state_dict()))]
            dist.broadcast_object_list(given, src=members[0])
            if rank in coming:
                model.load_state_dict(given[0][0])
                optimizer.load_state_dict(given[0][1])
                for anchor, value in zip(anchors, given[0][2], strict=True):
                    anchor.copy_(value)
                outer.load_state_dict(given[0][3])
        if rank in members or rank in coming:
            records[(index + 1) * PERIOD] = values_of(model)
    return records


def _means(tensors: Sequence[Tensor], group: Any, count: int) -> list[Tensor]:
    flat = torch.cat([tensor.flatten() for tensor in tensors]) / count
    dist.all_reduce(flat, group=group)
    pieces = flat.split([tensor.numel() for tensor in tensors])
    return [piece.view_as(tensor) for piece, tensor in zip(pieces, tensors, strict=True)]


def reference(ranks: int, rounds: Sequence[tuple[int, ...]], *, is_diloco: bool = False) -> list[Records]:
    return run_ranks(_reference, ranks, list(rounds), is_diloco)


def assert_same(found: Records, expected: Records, *, what: str) -> None:
    """Bit for bit, at each average that this process saw."""
    assert found.keys() <= expected.keys(), f"{what}: {found.keys()}, {expected.keys()}"
    for step, values in found.items():
        for name, value in values.items():
            assert torch.equal(value, expected[step][name]), f"{what}: {name} after step {step}"
