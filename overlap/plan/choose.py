"""`overlap.auto`: the fastest chain for a model on the link between its ranks."""

from __future__ import annotations

import inspect
import statistics
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter
from torch.optim import Optimizer

from overlap._checks import check_group, check_number, check_whole_number, described, is_one_of, told
from overlap._torch.ddp import uncompiled
from overlap.errors import ConfigurationError, UnsupportedError
from overlap.optim import OverlappedOptimizer, ZeroRedundancyOptimizer
from overlap.plan.candidates import METHODS, PLAIN, Candidate, allowed, build, obstacle, wrap
from overlap.plan.decision import MARGIN, Plan, Row, decide, quartiles
from overlap.plan.measure import Computing, Originals, Training, computing, generators_restored, gradients_ms
from overlap.plan.race import Race
from overlap.ranks.board import Agreement

__all__ = ["Request", "auto"]

# Of `seconds`, for measuring the computation.
_COMPUTE_SHARE = 0.1
# A model with no more gradients has one bucket, of whatever size.
_FIRST_BUCKET_BYTES = 2**20
_OWN_DDP_OPTIONS = ("module", "process_group", "bucket_cap_mb", "init_sync")


def auto(
    model: nn.Module,
    optimizer: Optimizer,
    *,
    sample: Sequence[Any] | None = None,
    loss: Callable[..., Any] | None = None,
    allow: str | Iterable[str] = ("exact",),
    updates: Literal["backward", "step"] = "backward",
    memory: str | int | None = None,
    report: str | Path | None = None,
    plan: Plan | None = None,
    seconds: float = 15.0,
    process_group: dist.ProcessGroup | None = None,
    ddp_options: Mapping[str, Any] | None = None,
    quiet: bool = False,
) -> tuple[DistributedDataParallel, Optimizer]:
    """Wrap ``model`` in DDP with the chain and the bucket size that win a race of real steps on this link.

    Call it on every rank, before the first step. It races chains beside plain DDP for some seconds, on copies: the
    model, the optimizer and all generators are left as they were. One of them is chosen only if it was faster by more
    than the noise, and by 2 %. All ranks choose the same. Rank 0 prints a table and the reason. See ``docs/auto.md``.

    Args:
        model: the model to train, on its device and not in DDP.
        optimizer: of its parameters.
        sample: a batch of this rank: the model's inputs, then the target. Not needed with ``plan``.
        loss: of the output and the target; returns a tensor of one element. A module, or a method of an object, is
            copied. Not needed with ``plan``.
        allow: the results that may be chosen besides "exact", which equals plain DDP up to the order of a sum:
            "16-bit", "8-bit", "low-rank". "sharded" is exact, too, but then a :class:`ZeroRedundancyOptimizer` takes
            the place of ``optimizer``: make schedulers and hooks for it, and call its ``state_dict`` on every rank.
        updates: ``"step"`` chooses among chains that update in ``optim.step()``, for a loop that clips or skips between
            backward and step, uses a ``GradScaler``, or adds up several backwards. With ``"backward"`` the chosen chain
            may update while backward runs, and such a loop gets an error.
        memory: ``"small"`` chooses among methods that take less memory on each rank than plain DDP, a number among
            those that take at most that many bytes, by an estimate without activations.
        report: draw the measurements into this file.
        plan: measure nothing, and follow this plan: for a run that resumes.
        seconds: about how long to measure.
        process_group: the ranks; the default group if ``None``.
        ddp_options: more arguments of ``DistributedDataParallel``.
        quiet: print nothing.

    Returns:
        The model in DDP and the optimizer for the loop. ``Plan.of(ddp)`` is the choice.

    Communication: collectives on a group of its own, which is gone when it returns; then those of DDP's constructor and
    of registering a chain. Ranks exchange their measurements through the group's store.

    Raises:
        ConfigurationError: an argument is wrong, before any collective; or the ranks have different models.
        UnsupportedError: the model cannot be copied, or the loss reaches it in another way than by its argument.
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
    start_s = time.monotonic()
    with Agreement(group, "call overlap.auto") as agreement:
        request = Request(
            model=model,
            optimizer=optimizer,
            sample=sample,
            loss=loss,
            allow=allow if isinstance(allow, str) or not isinstance(allow, Iterable) else tuple(allow),
            updates=updates,
            memory=memory,
            report=report,
            plan=plan,
            seconds=seconds,
            ddp_options={} if ddp_options is None else ddp_options,
        )
        given = agreement.agree(None if plan is None else str(plan.candidate))
        if len(set(given)) > 1:
            raise ConfigurationError(f"ranks were given different plans, {given}: load the same file on all")
        if plan is None:
            chosen = _race(request, group, agreement, start_s)
        else:
            chosen = plan
            _check_plan(plan, model, ranks=agreement.size)
        ddp = wrap(model, chosen.candidate, group, **request.ddp_options)
        optim = build(ddp, optimizer, chosen.candidate)
    chosen.attach(ddp)
    if agreement.rank == 0 and plan is None:
        if not quiet:
            print(chosen)
        if report is not None:
            try:
                chosen.draw(report)
            except Exception as error:  # Only a picture: the run goes on.
                words = f"report={str(report)!r} was not written ({type(error).__name__}: {error})"
                warnings.warn(words, stacklevel=2)
    return ddp, optim


def _check_plan(plan: Plan, model: nn.Module, *, ranks: int) -> None:
    """Raises: ConfigurationError: ``plan`` was made for something else."""
    count = sum(parameter.requires_grad for parameter in model.parameters())
    if plan.ranks != ranks or plan.parameters not in (None, count):
        raise ConfigurationError(
            f"plan was made for {plan.ranks} ranks and a model with {plan.parameters} trained parameters, and here are "
            f"{ranks} and {count}: leave it out to choose anew"
        )


def _race(request: Request, group: dist.ProcessGroup, agreement: Agreement, start_s: float) -> Plan:
    """The plan that a race decides. The originals are as before when it returns."""
    assert request.sample is not None and request.loss is not None
    originals = Originals(Training(request.model, request.optimizer, request.loss))
    device = originals.own.device
    try:
        with generators_restored(device):
            seconds, sample = request.seconds, request.sample
            step = computing(originals.copied(), sample, seconds=_COMPUTE_SHARE * seconds, agreement=agreement)
            originals.check()
            candidates, notes, memory = _candidates(request, step, agreement)
            with Race(agreement, group, originals.copied, sample, ddp_options=request.ddp_options) as race:
                link_ms = gradients_ms(race.group, step.gradient_bytes, device=device, agreement=agreement)
                plain_ms = race.time_baseline()
                least_ms = {one: METHODS[one.method].least_ms(step, gradients_ms=link_ms) for one in candidates}
                for one in candidates:
                    is_hopeless = least_ms[one] > (1 - MARGIN) * plain_ms and PLAIN not in notes
                    if is_hopeless and one != PLAIN:
                        notes.setdefault(one, f"takes {least_ms[one]:.2f} ms at least")
                entrants = [one for one in candidates if one not in notes and one != PLAIN]
                last = race.run(sorted(entrants, key=lambda one: least_ms[one]), end_s=start_s + seconds)
    finally:
        originals.check()
    notes.update(race.refused)
    rows = [
        Row(
            method=one.method,
            bucket_cap_mb=one.bucket_cap_mb,
            measured_ms=statistics.median(race.samples[one]) if race.samples.get(one) else None,
            ratio=quartiles(race.ratios[one]) if race.ratios.get(one) else None,
            rounds=len(race.samples.get(one, ())),
            memory_bytes=memory[one.method],
            note=notes.get(one, ""),
        )
        for one in candidates
    ]
    needed_s = None if race.needed_s is None else time.monotonic() - start_s + race.needed_s
    candidate, reason = decide(rows, [] if last is None else race.ratios[last], last=last, needed_s=needed_s)
    plan = Plan(
        method=candidate.method,
        bucket_cap_mb=candidate.bucket_cap_mb,
        ranks=agreement.size,
        rows=tuple(sorted(rows, key=lambda row: (row.measured_ms is None, row.measured_ms))),
        reason=reason,
        compute=f"{step}, an all-reduce of them {link_ms:.2f} ms",
        parameters=sum(parameter.requires_grad for parameter in request.model.parameters()),
    )
    return Plan.of_json(agreement.from_rank_0(plan.to_json()))


def _candidates(
    request: Request, step: Computing, agreement: Agreement
) -> tuple[list[Candidate], dict[Candidate, str], dict[str, int]]:
    """What rank 0 allows; which of it a rank cannot take, and why; and the memory of each method."""
    names = agreement.from_rank_0([[one.method, one.bucket_cap_mb] for one in allowed(request.allow, request.updates)])
    candidates = [Candidate(*name) for name in names]
    if step.gradient_bytes <= _FIRST_BUCKET_BYTES:
        candidates = [one for one in candidates if one.bucket_cap_mb is None]
    view = bool(request.ddp_options.get("gradient_as_bucket_view"))
    memory = {
        one.method: METHODS[one.method].memory_bytes(step, ranks=agreement.size, gradient_as_bucket_view=view)
        for one in candidates
    }
    own: dict[str, str] = {}
    for method, needed in memory.items():
        if (why := obstacle(METHODS[method], request.optimizer, is_sparse=step.is_sparse)) is not None:
            own[method] = why
        elif request.memory == "small" and needed >= memory[PLAIN.method]:
            own[method] = "takes no less memory than plain DDP"
        elif isinstance(request.memory, int) and needed > request.memory:
            own[method] = f"takes about {needed} bytes, more than memory={request.memory}"
    notes: dict[Candidate, str] = {}
    for of_rank in agreement.agree(own):
        for one in candidates:
            if one.method in of_rank:
                notes.setdefault(one, of_rank[one.method])
    return candidates, notes, memory


@dataclass(frozen=True, kw_only=True)
class Request:
    """The arguments of :func:`overlap.auto`.

    Raises:
        ConfigurationError: one of them is wrong; the message names it.
    """

    model: nn.Module
    optimizer: Optimizer
    sample: Sequence[Any] | None
    loss: Callable[..., Any] | None
    allow: str | Iterable[str]
    updates: str
    memory: str | int | None
    report: str | Path | None
    plan: Plan | None
    seconds: float
    ddp_options: Mapping[str, Any]

    def __post_init__(self) -> None:
        self._check_model()
        self._check_optimizer()
        allowed(self.allow, self.updates)
        check_number("seconds", self.seconds, above=0)
        if isinstance(self.memory, str) and self.memory != "small":
            raise ConfigurationError(f"memory={self.memory!r} is not 'small', a number of bytes, or None")
        if not is_one_of(self.memory, None, "small"):
            check_whole_number("memory", self.memory, least=1)
        if self.report is not None and not isinstance(self.report, (str, Path)):
            raise ConfigurationError(f"report is a {described(self.report)}: give the name of a picture, 'plan.png'")
        if not isinstance(self.ddp_options, Mapping):
            raise ConfigurationError(
                f"ddp_options={told(self.ddp_options)} is not a dict of DistributedDataParallel's arguments"
            )
        for name in _OWN_DDP_OPTIONS:
            if name in self.ddp_options:
                raise ConfigurationError(f"ddp_options has {name!r}, which auto gives to DDP itself: leave it out")
        if self.plan is None:
            self._check_sample()
        elif not isinstance(self.plan, Plan):
            raise ConfigurationError(f"plan is a {described(self.plan)}: give Plan.load(path), or leave it out")

    def _check_model(self) -> None:
        model = uncompiled(self.model)
        if not isinstance(model, nn.Module) or isinstance(model, (DistributedDataParallel, DataParallel)):
            raise ConfigurationError(
                f"model is a {described(model)}: give the torch.nn.Module that is to be trained, such as ddp.module; "
                "auto wraps it in DDP"
            )
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if isinstance(tensor, (UninitializedParameter, UninitializedBuffer)):
                raise ConfigurationError(
                    f"model has {name!r}, which is made in the first forward: run one before the optimizer is made"
                )
        devices = len({parameter.device for parameter in model.parameters() if parameter.requires_grad})
        if devices != 1:
            raise ConfigurationError(f"model has trained parameters on {devices} devices: auto chooses for one on one")

    def _check_optimizer(self) -> None:
        kind = described(self.optimizer)
        is_wrapper = isinstance(self.optimizer, (OverlappedOptimizer, ZeroRedundancyOptimizer))
        if is_wrapper or not isinstance(self.optimizer, Optimizer):
            raise ConfigurationError(
                f"optimizer is a {kind}: give a plain torch.optim.Optimizer, such as "
                "torch.optim.AdamW(model.parameters(), lr=1e-3); auto wraps it as its choice needs"
            )
        closure = inspect.signature(type(self.optimizer).step).parameters.get("closure")
        if closure is not None and closure.default is inspect.Parameter.empty:
            raise UnsupportedError(
                f"optimizer is a {kind}, whose step() needs a closure, and auto measures loops that call step() alone: "
                "use plain DDP with it"
            )
        own = {parameter for group in self.optimizer.param_groups for parameter in group["params"]}
        if own.isdisjoint(self.model.parameters()):
            raise ConfigurationError("optimizer has none of the model's parameters: make it from model.parameters()")

    def _check_sample(self) -> None:
        if not isinstance(self.sample, (tuple, list)) or len(self.sample) < 2:
            got = f"{len(self.sample)} entries" if isinstance(self.sample, (tuple, list)) else described(self.sample)
            raise ConfigurationError(
                f"sample is {got}: give a batch of this rank as a tuple, sample=(x, y), with as many inputs as the "
                "model takes before the target"
            )
        if not callable(self.loss):
            raise ConfigurationError(
                f"loss is a {described(self.loss)}: give a function of output and target, such as "
                "torch.nn.functional.cross_entropy"
            )
