"""Learning by experiment how an optimizer may be stepped.

[Note: what an optimizer couples]

An update in backward steps the parameters bucket by bucket, and a sharded one steps a part of them, or of their
elements, on each rank. That equals one whole ``step()`` only if the optimizer computes nothing from several parts at
once, as the estimate of Prodigy or a norm over all gradients does. Nothing in the interface of ``Optimizer`` tells, so
it is tried out: copies of the optimizer, with a few small parameters in each group, are stepped whole and in parts with
the same gradients, and their parameters, state, group values and attributes are compared bit for bit after each step.

The copies share nothing with the optimizer: what cannot be copied, or leads to another optimizer, is an answer too,
*unknown*. An experiment cannot see what starts after its last step, or what needs a size that it does not have.
"""

from __future__ import annotations

import copy
import enum
import itertools
import math
import types
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.optim import (
    ASGD,
    SGD,
    Adadelta,
    Adafactor,
    Adagrad,
    Adam,
    Adamax,
    AdamW,
    Muon,
    NAdam,
    Optimizer,
    RAdam,
    RMSprop,
    Rprop,
)

from overlap._torch.isolation import (
    CollectiveRefusedError,
    GeneratorStates,
    collectives_refused,
    global_step_hooks_suspended,
)
from overlap._torch.optimizer import bare_copy, unhooked_step
from overlap.optim.subset import CoupledError, SubsetStepper
from overlap.optim.wrappers import held_by, reachable, why_not_in_parts

__all__ = ["Finding", "Separability", "Verdict", "probe"]

_Record = dict[str, Any]


class Verdict(enum.Enum):
    """Whether parts can be stepped separately."""

    SEPARABLE = "separable"
    """The parts came out as the whole, in every bit."""
    COUPLED = "coupled"
    """They did not."""
    UNKNOWN = "unknown"
    """The experiment could not be made."""


@dataclass(frozen=True)
class Finding:
    """The outcome of one experiment, with what differed or what failed."""

    verdict: Verdict
    why: str = ""


@dataclass(frozen=True)
class Separability:
    """How an optimizer may be stepped. See [Note: what an optimizer couples]."""

    in_turn: Finding
    """Some parameters after others, by one object, as an update in backward does bucket by bucket."""
    by_parameter: Finding
    """Some parameters on each rank, by optimizers of their own."""
    by_element: Finding
    """Some elements of each parameter on each rank, as flat pieces, by optimizers of their own."""
    draws: tuple[str, ...] = ()
    """The global random number generators that ``step()`` draws from."""


_SEPARABLE = Finding(Verdict.SEPARABLE)
_ELEMENTWISE = (SGD, Adam, AdamW, Adagrad, Adadelta, Adamax, NAdam, RAdam, RMSprop, Rprop, ASGD)
_BY_PARAMETER = (Adafactor, Muon)

_STEPS = 12
# Small parameters keep one state in some optimizers, and large ones, from 4096 elements on, another one.
_SMALL, _LARGE = 192, 8256
_LARGE_FROM = 4096
_SHAPES = {
    _SMALL: {1: (192,), 2: (12, 16), 3: (4, 6, 8), 4: (4, 4, 4, 3)},
    _LARGE: {1: (8256,), 2: (96, 86), 3: (8, 12, 86), 4: (8, 12, 2, 43)},
}
# Whole vectors of any dtype, but no multiple of the blocks of which blockwise state is made.
_CUTS = {1: 0, _SMALL: 96, _LARGE: 2784}
_SCALES = (1.0, 1e-3, 30.0, 0.1, 1e-5, 3.0)
# Attributes with tensors larger than this belong to the real parameters, and not to the small ones.
_LARGEST_ATTRIBUTE = 65536


def probe(optimizer: Optimizer) -> Separability:
    """Find out how ``optimizer`` may be stepped, on small copies of it; takes some milliseconds.

    Issues nothing, and leaves the optimizer, its parameters, their state and all random number generators as they are.
    Optimizers of ``torch.optim`` are known without an experiment; classes derived from them are not.
    """
    if (why := why_not_in_parts(optimizer)) is not None:
        coupled = Finding(Verdict.COUPLED, why)
        return Separability(coupled, coupled, coupled)
    if type(optimizer) in _ELEMENTWISE:
        return Separability(_SEPARABLE, _SEPARABLE, _SEPARABLE)
    if type(optimizer) in _BY_PARAMETER:
        coupled = Finding(Verdict.COUPLED, "each element's update depends on others of its parameter")
        return Separability(_SEPARABLE, _SEPARABLE, coupled)
    try:
        return _Experiment(optimizer).run()
    except CollectiveRefusedError:
        coupled = Finding(Verdict.COUPLED, "its step() issues collectives")
        return Separability(coupled, coupled, coupled)
    except Exception as error:
        unknown = Finding(Verdict.UNKNOWN, _words(error))
        return Separability(unknown, unknown, unknown)


@dataclass
class _Copy:
    """A copy of the optimizer with small parameters, or with pieces of them, in the groups of their originals."""

    optimizer: Optimizer
    parameters: list[Tensor] = field(default_factory=list)


class _CannotCopyError(Exception):
    pass


class _Experiment:
    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._step: Callable[[Any], Any] = unhooked_step(type(optimizer))
        self._generator = torch.Generator().manual_seed(1)
        _check_attributes(optimizer)
        groups = [_representatives(group["params"]) for group in optimizer.param_groups]
        if len(groups) > 8:
            groups = [group[:1] for group in groups]
        self._chosen = list(itertools.chain.from_iterable(groups))
        if not self._chosen:
            raise _CannotCopyError("it has no parameters yet")
        self._values = [self._random(_shape(parameter), parameter) * 0.5 for parameter in self._chosen]
        self._gradients = [
            [self._gradient(value, _SCALES[(step + place) % len(_SCALES)]) for place, value in enumerate(self._values)]
            for step in range(_STEPS)
        ]

    def run(self) -> Separability:
        states = GeneratorStates(parameter.device for parameter in self._chosen)
        try:
            with warnings.catch_warnings(), collectives_refused(), global_step_hooks_suspended():
                warnings.simplefilter("ignore")
                histories = self._run_whole()
                draws = states.changed()
                findings = []
                for trial in (self._in_turn, self._by_parameter, self._by_element):
                    states.restore()
                    findings.append(_tried(trial, histories))
        finally:
            states.restore()
        in_turn, by_parameter, by_element = findings
        return Separability(in_turn, by_parameter, by_element, draws)

    def _run_whole(self) -> list[_Record]:
        whole = self._copied([slice(None)] * len(self._chosen))
        histories = []
        for gradients in self._gradients:
            self._step_with(whole, gradients)
            histories.append(_record(whole))
        for before, parameter in zip(self._values, whole.parameters, strict=True):
            if not bool(torch.isfinite(parameter).all()):
                raise _CannotCopyError("its parameters became infinite or NaN in the experiment")
            if torch.equal(before, parameter):
                raise _CannotCopyError("it left parameters as they were in the experiment")
        return histories

    def _in_turn(self, histories: list[_Record]) -> Finding:
        """Every other parameter, from the last on, and then the rest: buckets have no more order than that."""
        one = self._copied([slice(None)] * len(self._chosen))
        stepper = SubsetStepper(one.optimizer)
        places = list(range(len(self._chosen)))[::-1]
        for gradients, history in zip(self._gradients, histories, strict=True):
            stepper.begin()
            for part in (places[::2], places[1::2]):
                stepper.step([one.parameters[p] for p in part], [gradients[p] for p in part])
            if (what := _difference(history, _record(one))) is not None:
                return Finding(Verdict.COUPLED, f"{what} differs when its parameters are stepped in turn")
        return _SEPARABLE

    def _by_parameter(self, histories: list[_Record]) -> Finding:
        places = range(len(self._chosen))
        parts = [[slice(None) if p % 2 == part else None for p in places] for part in (0, 1)]
        return self._apart(parts, histories, "its parameters are stepped by two optimizers")

    def _by_element(self, histories: list[_Record]) -> Finding:
        cuts = [_CUTS[value.numel()] for value in self._values]
        parts: list[list[slice | None]] = [
            [slice(cut) if cut else None for cut in cuts],
            [slice(cut, None) for cut in cuts],
        ]
        return self._apart(parts, histories, "parts of a parameter are stepped by two optimizers")

    def _apart(self, parts: list[list[slice | None]], histories: list[_Record], how: str) -> Finding:
        for part in parts:
            if all(piece is None for piece in part):
                continue
            one = self._copied(part)
            kept = [(place, piece) for place, piece in enumerate(part) if piece is not None]
            for gradients, history in zip(self._gradients, histories, strict=True):
                self._step_with(one, [_piece(gradients[place], piece) for place, piece in kept])
                expected = {
                    **history,
                    "parameters": [_piece(history["parameters"][place], piece) for place, piece in kept],
                    "state": [history["state"][place] for place, _ in kept],
                }
                if (what := _difference(expected, _record(one))) is not None:
                    return Finding(Verdict.COUPLED, f"{what} differs when {how}")
        return _SEPARABLE

    def _step_with(self, one: _Copy, gradients: Sequence[Tensor]) -> None:
        for parameter, gradient in zip(one.parameters, gradients, strict=True):
            parameter.grad = gradient.clone()
        self._step(one.optimizer)

    def _copied(self, pieces: Sequence[slice | None]) -> _Copy:
        """A copy whose parameters are these pieces of the chosen ones; where it is ``None`` there is no parameter."""
        stand_ins: dict[int, Tensor] = {}
        for parameter, value, piece in zip(self._chosen, self._values, pieces, strict=True):
            if piece is not None:
                stand_ins[id(parameter)] = _leaf(_piece(value, piece).clone())
        copied = bare_copy(self._optimizer)
        memo: dict[int, Any] = {id(self._optimizer): copied}
        for group in self._optimizer.param_groups:
            for parameter in group["params"]:
                memo[id(parameter)] = stand_ins.get(id(parameter), _leaf(parameter.detach().new_zeros(0)))
        own = {key: value for key, value in vars(self._optimizer).items() if _is_own(key)}
        copied.__dict__.update(copy.deepcopy(own, memo))
        copied.state = self._copied_state(memo)
        copied.param_groups = [
            {
                **copy.deepcopy({key: value for key, value in group.items() if key != "params"}, memo),
                "params": [stand_ins[id(p)] for p in group["params"] if id(p) in stand_ins],
            }
            for group in self._optimizer.param_groups
        ]
        for group in copied.param_groups:
            _give_rate(group, self._optimizer.defaults)
        chosen = [stand_ins[id(p)] for p in self._chosen if id(p) in stand_ins]
        return _Copy(copied, chosen)

    def _copied_state(self, memo: dict[int, Any]) -> Any:
        """State of no parameter; what is kept under other keys is copied."""
        state = self._optimizer.state
        shared = {key: value for key, value in state.items() if not isinstance(key, Tensor)}
        return defaultdict(dict, copy.deepcopy(shared, memo))

    def _gradient(self, like: Tensor, scale: float) -> Tensor:
        """Away from zero, and from what has no square in half precision."""
        values = torch.randn(like.shape, generator=self._generator)
        values = (values + values.sign() * 0.5) * (max(scale, 0.05) if like.dtype == torch.float16 else scale)
        return values.to(device=like.device, dtype=like.dtype)

    def _random(self, shape: Sequence[int], like: Tensor) -> Tensor:
        values = torch.randn(tuple(shape), generator=self._generator)
        return values.to(device=like.device, dtype=like.dtype)


def _is_own(attribute: str) -> bool:
    return attribute not in ("param_groups", "state", "step") and not attribute.startswith("_optimizer_")


def _tried(trial: Callable[[list[_Record]], Finding], histories: list[_Record]) -> Finding:
    try:
        return trial(histories)
    except CoupledError as error:
        return Finding(Verdict.COUPLED, error.what)
    except Exception as error:
        return Finding(Verdict.UNKNOWN, _words(error))


def _words(error: Exception) -> str:
    return str(error) if isinstance(error, _CannotCopyError) else f"a copy of it raised {type(error).__name__}: {error}"


def _check_attributes(optimizer: Optimizer) -> None:
    """Raises: _CannotCopyError: a copy would share what changes with the optimizer, or be large."""
    parameters = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    for value in reachable(held_by(optimizer)):
        if isinstance(value, Tensor) and id(value) not in parameters and value.numel() > _LARGEST_ATTRIBUTE:
            raise _CannotCopyError(f"an attribute holds a tensor of {value.numel()} elements")
        # A function is copied by reference, with all that it has closed over.
        if isinstance(value, types.FunctionType) and any(
            isinstance(inner, (Tensor, Optimizer)) for inner in reachable([value])
        ):
            raise _CannotCopyError(f"the function {value.__qualname__} refers to tensors")


def _representatives(parameters: Sequence[Tensor]) -> list[Tensor]:
    """The largest and the smallest parameter of each number of dimensions."""
    by_dimensions: dict[int, list[Tensor]] = {}
    for parameter in parameters:
        if parameter.numel() and parameter.requires_grad:
            by_dimensions.setdefault(parameter.dim(), []).append(parameter)
    chosen = []
    for those in by_dimensions.values():
        largest, smallest = max(those, key=Tensor.numel), min(reversed(those), key=Tensor.numel)
        chosen += [largest] if largest is smallest else [largest, smallest]
    return chosen


def _shape(parameter: Tensor) -> tuple[int, ...]:
    if parameter.dim() == 0:
        return ()
    numel = _SMALL if parameter.numel() < _LARGE_FROM else _LARGE
    missing = max(0, parameter.dim() - 4)
    return (1,) * missing + _SHAPES[numel][parameter.dim() - missing]


def _piece(value: Tensor, piece: slice) -> Tensor:
    """The value itself for the whole of it, and flat otherwise, as elements are sharded."""
    return value if piece == slice(None) else value.reshape(-1)[piece]


def _leaf(value: Tensor) -> Tensor:
    return torch.nn.Parameter(value)


def _give_rate(group: dict[str, Any], defaults: Mapping[str, Any]) -> None:
    """A rate of zero, with which a warm-up begins, would hide everything."""
    rate = group.get("lr")
    if not isinstance(rate, (int, float, Tensor)) or bool(rate):
        return
    usable = [r for r in (group.get("initial_lr"), defaults.get("lr")) if isinstance(r, (int, float)) and r]
    given = float(usable[0]) if usable else 0.01
    if isinstance(rate, Tensor):
        rate.fill_(given)
    else:
        group["lr"] = given


def _record(one: _Copy) -> _Record:
    """Everything that a step can have changed, copied."""
    optimizer = one.optimizer
    return {
        "parameters": [parameter.detach().clone() for parameter in one.parameters],
        "state": [_copied_values(optimizer.state.get(parameter, {})) for parameter in one.parameters],
        "groups": [
            _copied_values({key: value for key, value in group.items() if key != "params"})
            for group in optimizer.param_groups
        ],
        "attributes": _copied_values(
            {
                **{key: value for key, value in optimizer.state.items() if not isinstance(key, Tensor)},
                **{key: value for key, value in vars(optimizer).items() if _is_own(key)},
            }
        ),
    }


def _copied_values(values: Any) -> Any:
    """The tensors, numbers and strings in ``values``, and in what it holds, copied; other objects are left out."""
    if isinstance(values, Tensor):
        return values.detach().clone()
    if isinstance(values, Mapping):
        return {key: _copied_values(value) for key, value in values.items() if not isinstance(key, Tensor)}
    if isinstance(values, (list, tuple)):
        return [_copied_values(value) for value in values]
    return values if isinstance(values, (bool, int, float, complex, str)) else None


def _difference(expected: Mapping[str, Any], actual: Mapping[str, Any]) -> str | None:
    """What is not the same in two records, in words."""
    for key, words in (("groups", "{} in a group"), ("attributes", "{} of the optimizer")):
        if (name := _differing(expected[key], actual[key])) is not None:
            return words.format(repr(name))
    for place, (one, other) in enumerate(zip(expected["parameters"], actual["parameters"], strict=True)):
        if not _is_same(one, other):
            return f"parameter {place}"
    if (name := _differing(expected["state"], actual["state"])) is not None:
        return f"{name!r} in the state"
    return None


def _differing(expected: Any, actual: Any) -> Any:
    """The innermost key under which two values differ."""
    if isinstance(expected, Mapping) and isinstance(actual, Mapping):
        pairs: Iterator[tuple[Any, Any, Any]] = ((key, expected[key], actual.get(key)) for key in expected)
    elif isinstance(expected, list) and isinstance(actual, list):
        # Lists whose lengths differ have an entry for each parameter.
        pairs = ((place, one, other) for place, (one, other) in enumerate(zip(expected, actual, strict=False)))
    else:
        return None if _is_same(expected, actual) else "value"
    for key, one, other in pairs:
        if (found := _differing(one, other)) is not None:
            return key if found == "value" else found
    return None


def _is_same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        if one.shape != other.shape:
            return True  # State of a part has the shape of the part.
        return torch.equal(one, other) or bool(torch.allclose(one, other, rtol=0, atol=0, equal_nan=True))
    if isinstance(one, float) and isinstance(other, float) and math.isnan(one) and math.isnan(other):
        return True
    return type(one) is type(other) and one == other
