"""How gradients are cut into buckets, kept for a run that resumes.

[Note: buckets after a resume]

DDP cuts its buckets anew after the first pass, so a new process begins with other buckets than those that the run had
when it was saved. What stages round depends on them: chunks of a quantizer that cross parameters, matrices
multiplied by one kernel, the order in which three or more ranks are summed. So stages that round save the buckets of
their last pass, and the first pass after loading waits for all gradients and runs on those, from the reducer on (see
:mod:`overlap.hooks.engine.regrouping`). Every other pass is cut by DDP alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch.utils.weak import WeakIdKeyDictionary

from overlap.hooks.bucket import Bucket

__all__ = ["BucketCut", "Buckets", "SavedCut"]

Buckets = tuple[tuple[str, ...], ...]
"""The parameters of each bucket of a pass, in order."""


class BucketCut:
    """The buckets of a model's last pass, and those that its next pass is to be reduced in."""

    def __init__(self) -> None:
        self.last: Buckets | None = None
        """``None`` before the first pass."""
        self.wanted: Buckets | None = None
        """``None``: DDP's own."""
        self._numbers: Any = WeakIdKeyDictionary()

    def keys_of(self, bucket: Bucket) -> tuple[str, ...]:
        """The parameters' names; where they are not known, numbers in the order in which gradients first come."""
        if bucket.fqns is not None:
            return bucket.fqns
        return tuple(self._numbers.setdefault(parameter, str(len(self._numbers))) for parameter in bucket.parameters)

    def note(self, used: Buckets) -> None:
        """A pass is over that was reduced in ``used``."""
        self.last, self.wanted = used, None

    def saved(self) -> list[list[str]] | None:
        """What :meth:`resume` takes."""
        known = self.wanted or self.last
        return None if known is None else [list(keys) for keys in known]

    def resume(self, saved: Iterable[Sequence[str]] | None) -> None:
        """Reduce the next pass in the buckets that were saved; if its parameters are others, in DDP's."""
        self.wanted = None if saved is None else tuple(tuple(keys) for keys in saved)


class SavedCut:
    """The buckets as part of a stage's state, which may be loaded before the stage is registered."""

    def __init__(self) -> None:
        self._cut: BucketCut | None = None
        self._kept: list[list[str]] | None = None

    def attach(self, cut: BucketCut | None) -> None:
        """Serve the model of ``cut``; what was loaded is for its next pass."""
        self._cut = cut
        if cut is not None and self._kept is not None:
            cut.resume(self._kept)

    def detach(self) -> None:
        """Stop serving the model."""
        self._kept, self._cut = self.state(), None

    def state(self) -> list[list[str]] | None:
        """The names of the parameters in each bucket; ``None`` before the first pass."""
        return self._kept if self._cut is None else self._cut.saved()

    def load(self, state: list[list[str]] | None) -> None:
        """Take over what :meth:`state` gave."""
        self._kept = state
        if self._cut is not None:
            self._cut.resume(state)
