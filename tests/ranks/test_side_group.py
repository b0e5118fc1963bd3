"""The Gloo group beside that of training, which saves use."""

import torch
import torch.distributed as dist

from harness import on_ranks
from overlap._torch.c10d import side_group


@on_ranks(3, timeout_s=30, group_timeout_s=10)
def test_ranks_in_different_numbers_of_groups_make_it(rank: int, world_size: int) -> None:
    if rank < 2:
        dist.new_group([0, 1], use_local_synchronization=True)
    group = side_group(dist.group.WORLD)
    assert group is side_group(dist.group.WORLD)
    total = torch.ones(1)
    dist.all_reduce(total, group=group)
    assert total.item() == world_size
