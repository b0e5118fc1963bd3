"""Memory formats on devices with streams, where the host must not wait for values."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from overlap.hooks.bucket import Bucket
from overlap.hooks.engine.memory_format import MemoryFormats


def _bucket(parameter: Tensor) -> Bucket:
    return Bucket(
        index=0,
        is_last=True,
        buffer=torch.zeros(parameter.numel(), device=parameter.device),
        parameters=(parameter,),
        group=None,  # type: ignore[arg-type]
        divisor=1,
        step=0,
        fqns=("weight",),
        views=((parameter.shape, parameter.stride(), 0),),
    )


def _parameter() -> nn.Parameter:
    # A value of this device cannot be read at all.
    parameter = nn.Parameter(torch.zeros(2, 3, 4, 5, device="meta"))
    parameter.grad = torch.zeros_like(parameter)
    return parameter


def test_formats_on_a_device_with_streams_are_told_apart_without_reading_a_value() -> None:
    parameter = _parameter()
    bucket = _bucket(parameter)
    formats = MemoryFormats([parameter])
    assert formats.refusal(bucket) is None and formats.refusal(bucket) is None
    parameter.data = parameter.data.to(memory_format=torch.channels_last)
    assert "weight has strides (60, 1, 15, 3), but had (60, 20, 5, 1) when" in str(formats.refusal(bucket))
    parameter.data = parameter.data.to(memory_format=torch.contiguous_format)
    assert formats.refusal(bucket) is None


def test_formats_of_parameters_that_are_not_known_at_registration_are_those_of_the_first_bucket() -> None:
    parameter = _parameter()
    bucket = _bucket(parameter)
    formats = MemoryFormats()
    assert formats.refusal(bucket) is None
    parameter.data = parameter.data.to(memory_format=torch.channels_last)
    assert formats.refusal(bucket) is not None
