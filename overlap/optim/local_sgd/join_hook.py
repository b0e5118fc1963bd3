"""Local SGD on a rank that has run out of inputs."""

from __future__ import annotations

from collections.abc import Callable

from torch.distributed.algorithms.join import JoinHook
from torch.nn.parallel import DistributedDataParallel

from overlap._torch.ddp import before_final_sync

__all__ = ["LocalSGDJoinHook"]


class LocalSGDJoinHook(JoinHook):
    """Shadows ``local.step()`` on a rank that has run out of inputs; DDP's own hook replays what is done in backward.

    DDP ends a ``Join`` by copying one rank's model to all, so the last average is made right before that.
    """

    def __init__(
        self, ddp: DistributedDataParallel | None, follow_step: Callable[[], None], synchronize: Callable[[], None]
    ) -> None:
        self._follow_step = follow_step
        self._synchronize = synchronize
        self.is_open = True
        self.has_replayed = False
        self.stop_watching: Callable[[], None] = lambda: None
        if ddp is not None:
            self.stop_watching = before_final_sync(ddp, self.post_hook)

    def main_hook(self) -> None:
        """The collectives of one step of the other ranks; none where they only accumulate gradients."""
        if self.has_replayed:
            self.has_replayed = False
            self._follow_step()

    def post_hook(self, is_last_joiner: bool = True) -> None:
        """All ranks end with the same parameters."""
        if self.is_open:
            self._synchronize()
            self.is_open = False
            self.stop_watching()
