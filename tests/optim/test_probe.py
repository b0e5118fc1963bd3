"""Learning by experiment how an optimizer may be stepped, without DDP."""

from __future__ import annotations

import copy
import functools
import random
import re
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from harness import assert_parity
from harness import third_party as users
from overlap.optim.probe import Separability, Verdict, probe
from overlap.optim.zero import division

SEPARABLE, COUPLED, UNKNOWN = Verdict.SEPARABLE, Verdict.COUPLED, Verdict.UNKNOWN


class MyAdamW(torch.optim.AdamW):
    """What is known of AdamW does not say what a class derived from it does."""


class MyAdafactor(torch.optim.Adafactor):
    pass


def _parameters(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Linear(8, 80), nn.Linear(80, 80), nn.LayerNorm(80))
    return list(model.to(dtype).parameters())


def _verdicts(found: Separability) -> tuple[Verdict, Verdict, Verdict]:
    return found.in_turn.verdict, found.by_parameter.verdict, found.by_element.verdict


class _ReadsTheFirstGroup(users.Lion):
    """Takes the rate of its first group for all."""

    def __init__(self, params: Any) -> None:
        first, *rest = params
        super().__init__([{"params": rest, "lr": 0.1}, {"params": [first], "lr": 0.01}])

    def begin(self) -> None:
        for group in self.param_groups:
            group["lr"] = self.param_groups[0]["lr"]


class _ChangesGradients(torch.optim.Optimizer):
    """Does to its gradients in ``step`` what optimizers of old do."""

    def __init__(self, params: Any, *, then: str) -> None:
        super().__init__(params, {"lr": 0.01})
        self.then = then

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                gradient = parameter.grad.data
                gradient.add_(parameter, alpha=0.1)
                parameter.add_(gradient, alpha=-group["lr"])
                if self.then == "zeroes":
                    parameter.grad.zero_()
                if self.then == "drops":
                    parameter.grad = None


USERS: dict[str, tuple[Callable[[Any], torch.optim.Optimizer], tuple[Verdict, Verdict, Verdict]]] = {
    "Lion": (users.Lion, (SEPARABLE, SEPARABLE, SEPARABLE)),
    "derived from AdamW": (MyAdamW, (SEPARABLE, SEPARABLE, SEPARABLE)),
    "derived from Adafactor": (MyAdafactor, (SEPARABLE, SEPARABLE, COUPLED)),
    "LAMB": (users.LAMB, (SEPARABLE, SEPARABLE, COUPLED)),
    "8 bits by blocks": (users.BlockwiseAdamW, (SEPARABLE, SEPARABLE, COUPLED)),
    "LAMB, global norm": (functools.partial(users.LAMB, max_norm=1.0), (COUPLED, COUPLED, COUPLED)),
    **{
        f"{then} its gradients": (functools.partial(_ChangesGradients, then=then), (SEPARABLE, SEPARABLE, SEPARABLE))
        for then in ("edits", "zeroes", "drops")
    },
    "Prodigy": (users.Prodigy, (COUPLED, COUPLED, COUPLED)),
    # Each of two optimizers counts its own steps, but one that is stepped twice counts twice.
    "counts its steps": (users.CountingSGD, (COUPLED, SEPARABLE, SEPARABLE)),
    "reads its first group": (_ReadsTheFirstGroup, (COUPLED, SEPARABLE, SEPARABLE)),
    "Lookahead": (lambda params: users.Lookahead(torch.optim.SGD(params, lr=0.1)), (COUPLED,) * 3),
    "step replaced": (lambda params: users.patch_step(torch.optim.SGD(params, lr=0.1)), (COUPLED,) * 3),
}


@pytest.mark.parametrize("name", USERS)
def test_the_experiment_tells_what_an_optimizer_couples(name: str) -> None:
    make, expected = USERS[name]
    assert _verdicts(probe(make(_parameters()))) == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("options", [{"foreach": True}, {"lr": torch.tensor(0.01)}, {"fused": True}], ids=str)
def test_the_experiment_agrees_with_what_is_known_of_adamw(dtype: torch.dtype, options: dict[str, Any]) -> None:
    optimizer = MyAdamW(_parameters(dtype), **options)
    assert _verdicts(probe(optimizer)) == _verdicts(probe(torch.optim.AdamW(_parameters()))) == (SEPARABLE,) * 3


class _CountsGroups(users.Lion):
    most = 0

    def begin(self) -> None:
        _CountsGroups.most = max(_CountsGroups.most, len(self.param_groups))


def test_the_experiment_takes_one_group_of_each_kind_however_many_there_are() -> None:
    parameters = [nn.Parameter(torch.ones(80, 80) if place % 2 else torch.ones(80)) for place in range(160)]
    groups = [{"params": [p], "lr": 0.1 / (place + 1), "name": f"{place}"} for place, p in enumerate(parameters)]
    assert _verdicts(probe(_CountsGroups(groups))) == (SEPARABLE,) * 3
    assert 0 < _CountsGroups.most <= 4


class _CouplesOneGroup(users.Lion):
    """Normalizes the gradients of the groups that ask for it by their norm over all of them."""

    def __init__(self, params: Any, asks: Callable[[dict[str, Any]], bool]) -> None:
        super().__init__(params)
        self.asks = asks

    def begin(self) -> None:
        for group in self.param_groups:
            gradients = [p.grad for p in group["params"] if p.grad is not None]
            if self.asks(group) and gradients:
                norm = torch.linalg.vector_norm(torch.stack([g.float().norm() for g in gradients]))
                for gradient in gradients:
                    gradient.add_(norm)


@pytest.mark.parametrize(
    ("option", "asks"),
    [
        ({"normalize": True}, lambda group: group["normalize"]),
        ({"algorithm": "normalized"}, lambda group: group.get("algorithm") == "normalized"),
        ({"max_norm": 1.0}, lambda group: group["max_norm"]),
        ({"own": None}, lambda group: "own" in group),
    ],
    ids=["switch", "text", "number", "key"],
)
def test_a_group_in_the_middle_that_is_stepped_otherwise_is_tried(option: dict[str, Any], asks: Any) -> None:
    usual = {"normalize": False, "max_norm": 0.0, "algorithm": "sign"}
    pairs = [[nn.Parameter(torch.ones(80)) for _ in range(2)] for _ in range(30)]
    pairs[17][0] = nn.Parameter(torch.ones(5000))
    groups = [{"params": pair, **usual, **(option if place == 17 else {})} for place, pair in enumerate(pairs)]
    assert probe(_CouplesOneGroup(groups, asks)).by_parameter.verdict is COUPLED


class _TakesTheLastButOne(users.Lion):
    def begin(self) -> None:
        self.param_groups[28]["lr"] = 0.1


def test_an_optimizer_that_looks_for_a_group_by_its_place_is_unknown() -> None:
    groups = [{"params": [nn.Parameter(torch.ones(8))]} for _ in range(30)]
    assert _verdicts(probe(_TakesTheLastButOne(groups))) == (UNKNOWN,) * 3


def test_the_experiment_of_a_sharded_optimizer_is_repeated_for_groups_of_a_new_kind_only(monkeypatch: Any) -> None:
    made: list[int] = []
    monkeypatch.setattr(division, "probe", lambda optimizer: made.append(len(optimizer.param_groups)))
    experiments = division.Experiments(users.Lion, {"lr": 0.1})
    group = {"params": [nn.Parameter(torch.ones(8))]}
    for groups in ([group], [group] * 2, [group] * 3, [group] * 3, [group] * 3 + [{**group, "lr": 0.3}]):
        experiments.separability_of(groups)
    assert made == [1, 2]
    experiments.separability_of([group, {**group, "weight_decay": 0.1}])
    experiments.separability_of([group, {"params": [nn.Parameter(torch.ones(8, 8))]}])
    assert made == [1, 2, 2, 2]


def test_a_rate_of_zero_at_the_start_hides_nothing() -> None:
    parameters = _parameters()
    optimizer = users.LAMB(parameters, max_norm=1.0)
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: step / 10)
    assert optimizer.param_groups[0]["lr"] == 0
    assert probe(optimizer).in_turn.verdict is COUPLED


def test_generators_that_step_draws_from_are_named() -> None:
    assert probe(users.SGLD(_parameters())).draws == ("torch",)
    assert probe(users.Lion(_parameters())).draws == ()


class _Uncopyable(users.Lion):
    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.lock = threading.Lock()


class _Closure(users.Lion):
    """Refers to its parameters from a function, which a copy would share."""

    def __init__(self, params: Any) -> None:
        params = list(params)
        super().__init__(params)
        self.decay = lambda: [p.data.mul_(0.9) for p in params]

    def begin(self) -> None:
        self.decay()


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (_Uncopyable, r"a copy of it raised TypeError: cannot pickle '_thread\.lock' object"),
        (_Closure, r"the function .*lambda.* refers to tensors"),
        (functools.partial(users.Lion, lr=float("nan")), "its parameters became infinite or NaN in the experiment"),
    ],
)
def test_what_cannot_be_tried_is_unknown_with_its_reason(make: Callable[[Any], Any], why: str) -> None:
    parameters = _parameters()
    before = copy.deepcopy(parameters)
    found = probe(make(parameters))
    assert _verdicts(found) == (UNKNOWN,) * 3
    assert re.search(why, found.in_turn.why)
    assert_parity(parameters, before, what="parameters after the experiment")


class _Busy(users.SGLD):
    """Touches everything that an experiment must put back or must not reach."""

    made = 0

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        type(self).made += 1
        self.mean = torch.zeros(())
        self.history: list[float] = []

    def begin(self) -> None:
        self.mean += 1
        self.history.append(random.random())
        self.state["n"] = self.state.get("n", 0) + 1
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1
            group["lr"].mul_(0.9)


def test_the_experiment_leaves_no_trace() -> None:
    parameters = _parameters()
    optimizer = _Busy([{"params": parameters[:2]}, {"params": parameters[2:]}])
    for group in optimizer.param_groups:
        group["lr"] = torch.tensor(0.01)
    calls: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("pre"))
    optimizer.register_step_post_hook(lambda *_: calls.append("post"))
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    calls.clear()
    handle = register_optimizer_step_post_hook(lambda *_: calls.append("global"))

    def everything() -> tuple[Any, ...]:
        return (
            [(p.detach().clone(), p.grad.clone(), p._version) for p in parameters],
            copy.deepcopy(optimizer.state_dict()),
            {key: copy.deepcopy(value) for key, value in vars(optimizer).items() if key in ("mean", "history")},
            torch.get_rng_state(),
            random.getstate(),
        )

    before = everything()
    found = probe(optimizer)
    handle.remove()
    assert found.draws == ("torch", "random") and found.in_turn.verdict is COUPLED
    assert_parity(everything(), before, what="everything after the experiment")
    assert calls == [] and _Busy.made == 1


class _Sums(users.Lion):
    """Issues a collective in `step`."""

    def begin(self) -> None:
        total = torch.zeros(())
        torch.distributed.all_reduce(total)


def test_a_step_that_issues_collectives_is_coupled_and_sends_nothing(tmp_path: Any) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        found = probe(_Sums(_parameters()))
    finally:
        torch.distributed.destroy_process_group()
    assert (found.by_parameter.verdict, found.by_parameter.why) == (COUPLED, "its step() issues collectives")


def test_adafactor_takes_its_eps_from_the_first_parameter_of_a_group() -> None:
    single, half = _parameters()[-4:], _parameters(torch.bfloat16)[-4:]
    found = probe(torch.optim.Adafactor([*single, *half]))
    assert _verdicts(found) == (COUPLED,) * 3
    assert "a group has torch.bfloat16 and torch.float32" in found.in_turn.why
    assert probe(torch.optim.Adafactor([*single, *half], eps=(1e-7, 1e-3))).in_turn.verdict is SEPARABLE
    assert probe(torch.optim.Adafactor([{"params": single}, {"params": half}])).in_turn.verdict is SEPARABLE
    # What is measured says the same as what is known.
    assert probe(MyAdafactor([*single, *half])).in_turn.verdict is COUPLED


def _frozen_and_scalar() -> list[Tensor]:
    frozen = nn.Parameter(torch.zeros(4), requires_grad=False)
    return [
        nn.Parameter(torch.tensor(1.0)),
        frozen,
        nn.Parameter(torch.zeros(0)),
        nn.Parameter(torch.ones(2, 2, 1, 2, 3)),
    ]


def test_scalars_empty_and_frozen_parameters_do_not_disturb_the_experiment() -> None:
    assert _verdicts(probe(users.Lion(_frozen_and_scalar()))) == (SEPARABLE,) * 3


def test_a_bound_step_that_was_set_back_is_the_classs_own() -> None:
    optimizer = torch.optim.SGD(_parameters(), lr=0.1)
    plain = optimizer.step
    optimizer.step = lambda *_: None  # type: ignore[method-assign]
    assert probe(optimizer).in_turn.why == "its step() was replaced on the object"
    optimizer.step = plain  # type: ignore[method-assign]
    torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    assert _verdicts(probe(optimizer)) == (SEPARABLE,) * 3
