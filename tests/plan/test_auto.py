"""`overlap.auto` on ranks: its result, the objects that it leaves alone, and failures on one rank.

Each world of ranks runs many cases, one after another; a failed one is reported by its name.
"""

import contextlib
import copy
import functools
import random
import re
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import overlap
from harness import on_ranks, run_ranks
from overlap import ConfigurationError, PeerError, Plan
from overlap._torch.c10d import issued
from overlap.plan import choice, race
from overlap.plan.candidates import METHODS

WIDTH, CLASSES, BATCH = 16, 4, 8
CROSS_ENTROPY = nn.functional.cross_entropy
ROUNDS = 5
OPTIONS: dict[str, Any] = {"loss": CROSS_ENTROPY, "quiet": True}


class _StoppedClock:
    """Takes the place of ``time`` in a race: no time passes, however busy the machine is."""

    monotonic = perf_counter = staticmethod(lambda: 0.0)


@contextlib.contextmanager
def _quick(*, fast: str | None = None) -> Iterator[None]:
    """Within a rank: all candidates race, for a few rounds; a step takes 1 ms on rank 0 and 2 ms on rank 1, and of the
    method ``fast`` next to nothing."""
    real = race.Race._sample_ms

    def sample_ms(self: Any, lane: Any) -> float:
        real(self, lane)
        return 1e-3 if lane.candidate == fast else 1.0 + dist.get_rank()

    with (
        mock.patch.object(race, "time", _StoppedClock),
        mock.patch.object(choice, "time", _StoppedClock),
        mock.patch.object(race, "_MOST_ROUNDS", ROUNDS),
        mock.patch.object(race, "_SAMPLE_MS", 1e-3),
        mock.patch.object(race.Race, "_sample_ms", sample_ms),
    ):
        yield


def _model(*, dropout: bool = False) -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.5 if dropout else 0.0)]
    return nn.Sequential(*layers, nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, CLASSES))


def _sample(rank: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(BATCH, WIDTH, generator=generator), torch.randint(CLASSES, (BATCH,), generator=generator)


def _adamw(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def _chosen(rank: int, *, fast: str | None = None, **options: Any) -> Plan:
    with _quick(fast=fast):
        return _raced(rank, **options)


def _raced(rank: int, *, model: nn.Module | None = None, **options: Any) -> Plan:
    model = _model() if model is None else model
    optimizer = options.pop("optimizer", None) or torch.optim.SGD(model.parameters(), lr=0.01)
    ddp, _ = overlap.auto(model, optimizer, **{"sample": _sample(rank), **OPTIONS, **options})
    return Plan.for_model(ddp)


def _trained(ddp: Any, optimizer: Any, rank: int) -> dict[str, Any]:
    x, y = _sample(rank)
    for _ in range(4):
        optimizer.zero_grad()
        CROSS_ENTROPY(ddp(x), y).backward()
        optimizer.step()
    getattr(optimizer, "wait", lambda: None)()
    return {name: value.clone() for name, value in ddp.module.state_dict().items()}


def _plan(method: str, **fields: Any) -> Plan:
    return Plan(**{"method": method, "ranks": 2, "rows": (), "reason": "by hand", **fields})


def _each(cases: dict[str, Callable[[int], None]], rank: int) -> None:
    for name, case in cases.items():
        try:
            case(rank)
        except BaseException as error:
            error.add_note(f"in the case {name!r}")
            raise


# Its result ----------------------------------------------------------------------------------------------------------


def _end_to_end(rank: int, world_size: int) -> Any:
    model = _model()
    with _quick():
        ddp, optim = overlap.auto(model, _adamw(model), sample=_sample(rank), **OPTIONS)
    plan = Plan.for_model(ddp)
    assert ddp.module is model
    result = _trained(ddp, optim, rank)
    plain = DistributedDataParallel(_model())
    return plan, result, _trained(plain, _adamw(plain), rank)


def test_ranks_that_differ_get_the_same_plan_and_train_as_plain_ddp_does() -> None:
    (first, result, expected), (second, *_) = run_ranks(_end_to_end, 2)
    assert first == second
    assert first.ranks == 2 and first.parameters == 8
    assert {METHODS[row.method].kind for row in first.rows} == {"exact"}
    measured = {row.method: row for row in first.rows if row.measured_ms is not None}
    assert set(measured) == {"ddp", "step"}
    assert all(row.measured_ms == 2 for row in measured.values()), "the slower rank counts"
    assert measured["step"].rounds == ROUNDS
    for name, value in expected.items():
        assert torch.equal(result[name], value), name


def _each_method(rank: int) -> None:
    """Built by a plan; the exact ones are plain DDP, bit for bit."""
    plain = DistributedDataParallel(_model(), bucket_cap_mb=0.01)
    expected = _trained(plain, _adamw(plain), rank)
    for method in METHODS:
        model = _model()
        ddp, optim = overlap.auto(model, _adamw(model), plan=_plan(method), ddp_options={"bucket_cap_mb": 0.01})
        found = _trained(ddp, optim, rank)
        assert Plan.for_model(ddp).method == method
        is_same = all(torch.equal(found[name], value) for name, value in expected.items())
        assert is_same == (METHODS[method].kind == "exact"), method


def _winner(rank: int, method: str, **options: Any) -> None:
    """The fastest is built, also of an optimizer that has stepped."""
    model, (x, y) = _model(), _sample(rank)
    optimizer = _adamw(model)
    CROSS_ENTROPY(model(x), y).backward()
    optimizer.step()
    with _quick(fast=method):
        ddp, optim = overlap.auto(model, optimizer, sample=(x, y), **OPTIONS, **options)
    _trained(ddp, optim, rank)
    assert Plan.for_model(ddp).method == method and "was chosen: it took" in Plan.for_model(ddp).reason


def _clipped(rank: int) -> None:
    model, (x, y) = _model(), _sample(rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options = {"sample": (x, y), **OPTIONS, "allow": "16-bit", "updates": "step"}
    with _quick(fast="bf16-deferred"):
        ddp, optim = overlap.auto(model, optimizer, **options)
    assert Plan.for_model(ddp).method == "bf16-deferred"
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


def _sparse(rank: int) -> None:
    model = nn.Sequential(nn.EmbeddingBag(10, 4, sparse=True))
    plan = _chosen(rank, model=model, sample=(torch.arange(24).reshape(8, 3) % 10, _sample(rank)[1]))
    assert plan.method == "ddp"
    assert "this gradient is sparse" in next(row.note for row in plan.rows if row.method == "step")


def _hooked_on_one(rank: int) -> None:
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    if rank == 1:
        optimizer.register_step_pre_hook(lambda *_: None)
    plan = _chosen(rank, model=model, optimizer=optimizer, fast="step")
    assert plan.method == "ddp"
    assert all("pre-hook" in row.note for row in plan.rows if row.method == "step")


def _has_collectives(rank: int) -> None:
    """By its own clock rank 1 would take 3 steps where rank 0 takes 6."""
    calls = 0

    def loss(output: Tensor, target: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        total = output.detach().sum()
        dist.all_reduce(total)
        return CROSS_ENTROPY(output, target) + total

    with _quick(), mock.patch.object(race, "_SAMPLE_MS", 6.0):
        _raced(rank, loss=loss)
    of_ranks: list[Any] = [None, None]
    dist.all_gather_object(of_ranks, calls)
    assert of_ranks[0] == of_ranks[1]


def _does_not_diverge(rank: int) -> None:
    model = _model()
    seen: list[float] = []

    def loss(output: Tensor, target: Tensor) -> Tensor:
        value = (output - 1).square().mean()
        seen.append(value.item())
        return value

    optimizer = torch.optim.SGD(model.parameters(), lr=1e6)
    _chosen(rank, model=model, optimizer=optimizer, loss=loss)
    assert optimizer.param_groups[0]["lr"] == 1e6
    assert max(seen) < 1e3


# Untouched -----------------------------------------------------------------------------------------------------------


def _changes_its_input(module: nn.Module, inputs: tuple[Tensor]) -> None:
    inputs[0].sub_(0.5)


def _left_alone(rank: int) -> None:
    model = _model(dropout=True)
    model[0].bias.requires_grad_(False)
    calls: list[int] = []
    model[4].register_forward_hook(lambda *_: None)
    model[0].register_forward_pre_hook(_changes_its_input)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
    x, y = _sample(rank)
    CROSS_ENTROPY(model(x), y).backward()
    optimizer.step()
    scheduler.step()
    CROSS_ENTROPY(model(x), y).backward()  # Leaves gradients.
    optimizer.register_step_post_hook(lambda *_: calls.append(1))
    before = copy.deepcopy([model.state_dict(), optimizer.state_dict(), scheduler.state_dict(), x])
    gradients = [None if p.grad is None else (p.grad, p.grad.clone()) for p in model.parameters()]
    versions = [p._version for p in model.parameters()]
    generators = torch.get_rng_state(), random.getstate()
    modes = [module.training for module in model.modules()]
    hooks = [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()]
    step = optimizer.step

    # Up to where the chosen one is built: DDP's constructor broadcasts rank 0's values, as it always does.
    class Stop(Exception):
        pass

    class NotBuilt(DistributedDataParallel):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            raise Stop

    with _quick(), mock.patch.object(choice, "DistributedDataParallel", NotBuilt), pytest.raises(Stop):
        overlap.auto(model, optimizer, sample=(x, y), **{**OPTIONS, "allow": ("sharded", "low-rank")})

    after = [model.state_dict(), optimizer.state_dict(), scheduler.state_dict(), x]
    torch.testing.assert_close(after, before, rtol=0, atol=0)
    for parameter, kept in zip(model.parameters(), gradients, strict=True):
        assert (parameter.grad is None) == (kept is None)
        assert kept is None or (parameter.grad is kept[0] and torch.equal(*kept))
    assert [p._version for p in model.parameters()] == versions
    assert torch.equal(torch.get_rng_state(), generators[0])
    assert random.getstate() == generators[1]
    assert [module.training for module in model.modules()] == modes
    assert [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()] == hooks
    assert [p.requires_grad for p in model.parameters()][:3] == [True, False, True]
    assert optimizer.step == step
    assert calls == []


class _Head(nn.Module):
    center: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("center", torch.zeros(CLASSES))
        self.scale = nn.Linear(CLASSES, CLASSES)

    def of(self, output: Tensor, target: Tensor) -> Tensor:
        self.center.mul_(0.9).add_(output.detach().mean(0), alpha=0.1)
        return CROSS_ENTROPY(self.scale(output) - self.center, target)


def _loss_with_state(rank: int) -> None:
    model, head = _model(), _Head()
    head.scale.weight.grad = torch.ones(CLASSES, CLASSES)
    before = copy.deepcopy([head.state_dict(), head.scale.weight.grad])
    optimizer = torch.optim.SGD([*model.parameters(), *head.parameters()], lr=0.1)
    _chosen(rank, model=model, optimizer=optimizer, loss=head.of)
    torch.testing.assert_close([head.state_dict(), head.scale.weight.grad], before, rtol=0, atol=0)
    assert head.scale.bias.grad is None


def _raced_as_the_loop_steps(rank: int) -> None:
    seen: set[tuple[torch.dtype, bool]] = set()

    def loss(output: Tensor, target: Tensor) -> Tensor:
        seen.add((output.dtype, torch.is_autocast_enabled("cpu")))
        return CROSS_ENTROPY(output, target)

    steps, backwards = 0, 0

    def step(self: Any, batch: Any, real: Any = race._Lane.step) -> None:
        nonlocal steps
        steps += 1
        real(self, batch)
        assert not torch.is_autocast_enabled("cpu"), "in the update"

    def backward(self: Any, batch: Any, real: Any = race._Lane._backward) -> None:
        nonlocal backwards
        backwards += 1
        real(self, batch)

    with mock.patch.object(race._Lane, "step", step), mock.patch.object(race._Lane, "_backward", backward):
        with torch.autocast("cpu", dtype=torch.float16):
            plan = _chosen(rank, loss=loss, accumulate=4)
        assert "Raced with 4 backwards a step, under autocast to torch.float16." in plan.reason
        assert seen == {(torch.float16, True)} and backwards == 4 * steps
        seen.clear()
        assert (
            "1 backward a step, under autocast to torch.bfloat16"
            in _chosen(rank, loss=loss, autocast=torch.bfloat16).reason
        )
        assert seen == {(torch.bfloat16, True)}


def _uncopyable(rank: int) -> None:
    model = _model()
    model.lock = __import__("threading").Lock()
    with pytest.raises((ConfigurationError, PeerError), match=r"cannot be copied .*Plan\.load\(path\)"):
        _chosen(rank, model=model)


@on_ranks(2, timeout_s=100)
def test_races_of_all_kinds(rank: int, world_size: int) -> None:
    cases: dict[str, Callable[[int], None]] = {
        "each method": _each_method,
        "sharded wins": functools.partial(_winner, method="zero-forward", allow="sharded"),
        "exact wins": functools.partial(_winner, method="step", allow=("sharded", "8-bit", "low-rank")),
        "updates in step: the loop clips and skips": _clipped,
        "sparse gradients": _sparse,
        "a pre-hook on one rank": _hooked_on_one,
        "a loss with collectives": _has_collectives,
        "a high learning rate": _does_not_diverge,
        "every bit is left as it was": _left_alone,
        "a method as loss is copied": _loss_with_state,
        "a model that cannot be copied": _uncopyable,
        "autocast and accumulation": _raced_as_the_loop_steps,
    }
    _each(cases, rank)


# Wrong arguments, and failures on one rank ---------------------------------------------------------------------------

BAD: dict[str, tuple[dict[str, Any], str]] = {
    "sample of one": ({"sample": (torch.ones(2),)}, r"sample is 1 entries: give .* sample=\(x, y\)"),
    "no loss": ({"loss": None}, "loss is a NoneType: give"),
    "loss without a scalar": ({"loss": lambda out, y: out}, r"loss returned shape \(8, 4\): give"),
    "loss without a gradient": ({"loss": lambda out, y: out.detach().sum()}, "loss returned .* without a gradient"),
    "unknown kind": ({"allow": ("exact", "4-bit")}, "allow has '4-bit'; known are exact, 16-bit, 8-bit, low-rank"),
    "seconds": ({"seconds": -1}, "seconds must be greater than 0"),
    "accumulate": ({"accumulate": 0}, "accumulate must be a whole number of at least 1, got 0"),
    "autocast": ({"autocast": "bf16"}, "autocast is a dtype such as torch.bfloat16, or None, got 'bf16'"),
    "plan": ({"plan": "plan.json"}, r"plan is a str: give Plan.load\(path\)"),
    "options": ({"ddp_options": 5}, "ddp_options=5 is not a dict"),
    "ranks of a plan": ({"plan": _plan("ddp", ranks=3)}, "plan was made for 3 ranks and .* here are 2"),
    "parameters of a plan": (
        {"plan": _plan("ddp", parameters=5)},
        "made for .* a model with 5 trained .* here are 2 and 8: leave",
    ),
}


def _bad_input(rank: int) -> None:
    group = dist.group.WORLD
    assert group is not None
    model = _model()
    wrapped = DistributedDataParallel(_model())
    cases: dict[str, tuple[Any, Any, dict[str, Any], str]] = {
        name: (model, _adamw(model), *case) for name, case in BAD.items()
    }
    cases |= {
        "in DDP": (wrapped, _adamw(model), {}, "DistributedDataParallel: give the torch.nn.Module"),
        "nothing trained": (nn.Flatten(), _adamw(model), {}, "model has trained parameters on 0 devices"),
        "overlapped": (model, overlap.OverlappedOptimizer(_adamw(model)), {}, "optimizer is a OverlappedOptimizer"),
        "another's": (_model(), _adamw(model), {}, "none of the model's parameters"),
        "closure": (model, torch.optim.LBFGS(model.parameters()), {}, r"LBFGS evaluates the model again"),
    }
    before = issued(group)
    for name, (one, other, options, words) in cases.items():
        with _quick(), pytest.raises(ConfigurationError) as raised:
            overlap.auto(one, other, **{"sample": _sample(rank), **OPTIONS, **options})
        assert re.search(words, str(raised.value)), (name, str(raised.value))
    assert issued(group) == before, "a collective on the user's group"


def test_auto_needs_a_process_group_and_a_plan_its_model() -> None:
    model = _model()
    with pytest.raises(ConfigurationError, match="init_process_group first"):
        overlap.auto(model, _adamw(model), sample=_sample(0), loss=CROSS_ENTROPY)
    with pytest.raises(ConfigurationError, match=r"overlap\.auto has not made this model"):
        Plan.for_model(nn.Flatten())  # type: ignore[arg-type]


def _bad_on_one(rank: int) -> None:
    words = "rank 1: ConfigurationError: allow has 'nonsense'" if rank == 0 else "^allow has 'nonsense'"
    with pytest.raises(PeerError if rank == 0 else ConfigurationError, match=words):
        _chosen(rank, allow="exact" if rank == 0 else "nonsense")


def _differ(rank: int, words: str, **options: Any) -> None:
    model = nn.Linear(WIDTH, CLASSES + rank) if "models" in words else _model()
    with pytest.raises((PeerError, ConfigurationError), match=words):
        _chosen(rank, model=model, **{name: value[rank] for name, value in options.items()})


def _fails(rank: int, at_call: int) -> None:
    """Rank 1's loss raises, before the race or in the middle of it."""
    calls = 0

    def loss(output: Tensor, target: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        if rank == 1 and calls == at_call:
            raise ZeroDivisionError("no such class")
        return CROSS_ENTROPY(output, target)

    words = "another rank failed where all call overlap.auto: rank 1: ZeroDivisionError: no such class"
    with pytest.raises(PeerError if rank == 0 else ZeroDivisionError, match=words if rank == 0 else "no such class"):
        _chosen(rank, loss=loss, allow="sharded")
    # The user's own group is as good as before.
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total.item() == 2


def _out_of_memory(rank: int, method: str, where: str) -> None:
    """Rank 1 has no memory for one method, and nothing waits for a timeout."""
    real_attach, real_step = overlap.AllReduce.attach, race._Lane.step

    def attach(self: Any, context: Any) -> None:
        if rank == 1 and where == "registration":
            raise torch.OutOfMemoryError("no memory")
        real_attach(self, context)

    def step(self: Any, batch: Any) -> None:
        if rank == 1 and where == "forward" and self.candidate == method:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes")
        real_step(self, batch)
        if rank == 1 and where == "update" and self.candidate == method:
            raise MemoryError

    with mock.patch.object(overlap.AllReduce, "attach", attach), mock.patch.object(race._Lane, "step", step):
        if method == "ddp":
            with pytest.raises((ConfigurationError, PeerError), match="ddp does not take this model: out of memory on"):
                _chosen(rank)
            return
        plan = _chosen(rank, fast=method, allow="sharded")
    assert plan.method != method
    rows = {row.method: row for row in plan.rows}
    assert rows[method].note == "out of memory on rank 1"
    raced = {name for name, row in rows.items() if row.measured_ms is not None}
    assert raced == {"ddp", "step", "zero", "zero-forward"} - {method}


@on_ranks(3, group_timeout_s=20)
def test_ranks_in_different_numbers_of_groups_race(rank: int, world_size: int) -> None:
    some = dist.new_group([1, 2])
    dist.new_group([0, 1])
    if rank:
        _chosen(rank, process_group=some, allow="exact")


# A rank that waits for another one's timeout fails by the deadline of its world, which is shorter.
@on_ranks(2, timeout_s=100, group_timeout_s=300)
def test_an_error_a_difference_and_full_memory_on_one_rank_are_so_on_all(rank: int, world_size: int) -> None:
    cases: dict[str, Callable[[int], None]] = {
        "bad input, before any collective": _bad_input,
        "one has bad input": _bad_on_one,
        "models": functools.partial(_differ, words="different models: give the same"),
        "allow": functools.partial(_differ, words="different candidates", allow=["exact", "16-bit"]),
        "plan on one": functools.partial(
            _differ, words="plans, None on rank 1 and ddp on rank 0", plan=[_plan("ddp"), None]
        ),
        "fails before the race": functools.partial(_fails, at_call=2),
        "fails in the race": functools.partial(_fails, at_call=30),
        "registers without memory": functools.partial(_out_of_memory, method="step", where="registration"),
        "updates without memory": functools.partial(_out_of_memory, method="zero-forward", where="update"),
        "plain DDP without memory": functools.partial(_out_of_memory, method="ddp", where="forward"),
    }
    _each(cases, rank)
