"""Functions of a bucket that tests put into chains, as docs/transforms.md has them."""

from collections.abc import Callable

from overlap import Bucket

__all__ = ["centralize", "clip_value", "scale"]

Function = Callable[[Bucket], None]


def scale(factor: float) -> Function:
    """Multiplies gradients by ``factor``."""

    def scale(bucket: Bucket) -> None:
        bucket.buffer.mul_(factor)

    return scale


def clip_value(value: float) -> Function:
    """As ``clip_grad_value_``."""

    def clip_value(bucket: Bucket) -> None:
        bucket.buffer.clamp_(-value, value)

    return clip_value


def centralize(bucket: Bucket) -> None:
    """Gradient centralization."""
    for gradient in bucket.gradients:
        if gradient.dim() > 1 and gradient.numel():
            gradient.sub_(gradient.mean(dim=tuple(range(1, gradient.dim())), keepdim=True))
