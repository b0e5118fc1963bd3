"""How many columns factors have: a number, a function of the step, or either of them by parameter.

[Note: one schedule on every rank]

Factors of unequal rank cannot be summed, so every rank must come to the same numbers. Numbers are part of the stage's
signature, which is compared at registration. A function is not, but what it gives is: it is called for the next
:data:`WINDOW` steps at once, and ranks compare a digest of all these numbers by one small collective before they use
the first. So a step costs nothing, and a difference is found before a collective of unequal sizes can hang. If a
function later gives another number than it gave then, it does not follow from the step alone, and that is an error.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from itertools import groupby

import torch
import torch.distributed as dist
from torch import Tensor

from overlap._checks import check_whole_number, told
from overlap.errors import ConfigurationError
from overlap.hooks.bucket import Bucket
from overlap.hooks.collectives import all_reduce
from overlap.hooks.rules import matches

__all__ = ["WINDOW", "Rank", "RankOption", "Ranks", "check_rank", "shown"]

Rank = int | Callable[[int], int]
RankOption = Rank | Mapping[str, Rank]

WINDOW = 1000
"""Steps whose ranks are compared at once."""
_REST = "*"


def check_rank(option: object) -> None:
    """Raises: ConfigurationError: it is not a rank, a function, or a mapping of patterns to these."""
    if isinstance(option, Mapping):
        if not option:
            raise ConfigurationError("rank is an empty mapping: give a rank for every matrix, such as {'*': 2}")
        for pattern, one in option.items():
            if not isinstance(pattern, str):
                raise ConfigurationError(
                    f"rank has the key {told(pattern)}: give a pattern of parameter names, such as '*'"
                )
            _check(f"rank[{pattern!r}]", one)
        return
    _check("rank", option)


def _check(name: str, one: object) -> None:
    if not callable(one):
        check_whole_number(name, one, least=1)


def shown(option: RankOption) -> str:
    """The option in words that are the same on every rank; a function has none."""
    if isinstance(option, Mapping):
        return "{" + ", ".join(f"{pattern!r}: {shown(one)}" for pattern, one in option.items()) + "}"
    return "<function of the step>" if callable(option) else repr(option)


class Ranks:
    """The ranks of a model's matrices in the current step."""

    def __init__(self, option: RankOption) -> None:
        self._is_by_name = isinstance(option, Mapping)
        self._given: Mapping[str, Rank] = option if isinstance(option, Mapping) else {_REST: option}
        self._functions = {pattern: one for pattern, one in self._given.items() if callable(one)}
        # By name.
        self._patterns: dict[str, str] = {}
        self._step = -1
        self._now = {pattern: one for pattern, one in self._given.items() if not callable(one)}
        self._start = 0
        self._compared: Mapping[str, list[int | None]] = {}
        self._is_to_compare = False

    def attach(self, names: Mapping[Tensor, str] | None, *, first_step: int) -> None:
        """Serve a model; ranks are compared anew.

        Raises:
            ConfigurationError: a matrix has no rank, a pattern is of no use, or a function gives no rank.
        """
        self._compared, self._step = {}, -1
        if self._is_by_name:
            self._check_names(names)
        self._values(first_step)

    def _check_names(self, names: Mapping[Tensor, str] | None) -> None:
        if names is None:
            raise ConfigurationError(
                f"rank={shown(self._given)} is by parameter name, and names are not known to a hook registered with "
                "ddp.register_comm_hook; register it with overlap.register(ddp, ...) instead"
            )
        first = {
            name: next((pattern for pattern in self._given if matches(pattern, name, parameter)), None)
            for parameter, name in names.items()
        }
        matrices = [name for parameter, name in names.items() if parameter.ndim > 1 and not parameter.is_complex()]
        if missing := [name for name in matrices if first[name] is None]:
            raise ConfigurationError(
                f"rank={shown(self._given)} has no pattern for {_some(missing)}: end it with a rank for all others, "
                "such as '*': 2"
            )
        for pattern in self._given:
            if pattern == _REST or pattern in first.values():
                continue
            if any(matches(pattern, name, parameter) for parameter, name in names.items()):
                why = "every name that it matches has an earlier pattern: put it first"
            else:
                why = f"no parameter has such a name; there are {_some(list(first))}"
            raise ConfigurationError(f"rank has the pattern {pattern!r}, and {why}")
        self._patterns = {name: pattern for name, pattern in first.items() if pattern is not None}

    def begin(self, step: int) -> bool:
        """Take the ranks of ``step``, once in each pass; gives whether they are others than before.

        Raises:
            ConfigurationError: a function gives no rank, or not the one that ranks compared.
        """
        if step == self._step or not self._functions:
            return False
        self._step = step
        place = step - self._start
        self._is_to_compare = not self._compared or not 0 <= place < WINDOW
        now = {**self._now, **{pattern: _value(pattern, one, step) for pattern, one in self._functions.items()}}
        if not self._is_to_compare:
            for pattern, values in self._compared.items():
                if values[place] is not None and values[place] != now[pattern]:
                    raise ConfigurationError(
                        f"the function of rank{_at(pattern)} gave {values[place]} for step {step} when ranks compared "
                        f"it and gives {now[pattern]} now: it must follow from the step alone"
                    )
        has_changed = now != self._now
        self._now = now
        return has_changed

    def of(self, key: str) -> int:
        """The rank of a parameter; a vector may have none, which is then 1."""
        if not self._is_by_name:
            return self._now[_REST]
        return self._now[self._patterns[key]] if key in self._patterns else 1

    async def compare(self, bucket: Bucket) -> None:
        """Compare the ranks of the next steps, where that is due: one all-reduce of two numbers.

        Raises:
            ConfigurationError: on every rank, if they are not the same on all.
        """
        if not self._is_to_compare:
            return
        step = self._step
        values = self._values(step)
        digest = int.from_bytes(hashlib.sha256(repr(values).encode()).digest()[:7], "big")
        both = torch.tensor([digest, -digest], dtype=torch.int64).to(bucket.buffer.device)
        await all_reduce(both, op=dist.ReduceOp.MAX, group=bucket.group)
        largest, smallest = both.tolist()
        if largest != -smallest:
            self._compared = {}
            raise ConfigurationError(
                f"ranks disagree about rank= in steps {step} to {step + WINDOW - 1}; on rank {bucket.group.rank()} it "
                f"is {_runs(values, step)}: it must be the same function of the step on every rank"
            )
        self._start, self._compared = step, values

    def described(self, first_step: int) -> str:
        """What the functions give from ``first_step`` on; nothing where there are none."""
        return _runs(self._values(first_step), first_step)

    def _values(self, start: int) -> dict[str, list[int | None]]:
        """What the functions give for a window of steps; ``None`` where one raises, which is a matter of that step."""
        return {
            pattern: [_value_ahead(pattern, one, step) for step in range(start, start + WINDOW)]
            for pattern, one in self._functions.items()
        }


def _value(pattern: str, function: Callable[[int], int], step: int) -> int:
    return check_whole_number(f"rank{_at(pattern)} in step {step}", function(step), least=1)


def _value_ahead(pattern: str, function: Callable[[int], int], step: int) -> int | None:
    try:
        return _value(pattern, function, step)
    except ConfigurationError:
        raise
    except Exception:  # A list of ranks may end where the training does.
        return None


def _at(pattern: str) -> str:
    return "" if pattern == _REST else f"[{pattern!r}]"


def _runs(values: Mapping[str, list[int | None]], start: int) -> str:
    return "; ".join(f"rank{_at(pattern)} {_run(ranks, start)}" for pattern, ranks in values.items())


def _run(ranks: list[int | None], start: int) -> str:
    parts, step = [], start
    for rank, members in groupby(ranks):
        parts.append(f"{'none' if rank is None else rank} from step {step}")
        step += len(list(members))
    return ", ".join(parts)


def _some(names: list[str]) -> str:
    return ", ".join([*names[:5], *(["..."] if len(names) > 5 else [])])
