"""The wires of one sharded update."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from overlap.errors import ConfigurationError
from overlap.hooks import Stage, StageContext
from overlap.hooks.wires import Wire
from overlap.hooks.wires.memory import WireMemory
from overlap.optim.zero.exchange import Exchange
from overlap.optim.zero.optimizer import ZeroRedundancyOptimizer
from overlap.optim.zero.reduce_scatter import ReduceScatter
from overlap.optim.zero.wire_exchange import WireExchange
from overlap.optim.zero.wire_options import check_real

__all__ = ["ShardedWires"]


class ShardedWires:
    """How gradients and parameters of one stage are sent, and what the stage keeps of that on its rank.

    Args:
        stage: which messages name.
        zero: the optimizer.
        reduce_wire: sends gradients to their owners; ``None``: they travel as they are.
        gather_wire: sends differences of parameters; ``None``: parameters travel as they are.
        error_feedback: add what ``reduce_wire`` left out of a step's gradients to the next step's.
    """

    def __init__(
        self,
        stage: Stage,
        zero: ZeroRedundancyOptimizer,
        *,
        reduce_wire: Wire | None,
        gather_wire: Wire | None,
        error_feedback: bool,
    ) -> None:
        self._stage = stage
        self._zero = zero
        self._reduce_wire, self._error_feedback = reduce_wire, error_feedback
        self.gathers_differences = gather_wire is not None and zero.world_size > 1
        """Whether the gather writes the parameters on the ranks that own them, too."""
        wires = [wire for wire in (reduce_wire, gather_wire) if wire is not None]
        self.memory = WireMemory(stage, error_feedback=error_feedback, wires=wires) if wires else None
        """``None`` where there are no wires."""
        self.exchange: Exchange = zero.exchange
        """How ranks exchange gradients and parameters."""
        if self.memory is not None:
            gathers = gather_wire if self.gathers_differences else None
            self.exchange = WireExchange.beside(
                zero.exchange, reduce_wire=reduce_wire, gather_wire=gathers, memory=self.memory
            )

    def check_reducer(self, reducer: Stage | None) -> None:
        """Raises: ConfigurationError: ``reduce_wire`` is to reduce, but ``reducer`` before the stage has."""
        is_own = isinstance(reducer, ReduceScatter) and reducer.exchange is self.exchange
        if self._reduce_wire is not None and reducer is not None and not is_own:
            raise ConfigurationError(
                f"{self._stage!r} reduces by itself, so that {self._reduce_wire!r} can carry gradients to their "
                f"owners, but {reducer!r} before it has reduced them: leave that out, or use ZeroStep without "
                "reduce_wire"
            )

    def check_named(self, context: StageContext) -> None:
        """Raises: ConfigurationError: errors are to be remembered by the parameters' names, which are not known."""
        if self._error_feedback and context.names is None:
            raise ConfigurationError(
                f"{self._stage!r} keeps errors by the parameters' names, which are not known to a hook registered "
                "with ddp.register_comm_hook: use chain(...).register(ddp), or error_feedback=False"
            )

    def attach(self, context: StageContext) -> None:
        """Serve the model of ``context``.

        Raises:
            ConfigurationError: what was loaded is another rank's or another model's.
            UnsupportedError: a parameter is complex.
        """
        if self.memory is not None:
            self.memory.attach(context)
            self._prepare(context.names)

    def detach(self) -> None:
        """Stop serving the model; what is remembered stays."""
        if self.memory is not None:
            self.memory.detach()

    def begin(self, names: Mapping[Tensor, str] | None) -> None:
        """A pass begins; ``names`` are the model's parameters. Raises: UnsupportedError: one is complex."""
        if self.memory is not None:
            self.memory.begin()
            self._prepare(names)

    def settle(self, *, failed: bool) -> None:
        """The pass is over."""
        if self.memory is not None:
            self.memory.settle(failed=failed)

    def _prepare(self, names: Mapping[Tensor, str] | None) -> None:
        """Take note of the parameters that travel through wires, those added since, too."""
        shards = [shard for shard in self._zero.shards.values() if names is None or shard.parameter in names]
        check_real(shards)
        if self.gathers_differences:
            for shard in shards:
                shard.keep_true()
