"""A model with what FSDP treats in its own ways, sharded in every way, and loops that accumulate in every way."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.functional import cross_entropy, tanh

import overlap

DIM, WORDS = 6, 11


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(DIM, 7), nn.Linear(7, DIM)

    def forward(self, x: Tensor, skip: bool = False) -> Tensor:
        hidden = tanh(self.first(x))
        return x + (hidden.mean(-1, keepdim=True) if skip else self.second(hidden))


class Net(nn.Module):
    """Tied and frozen parameters, uneven shards (7 and 11 rows), an empty one (1 row), and integers as inputs, so that
    the root's unit is reduced in FSDP's own end of backward."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm, self.head = nn.Embedding(WORDS, DIM), nn.LayerNorm(DIM), nn.Linear(DIM, WORDS)
        self.scale, self.rows = nn.Parameter(torch.ones(1)), nn.Parameter(torch.zeros(4))
        self.blocks = nn.ModuleList([Block(), checkpoint_wrapper(Block()), Block()])
        self.head.weight = self.embed.weight
        self.norm.requires_grad_(False)

    def forward(self, words: Tensor, rows: Tensor | None = None, skip: bool = False) -> Tensor:
        x = self.embed(words)
        for place, block in enumerate(self.blocks):
            x = block(x, skip and place == 0)
        loss = cross_entropy(self.head(self.norm(x)) * self.scale, (words + 1) % WORDS)
        return loss + (self.rows * (torch.ones(4) if rows is None else rows)).sum() / 8


class Case(NamedTuple):
    attachment: str = "hsdp"  # Or "replicate", "group".
    dtype: torch.dtype | None = None
    accumulation: str = "none"  # Or "no_sync", "partial", "last".
    adjust: str = ""  # Or "factor", "sums".


@functools.cache
def mesh_of(shape: tuple[int, ...] = (2, 2), names: tuple[str, ...] = ("replicate", "shard")) -> Any:
    """One for all models of a rank: to connect the ranks of its groups takes longer than a step."""
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


def sharded(case: Case, *, native: bool = False, mesh: Any = None, model: nn.Module | None = None) -> tuple[Any, Any]:
    """The model, and the group to register with; ``native``: as FSDP itself reduces it."""
    from torch.distributed._composable.replicate_with_fsdp import replicate
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    torch.manual_seed(0)
    model = Net() if model is None else model
    policy = MixedPrecisionPolicy(reduce_dtype=case.dtype)
    mesh = mesh_of() if mesh is None else mesh
    group = None
    for module in [*model.blocks, model]:
        if case.attachment == "replicate":
            replicate(module, mesh=mesh_of((dist.get_world_size(),), ("replicate",)), mp_policy=policy)
        elif case.attachment == "group" and not native:
            fully_shard(module, mesh=mesh["shard"], mp_policy=policy)
            group = mesh.get_group("replicate")
        else:
            fully_shard(module, mesh=mesh, mp_policy=policy)
        if case.adjust:  # Without sums Gloo can divide by the number of shards alone.
            module.set_gradient_divide_factor(2.0 if case.adjust == "factor" else 3.0)
            module.set_force_sum_reduction_for_comms(case.adjust == "sums")
    return model, group


def optimizer_of(model: nn.Module, lr: float = 0.3) -> torch.optim.Optimizer:
    return torch.optim.SGD([one for one in model.parameters() if one.requires_grad], lr=lr, momentum=0.9)


def words_of(rank: int, step: int, micro: int = 0) -> Tensor:
    return torch.randint(WORDS, (5,), generator=torch.Generator().manual_seed(1000 * step + 10 * micro + rank))


def step_of(
    model: Any, optimizer: torch.optim.Optimizer, step: int, accumulation: str = "none", **inputs: Any
) -> float:
    """One step of the loop: one backward, or three."""
    optimizer.zero_grad()
    micros, total = (1 if accumulation == "none" else 3), 0.0
    for micro in range(micros):
        is_last = micro == micros - 1
        if accumulation == "no_sync":
            model.set_requires_gradient_sync(is_last)
        elif accumulation == "partial":
            model.set_requires_all_reduce(is_last)
        elif accumulation == "last":
            model.set_is_last_backward(is_last)
        loss = model(words_of(dist.get_rank(), step, micro), **inputs)
        loss.backward()
        total += float(loss.detach())
    optimizer.step()
    return total / micros


def local(tensor: Tensor) -> Tensor:
    return (tensor.to_local() if hasattr(tensor, "to_local") else tensor).detach().clone()


def values(model: nn.Module) -> list[Tensor]:
    """This rank's shards of parameters and gradients."""
    trained = [one for one in model.parameters() if one.requires_grad]
    return [local(one) for one in trained] + [local(one.grad) for one in trained if one.grad is not None]


def run(case: Case, reducer: Any = None, *, mesh: Any = None, frozen: str | None = None) -> list[list[Tensor]]:
    """The values after each of two steps, of FSDP itself without a ``reducer``; a parameter is ``frozen`` later."""
    model, group = sharded(case, native=reducer is None, mesh=mesh)
    if reducer is not None:
        overlap.register(model, reducer, group=group)
    if frozen is not None:
        model.get_parameter(frozen).requires_grad_(False)
    optimizer, found = optimizer_of(model), []
    for step in range(2):
        step_of(model, optimizer, step, case.accumulation)
        found.append(values(model))
    return found


def assert_same(one: list[list[Tensor]], other: list[list[Tensor]], message: object = "") -> None:
    for step, (of_one, of_other) in enumerate(zip(one, other, strict=True)):
        assert len(of_one) == len(of_other)
        for left, right in zip(of_one, of_other, strict=True):
            assert left.shape == right.shape
            assert torch.equal(left, right), f"{message}, step {step}: {(left - right).abs().max()}"


def raised_by(function: Callable[[], Any]) -> str:
    """The class and the text of the library's error that ``function`` raises."""
    try:
        function()
    except overlap.OverlapError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"
