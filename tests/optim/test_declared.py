"""An optimizer is known or declared, and its parts agree on what they write to its groups."""

import copy
import functools
from typing import Any

import pytest
import torch
from step_loops import Counting, SignSGD, registered, settle
from tools.check_optimizer import check
from torch import nn
from torch.optim import SGD, Adafactor, AdamW, Muon

from harness import assert_parity, on_ranks, plain_step, wrap
from harness.models import MLP, mean_squared_error
from overlap import (
    AllReduce,
    ConfigurationError,
    OverlappedOptimizer,
    PeerError,
    Step,
    UnsupportedError,
    ZeroRedundancyOptimizer,
    chain,
    declare,
)
from overlap.optim.declared import KNOWN, unit_of

STEPS = 5


@declare("element")
class Estimates(SignSGD):
    """Declared, and wrongly: it makes an estimate over all parameters, as Prodigy does."""

    def rate(self, group: dict[str, Any]) -> float:
        largest = max((float(p.grad.abs().sum()) for p in group["params"] if p.grad is not None), default=0.0)
        group["d"] = largest
        return float(group["lr"] * group["d"])


# What is known.


def test_what_is_no_class_of_optimizers_and_what_is_no_unit_are_refused_with_the_remedy() -> None:
    parameter = nn.Parameter(torch.zeros(1))
    with pytest.raises(ConfigurationError, match=r"takes a class of optimizers, got SGD; .*declare\(type\(optimizer\)"):
        declare(SGD([parameter], lr=0.1), "element")  # type: ignore[call-overload]
    with pytest.raises(ConfigurationError, match=r'takes a class of optimizers, got .*declare\(Lion, "element"'):
        declare(nn.Linear, "element")  # type: ignore[type-var]
    with pytest.raises(ConfigurationError, match=r'"element" or "parameter", got \'row\'; use declare\(SignSGD, '):
        declare(SignSGD, "row")  # type: ignore[call-overload]
    on_default_stream = type("AdamW8bit", (SignSGD,), {"__module__": "bitsandbytes.optim"})
    with pytest.raises(ConfigurationError, match=r"bitsandbytes .*Step\(OverlappedOptimizer\(optimizer\), deferred"):
        declare(on_default_stream, "parameter")


def test_a_declaration_returns_the_class_and_the_last_one_counts() -> None:
    class Mine(SignSGD):
        pass

    assert unit_of(Mine) is None
    assert declare(Mine, "parameter") is Mine and unit_of(Mine) == "parameter"
    assert declare("element")(Mine) is Mine and unit_of(Mine([nn.Parameter(torch.zeros(1))])) == "element"


class _Careful(AdamW):
    """Leaves out the whole step where any gradient is not finite."""

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        gradients = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        return super().step(closure) if all(bool(g.isfinite().all()) for g in gradients) else None


def test_a_class_of_another_package_is_not_known_by_a_name_of_torchs() -> None:
    ours = type("AdamW", (SignSGD,), {"__module__": "models.optim"})
    torchs = type("AdamW", (SignSGD,), {"__module__": "torch.nn"})
    assert unit_of(ours) is None and unit_of(torchs) is None
    assert unit_of(Muon) == unit_of(Adafactor) == "parameter"


OPTION_SETS: dict[str, list[dict[str, Any]]] = {
    "SGD": [{"momentum": 0.9, "fused": True, "maximize": True}],
    "Adam": [{"amsgrad": True, "foreach": True}],
    "AdamW": [{"fused": True, "amsgrad": True}, {"lr": torch.tensor(0.01)}],
    "Adagrad": [{"lr_decay": 0.1, "weight_decay": 0.1}],
    "Adadelta": [{"weight_decay": 0.1, "foreach": True}],
    "Adamax": [{"weight_decay": 0.1, "foreach": True}],
    "NAdam": [{"weight_decay": 0.1, "decoupled_weight_decay": True}],
    "RAdam": [{"weight_decay": 0.1, "decoupled_weight_decay": True}],
    "RMSprop": [{"centered": True, "momentum": 0.5}],
    "Rprop": [{"foreach": True}],
    "ASGD": [{"t0": 2, "weight_decay": 0.1, "foreach": True}],
    "Adafactor": [{"weight_decay": 0.1}],
    "Muon": [{"weight_decay": 0.1, "nesterov": False}],
}
OF_TORCH = {name.partition(".")[2]: unit for name, unit in KNOWN.items() if name.startswith("torch.")}


@pytest.mark.parametrize("name", OF_TORCH)
def test_the_table_says_of_torchs_optimizers_what_the_experiment_says(name: str) -> None:
    for options in [{}, *OPTION_SETS[name]]:
        found = check(getattr(torch.optim, name), only_matrices=name == "Muon", **{"lr": 0.01, **options})
        assert not found["interleaved"] and not found["parameter"], options
        assert bool(found["element"]) == (OF_TORCH[name] == "parameter"), (options, found["element"])


def test_the_experiment_finds_what_no_part_can_know() -> None:
    assert check(Counting) == {"interleaved": "", "parameter": "", "element": ""}
    found = check(Estimates)
    assert all("'d' of this Estimates is" in found[part] for part in ("interleaved", "parameter", "element"))
    assert "differs after step" in check(functools.partial(torch.optim.Adafactor, lr=0.01))["element"]


# What is neither known nor declared.


def _whole(way: str) -> str:
    return rf"overlap\.declare\({{name}}, \"parameter\"\).*{way}Step\(OverlappedOptimizer\(optimizer\), deferred=True\)"


@on_ranks(2)
def test_what_is_not_declared_is_refused_before_any_collective_with_both_remedies(rank: int, world_size: int) -> None:
    ddp = wrap(MLP.model())
    for cls, of in ((SignSGD, ""), (_Careful, "; AdamW is")):
        match = _whole("").format(name=cls.__name__)
        for stage in (
            Step(OverlappedOptimizer(cls(ddp.parameters()))),
            Step(cls(ddp.parameters())),
            Step(cls(ddp.parameters()), deferred=True),
        ):
            with pytest.raises(UnsupportedError, match=f"{cls.__name__} is neither known nor declared{of}, .*{match}"):
                chain(AllReduce(), stage).register(ddp)
        with pytest.raises(UnsupportedError, match=_whole(r"chain\(AllReduce\(\), ").format(name=cls.__name__)):
            ZeroRedundancyOptimizer(ddp.parameters(), cls)
    # On one rank alone, before ranks send anything: the other one hears of it where they would meet.
    with pytest.raises(UnsupportedError if rank == 0 else PeerError, match="SignSGD is neither known nor declared"):
        ZeroRedundancyOptimizer(ddp.parameters(), SignSGD if rank == 0 else SGD, lr=0.1)
    # The remedies, as they stand there.
    optimizer = SignSGD(ddp.parameters())
    chain(AllReduce(), Step(OverlappedOptimizer(optimizer), deferred=True)).register(ddp).remove()
    mine = declare(type("Mine", (SignSGD,), {}), "parameter")
    zero = ZeroRedundancyOptimizer(ddp.parameters(), mine)
    assert zero.partition == "parameter"
    with pytest.raises(UnsupportedError, match=r"Mine does not update each element .*partition='parameter'"):
        ZeroRedundancyOptimizer(ddp.parameters(), mine, partition="element")
    assert ZeroRedundancyOptimizer(ddp.parameters(), AdamW, partition="parameter").partition == "parameter"
    chain(AllReduce(), Step(OverlappedOptimizer(mine(ddp.parameters())))).register(ddp).remove()


# Groups.


def _groups(module: nn.Module) -> list[dict[str, Any]]:
    """The second is in no bucket of its own, and of the third no rank but one has anything."""
    first, second, third, *rest = module.parameters()
    return [{"params": [first, *rest]}, {"params": [second], "lr": 0.02}, {"params": [third], "lr": 0.03}]


FORMS = ("interleaved", "deferred", "zero in forward", "zero by parameter", "zero deferred", "zero alone")


def _options(optimizer: Any) -> list[dict[str, Any]]:
    return [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]


@on_ranks(2)
def test_counts_of_steps_in_groups_and_attributes_are_plain_ddps_in_every_form(rank: int, world_size: int) -> None:
    plain = wrap(MLP.model(), **MLP.ddp_options())
    reference: Any = Counting(_groups(plain.module))
    histories = []
    for step in range(STEPS):
        plain_step(plain, reference, MLP.batch(step, rank), mean_squared_error)
        histories.append(([p.detach().clone() for p in plain.parameters()], copy.deepcopy(_options(reference))))
    for name in FORMS:
        ddp = wrap(MLP.model(), **MLP.ddp_options())
        optimizer: Any = (
            ZeroRedundancyOptimizer(_groups(ddp.module), Counting)
            if "alone" in name
            else registered(name, ddp, functools.partial(Counting), parameters=_groups(ddp.module))
        )
        for step, (parameters, options) in enumerate(histories):
            if "alone" in name:
                optimizer.zero_grad()
            mean_squared_error(ddp, MLP.batch(step, rank)).backward()
            assert [group["step"] for group in optimizer.param_groups] == [step] * 3, name
            optimizer.step()
            settle(optimizer)
            assert_parity([p.detach() for p in ddp.parameters()], parameters, what=f"{name}, step {step}")
            assert_parity(_options(optimizer), options, what=f"groups of {name}, step {step}")
        inner = optimizer.optim if isinstance(optimizer, ZeroRedundancyOptimizer) else optimizer.optimizer
        assert inner.calls == STEPS, name
