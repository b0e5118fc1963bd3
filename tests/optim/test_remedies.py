"""What a message tells the user to do works where the message is shown.

Each row is a loop that is refused, and what the message names for it: another form for the same loop, or another loop.
The remedy is run in the same situation, and must give plain DDP's parameters bit for bit.
"""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from step_loops import ADAMW, SGD, registered, settle
from torch import nn
from torch.utils.checkpoint import checkpoint

from harness import on_ranks, wrap
from harness.models import MLP
from overlap import OverlapError, TrainingLoopError, ZeroRedundancyOptimizer, allreduce_hook, hook_with_zero_step

Loop = Callable[[Any, Any, int], None]

ZERO_WHOLE = "zero deferred behind a reducer"


def _loss(model: Any, rank: int, step: int) -> torch.Tensor:
    loss: torch.Tensor = model(*MLP.batch(step, rank).inputs).square().mean()
    return loss


def usual(ddp: Any, optimizer: Any, rank: int, *, before_step: Callable[[Any], None] = lambda ddp: None) -> None:
    for step in range(4):
        optimizer.zero_grad()
        _loss(ddp, rank, step).backward()
        before_step(ddp)
        optimizer.step()


def twice(ddp: Any, optimizer: Any, rank: int) -> None:
    for step in range(4):
        _loss(ddp, rank, 2 * step).backward()
        _loss(ddp, rank, 2 * step + 1).backward()
        optimizer.step()
        optimizer.zero_grad()


def backward_alone_in_no_sync(ddp: Any, optimizer: Any, rank: int) -> None:
    for step in range(8):
        loss = _loss(ddp, rank, step)
        with nullcontext() if step % 2 else ddp.no_sync():
            loss.backward()
        if step % 2:
            optimizer.step()
            optimizer.zero_grad()


def accumulated(ddp: Any, optimizer: Any, rank: int, *, synchronized: int = 1) -> None:
    """Two backwards a step, of which one is synchronized."""
    for step in range(8):
        with nullcontext() if step % 2 == synchronized else ddp.no_sync():
            _loss(ddp, rank, step).backward()
        if step % 2:
            optimizer.step()
            optimizer.zero_grad()


def local_last(ddp: Any, optimizer: Any, rank: int) -> None:
    accumulated(ddp, optimizer, rank, synchronized=0)


def regularized(ddp: Any, optimizer: Any, rank: int) -> None:
    def regularize(ddp: Any) -> None:
        sum((0.01 * parameter.square().sum() for parameter in ddp.parameters()), torch.zeros(())).backward()

    usual(ddp, optimizer, rank, before_step=regularize)


def scaled(ddp: Any, optimizer: Any, rank: int) -> None:
    @torch.no_grad()
    def halve(ddp: Any) -> None:
        for parameter in ddp.parameters():
            parameter.grad.mul_(0.5)

    usual(ddp, optimizer, rank, before_step=halve)


def discards(ddp: Any, optimizer: Any, rank: int) -> None:
    for step in range(4):
        _loss(ddp, rank, step).backward()
        if step != 1:
            optimizer.step()
        optimizer.zero_grad()


def discards_within_skip(ddp: Any, optimizer: Any, rank: int) -> None:
    for step in range(4):
        skips = step == 1 and hasattr(optimizer, "skip_update")
        with optimizer.skip_update() if skips else nullcontext():
            _loss(ddp, rank, step).backward()
        if step != 1:
            optimizer.step()
        optimizer.zero_grad()


def bypasses(ddp: Any, optimizer: Any, rank: int) -> None:
    for step in range(4):
        optimizer.zero_grad()
        _loss(ddp.module, rank, step).backward()
        optimizer.step()


def bypasses_after_step(ddp: Any, optimizer: Any, rank: int) -> None:
    usual(ddp, optimizer, rank)
    _loss(ddp.module, rank, 4).backward()
    optimizer.step()


def never_clears(ddp: Any, optimizer: Any, rank: int) -> None:
    for step in range(4):
        _loss(ddp, rank, step).backward()


def clips(ddp: Any, optimizer: Any, rank: int) -> None:
    usual(ddp, optimizer, rank, before_step=lambda ddp: torch.nn.utils.clip_grad_norm_(ddp.parameters(), 0.01))


def clips_by_zero(ddp: Any, optimizer: Any, rank: int) -> None:
    if hasattr(optimizer, "clip_grad_norm_"):
        usual(ddp, optimizer, rank, before_step=lambda ddp: optimizer.clip_grad_norm_(0.01))
    else:
        clips(ddp, optimizer, rank)


def steps_twice(ddp: Any, optimizer: Any, rank: int) -> None:
    for step in range(4):
        _loss(ddp, rank, step).backward()
        optimizer.step()
        optimizer.step()


def lowers_rate(ddp: Any, optimizer: Any, rank: int) -> None:
    for step in range(4):
        optimizer.zero_grad()
        _loss(ddp, rank, step).backward()
        optimizer.param_groups[0]["lr"] *= 0.5
        optimizer.step()


def moves(ddp: Any, optimizer: Any, rank: int, *, steps_first: bool = False) -> None:
    """The whole model moves, or nothing of it."""
    usual(ddp, optimizer, rank)
    optimizer.zero_grad()
    _loss(ddp, rank, 4).backward()
    if steps_first:
        optimizer.step()
    settle(optimizer)
    ddp.module.to(torch.bfloat16).to(torch.float64)
    assert {each.dtype for p in ddp.parameters() for each in (p, p if p.grad is None else p.grad)} == {torch.float64}
    if not steps_first:
        optimizer.step()


def moves_later(ddp: Any, optimizer: Any, rank: int) -> None:
    moves(ddp, optimizer, rank, steps_first=True)


def another_steps(ddp: Any, optimizer: Any, rank: int) -> None:
    other = ADAMW(ddp.parameters())
    for step in range(4):
        optimizer.zero_grad()
        _loss(ddp, rank, step).backward()
        other.step()


@dataclass(frozen=True)
class Row:
    """In ``form``, ``loop`` is refused with a message in which ``says`` is; ``remedy`` is right in ``with_form``."""

    form: str
    loop: Loop
    says: str
    with_form: str | None = None
    remedy: Loop | None = None


NO_SYNC = "under ddp.no_sync()"

ROWS = [
    Row("interleaved", twice, "use Step(optimizer, deferred=True), whose backwards add up", "deferred"),
    Row("interleaved", twice, NO_SYNC, remedy=accumulated),
    Row("zero", twice, "use chain(AllReduce(), ZeroStep(zero, deferred=True)), whose backwards add up", ZERO_WHOLE),
    Row("zero", twice, NO_SYNC, remedy=accumulated),
    Row("zero deferred", twice, "use chain(AllReduce(), ZeroStep(zero, deferred=True))", ZERO_WHOLE),
    Row("zero deferred", backward_alone_in_no_sync, "or use chain(AllReduce(), ZeroStep(zero, def", ZERO_WHOLE),
    Row("zero deferred", backward_alone_in_no_sync, NO_SYNC, remedy=accumulated),
    Row("zero", regularized, "or use chain(AllReduce(), ZeroStep(zero, deferred=True))", ZERO_WHOLE),
    Row("interleaved", regularized, "or use Step(optimizer, deferred=True)", "deferred"),
    Row("interleaved", local_last, "outside of ddp.no_sync()", remedy=accumulated),
    Row(ZERO_WHOLE, local_last, "the last forward and backward of a step outside of ddp.no_sync()", remedy=accumulated),
    Row("zero alone", local_last, "last forward and backward of a step outside of ddp.no_sync()", remedy=accumulated),
    Row("zero alone", bypasses, "by ddp(x), not model(x)", remedy=usual),
    Row("interleaved", scaled, "Use Step(optimizer, deferred=True), which is exact for any edit", "deferred"),
    Row("zero", scaled, "use chain(AllReduce(), ZeroStep(zero, deferred=True))", ZERO_WHOLE),
    Row("zero behind a reducer", scaled, "Use chain(AllReduce(), ZeroStep(zero, deferred=True)), which", ZERO_WHOLE),
    Row("zero deferred", scaled, "after backward: use chain(AllReduce(), ZeroStep(zero, deferred=True))", ZERO_WHOLE),
    Row("released", scaled, "use Step(optimizer, deferred=True)", "deferred"),
    Row("interleaved", discards, "use Step(optimizer, deferred=True)", "deferred"),
    Row("interleaved", discards, "`with optimizer.skip_update():`", remedy=discards_within_skip),
    Row("zero", discards, "use ZeroStep(zero, deferred=True)", "zero deferred"),
    Row("zero", discards, "`with zero.skip_update():`", remedy=discards_within_skip),
    Row("interleaved", bypasses, "call ddp(x), not model(x)", remedy=usual),
    Row("zero deferred", bypasses, "call ddp(x), not model(x)", remedy=usual),
    Row("interleaved", steps_twice, "first run a forward, by ddp(x) and not model(x)", remedy=usual),
    Row("interleaved", lowers_rate, "use Step(optimizer, deferred=True)", "deferred"),
    Row("zero", lowers_rate, "use ZeroStep(zero, deferred=True)", "zero deferred"),
    *[Row(form, bypasses_after_step, "ddp(x)", remedy=usual) for form in ("interleaved", "deferred", "zero")],
    Row("hook", never_clears, "call zero_grad() before each backward", remedy=usual),
    Row("zero", clips, "use chain(AllReduce(), ZeroStep(zero, deferred=True))", ZERO_WHOLE),
    Row("zero deferred", clips, "zero.clip_grad_norm_(max_norm) with ZeroStep(zero, def", ZERO_WHOLE, clips_by_zero),
    *[
        Row(form, moves, "0.weight was moved to another dtype, device or memory format", remedy=moves_later)
        for form in ("interleaved", "released", "zero", "zero in forward")
    ],
    *[
        Row(
            form,
            another_steps,
            "AdamW uses the gradient of 0.weight, which the SGD of the chain applies, too, so both "
            "would update it: leave that call out and call ",
            remedy=usual,
        )
        for form in ("interleaved", "zero", "released")
    ],
    *[
        Row(form, another_steps, "leave that call out, or give", remedy=usual)
        for form in ("automatic", "zero automatic")
    ],
]


class _Stepless:
    """What a loop holds where backward does everything."""

    def __init__(self, optimizer: Any) -> None:
        self.zero_grad, self.param_groups = optimizer.zero_grad, optimizer.param_groups

    def step(self) -> None: ...


def _trained(form: str, loop: Loop, rank: int) -> list[torch.Tensor]:
    ddp = wrap(MLP.model(), **MLP.ddp_options(), gradient_as_bucket_view="released" in form)
    if form == "hook":
        optimizer = ZeroRedundancyOptimizer(ddp.parameters(), SGD.func, overlap_with_ddp=True, **SGD.keywords)
        ddp.register_comm_hook(None, hook_with_zero_step(allreduce_hook, ddp, optimizer))
    else:
        optimizer = registered(form, ddp) if form != "plain" else SGD(ddp.parameters())
    loop(ddp, _Stepless(optimizer) if "automatic" in form or form == "hook" else optimizer, rank)
    settle(optimizer)
    return [parameter.detach().clone() for parameter in ddp.parameters()]


@on_ranks(2)
def test_what_a_message_names_is_exact_in_its_place(rank: int, world_size: int) -> None:
    for row in ROWS:
        cell = f"{row.form}, {row.loop.__name__}, {row.says}"
        with pytest.raises(OverlapError) as refusal:
            _trained(row.form, row.loop, rank)
        assert row.says in str(refusal.value), f"{cell}: {refusal.value}"
        remedy = row.remedy or row.loop
        expected, got = _trained("plain", remedy, rank), _trained(row.with_form or row.form, remedy, rank)
        assert all(map(torch.equal, expected, got)), cell


class _Checkpointed(nn.Module):
    """Checkpoints its layers; the output layer may be tied to the embedding."""

    def __init__(self, *, tied: bool, use_reentrant: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.middle = nn.Embedding(20, 16), nn.Linear(16, 16)
        self.head = nn.Linear(16, 20, bias=False)
        self.use_reentrant = use_reentrant
        if tied:
            self.head.weight = self.embedding.weight
        else:
            self.embedding.requires_grad_(False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(tokens)
        hidden = hidden if hidden.requires_grad else hidden.requires_grad_()
        for layer in (self.middle, self.head):
            hidden = checkpoint(layer, hidden, use_reentrant=self.use_reentrant)
        return hidden


def _checkpointed(form: str, rank: int, *, tied: bool = True, use_reentrant: bool = True, **options: Any) -> Any:
    ddp = wrap(_Checkpointed(tied=tied, use_reentrant=use_reentrant), **options)
    optimizer = SGD(ddp.parameters()) if form == "plain" else registered(form, ddp)
    for step in range(4):
        tokens = torch.randint(0, 20, (4, 6), generator=torch.Generator().manual_seed(10 * step + rank))
        ddp.zero_grad()
        nn.functional.cross_entropy(ddp(tokens).flatten(0, 1), tokens.flatten()).backward()
        if "automatic" not in form:
            optimizer.step()
    settle(optimizer)
    return [parameter.detach().clone() for parameter in ddp.parameters()]


@on_ranks(2)
def test_a_gradient_that_comes_after_a_reentrant_checkpoint_is_refused_and_both_remedies_are_exact(rank: int) -> None:
    remedies: list[dict[str, Any]] = [{"use_reentrant": False}, {"static_graph": True}, {"tied": False}]
    for form in ("interleaved", "automatic", "deferred", "zero", "zero deferred", ZERO_WHOLE):
        with pytest.raises(
            TrainingLoopError, match=r"embedding.weight gets another .*use_reentrant=False.*static_graph"
        ):
            _checkpointed(form, rank)
        for remedy in remedies:
            expected, got = _checkpointed("plain", rank, **remedy), _checkpointed(form, rank, **remedy)
            assert all(map(torch.equal, expected, got)), (form, remedy)
