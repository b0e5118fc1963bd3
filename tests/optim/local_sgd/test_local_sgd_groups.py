"""Subgroups, hierarchies and uneven inputs."""

from __future__ import annotations

import functools
import pickle
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from local_loops import Values, assign, local, mean_of, plain, sgd, values_of
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

import overlap
from harness import assert_parity, run_ranks, wrap
from harness.models import MLP, UNUSED_ON_SOME_RANKS, mean_squared_error
from overlap import AllReduce, ConfigurationError, OverlappedOptimizer, Step, TrainingLoopError, UnsupportedError, chain
from overlap.hooks.post_local_sgd import PostLocal, PostLocalSGDState, post_localSGD_hook
from overlap.optim.local_sgd import (
    Average,
    HierarchicalModelAverager,
    LocalSGD,
    PeriodicModelAverager,
    PostLocalSGDOptimizer,
)

REASON = "Gloo adds three and more in another order"


def _hook(rank: int, subgroup: Any) -> None:
    """The hook and the optimizer under PyTorch's names, beside PyTorch's."""
    from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook as theirs
    from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager as TheirAverager

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Its package uses torch.jit.
        from torch.distributed.optim import PostLocalSGDOptimizer as TheirOptimizer

    def train(ddp: DistributedDataParallel, optimizer: Any) -> list[Values]:
        records = []
        for step in range(10):
            optimizer.zero_grad()
            mean_squared_error(ddp, MLP.batch(step, rank)).backward()
            optimizer.step()
            records.append(values_of(ddp.module))
        return records

    assert pickle.loads(pickle.dumps(post_localSGD_hook)) is post_localSGD_hook
    for allreduce in (True, False):
        state = theirs.PostLocalSGDState(None, subgroup, 4, allreduce)
        ddp = wrap(MLP.model())
        ddp.register_comm_hook(state, theirs.post_localSGD_hook)
        reference = train(ddp, TheirOptimizer(sgd(ddp.parameters()), TheirAverager(3, warmup_steps=4)))
        for register in (lambda d, s: d.register_comm_hook(s, post_localSGD_hook), _register):
            ours = PostLocalSGDState(None, subgroup, 4, allreduce)
            ddp = wrap(MLP.model())
            register(ddp, ours)
            candidate = train(ddp, PostLocalSGDOptimizer(sgd(ddp.parameters()), PeriodicModelAverager(3, 4)))
            assert ours.iter == state.iter == 4
            assert_parity(
                candidate, reference, what=f"{allreduce=}", exact=False, rtol=1e-4, atol=1e-6, reason=REASON
            )  # fmt: skip
    machine = PostLocalSGDState(None, None, 0)
    ddp = wrap(MLP.model())
    ddp.register_comm_hook(machine, post_localSGD_hook)
    assert machine.subgroup is None
    mean_squared_error(ddp, MLP.batch(0, rank)).backward()
    assert machine.subgroup is not None and machine.subgroup.size() == dist.get_world_size()
    with pytest.raises(ConfigurationError, match="start_localSGD_iter must be a whole number of at least 0, got -1"):
        PostLocalSGDState(None, None, -1)
    with pytest.raises(ConfigurationError, match="a PostLocalSGDState, got NoneType"):
        post_localSGD_hook.stage(None)
    with pytest.raises(ConfigurationError, match="takes a reducer"):
        PostLocal(PostLocalSGDState(None, None, 0), Step(sgd(ddp.parameters())))


def _register(ddp: DistributedDataParallel, state: PostLocalSGDState) -> None:
    PostLocal(state)
    chain(PostLocal(state)).register(ddp)


def _four(rank: int, world_size: int) -> None:
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    mine = pairs[rank // 2]
    _hook(rank, mine)
    with pytest.raises(ConfigurationError, match="only be made by all ranks of the job"):
        HierarchicalModelAverager({1: 1, 2: 2}, process_group=mine)

    def every_four(model: nn.Module, optimizer: Any, count: int) -> None:
        if count % 4 == 0:
            assign(model, mean_of(values_of(model)))

    def three_levels(model: nn.Module, optimizer: Any, count: int) -> None:
        # Lin et al., hierarchical: all ranks every 4 steps, pairs every 2, none at others.
        if count % 4 == 0:
            assign(model, mean_of(values_of(model)))
        elif count % 2 == 0:
            assign(model, mean_of(values_of(model), mine))

    kinds: dict[str, tuple[Any, Any, Any]] = {
        "a subgroup": (functools.partial(LocalSGD, period=4, start_step=2, subgroup=mine), every_four, mine),
        "a hierarchy": (
            functools.partial(LocalSGD, period={1: 1, 2: 2, 4: 4}, start_step=2), three_levels, None,
        ),
        "a hierarchy, overlapped": (
            functools.partial(LocalSGD, period={2: 2, 4: 4}, start_step=2, overlap=True), None, None,
        ),
    }  # fmt: skip
    for kind, (build, after_step, group) in kinds.items():
        candidate, made, ddp = local(MLP, rank, steps=12, build=build)
        if after_step is not None:
            reference = plain(MLP, rank, steps=12, start_step=2, after_step=after_step, gradient_group=group)
            assert_parity(candidate, reference, what=kind, exact=False, rtol=1e-4, atol=1e-6, reason=REASON)
        made.synchronize()
        assert_parity(
            values_of(ddp.module), mean_of(values_of(ddp.module)), what=kind, exact=False, rtol=1e-6, atol=1e-7,
            reason=REASON,
        )  # fmt: skip


def test_on_four_ranks() -> None:
    run_ranks(_four, 4, timeout_s=100)


BATCHES = (9, 4, 6)
FORMS: dict[str, Any] = {
    "alone": {},
    "overlapped": {"overlap": 1},
    "outer": {"outer": functools.partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True)},
    "outer, fragments": {"outer": functools.partial(torch.optim.SGD, lr=0.7), "fragments": 2, "overlap": 1},
    "machine": {"subgroup": "machine"},
    "update": {},
}


def _uneven(rank: int, world_size: int) -> None:
    for case in (MLP, UNUSED_ON_SOME_RANKS):
        for form, options in FORMS.items():
            for start in (0, 5):
                ddp = wrap(case.model(), **case.ddp_options())
                optimizer: Any = sgd(ddp.parameters())
                update = None
                if form == "update" and case.find_unused_parameters:
                    with pytest.raises(UnsupportedError, match="leave update out"):
                        LocalSGD(ddp, wrapped := OverlappedOptimizer(optimizer), update=Step(wrapped))
                    continue
                if form == "update":
                    optimizer = OverlappedOptimizer(optimizer)
                    update = Step(optimizer)
                made = LocalSGD(ddp, optimizer, 3, start, update=update, **options)
                with Join([ddp, made]):
                    for step in range(BATCHES[rank]):
                        if update is None:
                            made.zero_grad()
                        mean_squared_error(ddp, case.batch(step, rank)).backward()
                        made.step()
                what = f"{case}, {form}, from step {start}"
                assert made.step_count == max(BATCHES[:world_size]) and made.synchronizer.pending is None, what
                everyone: list[Any] = [None] * world_size
                dist.all_gather_object(everyone, values_of(ddp.module))
                for other in range(1, world_size):
                    assert_parity(everyone[other], everyone[0], what=f"{what}: rank {other} at the end")
                assert "_sync_final_model" not in vars(ddp)
                # And on it goes, all ranks again.
                for step in range(2):
                    made.zero_grad()
                    mean_squared_error(ddp, case.batch(step, rank)).backward()
                    made.step()


def _weights(rank: int, world_size: int) -> None:
    """What each rank counts for: the steps that it made in the round."""
    ends: dict[str, Values] = {}
    for kind in (Join, overlap.Join):
        ddp = wrap(MLP.model(), **MLP.ddp_options())
        made = LocalSGD(ddp, sgd(ddp.parameters()), 4, 0)
        with kind([ddp, made]):
            for step in range(BATCHES[rank]):
                made.zero_grad()
                mean_squared_error(ddp, MLP.batch(step, rank)).backward()
                made.step()
        ends[kind.__module__] = values_of(ddp.module)
    # The same on one rank, for all of them at once. Rank 0 makes 9 steps, rank 1 4 and rank 2 6.
    models = [MLP.model() for _ in range(world_size)]
    optimizers = [sgd(model.parameters()) for model in models]
    for begin, end in ((0, 4), (4, 8), (8, 9)):
        made_steps = [max(0, min(end, BATCHES[other]) - begin) for other in range(world_size)]
        for other, model in enumerate(models):
            for step in range(begin, begin + made_steps[other]):
                optimizers[other].zero_grad()
                mean_squared_error(model, MLP.batch(step, other)).backward()
                optimizers[other].step()
        values = [values_of(model) for model in models]
        mean = {
            name: sum(steps * v[name] for steps, v in zip(made_steps, values, strict=True)) / sum(made_steps)
            for name in values[0]
        }
        for model in models:
            assign(model, mean)  # type: ignore[arg-type]
    for kind_name, end in ends.items():
        assert_parity(
            end, values_of(models[0]), what=f"weights, {kind_name}", exact=False, rtol=1e-4, atol=1e-6, reason=REASON
        )


def _join(rank: int, world_size: int) -> None:
    _weights(rank, world_size)
    _uneven(rank, world_size)


@pytest.mark.parametrize("world_size", [2, 3])
def test_uneven_inputs_end_equal(world_size: int) -> None:
    run_ranks(_join, world_size, timeout_s=100)


def _left_out(rank: int, world_size: int) -> None:
    ddp = wrap(MLP.model(), **MLP.ddp_options())
    made = LocalSGD(ddp, sgd(ddp.parameters()), 2, 2)
    match = r"Join\(\[ddp, local\]\)" if rank == 1 else "rank 1"
    error: Any = TrainingLoopError if rank == 1 else Exception

    def uneven() -> None:
        with Join([ddp]):
            for step in range(2 - rank):
                made.zero_grad()
                mean_squared_error(ddp, MLP.batch(step, rank)).backward()
                made.step()

    with pytest.raises(error, match=match):
        uneven()


def _average_stage(rank: int, world_size: int) -> None:
    def train(ddp: DistributedDataParallel, optimizer: Any, averager: Any) -> list[Values]:
        records = []
        for step in range(6):
            if averager is not None:
                optimizer.zero_grad()
            mean_squared_error(ddp, MLP.batch(step, rank)).backward()
            if averager is not None:
                optimizer.step()
                averager.average_parameters(ddp.parameters())
            records.append(values_of(ddp.module))
        return records

    def local_reducer(group: Any) -> PostLocal:
        return PostLocal(PostLocalSGDState(None, None, 1, post_local_gradient_allreduce=False))

    ddp, other = wrap(MLP.model()), wrap(MLP.model())
    chain(local_reducer(None), Step(sgd(ddp.parameters())), Average(PeriodicModelAverager(2))).register(ddp)
    chain(local_reducer(None)).register(other)
    assert_parity(
        train(ddp, None, None),
        train(other, sgd(other.parameters()), PeriodicModelAverager(2)),
        what="an averager as the last stage",
    )
    with pytest.raises(ConfigurationError, match="takes a ModelAverager"):
        Average(AllReduce())  # type: ignore[arg-type]


def test_an_averager_is_the_last_stage_of_a_chain() -> None:
    run_ranks(_average_stage, 2)
    run_ranks(_left_out, 2, group_timeout_s=6)
