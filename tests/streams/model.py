"""The model that all scenarios train, and its data."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from harness.streams import active
from overlap.optim.zero import exchange

CPU = torch.device("cpu")
_WIDTH = 16
# Gathers that ride into the next forward come in several parts, though buckets are small.
exchange._LEAST_BYTES_ON_STREAMS = 64


class Net(nn.Module):
    """Every kind of parameter that rules tell apart, and buffers, which DDP sends in each forward."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(32, _WIDTH)
        self.layers = nn.Sequential(nn.Linear(_WIDTH, _WIDTH), nn.BatchNorm1d(_WIDTH), nn.Linear(_WIDTH, _WIDTH))
        self.head = nn.Linear(_WIDTH, _WIDTH)

    def forward(self, tokens: Tensor) -> Tensor:
        out: Tensor = self.head(self.layers(self.embedding(tokens).mean(dim=1)).tanh())
        return out


class Deep(Net):
    """Has buckets enough for memory to go from one to another."""

    def __init__(self) -> None:
        super().__init__()
        self.layers.extend(nn.Linear(_WIDTH, _WIDTH) for _ in range(6))


class Unused(Net):
    """Leaves out its head in every other forward, on each rank in another one."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, tokens: Tensor) -> Tensor:
        self.calls += 1
        out = self.layers(self.embedding(tokens).mean(dim=1))
        return out if self.calls % 2 else self.head(out)


class Branches(Net):
    """Has two branches; backward computes the second on a stream of its own, which the rest waits for afterwards."""

    def __init__(self) -> None:
        super().__init__()
        self.scales = nn.ParameterList(torch.ones(_WIDTH) for _ in range(2))

    def forward(self, tokens: Tensor) -> Tensor:
        hidden: Tensor = self.layers(self.embedding(tokens).mean(dim=1))
        first, second = hidden * self.scales[0], hidden.detach() * self.scales[1]
        if (detector := active()) is not None and hidden.requires_grad:
            main, beside = detector.default_stream, detector.new_stream()

            def go_beside(gradient: Tensor) -> None:
                beside.wait_stream(main)
                detector.enter(beside)

            # In backward the second branch comes first.
            second.register_hook(go_beside)
            first.register_hook(lambda gradient: detector.enter(main))
            hidden.register_hook(lambda gradient: main.wait_stream(beside))
        out: Tensor = self.head((first + second).tanh())
        return out


def wrapped(build: type[Net] = Net, device: torch.device = CPU, **options: Any) -> DistributedDataParallel:
    """A new model with the same weights each time, in buckets of one matrix."""
    torch.manual_seed(0)
    return DistributedDataParallel(build().to(device), bucket_cap_mb=1024 / 2**20, **options)


def batch(step: int, rank: int, device: torch.device = CPU) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    tokens, target = torch.randint(0, 32, (4, 6), generator=generator), torch.randn(4, _WIDTH, generator=generator)
    return tokens.to(device), target.to(device)


def matrices(ddp: nn.Module) -> list[Tensor]:
    """What Muon takes: hidden matrices."""
    return [p for name, p in ddp.named_parameters() if p.ndim == 2 and "embedding" not in name and "head" not in name]


def rest(ddp: nn.Module) -> list[Tensor]:
    taken = {id(parameter) for parameter in matrices(ddp)}
    return [parameter for parameter in ddp.parameters() if id(parameter) not in taken]
