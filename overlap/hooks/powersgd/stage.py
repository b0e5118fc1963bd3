"""The stage."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch

from overlap.hooks.allreduce import AllReduce
from overlap.hooks.bucket import Bucket
from overlap.hooks.powersgd import checkpoint
from overlap.hooks.powersgd.bypass import Measurement, Trial, measure
from overlap.hooks.powersgd.config import PowerSGDConfig
from overlap.hooks.powersgd.factors import Directions
from overlap.hooks.powersgd.memory import Memory, Slot
from overlap.hooks.powersgd.operands import make_operands
from overlap.hooks.powersgd.plan import Plan, make_plan, square_plan
from overlap.hooks.powersgd.round import Round
from overlap.hooks.powersgd.streams import hold
from overlap.hooks.stage import Stage, StageContext

__all__ = ["PowerSGD"]

_HALF = (torch.float16, torch.bfloat16)
# On a CPU, copying larger matrices together takes longer than one more kernel.
_CPU_BATCH_NUMEL = 16 * 1024
# DDP cuts its buckets anew after the first pass; the second is the first in which the new ones are warm.
_MEASURED_STEP = 2


class PowerSGD(Stage):
    """The mean of the gradients over ranks, approximately: sent as factors of low rank, 10 to 200 times less.

    Each gradient of two or more dimensions, as a matrix ``n x m``, becomes two factors ``n x rank`` and ``m x
    rank`` where that is at least ``min_compression_rate`` times less; the others, vectors above all, are
    reduced exactly. What the factors leave out stays on its rank and is added to the next gradient, so it
    arrives later.

    Memory is kept by parameter name, so nothing depends on how DDP cuts its buckets, and compression can
    begin at once. A gradient with a non-finite element comes out as NaN on every rank and leaves the memory
    as it was.

    Args:
        rank: columns of the factors; 1 to 4 in most cases, up to 32 for language models.
        start_step: backward passes that are reduced exactly before compression begins.
        min_compression_rate: compress only what gets at least this many times smaller; 0 for every matrix.
        error_feedback: keep what was left out and add it to the next gradient.
        warm_start: start from the factors of the step before.
        alternate: send left and right factors in turn, one a step: half the data, one collective, not two.
        error_dtype: dtype of what is kept, ``torch.bfloat16`` for half the memory; ``None``: the gradient's.
        bypass: ``"auto"`` measures in the third compressed pass whether compressing and sending a bucket
            takes longer than sending it, and if so reduces it exactly from then on. It measures with copies,
            which take the memory of two buckets once.
        seed: of the random directions from which factors start, the same on every rank.
        epsilon: added to the length that each direction of a basis is divided by. 0 is exact and safe.
        log_every_steps: steps between two lines of statistics in the log.

    Issues, a bucket: an all-reduce of all left factors and the uncompressed gradients, then one of all right
    factors; with ``alternate`` one all-reduce; in the bucket's dtype. Where nothing is compressed, one
    all-reduce of the bucket. Changes: ``bucket.buffer``. Keeps: one residual of the gradient's size and one
    factor a compressed parameter. Workspace: at most the bucket at work.

    Raises:
        ConfigurationError: an option is out of range, or a loaded state does not fit the model.

    T. Vogels, S. P. Karimireddy, M. Jaggi: PowerSGD: Practical Low-Rank Gradient Compression for Distributed
    Optimization. NeurIPS 2019 (arXiv 1905.13727). With ``alternate``: L. Zhang, L. Zhang, S. Shi, X. Chu, B.
    Li: Evaluation and Optimization of Gradient Compression for Distributed Deep Learning (ACP-SGD). ICDCS
    2023.

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
        bypass: Literal["auto"] | None = None,
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
            bypass=bypass,
            seed=seed,
            epsilon=epsilon,
            log_every_steps=log_every_steps,
        )
        self._set_up(config, Memory(), is_square=False)

    def _set_up(self, config: PowerSGDConfig, memory: Memory, *, is_square: bool) -> None:
        self.config = config
        self._memory = memory
        # A whole bucket as one matrix; batched_powerSGD_hook's way.
        self._is_square = is_square
        self._directions = Directions(config.seed)
        self._all_reduce = AllReduce()
        self._plans: dict[tuple[object, ...], Plan] = {}
        self._this_pass: list[tuple[Bucket, tuple[str, ...], Plan]] = []
        self._layout: list[tuple[tuple[str, ...], Plan]] = []
        self._measured: list[Measurement] = []

    def attach(self, context: StageContext) -> None:
        self._memory.attach(context)
        # Of another model, or of passes that not every rank has seen: ranks compare their plans next.
        self._layout.clear()
        self._measured.clear()

    def detach(self) -> None:
        self._memory.detach()

    def before_backward(self, *, is_replay: bool) -> None:
        # Counted here and not at the end, so that ranks agree on it even where one of them failed.
        self._memory.steps += 1
        self._this_pass.clear()

    def after_backward(self, *, failed: bool) -> str | None:
        self._layout = [(keys, plan) for _, keys, plan in self._this_pass]
        self._this_pass.clear()
        if failed:
            # Ranks may have come to different buckets, but a basis that differs among them gives different outputs.
            if self.config.alternate:
                self._memory.forget_factors()
            return f"{self!r}: what compression had left out of this pass's gradients may be lost"
        if self._step >= 0:
            self._memory.check_claimed()
            self._memory.statistics.report(self._memory.steps - 1, self.config.log_every_steps)
        return None

    @property
    def _step(self) -> int:
        """Of the current pass, counted from the first compressed one; negative before that."""
        return self._memory.steps - 1 - self.config.start_step

    async def __call__(self, bucket: Bucket) -> None:
        # Also where nothing is compressed yet: without names, parameters are numbered in the first pass.
        keys = self._memory.keys_of(bucket)
        # A buffer of complex gradients holds them as pairs of real numbers.
        is_real = bucket.buffer.is_floating_point() and not bucket.parameters[0].is_complex()
        if self._step < 0 or not is_real or bucket.buffer.numel() == 0:
            await self._all_reduce(bucket)
            return
        plan = self._plan_of(keys, bucket)
        self._this_pass.append((bucket, keys, plan))
        self._release(bucket, plan, self._memory.slots_of(keys))
        sent = await self._reduce(bucket, plan, keys, self._memory)
        self._memory.statistics.count(plan.numel, sent)
        if bucket.is_last and self._is_to_measure:
            await self._measure(bucket)

    def _plan_of(self, keys: tuple[str, ...], bucket: Bucket) -> Plan:
        bypassed = self._memory.bypassed or frozenset()
        key = (keys, bucket.buffer.numel(), bucket.buffer.device, bypassed)
        if (plan := self._plans.get(key)) is not None:
            return plan
        if self._is_square and not bypassed.issuperset(keys):
            plan = square_plan(bucket.buffer.numel(), rank=self.config.rank)
        else:
            plan = make_plan(
                [gradient.shape for gradient in bucket.gradients],
                rank=self.config.rank,
                min_compression_rate=self.config.min_compression_rate,
                exact={place for place, name in enumerate(keys) if name in bypassed},
                batch_numel=_CPU_BATCH_NUMEL if bucket.buffer.device.type == "cpu" else math.inf,
            )
        self._plans[key] = plan
        return plan

    def _release(self, bucket: Bucket, plan: Plan, slots: Sequence[Slot]) -> None:
        """Give away what is kept of parameters that are no longer compressed."""
        for place in plan.exact:
            if (residual := slots[place].residual) is not None:
                bucket.gradients[place].add_(hold(residual))
                slots[place].residual = None
            slots[place].factor = None

    async def _reduce(self, bucket: Bucket, plan: Plan, keys: tuple[str, ...], memory: Memory) -> int:
        if not plan.batches:
            await self._all_reduce(bucket)
            return plan.numel
        dtype = bucket.buffer.dtype
        compute_dtype = torch.float32 if dtype in _HALF else dtype
        residual_dtype = (self.config.error_dtype or dtype) if self.config.error_feedback else None
        slots = memory.slots_of(keys)
        if self._is_square:
            (batch,) = plan.batches
            whole = memory.bucket_slot(keys)
            if whole.factor is not None and tuple(whole.factor.shape) != (batch.rank, batch.cols):
                whole.factor = None  # Of a bucket that was cut in another way.
            factor_slots = [[whole]]
        else:
            factor_slots = [[slots[place] for place in batch.places] for batch in plan.batches]
        operands = make_operands(
            bucket,
            plan,
            slots,
            is_square=self._is_square,
            compute_dtype=compute_dtype,
            residual_dtype=residual_dtype,
        )
        work = zip(plan.batches, operands, factor_slots, strict=True)
        this_round = Round(bucket, plan, list(work), self.config, self._directions, self._step, compute_dtype)
        return await this_round.run()

    @property
    def _is_to_measure(self) -> bool:
        return self.config.bypass == "auto" and self._memory.bypassed is None and self._step >= _MEASURED_STEP

    async def _measure(self, bucket: Bucket) -> None:
        """Decide which buckets of this pass are sent as they are from the next one on."""
        # One at a time, so that the copies of one are gone when the next are made.
        trials = (self._trial(seen, keys, plan) for seen, keys, plan in self._this_pass if plan.batches)
        self._measured = await measure(trials, group=bucket.group, device=bucket.buffer.device)
        self._memory.bypassed = frozenset(key for found in self._measured if not found.compresses for key in found.keys)

    def _trial(self, bucket: Bucket, keys: tuple[str, ...], plan: Plan) -> Trial:
        memory = Memory()

        def copy() -> Bucket:
            # Fresh zeros: the same work as with gradients, and nothing that could overflow.
            return bucket.with_buffer(torch.zeros_like(bucket.buffer))

        async def send() -> None:
            await self._all_reduce(copy())

        async def compress() -> None:
            await self._reduce(copy(), plan, keys, memory)

        compressed = (place for batch in plan.batches for place in batch.places)
        return Trial(keys if self._is_square else tuple(keys[place] for place in compressed), send, compress)

    def compression_stats(self) -> tuple[float, int, int]:
        """How many times fewer elements are sent, the elements before and those after compression, so far."""
        statistics = self._memory.statistics
        return statistics.rate, statistics.numel_before, statistics.numel_after

    @property
    def signature(self) -> str:
        """The options; after a pass also a line a bucket: what is sent of it, in elements, and what was measured."""
        lines = [repr(self)]
        for index, (keys, plan) in enumerate(self._layout):
            found = [one for one in self._measured if not set(one.keys).isdisjoint(keys)]
            lines.append("; ".join([f"bucket {index}, {plan}", *map(str, found)]))
        return "\n".join(lines)

    def state_dict(self) -> dict[str, Any]:
        """What this rank remembers, a snapshot: each rank saves its own.

        Tensors and plain values only, so it loads with ``torch.load(..., weights_only=True)``.
        """
        return self._memory.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take over a copy of what :meth:`state_dict` gave on this rank, before or after registering.

        Raises:
            ConfigurationError: the state is another model's or another rank's; for another number of ranks,
                see :meth:`redistribute`. Where the stage is not yet registered, registering raises it.
        """
        if state_dict:
            self._memory.load_state_dict(state_dict)

    @staticmethod
    def redistribute(states: Sequence[Mapping[str, Any]], *, rank: int, ranks: int) -> dict[str, Any]:
        """The state for ``rank`` of ``ranks`` from those of other ranks, with the same sum of residuals.

        New rank ``r`` gets the sum of the residuals of the old ranks ``r``, ``r + ranks``, ``r + 2 * ranks`` and so on.

        Args:
            states: of the old ranks, all or at least those named above (where there is none: any one).
            rank: this rank in the new group.
            ranks: size of the new group.

        Raises:
            ConfigurationError: a state that is needed is missing, or states do not belong together.
        """
        return checkpoint.redistribute(states, rank=rank, ranks=ranks)

    def __repr__(self) -> str:
        name = "PowerSGD, whole buckets" if self._is_square else "PowerSGD"
        bypassed = self._memory.bypassed
        decided = f", {len(bypassed)} parameters bypassed" if bypassed else ""
        return f"{name}({self.config}{decided})"
