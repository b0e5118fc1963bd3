"""Three ranks, then two, then four, then one: what each part of a run carries over, through files and DCP.

The rule of each memory is tested beside its stage.
"""

import copy
import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import overlap
from harness import assert_parity, on_ranks, plain_step, run_ranks, wrap
from harness.models import MLP, mean_squared_error
from overlap import (
    Bucket,
    Cast,
    ConfigurationError,
    Int4,
    LocalSGD,
    OverlappedOptimizer,
    PowerSGD,
    Quantize,
    Step,
    Transform,
    ZeroRedundancyOptimizer,
    ZeroStep,
    chain,
    route,
)
from overlap.hooks import PostLocal, PostLocalSGDState

SIZES = (3, 2, 4, 1)
STEPS = 2  # Of each number of ranks.
ADAMW: dict[str, Any] = {"lr": 0.01, "weight_decay": 0.1}
OUTER = functools.partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True)


def _zero(ddp: Any, *stages: Any, master_dtype: Any = None, **stage: Any) -> ZeroRedundancyOptimizer:
    optimizer = ZeroRedundancyOptimizer(
        ddp.parameters(), torch.optim.AdamW, overlap_with_ddp=True, master_dtype=master_dtype, **ADAMW
    )
    chain(*stages, ZeroStep(optimizer, **stage)).register(ddp)
    return optimizer


def _step(ddp: Any, reducer: Callable[[], Any]) -> OverlappedOptimizer:
    optimizer = OverlappedOptimizer(torch.optim.AdamW(ddp.parameters(), **ADAMW))
    chain(reducer(), Step(optimizer)).register(ddp)
    return optimizer


def _powersgd() -> PowerSGD:
    return PowerSGD(rank=1, min_compression_rate=1)


def _feedback() -> Quantize:
    return Quantize(Int4(), error_feedback=True)


def _routed() -> Any:
    return route({"*.bias": _feedback(), "*": _powersgd()})


def _local(ddp: Any, period: int = 1) -> LocalSGD:
    optimizer = torch.optim.AdamW(ddp.parameters(), **ADAMW)
    options: dict[str, Any] = {"outer": OUTER, "wire": Int4(), "error_feedback": True, "reducer": _powersgd()}
    return LocalSGD(ddp, optimizer, period=period, start_step=1, **options)


EXACT = "gathered in backward"
"""The step after a resume is plain DDP's with the plain optimizer, bit for bit."""
FORMS: dict[str, Callable[[Any], Any]] = {
    EXACT: _zero,
    "Quantize": functools.partial(_step, reducer=lambda: Cast(torch.bfloat16, _feedback())),
    "PowerSGD": functools.partial(_step, reducer=_powersgd),
    "route": lambda ddp: _zero(ddp, _routed(), gather="forward"),
    "masters": lambda ddp: _zero(ddp, master_dtype=torch.float32, gather_wire=Int4()),
    "LocalSGD": _local,
}


def _made(form: str, seed: int = 0) -> tuple[Any, Any]:
    ddp = wrap(MLP.model(seed=seed), **MLP.ddp_options())
    return ddp, FORMS[form](ddp)


def _train(ddp: Any, optimizer: Any, steps: range, rank: int) -> None:
    for step in steps:
        plain_step(ddp, optimizer, MLP.batch(step, rank), mean_squared_error)


def _whole(optimizer: Any) -> Any:
    if not isinstance(optimizer, ZeroRedundancyOptimizer):
        return None
    optimizer.consolidate_state_dict(to=None)
    return copy.deepcopy(optimizer.state_dict())


def _leg(rank: int, ranks: int, folder: Path, begin: int) -> None:
    os.fsync = lambda descriptor: None  # It takes long, and is for when the machine fails.
    for form in FORMS:
        _leg_of(form, rank, folder / form, begin)


def _leg_of(form: str, rank: int, folder: Path, begin: int) -> None:
    ddp, optimizer = _made(form, seed=begin)
    start, end = begin, begin + STEPS
    if begin:
        _check_resumed(form, ddp, optimizer, folder / f"{begin}", rank)
        if form == EXACT:
            _check_next_step(ddp, optimizer, begin)
            start += 1
    # All ranks have the same batches, so that sums do not depend on their order.
    _train(ddp, optimizer, range(start, end), 0 if form == EXACT else rank)
    if form == "LocalSGD":
        optimizer.synchronize()
    state = {"run": overlap.state_dict(ddp, optimizer), "whole": _whole(optimizer)}
    folder.mkdir(exist_ok=True)
    overlap.save(folder / f"{end}", ddp, optimizer, step=end, rank=rank)
    torch.save(state, folder / f"{end}-{rank}.pt")


def _check_resumed(form: str, ddp: Any, optimizer: Any, where: Path, rank: int) -> None:
    saved = [torch.load(path) for path in where.parent.glob(f"{where.name}-*.pt")]
    saved.sort(key=lambda of_rank: of_rank["run"]["rank"])
    states = [one["run"] for one in saved]
    overlap.load_state_dict(ddp, optimizer, states)
    now = overlap.state_dict(ddp, optimizer)
    old = states[rank % len(states)]
    assert_parity(now["model"], old["model"], what=f"{form}, the model")
    if isinstance(optimizer, ZeroRedundancyOptimizer):
        assert_parity(_whole(optimizer), saved[0]["whole"], what=f"{form}, the optimizer")
    elif form != "LocalSGD":
        assert_parity(now["optimizer"], old["optimizer"], what=f"{form}, the optimizer")
    else:
        own, was = now["optimizer"][0]["state"], old["optimizer"][0]["state"]
        assert_parity(own["state"], was["state"], what="the inner optimizer")
        assert_parity(own["local_sgd"]["outer"], was["local_sgd"]["outer"], what="the outer optimizer")
    # In one folder of all ranks it is the same.
    other, its = _made(form, seed=9)
    assert overlap.load(where, other, its) == {"step": int(where.name)}, "what all old ranks had alike"
    assert_parity(overlap.state_dict(other, its), now, what=f"{form}, of one folder")


def _check_next_step(ddp: Any, zero: ZeroRedundancyOptimizer, step: int) -> None:
    plain = wrap(MLP.model(), **MLP.ddp_options())
    plain.module.load_state_dict(ddp.module.state_dict())
    optimizer = torch.optim.AdamW(plain.parameters(), **ADAMW)
    optimizer.load_state_dict(_whole(zero))
    for one, its in ((plain, optimizer), (ddp, zero)):
        _train(one, its, range(step, step + 1), 0)
    assert_parity(ddp.module.state_dict(), plain.module.state_dict(), what="the next step")
    assert_parity(_whole(zero)["state"], optimizer.state_dict()["state"], what="the next step's state")


@pytest.mark.timeout(300)
def test_a_run_continues_with_2_ranks_then_with_4_and_then_with_1(tmp_path: Path) -> None:
    for leg, ranks in enumerate(SIZES):
        run_ranks(_leg, ranks, tmp_path, STEPS * leg, timeout_s=120, group_timeout_s=60)


def _alone(form: str, group: dist.ProcessGroup, **model: Any) -> tuple[Any, Any]:
    """On one rank."""
    ddp = wrap(MLP.model(**model), process_group=group, **MLP.ddp_options())
    return ddp, MORE[form](ddp)


class _OfItsRank(Transform):
    """Remembers something else on each rank."""

    async def __call__(self, bucket: Bucket) -> None: ...

    def state_dict(self) -> dict[str, Any]:
        return {"rank": dist.get_rank()}


def _remembering(ddp: Any) -> Any:
    optimizer = OverlappedOptimizer(torch.optim.AdamW(ddp.parameters(), **ADAMW))
    chain(_OfItsRank(), _feedback(), Step(optimizer)).register(ddp)
    return optimizer


MORE: dict[str, Callable[[Any], Any]] = {
    "Quantize": functools.partial(_step, reducer=_feedback),
    "LocalSGD": functools.partial(_local, period=4),
    "of its rank": _remembering,
}


def _all_states(ddp: Any, optimizer: Any) -> list[Any]:
    states: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(states, overlap.state_dict(ddp, optimizer))
    return states


@on_ranks(2)
def test_states_that_do_not_belong_together_or_have_no_rule_are_refused_by_name(rank: int, world_size: int) -> None:
    groups = [dist.new_group([one]) for one in range(world_size)]

    def states_of(form: str, steps: int) -> list[Any]:
        ddp = wrap(MLP.model(), **MLP.ddp_options())
        optimizer = MORE[form](ddp)
        _train(ddp, optimizer, range(steps), rank)
        return _all_states(ddp, optimizer)

    first, second = states_of("Quantize", 3)
    (later, _) = states_of("Quantize", 4)
    edited = copy.deepcopy(second)
    edited["model"]["4.weight"][3, 3] += 1
    others = copy.deepcopy(second)
    others["stages"]["classes"] = [*others["stages"]["classes"][:-1], "Log"]
    ddp, optimizer = _alone("Quantize", groups[rank], seed=5)
    before = overlap.state_dict(ddp, optimizer)
    for states, message in (
        ([first], r"ranks \[0\] of 2: give those of all ranks"),
        ([first, first], r"ranks \[0, 0\] of 2"),
        ([first, second, second], r"ranks \[0, 1, 1\] of 2"),
        ([], "of ranks .* of none"),
        ([first, edited], "had different models: 4.weight of rank 1 is not that of rank 0"),
        ([later, second], "had different models"),
        ([first, others], "saved with Chain > Quantize > Log registered, and here"),
        ([first, {"model": {}}], "not what overlap.state_dict"),
    ):
        with pytest.raises(ConfigurationError, match=message):
            overlap.load_state_dict(ddp, optimizer, states)
    assert_parity(overlap.state_dict(ddp, optimizer), before, what="after states that were refused")
    overlap.load_state_dict(ddp, optimizer, [second, first])  # In any order.
    for form, steps, message in (
        ("of its rank", 2, r"_OfItsRank.* remembers other things on each rank, and has no rule for another number"),
        ("LocalSGD", 2, r"old rank 0 was saved in the middle of a round.*local.synchronize\(\)"),
    ):
        states = states_of(form, steps)
        with pytest.raises(ConfigurationError, match=message):
            overlap.load_state_dict(*_alone(form, groups[rank]), states)
    # Of another model, whose parameters have the same names and as many elements.
    ddp = wrap(torch.nn.Linear(16, 16))
    states = _all_states(ddp, _zero(ddp))
    flat = torch.nn.Module()
    flat.weight, flat.bias = torch.nn.Parameter(torch.zeros(256)), torch.nn.Parameter(torch.zeros(16))
    other = wrap(flat, process_group=groups[rank])
    zero = ZeroRedundancyOptimizer(other.parameters(), torch.optim.AdamW, groups[rank], **ADAMW)
    chain(ZeroStep(zero)).register(other)
    with pytest.raises(ConfigurationError, match=r"another model's: weight is \(16, 16\) .* and \(256,\)"):
        overlap.load_state_dict(other, zero, states)


def _left_out(old: int) -> dict[str, Any]:
    return {"error": {"weight": torch.tensor([1.0 + old])}, "rank": old, "ranks": 3}


def test_stages_inside_of_others_have_their_rules() -> None:
    stage = chain(PostLocal(PostLocalSGDState(None, None, 5), Cast(torch.bfloat16, _feedback())))
    states = [{"0": {"iter": 3, "0": {"0": _left_out(old)}}} for old in range(3)]
    made = stage.redistribute(states, rank=0, ranks=2)
    inner = {"error": {"weight": torch.tensor([4.0])}, "rank": 0, "ranks": 2}
    assert_parity(made, {"0": {"iter": 3, "0": {"0": inner}}}, what="of old ranks 0 and 2")
    before = [{"0": {"iter": 0}}] * 3
    assert stage.redistribute(before, rank=0, ranks=2) == before[0]  # Before the first pass.
    unknown = [{**state, "7": {"kept": 1}} for state in states]
    assert stage.redistribute(unknown, rank=1, ranks=2)["7"] == {"kept": 1}  # To be refused when it is loaded.
