"""What a loop of the corpus is, and how one is added.

A loop is written once, as users write it, as a generator that yields where everything is to be compared::

    @loop("clip by value", refused(IN_BACKWARD, "the gradient of"))
    def clip_by_value(ddp, optimizer, run):
        for x, y in run.batches():
            optimizer.zero_grad()
            loss = mse_loss(ddp(x), y)
            loss.backward()
            torch.nn.utils.clip_grad_value_(ddp.parameters(), 0.01)
            optimizer.step()
            yield loss

A form of update that is not named is expected to be exact. The module's first line is the heading of its loops.
"""

import importlib
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from .models import features, mlp

if TYPE_CHECKING:
    from .run import Run

Body = Callable[[Any, Any, "Run"], Iterator[Any]]

TOPICS = (
    "plain",
    "optimizers",
    "schedules",
    "gradients",
    "clipping",
    "precision",
    "accumulation",
    "losses",
    "modules",
    "weights",
    "parameters",
    "resuming",
    "inputs",
    "joined",
    "counted",
)


THREE_STEPS = ("plain", "schedules", "accumulation", "inputs")
"""Topics whose loops do not do the same in every step. Elsewhere there are two: the second has DDP's final buckets and
the state of the first."""


@dataclass(frozen=True)
class Expected:
    """What a form does with a loop, where it is not exact."""

    kind: str
    """``refused`` or ``limit``."""
    words: str
    """How the error begins; of a limit, why it is one."""
    is_a_race: bool = False
    """Whether a limit depends on timing, and may not show."""


@dataclass(frozen=True, kw_only=True)
class Loop:
    """A training loop and what it needs."""

    name: str
    topic: str
    body: Body
    model: Callable[[], nn.Module] = mlp
    optimizer: partial[torch.optim.Optimizer] = field(
        default_factory=lambda: partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.01)
    )
    """A class and its options; what is called with parameters or groups."""
    groups: Callable[[nn.Module], Any] = nn.Module.parameters
    """What the optimizer is given, of the DDP model."""
    prepare: Callable[[Any], Any] | None = None
    """What is done with the optimizer before the library sees it, such as registering a hook of the user's."""
    outer: Callable[[Any], Any] | None = None
    """What the loop wraps around the optimizer that the library gives it."""
    ddp: Mapping[str, Any] = field(default_factory=dict)
    """Options of ``ZeroRedundancyOptimizer``, in the forms that have one."""
    inputs: Callable[[torch.Generator], tuple[Tensor, Tensor]] = features
    steps: int
    expected: Mapping[str, Expected] = field(default_factory=dict)


LOOPS: dict[str, Loop] = {}

Declaration = Iterable[tuple[str, Expected]]


def loop(name: str, *declared: Declaration, **options: Any) -> Callable[[Body], Body]:
    """Adds a loop to the corpus, where ``declared`` says which forms are not expected to be exact."""

    def add(body: Body) -> Body:
        _add(name, body.__module__, body, declared, options)
        return body

    return add


def variant(body: Body, name: str, *declared: Declaration, **options: Any) -> None:
    """Adds the loop ``body`` once more, with other options; the caller's module is its topic."""
    _add(name, sys._getframe(1).f_globals["__name__"], body, declared, options)


def refused(forms: Iterable[str], words: str) -> Declaration:
    """These forms raise an error of the library's that begins with ``words``."""
    return [(form, Expected("refused", words)) for form in forms]


def limit(forms: Iterable[str], reason: str, *, is_a_race: bool = False) -> Declaration:
    """These forms differ, or cannot play the loop, for a documented reason."""
    return [(form, Expected("limit", reason, is_a_race)) for form in forms]


def load() -> Mapping[str, Loop]:
    """All loops, by name, topic after topic."""
    for topic in TOPICS:
        importlib.import_module(f"{__package__}.{topic}")
    return LOOPS


def topic_title(topic: str) -> str:
    """The first line of a topic's module."""
    return str(importlib.import_module(f"{__package__}.{topic}").__doc__).partition("\n")[0].rstrip(".")


def _add(name: str, module: str, body: Body, declared: Iterable[Declaration], options: Mapping[str, Any]) -> None:
    if name in LOOPS:
        raise ValueError(f"there are two loops named {name!r}")
    topic = module.rpartition(".")[2]
    defaults = {"steps": 3 if topic in THREE_STEPS else 2}
    LOOPS[name] = Loop(name=name, topic=topic, body=body, expected=_merged(name, declared), **{**defaults, **options})


def _merged(name: str, declared: Iterable[Declaration]) -> dict[str, Expected]:
    merged: dict[str, Expected] = {}
    for form, expected in (pair for declaration in declared for pair in declaration):
        if form in merged:
            raise ValueError(f"the loop {name!r} declares {form!r} twice")
        merged[form] = expected
    return merged
