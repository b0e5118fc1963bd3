"""Local SGD of several optimizers: Muon for matrices and AdamW for the rest, with DiLoCo (MuLoCo)."""

import functools
import io
from typing import Any

import pytest
import torch
from local_loops import local, plain, run, sgd
from local_wires import ByHand
from torch import nn

import overlap
from harness import assert_parity, on_ranks, play, wrap
from harness.models import MLP
from overlap import ConfigurationError, Int4, LocalSGD, UnsupportedError

OUTER = functools.partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True)
MULOCO = functools.partial(LocalSGD, period=3, start_step=0, wire=Int4(), error_feedback=True, outer=OUTER)


def muon_and_adamw(parameters: Any) -> list[torch.optim.Optimizer]:
    given = list(parameters)
    return [
        torch.optim.Muon([p for p in given if p.ndim == 2], lr=0.02),
        torch.optim.AdamW([p for p in given if p.ndim != 2], lr=0.01),
    ]


class _InTurn:
    """What a plain loop would do with them."""

    def __init__(self, parameters: Any) -> None:
        self.optimizers = muon_and_adamw(parameters)

    def zero_grad(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad()

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()


def _muloco(rank: int, world_size: int) -> None:
    parameters = {name: p.detach() for name, p in MLP.model().named_parameters()}
    by_hand = ByHand(parameters, wire=Int4(), period=3, error_feedback=True, outer=OUTER, fragments=[list(parameters)])
    expected = plain(MLP, rank, steps=11, start_step=0, after_step=by_hand.after_step, make=_InTurn)
    candidate, made, ddp = local(MLP, rank, steps=7, build=MULOCO, make=muon_and_adamw)
    state = io.BytesIO()
    torch.save(overlap.state_dict(ddp, made), state)
    candidate += run(MLP, rank, range(7, 11), ddp, made)
    assert_parity(candidate, expected, what="MuLoCo")
    assert repr(made).startswith("LocalSGD(Muon + AdamW, period 3")
    # Resumed within a round, and by the optimizer's own state.
    fresh = wrap(MLP.model(seed=5), **MLP.ddp_options())
    resumed = MULOCO(fresh, muon_and_adamw(fresh.parameters()))
    overlap.load_state_dict(fresh, resumed, torch.load(io.BytesIO(state.getvalue()), weights_only=True))
    assert_parity(run(MLP, rank, range(7, 11), fresh, resumed), expected[7:], what="resumed")
    with pytest.raises(ConfigurationError, match=r"of 1 optimizers, and here are 2 \(Muon \+ AdamW\)"):
        resumed.load_state_dict(sgd(fresh.parameters()).state_dict())


def _refused(rank: int, world_size: int) -> None:
    ddp = wrap(MLP.model())
    muon, adamw = muon_and_adamw(ddp.parameters())
    cases: list[tuple[Any, type[Exception], str]] = [
        ([], ConfigurationError, "the list of optimizers is empty"),
        ([muon, sgd(ddp.parameters())], ConfigurationError, r"Muon and SGD both have a parameter of shape"),
        ([muon, torch.optim.LBFGS([*adamw.param_groups[0]["params"]])], UnsupportedError, "inside step"),
        ([sgd(nn.Linear(2, 2).parameters())], ConfigurationError, "has no parameter of this model"),
    ]
    for optimizers, error, match in cases:
        with pytest.raises(error, match=match):
            LocalSGD(ddp, optimizers)


@on_ranks(2, timeout_s=150)
def test_two_ranks(rank: int, world_size: int) -> None:
    cells = {"Muon and AdamW inside of DiLoCo": _muloco, "what several cannot do is refused": _refused}
    play(cells, rank, world_size)
