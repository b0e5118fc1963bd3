"""Multiplication by a number."""

from __future__ import annotations

from overlap._checks import check_number
from overlap._torch.foreach import scale_
from overlap.hooks.bucket import Bucket
from overlap.hooks.transforms.transform import Place, Transform

__all__ = ["Scale"]


class Scale(Transform):
    """Multiplies gradients (after an update, the new parameters) by ``factor``.

    ``factor=ranks`` after the reducer makes the mean a sum.

    Args:
        factor: a finite number.

    Issues: nothing. Changes: ``bucket.buffer`` (after an update, the parameters).

    Raises:
        ConfigurationError: ``factor`` is not a finite number.

    >>> Scale(0.5)
    Scale(0.5)
    """

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = check_number("factor", factor)

    @property
    def commutes_with_scaling(self) -> bool:
        return True

    async def __call__(self, bucket: Bucket) -> None:
        if self.place is Place.UPDATED or bucket.owned is not None:
            scale_(self.seen(bucket), self.factor)
        else:
            bucket.buffer.mul_(self.factor)

    def __repr__(self) -> str:
        return f"Scale({self.factor:g})"
