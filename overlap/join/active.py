"""The Join whose block a process is in, per process group."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol
from weakref import WeakKeyDictionary

import torch.distributed as dist

from overlap.errors import TrainingLoopError, UnsupportedError

__all__ = [
    "ActiveJoin",
    "active_join",
    "clear_active_join",
    "gradient_divisor",
    "refuse_once_joined",
    "refuse_sample_weights",
    "set_active_join",
]


class ActiveJoin(Protocol):
    """What the rest of the library asks of a Join while its block is open."""

    @property
    def divisor(self) -> int:
        """The number by which sums of gradients are divided in the present iteration."""
        ...

    def divisor_among(self, ranks: Sequence[int]) -> int:
        """The same, for sums over ``ranks`` of the Join's group only."""
        ...

    @property
    def missing(self) -> list[int]:
        """The ranks that have run out of inputs in the present iteration, as far as it is known."""
        ...

    @property
    def weights_gradients(self) -> bool:
        """Whether each rank's gradients are weighted by its samples, for a mean over the whole group."""
        ...

    @property
    def replays_own_gradients(self) -> bool:
        """Whether this rank replays a backward with what it had accumulated under ``no_sync`` when it ran out."""
        ...


_active: WeakKeyDictionary[dist.ProcessGroup, ActiveJoin] = WeakKeyDictionary()


def active_join(group: dist.ProcessGroup) -> ActiveJoin | None:
    """The Join on ``group`` whose block this process is in, or ``None``."""
    return _active.get(group)


def set_active_join(group: dist.ProcessGroup, join: ActiveJoin) -> None:
    """Make ``join`` the active one on ``group``."""
    _active[group] = join


def clear_active_join(group: dist.ProcessGroup) -> None:
    """Leave ``group`` without an active Join."""
    _active.pop(group, None)


def gradient_divisor(group: dist.ProcessGroup, *, within: dist.ProcessGroup | None = None) -> int:
    """The number by which a sum of gradients over ``group`` is divided.

    That is the group's size, or under ``Join(..., divide_by_initial_world_size=False)`` the number of ranks that still
    have inputs. It is the same on every rank, also on those without inputs. Every reducer divides by
    ``bucket.divisor``, which is set from here alone.

    Args:
        group: the ranks whose gradients are added up.
        within: the group that the model trains on, where ``group`` is a part of it.

    Raises:
        UnsupportedError: gradients are weighted for a mean over all of ``within``.

    >>> from overlap.join import gradient_divisor
    >>> gradient_divisor(dist.group.WORLD)
    1
    """
    if (join := active_join(group)) is not None:
        return join.divisor
    if within is None or (join := active_join(within)) is None:
        return group.size()
    whole, part = dist.get_process_group_ranks(within), dist.get_process_group_ranks(group)
    if set(part) != set(whole):
        refuse_sample_weights(within, "averages gradients over some of the ranks")
    return join.divisor_among([whole.index(rank) for rank in part if rank in whole])


def refuse_sample_weights(group: dist.ProcessGroup, what: str) -> None:
    """Called where gradients are not averaged over all of ``group``.

    Raises:
        UnsupportedError: the active Join weights them for a mean over all.
    """
    if (join := active_join(group)) is not None and join.weights_gradients:
        raise UnsupportedError(
            f"weight_by_samples=True weights gradients for a mean over the samples of all ranks, and this model "
            f"{what}: leave weight_by_samples out"
        )


def refuse_once_joined(group: dist.ProcessGroup, what: str) -> None:
    """Called before collectives that a rank without inputs does not replay.

    Raises:
        TrainingLoopError: there is such a rank.
    """
    if (join := active_join(group)) is not None and (missing := join.missing):
        raise TrainingLoopError(
            f"{what} inside of Join: ranks {missing} have run out of inputs and are not told of the call, so the "
            "others would wait for them; call it after the block"
        )
