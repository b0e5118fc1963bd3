"""Ranks as coroutines of one thread: thousands of small cases a minute.

Each rank's stage runs to its next collective; when all ranks are there, the collective is computed. This shows what is
computed, and that every rank issues the same collectives of the same sizes. It cannot show races and missing waits.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from overlap import Bucket, Stage
from overlap._torch.device import has_streams
from overlap.hooks import StageContext
from overlap.hooks.stage import walk

CPU = torch.device("cpu")


@dataclass(eq=False)
class FakeGroup:
    """Has the rank and the size of a process group, and nothing else of it."""

    own_rank: int
    ranks: int

    def rank(self) -> int:
        return self.own_rank

    def size(self) -> int:
        return self.ranks


class _Collective:
    """One collective, with what each rank gave to it; computed when all ranks are there."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self.calls: list[tuple[str, tuple[Any, ...]]] = []

    def size(self) -> int:
        return self.ranks

    def all_reduce(self, tensor: Tensor, op: Any) -> list[Any]:
        self.calls.append(("all_reduce", (tensor, op)))
        return []

    def all_gather(self, output: Tensor, input: Tensor) -> list[Any]:
        self.calls.append(("all_gather", (output, input)))
        return []

    def send_recv(self, sends: Any, receives: Any) -> list[Any]:
        self.calls.append(("send_recv", (sends, receives)))
        return []

    def compute(self) -> None:
        kinds = {kind for kind, _ in self.calls}
        assert len(kinds) == 1 and len(self.calls) == self.ranks, f"ranks issue different collectives: {kinds}"
        getattr(self, f"_{kinds.pop()}")(*zip(*(tensors for _, tensors in self.calls), strict=True))

    def _all_reduce(self, tensors: Sequence[Tensor], ops: Sequence[Any]) -> None:
        assert len({(tensor.shape, tensor.dtype) for tensor in tensors}) == 1 and len(set(map(str, ops))) == 1
        total = tensors[0].clone()
        for tensor in tensors[1:]:
            total = torch.maximum(total, tensor) if ops[0] == dist.ReduceOp.MAX else total + tensor
        for tensor in tensors:
            tensor.copy_(total)

    def _all_gather(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
        gathered = torch.cat(list(inputs))
        for output in outputs:
            output.copy_(gathered)

    def _send_recv(self, sends: Sequence[Any], receives: Sequence[Any]) -> None:
        messages = {(rank, peer): tensor for rank, own in enumerate(sends) for tensor, peer in own}
        for rank, own in enumerate(receives):
            for tensor, peer in own:
                tensor.copy_(messages.pop((peer, rank)))
        assert not messages, "a message that nobody receives"


class World:
    """Stages, one per rank, over parameters of given shapes.

    With `names` the parameters have names, as with `overlap.register`; without, as with `ddp.register_comm_hook`.
    """

    def __init__(
        self,
        stages: Sequence[Stage],
        shapes: Sequence[Sequence[int]],
        *,
        names: bool = True,
        divisor: int = 0,
    ) -> None:
        self.stages = list(stages)
        ranks = len(self.stages)
        self.divisor = divisor or ranks
        self.groups = [FakeGroup(rank, ranks) for rank in range(ranks)]
        self.parameters = [torch.zeros(*shape) for shape in shapes]
        self.names = tuple(f"p{place}" for place in range(len(shapes))) if names else None
        self.shapes = [torch.Size(shape) for shape in shapes]
        self.steps = 0
        self.largest: list[Tensor] = []
        self.sent_numel: list[int] = []
        """Elements of each all-reduce of the last step."""
        self.sent_bytes: list[int] = []
        """Bytes that rank 0 sent by each collective of the last step."""
        for stage, group in zip(self.stages, self.groups, strict=True):
            named = None if self.names is None else dict(zip(self.parameters, self.names, strict=True))
            site = StageContext(
                group=group,  # type: ignore[arg-type]
                device=CPU,
                names=named,
                finds_unused=False,
                note_largest=self.largest.append,
            )
            for each in walk(stage):
                each.attach(site)

    def step(self, gradients: Sequence[Sequence[Tensor]]) -> list[list[Tensor]]:
        """Reduces one bucket of `gradients[rank][place]`; returns what each rank got, in the same order."""
        buckets = [self._bucket(rank, gradients[rank]) for rank in range(len(self.stages))]
        self.sent_numel, self.sent_bytes = [], []
        self.largest.clear()
        for stage in self.stages:
            for each in walk(stage):
                each.commit()
                each.before_backward(is_replay=False)
        coroutines: list[Any] = [stage(bucket) for stage, bucket in zip(self.stages, buckets, strict=True)]
        try:
            self._drive(coroutines)
        finally:
            for coroutine in coroutines:
                coroutine.close()
        found_inf = (
            ~(torch.cat([one.view(-1) for one in self.largest]) < torch.inf).all()
            if self.largest
            else torch.tensor(False)
        )
        for stage in self.stages:
            for each in walk(stage):
                if has_streams(CPU):
                    each.discard(found_inf=found_inf)
                elif found_inf:
                    each.discard()
                each.after_backward(failed=False)
        self.steps += 1
        return [[gradient.clone() for gradient in bucket.gradients] for bucket in buckets]

    @torch.no_grad()
    def _drive(self, coroutines: list[Any]) -> None:
        pending = [next_operation(coroutine) for coroutine in coroutines]
        while any(operation is not None for operation in pending):
            assert all(operation is not None for operation in pending), "ranks issue different collectives"
            collective = _Collective(len(self.stages))
            channels: Any = SimpleNamespace(for_group=lambda group, collective=collective: collective)
            for operation in pending:
                operation.launch(channels)  # type: ignore[union-attr]
            self.sent_bytes += [operation.sent_bytes for operation in pending[:1]]  # type: ignore[union-attr]
            kind, (first, *_) = collective.calls[0]
            if kind == "all_reduce" and first.is_floating_point():
                self.sent_numel.append(first.numel())
            collective.compute()
            pending = [next_operation(coroutine) for coroutine in coroutines]

    def _bucket(self, rank: int, gradients: Sequence[Tensor]) -> Bucket:
        views, offset = [], 0
        for gradient in gradients:
            views.append((gradient.size(), gradient.stride(), offset))
            offset += gradient.numel()
        bucket = Bucket(
            index=0,
            is_last=True,
            buffer=torch.empty(offset, dtype=gradients[0].dtype, device=gradients[0].device),
            parameters=tuple(self.parameters),
            group=self.groups[rank],  # type: ignore[arg-type]
            divisor=self.divisor,
            step=self.steps,
            is_replay=False,
            fqns=self.names,
            views=tuple(views),
        )
        for view, gradient in zip(bucket.gradients, gradients, strict=True):
            view.copy_(gradient)
        return bucket


def next_operation(coroutine: Any) -> Any:
    """The coroutine's next operation; `None` when it has ended."""
    try:
        return coroutine.send(None)
    except StopIteration:
        return None
