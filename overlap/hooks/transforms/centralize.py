"""Gradient centralization."""

from __future__ import annotations

from overlap.errors import UnsupportedError
from overlap.hooks.bucket import Bucket
from overlap.hooks.transforms.transform import Transform

__all__ = ["Centralize"]


class Centralize(Transform):
    """Subtracts from each slice of a gradient along its first dimension the slice's mean, which is zero afterwards.

    This is gradient centralization (Yong et al. 2020, https://arxiv.org/abs/2004.01461), for gradients of two or more
    dimensions; those of one dimension are left alone. After an update it centralizes the new parameters.

    It is linear: before a ``ZeroStep`` that reduces by itself it acts on this rank's own gradient, and the mean of what
    ranks have centralized is the mean centralized, up to rounding.

    Issues: nothing. Changes: ``bucket.buffer`` (after an update, the parameters).

    Raises:
        UnsupportedError: in ``backward``, after a reduce-scatter that cuts a parameter between ranks.

    >>> Centralize()
    Centralize()
    """

    @property
    def commutes_with_scaling(self) -> bool:
        return True

    async def __call__(self, bucket: Bucket) -> None:
        for parameter, seen in zip(bucket.parameters, self.seen(bucket), strict=True):
            if parameter.dim() < 2 or seen.numel() == 0:
                continue
            if seen.numel() != parameter.numel():
                raise UnsupportedError(
                    f"{self!r} needs whole gradients, and the reduce-scatter before it cuts them between ranks "
                    f"({bucket.describe()}): put it before the reducer, or build the ZeroRedundancyOptimizer with "
                    "partition='parameter'"
                )
            whole = seen if seen.shape == parameter.shape else seen.as_strided(parameter.shape, parameter.stride())
            whole.sub_(whole.mean(dim=tuple(range(1, whole.dim())), keepdim=True))

    def __repr__(self) -> str:
        return "Centralize()"
