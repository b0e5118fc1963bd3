"""``bypass="auto"`` of a reducer that compresses."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping
from typing import Any

from overlap._checks import is_one_of, told
from overlap.errors import ConfigurationError
from overlap.hooks.allreduce import AllReduce
from overlap.hooks.bucket import Bucket
from overlap.hooks.collectives import Operation
from overlap.hooks.context import StageContext
from overlap.hooks.cut import BucketCut, SavedCut
from overlap.hooks.measure import Measurement, Trial, measure
from overlap.hooks.stage import Stage

__all__ = ["Bypass", "bypass_from"]

Reduce = Callable[[Bucket], Coroutine[Operation, Any, None]]

# DDP cuts its buckets anew after the first pass; in the second the new ones may allocate, so the third is measured.
_MEASURED_STEP = 2
# A pass may end well on some ranks and fail on others, which then know nothing of it. By the next one all do.
_PASSES_TO_CONFIRM = 2


class Bypass(Stage):
    """Compresses a bucket or sends it as it is, whichever was measured to be faster; a child of the reducer.

    It measures once, with copies, at the end of the third pass, and on all ranks of the model, so that every rank
    decides alike. A bucket whose parameters are all bypassed is sent as it is from then on.

    Args:
        what: the reducer's name in the log.
        compress: reduces a bucket as the reducer does.
        sample: the same without a trace in the reducer's memory; ``compress`` where it has none.
        send: reduces a bucket as it is.
    """

    def __init__(
        self, what: str, *, compress: Reduce, sample: Reduce | None = None, send: Reduce | None = None
    ) -> None:
        self._what = what
        self._compress = compress
        self._sample = compress if sample is None else sample
        self._send = AllReduce() if send is None else send
        self.bypassed: frozenset[str] | None = None
        """Parameters that are sent as they are; ``None`` before the measurement."""
        self._passes = 0
        self._to_confirm = 0
        # Of each bucket of a pass that may be measured, its keys and what makes one like it.
        self._seen: list[tuple[tuple[str, ...], Callable[[], Bucket]]] = []
        self._measured: list[Measurement] = []
        self._context: StageContext | None = None
        self._keys = BucketCut()
        self._cut = SavedCut()

    def attach(self, context: StageContext) -> None:
        # They are of passes that not every rank has seen, and ranks compare signatures next.
        self._measured.clear()
        self._context = context
        self._keys = context.cut or BucketCut()
        self._cut.attach(context.cut)

    def detach(self) -> None:
        self._context = None
        self._cut.detach()

    def before_backward(self, *, is_replay: bool) -> None:
        # Counted here and not at the end, so that ranks agree on it even if one of them fails.
        self._passes += 1
        self._seen.clear()

    def after_backward(self, *, failed: bool) -> str | None:
        self._seen.clear()
        if failed and self._to_confirm:
            self.bypassed = None
            self._measured.clear()
        self._to_confirm = 0 if failed else max(0, self._to_confirm - 1)
        return None

    async def __call__(self, bucket: Bucket) -> None:
        keys = self._keys.keys_of(bucket)
        if self.bypassed is not None and self.bypassed.issuperset(keys):
            await self._send(bucket)
            return
        is_measured = self.bypassed is None and self._passes > _MEASURED_STEP
        if is_measured:
            self._seen.append((keys, bucket.outline()))
        await self._compress(bucket)
        if bucket.is_last and is_measured:
            await self._measure(bucket)

    async def _measure(self, bucket: Bucket) -> None:
        assert self._context is not None, "a stage is attached before its first pass"
        # One at a time, so that the copies of one are freed before the next are made.
        trials = (self._trial(keys, zeros) for keys, zeros in self._seen)
        self._measured = await measure(trials, group=self._context.group, device=bucket.buffer.device, what=self._what)
        self.bypassed = frozenset(key for found in self._measured if not found.compresses for key in found.keys)
        self._to_confirm = _PASSES_TO_CONFIRM

    def _trial(self, keys: tuple[str, ...], zeros: Callable[[], Bucket]) -> Trial:
        # Fresh zeros: the same work as with gradients, and nothing that could overflow.
        async def send() -> None:
            await AllReduce()(zeros())

        async def compress() -> None:
            await self._sample(zeros())

        return Trial(keys, send, compress)

    def state_dict(self) -> dict[str, Any]:
        """What was decided, the passes so far, and the buckets of the last one, which a decision is for."""
        return {
            "bypassed": None if self.bypassed is None else sorted(self.bypassed),
            "passes": self._passes,
            "buckets": self._cut.state(),
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load what :meth:`state_dict` returned; with an empty one, measure anew."""
        bypassed = state_dict.get("bypassed")
        self.bypassed = None if bypassed is None else frozenset(bypassed)
        self._passes = state_dict.get("passes", 0)
        self._to_confirm = 0
        self._measured.clear()
        self._cut.load(state_dict.get("buckets"))

    @property
    def signature(self) -> str:
        """What was decided; after the measurement also a line per bucket."""
        decided = "" if self.bypassed is None else f" ({', '.join(sorted(self.bypassed))})"
        return "\n".join([f"{self!r}{decided}", *map(str, self._measured)])

    def __repr__(self) -> str:
        """The option as it would be typed, and what was decided."""
        return "bypass='auto'" + (f", {len(self.bypassed)} parameters bypassed" if self.bypassed else "")


def bypass_from(option: object, what: str, *, compress: Reduce, **functions: Reduce | None) -> Bypass | None:
    """What the option ``bypass`` of a reducer stands for; see :class:`Bypass`.

    Raises:
        ConfigurationError: ``option`` is neither ``None`` nor ``"auto"``.
    """
    if option is None:
        return None
    if not is_one_of(option, "auto"):
        raise ConfigurationError(f'bypass must be None or "auto", got {told(option)}')
    return Bypass(what, compress=compress, **functions)
