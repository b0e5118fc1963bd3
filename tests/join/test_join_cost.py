"""How many collectives an iteration costs under Join, counted by the process group itself."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from join_loops import WAYS, joined
from torch.distributed.algorithms.join import Join as TorchJoin

from harness import run_ranks, wrap
from harness.models import BATCH_NORM, MLP, Case, mean_squared_error
from overlap import AllReduce, chain

_STEPS = 8
# The first backward is of one bucket, and the forward after it makes them anew.
_SETTLED = 2


def _issued(ddp: Any) -> int:
    return int(ddp.process_group._get_sequence_number_for_group())


def _per_iteration(ddp: Any, batches: Iterable[Any]) -> float:
    """Collectives on the model's own process group, from the end of one iteration to the end of a later one."""
    numbers = []
    for batch in batches:
        mean_squared_error(ddp, batch).backward()
        numbers.append(_issued(ddp))
    return (numbers[-1] - numbers[_SETTLED]) / (len(numbers) - 1 - _SETTLED)


def _model(case: Case, *, registered: bool) -> Any:
    ddp = wrap(case.model(), **case.ddp_options())
    if registered:
        chain(AllReduce()).register(ddp)
    return ddp


def _count(rank: int, world_size: int, steps: int, cases: tuple[Case, ...]) -> dict[str, float]:
    extra = {}
    for case in cases:
        batches = [case.batch(step, rank) for step in range(_STEPS)]
        own = batches if rank == 0 else batches[:steps]
        for registered in (False, True):
            name = f"{case}, {registered=}"
            plain = _per_iteration(_model(case, registered=registered), batches)
            assert plain > 0 or registered, "buckets are reduced on the model's own group where nothing is registered"
            for way in WAYS:
                ddp = _model(case, registered=registered)
                with joined([ddp], own, way) as iterated:
                    extra[f"{name}, {way}"] = _per_iteration(ddp, iterated) - plain
            ddp = _model(case, registered=registered)
            if not registered:
                with TorchJoin([ddp]):
                    extra[f"{name}, PyTorch"] = _per_iteration(ddp, own) - plain
    return extra


def test_collectives_an_iteration() -> None:
    # Even, and one rank that runs out on the way.
    for steps, cases in ((_STEPS, (MLP,)), (5, (MLP, BATCH_NORM))):
        extra = run_ranks(_count, 2, steps, cases)[0]
        for name, number in extra.items():
            known = name.endswith(("lengths", "loader"))
            theirs = 3 if "batch_norm" in name else 2
            assert number == (theirs if name.endswith("PyTorch") else 0 if known else 1), name
