"""Averages one model: which of its tensors, when, and over which ranks.

An average is begun at the end of a step and applied ``overlap`` steps later, at once where that is 0. If it is applied
later, copies are averaged meanwhile, and each rank keeps the updates that it made since: new = average + (current -
snapshot). Parameters are only written between two steps, by the training thread, never while a forward or a backward
reads them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from overlap._checks import check_flag, check_whole_number, described, is_one_of, told
from overlap._torch.ddp import data_parallel_parameters
from overlap.errors import ConfigurationError, UnsupportedError
from overlap.hooks import StageContext
from overlap.hooks.wires import Wire
from overlap.optim.local_sgd.averages import Running, Weight, WiredMean, average, wider
from overlap.optim.local_sgd.given import SeveralOptimizers
from overlap.optim.local_sgd.outer import Anchors, MakeOptimizer
from overlap.optim.local_sgd.schedule import Period, Schedule
from overlap.ranks.collectives import all_reduce

__all__ = ["Averager", "into_fragments"]


@dataclass
class _Pending:
    """An average of one fragment that was begun and not applied."""

    fragment: int
    apply_after: int
    """The step after which it is applied."""
    means: dict[str, Tensor]
    """The tensors themselves, or copies; the means, when the average is done."""
    snapshots: dict[str, Tensor]
    """The tensors as they were; empty where the average is applied at once."""
    tensors: dict[str, Tensor]
    running: Running | None = None

    def wait(self) -> None:
        if self.running is not None:
            self.running.wait()


class Averager:
    """Averages one model, fragment by fragment, between two steps, when its schedule says so.

    Arguments and errors are those of :class:`LocalSGD`, the ``owner``.
    """

    def __init__(
        self,
        owner: object,
        ddp: DistributedDataParallel,
        optimizer: Optimizer,
        period: Period,
        start_step: int,
        *,
        overlap: bool | int,
        outer: MakeOptimizer | None,
        fragments: int,
        average_buffers: bool,
        optimizer_state: str,
        average_dtype: torch.dtype | None,
        wire: Wire | None,
        error_feedback: bool,
    ) -> None:
        self._delay = check_whole_number("overlap", int(overlap) if isinstance(overlap, bool) else overlap, least=0)
        self._has_buffers = check_flag("average_buffers", average_buffers)
        self._resets_state = optimizer_state == "reset"
        self._dtype = average_dtype
        check_whole_number("fragments", fragments, least=1)
        _check_options(optimizer_state, average_dtype, wire, error_feedback)
        if isinstance(period, Mapping) and len(period) > 1 and (outer is not None or fragments > 1 or wire is not None):
            raise ConfigurationError(
                f"outer, fragments and wire need one period for all ranks, and {told(period)} is a hierarchy: give one "
                f"number, as in period={told(next(iter(period)))}"
            )
        self._module = ddp.module
        self._optimizer = optimizer
        self._parameters = _trained_parameters(ddp, optimizer)
        for option, given in (("outer", outer), ("wire", wire)):
            unreal = [(name, p.dtype) for name, p in self._parameters.items() if p.is_complex() and given is not None]
            for name, dtype in unreal:
                raise UnsupportedError(
                    f"{option} takes real numbers, and {name} is {str(dtype).removeprefix('torch.')}: leave {option} "
                    "out, and it is averaged in full precision"
                )
        self.fragments = into_fragments(self._parameters, fragments)
        """The names of the parameters that are averaged together."""
        self.anchors = None
        if outer is not None or wire is not None:
            self.anchors = Anchors(self._parameters, average_dtype, outer)
        self.wire = None
        if wire is not None and self.anchors is not None:
            self.wire = WiredMean(wire, self.anchors.values, error_feedback=error_feedback, owner=owner)
        self.schedule = Schedule(period, start_step, ddp.process_group)
        self.rounds = 0
        """Averages that the schedule asked for so far; those of :meth:`synchronize` are not counted."""
        self.pending: _Pending | None = None
        self.own_steps = [[0] * len(self.schedule.levels) for _ in self.fragments]
        """Steps of this rank since it last averaged, by fragment and level: its weight under Join."""

    @property
    def outer(self) -> Optimizer | None:
        """The outer optimizer, where there is one."""
        return None if self.anchors is None else self.anchors.optimizer

    def begin_step(self) -> None:
        """A step begins: begin a round, if it is the round's first."""
        self.schedule.begin_round()
        if self.anchors is not None and self.schedule.is_local:
            self.anchors.begin()

    def end_step(self, context: StageContext, *, is_own: bool, is_joining: bool) -> None:
        """This rank (or under ``Join`` only others) made a step: average if it is time."""
        self.begin_step()
        if is_own and self.schedule.is_local:
            self.own_steps = [[steps + 1 for steps in levels] for levels in self.own_steps]
        level = self.schedule.count()
        if self.pending is not None and self.schedule.step >= self.pending.apply_after:
            self.apply_pending()
        if level is not None:
            self._average(self.rounds % len(self.fragments), level, context, self._delay, is_joining=is_joining)
            self.rounds += 1

    def synchronize(self, context: StageContext, *, is_joining: bool) -> None:
        """Average every fragment that was stepped since its last average, over all ranks, and begin a new round."""
        self.apply_pending()
        if not self.schedule.is_local:
            return
        for fragment, steps in enumerate(self.own_steps):
            # Under Join ranks differ in the number of their steps.
            if steps[-1] or is_joining:
                self._average(fragment, len(steps) - 1, context, 0, is_joining=is_joining)
        self.schedule.round_end = None

    def _average(self, fragment: int, level: int, context: StageContext, delay: int, *, is_joining: bool) -> None:
        """Begin the average of one fragment with the ranks of a level, and apply it after ``delay`` steps."""
        self.apply_pending()
        group = self.schedule.levels[level]
        steps = self.own_steps[fragment][level]
        self.own_steps[fragment][: level + 1] = [0] * (level + 1)
        weight = _weight(steps, group, context.device) if is_joining else Weight(1, group.size())
        if weight is None:
            return
        tensors = self._tensors_of(fragment)
        means, snapshots = dict(tensors), {}
        if self.anchors is not None:
            self.anchors.check_common(group, context.device)
        if delay:
            means = {name: t.to(wider(t.dtype, self._dtype), copy=True) for name, t in tensors.items()}
            snapshots = {name: tensor.clone() for name, tensor in tensors.items()}
        elif self.anchors is not None:
            means.update((name, means[name].to(self.anchors.values[name].dtype)) for name in self.fragments[fragment])
        in_background = context if delay or self.wire is not None else None
        running = average(means, group, weight, dtype=self._dtype, wire=self.wire, context=in_background)
        after = self.schedule.step + delay
        self.pending = _Pending(fragment, after, tensors=tensors, means=means, snapshots=snapshots, running=running)
        if not delay:
            self.apply_pending()

    @torch.no_grad()
    def apply_pending(self) -> None:
        """Wait for the pending average and write the new values, if there is one."""
        pending, self.pending = self.pending, None
        if pending is None:
            return
        pending.wait()
        new, names = pending.means, self.fragments[pending.fragment]
        if self.anchors is not None:
            new = {**new, **self.anchors.step({name: new[name] for name in names})}
        for name, tensor in pending.tensors.items():
            if (snapshot := pending.snapshots.get(name)) is not None:
                # Exactly the average where nothing was learnt meanwhile.
                tensor.copy_(tensor.to(new[name].dtype, copy=True).sub_(snapshot).add_(new[name]))
            elif new[name] is not tensor:
                tensor.copy_(new[name])
        if self._resets_state:
            inner = self._optimizer
            for one in inner.optimizers if isinstance(inner, SeveralOptimizers) else [inner]:
                for name in names:
                    one.state.pop(self._parameters[name], None)

    def _tensors_of(self, fragment: int) -> dict[str, Tensor]:
        """A fragment's parameters, by name, and the buffers that are averaged with them."""
        found = {name: self._parameters[name].detach() for name in self.fragments[fragment]}
        if self._has_buffers and fragment == 0:
            found.update((f"buffer {name}", b) for name, b in self._module.named_buffers() if b.is_floating_point())
        return found

    def restart(self) -> None:
        """Begin again from step 0, as if all ranks had the same parameters."""
        if self.outer is not None:
            self.outer.state.clear()
        outer = None if self.outer is None else self.outer.state_dict()
        steps = [[0] * len(levels) for levels in self.own_steps]
        start: dict[str, Any] = {"step": 0, "round_end": None, "rounds": 0, "own_steps": steps, "outer": outer}
        self.load_state_dict({**start, "anchors": {}, "wire": None, "flight": None})

    def state_dict(self) -> dict[str, Any]:
        """Tensors and plain values by name, enough to resume in the middle of a round; waits for a pending average."""
        flight = None
        if (pending := self.pending) is not None:
            pending.wait()
            flight = {
                "fragment": pending.fragment,
                "apply_after": pending.apply_after,
                "means": {name: tensor.clone() for name, tensor in pending.means.items()},
                "snapshots": {name: tensor.clone() for name, tensor in pending.snapshots.items()},
            }
        return {
            "step": self.schedule.step,
            "round_end": self.schedule.round_end,
            "rounds": self.rounds,
            "own_steps": [list(levels) for levels in self.own_steps],
            "anchors": dict(self.anchors.values) if self.anchors is not None and self.anchors.is_set else {},
            "outer": None if self.outer is None else self.outer.state_dict(),
            "wire": None if self.wire is None else self.wire.memory.state_dict(),
            "flight": flight,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what :meth:`state_dict` returned on this rank.

        Raises:
            ConfigurationError: it is of other settings, of another model or of another rank.
        """
        pending, self.pending = self.pending, None
        if pending is not None:
            pending.wait()
        if [len(levels) for levels in state["own_steps"]] != [len(levels) for levels in self.own_steps]:
            raise ConfigurationError("the state is of local SGD with another number of fragments or of levels")
        if (state["outer"] is None) != (self.outer is None):
            saved, here = ("with an", "none") if self.outer is None else ("without an", "one")
            raise ConfigurationError(f"the state was saved {saved} outer optimizer, and this one has {here}")
        flight = state["flight"]
        if (self.anchors is not None and "anchors" not in state) or (flight is not None and "fragment" not in flight):
            raise ConfigurationError(
                "the state was saved by an earlier version of overlap in another layout: load it there, call "
                "local.synchronize(), and save the model and local.optimizer alone"
            )
        wire = state["wire"] or {}
        if self.wire is not None:
            self.wire.memory.load_state_dict(wire)
        elif wire.get("error"):
            raise ConfigurationError(
                "the state has error feedback, the errors of a wire that are still to be delivered, and this LocalSGD "
                "has no wire: give the wire and error_feedback=True of the run that was saved"
            )
        self.schedule.step, self.schedule.round_end, self.rounds = state["step"], state["round_end"], state["rounds"]
        self.own_steps = [list(levels) for levels in state["own_steps"]]
        if self.anchors is not None:
            self.anchors.load(state["anchors"])
        if self.outer is not None:
            self.outer.load_state_dict(state["outer"])
        if flight is not None:
            tensors = self._tensors_of(flight["fragment"])
            if flight["snapshots"].keys() != tensors.keys():
                raise ConfigurationError("the pending average that was saved is of a model with other parameters")
            means, snapshots = (
                {name: flight[key][name].to(tensor.device, copy=True) for name, tensor in tensors.items()}
                for key in ("means", "snapshots")
            )
            self.pending = _Pending(flight["fragment"], flight["apply_after"], means, snapshots, tensors)

    def __repr__(self) -> str:
        # The same on every rank that has the same settings.
        parts = [repr(self.schedule)]
        parts += [] if self.outer is None else [f"outer {type(self.outer).__name__}"]
        parts += [f"overlap {self._delay}"] if self._delay else []
        parts += [f"{len(self.fragments)} fragments"] if len(self.fragments) > 1 else []
        parts += [] if self._has_buffers else ["buffers kept"]
        parts += ["state reset"] if self._resets_state else []
        parts += [] if self._dtype is None else [f"in {str(self._dtype).removeprefix('torch.')}"]
        if self.wire is not None:
            parts += [f"wire {self.wire.wire!r}"] + ["error feedback"] * (self.wire.memory.feedback is not None)
        return ", ".join(parts)


def _weight(steps: int, group: dist.ProcessGroup, device: torch.device) -> Weight | None:
    """This rank's weight by the steps that it made; ``None`` where no rank made any.

    Communication: one all-reduce of a number on ``group``.
    """
    total = torch.tensor([steps], device=device)
    all_reduce(total, group=group)
    return Weight(steps, int(total)) if int(total) else None


def _check_options(state: str, dtype: torch.dtype | None, wire: Wire | None, error_feedback: bool) -> None:
    """Raises: ConfigurationError: a value is out of range, or two do not fit together."""
    if not is_one_of(state, "keep", "reset"):
        raise ConfigurationError(f'optimizer_state must be "keep" or "reset", got {told(state)}')
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise ConfigurationError(
            f"average_dtype must be a floating-point dtype such as torch.float32, got {told(dtype)}"
        )
    if wire is not None and not isinstance(wire, Wire):
        hint = f"{wire.__name__}()" if isinstance(wire, type) else "Int8()"
        raise ConfigurationError(f"wire is {described(wire)}; give a wire such as {hint}, or None for full precision")
    check_flag("error_feedback", error_feedback)
    if error_feedback and wire is None:
        raise ConfigurationError(
            "error_feedback=True keeps the errors of a wire, and there is no wire: give one, as in wire=Int8()"
        )
    if wire is not None and dtype is not None and dtype.itemsize > torch.float32.itemsize:
        raise ConfigurationError(
            f"average_dtype is {dtype}, and what a wire carries is summed in torch.float32: leave one of the two out"
        )


def _trained_parameters(ddp: DistributedDataParallel, optimizer: Optimizer) -> dict[str, Tensor]:
    """The parameters that require a gradient, by name. Raises: ConfigurationError: the optimizer has none of them."""
    trained: dict[str, Tensor] = {n: p for p, n in data_parallel_parameters(ddp).items() if p.requires_grad}
    stepped = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    if not stepped & {id(parameter) for parameter in trained.values()}:
        raise ConfigurationError(
            f"the {type(optimizer).__name__} has no parameter of this model; build it from the model's parameters()"
        )
    return trained


def into_fragments(parameters: Mapping[str, Tensor], count: int) -> list[list[str]]:
    """Cut the parameters' names, in the model's order, into ``count`` fragments of about as many elements each."""
    total = sum(parameter.numel() for parameter in parameters.values())
    fragments: dict[int, list[str]] = {}
    before = 0
    for name, parameter in parameters.items():
        middle = before + parameter.numel() / 2
        fragments.setdefault(min(count - 1, int(count * middle / max(1, total))), []).append(name)
        before += parameter.numel()
    if len(fragments) < count:
        raise ConfigurationError(
            f"fragments={told(count)} leaves some without a parameter: the model has {len(parameters)}, or they are "
            "too unequal; give a smaller number"
        )
    return list(fragments.values())
