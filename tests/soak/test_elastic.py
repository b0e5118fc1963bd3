"""Under `torchrun --max-restarts` a run whose rank fails ends with status 0 and the bits of one that never failed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from harness import assert_parity, run_ranks
from soak import checkpoints, elastic


def _prepared(folder: Path) -> Path:
    for name in elastic.NAMES:
        elastic.folder_of(folder, name).mkdir(parents=True)
    return folder


@pytest.fixture(scope="module")
def never_failed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = _prepared(tmp_path_factory.mktemp("reference"))
    run_ranks(elastic.train, 2, folder)
    return folder


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("failure", "restarts"), [("killed", 1)])
def test_a_restarted_run_ends_with_the_same_bits_and_status_0(
    failure: str, restarts: int, tmp_path: Path, never_failed: Path
) -> None:
    folder = _prepared(tmp_path)
    script = Path(elastic.__file__)
    argv = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts", "1",
        "--monitor-interval", "0.1", str(script), str(folder), failure,
    ]  # fmt: skip
    environ = {
        **os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo",
        # Without it PyTorch's init_process_group can read what the first start has left in the store.
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }  # fmt: skip
    done = subprocess.run(argv, env=environ, capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    for rank in range(2):
        assert (folder / f"restarts-{rank}").read_text() == str(restarts)
        for name in elastic.NAMES:
            ours, theirs = (
                checkpoints.load(checkpoints.file_of(elastic.folder_of(where, name), elastic.STEPS, rank))
                for where in (folder, never_failed)
            )
            assert_parity(ours, theirs, what=f"{name}, rank {rank}, {failure}")
