"""Telling whether a gradient is still what the library left in ``.grad``. See [Note: edits by value]."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from overlap._torch.autograd import version
from overlap._torch.device import has_streams
from overlap.hooks.late_reads import LateReads
from overlap.optim.fingerprint import fingerprints

__all__ = ["GradientVersions", "LateVerdicts"]


@dataclass
class _Note:
    """What was in ``.grad`` of a parameter."""

    tensor: weakref.ref[Tensor]
    version: int
    values: Tensor

    @classmethod
    def of_each(cls, gradients: Sequence[Tensor]) -> list[_Note]:
        return [
            cls(weakref.ref(gradient), version(gradient), values)
            for gradient, values in zip(gradients, fingerprints(gradients), strict=True)
        ]

    def is_of(self, gradient: Tensor) -> bool:
        """Whether it is that tensor, with nothing done to it that raises its version."""
        return gradient is self.tensor() and version(gradient) == self.version


class GradientVersions:
    """The tensors in ``.grad`` of some parameters and their values, at one moment.

    Args:
        parameters: whose gradients to note.
        known: notes of before, to be taken over where they still hold.
    """

    def __init__(self, parameters: Iterable[Tensor] = (), *, known: GradientVersions | None = None) -> None:
        before = {} if known is None else known._notes
        self._notes: dict[int, _Note] = {}
        fresh: dict[int, Tensor] = {}
        for parameter in parameters:
            if (gradient := parameter.grad) is None:
                continue
            note = before.get(id(parameter))
            if note is not None and note.is_of(gradient):
                self._notes[id(parameter)] = note
            else:
                fresh[id(parameter)] = gradient
        self._notes.update(zip(fresh, _Note.of_each(list(fresh.values())), strict=True))

    def hold(self, parameter: Tensor) -> bool:
        """Whether ``parameter.grad`` is the tensor that it was, by its version, or ``None`` as it was."""
        note = self._notes.get(id(parameter))
        if note is None or parameter.grad is None:
            return note is None and parameter.grad is None
        return note.is_of(parameter.grad)

    def hold_another_tensor(self, parameter: Tensor) -> bool:
        """Whether ``parameter.grad`` is a tensor that was not there then, such as one from a backward of the user's."""
        note = self._notes.get(id(parameter))
        return parameter.grad is not None and (note is None or parameter.grad is not note.tensor())

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
        doubtful: list[tuple[Tensor, Tensor, Tensor | None]] = []
        for parameter in parameters:
            note, gradient = self._notes.get(id(parameter)), parameter.grad
            if gradient is None:
                changed += [parameter] if note is not None and not ignores_zeros else []
            elif note is None:
                doubtful += [(parameter, gradient, None)]
            elif samples or not note.is_of(gradient):
                doubtful += [(parameter, gradient, note.values)]
        if not doubtful:
            return changed
        notes = _Note.of_each([gradient for _, gradient, _ in doubtful])
        for (parameter, gradient, before), note in zip(doubtful, notes, strict=True):
            is_other = torch.ones_like(note.values, dtype=torch.bool) if before is None else note.values != before
            if has_streams(gradient.device):
                late.add(parameter, is_other & gradient.any() if ignores_zeros else is_other)
            elif is_other:
                if not ignores_zeros or gradient.any():
                    changed.append(parameter)
                continue  # What the loop has set to zero is its own.
            elif ignores_zeros and not self.hold(parameter) and not gradient.any():
                continue  # Likewise zeros that it has set to zero once more.
            self._notes[id(parameter)] = note
        late.send()
        return changed


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
