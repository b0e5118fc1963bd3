"""Averages one model: which of its tensors, when, and by which outer optimizer.

An average is begun at the end of a step and applied ``overlap`` steps later, at once where that is 0. If it is applied
later, copies are averaged meanwhile, and each rank keeps the updates that it made since: new = average + (current -
snapshot). Parameters are only written between two steps, by the training thread, never while a forward or a backward
reads them.

If all ranks began the round at the parameters ``x``, their anchor, and ``m`` is the mean at its end, the gradient of an
outer optimizer is ``x - m``. SGD with rate 1 gives the plain average, SGD with momentum is SlowMo (Wang et al. 2019,
https://arxiv.org/abs/1910.00643), and Nesterov momentum is DiLoCo (Douillard et al. 2023,
https://arxiv.org/abs/2311.08105).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from overlap._checks import check_flag, check_whole_number, short_repr, type_name
from overlap._torch.ddp import data_parallel_parameters
from overlap._torch.foreach import copy_all, subtract_from_
from overlap.errors import ConfigurationError, UnsupportedError
from overlap.hooks import StageContext
from overlap.hooks.wires import Wire
from overlap.optim.local_sgd.means import Running, WiredMean, average, wider
from overlap.optim.stepper import check_optimizer, grads_replaced, step_whole
from overlap.ranks.board import group_all_reduce

MakeOptimizer = Callable[[list[Tensor]], Optimizer]


@dataclass
class _Pending:
    """An average of one fragment that was begun and not applied."""

    fragment: int
    apply_after: int
    """The step after which it is applied."""
    tensors: dict[str, Tensor]
    means: dict[str, Tensor]
    """``tensors`` themselves, or copies; the means, when the average is done."""
    snapshots: dict[str, Tensor]
    """``tensors`` as they were; empty where the average is applied at once."""
    running: Running = field(default_factory=Running)


class Averager:
    """Averages one model, fragment by fragment, between two steps, at the end of each round.

    Args:
        owner: named in messages.
        ddp: the model.
        optimizer: has to have some of its parameters.
        period, start_step, overlap, outer, fragments, wire, error_feedback: of :class:`LocalSGD`.

    Raises:
        ConfigurationError: an option is out of range, or two do not fit together.
    """

    def __init__(
        self,
        owner: object,
        ddp: DistributedDataParallel,
        optimizer: Optimizer,
        *,
        period: int,
        start_step: int,
        overlap: int,
        outer: MakeOptimizer | None,
        fragments: int,
        wire: Wire | None,
        error_feedback: bool,
    ) -> None:
        self.period = check_whole_number("period", period, least=1)
        """Steps from one average to the next; another number counts from the next round on."""
        self._start_step = check_whole_number("start_step", start_step, least=0)
        self._overlap = check_whole_number("overlap", overlap, least=0)
        if wire is not None and not isinstance(wire, Wire):
            hint = f"{wire.__name__}()" if isinstance(wire, type) else "Int8()"
            raise ConfigurationError(
                f"wire is {type_name(wire)}; give a wire such as {hint}, or None for full precision"
            )
        if check_flag("error_feedback", error_feedback) and wire is None:
            raise ConfigurationError(
                "error_feedback=True keeps the errors of a wire, and there is no wire: give one, as in wire=Int8()"
            )
        self.group: dist.ProcessGroup = ddp.process_group
        self._module = ddp.module
        self._parameters = {n: p for p, n in data_parallel_parameters(ddp).items() if p.requires_grad}
        stepped = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        if stepped.isdisjoint(map(id, self._parameters.values())):
            raise ConfigurationError(
                f"the {type(optimizer).__name__} has no parameter of this model; build it from the model's parameters()"
            )
        self.fragments = into_fragments(self._parameters, check_whole_number("fragments", fragments, least=1))
        """The names of the parameters that are averaged together."""
        self.anchors: dict[str, Tensor] | None = None
        """With ``outer`` or ``wire``: the parameters that all ranks had when the round began, at least in fp32."""
        self.has_anchored = False
        """Whether a round has begun."""
        self.outer: Optimizer | None = None
        """The outer optimizer, over the anchors."""
        self.wire: WiredMean | None = None
        if outer is not None or wire is not None:
            if unreal := [name for name, p in self._parameters.items() if p.is_complex()]:
                raise UnsupportedError(
                    f"outer and wire take real numbers, and {unreal[0]} is complex: leave them out, and it is averaged "
                    "in full precision"
                )
            self.anchors = {n: p.detach().to(wider(p.dtype), copy=True) for n, p in self._parameters.items()}
            if outer is not None:
                if isinstance(outer, Optimizer) or not callable(outer):
                    raise ConfigurationError(
                        f"outer must be a function that makes an optimizer of tensors, got {type_name(outer)}; give "
                        "functools.partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True)"
                    )
                self.outer = check_optimizer(outer(list(self.anchors.values())))
            if wire is not None:
                self.wire = WiredMean(wire, self.anchors, error_feedback=error_feedback, owner=owner)
        self.step = 0
        """Training steps so far: the only counter of steps."""
        self.round_end: int | None = None
        """The step after which ranks average next, once local SGD has started."""
        self.rounds = 0
        """Rounds that have ended so far; averages of :meth:`synchronize` are not counted."""
        self.pending: _Pending | None = None
        self.own_steps = [0] * len(self.fragments)
        """Steps of this rank since it last averaged each fragment: its weight under Join."""

    @property
    def is_local(self) -> bool:
        """Whether the next step is one of local SGD."""
        return self.step >= self._start_step

    def begin_step(self) -> None:
        """A step begins: begin a round, if it is the round's first."""
        if not self.is_local:
            return
        if self.round_end is None:
            self.round_end = self.step + self.period
        if self.anchors is not None and not self.has_anchored:
            copy_all(list(self.anchors.values()), [parameter.detach() for parameter in self._parameters.values()])
            self.has_anchored = True

    def end_step(self, context: StageContext, *, is_own: bool, is_joining: bool) -> None:
        """This rank (or under ``Join`` only others) made a step: average if it is time."""
        self.begin_step()
        if is_own and self.is_local:
            self.own_steps = [steps + 1 for steps in self.own_steps]
        self.step += 1
        if self.pending is not None and self.step >= self.pending.apply_after:
            self.apply_pending()
        if self.step == self.round_end:
            self.round_end = None
            fragment = self.rounds % len(self.fragments)
            self._average(fragment, context, self._overlap, is_joining=is_joining)
            self.rounds += 1

    def synchronize(self, context: StageContext, *, is_joining: bool) -> None:
        """Average every fragment that was stepped since its last average, and begin a new round."""
        self.apply_pending()
        if not self.is_local:
            return
        for fragment, steps in enumerate(self.own_steps):
            # Under Join ranks differ in the number of their steps.
            if steps or is_joining:
                self._average(fragment, context, 0, is_joining=is_joining)
        self.round_end = None

    def _average(self, fragment: int, context: StageContext, delay: int, *, is_joining: bool) -> None:
        """Begin the average of one fragment, and apply it after ``delay`` steps."""
        self.apply_pending()
        own, total = 1, self.group.size()
        steps, self.own_steps[fragment] = self.own_steps[fragment], 0
        if is_joining:
            of_all = torch.tensor([steps], device=context.device)
            group_all_reduce(of_all, group=self.group)
            own, total = steps, int(of_all)
            if not total:
                return
        tensors = self._tensors_of(fragment)
        means, snapshots = dict(tensors), {}
        if delay:
            means = {name: tensor.to(wider(tensor.dtype), copy=True) for name, tensor in tensors.items()}
            snapshots = {name: tensor.clone() for name, tensor in tensors.items()}
        elif self.anchors is not None:
            means.update((name, means[name].to(self.anchors[name].dtype)) for name in self.fragments[fragment])
        in_background = context if delay or self.wire is not None else None
        running = average(means, self.group, (own, total), widens=True, wire=self.wire, context=in_background)
        self.pending = _Pending(fragment, self.step + delay, tensors, means, snapshots, running)
        if not delay:
            self.apply_pending()

    @torch.no_grad()
    def apply_pending(self) -> None:
        """Wait for the pending average and write the new values, if there is one."""
        pending, self.pending = self.pending, None
        if pending is None:
            return
        pending.running.wait()
        new = dict(pending.means)
        if self.anchors is not None:
            names = self.fragments[pending.fragment]
            anchors, means = [self.anchors[name] for name in names], [new[name] for name in names]
            if self.outer is None:
                copy_all(anchors, means)
            else:
                subtract_from_(means, anchors)  # They are its gradients now.
                with grads_replaced(anchors, means):
                    step_whole(self.outer)
            new.update(zip(names, anchors, strict=True))
        for name, tensor in pending.tensors.items():
            if (snapshot := pending.snapshots.get(name)) is not None:
                # Exactly the average where nothing was learnt meanwhile.
                tensor.copy_(tensor.to(new[name].dtype, copy=True).sub_(snapshot).add_(new[name]))
            elif new[name] is not tensor:
                tensor.copy_(new[name])

    def _tensors_of(self, fragment: int) -> dict[str, Tensor]:
        """A fragment's parameters, by name; with the first one the floating-point buffers."""
        found = {name: self._parameters[name].detach() for name in self.fragments[fragment]}
        if fragment == 0:
            found.update((f"buffer {name}", b) for name, b in self._module.named_buffers() if b.is_floating_point())
        return found

    def state_dict(self) -> dict[str, Any]:
        """Tensors and plain values by name, enough to resume in the middle of a round; waits for a pending average."""
        flight = None
        if (pending := self.pending) is not None:
            pending.running.wait()
            flight = {
                "fragment": pending.fragment,
                "apply_after": pending.apply_after,
                "means": {name: tensor.clone() for name, tensor in pending.means.items()},
                "snapshots": {name: tensor.clone() for name, tensor in pending.snapshots.items()},
            }
        return {
            "step": self.step,
            "round_end": self.round_end,
            "rounds": self.rounds,
            "own_steps": list(self.own_steps),
            "anchors": dict(self.anchors) if self.anchors is not None and self.has_anchored else {},
            "outer": None if self.outer is None else self.outer.state_dict(),
            "wire": None if self.wire is None else self.wire.memory.state_dict(),
            "flight": flight,
        }

    def check(self, state: Mapping[str, Any]) -> None:
        """Raises: ConfigurationError: the state is of other settings, of another model or of another rank."""
        if len(state["own_steps"]) != len(self.own_steps):
            raise ConfigurationError("the state is of local SGD with another number of fragments")
        if (state["outer"] is None) != (self.outer is None):
            saved, here = ("with an", "none") if self.outer is None else ("without an", "one")
            raise ConfigurationError(f"the state was saved {saved} outer optimizer, and this one has {here}")
        if self.anchors is not None and not state["anchors"] and any(state["own_steps"]):
            raise ConfigurationError(
                "the state was saved without a wire and an outer optimizer in the middle of a round, when ranks have "
                "different parameters: call local.synchronize() before saving, or resume without them"
            )
        if self.anchors is not None and state["anchors"] and state["anchors"].keys() != self.anchors.keys():
            raise ConfigurationError("the state of local SGD is of a model with other parameters")
        flight = state["flight"]
        if flight is not None and flight["snapshots"].keys() != self._tensors_of(flight["fragment"]).keys():
            raise ConfigurationError("the pending average that was saved is of a model with other parameters")
        if self.wire is None and (state["wire"] or {}).get("error"):
            raise ConfigurationError(
                "the state has error feedback, the errors of a wire that are still to be delivered, and this LocalSGD "
                "has no wire: give the wire and error_feedback=True of the run that was saved"
            )

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state that :meth:`state_dict` returned on this rank, and that has passed :meth:`check`."""
        pending, self.pending = self.pending, None
        if pending is not None:
            pending.running.wait()
        if self.wire is not None:
            self.wire.memory.load_state_dict(state["wire"] or {})
        self.step, self.round_end, self.rounds = state["step"], state["round_end"], state["rounds"]
        self.own_steps = list(state["own_steps"])
        if self.anchors is not None:
            # Without any, the next step begins a round.
            self.has_anchored = bool(state["anchors"])
            copy_all([self.anchors[name] for name in state["anchors"]], list(state["anchors"].values()))
        if self.outer is not None:
            self.outer.load_state_dict(state["outer"])
        if (flight := state["flight"]) is not None:
            tensors = self._tensors_of(flight["fragment"])
            means, snapshots = (
                {name: flight[key][name].to(tensor.device, copy=True) for name, tensor in tensors.items()}
                for key in ("means", "snapshots")
            )
            self.pending = _Pending(flight["fragment"], flight["apply_after"], tensors, means, snapshots)

    def __repr__(self) -> str:
        # The same on every rank that has the same options.
        parts = [f"period {self.period} from step {self._start_step}"]
        parts += [f"overlap {self._overlap}"] if self._overlap else []
        parts += [f"{len(self.fragments)} fragments"] if len(self.fragments) > 1 else []
        if self.wire is not None:
            parts += [f"wire {self.wire.wire!r}"]
            parts += ["error feedback"] if self.wire.memory.has_feedback else []
        return ", ".join(parts if self.outer is None else [*parts, f"outer {type(self.outer).__name__}"])


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
            f"fragments={short_repr(count)} leaves some without a parameter: the model has {len(parameters)}, or they "
            "are too unequal; give a smaller number"
        )
    return list(fragments.values())
