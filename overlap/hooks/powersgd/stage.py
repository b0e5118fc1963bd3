"""The stage that reduces gradients as factors of low rank, and its options."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch

from overlap._checks import as_number, check_flag, check_whole_number, told
from overlap.errors import ConfigurationError
from overlap.hooks.allreduce import AllReduce
from overlap.hooks.bucket import Bucket
from overlap.hooks.powersgd.algorithm import Bases, PowerIteration, WiredMean
from overlap.hooks.powersgd.layout import BucketLayout, Dtypes, PerParameter
from overlap.hooks.powersgd.memory import Memory, redistribute
from overlap.hooks.stage import Stage, StageContext
from overlap.hooks.wires import Wire

__all__ = ["PowerSGD", "PowerSGDConfig"]

_HALF = (torch.float16, torch.bfloat16)
# torch does not add in narrower ones.
_ERROR_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


@dataclass(frozen=True, kw_only=True)
class PowerSGDConfig:
    """The options of :class:`PowerSGD`, which describes them; checked, and the same on every rank."""

    rank: int = 2
    start_step: int = 0
    min_compression_rate: float = 2.0
    error_feedback: bool = True
    warm_start: bool = True
    alternate: bool = False
    error_dtype: torch.dtype | None = None
    wire: Wire | None = None
    seed: int = 0
    epsilon: float = 0.0
    log_every_steps: int = 10_000

    def __post_init__(self) -> None:
        _check_rank(self.rank)
        check_whole_number("start_step", self.start_step, least=0)
        check_whole_number("seed", self.seed, least=0)
        check_whole_number("log_every_steps", self.log_every_steps, least=1)
        for flag in ("error_feedback", "warm_start", "alternate"):
            check_flag(flag, getattr(self, flag))
        for number in ("min_compression_rate", "epsilon"):
            _check_number(number, getattr(self, number))
        if self.wire is not None and not isinstance(self.wire, Wire):
            raise ConfigurationError(f"wire must be a Wire such as Int8(), or None, got {told(self.wire)}")
        dtype = self.error_dtype
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype in _ERROR_DTYPES):
            listed = ", ".join(map(str, _ERROR_DTYPES))
            raise ConfigurationError(f"error_dtype must be one of {listed} or None, got {told(dtype)}")
        if self.alternate and not self.warm_start:
            raise ConfigurationError(
                "alternate=True computes each factor from the one of the step before, which warm_start=False "
                "throws away: use only one of the two"
            )

    def __str__(self) -> str:
        """The options as they would be typed, without defaults."""
        parts = [f"rank={self.rank!r}"]
        for option in fields(self):
            value = getattr(self, option.name)
            if option.name not in ("rank", "log_every_steps") and value != option.default:
                parts.append(f"{option.name}={value!r}")
        return ", ".join(parts)

    def dtypes(self, dtype: torch.dtype) -> Dtypes:
        """For a bucket of ``dtype``."""
        compute = torch.float32 if dtype in _HALF else dtype
        return Dtypes(compute, (self.error_dtype or dtype) if self.error_feedback else None)


def _check_rank(rank: object) -> None:
    if callable(rank) or isinstance(rank, Mapping):
        raise ConfigurationError(
            f"rank is {told(rank)}: give a whole number such as 2, the same in all steps; for another rank of some "
            'parameters write route({"*.embedding.weight": PowerSGD(rank=8), "*": PowerSGD(rank=2)})'
        )
    check_whole_number("rank", rank, least=1)


def _check_number(name: str, value: object) -> None:
    number = as_number(value)
    # The comparison is false for NaN too.
    if number is None or not 0 <= number < float("inf"):
        raise ConfigurationError(f"{name} must be a number of at least 0, got {told(value)}")


class PowerSGD(Stage):
    """The mean of the gradients over ranks, approximately: sent as factors of low rank, 10 to 200 times less.

    Each gradient of two or more dimensions, as a matrix ``n x m``, becomes two factors ``n x rank`` and ``m x rank``
    where that is at least ``min_compression_rate`` times less; the others, vectors above all, are reduced exactly. What
    the factors leave out stays on its rank and is added to the next gradient, so it arrives later.

    Memory is kept by parameter name, so nothing depends on how DDP cuts its buckets, and compression can begin at once.
    A gradient with a non-finite element comes out as NaN on every rank and leaves the memory as it was.

    Args:
        rank: columns of the factors; 1 to 4 in most cases, up to 32 for language models. For another rank of some
            parameters: ``route({"*.embedding.weight": PowerSGD(rank=8), "*": PowerSGD(rank=2)})``.
        start_step: backward passes that are reduced exactly before compression begins.
        min_compression_rate: compress only what gets at least this many times smaller; 0 for every matrix.
        error_feedback: keep what was left out and add it to the next gradient.
        warm_start: start from the factors of the step before.
        alternate: send left and right factors in turn, one per step: half the data, one collective instead of two.
        error_dtype: dtype of what is kept, ``torch.bfloat16`` for half the memory; ``None``: the gradient's.
        wire: how factors travel, such as ``Int8()``; what it leaves out of them stays in the residual. ``None``: in the
            gradient's dtype. Uncompressed gradients stay exact, by an all-reduce of their own.
        seed: of the random directions from which factors start, the same on every rank.
        epsilon: added to the length that each direction of a basis is divided by.
        log_every_steps: steps between two lines of statistics in the log.

    Communication: per bucket an all-reduce of all left factors and the uncompressed gradients, then one of all right
    factors; with ``alternate`` only one, of either factors and the uncompressed gradients; in the bucket's dtype. Where
    nothing is compressed, one all-reduce of the bucket. With ``wire``, in place of an all-reduce of factors, a send and
    a receive with every other rank and an all-gather. Changes: ``bucket.buffer``. Keeps: one residual of the gradient's
    size and one factor per compressed parameter. Workspace: at most the bucket that is being compressed.

    Raises:
        ConfigurationError: an option is out of range, or a loaded state does not fit the model.

    T. Vogels, S. P. Karimireddy, M. Jaggi: PowerSGD, NeurIPS 2019, arXiv 1905.13727. ``alternate``: L. Zhang et al.:
    ACP-SGD, ICDCS 2023.

    >>> PowerSGD(rank=4, start_step=1000)
    PowerSGD(rank=4, start_step=1000)
    """

    def __init__(
        self,
        *,
        rank: int = 2,
        start_step: int = 0,
        min_compression_rate: float = 2.0,
        error_feedback: bool = True,
        warm_start: bool = True,
        alternate: bool = False,
        error_dtype: torch.dtype | None = None,
        wire: Wire | None = None,
        seed: int = 0,
        epsilon: float = 0.0,
        log_every_steps: int = 10_000,
    ) -> None:
        config = PowerSGDConfig(
            rank=rank,
            start_step=start_step,
            min_compression_rate=min_compression_rate,
            error_feedback=error_feedback,
            warm_start=warm_start,
            alternate=alternate,
            error_dtype=error_dtype,
            wire=wire,
            seed=seed,
            epsilon=epsilon,
            log_every_steps=log_every_steps,
        )
        self._set_up(config, Memory(), PerParameter())

    def _set_up(self, config: PowerSGDConfig, memory: Memory, form: PerParameter) -> None:
        self.config = config
        self._memory = memory
        self._form = form
        self._bases = Bases(seed=config.seed, warm_start=config.warm_start)
        self._all_reduce = AllReduce()
        self._layouts: dict[tuple[object, ...], BucketLayout] = {}
        self._this_pass: list[BucketLayout] = []
        self._last_pass: list[BucketLayout] = []

    def attach(self, context: StageContext) -> None:
        self._memory.attach(context)
        # They are of another model, or of passes that not every rank has seen, and ranks compare signatures next.
        self._last_pass.clear()

    def detach(self) -> None:
        self._memory.detach()

    def before_backward(self, *, is_replay: bool) -> None:
        # Counted here, so that ranks agree on it even if one of them fails.
        self._memory.steps += 1
        self._this_pass.clear()

    def after_backward(self, *, failed: bool) -> str | None:
        self._last_pass = self._this_pass.copy()
        self._this_pass.clear()
        if failed:
            # Ranks may have stopped at different buckets, and bases that differ among them give different outputs.
            if self.config.alternate:
                self._memory.forget_factors()
            return f"{self!r}: what compression had left out of this pass's gradients may be lost"
        # Empty if a wrapping stage reduced without compression.
        if self._last_pass:
            self._memory.check_claimed()
            self._memory.statistics.report(self._memory.steps - 1, self.config.log_every_steps)
        return None

    @property
    def _step(self) -> int:
        """Of the current pass, counted from the first compressed one."""
        return self._memory.steps - 1 - self.config.start_step

    async def __call__(self, bucket: Bucket) -> None:
        # Also before compression begins, because parameters without names are numbered in the first pass.
        keys = self._memory.keys_of(bucket)
        # A buffer of complex gradients holds them as pairs of real numbers.
        is_real = bucket.buffer.is_floating_point() and not bucket.parameters[0].is_complex()
        if self._step < 0 or not is_real or bucket.buffer.numel() == 0:
            await self._all_reduce(bucket)
            return
        layout = self._layout_of(keys, bucket)
        self._this_pass.append(layout)
        self._memory.release(bucket, layout.exact, keys)
        sent_numel = await self._reduce(bucket, layout, keys)
        self._memory.settle_released(bucket, layout.exact, keys)
        self._memory.statistics.count(layout.numel, sent_numel)

    def _layout_of(self, keys: tuple[str, ...], bucket: Bucket) -> BucketLayout:
        key = (keys, bucket.buffer.numel(), bucket.buffer.device)
        if (layout := self._layouts.get(key)) is None:
            layout = self._layouts[key] = self._form.lay_out(
                bucket, rank=self.config.rank, min_compression_rate=self.config.min_compression_rate
            )
        return layout

    async def _reduce(self, bucket: Bucket, layout: BucketLayout, keys: tuple[str, ...]) -> int:
        """Reduce the bucket; returns how many elements were sent."""
        if not layout.batches:
            await self._all_reduce(bucket)
            return layout.numel
        dtypes, wire = self.config.dtypes(bucket.buffer.dtype), self.config.wire
        wired = None if wire is None else WiredMean(wire, self._memory.rounding(wire))
        iteration = PowerIteration(
            bucket=bucket,
            layout=layout,
            matrices=self._form.matrices(bucket, layout, keys, self._memory, dtypes),
            bases=self._bases,
            step=self._step,
            compute_dtype=dtypes.compute,
            epsilon=self.config.epsilon,
            wired=wired,
        )
        if self.config.alternate:
            return await iteration.one_factor(is_left=self._step % 2 == 0)
        return await iteration.both_factors()

    def compression_stats(self) -> tuple[float, int, int]:
        """How many times fewer elements are sent, the elements before and those after compression, so far."""
        return self._memory.statistics.summary()

    @property
    def signature(self) -> str:
        """The options; after a pass also a line per bucket: the elements sent of it."""
        return "\n".join([repr(self), *(f"bucket {index}, {layout}" for index, layout in enumerate(self._last_pass))])

    def state_dict(self) -> dict[str, Any]:
        """A snapshot of what this rank remembers; each rank saves its own.

        It holds only tensors and plain values, so ``torch.load(..., weights_only=True)`` loads it.
        """
        return self._memory.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take over a copy of what :meth:`state_dict` gave on this rank, before or after registering.

        Raises:
            ConfigurationError: the state is another model's or another rank's; for another number of ranks, see
                :meth:`redistribute`. If the stage is not yet registered, registering raises it.
        """
        if state_dict:
            self._memory.load_state_dict(state_dict)

    redistribute = staticmethod(redistribute)

    def __repr__(self) -> str:
        return f"{self._form.name}({self.config})"
