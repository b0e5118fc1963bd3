"""`overlap.auto` on ranks: what it returns, what it leaves alone, and what happens when a rank fails."""

from __future__ import annotations

import copy
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import overlap
from harness import RankFailed, run_ranks
from harness.races import made_faster
from overlap import ConfigurationError, PeerError, Plan, UnsupportedError
from overlap._torch.c10d import issued
from overlap.plan import choose, race
from overlap.plan.buckets import cut
from overlap.plan.candidates import METHODS, Candidate
from overlap.plan.profile import ParameterTimes

WIDTH, CLASSES, BATCH = 16, 4, 8
# The time is for a busy machine: rounds and measured steps end long before.
OPTIONS: dict[str, Any] = {"loss": nn.functional.cross_entropy, "seconds": 20.0, "quiet": True}
CROSS_ENTROPY = nn.functional.cross_entropy


def _quick() -> None:
    """Within a rank: few rounds, and few steps measured."""
    race._MOST_ROUNDS = 5
    choose._COMPUTE_SHARE = 0.001


def _model(*, dropout: bool = True) -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.5 if dropout else 0.0)]
    return nn.Sequential(*layers, nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, CLASSES))


def _sample(rank: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(BATCH, WIDTH, generator=generator), torch.randint(CLASSES, (BATCH,), generator=generator)


def _adamw(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def _trained(ddp: nn.Module, optimizer: torch.optim.Optimizer, rank: int, *, steps: int = 4) -> dict[str, Any]:
    x, y = _sample(rank)
    for _ in range(steps):
        optimizer.zero_grad()
        CROSS_ENTROPY(ddp(x), y).backward()
        optimizer.step()
    if hasattr(optimizer, "wait"):
        optimizer.wait()
    return {name: value.clone() for name, value in ddp.module.state_dict().items()}  # type: ignore[union-attr]


def _plan(method: str, bucket_cap_mb: float | None = None) -> Plan:
    return Plan(method=method, bucket_cap_mb=bucket_cap_mb, ranks=2, rows=(), reason="by hand")


# What it returns -----------------------------------------------------------------------------------------------


def _end_to_end(rank: int, world_size: int, folder: Path) -> tuple[Any, ...]:
    _quick()

    def slower_on_one(output: Tensor, target: Tensor) -> Tensor:
        time.sleep(0.004 * rank)
        return CROSS_ENTROPY(output, target)

    model = _model(dropout=False)
    ddp, optim = overlap.auto(model, _adamw(model), sample=_sample(rank), **{**OPTIONS, "loss": slower_on_one})
    plan = Plan.of(ddp)
    plan.save(folder / f"plan{rank}.json")
    assert ddp.module is model
    result = _trained(ddp, optim, rank)
    plain = DistributedDataParallel(_model(dropout=False), bucket_cap_mb=plan.bucket_cap_mb)
    expected = _trained(plain, _adamw(plain), rank)
    return plan, result, expected


def test_ranks_that_differ_get_the_same_plan_and_train_as_plain_ddp_does(tmp_path: Path) -> None:
    (first, result, expected), (second, *_) = run_ranks(_end_to_end, 2, tmp_path)
    assert first == second
    assert first.ranks == 2
    assert METHODS[first.method].kind == "exact"
    assert {row.kind for row in first.rows} == {"exact"}
    measured = [row.candidate for row in first.rows if row.measured_ms is not None]
    assert Candidate("ddp") in measured
    assert len(measured) > 1
    # The sleep of the slower rank is in the profile.
    assert all(row.predicted_ms > 4 for row in first.rows)
    for name, value in expected.items():
        assert torch.equal(result[name], value), name
    assert Plan.load(tmp_path / "plan0.json") == Plan.load(tmp_path / "plan1.json") == first


def _each_method(rank: int, world_size: int) -> dict[str, Any]:
    plain = DistributedDataParallel(_model(dropout=False), bucket_cap_mb=0.01)
    found = {"plain": _trained(plain, _adamw(plain), rank)}
    for method in METHODS:
        model = _model(dropout=False)
        ddp, optim = overlap.auto(model, _adamw(model), plan=_plan(method, 0.01))
        found[method] = _trained(ddp, optim, rank)
        assert Plan.of(ddp).method == method
    return found


def test_a_plan_builds_what_it_says_and_exact_ones_are_plain_ddp_bit_for_bit() -> None:
    found, _ = run_ranks(_each_method, 2)
    for method in METHODS:
        same = all(torch.equal(found[method][name], value) for name, value in found["plain"].items())
        assert same == (METHODS[method].kind == "exact"), method


def _raced_by_hand(rank: int, world_size: int) -> tuple[Plan, Plan]:
    """The others are made to look much faster, so that they are raced and built."""
    _quick()
    chosen = []
    for method in ("zero-forward", "step"):
        real = choose.Race.run
        choose.Race.run = made_faster(real, method)
        order = choose.Options.order
        choose.Options.order = lambda self, fast=method: [("ddp", None, 1.0), (fast, None, 0.5)]
        model = _model(dropout=False)
        ddp, optim = overlap.auto(model, _adamw(model), sample=_sample(rank), allow="sharded", **OPTIONS)
        choose.Race.run, choose.Options.order = real, order
        _trained(ddp, optim, rank)
        chosen.append(Plan.of(ddp))
    return tuple(chosen)  # type: ignore[return-value]


def test_the_winner_of_the_race_is_what_is_built() -> None:
    (zero, step), other = run_ranks(_raced_by_hand, 2)
    assert (zero.method, step.method) == ("zero-forward", "step")
    assert "in the race" in zero.reason
    assert other == (zero, step)


def _bucket_sizes(rank: int, world_size: int, cap_mb: float | None) -> tuple[list[int], list[int]]:
    layers = [nn.Linear(300, 300) for _ in range(9)]
    ddp = DistributedDataParallel(nn.Sequential(*layers), bucket_cap_mb=cap_mb)
    seen: list[int] = []

    def note(state: Any, bucket: Any) -> Any:
        seen.append(bucket.buffer().nbytes)
        future: Any = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    note.__annotations__.clear()
    ddp.register_comm_hook(None, note)
    for _ in range(3):
        seen.clear()
        ddp(torch.ones(2, 300)).sum().backward()
    # Of a linear layer the bias comes first.
    reverse = list(reversed(list(ddp.module.named_parameters())))
    known = [ParameterTimes(name=n, shape=tuple(p.shape), needed_ms=0, ready_ms=k) for k, (n, p) in enumerate(reverse)]
    return sorted(seen), sorted(sum(one.nbytes for one in bucket) for bucket in cut(known, cap_mb))


@pytest.mark.parametrize("cap_mb", [None, 1.0, 0.3])
def test_buckets_are_cut_as_ddp_cuts_them(cap_mb: float | None) -> None:
    (seen, expected), _ = run_ranks(_bucket_sizes, 2, cap_mb)
    assert len(seen) > 1
    assert seen == expected


# What it leaves alone ------------------------------------------------------------------------------------------


def _left_alone(rank: int, world_size: int) -> None:
    _quick()
    model = _model()
    model[0].bias.requires_grad_(False)
    calls: list[int] = []
    model[4].register_forward_hook(lambda *_: None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
    x, y = _sample(rank)
    CROSS_ENTROPY(model(x), y).backward()
    optimizer.step()
    scheduler.step()
    CROSS_ENTROPY(model(x), y).backward()  # Leaves gradients.
    optimizer.register_step_post_hook(lambda *_: calls.append(1))
    before = copy.deepcopy([model.state_dict(), optimizer.state_dict(), scheduler.state_dict()])
    gradients = [None if p.grad is None else (p.grad, p.grad.clone()) for p in model.parameters()]
    versions = [p._version for p in model.parameters()]
    generators = torch.get_rng_state(), random.getstate()
    modes = [module.training for module in model.modules()]
    hooks = [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()]
    post = [len(p._post_accumulate_grad_hooks or ()) for p in model.parameters()]
    step = optimizer.step

    # Up to where the chosen one is built: DDP's constructor broadcasts rank 0's values, as it always does.
    class Stop(Exception):
        pass

    def stop(*args: Any, **options: Any) -> Any:
        raise Stop

    real, choose.wrap = choose.wrap, stop
    with pytest.raises(Stop):
        overlap.auto(model, optimizer, sample=(x, y), **OPTIONS)
    choose.wrap = real

    after = [model.state_dict(), optimizer.state_dict(), scheduler.state_dict()]
    _assert_same(after, before)
    for parameter, kept in zip(model.parameters(), gradients, strict=True):
        assert (parameter.grad is None) == (kept is None)
        assert kept is None or (parameter.grad is kept[0] and torch.equal(*kept))
    assert [p._version for p in model.parameters()] == versions
    assert torch.equal(torch.get_rng_state(), generators[0])
    assert random.getstate() == generators[1]
    assert [module.training for module in model.modules()] == modes
    assert [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()] == hooks
    assert [len(p._post_accumulate_grad_hooks or ()) for p in model.parameters()] == post
    assert [p.requires_grad for p in model.parameters()][:3] == [True, False, True]
    assert optimizer.step == step
    assert calls == []


def _assert_same(actual: Any, expected: Any) -> None:
    if isinstance(expected, Tensor):
        assert torch.equal(actual, expected)
    elif isinstance(expected, dict):
        assert actual.keys() == expected.keys()
        for key in expected:
            _assert_same(actual[key], expected[key])
    elif isinstance(expected, (list, tuple)):
        assert len(actual) == len(expected)
        for one, other in zip(actual, expected, strict=True):
            _assert_same(one, other)
    else:
        assert actual == expected


def test_measuring_and_racing_leave_every_bit_as_it_was() -> None:
    run_ranks(_left_alone, 2)


def test_the_check_would_notice_measuring_on_the_model_itself() -> None:
    def measured_in_place(rank: int, world_size: int) -> None:
        choose.Originals.copied = lambda self: self.own  # type: ignore[method-assign]
        _left_alone(rank, world_size)

    with pytest.raises(RankFailed, match=r"has changed|PeerError"):
        run_ranks(measured_in_place, 2)


def _refused(rank: int, world_size: int, case: str) -> str:
    _quick()
    model = _model()
    loss: Callable[..., Tensor] = CROSS_ENTROPY
    if case == "reaches":
        loss = lambda out, y: CROSS_ENTROPY(out, y) + model[0].weight.square().sum()  # noqa: E731
    elif case == "uncopyable":
        model.lock = __import__("threading").Lock()
    elif case == "shared":
        type(model).__deepcopy__ = lambda self, memo: self  # type: ignore[attr-defined]
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(UnsupportedError) as raised:
        overlap.auto(model, _adamw(model), sample=_sample(rank), **{**OPTIONS, "loss": loss})
    assert all(p.grad is None for p in model.parameters())
    assert all(torch.equal(one, other) for one, other in zip(model.parameters(), before, strict=True))
    return str(raised.value)


@pytest.mark.parametrize(
    ("case", "said"),
    [
        ("reaches", "a gradient of '0.weight' in the model itself"),
        ("uncopyable", "cannot be copied"),
        ("shared", "shares '0.weight' with the model"),
    ],
)
def test_what_cannot_be_put_back_is_refused_with_the_remedy(case: str, said: str) -> None:
    for words in run_ranks(_refused, 2, case):
        assert said in words
        assert "Plan.load(path)" in words


# Bad input and ranks that fail ---------------------------------------------------------------------------------

BAD: dict[str, tuple[dict[str, Any], str]] = {
    "sample of one": ({"sample": (torch.ones(2),)}, r"sample is 1 entries: give .* sample=\(x, y\)"),
    "sample of another type": ({"sample": torch.ones(2)}, "sample is Tensor: give"),
    "no sample": ({"sample": None}, "sample is NoneType: give"),
    "no loss": ({"loss": None}, "loss is a NoneType: give"),
    "loss without a scalar": ({"loss": lambda out, y: out}, r"loss returned shape \(8, 4\): give"),
    "loss without a gradient": ({"loss": lambda out, y: out.detach().sum()}, "loss returned .* without a gradient"),
    "loss of another type": ({"loss": lambda out, y: 1.0}, "loss returned float: give"),
    "unknown kind": (
        {"allow": ("exact", "4-bit")},
        "allow has '4-bit'; known are exact, 16-bit, 8-bit, low-rank, sharded",
    ),
    "unknown kind as a word": ({"allow": "all"}, "allow has 'all'; known are"),
    "allow of another type": ({"allow": 8}, "allow has 8; known are"),
    "memory": ({"memory": "tiny"}, "memory='tiny' is not 'small'"),
    "memory of nothing": ({"memory": 0}, "memory must be a whole number of at least 1"),
    "seconds": ({"seconds": -1}, "seconds must be greater than 0"),
    "report": ({"report": "/nowhere/plan.png"}, "report='/nowhere/plan.png' lies in a folder that does not exist"),
    "plan": ({"plan": "plan.json"}, r"plan is a str: give Plan.load\(path\)"),
    "options": ({"ddp_options": {"bucket_cap_mb": 5}}, "ddp_options has 'bucket_cap_mb'"),
}


def _bad_input(rank: int, world_size: int) -> dict[str, str]:
    group = dist.group.WORLD
    assert group is not None
    model = _model()
    optimizer = _adamw(model)
    given = {"sample": _sample(rank), **OPTIONS}
    before = issued(group)
    said = {}
    for name, (change, _) in BAD.items():
        with pytest.raises(ConfigurationError) as raised:
            overlap.auto(model, optimizer, **{**given, **change})
        said[name] = str(raised.value)
    wrapped = overlap.OverlappedOptimizer(_adamw(model))
    others = {
        "wrapped": (DistributedDataParallel(model), optimizer),
        "no module": (model.parameters(), optimizer),
        "nothing trained": (nn.Flatten(), optimizer),
        "no optimizer": (model, "adamw"),
        "overlapped": (model, wrapped),
        "another's": (_model(), optimizer),
    }
    after = issued(group)
    for name, (one, other) in others.items():
        with pytest.raises(ConfigurationError) as raised:
            overlap.auto(one, other, **given)  # type: ignore[arg-type]
        said[name] = str(raised.value)
    assert issued(group) == after
    assert "loss" in said["loss without a scalar"]
    assert before is not None
    return said


def test_bad_input_is_refused_by_name_before_any_collective() -> None:
    import re

    said, other = run_ranks(_bad_input, 2)
    assert said.keys() == other.keys()
    for name, (_, words) in BAD.items():
        assert re.search(words, said[name]), said[name]
    assert "model is a PyTorch's DistributedDataParallel already" in said["wrapped"] or "already" in said["wrapped"]
    assert "model is a generator" in said["no module"]
    assert "no parameter that requires a gradient" in said["nothing trained"]
    assert "optimizer is a str" in said["no optimizer"]
    assert "optimizer is a OverlappedOptimizer" in said["overlapped"]
    assert "none of the model's parameters" in said["another's"]


def test_without_a_process_group_it_says_what_to_do() -> None:
    model = _model()
    with pytest.raises(ConfigurationError, match="init_process_group first"):
        overlap.auto(model, _adamw(model), sample=_sample(0), loss=CROSS_ENTROPY)


def test_a_model_that_auto_has_not_made_has_no_plan() -> None:
    with pytest.raises(ConfigurationError, match=r"overlap\.auto has not made this model"):
        Plan.of(nn.Flatten())  # type: ignore[arg-type]


def _fails(rank: int, world_size: int, at_call: int) -> tuple[str, str, float]:
    """Rank 1's loss raises, while it is measured or in the middle of the race."""
    _quick()
    choose._LEAST_TIMEOUT_S, choose._TIMEOUT_STEPS = 2.0, 0
    calls = 0
    racing = False

    def loss(output: Tensor, target: Tensor) -> Tensor:
        nonlocal calls
        calls += racing or at_call < 3
        if rank == 1 and calls > at_call:
            raise ZeroDivisionError("no such class")
        return CROSS_ENTROPY(output, target)

    real = choose.Race.run

    def run(self: Any, rounds: int) -> None:
        nonlocal racing
        racing = True
        real(self, rounds)

    choose.Race.run = run  # type: ignore[method-assign]
    choose.Options.order = lambda self: [("ddp", None, 1.0), ("step", None, 0.5)]  # type: ignore[method-assign]
    model = _model()
    start_s = time.monotonic()
    error = ""
    try:
        overlap.auto(model, _adamw(model), sample=_sample(rank), **{**OPTIONS, "loss": loss})
    except (PeerError, ZeroDivisionError) as raised:
        error = f"{type(raised).__name__}: {raised}"
    took_s = time.monotonic() - start_s
    # The user's own group is as good as before.
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total.item() == world_size
    return error, "racing" if racing else "measuring", took_s


@pytest.mark.parametrize(("at_call", "phase"), [(1, "measuring"), (4, "racing")])
def test_a_rank_that_fails_ends_the_others_with_its_error(at_call: int, phase: str) -> None:
    (waiting, when, took_s), (raised, *_) = run_ranks(_fails, 2, at_call)
    assert raised == "ZeroDivisionError: no such class"
    assert waiting.startswith(
        "PeerError: another rank failed where all call overlap.auto: rank 1: ZeroDivisionError: no such class"
    )
    assert when == phase
    assert took_s < 15


def _bad_on_one(rank: int, world_size: int) -> str:
    model = _model()
    allow = ("exact",) if rank == 0 else ("nonsense",)
    with pytest.raises((PeerError, ConfigurationError)) as raised:
        overlap.auto(model, _adamw(model), sample=_sample(rank), loss=CROSS_ENTROPY, allow=allow)
    return f"{type(raised.value).__name__}: {raised.value}"


def test_bad_input_on_one_rank_alone_does_not_leave_the_others_waiting() -> None:
    first, second = run_ranks(_bad_on_one, 2)
    assert first.startswith(
        "PeerError: another rank failed where all call overlap.auto: rank 1: ConfigurationError: allow has 'nonsense'"
    )
    assert second.startswith("ConfigurationError: allow has 'nonsense'")


def _different(rank: int, world_size: int, case: str) -> str:
    _quick()
    if case == "models":
        model: nn.Module = nn.Linear(WIDTH, CLASSES + rank)
        options: dict[str, Any] = {"sample": _sample(rank), **OPTIONS}
    else:
        model, options = _model(), {"plan": _plan("step" if rank else "ddp")}
    with pytest.raises((PeerError, ConfigurationError)) as raised:
        overlap.auto(model, _adamw(model), **options)
    return str(raised.value)


@pytest.mark.parametrize(
    ("case", "said"), [("models", "have different models"), ("plans", "load the same file on all")]
)
def test_ranks_with_different_models_or_plans_are_told(case: str, said: str) -> None:
    assert all(said in words for words in run_ranks(_different, 2, case))
