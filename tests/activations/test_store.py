"""The store of offloaded tensors: they come back as they were, and buffers are used again."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import Tensor, nn

from harness import assert_parity
from overlap import ConfigurationError
from overlap.activations import limit_offload_pool, offload_wrapper, release_offload_pool
from overlap.activations.store import Store, store_of


def _tensors() -> list[Tensor]:
    """A transposed one, a slice and a complex one: each fits a buffer of 512 bytes."""
    return [torch.randn(8, 5).t(), torch.randn(3, 4, 5)[:, 1], torch.randn(2, 3, dtype=torch.complex64)]


def test_a_stored_tensor_comes_back_as_often_as_it_is_fetched() -> None:
    store, tensors = Store(torch.device("cpu")), _tensors()
    stored = [store.put(tensor) for tensor in tensors]
    for tensor, one in zip(tensors, stored, strict=True):
        for _ in range(2):
            assert_parity(one.fetch(), tensor, what="a tensor that was stored")
    assert stored[0].fetch().stride() == tensors[0].stride()


def test_buffers_are_used_again() -> None:
    store, tensors = Store(torch.device("cpu")), _tensors()
    stored = [store.put(tensor) for tensor in tensors]
    pointers = {one.host.data_ptr() for one in stored}
    assert len(pointers) == 3 and store.lent_bytes == 3 * 512
    del stored
    gc.collect()
    assert (store.lent_bytes, store.free_bytes) == (0, 3 * 512)
    again = [store.put(tensor) for tensor in tensors]
    assert {one.host.data_ptr() for one in again} == pointers


def test_buffers_are_dropped_when_shapes_change() -> None:
    store, tensors = Store(torch.device("cpu")), _tensors()
    stored = [store.put(tensor) for tensor in tensors]
    del stored
    gc.collect()
    large = store.put(torch.zeros(128))
    other = store.put(torch.zeros(4096))
    assert store.free_bytes == 2 * 512, "as much is lent as is not"
    del large, other
    gc.collect()
    store.put(torch.zeros(1000))
    assert store.free_bytes == 4096, "only what is of use is kept"


def test_what_is_kept_between_steps_has_a_bound_and_can_be_released() -> None:
    block = offload_wrapper(nn.Sequential(*(nn.Tanh() for _ in range(5))))
    x = torch.ones(2**22, requires_grad=True)
    store = store_of(torch.device("cpu"))
    block(x).square().sum().backward()
    assert 0 < store.free_bytes <= 64 * 2**20, "a step of 80 MB leaves at most 64 MB behind"
    limit_offload_pool(2**25, "cpu")
    try:
        block(x).square().sum().backward()
        assert store.free_bytes <= 2**25
        limit_offload_pool(0, "cpu")
        assert store.free_bytes == 0
        block(x).square().sum().backward()
        assert (store.free_bytes, store.lent_bytes) == (0, 0)
    finally:
        limit_offload_pool(64 * 2**20, "cpu")
    block(x[:1000]).sum().backward()
    assert release_offload_pool() >= 5 * 4000 and store.free_bytes == 0
    assert release_offload_pool() == 0


@pytest.mark.parametrize("wrong", [-1, 1.5, True, "64 MB"])
def test_a_bound_that_is_not_a_number_of_bytes_is_refused(wrong: object) -> None:
    with pytest.raises(ConfigurationError, match="nbytes must be a whole number of at least 0, got"):
        limit_offload_pool(wrong, "cpu")  # type: ignore[arg-type]
