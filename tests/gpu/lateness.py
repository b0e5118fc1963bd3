"""Streams made late on purpose, so that what does not wait for them computes wrong numbers.

A race between two streams seldom shows: the one that should wait is behind anyway. Here the host stays as fast as it is
while a stream gets some milliseconds of nothing to do, in one of two places. On the CPU the thread sleeps instead.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Self
from unittest.mock import patch

import torch
from torch import nn

from overlap._torch.device import DeviceStreams, streams_replaced, synchronize
from overlap.hooks.collectives import Collective

IN_ORDER, LATE_STAGES, LATE_MODEL = "in order", "late stages", "late model"

# About 3 ms of an H100 or H200, much longer than the host takes to launch what comes next.
_CYCLES = 6_000_000
_ON_HOST_S = 0.001


class Lateness:
    """As a context manager, makes one run late, or not.

    - ``LATE_STAGES``: the stage's stream, before each collective and once its result is there. What reads the result
      without waiting for the collective, or for the stage, reads what was there before.
    - ``LATE_MODEL``: the model's stream, in forward and in backward. A stage that does not wait for it takes gradients
      that are not there yet.
    - ``IN_ORDER``: the opposite. All is on one stream, and the host waits for each collective: there can be no race.
    """

    def __init__(self, device: torch.device, where: str) -> None:
        self.device, self.where = device, where
        self.delays = 0
        """How often something was made late: none, and nothing was tested."""
        self._undo = ExitStack()

    def __enter__(self) -> Self:
        if self.where == LATE_STAGES:
            self._undo.enter_context(_around_collectives(before=self.delay, after=self.delay))
        elif self.where == IN_ORDER:

            def wait() -> None:
                synchronize(self.device)

            self._undo.enter_context(_around_collectives(before=wait, after=wait))
            self._undo.enter_context(streams_replaced(_OneStream()))
        return self

    def __exit__(self, *_: object) -> None:
        self._undo.close()

    def delay(self, *_: object) -> None:
        """Give the current stream nothing to do for a while; on the CPU, the thread."""
        self.delays += 1
        if self.device.type == "cuda":
            torch.cuda._sleep(_CYCLES)
        else:
            time.sleep(_ON_HOST_S)

    def watch(self, model: nn.Module) -> None:
        """Make each layer late, in forward and in backward, if that is where."""
        if self.where == LATE_MODEL:
            for layer in model.modules():
                if isinstance(layer, nn.Linear):
                    layer.register_forward_hook(self.delay)
                    layer.register_full_backward_hook(self.delay)


class _OneStream(DeviceStreams):
    """All streams are the model's."""

    def new_stream(self, device: torch.device, **_: Any) -> Any:
        return super().current_stream(device)


@contextmanager
def _around_collectives(*, before: Callable[[], None], after: Callable[[], None]) -> Iterator[None]:
    launch, finish = Collective.launch, Collective.finish

    def late_launch(self: Collective, *args: Any, **named: Any) -> Any:
        before()
        return launch(self, *args, **named)

    def late_finish(self: Collective, *args: Any, **named: Any) -> Any:
        result = finish(self, *args, **named)
        after()
        return result

    with patch.multiple(Collective, launch=late_launch, finish=late_finish):
        yield
