"""Saving, loading and going on, in the same process."""

import copy
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.functional import mse_loss

from .corpus import loop, refused
from .declared import ALREADY_UPDATED
from .forms import STEPPED
from .models import ADAMW, batch_norm
from .plain import usual
from .run import Run


def _shared(state: Any) -> Any:
    """Rank 0's, on every rank, as from a file."""
    box = [copy.deepcopy(state)]
    dist.broadcast_object_list(box, 0)
    return box[0]


def _gone_on(ddp: Any, run: Run, saved: Any) -> Iterator[Any]:
    ddp = run.rewrap(ddp)
    for value in ddp.parameters():
        torch.nn.init.zeros_(value)
    ddp.module.load_state_dict(saved["model"])
    optimizer = run.optimizer(ddp)
    run.load(optimizer, saved["optimizer"])
    yield from usual(ddp, optimizer, run)


@loop("saved, and resumed with a new model and optimizer", model=batch_norm, optimizer=ADAMW)
def resumed(ddp: Any, optimizer: Any, run: Run) -> Iterator[Any]:
    yield from usual(ddp, optimizer, run)
    saved = _shared({"model": ddp.module.state_dict(), "optimizer": run.state_of(optimizer)})
    yield from _gone_on(ddp, run, saved)


@loop("resumed from the file that rank 0 of the script wrote", model=batch_norm, optimizer=ADAMW)
def resumed_from_file(ddp: Any, optimizer: Any, run: Run) -> Iterator[Any]:
    yield from usual(ddp, optimizer, run)
    state = {"model": ddp.module.state_dict(), "optimizer": run.state_of(optimizer), "step": 3}
    with TemporaryDirectory() as folder:
        file = Path(_shared(folder)) / "ckpt.pt"
        if run.rank == 0:
            torch.save(state, file)
        dist.barrier()
        saved = torch.load(file, map_location="cpu", weights_only=True)
        dist.barrier()
    yield from _gone_on(ddp, run, saved)


@loop("the optimizer's state loaded in mid-run, into the same optimizer", optimizer=ADAMW, steps=2)
def reloaded(ddp: Any, optimizer: Any, run: Run) -> Iterator[Any]:
    yield from usual(ddp, optimizer, run)
    saved = _shared({"model": ddp.module.state_dict(), "optimizer": run.state_of(optimizer)})
    yield from usual(ddp, optimizer, run)
    ddp.module.load_state_dict(saved["model"])
    run.load(optimizer, saved["optimizer"])
    yield from usual(ddp, optimizer, run)


@loop(
    "the optimizer's state loaded between backward and step()",
    refused(STEPPED, "load_state_dict() between backward and "),
    ALREADY_UPDATED,
    optimizer=ADAMW,
)
def reloaded_late(ddp: Any, optimizer: Any, run: Run) -> Iterator[Any]:
    yield from usual(ddp, optimizer, run)
    saved = _shared(run.state_of(optimizer))
    for x, y in run.batches():
        optimizer.zero_grad()
        loss = mse_loss(ddp(x), y)
        loss.backward()
        run.load(optimizer, saved)
        optimizer.step()
        yield loss


@loop("plain, then this form, then plain", optimizer=ADAMW, steps=2)
def there_and_back(ddp: Any, optimizer: Any, run: Run) -> Iterator[Any]:
    ddp = run.rewrap(ddp)
    first = run.plain_optimizer(ddp.parameters())
    yield from usual(ddp, first, run)
    optimizer = run.optimizer(ddp)
    run.load(optimizer, first.state_dict())
    yield from usual(ddp, optimizer, run)
    saved = _shared(run.state_of(optimizer))
    run.settle(optimizer)
    ddp = run.rewrap(ddp)
    last = run.plain_optimizer(ddp.parameters())
    last.load_state_dict(saved)
    yield from usual(ddp, last, run)
