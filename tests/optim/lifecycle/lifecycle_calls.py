"""The calls that a training loop can make, and random sequences of them."""

import random
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from typing import Any

PARAMETERS = 6
"""Of the model in lifecycle_forms."""
_CANDIDATES = 100


@dataclass(frozen=True)
class Call:
    """One call of a training loop. One that cannot be made where the loop stands is left out when a sequence runs."""

    name: str
    argument: Any = None

    def __repr__(self) -> str:
        return self.name if self.argument is None else f"{self.name}({self.argument})"


@dataclass(frozen=True)
class Script:
    """Calls, and whether the model has been trained before them, so that DDP has rebuilt its buckets."""

    calls: tuple[Call, ...]
    _: KW_ONLY
    is_warm: bool
    end: tuple[Call, ...] = ()
    limit: int = 10_000
    """So many of ``calls`` are made, of those that can be; then those of ``end``."""

    def __repr__(self) -> str:
        return f"{'warm' if self.is_warm else 'cold'}: {', '.join(map(repr, self.calls + self.end))}"


def draw(seed: str) -> Script:
    """A sequence that depends on ``seed`` alone."""
    source = random.Random(seed)
    calls: list[Call] = []
    while len(calls) < _CANDIDATES:
        phrase = source.choice(_PHRASES) if source.random() < 0.45 else (None,)
        calls += [_call(source) if name is None else _named(source, name) for name in phrase]
    limit = source.randint(5, 25)
    end: tuple[Call, ...] = ()
    if source.random() < 0.1:
        after = [_call(source, _AFTER_INCOMPLETE) for _ in range(source.randint(1, 4))]
        end = (Call("incomplete_backward"), *after)
    return Script(tuple(calls), end=end, limit=limit, is_warm=source.random() < 0.8)


def parse(text: str) -> Script:
    """A script for a warm model from words such as ``edit:3`` and ``zero_grad:T``."""
    values: dict[str, Any] = {"": None, "T": True, "F": False}
    calls = []
    for word in text.split():
        name, _, argument = word.partition(":")
        value = float(argument) if "." in argument else int(argument) if argument.isdigit() else argument
        calls.append(Call(name, values.get(argument, value)))
    return Script(tuple(calls), is_warm=True)


def _call(source: random.Random, weights: dict[str, int] | None = None) -> Call:
    weights = weights or _WEIGHTS
    (name,) = source.choices(list(weights), list(weights.values()))
    return _named(source, name)


def _named(source: random.Random, name: str) -> Call:
    argument = _ARGUMENTS.get(name)
    return Call(name, None if argument is None else argument(source))


# What training loops do in a row, and what tells one phase from another.
_PHRASES: tuple[tuple[str, ...], ...] = (
    *[("forward", "backward", "step")] * 4,
    *[("forward", "backward")] * 4,
    ("own_gradient", "step"),
    ("zero_grad", "own_gradient", "step"),
    ("no_sync", "step"),
    ("no_sync", "zero_grad"),
    ("remove", "register"),
    ("forward", "remove", "register", "backward"),
    ("forward", "failing_step", "backward"),
    ("forward", "backward", "forward", "step", "backward"),
    ("forward", "skipped_backward", "step"),
    ("forward", "skipped_backward", "zero_grad", "forward", "backward", "step"),
    ("forward", "skipped_backward", "forward", "backward", "step"),
    ("forward", "backward", "set_lr", "step"),
    ("forward", "backward", "inert_clip", "step"),
    ("forward", "backward", "data_edit", "step"),
)

_WEIGHTS = {
    "forward": 16,
    "backward": 16,
    "no_sync": 6,
    "step": 12,
    "step_with_closure": 1,
    "failing_step": 4,
    "failing_backward": 4,
    "zero_grad": 6,
    "ddp_zero_grad": 4,
    "edit": 4,
    "data_edit": 3,
    "inert_clip": 4,
    "skipped_backward": 5,
    "own_gradient": 5,
    "save": 2,
    "load": 3,
    "remove": 4,
    "register": 5,
    "set_lr": 2,
    "evaluate": 1,
}
_AFTER_INCOMPLETE = {"step": 4, "zero_grad": 3, "ddp_zero_grad": 1, "load": 1, "remove": 2}

_ARGUMENTS: dict[str, Callable[[random.Random], Any]] = {
    "failing_backward": lambda source: source.choice(["first", "last", "update"]),
    "zero_grad": lambda source: source.random() < 0.7,
    "ddp_zero_grad": lambda source: source.random() < 0.7,
    "edit": lambda source: source.choice(["all", *range(PARAMETERS)]),
    "data_edit": lambda source: source.choice(["all", *range(PARAMETERS)]),
    "own_gradient": lambda source: source.randrange(PARAMETERS),
    "set_lr": lambda source: source.choice([0.01, 0.02, 0.05]),
    "register": lambda source: source.choice(["same", "new"]),
}
