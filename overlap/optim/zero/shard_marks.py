"""What must be the same in ``step()`` as a sharded update in backward left it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from overlap._torch.device import has_streams
from overlap.optim.update_marks import UpdateMarks
from overlap.optim.zero.optimizer import ZeroRedundancyOptimizer

__all__ = ["marks_of_shards"]


def marks_of_shards(
    zero: ZeroRedundancyOptimizer,
    updated: Sequence[Tensor],
    names: Mapping[Tensor, str],
    *,
    samples: bool,
    in_forward: bool,
    are_differences: bool,
) -> UpdateMarks:
    """The marks of an update of the parameters ``updated``, which messages call by ``names``.

    Args:
        zero: the optimizer.
        updated: what backward has updated.
        names: of the model's parameters.
        samples: note values, too.
        in_forward: whether parameters are gathered during the next forward.
        are_differences: whether differences travel, and not parameters.
    """
    named = {parameter: names.get(parameter, "a parameter") for parameter in updated}
    owned = {own: name for parameter, name in named.items() if (own := zero.shards[id(parameter)].own) is not None}
    if in_forward:
        # Gathers that run during the next forward move versions until then, but not the values of this rank's part,
        # unless they are gathers of differences.
        sees_values = samples and not (has_streams(zero.ownership.device) or are_differences)
        shards = [(zero.shards[id(parameter)], name) for parameter, name in named.items()] if sees_values else []
        named = {shard.views[zero.rank]: name for shard, name in shards if shard.own is not None}
    return UpdateMarks(
        lambda: zero.param_groups,
        lambda: [zero.optim.state.get(own, {}) for own in owned],
        list(owned.values()),
        named,
        samples=samples,
    )
