"""`overlap.auto` measures what is unusual: collectives in a loss, inputs changed in place, candidates that refuse."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import overlap
from harness import run_ranks
from harness.races import made_faster
from overlap import ConfigurationError, Plan
from overlap.plan import choose, race

OPTIONS: dict[str, Any] = {"seconds": 20.0, "quiet": True}
CROSS_ENTROPY = nn.functional.cross_entropy


def _quick() -> None:
    race._MOST_ROUNDS = 2
    choose._COMPUTE_SHARE = 0.001


def _against_plain(method: str) -> None:
    choose.Options.order = lambda self: [("ddp", None, 1.0), (method, None, 0.5)]  # type: ignore[method-assign]


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))


def _sample(rank: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(8, 16, generator=generator), torch.randint(4, (8,), generator=generator)


def _collectives(rank: int, world_size: int) -> int:
    """By its own clock rank 1 would take fewer steps: it has less time left, and each takes longer."""
    _quick()
    choose._COMPUTE_SHARE = 0.02
    _against_plain("step")
    calls = 0

    def loss(output: Tensor, target: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        time.sleep(0.01 + 0.05 * rank)
        total = output.detach().sum()
        dist.all_reduce(total)
        time.sleep(0.02 * rank)
        return CROSS_ENTROPY(output, target) + total

    model = _model()
    overlap.auto(model, torch.optim.SGD(model.parameters(), lr=0.01), sample=_sample(rank), loss=loss, **OPTIONS)
    return calls


def test_ranks_take_equally_many_steps_so_that_a_loss_may_have_collectives() -> None:
    first, second = run_ranks(_collectives, 2)
    assert first == second


class _InPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = _model()

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.inner(x.sub_(0.5).div_(0.7))
        return output


def _changed_in_place(rank: int, world_size: int) -> bool:
    _quick()
    model, (x, y) = _InPlace(), _sample(rank)
    before = x.clone()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    overlap.auto(model, optimizer, sample=(x, y), loss=CROSS_ENTROPY, **OPTIONS)
    return torch.equal(x, before)


def test_a_model_that_changes_its_input_gets_a_copy_of_it() -> None:
    assert run_ranks(_changed_in_place, 2) == [True, True]


def _sparse(rank: int, world_size: int) -> Plan:
    _quick()
    model = nn.Sequential(nn.EmbeddingBag(10, 4, sparse=True))
    sample = torch.arange(24).reshape(8, 3) % 10, _sample(rank)[1]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ddp, _ = overlap.auto(model, optimizer, sample=sample, loss=CROSS_ENTROPY, **OPTIONS)
    return Plan.of(ddp)


def test_a_model_with_sparse_gradients_is_left_to_plain_ddp() -> None:
    plan, other = run_ranks(_sparse, 2)
    assert plan == other
    assert plan.method == "ddp"
    assert any("sparse" in row.note for row in plan.rows if row.method == "step")


def _hooked_on_one(rank: int, world_size: int) -> Plan:
    _quick()
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    if rank == 1:
        optimizer.register_step_pre_hook(lambda *_: None)
    ddp, _ = overlap.auto(model, optimizer, sample=_sample(rank), loss=CROSS_ENTROPY, **OPTIONS)
    return Plan.of(ddp)


def test_a_pre_hook_on_one_rank_rules_updates_in_backward_out_on_all() -> None:
    plan, other = run_ranks(_hooked_on_one, 2)
    assert plan == other
    assert all("pre-hook" in row.note for row in plan.rows if row.update == "in backward")
    assert plan.method == "ddp"


def _not_written(rank: int, world_size: int, path: str) -> tuple[str, list[str]]:
    import warnings

    import overlap.plan.picture as picture

    _quick()

    def full(*args: Any) -> None:
        raise OSError("no space left")

    picture.save_plan = full
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ddp, _ = overlap.auto(model, optimizer, sample=_sample(rank), loss=CROSS_ENTROPY, report=path, **OPTIONS)
    return Plan.of(ddp).method, [str(one.message) for one in caught if "report=" in str(one.message)]


def test_a_report_that_cannot_be_written_is_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    (first, said), (second, nothing) = run_ranks(_not_written, 2, str(tmp_path / "plan.png"))
    assert first == second
    assert "was not written (OSError: no space left)" in said[0]
    assert nothing == []


def _refused(rank: int, world_size: int, case: str) -> str:
    model, options = _model(), {"sample": _sample(rank), "loss": CROSS_ENTROPY, **OPTIONS}
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    plan = {"method": "ddp", "bucket_cap_mb": None, "ranks": 2, "rows": (), "reason": ""}
    if case == "format":
        options["report"] = "plan.xyz"
    elif case == "closure":
        optimizer = torch.optim.LBFGS(model.parameters())
    elif case == "lazy":
        model = nn.Sequential(nn.LazyLinear(4))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    elif case == "plan on one":
        options["plan"] = Plan(**plan) if rank == 0 else None
    elif case == "ranks":
        options["plan"] = Plan(**{**plan, "ranks": 3})
    elif case == "parameters":
        options["plan"] = Plan(**plan, parameters=5)
    with pytest.raises(ConfigurationError) as raised:
        overlap.auto(model, optimizer, **options)
    return str(raised.value)


@pytest.mark.parametrize(
    ("case", "said"),
    [
        ("format", "report='plan.xyz' has no ending of a picture; known are"),
        ("closure", "LBFGS, whose step() needs a closure"),
        ("lazy", "model has '0.weight', which is made in the first forward"),
        ("plan on one", "plan was given on rank 0 and not on rank 1: give the same on all"),
        ("ranks", "plan was made for 3 ranks, and here are 2"),
        ("parameters", "plan was made for a model with 5 trained parameters, and this one has 4"),
    ],
)
def test_what_cannot_work_is_refused_on_all_ranks(case: str, said: str) -> None:
    if case == "format":
        pytest.importorskip("matplotlib")
    for words in run_ranks(_refused, 2, case):
        assert said in words


def _clipped(rank: int, world_size: int) -> str:
    _quick()
    choose.Race.run = made_faster(choose.Race.run, "bf16-deferred")  # type: ignore[method-assign]
    race._MOST_ROUNDS = 5
    _against_plain("bf16-deferred")
    model, (x, y) = _model(), _sample(rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options = {"allow": "16-bit", "updates": "step", **OPTIONS}
    ddp, optim = overlap.auto(model, optimizer, sample=(x, y), loss=CROSS_ENTROPY, **options)
    for batch in range(3):
        optim.zero_grad()
        CROSS_ENTROPY(ddp(x), y).backward()
        nn.utils.clip_grad_norm_(ddp.parameters(), 1e-3)
        before = [p.detach().clone() for p in model.parameters()]
        if batch == 1:
            optim.zero_grad()
            continue
        optim.step()
        moved = torch.stack([(p - q).norm() for p, q in zip(model.parameters(), before, strict=True)]).norm()
        assert 0 < moved.item() <= 1.01e-4
    return Plan.of(ddp).method


def test_with_updates_in_step_the_loop_may_clip_and_skip() -> None:
    assert run_ranks(_clipped, 2) == ["bf16-deferred"] * 2


class _Centered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.center: Tensor
        self.register_buffer("center", torch.zeros(4))
        self.scale = nn.Linear(4, 4)

    def of(self, output: Tensor, target: Tensor) -> Tensor:
        self.center.mul_(0.9).add_(output.detach().mean(0), alpha=0.1)
        return CROSS_ENTROPY(self.scale(output) - self.center, target)


def _own_state(rank: int, world_size: int, kind: str) -> None:
    _quick()
    model, head = _model(), _Centered()
    head.scale.weight.grad = torch.ones(4, 4)
    before = [one.detach().clone() for one in (head.center, head.scale.weight, head.scale.weight.grad)]
    optimizer = torch.optim.SGD([*model.parameters(), *head.parameters()], lr=0.1)
    loss = {"method": head.of, "closure": lambda output, target: 2.0 * head.of(output, target)}[kind]
    overlap.auto(model, optimizer, sample=_sample(rank), loss=loss, **OPTIONS)
    assert head.scale.weight.grad is not None
    after = [head.center, head.scale.weight, head.scale.weight.grad]
    assert all(torch.equal(one, other) for one, other in zip(after, before, strict=True))
    assert head.scale.bias.grad is None


@pytest.mark.parametrize("kind", ["method", "closure"])
def test_the_state_of_a_loss_is_put_back(kind: str) -> None:
    run_ranks(_own_state, 2, kind)


def _diverging(rank: int, world_size: int) -> list[float]:
    _quick()
    model = _model()
    seen: list[float] = []

    def loss(output: Tensor, target: Tensor) -> Tensor:
        value = (output - 1).square().mean()
        seen.append(value.item())
        return value

    optimizer = torch.optim.SGD(model.parameters(), lr=1e6)
    overlap.auto(model, optimizer, sample=_sample(rank), loss=loss, **OPTIONS)
    assert optimizer.param_groups[0]["lr"] == 1e6
    return seen


def test_measuring_does_not_diverge() -> None:
    for seen in run_ranks(_diverging, 2):
        assert max(seen) < 1e3
