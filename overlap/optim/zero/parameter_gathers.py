"""The gathers of a pass that do not run bucket by bucket in its backward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from overlap.hooks import StageContext
from overlap.optim.lifecycle import UpdateLifecycle
from overlap.optim.zero.exchange import Exchange, Gather
from overlap.optim.zero.optimizer import ZeroRedundancyOptimizer
from overlap.optim.zero.prefetch import ParameterPrefetch

__all__ = ["ParameterGathers"]


class ParameterGathers:
    """Gathers the new parameters of a pass at once: when backward is over, in ``step()``, or in the next forward.

    Args:
        zero: the optimizer.
        exchange: how ranks exchange parameters.
        lifecycle: of the update.
        in_forward: whether they run during the next forward.
        are_differences: whether differences travel, and not parameters.
    """

    def __init__(
        self,
        zero: ZeroRedundancyOptimizer,
        exchange: Exchange,
        lifecycle: UpdateLifecycle,
        *,
        in_forward: bool,
        are_differences: bool,
    ) -> None:
        self._zero = zero
        self._exchange = exchange
        self._lifecycle = lifecycle
        self._are_differences = are_differences
        self._prefetch = ParameterPrefetch() if in_forward else None

    @property
    def are_in_forward(self) -> bool:
        """Whether they run during the next forward."""
        return self._prefetch is not None

    def attach(self, context: StageContext) -> None:
        """Serve the model of ``context``. Raises: as :meth:`ParameterPrefetch.attach`."""
        if self._prefetch is not None:
            self._prefetch.attach(context)

    def detach(self) -> None:
        """Stop serving the model; waits for all gathers."""
        if self._prefetch is not None:
            self._prefetch.detach()

    def run(self, gathers: Sequence[Gather], context: StageContext | None) -> None:
        """Outside of a backward: bring what each rank owns to all, the first layers' parameters first.

        Args:
            gathers: of each bucket, in their order.
            context: where the stage is registered.
        """
        prefetch = self._prefetch or ParameterPrefetch()
        assert context is not None, "gathers run while the stage is attached"
        gathers = list(reversed(gathers))  # The last bucket has the first layers, which the next forward needs first.
        if self._prefetch is not None and not self._are_differences:
            gathers = [replace(gather, shards=part) for gather in gathers for part in gather.shards.parts]
        prefetch.begin(context, gathers, self._exchange)
        # When all have joined DDP brings parameters to all. A replay must not wait inside of DDP's shadow: its hook
        # does.
        if self._prefetch is None or (self._zero.is_joining and not self._lifecycle.is_replay):
            prefetch.wait()

    def wait(self) -> None:
        """Wait for gathers that run during the next forward."""
        if self._prefetch is not None:
            self._prefetch.wait()
