"""`overlap.auto`: the fastest chain for a model on the link between its ranks."""

from __future__ import annotations

import socket
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from overlap.errors import ConfigurationError
from overlap.join.board import Agreement
from overlap.plan.candidates import Candidate, build, obstacles, wrap
from overlap.plan.compute import forward_and_loss, fresh, measure, model_device, thread_rate
from overlap.plan.copies import Originals, Training, generators_restored
from overlap.plan.decision import Options, Samples
from overlap.plan.dry import measured_costs
from overlap.plan.given import agreed, check_alike
from overlap.plan.link import Link
from overlap.plan.plan import Plan
from overlap.plan.predict import ranking
from overlap.plan.profile import Profile
from overlap.plan.race import Race
from overlap.plan.request import Request, check_group_exists
from overlap.plan.tournament import tournament
from overlap.plan.wire_times import SHARING_STEPS, measure_link, measure_sharing

__all__ = ["auto"]

# Of the time for choosing, what measuring the computation takes.
_COMPUTE_SHARE = 0.15
# How much longer than asked choosing may take for the sake of a race.
_GRACE = 0.4
# After a rank has failed in a race the others wait for it as long as this, at least.
_LEAST_TIMEOUT_S, _TIMEOUT_STEPS = 60.0, 20


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
    seconds: float = 10.0,
    process_group: dist.ProcessGroup | None = None,
    ddp_options: Mapping[str, Any] | None = None,
    quiet: bool = False,
) -> tuple[DistributedDataParallel, Optimizer]:
    """Wrap ``model`` in DDP with the chain and the bucket size that are fastest here, found out by measuring.

    Call it on every rank, before the first step. It measures for some seconds what the model computes and what the
    link costs, predicts the step of each candidate, runs the best beside plain DDP, and keeps one of them only if that
    was faster by 2 % or more. All of that happens on copies: the model, the optimizer and all generators are left as
    they were. Rank 0 decides for all, and prints a table and the reason. See ``docs/auto.md``.

    Args:
        model: what is to be trained, on its device and not in DDP.
        optimizer: of its parameters.
        sample: a batch of this rank: the model's inputs, then the target. Not needed with ``plan``.
        loss: of the output and the target; returns a tensor of one element. Not needed with ``plan``.
        allow: what else than "exact" may be chosen: "16-bit", "8-bit", "low-rank"; exact methods equal plain DDP up to
            the order of a sum. "sharded" is exact, too, but the optimizer that is returned is then a
            :class:`ZeroRedundancyOptimizer`, made anew from the class and the groups of ``optimizer``, which is no
            longer used: make schedulers and hooks for what is returned, and call its ``state_dict`` on every rank.
        updates: ``"step"`` chooses among what updates in ``optim.step()``, so that the loop may clip or skip a
            batch between backward and step, use a ``GradScaler``, or add up several backwards. With ``"backward"`` what
            is chosen may update while backward runs, and such a loop gets an error.
        memory: ``"small"`` chooses among methods that take less memory on each rank than plain DDP, a number among
            those that take at most that many bytes: parameters, gradients, buckets, optimizer state and state of
            stages. Sharding takes less, if ``allow`` names it.
        report: draw what was measured and predicted into this file.
        plan: measure nothing, and follow this plan: for a run that resumes.
        seconds: about how long to measure.
        process_group: the ranks; the default group if ``None``.
        ddp_options: more arguments of ``DistributedDataParallel``.
        quiet: print nothing.

    Returns:
        The model in DDP and the optimizer for the loop. ``Plan.of(ddp)`` is what was decided.

    Issues: collectives on a group of its own, which is gone when it returns; then those of DDP's constructor and of
    registering a chain. Ranks exchange what they measured through the group's store.

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
    group = check_group_exists(process_group)
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
        check_alike(plan, agreement)
        decided = (
            _Chooser(request, group, agreement, start_s).choose() if plan is None else agreed(plan, model, agreement)
        )
        ddp = wrap(model, decided.candidate, group=group, ddp_options=request.ddp_options)
        optim = build(ddp, optimizer, decided.candidate)
    decided.attach(ddp)
    if agreement.rank == 0 and plan is None and report is not None:
        _draw(decided, report)
    if agreement.rank == 0 and plan is None and not quiet:
        print(decided)
    return ddp, optim


def _draw(plan: Plan, path: str | Path) -> None:
    """A failure is only a warning: the picture is not worth ending a run."""
    from overlap.plan.picture import save_plan

    try:
        save_plan(plan, path)
    except Exception as error:
        warnings.warn(f"report={str(path)!r} was not written ({type(error).__name__}: {error})", stacklevel=3)


class _Chooser:
    """One call of :func:`auto` that measures."""

    def __init__(self, request: Request, group: dist.ProcessGroup, agreement: Agreement, start_s: float) -> None:
        self._request, self._group, self._agreement, self._start_s = request, group, agreement, start_s
        self._device = model_device(request.model)
        assert request.sample is not None and request.loss is not None
        self._sample = request.sample
        self._originals = Originals(Training(request.model, request.optimizer, request.loss))

    def choose(self) -> Plan:
        try:
            with generators_restored(self._device):
                plan = self._chosen()
        finally:
            self._originals.restore()
            self._originals.check()
        return plan

    def _chosen(self) -> Plan:
        copied = self._originals.copied()
        profile, skew = self._profile(copied)
        self._originals.check()
        with _own_group(self._group, profile) as group:
            link = measure_link(group, self._device)
            link = measure_sharing(link, group, self._device, self._computing(copied))
            sparse = any(one.grad is not None and one.grad.is_sparse for one in copied.model.parameters())
            del copied
            ruled_out: dict[str, str] = {}
            own = obstacles(self._request.optimizer, has_sparse_gradients=sparse)
            for found in reversed(self._agreement.agree(own)):
                ruled_out.update(found)
            # One rank decides: what the others find differs in the last digits.
            options = self._options(profile, link, ruled_out) if self._agreement.rank == 0 else None
            order = self._agreement.from_rank_0(None if options is None else options.order())
            samples, refused = self._raced(group, {Candidate(*name): ms for *name, ms in order})
        plan = None
        if options is not None:
            plan = options.decide(
                samples,
                refused,
                ranks=link.ranks,
                compute=f"{profile.in_words()}{skew}",
                link=f"all-reduce {link.all_reduce}; messages {link.messages}",
                seconds=time.monotonic() - self._start_s,
            ).to_json()
            plan["parameters"] = len(profile.parameters)
        return Plan.of_json(self._agreement.from_rank_0(plan))

    def _options(self, profile: Profile, link: Link, ruled_out: Mapping[str, str]) -> Options:
        as_view = bool(self._request.ddp_options.get("gradient_as_bucket_view"))
        costs = measured_costs(link.ranks, self._device)
        found = ranking(self._request.candidates(), profile, link, costs, gradient_as_bucket_view=as_view)
        return Options.of(found, memory=self._request.memory, obstacles=ruled_out)

    def _computing(self, training: Training) -> Callable[[], None]:
        batches = [fresh(self._sample) for _ in range(SHARING_STEPS)]

        def compute() -> None:
            training.optimizer.zero_grad()
            forward_and_loss(training.model, training, batches.pop()).backward()

        return compute

    def _profile(self, training: Training) -> tuple[Profile, str]:
        """Of the slowest rank, and how far the ranks are apart."""
        ranks_here = self._agreement.agree(socket.gethostname()).count(socket.gethostname())
        own = measure(
            training,
            self._sample,
            seconds=_COMPUTE_SHARE * self._request.seconds,
            threads=thread_rate(ranks_here),
            allows_unused=bool(self._request.ddp_options.get("find_unused_parameters")),
            agreed=self._agreement.from_rank_0,
        )
        names = sorted((one.name, list(one.shape), one.dtype) for one in own.parameters)
        found = [Profile.of_json({"version": 1, **one}) for one in self._agreement.agree(asdict(own))]
        for rank, other in enumerate(found):
            if sorted((one.name, list(one.shape), one.dtype) for one in other.parameters) != names:
                raise ConfigurationError(
                    f"rank {self._agreement.rank} and rank {rank} have different models: give the same on all"
                )
        slowest = Profile.slowest(found)
        least_ms = min(one.compute_ms for one in found)
        apart = slowest.compute_ms / least_ms - 1
        return slowest, f"; the fastest rank takes {apart:.0%} less" if apart > 0.1 else ""

    def _left_s(self) -> float:
        """Of the time for choosing, by the clock of rank 0."""
        spent_s = time.monotonic() - self._start_s
        left_s: float = self._agreement.from_rank_0((1 + _GRACE) * self._request.seconds - spent_s)
        return max(0.0, left_s)

    def _raced(
        self, group: dist.ProcessGroup, predicted_ms: Mapping[Candidate, float]
    ) -> tuple[Samples, dict[Candidate, str]]:
        """Samples of those for which there is time, plain DDP among them; and what could not be built."""
        race = Race(
            self._agreement, group, self._device, self._sample, self._originals.copied, self._request.ddp_options
        )
        try:
            tournament(race, next(iter(predicted_ms)), predicted_ms, left_s=self._left_s)
        finally:
            race.close()
        return race.samples, race.refused


@contextmanager
def _own_group(group: dist.ProcessGroup, profile: Profile) -> Iterator[dist.ProcessGroup]:
    """A group of the same ranks whose collectives give up soon, for as long as nothing fails."""
    timeout_s = max(_LEAST_TIMEOUT_S, _TIMEOUT_STEPS * (profile.compute_ms + profile.update_ms) / 1e3)
    ranks = dist.get_process_group_ranks(group)
    everyone = len(ranks) == dist.get_world_size()
    own = dist.new_group(ranks, timeout=timedelta(seconds=timeout_s), use_local_synchronization=not everyone)
    assert own is not None, "this rank is in the group that it was given"
    yield own
    # Not after an error: the others would report a closed connection in place of what went wrong here.
    dist.destroy_process_group(own)
