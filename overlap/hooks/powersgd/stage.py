"""The stage that reduces gradients as factors of low rank."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from overlap.hooks.allreduce import AllReduce
from overlap.hooks.bucket import Bucket
from overlap.hooks.powersgd.algorithm import PowerIteration
from overlap.hooks.powersgd.config import PowerSGDConfig
from overlap.hooks.powersgd.layout import BucketLayout, layout_of
from overlap.hooks.powersgd.memory import Memory, redistribute
from overlap.hooks.stage import Stage, StageContext
from overlap.hooks.wires import Wire

__all__ = ["PowerSGD"]


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
        self._set_up(config, Memory())

    def _set_up(self, config: PowerSGDConfig, memory: Memory) -> None:
        self.config = config
        self._memory = memory
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
        self._memory.claim(keys)
        sent_numel = await self._reduce(bucket, keys)
        self._memory.statistics.count(bucket.buffer.numel(), sent_numel)

    async def _reduce(self, bucket: Bucket, keys: tuple[str, ...]) -> int:
        """Reduce the bucket; returns how many elements were sent."""
        layout = self._layout_of(bucket, keys)
        self._this_pass.append(layout)
        released = self._memory.release(keys, bucket.gradients, layout.exact)
        sent_numel = layout.numel
        if not layout.batches:
            await self._all_reduce(bucket)
        else:
            iteration = PowerIteration(bucket, layout, keys, self._memory, self.config, step=self._step)
            if not self.config.alternate:
                await iteration.both_factors()
            elif self._step % 2 == 0:
                await iteration.left_factors()
            else:
                await iteration.right_factors()
            sent_numel = iteration.sent_numel
        self._memory.settle(released)
        return sent_numel

    def _layout_of(self, bucket: Bucket, keys: tuple[str, ...]) -> BucketLayout:
        key = (keys, bucket.buffer.numel(), bucket.buffer.device)
        if (layout := self._layouts.get(key)) is None:
            layout = self._layouts[key] = layout_of(
                [gradient.shape for gradient in bucket.gradients],
                rank=self.config.rank,
                min_compression_rate=self.config.min_compression_rate,
                device=bucket.buffer.device,
            )
        return layout

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
        return f"PowerSGD({self.config})"
