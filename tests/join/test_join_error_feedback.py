"""What a stage had kept when its rank ran out is sent on: what was sent and what is kept makes up all gradients."""

import copy
from typing import Any

import torch
from join_loops import joined

from harness import assert_parity, run_ranks, wrap
from harness.models import MLP, mean_squared_error
from overlap import Int4, PowerSGD, Quantize, Stage, chain
from overlap.hooks.stage import Role

_BATCHES = (6, 2)


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
    "PowerSGD": (
        lambda: PowerSGD(rank=1, start_step=0, min_compression_rate=1),
        lambda stage: stage.state_dict()["residuals"],
    ),
    "Quantize": (
        lambda: Quantize(Int4(), error_feedback=True),
        # Of the mean over two ranks.
        lambda stage: {name: 2 * error for name, error in stage.state_dict()["error"].items()},
    ),
}


def _train(rank: int, feedback: str) -> Any:
    """The sum of this rank's gradients, what it keeps at the end, what was sent, and what it kept when it ran out."""
    make, kept_in = FEEDBACK[feedback]
    ddp = wrap(MLP.model(), **MLP.ddp_options())
    alone = copy.deepcopy(ddp.module)
    stage, sums = make(), _Sent()
    chain(stage, sums).register(ddp)
    total = {name: torch.zeros_like(parameter) for name, parameter in alone.named_parameters()}
    with joined([ddp], [MLP.batch(step, rank) for step in range(_BATCHES[rank])], "batches") as batches:
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
    return total, kept, sums.sent, kept_when_leaving


def _all(rank: int, world_size: int) -> dict[str, Any]:
    return {feedback: _train(rank, feedback) for feedback in FEEDBACK}


def test_what_a_joined_rank_had_kept_is_sent_on() -> None:
    first, second = run_ranks(_all, 2)
    for feedback in FEEDBACK:
        (total0, kept0, sent, _), (total1, kept1, sent1, kept_when_leaving) = first[feedback], second[feedback]
        assert_parity(sent1, sent, what=f"what every rank got of {feedback}")
        for name in sent:
            torch.testing.assert_close(
                2 * sent[name] + kept0[name] + kept1[name], total0[name] + total1[name], rtol=1e-4, atol=1e-5
            )
        # In a quantized sum the rank that owns a part keeps what the sum of all ranks left out.
        if feedback != "Quantize":
            assert any(kept.norm() > 2 * kept1[name].norm() for name, kept in kept_when_leaving.items())
