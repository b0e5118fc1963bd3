"""Finding out by experiment how an optimizer may be stepped.

[Note: what an optimizer couples]

An update in backward steps the parameters bucket by bucket, and a sharded one steps a part of them, or of their
elements, on each rank. That equals one whole ``step()`` only if the optimizer computes nothing from several parts at
once, as the estimate of Prodigy or a norm over all gradients does. The interface of ``Optimizer`` does not say so, so
it is tested: copies of the optimizer, with a few small parameters in each group, are stepped whole and in parts with
the same gradients, and their parameters, state, group values and attributes are compared bit for bit after each step.

The copies share nothing with the optimizer: what cannot be copied, or leads to another optimizer, is an answer too,
*unknown*. An experiment cannot see what starts after its last step, or what needs a size that it does not have.
"""

from __future__ import annotations

import enum
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
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
from overlap._torch.optimizer import unhooked_step
from overlap.optim.miniature import WHOLE, CannotCopyError, Miniature, MiniatureMaker, piece_of
from overlap.optim.snapshot import Snapshot, difference
from overlap.optim.subset import CoupledError, SubsetStepper
from overlap.optim.update_stream import ordered_after_gradients
from overlap.optim.wrappers import why_not_in_parts

__all__ = ["Finding", "Separability", "Verdict", "probe"]


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
_SCALES = (1.0, 1e-3, 30.0, 0.1, 1e-5, 3.0)


def probe(optimizer: Optimizer) -> Separability:
    """Find out how ``optimizer`` may be stepped, on small copies of it; takes some milliseconds.

    Issues nothing, and leaves the optimizer, its parameters, their state and all random number generators as they are.
    Optimizers of ``torch.optim`` are known without an experiment; classes derived from them are not.
    """
    if (why := why_not_in_parts(optimizer) or _why_one_eps(optimizer)) is not None:
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


def _why_one_eps(optimizer: Optimizer) -> str | None:
    """Why the eps of Adafactor depends on which parameter of a group comes first; None where it does not."""
    for group in optimizer.param_groups if type(optimizer) is Adafactor else ():
        dtypes = sorted({str(parameter.dtype) for parameter in group["params"]})
        if group["eps"][0] is None and len(dtypes) > 1:
            return (
                "its eps[0] is None, which for all parameters of a group becomes that of the first one's dtype, and a "
                f"group has {' and '.join(dtypes)} (give a number, or a group to each dtype)"
            )
    return None


class _Experiment:
    def __init__(self, optimizer: Optimizer) -> None:
        self._step: Callable[[Any], Any] = unhooked_step(type(optimizer))
        self._maker = MiniatureMaker(optimizer)
        self._places = range(len(self._maker.values))
        self._gradients = [
            [self._maker.gradient(place, _SCALES[(step + place) % len(_SCALES)]) for place in self._places]
            for step in range(_STEPS)
        ]

    def run(self) -> Separability:
        states = GeneratorStates(parameter.device for parameter in self._maker.values)
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

    def _run_whole(self) -> list[Snapshot]:
        whole = self._maker.make([WHOLE for _ in self._places])
        histories = []
        for gradients in self._gradients:
            self._step_with(whole, gradients)
            histories.append(whole.snapshot())
        for before, parameter in zip(self._maker.values, whole.parameters, strict=True):
            if not bool(torch.isfinite(parameter).all()):
                raise CannotCopyError("its parameters became infinite or NaN in the experiment")
            if torch.equal(before, parameter):
                raise CannotCopyError("it left parameters as they were in the experiment")
        return histories

    def _in_turn(self, histories: list[Snapshot]) -> Finding:
        """Parameter by parameter, from the last on, as in the smallest buckets there could be."""
        one = self._maker.make([WHOLE for _ in self._places])
        stepper = SubsetStepper(one.optimizer)
        for gradients, history in zip(self._gradients, histories, strict=True):
            stepper.begin()
            for parameter, gradient in zip(reversed(one.parameters), reversed(gradients), strict=True):
                stepper.step([parameter], [gradient.clone()])  # Some optimizers change it in place.
            if (what := difference(history, one.snapshot())) is not None:
                return Finding(Verdict.COUPLED, f"{what} differs when its parameters are stepped in turn")
        return _SEPARABLE

    def _by_parameter(self, histories: list[Snapshot]) -> Finding:
        parts = [[WHOLE if place % 2 == part else None for place in self._places] for part in (0, 1)]
        return self._apart(parts, histories, "its parameters are stepped by two optimizers")

    def _by_element(self, histories: list[Snapshot]) -> Finding:
        cuts = self._maker.cuts
        parts: list[list[slice | None]] = [
            [slice(cut) if cut else None for cut in cuts],
            [slice(cut, None) for cut in cuts],
        ]
        return self._apart(parts, histories, "parts of a parameter are stepped by two optimizers")

    def _apart(self, parts: list[list[slice | None]], histories: list[Snapshot], how: str) -> Finding:
        for part in parts:
            if all(piece is None for piece in part):
                continue
            one = self._maker.make(part)
            kept = [(place, piece) for place, piece in enumerate(part) if piece is not None]
            for gradients, history in zip(self._gradients, histories, strict=True):
                self._step_with(one, [piece_of(gradients[place], piece) for place, piece in kept])
                expected = {
                    **history,
                    "parameters": [piece_of(history["parameters"][place], piece) for place, piece in kept],
                    "state": [history["state"][place] for place, _ in kept],
                }
                if (what := difference(expected, one.snapshot())) is not None:
                    return Finding(Verdict.COUPLED, f"{what} differs when {how}")
        return _SEPARABLE

    def _step_with(self, one: Miniature, gradients: Sequence[Tensor]) -> None:
        for parameter, gradient in zip(one.parameters, gradients, strict=True):
            parameter.grad = gradient.clone()
        with ordered_after_gradients(one.optimizer, one.parameters):
            self._step(one.optimizer)


def _tried(trial: Callable[[list[Snapshot]], Finding], histories: list[Snapshot]) -> Finding:
    try:
        return trial(histories)
    except CoupledError as error:
        return Finding(Verdict.COUPLED, error.what)
    except Exception as error:
        return Finding(Verdict.UNKNOWN, _words(error))


def _words(error: Exception) -> str:
    return str(error) if isinstance(error, CannotCopyError) else f"a copy of it raised {type(error).__name__}: {error}"
