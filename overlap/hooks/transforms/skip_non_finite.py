"""Skipping steps whose gradients are not finite."""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist
from torch import Tensor

from overlap._torch.device import hold
from overlap._torch.foreach import LargestElements
from overlap.errors import ConfigurationError, UnsupportedError
from overlap.hooks.bucket import Bucket
from overlap.hooks.collectives import Operation, all_reduce
from overlap.hooks.stage import Role, Stage, StageContext, UpdateStage, updates_of
from overlap.hooks.transforms.transform import WholePassTransform


class SkipNonFinite(WholePassTransform):
    """Leaves out a whole step, on every rank, if an element of the mean gradients is infinite or NaN.

    This is the loop ``if all(p.grad.isfinite().all() for p in ddp.parameters()): optimizer.step()``, bit for bit: the
    updates after it in the chain change no parameter, no state and no count of steps, whether they are made in backward
    or in ``step()``, which the loop calls as always. Gradients stay as they are until the next forward clears them. It
    waits for all buckets, so updates run when backward has computed everything.

    On the CPU the update is not made, and step hooks of ``Step``'s optimizer do not run (those of a
    ``ZeroRedundancyOptimizer`` do). On an accelerator the host does not wait for the answer: the optimizer gets
    ``found_inf``, as from ``GradScaler``, which needs ``fused=True`` (and SGD without momentum); step hooks run in any
    case. Other transforms, also those after the update, run in every pass. Error feedback of wires does not change;
    ``PowerSGD`` keeps the residuals of matrices that are not finite, but counts the others as delivered.

    Communication: one all-reduce of a number per backward. Changes: nothing.

    Raises:
        ConfigurationError: at registration, if it does not stand between the reducer and an update.
        UnsupportedError: at registration, if an update cannot be left out: an optimizer on an accelerator that is not
            fused, or an interleaved update of an optimizer that serves several models.

    >>> SkipNonFinite()
    SkipNonFinite()
    """

    needs_mean = True
    edits_gradients = False

    def __init__(self) -> None:
        super().__init__()
        self._updates: Sequence[UpdateStage] = []
        self._largest = LargestElements()
        self._found_inf: Tensor | None = None

    @property
    def skipped(self) -> Tensor | None:
        """1.0 if the last step was left out, else 0.0, a 0-dimensional tensor; ``None`` before the first pass."""
        return None if self._found_inf is None else hold(self._found_inf)

    def check_position(self, before: Sequence[Stage], after: Sequence[Stage]) -> None:
        super().check_position(before, after)
        updates = [stage for stage in after if stage.role is Role.UPDATE]
        self._updates = updates_of(updates)
        if self.place is not Role.REDUCER or not updates:
            raise ConfigurationError(
                f"{self!r} looks at the mean and has the update after it left out, so it stands between them: "
                f"chain(AllReduce(), {self!r}, Step(optimizer)); where the loop steps a plain optimizer, give that to "
                "Step"
            )
        if other := [stage for stage in updates if stage not in self._updates]:
            raise UnsupportedError(
                f"{other[0]!r} cannot leave out the update of a pass; use Step(optimizer) or ZeroStep(zero)"
            )

    def attach(self, context: StageContext) -> None:
        for update in self._updates:
            update.check_skippable(context)
        super().attach(context)

    def detach(self) -> None:
        super().detach()
        self._updates = []

    def before_backward(self, *, is_replay: bool) -> None:
        super().before_backward(is_replay=is_replay)
        self._largest.clear()

    def look(self, bucket: Bucket) -> None:
        self._largest.update(self.inputs(bucket))

    def act(self, buckets: Sequence[Bucket]) -> Operation:
        self._found_inf = self._largest.found_inf(buckets[0].buffer.device)
        return all_reduce(self._found_inf, op=dist.ReduceOp.MAX, group=buckets[0].group)

    def finish(self) -> None:
        assert self._found_inf is not None, "act has looked"
        for update in self._updates:
            update.skip_if(self._found_inf)

    def __repr__(self) -> str:
        return "SkipNonFinite()"
