"""What a state holds, which states are refused, and one file for all ranks.

tests/compositions resumes every update, in new processes.
"""

import copy
import dataclasses
import functools
import io
import linecache
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException

import overlap
from harness import assert_parity, on_ranks, plain_step, play, wrap
from harness.models import BATCH_NORM, MLP, mean_squared_error
from overlap import (
    AllReduce,
    Cast,
    ConfigurationError,
    Int4,
    LocalSGD,
    OverlappedOptimizer,
    PowerSGD,
    PowerSGDState,
    Quantize,
    Step,
    TrainingLoopError,
    ZeroRedundancyOptimizer,
    ZeroStep,
    as_stage,
    chain,
    powerSGD_hook,
)
from overlap.hooks import PostLocal, PostLocalSGDState, states

ADAMW = functools.partial(torch.optim.AdamW, lr=0.01)
# DDP keeps the buckets that it begins with, and so does what is rounded by bucket.
KEPT = dataclasses.replace(BATCH_NORM, find_unused_parameters=True)


def _feedback() -> Quantize:
    return Quantize(Int4(), error_feedback=True)


def _overlapped(rank: int, *, steps: int = 3, reducer: Any = None, parameters: Any = list, **step: Any) -> Any:
    ddp = wrap(KEPT.model(), **KEPT.ddp_options())
    optimizer = OverlappedOptimizer(ADAMW(parameters(ddp.parameters())))
    chain(_feedback() if reducer is None else reducer, Step(optimizer, **step)).register(ddp)
    _train(rank, ddp, optimizer, range(steps))
    return ddp, optimizer


def _zero(rank: int, *, steps: int = 3, **options: Any) -> Any:
    ddp = wrap(KEPT.model(), **KEPT.ddp_options())
    zero = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.AdamW, overlap_with_ddp=True, lr=0.01, **options)
    chain(_feedback(), ZeroStep(zero, gather="forward")).register(ddp)
    _train(rank, ddp, zero, range(steps))
    return ddp, zero


def _train(rank: int, ddp: Any, optimizer: Any, steps: range) -> None:
    for step in steps:
        plain_step(ddp, optimizer, MLP.batch(step, rank), mean_squared_error)


def _packed(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def _through_a_file(state: Any) -> Any:
    return torch.load(io.BytesIO(_packed(state)), weights_only=True)


def _refused(rank: int, folder: Path) -> None:
    ddp, optimizer = _overlapped(rank)
    state = overlap.state_dict(ddp, optimizer)
    other = {**state["model"], "9.weight": torch.ones(1)}
    wider = {**state["model"], "0.weight": torch.ones(3, 16)}
    narrower = {**state["model"], "0.weight": state["model"]["0.weight"].bfloat16()}
    foreign = copy.deepcopy(state)
    foreign["optimizer"][0]["parameters"][0][0] = "embedding"
    refused = {
        f"saved by rank {1 - rank} of 2, but this is rank {rank} of 2": {**state, "rank": 1 - rank},
        f"rank {rank} of 3, but": {**state, "ranks": 3},
        "not what overlap.state_dict": {"model": state["model"]},
        "another model's, which adds 9.weight": {**state, "model": other},
        r"0.weight is \(3, 16\) torch.float32 in it, and \(16, 16\) torch.float32 here": {**state, "model": wider},
        r"0.weight is \(16, 16\) torch.bfloat16 in it": {**state, "model": narrower},
        "saved with 0 optimizers, and load_state_dict was given 1": {**state, "optimizer": []},
        "group 0 lacks 0.weight and adds embedding": foreign,
        "saved with no stage registered, and here Chain > Quantize > Step is": {**state, "stages": None},
    }
    fresh, new = _overlapped(rank, steps=0)
    before = overlap.state_dict(fresh, new)
    for message, wrong in refused.items():
        with pytest.raises(ConfigurationError, match=message):
            overlap.load_state_dict(fresh, new, wrong)
    with pytest.raises(
        ConfigurationError, match="Chain > Quantize > Step registered, and here Chain > Cast > Quantize"
    ):
        overlap.load_state_dict(*_overlapped(rank, steps=0, reducer=Cast(torch.bfloat16, _feedback())), state)
    zero_ddp, zero = _zero(rank, steps=0)
    classes = overlap.state_dict(zero_ddp, zero)["stages"]["classes"]
    with pytest.raises(ConfigurationError, match="of class AdamW, but this one is a ZeroRedundancyOptimizer"):
        overlap.load_state_dict(zero_ddp, zero, {**state, "stages": {**state["stages"], "classes": classes}})
    with pytest.raises(ConfigurationError, match=r"share of .* is not the one that was saved"):
        overlap.load_state_dict(*_zero(rank, steps=0, partition="parameter"), overlap.state_dict(*_zero(rank)))
    with pytest.raises(ConfigurationError, match="Linear is not a DistributedDataParallel model"):
        overlap.state_dict(nn.Linear(2, 2))  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="is not an optimizer"):
        overlap.state_dict(ddp, "sgd")  # type: ignore[arg-type]
    assert_parity(overlap.state_dict(fresh, new), before, what="after states that were refused")


def _between(rank: int, folder: Path) -> None:
    for deferred in (False, True):
        ddp, optimizer = _overlapped(rank, deferred=deferred)
        mean_squared_error(ddp, MLP.batch(5, rank)).backward()
        with pytest.raises(
            TrainingLoopError, match=r"between backward and optimizer.step\(\): gradients are not saved"
        ):
            overlap.state_dict(ddp, optimizer)
        optimizer.step()
        overlap.state_dict(ddp, optimizer)
    ddp = wrap(MLP.model(), **MLP.ddp_options())
    local = LocalSGD(ddp, ADAMW(ddp.parameters()), start_step=5)
    mean_squared_error(ddp, MLP.batch(5, rank)).backward()
    with pytest.raises(TrainingLoopError, match=r"between backward and local.step\(\)"):
        overlap.state_dict(ddp, local)


def _snapshot(rank: int, folder: Path) -> None:
    ddp, optimizer = _overlapped(rank)
    next(iter(optimizer.state.values()))["kind"] = "first"  # Which PyTorch loads as a sequence.
    state = overlap.state_dict(ddp, optimizer)
    before = copy.deepcopy(state)
    _train(rank, ddp, optimizer, range(3, 5))
    assert_parity(state, before, what="a state after later steps")
    end = overlap.state_dict(ddp, optimizer)
    overlap.load_state_dict(ddp, optimizer, state)
    _train(rank, ddp, optimizer, range(3, 5))
    assert_parity(overlap.state_dict(ddp, optimizer), end, what="gone back and trained again")
    assert_parity(state, before, what="a state that was loaded, after later steps")


REDUCERS: dict[str, Callable[[], Any]] = {
    "Quantize, stochastic": lambda: Quantize(Int4(rounding="stochastic"), error_feedback=True),
    "Cast, Quantize": lambda: Cast(torch.bfloat16, _feedback()),
    "PowerSGD, alternating": lambda: PowerSGD(rank=2, min_compression_rate=1, alternate=True),
    "PowerSGD, late and cold": lambda: PowerSGD(rank=2, start_step=2, warm_start=False, min_compression_rate=1),
    "powerSGD_hook": lambda: as_stage(powerSGD_hook, PowerSGDState(None, 2, 1, 1)),
    "PostLocal": lambda: PostLocal(PostLocalSGDState(None, None, 4), _feedback()),
}


def _resumes(rank: int, folder: Path) -> None:
    for name, reducer in REDUCERS.items():
        ddp, optimizer = _overlapped(rank, reducer=reducer())
        state = _through_a_file(overlap.state_dict(ddp, optimizer))
        other, its = _overlapped(rank, steps=0, reducer=reducer())
        overlap.load_state_dict(other, its, state)
        for one, its_own in ((ddp, optimizer), (other, its)):
            _train(rank, one, its_own, range(3, 5))
        assert_parity(overlap.state_dict(other, its), overlap.state_dict(ddp, optimizer), what=name)


def _plain_optimizer(rank: int, folder: Path) -> None:
    ddp, optimizer = _overlapped(rank)
    state = overlap.state_dict(ddp, optimizer)
    with pytest.raises(ConfigurationError, match="group 0 has them in another order; make the same groups"):
        overlap.load_state_dict(*_overlapped(rank, steps=0, parameters=lambda found: list(found)[::-1]), state)
    in_backward = wrap(KEPT.model(), **KEPT.ddp_options())
    its = ADAMW(in_backward.parameters())
    chain(_feedback(), Step(its)).register(in_backward)
    overlap.load_state_dict(in_backward, its, copy.deepcopy(state))
    for step in range(3, 6):
        mean_squared_error(in_backward, MLP.batch(step, rank)).backward()
    plain = wrap(KEPT.model(), **KEPT.ddp_options())
    adamw = ADAMW(plain.parameters())
    overlap.register(plain, _feedback())
    state["stages"]["classes"], state["stages"]["state"] = ["Quantize"], state["stages"]["state"]["0"]
    overlap.load_state_dict(plain, adamw, state)
    for one, its_own in ((ddp, optimizer), (plain, adamw)):
        _train(rank, one, its_own, range(3, 6))
    assert_parity(plain.module.state_dict(), ddp.module.state_dict(), what="with a plain optimizer")
    assert_parity(overlap.state_dict(in_backward, its), overlap.state_dict(ddp, optimizer), what="stepped in backward")


class _Framework:
    """What frameworks hand out in place of an optimizer."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer
        self.param_groups = optimizer.param_groups


def _one_file(rank: int, folder: Path) -> None:
    """tests/resume/test_other_ranks.py has distributed checkpoints."""
    ddp, zero = _zero(rank)
    file = folder / "custom_checkpoint_0.pkl"
    state = overlap.TrainState(ddp, _Framework(zero)).gathered()  # type: ignore[arg-type]
    assert (state is None) is (rank == 1)
    if rank == 0:
        torch.save(state, file)
    torch.distributed.barrier()
    resumed, its = _zero(rank, steps=0)
    overlap.TrainState(resumed, its).load_state_dict(torch.load(file, weights_only=True))
    for one, its_own in ((ddp, zero), (resumed, its)):
        _train(rank, one, its_own, range(3, 6))
    assert_parity(overlap.state_dict(resumed, its), overlap.state_dict(ddp, zero), what="one file for all ranks")
    with pytest.raises(ConfigurationError, match="not the state of a TrainState"):
        overlap.TrainState(resumed, its).load_state_dict({"step": 1})


def _by_dcp(rank: int, folder: Path) -> None:
    """At the same number of ranks without communication; :func:`overlap.load` at any."""
    # Before rank 0 makes a group of its own: PyTorch names groups after the number of those that a rank is in.
    background = torch.distributed.new_group(backend="gloo")
    for name in ("saved", "saved in the background"):
        ddp, zero = _zero(rank)
        expected = overlap.state_dict(ddp, zero)
        run = {"run": overlap.TrainState(ddp, zero), "epoch": 3}
        if name == "saved":
            dcp.save(run, checkpoint_id=folder / name)
        else:
            future: Any = dcp.async_save(run, checkpoint_id=folder / name, process_group=background)
            _train(rank, ddp, zero, range(3, 4))
            future.result()
        resumed, its = _zero(rank, steps=0)
        given = {"run": overlap.TrainState(resumed, its), "epoch": 0}
        dcp.load(given, checkpoint_id=folder / name)
        assert given["epoch"] == 3
        assert_parity(overlap.state_dict(resumed, its), expected, what=name)
        other, its_own = _zero(rank, steps=1)
        assert overlap.load(folder / name, other, its_own) == {}
        assert_parity(overlap.state_dict(other, its_own), expected, what=f"{name}, by overlap.load")
        states: list[Any] = [None] * 2
        torch.distributed.all_gather_object(states, expected)
        if rank == 0:
            _by_one(folder / name, states)


def _of_version_0_1_0(rank: int, folder: Path) -> None:
    """The states of all ranks in bytes, which differ or are shared, under one name."""

    ddp, zero = _zero(rank)
    own = overlap.state_dict(ddp, zero)
    states: list[Any] = [None] * 2
    torch.distributed.all_gather_object(states, own)
    shared = {key: _packed(states[0][key]) for key in ("version", "ranks", "model")}
    each = [{key: _packed(one[key]) for key in one if key not in shared} for one in states]
    old = {"overlap": _packed({"shared": shared, "own": each})}
    dcp.save({"run": old}, checkpoint_id=folder / "old")
    for name in ("by TrainState", "by load"):
        resumed, its = _zero(rank, steps=1)
        if name == "by load":
            overlap.load(folder / "old", resumed, its)
        else:
            overlap.TrainState(resumed, its).load_state_dict(old)
        now = overlap.state_dict(resumed, its)
        assert_parity({**now, "model": {}}, {**own, "model": {}}, what=name)
        assert_parity(now["model"], states[0]["model"], what=f"{name}, the model")


def _named_pieces_of_version_0_1_0(rank: int, folder: Path) -> None:
    """Of two ranks, on CPUs: weight and bias have 60 and 3 elements, and chunks begin at multiples of 32 of these."""

    weight, bias = torch.arange(60.0), torch.arange(3.0) - 7
    steps = {f"{index}/step": torch.tensor(5.0) for index in range(2)}
    by_element = [
        {
            **steps,
            "0/exp_avg/0:32": weight[:32] / 8,
            "0/exp_avg_sq/0:32": weight[:32] / 4,
            "1/exp_avg/0:3": bias,
            "1/exp_avg_sq/0:3": -bias,
        },
        {
            **steps,
            "0/exp_avg/32:60": weight[32:] / 8,
            "0/exp_avg_sq/32:60": weight[32:] / 4,
            "1/exp_avg/3:3": bias[3:],
            "1/exp_avg_sq/3:3": bias[3:],
        },
    ]
    by_parameter = [
        {"0/step": torch.tensor(5.0), "0/exp_avg/0:60": weight / 8, "0/exp_avg_sq/0:60": weight / 4},
        {"1/step": torch.tensor(5.0), "1/exp_avg/0:3": bias, "1/exp_avg_sq/0:3": -bias},
    ]
    manifest = {
        "state": {},
        "entries": {},
        "options": [{"lr": 0.25}],
        "dtypes": [torch.float32, torch.float32],
        "strides": [[20, 1], [1]],
        "groups": [2],
        "shapes": [[3, 20], [3]],
    }
    expected = {
        0: {"step": torch.tensor(5.0), "exp_avg": weight.view(3, 20) / 8, "exp_avg_sq": weight.view(3, 20) / 4},
        1: {"step": torch.tensor(5.0), "exp_avg": bias, "exp_avg_sq": -bias},
    }
    for partition, pieces in (("element", by_element), ("parameter", by_parameter)):
        model = {"weight": weight.view(3, 20), "bias": bias}
        shared = {"version": 2, "ranks": 2, "stages": None, "model": model}
        optimizers = [
            {"class": "ZeroRedundancyOptimizer(Adam)", "parameters": [["weight", "bias"]], "own": own}
            for own in ({"manifest": manifest, **named} for named in pieces)
        ]
        each = [
            {key: _packed(value) for key, value in {"rank": old, "optimizer": [optimizer]}.items()}
            for old, optimizer in enumerate(optimizers)
        ]
        file = {"overlap": _packed({"shared": {key: _packed(value) for key, value in shared.items()}, "own": each})}
        dcp.save({"run": file}, checkpoint_id=folder / f"pieces by {partition}")
        for way in ("TrainState", "load", "load_state_dict"):
            ddp = wrap(nn.Linear(20, 3))
            zero = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.Adam, lr=0.1, partition=partition)
            if way == "TrainState":
                overlap.TrainState(ddp, zero).load_state_dict(file)
            elif way == "load":
                overlap.load(folder / f"pieces by {partition}", ddp, zero)
            else:
                overlap.load_state_dict(ddp, zero, {**shared, "rank": rank, "optimizer": [optimizers[rank]]})
            zero.consolidate_state_dict(to=None)
            state = zero.state_dict()
            assert_parity(state["state"], expected, what=f"by {partition}, {way}")
            assert_parity(dict(ddp.module.state_dict()), model, what=f"by {partition}, {way}, the model")
            assert state["param_groups"][0]["lr"] == 0.25


def _by_one(folder: Path, states: list[Any]) -> None:
    """On one rank, which is not the number that has saved."""
    alone = torch.distributed.new_group([0], use_local_synchronization=True)
    resumed = []
    for _ in range(2):
        ddp = wrap(KEPT.model(), process_group=alone, **KEPT.ddp_options())
        zero = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.AdamW, alone, lr=0.01)
        chain(_feedback(), ZeroStep(zero)).register(ddp)
        resumed.append((ddp, zero))
    with pytest.raises(CheckpointException, match=r"Missing key.*overlap.load\(folder, ddp, optim\) loads it"):
        dcp.load({"run": overlap.TrainState(*resumed[0])}, checkpoint_id=folder, process_group=alone)
    overlap.load(folder, *resumed[0])
    overlap.load_state_dict(*resumed[1], states)
    assert_parity(overlap.state_dict(*resumed[0]), overlap.state_dict(*resumed[1]), what="of a list")


def _with_ddp(rank: int, folder: Path) -> None:
    def made() -> Any:
        ddp = wrap(MLP.model(), **MLP.ddp_options())
        ddp.register_comm_hook(PowerSGDState(None, 1, 0, 1), powerSGD_hook)
        return ddp, ADAMW(ddp.parameters())

    ddp, optimizer = made()
    _train(rank, ddp, optimizer, range(3))
    state = _through_a_file(overlap.state_dict(ddp, optimizer))
    other, its = made()
    overlap.load_state_dict(other, its, state)
    for one, its_own in ((ddp, optimizer), (other, its)):
        _train(rank, one, its_own, range(3, 6))
    assert_parity(overlap.state_dict(other, its), overlap.state_dict(ddp, optimizer), what="a hook of DDP's own")

    class Opaque:
        pass

    foreign = wrap(MLP.model(), **MLP.ddp_options())
    foreign.register_comm_hook(Opaque(), _foreign_hook)
    with pytest.raises(ConfigurationError, match="keeps its state in a Opaque"):
        overlap.state_dict(foreign)
    registered = wrap(MLP.model(), **MLP.ddp_options())
    overlap.register(registered, _foreign_hook, Opaque())
    with pytest.raises(ConfigurationError, match="keeps its state in a Opaque"):
        overlap.state_dict(registered)


def _foreign_hook(state, bucket):
    future: Any = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


def _kept(rank: int, folder: Path) -> None:
    ddp, optimizer = _overlapped(rank, steps=1, reducer=AllReduce())
    optimizer.param_groups[0]["callback"] = print
    with pytest.raises(ConfigurationError, match=r"\['callback'\] is a builtin_function_or_method, which is neither"):
        overlap.state_dict(ddp, optimizer)
    ddp, optimizer = _overlapped(rank, steps=2, reducer=PowerSGD(start_step=5))
    state = overlap.state_dict(ddp, optimizer)
    assert state["stages"]["state"]["0"]["steps"] == 2
    fresh, new = _overlapped(rank, steps=0, reducer=PowerSGD(start_step=5))
    overlap.load_state_dict(fresh, new, state)
    assert_parity(overlap.state_dict(fresh, new), state, what="before it matters")


def _warns(rank: int, folder: Path) -> None:
    """Once, where the memory of stages is not saved with the state of an optimizer."""

    def told(*calls: Callable[[], Any]) -> int:
        states._needs_no_warning = False
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            for call in calls * 2:
                call()
        texts = [str(one.message) for one in found]
        assert all("save with overlap.save(folder, ddp, optimizer) on every rank" in text for text in texts), texts
        lines = [linecache.getline(one.filename, one.lineno).strip() for one in found]
        assert all(line == "call()" or "lambda" in line for line in lines), f"at the line that saves or loads: {lines}"
        return len(texts)

    ddp, optimizer = _overlapped(rank)
    state, whole = optimizer.optimizer.state_dict(), overlap.state_dict(ddp, optimizer)
    assert told(optimizer.state_dict) == told(lambda: optimizer.load_state_dict(state)) == 1
    assert told(lambda: overlap.load_state_dict(ddp, optimizer, whole), lambda: overlap.state_dict(ddp, optimizer)) == 0
    assert told(lambda: overlap.TrainState(ddp, optimizer, stages_only=True), optimizer.state_dict) == 0
    _, its = _overlapped(rank, reducer=AllReduce())
    assert told(its.state_dict, lambda: its.load_state_dict(its.state_dict())) == 0
    _, zero = _zero(rank)
    zero.consolidate_state_dict(to=None)
    assert told(zero.state_dict) == told(lambda: zero.load_state_dict(state)) == 1
    model = wrap(MLP.model(), **MLP.ddp_options())
    local = LocalSGD(model, ADAMW(model.parameters()), period=2, start_step=0)
    _train(rank, model, local, range(1))
    of_round = local.state_dict() if told(local.state_dict) == 1 else None
    assert told(lambda: local.load_state_dict(of_round)) == 1
    assert told(lambda: overlap.state_dict(model, local)) == 0
    local.synchronize()
    assert told(local.state_dict) == 0


def _pair(rank: int, steps: int) -> Any:
    ddp = wrap(MLP.model(), **MLP.ddp_options())
    matrices, others = ([p for p in ddp.parameters() if (p.ndim == 2) is is_matrix] for is_matrix in (True, False))
    zero = ZeroRedundancyOptimizer(matrices, torch.optim.Muon, lr=0.02)
    adamw = OverlappedOptimizer(ADAMW(others))
    chain(ZeroStep(zero), Step(adamw)).register(ddp)
    for step in range(steps):
        mean_squared_error(ddp, MLP.batch(step, rank)).backward()
        zero.step()
        adamw.step()
    return ddp, zero, adamw


def _of_two(rank: int, folder: Path) -> None:
    ddp, zero, adamw = _pair(rank, 3)
    state, file = overlap.state_dict(ddp, [zero, adamw]), overlap.TrainState(ddp, [zero, adamw]).state_dict()
    fresh, *new = _pair(rank, 1)
    before = overlap.state_dict(fresh, new)
    for optimizers, message in (
        (new[0], r"Step\(AdamW, interleaved\) is registered, and load_state_dict was not given its optimizer"),
        (new[::-1], r"of class ZeroRedundancyOptimizer\(Muon\), but this one is a AdamW"),
        ([new[0], new[0]], "one optimizer twice"),
        (None, "saved with 2 optimizers, and load_state_dict was given 0"),
    ):
        with pytest.raises(ConfigurationError, match=message):
            overlap.load_state_dict(fresh, optimizers, state)
    assert_parity(overlap.state_dict(fresh, new), before, what="after states that were refused")
    with pytest.raises(ConfigurationError, match="whose state would be lost"):
        overlap.state_dict(ddp, zero)
    overlap.TrainState(fresh, new).load_state_dict(file)
    assert_parity(overlap.state_dict(fresh, new), state, what="of one file")


CELLS: dict[str, Callable[[int, Path], None]] = {
    "a state that does not fit is refused by name and changes nothing": _refused,
    "a state between backward and step is refused": _between,
    "a state is a snapshot that a run can go back to": _snapshot,
    "every reducer resumes bit for bit": _resumes,
    "a plain optimizer resumes exactly, and another order is refused": _plain_optimizer,
    "one file for all ranks resumes each rank exactly": _one_file,
    "PyTorch's own calls save and load it": _by_dcp,
    "one of version 0.1.0 loads": _of_version_0_1_0,
    "named pieces of version 0.1.0 load": _named_pieces_of_version_0_1_0,
    "hooks that are registered with DDP are saved or refused": _with_ddp,
    "what cannot be saved is named, and counters are saved before they matter": _kept,
    "the states of two optimizers are saved together": _of_two,
    "an optimizer's state without the memory of stages is one warning": _warns,
}


@on_ranks(2, timeout_s=120)
def test_two_ranks(rank: int, folder: Path) -> None:
    play(CELLS, rank, folder)
