"""Gathers in the next forward, with weights that are made in hooks or read by other modules, and parameters added."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parametrizations, prune, spectral_norm, weight_norm

from harness import run_ranks, wrap
from overlap import ZeroRedundancyOptimizer, ZeroStep, chain

WIDTH = 16


def _pruned(model: Any) -> None:
    for layer in model[::2]:
        prune.l1_unstructured(layer, "weight", amount=0.3)


def _old_weight_norm(model: Any) -> None:
    for place in range(0, len(model), 2):
        model[place] = weight_norm(model[place])


def _old_spectral_norm(model: Any) -> None:
    for place in range(0, len(model), 2):
        model[place] = spectral_norm(model[place])


def _parametrized(model: Any) -> None:
    for layer in model[::2]:
        parametrizations.weight_norm(layer)


class _Scaled:
    """A hook of the user's that makes what the layer uses of its weight."""

    def __call__(self, layer: Any, inputs: Any) -> Any:
        return (inputs[0] + layer.weight.detach().sum(),)


def _hooked(model: Any) -> None:
    for layer in model[::2]:
        layer.register_forward_pre_hook(_Scaled(), prepend=True)


class _ReadsEarly(nn.Module):
    """Reads a weight of the last layer before the first layer is called."""

    def __init__(self, layers: nn.Module) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        last: Any = self.layers[-1]
        return self.layers(nn.functional.linear(inputs, last.weight))  # type: ignore[no-any-return]


class _CallsForward(nn.Module):
    """Calls the forward of a recurrent layer without its hooks."""

    def __init__(self) -> None:
        super().__init__()
        self.recurrent = nn.LSTM(WIDTH, WIDTH)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.recurrent.forward(inputs)[0]  # type: ignore[no-any-return]


def _read_by_another(model: Any) -> None:
    layers = nn.Sequential(*model)
    model.__init__(_ReadsEarly(layers))


def _tied(model: Any) -> None:
    model[6].weight = model[0].weight


def _recurrent(model: Any) -> None:
    model.insert(0, _CallsForward())


CHANGES: dict[str, tuple[Callable[[Any], None], bool]] = {
    "pruning": (_pruned, False),
    "old weight_norm": (_old_weight_norm, False),
    "old spectral_norm": (_old_spectral_norm, False),
    "parametrizations": (_parametrized, False),
    "pruning after registering": (_pruned, True),
    "a hook before registering": (_hooked, False),
    "a hook after registering": (_hooked, True),
    "weights that another module reads": (_read_by_another, False),
    "tied weights": (_tied, False),
    "forward called without hooks": (_recurrent, False),
}


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    layers = [layer for _ in range(3) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]
    return nn.Sequential(*layers, nn.Linear(WIDTH, WIDTH))


def _slow_down(zero: ZeroRedundancyOptimizer) -> None:
    gather = zero.exchange.gather

    async def slow_gather(shards: Any, group: Any) -> None:
        time.sleep(0.005)
        await gather(shards, group)

    object.__setattr__(zero.exchange, "gather", slow_gather)


def _train(rank: int, world_size: int, names: list[str]) -> None:
    warnings.simplefilter("ignore")  # The old functions are deprecated.
    for name in names:
        change, is_late = CHANGES[name]
        models = []
        for _ in range(2):
            model = _model()
            if not is_late:
                change(model)
            models.append(DistributedDataParallel(model, bucket_cap_mb=0.001))
        plain, ddp = models
        reference = torch.optim.AdamW(plain.parameters(), lr=0.01)
        zero = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.AdamW, lr=0.01, overlap_with_ddp=True)
        registration = chain(ZeroStep(zero, gather="forward")).register(ddp)
        _slow_down(zero)
        if is_late:
            change(plain.module)
            change(ddp.module)
        for step in range(5):
            inputs = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank))
            losses = []
            for model, optimizer in ((plain, reference), (ddp, zero)):
                optimizer.zero_grad()
                loss = model(inputs).square().mean()
                loss.backward()
                optimizer.step()
                losses.append(loss)
            assert torch.equal(*losses), (name, step)
        registration.remove()
        for ours, theirs in zip(ddp.parameters(), plain.parameters(), strict=True):
            assert torch.equal(ours, theirs), name


def test_weights_that_hooks_and_other_modules_read_are_waited_for() -> None:
    run_ranks(_train, 2, list(CHANGES))


def _add(rank: int, world_size: int) -> None:
    plain, ddp = (wrap(_model(), bucket_cap_mb=0.001) for _ in range(2))
    first, last = ({id(p) for p in model[0].parameters()} for model in (plain.module, ddp.module))
    reference = torch.optim.AdamW([p for p in plain.parameters() if id(p) not in first], lr=0.01)
    zero = ZeroRedundancyOptimizer(
        [p for p in ddp.parameters() if id(p) not in last], torch.optim.AdamW, lr=0.01, overlap_with_ddp=True
    )
    registration = chain(ZeroStep(zero, gather="forward")).register(ddp)
    _slow_down(zero)
    for step in range(7):
        if step == 3:
            reference.add_param_group({"params": list(plain.module[0].parameters())})
            zero.add_param_group({"params": list(ddp.module[0].parameters())})
        inputs = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank))
        losses = []
        for model, optimizer in ((plain, reference), (ddp, zero)):
            model.zero_grad()
            optimizer.zero_grad()
            loss = model(inputs).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss)
        assert torch.equal(*losses), step
    registration.remove()
    for ours, theirs in zip(ddp.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_parameters_added_after_registering_are_waited_for() -> None:
    run_ranks(_add, 2)
