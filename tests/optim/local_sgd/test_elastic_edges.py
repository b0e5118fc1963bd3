"""Elastic local SGD on one process and on a few threads: what is refused, saved, and given to newcomers."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from elastic_runs import (
    OUTER,
    PERIOD,
    client,
    elastic,
    hosted,
    model_of,
    numbers_taken,
    one_step,
    sgd,
    values_of,
    wait_for,
)
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from harness import RankDied, run_ranks
from overlap import CollectiveError, ConfigurationError, ElasticLocalSGD, TrainingLoopError, UnsupportedError
from overlap.optim.local_sgd.elastic_exchange import ElasticExchange


def _alone(model: nn.Module, **options: Any) -> ElasticLocalSGD:
    return elastic(model, dist.HashStore(), **{"world_size": 1, **options})


def _in_threads(count: int, run: Callable[[int], Any]) -> list[Any]:
    found: list[Any] = [None] * count

    def keep(rank: int) -> None:
        try:
            found[rank] = run(rank)
        except Exception as error:
            found[rank] = error

    threads = [threading.Thread(target=keep, args=(rank,)) for rank in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(40)
    assert not any(thread.is_alive() for thread in threads), "a process waits in vain"
    return found


def _train_on(local: ElasticLocalSGD, model: nn.Module, rank: int, before: Callable[[], None] = lambda: None) -> None:
    with local:
        while True:
            before()
            one_step(model, local, rank, local.step_count)


# One process --------------------------------------------------------------------------------------------------


def _one_process(rank: int, world_size: int) -> None:
    for period in (PERIOD, lambda step: 1 + step % 2):
        model, plain = model_of(), model_of()
        optimizer = sgd(plain)
        with _alone(model, period=period) as local:
            for step in range(7):
                one_step(model, local, 0, step)
                one_step(plain, optimizer, 0, step)
        assert all(value.equal(values_of(plain)[name]) for name, value in values_of(model).items())
        assert local.step_count == 7 and local.members == ()


def test_one_process_trains_as_without() -> None:
    run_ranks(_one_process, 1, backend=None)


def _resumed(rank: int, world_size: int) -> None:
    def trained(begin: int, end: int, saved: Any = None, **options: Any) -> tuple[Any, Any]:
        model = model_of()
        local = _alone(model, outer=OUTER, **options)
        if saved is not None:
            model.load_state_dict(saved[0])
            local.load_state_dict(saved[1])
        with local:
            assert local.step_count == begin
            for step in range(begin, end):
                one_step(model, local, 0, step)
        return model.state_dict(), local.state_dict()

    for middle in (PERIOD, PERIOD + 1):
        whole = trained(0, 3 * PERIOD)
        parts = trained(middle, 3 * PERIOD, trained(0, middle))
        assert all(whole[0][name].equal(parts[0][name]) for name in whole[0])
        assert whole[1]["elastic_local_sgd"]["round"] == parts[1]["elastic_local_sgd"]["round"]
    with pytest.raises(ConfigurationError, match="saved with an outer optimizer"):
        _alone(model_of()).load_state_dict(whole[1])
    with pytest.warns(UserWarning, match="begins at step 0"):
        _alone(model_of()).load_state_dict(sgd(model_of()).state_dict())


def test_a_run_that_was_saved_goes_on_exactly_also_in_the_middle_of_a_round() -> None:
    run_ranks(_resumed, 1, backend=None)


def _momentum(local: ElasticLocalSGD) -> torch.Tensor:
    assert local.outer is not None
    return torch.cat([state["momentum_buffer"].flatten() for state in local.outer.state.values()])


def _kinds(rank: int, world_size: int) -> None:
    model = model_of().bfloat16()
    model[0].weight.requires_grad_(False)
    frozen = model[0].weight.clone()
    both = [torch.optim.SGD([model[0].bias], lr=0.1), torch.optim.AdamW(model[3].parameters(), lr=0.1)]
    local = ElasticLocalSGD(
        model, both, dist.HashStore(), world_size=1, period=2, outer=OUTER, average_dtype=torch.float32,
        average_buffers=False, timeout=timedelta(minutes=1),
    )  # fmt: skip
    with local:
        for _ in range(5):
            local.zero_grad()
            model(torch.randn(6, 8).bfloat16()).square().mean().backward()
            local.step()
        before = _momentum(local)
        local.synchronize()
        after = _momentum(local)
        local.synchronize()
        assert not before.equal(after) and after.equal(_momentum(local))
    assert model[0].weight.equal(frozen) and after.dtype == torch.float32


def test_half_precision_frozen_parameters_and_several_optimizers() -> None:
    run_ranks(_kinds, 1, backend=None)


def _refusals(rank: int, world_size: int) -> None:
    model = model_of()
    refused: list[tuple[dict[str, Any], str]] = [
        ({"period": {2: 2, 4: 4}}, "a hierarchy, whose groups would have to stay"),
        ({"period": 0}, "period must be a whole number of at least 1"),
        ({"world_size": 0}, "world_size must be"),
        ({"min_size": 0}, "min_size must be"),
        ({"min_size": 4}, "min_size is 4, and the group begins with world_size=3"),
        ({"timeout": 0}, "timeout must be greater than 0"),
        ({"join_timeout": timedelta(0)}, "join_timeout must be greater than 0"),
        ({"heartbeat_timeout": float("nan")}, "heartbeat_timeout must be a finite number"),
        ({"average_dtype": torch.int8}, "average_dtype must be"),
        ({"outer": sgd(model)}, "outer must be a function"),
    ]
    for options, said in refused:
        with pytest.raises(ConfigurationError, match=said):
            elastic(model, dist.HashStore(), **options)
    with pytest.raises(ConfigurationError, match="in DistributedDataParallel: give the module that it wraps"):
        elastic(nn.Sequential(DistributedDataParallel(model)), dist.HashStore())
    with pytest.raises(ConfigurationError, match="store is a store such as"):
        elastic(model, "localhost:29500")
    with pytest.raises(ConfigurationError, match="model is the module"):
        ElasticLocalSGD(sgd(model), sgd(model), dist.HashStore(), world_size=1)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="has no parameter of this model"):
        ElasticLocalSGD(model, sgd(nn.Linear(1, 1)), dist.HashStore(), world_size=1)
    with pytest.raises(UnsupportedError, match="complex"):
        elastic(nn.Linear(2, 2, dtype=torch.complex64), dist.HashStore(), outer=OUTER)
    with pytest.raises(TypeError, match="wire"):
        elastic(model, dist.HashStore(), wire=None)

    local = _alone(model)
    for call in (local.step, local.synchronize, lambda: local.rank):
        with pytest.raises(TrainingLoopError, match="works inside of the block"):
            call()
    with local:
        assert (local.rank, local.world_size, local.members) == (0, 1, (0,))
        with pytest.raises(TrainingLoopError, match="in the group already"), local:
            pass
        assert local.world_size == 1
        with pytest.raises(TrainingLoopError, match="load it before"):
            local.load_state_dict(local.state_dict())
    with pytest.raises(ConfigurationError, match="period at step 0 must be"), _alone(model, period=lambda step: 0):
        pass
    store = dist.HashStore()
    with elastic(model, store, world_size=1), pytest.raises(ConfigurationError, match="same model and settings"):
        elastic(nn.Sequential(nn.Linear(8, 4)), store, world_size=1).__enter__()
    late = elastic(model, dist.HashStore(), join_timeout=0.1)
    with pytest.raises(CollectiveError, match=r"world_size=3 processes, and 1 came"), late:
        pass


def test_what_does_not_work_is_refused_by_name() -> None:
    run_ranks(_refusals, 1)


# Several ------------------------------------------------------------------------------------------------------


def _the_furthest(rank: int, world_size: int, port: int) -> None:
    def train(place: int) -> Any:
        model = model_of()
        local = elastic(model, client(port), world_size=2, outer=OUTER)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(place)
        state = local.state_dict()
        state["elastic_local_sgd"] |= {"step": 4 * place, "round": (3, 6)}
        local.load_state_dict(state)
        with local:
            assert local.step_count == 4
            return values_of(model)

    found = _in_threads(2, train)
    expected = values_of(model_of())
    for values in found:
        assert values["0.weight"].equal(expected["0.weight"] + 1), found


def test_when_a_group_forms_the_process_with_the_most_steps_gives_its_model() -> None:
    with hosted() as port:
        run_ranks(_the_furthest, 1, port, backend=None)


def _nothing_is_left(rank: int, world_size: int, port: int) -> None:
    def train(place: int) -> int:
        store, model = client(port), model_of()
        wait_for(lambda: numbers_taken(store) == place)
        with elastic(model, store, world_size=2 if place < 2 else 1) as local:
            while local.step_count < 4 * PERIOD:
                if local.step_count == PERIOD + 1 and place == 1:
                    raise ValueError("lost")
                one_step(model, local, place, local.step_count)
        return local.step_count

    before = {thread.name for thread in threading.enumerate()}
    found = _in_threads(2, train)
    assert found[0] == 4 * PERIOD and isinstance(found[1], ValueError)
    wait_for(lambda: {thread.name for thread in threading.enumerate()} <= before)


def test_no_thread_is_left_after_the_block() -> None:
    with hosted() as port:
        run_ranks(_nothing_is_left, 1, port, backend=None)


def _failing_link(rank: int, world_size: int, port: int) -> None:
    def train(place: int) -> Any:
        store, model = client(port), model_of()
        wait_for(lambda: numbers_taken(store) == place)
        local = elastic(model, store, world_size=2)
        # Once more where the other has given up and left by then.
        with pytest.raises(CollectiveError, match=r"failed [34] times, .* lost a connection: .* by peer"):
            _train_on(local, model, place)
        return values_of(model), local.step_count

    def broken(self: ElasticExchange, view: Any, tensors: Any) -> None:
        self._raise(view, RuntimeError("[/gloo/transport/tcp/pair.cc] Connection closed by peer"))

    ElasticExchange.sum = broken  # type: ignore[method-assign]
    for place, (values, steps) in enumerate(_in_threads(2, train)):
        assert steps == PERIOD
        model = model_of()
        optimizer = sgd(model)
        for step in range(PERIOD):
            one_step(model, optimizer, place, step)
        assert all(value.equal(values[name]) for name, value in values_of(model).items())


def test_an_average_that_always_fails_is_an_error_and_changes_nothing() -> None:
    with hosted() as port:
        run_ranks(_failing_link, 1, port, backend=None)


# The store's host ---------------------------------------------------------------------------------------------


def _without_store(rank: int, world_size: int, folder: Path, fault: str) -> tuple[str, float]:
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        (folder / "part").write_text(f"{store.port} {os.getpid()}")
        (folder / "part").rename(folder / "port")
        wait_for(lambda: store.check(["train"]))
        os.kill(os.getpid(), signal.SIGKILL if fault == "killed" else signal.SIGSTOP)
        return "", 0.0
    wait_for((folder / "port").exists)
    port, host = map(int, (folder / "port").read_text().split())
    store, model = client(port), model_of()
    local = elastic(model, store, world_size=2, heartbeat_timeout=2)
    began_s = 0.0

    def before() -> None:
        nonlocal began_s
        if local.step_count != PERIOD + 1:
            return
        if rank == 1:
            wait_for(lambda: store.check(["the other trains"]))
        store.set({1: "train", 2: "the other trains"}[rank], "")
        time.sleep(0.5)
        began_s = time.monotonic()

    with pytest.raises(CollectiveError) as raised:
        _train_on(local, model, rank, before)
    waited_s = time.monotonic() - began_s
    if fault == "stopped":
        (folder / f"done{rank}").touch()
        wait_for(lambda: all((folder / f"done{one}").exists() for one in (1, 2)))
        os.kill(host, signal.SIGCONT)
    return str(raised.value), waited_s


@pytest.mark.parametrize("fault", ["killed", "stopped"])
def test_without_the_stores_host_all_end_with_an_error_in_time(fault: str, tmp_path: Path) -> None:
    found = run_ranks(_without_store, 3, tmp_path, fault, backend=None, return_exceptions=True)
    assert isinstance(found[0], RankDied) == (fault == "killed")
    state = "has ended" if fault == "killed" else "hangs or is cut off"
    for said, waited_s in found[1:]:
        assert f"the process that hosts the store of this group {state}" in said
        assert waited_s < 10
