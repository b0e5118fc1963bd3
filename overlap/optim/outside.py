"""Gradients of parameters that are not in any registered model: ``step()`` applies them, and a forward clears them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from torch import Tensor

from overlap.errors import TrainingLoopError
from overlap.optim.pass_gradients import PassGradients

__all__ = ["OutsideGradients"]


class OutsideGradients(PassGradients):
    """What ``step()`` has applied of parameters outside of all models, until the next forward of one of these."""

    def __init__(self) -> None:
        super().__init__(clears=lambda parameter: True)

    def note_stepped(self, updated: Iterable[Tensor], models: Sequence[Mapping[Tensor, str]]) -> None:
        """``step()`` has updated these; ``models`` are the parameters of each, empty where no forward is seen."""
        if models and all(models):
            self.note_applied(p for p in updated if not any(p in of_model for of_model in models))
            if self.applied:
                self.note_values(are_there=True)

    def refuse_edits(self) -> None:
        """Raises: TrainingLoopError: the loop changed a gradient in place after it had been applied."""
        self.release_new_tensors()
        if self.edited(keeps_new_tensors=True, ignores_zeros=True, samples=False):
            self.accept_values()
            raise TrainingLoopError(
                "the gradient of a parameter outside of the model was changed after optimizer.step() had applied it: "
                "change it before, or call zero_grad() first"
            )

    def on_forward(self) -> None:
        """A forward of a registered model begins. Raises: TrainingLoopError: as :meth:`refuse_edits`."""
        self.refuse_edits()
        self.clear_applied()
