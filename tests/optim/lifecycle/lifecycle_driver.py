"""Runs sequences of calls on ours and on the reference side by side, on one rank of a world."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import threading
from typing import Any

import torch
import torch.distributed as dist
from lifecycle_calls import Call, Script, draw
from lifecycle_forms import ArmedError, Form, Net, armed
from lifecycle_oracle import Oracle, chosen, loss_of
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from overlap import CollectiveError, TrainingLoopError
from overlap._torch.read_only import GuardedGradient

_SYNCHRONIZING = ("backward", "no_sync", "step_with_closure")  # Under no_sync, where a forward before it was not.
_BUCKET_CAP_MB = 80 / 2**20


@dataclasses.dataclass
class Pair:
    """Two DDP models with the same weights, which may have been trained, so that buckets are rebuilt."""

    ours: DistributedDataParallel
    reference: DistributedDataParallel
    start: dict[str, Tensor]

    @classmethod
    def make(cls, *, is_warm: bool, releases: bool = False) -> Pair:
        torch.manual_seed(0)
        model = Net()
        start = copy.deepcopy(model.state_dict())
        options = {"bucket_cap_mb": _BUCKET_CAP_MB, "gradient_as_bucket_view": releases}
        sides = [DistributedDataParallel(copy.deepcopy(model), **options) for _ in range(2)]
        pair = cls(*sides, start=start)
        if is_warm:
            for _, ddp in itertools.product(range(2), sides):
                loss_of(ddp, (torch.ones(1, 5), torch.ones(1, 3))).backward()
        pair.reset()
        return pair

    def reset(self) -> None:
        """The first weights, and no gradients."""
        for ddp in (self.ours, self.reference):
            ddp.module.load_state_dict(self.start)
            ddp.zero_grad()


class Run:
    """One sequence on one pair."""

    def __init__(self, form: Form, pair: Pair, rank: int) -> None:
        self.form, self.ddp = form, pair.ours
        self.rank = rank
        self.parameters = list(self.ddp.parameters())
        self.optimizer = form.optimizer(self.ddp)
        self.oracle = Oracle(form, pair.reference, form.make(pair.reference.parameters()))
        self.loss: Tensor | None = None
        self.saved = copy.deepcopy(form.state(self.optimizer))
        self.stage = form.stage(self.ddp, self.optimizer)
        self.registration: Any = None
        self.steps = 0
        self.errors: list[str] = []
        self.kept: list[tuple[Tensor, Tensor]] = []
        self.make(Call("register", "same"))

    def make(self, call: Call) -> str | None:
        """Make a call on both sides; what is wrong then, if anything is."""
        expected = self.oracle.expected(call)
        batch = self._batch()
        outcome, text = self._outcome(call, batch)
        if outcome not in expected:
            return f"{call!r} in phase {self.oracle.phase} gave {text}, expected {' or '.join(sorted(expected))}"
        if outcome != "ok":
            self.errors.append(outcome)
        self.oracle.follow(call, outcome, batch)
        if self.form.releases and outcome == "ok" and call.name in _SYNCHRONIZING:
            self.oracle.note_released({place for place, p in enumerate(self.parameters) if _values(p) is None})
        if self.oracle.loss is None:
            self.loss = None
        self.form.settle(self.optimizer)
        self.oracle.is_unknown = self._take_over() if self._can_take_over() else self.oracle.is_unknown
        return self._difference(call)

    def _can_take_over(self) -> bool:
        return self.oracle.is_unknown and not self.oracle.has_ended

    def _take_over(self) -> bool:
        """After an update that failed on its way: the reference goes on from what ours is."""
        for ours, theirs in zip(self.parameters, self.oracle.parameters, strict=True):
            theirs.data.copy_(ours.data)
        self.oracle.optimizer.load_state_dict(copy.deepcopy(self.optimizer.state_dict()))
        return False

    def _batch(self) -> tuple[Tensor, Tensor]:
        self.steps += 1
        generator = torch.Generator().manual_seed(2 * self.steps + self.rank)
        return torch.randn(2, 5, generator=generator), torch.randn(2, 3, generator=generator)

    def _outcome(self, call: Call, batch: tuple[Tensor, Tensor]) -> tuple[str, str]:
        try:
            getattr(self, f"_{call.name}")(call, batch)
        except (TrainingLoopError, ArmedError) as error:
            return type(error).__name__, repr(error)
        except CollectiveError as error:
            return "PeerError", repr(error)
        except Exception as error:
            return "another error", repr(error)
        return "ok", "no error"

    # The calls, on ours.

    def _forward(self, call: Call, batch: tuple[Tensor, Tensor]) -> None:
        self.loss = loss_of(self.ddp, batch)

    def _backward(self, call: Call, batch: tuple[Tensor, Tensor]) -> None:
        assert self.loss is not None
        loss, self.loss = self.loss, None
        loss.backward()

    def _failing_backward(self, call: Call, batch: tuple[Tensor, Tensor]) -> None:
        is_update = call.argument == "update"
        with armed(stage=None if is_update else call.argument, optimizer=is_update):
            self._backward(call, batch)

    def _no_sync(self, call: Call, batch: tuple[Tensor, Tensor]) -> None:
        with self.ddp.no_sync():
            self._forward(call, batch)
            self._backward(call, batch)

    def _incomplete_backward(self, call: Call, batch: tuple[Tensor, Tensor]) -> None:
        loss_of(self.ddp, batch, is_partial=True).backward()
        # What DDP gave to the worker before is done then, and what is compared does not depend on when.
        is_done = threading.Event()
        self.registration.runtime.executor.submit(is_done.set)
        assert is_done.wait(20)

    def _step(self, call: Call, batch: tuple[Tensor, Tensor]) -> None:
        self.optimizer.step()

    def _step_with_closure(self, call: Call, batch: tuple[Tensor, Tensor]) -> None:
        def closure() -> None:
            self._forward(call, batch)
            self._backward(call, batch)

        self.optimizer.step(closure)

    def _failing_step(self, call: Call, batch: tuple[Tensor, Tensor]) -> None:
        with armed(optimizer=True):
            self.optimizer.step()

    def _zero_grad(self, call: Call, batch: tuple[Tensor, Tensor]) -> None:
        self.optimizer.zero_grad(set_to_none=call.argument)

    def _ddp_zero_grad(self, call: Call, batch: tuple[Tensor, Tensor]) -> None:
        self.ddp.zero_grad(set_to_none=call.argument)

    def _edit(self, call: Call, batch: tuple[Tensor, Tensor]) -> None:
        for place in chosen(call):
            gradient = self.parameters[place].grad
            if gradient is not None:
                gradient.mul_(0.5)

    def _data_edit(self, call: Call, batch: tuple[Tensor, Tensor]) -> None:
        for place in chosen(call):
            gradient = self.parameters[place].grad
            if gradient is not None:
                gradient.data.mul_(0.5)

    def _inert_clip(self, call: Call, batch: tuple[Tensor, Tensor]) -> None:
        torch.nn.utils.clip_grad_norm_(self.parameters, float("inf"))

    def _skipped_backward(self, call: Call, batch: tuple[Tensor, Tensor]) -> None:
        with self.form.skipping(self.stage, self.optimizer):
            self._backward(call, batch)

    def _own_gradient(self, call: Call, batch: tuple[Tensor, Tensor]) -> None:
        (self.parameters[call.argument] * 0.1).sum().backward()

    def _save(self, call: Call, batch: tuple[Tensor, Tensor]) -> None:
        self.saved = copy.deepcopy(self.form.state(self.optimizer))

    def _load(self, call: Call, batch: tuple[Tensor, Tensor]) -> None:
        self.optimizer.load_state_dict(copy.deepcopy(self.saved))

    def _set_lr(self, call: Call, batch: tuple[Tensor, Tensor]) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = call.argument

    def _decay(self, call: Call, batch: tuple[Tensor, Tensor]) -> None:
        with torch.no_grad():
            for parameter in self.parameters:
                parameter.mul_(0.9)

    def _keep(self, call: Call, batch: tuple[Tensor, Tensor]) -> None:
        pairs = list(zip(self.parameters, self.oracle.parameters, strict=True))
        for parameter in self.parameters:
            _ = None if parameter.grad is None else parameter.grad.clone()  # Refused where it cannot be read.
        self.kept = [(p.grad, q.grad) for p, q in pairs if p.grad is not None and q.grad is not None]

    def _evaluate(self, call: Call, batch: tuple[Tensor, Tensor]) -> None:
        with torch.no_grad():
            loss_of(self.ddp, batch)

    def _remove(self, call: Call, batch: tuple[Tensor, Tensor]) -> None:
        self.registration.remove()

    def _register(self, call: Call, batch: tuple[Tensor, Tensor]) -> None:
        if call.argument == "new":
            self.stage = self.form.stage(self.ddp, self.optimizer)
        self.registration = self.form.register(self.ddp, self.stage, self.optimizer)

    def close(self) -> None:
        """Leave DDP as it was, if it can still be used."""
        self.registration.remove()

    # Comparing.

    @property
    def _compares_gradients(self) -> bool:
        return self.form.has_whole_gradients and not self.oracle.has_garbage

    def _difference(self, call: Call) -> str | None:
        if self.oracle.is_unknown:
            return None
        where = f"after {call!r}, in phase {self.oracle.phase},"
        if any(not _shows(gradient, theirs) for gradient, theirs in self.kept):
            return f"{where} a gradient that the loop has kept has other values than plain DDP's"
        for place, (name, ours) in enumerate(self.ddp.module.named_parameters()):
            theirs = self.oracle.parameters[place]
            if not torch.equal(ours, theirs):
                return f"{where} {name} is {_short(ours)}, but of plain DDP {_short(theirs)}"
            if self.form.releases and self.oracle.has_garbage:
                continue  # What a backward had released before it failed is gone.
            if isinstance(ours.grad, GuardedGradient) != (place in self.oracle.handed):
                return f"{where} the gradient of {name} is{' not' * (place in self.oracle.handed)} read-only"
            if self.oracle.hides(place) and _can_be_read(ours.grad):
                return f"{where} the gradient of {name} can be read"
            if (_values(ours) is None) != (theirs.grad is None):
                return f"{where} the gradient of {name} is {ours.grad}, but of plain DDP {_short(theirs.grad)}"
            if ours.grad is None or theirs.grad is None or not self._compares_gradients:
                continue
            if not torch.equal(ours.grad, theirs.grad):
                return f"{where} the gradient of {name} is {_short(ours.grad)}, but of plain DDP {_short(theirs.grad)}"
        if call.name == "save":
            ours, theirs = self.saved, self.oracle.saved
        elif self.form.compares_state_always:
            ours, theirs = self.optimizer.state_dict(), self.oracle.optimizer.state_dict()
        else:
            return None
        ours = {key: value for key, value in ours.items() if key != "local_sgd"}
        return (
            None if _is_equal(ours, theirs) else f"{where} the optimizer's state is {ours}, but of plain DDP {theirs}"
        )


def _values(parameter: Tensor) -> Tensor | None:
    """Its gradient; ``None`` where that was released, too."""
    return parameter.grad.plain if isinstance(parameter.grad, GuardedGradient) else parameter.grad


def _can_be_read(gradient: Any) -> bool:
    try:
        gradient.sum()
    except TrainingLoopError:
        return False
    return True


def _shows(gradient: Tensor, values: Tensor) -> bool:
    return _can_be_read(gradient) and torch.equal(gradient, values)


def _short(tensor: Tensor | None) -> str:
    return "None" if tensor is None else str([round(value, 6) for value in tensor.flatten()[:3].tolist()])


def _is_equal(ours: Any, theirs: Any) -> bool:
    if isinstance(ours, Tensor):
        return isinstance(theirs, Tensor) and torch.equal(ours, theirs)
    if isinstance(ours, dict):
        return ours.keys() == theirs.keys() and all(_is_equal(ours[key], theirs[key]) for key in ours)
    if isinstance(ours, list):
        return len(ours) == len(theirs) and all(map(_is_equal, ours, theirs))
    return bool(ours == theirs)


@dataclasses.dataclass(frozen=True)
class Played:
    """What came of a script."""

    difference: str | None
    """What went wrong first, on any rank."""
    made: Script
    """The calls that were made, up to there."""


_MEETS = frozenset(
    {
        "forward",
        "backward",
        "skipped_backward",
        "no_sync",
        "failing_backward",
        "incomplete_backward",
        "step_with_closure",
        "register",
    }
    | {"save", "step", "load"}
)


class Player:
    """Plays sequences of one form, on every rank of a world alike; keeps DDP models for the next sequence."""

    def __init__(self, form: Form, rank: int) -> None:
        self.form, self.rank = form, rank
        self._pair: Pair | None = None

    def play(self, script: Script) -> Played:
        """Make the calls of ``script`` that can be made; ``difference`` is the same on whether it is on every rank."""
        pair, self._pair = self._pair, None
        if pair is None or not script.is_warm:
            pair = Pair.make(is_warm=script.is_warm, releases=self.form.releases)
        pair.reset()
        run = Run(self.form, pair, self.rank)
        made: list[Call] = []
        found = difference = None
        try:
            candidates = (call for call in script.calls if run.oracle.allows(call))
            # A cold model has one bucket, which does not come at all then, so that nobody can tell.
            end = script.end if script.is_warm else ()
            rest = (call for call in (*end, Call("save")) if run.oracle.allows(call))
            for call in itertools.chain(itertools.islice(candidates, script.limit), rest):
                # Where a rank waits for the others, all must still be at it.
                if call.name in _MEETS and (found := _on_any_rank(difference)) is not None:
                    break
                if difference is None:
                    made.append(call)
                    difference = run.make(call)
            else:
                found = _on_any_rank(difference)
        finally:
            run.close()
        oracle = run.oracle
        if script.is_warm and found is None and not oracle.has_ended and not oracle.synchronizes_next:
            self._pair = pair
        return Played(found, Script(tuple(made), is_warm=script.is_warm))


def _on_any_rank(difference: str | None) -> str | None:
    has_failed = torch.tensor([difference is not None])
    dist.all_reduce(has_failed, op=dist.ReduceOp.MAX)
    if not has_failed:
        return None
    return difference or "nothing on this rank, but another rank"


def search(forms: list[Form], rank: int, seeds: range) -> None:
    """Play the sequences of ``seeds`` with each form; raises an AssertionError with the first that goes wrong."""
    for form in forms:
        player = Player(form, rank)
        for seed in seeds:
            played = player.play(draw(f"{form}:{seed}"))
            if played.difference is not None:
                raise AssertionError(f"{form}, seed {seed}:\n  {played.made!r}\n  {played.difference}")
