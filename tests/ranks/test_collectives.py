"""Where a collective on the user's own group fails, the error is ours; and the group beside it, which saves use."""

import ast
import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import overlap
from harness import RankDied, on_ranks, run_ranks, wrap
from harness.models import MLP, mean_squared_error
from overlap import CollectiveError, ZeroRedundancyOptimizer
from overlap._torch.c10d import side_group


def _loses_a_rank(rank: int, world_size: int) -> str:
    ddp = wrap(MLP.model(), **MLP.ddp_options())
    zero = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.SGD, lr=0.1)
    mean_squared_error(ddp, MLP.batch(0, rank)).backward()
    dist.barrier()
    if rank == 1:
        os._exit(3)
    with pytest.raises(CollectiveError) as caught:
        zero.step()
    return " ".join([str(caught.value), *getattr(caught.value, "__notes__", ())])


def test_a_lost_rank_is_a_clear_error() -> None:
    told, died = run_ranks(_loses_a_rank, 2, group_timeout_s=5, return_exceptions=True)
    assert isinstance(died, RankDied), died
    assert isinstance(told, str), told
    assert "no rank has reported an error" in told or "ranks [1] did not come" in told, told


# Elsewhere in the library Gloo's bare errors would reach the user.
_ISSUE = {
    "ranks/board.py",
    "_torch/c10d.py",  # What executors launch; they wait for it.
    "ranks/values.py",  # By failures_explained(), too.
    "join/adapters.py",  # In the block of a Join, which explains what comes out of it.
    "hooks/engine/registration.py",  # As plain DDP does, where nothing is registered any more.
}


_COLLECTIVES = ("all_", "barrier", "batch_", "broadcast", "gather", "irecv", "isend", "recv", "reduce", "scatter")


def test_no_other_module_issues_collectives_on_a_users_group() -> None:
    package = Path(overlap.__file__).parent
    programs = {"demo.py", "doctor.py"}
    sources = {path.relative_to(package): ast.parse(path.read_text()) for path in package.rglob("*.py")}
    found = {
        path.as_posix()
        for path, source in sources.items()
        for node in ast.walk(source)
        if path.parts[0] not in programs and isinstance(node, ast.Call) and _is_collective(node.func)
    }
    assert found == _ISSUE


def _is_collective(called: ast.expr) -> bool:
    return (
        isinstance(called, ast.Attribute)
        and isinstance(called.value, ast.Name)
        and called.value.id == "dist"
        and called.attr.startswith(_COLLECTIVES)
    )


@on_ranks(3, timeout_s=30, group_timeout_s=10)
def test_ranks_in_different_numbers_of_groups_make_it(rank: int, world_size: int) -> None:
    if rank < 2:
        dist.new_group([0, 1], use_local_synchronization=True)
    group = side_group(dist.group.WORLD)
    assert group is side_group(dist.group.WORLD)
    total = torch.ones(1)
    dist.all_reduce(total, group=group)
    assert total.item() == world_size
