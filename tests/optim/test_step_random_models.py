"""Parity on small models that Hypothesis draws: tied, frozen and unused parameters, odd shapes and dtypes."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from harness import assert_parity, overlapped_step, run_threads, train, wrap
from harness.models import Batch
from overlap import AllReduce, OverlappedOptimizer, Step, chain


@dataclass(frozen=True)
class Layer:
    """A parameter that takes part in a sum: `scale * sum(parameter * noise)`."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    is_frozen: bool
    use: str
    tied_to: int | None


SHAPES = st.sampled_from([(), (1,), (3,), (7, 5), (16, 16), (0, 4), (2, 3, 2, 1), (33,)])
LAYERS = st.builds(
    Layer,
    shape=SHAPES,
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
    is_frozen=st.booleans(),
    use=st.sampled_from(["always", "always", "never", "rank 0", "even steps"]),
    tied_to=st.none() | st.integers(0, 3),
)
MAKERS = {
    "sgd": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.1),
    "adamw": functools.partial(torch.optim.AdamW, lr=0.1, weight_decay=0.1, foreach=True),
    "rmsprop": functools.partial(torch.optim.RMSprop, lr=0.1, foreach=False),
}


class Drawn(nn.Module):
    def __init__(self, layers: list[Layer]) -> None:
        super().__init__()
        self.layers = layers
        # One that always counts, so that every model has something to train.
        self.base = nn.Parameter(torch.ones(4))
        self.drawn = nn.ParameterList()
        generator = torch.Generator().manual_seed(0)
        for layer in layers:
            if layer.tied_to is not None and layer.tied_to < len(self.drawn):
                self.drawn.append(self.drawn[layer.tied_to])
                continue
            values = torch.randn(layer.shape, generator=generator).to(layer.dtype)
            self.drawn.append(nn.Parameter(values, requires_grad=not layer.is_frozen))

    def forward(self, step: int, rank: int) -> Tensor:
        generator = torch.Generator().manual_seed(1000 * step + rank)
        total = (self.base * torch.randn(4, generator=generator)).sum()
        for layer, parameter in zip(self.layers, self.drawn, strict=True):
            noise = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
            is_used = {"never": False, "rank 0": rank == 0, "even steps": step % 2 == 0}.get(layer.use, True)
            if is_used:
                total = total + (parameter * noise).square().sum().float()
        return total


def _loss(ddp: nn.Module, batch: Batch) -> Tensor:
    loss: Tensor = ddp(*batch.inputs)
    return loss


def _both(rank: int, world_size: int, layers: list[Layer], maker: str, deferred: bool, view: bool) -> None:
    batches = [Batch((step, rank), torch.empty(0)) for step in range(4)]
    options: dict[str, Any] = {
        "find_unused_parameters": any(layer.use != "always" for layer in layers),
        "gradient_as_bucket_view": view,
        "bucket_cap_mb": 100 / 2**20,
    }
    make = MAKERS[maker]
    ddp = wrap(Drawn(layers), **options)
    reference = train(ddp, make(ddp.parameters()), batches, loss_of=_loss, min_buckets=1)
    ddp = wrap(Drawn(layers), **options)
    optimizer = OverlappedOptimizer(make(ddp.parameters()))
    chain(AllReduce(), Step(optimizer, deferred=deferred)).register(ddp)
    candidate = train(ddp, optimizer, batches, step_fn=overlapped_step, loss_of=_loss, min_buckets=1)
    assert_parity(candidate, reference, what="a drawn model")


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)
@given(
    layers=st.lists(LAYERS, min_size=1, max_size=6),
    maker=st.sampled_from(sorted(MAKERS)),
    deferred=st.booleans(),
    view=st.booleans(),
)
def test_drawn_models_equal_plain_ddp(layers: list[Layer], maker: str, deferred: bool, view: bool) -> None:
    run_threads(_both, 2, layers, maker, deferred, view)
