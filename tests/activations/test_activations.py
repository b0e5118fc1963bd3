"""Activations computed again or kept on the CPU: equal gradients, fewer bytes, and a module that is as it was."""

from __future__ import annotations

import copy
import functools
import gc
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.parallel import DistributedDataParallel

from harness import assert_parity, overlapped_step, run_ranks, train, wrap
from harness.models import BATCH_NORM, MLP, TRANSFORMER
from overlap import AllReduce, ConfigurationError, OverlappedOptimizer, Step, UnsupportedError, chain
from overlap.activations import (
    Checkpointed,
    Offloaded,
    apply_activation_checkpointing,
    checkpoint_wrapper,
    offload_wrapper,
    offloaded_bytes,
)

WRAPPERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "checkpoint": checkpoint_wrapper,
    "checkpoint, arguments offloaded": functools.partial(checkpoint_wrapper, offload_to_cpu=True),
    "offload": functools.partial(offload_wrapper, min_bytes=0),
    "both": lambda module: offload_wrapper(checkpoint_wrapper(module)),
}


class Block(nn.Module):
    """Dropout, several outputs, arguments by name, a buffer, a non-contiguous and an expanded tensor, a double."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.first = nn.Linear(width, width)
        self.norm = nn.BatchNorm1d(width)
        self.second = nn.Linear(width, width)
        self.drop = nn.Dropout(0.5)
        self.calls = 0

    def forward(self, x: Tensor, *, scale: Tensor, flag: bool = False, debug: Any = None) -> tuple[Tensor, dict]:
        self.calls += 1
        hidden = self.drop(self.norm(self.first(x)).relu()) * scale.expand_as(x)
        out = self.second(hidden.t().contiguous().t()) if flag else hidden
        return out, {"double": out.double().tanh(), "same": out.exp().t() @ out}


def _gradients(module: nn.Module, plain: nn.Module) -> list[Tensor]:
    torch.manual_seed(1)
    plain.zero_grad()
    x, scale = torch.randn(32, 64, requires_grad=True), torch.randn(64, requires_grad=True)
    out, more = module(x, scale=scale, flag=True, debug="ours")
    (out.sum() + more["double"].sum() + more["same"].square().mean()).backward()
    return [p.grad.clone() for p in (*plain.parameters(), x, scale)] + [torch.rand(3)]


@pytest.mark.parametrize("name", WRAPPERS)
def test_gradients_and_random_numbers_are_equal(name: str) -> None:
    plain = Block()
    reference = _gradients(plain, plain)
    wrapped = WRAPPERS[name](plain)
    for _ in range(3):
        assert_parity(_gradients(wrapped, plain), reference, what=name)
    assert plain.calls == 1 + 3 * (1 if name == "offload" else 2), "recomputed, or not"
    with torch.no_grad():
        plain.calls = 0
        wrapped(torch.randn(4, 64), scale=torch.ones(64))
        assert plain.calls == 1
    assert offloaded_bytes("cpu") == 0


@pytest.mark.parametrize("name", WRAPPERS)
def test_a_wrapped_module_is_as_it_was(name: str) -> None:
    plain = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    wrapped = WRAPPERS[name](plain)
    assert isinstance(wrapped, nn.Sequential) and isinstance(wrapped, Checkpointed | Offloaded)
    assert not isinstance(plain, Checkpointed | Offloaded)
    outer, inner = nn.ModuleDict({"layer": wrapped}), nn.ModuleDict({"layer": plain})
    for of in (nn.Module.named_parameters, nn.Module.named_buffers):
        assert [key for key, _ in of(outer)] == [key for key, _ in of(inner)]
    assert [key for key, _ in outer.named_modules()] == [key for key, _ in inner.named_modules()]
    assert list(outer.state_dict()) == list(inner.state_dict())
    assert len(wrapped) == 3 and wrapped[0] is plain[0] and wrapped[:2][1] is plain[1]
    inner.load_state_dict(outer.state_dict())
    outer.load_state_dict(nn.ModuleDict({"layer": copy.deepcopy(plain)}).state_dict())
    # One state under two faces: the mode, the dtype and a new attribute are the other's, too.
    wrapped.eval().double()
    assert not plain.training and plain[0].weight.dtype == torch.float64
    plain.answer = 42
    assert wrapped.answer == 42
    for twin in (pickle.loads(pickle.dumps(wrapped)), copy.deepcopy(wrapped)):
        assert type(twin) is type(wrapped) and twin.answer == 42
        assert_parity(twin.state_dict(), plain.state_dict(), what="a copy")
        twin[0].weight.data.zero_()
        assert plain[0].weight.any()
        assert twin(torch.ones(2, 4, dtype=torch.float64)).requires_grad


def test_hooks_of_the_module_run_once() -> None:
    calls: list[str] = []
    plain = nn.Linear(2, 2)
    plain.register_forward_pre_hook(lambda *_: calls.append("before"))
    wrapped = checkpoint_wrapper(plain)
    wrapped.register_forward_hook(lambda *_: calls.append("after"))
    wrapped(torch.ones(1, 2)).sum().backward()
    assert calls == ["before", "after"]


# Bytes -------------------------------------------------------------------------------------------------------


def _saved_bytes(module: nn.Module, x: Tensor) -> tuple[int, int, Tensor]:
    """What autograd keeps on the device for backward, parameters left out, and what is offloaded meanwhile."""
    storages: dict[int, int] = {}
    own = {p.untyped_storage().data_ptr() for p in module.parameters()}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        out = module(x).sum()
    return sum(storages.values()), offloaded_bytes("cpu"), out


def test_saved_bytes_drop() -> None:
    layers, rows, width = 6, 256, 128
    model = nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(layers)))
    x = torch.randn(rows, width)
    tensor_bytes = rows * width * 4
    kept, away, out = _saved_bytes(model, x)
    # The input of each Linear and the output of each Tanh, which is the next one's input.
    assert (kept, away) == ((layers + 1) * tensor_bytes, 0)
    del out
    checkpointed = copy.deepcopy(model)
    assert apply_activation_checkpointing(checkpointed, lambda m: isinstance(m, nn.Sequential)) == layers
    kept, away, out = _saved_bytes(checkpointed, x)
    assert (kept, away) == (layers * tensor_bytes, 0), "the input of each block alone"
    kept, away, out = _saved_bytes(checkpoint_wrapper(model), x)
    assert (kept, away) == (tensor_bytes, 0), "the input of all"
    kept, away, out = _saved_bytes(checkpoint_wrapper(model, offload_to_cpu=True), x)
    assert (kept, away) == (0, tensor_bytes)
    del out
    kept, away, out = _saved_bytes(offload_wrapper(model), x)
    # Saved twice where it is one's output and the next one's input: once for each that saves it; no parameters.
    assert (kept, away) == (0, 2 * layers * tensor_bytes)
    out.backward()
    del out
    gc.collect()
    assert offloaded_bytes("cpu") == 0
    kept, away, out = _saved_bytes(offload_wrapper(model, min_bytes=tensor_bytes + 1), x)
    assert away == 0
    kept, away, out = _saved_bytes(offload_wrapper(model), x)
    model.zero_grad()
    out.backward(retain_graph=True)
    first = model[0][0].weight.grad.clone()
    out.backward()
    assert torch.equal(model[0][0].weight.grad, 2 * first)


def test_buffers_are_lent_again_and_dropped_when_shapes_change() -> None:
    from overlap.activations.store import Store

    store = Store(torch.device("cpu"))
    tensors = [torch.randn(8, 5).t(), torch.randn(3, 4, 5)[:, 1], torch.randn(2, 3, dtype=torch.complex64)]
    stored = [store.put(tensor) for tensor in tensors]
    pointers = {one.host.data_ptr() for one in stored}
    assert len(pointers) == 3 and store.lent_bytes == 3 * 512
    for tensor, one in zip(tensors, stored, strict=True):
        for _ in range(2):
            assert_parity(one.fetch(), tensor, what="a tensor that was away")
    assert stored[0].fetch().stride() == tensors[0].stride()
    del stored, one
    gc.collect()
    assert (store.lent_bytes, store.free_bytes) == (0, 3 * 512)
    again = [store.put(tensor) for tensor in tensors]
    assert {one.host.data_ptr() for one in again} == pointers
    del again
    gc.collect()
    large = store.put(torch.zeros(128))
    other = store.put(torch.zeros(4096))
    assert store.free_bytes == 2 * 512, "as much is lent as is not"
    del large, other
    gc.collect()
    store.put(torch.zeros(1000))
    assert store.free_bytes == 4096, "only what is of use is kept"


# Models ------------------------------------------------------------------------------------------------------


def _in_ddp(rank: int, world_size: int) -> None:
    sgd = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)
    for case in (MLP, TRANSFORMER, BATCH_NORM):
        results = []
        for name in (None, "checkpoint", "offload"):
            model = case.model()
            if name is not None:
                kinds = (nn.Linear, nn.Tanh) if case is MLP else (nn.TransformerEncoderLayer, nn.Linear)
                assert apply_activation_checkpointing(
                    model, lambda m, kinds=kinds: isinstance(m, kinds), checkpoint_wrapper_fn=WRAPPERS[name]
                )
            ddp = wrap(model, **case.ddp_options())
            optimizer = OverlappedOptimizer(sgd(ddp.parameters()))
            chain(AllReduce(), Step(optimizer)).register(ddp)
            results.append(train(ddp, optimizer, case.batches(rank, steps=4), step_fn=overlapped_step, gradients=True))
        assert_parity(results[1], results[0], what=f"checkpointed, {case}")
        assert_parity(results[2], results[0], what=f"offloaded, {case}")
    with pytest.raises(UnsupportedError, match="DDP last"):
        checkpoint_wrapper(ddp)


def test_in_ddp_with_a_chain_training_is_the_same_in_every_bit() -> None:
    run_ranks(_in_ddp, 2)


def _compiled(rank: int, world_size: int) -> None:
    plain = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16))
    x = torch.randn(8, 16)
    plain(x).square().sum().backward()
    reference = [p.grad.clone() for p in plain.parameters()]
    for name, wrapper in WRAPPERS.items():
        for fullgraph in (False, True):
            plain.zero_grad()
            torch._dynamo.reset()
            compiled = torch.compile(
                nn.Sequential(wrapper(plain), nn.Identity()), backend="aot_eager", fullgraph=fullgraph
            )
            if fullgraph and name != "checkpoint":
                with pytest.raises(torch._dynamo.exc.Unsupported, match="hooks on saved tensors, which are not traced"):
                    compiled(x)
                continue
            compiled(x).square().sum().backward()
            assert_parity(
                [p.grad for p in plain.parameters()],
                reference,
                what=f"{name}, compiled",
                exact=False,
                rtol=1e-5,
                atol=1e-6,
                reason="compiled code may add up in another order",
            )
    with pytest.raises(UnsupportedError, match="wrap the module first and compile it then"):
        checkpoint_wrapper(compiled)


def test_under_torch_compile() -> None:
    run_ranks(_compiled, 1, backend=None)


def test_modules_in_several_places_are_wrapped_once() -> None:
    shared = nn.Linear(2, 2)
    model = nn.ModuleDict({"a": nn.Sequential(shared, nn.ReLU()), "b": nn.ModuleList([shared])})
    assert apply_activation_checkpointing(model) == 3
    assert model["a"][0] is model["b"][0] and isinstance(model["a"][0], Checkpointed)
    assert isinstance(model["a"], Checkpointed) and isinstance(model["a"][1], nn.ReLU)
    assert list(model.state_dict()) == ["a.0.weight", "a.0.bias", "b.0.weight", "b.0.bias"]
    model["a"](torch.ones(1, 2)).sum().backward()
    assert shared.weight.grad is not None
    with pytest.raises(ConfigurationError, match="wrap it once"):
        apply_activation_checkpointing(model)
    with pytest.raises(ConfigurationError, match="check_fn returned CheckpointedLinear for Sequential"):
        apply_activation_checkpointing(
            nn.Sequential(nn.Sequential()), lambda module: checkpoint_wrapper(nn.Linear(1, 1))
        )


def test_bad_input_is_named() -> None:
    with pytest.raises(ConfigurationError, match=r"is no nn.Module"):
        checkpoint_wrapper(torch.relu)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="ModuleList has no forward; wrap the modules in it"):
        offload_wrapper(nn.ModuleList())
    with pytest.raises(ConfigurationError, match="min_bytes is -1"):
        offload_wrapper(nn.ReLU(), min_bytes=-1)
    with pytest.raises(ConfigurationError, match="offload_to_cpu is 'yes'"):
        checkpoint_wrapper(nn.ReLU(), "yes")  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="determinism_check is 'maybe'"):
        checkpoint_wrapper(nn.ReLU(), determinism_check="maybe")  # type: ignore[arg-type]
    patched = nn.ReLU()
    patched.forward = lambda x: x  # type: ignore[method-assign]
    with pytest.raises(ConfigurationError, match="forward of this ReLU was replaced on the instance"):
        checkpoint_wrapper(patched)
    lazy = nn.LazyLinear(2)
    with pytest.raises(UnsupportedError, match=r"LazyLinear has parameters without a shape.*call it once"):
        checkpoint_wrapper(lazy)
    lazy(torch.ones(1, 3))
    assert checkpoint_wrapper(lazy)(torch.ones(1, 3)).shape == (1, 2)
    with pytest.raises(ConfigurationError, match="the wrapper is given by name, checkpoint_wrapper_fn"):
        apply_activation_checkpointing(nn.Sequential(nn.ReLU()), checkpoint_wrapper)  # type: ignore[arg-type]
    compiled = nn.ReLU()
    compiled.compile(backend="eager")
    with pytest.raises(UnsupportedError, match="has been compiled"):
        checkpoint_wrapper(compiled)


# On a GPU ----------------------------------------------------------------------------------------------------


def _on_gpu(rank: int, world_size: int) -> list[int]:
    peaks = []
    torch.manual_seed(0)
    plain = nn.Sequential(*(nn.Sequential(nn.Linear(1024, 1024), nn.ReLU(), nn.Dropout(0.1)) for _ in range(16))).cuda()
    x = torch.randn(8192, 1024, device="cuda")
    reference: list[Tensor] = []
    for wrapper in (lambda module: module, offload_wrapper, checkpoint_wrapper, WRAPPERS["both"]):
        model = nn.Sequential(*(wrapper(block) for block in plain))
        for _ in range(4):  # Buffers of the first step are lent again in the next, while copies are under way.
            torch.manual_seed(3)
            plain.zero_grad()
            torch.cuda.reset_peak_memory_stats()
            model(x).square().mean().backward()
            peak = torch.cuda.max_memory_allocated()
            got = [p.grad.clone() for p in plain.parameters()]
            if not reference:
                reference = got
            else:
                assert all(torch.equal(one, other) for one, other in zip(got, reference, strict=True))
        peaks.append(peak)
    assert offloaded_bytes() == 0
    return peaks


@pytest.mark.gpu
def test_on_a_gpu_gradients_are_equal_and_the_peak_is_lower() -> None:
    ((plain, offloaded, checkpointed, both),) = run_ranks(_on_gpu, 1, backend=None, timeout_s=120)
    print(f"peak MB: {plain >> 20} plain, {offloaded >> 20} offloaded, {checkpointed >> 20}, {both >> 20} both")
    assert offloaded < 0.8 * plain and checkpointed < 0.8 * plain and both < 0.8 * plain


@pytest.mark.gpu
def test_copies_go_on_beside_the_computation() -> None:
    def overlapping(rank: int, world_size: int) -> int:
        from torch.profiler import ProfilerActivity, profile

        block = offload_wrapper(nn.Sequential(*(nn.Linear(2048, 2048) for _ in range(8))).cuda())
        x = torch.randn(8192, 2048, device="cuda")
        block(x).sum().backward()
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            block(x).sum().backward()
            torch.cuda.synchronize()
        events = [event for event in profiler.events() or [] if event.device_type.name == "CUDA"]
        copies = [event for event in events if "Memcpy" in event.name]
        kernels = [event for event in events if "Memcpy" not in event.name]
        return sum(
            any(k.time_range.start < c.time_range.end and c.time_range.start < k.time_range.end for k in kernels)
            for c in copies
        )

    (beside,) = run_ranks(overlapping, 1, backend=None, timeout_s=120)
    assert beside >= 4


def test_ddp_inside_is_refused() -> None:
    def refused(rank: int, world_size: int) -> None:
        with pytest.raises(UnsupportedError, match="DistributedDataParallel in it"):
            offload_wrapper(nn.Sequential(DistributedDataParallel(nn.Linear(2, 2))))

    run_ranks(refused, 1)
