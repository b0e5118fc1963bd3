"""Telling whether a gradient is still what the library left in ``.grad``. See [Note: edits by value]."""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from overlap._torch.autograd import version, versions
from overlap._torch.device import has_streams
from overlap.hooks.late_reads import LateReads
from overlap.optim.fingerprint import fingerprints

__all__ = ["GradientVersions", "LateVerdicts"]


class GradientVersions:
    """The tensors in ``.grad`` of some parameters and their values, at one moment.

    Args:
        parameters: whose gradients to note.
        known: notes of before, to be taken over where they still hold.
        copies: gives values that were copied to ``.grad`` of a parameter, where those are not changed before the
            gradients are looked at for the last time; nothing need be computed of them now.
    """

    def __init__(
        self,
        parameters: Iterable[Tensor] = (),
        *,
        known: GradientVersions | None = None,
        copies: Callable[[], dict[int, Tensor]] | None = None,
    ) -> None:
        pairs = [(parameter, gradient) for parameter in parameters if (gradient := parameter.grad) is not None]
        self._parameters = [parameter for parameter, _ in pairs]
        gradients = [gradient for _, gradient in pairs]
        self._tensors = list(map(weakref.ref, gradients))
        self._versions = versions(gradients)
        self._copies = copies
        self._values: list[Tensor | None] = [None] * len(gradients)
        self._places: dict[int, int] | None = None
        if copies is not None:
            return
        fresh = [place for place, (parameter, gradient) in enumerate(pairs) if not self._take_over(place, known)]
        self._note_values(fresh, [gradients[place] for place in fresh])

    def _take_over(self, place: int, known: GradientVersions | None) -> bool:
        if known is None or (before := known._place_of(self._parameters[place])) is None:
            return False
        if known._tensors[before]() is not self._tensors[place]() or known._versions[before] != self._versions[place]:
            return False
        self._values[place] = known._values_at(before)
        return True

    def _note_values(self, places: Sequence[int], gradients: Sequence[Tensor]) -> None:
        for place, values in zip(places, fingerprints(gradients), strict=True):
            self._values[place] = values

    def _place_of(self, parameter: Tensor) -> int | None:
        if self._places is None:
            self._places = {id(parameter): place for place, parameter in enumerate(self._parameters)}
        return self._places.get(id(parameter))

    def _values_at(self, place: int) -> Tensor:
        if (values := self._values[place]) is None:
            assert self._copies is not None
            copies, missing = self._copies(), [p for p, values in enumerate(self._values) if values is None]
            self._note_values(missing, [copies[id(self._parameters[each])] for each in missing])
            values = self._values[place]
        assert values is not None
        return values

    def __len__(self) -> int:
        """Of how many parameters there are notes."""
        return len(self._parameters)

    def all_hold(self) -> bool:
        """Whether :meth:`hold` is true of every parameter of which there is a note."""
        gradients = [parameter.grad for parameter in self._parameters]
        noted = [tensor() for tensor in self._tensors]
        if not all(map(operator.is_, gradients, noted)):
            return False
        try:
            return versions(gradients) == self._versions  # type: ignore[arg-type]
        except AttributeError:  # Cleared, and gone.
            return False

    def hold(self, parameter: Tensor) -> bool:
        """Whether ``parameter.grad`` is the tensor that it was, by its version, or ``None`` as it was."""
        place, gradient = self._place_of(parameter), parameter.grad
        if place is None or gradient is None:
            return place is None and gradient is None
        return self._is_at(place, gradient)

    def _is_at(self, place: int, gradient: Tensor) -> bool:
        return gradient is self._tensors[place]() and version(gradient) == self._versions[place]

    def hold_another_tensor(self, parameter: Tensor) -> bool:
        """Whether ``parameter.grad`` is a tensor that was not there then, such as one from a backward of the user's."""
        place, gradient = self._place_of(parameter), parameter.grad
        return gradient is not None and (place is None or gradient is not self._tensors[place]())

    def changed(
        self, parameters: Iterable[Tensor], late: LateVerdicts, *, samples: bool, ignores_zeros: bool
    ) -> list[Tensor]:
        """Those of ``parameters`` whose gradients have other values; what has the same values is noted as it is now.

        Args:
            parameters: which to look at.
            late: where to put what is not known yet, on an accelerator.
            samples: compare values even where no version has moved.
            ignores_zeros: whether a gradient that was cleared or set to zero counts as it was.
        """
        changed: list[Tensor] = []
        doubtful: list[tuple[Tensor, Tensor, int | None]] = []
        for parameter in parameters:
            place, gradient = self._place_of(parameter), parameter.grad
            if gradient is None:
                changed += [parameter] if place is not None and not ignores_zeros else []
            elif place is None:
                doubtful += [(parameter, gradient, None)]
            elif samples or not self._is_at(place, gradient):
                doubtful += [(parameter, gradient, place)]
        if not doubtful:
            return changed
        found = fingerprints([gradient for _, gradient, _ in doubtful])
        for (parameter, gradient, place), values in zip(doubtful, found, strict=True):
            is_other = torch.ones_like(values, dtype=torch.bool) if place is None else values != self._values_at(place)
            if has_streams(gradient.device):
                late.add(parameter, is_other & gradient.any() if ignores_zeros else is_other)
            elif is_other:
                if not ignores_zeros or gradient.any():
                    changed.append(parameter)
                continue  # What the loop has set to zero is its own.
            elif ignores_zeros and not self.hold(parameter) and not gradient.any():
                continue  # Likewise zeros that it has set to zero once more.
            self._note(parameter, gradient, values)
        late.send()
        return changed

    def _note(self, parameter: Tensor, gradient: Tensor, values: Tensor) -> None:
        place = self._place_of(parameter)
        if place is None:
            place = len(self._parameters)
            assert self._places is not None
            self._places[id(parameter)] = place
            self._parameters.append(parameter)
            self._tensors.append(weakref.ref(gradient))
            self._versions.append(version(gradient))
            self._values.append(values)
        else:
            self._tensors[place], self._versions[place] = weakref.ref(gradient), version(gradient)
            self._values[place] = values


class LateVerdicts:
    """Whether gradients on an accelerator were changed, read when the device has found out; the host never waits."""

    def __init__(self) -> None:
        self._asked: list[tuple[Tensor, Tensor]] = []
        self._sent: LateReads[list[Tensor]] = LateReads()

    def add(self, parameter: Tensor, is_changed: Tensor) -> None:
        """Ask about ``parameter``."""
        self._asked.append((parameter, is_changed))

    def send(self) -> None:
        """Copy the answers to the host, behind what the device has queued."""
        by_device: dict[torch.device, list[tuple[Tensor, Tensor]]] = {}
        for parameter, is_changed in self._asked:
            by_device.setdefault(is_changed.device, []).append((parameter, is_changed))
        self._asked = []
        for asked in by_device.values():
            self._sent.send([parameter for parameter, _ in asked], torch.stack([answer for _, answer in asked]))

    def read(self) -> list[Tensor]:
        """The parameters whose gradients had been changed, as far as the device has told by now."""
        return [
            parameter
            for parameters, answers in self._sent.read()
            for parameter, is_changed in zip(parameters, answers.tolist(), strict=True)
            if is_changed
        ]
