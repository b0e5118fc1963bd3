"""Averages of parameters that a training loop, or an averager, asks for itself."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from overlap._checks import check_group
from overlap.errors import ConfigurationError
from overlap.hooks.wires import Wire
from overlap.optim.local_sgd.anchors import Anchors
from overlap.optim.local_sgd.average import Weight, average_parts, into_parts, tensors_of
from overlap.optim.local_sgd.compressed import CompressedMean, Ranks, check_real, check_wire

__all__ = ["Params", "WiredAverager", "average_parameters"]

Params = Iterable[Tensor] | Iterable[dict[str, Tensor]]


def average_parameters(
    params: Params,
    process_group: dist.ProcessGroup | None = None,
    *,
    dtype: torch.dtype | None = None,
    wire: Wire | None = None,
) -> None:
    """Replace each parameter by its mean over the ranks of ``process_group``, in place, with or without a gradient.

    With ``wire`` the parameters themselves are rounded, since this function remembers nothing that ranks have in
    common: with ``Int8()`` by at most 1/127 of the largest magnitude in a chunk on any rank, with ``Int4()`` by at most
    1/7. That is for values of which an estimate is enough; for training, :class:`LocalSGD` and the averagers send
    changes, which few bits hold. Ranks have the same means, bit for bit.

    Args:
        params: parameters, or an optimizer's ``param_groups``; the same on every rank. Integers are left as they are.
        process_group: the default group where ``None``. A rank that is not in it does nothing.
        dtype: sum in this dtype where it is wider than a parameter's: ``torch.float32`` for half precision.
        wire: how parameters travel; in full precision where ``None``.

    Issues: one all-reduce for each 8 MB of parameters, on ``process_group``; with ``wire`` a send and a receive with
    every other rank and an all-gather. Needs two such buffers beside the model, with ``wire`` eight.

    Raises:
        ConfigurationError: ``params`` holds something else, or ``wire`` is not a wire.
        UnsupportedError: a parameter is complex, and there is a wire.

    >>> average_parameters(model.parameters(), dist.group.WORLD)
    """
    check_group("process_group", process_group, may_be_outside=True)
    check_wire(wire, dtype=dtype)
    group = process_group if process_group is not None else dist.group.WORLD
    tensors = tensors_of(params)
    if group is None or dist.get_rank(group) < 0:
        return
    if wire is None:
        average_parts(into_parts(tensors, dtype=dtype), group)
        return
    mean = CompressedMean(wire, error_feedback=False)
    mean.average(_by_place(tensors), None, Ranks(group), Weight(1, group.size()))


class WiredAverager:
    """What an averager keeps from one average through a wire to the next.

    The first average is in full precision. Its result, which all ranks have, is the anchor: later ones send what has
    changed since, and move it. Takes a copy of the parameters, and another in fp32 with error feedback. Parameters are
    known by their place among those that are given.

    Raises:
        ConfigurationError: ``wire`` is not a wire, or there is error feedback and none.
    """

    def __init__(self, wire: Wire | None, *, error_feedback: bool) -> None:
        check_wire(wire, error_feedback=error_feedback)
        self._mean = None if wire is None else CompressedMean(wire, error_feedback=error_feedback)
        self._anchors: Anchors | None = None
        self._loaded: Mapping[str, Any] = {}

    def average(self, params: Params, ranks: Ranks) -> None:
        """Replace ``params`` by their means over ``ranks``, in place; in full precision where there is no wire.

        Raises:
            ConfigurationError: they are others than those of the last average, or ranks differ in what they keep.
            UnsupportedError: a parameter is complex.
        """
        if self._mean is None or dist.get_rank(ranks.whole) < 0:
            average_parameters(params, ranks.whole)
            return
        tensors = _by_place(tensors_of(params))
        if not tensors:
            return
        weight = Weight(1, ranks.whole.size())
        if self._anchors is None:
            self._anchors = Anchors(tensors, None)
            if not self._loaded:
                average_parts(into_parts(tensors.values()), ranks.whole, weight=weight)
                self._anchors.set_anchors()
                return
            self._anchors.load_state_dict(self._loaded)
            self._mean.load_state_dict(self._loaded, tensors)
        _check_same(tensors, self._anchors.values)
        self._anchors.check_common(ranks.whole, next(iter(tensors.values())).device)
        self._mean.average(tensors, self._anchors.values, ranks, weight)
        self._anchors.step(list(tensors), list(tensors.values()))

    def state_dict(self, ranks: Ranks) -> dict[str, Any]:
        """The anchors and what was left out on this rank; empty without a wire and before the first average."""
        if self._mean is None or self._anchors is None:
            return dict(self._loaded)
        place = {"rank": ranks.whole.rank(), "ranks": ranks.whole.size()}
        return {**self._anchors.state_dict(), **self._mean.state_dict(), **place}

    def load_state_dict(self, state: Mapping[str, Any], ranks: Ranks) -> None:
        """Take over what :meth:`state_dict` gave on this rank; nothing means that the next average is a first one.

        Raises:
            ConfigurationError: it is another rank's, or there is no wire here.
        """
        if state and self._mean is None:
            raise ConfigurationError(
                "the state is of an averager that averages through a wire, and this one has none: give it the wire"
            )
        if state and (state["rank"], state["ranks"]) != (ranks.whole.rank(), ranks.whole.size()):
            raise ConfigurationError(
                f"the state was saved by rank {state['rank']} of {state['ranks']}, but this is rank "
                f"{ranks.whole.rank()} of {ranks.whole.size()}, and each rank has its own error feedback: load this "
                "rank's file; for another number of ranks leave it out, and the next average is in full precision"
            )
        self._anchors, self._loaded = None, dict(state)
        if self._mean is not None:
            self._mean.restart()


def _by_place(tensors: Iterable[Tensor]) -> dict[str, Tensor]:
    """Those with floating-point numbers, each once, by their place.

    Raises:
        UnsupportedError: one is complex.
    """
    unique = {id(tensor): tensor.detach() for tensor in tensors}.values()
    named = {str(place): tensor for place, tensor in enumerate(unique)}
    check_real({f"parameter {place}": tensor for place, tensor in named.items()})
    return {place: tensor for place, tensor in named.items() if tensor.is_floating_point()}


def _check_same(tensors: Mapping[str, Tensor], anchors: Mapping[str, Tensor]) -> None:
    """Raises: ConfigurationError: these are not the parameters that ranks had in common."""
    here, before = ({name: (t.shape, t.dtype) for name, t in named.items()} for named in (tensors, anchors))
    if here != before:
        differing = next(name for name in {**here, **before} if here.get(name) != before.get(name))
        raise ConfigurationError(
            f"this averager sends what has changed since its last average, and was given other parameters then (the "
            f"first that differs is parameter {differing}): make one averager for each set of parameters"
        )
