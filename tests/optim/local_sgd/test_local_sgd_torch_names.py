"""PyTorch's names for post-local SGD: averagers, the optimizer and the hook, beside PyTorch's own."""

import copy
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from local_loops import Values, mean_of, run, sgd, values_of
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook as their_hook
from torch.distributed.algorithms.model_averaging import averagers as theirs
from torch.distributed.algorithms.model_averaging.hierarchical_model_averager import HierarchicalModelAverager
from torch.nn.parallel import DistributedDataParallel

from harness import assert_parity, on_ranks, plain_step, play, wrap
from harness.models import BATCH_NORM, MLP, mean_squared_error
from overlap import ConfigurationError, Step, chain
from overlap._torch import classes
from overlap.hooks import PostLocal, PostLocalSGDState, noop_hook, post_localSGD_hook
from overlap.optim.local_sgd import (
    PeriodicModelAverager,
    PostLocalSGDOptimizer,
    average_parameters,
)

# average_parameters.


def _tensors(rank: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(rank)

    def random(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    return {
        "scalar": random(1)[0].clone(),
        "matrix": random(30, 7),
        "strided": random(8, 6).t(),
        "channels last": random(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "double": random(11, dtype=torch.float64),
        "half": random(9, dtype=torch.bfloat16),
        "complex": torch.complex(random(5), random(5)),
        "empty": random(0, 4),
        "integer": torch.tensor([rank, 7]),
        "large": random(1_200, 1_100),
        "large and half": random(1_500, 1_500, dtype=torch.bfloat16),
    }


def _means(rank: int, world_size: int) -> None:
    tensors = _tensors(rank)
    storage = {name: tensor.data_ptr() for name, tensor in tensors.items()}
    expected = {
        name: t.clone() if name == "integer" else mean_of({"": t.contiguous()})[""] for name, t in tensors.items()
    }
    # Groups of an optimizer, one tensor in two of them, none with a gradient.
    average_parameters([{"params": list(tensors.values())}, {"params": [tensors["matrix"]]}])
    assert_parity(tensors, expected, what="means")
    assert {name: tensor.data_ptr() for name, tensor in tensors.items()} == storage
    assert tensors["channels last"].is_contiguous(memory_format=torch.channels_last)


def _group_of_one(rank: int, world_size: int) -> None:
    solo: Any = dist.new_group([0])
    matrix = _tensors(rank)["matrix"]
    average_parameters([matrix], solo)
    assert_parity(matrix, _tensors(rank)["matrix"], what="a group of one, and a rank that is not in it")


# PeriodicModelAverager.


def _averager_parity(rank: int, world_size: int) -> None:
    def train(averager: Any) -> list[Values]:
        model = MLP.model()
        optimizer = sgd(model.parameters())
        records = []
        for step in range(30):
            plain_step(model, optimizer, MLP.batch(step, rank), mean_squared_error)
            averager.average_parameters(model.parameters())
            records.append(values_of(model))
        return records

    with pytest.warns(UserWarning, match="plain DDP is faster"):
        PeriodicModelAverager(1)
    for period, warmup in ((1, 0), (4, 6)):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ours = train(PeriodicModelAverager(period, warmup))
            reference = train(theirs.PeriodicModelAverager(period, warmup))
        assert_parity(ours, reference, what=f"period {period}")


WRONG: dict[str, tuple[Callable[[], Any], str]] = {
    "period": (lambda: PeriodicModelAverager(0), "period must be a whole number of at least 1, got 0"),
    "bool": (lambda: PeriodicModelAverager(True), "got True"),
    "warmup": (lambda: PeriodicModelAverager(2, -1), "warmup_steps must be a whole number of at least 0, got -1"),
    "class of optimizer": (
        lambda: PostLocalSGDOptimizer(torch.optim.SGD, PeriodicModelAverager(2)), "the class SGD",  # type: ignore[arg-type]
    ),
    "class of averager": (
        lambda: PostLocalSGDOptimizer(torch.optim.SGD([torch.ones(1)]), PeriodicModelAverager),  # type: ignore[arg-type]
        "takes a ModelAverager",
    ),
    "start": (
        lambda: PostLocalSGDState(None, None, -1), "start_localSGD_iter must be a whole number of at least 0, got -1",
    ),
    "state": (
        lambda: post_localSGD_hook.stage(None), r"must be a PostLocalSGDState of overlap\.hooks, got NoneType",
    ),
    "reducer": (
        lambda: PostLocal(PostLocalSGDState(None, None, 0), Step(sgd(nn.Linear(1, 1).parameters()))),
        "is not a reducer",
    ),
    "parameters": (lambda: average_parameters(["weight"]), "got list; give"),  # type: ignore[list-item]
}  # fmt: skip


def _wrong(rank: int, world_size: int) -> None:
    for name, (make, match) in WRONG.items():
        with pytest.raises(ConfigurationError, match=match):
            pytest.fail(f"{name}: {make()}")


# PostLocalSGDOptimizer.


def _optimizer(rank: int, world_size: int) -> None:
    """Closures, hooks of either optimizer, schedulers and state; the averager averages at every second step."""
    model = BATCH_NORM.model()
    inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    wrapped = PostLocalSGDOptimizer(inner, PeriodicModelAverager(2))
    calls: list[str] = []
    wrapped.register_step_pre_hook(lambda *_: calls.append("pre"))
    inner.register_step_post_hook(lambda *_: calls.append("post"))
    schedule = torch.optim.lr_scheduler.StepLR(wrapped, 1, gamma=0.5)

    def closure() -> Tensor:
        wrapped.zero_grad()
        loss = mean_squared_error(model, MLP.batch(0, rank))
        loss.backward()
        return loss

    assert wrapped.step(closure).item() > 0 and calls == ["pre", "post"]
    schedule.step()
    assert wrapped.defaults is inner.defaults and inner.param_groups[0]["lr"] == 0.05
    saved = copy.deepcopy(wrapped.state_dict())
    assert saved["step"] == 1
    plain = {key: saved[key] for key in ("state", "param_groups")}
    inner.load_state_dict(plain)
    wrapped.averager.step = 5
    wrapped.load_state_dict(saved)
    assert wrapped.averager.step == 1
    with pytest.warns(UserWarning, match="does not contain a step counter for an averager. Setting step counter to 0."):
        wrapped.load_state_dict(plain)
    assert wrapped.averager.step == 0 and wrapped.param_groups is inner.param_groups
    wrapped.param_groups[0]["lr"] = 0.01
    assert inner.param_groups[0]["lr"] == 0.01


def _skipped(rank: int, world_size: int) -> None:
    """A gradient that is not finite on one rank: that rank updates nothing, and averages with the others."""
    model = nn.Linear(2, 2)
    wrapped = PostLocalSGDOptimizer(torch.optim.SGD(model.parameters(), lr=0.5), PeriodicModelAverager(2))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(float(rank))
            parameter.grad = torch.full_like(parameter, 8.0 if rank == 0 else float("inf"))
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(torch.zeros(()))  # So that there is a scale.
    scaler.step(wrapped)
    # Rank 0 goes from 0 to -1, rank 1 stays at 1.
    assert all(parameter.eq(0).all() for parameter in model.parameters())


# The hook.


def _machine(rank: int, world_size: int) -> None:
    state = PostLocalSGDState(None, None, 0)
    ddp = wrap(MLP.model())
    ddp.register_comm_hook(state, post_localSGD_hook)
    assert state.subgroup is None
    mean_squared_error(ddp, MLP.batch(0, rank)).backward()
    assert state.subgroup is not None and state.subgroup.size() == world_size


CELLS: dict[str, Callable[[int, int], None]] = {
    "every floating-point tensor becomes its mean, in place": _means,
    "a rank outside of the group keeps its parameters": _group_of_one,
    "the periodic averager does what PyTorch's does": _averager_parity,
    "wrong arguments are named": _wrong,
    "the optimizer is the wrapped one": _optimizer,
    "a rank whose step is skipped by GradScaler still averages": _skipped,
    "the subgroup of a machine is made in the first local pass": _machine,
}


@on_ranks(2, timeout_s=150)
def test_two_ranks(rank: int, world_size: int) -> None:
    play(CELLS, rank, world_size)


def test_an_averager_needs_a_process_group() -> None:
    with pytest.raises(ConfigurationError, match="init_process_group"):
        PeriodicModelAverager(2)


def test_a_pickled_hook_is_the_hook_itself() -> None:
    assert pickle.loads(pickle.dumps(post_localSGD_hook)) is post_localSGD_hook


@on_ranks(4)
def test_hook_and_optimizer_do_what_pytorchs_do(rank: int, world_size: int) -> None:
    def train(register: Callable[[DistributedDataParallel], None], optimizer: Any) -> list[Values]:
        ddp = wrap(MLP.model())
        register(ddp)
        return run(MLP, rank, range(10), ddp, optimizer(sgd(ddp.parameters())))

    pairs: list[Any] = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    for averages_in_pairs in (True, False):
        given = None, pairs[rank // 2], 4, averages_in_pairs
        state = their_hook.PostLocalSGDState(*given)
        reference = train(
            lambda ddp, state=state: ddp.register_comm_hook(state, their_hook.post_localSGD_hook),
            lambda inner: classes.PostLocalSGDOptimizer(inner, theirs.PeriodicModelAverager(3, warmup_steps=4)),
        )
        ours = PostLocalSGDState(*given), PostLocalSGDState(*given)
        for what, register in {
            "hook": lambda ddp, own=ours[0]: ddp.register_comm_hook(own, post_localSGD_hook),
            "stage": lambda ddp, own=ours[1]: chain(PostLocal(own)).register(ddp),
        }.items():
            candidate = train(register, lambda inner: PostLocalSGDOptimizer(inner, PeriodicModelAverager(3, 4)))
            assert_parity(
                candidate, reference, what=f"{what}, {averages_in_pairs}", rtol=1e-4, atol=1e-6,
                reason="Gloo adds three and more in another order",
            )  # fmt: skip
        assert ours[0].iter == ours[1].iter == state.iter == 4
    # An averager of PyTorch's, too.
    alone, theirs_in_theirs, theirs_in_ours = (
        train(lambda ddp: ddp.register_comm_hook(None, noop_hook), make)
        for make in (
            lambda inner: inner,
            lambda inner: classes.PostLocalSGDOptimizer(inner, HierarchicalModelAverager({2: 2, 4: 4})),
            lambda inner: PostLocalSGDOptimizer(inner, HierarchicalModelAverager({2: 2, 4: 4})),
        )
    )
    assert_parity(theirs_in_ours, theirs_in_theirs, what="a hierarchy")
    assert any(not torch.equal(value, alone[-1][name]) for name, value in theirs_in_ours[-1].items())
