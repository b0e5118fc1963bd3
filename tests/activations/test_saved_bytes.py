"""How much is kept on the device for backward, and how much on the CPU."""

from __future__ import annotations

import gc

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from overlap.activations import apply_activation_checkpointing, checkpoint_wrapper, offload_wrapper, offloaded_bytes

LAYERS, ROWS, WIDTH = 6, 256, 128
TENSOR_BYTES = ROWS * WIDTH * 4


def _model() -> nn.Sequential:
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(LAYERS)))


def _saved_bytes(module: nn.Module) -> tuple[int, int, Tensor]:
    """What autograd keeps on the device for backward, parameters left out, and what is offloaded meanwhile."""
    storages: dict[int, int] = {}
    own = {p.untyped_storage().data_ptr() for p in module.parameters()}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        out = module(torch.randn(ROWS, WIDTH)).sum()
    return sum(storages.values()), offloaded_bytes("cpu"), out


def test_a_plain_model_keeps_every_activation() -> None:
    kept, away, _out = _saved_bytes(_model())
    # The input of each Linear and the output of each Tanh, which is the next one's input.
    assert (kept, away) == ((LAYERS + 1) * TENSOR_BYTES, 0)


def test_a_model_with_checkpointed_blocks_keeps_the_input_of_each() -> None:
    model = _model()
    assert apply_activation_checkpointing(model, lambda module: isinstance(module, nn.Sequential)) == LAYERS
    kept, away, _out = _saved_bytes(model)
    assert (kept, away) == (LAYERS * TENSOR_BYTES, 0)


def test_a_checkpointed_model_keeps_its_input() -> None:
    kept, away, _out = _saved_bytes(checkpoint_wrapper(_model()))
    assert (kept, away) == (TENSOR_BYTES, 0)


def test_a_checkpointed_model_with_offloaded_arguments_keeps_nothing_on_the_device() -> None:
    kept, away, _out = _saved_bytes(checkpoint_wrapper(_model(), offload_to_cpu=True))
    assert (kept, away) == (0, TENSOR_BYTES)


def test_an_offloaded_model_keeps_its_activations_on_the_cpu_until_backward() -> None:
    kept, away, out = _saved_bytes(offload_wrapper(_model()))
    # Saved twice where it is one's output and the next one's input: once for each that saves it; no parameters.
    assert (kept, away) == (0, 2 * LAYERS * TENSOR_BYTES)
    out.backward()
    del out
    gc.collect()
    assert offloaded_bytes("cpu") == 0


def test_tensors_smaller_than_min_bytes_stay() -> None:
    _, away, _out = _saved_bytes(offload_wrapper(_model(), min_bytes=TENSOR_BYTES + 1))
    assert away == 0


def test_a_retained_graph_of_an_offloaded_model_runs_backward_twice() -> None:
    model = _model()
    _, _, out = _saved_bytes(offload_wrapper(model))
    out.backward(retain_graph=True)
    first = model[0][0].weight.grad.clone()
    out.backward()
    assert torch.equal(model[0][0].weight.grad, 2 * first)
