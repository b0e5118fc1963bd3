"""Chains as people would write them, made of every part that the library has."""

import functools
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from bucket_functions import Ones, centralize, clip_value, scale
from overlap import (
    AllReduce,
    Bucket,
    Cast,
    ClipGradNorm,
    Float8,
    Int4,
    Int8,
    LocalSGD,
    Log,
    OverlappedOptimizer,
    PowerSGD,
    Quantize,
    SkipNonFinite,
    Step,
    TopK,
    Transform,
    ZeroRedundancyOptimizer,
    ZeroStep,
    chain,
    route,
)

ADAMW = functools.partial(torch.optim.AdamW, lr=0.01, weight_decay=0.1)
SGD = functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9)
MUON = functools.partial(torch.optim.Muon, lr=0.02)
OUTER = functools.partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True)

Build = Callable[[Any], list[Any]]


@dataclass(frozen=True, kw_only=True)
class Sentence:
    """``build(ddp)`` registers the chain and returns the optimizers of the loop."""

    build: Build
    by_hand: Callable[[Any, list[Any]], None] | None = None
    """What plain DDP does between backward and the steps of ``plain(ddp)``; ``None`` where the chain rounds."""
    tolerance: Mapping[str, Any] = field(default_factory=dict)
    """Where something is summed in another order."""
    plain: Callable[[Any], list[Any]] = lambda ddp: [ADAMW(ddp.parameters())]
    equal_every: int = 1
    """Steps from one in which ranks have equal parameters to the next."""
    skips: bool = False
    """Whether a step with a gradient that is not finite changes nothing."""


def _matrices(ddp: Any) -> list[Tensor]:
    """What Muon takes: hidden matrices."""
    return [p for name, p in ddp.named_parameters() if p.ndim == 2 and "embedding" not in name and "head" not in name]


def _rest(ddp: Any) -> list[Tensor]:
    matrices = {id(parameter) for parameter in _matrices(ddp)}
    return [parameter for parameter in ddp.parameters() if id(parameter) not in matrices]


def with_update(*before: Callable[[], Any], **options: Any) -> Build:
    """These stages, then one update of AdamW."""

    def build(ddp: Any) -> list[Any]:
        optimizer = OverlappedOptimizer(ADAMW(ddp.parameters()))
        chain(*(make() for make in before), Step(optimizer, **options)).register(ddp)
        return [optimizer]

    return build


def _sharded_adamw(parameters: Any, **options: Any) -> ZeroRedundancyOptimizer:
    adamw = {**ADAMW.keywords, **options}
    return ZeroRedundancyOptimizer(parameters, torch.optim.AdamW, overlap_with_ddp=True, **adamw)


def sharded(*before: Callable[[], Any], partition: str = "element", **options: Any) -> Build:
    """These stages, then one sharded update of AdamW."""

    def build(ddp: Any) -> list[Any]:
        zero = _sharded_adamw(ddp.parameters(), partition=partition)
        chain(*(make() for make in before), ZeroStep(zero, **options)).register(ddp)
        return [zero]

    return build


def _muon(*before: Callable[[], Any]) -> Build:
    def build(ddp: Any) -> list[Any]:
        muon, adamw = OverlappedOptimizer(MUON(_matrices(ddp))), OverlappedOptimizer(ADAMW(_rest(ddp)))
        chain(*(make() for make in before), Step(muon), Step(adamw)).register(ddp)
        return [muon, adamw]

    return build


def _sharded_muon(*before: Callable[[], Any], **options: Any) -> Build:
    def build(ddp: Any) -> list[Any]:
        muon = ZeroRedundancyOptimizer(_matrices(ddp), torch.optim.Muon, lr=0.02, overlap_with_ddp=True)
        adamw = _sharded_adamw(_rest(ddp))
        chain(*(make() for make in before), ZeroStep(muon, **options), ZeroStep(adamw, **options)).register(ddp)
        return [muon, adamw]

    return build


def _mixed(ddp: Any) -> list[Any]:
    muon = ZeroRedundancyOptimizer(_matrices(ddp), torch.optim.Muon, lr=0.02, overlap_with_ddp=True)
    adamw = OverlappedOptimizer(ADAMW(_rest(ddp)))
    chain(ZeroStep(muon), Step(adamw)).register(ddp)
    return [muon, adamw]


def local(**options: Any) -> Build:
    """Averages of two steps of SGD each."""
    return lambda ddp: [LocalSGD(ddp, SGD(ddp.parameters()), **{"period": 2, "start_step": 2, **options})]


def _clip(ddp: Any, optimizers: list[Any]) -> None:
    torch.nn.utils.clip_grad_norm_(ddp.parameters(), 0.1)


def _clip_value(ddp: Any, optimizers: list[Any]) -> None:
    torch.nn.utils.clip_grad_value_(ddp.parameters(), 0.01)


def _nothing(ddp: Any, optimizers: list[Any]) -> None:
    pass


def _two(ddp: Any) -> list[Any]:
    return [MUON(_matrices(ddp)), ADAMW(_rest(ddp))]


class _Noise(Transform):
    """Noise that follows from the parameter's name and the number of passes, which is the stage's state."""

    def __init__(self) -> None:
        super().__init__()
        self._passes = 0

    def before_backward(self, *, is_replay: bool) -> None:
        self._passes += 1

    async def __call__(self, bucket: Bucket) -> None:
        for name, gradient in zip(bucket.names, bucket.gradients, strict=True):
            source = torch.Generator().manual_seed(zlib.crc32(name.encode()) + self._passes)
            gradient.add_(torch.randn(gradient.shape, generator=source), alpha=0.01)

    def state_dict(self) -> dict[str, Any]:
        return {"passes": self._passes}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        self._passes = state_dict["passes"]


def _log() -> Log:
    return Log(lambda *arguments, **named: None)


ROUTES = {"*embedding*": AllReduce, "*.weight": lambda: PowerSGD(rank=1, min_compression_rate=1), "*": AllReduce}
EXACT_ROUTES = {"*embedding*": AllReduce, "*.weight": AllReduce, "*": AllReduce}


def _routed(rules: dict[str, Callable[[], Any]]) -> Callable[[], Any]:
    return lambda: route({pattern: make() for pattern, make in rules.items()})


def _factors() -> Any:
    def factors(rank: int) -> PowerSGD:
        return PowerSGD(rank=rank, min_compression_rate=1, wire=Int8())

    return route({"head.*": factors(2), "*": factors(1)})


def _int4() -> Quantize:
    return Quantize(Int4(), error_feedback=True)


# The squares of the global norm are added up rank by rank.
SUMMED = {"rtol": 1e-5, "atol": 1e-7, "reason": "summed rank by rank"}

SENTENCES: dict[str, Sentence] = {
    # Bit for bit what the same thing by hand is.
    "clip the norm": Sentence(build=with_update(AllReduce, lambda: ClipGradNorm(0.1)), by_hand=_clip),
    "count, clip the norm": Sentence(build=with_update(Ones, AllReduce, lambda: ClipGradNorm(0.1)), by_hand=_clip),
    "count, sharded": Sentence(build=sharded(Ones), by_hand=_nothing),
    "clip values": Sentence(build=with_update(AllReduce, lambda: clip_value(0.01)), by_hand=_clip_value),
    "clip the norm, sharded": Sentence(build=sharded(lambda: ClipGradNorm(0.1)), by_hand=_clip, tolerance=SUMMED),
    "log, skip": Sentence(build=with_update(AllReduce, _log, SkipNonFinite), by_hand=_nothing, skips=True),
    "log, skip, sharded": Sentence(build=sharded(_log, SkipNonFinite), by_hand=_nothing, skips=True),
    "skip, sharded, in the next forward": Sentence(
        build=sharded(SkipNonFinite, gather="forward"), by_hand=_nothing, skips=True
    ),
    "routed to one": Sentence(build=with_update(_routed(EXACT_ROUTES)), by_hand=_nothing),
    "two updates": Sentence(build=_muon(AllReduce), by_hand=_nothing, plain=_two),
    "two updates, clipped": Sentence(build=_muon(AllReduce, lambda: ClipGradNorm(0.1)), by_hand=_clip, plain=_two),
    "two sharded updates": Sentence(build=_sharded_muon(), by_hand=_nothing, plain=_two),
    "two sharded updates, clipped": Sentence(
        build=_sharded_muon(lambda: ClipGradNorm(0.1)), by_hand=_clip, plain=_two, tolerance=SUMMED
    ),
    "two sharded updates, deferred": Sentence(build=_sharded_muon(deferred=True), by_hand=_nothing, plain=_two),
    "one sharded, one not": Sentence(build=_mixed, by_hand=_nothing, plain=_two),
    # Rounded.
    "everything around 16 bits": Sentence(
        build=with_update(
            lambda: scale(2.0), lambda: Cast(torch.bfloat16), lambda: scale(0.5), lambda: centralize, _Noise
        )
    ),
    "routed to factors": Sentence(build=with_update(_routed(ROUTES), lambda: ClipGradNorm(1.0))),
    "routed to factors, then sharded": Sentence(build=sharded(_routed(ROUTES))),
    "fp8, skip": Sentence(build=with_update(lambda: Quantize(Float8()), SkipNonFinite), skips=True),
    "sparse, deferred": Sentence(build=with_update(lambda: Quantize(TopK(0.1), error_feedback=True), deferred=True)),
    "4 bits, sharded, skip": Sentence(build=sharded(_int4, SkipNonFinite), skips=True),
    "factors in 8 bits, clipped, two sharded updates": Sentence(
        build=_sharded_muon(_factors, lambda: ClipGradNorm(1.0))
    ),
    "4 bits, clipped, sharded, in the next forward": Sentence(
        build=sharded(_int4, lambda: ClipGradNorm(1.0), gather="forward")
    ),
    "factors in 8 bits, two updates": Sentence(
        build=_muon(lambda: PowerSGD(rank=1, min_compression_rate=1, wire=Int8()))
    ),
    "DiLoCo in 4 bits": Sentence(build=local(wire=Int4(), error_feedback=True, outer=OUTER), equal_every=2),
    "sparse averages": Sentence(build=local(wire=TopK(0.1), error_feedback=True), equal_every=2),
}


class Net(nn.Module):
    """Every kind of parameter that rules tell apart: an embedding, hidden matrices, biases, a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(32, 16)
        self.layers = nn.Sequential(*(part for _ in range(3) for part in (nn.Linear(16, 16), nn.Tanh())))
        self.head = nn.Linear(16, 16)

    def forward(self, tokens: Tensor) -> Tensor:
        out: Tensor = self.head(self.layers(self.embedding(tokens).mean(dim=1)))
        return out
