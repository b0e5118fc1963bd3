"""A script for `torchrun --max-restarts`: all forms train side by side, a rank fails once, and the restart resumes.

`torchrun --nproc-per-node 2 --max-restarts 1 tests/soak/elastic.py FOLDER killed`; `raises` and `none` are the others.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1]))

import overlap
from harness.models import MLP, mean_squared_error
from soak import checkpoints
from soak.forms import FORMS

STEPS, FAILS_IN, SAVED_EVERY = 10, 7, 2
NAMES = [form.name for form in FORMS.values() if form.join is None and form.is_ours]


def folder_of(folder: Path, name: str) -> Path:
    return folder / name.replace(" ", "_").replace(",", "")


def train(rank: int, ranks: int, folder: Path, failure: str = "none") -> None:
    """Resumes every form at the latest step that there is of all forms, and trains to the end."""
    made = {name: FORMS[name].made(keeps_buckets=FORMS[name].rounds_by_bucket) for name in NAMES}
    begin = min(checkpoints.latest_step(folder_of(folder, name), ranks) or 0 for name in NAMES)
    for name, built in made.items():
        if begin:
            state = checkpoints.load(checkpoints.file_of(folder_of(folder, name), begin, rank))
            overlap.load_state_dict(built.ddp, built.optimizer, state)
    for step in range(begin, STEPS):
        for place, (name, built) in enumerate(made.items()):
            if (step, rank, place) == (FAILS_IN, 1, len(made) // 2):
                _fail(failure)
            built.optimizer.zero_grad()
            mean_squared_error(built.ddp, MLP.batch(step, rank)).backward()
            built.optimizer.step()
            if (step + 1) % SAVED_EVERY == 0:
                path = checkpoints.file_of(folder_of(folder, name), step + 1, rank)
                checkpoints.save(overlap.state_dict(built.ddp, built.optimizer), path)


def _fail(failure: str) -> None:
    if failure == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if failure == "raises":
        raise ValueError("this rank fails once")


def _main() -> None:
    folder, failure = Path(sys.argv[1]), sys.argv[2]
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, restarts = dist.get_rank(), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    train(rank, dist.get_world_size(), folder, failure if restarts == 0 else "none")
    (folder / f"restarts-{rank}").write_text(str(restarts))
    dist.destroy_process_group()


if __name__ == "__main__":
    _main()
