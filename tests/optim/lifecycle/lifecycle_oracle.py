"""What a training loop on the library must do, told from plain DDP: independent of ``overlap.optim.lifecycle``.

The oracle holds a plain DDP model with a plain optimizer, to which it makes the calls that the loop under test makes,
and knows from what was documented which of them are errors, what becomes of ``.grad`` and when the update is made.
"""

import copy
from collections.abc import Iterable
from typing import Any

import torch
from lifecycle_calls import Call
from lifecycle_forms import Form
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

OK = frozenset({"ok"})
REFUSED = frozenset({"TrainingLoopError"})
RAISED = frozenset({"ArmedError"})
# Ranks raise at the same place, but the first to do so ends the others' collectives.
FAILED = frozenset({"ArmedError", "PeerError"})


class Oracle:
    """The reference side of one sequence, and what is expected of the other side.

    ``phase`` is where the loop stands: off (nothing registered), idle, reduced, applied, stepped, failed,
    incomplete (a backward did not reach all parameters).
    """

    def __init__(self, form: Form, ddp: DistributedDataParallel, optimizer: Any) -> None:
        self.form, self.ddp, self.optimizer = form, ddp, optimizer
        self.parameters = list(ddp.parameters())
        self.phase = "off"
        self.marks: dict[int, str] = {}
        """What became of each gradient that was applied: as left; replaced before ``step()``, which the loop
        has not been told; changed in place after it (own); another tensor or none (new)."""
        self.handed: set[int] = set()
        """Parameters whose ``.grad`` is read-only."""
        self.means: set[int] = set()
        """Parameters whose ``.grad`` is what the last backward left, perhaps edited."""
        self.lr_then: float | None = None
        """With which backward has made the update, if the loop has not been told of a change since."""
        self.has_decayed = False
        """The loop has changed parameters since the last backward."""
        self.cleared: set[int] = set()
        """Parameters whose gradient a forward has cleared since the last backward."""
        self.released: set[int] = set()
        """Parameters whose gradient the last backward has applied and given back."""
        self.has_garbage = False
        """A backward failed: ``.grad`` is there, but its values are anything."""
        self.is_unknown = False
        """How many parameters were updated is not known."""
        self.has_ended = False
        """A backward was incomplete, so that DDP takes no other forward."""
        self.has_own = False
        """``.grad`` holds something that other ranks do not have, or is not the mean everywhere."""
        self.loss: Tensor | None = None
        self.synchronizes_next = False
        """DDP waits for gradients: the next backward synchronizes, under ``no_sync``, too."""
        self.is_unfinished = False
        """A backward was refused before DDP saw a gradient; the next forward has DDP forget it."""
        self.saved = copy.deepcopy(optimizer.state_dict())

    # Where calls can be made.

    def allows(self, call: Call) -> bool:
        """Whether a training loop can make this call here, as far as plain DDP goes."""
        name = call.name
        if name in ("remove", "register") and not self.form.can_be_removed:
            return False
        if not self.form.has_whole_gradients and not self._can_be_sharded(name):
            return False
        if self.has_ended:
            ends = ("step", "zero_grad", "ddp_zero_grad", "load", "remove")
            return name in ends and not (name == "remove" and self.phase == "off")
        if name in ("backward", "failing_backward", "skipped_backward"):
            if self.loss is None or (name == "failing_backward" and self.phase == "off"):
                return False
            return call.argument != "update" or bool(self.form.in_backward)
        if name == "incomplete_backward":
            return self.phase != "off"
        if name in ("zero_grad", "ddp_zero_grad") and self.form.releases and self.has_garbage:
            return bool(call.argument)  # Which gradients are there to be set to zero is not known.
        if name == "own_gradient":
            # DDP would take it for the backward that it waits for.
            return not (self.synchronizes_next or self.is_unfinished)
        if name == "save":
            return not self.is_unknown
        if name in ("remove", "register"):
            return (self.phase == "off") == (name == "register")
        return True

    def _can_be_sharded(self, name: str) -> bool:
        """Whether plain DDP can tell what a sharded update does: not where ranks apply gradients that differ."""
        if name in ("no_sync", "ddp_zero_grad", "remove") and self.phase == "reduced":
            return False
        if name == "remove" and (self.has_own or self.has_ended):
            return False
        # A rank that owns nothing of what has a gradient would not raise.
        return self.phase != "off" or name not in ("no_sync", "failing_step")

    # What is expected.

    def expected(self, call: Call) -> frozenset[str]:
        """The outcomes of ``call`` that are right: ok, or the class of an error."""
        return getattr(self, f"_expect_{call.name}", self._expect_success)(call)

    def _expect_success(self, call: Call) -> frozenset[str]:
        return OK

    def _expect_forward(self, call: Call) -> frozenset[str]:
        return REFUSED if self._meets_replaced() else OK

    def _expect_edit(self, call: Call) -> frozenset[str]:
        return OK if self.handed.isdisjoint(chosen(call)) else REFUSED

    _expect_data_edit = _expect_edit

    def _expect_inert_clip(self, call: Call) -> frozenset[str]:
        return REFUSED if self.handed else OK

    def _expect_own_gradient(self, call: Call) -> frozenset[str]:
        return REFUSED if call.argument in self.handed else OK

    def _expect_ddp_zero_grad(self, call: Call) -> frozenset[str]:
        return REFUSED if self.phase == "applied" and self.handed and not call.argument else OK

    def hides(self, place: int) -> bool:
        """Whether the gradient cannot even be read."""
        return place in self.handed and (place in self.released or not self.form.has_whole_gradients)

    def _expect_backward(self, call: Call) -> frozenset[str]:
        return REFUSED if self._is_second_backward() else OK

    _expect_skipped_backward = _expect_backward

    def _is_second_backward(self) -> bool:
        """Whether a backward would add to what was applied, or to what is not the mean everywhere."""
        return self.phase in ("applied", "failed") or self._adds_to_parts()

    def _adds_to_parts(self) -> bool:
        """Whether a backward would add to what is read-only; refused before DDP sees a gradient, it changes nothing."""
        return self.phase in ("reduced", "failed") and not self.form.adds_up and bool(self.handed)

    def _expect_failing_backward(self, call: Call) -> frozenset[str]:
        return REFUSED if self._is_second_backward() else FAILED

    def _expect_no_sync(self, call: Call) -> frozenset[str]:
        if self._meets_replaced():
            return REFUSED
        is_second = self.phase != "failed" and self._is_second_backward()
        return REFUSED if self.synchronizes_next and is_second else OK

    def _expect_incomplete_backward(self, call: Call) -> frozenset[str]:
        return REFUSED if self.phase == "reduced" and self._adds_to_parts() else self._expect_forward(call)

    def _expect_step(self, call: Call) -> frozenset[str]:
        if self.phase == "off":
            return OK
        if self.form.refuses_step or self.phase in ("failed", "incomplete"):
            return REFUSED
        if self._meets_replaced() or self._meets_change() or self._local() or self._is_step_again():
            return REFUSED
        return OK

    def _is_step_again(self) -> bool:
        """Whether all that is there has been applied already, or has been changed since; an ordinary optimizer would
        apply it again."""
        if self.phase == "stepped" and any(
            mark in ("own", "new") and self.parameters[place].grad is not None for place, mark in self.marks.items()
        ):
            return True
        is_there = bool(self.released) or any(self.parameters[place].grad is not None for place in self.marks)
        clears = self.form.clears and not self.form.is_automatic
        return self.phase == "stepped" and clears and is_there and not self._pending()

    def _expect_failing_step(self, call: Call) -> frozenset[str]:
        expected = self._expect_step(call)
        # A step without any gradient is a whole step of the optimizer, too, which may count it.
        is_whole = self.form.has_whole_gradients and self.phase in ("off", "idle", "reduced")
        calls_optimizer = self._to_update() or self.form.refuses_step or not self.form.clears or is_whole
        return RAISED if expected == OK and calls_optimizer else expected

    def _expect_step_with_closure(self, call: Call) -> frozenset[str]:
        if self.phase == "off" or not self.form.refuses_step:
            is_second = self.phase != "failed" and self._is_second_backward()
            return REFUSED if self._meets_replaced() or is_second else OK
        return REFUSED

    def _expect_zero_grad(self, call: Call) -> frozenset[str]:
        return REFUSED if self.phase == "applied" and self.form.sees_calls else OK

    def _expect_load(self, call: Call) -> frozenset[str]:
        return REFUSED if self.phase == "applied" else OK

    def _meets_replaced(self) -> bool:
        return self.phase == "applied" and "replaced" in self.marks.values()

    def _lr(self) -> float:
        return float(self.optimizer.param_groups[0]["lr"])

    def _meets_change(self) -> bool:
        """Whether the update in backward has used another learning rate, or other parameters."""
        if self.phase != "applied" or self.lr_then is None:
            return False
        return self.lr_then != self._lr() or self.has_decayed

    def _local(self) -> set[int]:
        """Parameters with a gradient that ``step()`` would apply, but that is not the mean over ranks."""
        if not self.form.refuses_local:
            return set()
        local = {place for place in self._pending() if place not in self.means}
        # A sharded update cannot tell whether the others have zeros, too.
        return {place for place in local if self._is_nonzero(place)} if self.form.has_whole_gradients else local

    def _is_nonzero(self, place: int) -> bool:
        gradient = self.parameters[place].grad
        return gradient is not None and bool(gradient.any())

    def _pending(self) -> list[int]:
        """What ``step()`` would update."""
        places = range(len(self.parameters))
        return [place for place in places if self.parameters[place].grad is not None and place not in self.marks]

    def _to_update(self) -> list[int]:
        """What ``step()`` updates."""
        is_due = self.form.has_whole_gradients or self.phase in ("off", "reduced")
        return self._pending() if is_due else []

    # Following: the same on plain DDP.

    def follow(self, call: Call, outcome: str, batch: tuple[Tensor, Tensor]) -> None:
        """Make the call on the reference, or what the error that it was on the other side leaves of it."""
        getattr(self, f"_{call.name}")(call, outcome, batch)

    def _forward(self, call: Call, outcome: str, batch: tuple[Tensor, Tensor]) -> None:
        if self._begin_forward():
            self.loss = loss_of(self.ddp, batch)
            self.synchronizes_next = True

    def _leave_unfinished(self) -> None:
        self.loss, self.synchronizes_next, self.is_unfinished = None, False, True
        self.ddp.reducer._reset_state()

    def _begin_forward(self) -> bool:
        """What a forward does to gradients; false where it is refused, and the loop can go on."""
        if self._meets_replaced():
            self._take_replaced_for_applied()
            return False
        self.is_unfinished = False
        if self.phase == "failed":
            self._clear(range(len(self.parameters)))
            self.has_garbage = self.has_own = False
            self.cleared = set()
            self._forget()
        elif self.phase in ("applied", "stepped"):
            as_left = {place for place, mark in self.marks.items() if mark == "as left"} | self.handed
            self.cleared |= {place for place in as_left if self.parameters[place].grad is not None}
            self._clear(as_left)
            self.means -= set(self.marks)
            self.marks, self.handed = {}, set()
        # What the loop has cleared by itself is no mean any more, and if that is all, the backward is discarded.
        self.means = {place for place in self.means if self.parameters[place].grad is not None}
        if self.phase == "reduced" and not self.means:
            self.phase = "idle"
        if self.phase in ("idle", "stepped", "failed"):
            self.phase = "idle"
            self._forget()
        return True

    def _take_replaced_for_applied(self) -> None:
        """The loop was told once that what it has put there is lost."""
        self.marks = {place: "as left" if mark == "replaced" else mark for place, mark in self.marks.items()}

    def _skipped_backward(self, call: Call, outcome: str, batch: tuple[Tensor, Tensor]) -> None:
        self._backward(call, outcome, batch)

    def _backward(self, call: Call, outcome: str, batch: tuple[Tensor, Tensor]) -> None:
        assert self.loss is not None
        is_noticed = self.synchronizes_next
        if is_noticed and self._adds_to_parts():
            self._leave_unfinished()
            return
        if not is_noticed:
            self._note_added_everywhere()
        self.loss.backward()
        self.loss, self.synchronizes_next = None, False
        if self.phase == "off" or not is_noticed:
            return
        self.cleared = set()
        is_refused = self._is_second_backward()
        self.has_own = False
        self._forget()
        if is_refused:
            self.phase, self.has_garbage = "failed", True
            return
        places = range(len(self.parameters))
        self.means = set(places)
        self.handed = set() if self.form.has_whole_gradients else set(places)
        self.has_decayed = False
        if call.name == "skipped_backward":
            self.phase = "reduced"
            return
        self._update(self.form.in_backward)
        self.marks = dict.fromkeys(self.form.in_backward, "as left")
        self.lr_then = self._lr()
        in_step = "reduced" if self.form.is_deferred else "applied"
        self.phase = "stepped" if self.form.is_automatic else in_step
        if self.phase != "reduced":
            self.handed |= set(self.marks)

    def note_released(self, gone: set[int]) -> None:
        """``.grad`` of these has no values after a backward, which need not release what others may have seen."""
        if released := gone & {place for place, mark in self.marks.items() if mark == "as left"}:
            self.released = released
            self.handed |= released  # Until the next forward.
            self.cleared |= released
            self._clear(released)

    def _failing_backward(self, call: Call, outcome: str, batch: tuple[Tensor, Tensor]) -> None:
        assert self.loss is not None
        if self._adds_to_parts():
            self.loss = None
            return
        self.loss.backward()
        self.loss, self.synchronizes_next = None, False
        is_on_its_way = not self._is_second_backward() and call.argument == "last"
        self.is_unknown = is_on_its_way and self.form.updates_bucket_by_bucket
        self.has_ended = self.is_unknown and not self.form.has_whole_gradients
        self._forget()
        self.phase, self.has_garbage = "failed", True

    def _no_sync(self, call: Call, outcome: str, batch: tuple[Tensor, Tensor]) -> None:
        if not self._begin_forward():
            return
        with self.ddp.no_sync():
            self.loss = loss_of(self.ddp, batch)
            if self.synchronizes_next:
                self._backward(call, outcome, batch)
                return
            self._note_added_everywhere()
            self.loss.backward()
            self.loss, self.has_own = None, True

    def _incomplete_backward(self, call: Call, outcome: str, batch: tuple[Tensor, Tensor]) -> None:
        if not self._begin_forward():
            return
        if self._adds_to_parts():
            self._leave_unfinished()
            return
        loss_of(self.ddp, batch, is_partial=True).backward()
        self.loss, self.has_ended = None, True
        is_refused = self._is_second_backward()
        self.is_unknown = self.form.updates_bucket_by_bucket and not is_refused
        self.phase = "failed" if is_refused else "incomplete"
        self._forget()

    def _step(self, call: Call, outcome: str, batch: tuple[Tensor, Tensor]) -> None:
        if outcome != "ok":
            if self._meets_replaced():
                self._take_replaced_for_applied()
            elif self._meets_change():
                self.lr_then = None  # It was told once.
            return
        pending = self._to_update()
        self._update(pending)
        if self.phase == "off" and not self.form.has_whole_gradients:
            self.loss = None  # What was gathered is written to all parameters, if nothing was updated, too.
        if self.phase in ("reduced", "applied") and self.form.clears:
            self.marks |= dict.fromkeys((place for place in pending if place in self.means), "as left")
            there = {place for place, parameter in enumerate(self.parameters) if parameter.grad is not None}
            self.marks |= dict.fromkeys(there & set(self.marks), "as left")
            if self.form.has_whole_gradients:
                self.handed &= self.released
        if self.phase in ("reduced", "applied") or (self.phase != "off" and self.marks):
            self.phase = "stepped"

    def _failing_step(self, call: Call, outcome: str, batch: tuple[Tensor, Tensor]) -> None:
        if outcome != "ArmedError":
            self._step(call, outcome, batch)
            return
        if self.phase in ("reduced", "applied"):
            self.phase = "failed"  # Elsewhere what could not be applied is the loop's own.

    def _step_with_closure(self, call: Call, outcome: str, batch: tuple[Tensor, Tensor]) -> None:
        if self.phase != "off" and self.form.refuses_step:
            return
        if self._meets_replaced():
            self._forward(call, outcome, batch)
            return
        self._forward(call, outcome, batch)
        is_refused = self._is_second_backward()
        self._backward(call, outcome, batch)
        if not is_refused:
            self._step(call, outcome, batch)

    def _zero_grad(self, call: Call, outcome: str, batch: tuple[Tensor, Tensor]) -> None:
        if outcome != "ok":
            return
        if not self.form.sees_calls or self.phase == "off":
            self._ddp_zero_grad(call, outcome, batch)
            return
        if self.phase in ("idle", "stepped") and not call.argument:
            for place in self.cleared:  # As if the forward had left them for this call.
                if self.parameters[place].grad is None:
                    self.parameters[place].grad = torch.zeros_like(self.parameters[place])
        self.cleared = set()
        self.optimizer.zero_grad(call.argument)
        self.has_garbage = self.has_own = False
        self._forget()
        if self.phase in ("reduced", "stepped", "failed"):
            self.phase = "idle"

    def _ddp_zero_grad(self, call: Call, outcome: str, batch: tuple[Tensor, Tensor]) -> None:
        for place, parameter in enumerate(self.parameters):
            if outcome != "ok" and place in self.handed:
                return
            if parameter.grad is None and place in self.handed and not call.argument:
                parameter.grad = torch.zeros_like(parameter)  # It was released.
            if parameter.grad is not None or place in self.handed:
                self._note_change(place, is_in_place=not call.argument)
            if parameter.grad is not None:
                parameter.grad = None if call.argument else parameter.grad.zero_()
        self.has_garbage = self.has_own = False

    def _edit(self, call: Call, outcome: str, batch: tuple[Tensor, Tensor]) -> None:
        for place in chosen(call):
            if place in self.handed:
                return
            gradient = self.parameters[place].grad
            if gradient is not None:
                self._note_change(place, is_in_place=True)
                gradient.mul_(0.5)

    def _data_edit(self, call: Call, outcome: str, batch: tuple[Tensor, Tensor]) -> None:
        """Raises no version, so that what ``step()`` has left is still taken for it."""
        for place in chosen(call):
            if place in self.handed:
                return
            gradient = self.parameters[place].grad
            if gradient is not None:
                gradient.data.mul_(0.5)

    def _inert_clip(self, call: Call, outcome: str, batch: tuple[Tensor, Tensor]) -> None:
        """Changes no value, but is an edit like any other."""
        if any(map(self.hides, range(len(self.parameters)))):
            return  # The norm cannot be read.
        for place, parameter in enumerate(self.parameters):
            if place in self.handed:
                return
            if parameter.grad is not None:
                self._note_change(place, is_in_place=True)

    def _own_gradient(self, call: Call, outcome: str, batch: tuple[Tensor, Tensor]) -> None:
        if outcome != "ok":
            return
        self._note_added(call.argument)
        (self.parameters[call.argument] * 0.1).sum().backward()

    def _note_added_everywhere(self) -> None:
        for place in range(len(self.parameters)):
            self._note_added(place)

    def _note_added(self, place: int) -> None:
        """Autograd adds to a gradient in place, or makes a new one."""
        self._note_change(place, is_in_place=self.parameters[place].grad is not None)

    def _note_change(self, place: int, *, is_in_place: bool) -> None:
        """The loop changes ``.grad``, or puts something else there."""
        if place in self.handed:
            self.handed.remove(place)
            mark = "replaced" if self.phase == "applied" else "new"
        else:
            mark = "own" if is_in_place else "new"
        if self.marks.get(place) == "as left" or (self.marks.get(place) == "own" and mark == "new"):
            self.marks[place] = mark

    def _save(self, call: Call, outcome: str, batch: tuple[Tensor, Tensor]) -> None:
        self.saved = copy.deepcopy(self.optimizer.state_dict())

    def _load(self, call: Call, outcome: str, batch: tuple[Tensor, Tensor]) -> None:
        if outcome == "ok":
            self.optimizer.load_state_dict(copy.deepcopy(self.saved))

    def _set_lr(self, call: Call, outcome: str, batch: tuple[Tensor, Tensor]) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = call.argument

    def _decay(self, call: Call, outcome: str, batch: tuple[Tensor, Tensor]) -> None:
        self.has_decayed = True
        self.loss = None
        with torch.no_grad():
            for parameter in self.parameters:
                parameter.mul_(0.9)

    def _keep(self, call: Call, outcome: str, batch: tuple[Tensor, Tensor]) -> None:
        pass

    def _evaluate(self, call: Call, outcome: str, batch: tuple[Tensor, Tensor]) -> None:
        with torch.no_grad():
            loss_of(self.ddp, batch)

    def _remove(self, call: Call, outcome: str, batch: tuple[Tensor, Tensor]) -> None:
        if self.phase == "failed":
            self._clear(range(len(self.parameters)))
        self._clear({place for place, mark in self.marks.items() if mark in ("as left", "own")} | self.handed)
        self.has_garbage = False
        self.cleared = set()
        self._forget()
        self.phase = "off"

    def _register(self, call: Call, outcome: str, batch: tuple[Tensor, Tensor]) -> None:
        self.phase = "idle"

    # Gradients and the update.

    def _forget(self) -> None:
        self.marks, self.means, self.released, self.handed = {}, set(), set(), set()

    def _clear(self, places: Iterable[int]) -> None:
        for place in places:
            self.parameters[place].grad = None

    def _update(self, places: Iterable[int]) -> None:
        """The optimizer's step on these parameters alone."""
        chosen = set(places)
        if not chosen:
            return
        hidden = {place: p.grad for place, p in enumerate(self.parameters) if place not in chosen}
        self._clear(hidden)
        self.optimizer.step()
        for place, gradient in hidden.items():
            self.parameters[place].grad = gradient
        self.loss = None  # Autograd refuses a backward whose weights have been changed since its forward.


def loss_of(ddp: nn.Module, batch: tuple[Tensor, Tensor], *, is_partial: bool = False) -> Tensor:
    """The loss of both sides."""
    return torch.nn.functional.mse_loss(ddp(batch[0], is_partial), batch[1])


def chosen(call: Call) -> Iterable[int]:
    """The parameters that an edit changes."""
    return range(6) if call.argument == "all" else [call.argument]
