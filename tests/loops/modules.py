"""Kinds of models."""

import warnings
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn, optim
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.functional import cross_entropy, mse_loss, normalize
from torch.utils.checkpoint import checkpoint

from .corpus import limit, loop, refused, variant
from .declared import HOOK_IS_NOT_TOLD
from .forms import ALL, IN_BACKWARD, INTERLEAVED, STAGED
from .models import ADAMW, batch_norm, convolutional, dropout, images, mlp, tokens
from .plain import applied, usual
from .run import Run


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.middle = nn.Embedding(32, 16), nn.Linear(16, 16)
        self.head, self.last = nn.Linear(16, 32, bias=False), nn.Linear(32, 16)
        self.head.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.head(self.middle(self.embedding(x)).tanh()))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.lstm = nn.Embedding(32, 16), nn.LSTM(16, 16, batch_first=True)
        self.head = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(self.embedding(x))[0])


def _transformer() -> nn.Module:
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    return nn.Sequential(nn.Embedding(32, 16), layer, nn.Linear(16, 16))


class Checkpointed(nn.Module):
    """Two blocks with dropout, computed again in backward."""

    def __init__(self, *, use_reentrant: bool) -> None:
        super().__init__()
        self.stem, self.first, self.second, self.head = nn.Linear(16, 16), dropout(), dropout(), nn.Linear(16, 16)
        self.use_reentrant = use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for part in (self.first, self.second):
            x = checkpoint(part, x, use_reentrant=self.use_reentrant)
        return self.head(x)


class ReadsItself(nn.Module):
    """Uses the detached weight of its first layer in its last, as some attention and memory modules do."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        weight = self.second.weight
        read = weight.detach() if self.how == "detach" else weight.data
        # In backward this product needs the weight after the gradient of the layer below has come.
        return self.second((self.first(x).tanh() @ read).tanh())


class Transposed(nn.Module):
    """A weight that lies transposed in memory, and is dense."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(24, 16).mul_(0.2).t())
        self.first, self.last = nn.Linear(16, 16), nn.Linear(24, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x).tanh() @ self.weight)


def _sparse() -> nn.Module:
    return nn.Sequential(nn.Embedding(32, 16, sparse=True), nn.Linear(16, 16))


class WithScalars(nn.Module):
    """Parameters of no dimension, of one element and of none."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.tensor(1.0)), nn.Parameter(torch.zeros(1))
        self.nothing = nn.Parameter(torch.empty(0))
        self.inner = mlp()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) * self.scale + self.shift + self.nothing.sum()


class Unused(nn.Module):
    """Two branches that are used by turns, the first one once in ``every`` forwards."""

    def __init__(self, every: int = 2) -> None:
        super().__init__()
        self.every = every
        self.first, self.left, self.right = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 16)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return (self.left if self.calls % self.every == 1 else self.right)(self.first(x))


class Momentum(nn.Module):
    """MoCo: forward writes the encoder of keys through ``.data``, and gathers keys of all ranks into a queue."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key = mlp(), mlp()
        self.key.load_state_dict(self.query.state_dict())
        self.key.requires_grad_(False)
        self.register_buffer("queue", normalize(torch.randn(16, 16), dim=0))

    def forward(self, x: Tensor) -> Tensor:
        query = normalize(self.query(x), dim=1)
        with torch.no_grad():
            for trained, parameter in zip(self.query.parameters(), self.key.parameters(), strict=True):
                parameter.data = parameter.data * 0.9 + trained.data * 0.1
            keys = normalize(self.key(x), dim=1)
        positive, negative = (query * keys).sum(dim=1, keepdim=True), query @ self.queue.clone()
        gathered = [torch.empty_like(keys) for _ in range(dist.get_world_size())]
        dist.all_gather(gathered, keys)
        self.queue.copy_(torch.cat([*(each.T for each in gathered), self.queue[:, : -sum(map(len, gathered))]], dim=1))
        return torch.cat([positive, negative], dim=1)


class Gathered(torch.autograd.Function):
    """The tensors of all ranks; the gradient of this rank's is summed over ranks."""

    @staticmethod
    def forward(ctx: Any, own: Tensor) -> tuple[Tensor, ...]:
        gathered = [torch.empty_like(own) for _ in range(dist.get_world_size())]
        dist.all_gather(gathered, own.contiguous())
        return tuple(gathered)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        every = torch.stack(gradients)
        dist.all_reduce(every)
        return every[dist.get_rank()]


STILL_NEEDED = limit(
    IN_BACKWARD, "the update may come while backward needs the weight: autograd's error, on every rank", is_a_race=True
)
STILL_NEEDED_DATA = limit(
    IN_BACKWARD,
    "the update may come while backward needs the weight, which autograd is not told of through .data: read a clone",
    is_a_race=True,
)
RESTRIDED = [
    *refused([*INTERLEAVED, "deferred", "automatic", "local"], "2.weight has strides (72, 1, 24, 8), but had"),
    *refused(["hook"], "a parameter of shape (8, 8, 3, 3) has strides (72, 1, 24, 8), but had"),
    *refused([*STAGED, "zero alone"], "parameter 0 of group 0 has strides (27, 1, 9, 3), but had"),
]
SPARSE = [
    *refused([form for form in ALL if form != "zero alone"], "this gradient is sparse, and stages work on dense ones"),
    *refused(["zero alone"], "the gradient of parameter 0 of group 0 is sparse"),
]


def _channels_last() -> nn.Module:
    return convolutional().to(memory_format=torch.channels_last)


def _frozen() -> nn.Module:
    model = mlp()
    model[0].requires_grad_(False)
    model[2].bias.requires_grad_(False)
    return model


variant(usual, "channels_last, SGD", model=_channels_last, inputs=images)
variant(usual, "a weight that lies transposed in memory", model=Transposed, optimizer=ADAMW)
variant(usual, "tied weights", model=Tied, inputs=tokens)
variant(usual, "LSTM", model=Recurrent, inputs=tokens)
variant(usual, "attention with dropout", model=_transformer, inputs=tokens, optimizer=ADAMW)
variant(usual, "BatchNorm, buffers broadcast", model=batch_norm)
variant(usual, "frozen layers", model=_frozen, optimizer=ADAMW)
variant(usual, "scalar, one-element and empty parameters", model=WithScalars, optimizer=ADAMW)
variant(usual, "a sparse embedding", SPARSE, model=_sparse, inputs=tokens, optimizer=partial(optim.SGD, lr=0.1))
variant(usual, "checkpointing with dropout", model=lambda: Checkpointed(use_reentrant=False))
variant(
    usual,
    "checkpointing, reentrant, static_graph",
    model=lambda: Checkpointed(use_reentrant=True),
    ddp={"static_graph": True},
)
variant(
    usual,
    "checkpoint_wrapper with BatchNorm",
    model=lambda: nn.Sequential(checkpoint_wrapper(batch_norm()), nn.Linear(16, 16)),
)
variant(usual, "a network that reads its own weight.detach()", STILL_NEEDED, model=lambda: ReadsItself("detach"))
variant(usual, "a network that reads its own weight.data", STILL_NEEDED_DATA, model=lambda: ReadsItself("data"))
variant(
    usual,
    "branches used by turns, AdamW",
    HOOK_IS_NOT_TOLD,
    model=Unused,
    ddp={"find_unused_parameters": True},
    optimizer=ADAMW,
    steps=3,
)


@loop(
    "a branch used now and then, the model's zero_grad(set_to_none=False)",
    HOOK_IS_NOT_TOLD,
    model=partial(Unused, every=3),
    ddp={"find_unused_parameters": True},
    optimizer=ADAMW,
    steps=3,
)
def now_and_then_from_zeros(ddp: Any, optimizer: Any, run: Run) -> Iterator[Any]:
    for x, y in run.batches():
        ddp.zero_grad(set_to_none=False)
        loss = applied(optimizer, mse_loss(ddp(x), y))
        yield loss


@loop("MoCo: a momentum encoder written by .data in the forward, with keys of all ranks", model=Momentum)
def momentum_encoder(ddp: Any, optimizer: Any, run: Run) -> Iterator[Any]:
    for x, _ in run.batches():
        loss = cross_entropy(ddp(x) / 0.2, torch.zeros(len(x), dtype=torch.int64))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield loss


@loop("a contrastive loss over the embeddings of all ranks, gathered with gradients")
def contrastive(ddp: Any, optimizer: Any, run: Run) -> Iterator[Any]:
    for x, _ in run.batches():
        optimizer.zero_grad()
        own, other = (normalize(ddp(each), dim=1) for each in (x, x.flip(1)))
        gathered = torch.cat(Gathered.apply(other))
        loss = applied(optimizer, cross_entropy(own @ gathered.T / 0.1, torch.arange(len(x)) + run.rank * len(x)))
        yield loss


@loop("a model turned channels_last in mid-run", RESTRIDED, model=convolutional, inputs=images, optimizer=ADAMW)
def turned(ddp: Any, optimizer: Any, run: Run) -> Iterator[Any]:
    yield from usual(ddp, optimizer, run)
    optimizer.zero_grad()
    ddp.module.to(memory_format=torch.channels_last)
    with warnings.catch_warnings(action="ignore"):  # DDP's, of gradients whose strides are not its bucket's.
        yield from usual(ddp, optimizer, run)


@loop(
    "torch.compile of the model, inside DDP",
    refused(["zero forward"], "gather='forward' cannot hook into a compiled module"),
)
def compiled(ddp: Any, optimizer: Any, run: Run) -> Iterator[Any]:
    ddp.module.compile(backend="eager")
    with torch._dynamo.config.patch(optimize_ddp=False):  # It takes no buckets as small as these.
        yield from usual(ddp, optimizer, run)
