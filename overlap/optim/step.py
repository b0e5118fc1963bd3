"""The update of replicated parameters, in backward or after it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from overlap._torch.optimizer import mark_stepped
from overlap.errors import ConfigurationError, TrainingLoopError, UnsupportedError
from overlap.hooks import Bucket, Role, Stage, StageContext, whole_pass
from overlap.join.active import active_join
from overlap.optim.clipping import Clipping, GradientNorms, SealedGradients
from overlap.optim.functional import FunctionalOptimizer
from overlap.optim.overlapped import OverlappedOptimizer
from overlap.optim.unused import used_on_any_rank

__all__ = ["Step"]


class Step(Stage):
    """Updates parameters with the averaged gradients of their bucket, on every rank alike.

    *Interleaved* (default): each bucket's parameters are updated as soon as it is reduced, while backward still
    computes the next ones. *Deferred* (``deferred=True``, or ``clip_grad_norm``): all are updated at once, when all
    gradients are there. Clipping by the global norm and ``GradScaler`` need that, and so do optimizers whose step
    couples parameters.

    Given an :class:`OverlappedOptimizer`, the loop calls its ``step()`` once for each backward; that makes the
    deferred update. Given a plain or a functional optimizer, the stage does everything in backward (the deferred
    update with the last bucket) and the loop calls no ``step()``.

    After backward ``.grad`` holds the averaged gradient; it is cleared before the model's next forward.

    Args:
        optimizer: what updates; it may have parameters that the model has not.
        params: update these alone in backward; the others keep their averaged ``.grad`` (an ``OverlappedOptimizer``
            updates its own among them in ``step()``).
        deferred: update all parameters at once; by default only where clipping needs it.
        clip_grad_norm: scale the averaged gradients to at most this global norm first, as
            ``torch.nn.utils.clip_grad_norm_`` does; implies ``deferred``.
        norm_type: which norm.

    Issues: nothing; where DDP looks for unused parameters and the update is interleaved, one all-reduce of a byte a
    parameter, because a parameter that no rank used must not be updated (weight decay and momentum would move it).

    Raises:
        ConfigurationError: an argument is out of range, or (at registration) optimizer and model do not fit.
        TrainingLoopError: in ``backward``, when ``step()`` was not called after the one before.

    >>> layer = torch.nn.Linear(2, 2)
    >>> Step(torch.optim.SGD(layer.parameters(), lr=0.1), clip_grad_norm=1.0)
    Step(SGD, deferred, clip_grad_norm=1.0)
    """

    role = Role.UPDATE

    def __init__(
        self,
        optimizer: Optimizer | FunctionalOptimizer,
        *,
        params: Iterable[Tensor] | None = None,
        deferred: bool | None = None,
        clip_grad_norm: float | None = None,
        norm_type: float = 2.0,
    ) -> None:
        self.clipping = None if clip_grad_norm is None else Clipping(clip_grad_norm, norm_type)
        if self.clipping is not None and deferred is False:
            raise ConfigurationError(
                f"clip_grad_norm={clip_grad_norm} needs the norm of all gradients before the first update, which "
                "deferred=False rules out; leave deferred out"
            )
        self.is_deferred = bool(deferred) or self.clipping is not None
        self.norms = None if self.clipping is None else GradientNorms(norm_type)
        self._is_automatic = not isinstance(optimizer, OverlappedOptimizer)
        self._functional = optimizer if isinstance(optimizer, FunctionalOptimizer) else None
        plain = optimizer.optimizer if isinstance(optimizer, FunctionalOptimizer) else optimizer
        self.optimizer = plain if isinstance(plain, OverlappedOptimizer) else OverlappedOptimizer(plain)
        self._only = None if params is None else {id(parameter): parameter for parameter in params}
        self._check_params()
        self._names: Mapping[Tensor, str] = {}
        self._finds_unused: bool | None = None
        self._guard: torch.utils.hooks.RemovableHandle | None = None
        self._is_attached = False
        self.group: dist.ProcessGroup | None = None
        """The process group of the model, while this is registered."""
        self._adopts = False  # A functional optimizer that was given no parameters takes those that come.
        self._saw_forward = False
        self._reduced: dict[int, Tensor] = {}
        self._gradients: list[tuple[list[Tensor], list[Tensor]]] = []
        self._is_in_backward = False
        self._is_replay = False
        self._awaits_step = False
        self._clears = False
        self._has_failed = False
        self._sealed = SealedGradients()

    def _check_params(self) -> None:
        if self._only is None:
            return
        if not self._only:
            raise ConfigurationError("params is empty: nothing would be updated; leave it out to update all")
        if any(not self.optimizer.stepper.covers(parameter) for parameter in self._only.values()):
            raise ConfigurationError(f"params has parameters that the {self._optimizer_name} does not have")
        if self.is_deferred:
            raise ConfigurationError("params chooses what is updated in backward, but deferred updates come after it")

    @property
    def _optimizer_name(self) -> str:
        return type(self.optimizer.optimizer).__name__

    @property
    def signature(self) -> str:
        return repr(self)

    def attach(self, context: StageContext) -> None:
        if self._is_attached:
            raise ConfigurationError(f"{self!r} serves a model already; make a Step for each model")
        if context.finds_unused and not self.is_deferred and context.device.type != "cpu":
            raise UnsupportedError(
                "with find_unused_parameters or static_graph an interleaved update would stop the host to learn "
                "which parameters no rank used; use Step(optimizer, deferred=True)"
            )
        self._adopts = self._functional is not None and not any(g["params"] for g in self.optimizer.param_groups)
        self._check_coverage(context)
        self.group = context.group
        self.optimizer.adopt(self)
        self._is_attached = True
        self._names, self._finds_unused = context.names or {}, context.finds_unused
        if self._is_automatic and self._functional is None:
            self._guard = self.optimizer.optimizer.register_step_pre_hook(_refuse_step)

    def _check_coverage(self, context: StageContext) -> None:
        if context.names is None or self._adopts:
            return
        self.optimizer.stepper.refresh()
        of_model = set(map(id, context.names))
        of_optimizer = [p for group in self.optimizer.param_groups for p in group["params"]]
        outside = [p for p in of_optimizer if id(p) not in of_model and p.requires_grad]
        if of_model.isdisjoint(map(id, of_optimizer)):
            raise ConfigurationError(
                f"the {self._optimizer_name} has no parameter of this model; build it from ddp.parameters()"
            )
        if outside and self._is_automatic and self._only is None:
            raise ConfigurationError(
                f"{len(outside)} parameters of the {self._optimizer_name} are not in this model, so backward would "
                "never update them; give OverlappedOptimizer(optimizer) to Step and call its step()"
            )

    def detach(self) -> None:
        # What has been applied must not be applied again by an optimizer that nobody tells.
        self._clear_applied(list(self._reduced.values()))
        self._reduced.clear()
        self._is_attached = self._is_in_backward = self._awaits_step = self._clears = False
        self.group = None
        self.optimizer.release(self)
        if self._guard is not None:
            self._guard.remove()

    def before_forward(self) -> None:
        self._saw_forward = True
        if self._is_automatic and not self._is_replay:
            self._check_unchanged()
        if self._has_failed:
            # The gradients of a failed backward are half reduced, those of buckets that never came included.
            for parameter in self._names or self._reduced.values():
                if self._clears_gradient_of(parameter):
                    parameter.grad = None
            self._has_failed = False
        self._clear()

    def _clear(self) -> None:
        if self._clears:
            self._clear_applied(list(self._reduced.values()))
            # What step() has yet to update stays, and stays reduced.
            self._clears = self._awaits_step

    def _clear_applied(self, parameters: Iterable[Tensor]) -> None:
        cleared = [p for p in parameters if self.optimizer.has_applied(p) and self._clears_gradient_of(p)]
        for parameter in cleared:
            parameter.grad = None
            self._reduced.pop(id(parameter))
        self.optimizer.note_new_gradients(cleared)

    def _clears_gradient_of(self, parameter: Tensor) -> bool:
        return self._updates(parameter) or (not self._is_automatic and self.optimizer.stepper.covers(parameter))

    def before_backward(self, *, is_replay: bool) -> None:
        if self._awaits_step and not is_replay:
            raise TrainingLoopError(
                "a second backward began before step() was called for the first: call optimizer.step() after each "
                "synchronized backward, or run all but the last backward of a step under ddp.no_sync()"
            )
        if is_replay:
            self._clear()  # No forward comes before it.
        self._is_in_backward, self._is_replay = True, is_replay
        self.optimizer.note_new_gradients(list(self._reduced.values()))
        self.optimizer.stepper.begin()
        self._reduced.clear()
        self._gradients.clear()
        if self.norms is not None:
            self.norms.clear()

    async def __call__(self, bucket: Bucket) -> None:
        if self._adopts and self._functional is not None:
            for parameter in bucket.parameters:
                if not self.optimizer.stepper.covers(parameter):
                    self._functional.add(parameter)
                    self.optimizer.stepper.refresh()
        mine = [
            (parameter, gradient)
            for parameter, gradient in zip(bucket.parameters, bucket.gradients, strict=True)
            if self._updates(parameter)
        ]
        if self.is_deferred:
            await self._defer(bucket, mine)
        else:
            await self._interleave(bucket, mine)
        self._reduced.update((id(parameter), parameter) for parameter in bucket.parameters)

    async def _interleave(self, bucket: Bucket, mine: list[tuple[Tensor, Tensor]]) -> None:
        used = await used_on_any_rank(bucket, [parameter for parameter, _ in mine], self._finds_unused)
        self._apply([pair for pair, is_used in zip(mine, used, strict=True) if is_used])

    async def _defer(self, bucket: Bucket, mine: list[tuple[Tensor, Tensor]]) -> None:
        if self.norms is not None:
            self.norms.take([parameter for parameter, _ in mine], [gradient for _, gradient in mine])
        # A rank that replays has no step() of its own to wait for, and learns here what the others' .grad tells them.
        is_told = self._finds_unused is not False and active_join(bucket.group) is not None
        if not (self._is_automatic or bucket.is_replay or is_told):
            return
        if bucket.is_replay and self._finds_unused and not (self._is_automatic or is_told):
            raise UnsupportedError(
                "PyTorch's Join with find_unused_parameters does not tell a rank without inputs which parameters the "
                "others used; use `with overlap.Join([ddp, optimizer])`, or the interleaved update"
            )
        used = await used_on_any_rank(bucket, [parameter for parameter, _ in mine], self._finds_unused)
        if not (self._is_automatic or bucket.is_replay):
            return
        kept = [pair for pair, is_used in zip(mine, used, strict=True) if is_used]
        self._gradients.append(([parameter for parameter, _ in kept], [gradient for _, gradient in kept]))
        await whole_pass()
        # The first to go on updates all: as soon as it is through, DDP may copy its gradients out of the bucket.
        if self._gradients:
            self._apply_all()

    @torch.no_grad()
    def _apply_all(self) -> None:
        pairs = {
            id(parameter): (parameter, gradient)
            for parameters, gradients in self._gradients
            for parameter, gradient in zip(parameters, gradients, strict=True)
        }
        groups = self.optimizer.param_groups
        # In the optimizer's order, in which clip_grad_norm_ adds norms up.
        ordered = [pairs[id(parameter)] for group in groups for parameter in group["params"] if id(parameter) in pairs]
        self._gradients.clear()
        if self.clipping is not None and self.norms is not None and ordered:
            noted = self.norms.noted([parameter for parameter, _ in ordered])
            self.clipping.scale_([gradient for _, gradient in ordered], noted)
        self._apply(ordered)

    def _apply(self, pairs: list[tuple[Tensor, Tensor]]) -> None:
        parameters = [parameter for parameter, _ in pairs]
        self.optimizer.stepper.step(parameters, [gradient for _, gradient in pairs])
        self.optimizer.note_applied(parameters)

    def _updates(self, parameter: Tensor) -> bool:
        return (self._only is None or id(parameter) in self._only) and self.optimizer.stepper.covers(parameter)

    def after_backward(self, *, failed: bool) -> str | None:
        self._is_in_backward = False
        if failed:
            self._awaits_step, self._clears, self._has_failed = False, False, True
            if self.is_deferred or not self._reduced:
                return None
            return (
                f"{len(self._reduced)} parameters had been updated by then, and on other ranks perhaps more or fewer: "
                "load a checkpoint before going on, or use Step(optimizer, deferred=True), which updates all or none"
            )
        self._sealed.seal(self._reduced.values())
        if self.norms is not None:
            self.norms.seal(self._sealed)
        self._awaits_step = not (self._is_automatic or self._is_replay)
        self._clears = self._is_automatic or self._is_replay or not self.is_deferred
        if self._is_automatic or self._is_replay:
            mark_stepped(self.optimizer.optimizer)
        return None

    # What OverlappedOptimizer.step asks and tells.

    def check_complete(self) -> None:
        """Raises: TrainingLoopError: the last backward ended before all buckets came."""
        if not self._is_in_backward:
            return
        missing = [name for parameter, name in self._names.items() if id(parameter) not in self._reduced]
        raise TrainingLoopError(
            f"backward has not reached every parameter: no gradient for some of {', '.join(missing[:5])}"
            f"{', ...' if len(missing) > 5 else ''}; use DistributedDataParallel(find_unused_parameters=True) "
            "if part of the model takes no part in the loss"
        )

    def check_reduced(self, pending: list[Tensor]) -> None:
        """Raises: TrainingLoopError: a gradient about to be applied is this rank's own and no mean."""
        if not self._saw_forward:
            return  # No training step: gradients of zeros, set to have the optimizer make its state, for one.
        local = [self._names[p] for p in pending if p in self._names and not self.has_reduced(p)]
        if local:
            raise TrainingLoopError(
                f"step() would apply gradients that were not reduced over ranks ({local[0]} and {len(local) - 1} "
                "others): the backward ran under no_sync(), or did not reach every parameter"
            )

    def check_unchanged(self) -> None:
        """Raises: TrainingLoopError: ``.grad`` was changed after backward had applied it."""
        if self._awaits_step and not self.is_deferred:
            self._check_unchanged()

    def _check_unchanged(self) -> None:
        applied = [p for p in self._reduced.values() if p.grad is not None and self.optimizer.has_applied(p)]
        changed = [p for p in applied if not self._sealed.holds(p)]
        # Setting gradients to zero is no edit that anyone could miss.
        edited = [p for p in changed if p.grad is not None and bool(p.grad.any())]
        if edited:
            raise TrainingLoopError(
                f"the gradient of {self._names.get(edited[0], 'a parameter')} (and of {len(edited) - 1} others) was "
                "changed after backward, but the update had been made in backward; clipping, GradScaler and other "
                "edits need an OverlappedOptimizer and Step(optimizer, deferred=True)"
            )

    def has_reduced(self, parameter: Tensor) -> bool:
        """Whether the last backward of this stage's model reduced the gradient of ``parameter``."""
        return id(parameter) in self._reduced

    def on_stepped(self) -> None:
        """``step()`` has updated everything."""
        self._awaits_step, self._clears, self._saw_forward = False, True, False

    def __repr__(self) -> str:
        parts = [self._optimizer_name, "deferred" if self.is_deferred else "interleaved"]
        if self._only is not None:
            parts.append(f"{len(self._only)} parameters")
        if self.clipping is not None:
            parts.append(f"clip_grad_norm={self.clipping.max_norm}")
        return f"Step({', '.join(parts)})"


def _refuse_step(optimizer: Optimizer, args: object, kwargs: object) -> None:
    raise TrainingLoopError(
        f"this {type(optimizer).__name__} is stepped inside backward, and step() would apply the gradients again: "
        "leave the call out, or give OverlappedOptimizer(optimizer) to Step and call that one's step() "
        "(with GradScaler, together with deferred=True)"
    )
