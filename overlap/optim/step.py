"""The update of replicated parameters: every rank makes the whole of it. See [Note: an update]."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import compress

import torch
from torch import Tensor
from torch.optim import Optimizer

from overlap._torch import classes
from overlap._torch.optimizer import pre_hooks, runs_step_hooks, unwrapped
from overlap.errors import ConfigurationError, RegistrationError, TrainingLoopError, UnsupportedError
from overlap.hooks import Bucket, StageContext
from overlap.optim.declared import check_nothing_before, check_one_eps, check_unit
from overlap.optim.gradients import and_others
from overlap.optim.lifecycle import Form, Phase
from overlap.optim.optimizer import OverlappedOptimizer
from overlap.optim.stepper import StepGuard
from overlap.optim.torch_names import FunctionalOptimizer
from overlap.optim.update import BucketLayout, Update

_DEFERRED = "Step(optimizer, deferred=True)"
_DEFERRED_AUTOMATIC = f"an OverlappedOptimizer and {_DEFERRED}"
_WHOLE = "Step(OverlappedOptimizer(optimizer), deferred=True)"


@dataclass(frozen=True, eq=False)
class StepLayout(BucketLayout):
    """As :class:`BucketLayout`."""

    places: list[int] | None
    """Of the parameters that are updated in the bucket; ``None``: all are."""


class Step(Update[StepLayout]):
    """Updates parameters with the averaged gradients of their bucket, on every rank alike.

    *Interleaved* (default): the parameters of a bucket that is reduced are updated when the next bucket arrives, while
    backward still computes more. *Deferred*: all are updated at once, when all gradients are there, as ``GradScaler``,
    edits of ``.grad`` by the loop, step pre-hooks and optimizers that are neither known nor declared (see
    :func:`overlap.declare`) need.

    Given an :class:`OverlappedOptimizer`, the loop calls its ``step()``: after each backward where updates are
    interleaved, after one or more where they are deferred, and made there. Given a plain or a functional optimizer, the
    stage does everything in backward (a deferred update with the last bucket), and the loop calls no ``step()``.

    After backward ``.grad`` holds the averaged gradient; it is cleared before the model's next forward. Where the
    update was made in backward, it is read-only until ``step()`` (in the automatic form until the next forward): an
    edit, such as a clip, raises ``TrainingLoopError`` at its line.

    Args:
        optimizer: may have parameters that the model does not have; parameters of the model that it does not have keep
            their averaged ``.grad``. Of Accelerate's and Lightning's wrappers the
            optimizer inside is taken.
        deferred: update all parameters at once.
        release_gradients: free a bucket's memory as soon as it is updated, and allocate it again for its next gradient,
            so that gradients hardly add to the peak. ``.grad`` cannot be read after backward. Needs
            ``DistributedDataParallel(..., gradient_as_bucket_view=True)``; see ``docs/memory.md``.

    Communication: none; where DDP looks for unused parameters, one all-reduce of a byte a parameter, unless ``step()``
    makes the update outside of a ``Join``: a parameter that no rank used must not be updated (weight decay and momentum
    would move it).

    Raises:
        ConfigurationError: an argument is out of range, or (at registration) optimizer and model do not fit.
        UnsupportedError: at registration, if the update is made in backward and the optimizer is neither known nor
            declared, or something must run before its step; in ``backward``, if buckets leave different values in its
            groups.
        RegistrationError: another model has a stage that updates the same parameters with this optimizer.
        CollectiveError: at registration, the ranks have other hyperparameters or groups.
        TrainingLoopError: in ``backward``, when an interleaved update has not been followed by ``step()``; and as
            described in ``docs/guides/loop.md``.

    >>> layer = torch.nn.Linear(2, 2)
    >>> Step(torch.optim.SGD(layer.parameters(), lr=0.1), deferred=True)
    Step(SGD, deferred)
    """

    def __init__(
        self,
        optimizer: Optimizer | FunctionalOptimizer,
        *,
        deferred: bool | None = None,
        release_gradients: bool = False,
    ) -> None:
        optimizer = unwrapped(optimizer)
        if isinstance(optimizer, classes.ZeroRedundancyOptimizer):
            raise ConfigurationError(
                "Step updates on every rank alike; for a ZeroRedundancyOptimizer use ZeroStep(zero)"
            )
        self._functional = optimizer if isinstance(optimizer, FunctionalOptimizer) else None
        plain = optimizer.optimizer if isinstance(optimizer, FunctionalOptimizer) else optimizer
        automatic = not isinstance(plain, OverlappedOptimizer)
        self.optimizer: OverlappedOptimizer
        deferred_form = _DEFERRED_AUTOMATIC if automatic else _DEFERRED
        super().__init__(
            plain if isinstance(plain, OverlappedOptimizer) else OverlappedOptimizer(plain),
            Form(
                "optimizer.step()",
                deferred_form,
                edits=deferred_form,
                skip="stage.skip_update()" if automatic else "optimizer.skip_update()",
                is_automatic=automatic,
            ),
            deferred=deferred,
            release_gradients=release_gradients,
        )
        self._guard: torch.utils.hooks.RemovableHandle | None = None

    # The primitives of an update.

    def owns_gradient_of(self, parameter: Tensor) -> bool:
        return self.optimizer.stepper.covers(parameter)

    def make_layout(self, bucket: Bucket) -> StepLayout:
        if self._adopts_parameters and not all(map(self.optimizer.stepper.covers, bucket.parameters)):
            self._adopt(bucket.parameters)
        places = [place for place, p in enumerate(bucket.parameters) if self.optimizer.stepper.covers(p)]
        own = [bucket.parameters[place] for place in places]
        is_all = len(own) == len(bucket.parameters)
        return StepLayout(bucket.parameters, own, {id(p): p for p in own}, None if is_all else places)

    def to_update(
        self, bucket: Bucket, layout: StepLayout, used: list[bool] | None
    ) -> tuple[Sequence[Tensor], list[Tensor]]:
        parameters, gradients = layout.parameters, list(bucket.gradients)
        if layout.places is not None:
            gradients = [gradients[place] for place in layout.places]
        if used is not None:
            parameters, gradients = list(compress(parameters, used)), list(compress(gradients, used))
        return parameters, gradients

    def applying(self, parameters: Sequence[Tensor], gradients: list[Tensor]) -> Callable[[], None]:
        def apply() -> None:
            verdict = self.lifecycle.verdict
            if verdict.found_inf is None:
                self.optimizer.stepper.step(parameters, gradients)
            elif not verdict.skips(self.stepped):
                with verdict.passed_to(self.stepped):
                    self.optimizer.stepper.step(parameters, gradients)
            self.lifecycle.gradients.note_applied(parameters)

        return apply

    @torch.no_grad()
    def apply_held(self, held: dict[Tensor, Tensor]) -> None:
        self.optimizer._apply(list(held), list(held.values()), self.lifecycle.verdict, {})
        # Fused kernels do not; a weight that a later node of backward still needs is then autograd's own error.
        torch.autograd.graph.increment_version(list(held))

    def begin(self) -> None:
        optimizer = self.optimizer
        if not self.form.is_deferred:
            check_nothing_before(optimizer.optimizer)
        for other in optimizer.updates:
            if other is not self and other.lifecycle.phase in (Phase.BACKWARD, Phase.APPLIED):
                optimizer.stepper.refresh()  # The backward of another model is a part of the same step.
                return
        optimizer.stepper.begin()

    def conclude(self) -> None:
        """Raises: TrainingLoopError: a parameter has a gradient but came in no bucket, such as one added since."""
        if not self.form.is_automatic or self.lifecycle.is_replay:
            return
        reduced = self.lifecycle.gradients.reduced
        every = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        if left := [p for p in every if p.grad is not None and id(p) not in reduced]:
            raise TrainingLoopError(
                f"{len(left)} parameters of the {self.optimizer_name} have gradients but are in no bucket of the "
                "model, so backward never updates them: freeze or unfreeze parameters of the model before "
                "DistributedDataParallel is made; for other parameters give OverlappedOptimizer(optimizer) to Step and "
                "call its step()"
            )

    def end_step(self) -> None:
        self.optimizer.end_step(self)

    # Registration.

    @property
    def updated(self) -> Sequence[Tensor]:
        return [p for group in self.optimizer.param_groups for p in group["params"] if self.owns_gradient_of(p)]

    @property
    def _adopts_parameters(self) -> bool:
        """Whether the functional optimizer was given no parameters, and takes those that come."""
        return self._functional is not None and self._functional.adopts

    def _adopt(self, parameters: Iterable[Tensor]) -> None:
        assert self._functional is not None, "only these adopt parameters"
        self._functional.adopt(parameters)
        self.optimizer.stepper.refresh()

    def attach(self, context: StageContext) -> None:
        optimizer = self.optimizer
        if not self._adopts_parameters and context.names is not None:
            self._check_coverage(context.names)
        for other in optimizer.updates:
            if other.form.is_deferred != self.form.is_deferred:
                raise ConfigurationError(f"one optimizer is updated in one way, but has {other!r} and {self!r}")
            if (other.may_skip or self.may_skip) and self.form.leads_to is not Phase.REDUCED:
                raise UnsupportedError(
                    f"one optimizer serves two models, and where gradients of one are not finite {self!r} may have "
                    "updated the other already: use Step(optimizer, deferred=True) for both"
                )
        _check_one_model(self.stepped, context)
        if self.form.leads_to is not Phase.REDUCED:
            # An update in backward need not equal one whole step. See [Note: known or declared].
            check_unit(self.stepped, instead=_WHOLE)
            if not self.form.is_deferred:
                check_nothing_before(self.stepped)
                check_one_eps(self.stepped, instead=_WHOLE)
        super().attach(context)
        if self._adopts_parameters and context.names is not None:
            # In the model's order, which is that of its state, and not as buckets bring them.
            self._adopt(parameter for parameter in context.names if parameter.requires_grad)
        optimizer.updates.append(self)
        optimizer.was_registered = True
        if self._functional is None and runs_step_hooks(self.stepped):  # Some wrappers do not.
            guard = StepGuard(self, through=None if self.form.is_automatic else optimizer)
            self._guard = self.stepped.register_step_pre_hook(guard)

    def _check_coverage(self, names: Mapping[Tensor, str]) -> None:
        """Raises: ConfigurationError: the optimizer has no parameter of the model, or some that nothing updates."""
        self.optimizer.stepper.refresh()
        every = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        if not any(parameter in names for parameter in every):
            raise ConfigurationError(
                f"the {self.optimizer_name} has no parameter of this model; build it from ddp.parameters()"
            )
        outside = [parameter for parameter in every if parameter not in names and parameter.requires_grad]
        if outside and self.form.is_automatic:
            raise ConfigurationError(
                f"{len(outside)} parameters of the {self.optimizer_name} are not in this model, so backward would "
                "never update them; give OverlappedOptimizer(optimizer) to Step and call its step()"
            )

    def detach(self) -> None:
        super().detach()
        if self in self.optimizer.updates:
            self.optimizer.updates.remove(self)
        if self._guard is not None:
            self._guard.remove()

    def __repr__(self) -> str:
        parts = [self.optimizer_name, "deferred" if self.form.is_deferred else "interleaved"]
        if self.releases_gradients:
            parts.append("release_gradients=True")
        return f"Step({', '.join(parts)})"


def _check_one_model(optimizer: Optimizer, context: StageContext) -> None:
    """Raises: RegistrationError: a stage updates some of the same parameters for another DDP model."""
    names = context.names or {}
    for guard in [hook for hook in pre_hooks(optimizer).values() if isinstance(hook, StepGuard)]:
        other = guard.stage
        if other is None or other.lifecycle.context.ddp is context.ddp:
            continue
        shared = [parameter for parameter in other.lifecycle.names if parameter in names]
        if shared and not guard.detach_if_dead():
            raise RegistrationError(
                f"{names[shared[0]]}{and_others(shared, 'other parameter')} is updated by {other!r} already, of "
                "another DistributedDataParallel of the same module: first call .remove() on what register returned "
                "for that"
            )
