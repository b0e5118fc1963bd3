"""The stage that reduces gradients as factors of low rank."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from functools import partial
from typing import Any

from overlap._checks import as_number, check_flag, check_whole_number, short_repr
from overlap._torch.foreach import largest
from overlap.errors import ConfigurationError
from overlap.hooks.bucket import Bucket
from overlap.hooks.powersgd.algorithm import PowerIteration, ReductionLayout, layout_of
from overlap.hooks.powersgd.memory import Memory, redistribute
from overlap.hooks.reducers import AllReduce
from overlap.hooks.stage import Plan, follow
from overlap.hooks.wires import StageWithMemory, Wire


class PowerSGD(StageWithMemory):
    """The mean of the gradients over ranks, approximately: sent as factors of low rank, 10 to 200 times smaller.

    Each gradient of two or more dimensions, as a matrix ``n x m``, becomes two factors ``n x rank`` and ``m x rank`` if
    they are at least ``min_compression_rate`` times smaller; the others, vectors above all, are reduced exactly. The
    error of the factors stays on its rank and is added to the next gradient, so it is delivered later.

    Memory is kept by parameter name, so nothing depends on how DDP cuts its buckets, and compression can begin at once.
    A gradient with a non-finite element comes out as NaN on every rank, and its pass leaves the memory as it was.
    :class:`PowerSGDState` has the options that PyTorch has, under its names.

    Args:
        rank: columns of the factors; 1 to 4 in most cases, up to 32 for language models. For another rank of some
            parameters: ``route({"*.embedding.weight": PowerSGD(rank=8), "*": PowerSGD(rank=2)})``.
        start_step: backward passes that are reduced exactly before compression begins.
        min_compression_rate: compress only gradients that get at least this many times smaller; 0 for every matrix.
        error_feedback: keep the error and add it to the next gradient.
        warm_start: start from the factors of the step before.
        alternate: send left and right factors in turn, one per step: half the data, one collective instead of two.
        wire: how factors are sent, such as ``Int8()``; its rounding errors are kept, too. ``None``: in the gradient's
            dtype. Uncompressed gradients stay exact, by an all-reduce of their own.
        seed: of the random directions from which factors start, the same on every rank.

    Communication: per bucket an all-reduce of all left factors and the uncompressed gradients, then one of all right
    factors; with ``alternate`` only one, of either factors and the uncompressed gradients; in the bucket's dtype. If
    nothing is compressed, one all-reduce of the bucket. With ``wire``, in place of an all-reduce of factors, a send and
    a receive with every other rank and an all-gather. Changes: ``bucket.buffer``. Keeps: one residual of the gradient's
    size, in ``float32`` at least, and one factor per compressed parameter; from backward to the step two of both.
    Workspace: at most the bucket that is being compressed.

    Raises:
        ConfigurationError: an option is out of range, or a loaded state does not fit the model.

    T. Vogels, S. P. Karimireddy, M. Jaggi: PowerSGD, NeurIPS 2019, arXiv 1905.13727. ``alternate``: L. Zhang et al.:
    ACP-SGD, ICDCS 2023.

    >>> PowerSGD(rank=4, start_step=1000)
    PowerSGD(rank=4, start_step=1000)
    """

    _memory: Memory

    def __init__(
        self,
        *,
        rank: int = 2,
        start_step: int = 0,
        min_compression_rate: float = 2.0,
        error_feedback: bool = True,
        warm_start: bool = True,
        alternate: bool = False,
        wire: Wire | None = None,
        seed: int = 0,
    ) -> None:
        self.rank = check_whole_number("rank", rank, least=1)
        self.start_step = check_whole_number("start_step", start_step, least=0)
        self.min_compression_rate = min_compression_rate
        rate = as_number(min_compression_rate)
        if rate is None or not 0 <= rate < float("inf"):  # False for NaN, too.
            raise ConfigurationError(
                f"min_compression_rate must be a number of at least 0, got {short_repr(min_compression_rate)}"
            )
        self.error_feedback = check_flag("error_feedback", error_feedback)
        self.warm_start = check_flag("warm_start", warm_start)
        self.alternate = check_flag("alternate", alternate)
        self.wire = wire
        if wire is not None and not isinstance(wire, Wire):
            raise ConfigurationError(f"wire must be a Wire such as Int8(), or None, got {short_repr(wire)}")
        self.seed = check_whole_number("seed", seed, least=0)
        if alternate and not warm_start:
            raise ConfigurationError(
                "alternate=True computes each factor from the one of the step before, which warm_start=False "
                "throws away: use only one of the two"
            )
        self._memory = Memory(self, wire=wire)
        self._layouts: dict[tuple[object, ...], ReductionLayout] = {}
        self._all_reduce = AllReduce()
        self._compresses = False

    def before_backward(self, *, is_replay: bool) -> None:
        super().before_backward(is_replay=is_replay)
        self._memory.counts["steps"] += 1
        if (compresses := self._step >= 0) is not self._compresses:  # It begins; or a discarded step has begun it.
            self._compresses = compresses
            self._memory.replan()

    @property
    def _step(self) -> int:
        """Passes since compression began."""
        return self._memory.counts["steps"] - 1 - self.start_step

    async def __call__(self, bucket: Bucket) -> None:
        await follow(self._plan(bucket))

    def plan(self, bucket: Bucket) -> Plan | None:
        """``None`` where steps differ from each other, or factors are sent by a wire's several collectives."""
        is_always = self.wire is None and self.warm_start and not self.alternate
        return self._plan(bucket) if is_always else None

    def _plan(self, bucket: Bucket) -> Plan:
        memory, step = self._memory, self._step
        # Also before compression begins, because parameters without names are numbered in the first pass.
        keys = memory.keys_of(bucket)
        # A buffer of complex gradients holds them as pairs of real numbers.
        is_real = bucket.buffer.is_floating_point() and not bucket.parameters[0].is_complex()
        if step < 0 or not is_real or bucket.buffer.numel() == 0:
            return self._all_reduce.plan(bucket)
        layout = self._layout_of(bucket, keys)
        exact, gradients = [keys[place] for place in layout.exact], [bucket.gradients[place] for place in layout.exact]
        release = partial(memory.release, exact, gradients)
        if not layout.batches:

            def count() -> None:
                memory.note_largest(largest(bucket.buffer))
                memory.count(bucket.buffer.numel(), bucket.buffer.numel())

            return release, *self._all_reduce.plan(bucket), count
        iteration = PowerIteration(
            bucket,
            layout,
            keys,
            memory,
            is_left=step % 2 == 0 if self.alternate else None,
            error_feedback=self.error_feedback,
            wire=self.wire,
            seed=self.seed,
            cold_step=None if self.warm_start else step,
        )
        return release, *iteration.plan()

    def _layout_of(self, bucket: Bucket, keys: tuple[str, ...]) -> ReductionLayout:
        key = (keys, bucket.buffer.numel(), bucket.buffer.device)
        if (layout := self._layouts.get(key)) is None:
            layout = self._layouts[key] = layout_of(
                [gradient.shape for gradient in bucket.gradients],
                rank=self.rank,
                min_compression_rate=self.min_compression_rate,
                device=bucket.buffer.device,
            )
        return layout

    def compression_stats(self) -> tuple[float, int, int]:
        """The ratio of elements before and after compression so far, and both numbers."""
        return self._memory.compression_stats()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        if state_dict:
            super().load_state_dict(state_dict)

    redistribute = staticmethod(redistribute)

    def __repr__(self) -> str:
        parts = [f"rank={self.rank!r}"]
        for name, option in inspect.signature(PowerSGD.__init__).parameters.items():
            if name not in ("self", "rank") and (value := getattr(self, name)) != option.default:
                parts.append(f"{name}={value!r}")
        return f"PowerSGD({', '.join(parts)})"
