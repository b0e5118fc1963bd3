"""Ranks that may run out of inputs at different steps."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from overlap import Join, UnsupportedError
from overlap.bench.training_setup import TrainingLoop, TrainingSetup
from overlap.bench.variant import variant


@variant("torch-join", block_steps=4)
def torch_join(setup: TrainingSetup) -> TrainingLoop:
    from torch.distributed.algorithms.join import Join as TorchJoin

    ddp = setup.ddp()
    plain = setup.plain_loop(ddp)
    return TrainingLoop(step=plain.step, block=lambda steps: TorchJoin([ddp]))


@variant("overlap-join", block_steps=4)
def overlap_join(setup: TrainingSetup) -> TrainingLoop:
    """Every rank knows how many steps it runs."""
    return _joined(setup, lengths_known=True)


@variant("overlap-join-unknown", block_steps=4)
def overlap_join_unknown(setup: TrainingSetup) -> TrainingLoop:
    """Ranks learn of each iteration from an all-reduce under the one before."""
    return _joined(setup, lengths_known=False)


def _joined(setup: TrainingSetup, *, lengths_known: bool) -> TrainingLoop:
    """The plain loop over a loader that knows its length, or over a stream that does not."""
    if setup.is_simulated:
        raise UnsupportedError("Join talks to every rank when its block begins, and a simulated link has one process")
    ddp = setup.ddp()
    plain = setup.plain_loop(ddp)
    batches: Iterator[int] = iter(())

    @contextlib.contextmanager
    def block(steps: int) -> Iterator[None]:
        nonlocal batches
        with Join([ddp]) as join:
            batches = join.iterate(range(steps) if lengths_known else iter(range(steps)))
            # The first waits for the other ranks: once per loop, so it is not part of a step.
            next(batches)
            yield

    def step() -> None:
        plain.step()
        next(batches, None)

    return TrainingLoop(step=step, block=block)
