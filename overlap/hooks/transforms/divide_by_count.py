"""The mean over samples or tokens, where ranks have different numbers of them.

[Note: one division]

Every reducer divides by ``bucket.divisor``. This transform divides in its place: it multiplies this rank's gradients by
``1 / count of all ranks`` and passes the bucket on with a divisor of 1, so that any reducer adds up parts of the true
mean, and error feedback adds errors of means to means, whatever the counts of their steps were.

The count of all ranks is one all-reduce of one number. The first bucket of a pass launches it when it arrives, and goes
on when the next one arrives; a bucket that comes before it is there waits for it, and launches nothing. So the order of
collectives follows from arrivals, as ever. On a CPU the stages' thread reads the number. On an accelerator nothing on
the host does: it stays a tensor, which kernels read.

[Note: counts and gradients]

A count is kept where the gradients of its backward are. It is *new* until a backward under ``no_sync`` has made it
*accumulated*, as those gradients are in ``.grad``. Where a backward begins and no parameter has a ``.grad``, the loop
has cleared them, and the accumulated counts go, too. A synchronized backward uses both kinds. So a batch that the loop
discards leaves no count.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from functools import partial

import torch
from torch import Tensor

from overlap._checks import as_number, short_repr
from overlap._torch.autograd import after_gradients
from overlap._torch.device import has_streams
from overlap.errors import ArgumentTypeError, ConfigurationError, TrainingLoopError, hide_internal_frames
from overlap.hooks.bucket import Bucket
from overlap.hooks.collectives import Operation, all_reduce
from overlap.hooks.post_local_sgd import PostLocal
from overlap.hooks.reducers import NoReduction, OnGroup
from overlap.hooks.stage import Plan, Role, Stage, StageContext, walk
from overlap.hooks.transforms.transform import Transform


class DivideByCount(Transform):
    """Divides gradients by the samples or tokens of all ranks: their mean, and not the mean over ranks.

    The loss must be a *sum*. Of a mean the result is wrong, and nothing can know. Each rank says by :meth:`count` how
    many summands its losses have; where ranks or microbatches have different numbers, every sample has the same weight
    all the same, as in one process that has all batches. All ranks get the same bits. They are plain DDP's with a mean
    loss where each rank has the same count, this and the number of ranks are powers of two, and nothing underflows;
    else they are the same up to rounding.

    It stands before a reducer, or before a ``ZeroStep`` that reduces by itself. The reducer, clipping, error feedback
    and the update see the true mean; ``GradScaler`` works as always. Under ``Join`` a rank that has run out of inputs
    counts 0, and ``divide_by_initial_world_size`` means nothing. A second synchronized backward before ``step()`` is
    refused where the chain has the update, and must not come where the loop's own optimizer makes it: accumulate under
    ``ddp.no_sync()``.

    Communication: one all-reduce of eight bytes per synchronized backward. Changes: ``bucket.buffer``.

    Raises:
        ConfigurationError: at registration, if it does not stand before a reducer that takes the mean over all ranks of
            the model; or if it is registered as a hook with DDP itself, which does not tell of ``no_sync``.
        TrainingLoopError: in ``backward()``, on all ranks, if a rank has no count, or all counts are 0.

    >>> by_count = DivideByCount()
    >>> chain(by_count, AllReduce()).register(ddp)
    <chain(DivideByCount(), AllReduce()) registered>
    >>> by_count.count(len(x))
    >>> torch.nn.functional.cross_entropy(ddp(x), y, reduction="sum").backward()
    """

    def __init__(self) -> None:
        super().__init__()
        # See [Note: counts and gradients]. Tensors where they are on an accelerator.
        self._new: float | Tensor | None = None
        self._accumulated: float | Tensor | None = None
        # Of the pass under way.
        self._own = 0.0
        self._is_on_streams = self._is_launched = False
        self._scales: dict[torch.dtype, Tensor | float] = {}

    def count(self, number: float | Tensor) -> None:
        """Say how many samples or tokens a loss of this rank is the sum of, before its ``backward()``.

        Counts of several calls add up until a synchronized backward has used them: call it once a microbatch, or once
        for all of a step. A rank whose batch has nothing that counts says 0.

        Args:
            number: not negative and finite; a number, or a 0-dimensional tensor of any real dtype on any device. For
                one on the model's accelerator the host does not wait. So it cannot raise there: a negative count or one
                that is not finite, and counts that are all 0, make all gradients NaN or infinite on all ranks, which
                ``SkipNonFinite`` and ``GradScaler`` leave out.

        Raises:
            ConfigurationError: it is not such a number; or this is not registered. The other ranks get a ``PeerError``.
        """
        if (context := self.context) is None:
            raise ConfigurationError(
                f"{self!r}.count() belongs to a model: call it after chain({self!r}, AllReduce(), ...).register(ddp)"
            )
        added = self._of_tensor(number, context) if isinstance(number, Tensor) else as_number(number)
        if added is None or (not isinstance(added, Tensor) and not 0 <= added < math.inf):
            error = _refusal(number, context.group.rank())
            context.report(error)
            hide_internal_frames(error)
            raise error
        self._new = added if self._new is None else self._new + added

    def _of_tensor(self, number: Tensor, context: StageContext) -> float | Tensor | None:
        if number.dim() != 0 or number.is_complex() or number.dtype == torch.bool:
            return None
        if not (self._is_on_streams and has_streams(number.device)):
            return float(number)
        own = number.detach().to(context.device, torch.float64)
        return torch.where(own < 0, torch.nan, own)

    def check_position(self, before: Sequence[Stage], after: Sequence[Stage]) -> None:
        super().check_position(before, after)
        if self.place is not Role.TRANSFORM:
            raise ConfigurationError(
                f"{self!r} divides in place of the reducer, and stands after it: write chain({self!r}, AllReduce(), "
                "...)"
            )
        if any(isinstance(stage, DivideByCount) for stage in after):
            raise ConfigurationError(f"{self!r} stands twice in a chain, which would divide twice: leave one out")
        reducer = next(stage for stage in after if stage.reduces)
        for stage in walk(reducer):
            if isinstance(stage, NoReduction | OnGroup | PostLocal):
                raise ConfigurationError(
                    f"{self!r} counts all ranks of the model, and {stage!r} does not take the mean over all of them: "
                    "use a reducer such as AllReduce(), or leave the count out and divide the loss by this rank's own"
                )

    def attach(self, context: StageContext) -> None:
        if context.names is None:
            raise ConfigurationError(
                f"{self!r} needs to see forwards and no_sync, of which ddp.register_comm_hook tells nothing: register "
                "the chain with overlap.register(ddp, ...)"
            )
        super().attach(context)
        self._parameters = list(context.names)
        self._total = torch.zeros(1, dtype=torch.float64, device=context.device)
        self._reduction = all_reduce(self._total, group=context.group)
        self._launched = _Launched(self._reduction)
        self._is_on_streams = has_streams(context.device)

    def detach(self) -> None:
        super().detach()
        self._new = self._accumulated = None
        self._scales.clear()

    def before_gradients(self, *, synchronizes: bool) -> None:
        if self._accumulated is not None and all(parameter.grad is None for parameter in self._parameters):
            self._accumulated = None
        if not synchronizes:
            after_gradients(self._note_accumulated)

    def _note_accumulated(self) -> None:
        if self._new is not None and any(parameter.grad is not None for parameter in self._parameters):
            self._accumulated, self._new = self._all_counts(), None

    def _all_counts(self) -> float | Tensor | None:
        if self._accumulated is None or self._new is None:
            return self._accumulated if self._new is None else self._new
        return self._accumulated + self._new

    def discard(self, *, found_inf: Tensor | None = None, others: Collection[str] = ()) -> None:
        if found_inf is None and not others:
            self._accumulated = None

    def before_backward(self, *, is_replay: bool) -> None:
        count = self._new if self._accumulated is None else self._all_counts()
        self._new = self._accumulated = None
        self._is_launched = False
        self._scales.clear()
        if isinstance(count, Tensor):
            self._total.copy_(count)
            return
        if count is None and not is_replay:
            assert self.context is not None, "a stage is attached before its first pass"
            raise TrainingLoopError(
                f"rank {self.context.group.rank()} has no count for this backward: call by_count.count(n) before it, "
                "with the number of samples or tokens that the loss is the sum of, also where it is 0; to run a "
                "backward again after an error, count again"
            )
        self._own = count or 0.0
        self._total.fill_(self._own)

    def plan(self, bucket: Bucket) -> Plan:
        return self._next_operation, partial(self._divide, bucket.buffer)

    def _next_operation(self) -> Operation | None:
        """What a bucket waits for; nothing where an earlier one has the count."""
        if self._scales:
            return None
        if self._is_launched:
            return self._launched
        self._is_launched = True
        return self._reduction

    def _divide(self, buffer: Tensor) -> None:
        # As by a number on a CPU: in fp32 at least, where the reciprocal of a large count does not underflow.
        dtype = torch.promote_types(buffer.dtype, torch.float32).to_real()
        if (scale := self._scales.get(dtype)) is not None:
            pass
        elif self._is_on_streams:
            # Of an infinite count the reciprocal would be 0.
            scale = torch.where(self._total < math.inf, self._total.reciprocal(), torch.nan).to(dtype)
        elif 0 < (total := self._total.item()) < math.inf:
            scale = 1 / total
        else:
            assert self.context is not None, "a stage is attached before its first pass"
            group = self.context.group
            raise TrainingLoopError(
                f"the counts of all {group.size()} ranks add up to {total:g} (rank {group.rank()} counts "
                f"{self._own:g}), by which no gradient can be divided: leave such a batch out on every rank, by not "
                "calling backward()"
            )
        self._scales[dtype] = scale
        if isinstance(scale, Tensor):
            torch.mul(buffer, scale, out=buffer)
        else:
            buffer.mul_(scale)

    def output_bucket(self, bucket: Bucket) -> Bucket:
        return bucket.with_changes(divisor=1)

    def __repr__(self) -> str:
        return "DivideByCount()"


class _Launched(Operation):
    """The end of a collective that another bucket has launched."""

    label = "count"

    def __init__(self, collective: Operation) -> None:
        self.finish = collective.finish  # type: ignore[method-assign]


def _refusal(number: object, rank: int) -> ConfigurationError:
    is_one = number.dim() == 0 if isinstance(number, Tensor) else as_number(number) is not None
    if not is_one:
        given = f"a tensor of shape {tuple(number.shape)}" if isinstance(number, Tensor) else short_repr(number)
        return ArgumentTypeError(
            f"rank {rank} counts {given}, which is not a number: give count() the number of samples or tokens that the "
            "loss is the sum of, as in by_count.count(len(x)) or by_count.count(mask.sum())"
        )
    return ConfigurationError(
        f"rank {rank} counts {short_repr(number)}: the number of samples or tokens that a loss is the sum of is real, "
        "finite and at least 0; where a batch has nothing that counts, count 0"
    )
