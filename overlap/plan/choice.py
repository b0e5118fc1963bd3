"""`overlap.auto`: the fastest chain for a model on the link between its ranks, and the :class:`Plan` that it makes."""

from __future__ import annotations

import inspect
import json
import math
import statistics
import time
import weakref
from collections import ChainMap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, Self

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.optim import Optimizer
from tqdm import tqdm

from overlap._checks import check_group, check_number, check_whole_number, short_repr, type_name
from overlap._torch.ddp import uncompiled
from overlap.errors import ConfigurationError, UnsupportedError
from overlap.optim import OverlappedOptimizer, ZeroRedundancyOptimizer
from overlap.plan.candidates import METHODS, PLAIN, allowed, build, obstacle
from overlap.plan.race import Like, Race, device_of, generators_restored
from overlap.ranks.board import Agreement

# By how much a candidate must be faster than plain DDP to take its place.
_MARGIN = 0.02
# How often a candidate that is no faster may win so many rounds.
_CHANCE = 1 / 32
_HEADINGS = ("candidate", "update", "ms a step", "of plain DDP", "rounds", "result")
_PROGRESS = "{desc}: {bar} {n:.0f} of {total:.0f} s"
_plans: weakref.WeakKeyDictionary[DistributedDataParallel, Plan] = weakref.WeakKeyDictionary()


def auto(
    model: nn.Module,
    optimizer: Optimizer,
    *,
    sample: Sequence[Any] | None = None,
    loss: Callable[..., Any] | None = None,
    allow: str | Iterable[str] = ("exact",),
    updates: Literal["backward", "step"] = "backward",
    plan: Plan | None = None,
    seconds: float = 15.0,
    accumulate: int = 1,
    autocast: torch.dtype | None = None,
    process_group: dist.ProcessGroup | None = None,
    ddp_options: Mapping[str, Any] | None = None,
    quiet: bool = False,
) -> tuple[DistributedDataParallel, Optimizer]:
    """Wrap ``model`` in DDP with the chain that wins a race of real steps on this link.

    Call it on every rank, before the first step. It races chains beside plain DDP for some seconds, on copies: the
    model, the optimizer and all generators are left as they were. One of them is chosen only if it was faster by more
    than the noise, and by 2 %. All ranks choose the same. Rank 0 prints a table and the reason. See ``docs/choose.md``.

    Args:
        model: the model to train, on its device and not in DDP.
        optimizer: of its parameters.
        sample: a batch of this rank: the model's inputs, then the target. Not needed with ``plan``.
        loss: of the output and the target alone; returns a tensor of one element. A module, or a method of an object,
            is copied, but nothing else that it reaches. Not needed with ``plan``.
        allow: the results that may be chosen besides "exact", which equals plain DDP up to the order of a sum:
            "16-bit", "8-bit", "low-rank". "sharded" is exact, too, but then a :class:`ZeroRedundancyOptimizer` takes
            the place of ``optimizer``: make schedulers and hooks for it, and call its ``state_dict`` on every rank.
        updates: ``"step"`` chooses among chains that update in ``optim.step()``, for a loop that clips or skips between
            backward and step, uses a ``GradScaler``, or adds up several backwards. With ``"backward"`` the chosen chain
            may update while backward runs, and such a loop gets an error.
        plan: measure nothing, and follow this plan: for a run that resumes.
        seconds: about how long to measure.
        accumulate: the backwards of a step in the loop, all but the last under ``no_sync``.
        autocast: the dtype of ``torch.autocast`` around forward and loss in the loop; where ``None`` that which is
            active where this is called, if one is.
        process_group: the ranks; the default group if ``None``.
        ddp_options: more arguments of ``DistributedDataParallel``, such as ``bucket_cap_mb``.
        quiet: print nothing; else rank 0 also shows on stderr, meanwhile, which chain runs.

    Returns:
        The model in DDP and the optimizer for the loop. ``Plan.of(ddp)`` is the choice.

    Communication: collectives on a group of its own, which is gone when it returns; then those of DDP's constructor and
    of registering a chain. Ranks exchange their measurements through the group's store.

    Raises:
        ConfigurationError: an argument is wrong or differs between ranks, before any collective.
        UnsupportedError: the model, the optimizer or the loss cannot be copied.
        PeerError: another rank failed.

    >>> model = torch.nn.Linear(4, 2)
    >>> optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    >>> ddp, optim = overlap.auto(model, optimizer, sample=(x, y), loss=loss_fn, seconds=0.1, quiet=True)
    >>> for x, y in loader:
    ...     optim.zero_grad()
    ...     loss_fn(ddp(x), y).backward()
    ...     optim.step()
    """
    if not dist.is_available() or not dist.is_initialized():
        raise ConfigurationError(
            "auto measures the link between ranks, but there is no process group: call "
            "torch.distributed.init_process_group first"
        )
    group: Any = check_group("process_group", process_group) or dist.group.WORLD
    end_s = time.monotonic()
    with Agreement(group, "call overlap.auto") as agreement:
        options = {} if ddp_options is None else ddp_options
        allow = allow if isinstance(allow, str) or not isinstance(allow, Iterable) else tuple(allow)
        candidates = allowed(allow, updates)
        end_s += check_number("seconds", seconds, above=0)
        if not isinstance(options, Mapping):
            raise ConfigurationError(f"ddp_options={short_repr(options)} is not a dict of DDP's arguments")
        if plan is not None and not isinstance(plan, Plan):
            raise ConfigurationError(f"plan is a {type_name(plan)}: give Plan.load(path), or leave it out")
        _check_model(model)
        _check_optimizer(optimizer, model)
        if plan is None:
            _check_loss(sample, loss)
        like = Like(check_whole_number("accumulate", accumulate, least=1), _autocast_dtype(autocast, model))
        trained = [[name, list(p.shape), str(p.dtype)] for name, p in model.named_parameters() if p.requires_grad]
        given = {
            "plans": None if plan is None else plan.method,
            "models": trained,
            "candidates (allow=, updates=)": candidates,
            "loops (accumulate=, autocast=)": str(like),
        }
        agreement.agree(given, _check_alike)
        if plan is None:
            assert sample is not None and loss is not None
            with (
                generators_restored(device_of(model)),
                torch.autocast(device_of(model).type, enabled=False),  # Backward and step run without.
                tqdm(
                    total=seconds, bar_format=_PROGRESS, leave=False, disable=quiet or agreement.rank != 0
                ) as progress,
                Race(
                    agreement,
                    group,
                    (model, optimizer, loss),
                    sample,
                    ddp_options=options,
                    like=like,
                    progress=progress,
                ) as race,
            ):
                chosen = _raced(race, candidates, optimizer, agreement, end_s, len(trained), like)
        else:
            chosen = plan
            if plan.ranks != agreement.size or plan.parameters not in (None, len(trained)):
                raise ConfigurationError(
                    f"plan was made for {plan.ranks} ranks and a model with {plan.parameters} trained parameters; here "
                    f"are {agreement.size} and {len(trained)}: leave plan out, and choose anew"
                )
        ddp = DistributedDataParallel(model, process_group=group, **options)
        optim = build(ddp, optimizer, METHODS[chosen.method])
    _plans[ddp] = chosen
    if agreement.rank == 0 and plan is None and not quiet:
        print(chosen)
    return ddp, optim


def _check_alike(of_ranks: list[dict[str, Any]]) -> None:
    for rank, given in enumerate(of_ranks):
        for name, first in of_ranks[0].items():
            if given[name] != first:
                shown = f", {given[name]} on rank {rank} and {first} on rank 0" if name == "plans" else ""
                raise ConfigurationError(f"ranks were given different {name}{shown}: give the same on all")


def _autocast_dtype(given: torch.dtype | None, model: nn.Module) -> torch.dtype | None:
    """Raises: ConfigurationError: ``given`` is not a dtype of autocast."""
    if given is not None and (not isinstance(given, torch.dtype) or not given.is_floating_point):
        raise ConfigurationError(f"autocast is a dtype such as torch.bfloat16, or None, got {short_repr(given)}")
    kind = device_of(model).type
    return given or (torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None)


def _raced(
    race: Race,
    candidates: list[str],
    optimizer: Optimizer,
    agreement: Agreement,
    end_s: float,
    parameters: int,
    like: Like,
) -> Plan:
    """The plan that a race of copies decides."""
    found = {one: obstacle(METHODS[one], optimizer) for one in candidates}
    own = {one: why for one, why in found.items() if why is not None}
    notes: dict[str, str] = agreement.agree(own, lambda of_ranks: dict(ChainMap(*reversed(of_ranks))))
    last = race.run([one for one in candidates if one not in notes and one != PLAIN], end_s=end_s)
    notes |= race.refused
    rows = [
        Row(
            method=one,
            measured_ms=statistics.median(samples) if (samples := race.samples.get(one)) else None,
            ratio=quartiles(ratios) if (ratios := race.ratios.get(one)) else None,
            rounds=len(samples or ()),
            note=notes.get(one, ""),
        )
        for one in candidates
    ]
    method, reason = decide(last, [] if last is None else race.ratios[last], is_complete=race.is_complete)
    return Plan(
        method=method,
        ranks=agreement.size,
        rows=tuple(sorted(rows, key=lambda row: (row.measured_ms is None, row.measured_ms))),
        reason=f"{reason} Raced with {like}.",
        parameters=parameters,
    )


def _check_loss(sample: Any, loss: Any) -> None:
    if not isinstance(sample, (tuple, list)) or len(sample) < 2:
        got = f"{len(sample)} entries" if isinstance(sample, (tuple, list)) else type_name(sample)
        raise ConfigurationError(
            f"sample is {got}: give a batch of this rank as a tuple, sample=(x, y), with as many inputs as the model "
            "takes before the target"
        )
    if not callable(loss):
        raise ConfigurationError(
            f"loss is a {type_name(loss)}: give a function of output and target, such as "
            "torch.nn.functional.cross_entropy"
        )


def _check_model(model: Any) -> None:
    model = uncompiled(model)
    if not isinstance(model, nn.Module) or isinstance(model, (DistributedDataParallel, DataParallel)):
        raise ConfigurationError(
            f"model is a {type_name(model)}: give the torch.nn.Module that is to be trained, such as ddp.module; "
            "auto wraps it in DDP"
        )
    devices = len({parameter.device for parameter in model.parameters() if parameter.requires_grad})
    if devices != 1:
        raise ConfigurationError(f"model has trained parameters on {devices} devices: auto chooses for one on one")


def _check_optimizer(optimizer: Any, model: nn.Module) -> None:
    kind = type_name(optimizer)
    is_wrapper = isinstance(optimizer, (OverlappedOptimizer, ZeroRedundancyOptimizer))
    if is_wrapper or not isinstance(optimizer, Optimizer):
        raise ConfigurationError(
            f"optimizer is a {kind}: give a plain torch.optim.Optimizer, such as "
            "torch.optim.AdamW(model.parameters(), lr=1e-3); auto wraps it as its choice needs"
        )
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise UnsupportedError(
            f"optimizer is a {kind}, whose step() needs a closure, and auto measures loops that call step() alone: "
            "use plain DDP with it"
        )
    own = {parameter for group in optimizer.param_groups for parameter in group["params"]}
    if own.isdisjoint(model.parameters()):
        raise ConfigurationError("optimizer has none of the model's parameters: make it from model.parameters()")


# The decision -------------------------------------------------------------------------------------------------------


def is_surely_faster(ratios: Sequence[float]) -> bool:
    """Whether steps that took these parts of plain DDP's are faster by more than the noise.

    The median must be at most 0.98, and so many rounds won that it would happen to a candidate that is no faster once
    in 32 times (the sign test, which knows nothing of how noise is distributed): 5 of 5, 9 of 10, 21 of 30.

    >>> is_surely_faster([0.9, 0.95, 0.9, 0.97, 0.96])
    True
    >>> is_surely_faster([0.9, 0.95, 0.9, 0.97, 1.01]), is_surely_faster([0.9, 0.9, 0.9, 0.9])
    (False, False)
    """
    rounds, won = len(ratios), sum(ratio < 1 for ratio in ratios)
    by_chance = sum(math.comb(rounds, count) for count in range(won, rounds + 1)) / 2**rounds
    return bool(ratios) and statistics.median(ratios) <= 1 - _MARGIN and by_chance <= _CHANCE


def decide(last: str | None, ratios: Sequence[float], *, is_complete: bool) -> tuple[str, str]:
    """The method to build, and the reason: ``last`` won the race, with these ``ratios`` in its last heat."""
    more = "" if is_complete else " The time was too short for all candidates: give more seconds=."
    if last is None:
        return PLAIN, f"Plain DDP stays: no other candidate was raced.{more}"
    took = "took {1:.3f} of plain DDP's step (quartiles {0:.3f} and {2:.3f})".format(*quartiles(ratios))
    took += f" and won {sum(ratio < 1 for ratio in ratios)} of {len(ratios)} rounds."
    if not is_surely_faster(ratios):
        within = f"That is within the noise, or more than {1 - _MARGIN:.2f}."
        return PLAIN, f"Plain DDP stays: the best of the others, {last}, {took} {within}{more}"
    if not METHODS[last].is_deferred:
        took += (
            " It updates in backward: a loop that clips, scales or skips between backward and step, or runs several "
            "backwards a step, needs updates='step'."
        )
    return last, f"{last} was chosen: it {took}{more}"


def quartiles(values: Sequence[float]) -> list[float]:
    """The lower quartile, the median and the upper quartile."""
    if len(values) == 1:
        return [*values] * 3
    return [round(value, 4) for value in statistics.quantiles(values, method="inclusive")]


@dataclass(frozen=True, kw_only=True)
class Row:
    """A candidate and its last heat of the race."""

    method: str
    measured_ms: float | None = None
    """A step, by the median of the rounds; ``None`` if it was not raced."""
    ratio: list[float] | None = None
    """Its step as a part of plain DDP's in the same round: lower quartile, median, upper quartile."""
    rounds: int = 0
    note: str = ""
    """Why it was not raced, or may not be chosen."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A choice, with the measurements that it was made from. ``print(plan)`` shows the table and the reason.

    >>> print(Plan(method="ddp", ranks=2, rows=(), reason="Plain DDP was fastest.").reason)
    Plain DDP was fastest.
    """

    method: str
    """A name in the table's first column."""
    ranks: int
    rows: tuple[Row, ...]
    reason: str
    parameters: int | None = None
    """How many tensors are trained."""

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise ConfigurationError(f"method={self.method!r} is not one of {', '.join(METHODS)}")

    @classmethod
    def of(cls, ddp: DistributedDataParallel) -> Plan:
        """The plan from which :func:`overlap.auto` made ``ddp``.

        Raises:
            ConfigurationError: it made no such model.
        """
        plan = _plans.get(ddp)
        if plan is None:
            raise ConfigurationError("overlap.auto has not made this model: give the first that it returned")
        return plan

    def save(self, path: str | Path) -> None:
        """Write it as JSON, for :meth:`load`; one rank is enough, since all have the same."""
        Path(path).write_text(json.dumps(asdict(self), indent=1) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read a file that :meth:`save` wrote.

        Raises:
            ConfigurationError: the file is not there, or holds something else.
        """
        try:
            fields = json.loads(Path(path).read_text())
            return cls(**{**fields, "rows": tuple(Row(**row) for row in fields["rows"])})
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigurationError(
                f"{str(path)!r} is not a plan that Plan.save of this version wrote ({error}): leave plan out, and "
                "choose anew"
            ) from None

    def __str__(self) -> str:
        """The rows as a table, the chosen one marked, and the reason."""
        lines = [("", *_HEADINGS), *map(self._cells, self.rows)]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        aligned = [f"{side}{width}" for side, width in zip("<<<>>><", widths, strict=True)]
        table = ["  ".join(map(format, line, aligned)).rstrip() for line in lines]
        return "\n".join([*table, "", self.reason])

    def _cells(self, row: Row) -> tuple[str, ...]:
        return (
            ">" if row.method == self.method else "",
            row.method,
            METHODS[row.method].update,
            "-" if row.measured_ms is None else f"{row.measured_ms:.2f}",
            "-" if row.ratio is None else "{1:.3f} ({0:.3f} to {2:.3f})".format(*row.ratio),
            str(row.rounds or "-"),
            f"{METHODS[row.method].kind}{f' ({row.note})' if row.note else ''}",
        )
