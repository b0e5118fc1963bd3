"""True weights and errors after edits, failures and passes that are not finite; tests/compositions resumes them."""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_zero_wires import BOTH, DEFERRED, FORWARD, WHOLE, check, train
from torch import nn
from wires_by_hand import ByHand, by_hand, made, parameters_of

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
from overlap.hooks.wires.formats import ChunkCodec


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
        "reduce_wire is a Wire such as Int8(), or None, got": {"reduce_wire": Int4},
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


def test_what_wires_cannot_do_is_refused_before_anything_is_sent() -> None:
    run_ranks(_refused, 2)
