"""Local SGD's averages beside plain loops that average by hand: when, of what, by which optimizer and how late."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from local_loops import Values, assign, local, mean_of, plain, play, run, values_of
from torch import nn

from harness import assert_parity, run_ranks, wrap
from harness.models import MLP
from overlap import LocalSGD

START, STEPS, PERIOD = 3, 14, 4
OUTER = functools.partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True)
DILOCO = functools.partial(LocalSGD, period=PERIOD, outer=OUTER)
GLOO = "Gloo adds three and more in another order"


def _check_synchronizes(made: LocalSGD, ddp: Any, what: str, **how: Any) -> None:
    made.synchronize()
    assert_parity(values_of(ddp.module), mean_of(values_of(ddp.module)), what=f"{what}, synchronized", **how)


def _every_period(rank: int, world_size: int) -> None:
    def after_step(model: nn.Module, optimizer: Any, count: int) -> None:
        if count % PERIOD == 0:
            assign(model, mean_of(values_of(model)))

    candidate, made, ddp = local(MLP, rank, steps=STEPS, build=lambda ddp, o: LocalSGD(ddp, o, PERIOD, START))
    reference = plain(MLP, rank, steps=STEPS, start_step=START, after_step=after_step)
    assert_parity(candidate, reference, what="every period")
    assert made.averager.step == STEPS and made.averager.rounds == (STEPS - START) // PERIOD
    _check_synchronizes(made, ddp, "every period")


def _another_period(rank: int, world_size: int) -> None:
    """A period that is changed within a round counts from the next one on."""

    def after_step(model: nn.Module, optimizer: Any, count: int) -> None:
        if count in (4, 6, 8, 10):
            assign(model, mean_of(values_of(model)))

    expected = plain(MLP, rank, steps=STEPS, start_step=START, after_step=after_step)
    candidate, made, ddp = local(MLP, rank, steps=START + 1, build=lambda ddp, o: LocalSGD(ddp, o, PERIOD, START))
    made.averager.period = 2
    candidate += run(MLP, rank, range(START + 1, STEPS), ddp, made)
    assert_parity(candidate, expected, what="another period")


def _overlapped(rank: int, world_size: int, delay: int) -> None:
    pending: dict[int, tuple[Values, Values]] = {}

    def after_step(model: nn.Module, optimizer: Any, count: int) -> None:
        if count in pending:
            snapshot, mean = pending.pop(count)
            current = values_of(model)
            assign(model, {n: (current[n] - snapshot[n]) + mean[n] for n in current})
        if count % PERIOD == 0:
            snapshot = values_of(model)
            pending[count + delay] = (snapshot, mean_of(snapshot))

    reference = plain(MLP, rank, steps=STEPS, start_step=START, after_step=after_step)
    build = functools.partial(LocalSGD, period=PERIOD, start_step=START, overlap=delay)
    candidate, made, ddp = local(MLP, rank, steps=STEPS, build=build)
    assert_parity(candidate, reference, what=f"overlap {delay}")
    _check_synchronizes(made, ddp, f"overlap {delay}")


# Outer optimizers.


class _Reference:
    """DiLoCo as the paper has it, with the fragments of the streaming form."""

    def __init__(self, fragments: list[list[str]]) -> None:
        start = {name: p.detach().clone() for name, p in MLP.model().named_parameters()}
        self.global_values, self.momentum = start, {name: torch.zeros_like(p) for name, p in start.items()}
        self.is_first = dict.fromkeys(start, True)
        self.fragments, self.round = fragments, 0

    def after_step(self, model: nn.Module, optimizer: Any, count: int) -> None:
        if count % PERIOD:
            return
        names = self.fragments[self.round % len(self.fragments)]
        self.round += 1
        means = mean_of({name: value for name, value in values_of(model).items() if name in names})
        for name in names:
            gradient = self.global_values[name] - means[name]
            first, self.is_first[name] = self.is_first[name], False
            self.momentum[name] = gradient.clone() if first else 0.9 * self.momentum[name] + gradient
            self.global_values[name] = self.global_values[name] - 0.7 * (gradient + 0.9 * self.momentum[name])
        assign(model, {name: self.global_values[name] for name in names})


def _diloco(rank: int, world_size: int, fragments: int) -> None:
    candidate, made, ddp = local(MLP, rank, steps=16, build=functools.partial(DILOCO, fragments=fragments))
    reference = _Reference(made.averager.fragments)
    assert len(reference.fragments) == fragments
    assert sorted(name for part in reference.fragments for name in part) == sorted(dict(MLP.model().named_parameters()))
    assert_parity(
        candidate,
        plain(MLP, rank, steps=16, start_step=0, after_step=reference.after_step),
        what=f"DiLoCo, {fragments} fragments",
        exact=False,
        rtol=1e-4,
        atol=1e-6,
        reason="the update is one expression here, and kernels elsewhere",
    )
    if fragments == 1:  # The momentum of the average that was just made is not applied again.
        averaged = values_of(ddp.module)
        made.synchronize()
        assert_parity(values_of(ddp.module), averaged, what="synchronized after an average")


def _half(rank: int, world_size: int, outer: Any, overlap: bool) -> None:
    model = nn.Linear(3, 3, bias=False).bfloat16()
    ddp = wrap(model)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=1.0)
    made = LocalSGD(ddp, optimizer, 1, 0, outer=outer, overlap=overlap)
    storage = ddp.module.weight.data_ptr()
    made.zero_grad()
    (ddp(torch.full((1, 3), 0.01 + rank, dtype=torch.bfloat16)).sum()).backward()
    own = (model.weight.detach() - ddp.module.weight.grad).float()
    made.step()
    made.synchronize()
    assert_parity(ddp.module.weight.detach(), mean_of({"": own})[""].bfloat16(), what="bfloat16")
    assert ddp.module.weight.data_ptr() == storage


CELLS: dict[str, Callable[[int, int], None]] = {
    "every period": _every_period,
    "another period from the next round on": _another_period,
    "overlap 1": functools.partial(_overlapped, delay=1),
    "overlap 3": functools.partial(_overlapped, delay=3),
    "DiLoCo": functools.partial(_diloco, fragments=1),
    "streaming DiLoCo": functools.partial(_diloco, fragments=3),
    "half precision is averaged in fp32": functools.partial(_half, outer=None, overlap=False),
    "half precision, outer, overlapped": functools.partial(
        _half, outer=functools.partial(torch.optim.SGD, lr=1.0), overlap=True
    ),
}


def test_local_sgd_is_the_loop_by_hand() -> None:
    play(CELLS, 2)


def _subgroup(rank: int, world_size: int) -> None:
    pair: Any = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
    close: dict[str, Any] = {"exact": False, "rtol": 1e-4, "atol": 1e-6, "reason": GLOO}

    def every_four(model: nn.Module, optimizer: Any, count: int) -> None:
        if count % 4 == 0:
            assign(model, mean_of(values_of(model)))

    build: Any = functools.partial(LocalSGD, start_step=2, period=4, subgroup=pair)
    candidate, made, ddp = local(MLP, rank, steps=13, build=build)
    reference = plain(MLP, rank, steps=13, start_step=2, after_step=every_four, gradient_group=pair)
    assert_parity(candidate, reference, what="a subgroup", **close)
    _check_synchronizes(made, ddp, "a subgroup", **close)


def test_a_subgroup_continues_to_average_gradients() -> None:
    run_ranks(_subgroup, 4)
