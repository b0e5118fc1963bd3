"""Several updates in one chain, each of its own parameters, beside the same optimizers on plain DDP."""

from __future__ import annotations

from several_loops import FORMS, check, plain_run, several_run

from harness import bucket_calls, run_ranks
from harness.models import MLP
from overlap import ReduceScatter, Step, ZeroStep


def _parity(rank: int, world_size: int) -> None:
    reference = plain_run(MLP, rank)
    for name, form in FORMS.items():
        with bucket_calls(Step) as steps, bucket_calls(ZeroStep) as zeros, bucket_calls(ReduceScatter) as reductions:
            candidate = several_run(MLP, rank, form)
        check(candidate, reference, what=name, rank=rank)
        assert len(steps) + len(zeros) > 20, name
        assert bool(reductions) == (name.startswith(("both sharded", "sharded")) and "reducer" not in name), name


def test_two_optimizers_equal_the_same_two_on_plain_ddp() -> None:
    run_ranks(_parity, 2)
