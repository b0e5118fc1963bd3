"""Clipping element by element."""

from __future__ import annotations

from overlap._checks import check_number
from overlap.errors import UnsupportedError
from overlap.hooks.bucket import Bucket
from overlap.hooks.context import StageContext
from overlap.hooks.transforms.transform import Place, Transform

__all__ = ["ClipValue"]


class ClipValue(Transform):
    """Clips every element to the range from ``-value`` to ``value``.

    Before the reducer this rank's own gradient, after it the mean, as ``torch.nn.utils.clip_grad_value_`` does, bit for
    bit; after an update the new parameters, as the critic of a Wasserstein GAN needs (Arjovsky et al. 2017,
    https://arxiv.org/abs/1701.07875).

    Args:
        value: a positive number.

    Issues: nothing. Changes: ``bucket.buffer`` (after an update, the parameters).

    Raises:
        ConfigurationError: ``value`` is not a positive number.
        UnsupportedError: at registration, if a parameter is complex.

    >>> ClipValue(0.1)
    ClipValue(0.1)
    """

    def __init__(self, value: float) -> None:
        super().__init__()
        self.value = check_number("value", value, above=0)

    @property
    def needs_mean(self) -> bool:
        return True

    @property
    def commutes_with_scaling(self) -> bool:
        return self._place is Place.UPDATED

    def attach(self, context: StageContext) -> None:
        name = next((name for parameter, name in (context.names or {}).items() if parameter.is_complex()), None)
        if name is not None:
            raise UnsupportedError(
                f"{name} is complex, and complex numbers have no order to clip by: use ClipGradNorm in place of "
                f"{self!r}, or a function of a bucket"
            )
        super().attach(context)

    async def __call__(self, bucket: Bucket) -> None:
        whole = self.place is not Place.UPDATED and bucket.owned is None
        for tensor in [bucket.buffer] if whole else self.seen(bucket):
            tensor.clamp_(-self.value, self.value)

    def __repr__(self) -> str:
        return f"ClipValue({self.value:g})"
