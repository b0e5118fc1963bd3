"""Running a forward again in backward finds the state that the first run found, and leaves nothing behind."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils import parametrizations, prune

from harness import assert_parity
from overlap.activations import apply_activation_checkpointing, checkpoint_wrapper


class MovingScale(nn.Module):
    """Its output depends on attributes and buffers, which it changes in place, through ``.data`` and by assignment."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.register_buffer("in_place", torch.ones(width))
        self.register_buffer("by_data", torch.ones(width))
        self.register_buffer("assigned", torch.ones(width))
        self.register_buffer("large", torch.ones(600, 600))
        self.register_buffer("nothing", None)
        self.calls, self.rate, self.last = 0, 1.0, None

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.rate *= 0.9
        scale = self.in_place * self.by_data * self.assigned * self.large[0, 0]
        self.last = out = (self.linear(x) * scale).tanh() * self.rate
        mean = x.detach().mean(0)
        self.in_place.mul_(0.9).add_(0.1 * mean)
        self.by_data.data.mul_(0.9).add_(0.1 * mean)
        self.assigned = 0.9 * self.assigned + 0.1 * mean
        self.large.mul_(0.9)
        return out


def _around(make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(nn.Linear(8, 8), make(), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 8))


def _pruned() -> nn.Module:
    layer = nn.Linear(8, 8)
    prune.random_unstructured(layer, "weight", amount=0.5)
    return layer


def _nested() -> nn.Module:
    model = nn.Sequential(nn.Sequential(MovingScale(), nn.BatchNorm1d(8)), nn.Tanh(), nn.BatchNorm1d(8))
    model[2].running_mean = model[0][1].running_mean  # One buffer in two modules.
    apply_activation_checkpointing(model)
    return model


MODULES: dict[str, Callable[[], nn.Module]] = {
    "BatchNorm": _around(lambda: nn.BatchNorm1d(8)),
    "BatchNorm itself, momentum=None": lambda: nn.BatchNorm1d(8, momentum=None),
    "buffers and attributes": _around(MovingScale),
    "buffers of the module itself": MovingScale,
    "wrapped inside too": _nested,
    "spectral_norm": lambda: nn.utils.spectral_norm(nn.Linear(8, 8)),
    "spectral_norm as a parametrization inside": _around(lambda: parametrizations.spectral_norm(nn.Linear(8, 8))),
    "pruned": _pruned,
}


def _step(module: nn.Module, step: int, *, changes_mode: bool) -> list[Tensor]:
    """Two forwards, and two backwards through both."""
    torch.manual_seed(step)
    module.zero_grad()
    module.train()
    first, second = torch.randn(16, 8, requires_grad=True), torch.randn(16, 8)
    loss = module(first).square().mean() + module(second).sin().mean()
    module.train(not changes_mode)
    versions = [buffer._version for buffer in module.buffers()]
    loss.backward(retain_graph=True)
    loss.backward()
    assert [buffer._version for buffer in module.buffers()] == versions, "the buffers themselves stay as they are"
    gradients = [p.grad for p in module.parameters() if p.grad is not None]
    counters = [torch.tensor([m.calls, m.rate]) for m in module.modules() if isinstance(m, MovingScale)]
    return [loss.detach(), first.grad, *gradients, *module.buffers(), *counters, torch.rand(2)]  # type: ignore[list-item]


@pytest.mark.parametrize("name", MODULES)
def test_a_checkpointed_module_is_in_every_bit_what_it_is_without(name: str) -> None:
    torch.manual_seed(7)
    plain = MODULES[name]()
    torch.manual_seed(7)
    wrapped = checkpoint_wrapper(MODULES[name]())
    for step in range(3):
        reference = _step(plain, step, changes_mode=step == 2)
        got = _step(wrapped, step, changes_mode=step == 2)
        assert_parity(got, reference, what=f"{name}, step {step}")
    assert_parity(wrapped.state_dict(), plain.state_dict(), what=name)


def test_a_forward_that_fails_in_backward_leaves_nothing_behind_either() -> None:
    class Fails(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.runs = nn.BatchNorm1d(8), []

        def forward(self, x: Tensor) -> Tensor:
            self.runs.append(1)
            out = self.norm(x)
            if len(self.runs) == 2:
                raise ValueError("the second time")
            return out.tanh()

    module = Fails()
    out = checkpoint_wrapper(module)(torch.randn(4, 8, requires_grad=True))
    mean = module.norm.running_mean
    with pytest.raises(ValueError, match="the second time"):
        out.sum().backward()
    assert module.norm.running_mean is mean and module.norm.num_batches_tracked == 1


def test_with_exchanged_parameters_it_runs_again_with_those() -> None:
    plain = MODULES["BatchNorm"]()
    wrapped = checkpoint_wrapper(copy.deepcopy(plain))
    results = []
    for module in (plain, wrapped):
        torch.manual_seed(0)
        exchanged = {name: torch.randn_like(p).requires_grad_() for name, p in module.named_parameters()}
        out = functional_call(module, exchanged, (torch.randn(16, 8),))
        out.square().mean().backward()
        results.append([value.grad for value in exchanged.values()])
    assert_parity(results[1], results[0], what="gradients of the exchanged parameters")
    assert all(p.grad is None for p in wrapped.parameters())
