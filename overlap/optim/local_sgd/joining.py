"""A rank that has run out of inputs goes on taking part in averages, with the weight of what it learnt."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.distributed.algorithms.join import JoinHook

if TYPE_CHECKING:
    from overlap.optim.local_sgd.controller import LocalSGD

__all__ = ["LocalSGDJoinHook"]


class LocalSGDJoinHook(JoinHook):
    """Shadows ``local.step()``; what happens in backward, DDP's own hook replays.

    DDP ends a ``Join`` by bringing one rank's model to all, so the last average is made right before that.
    """

    def __init__(self, local: LocalSGD) -> None:
        self._local = local
        local.watch_end_of_join()

    def main_hook(self) -> None:
        """The collectives of one step, as the active ranks issue them."""
        self._local.step_joined()

    def post_hook(self, is_last_joiner: bool) -> None:
        """All ranks end equal."""
        self._local.end_join()
