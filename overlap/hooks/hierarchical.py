"""Gradients reduced exactly within a machine, and in fewer bytes between machines.

[Note: one part of every parameter]

Row ``r`` holds part ``r`` of every parameter of a bucket, one after another. A part is ``ceil(numel / rows)`` elements
in the order of memory, and the last ones are filled up with zeros. So a rank sends the same elements of a parameter
whatever DDP's buckets are, and all rows are equally long.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from overlap._checks import check_whole_number
from overlap._torch.c10d import group_timeout
from overlap._torch.foreach import copy_all
from overlap.errors import ConfigurationError
from overlap.hooks.adapters import HookStage, as_stage
from overlap.hooks.bucket import Bucket, BucketView
from overlap.hooks.collectives import all_gather, reduce_scatter
from overlap.hooks.post_local_sgd import PostLocal
from overlap.hooks.powersgd import PowerSGD
from overlap.hooks.reducers import AllReduce, Cast
from overlap.hooks.route import Route
from overlap.hooks.segments import round_up, segment_multiple
from overlap.hooks.stage import Role, Stage, StageContext, StageOfOneModel, walk
from overlap.ranks.machines import Levels, check_is_whole_job, ranks_by_machine

__all__ = ["Hierarchical"]

_Views = tuple[BucketView, ...]


class Hierarchical(StageOfOneModel):
    """The mean of the gradients over ranks, in two levels: exact within a machine, by ``outer`` between machines.

    Of ``L`` ranks on each of ``M`` machines, every rank gets the sum over its machine of one part of each gradient,
    ``1/L`` of it (reduce-scatter); ``outer`` reduces that part over the ranks of that part on the other machines;
    and the parts are gathered within each machine::

        machine 0   rank 0  part 0 --+      +-- all parts
                    rank 1  part 1 --|-+    |
                                     | |  gather within the machine
        machine 1   rank 2  part 0 --+ |    |
                    rank 3  part 1 ----+    +-- all parts

    So the ranks of a machine share the link to the others, and each value crosses it once. ``outer`` gets buckets of
    flat parts with a ``divisor`` of 1; a part is cut from every parameter, so its memory by parameter name does not
    depend on DDP's buckets. On one machine, and where :class:`PostLocal` names a group of its own, ``inner`` reduces
    alone.

    Args:
        inner: :class:`AllReduce`, or ``Cast(dtype)`` to reduce and gather in that dtype within a machine.
        outer: a reducer such as ``Quantize(Int4(), error_feedback=True)``; :class:`AllReduce` where ``None``.
        machine_size: ranks on each machine, which are consecutive in the model's process group; where ``None``, ranks
            with one host name are on one machine.

    Communication, per bucket of ``N`` elements: within the machine a reduce-scatter and an all-gather, in which a rank
    sends ``2 N (L-1)/L`` elements; between machines that of ``outer`` for ``N/L`` elements. When it is registered,
    host names are compared; before the first pass, groups are made. Changes: ``bucket.buffer``. Memory: one bucket.

    Raises:
        ConfigurationError: ``inner`` is another reducer, or ``outer`` is not one or cannot work on parts; when it is
            registered, machines have different numbers of ranks, or the model is not on all ranks of the job.

    >>> from overlap import Int4, Quantize
    >>> Hierarchical(inner=AllReduce(), outer=Quantize(Int4()))
    Hierarchical(AllReduce(), Quantize(Int4()))
    """

    def __init__(
        self, inner: Stage | None = None, outer: Stage | None = None, *, machine_size: int | None = None
    ) -> None:
        self.inner = AllReduce() if inner is None else as_stage(inner)
        self.outer = AllReduce() if outer is None else as_stage(outer)
        self.machine_size = None if machine_size is None else check_whole_number("machine_size", machine_size, least=1)
        self._dtype = _dtype_of(self.inner)
        _check_outer(self.outer)
        self.children = (self.inner, self.outer)
        self._machines: list[list[int]] = []
        """The ranks of each machine."""
        self._levels: Levels | None = None
        """``None`` before the first pass, and on one machine."""

    def attach(self, context: StageContext) -> None:
        machines = self._machines if self.context is not None else _machines_of(context.group, size=self.machine_size)
        if machines != self._machines:
            self._machines, self._levels = machines, None
        super().attach(context)

    def context_of(self, child: Stage, context: StageContext) -> StageContext:
        """For ``outer``, with the shapes of the parts in place of the parameters."""
        if child is not self.outer or context.names is None:
            return context
        parts = {}
        for parameter, name in context.names.items():
            numel = parameter.numel() * (2 if parameter.is_complex() else 1)
            parts[torch.empty(-(-numel // self._rows), device="meta")] = name
        return replace(context, names=parts)

    def before_backward(self, *, is_replay: bool) -> None:
        # Here and not at registration, where ranks have not been found to have the same stages yet.
        if self._levels is None and len(self._machines) > 1:
            assert self.context is not None, "a stage is attached before its first pass"
            group = self.context.group
            self._levels = Levels.of(self._machines, group, timeout=group_timeout(group, self.context.device))

    @property
    def _rows(self) -> int:
        """Ranks on each machine."""
        return len(self._machines[0])

    async def __call__(self, bucket: Bucket) -> None:
        assert self.context is not None, "a stage is attached before its first pass"
        levels, ranks = self._levels, self.context.group.size()
        if levels is None or bucket.group.size() != ranks or bucket.buffer.numel() == 0:
            await self.inner(bucket)
            return
        buffer = torch.view_as_real(bucket.buffer).view(-1) if bucket.buffer.is_complex() else bucket.buffer
        whole = bucket.layout
        parts, numel = _parts_of(whole, self._rows)
        row_numel = round_up(numel, segment_multiple(buffer.device))  # See [Note: segments].
        rows = torch.zeros(self._rows, row_numel, dtype=self._dtype or buffer.dtype, device=buffer.device)
        in_bucket, in_rows = _same_elements(buffer, whole, rows, parts)
        buffer.mul_(1 / bucket.divisor)  # As in DDP, each rank divides before the sum.
        copy_all(in_rows, in_bucket)
        own = rows[levels.inside.rank()]
        if self._rows > 1:
            await reduce_scatter(own, rows.view(-1), group=levels.inside)
        own_part = own[:numel].to(buffer.dtype)
        await self.outer(replace(bucket, buffer=own_part, raw=None, views=parts, group=levels.between, divisor=1))
        if own_part.dtype != own.dtype:
            own[:numel].copy_(own_part)
        if self._rows > 1:
            await all_gather(rows.view(-1), own, group=levels.inside)
        copy_all(in_bucket, in_rows)
        # Other ranks of the machine may have a part that is not finite.
        for stage in walk(self.outer):
            stage.note_result(buffer)

    def redistribute(self, states: Sequence[Mapping[str, Any]], *, rank: int, ranks: int) -> dict[str, Any]:
        """Raises: ConfigurationError: always, since the memory is of parts that belong to ranks of a machine."""
        raise ConfigurationError(
            f"{self!r} remembers the parts of parameters of a rank on its machine, and has no rule for "
            f'others: resume with {len(states)} ranks, or set state["stages"]["state"] = {{}} in every state, and all '
            "stages begin anew"
        )

    def origin_in(self, context: StageContext) -> dict[str, Any]:
        """Says which elements this rank's parts are."""
        unusual = {
            name: list(parameter.stride())
            for parameter, name in (context.names or {}).items()
            if not parameter.is_contiguous()
        }
        rank, ranks = context.group.rank(), context.group.size()
        return {"rank": rank, "ranks": ranks, "machine_size": self._rows, "strides": unusual}

    def check_origin(self, origin: Mapping[str, Any], context: StageContext) -> None:
        here = self.origin_in(context)
        if dict(origin) == here:
            return
        was, now = (
            f"rank {one['rank']} of {one['ranks']}, {one['machine_size']} on each machine" for one in (origin, here)
        )
        if was == now:
            raise ConfigurationError(
                f"the state of {self!r} has parts of parameters in the order of memory, and some parameters had other "
                "strides: use the memory format of the run that was saved"
            )
        raise ConfigurationError(
            f"the state of {self!r} was saved by {was}, but this is {now}: load this rank's file; for other machines "
            "start without the state"
        )

    @property
    def signature(self) -> str:
        size = f", machine_size={self.machine_size}"
        machines = f" on {len(self._machines)} machines of {self._rows}" if self._machines else ""
        return f"Hierarchical({self.inner.signature}, {self.outer.signature}{size}){machines}"

    def __repr__(self) -> str:
        size = "" if self.machine_size is None else f", machine_size={self.machine_size}"
        return f"Hierarchical({self.inner!r}, {self.outer!r}{size})"


def _dtype_of(inner: Stage) -> torch.dtype | None:
    """The dtype within a machine; ``None``: the gradients'.

    Raises:
        ConfigurationError: ``inner`` is neither ``AllReduce()`` nor a cast of it.
    """
    if type(inner) is AllReduce:
        return None
    if isinstance(inner, Cast) and [type(child) for child in inner.children] == [AllReduce]:
        return inner.dtype
    raise ConfigurationError(
        f"inner reduces exactly within a machine, so it is AllReduce() or Cast(dtype), got {inner!r}; what compresses "
        "is outer, between machines"
    )


def _check_outer(outer: Stage) -> None:
    """Raises: ConfigurationError: ``outer`` is not a reducer that can work on parts of parameters."""
    if outer.role is not Role.REDUCER:
        raise ConfigurationError(f"outer reduces between machines, and {outer!r} is not a reducer")
    for stage in walk(outer):
        if stage.role is Role.TRANSFORM or isinstance(stage, Route | PowerSGD | PostLocal | HookStage | Hierarchical):
            raise ConfigurationError(
                f"{stage!r} cannot work on the flat parts of parameters that a rank has between machines; use a "
                "reducer such as Quantize(...), Cast(...) or AllReduce() as outer, and route({...}) around Hierarchical"
            )


def _parts_of(whole: _Views, rows: int) -> tuple[_Views, int]:
    """Where the part of each parameter is in a row, given where the parameter is in the bucket; and their elements."""
    parts, end = [], 0
    for size, _, _ in whole:
        part = -(-size.numel() // rows)
        parts.append((torch.Size([part]), (1,), end))
        end += part
    return tuple(parts), end


def _same_elements(flat: Tensor, whole: _Views, rows: Tensor, parts: _Views) -> tuple[list[Tensor], list[Tensor]]:
    """Views of the same elements in the flat bucket and in the rows; see [Note: one part of every parameter]."""
    in_flat, in_rows = [], []
    for (size, _, start), ((part,), _, column) in zip(whole, parts, strict=True):
        full, rest = divmod(size.numel(), part) if part else (0, 0)
        if full:
            in_flat.append(flat[start : start + full * part].view(full, part))
            in_rows.append(rows[:full, column : column + part])
        if rest:
            in_flat.append(flat[start + full * part : start + size.numel()])
            in_rows.append(rows[full, column : column + rest])
    return in_flat, in_rows


def _machines_of(group: dist.ProcessGroup, *, size: int | None) -> list[list[int]]:
    """The ranks of ``group`` on each machine, ``size`` of them; where ``None``, by host name.

    Communication: with ``size=None`` host names are compared through the group's store.

    Raises:
        ConfigurationError: ``group`` lacks ranks of the job, or machines have different numbers of ranks; on every rank
            alike.
    """
    check_is_whole_job(group, remedy="train this model on the ranks of the whole job, or use AllReduce()")
    if size is None:
        machines = ranks_by_machine(group)
        if len({len(ranks) for ranks in machines}) > 1:
            raise ConfigurationError(
                f"Hierarchical needs as many ranks on every machine, but the {len(machines)} machines have "
                f"{', '.join(str(len(ranks)) for ranks in machines)}; start as many on each, or use AllReduce()"
            )
        return machines
    ranks = dist.get_process_group_ranks(group)
    if len(ranks) % size:
        raise ConfigurationError(
            f"machine_size={size} does not divide the {len(ranks)} ranks of the model's process group: give the number "
            "of ranks on each machine, which must be the same on all"
        )
    return [list(ranks[start : start + size]) for start in range(0, len(ranks), size)]
