"""The sharded update on a rank that has run out of inputs."""

from __future__ import annotations

from collections.abc import Callable

from torch.distributed.algorithms.join import JoinHook

__all__ = ["ZeroJoinHook"]


class ZeroJoinHook(JoinHook):
    """Runs ``step`` on a rank that has run out of inputs. DDP's own hook runs what stages do in backward, and brings
    the last joiner's parameters to all ranks."""

    def __init__(self, step: Callable[[], None], wait: Callable[[], None]) -> None:
        self._step, self._wait = step, wait

    def main_hook(self) -> None:
        """The collectives of one step, as the active ranks issue them."""
        self._step()

    def post_hook(self, is_last_joiner: bool) -> None:
        """After the block parameters are final."""
        self._wait()
