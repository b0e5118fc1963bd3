"""Loops under Join where rank 1 runs out of batches first, beside plain DDP under PyTorch's Join."""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import optim
from torch.distributed.algorithms.join import Join as TorchJoin
from torch.nn.functional import mse_loss
from torch.optim import lr_scheduler

from overlap import Join

from .corpus import loop
from .models import ADAMW, mlp
from .plain import applied, trained
from .run import Run

_SHORT, _LONG = 2, 4
"""Steps of rank 1, and of rank 0."""

Step = Callable[[Any, Any, int, Any, Any], Any]


def _usual(ddp: Any, optimizer: Any, place: int, x: Any, y: Any) -> Any:
    return trained(ddp, optimizer, x, y)


def uneven(step: Step = _usual, *, schedule: Any = None, iterates: bool = False, **options: Any) -> Any:
    """A loop of ``step`` and perhaps a scheduler; ``iterates``: over ``join.iterate``.

    In plain DDP the optimizer and the scheduler of rank 1 stop with its batches, and its model becomes rank 0's.
    """

    def body(ddp: Any, optimizer: Any, run: Run) -> Iterator[Any]:
        scheduler = None if schedule is None else schedule(optimizer)
        batches = list(islice(run.batches(), _SHORT if run.rank == 1 else None))
        followed = [optimizer] if hasattr(optimizer, "join_hook") else []
        if run.is_plain:
            join: Any = TorchJoin([ddp])
        else:
            join = Join([ddp, *followed, *([] if scheduler is None else [scheduler])], **options)
        with join:
            for place, (x, y) in enumerate(batches if run.is_plain or not iterates else join.iterate(batches)):
                loss = step(ddp, optimizer, place, x, y)
                if scheduler is not None:
                    scheduler.step()
        if run.rank == 1:
            run.compare_models_only()
        yield loss.detach()

    return body


def _by_hand(ddp: Any, optimizer: Any, place: int, x: Any, y: Any) -> Any:
    for group in optimizer.param_groups:
        group["lr"], group["momentum"] = 0.02 * (place + 1), 0.5 + 0.1 * place
    return _usual(ddp, optimizer, place, x, y)


def _warmed_up(optimizer: Any) -> Any:
    return lr_scheduler.SequentialLR(
        optimizer,
        [lr_scheduler.LinearLR(optimizer, 0.1, total_iters=2), lr_scheduler.ExponentialLR(optimizer, 0.5)],
        milestones=[2],
    )


def _scaled(ddp: Any, optimizer: Any, place: int, x: Any, y: Any) -> Any:
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    optimizer.zero_grad()
    loss = mse_loss(ddp(x), y)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    return loss


def _by_closure(ddp: Any, optimizer: Any, place: int, x: Any, y: Any) -> Any:
    def evaluate() -> Any:
        optimizer.zero_grad()
        loss = mse_loss(ddp(x), y)
        loss.backward()
        return loss

    return optimizer.step(evaluate)


def _of_two_forwards(ddp: Any, optimizer: Any, place: int, x: Any, y: Any) -> Any:
    optimizer.zero_grad()
    with ddp.no_sync():
        mse_loss(ddp(-x), y).backward()
    return applied(optimizer, mse_loss(ddp(x), y))


_UNEVEN: dict[str, Any] = {"optimizer": ADAMW, "steps": _LONG}

loop("Join, batches by join.iterate", **_UNEVEN)(uneven(iterates=True))
loop("Join, StepLR", **_UNEVEN)(uneven(schedule=lambda o: lr_scheduler.StepLR(o, 1, 0.5)))
loop("Join, a warm-up by schedulers one after another", steps=_LONG)(uneven(schedule=_warmed_up, iterates=True))
loop("Join, rate and momentum set by hand", steps=_LONG)(uneven(_by_hand))
loop("Join, a disabled GradScaler", **_UNEVEN)(uneven(_scaled))
loop("Join, step(closure)", **_UNEVEN)(uneven(_by_closure))
loop("Join, accumulation under no_sync()", **_UNEVEN)(uneven(_of_two_forwards))


@loop("Join of two models, one of them plain", **_UNEVEN)
def with_a_plain_model(ddp: Any, optimizer: Any, run: Run) -> Iterator[Any]:
    other = run.wrap(mlp())
    stepped = optim.SGD(other.parameters(), lr=0.1, momentum=0.9)
    followed = [optimizer] if hasattr(optimizer, "join_hook") else []
    # PyTorch's does not follow one backward of two models.
    with Join([ddp, other] if run.is_plain else [ddp, other, stepped, *followed]):
        for x, y in islice(run.batches(), _SHORT if run.rank == 1 else None):
            stepped.zero_grad()
            optimizer.zero_grad()
            loss = mse_loss(ddp(x), y) + mse_loss(other(x), y)
            loss.backward()
            stepped.step()
            optimizer.step()
    if run.rank == 1:
        run.compare_models_only()
    yield loss.detach()


@loop("Join, two epochs, without zero_grad()", optimizer=partial(optim.SGD, lr=0.1), steps=2 * _LONG)
def epochs(ddp: Any, optimizer: Any, run: Run) -> Iterator[Any]:
    followed = [optimizer] if hasattr(optimizer, "join_hook") else []
    clears = run.is_plain or run.form.name in ("hook", "zero alone", "local")
    batches = list(run.batches())
    for epoch in (batches[:_LONG], batches[_LONG:]):
        with TorchJoin([ddp]) if run.is_plain else Join([ddp, *followed]):
            for x, y in epoch[: _SHORT if run.rank == 1 else None]:
                if clears:
                    optimizer.zero_grad()
                loss = applied(optimizer, mse_loss(ddp(x), y))
    if run.rank == 1:
        run.compare_models_only()
    yield loss.detach()
