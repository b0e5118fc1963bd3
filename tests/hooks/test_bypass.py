"""`bypass="auto"` of each reducer that compresses: measured once, decided alike on all ranks, kept in the state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import overlap
from harness import assert_parity, run_ranks, wrap
from harness.models import MLP, mean_squared_error
from harness.spy import bucket_calls
from overlap import AllReduce, Cast, ConfigurationError, Hierarchical, PowerSGD, Quantize, chain, register, route
from overlap.hooks import GatherQuantized, measure

from .runs import run

_MEASURED = 3
"""Passes up to the measurement, that one included."""

REDUCERS: dict[str, Callable[..., Any]] = {
    "Quantize": lambda **bypass: Quantize(bits=4, **bypass),
    "Quantize, stochastic": lambda **bypass: Quantize(bits=4, rounding="stochastic", error_feedback=True, **bypass),
    "Cast": lambda **bypass: Cast(torch.bfloat16, **bypass),
    "Hierarchical": lambda **bypass: Hierarchical(outer=Cast(torch.bfloat16), machine_size=1, **bypass),
    "between machines": lambda **bypass: Hierarchical(outer=Quantize(bits=4, **bypass), machine_size=1),
    "route": lambda **bypass: route({"*.bias": AllReduce(), "*": Quantize(bits=8, **bypass)}),
    "GatherQuantized": lambda **bypass: GatherQuantized(64, **bypass),
    # None of these parameters is in the last bucket.
    "route, PowerSGD": lambda **bypass: route(
        {"4.*": PowerSGD(rank=1, min_compression_rate=0, **bypass), "*": AllReduce()}
    ),
}


def _clock(times_ms: Callable[[], float]) -> None:
    """Has each measurement find these times: of sending, then of compressing, in turn."""

    async def best_ms(run: Any, device: torch.device) -> float:
        await run()
        return times_ms()

    measure._best_ms = best_ms  # type: ignore[assignment]


def _alternating(*times_ms: float) -> Callable[[], float]:
    turn = iter(times_ms * 1000)
    return lambda: next(turn)


def _kept(rank: int, world_size: int) -> None:
    """Where compression pays, nothing changes."""
    _clock(_alternating(8.0, 1.0))
    for name, make in REDUCERS.items():
        measured = make(bypass="auto")
        found = run(rank, chain(measured).register)
        assert_parity(found, run(rank, chain(make()).register), what=f"{name}, which is faster")
        assert "compressed: 1.00 ms compressed, 8.00 ms as it is" in measured.signature, name


def test_where_compression_is_faster_nothing_changes() -> None:
    run_ranks(_kept, 2, timeout_s=120)


def _bypassed(rank: int, world_size: int) -> None:
    """Where it does not pay, the exact mean is taken; one rank's own time alone would say otherwise."""
    for name, make in REDUCERS.items():
        _clock(_alternating(1.0, 4.0) if rank == 0 else _alternating(8.0, 6.0))
        measured = make(bypass="auto")
        ddp = wrap(MLP.model())
        chain(measured).register(ddp)
        sums: dict[str, Any] = {}
        given: dict[str, Any] = {}
        for step in range(6):
            ddp.zero_grad()
            mean_squared_error(ddp, MLP.batch(step, rank)).backward()
            alone = wrap(MLP.model())
            mean_squared_error(alone, MLP.batch(step, rank)).backward()
            for (key, ours), theirs in zip(ddp.module.named_parameters(), alone.parameters(), strict=True):
                is_exact = torch.equal(ours.grad, theirs.grad)
                # In the pass after the measurement what was left out goes out, too.
                keeps = "stochastic" in name or "PowerSGD" in name
                assert is_exact or step < _MEASURED + keeps, f"{name}: {key} in step {step}"
                sums[key] = sums.get(key, 0.0) + ours.grad.double()
                given[key] = given.get(key, 0.0) + theirs.grad.double()
        assert "sent as it is: 5.00 ms compressed, 4.50 ms as it is" in measured.signature, name
        assert "parameters bypassed" in repr(measured), name
        if keeps:
            for key, total in sums.items():
                torch.testing.assert_close(total, given[key], rtol=1e-5, atol=1e-6)


def test_where_sending_is_faster_the_mean_is_exact_and_nothing_is_lost() -> None:
    run_ranks(_bypassed, 2, timeout_s=120)


def _by_column(rank: int, world_size: int) -> list[str]:
    """Ranks in different places of their machines measure the opposite of each other, in different groups."""
    _clock(_alternating(1.0, 2.0) if rank % 2 else _alternating(8.0, 1.0))
    ddp, stage = wrap(MLP.model()), Hierarchical(outer=Quantize(bits=8, bypass="auto"), machine_size=2)
    register(ddp, stage)
    for step in range(5):
        mean_squared_error(ddp, MLP.batch(step, rank)).backward()
    decided: list[str] = stage.state_dict()["outer"]["bypass"]["bypassed"]
    return decided


def test_between_machines_all_ranks_decide_together() -> None:
    # Else the ranks of one machine would issue different numbers of collectives.
    assert run_ranks(_by_column, 4) == [[]] * 4


def _of_some(rank: int, world_size: int) -> None:
    """One bucket is bypassed and others are not; the decision is saved."""
    times_ms = iter([1.0, 2.0, *[2.0, 1.0] * 100])
    _clock(lambda: next(times_ms))
    stage = Quantize(bits=4, error_feedback=True, bypass="auto")
    ddp = wrap(MLP.model())
    register(ddp, stage)
    for step in range(5):
        ddp.zero_grad()
        mean_squared_error(ddp, MLP.batch(step, rank)).backward()
    state = overlap.state_dict(ddp)
    bypassed = state["stages"]["state"]["bypass"]["bypassed"]
    names = [name for name, _ in ddp.module.named_parameters()]
    assert 0 < len(bypassed) < len(names)
    assert set(state["stages"]["state"]["error"]) == set(names) - set(bypassed), "what was left out has gone out"

    _clock(lambda: pytest.fail("a decision is not taken again"))
    again = wrap(ddp.module)
    register(again, resumed := Quantize(bits=4, error_feedback=True, bypass="auto"))
    overlap.load_state_dict(again, None, state)
    for model in (ddp, again):
        model.zero_grad()
        mean_squared_error(model, MLP.batch(5, rank)).backward()
    assert_parity(
        [parameter.grad for parameter in again.parameters()],
        [parameter.grad for parameter in ddp.parameters()],
        what="the next step of a run that resumed",
    )
    assert_parity(resumed.state_dict(), stage.state_dict(), what="the state of a run that resumed")
    with pytest.raises(ConfigurationError, match='bypasses none: make it with bypass="auto"'):
        Quantize(bits=4, error_feedback=True).load_state_dict(stage.state_dict())


def test_a_decision_for_some_buckets_is_saved_and_resumed() -> None:
    run_ranks(_of_some, 2)


def _failed(rank: int, world_size: int) -> None:
    """A pass that fails right after the measurement: not every rank may have come that far, so all measure anew."""
    _clock(_alternating(1.0, 2.0))
    ddp = wrap(MLP.model())
    stage, fails = Cast(torch.bfloat16, bypass="auto"), False

    def may_fail(bucket: overlap.Bucket) -> None:
        if fails and bucket.is_last:
            raise ValueError("boom")

    chain(stage, may_fail).register(ddp)
    for step in range(7):
        fails = step in (2, 4)
        if fails:
            with pytest.raises(ValueError, match="boom"):
                mean_squared_error(ddp, MLP.batch(step, rank)).backward()
        else:
            mean_squared_error(ddp, MLP.batch(step, rank)).backward()
        # Measured in steps 2, 3 and 5.
        assert (stage.state_dict()["bypassed"] is not None) == (step in (3, 5, 6)), step


def test_a_failed_pass_takes_a_fresh_decision_back() -> None:
    run_ranks(_failed, 2)


def _really(rank: int, world_size: int) -> list[list[str]]:
    decided = []
    with bucket_calls(AllReduce) as calls:
        for make in REDUCERS.values():
            ddp, stage = wrap(MLP.model()), make(bypass="auto")
            register(ddp, stage)
            for step in range(5):
                mean_squared_error(ddp, MLP.batch(step, rank)).backward()
            decided.append(stage.signature)
    assert len(calls) > 10, "it did measure"
    return decided


def test_measured_times_lead_every_rank_to_the_same_decisions() -> None:
    found = run_ranks(_really, 3)
    assert found[0] == found[1] == found[2]
    assert all("ms as it is" in signature for signature in found[0])


@pytest.mark.parametrize(("compress_ms", "compresses"), [(7.0, True), (9.0, False), (11.0, False)])
def test_in_doubt_a_bucket_is_sent_exactly(compress_ms: float, compresses: bool) -> None:
    assert measure.Measurement(("weight",), send_ms=10.0, compress_ms=compress_ms).compresses == compresses


def test_a_bypass_that_is_not_auto_or_cannot_choose_is_refused() -> None:
    with pytest.raises(ConfigurationError, match='bypass must be None or "auto", got True'):
        Quantize(bypass=True)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match=r"between a cast and AllReduce.*a cast for Quantize"):
        Cast(torch.bfloat16, Quantize(), bypass="auto")
