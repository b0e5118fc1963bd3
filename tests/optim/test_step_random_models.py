"""Parity on small models that Hypothesis draws, of odd shapes and dtypes, tied, frozen and unused; and on chains."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from bucket_functions import centralize, clip_value, scale
from harness import assert_parity, overlapped_step, run_threads, train, wrap
from harness.models import Batch
from overlap import AllReduce, OverlappedOptimizer, Step, chain, route
from overlap.hooks import by_ndim


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


# Chains that Hypothesis draws: transforms, routes and two updates, beside the same by hand.


def _centralize(gradient: Tensor) -> None:
    if gradient.ndim > 1:
        gradient.sub_(gradient.mean(dim=tuple(range(1, gradient.ndim)), keepdim=True))


BY_HAND: dict[str, tuple[Callable[[Any], Any], Callable[[Tensor], Any]]] = {
    "scale": (scale(0.5), lambda gradient: gradient.mul_(0.5)),
    "clip": (clip_value(0.3), lambda gradient: gradient.clamp_(-0.3, 0.3)),
    "centralize": (centralize, _centralize),
}


@dataclass(frozen=True)
class Drawing:
    """A chain: what is scaled before the reducer, how it reduces, transforms of the mean, and the updates."""

    is_scaled: bool
    is_routed: bool
    transforms: tuple[str, ...]
    makers: tuple[str, ...]
    deferred: tuple[bool, bool]


DRAWINGS = st.builds(
    Drawing,
    is_scaled=st.booleans(),
    is_routed=st.booleans(),
    transforms=st.lists(st.sampled_from(sorted(BY_HAND)), max_size=3).map(tuple),
    makers=st.lists(st.sampled_from(sorted(MAKERS)), min_size=1, max_size=2).map(tuple),
    deferred=st.tuples(st.booleans(), st.booleans()),
)


def _optimizers(ddp: nn.Module, makers: tuple[str, ...]) -> list[torch.optim.Optimizer]:
    """The first has the first parameter and, if there are two, every second one."""
    trained = [parameter for parameter in ddp.parameters() if parameter.requires_grad]
    parts = [trained] if len(makers) == 1 or len(trained) < 2 else [trained[::2], trained[1::2]]
    return [MAKERS[maker](part) for maker, part in zip(makers, parts, strict=False)]


def _registered(ddp: Any, drawing: Drawing) -> list[Any]:
    optimizers = [OverlappedOptimizer(optimizer) for optimizer in _optimizers(ddp, drawing.makers)]
    has_matrix = any(parameter.ndim > 1 and parameter.requires_grad for parameter in ddp.parameters())
    is_routed = drawing.is_routed and has_matrix
    chain(
        *([scale(0.5)] if drawing.is_scaled else []),
        route({by_ndim(least=2): AllReduce(), "*": AllReduce()}) if is_routed else AllReduce(),
        *(BY_HAND[name][0] for name in drawing.transforms),
        *(Step(one, deferred=late) for one, late in zip(optimizers, drawing.deferred, strict=False)),
    ).register(ddp)
    return optimizers


def _both_chains(rank: int, world_size: int, layers: list[Layer], drawing: Drawing) -> None:
    options: dict[str, Any] = {
        "find_unused_parameters": any(layer.use != "always" for layer in layers),
        "bucket_cap_mb": 100 / 2**20,
    }
    plain, ddp = wrap(Drawn(layers), **options), wrap(Drawn(layers), **options)
    by_hand, overlapped = _optimizers(plain, drawing.makers), _registered(ddp, drawing)
    edits = [*(["scale"] if drawing.is_scaled else []), *drawing.transforms]
    for step in range(4):
        plain(step, rank).backward()
        for parameter in plain.parameters():
            for name in edits if parameter.grad is not None else ():
                BY_HAND[name][1](parameter.grad)
        ddp(step, rank).backward()
        for optimizer in [*by_hand, *overlapped]:
            optimizer.step()
            optimizer.zero_grad()
        states = [[one.state_dict() for one in optimizers] for optimizers in (overlapped, by_hand)]
        assert_parity(dict(ddp.named_parameters()), dict(plain.named_parameters()), what=f"parameters, step {step}")
        assert_parity(*states, what=f"states, step {step}")


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)
@given(layers=st.lists(LAYERS, min_size=1, max_size=6), drawing=DRAWINGS)
def test_drawn_chains_equal_the_same_by_hand(layers: list[Layer], drawing: Drawing) -> None:
    run_threads(_both_chains, 2, layers, drawing)
