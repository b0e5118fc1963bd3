"""A checkpoint is whole, or it is not there; what was saved is loaded, or refused by its name."""

from __future__ import annotations

import collections
import os
import shutil
import subprocess
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

import overlap
from harness import assert_parity, run_ranks, wrap
from harness.models import MLP, mean_squared_error
from overlap import (
    CheckpointError,
    CheckpointManager,
    ConfigurationError,
    OverlappedOptimizer,
    Quantize,
    Step,
    TrainingLoopError,
    TrainState,
    chain,
)
from overlap.resume import checkpoint_manager


def _state(number: int) -> dict[str, Any]:
    return {"weight": torch.full((40,), float(number)), "step": number}


def _files(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def test_the_latest_is_found_and_older_ones_are_deleted(tmp_path: Path) -> None:
    checkpoints = CheckpointManager(tmp_path / "run", keep_last=2)
    assert checkpoints.latest_step() is None and checkpoints.steps() == []
    with pytest.raises(CheckpointError, match="run has no checkpoint; in it are none"):
        checkpoints.load()
    for step in (9, 10, 11):
        checkpoints.save(step, _state(step))
    assert checkpoints.steps() == [10, 11]
    assert _files(tmp_path / "run") == [
        "latest", "step-10/SHA256SUMS", "step-10/rank-0-of-1.pt", "step-11/SHA256SUMS", "step-11/rank-0-of-1.pt",
    ]  # fmt: skip
    again = CheckpointManager(tmp_path / "run")
    assert again.latest_step() == 11
    assert_parity(again.load(), _state(11), what="the latest")
    assert_parity(again.load(10), _state(10), what="an older one")
    assert_parity(again.load_all(), [_state(11)], what="of all ranks")
    with pytest.raises(CheckpointError, match="has no checkpoint of step 9; in it are "):
        again.load(9)


@pytest.mark.skipif(shutil.which("sha256sum") is None, reason="needs sha256sum")
def test_sha256sum_checks_a_checkpoint(tmp_path: Path) -> None:
    CheckpointManager(tmp_path).save(3, _state(3))
    for folder, sums in ((tmp_path, "latest"), (tmp_path / "step-3", "SHA256SUMS")):
        subprocess.run(["sha256sum", "--check", "--strict", sums], cwd=folder, check=True, capture_output=True)


def test_the_same_step_can_be_saved_again_and_a_run_can_go_back(tmp_path: Path) -> None:
    checkpoints = CheckpointManager(tmp_path, keep_last=2)
    for number in range(3):
        checkpoints.save(5, _state(number))
        assert checkpoints.steps() == [5] and checkpoints.load()["step"] == number
    for step in (6, 7, 8):
        checkpoints.save(step, _state(step))
    checkpoints.save(7, _state(70))  # Gone back to 6, and on from there.
    assert (checkpoints.latest_step(), checkpoints.steps()) == (7, [7, 8])
    assert checkpoints.load()["step"] == checkpoints.load(7)["step"] == 70


def test_what_is_saved_in_the_background_is_the_state_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    later: list[Callable[[], None]] = []
    monkeypatch.setattr(checkpoint_manager, "start", lambda work, name: later.append(work))
    checkpoints, state = CheckpointManager(tmp_path), _state(1)
    for step in (1, 2):
        checkpoints.async_save(step, state)
        state["weight"].fill_(7.0)  # As later steps do, before anything is written.
        later.pop()()
        assert checkpoints.latest_step() == (None if step == 1 else 1)
        state = _state(2)
    assert_parity(checkpoints.load(), _state(1), what="the first")  # Committed when the second began.
    checkpoints.commit()
    checkpoints.commit()  # Nothing is left to do.
    assert checkpoints.latest_step() == 2


def test_what_fails_in_the_background_is_raised_when_it_would_become_the_latest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, data: Any) -> int:
        raise OSError("the disk is full")

    checkpoints = CheckpointManager(tmp_path)
    checkpoints.save(1, _state(1))
    checkpoints.async_save(2, _state(2))
    with pytest.raises(Exception, match=r"cannot pickle|Can't pickle|Can't get local object"):
        checkpoints.save(3, lambda: None)  # The second was committed before.
    assert checkpoints.latest_step() == 2
    with monkeypatch.context() as patched:
        patched.setattr(Path, "write_bytes", full)
        checkpoints.async_save(4, _state(4))
        with pytest.raises(OSError, match="the disk is full"):
            checkpoints.commit()
    assert checkpoints.latest_step() == 2
    checkpoints.save(4, _state(4))
    assert checkpoints.latest_step() == 4


def test_files_of_ones_own_are_committed_as_they_are(tmp_path: Path) -> None:
    checkpoints = CheckpointManager(tmp_path)
    with checkpoints.saving(1) as folder:
        (folder / "inner").mkdir()
        (folder / "inner" / "weights.bin").write_bytes(b"w")
    assert checkpoints.path() == tmp_path / "step-1"
    with pytest.raises(ConfigurationError, match=r"no rank-0-of-1.pt, but inner/weights.bin.* path\(\) for files"):
        checkpoints.load()
    with pytest.raises(FileNotFoundError), checkpoints.saving(2) as folder:
        (folder / "not" / "there").write_bytes(b"h")
    with pytest.raises(KeyboardInterrupt), checkpoints.saving(2):
        raise KeyboardInterrupt
    with pytest.raises(CheckpointError, match="no file was written"), checkpoints.saving(2):
        pass
    checkpoints.begin(2)
    with pytest.raises(TrainingLoopError, match=r"step 3 begins before commit\(\) of step 2"):
        checkpoints.begin(3)
    assert checkpoints.latest_step() == 1
    for options, message in (({"keep_last": 0}, "keep_last"), ({"process_group": "all"}, "process_group")):
        with pytest.raises(ConfigurationError, match=message):
            CheckpointManager(tmp_path, **options)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match=r"folder is a path .* got int"):
        CheckpointManager(3)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="step must be a whole number"):
        CheckpointManager(tmp_path).save(-1, {})


class Crash(BaseException):
    """The process is gone."""


_CHANGES = ("mkdir", "rename", "replace", "fsync", "rmdir", "unlink")


@pytest.fixture
def crash_after(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Makes the process end before its n-th change of the disk from then on."""
    left = [10**9]
    real = {name: getattr(os, name) for name in _CHANGES} | {"fsync": lambda descriptor: None}  # Which takes time.
    for name in _CHANGES:

        def change(*args: Any, whole: Any = real[name], **kwargs: Any) -> Any:
            left[0] -= 1
            if left[0] < 0:
                raise Crash
            return whole(*args, **kwargs)

        monkeypatch.setattr(os, name, change)
    return lambda count: left.__setitem__(0, count)


@pytest.mark.parametrize("step", [2, 1, 0], ids=["the next step", "the same step", "an earlier step"])
def test_a_crash_at_any_moment_leaves_the_old_checkpoint_or_the_new_one(
    step: int, tmp_path: Path, crash_after: Callable[[int], None]
) -> None:
    found: collections.Counter[int] = collections.Counter()
    for count in range(60):
        folder = tmp_path / str(count)
        before = CheckpointManager(folder, keep_last=1)
        before.save(0, _state(0))
        before.keep_last = 2
        before.save(1, _state(1))
        crash_after(count)
        try:
            CheckpointManager(folder, keep_last=1).save(step, _state(5))
            is_over = True
        except Crash:
            is_over = False
        crash_after(10**9)
        after = CheckpointManager(folder, keep_last=1)
        found[after.load()["step"]] += 1
        assert all(after.load(left)["step"] in (0, 1, 5) for left in after.steps())
        after.save(3, _state(3))
        assert _files(folder) == ["latest", "step-3/SHA256SUMS", "step-3/rank-0-of-1.pt"]
        if is_over:
            break
    assert is_over and found.keys() == {1, 5} and found[1] > 3, found


def test_everything_is_on_the_disk_before_it_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or a machine that fails could leave the new name without the data."""
    synced: set[str] = set()
    fsync, rename, replace = os.fsync, os.rename, os.replace

    def noted(descriptor: int) -> None:
        synced.add(str(Path(f"/proc/self/fd/{descriptor}").readlink()))
        fsync(descriptor)

    def renamed(old: Any, new: Any) -> None:
        inside = [str(path) for path in Path(old).rglob("*")]
        assert {str(old), *inside} <= synced, f"{new} gets its name before it is on the disk"
        synced.discard(str(tmp_path))
        rename(old, new)

    def replaced(old: Any, new: Any) -> None:
        assert str(old) in synced
        synced.add(str(new))
        assert Path(new).name != "latest" or str(tmp_path) in synced, "latest points to a name that may be lost"
        synced.discard(str(Path(new).parent))
        replace(old, new)

    monkeypatch.setattr(os, "fsync", noted)
    monkeypatch.setattr(os, "rename", renamed)
    monkeypatch.setattr(os, "replace", replaced)
    CheckpointManager(tmp_path).save(1, _state(1))
    assert str(tmp_path) in synced


def _damaged(folder: Path) -> dict[str, Callable[[], Any]]:
    """What may happen to a checkpoint; each names the file that is told of."""
    own, other = folder / "step-2/rank-0-of-1.pt", folder / "step-1/rank-0-of-1.pt"
    sums, pointer = folder / "step-2/SHA256SUMS", folder / "latest"
    data = own.read_bytes()
    return {
        "step-2/rank-0-of-1.pt is not what was saved": lambda: own.write_bytes(data[:-1]),
        "step-2/rank-0-of-1.pt is not what": lambda: own.write_bytes(other.read_bytes()),
        "step-2/rank-0-of-1.pt is": lambda: own.write_bytes(b""),
        "step-2/rank-0-of-1.pt is missing, which": own.unlink,
        "step-2/rank-1-of-2.pt does not belong": lambda: own.with_name("rank-1-of-2.pt").write_bytes(data),
        "step-2/SHA256SUMS is missing": sums.unlink,
        "step-2/SHA256SUMS is not what was saved: its SHA-256 is not the one in .*latest": lambda: sums.write_text("x"),
        "latest is damaged: it is not a list": lambda: pointer.write_text("step-2"),
        "latest is damaged: it does not point": lambda: shutil.copy(sums, pointer),
        "latest is damaged": lambda: pointer.write_bytes(b""),
    }


@pytest.mark.parametrize("case", range(10))
def test_what_is_damaged_is_refused_by_name_and_others_can_be_loaded(case: int, tmp_path: Path) -> None:
    checkpoints = CheckpointManager(tmp_path)
    for step in (1, 2):
        checkpoints.save(step, _state(step))
    message, damage = list(_damaged(tmp_path).items())[case]
    damage()
    for read in (checkpoints.load, checkpoints.load_all, checkpoints.path):
        with pytest.raises(CheckpointError, match=message):
            read()
    assert checkpoints.steps() == [1, 2]
    assert_parity(checkpoints.load(1), _state(1), what="the one before")
    checkpoints.save(3, _state(3))
    assert checkpoints.load()["step"] == 3


def _trained(rank: int) -> Any:
    ddp = wrap(MLP.model(), **MLP.ddp_options())
    optimizer = OverlappedOptimizer(torch.optim.AdamW(ddp.parameters(), lr=0.01))
    chain(Quantize(bits=4, error_feedback=True), Step(optimizer)).register(ddp)
    for step in range(2):
        mean_squared_error(ddp, MLP.batch(step, rank)).backward()
        optimizer.step()
    return ddp, optimizer


def _on_two_ranks(rank: int, world_size: int, folder: Path) -> None:
    ddp, optimizer = _trained(rank)
    own = overlap.state_dict(ddp, optimizer)
    checkpoints = CheckpointManager(folder, keep_last=2)
    # Each rank its own file.
    checkpoints.save(1, own)
    assert_parity(checkpoints.load(), own, what="each rank's own")
    assert [state["rank"] for state in checkpoints.load_all()] == [0, 1]
    # One rank saves all.
    whole = TrainState(ddp, optimizer).state_dict()
    with checkpoints.saving(2) as into:
        if rank == 0:
            torch.save(whole, into / "run.pt")
    resumed, its = _trained(rank)
    TrainState(resumed, its).load_state_dict(torch.load(checkpoints.path() / "run.pt", weights_only=True))
    assert_parity(overlap.state_dict(resumed, its), own, what="by rank 0 alone")
    # A folder of torch.distributed.checkpoint, also in the background.
    with checkpoints.saving(3) as into:
        dcp.save({"run": TrainState(ddp, optimizer)}, checkpoint_id=into)
    future = dcp.async_save(
        {"run": TrainState(ddp, optimizer)}, checkpoint_id=checkpoints.begin(4), process_group=dist.new_group()
    )
    assert checkpoints.latest_step() == 3
    checkpoints.commit(future)
    assert (checkpoints.latest_step(), checkpoints.steps()) == (4, [3, 4])
    resumed, its = _trained(rank)
    dcp.load({"run": TrainState(resumed, its)}, checkpoint_id=checkpoints.path())
    assert_parity(overlap.state_dict(resumed, its), own, what="by torch.distributed.checkpoint")
    _fails_on_one_rank(rank, checkpoints, own)


def _fails_on_one_rank(rank: int, checkpoints: CheckpointManager, own: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"step differs between ranks, \[5, 6\]"):
        checkpoints.save(5 + rank, own)
    error = ZeroDivisionError if rank == 1 else CheckpointError
    with pytest.raises(error, match=r"^rank 1 could not save step 5 to .*: ZeroD|^division"), checkpoints.saving(5):
        assert 1 / (1 - rank)
    checkpoints.begin(6)
    future: Future[None] = Future()
    if rank == 1:
        future.set_exception(OSError("the disk is full"))
    else:
        future.set_result(None)
    with pytest.raises(OSError if rank == 1 else CheckpointError, match="the disk is full"):
        checkpoints.commit(future)
    assert checkpoints.latest_step() == 4
    checkpoints.save(7, own)
    dist.barrier()
    if rank == 0:
        path = checkpoints.folder / "step-7" / "rank-1-of-2.pt"
        path.write_bytes(path.read_bytes()[:-1])
    dist.barrier()
    # Also for the rank whose own file is as it was.
    with pytest.raises(CheckpointError, match=r"step-7/rank-1-of-2.pt is not what was saved"):
        checkpoints.load()
    assert_parity(checkpoints.path(4).name, "step-4", what="an older one")
    groups = [dist.new_group([one]) for one in range(2)]
    with pytest.raises(ConfigurationError, match=r"no rank-0-of-1.pt, but rank-0-of-2.pt.* load_all\(\)"):
        CheckpointManager(checkpoints.folder, process_group=groups[rank]).load(7)


def test_ranks_save_and_load_together_and_what_fails_on_one_is_an_error_on_all(tmp_path: Path) -> None:
    run_ranks(_on_two_ranks, 2, tmp_path)
