"""Local SGD's averages beside plain loops that average by hand: when, of what, by which optimizer and how late."""

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from local_loops import assign, local, mean_of, plain, run, values_of
from local_wires import beside
from torch import nn

from harness import assert_parity, on_ranks, play, wrap
from harness.models import MLP
from overlap import LocalSGD

START, STEPS, PERIOD = 3, 14, 4
OUTER = functools.partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True)


def _by_hand(rank: int, world_size: int, *, steps: int = STEPS, start_step: int = START, **options: Any) -> None:
    made, ddp, by_hand = beside(rank, steps=steps, period=PERIOD, start_step=start_step, **options)
    assert made.averager.step == steps and made.averager.rounds == by_hand.round == (steps - start_step) // PERIOD
    values = values_of(ddp.module)
    made.synchronize()
    if "outer" not in options:
        assert_parity(values_of(ddp.module), mean_of(values), what="synchronized")
    elif options["fragments"] == 1:  # The momentum of the average that was just made is not applied again.
        assert_parity(values_of(ddp.module), values, what="synchronized after an average")


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
    "every period": _by_hand,
    "another period from the next round on": _another_period,
    "overlap 1": functools.partial(_by_hand, overlap=1),
    "overlap 3": functools.partial(_by_hand, overlap=3),
    "DiLoCo": functools.partial(_by_hand, steps=16, start_step=0, outer=OUTER, fragments=1),
    "streaming DiLoCo": functools.partial(_by_hand, steps=16, start_step=0, outer=OUTER, fragments=3),
    "half precision is averaged in fp32": functools.partial(_half, outer=None, overlap=False),
    "half precision, outer, overlapped": functools.partial(
        _half, outer=functools.partial(torch.optim.SGD, lr=1.0), overlap=True
    ),
}


@on_ranks(2, timeout_s=150)
def test_local_sgd_is_the_loop_by_hand(rank: int, world_size: int) -> None:
    play(CELLS, rank, world_size)


@on_ranks(4)
def test_a_subgroup_continues_to_average_gradients(rank: int, world_size: int) -> None:
    pair: Any = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
    close: dict[str, Any] = {"rtol": 1e-4, "atol": 1e-6, "reason": "Gloo adds in another order"}

    def every_four(model: nn.Module, optimizer: Any, count: int) -> None:
        if count % 4 == 0:
            assign(model, mean_of(values_of(model)))

    build: Any = functools.partial(LocalSGD, start_step=2, period=4, subgroup=pair)
    candidate, made, ddp = local(MLP, rank, steps=13, build=build)
    reference = plain(MLP, rank, steps=13, start_step=2, after_step=every_four, gradient_group=pair)
    assert_parity(candidate, reference, what="a subgroup", **close)
    made.synchronize()
    assert_parity(values_of(ddp.module), mean_of(values_of(ddp.module)), what="a subgroup, synchronized", **close)
