"""The reduction of sharded updates as a stage of its own: where a chain gets it, what it leaves, what it refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from several_loops import ADAMW, MUON, divided, zero_pair
from zero_loops import FORMS, check, plain_run, zero_run

from harness import bucket_calls, run_ranks, wrap
from harness.models import MLP, Batch, mean_squared_error
from overlap import (
    AllReduce,
    Cast,
    ConfigurationError,
    OverlappedOptimizer,
    ReduceScatter,
    Step,
    ZeroRedundancyOptimizer,
    ZeroStep,
    chain,
)
from overlap.hooks import Transform


class _Looks(Transform):
    """A transform that keeps what it sees of each bucket."""

    def __init__(self, *, needs_mean: bool = True) -> None:
        super().__init__()
        self.needs_mean = needs_mean
        self.seen: list[Any] = []

    async def __call__(self, bucket: Any) -> None:
        self.seen.append((bucket, bucket.buffer.clone()))


def _kinds(*stages: Any) -> list[str]:
    return [type(stage).__name__ for stage in chain(*stages).stages]


def _inserted(rank: int, world_size: int) -> None:
    ddp = wrap(MLP.model(), **MLP.ddp_options())
    muon, adamw = zero_pair(ddp)
    whole = OverlappedOptimizer(torch.optim.AdamW(divided(ddp)[1], **ADAMW))
    mean, own = _Looks(), _Looks(needs_mean=False)
    assert _kinds(ZeroStep(muon)) == ["ZeroStep"]
    assert _kinds(own, ZeroStep(muon), mean) == ["_Looks", "ZeroStep", "_Looks"]
    assert _kinds(AllReduce(), mean, ZeroStep(muon)) == ["AllReduce", "_Looks", "ZeroStep"]
    assert _kinds(own, mean, own, ZeroStep(muon)) == ["_Looks", "ReduceScatter", "_Looks", "_Looks", "ZeroStep"]
    assert _kinds(own, ZeroStep(muon), ZeroStep(adamw)) == ["_Looks", "ReduceScatter", "ZeroStep", "ZeroStep"]
    assert _kinds(ZeroStep(muon), Step(whole)) == ["ReduceScatter", "ZeroStep", "Step"]
    assert _kinds(Step(whole), ZeroStep(muon)) == ["ReduceScatter", "Step", "ZeroStep"]
    assert _kinds(chain(ZeroStep(muon)), chain(ZeroStep(adamw))) == ["ReduceScatter", "ZeroStep", "ZeroStep"]
    assert chain(ZeroStep(muon), ZeroStep(adamw)).stages[0].zeros == (muon, adamw)
    assert repr(ReduceScatter(muon, adamw)) == "ReduceScatter(Muon, AdamW)"
    assert "Muon by parameter, AdamW by element" in ReduceScatter(muon, adamw).signature


def _refused(rank: int, world_size: int) -> None:
    ddp = wrap(MLP.model(), **MLP.ddp_options())
    muon, adamw = zero_pair(ddp)
    for zeros, message in (
        ((), "takes the optimizers"),
        ((muon, muon), "each once, got 2"),
        ((ddp,), "ReduceScatt"),
    ):
        with pytest.raises(ConfigurationError, match=message):
            ReduceScatter(*zeros)
    for stage, message in (
        (
            chain(ReduceScatter(muon, adamw), ZeroStep(muon)),
            "part of the mean for AdamW, but no ZeroStep of it follows",
        ),
        (chain(Cast(torch.float64, ReduceScatter(muon)), ZeroStep(muon)), "which a stage around it cannot know"),
        (ReduceScatter(muon), "no ZeroStep of it follows"),
    ):
        with pytest.raises(ConfigurationError, match=message):
            stage.register(ddp) if hasattr(stage, "register") else chain(stage).register(ddp)
    # The model and the optimizers are as before.
    chain(ZeroStep(muon), ZeroStep(adamw)).register(ddp)
    mean_squared_error(ddp, MLP.batch(0, rank)).backward()
    muon.step()
    adamw.step()


def test_a_chain_gets_the_reduction_of_its_sharded_update_where_others_need_the_mean() -> None:
    run_ranks(_inserted, 1)


def test_a_reduction_without_its_update_is_an_error_at_registration() -> None:
    run_ranks(_refused, 2)


def _parts(rank: int, world_size: int) -> None:
    plain, ddp = (wrap(MLP.model(), **MLP.ddp_options()) for _ in range(2))
    parameters = list(ddp.parameters())
    weights = [p for p in parameters[:6] if p.ndim == 2]
    # Parameters stay as they are, and with them the reference.
    muon = ZeroRedundancyOptimizer(weights, torch.optim.Muon, lr=0.0)
    adamw = ZeroRedundancyOptimizer([p for p in parameters[:6] if p.ndim == 1], torch.optim.AdamW, lr=0.0)
    names = {id(parameter): name for name, parameter in ddp.module.named_parameters()}
    looks, after = _Looks(), _Looks()
    chain(looks, ZeroStep(muon), ZeroStep(adamw), after).register(ddp)
    for step in range(4):
        looks.seen.clear()
        after.seen.clear()
        plain.zero_grad()
        mean_squared_error(plain, MLP.batch(step, rank)).backward()
        mean_squared_error(ddp, MLP.batch(step, rank)).backward()
        grads = {name: parameter.grad for name, parameter in plain.module.named_parameters()}
        counts = {name: torch.zeros(grad.shape) for name, grad in grads.items()}
        assert all(bucket.is_mean for bucket, _ in looks.seen)
        for (bucket, buffer), (later, _) in zip(looks.seen, after.seen, strict=True):
            assert later.owned is bucket.owned
            offset = 0
            for place, parameter in enumerate(bucket.parameters):
                name = names[id(parameter)]
                part = None if bucket.owned is None else bucket.owned[place]
                values = buffer[offset : offset + parameter.numel()]
                count = counts[name].view(-1)
                if part is None:
                    assert int(name.split(".")[0]) >= 6
                    assert torch.equal(values, grads[name].flatten()), name
                    count += 1 / world_size
                else:
                    start = int(part.storage_offset() - bucket.buffer.storage_offset()) - offset
                    owned = slice(start, start + part.numel())
                    assert torch.equal(values[owned], grads[name].flatten()[owned]), name
                    count[owned] += 1
                offset += parameter.numel()
        for count in counts.values():
            dist.all_reduce(count)
            assert torch.equal(count, torch.ones_like(count))
        if step > 0:
            assert len(looks.seen) > 2
        for optimizer in (muon, adamw):
            optimizer.step()
        for parameter in parameters[6:]:
            parameter.grad = None


def test_each_element_of_the_mean_is_owned_by_one_rank_or_is_on_all() -> None:
    run_ranks(_parts, 2)


def _with_a_transform(rank: int, world_size: int) -> None:
    adamw = torch.optim.AdamW
    reference = plain_run(MLP, rank, lambda parameters: adamw(parameters, **ADAMW))
    with bucket_calls(ReduceScatter) as calls:
        for form in ("interleaved", "interleaved, gather in forward", "deferred", "automatic, deferred"):
            candidate = zero_run(MLP, rank, adamw, ADAMW, FORMS[form], reducer=_Looks())
            check(candidate, reference, what=form, world_size=world_size)
    assert len(calls) > 40


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_transform_of_the_mean_before_a_sharded_update_changes_nothing_else(world_size: int) -> None:
    run_ranks(_with_a_transform, world_size)


def _clipped(rank: int, world_size: int) -> None:
    plain, ddp = (wrap(MLP.model(), **MLP.ddp_options()) for _ in range(2))
    muon, adamw = zero_pair(ddp)
    matrices, others = divided(plain)
    chain(ZeroStep(muon, deferred=True), ZeroStep(adamw, clip_grad_norm=0.02)).register(ddp)

    def backward(model: Any, batch: Batch) -> None:
        mean_squared_error(model, batch).backward()

    reference = torch.optim.Muon(matrices, **MUON), torch.optim.AdamW(others, **ADAMW)
    for step in range(4):
        plain.zero_grad()
        backward(plain, MLP.batch(step, rank))
        backward(ddp, MLP.batch(step, rank))
        expected = torch.nn.utils.clip_grad_norm_(matrices, 0.03)
        torch.nn.utils.clip_grad_norm_(others, 0.02)
        total = muon.clip_grad_norm_(0.03)
        torch.testing.assert_close(total, expected)
        assert float(total) > 0.03
        for optimizer in (*reference, muon, adamw):
            optimizer.step()
        for ours, theirs in zip(ddp.parameters(), plain.parameters(), strict=True):
            # The ranks' parts of the norm are summed in float64, and Muon works in bfloat16.
            torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)


def test_each_sharded_update_clips_by_the_norm_of_its_own_parameters() -> None:
    run_ranks(_clipped, 2)
