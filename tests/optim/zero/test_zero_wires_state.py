"""True weights and errors: saved and resumed, after edits, failures and passes that are not finite."""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from test_zero_wires import BOTH, DEFERRED, FORWARD, WHOLE, check, train
from torch import nn
from wires_by_hand import ADAMW, ByHand, by_hand, made, parameters_of, true_of

import overlap
from harness import assert_parity, run_ranks, wrap
from harness.models import MLP, mean_squared_error
from overlap import (
    AllReduce,
    ConfigurationError,
    Int4,
    Int8,
    ReduceScatter,
    UnsupportedError,
    ZeroRedundancyOptimizer,
    ZeroStep,
    chain,
)
from overlap.hooks.wires.numbers import ChunkCodec

STOCHASTIC: dict[str, Any] = {
    "reduce_wire": Int4(rounding="stochastic"),
    "gather_wire": Int8(rounding="stochastic"),
    "error_feedback": True,
}
# The arguments of the stage, and of the optimizer.
RESUMED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "both": (BOTH, {}),
    "stochastic, in forward": (STOCHASTIC | FORWARD, {}),
    "gather, whole": ({"gather_wire": Int4()} | DEFERRED, WHOLE),
}


def _started(form: str, **model: Any) -> tuple[Any, Any, Any]:
    of_stage, options = RESUMED[form]
    # Its rounding depends on the buckets, which DDP keeps from its first pass on where it looks for unused parameters.
    ddp = wrap(MLP.model(**model), **MLP.ddp_options() | {"find_unused_parameters": True})
    return ddp, *made(ddp, form=of_stage, **options)[:2]


def _saved(rank: int, world_size: int, folder: Path) -> None:
    for form in RESUMED:
        ddp, zero, stage = _started(form)
        for step in range(6):
            if step == 3:
                zero.consolidate_state_dict(to=None)
                torch.save(overlap.state_dict(ddp, zero), folder / f"{form}-{rank}.pt")
                whole = {"model": ddp.module.state_dict(), "zero": zero.state_dict(), "stage": stage.state_dict()}
                torch.save(whole, folder / f"{form}-whole-{rank}.pt")
                dcp.save({"zero": zero.sharded_state_dict()}, checkpoint_id=folder / f"{form}-dcp")
            train(ddp, zero, MLP, rank, step, {})
        torch.save(overlap.state_dict(ddp, zero), folder / f"{form}-end-{rank}.pt")


def _of_rank(ddp: Any, zero: Any, stage: Any, folder: Path, form: str) -> None:
    overlap.load_state_dict(ddp, zero, torch.load(folder / f"{form}-{zero.rank}.pt", weights_only=True))


def _whole(ddp: Any, zero: Any, stage: Any, folder: Path, form: str) -> None:
    saved = torch.load(folder / f"{form}-whole-{zero.rank}.pt", weights_only=True)
    ddp.module.load_state_dict(saved["model"])
    zero.load_state_dict(saved["zero"])
    stage.load_state_dict(saved["stage"])


def _sharded(ddp: Any, zero: Any, stage: Any, folder: Path, form: str) -> None:
    saved = torch.load(folder / f"{form}-whole-{zero.rank}.pt", weights_only=True)
    ddp.module.load_state_dict(saved["model"])
    stage.load_state_dict(saved["stage"])
    zero.load_sharded(folder / f"{form}-dcp", key="zero")


def _resumed(rank: int, world_size: int, folder: Path) -> None:
    loads: list[Callable[..., None]] = [_of_rank, _whole, _sharded]
    for form, (of_stage, options) in RESUMED.items():
        for load in loads if form == "both" else loads[:1]:
            ddp, zero, stage = _started(form, seed=7)
            load(ddp, zero, stage, folder, form)
            for step in range(3, 6):
                train(ddp, zero, MLP, rank, step, {})
            end = torch.load(folder / f"{form}-end-{rank}.pt", weights_only=True)
            assert_parity(overlap.state_dict(ddp, zero), end, what=f"{form}, {load.__name__}")
        # Loaded before registering, the true weights wait for the stage.
        saved = torch.load(folder / f"{form}-whole-{rank}.pt", weights_only=True)
        model = MLP.model()
        model.load_state_dict(saved["model"])
        ddp = wrap(model, **MLP.ddp_options())
        zero = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.AdamW, **ADAMW, **options)
        zero.load_state_dict(saved["zero"])
        chain(ZeroStep(zero, **of_stage)).register(ddp)
        names = [name for name, _ in model.named_parameters()]
        for name, start, part in true_of(ddp, zero):
            true = saved["zero"]["state"][names.index(name)]["master_param"].view(-1)
            assert torch.equal(part, true[start : start + part.numel()]), f"{form}, {name}"
    plain = torch.optim.AdamW(MLP.model().parameters(), **ADAMW)
    plain.load_state_dict(saved["zero"])
    assert all(state["exp_avg"].any() for state in plain.state.values())


def test_a_run_that_resumes_goes_on_bit_for_bit(tmp_path: Path) -> None:
    run_ranks(_saved, 2, tmp_path)
    run_ranks(_resumed, 2, tmp_path)


def _other_ranks(rank: int, world_size: int, states: list[Mapping[str, Any]]) -> dict[str, Any]:
    ddp = wrap(MLP.model(), **MLP.ddp_options())
    zero, stage, _ = made(ddp, form=BOTH)
    if states:
        with pytest.raises(ConfigurationError, match=r"saved by rank 0 of 2.*ZeroStep.redistribute"):
            stage.load_state_dict(states[0])
        stage.load_state_dict(ZeroStep.redistribute(states, rank=rank, ranks=world_size))
    for step in range(2):
        train(ddp, zero, MLP, rank, step, {})
    state: dict[str, Any] = stage.state_dict()
    return state


def test_errors_are_redistributed_to_another_number_of_ranks() -> None:
    states = run_ranks(_other_ranks, 2, [])
    made_for = [ZeroStep.redistribute(states, rank=rank, ranks=3) for rank in range(3)]
    for name in states[0]["error"]:
        total = sum(state["error"][name] for state in states)
        assert torch.equal(total, sum(state["error"].get(name, 0) for state in made_for))
    run_ranks(_other_ranks, 3, states)


def _scaled(model: nn.Module) -> None:
    model[0].weight[:4].mul_(1.5)  # type: ignore[index]
    model[2].bias.zero_()  # type: ignore[union-attr]


def _by_data(model: nn.Module) -> None:
    model[4].weight.data[3:9] = 0.25  # type: ignore[index, union-attr]


def _replaced(model: nn.Module) -> None:
    model.load_state_dict(MLP.model(seed=3).state_dict())


def _edits(rank: int, world_size: int) -> None:
    for form, options in ((BOTH, {}), (BOTH | DEFERRED | FORWARD, WHOLE)):
        ddp = wrap(MLP.model(), **MLP.ddp_options())
        zero, stage, cuts = made(ddp, form=form, **options)
        reference = by_hand(MLP, world_size, ddp, zero, stage)

        def same(change: Callable[[nn.Module], None], ddp: Any = ddp, reference: ByHand = reference) -> None:
            with torch.no_grad():
                change(ddp.module)
            reference.edit(change)

        for step in range(7):
            train(ddp, zero, MLP, rank, step, form)
            reference.step(step, cuts.passes[step])
            if step == 1:
                same(_scaled)
            if step == 2:
                same(_by_data)
            if step == 3:
                # Weights are put aside for an evaluation, and brought back: nothing has changed.
                kept = copy.deepcopy(ddp.module.state_dict())
                _replaced(ddp.module)
                ddp.module.load_state_dict(kept)
            if step == 4:
                same(_replaced)
            if step == 5:
                # In other memory, with the same values.
                for parameter in ddp.parameters():
                    parameter.data = parameter.data.clone()
            if step in (1, 2, 4):
                # The true weights follow when the next pass begins.
                assert_parity(parameters_of(ddp), dict(reference.public), what=f"edited after step {step}")
                continue
            check(ddp, zero, stage, reference, what=f"{form}, step {step}")
        check(ddp, zero, stage, reference, what=f"{form}, after edits")


def test_the_true_weights_follow_edits_and_nothing_else() -> None:
    run_ranks(_edits, 2)


def _added(rank: int, world_size: int) -> None:
    ddp = wrap(MLP.model(), **MLP.ddp_options())
    named = dict(ddp.module.named_parameters())
    late = [p for name, p in named.items() if name.startswith("8")]
    early = [p for name, p in named.items() if not name.startswith("8")]
    zero, stage, cuts = made(ddp, form=BOTH, parameters=early)
    reference = by_hand(MLP, world_size, ddp, zero, stage)
    for step in range(5):
        if step == 2:
            zero.add_param_group({"params": late})
            whole = by_hand(MLP, world_size, ddp, zero, stage)
            new = {name: whole.true[name] for name in named if name.startswith("8")}
            reference.ranges = whole.ranges
            reference.true.update(new)
            reference.optimizer.add_param_group({"params": list(new.values())})
        train(ddp, zero, MLP, rank, step, BOTH)
        if step < 2:
            gradients = [reference.gradients(step, other, is_zero=False) for other in range(world_size)]
            means = {n: sum(g[n] for g in gradients) / world_size for n in named if n.startswith("8")}
            for name, mean in means.items():
                assert torch.equal(named[name].grad, mean), f"{name} is averaged in full"
        for parameter in late if step < 2 else []:
            parameter.grad = None
        reference.step(step, cuts.passes[step])
        check(ddp, zero, stage, reference, what=f"step {step}")


def test_parameters_outside_are_averaged_in_full_until_they_are_added() -> None:
    run_ranks(_added, 2)


def _not_applied(rank: int, world_size: int) -> None:
    form = BOTH | DEFERRED
    ddp = wrap(MLP.model(), **MLP.ddp_options())
    zero, stage, cuts = made(ddp, form=form)
    reference = by_hand(MLP, world_size, ddp, zero, stage)
    for step in range(2):
        train(ddp, zero, MLP, rank, step, form)
        reference.step(step, cuts.passes[step])

    def spoilt(gradient: torch.Tensor, element: int) -> torch.Tensor:
        gradient = gradient.clone()
        gradient.view(-1)[element] = math.inf
        return gradient

    # The first element belongs to one rank, the last to the other, and nobody else sees what comes of it.
    weight = ddp.module[0].weight
    ranges = zero.shards[id(weight)].ranges
    assert {owner for owner, (start, end) in enumerate(ranges) if start == 0 or end == weight.numel()} == {0, 1}
    for element in (0, -1):
        handle = weight.register_hook(functools.partial(spoilt, element=element)) if rank == 0 else None
        mean_squared_error(ddp, MLP.batch(2, rank)).backward()
        if handle is not None:
            handle.remove()
        zero.zero_grad()
        check(ddp, zero, stage, reference, what=f"after a pass whose element {element} is not finite on rank 0")
    intact = ChunkCodec.read

    def fail(*args: Any, **kwargs: Any) -> Any:
        raise ValueError("the codec broke")

    ChunkCodec.read = fail  # type: ignore[method-assign]
    with pytest.raises(ValueError, match="the codec broke"):
        mean_squared_error(ddp, MLP.batch(2, rank)).backward()
    ChunkCodec.read = intact  # type: ignore[method-assign]
    zero.zero_grad()
    check(ddp, zero, stage, reference, what="after a pass that failed")
    cuts.passes[2:] = []
    for step in range(2, 4):
        train(ddp, zero, MLP, rank, step, form)
        reference.step(step, cuts.passes[step])
        check(ddp, zero, stage, reference, what=f"step {step}")


def test_a_pass_that_is_not_finite_or_fails_changes_no_memory_on_any_rank() -> None:
    run_ranks(_not_applied, 2)


def _check_equal_on_all_ranks(ddp: Any) -> None:
    for name, value in parameters_of(ddp).items():
        other = value.clone()
        torch.distributed.broadcast(other, src=0)
        assert torch.equal(other, value), f"{name} on all ranks"


class _Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 3, dtype=torch.complex64))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return (inputs.to(torch.complex64) @ self.weight).abs()


def _refused(rank: int, world_size: int) -> None:
    def zero_of(ddp: Any, parameters: Any = None) -> Any:
        return ZeroRedundancyOptimizer(parameters or ddp.parameters(), torch.optim.SGD, lr=0.1)

    ddp = wrap(MLP.model(), **MLP.ddp_options())
    zero = zero_of(ddp)
    for form, message in {
        "reduce_wire is the class Int4: give one of its objects, Int4()": {"reduce_wire": Int4},
        "gather_wire is a Wire such as Int8(), or None, got": {"gather_wire": 8},
        "error_feedback is True or False, got 1": {"reduce_wire": Int4(), "error_feedback": 1},
        "reduce_wire is None: give one": {"error_feedback": True, "gather_wire": Int8()},
    }.items():
        with pytest.raises(ConfigurationError) as error:
            ZeroStep(zero, **message)  # type: ignore[arg-type]
        assert form in str(error.value)
    for reducer in (AllReduce(), ReduceScatter(zero)):
        with pytest.raises(ConfigurationError, match=r"reduces by itself.*leave that out, or use ZeroStep without"):
            chain(reducer, ZeroStep(zero, reduce_wire=Int4())).register(ddp)
    hook = overlap.as_hook(chain(ZeroStep(zero, reduce_wire=Int4(), error_feedback=True)))
    hooked = wrap(MLP.model(), **MLP.ddp_options())
    hooked.register_comm_hook(None, hook)
    with pytest.raises(ConfigurationError, match=r"names.*error_feedback=False"):
        mean_squared_error(hooked, MLP.batch(0, rank)).backward()
    complex_ = wrap(_Complex())
    with pytest.raises(UnsupportedError, match=r"is torch.complex64, and wires take real numbers"):
        chain(ZeroStep(zero_of(complex_), gather_wire=Int8())).register(complex_)
    several = wrap(MLP.model(), **MLP.ddp_options())
    parameters = list(several.parameters())
    first, second = zero_of(several, parameters[:4]), zero_of(several, parameters[4:])
    with pytest.raises(UnsupportedError, match="leave its reduce_wire out"):
        chain(ZeroStep(first, reduce_wire=Int4()), ZeroStep(second))
    chain(ZeroStep(first, gather_wire=Int4()), ZeroStep(second, gather_wire=Int8())).register(several)
    for step in range(3):
        mean_squared_error(several, MLP.batch(step, rank)).backward()
        first.step()
        second.step()
    _check_equal_on_all_ranks(several)


def test_what_wires_cannot_do_is_refused_before_anything_is_sent() -> None:
    run_ranks(_refused, 2)
