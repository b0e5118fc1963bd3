"""Optimizers of torch.optim whose functions and kernels are called directly equal their own step() bit for bit,
whatever the loop does to groups and state between steps: without DDP, and a few with it."""

import copy
import functools
import gc
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from step_loops import backward, plain_ddp, registered, settle
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from harness import assert_parity, on_ranks, wrap
from harness.models import MLP
from overlap.optim.stepper import FoundInf, SubsetStepper


class _Derived(AdamW):
    """May override anything."""


MADE: Mapping[str, tuple[type[Optimizer], dict[str, Any]]] = {
    "AdamW": (AdamW, {"lr": 0.1}),
    "AdamW, amsgrad": (AdamW, {"lr": 0.1, "amsgrad": True}),
    "AdamW, maximize": (AdamW, {"lr": 0.1, "maximize": True, "eps": 1e-3}),
    "AdamW, tensor lr": (AdamW, {"lr": torch.tensor(0.1)}),
    "Adam": (Adam, {"lr": 0.1, "betas": (0.8, 0.9)}),
    "Adam, weight decay": (Adam, {"lr": 0.1, "weight_decay": 0.3}),
    "Adam, decoupled": (Adam, {"lr": 0.1, "weight_decay": 0.3, "decoupled_weight_decay": True}),
    "SGD": (SGD, {"lr": 0.1}),
    "SGD, tensor lr": (SGD, {"lr": torch.tensor(0.1), "weight_decay": 0.3, "maximize": True}),
    "SGD, momentum": (SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.5}),
    "SGD, Nesterov": (SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.3}),
}
LEFT: Mapping[str, tuple[type[Optimizer], dict[str, Any]]] = {
    "AdamW, capturable": (AdamW, {"lr": 0.1, "fused": True, "capturable": True}),
    "AdamW, tensor betas": (AdamW, {"lr": 0.1, "fused": True, "betas": (torch.tensor(0.8), torch.tensor(0.9))}),
    "a derived class": (_Derived, {"lr": 0.1, "fused": True}),
}


def _replace_entries(optimizer: Optimizer) -> None:
    for parameter, entry in list(optimizer.state.items()):
        optimizer.state[parameter] = {key: value / 2 for key, value in entry.items()}


def _replace_tensors(optimizer: Optimizer) -> None:
    for entry in optimizer.state.values():
        entry.update({key: value / 2 for key, value in entry.items() if isinstance(value, Tensor)})


def _swap_groups(optimizer: Optimizer) -> None:
    first, second = optimizer.param_groups
    first["params"], second["params"] = second["params"], first["params"]


def _add_group(optimizer: Optimizer) -> None:
    first = optimizer.param_groups[0]["params"]
    optimizer.add_param_group({"params": [first.pop()], "lr": 0.01})


def _set(**options: Any) -> Callable[[Optimizer], None]:
    return lambda optimizer: optimizer.param_groups[0].update(options)


def _load(optimizer: Optimizer) -> None:
    saved = copy.deepcopy(optimizer.state_dict())
    for entry in saved["state"].values():
        entry.update({key: value / 2 for key, value in entry.items() if isinstance(value, Tensor)})
    saved["param_groups"][1]["lr"] = 0.01
    optimizer.load_state_dict(saved)


EVENTS: Mapping[str, Callable[[Optimizer], None]] = {
    "nothing": lambda optimizer: None,
    "scheduler": lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5).step(),
    "load_state_dict": _load,
    "replaced entries": _replace_entries,
    "replaced tensors": _replace_tensors,
    "state in place": lambda optimizer: [value.div_(2) for s in optimizer.state.values() for value in s.values()],
    "cleared state": lambda optimizer: optimizer.state.clear(),
    "swapped groups": _swap_groups,
    "an added group": _add_group,
    "other options": _set(lr=0.3, weight_decay=0.2, maximize=True),
    "momentum": _set(momentum=0.7, nesterov=False),
    "no momentum": _set(momentum=0.0, nesterov=False),
    "no fused kernel": _set(fused=False),
    "foreach": _set(fused=False, foreach=True),
}


def _parameters(other: torch.dtype) -> list[nn.Parameter]:
    torch.manual_seed(0)
    shapes_and_dtypes = [((33, 7), torch.float32), ((5,), torch.float32), ((), torch.float32), ((9, 9), other)]
    return [nn.Parameter(torch.randn(shape).to(dtype)) for shape, dtype in shapes_and_dtypes * 2]


def _made(cls: type[Optimizer], options: Mapping[str, Any]) -> tuple[list[nn.Parameter], Optimizer]:
    # For bfloat16 on a CPU what PyTorch's kernel of SGD with momentum computes changes from run to run.
    parameters = _parameters(torch.float64 if cls is SGD else torch.bfloat16)
    groups = [{"params": parameters[:3]}, {"params": parameters[3:], "lr": 0.2}]
    return parameters, cls(groups, **copy.deepcopy(dict(options)))


def _step_plain(optimizer: Optimizer, parameters: list[nn.Parameter], gradients: Mapping[int, Tensor]) -> None:
    for place, parameter in enumerate(parameters):
        parameter.grad = gradients.get(place)
    optimizer.step()


class _Candidate:
    """Steps an optimizer in two parts of both groups, or whole; notes how often a twin did it."""

    def __init__(self, optimizer: Optimizer, parameters: list[nn.Parameter], *, is_whole: bool) -> None:
        self._optimizer, self._parameters, self._is_whole = optimizer, parameters, is_whole
        self.stepper = SubsetStepper(optimizer)
        self.twins = 0
        inner = self.stepper._step

        def counted(*arguments: Any) -> None:
            self.twins += 1
            inner(*arguments)

        self.stepper._step = counted  # type: ignore[method-assign]

    def step(self, gradients: Mapping[int, Tensor]) -> None:
        of = {place: self._parameters[place] for place in gradients}
        if self._is_whole and self.stepper.step_by_kernels(list(of.values()), list(gradients.values())):
            return
        self.stepper.begin()
        for part in (list(of)[1::2], list(of)[::2]):
            self.stepper.step([of[place] for place in part], [gradients[place] for place in part])
        self.stepper.finish()


def _compare(
    made: tuple[type[Optimizer], dict[str, Any]], event: Callable[[Optimizer], None], what: str, *, is_whole: bool
) -> _Candidate:
    parameters, plain = _made(*made)
    own, optimizer = _made(*made)
    candidate = _Candidate(optimizer, own, is_whole=is_whole)
    generator = torch.Generator().manual_seed(1)
    for step in range(6):
        gradients = {
            place: torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
            for place, parameter in enumerate(parameters)
            if (place, step) != (1, 1)
        }
        if step == 3:
            event(plain)
            event(optimizer)
            candidate.twins = 0
        is_fused = bool(optimizer.defaults["fused"])
        found_inf = {4: torch.tensor(1.0), 5: torch.tensor(0.0)}.get(step) if is_fused else None
        if found_inf is not None and any(group.get("momentum") for group in plain.param_groups):
            found_inf.zero_()  # SGD's kernel with momentum cannot skip.
        verdict = FoundInf(found_inf, None if found_inf is None else torch.tensor(4.0))
        if found_inf is not None and not all(group["fused"] for group in plain.param_groups):
            verdict = FoundInf()
        with verdict.passed_to(plain):
            _step_plain(plain, parameters, {place: gradient.clone() for place, gradient in gradients.items()})
        with verdict.passed_to(optimizer):
            candidate.step(gradients)
        assert_parity(own, parameters, what=f"{what}, parameters after step {step}")
        assert_parity(optimizer.state_dict(), plain.state_dict(), what=f"{what}, state after step {step}")
    return candidate


@pytest.mark.filterwarnings("ignore:Detected call of .lr_scheduler.step")  # One is made, and stepped at once.
@pytest.mark.parametrize("is_whole", [False, True], ids=["in parts", "whole"])
@pytest.mark.parametrize("kernels", [{"fused": True}, {"foreach": True}, {}], ids=["fused", "foreach", "one by one"])
@pytest.mark.parametrize("name", MADE)
def test_functions_equal_the_step_of_the_class(name: str, kernels: dict[str, bool], is_whole: bool) -> None:
    cls, options = MADE[name]
    has_tensor_lr = isinstance(options["lr"], Tensor)
    if has_tensor_lr and "foreach" in kernels:
        pytest.skip("torch.optim refuses a tensor as the lr of foreach")
    for event_name, event in EVENTS.items():
        what = f"{name}, {event_name}"
        # A class that was not made with fused=True makes other state.
        is_left_out = "fused" not in kernels and event_name == "no fused kernel"
        if is_left_out or (event_name == "foreach" and has_tensor_lr) or ("momentum" in event_name and cls is not SGD):
            continue
        candidate = _compare((cls, {**options, **kernels}), event, what, is_whole=is_whole)
        # No twin but where there is no state yet; two parts are two.
        assert candidate.twins <= 2 * (event_name in ("cleared state", "momentum")), f"{what}: {candidate.twins} twins"


def test_kernels_are_used_after_something_was_compiled() -> None:
    """The first ``torch.compile`` of a process wraps methods of every optimizer's class."""
    torch.compile(torch.sin, backend="eager")(torch.ones(2))
    cls, options = MADE["AdamW"]
    assert not _compare((cls, {**options, "fused": True}), EVENTS["nothing"], "compiled", is_whole=False).twins


@pytest.mark.parametrize("name", LEFT)
def test_what_is_no_function_of_lists_is_left_to_the_class(name: str) -> None:
    for event_name in ("nothing", "load_state_dict"):
        candidate = _compare(LEFT[name], EVENTS[event_name], f"{name}, {event_name}", is_whole=True)
        assert candidate.twins == 6


@on_ranks(2)
def test_every_form_equals_plain_ddp_also_after_loading(rank: int, world_size: int) -> None:
    for name, kernels in (
        ("AdamW, amsgrad", {"fused": True}),
        ("SGD, Nesterov", {"fused": True}),
        ("AdamW, amsgrad", {"foreach": True}),
        ("SGD, Nesterov", {}),
    ):
        cls, options = MADE[name]
        make = functools.partial(cls, **options, **kernels)
        for form in ("interleaved", "deferred", "zero", "zero deferred"):
            reference, plain = plain_ddp(MLP, make)
            ddp = wrap(MLP.model(), **MLP.ddp_options())
            optimizer = registered(form, ddp, make)
            for step in range(6):
                for model, one in ((reference, plain), (ddp, optimizer)):
                    one.zero_grad()
                    backward(model, step, rank)
                    one.step()
                settle(optimizer)
                if step == 3:
                    saved = copy.deepcopy(plain.state_dict())
                    for entry in saved["state"].values():
                        entry.update({key: value / 2 for key, value in entry.items()})
                    plain.load_state_dict(copy.deepcopy(saved))
                    replaced = [weakref.ref(tensor) for entry in optimizer.state.values() for tensor in entry.values()]
                    optimizer.load_state_dict(saved)
                    gc.collect()
                    assert replaced and not any(tensor() is not None for tensor in replaced), "state is held twice"
                what = f"{name}, {kernels}, {form}, step {step}"
                assert_parity(ddp.module.state_dict(), reference.module.state_dict(), what=what)
