"""Wrapped modules have the gradients and random numbers of plain ones, also in DDP and under torch.compile."""

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from activations.test_wrappers import WRAPPERS
from harness import assert_parity, on_ranks, overlapped_step, train, wrap
from harness.models import BATCH_NORM, TRANSFORMER
from overlap import AllReduce, OverlappedOptimizer, Step, chain
from overlap.activations import apply_activation_checkpointing, checkpoint_wrapper, offload_wrapper


class Block(nn.Module):
    """Dropout, several outputs, arguments by name, a buffer, a non-contiguous and an expanded tensor, a double."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.first = nn.Linear(width, width)
        self.norm = nn.BatchNorm1d(width)
        self.second = nn.Linear(width, width)
        self.drop = nn.Dropout(0.5)
        self.calls = [0]  # The contents of a list are not restored when the forward runs again.

    def forward(self, x: Tensor, *, scale: Tensor, use_reentrant: bool = False) -> tuple[Tensor, dict[str, Tensor]]:
        self.calls[0] += 1
        hidden = self.drop(self.norm(self.first(x)).relu()) * scale.expand_as(x)
        out = self.second(hidden.t().contiguous().t()) if use_reentrant else hidden
        return out, {"double": out.double().tanh(), "same": out.exp().t() @ out}


def _gradients(module: nn.Module, plain: nn.Module, *, bf16: bool = False) -> list[Tensor]:
    torch.manual_seed(1)
    plain.zero_grad()
    x, scale = torch.randn(32, 64, requires_grad=True), torch.randn(64, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=bf16):
        out, more = module(x, scale=scale, use_reentrant=True)
    (out.sum() + more["double"].sum() + more["same"].square().mean()).backward()
    return [p.grad.clone() for p in (*plain.parameters(), x, scale)] + [torch.rand(3)]  # type: ignore[union-attr]


@pytest.mark.parametrize("name", WRAPPERS)
def test_gradients_and_random_numbers_are_equal_in_every_step(name: str) -> None:
    plain = Block()
    references = [_gradients(plain, plain, bf16=bf16) for bf16 in (False, True)]
    plain.calls = [0]
    wrapped = WRAPPERS[name](plain)
    for step in range(4):
        assert_parity(_gradients(wrapped, plain, bf16=step % 2 == 1), references[step % 2], what=name)
    assert plain.calls[0] == (4 if name == "offload" else 8), "recomputed, or not"
    with torch.no_grad():
        wrapped(torch.randn(4, 64), scale=torch.ones(64))
    assert plain.calls[0] == (5 if name == "offload" else 9)


def test_gradients_of_gradients_are_equal() -> None:
    plain = nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh())
    leaf = torch.randn(16, 32)
    results = []
    for module in (plain, offload_wrapper(plain), checkpoint_wrapper(offload_wrapper(plain))):
        x = leaf.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(module(x).square().sum(), x, create_graph=True)
        found = torch.autograd.grad(gradient.square().sum(), [x, *plain.parameters()], allow_unused=True)
        results.append([one for one in found if one is not None])
    assert_parity(results[1], results[0], what="offloaded")
    assert_parity(results[2], results[0], what="offloaded in a checkpoint")


# What stays on the device ------------------------------------------------------------------------------------


class Function(nn.Module):
    """A function of one tensor, with a parameter that scales it."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function, self.scale = function, nn.Parameter(torch.tensor(2.0))

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x * self.scale)


class Subclass(Tensor):
    """Its elements may not be all of it."""


def _sparse(x: Tensor) -> Tensor:
    with torch.sparse.check_sparse_tensor_invariants():
        return torch.sparse.mm(torch.eye(len(x)).to_sparse(), x)


FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "dense": lambda x: x.exp(),
    "no dimension": lambda x: x.sum().exp(),
    "conjugated": lambda x: (torch.complex(x, x).conj() * torch.complex(x, -x)).real,
    "negated": lambda x: torch.complex(x, x).conj().imag.square(),
    "bfloat16": lambda x: x.bfloat16().tanh().float(),
    "bool": lambda x: x.masked_fill(x > 0, 1.0).square(),
    "with gaps": lambda x: x[:, ::2].t().square(),
    "no elements": lambda x: x[:0].exp(),
    "expanded": lambda x: x * torch.ones(1, 1).expand_as(x),
    "sparse": _sparse,
    "a subclass": lambda x: x * torch.ones(32, 32).as_subclass(Subclass),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_any_saved_tensor_comes_back(name: str) -> None:
    plain = Function(FUNCTIONS[name])
    leaf = torch.randn(32, 32)
    results = []
    for module in (plain, offload_wrapper(plain)):
        x = leaf.clone().requires_grad_()
        plain.zero_grad()
        out = module(x)
        out.sum().backward(retain_graph=True)
        out.sum().backward()
        results.append([out.detach().as_subclass(Tensor), x.grad, plain.scale.grad])
    assert_parity(results[1], results[0], what=name)


def test_bytes_that_are_kept_for_backward() -> None:
    nbytes = 256 * 128 * 4

    def saved_bytes(module: nn.Module) -> int:
        storages: dict[int, int] = {}
        own = {p.untyped_storage().data_ptr() for p in module.parameters()}

        def pack(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in own:
                storages[storage.data_ptr()] = storage.nbytes()
            return tensor

        with saved_tensors_hooks(pack, lambda tensor: tensor):
            out = module(torch.randn(256, 128)).sum()
        assert out.requires_grad
        return sum(storages.values())

    model = nn.Sequential(*(nn.Sequential(nn.Linear(128, 128), nn.Tanh()) for _ in range(6)))
    assert saved_bytes(model) == 7 * nbytes, "the input of each Linear and the last output"
    assert saved_bytes(checkpoint_wrapper(model)) == nbytes, "the arguments"
    for wrapped in (offload_wrapper(model), checkpoint_wrapper(model, offload_to_cpu=True)):
        assert saved_bytes(wrapped) == 0, "all of it goes through the wrapper's own hooks"


# In DDP ------------------------------------------------------------------------------------------------------


@on_ranks(2)
def test_in_ddp_with_a_chain_training_is_the_same_in_every_bit(rank: int, world_size: int) -> None:
    sgd = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)
    kinds = (nn.TransformerEncoderLayer, nn.Linear, nn.Tanh)
    for case in (TRANSFORMER, BATCH_NORM):
        results = []
        for name in (None, "checkpoint", "offload"):
            model = case.model()
            if name is not None:
                assert apply_activation_checkpointing(
                    model, lambda module: isinstance(module, kinds), checkpoint_wrapper_fn=WRAPPERS[name]
                )
            ddp = wrap(model, **case.ddp_options())
            optimizer = OverlappedOptimizer(sgd(ddp.parameters()))
            chain(AllReduce(), Step(optimizer)).register(ddp)
            results.append(train(ddp, optimizer, case.batches(rank, steps=4), step_fn=overlapped_step, gradients=True))
        assert_parity(results[1], results[0], what=f"checkpointed, {case}")
        assert_parity(results[2], results[0], what=f"offloaded, {case}")


# Under torch.compile -----------------------------------------------------------------------------------------


@on_ranks(1, backend=None)
def test_under_torch_compile_gradients_are_equal_and_batches_counted_once(rank: int, world_size: int) -> None:
    plain = nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 16))
    x = torch.randn(8, 16)
    reference: dict[str, Any] = {}
    for name, wrapper in {"plain": lambda module: module, **WRAPPERS}.items():
        module = copy.deepcopy(plain)
        wrapped = nn.Sequential(wrapper(module), nn.Identity())
        torch._dynamo.reset()
        step = (
            wrapped if name == "plain" else torch.compile(wrapped, backend="aot_eager", fullgraph=name == "checkpoint")
        )
        for _ in range(2):
            step(x).square().sum().backward()
        found = {"gradients": [p.grad for p in module.parameters()], "buffers": list(module.buffers())}
        reason = "compiled code may add up in another order"
        if name == "plain":
            reference = found
        else:
            assert_parity(found, reference, what=name, rtol=1e-5, atol=1e-6, reason=reason)
        if name not in ("plain", "checkpoint"):
            torch._dynamo.reset()
            with pytest.raises(torch._dynamo.exc.Unsupported, match="hooks on saved tensors, which are not traced"):
                torch.compile(wrapped, backend="aot_eager", fullgraph=True)(x)
