"""Chains on torchft: the steps of replicas that are killed, come back, raise or do not commit."""

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from comparing import copied, model_of_two_buckets
from replicas import (
    COLLECTIVE_S,
    FAULT_STEP,
    FORMS,
    HEARTBEAT_S,
    QUORUM_S,
    STEPS,
    backward,
    batch,
    join,
    lighthouse,
    manager_of,
    optimizer_of,
    start,
)
from torch.distributed.algorithms import Join as TorchJoin
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook as torch_hook
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

import overlap
from harness import RankDied, assert_parity, run_ranks

ROOT = Path(__file__).parent.parent.parent


def _of_union(participants: list[int]) -> dict[str, Any]:
    """What plain SGD learns from the mean over so many ranks in each step."""
    torch.set_num_threads(1)  # As replicas have: more of them add up in another order.
    model = model_of_two_buckets()
    optimizer = optimizer_of(model)
    for step, ranks in enumerate(participants):
        means = [torch.zeros_like(parameter) for parameter in model.parameters()]
        for rank in range(ranks):
            x, y = batch(step, rank)
            gradients = torch.autograd.grad(mse_loss(model(x), y), list(model.parameters()))
            for mean, gradient in zip(means, gradients, strict=True):
                mean.add_(gradient * (1 / ranks))
        for parameter, mean in zip(model.parameters(), means, strict=True):
            parameter.grad = mean
        optimizer.step()
    return copied(dict(model.named_parameters()))


def _play(folder: Path, form: str, of_a: str = "", of_b: str = "", *, least: int = 1) -> list[Any]:
    """Two replicas; one that was killed is started again when the other has gone on without it, unless it is lost."""
    with lighthouse(least=least) as address, ThreadPoolExecutor(3) as pool:
        first, second = (
            start(pool, name, address, form, kind, least, str(folder)) for name, kind in (("a", of_a), ("b", of_b))
        )
        if of_b == "killed":
            (died,) = join([second])
            (folder / "b.there").unlink()
            assert isinstance(died, RankDied)
            while not (folder / "a.passed").exists() and not first.done():
                time.sleep(0.05)
            second = start(pool, "b", address, form, "", least, str(folder))
        return join([first, second])


def _check_steps(log: list[Any], participants: list[int]) -> None:
    """Those that were committed, each once and in order, had so many ``participants``."""
    committed = [(step, ranks) for step, ranks, is_committed, _ in log if is_committed]
    assert committed == list(enumerate(participants)), log


def _on_ranks(rank: int, world_size: int, form: str) -> dict[str, Any]:
    """The same chain on a DDP of ranks that stay, with the buckets of a replica."""
    model = model_of_two_buckets()
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.002, find_unused_parameters=True)
    ddp.broadcast_buffers = False
    optimizer = optimizer_of(model)
    if form == "without Step":
        overlap.chain(FORMS[form]()).register(ddp)
    else:
        optimizer = overlap.OverlappedOptimizer(optimizer)
        overlap.chain(FORMS[form](), overlap.Step(optimizer, deferred=True)).register(ddp)
    for step in range(STEPS):
        optimizer.zero_grad()
        backward(ddp, form, step, rank)
        optimizer.step()
    return copied(dict(model.named_parameters()))


@pytest.mark.parametrize("form", [form for form in FORMS if form != "AllReduce"])
def test_a_chain_learns_on_replicas_what_it_learns_on_ranks(tmp_path: Path, form: str) -> None:
    a, b = _play(tmp_path, form, least=2)
    (expected, _) = run_ranks(_on_ranks, 2, form)
    for one in (a, b):
        _check_steps(one["log"], [2] * STEPS)
        assert_parity(expected, one["state"][0], what=form)


def test_a_replica_is_lost(tmp_path: Path) -> None:
    a, b = _play(tmp_path, "AllReduce", of_b="lost")
    assert isinstance(b, RankDied)
    assert (FAULT_STEP, 2, False, "") in a["log"]  # It is made again without the other.
    participants = [2] * FAULT_STEP + [1] * (STEPS - FAULT_STEP)
    _check_steps(a["log"], participants)
    # The failed collective fails at once, and the quorum waits for missing heartbeats.
    assert a["took_s"] < HEARTBEAT_S + COLLECTIVE_S + QUORUM_S
    assert_parity(_of_union(participants), a["state"][0], what="plain SGD")


def test_a_replica_is_killed_and_comes_back(tmp_path: Path) -> None:
    a, b = _play(tmp_path, "PowerSGD", of_b="killed")
    participants = [ranks for _, ranks, is_committed, _ in a["log"] if is_committed]
    assert participants[FAULT_STEP] == 1 and participants[-1] == 2
    _check_steps(a["log"], participants)
    step = b["log"][0][0]
    healed, healthy = b["memory"][step]["1"], a["memory"][step]["1"]
    assert_parity([healthy["steps"], healthy["factors"]], [healed["steps"], healed["factors"]], what="the factors")
    assert healthy["factors"] and healthy["residuals"] and not healed["residuals"]
    assert [one for one in b["log"] if one[2]] == [one for one in a["log"] if one[2]][-len(b["log"]) :]
    assert_parity(a["state"][:2], b["state"][:2], what="b")


def test_an_error_in_a_stage_is_one_lost_step(tmp_path: Path) -> None:
    a, b = _play(tmp_path, "AllReduce", of_b="raises", least=2)
    assert (FAULT_STEP, 2, False, "a stage raised") in b["log"]
    assert (FAULT_STEP, 2, False, "") in a["log"]
    for one in (a, b):
        _check_steps(one["log"], [2] * STEPS)
        assert_parity(_of_union([2] * STEPS), one["state"][0], what="plain SGD")


def test_a_step_that_no_replica_commits_changes_nothing(tmp_path: Path) -> None:
    a, b = _play(tmp_path, "Quantize", of_a="reports", of_b="reports", least=2)
    for one in (a, b):
        assert (FAULT_STEP, 2, False, "") in one["log"]
        _check_steps(one["log"], [2] * STEPS)
    assert_parity(a["state"][:2], b["state"][:2], what="b")


def test_a_replica_that_alone_does_not_commit_is_healed(tmp_path: Path) -> None:
    a, b = _play(tmp_path, "PowerSGD", of_b="reports", least=2)
    _check_steps(a["log"], [2] * STEPS)
    assert (FAULT_STEP, 2, False, "") in b["log"]
    assert_parity(a["state"][:2], b["state"][:2], what="b")


def _refusals(rank: int, world_size: int, address: str) -> None:
    from torchft.manager import WorldSizeMode

    from overlap.integrations.torchft import prepare

    model = model_of_two_buckets()
    manager = manager_of("a", address)

    def refused(words: str, make: Callable[[], Any]) -> None:
        with pytest.raises(overlap.OverlapError, match=re.escape(words)):
            make()

    def prepared(chain: Any, of: Any = manager, **options: Any) -> Any:
        return prepare(of, model, optimizer_of(model), chain=chain, **options)

    def deferred(optimizer: Any) -> Any:
        return overlap.Step(optimizer, deferred=True)

    chains: dict[str, Any] = {
        "use Step(optimizer, deferred=True)": lambda o: overlap.chain(
            overlap.AllReduce(), overlap.Step(o, deferred=False)
        ),
        "use an OverlappedOptimizer": lambda o: overlap.chain(
            overlap.AllReduce(), overlap.Step(o.optimizer, deferred=True)
        ),
        "use a stage": lambda o: overlap.chain(overlap.as_stage(torch_hook, None), deferred(o)),
    }
    for words, chain in chains.items():
        refused(words, lambda chain=chain: prepared(chain))
    plain = overlap.AllReduce()
    sgd = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    refused("has made the update in backward by then", lambda: prepared(overlap.chain(plain, overlap.Step(sgd))))
    refused("rebuild its buckets", lambda: prepared(plain, static_graph=True))
    ddp, optimizer = prepared(overlap.PowerSGD(rank=1))
    refused("a Manager for each model", lambda: prepared(plain))
    refused("call optimizer.zero_grad()", optimizer.step)
    refused("neither a closure nor GradScaler", lambda: optimizer.step(lambda: None))
    refused("manager.shutdown()", lambda: overlap.Join([ddp]))
    refused("manager.shutdown()", lambda: TorchJoin([ddp]))
    optimizer.zero_grad()
    backward(ddp, "", 0, 0)
    optimizer.step()
    assert manager.current_step() == 1
    optimizer.zero_grad()
    backward(ddp, "", 1, 0)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(1))
    refused("neither a closure nor GradScaler", lambda: scaler.step(optimizer))
    # Last: a quorum would wait for these, too.
    refused("use_async_quorum=False", lambda: prepared(plain, manager_of("b", address, use_async_quorum=True)))
    spares = WorldSizeMode.FIXED_WITH_SPARES
    refused("WorldSizeMode.DYNAMIC", lambda: prepared(plain, manager_of("c", address, world_size_mode=spares)))
    refused("a replica group of its own", lambda: prepared(plain, manager_of("d", address, world_size=2)))
    manager.shutdown(wait=False)


def test_what_cannot_be_taken_back_is_refused() -> None:
    with lighthouse(least=1) as address:
        run_ranks(_refusals, 1, address, backend=None)


def test_the_example() -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, ROOT / "examples" / "torchft_ddp.py", "--steps", "400"]
    shown = subprocess.run(command, env=environment, check=True, capture_output=True, text=True, timeout=150).stdout
    assert "replica 1 was killed; it starts again" in shown
    ends = dict(re.findall(r"\[replica (\d)\] loss of all images (.*)", shown))
    assert ends["0"] == ends["1"]
    assert float(ends["0"].split(",")[0]) < 0.5
