"""Gradients reduced exactly within a machine, and in fewer bytes between machines.

[Note: one part of every parameter]

Row ``r`` holds part ``r`` of every parameter of a bucket, one after another. A part is ``ceil(numel / rows)`` elements
in the order of memory, and the last ones are filled up with zeros. So which elements of a parameter a rank sends to
other machines does not depend on DDP's buckets, and memory by parameter name stays valid when those are rebuilt; and
all rows are equally long, so that the ranks of a machine issue the same collectives.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from overlap._checks import check_whole_number
from overlap._torch.c10d import group_timeout
from overlap._torch.foreach import copy_all
from overlap.errors import ConfigurationError, RegistrationError
from overlap.hooks.adapters import HookStage, stage_from
from overlap.hooks.allreduce import AllGather, AllReduce
from overlap.hooks.bucket import Bucket
from overlap.hooks.cast import Cast
from overlap.hooks.collectives import all_gather, reduce_scatter
from overlap.hooks.context import StageContext
from overlap.hooks.machines import Machines, members_of
from overlap.hooks.post_local_sgd import PostLocal
from overlap.hooks.powersgd import PowerSGD
from overlap.hooks.quantize import Quantize
from overlap.hooks.route import Route
from overlap.hooks.segments import round_up, segment_multiple
from overlap.hooks.stage import Role, Stage, walk

__all__ = ["Hierarchical"]

_PLACE = "place"


class Hierarchical(Stage):
    """The mean of the gradients over ranks, in two levels: exact within a machine, by ``outer`` between machines.

    Of ``L`` ranks on each of ``M`` machines, every rank gets the sum over its machine of one part of each gradient,
    ``1/L`` of it (reduce-scatter); ``outer`` reduces that part over the ranks in the same place on the other machines;
    and the parts are gathered within each machine::

        machine 0   rank 0  part 0 --+      +-- all parts
                    rank 1  part 1 --|-+    |
                                     | |  gather within the machine
        machine 1   rank 2  part 0 --+ |    |
                    rank 3  part 1 ----+    +-- all parts

    So the ranks of a machine share the link to the others, and each value crosses it once. A part is cut from every
    parameter, so a reducer with memory by parameter name works as ``outer``, whatever DDP's buckets are. The sum over
    machines is taken of sums that are divided already, so ``outer`` gets buckets with a ``divisor`` of 1, whose
    gradients are flat parts. On one machine, and where :class:`PostLocal` names a group of its own, ``inner`` reduces
    alone.

    Args:
        inner: :class:`AllReduce`, or ``Cast(dtype)`` to reduce and gather in that dtype within a machine.
        outer: a reducer such as ``Quantize(Int4(), error_feedback=True)``; :class:`AllReduce` where ``None``.
        machine_size: ranks on each machine, which are consecutive in the model's process group; where ``None``, ranks
            with one host name are on one machine.

    Issues, per bucket of ``N`` elements: within the machine a reduce-scatter and an all-gather, in which a rank sends
    ``2 N (L-1)/L`` elements; between machines what ``outer`` issues for ``N/L`` elements. When it is registered without
    ``machine_size``, a gather of host names; before the first pass, the collectives of making groups. Changes:
    ``bucket.buffer``. Memory: a copy of the bucket.

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
        self.inner = AllReduce() if inner is None else stage_from(inner)
        self.outer = AllReduce() if outer is None else stage_from(outer)
        self.machine_size = None if machine_size is None else check_whole_number("machine_size", machine_size, least=1)
        self._dtype = _dtype_of(self.inner)
        _check_outer(self.outer)
        self._context: StageContext | None = None
        self._members: list[list[int]] = []
        """The ranks of each machine."""
        self._machines: Machines | None = None
        self._saved_by: Mapping[str, Any] | None = None

    @property
    def children(self) -> tuple[Stage, ...]:
        return self.inner, self.outer

    def attach(self, context: StageContext) -> None:
        if self._context is not None:
            raise RegistrationError(f"{self!r} is registered with a model already; give each model one of its own")
        members = members_of(context.group, size=self.machine_size)
        self._check_place(self._saved_by, _place(context, len(members[0])))
        if members != self._members:
            self._members, self._machines = members, None
        self._context = context

    def context_of(self, child: Stage, context: StageContext) -> StageContext:
        """For ``outer``, with the shapes of the parts in place of the parameters."""
        if child is not self.outer or context.names is None:
            return context
        parts = {_part_of(parameter, self._rows): name for parameter, name in context.names.items()}
        return replace(context, names=parts)

    def detach(self) -> None:
        if self._context is not None and not all(map(_is_without_memory, walk(self.outer))):
            self._saved_by = _place(self._context, self._rows)
        self._context = None

    def before_backward(self, *, is_replay: bool) -> None:
        # Here and not at registration, where ranks have not been found to have the same stages yet.
        if self._machines is None and len(self._members) > 1:
            assert self._context is not None, "a stage is attached before its first pass"
            timeout = group_timeout(self._context.group, self._context.device)
            self._machines = Machines.connect(self._members, timeout=timeout)

    @property
    def _rows(self) -> int:
        """Ranks on each machine."""
        return len(self._members[0])

    async def __call__(self, bucket: Bucket) -> None:
        assert self._context is not None, "a stage is attached before its first pass"
        machines = self._machines
        if machines is None or bucket.group.size() != self._context.group.size() or bucket.buffer.numel() == 0:
            await self.inner(bucket)
            return
        buffer = torch.view_as_real(bucket.buffer).view(-1) if bucket.buffer.is_complex() else bucket.buffer
        layout = _Rows.of(bucket, self._rows)
        # As in DDP, each rank divides before the sum.
        rows = layout.pack(buffer.mul_(1 / bucket.divisor), dtype=self._dtype or buffer.dtype)
        own = rows[machines.inside.rank()]
        if self._rows > 1:
            await reduce_scatter(own, rows.view(-1), group=machines.inside)
        part = own[: layout.numel].to(buffer.dtype)
        between = replace(bucket, buffer=part, raw=None, views=layout.views, group=machines.between, divisor=1)
        await self.outer(between)
        if part.dtype != own.dtype:
            own[: layout.numel].copy_(part)
        if self._rows > 1:
            await all_gather(rows.view(-1), own, group=machines.inside)
        layout.unpack(rows, buffer)
        # Other ranks of the machine may have a part that is not finite.
        for stage in walk(self.outer):
            stage.note_result(buffer)

    def state_dict(self) -> dict[str, Any]:
        """What ``outer`` remembers, and the ``place`` that its parts of parameters are for."""
        outer = self.outer.state_dict()
        state: dict[str, Any] = {"outer": outer} if outer else {}
        place = self._saved_by if self._context is None else _place(self._context, self._rows)
        return {**state, _PLACE: place} if state and place is not None else state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load what :meth:`state_dict` returned on this rank, before or after registering.

        Raises:
            ConfigurationError: it is another rank's, of other machines, or of another reducer. If the stage is not yet
                registered, registering raises the former.
        """
        if unknown := sorted(set(state_dict) - {"outer", _PLACE}):
            raise ConfigurationError(f"{self!r} has no state {unknown}")
        saved_by = state_dict.get(_PLACE)
        if self._context is not None:
            self._check_place(saved_by, _place(self._context, self._rows))
        self._saved_by = saved_by
        self.outer.load_state_dict(state_dict.get("outer", {}))

    def redistribute(self, states: Sequence[Mapping[str, Any]], *, rank: int, ranks: int) -> dict[str, Any]:
        """Refused: what is remembered is of parts that belong to places on machines.

        Raises:
            ConfigurationError: always.
        """
        raise ConfigurationError(
            f"{self!r} remembers parts of parameters by the place of a rank on its machine, and has no rule for "
            f'others: resume with {len(states)} ranks, or set state["stages"]["state"] = {{}} in every state, and all '
            "stages begin anew"
        )

    def _check_place(self, saved_by: Mapping[str, Any] | None, here: Mapping[str, Any]) -> None:
        """Raises: ConfigurationError: the state that was loaded is of another place."""
        if saved_by is None or dict(saved_by) == dict(here):
            return
        was, now = (
            f"rank {place['rank']} of {place['ranks']}, {place['machine_size']} on each machine"
            for place in (saved_by, here)
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
        machines = f" on {len(self._members)} machines of {self._rows}" if self._members else ""
        return f"Hierarchical({self.inner.signature}, {self.outer.signature}{size}){machines}"

    def __repr__(self) -> str:
        size = "" if self.machine_size is None else f", machine_size={self.machine_size}"
        return f"Hierarchical({self.inner!r}, {self.outer!r}{size})"


def _place(context: StageContext, rows: int) -> dict[str, Any]:
    """What says which elements a rank's parts are."""
    unusual = {
        name: list(parameter.stride())
        for parameter, name in (context.names or {}).items()
        if not parameter.is_contiguous()
    }
    rank, ranks = context.group.rank(), context.group.size()
    return {"rank": rank, "ranks": ranks, "machine_size": rows, "strides": unusual}


def _part_of(parameter: Tensor, rows: int) -> Tensor:
    """A tensor of the shape of a part of ``parameter``, without memory."""
    return torch.empty(_part_numel(parameter, rows), device="meta")


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
        if isinstance(stage, Route):
            raise ConfigurationError(
                f"{stage!r} would see the parts of parameters, whose shapes are others: put Hierarchical(...) into "
                "route({...})"
            )
        if isinstance(stage, PowerSGD):
            raise ConfigurationError(
                f"{stage!r} compresses matrices, and between machines a rank has flat parts of them: use "
                "Quantize(...) or Cast(...), or PowerSGD alone"
            )
        if stage.role is Role.TRANSFORM or isinstance(stage, PostLocal | HookStage | Hierarchical):
            raise ConfigurationError(
                f"{stage!r} cannot work on the parts of parameters that a rank has between machines; use a reducer "
                "such as Quantize(...), Cast(...) or AllReduce() as outer"
            )


def _is_without_memory(stage: Stage) -> bool:
    if isinstance(stage, Quantize):
        return not (stage.error_feedback or stage.wire.is_stochastic)
    return isinstance(stage, AllReduce | AllGather | Cast)


def _part_numel(parameter: Tensor, rows: int) -> int:
    """How many real numbers of ``parameter`` are in each of ``rows`` rows."""
    return -(-parameter.numel() * (2 if parameter.is_complex() else 1) // rows)


@dataclass(frozen=True)
class _Rows:
    """See [Note: one part of every parameter]."""

    count: int
    extents: tuple[tuple[int, int], ...]
    """Where each parameter begins in the bucket, and its real numbers."""

    @classmethod
    def of(cls, bucket: Bucket, count: int) -> _Rows:
        views = bucket.with_buffer(bucket.buffer).views
        assert views is not None, "with_buffer makes them"
        return cls(count, tuple((offset, size.numel()) for size, _, offset in views))

    @property
    def parts(self) -> tuple[int, ...]:
        """The elements of each parameter in a row."""
        return tuple(-(-numel // self.count) for _, numel in self.extents)

    @property
    def numel(self) -> int:
        """The elements of a row, without its padding at the end."""
        return sum(self.parts)

    @property
    def views(self) -> tuple[tuple[torch.Size, tuple[int, ...], int], ...]:
        """The parts of a row as :attr:`Bucket.views`."""
        ends = itertools.accumulate(self.parts)
        return tuple((torch.Size([part]), (1,), end - part) for part, end in zip(self.parts, ends, strict=True))

    def pack(self, flat: Tensor, *, dtype: torch.dtype) -> Tensor:
        """The gradients of a bucket's buffer as rows, shape ``(count, n)``; see [Note: segments]."""
        numel = round_up(self.numel, segment_multiple(flat.device))
        is_full = self.count * numel == sum(numel for _, numel in self.extents)
        rows = (torch.empty if is_full else torch.zeros)((self.count, numel), dtype=dtype, device=flat.device)
        pairs = list(self._pairs(flat, rows))
        copy_all([row for _, row in pairs], [own for own, _ in pairs])
        return rows

    def unpack(self, rows: Tensor, flat: Tensor) -> None:
        """The inverse of :meth:`pack`."""
        pairs = list(self._pairs(flat, rows))
        copy_all([own for own, _ in pairs], [row for _, row in pairs])

    def _pairs(self, flat: Tensor, rows: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Views of the same elements in both."""
        for (start, numel), (_, _, column), part in zip(self.extents, self.views, self.parts, strict=True):
            full, rest = divmod(numel, part) if part else (0, 0)
            if full:
                yield flat[start : start + full * part].view(full, part), rows[:full, column : column + part]
            if rest:
                yield flat[start + full * part : start + numel], rows[full, column : column + rest]
