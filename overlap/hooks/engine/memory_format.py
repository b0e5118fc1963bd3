"""Finds parameters whose memory format was changed after DDP had laid out its buckets."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from overlap._torch.device import has_streams
from overlap.errors import TrainingLoopError
from overlap.hooks.bucket import Bucket

__all__ = ["MemoryFormats"]

Strides = tuple[int, ...]


class MemoryFormats:
    """Checks that gradients lie in the buckets as the parameters lie in memory.

    DDP lays out a bucket once, by the strides that its parameters then have, and does not tell which those were. So the
    first time that a bucket comes, and when strides have changed, what lies in it is compared with ``.grad``. Where the
    host runs ahead of the device it cannot look at values: there strides must be those at registration.

    Args:
        parameters: those of the model, as they are at registration, where they are known.
    """

    def __init__(self, parameters: Iterable[Tensor] = ()) -> None:
        self._at_first = {id(parameter): parameter.stride() for parameter in parameters}
        self._checked: dict[int, Strides] = {}
        self._layouts: set[tuple[tuple[int, Strides], ...]] = set()

    @torch.no_grad()
    def refusal(self, bucket: Bucket) -> TrainingLoopError | None:
        """The error to raise, if a gradient lies otherwise than its parameter; ``bucket`` is as DDP has filled it."""
        layout = _layout(bucket)
        if layout in self._layouts or bucket.buffer.is_sparse:
            return None
        if has_streams(bucket.buffer.device):
            return self._refusal_by_strides(bucket)
        is_certain = True
        for place, (parameter, gradient) in enumerate(zip(bucket.parameters, bucket.gradients, strict=True)):
            before = self._checked.get(id(parameter))
            if before == parameter.stride() or sum(length > 1 for length in parameter.shape) < 2:
                continue
            found = _strides_in_bucket(parameter, gradient, bucket.buffer, before)
            if found is None:
                is_certain = False
            elif not found or not _is_same_order(found, gradient):
                return _error(bucket, place, found)
            else:
                self._checked[id(parameter)] = parameter.stride()
        if is_certain:
            self._layouts.add(layout)
        return None

    def _refusal_by_strides(self, bucket: Bucket) -> TrainingLoopError | None:
        for place, parameter in enumerate(bucket.parameters):
            before = self._at_first.setdefault(id(parameter), parameter.stride())
            if not _is_same_order(before, parameter):
                return _error(bucket, place, before)
        self._layouts.add(_layout(bucket))
        return None

    def has_checked(self, bucket: Bucket) -> bool:
        """Whether :meth:`refusal` has found that the gradients of ``bucket`` lie as its parameters do."""
        return _layout(bucket) in self._layouts


def _layout(bucket: Bucket) -> tuple[tuple[int, Strides], ...]:
    return tuple((id(parameter), parameter.stride()) for parameter in bucket.parameters)


def _error(bucket: Bucket, place: int, strides: Strides) -> TrainingLoopError:
    parameter = bucket.parameters[place]
    name = bucket.fqns[place] if bucket.fqns else f"a parameter of shape {tuple(parameter.shape)}"
    had = f"had {strides}" if strides else "had others"
    return TrainingLoopError(
        f"{name} has strides {parameter.stride()}, but {had} when DistributedDataParallel was built, which "
        "still lays out its gradient in that way: after model.to(memory_format=...) build DistributedDataParallel anew "
        "and register again"
    )


def _strides_in_bucket(parameter: Tensor, gradient: Tensor, buffer: Tensor, before: Strides | None) -> Strides | None:
    """The strides of the gradient in the bucket, ``()`` if it is not there; ``None`` if values do not tell."""
    grad = parameter.grad
    if grad is None or grad.shape != gradient.shape or grad.dtype != gradient.dtype or grad.is_sparse:
        return None
    if grad.untyped_storage().data_ptr() == buffer.untyped_storage().data_ptr():
        return grad.stride()  # gradient_as_bucket_view=True
    others = [
        strides
        for strides in (*_usual_strides(gradient), *(() if before is None else (before,)))
        if not _is_same_order(strides, gradient)
    ]
    if _holds(grad, gradient, gradient.stride()):
        return None if any(_holds(grad, gradient, strides) for strides in others) else gradient.stride()
    found = next((strides for strides in others if _holds(grad, gradient, strides)), None)
    # Other hooks may have changed .grad meanwhile; a parameter of unusual strides is a stronger hint.
    return () if found is None and (before is not None or not gradient.is_contiguous()) else found


def _usual_strides(tensor: Tensor) -> list[Strides]:
    """Those of the memory formats, and of a transposed matrix."""
    dims = range(tensor.ndim)
    orders = [tuple(dims), tuple(reversed(dims)), (0, *dims[2:], 1)]
    return [_strides_of(tensor.shape, order) for order in orders]


def _strides_of(shape: torch.Size, order: tuple[int, ...]) -> Strides:
    """The strides of a dense tensor whose dimensions lie in memory in this order, the outermost first."""
    strides, step = [0] * len(shape), 1
    for dim in reversed(order):
        strides[dim] = step
        step *= shape[dim]
    return tuple(strides)


def _is_same_order(strides: Strides, tensor: Tensor) -> bool:
    """Whether the elements are in the same order; the stride of a dimension of one element does not matter."""
    pairs = zip(tensor.shape, strides, tensor.stride(), strict=True)
    return all(length == 1 or one == other for length, one, other in pairs)


def _holds(grad: Tensor, gradient: Tensor, strides: Strides) -> bool:
    candidate = gradient.as_strided(gradient.size(), strides)
    return bool(((candidate == grad) | (candidate.isnan() & grad.isnan())).all())
