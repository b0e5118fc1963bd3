"""Whether all ranks register the same stages for the same model.

[Note: models of one layout]

What ranks compare where they register says nothing of two models that differ only in their values: a generator's two
copies, say. DDP has made these equal on all ranks, so values tell one model from another. They may differ between ranks
all the same, under local SGD for one, and that is no mistake. So it is an error only where a rank registers what rank 0
registered at another place.
"""

from __future__ import annotations

from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch.distributed as dist

from overlap._torch.fingerprint import fingerprint
from overlap.hooks.context import StageContext
from overlap.hooks.engine.division import Division
from overlap.hooks.stage import Stage
from overlap.join.failures import FailureStore

__all__ = ["difference"]


class _Registered(NamedTuple):
    layout: str
    own: str
    of_rank_0: str


_registered: WeakKeyDictionary[dist.ProcessGroup, list[_Registered]] = WeakKeyDictionary()


def difference(failures: FailureStore, stage: Stage, context: StageContext, division: Division) -> str | None:
    """What this rank registers otherwise than rank 0, as far as it can be told.

    Raises:
        CollectiveError: the store does not answer within the group's timeout.
    """
    rank = context.group.rank()
    signature = f"{stage.signature} for {context.model_in_words}{division.signature}"
    if (other := failures.agree(signature)) is not None:
        return (
            f"rank {rank} registers {signature}, but rank 0 registers {other}; "
            "every rank must run the same stages for the same model"
        )
    if not context.names:
        return None
    own = fingerprint(context.names)
    layout, of_rank_0 = context.model_in_words, failures.of_rank_0("fingerprint", own)
    if (places := _other_place(context.group, layout, own, of_rank_0)) is None:
        return None
    return (
        f"rank {rank} registers as number {places[0]} of {layout} what rank 0 registers as number {places[1]}; "
        "register models in the same order on every rank"
    )


def _other_place(group: dist.ProcessGroup, layout: str, own: str, of_rank_0: str) -> tuple[int, int] | None:
    """Note a registration on ``group``: of a model of fingerprint ``own`` here and ``of_rank_0`` there.

    Returns:
        The places, counted from 1, at which this rank and rank 0 registered one model of this ``layout``, where they
        are known to differ.
    """
    past = _registered.setdefault(group, [])
    past.append(_Registered(layout, own, of_rank_0))
    alike = [each for each in past if each.layout == layout]
    if own == of_rank_0:
        return None
    for place, earlier in enumerate(alike[:-1], start=1):
        if earlier.own != earlier.of_rank_0 and earlier.of_rank_0 == own:
            return len(alike), place
        if earlier.own != earlier.of_rank_0 and earlier.own == of_rank_0:
            return place, len(alike)
    return None
