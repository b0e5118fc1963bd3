"""One folder for all ranks: what it holds, who else reads it, and which folders are refused.

tests/compositions resumes every chain from one, tests/resume/test_other_ranks.py at other numbers of ranks.
"""

import contextlib
import copy
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import overlap
from benchmarks.host_cost import IdleStreams
from harness import assert_parity, on_ranks, plain_step, play, run_ranks, wrap
from harness.models import BATCH_NORM, EMPTY, MLP, Case, mean_squared_error
from overlap import (
    AllReduce,
    CollectiveError,
    ConfigurationError,
    Int4,
    LocalSGD,
    OverlappedOptimizer,
    PeerError,
    PowerSGD,
    Quantize,
    Step,
    TrainingLoopError,
    ZeroRedundancyOptimizer,
    ZeroStep,
    chain,
)
from overlap._torch.device import streams_replaced

ADAMW: dict[str, Any] = {"lr": 0.01, "weight_decay": 0.1}


class Loader:
    """As a StatefulDataLoader: each rank has a position of its own."""

    def __init__(self, position: int = 0) -> None:
        self.position = position

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position, "seeds": [torch.arange(self.position)]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state["position"] == 13:
            raise ValueError("an unlucky position")
        self.position = len(state["seeds"][0])


def _made(case: Case = MLP, *, seed: int = 0, reducer: Any = None, **options: Any) -> tuple[Any, Any]:
    ddp = wrap(case.model(seed=seed), **case.ddp_options(), **options)
    optimizer = OverlappedOptimizer(torch.optim.AdamW(ddp.parameters(), **ADAMW))
    chain(Quantize(Int4(), error_feedback=True) if reducer is None else reducer, Step(optimizer)).register(ddp)
    return ddp, optimizer


def _train(rank: int, ddp: Any, optimizer: Any, steps: range, case: Case = MLP) -> None:
    for step in steps:
        plain_step(ddp, optimizer, case.batch(step, rank), mean_squared_error)


def _loop(rank: int, folder: Path) -> None:
    """Schedulers, positions and values; the future of a save; what ranks have alike is written once."""
    ddp, optimizer = _made()
    scheduler, loader = torch.optim.lr_scheduler.StepLR(optimizer, 1), Loader(3 + rank)
    _train(rank, ddp, optimizer, range(2))
    scheduler.step()
    table = torch.full((3, 4), 7.0)
    added = {"scheduler": scheduler, "loader": loader, "epoch": 1, "best": 0.5, "mine": rank, "table": table}
    expected = overlap.state_dict(ddp, optimizer)
    future = overlap.save(folder / "loop", ddp, optimizer, wait=False, **added)
    _train(rank, ddp, optimizer, range(2, 3))
    overlap.save(folder / "second", ddp, optimizer)
    assert future is not None and future.done(), "the second one waits for the first"
    other, its = _made(seed=5)
    later, resumed = torch.optim.lr_scheduler.StepLR(its, 1), Loader()
    values = overlap.load(folder / "loop", other, its, scheduler=later, loader=resumed)
    assert_parity(values, {"epoch": 1, "best": 0.5, "mine": rank, "table": table}, what="values")
    assert later.state_dict() == {**scheduler.state_dict(), "_last_lr": later.state_dict()["_last_lr"]}
    assert resumed.position == 3 + rank
    assert_parity(overlap.state_dict(other, its), expected, what="of the time of the save")
    for wrong, message in (
        ({"epoch": 1}, r"epoch=1 has no load_state_dict\(\): give objects; values are returned"),
        ({"scaler": Loader()}, r"no object scaler was saved in .*loop, which has \['loader', 'scheduler'\]"),
    ):
        with pytest.raises(ConfigurationError, match=message):
            overlap.load(folder / "loop", other, its, **wrong)


def _buffers(rank: int, folder: Path) -> None:
    """Rank 0's where DDP broadcasts them, else each rank's; so are parameters that DDP ignores, and their state."""
    for name, is_broadcast, ignored in (("broadcast", True, []), ("own", False, []), ("ignored", True, ["0.bias"])):
        case = BATCH_NORM

        def made(seed: int, is_broadcast: bool = is_broadcast, ignored: Any = ignored, case: Case = case) -> Any:
            model = case.model(seed=seed)
            DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ignored)
            ddp = wrap(model, **case.ddp_options())
            ddp.broadcast_buffers = is_broadcast  # The argument of this name warns.
            return ddp, torch.optim.AdamW(ddp.parameters(), **ADAMW)

        ddp, optimizer = made(0)
        _train(rank, ddp, optimizer, range(2), case)
        overlap.save(folder / name, ddp, optimizer)
        other, its = made(3)
        overlap.load(folder / name, other, its)
        if not is_broadcast or ignored:
            now, then = (one.module.state_dict() for one in (other, ddp))
            kept = [key for key in then if "running" not in key and "num" not in key] if is_broadcast else list(then)
            assert_parity({key: now[key] for key in kept}, {key: then[key] for key in kept}, what=f"{name}, at once")
        for one, of_one in ((ddp, optimizer), (other, its)):
            _train(rank, one, of_one, range(2, 4), case)
        assert_parity(overlap.state_dict(other, its), overlap.state_dict(ddp, optimizer), what=name)


def _apart(rank: int, folder: Path) -> None:
    """In the middle of a round each rank has a model of its own; after an average they have one."""

    def made(seed: int) -> Any:
        ddp = wrap(MLP.model(seed=seed), **MLP.ddp_options())
        optimizer = torch.optim.AdamW(ddp.parameters(), **ADAMW)
        return ddp, LocalSGD(ddp, optimizer, period=3, start_step=0, wire=Int4(), error_feedback=True)

    ddp, local = made(0)
    _train(rank, ddp, local, range(2))
    overlap.save(folder / "middle", ddp, local)
    other, its = made(3)
    overlap.load(folder / "middle", other, its)
    for one, of_one in ((ddp, local), (other, its)):
        _train(rank, one, of_one, range(2, 5))
    assert_parity(overlap.state_dict(other, its), overlap.state_dict(ddp, local), what="from the middle of a round")
    names = dcp.FileSystemReader(folder / "middle").read_metadata().state_dict_metadata
    assert not any(name.startswith("model.") for name in names)
    alone = dist.new_group([rank], use_local_synchronization=True)
    single = wrap(MLP.model(), process_group=alone, **MLP.ddp_options())
    with pytest.raises(ConfigurationError, match="while ranks had different models, by 2 ranks, and here are 1"):
        overlap.load(folder / "middle", single, LocalSGD(single, torch.optim.AdamW(single.parameters()), period=3))


def _several(rank: int, folder: Path) -> None:
    """Several optimizers, a parameter outside of the model, one of channels_last, an empty one."""

    def made(seed: int) -> Any:
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(8 * 4, 5)).to(
            memory_format=torch.channels_last
        )
        ddp = wrap(model)
        outside = nn.Parameter(torch.full((3,), float(rank)))
        zero = ZeroRedundancyOptimizer(ddp.module[0].parameters(), torch.optim.Adam, lr=0.1)
        sgd = torch.optim.SGD([*ddp.module[2].parameters(), outside], lr=0.1, momentum=0.9)
        chain(ZeroStep(zero)).register(ddp)
        return ddp, zero, sgd, outside

    def train(made: Any, steps: range) -> None:
        ddp, zero, sgd, outside = made
        for step in steps:
            x = torch.randn(4, 3, 4, 4, generator=torch.Generator().manual_seed(2 * step + rank))
            (ddp(x).square().mean() + outside.square().sum()).backward()
            zero.step()
            sgd.step()
            sgd.zero_grad()

    run = made(0)
    train(run, range(2))
    ddp, zero, sgd, outside = run
    overlap.save(folder / "several", ddp, [zero, sgd])
    resumed = made(1)
    overlap.load(folder / "several", resumed[0], [resumed[1], resumed[2]])
    with torch.no_grad():
        resumed[3].copy_(outside)
    assert_parity(
        overlap.state_dict(resumed[0], [resumed[1], resumed[2]]), overlap.state_dict(ddp, [zero, sgd]), what="at once"
    )
    for one in (run, resumed):
        train(one, range(2, 4))
    assert_parity(resumed[0].module.state_dict(), ddp.module.state_dict(), what="later")
    empty = wrap(EMPTY.model(), **EMPTY.ddp_options())
    its = ZeroRedundancyOptimizer(empty.parameters(), torch.optim.Adam, partition="parameter")
    _train(rank, empty, its, range(2), EMPTY)
    overlap.save(folder / "empty", empty, its)
    by_element = ZeroRedundancyOptimizer(empty.parameters(), torch.optim.Adam)
    overlap.load(folder / "empty", empty, by_element)
    for one in (its, by_element):
        one.consolidate_state_dict(to=None)
    assert_parity(by_element.state_dict(), its.state_dict(), what="by parameter, then by element")


def _refused(rank: int, folder: Path) -> None:
    ddp, optimizer = _made()
    _train(rank, ddp, optimizer, range(2))
    overlap.save(folder / "whole", ddp, optimizer, loader=Loader(13 if rank else 2))
    with pytest.raises(
        ConfigurationError, match=r"whole has a checkpoint already, .* give each save a folder of its own"
    ):
        overlap.save(folder / "whole", ddp, optimizer)
    mean_squared_error(ddp, MLP.batch(5, rank)).backward()
    with pytest.raises(TrainingLoopError, match="gradients are not saved"):
        overlap.save(folder / "between", ddp, optimizer)
    optimizer.step()
    with pytest.raises(ConfigurationError, match=r"made=\.\.\. is a object, which is neither"):
        overlap.save(folder / "opaque", ddp, optimizer, made=object())
    with pytest.raises(PeerError if rank == 0 else ConfigurationError, match="is not an optimizer"):
        overlap.save(folder / "alone", ddp, optimizer if rank == 0 else "sgd")  # type: ignore[arg-type]
    assert not any((folder / name).exists() for name in ("between", "opaque", "alone")), "nothing is written"
    # Files of another model, another optimizer, another chain; one that is damaged, and one that is not whole.
    for name in ("cut", "flipped", "metadata", "interrupted"):
        overlap.save(folder / name, ddp, optimizer)
    file, metadata = folder / "flipped" / f"__{rank}_0.distcp", folder / "metadata" / ".metadata"
    dist.barrier()
    data = bytearray(file.read_bytes())
    data[data.index(b"data/0") + 96] ^= 1  # One bit of a tensor.
    file.write_bytes(data)
    os.truncate(folder / "cut" / f"__{rank}_0.distcp", 1000)
    if rank == 0:
        metadata.write_bytes(metadata.read_bytes()[:-100])
        (folder / "interrupted" / ".metadata").rename(folder / "interrupted" / ".metadata.tmp")
    dist.barrier()
    other, its = _made(seed=4)
    _train(rank, other, its, range(1))
    wider = wrap(nn.Linear(16, 32))
    its_own = torch.optim.AdamW(wider.parameters())
    chain(Quantize(Int4(), error_feedback=True), Step(its_own)).register(wider)
    sgd = OverlappedOptimizer(torch.optim.SGD(other.parameters(), lr=0.1))
    errors = ConfigurationError, PeerError
    loader = Loader(5)
    for name, model, given, objects, message in (
        ("nowhere", other, its, {}, r"nowhere has no whole checkpoint: .metadata is missing"),
        ("interrupted", other, its, {}, r"has no whole checkpoint"),
        ("metadata", other, its, {}, r"metadata is damaged, load the one before"),
        ("cut", other, its, {}, r"cut is damaged"),
        ("flipped", other, its, {}, r"flipped is damaged"),
        ("whole", wider, its_own, {}, r"another model's, which lacks weight, bias and adds"),
        ("whole", other, None, {}, r"saved with 1 optimizers, and load.* was given 0"),
        ("whole", other, [its, sgd], {}, r"saved with 1 optimizers, and load.* was given 2"),
        (
            "whole",
            *_made(reducer=PowerSGD(rank=1)),
            {},
            r"saved with Chain > Quantize > Step registered, and here Chain > P",
        ),
        ("whole", *_made(reducer=Quantize(Int4())), {}, "has error feedback, but"),
    ):
        before = overlap.state_dict(model, given)
        with pytest.raises(errors, match=message):
            overlap.load(folder / name, model, given, **objects)
        assert_parity(overlap.state_dict(model, given), before, what=f"after {message!r}")
    before = overlap.state_dict(other, its)
    with pytest.raises(ValueError if rank else PeerError, match="an unlucky position"):
        overlap.load(folder / "whole", other, its, loader=loader)
    assert loader.position == 5, "rank 0's, which had been loaded, is as before"
    assert_parity(overlap.state_dict(other, its), before, what="where an object of rank 1 has refused its state")
    overlap.load(folder / "whole", other, its)
    (folder / "taken").mkdir(exist_ok=True)
    (folder / "taken" / "file").touch()
    with pytest.raises(CollectiveError, match=r"taken/file/1 was not written, and is no checkpoint: rank 0"):
        overlap.save(folder / "taken" / "file" / "1", ddp, optimizer)


class _Nesting(torch.optim.SGD):
    """Its state has values of other dtypes than the parameter's, one in another."""

    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            codes = torch.arange(parameter.numel(), dtype=torch.uint8)
            scale = torch.full((1,), 1 / 3, dtype=torch.float64)
            self.state[parameter]["quantized"] = {"codes": codes, "kind": "nf4", "scales": [scale, None]}


def _nested(rank: int, folder: Path) -> None:
    """State comes back as it was, and forms of others that do not fit are refused before anything is changed."""

    def made(make: Callable[..., Any], **options: Any) -> tuple[Any, Any]:
        model = nn.Linear(4, 4).to(torch.bfloat16)
        with torch.no_grad():
            model.weight.fill_(0.5)
        return (ddp := wrap(model)), make(ddp.parameters(), lr=0.1, **options)

    def trained(make: Callable[..., Any], **options: Any) -> tuple[Any, Any]:
        ddp, optimizer = made(make, **options)
        ddp(torch.ones(2, 4, dtype=torch.bfloat16)).sum().backward()
        optimizer.step()
        return ddp, optimizer

    def sharded(parameters: Any, **options: Any) -> Any:
        return ZeroRedundancyOptimizer(parameters, torch.optim.AdamW, master_dtype=torch.float32, **options)

    ddp, optimizer = trained(_Nesting)
    overlap.save(folder / "nested", ddp, optimizer)
    other, its = made(_Nesting)
    overlap.load(folder / "nested", other, its)
    assert_parity(its.state_dict()["state"], optimizer.state_dict()["state"], what="nested state")
    overlap.save(folder / "masters", *trained(sharded))
    ddp, optimizer = trained(torch.optim.SGD, momentum=0.9)
    model, state = get_state_dict(ddp, optimizer)
    dcp.save({"model": model, "optim": state}, checkpoint_id=folder / "sgd")
    numbered = {"model": ddp.module.state_dict(), "optim": optimizer.state_dict()}
    dcp.save(numbered, checkpoint_id=folder / "numbered")
    for name, message in (
        ("masters", r"a copy of parameter 0 in torch.float32"),
        ("sgd", r"options \['dampening', .*\], and AdamW has \['amsgrad', 'betas'"),
        ("numbered", r"another form than that of overlap.save"),
    ):
        other, its = made(torch.optim.AdamW)
        before = copy.deepcopy(other.module.state_dict())
        with pytest.raises(ConfigurationError, match=message):
            overlap.load(folder / name, other, its)
        assert_parity(other.module.state_dict(), before, what=name)
    for value in ({np.str_("a"): 1, b"b": {frozenset(): 2}}, np.ones(2)):
        with pytest.raises(ConfigurationError, match="neither a tensor nor a plain value"):
            overlap.save(folder / "keys", ddp, optimizer, value=value)
    with pytest.raises(ConfigurationError, match=r"gathered\(to=2\)"):
        overlap.TrainState(ddp, optimizer).gathered(to=2)


CELLS: dict[str, Callable[[int, Path], None]] = {
    "what the loop adds": _loop,
    "buffers and ignored parameters": _buffers,
    "models that differ": _apart,
    "several optimizers and layouts": _several,
    "state that nests, and forms of others": _nested,
    "a folder that does not fit is refused and changes nothing": _refused,
}


@on_ranks(2, timeout_s=120)
def test_two_ranks(rank: int, folder: Path) -> None:
    play(CELLS, rank, folder)


# The same state, cut in blocks by 2 ranks, by elements by 3, whole on 1, and as FSDP2's shards on 3.


def _model(seed: int) -> Any:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(33, 10), nn.Conv1d(10, 7, 3, padding=1), nn.Linear(7, 3))


def _expected(model: Any, optimizer: Any) -> Any:
    """Made up from names, so that every rank of every world knows it."""
    for number, parameter in enumerate(model.parameters()):
        filled = torch.arange(float(parameter.numel())).view(parameter.shape) + 1000 * number
        parameter.data.copy_(filled)
        optimizer.state[parameter] = {"step": torch.tensor(5.0), "exp_avg": filled / 3, "exp_avg_sq": filled * filled}
    return optimizer


def _whole(zero: Any) -> Any:
    zero.consolidate_state_dict(to=None)
    return zero.state_dict()["state"]


def _leg(rank: int, world_size: int, folder: Path, leg: str) -> None:
    os.fsync = lambda descriptor: None
    model = _model(0)
    optimizer = _expected(model, torch.optim.AdamW(model.parameters(), lr=0.3))
    expected = copy.deepcopy({"model": model.state_dict(), "state": optimizer.state_dict()["state"]})
    mesh = init_device_mesh("cpu", (world_size,))
    other = _model(1)
    for name in ("now", "later"):
        ddp = DistributedDataParallel(other)
        with streams_replaced(IdleStreams()) if leg == "elements" else contextlib.nullcontext():
            zero = ZeroRedundancyOptimizer(other.parameters(), torch.optim.AdamW, lr=0.1)
        if leg == "blocks":
            zero = ZeroRedundancyOptimizer.from_optimizer(optimizer)
            chain(ZeroStep(zero)).register(ddp := DistributedDataParallel(model))
        elif leg == "elements":
            assert overlap.load(folder / f"blocks-{name}", ddp, zero) == {"step": 5}
            assert_parity({"model": other.state_dict(), "state": _whole(zero)}, expected, what=leg)
        elif leg == "plain":
            plain = torch.optim.AdamW(other.parameters(), lr=0.1)
            overlap.load(folder / f"elements-{name}", ddp, plain)
            assert_parity({"model": other.state_dict(), "state": plain.state_dict()["state"]}, expected, what=leg)
            assert plain.param_groups[0]["lr"] == 0.3
            # By PyTorch's own calls.
            again = _model(2)
            its = torch.optim.AdamW(again.parameters(), lr=0.1)
            parts = dict(zip(("model", "optim"), get_state_dict(again, its), strict=True))
            dcp.load(parts, checkpoint_id=folder / f"elements-{name}")
            set_state_dict(again, its, model_state_dict=parts["model"], optim_state_dict=parts["optim"])
            assert_parity({"model": again.state_dict(), "state": its.state_dict()["state"]}, expected, what="PyTorch's")
            dcp.save(parts, checkpoint_id=folder / f"torch-{name}")
            continue
        else:
            sharded = fully_shard(_model(3), mesh=mesh)
            its = torch.optim.AdamW(sharded.parameters(), lr=0.1)
            parts = dict(zip(("model", "optim"), get_state_dict(sharded, its), strict=True))
            dcp.load(parts, checkpoint_id=folder / f"elements-{name}")
            set_state_dict(sharded, its, model_state_dict=parts["model"], optim_state_dict=parts["optim"])
            found = {key: value.full_tensor() for key, value in sharded.state_dict().items()}
            moments = [its.state[parameter]["exp_avg"].full_tensor() for parameter in sharded.parameters()]
            assert_parity(found, expected["model"], what=leg)
            assert_parity(moments, [one["exp_avg"] for one in expected["state"].values()], what=f"{leg}, moments")
            # What PyTorch has saved, into a divided optimizer.
            overlap.load(folder / f"torch-{name}", ddp, zero)
            assert_parity({"model": other.state_dict(), "state": _whole(zero)}, expected, what="PyTorch's folder")
            continue
        future = overlap.save(folder / f"{leg}-{name}", ddp, zero, wait=name == "now", step=5)
        if future is not None:
            future.result()


def test_blocks_elements_plain_optimizers_and_fsdp2_read_one_file(tmp_path: Path) -> None:
    for leg, ranks in (("blocks", 2), ("elements", 3), ("plain", 1), ("FSDP2", 3)):
        run_ranks(_leg, ranks, tmp_path, leg)


def _killed(rank: int, world_size: int, folder: Path) -> str:
    ddp, optimizer = _made(reducer=AllReduce())
    _train(rank, ddp, optimizer, range(1))
    overlap.save(folder / "1", ddp, optimizer, step=1)
    if rank == 1:
        os.fsync = lambda _: os.kill(os.getpid(), signal.SIGKILL)  # Its part is not written.
    _train(rank, ddp, optimizer, range(1, 2))
    with pytest.raises(CollectiveError) as raised:
        overlap.save(folder / "2", ddp, optimizer, step=2)
    return str(raised.value)


def test_a_save_whose_rank_is_killed_is_no_checkpoint(tmp_path: Path) -> None:
    run_ranks(_killed, 2, tmp_path, return_exceptions=True)
    assert (tmp_path / "1" / ".metadata").exists() and not (tmp_path / "2" / ".metadata").exists()
    run_ranks(_resumed, 2, tmp_path)


def _resumed(rank: int, world_size: int, folder: Path) -> None:
    with pytest.raises(ConfigurationError, match="has no whole checkpoint"):
        overlap.load(folder / "2", *_made(reducer=AllReduce()))
    assert overlap.load(folder / "1", *_made(reducer=AllReduce())) == {"step": 1}
