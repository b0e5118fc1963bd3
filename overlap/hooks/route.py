"""A reducer for each parameter."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch
from torch import Tensor

from overlap._torch.device import Workspace
from overlap._torch.foreach import copy_all, largest
from overlap.errors import ConfigurationError, RegistrationError
from overlap.hooks.adapters import HookStage, as_stage, shown
from overlap.hooks.bucket import Bucket, renew
from overlap.hooks.post_local_sgd import PostLocal
from overlap.hooks.segments import can_be_sent
from overlap.hooks.stage import Code, InnerCode, Plan, Role, Stage, StageContext, planner, walk

Rule = str | Callable[[str, Tensor], bool]
"""A pattern of names, or a function of a parameter's name and the parameter."""


class Route(Stage):
    """Reducers, each for some of the parameters; made by :func:`route`."""

    def __init__(self, rules: Mapping[Rule, Stage]) -> None:
        self.rules = dict(rules)
        # Rules may share a reducer.
        self.children = tuple(dict.fromkeys(self.rules.values()))
        self._reducer_of: dict[str, Stage] = {}
        """The reducer of each parameter, by name, while this is registered."""
        # Where a reducer has to know whether the results of the others are finite.
        self._note_largest: Callable[[Tensor], None] | None = None

    def attach(self, context: StageContext) -> None:
        if context.names is None:
            raise ConfigurationError(
                f"{self!r} needs the parameters' names, which a hook registered with ddp.register_comm_hook does not "
                "know; register it with overlap.register(ddp, ...)"
            )
        if self._reducer_of:
            raise RegistrationError(f"{self!r} is registered with a model already; give each model one of its own")
        names = list(context.names.values())
        reducer_of: dict[str, Stage] = {}
        unused = dict.fromkeys(self.rules)
        unused.pop("*", None)
        for parameter, name in context.names.items():
            rule = next((rule for rule in self.rules if _matches(rule, name, parameter)), None)
            if rule is None:
                raise ConfigurationError(
                    f"no rule of {self!r} matches the parameter {name} of shape {tuple(parameter.shape)}; end the "
                    'rules with "*": AllReduce() for all that is left'
                )
            reducer_of[name] = self.rules[rule]
            unused.pop(rule, None)
        for rule in unused:
            raise ConfigurationError(
                f"the rule {_shown_rule(rule)} of {self!r} is the first to match no parameter of the model, which are "
                f"{', '.join(names[:5])}{', ...' if len(names) > 5 else ''}: mend it, or put it further to the front"
            )
        self._reducer_of = reducer_of
        self._note_largest = context.note_largest if any(map(_has_feedback, self.children)) else None

    def detach(self) -> None:
        self._reducer_of = {}

    def context_of(self, child: Stage, context: StageContext) -> StageContext:
        """With the names of the parameters that ``child`` reduces."""
        assert context.names is not None, "attach refuses models without names"
        names = {parameter: name for parameter, name in context.names.items() if self._reducer_of[name] is child}
        return replace(context, names=names)

    async def __call__(self, bucket: Bucket) -> None:
        for reducer, part in self._parts_of(bucket):
            part.begin()
            try:
                await reducer(part.bucket)
            except Exception as error:
                error.add_note(_where(reducer, part.bucket))
                raise
            part.end()

    def plan(self, bucket: Bucket) -> Plan | None:
        whole: list[Code] = []
        for reducer, part in self._parts_of(bucket):
            if (plan := planner(reducer)(part.bucket)) is None:
                return None
            where = partial(_where, reducer, part.bucket)
            whole += part.planned([InnerCode(code, where) for code in plan])
        return whole

    def _parts_of(self, bucket: Bucket) -> Iterator[tuple[Stage, _Part]]:
        """Each reducer of the bucket's parameters, in the order of the rules, with its part."""
        positions: dict[Stage, list[int]] = {reducer: [] for reducer in self.children}
        for position, name in enumerate(bucket.names):
            if name not in self._reducer_of:
                raise ConfigurationError(f"{self!r} does not know the parameter {name}, which is new in the model")
            positions[self._reducer_of[name]].append(position)
        for reducer, found in positions.items():
            if found:  # Those with feedback note the largest themselves.
                yield reducer, _Part(bucket, found, None if _has_feedback(reducer) else self._note_largest)

    @property
    def signature(self) -> str:
        """The rules, and each reducer with its parameters."""
        rules = (f"{_shown_rule(rule)}: {self.children.index(reducer)}" for rule, reducer in self.rules.items())
        lines = [f"route({', '.join(rules)})"]
        for position, reducer in enumerate(self.children):
            own = [name for name, one in self._reducer_of.items() if one is reducer]
            lines.append(f"{position}: {reducer.signature} for {', '.join(own) or 'no parameter'}")
        return "\n".join(lines)

    def __repr__(self) -> str:
        return f"route({{{', '.join(f'{_shown_rule(rule)}: {reducer!r}' for rule, reducer in self.rules.items())}}})"


def route(rules: Mapping[Rule, Stage | Callable[..., Any]]) -> Route:
    """A reducer made of several, each for some of the parameters: the first rule that matches decides.

    A rule is a pattern of fully qualified names, as in ``fnmatch``, or a function ``(name, parameter) -> bool``. ``*``
    also stands for dots, and ``"*."`` at the front may stand for nothing, so ``"*.embedding.weight"`` is also the
    ``embedding.weight`` of the model itself. Several rules may share one reducer.

    A bucket whose parameters all have one reducer goes to it as it is. Others are split: each reducer gets a bucket of
    its own parameters, in the order of the rules; ``is_last`` stays that of DDP's bucket. Neighbouring parameters are
    reduced in place, others are packed.

    Args:
        rules: reducers by rule, the first that matches first; ``"*": AllReduce()`` takes all that is left.

    Communication: that of the reducers. Changes: ``bucket.buffer``. Memory: a copy of the gradients that are packed.

    Raises:
        ConfigurationError: there are no rules, or a value is not a reducer; when it is registered, a parameter has no
            rule, a rule has no parameter (but ``"*"``), or names are not known.

    >>> from overlap import AllReduce, PowerSGD, route
    >>> route({"*.embedding.weight": AllReduce(), "*": PowerSGD(rank=4)})
    route({'*.embedding.weight': AllReduce(), '*': PowerSGD(rank=4)})
    """
    if not isinstance(rules, Mapping) or not rules:
        raise ConfigurationError(
            f'route takes reducers by rule, as in route({{"*.bias": AllReduce(), "*": PowerSGD()}}), got {shown(rules)}'
        )
    made = {rule: as_stage(value) for rule, value in rules.items()}
    for rule, reducer in made.items():
        if not isinstance(rule, str) and (isinstance(rule, type) or not callable(rule)):
            raise ConfigurationError(
                f"a rule is a pattern of names or a function (name, parameter) -> bool, got {shown(rule)}"
            )
        where = f"{reducer!r}, which is to reduce {_shown_rule(rule)},"
        if reducer.role is not Role.REDUCER:
            raise ConfigurationError(
                f"{where} is not a reducer; a function that reduces is marked with @overlap.reducer, and updates come "
                "after route({...}) in the chain"
            )
        for stage in walk(reducer):
            if stage.role is Role.TRANSFORM:
                raise ConfigurationError(
                    f"{where} has the transform {stage!r}, which would see some of the parameters only; put it before "
                    "or after route({...}) in the chain"
                )
            if isinstance(stage, Route | PostLocal):
                raise ConfigurationError(
                    f"{where} decides for all of the model; write one route({{...}}), and PostLocal(state, route(...))"
                )
            if isinstance(stage, HookStage):
                raise ConfigurationError(
                    f"{where} calls a communication hook, which must be called with DDP's own buckets; use a reducer "
                    "such as AllReduce(), Cast(torch.bfloat16) or PowerSGD(), or a function marked with "
                    "@overlap.reducer"
                )
    return Route(made)


def _has_feedback(reducer: Stage) -> bool:
    return any(getattr(stage, "error_feedback", False) for stage in walk(reducer))


def _matches(rule: Rule, name: str, parameter: Tensor) -> bool:
    """Whether ``rule`` means the parameter of this name."""
    if not isinstance(rule, str):
        return bool(rule(name, parameter))
    return fnmatchcase(name, rule) or (rule.startswith("*.") and fnmatchcase(name, rule[2:]))


def _shown_rule(rule: Rule) -> str:
    """The same text on every rank."""
    if isinstance(rule, str):
        return repr(rule)
    name: str = getattr(rule, "__name__", None) or type(rule).__name__
    return name


def _where(reducer: Stage, part: Bucket) -> str:
    return f"raised in stage {reducer!r}, {part.describe()}"


class _Part:
    """The parameters of a bucket at ``positions``, in ascending order, as a bucket of their own.

    Its buffer is a view of gradients in one run that can be sent from its start ([Note: segments]); others are copied
    there and back. Where a plan keeps it, copies have memory from :meth:`begin` to :meth:`end` alone.
    """

    def __init__(self, whole: Bucket, positions: Sequence[int], note_largest: Callable[[Tensor], None] | None) -> None:
        self._whole = self.bucket = whole
        self._note_largest = note_largest
        # Where packed gradients come from, and where they are in the buffer.
        self._runs: list[Tensor] = []
        self._packed: Sequence[Tensor] = ()
        self._workspace = Workspace()
        if len(positions) == len(whole.parameters):
            return
        spans: list[tuple[int, int]] = []
        views, numel = [], 0
        for size, stride, offset in (whole.layout[position] for position in positions):
            views.append((size, stride, numel))
            numel += size.numel()
            if spans and spans[-1][1] == offset:
                spans[-1] = (spans[-1][0], offset + size.numel())
            elif size.numel():
                spans.append((offset, offset + size.numel()))
        runs = [whole.buffer[start:end] for start, end in spans]
        buffer = runs[0] if runs else whole.buffer[:0]
        if len(runs) > 1 or not all(map(can_be_sent, runs)):
            self._runs = runs
            buffer = self._workspace.make(numel, dtype=buffer.dtype, device=buffer.device)
            self._packed = buffer.split([run.numel() for run in runs])
        self.bucket = replace(
            whole,
            buffer=buffer,
            parameters=tuple(whole.parameters[position] for position in positions),
            fqns=tuple(whole.names[position] for position in positions),
            raw=None,
            views=tuple(views),
        )

    def planned(self, plan: Plan) -> Plan:
        """``plan``, made of the reducer for this part, with what goes before it and comes after it."""
        if not self._runs:
            begin = () if self.bucket is self._whole else (self.begin,)
            return *begin, *plan, *(() if self._note_largest is None else (self.end,))
        self._workspace.give_back()

        def begin_packed() -> None:
            self._workspace.take()
            self.begin()

        def end_packed() -> None:
            self.end()
            self._workspace.give_back()

        return begin_packed, *plan, end_packed

    def begin(self) -> None:
        renew([self.bucket], self._whole.step)
        if self._runs:
            torch.cat(self._runs, out=self.bucket.buffer)

    def end(self) -> None:
        if self._note_largest is not None:
            self._note_largest(largest(self.bucket.buffer))
        copy_all(self._runs, self._packed)
