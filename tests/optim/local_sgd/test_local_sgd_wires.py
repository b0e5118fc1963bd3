"""Local SGD whose averages go through a wire, beside averages by hand."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from local_loops import local, plain, run, sgd, values_of
from local_wires import ByHand, gathered, sent_bytes
from torch import nn

from harness import assert_parity, run_ranks, wrap
from harness.models import BATCH_NORM, MLP
from overlap import BFloat16, Float8, Int4, Int8, OverlappedOptimizer, Step, TopK
from overlap.optim.local_sgd import LocalSGD
from overlap.optim.local_sgd.model_tensors import into_fragments

PERIOD, STEPS = 3, 14
OUTER = functools.partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True)
OPTIONS: dict[str, dict[str, Any]] = {
    "int8": {"wire": Int8()},
    "bfloat16 in 3 fragments": {"wire": BFloat16(), "fragments": 3},
    "float8": {"wire": Float8(), "error_feedback": True},
    "top 5 %": {"wire": TopK(0.05, chunk=64), "error_feedback": True, "outer": OUTER},
    "int4 with feedback": {"wire": Int4(chunk=64), "error_feedback": True},
    "overlapped": {"wire": Int4(), "error_feedback": True, "overlap": 2},
    "DiLoCo": {"wire": Int4(), "error_feedback": True, "outer": OUTER},
    "streaming DiLoCo": {"wire": Int4(), "error_feedback": True, "outer": OUTER, "fragments": 2, "overlap": 1},
}


def assert_equal_ranks(model: nn.Module, what: str) -> None:
    flat = torch.cat([value.double().flatten() for value in values_of(model).values()])
    for other in gathered(flat):
        assert_parity(other, flat, what=f"{what}: ranks")


def _by_hand(rank: int, world_size: int) -> None:
    parameters = {name: p.detach() for name, p in MLP.model().named_parameters()}
    for name, options in OPTIONS.items():
        for start_step in (0, 2) if (world_size, name) == (2, "DiLoCo") else (0,):
            before = plain(MLP, rank, steps=start_step, start_step=start_step, after_step=lambda *_: None)
            reference = ByHand(
                before[-1] if before else parameters,
                period=PERIOD,
                **{**options, "fragments": into_fragments(parameters, options.get("fragments", 1))},
            )
            expected = plain(MLP, rank, steps=STEPS, start_step=start_step, after_step=reference.after_step)
            build = functools.partial(LocalSGD, period=PERIOD, start_step=start_step, **options)
            candidate, made, ddp = local(MLP, rank, steps=STEPS, build=build)
            assert_parity(candidate, expected, what=f"{name}, from step {start_step}")
            errors = made.state_dict()["local_sgd"]["wire"].get("error", {})
            assert reference.round and errors.keys() == (reference.errors or {}).keys()
            if reference.errors:
                assert_parity(errors, reference.errors, what=f"{name}: what was left out")
            made.synchronize()
            assert_equal_ranks(ddp.module, f"{name}, synchronized")


@pytest.mark.parametrize("world_size", [2, 3])
def test_what_is_sent_is_the_change_since_the_last_average(world_size: int) -> None:
    run_ranks(_by_hand, world_size)


def _forms(rank: int, world_size: int) -> None:
    """Ranks are equal after every average, whatever else is averaged and however the update is made."""

    def with_update(ddp: Any, optimizer: Any) -> LocalSGD:
        wrapped = OverlappedOptimizer(optimizer)
        return LocalSGD(ddp, wrapped, PERIOD, 0, update=Step(wrapped), wire=Int4())

    build = functools.partial(LocalSGD, period=PERIOD, start_step=0, wire=Int4(rounding="stochastic"))
    forms: dict[str, Any] = {
        "stochastic rounding": functools.partial(build, error_feedback=True),
        "optimizer state": functools.partial(build, optimizer_state="average"),
        "subgroup": functools.partial(build, subgroup="machine"),
        "update in backward": with_update,
    }
    for name, form in forms.items():
        ddp = wrap(BATCH_NORM.model(), **BATCH_NORM.ddp_options())
        made = form(ddp, sgd(ddp.parameters()))
        for step in range(2 * PERIOD):
            run(BATCH_NORM, rank, [step], ddp, made, zero_grad=name != "update in backward")
            if (step + 1) % PERIOD == 0:
                assert_equal_ranks(ddp.module, f"{name}, after step {step}")
        if name == "optimizer state":
            momenta = torch.cat([made.state[p]["momentum_buffer"].flatten() for p in ddp.parameters()])
            for other in gathered(momenta):
                assert_parity(other, momenta, what="momenta, averaged in full precision")


def test_ranks_are_equal_after_every_average() -> None:
    run_ranks(_forms, 2)


def _hierarchy(rank: int, world_size: int) -> None:
    """Pairs average exactly every 2 steps, and every 4 steps pairs exchange changes through the wire."""
    build = functools.partial(LocalSGD, period={2: 2, 4: 4}, start_step=0, wire=Int4(), error_feedback=True)
    for overlap in (0, 1):
        ddp = wrap(MLP.model(), **MLP.ddp_options())
        made = build(ddp, sgd(ddp.parameters()), overlap=overlap)
        reference = LocalSGD(other := wrap(MLP.model(), **MLP.ddp_options()), sgd(other.parameters()), {2: 2, 4: 4}, 0)
        run(MLP, rank, range(2), other, reference)
        run(MLP, rank, range(2 + overlap), ddp, made)
        if not overlap:
            assert_parity(values_of(ddp.module), values_of(other.module), what="pairs average exactly")
            run(MLP, rank, [2, 3], other, reference)
        with sent_bytes() as sent:
            run(MLP, rank, range(2 + overlap, 4 + overlap), ddp, made)
        made.synchronizer.apply_pending()
        assert made.synchronizer.anchors is not None
        anchors = torch.cat([value.flatten() for value in made.synchronizer.anchors.values.values()])
        for one in gathered(anchors):
            assert_parity(one, anchors, what="the average of all ranks")
        numel = anchors.numel()
        # Each of the pair's two ranks sends half of the changes to the other pair: half of that half, twice.
        between = 2 * Int4().codec(-(-numel // 4)).message_bytes
        assert sent["send_recv"] == between // 2 and sent["reduce_scatter"] == sent["all_gather"] - between // 2
        if not overlap:
            assert_equal_ranks(ddp.module, "after the average of all ranks")
            exact = torch.cat([value.flatten() for value in values_of(other.module).values()])
            start = torch.cat([p.detach().flatten() for p in MLP.model().parameters()])
            error, change = (anchors - exact).norm(), (exact - start).norm()
            assert 0 < error < 0.5 * change, "int4 rounds changes, not parameters"
            state = made.state_dict()["local_sgd"]["wire"]["error"]
            left_out = sum(gathered(torch.cat([error.flatten() for error in state.values()])))
            assert_parity(
                anchors + left_out, exact, what="what arrived and what was left out", exact=False, rtol=1e-5, atol=1e-6,
                reason="sums in another order",
            )  # fmt: skip


def test_a_hierarchy_uses_the_wire_between_its_largest_groups() -> None:
    run_ranks(_hierarchy, 4)


def _bytes(rank: int, world_size: int) -> None:
    """4-bit averages send an eighth of full precision, and the scales."""
    counts = {}
    for name, options in {"fp32": {}, "int8": {"wire": Int8()}, "int4": {"wire": Int4()}}.items():
        ddp = wrap(nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 256)))
        made = LocalSGD(ddp, sgd(ddp.parameters()), 1, 0, **options)  # type: ignore[arg-type]
        ddp(torch.full((2, 256), 1.0 + rank)).sum().backward()
        with sent_bytes() as sent:
            made.step()
        counts[name] = sum(sent.values())
        numel = sum(p.numel() for p in ddp.parameters())
        if options:
            message_bytes = options["wire"].codec(-(-numel // world_size)).message_bytes
            assert sent == dict.fromkeys(("send_recv", "all_gather"), (world_size - 1) * message_bytes), name
    assert counts["int8"] / counts["fp32"] == pytest.approx(0.252, abs=0.003)
    assert counts["int4"] / counts["fp32"] == pytest.approx(0.127, abs=0.003)


@pytest.mark.parametrize("world_size", [2, 3])
def test_bytes_sent(world_size: int) -> None:
    run_ranks(_bytes, world_size)


def _one_rank(rank: int, world_size: int) -> None:
    plain_run, _, _ = local(MLP, rank, steps=6, build=functools.partial(LocalSGD, period=2, start_step=0))
    build = functools.partial(LocalSGD, period=2, start_step=0, wire=Int4(), error_feedback=True)
    wired, made, _ = local(MLP, rank, steps=6, build=build)
    assert_parity(wired, plain_run, what="one rank: nothing is rounded")
    assert dist.get_world_size() == 1 and made.synchronizer.rounds == 3


def test_one_rank_rounds_nothing() -> None:
    run_ranks(_one_rank, 1)
