"""Which saved tensors are kept on the CPU, and that none is lost count of when something fails."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from harness import assert_parity
from overlap.activations import checkpoint_wrapper, offload_wrapper, offloaded_bytes, store
from overlap.activations.store import Store

CPU = torch.device("cpu")


class Function(nn.Module):
    """A module that calls a function of one tensor, with a parameter that scales it."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function, self.scale = function, nn.Parameter(torch.tensor(2.0))

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x * self.scale)


class Subclass(Tensor):
    """One whose values are no more than those of its elements, which is not for the store to know."""


def _sparse(x: Tensor) -> Tensor:
    with torch.sparse.check_sparse_tensor_invariants():
        return torch.sparse.mm(torch.eye(len(x)).to_sparse(), x)


FUNCTIONS: dict[str, tuple[Callable[[Tensor], Tensor], bool]] = {
    "dense": (lambda x: x.exp(), True),
    "no dimension": (lambda x: x.sum().exp(), True),
    "conjugated": (lambda x: (torch.complex(x, x).conj() * torch.complex(x, -x)).real, True),
    "bfloat16": (lambda x: x.bfloat16().tanh().float(), True),
    "bool": (lambda x: x.masked_fill(x > 0, 1.0).square(), True),
    "with gaps": (lambda x: x[:, ::2].t().square(), True),
    "no elements": (lambda x: x[:0].exp(), False),
    "expanded": (lambda x: x * torch.ones(1, 1).expand_as(x), False),
    "sparse": (_sparse, False),
    "a subclass": (lambda x: x * torch.ones(8, 8).as_subclass(Subclass), False),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_any_tensor_comes_back_and_some_stay_where_they_are(name: str) -> None:
    function, is_stored = FUNCTIONS[name]
    plain = Function(function)
    leaf = torch.randn(8, 8)
    results = []
    for module in (plain, offload_wrapper(plain, min_bytes=0)):
        x = leaf.clone().requires_grad_()
        plain.zero_grad()
        out = module(x)
        # The input is saved for the parameter's gradient.
        more = offloaded_bytes("cpu") > 512
        out.sum().backward()
        results.append([out.detach().as_subclass(Tensor), x.grad, plain.scale.grad])
    assert more is is_stored
    assert_parity(results[1], results[0], what=name)
    del out
    gc.collect()
    assert offloaded_bytes("cpu") == 0


@pytest.mark.parametrize("wrap", [offload_wrapper, lambda m: checkpoint_wrapper(offload_wrapper(m))], ids=["", "both"])
def test_gradients_of_gradients_are_equal(wrap: Callable[[nn.Module], nn.Module]) -> None:
    plain = nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh())
    leaf = torch.randn(16, 32)
    results = []
    for module in (plain, wrap(plain)):
        x = leaf.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(module(x).square().sum(), x, create_graph=True)
        results.append(torch.autograd.grad(gradient.square().sum(), [x, *plain.parameters()], allow_unused=True))
    assert results[0][0].abs().sum() > 0
    assert_parity([r for r in results[1] if r is not None], [r for r in results[0] if r is not None], what="second")
    del results, gradient, x
    gc.collect()
    assert offloaded_bytes("cpu") == 0


def test_what_was_saved_before_a_change_in_place_is_what_backward_gets() -> None:
    x = torch.randn(32, 32, requires_grad=True)
    hidden = x * 1
    module = offload_wrapper(Function(lambda scaled: scaled.sum()))
    out = module(hidden)
    with torch.no_grad():
        hidden.zero_()
    out.backward()
    assert_parity([module.scale.grad], [x.detach().sum()], what="the gradient")


def test_a_default_device_is_not_where_buffers_are() -> None:
    module = offload_wrapper(nn.Tanh())
    x = torch.randn(32, 32, requires_grad=True)
    with torch.device("meta"):
        module(x).sum().backward()
    assert x.grad is not None and x.grad.device == CPU


@pytest.mark.parametrize("fails", ["the buffer", "the copy"])
def test_a_failure_while_storing_leaves_nothing_behind(fails: str, monkeypatch: pytest.MonkeyPatch) -> None:
    to = Store(CPU)

    def fail(*args: object, **options: object) -> Tensor:
        raise RuntimeError("no memory")

    with monkeypatch.context() as patch:
        patch.setattr(*(store, "host_buffer") if fails == "the buffer" else (Tensor, "copy_"), fail)
        with pytest.raises(RuntimeError, match="no memory"):
            to.put(torch.ones(256))
    gc.collect()
    assert to.lent_bytes == 0
    assert to.put(torch.ones(256)).fetch()[0] == 1


def test_a_forward_and_a_backward_that_fail_leave_nothing_behind() -> None:
    def fail(x: Tensor) -> Tensor:
        y = x.exp()
        if y.isnan().any():
            raise ValueError("in forward")
        y.register_hook(lambda gradient: 1 / 0)
        return y

    module = offload_wrapper(Function(fail))
    with pytest.raises(ValueError, match="in forward"):
        module(torch.full((32, 32), torch.nan, requires_grad=True))
    out = module(torch.ones(32, 32, requires_grad=True))
    with pytest.raises(ZeroDivisionError):
        out.sum().backward()
    del out
    gc.collect()
    assert offloaded_bytes("cpu") == 0
