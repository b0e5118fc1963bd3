"""PowerSGD under the names of ``torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook``."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
from torch import Tensor

from overlap._checks import check_flag, check_group, check_number, check_whole_number, type_name
from overlap._torch import classes
from overlap.errors import ConfigurationError
from overlap.hooks.adapters import StageHook
from overlap.hooks.powersgd.memory import Memory, redistribute
from overlap.hooks.powersgd.stage import PowerSGD
from overlap.hooks.reducers import OnGroup

_logger = logging.getLogger(__name__)


class PowerSGDState(Memory, classes.PowerSGDState):
    """Options and memory of :func:`powerSGD_hook`, for one model.

    The arguments are PyTorch's and mean the same; :class:`PowerSGD` has more. ``start_powerSGD_iter`` may be 0 or more,
    since memory does not depend on buckets. ``orthogonalization_epsilon`` and ``batch_tensors_with_same_shape`` change
    nothing: bases are always whole, without a division by zero, and equal shapes are batched wherever that is faster.
    Pickling leaves the process group out (set it again, or leave it ``None`` for the model's own); load the pickle on
    the same rank of the same number of ranks.

    Raises:
        ConfigurationError: an argument is out of range.

    >>> PowerSGDState(None, matrix_approximation_rank=4).compression_stats()
    (0.0, 0, 0)
    """

    def __init__(
        self,
        process_group: dist.ProcessGroup | None,
        matrix_approximation_rank: int = 1,
        start_powerSGD_iter: int = 1_000,  # noqa: N803 (PyTorch's name)
        min_compression_rate: float = 2,
        use_error_feedback: bool = True,
        warm_start: bool = True,
        orthogonalization_epsilon: float = 0,
        random_seed: int = 0,
        compression_stats_logging_frequency: int = 10_000,
        batch_tensors_with_same_shape: bool = False,
    ) -> None:
        super().__init__(self, wire=None)
        self.process_group = check_group("process_group", process_group)
        self.matrix_approximation_rank = matrix_approximation_rank
        self.start_powerSGD_iter = start_powerSGD_iter
        self.min_compression_rate = min_compression_rate
        self.use_error_feedback = use_error_feedback
        self.warm_start = warm_start
        self.orthogonalization_epsilon = check_number("orthogonalization_epsilon", orthogonalization_epsilon)
        self.random_seed = random_seed
        frequency = check_whole_number(
            "compression_stats_logging_frequency", compression_stats_logging_frequency, least=0
        )
        self.compression_stats_logging_frequency = max(1, frequency)
        self.batch_tensors_with_same_shape = check_flag("batch_tensors_with_same_shape", batch_tensors_with_same_shape)
        _HookPowerSGD(self)  # Raises here, and not in the first backward.

    @property
    def iter(self) -> int:
        """Backward passes so far."""
        return self.counts["steps"]

    @property
    def error_dict(self) -> dict[str, Tensor]:
        """This rank's residuals, by parameter."""
        return self.values()

    @property
    def total_numel_before_compression(self) -> int:
        return self.counts["before"]

    @property
    def total_numel_after_compression(self) -> int:
        return self.counts["after"]

    redistribute = staticmethod(redistribute)

    def __getstate__(self) -> dict[str, Any]:
        if self.process_group is not None:
            _logger.warning("PowerSGDState: the process group is not pickled; set process_group after loading")
        options = {name: getattr(self, name) for name in inspect.signature(PowerSGDState).parameters}
        return {**options, "process_group": None, "memory": self.state_dict()}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        memory, options = state["memory"], {name: value for name, value in state.items() if name != "memory"}
        self.__init__(**options)  # type: ignore[misc]
        self.load_state_dict(memory)

    def maybe_increase_iter(self, bucket: Any) -> None:
        """Does nothing: the stage counts backward passes."""


class _HookPowerSGD(PowerSGD):
    """The stage of a state."""

    def __init__(self, state: PowerSGDState) -> None:
        super().__init__(
            rank=state.matrix_approximation_rank,
            start_step=state.start_powerSGD_iter,
            min_compression_rate=state.min_compression_rate,
            error_feedback=state.use_error_feedback,
            warm_start=state.warm_start,
            seed=state.random_seed,
        )
        self._memory = state
        self._log_every_steps = state.compression_stats_logging_frequency

    def after_backward(self, *, failed: bool) -> str | None:
        rate, before, after = self.compression_stats()
        step = self._memory.counts["steps"]
        if after and not failed and step % self._log_every_steps == 0:
            _logger.info("step %d: %d elements sent as %d, %.1f times fewer", step, before, after, rate)
        return super().after_backward(failed=failed)


def _group_of(state: Any) -> dist.ProcessGroup | None:
    if isinstance(state, PowerSGDState):
        return state.process_group
    raise ConfigurationError(f"the state of powerSGD_hook is an overlap.PowerSGDState, got {type_name(state)}")


powerSGD_hook = StageHook(  # noqa: N816 (PyTorch's name)
    lambda state: OnGroup.of(_group_of(state), _HookPowerSGD(state)),
    "powerSGD_hook",
    group_of=_group_of,
    doc="""Reduces each gradient as two factors of low rank: :class:`PowerSGD`, with a :class:`PowerSGDState`.

    >>> state = PowerSGDState(process_group=None, matrix_approximation_rank=1, start_powerSGD_iter=1000)
    >>> registration = overlap.register(ddp, powerSGD_hook, state)
    >>> loss_fn(ddp(x), y).backward()
    """,
    module=__name__,
)
