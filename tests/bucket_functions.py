"""Functions of a bucket that tests put into chains, as docs/transforms.md has them."""

from collections.abc import Callable

import torch

from overlap import Bucket, DivideByCount

Function = Callable[[Bucket], None]


class Ones(DivideByCount):
    """Every rank counts 1 in every pass, so that the mean over what is counted is that over ranks."""

    def before_backward(self, *, is_replay: bool) -> None:
        assert self.context is not None
        self.count(torch.ones((), device=self.context.device))
        super().before_backward(is_replay=is_replay)


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
