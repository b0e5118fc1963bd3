"""With gather="forward" parameters are gathered during the next forward, in parts, and whoever reads them waits."""

import copy
import itertools
import pickle
import time
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from harness import on_ranks, run_ranks, wrap
from overlap import ZeroRedundancyOptimizer, ZeroStep, chain
from overlap.errors import UnsupportedError
from overlap.optim.zero import exchange
from overlap.optim.zero.exchange import parts_by_need

WIDTH = 16


class _Loop:
    """A model that is trained; ``read`` is what a loop does with it after each step."""

    def __init__(self, rank: int, *, is_plain: bool, deferred: bool = False, gather_s: float = 0.004) -> None:
        torch.manual_seed(0)
        layers = [layer for _ in range(3) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]
        self.rank = rank
        self.ddp = wrap(nn.Sequential(*layers, nn.Linear(WIDTH, WIDTH)), bucket_cap_mb=0.001)
        self.optimizer: Any
        if is_plain:
            self.optimizer = torch.optim.AdamW(self.ddp.parameters(), lr=0.01)
            return
        self.optimizer = zero = ZeroRedundancyOptimizer(
            self.ddp.parameters(), torch.optim.AdamW, lr=0.01, overlap_with_ddp=True
        )
        self.registration = chain(ZeroStep(zero, gather="forward", deferred=deferred)).register(self.ddp)
        self.gathered = 0
        (self.stage,) = zero.updates
        gathering = self.stage.gathering

        def count() -> None:
            self.gathered += 1

        self.stage.gathering = lambda shards, group: (
            lambda: time.sleep(gather_s),
            *gathering(shards, group),
            count,
        )

    @property
    def module(self) -> Any:
        return self.ddp.module

    def inputs(self, step: int) -> Tensor:
        return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(10 * step + self.rank))

    def backward(self, step: int) -> Tensor:
        self.optimizer.zero_grad()
        loss: Tensor = self.ddp(self.inputs(step)).square().mean()
        loss.backward()
        return loss

    def step(self, step: int) -> Tensor:
        loss = self.backward(step)
        self.optimizer.step()
        return loss


@torch.no_grad()
def _clamped(loop: _Loop) -> Iterable[Tensor]:
    for parameter in loop.module.parameters():
        parameter.clamp_(-0.1, 0.1)
    return ()


@torch.no_grad()
def _evaluated(loop: _Loop) -> Iterable[Tensor]:
    loop.module.eval()
    outputs = [loop.module[4](loop.inputs(0)), loop.module(loop.inputs(0)), loop.ddp(loop.inputs(0))]
    loop.module.train()
    return outputs


READERS: dict[str, Callable[[_Loop], Iterable[Tensor]]] = {
    "the parameters": lambda loop: loop.ddp.parameters(),
    "state_dict of the module": lambda loop: loop.module.state_dict().values(),
    "state_dict of a part": lambda loop: loop.module[6].state_dict().values(),
    "deepcopy": lambda loop: copy.deepcopy(loop.module).parameters(),
    "pickle": lambda loop: pickle.loads(pickle.dumps(loop.module)).parameters(),
    "an attribute": lambda loop: [loop.module[6].weight, loop.module[6].bias],
    "get_parameter": lambda loop: [loop.module.get_parameter("6.weight")],
    "the dict of parameters": lambda loop: {**loop.module[6]._parameters}.values(),
    "clamped weights": _clamped,
    "forwards without gradients": _evaluated,
    "a part's forward in training": lambda loop: [loop.module[6](loop.inputs(0))],
}


@on_ranks(2)
def test_whoever_reads_parameters_through_the_model_waits_for_them(rank: int, world_size: int) -> None:
    for deferred in (False, True):
        plain, ours = _Loop(rank, is_plain=True), _Loop(rank, is_plain=False, deferred=deferred)
        for step, (name, read) in enumerate(READERS.items()):
            assert torch.equal(ours.step(step), plain.step(step)), (name, step)
            got, expected = [tuple(v.detach().clone() for v in read(loop)) for loop in (ours, plain)]
            for mine, theirs in zip(got, expected, strict=True):
                assert torch.equal(mine, theirs), name
        ours.registration.remove()
        assert type(ours.module[0]._parameters) is dict
        for mine, theirs in zip(ours.ddp.parameters(), plain.ddp.parameters(), strict=True):
            assert torch.equal(mine, theirs)


@on_ranks(2)
def test_a_forward_begins_before_all_gathers_are_over(rank: int, world_size: int) -> None:
    loop = _Loop(rank, is_plain=False, gather_s=0.04)
    in_forward: list[int] = []
    # The first layer is through.
    loop.module[1].register_forward_hook(lambda *_: in_forward.append(loop.gathered))
    after_forward: list[int] = []
    for step in range(5):
        outputs = loop.ddp(loop.inputs(step))
        after_forward.append(loop.gathered)
        outputs.square().mean().backward()
        loop.optimizer.step()
    # The first forwards come before DDP has rebuilt its buckets.
    assert all(early < late for early, late in list(zip(in_forward, after_forward, strict=True))[2:])


@on_ranks(2)
def test_modules_compiled_in_place_are_refused(rank: int, world_size: int) -> None:
    ours = _Loop(rank, is_plain=False)
    ours.registration.remove()
    stage = ZeroStep(ours.optimizer, gather="forward")
    ours.module[2].compile(backend="eager")
    with pytest.raises(UnsupportedError, match=r"and 2 is compiled; compile the DistributedDataParallel model"):
        chain(stage).register(ours.ddp)
    ours.module[2]._compiled_call_impl = None
    chain(stage).register(ours.ddp)
    ours.module.compile(backend="eager")
    # Dynamo's own optimizer of DDP refuses such small buckets.
    with torch._dynamo.config.patch(optimize_ddp=False), pytest.raises(UnsupportedError, match="the model is compiled"):
        ours.backward(0)


@on_ranks(2)
def test_the_error_of_a_failed_gather_stays_until_the_parameters_are_loaded(rank: int, world_size: int) -> None:
    loop = _Loop(rank, is_plain=False)
    zero = loop.optimizer

    def bad(shards: Any, group: Any) -> Any:
        raise ValueError("lost")

    for step in range(2):
        loop.step(step)
    zero.wait()
    good, loop.stage.gathering = loop.stage.gathering, bad
    saved = {name: value.clone() for name, value in loop.module.state_dict().items()}
    loop.backward(2)
    # Until the parameters are loaded, nobody goes on with different models on the ranks.
    for act in (zero.wait, zero.wait, lambda: loop.ddp(loop.inputs(3)), lambda: list(loop.ddp.parameters())):
        with pytest.raises(ValueError, match="lost") as failure:
            act()
        assert "load a checkpoint by model.load_state_dict(...) on every rank" in failure.value.__notes__[-1]
    loop.stage.gathering = good
    zero.consolidate_state_dict(to=None)
    zero.step()
    zero.load_state_dict(zero.state_dict())
    loop.module.load_state_dict(saved)
    assert all(torch.equal(value, saved[name]) for name, value in loop.module.state_dict().items())
    for step in range(3, 5):
        loop.step(step)
    for parameter in loop.ddp.parameters():
        first = parameter.detach().clone()
        dist.broadcast(first, 0)
        assert torch.equal(parameter, first)
    loop.stage.gathering = bad
    loop.backward(5)
    with pytest.raises(ValueError, match="lost"):
        zero.wait()
    loop.registration.remove()  # Raises only what nobody has heard of.


LAYER_BYTES = 4 * (WIDTH * WIDTH + WIDTH)
LAYERS = 4
# A part for each layer, though all are in one bucket.
exchange._LEAST_BYTES = LAYER_BYTES


@given(st.lists(st.integers(0, 50), min_size=1, max_size=30), st.integers(1, 60))
def test_parts_are_the_bucket_from_its_end_each_as_small_as_it_may_be(sizes: list[int], least: int) -> None:
    parts = parts_by_need(sizes, least)
    places = [list(range(len(sizes))[part]) for part in parts]
    assert list(itertools.chain.from_iterable(reversed(places))) == list(range(len(sizes)))
    held = [[sizes[place] for place in part] for part in places]
    assert len(held) == 1 or all(sum(part) >= least for part in held)
    # All but the last, to which what is left over is added, would have too little without their first parameter.
    assert all(sum(part[1:]) < least for part in held[:-1])


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(layer for _ in range(LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())))


class _Launches:
    """An observer that notes what is launched."""

    def __init__(self) -> None:
        self.noted: list[tuple[str, int, int]] = []

    def launched(self, subject: Any, label: str, operation: Any) -> None:
        self.noted.append((operation.label, subject.index, operation.sent_bytes))

    def __getattr__(self, name: str) -> Any:
        return lambda *args: None


def _launched(rank: int, world_size: int) -> list[Any]:
    noted = []
    for partition in ("element", "parameter"):
        ddp = DistributedDataParallel(_model())
        zero = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.AdamW, lr=0.01, partition=partition)
        registration = chain(ZeroStep(zero, gather="forward")).register(ddp)
        launches = _Launches()
        for step in range(3):
            zero.wait()
            if step == 2:
                registration.runtime.executor.observer = launches
            ddp(torch.randn(4, WIDTH)).square().mean().backward()
            zero.step()
        zero.wait()
        noted.append(launches.noted)
    return noted


def test_every_rank_gathers_a_bucket_after_its_reduction_in_parts_but_not_whole_parameters() -> None:
    world_size = 3
    by_rank = run_ranks(_launched, world_size)
    noted, whole = zip(*by_rank, strict=True)
    first, *others = ([(label, index) for label, index, _ in rank] for rank in noted)
    assert first == [("reduce_scatter", 0)] + [("all_gather", 0)] * LAYERS
    assert all(other == first for other in others)
    # All ranks together send what one message for the whole bucket would be.
    gathered = sum(sent for rank in noted for _, _, sent in rank[1:])
    assert gathered == LAYERS * LAYER_BYTES * (world_size - 1)
    assert all(len(of_rank) == 2 for of_rank in whole)
