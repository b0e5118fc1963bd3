"""LocalSGD as the optimizer of a training loop: closures, hooks, schedulers, DDP's switch, refusals."""

import copy
import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from local_loops import local, mean_of, run, sgd, values_of
from torch import Tensor, nn

from harness import assert_parity, on_ranks, play, wrap
from harness.models import MLP, mean_squared_error
from overlap import ConfigurationError, Int8, LocalSGD, RegistrationError, TrainingLoopError

OUTER = functools.partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True)


def _in_a_loop(rank: int, world_size: int) -> None:
    """Two steps and an average: the first with a closure, the second with a backward under no_sync before it."""
    ddp = wrap(MLP.model(), **MLP.ddp_options())
    storage = [p.data_ptr() for p in ddp.parameters()]
    inner = sgd(ddp.parameters())
    made = LocalSGD(ddp, inner, period=2, start_step=0)
    calls: list[int] = []
    made.register_step_post_hook(lambda *_: calls.append(1))
    schedule = torch.optim.lr_scheduler.StepLR(made, 1, gamma=0.5)

    def closure() -> Tensor:
        made.zero_grad()
        loss = mean_squared_error(ddp, MLP.batch(0, rank))
        loss.backward()
        return loss

    assert made.step(closure).item() > 0
    with ddp.no_sync():
        mean_squared_error(ddp, MLP.batch(1, rank)).backward()
    mean_squared_error(ddp, MLP.batch(2, rank)).backward()
    made.step()
    schedule.step()
    assert made.averager.step == 2 and calls == [1, 1]
    assert_parity(values_of(ddp.module), mean_of(values_of(ddp.module)), what="averaged")
    assert [p.data_ptr() for p in ddp.parameters()] == storage, "parameters keep their storage"
    assert inner.param_groups[0]["lr"] == 0.05 and made.defaults is inner.defaults
    with pytest.raises(ConfigurationError, match="save its state_dict"):
        copy.deepcopy(made)


def _start(rank: int, world_size: int) -> None:
    """With an outer optimizer the first step is local, and its rate can be scheduled."""
    ddp = wrap(MLP.model())
    plain = LocalSGD(ddp, sgd(ddp.parameters()))
    assert "from step 1000" in repr(plain) and plain.outer is None
    plain.remove()
    made = LocalSGD(ddp, sgd(ddp.parameters()), period=2, outer=OUTER)
    assert "from step 0" in repr(made) and made.outer is not None
    schedule = torch.optim.lr_scheduler.StepLR(made.outer, 1, gamma=0.5)
    run(MLP, rank, range(2), ddp, made)
    schedule.step()
    assert made.averager.rounds == 1 and made.outer.param_groups[0]["lr"] == 0.35


def _switch(rank: int, world_size: int) -> None:
    """DDP is switched off while ranks train alone, unless a subgroup goes on; removed, all is as before."""
    for subgroup, syncs in ((None, False), ("machine", True)):
        build = functools.partial(LocalSGD, period=4, start_step=1, subgroup=subgroup)
        _, made, ddp = local(MLP, rank, steps=3, build=build)
        assert ddp.require_backward_grad_sync == syncs
        made.remove()
        assert ddp.require_backward_grad_sync
        with pytest.raises(RegistrationError, match="make another one"):
            made.step()


def _inner_step(rank: int, world_size: int) -> None:
    """The wrapped optimizer's own step() would never average; after remove() it is the loop's again."""
    for several in (False, True):
        ddp = wrap(MLP.model())
        halves = list(ddp.parameters())[:5], list(ddp.parameters())[5:]
        optimizers = [sgd(half) for half in halves] if several else [sgd(ddp.parameters())]
        made = LocalSGD(ddp, optimizers if several else optimizers[0], period=2, start_step=0)
        for _ in range(2):
            ddp(*MLP.batch(0, rank).inputs).sum().backward()
            with pytest.raises(
                TrainingLoopError, match=r"SGD is stepped by the LocalSGD .* never average: call step\(\)"
            ):
                optimizers[-1].step()
            made.step()
        assert made.averager.rounds == 1
        made.remove()
        for optimizer in optimizers:
            optimizer.step()


def _wrong_arguments(rank: int, world_size: int) -> None:
    others = dist.new_group([0]), dist.new_group([1])
    ddp = wrap(MLP.model())
    cases: list[tuple[dict[str, Any], str]] = [
        ({"period": 0}, "period must be a whole number of at least 1, got 0"),
        ({"start_step": -1}, "start_step must be a whole number of at least 0, got -1"),
        ({"subgroup": others[1 - rank]}, "this rank is not in the group that it was given as subgroup"),
        ({"subgroup": "node"}, "machine"),
        ({"overlap": -1}, "overlap must be a whole number"),
        ({"fragments": 100}, "leaves some without a parameter"),
        ({"outer": torch.optim.SGD([torch.ones(1)])}, "functools.partial"),
        ({"optimizer": sgd(nn.Linear(1, 1).parameters())}, "no parameter of this model"),
        ({"optimizer": torch.optim.SGD}, "the class SGD"),
        ({"ddp": ddp.module}, "is not a DistributedDataParallel model"),
        ({"wire": Int8}, r"the class Int8; give a wire such as Int8\(\)"),
        ({"error_feedback": True}, "there is no wire"),
        ({"wire": Int8(), "error_feedback": 1}, "error_feedback is True or False, got 1"),
    ]
    for options, match in cases:
        with pytest.raises(ConfigurationError, match=match):
            LocalSGD(**{"ddp": ddp, "optimizer": sgd(ddp.parameters()), **options})


CELLS = {
    "closures, accumulation, hooks and schedulers are those of an optimizer": _in_a_loop,
    "an outer optimizer starts at once": _start,
    "DDP is switched off while ranks train alone": _switch,
    "the wrapped optimizer's step() is refused": _inner_step,
    "wrong arguments are named": _wrong_arguments,
}


@on_ranks(2, timeout_s=150)
def test_two_ranks(rank: int, world_size: int) -> None:
    play(CELLS, rank, world_size)
