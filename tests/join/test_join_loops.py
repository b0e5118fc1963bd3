"""What a loop may do inside of Join: accumulate, evaluate, leave parameters unused, come again."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from join_loops import WAYS, even, joined, left, overlapped_body, plain_body, uneven
from torch.distributed.algorithms.join import Join as TorchJoin

from harness import assert_parity, run_ranks, run_threads, wrap
from harness.models import BATCH_NORM, MLP, UNUSED_ON_SOME_RANKS, Case, mean_squared_error
from overlap import (
    AllGather,
    AllReduce,
    Join,
    Joinable,
    JoinHook,
    OverlappedOptimizer,
    PowerSGD,
    Quantize,
    Stage,
    Step,
    UnsupportedError,
    chain,
)
from overlap.hooks.stage import Role

SUMMATION = "three and four ranks' gradients are added up in another order"


def _make(ddp: Any, update: str | None) -> Any:
    optimizer: Any = torch.optim.AdamW(ddp.parameters(), lr=0.01, weight_decay=0.1)
    if update is not None:
        optimizer = OverlappedOptimizer(optimizer)
        chain(AllReduce(), Step(optimizer, deferred=update == "deferred")).register(ddp)
    return optimizer


def _accumulating(ddp: Any, optimizer: Any, batch: Any, scale: float) -> None:
    """Two parts of each batch, the first under no_sync."""
    optimizer.zero_grad()
    with ddp.no_sync():
        (mean_squared_error(ddp, batch) * scale).backward()
    (mean_squared_error(ddp, batch).square() * scale).backward()
    optimizer.step()


def _two_forwards(ddp: Any, optimizer: Any, batch: Any, scale: float) -> None:
    optimizer.zero_grad()
    first, second = ddp(*batch.inputs), ddp(*(-each for each in batch.inputs))
    ((first - second + batch.target).square().mean() * scale).backward()
    optimizer.step()


def _evaluating(ddp: Any, optimizer: Any, batch: Any, scale: float) -> None:
    """A forward under no_grad on either side of the training step."""
    with torch.no_grad():
        ddp(*batch.inputs)
    plain_body(ddp, optimizer, batch, scale)
    with torch.no_grad():
        ddp.eval()
        ddp(*batch.inputs)
        ddp.train()


BODIES = {"accumulating": _accumulating, "two forwards": _two_forwards, "evaluating": _evaluating}


def _odd_loops(rank: int, world_size: int, update: str | None) -> list[Any]:
    results = []
    for name, body in BODIES.items():
        for case in (MLP, BATCH_NORM):
            if case is BATCH_NORM and name == "two forwards":
                continue  # DDP itself cannot: the second forward changes buffers that backward needs.
            ddp = wrap(case.model(), **case.ddp_options())
            reference = even(ddp, _make(ddp, None), case, rank, body=body)
            for way in WAYS:
                # A forward is an iteration where no loader says otherwise.
                forwards = {"accumulating": 2, "two forwards": 2}.get(name, 1)
                if way == "lengths" and forwards > 1:
                    continue
                ddp = wrap(case.model(), **case.ddp_options())
                optimizer = _make(ddp, update)
                ours = uneven(ddp, optimizer, case, rank, way, body=body)
                what = f"{name}, {case}, {way}, {update}"
                if case is MLP:
                    assert_parity(ours, reference, what=what)
                results.append((what, ours))
    return results


def _same_on_every_rank(results: list[list[Any]]) -> None:
    for per_rank in zip(*results, strict=True):
        what, first = per_rank[0]
        for rank, (_, other) in enumerate(per_rank[1:], start=1):
            assert_parity(other, first, what=f"{what}: rank {rank} against rank 0")


@pytest.mark.parametrize("update", [None, "interleaved", "deferred"])
def test_accumulation_several_forwards_and_evaluation(update: str | None) -> None:
    _same_on_every_rank(run_ranks(_odd_loops, 2, update))


def _no_batch_and_again(rank: int, world_size: int) -> list[Any]:
    """Four ranks, the last without a batch; then a second Join with other numbers, a third with equal ones."""
    results = []
    rounds = ((6, 3, 4, 0), (2, 5, 0, 5), (3, 3, 3, 3))
    for update in (None, "interleaved", "deferred"):
        # Buffers are the model's own matter, whatever updates it.
        for case in (MLP, UNUSED_ON_SOME_RANKS, *([BATCH_NORM] if update == "deferred" else [])):
            ways = WAYS if case is MLP and update == "deferred" else ("stream" if case is BATCH_NORM else "loader",)
            for way in ways:
                ddp = wrap(case.model(), **case.ddp_options())
                optimizer = _make(ddp, update)
                ddp2 = wrap(case.model(), **case.ddp_options())
                plain = _make(ddp2, None)
                for counts in rounds:
                    ours = uneven(ddp, optimizer, case, rank, way, counts=counts)
                    results.append((f"{case}, {way}, {update}, {counts}", ours))
                    if case is MLP:
                        reference = even(ddp2, plain, case, rank, body=plain_body, counts=counts)
                        assert_parity(
                            ours,
                            reference,
                            what=results[-1][0],
                            exact=False,
                            rtol=2e-3,
                            atol=2e-4,
                            reason=SUMMATION,
                        )
    return results


def test_a_rank_without_a_batch_and_one_join_after_another() -> None:
    _same_on_every_rank(run_ranks(_no_batch_and_again, 4, timeout_s=100))


class _Residual(Stage):
    """Error feedback: sends what is above a threshold, and keeps the rest for the next time."""

    def __init__(self) -> None:
        self.kept: dict[str, torch.Tensor] = {}

    async def __call__(self, bucket: Any) -> None:
        for name, gradient in zip(bucket.names, bucket.gradients, strict=True):
            gradient.add_(self.kept.get(name, torch.zeros_like(gradient)))
            self.kept[name] = gradient * (gradient.abs() < gradient.abs().mean())
            gradient.sub_(self.kept[name])
        await AllGather()(bucket)


class _Sent(Stage):
    """Adds up what comes out of the reducer before it."""

    role = Role.UPDATE

    def __init__(self) -> None:
        self.sent: dict[str, torch.Tensor] = {}

    async def __call__(self, bucket: Any) -> None:
        for name, gradient in zip(bucket.names, bucket.gradients, strict=True):
            self.sent[name] = self.sent.get(name, 0) + gradient


# Stages that keep what they do not send, and where.
FEEDBACK: dict[str, tuple[Any, Any]] = {
    "residual": (_Residual, lambda stage: stage.kept),
    "PowerSGD": (
        lambda: PowerSGD(rank=1, start_step=0, min_compression_rate=1),
        lambda stage: stage.state_dict()["residuals"],
    ),
    "Quantize": (
        lambda: Quantize(bits=4, error_feedback=True),
        # Of the mean over two ranks.
        lambda stage: {name: 2 * error for name, error in stage.state_dict()["error"].items()},
    ),
}


def _error_feedback(rank: int, world_size: int) -> Any:
    """What a rank had kept when it ran out is sent by and by: what was sent and what is kept makes up all gradients."""
    case, counts = MLP, (6, 2)
    results = {}
    for feedback, (make, kept_in) in FEEDBACK.items():
        ddp = wrap(case.model(), **case.ddp_options())
        alone = copy.deepcopy(ddp.module)
        stage, sums = make(), _Sent()
        chain(stage, sums).register(ddp)
        total = {name: torch.zeros_like(parameter) for name, parameter in alone.named_parameters()}
        with joined([ddp], [case.batch(step, rank) for step in range(counts[rank])], "loader") as batches:
            for batch in batches:
                ddp.zero_grad()
                mean_squared_error(ddp, batch).backward()
                alone.zero_grad()
                mean_squared_error(alone, batch).backward()
                for name, parameter in alone.named_parameters():
                    total[name] += parameter.grad
            kept_when_leaving = copy.deepcopy(dict(kept_in(stage)))
        # What is not compressed is not kept.
        kept = {name: kept_in(stage).get(name, torch.zeros_like(value)).view_as(value) for name, value in total.items()}
        results[feedback] = (total, kept, sums.sent, kept_when_leaving)
    return results


def test_error_feedback_of_a_joined_rank_is_sent_on() -> None:
    first, second = run_ranks(_error_feedback, 2)
    for feedback in FEEDBACK:
        (total0, kept0, sent, _), (total1, kept1, sent1, kept_when_leaving) = first[feedback], second[feedback]
        assert_parity(sent1, sent, what=f"what every rank got of {feedback}")
        for name in sent:
            torch.testing.assert_close(
                2 * sent[name] + kept0[name] + kept1[name], total0[name] + total1[name], rtol=1e-4, atol=1e-5
            )
        if feedback != "Quantize":  # Whoever owns a part keeps what all ranks' sum of it left out.
            assert any(kept.norm() > 2 * kept1[name].norm() for name, kept in kept_when_leaving.items()), feedback


def _two_models(rank: int, world_size: int) -> Any:
    """Two models in one Join, the first of which runs first or second, against a rank that goes on with zeros."""
    counts = (5, 2)
    results = []

    def models(update: str | None) -> list[Any]:
        made = [wrap(MLP.model(seed=seed), **MLP.ddp_options()) for seed in (0, 1)]
        return [(ddp, _make(ddp, update)) for ddp in made]

    def body(pairs: list[Any], batch: Any, scale: float) -> None:
        (encoder, encoding), (decoder, decoding) = pairs
        encoding.zero_grad()
        decoding.zero_grad()
        (torch.nn.functional.mse_loss(decoder(encoder(*batch.inputs)), batch.target) * scale).backward()
        encoding.step()
        decoding.step()

    pairs = models(None)
    for step in range(max(counts)):
        body(pairs, MLP.batch(step, rank), float(step < counts[rank]))
    reference = [left(*pair) for pair in pairs]
    for number, way in enumerate(WAYS * 2):
        update = (None, "interleaved", "deferred")[number % 3]
        pairs = models(update)
        listed = pairs if number < len(WAYS) else pairs[::-1]
        batches = [MLP.batch(step, rank) for step in range(counts[rank])]
        with joined([each for pair in listed for each in pair], batches, way) as iterated:
            for batch in iterated:
                body(pairs, batch, 1.0)
        results.append((f"two models, {way}, {update}, {number}", [left(*pair) for pair in pairs]))
        assert_parity(results[-1][1], reference, what=results[-1][0])
    return results


def test_two_models_in_one_join() -> None:
    _same_on_every_rank(run_ranks(_two_models, 2))


class _Average(Joinable):
    """A joinable of one's own: the mean of a number over ranks, once a call."""

    def __init__(self) -> None:
        super().__init__()
        self.value, self.calls, self.last = torch.zeros(1), 0, [False]

    def step(self, value: float | None = None) -> None:
        Join.notify_join_context(self)
        self.reduce(value)

    def reduce(self, value: float | None = None) -> None:
        self.value = torch.full((1,), value or 0.0)
        torch.distributed.all_reduce(self.value)
        self.calls += 1

    def join_hook(self, **kwargs: Any) -> JoinHook:
        average = self

        class Hook(JoinHook):
            def main_hook(self) -> None:
                average.reduce()

            def post_hook(self, is_last_joiner: bool) -> None:
                average.last = [is_last_joiner, kwargs]

        return Hook()

    @property
    def join_device(self) -> torch.device:
        return torch.device("cpu")

    @property
    def join_process_group(self) -> Any:
        return torch.distributed.group.WORLD


def _own_joinable(rank: int, world_size: int) -> Any:
    """Called in every second iteration only, which PyTorch's Join cannot follow; and by itself, in both Joins."""
    counts = (7, 4, 2)
    seen = []
    for way in WAYS:
        ddp, average = wrap(MLP.model(), **MLP.ddp_options()), _Average()
        with joined([average, ddp], list(range(counts[rank])), way, colour="green") as numbers:
            for number in numbers:
                mean_squared_error(ddp, MLP.batch(number, rank)).backward()
                if number % 2:
                    average.step(1.0)
        seen.append((average.calls, average.value.item(), average.last))
    for kind in (Join, TorchJoin):
        average = _Average()
        with kind([average], colour="green"):
            for _ in range(counts[rank]):
                average.step(1.0)
        seen.append((average.calls, average.value.item(), average.last))
    return seen


def test_a_joinable_of_ones_own_in_both_joins() -> None:
    results = run_ranks(_own_joinable, 3)
    for rank, seen in enumerate(results):
        last = [rank == 0, {"colour": "green"}]
        assert seen[:4] == [(3, 1.0, last)] * 4
        assert seen[4:] == [(7, 1.0, last)] * 2


def _ddps_own_join(rank: int, world_size: int) -> Any:
    ddp = wrap(MLP.model(), **MLP.ddp_options())
    optimizer = _make(ddp, "deferred")
    ended = []
    for join in (ddp.join, lambda: TorchJoin([ddp, optimizer])):
        with join():
            for step in range(4 - rank):
                overlapped_body(ddp, optimizer, MLP.batch(step, rank), 1.0)
        ended.append(left(ddp, optimizer))
        # Gradients that a joined rank left must not be added to.
        overlapped_body(ddp, optimizer, MLP.batch(9, rank), 1.0)
        ended.append(left(ddp, optimizer))
    with (
        pytest.raises(UnsupportedError, match=r"overlap\.Join"),
        ddp.join(divide_by_initial_world_size=False),
    ):
        ddp(*MLP.batch(0, rank).inputs)
    return ended


def test_ddps_own_join_with_a_chain() -> None:
    first, second = run_ranks(_ddps_own_join, 2)
    assert_parity(second, first, what="after ddp.join(), PyTorch's Join, and one more step each")


def _threads(rank: int, world_size: int, case: Case) -> Any:
    ddp = wrap(case.model(), **case.ddp_options())
    optimizer = _make(ddp, "interleaved")
    return [uneven(ddp, optimizer, case, rank, way, counts=(3, 0, 2, 5)) for way in WAYS]


def test_on_a_backend_without_connections_of_our_own() -> None:
    first, *others = run_threads(_threads, 4, MLP)
    for other in others:
        assert_parity(other, first, what="threads")
