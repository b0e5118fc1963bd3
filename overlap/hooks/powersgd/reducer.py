"""The stage that reduces gradients as factors of low rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.optim import Optimizer

from overlap.errors import ConfigurationError
from overlap.hooks.allreduce import AllReduce
from overlap.hooks.bucket import Bucket
from overlap.hooks.powersgd.algorithm import Compressed, PowerIteration
from overlap.hooks.powersgd.bases import Bases
from overlap.hooks.powersgd.checkpoint import redistribute
from overlap.hooks.powersgd.config import PowerSGDConfig
from overlap.hooks.powersgd.layout import BucketLayout
from overlap.hooks.powersgd.matrices import PerParameter
from overlap.hooks.powersgd.memory import Memory
from overlap.hooks.powersgd.momentum import Momentum, momentum_of
from overlap.hooks.powersgd.ranks import Ranks
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
        rank: columns of the factors; 1 to 4 in most cases, up to 32 for language models. Or a function of the step (the
            number of earlier backward passes), the same on every rank; or either of these for patterns of parameter
            names, the first that matches: ``{"*.embedding.weight": 8, "*": 2}``. A change keeps residuals.
        start_step: backward passes that are reduced exactly before compression begins.
        min_compression_rate: compress only what gets at least this many times smaller; 0 for every matrix.
        error_feedback: keep what was left out and add it to the next gradient.
        warm_start: start from the factors of the step before.
        alternate: send left and right factors in turn, one per step: half the data, one collective instead of two.
        error_dtype: dtype of what is kept, ``torch.bfloat16`` for half the memory; ``None``: the gradient's.
        wire: how factors travel, such as ``Int8()``; what it leaves out of them stays in the residual. ``None``: in the
            gradient's dtype. Uncompressed gradients stay exact, by an all-reduce of their own.
        momentum: momentum before compression, with ``optimizer``, which updates the model and must have none. Each rank
            sends velocities ``u = momentum * u + gradient``; what is sent of a matrix is removed from its ``u``.
        optimizer: a ``torch.optim.SGD``, or a wrapper of one; looked at in each pass, not changed.
        seed: of the random directions from which factors start, the same on every rank.
        epsilon: added to the length that each direction of a basis is divided by.
        log_every_steps: steps between two lines of statistics in the log.

    Issues, per bucket: an all-reduce of all left factors and the uncompressed gradients, then one of all right factors;
    with ``alternate`` only one, of either factors and the uncompressed gradients; in the bucket's dtype. Where nothing
    is compressed, one all-reduce of the bucket. With ``wire``, in place of an all-reduce of factors, a send and a
    receive with every other rank and an all-gather. Where ``rank`` is a function, once in 1000 passes an all-reduce of
    two numbers, which the host reads. Changes: ``bucket.buffer``. Keeps: one residual of the gradient's size and one
    factor per compressed parameter; with ``momentum`` one velocity per parameter. Workspace: at most the bucket that is
    being compressed, with ``momentum`` one more.

    Raises:
        ConfigurationError: an option is out of range, or a loaded state does not fit the model.

    T. Vogels, S. P. Karimireddy, M. Jaggi: PowerSGD, NeurIPS 2019, arXiv 1905.13727. ``alternate``: L. Zhang et al.:
    ACP-SGD, ICDCS 2023. ``momentum``: Y. Lin et al.: Deep Gradient Compression, ICLR 2018, arXiv 1712.01887.

    >>> PowerSGD(rank=4, start_step=1000)
    PowerSGD(rank=4, start_step=1000)
    """

    def __init__(
        self,
        *,
        rank: int | Callable[[int], int] | Mapping[str, int | Callable[[int], int]] = 2,
        start_step: int = 0,
        min_compression_rate: float = 2.0,
        error_feedback: bool = True,
        warm_start: bool = True,
        alternate: bool = False,
        error_dtype: torch.dtype | None = None,
        wire: Wire | None = None,
        momentum: float = 0.0,
        optimizer: Optimizer | None = None,
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
            momentum=momentum,
            seed=seed,
            epsilon=epsilon,
            log_every_steps=log_every_steps,
        )
        self._set_up(config, Memory(), PerParameter(), momentum_of(momentum, optimizer))

    def _set_up(
        self, config: PowerSGDConfig, memory: Memory, form: PerParameter, momentum: Momentum | None = None
    ) -> None:
        self.config = config
        self._memory = memory
        self._form = form
        self._ranks = Ranks(config.rank)
        self._bases = Bases(seed=config.seed, warm_start=config.warm_start)
        self._all_reduce = AllReduce()
        self._layouts: dict[tuple[object, ...], BucketLayout] = {}
        self._this_pass: list[BucketLayout] = []
        self._last_pass: list[BucketLayout] = []
        self._momentum = momentum

    def attach(self, context: StageContext) -> None:
        if self._momentum is not None:
            self._momentum.attach(context)
        self._ranks.attach(context.names, first_step=self._first_step)
        self._memory.attach(context)
        # They are of another model, or of passes that not every rank has seen, and ranks compare signatures next.
        self._last_pass.clear()

    def detach(self) -> None:
        self._memory.detach()

    def before_backward(self, *, is_replay: bool) -> None:
        # Counted here, so that ranks agree on it even if one of them fails.
        self._memory.steps += 1
        if self._momentum is not None:
            self._momentum.check()
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

    @property
    def _first_step(self) -> int:
        """The next pass that compresses, counted from the first pass."""
        return max(self._memory.steps, self.config.start_step)

    async def __call__(self, bucket: Bucket) -> None:
        # Also before compression begins, because parameters without names are numbered in the first pass.
        keys = self._memory.keys_of(bucket)
        if self._momentum is None:
            await self._mean(bucket, keys)
        else:
            slots = self._memory.slots_of(keys)
            velocities = self._momentum.add_to(bucket, slots)
            self._momentum.keep(bucket, slots, velocities, await self._mean(bucket, keys))

    async def _mean(self, bucket: Bucket, keys: tuple[str, ...]) -> Compressed | None:
        """Reduce the bucket; gives what was compressed."""
        # A buffer of complex gradients holds them as pairs of real numbers.
        is_real = bucket.buffer.is_floating_point() and not bucket.parameters[0].is_complex()
        if self._step < 0 or not is_real or bucket.buffer.numel() == 0:
            await self._all_reduce(bucket)
            return None
        if self._ranks.begin(self._memory.steps - 1):
            self._layouts.clear()
            self._bases.directions.forget()
        await self._ranks.compare(bucket)
        layout = self._layout_of(keys, bucket)
        self._this_pass.append(layout)
        self._memory.release(bucket, layout.exact, keys)
        compressed = await self._reduce(bucket, layout, keys)
        self._memory.settle_released(bucket, layout.exact, keys)
        self._memory.statistics.count(layout.numel, compressed.sent_numel if compressed else layout.numel)
        return compressed

    def _layout_of(self, keys: tuple[str, ...], bucket: Bucket) -> BucketLayout:
        key = (keys, bucket.buffer.numel(), bucket.buffer.device)
        if (layout := self._layouts.get(key)) is None:
            ranks = [self._ranks.of(name) for name in keys]
            layout = self._layouts[key] = self._form.lay_out(bucket, self.config, ranks)
        return layout

    async def _reduce(self, bucket: Bucket, layout: BucketLayout, keys: tuple[str, ...]) -> Compressed | None:
        if not layout.batches:
            await self._all_reduce(bucket)
            return None
        dtypes = self.config.dtypes(bucket.buffer.dtype)
        iteration = PowerIteration(
            bucket=bucket,
            layout=layout,
            matrices=self._form.matrices(bucket, layout, keys, self._memory, dtypes),
            bases=self._bases,
            step=self._step,
            compute_dtype=dtypes.compute,
            epsilon=self.config.epsilon,
            wired=self._memory.wired_mean(self.config.wire),
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
        lines = [repr(self)]
        if schedule := self._ranks.described(self._first_step):
            lines.append(schedule)
        lines += [f"bucket {index}, {layout}" for index, layout in enumerate(self._last_pass)]
        return "\n".join(lines)

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
        if self._momentum is None and state_dict.get("velocities"):
            raise ConfigurationError(
                f"the state has the velocities of momentum, but {self!r} has none: make it with momentum= and "
                "optimizer=, or load the state with state['velocities'] = {}"
            )
        if state_dict:
            self._memory.load_state_dict(state_dict)

    redistribute = staticmethod(redistribute)

    def __repr__(self) -> str:
        return f"{self._form.name}({self.config})"
