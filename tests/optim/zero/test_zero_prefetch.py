"""With gather="forward" parameters are gathered during the next forward, and whoever needs them waits."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch

from harness import bucket_sizes_bytes, run_ranks, wrap
from harness.models import MLP, TRANSFORMER, Case, mean_squared_error
from overlap import ZeroRedundancyOptimizer, ZeroStep, chain


class SlowGather:
    """Holds the exchange's gather up, so that a missing wait would show."""

    def __init__(self, zero: ZeroRedundancyOptimizer) -> None:
        import time

        inner = zero.exchange.gather

        async def gather(bucket: Any, plan: Any) -> None:
            time.sleep(0.01)
            await inner(bucket, plan)

        object.__setattr__(zero.exchange, "gather", gather)


def _riding(rank: int, world_size: int, case: Case, deferred: bool) -> None:
    plain = wrap(case.model(), **case.ddp_options())
    reference = torch.optim.AdamW(plain.parameters(), lr=0.01)
    ddp = wrap(case.model(), **case.ddp_options())
    zero = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.AdamW, lr=0.01, overlap_with_ddp=True)
    registration = chain(ZeroStep(zero, gather="forward", deferred=deferred)).register(ddp)
    SlowGather(zero)
    for step in range(6):
        batch = case.batch(step, rank)
        plain.zero_grad()
        expected = mean_squared_error(plain, batch)
        expected.backward()
        reference.step()
        loss = mean_squared_error(ddp, batch)
        assert torch.equal(loss, expected), f"step {step}: the forward used old parameters"
        loss.backward()
        zero.step()
        if step == 2:
            for model in (plain, ddp):
                model.eval()
            with torch.no_grad():
                assert torch.equal(mean_squared_error(ddp, batch), mean_squared_error(plain, batch))
            for model in (plain, ddp):
                model.train()
        if step == 3:
            state = ddp.module.state_dict()
            assert all(torch.equal(state[name], value) for name, value in plain.module.state_dict().items())
        if step == 4:
            zero.wait()
            assert all(torch.equal(a, b) for a, b in zip(ddp.parameters(), plain.parameters(), strict=True))
    registration.remove()
    assert all(torch.equal(a, b) for a, b in zip(ddp.parameters(), plain.parameters(), strict=True))


@pytest.mark.parametrize("deferred", [False, True])
@pytest.mark.parametrize("case", [MLP, TRANSFORMER], ids=str)
def test_gathers_that_ride_are_waited_for_by_whoever_needs_them(case: Case, deferred: bool) -> None:
    run_ranks(_riding, 2, case, deferred)


def _a_gather_fails(rank: int, world_size: int) -> None:
    ddp = wrap(MLP.model(), **MLP.ddp_options())
    zero = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.SGD, lr=0.1, overlap_with_ddp=True)
    chain(ZeroStep(zero, gather="forward")).register(ddp)
    good = zero.exchange.gather

    async def bad(bucket: Any, plan: Any) -> None:
        raise ValueError("lost")

    for step in range(5):
        if step == 2:
            zero.wait()
            object.__setattr__(zero.exchange, "gather", bad)
        mean_squared_error(ddp, MLP.batch(step, rank)).backward()
        if step == 2:
            with pytest.raises(ValueError, match="lost"):
                zero.wait()
            object.__setattr__(zero.exchange, "gather", good)
        zero.step()


def test_a_gather_that_fails_is_raised_by_who_waits() -> None:
    run_ranks(_a_gather_fails, 2)


def _copied(rank: int, world_size: int) -> None:
    ddp = wrap(MLP.model(), **MLP.ddp_options())
    zero = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.SGD, lr=0.1, overlap_with_ddp=True)
    chain(ZeroStep(zero, gather="forward")).register(ddp)
    for step in range(3):
        mean_squared_error(ddp, MLP.batch(step, rank)).backward()
        zero.step()
    zero.wait()
    twin, pickled = copy.deepcopy(ddp.module), pickle.loads(pickle.dumps(ddp.module))
    for other in (twin, pickled):
        assert torch.equal(other(*MLP.batch(0, 0).inputs), ddp.module(*MLP.batch(0, 0).inputs))


def test_a_model_whose_gathers_ride_can_be_copied() -> None:
    run_ranks(_copied, 2)


def _observed(rank: int, world_size: int) -> list[str]:
    ddp = wrap(MLP.model(), **MLP.ddp_options())
    zero = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.SGD, lr=0.1, overlap_with_ddp=True)
    registration = chain(ZeroStep(zero, gather="forward")).register(ddp)
    launched: list[tuple[str, int]] = []

    class Log:
        def launched(self, bucket: Any, label: str, operation: Any) -> None:
            launched.append((operation.label, bucket.index))

        def __getattr__(self, name: str) -> Any:
            return lambda *args: None

    for step in range(4):
        if step == 3:
            zero.wait()
            registration.observer = Log()  # type: ignore[assignment]
        mean_squared_error(ddp, MLP.batch(step, rank)).backward()
        zero.step()
    zero.wait()
    buckets = len(bucket_sizes_bytes(ddp))
    assert [index for _, index in launched] == [*range(buckets), *reversed(range(buckets))]
    return [label for label, _ in launched]


def test_gathers_that_ride_come_after_the_pass_with_the_first_layers_first() -> None:
    first, second = run_ranks(_observed, 2)
    half = len(first) // 2
    assert first == second == ["send_recv"] * 2 * half
