"""The functional forms of torch.optim's own classes, for a part of the parameters, without the optimizer's ``step``.

[Note: functional optimizers]

``step`` makes lists of its parameters, gradients and state, and calls a function of them: ``adam`` or ``sgd``, and with
``fused=True`` a kernel, for which it sorts tensors by device and dtype. For a bucket of six parameters the lists take
longer than that kernel. Where the class is ``Adam``, ``AdamW`` or ``SGD`` itself, a part has the same parameters in
every step. So lists of them and of their entries in ``optimizer.state`` are kept, and the functions are called as
``step`` would call them. Once a step options are read, and lists are made anew if groups have other parameters or
entries are other objects: after ``load_state_dict``, say. Tensors are taken out of the entries each time, so that state
that the loop has moved elsewhere is not held. All else is left to ``step``.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim.adam import adam
from torch.optim.sgd import sgd

from overlap._torch.foreach import add_one_, fused_adam_, fused_adamw_, fused_sgd_, subtract_
from overlap._torch.optimizer import checks_devices, init_group, own_step, unhooked_step

Split = list[tuple[int, dict[str, Any]]]
"""The places of groups, with the entries of each that list its parameters."""

_METHODS: Mapping[type[Optimizer], Any] = {cls: (unhooked_step(cls), init_group(cls)) for cls in (Adam, AdamW, SGD)}
# The options of a group that functions and kernels take by the same name.
_OPTIONS: Mapping[type[Optimizer], tuple[str, ...]] = {
    Adam: ("amsgrad", "lr", "weight_decay", "eps", "maximize"),
    SGD: ("lr", "weight_decay", "momentum", "dampening", "nesterov", "maximize"),
}
_TENSOR = frozenset({Tensor})
_STRIDED = frozenset({torch.strided})
_layout_of = operator.attrgetter("layout")


def _taking(*keys: str | None) -> tuple[Callable[[Any], Any] | None, ...]:
    """What takes each of ``keys`` out of an entry, or ``None``."""
    return tuple(None if key is None else operator.methodcaller("get", key) for key in keys)


# What the kernels take lists of, in their order; where there is nothing to take, the list is empty.
_MOMENTS = _taking("exp_avg", "exp_avg_sq", None, "step")
_LARGEST_MOMENTS = _taking("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "step")
_MOMENTUM = _taking("momentum_buffer")
_NO_STATE = _taking(None)


@dataclass(frozen=True, slots=True)
class _Call:
    """How the function, or the fused kernel, is called for the parameters of a group."""

    function: Callable[..., None]
    is_fused: bool
    options: dict[str, Any]
    state: tuple[Callable[[Any], Any] | None, ...]


@dataclass(frozen=True, slots=True)
class _Run:
    """Parameters of one group, device and dtype, and the entries of their state."""

    group: int
    places: list[int] | None
    """Of the parameters in the part; ``None``: they are all of it."""
    parameters: list[Tensor]
    entries: list[dict[str, Any]]


class FunctionalStep:
    """That of one optimizer. See [Note: functional optimizers]."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._calls: list[_Call | None] = []
        # By the ids of the parameters of a part.
        self._runs: dict[tuple[int, ...], list[_Run]] = {}
        # What the runs were made of.
        self._known: list[Any] = []

    def refresh(self, layout: object) -> None:
        """A step begins: look at options and state; ``layout`` is another object where groups have other parameters."""
        optimizer, cls = self._optimizer, type(self._optimizer)
        calls: list[_Call | None] = []
        if (
            _METHODS.get(cls) == (unhooked_step(cls), init_group(cls))
            and own_step(optimizer) is None
            and not checks_devices(optimizer)
        ):
            calls = list(map(self._call_of, optimizer.param_groups))
        known = [layout, *optimizer.state, *optimizer.state.values()] if any(calls) else []
        self._calls = calls
        if len(known) != len(self._known) or not all(map(operator.is_, known, self._known)):
            self._known = known
            self._runs.clear()

    def forget(self) -> None:
        """State is about to be replaced: hold none of it, which would be in memory twice until the next step."""
        self._known = []
        self._runs.clear()

    def _call_of(self, group: Mapping[str, Any]) -> _Call | None:
        lr, is_fused = group["lr"], bool(group["fused"])
        if group["differentiable"] or group.get("capturable") or (group["foreach"] and isinstance(lr, Tensor)):
            return None
        if type(self._optimizer) is SGD:
            options = {key: group[key] for key in _OPTIONS[SGD]}
            options |= {"is_first_step": False} if is_fused else {"foreach": group["foreach"], "fused": group["fused"]}
            return _Call(
                fused_sgd_ if is_fused else sgd, is_fused, options, _MOMENTUM if group["momentum"] else _NO_STATE
            )
        beta1, beta2 = group["betas"]
        if isinstance(beta1, Tensor) or isinstance(beta2, Tensor) or (isinstance(lr, Tensor) and not lr.is_cpu):
            return None
        is_decoupled = group["decoupled_weight_decay"]
        options = {"beta1": beta1, "beta2": beta2, **{key: group[key] for key in _OPTIONS[Adam]}}
        if not is_fused:
            options |= {key: group[key] for key in ("foreach", "fused", "decoupled_weight_decay")}
        function = adam if not is_fused else fused_adamw_ if is_decoupled else fused_adam_
        return _Call(function, is_fused, options, _LARGEST_MOMENTS if group["amsgrad"] else _MOMENTS)

    def step(
        self, key: tuple[int, ...], split: Split, parameters: Sequence[Tensor], gradients: Sequence[Tensor]
    ) -> bool:
        """Step ``parameters`` of these ids, ``split`` by the places of their groups; returns ``False``, without having
        done anything, where the optimizer itself has to; under ``no_grad``."""
        if not self._calls:
            return False
        if key not in self._runs:
            self._runs[key] = self._runs_of(split, parameters)
        steps: list[tuple[_Call, list[Tensor], Sequence[Tensor], list[list[Tensor]]]] = []
        for run in self._runs[key]:
            if (call := self._calls[run.group]) is None:
                return False
            lists = []
            for take in call.state:
                lists.append([] if take is None else list(map(take, run.entries)))  # noqa: PERF401 (it is a call more)
            own = gradients if run.places is None else [gradients[place] for place in run.places]
            # Where there is no state yet, the optimizer makes it; and it has words for a sparse gradient.
            if not (_TENSOR.issuperset(map(type, chain(*lists))) and _STRIDED.issuperset(map(_layout_of, own))):
                return False
            steps.append((call, run.parameters, own, lists))
        for step in steps:
            self._step(*step)
        return bool(steps)

    def _step(
        self, call: _Call, parameters: list[Tensor], gradients: Sequence[Tensor], lists: list[list[Tensor]]
    ) -> None:
        found_inf, scale = map(self._optimizer.__dict__.get, ("found_inf", "grad_scale"))
        if not call.is_fused:
            with torch.no_grad():
                call.function(
                    parameters, list(gradients), *lists, **call.options, grad_scale=scale, found_inf=found_inf
                )
            return
        if found_inf is not None:
            found_inf = found_inf.to(parameters[0].device, non_blocking=True)
        if scale is not None:
            scale = scale.to(parameters[0].device, non_blocking=True)
        counts = lists[-1] if len(lists) > 1 else []
        if counts:
            add_one_(counts)
        call.function(parameters, gradients, *lists, **call.options, grad_scale=scale, found_inf=found_inf)
        if found_inf is not None and counts:
            subtract_(counts, found_inf)

    def _runs_of(self, split: Split, parameters: Sequence[Tensor]) -> list[_Run]:
        """Those of a part; none if the optimizer itself has to step it."""
        place_of = {id(parameter): place for place, parameter in enumerate(parameters)}
        state, runs = self._optimizer.state, []
        for group, members in split:
            alike: dict[Any, list[Tensor]] = {}
            for parameter in members["params"]:
                alike.setdefault((parameter.device, parameter.dtype), []).append(parameter)
            for own in alike.values():
                entries = [state.get(parameter, {}) for parameter in own]
                are_tensors = all(type(one) in (Tensor, Parameter) and one.is_floating_point() for one in own)
                if not are_tensors or any(type(entry) is not dict for entry in entries):
                    return []
                places = None if len(own) == len(parameters) else [place_of[id(parameter)] for parameter in own]
                runs.append(_Run(group, places, own, entries))
        return runs
