"""The gradients of a model's last backward: which are the library's, and whether they are as it left them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor

from overlap.hooks import Bucket
from overlap.optim.fingerprint import is_sampled
from overlap.optim.gradient_versions import GradientVersions, LateVerdicts

__all__ = ["PassGradients"]


class PassGradients:
    """Of which of an update's parameters the last backward reduced the gradients, and which have been applied.

    Args:
        clears: whether the gradient of a parameter is this update's to clear.
    """

    def __init__(self, clears: Callable[[Tensor], bool]) -> None:
        self._clears = clears
        self._reduced: dict[int, Tensor] = {}
        self._applied: dict[int, Tensor] = {}
        self._cleared: list[Tensor] = []
        # By id, of those that were released when backward was over; what is in .grad then came later.
        self._released: set[int] = set()
        # Likewise those that no rank has used in the last backward.
        self._unused: set[int] = set()
        # None after a replay, on a rank where DDP sets no .grad.
        self._versions: GradientVersions | None = None
        self._late = LateVerdicts()
        self._passes = 0
        # The buckets of the last backward; None where one of them was not copied to .grad.
        self._copied: list[Bucket] | None = []
        # Whether there is a gradient of each parameter, and a note of it.
        self._are_noted = False

    @property
    def reduced(self) -> list[Tensor]:
        """Parameters whose gradients came in a bucket of the last backward."""
        return list(self._reduced.values())

    def has_reduced(self, parameter: Tensor) -> bool:
        """Whether the gradient of ``parameter`` came in a bucket of the last backward."""
        return id(parameter) in self._reduced

    def lacks(self, parameter: Tensor) -> bool:
        """Whether the gradient of ``parameter`` is this update's, and came in no bucket of the last backward."""
        return self._clears(parameter) and not self.has_reduced(parameter)

    @property
    def applied(self) -> list[Tensor]:
        """Parameters whose gradients, as they were left, have been applied."""
        return list(self._applied.values())

    @property
    def applied_ids(self) -> frozenset[int]:
        """The ``id`` of each of :attr:`applied`."""
        return frozenset(self._applied)

    def has_applied(self, parameter: Tensor) -> bool:
        """Whether what was left in ``.grad`` of ``parameter`` has been applied."""
        return id(parameter) in self._applied

    def note_reduced(
        self, parameters: Iterable[Tensor], *, own: Mapping[int, Tensor] | None = None, copied: Bucket | None = None
    ) -> None:
        """A bucket of these parameters is through; those of another update are not noted.

        Args:
            parameters: the bucket's.
            own: those of them that are this update's, by ``id``, where that is known.
            copied: the bucket, if DDP copies what is in it to ``.grad`` and leaves it as it is until the next backward.
        """
        if own is None:
            own = {id(parameter): parameter for parameter in parameters if self._clears(parameter)}
        self._reduced.update(own)
        self._are_noted = False
        if copied is None:
            self._copied = None
        elif self._copied is not None:
            self._copied.append(copied)

    def note_applied(self, parameters: Iterable[Tensor]) -> None:
        """The gradients of these parameters have been applied."""
        if not (noted := list(parameters)):
            return
        self._applied.update(zip(map(id, noted), noted, strict=True))
        self._are_noted = False

    def note_unused(self, parameters: Iterable[Tensor]) -> None:
        """No rank has used these parameters in this backward, so that DDP leaves their ``.grad`` as it is."""
        self._unused.update(map(id, parameters))

    def was_unused(self, parameter: Tensor) -> bool:
        """Whether no rank has used ``parameter`` in the last backward, as far as was asked."""
        return id(parameter) in self._unused

    def note_released(self, parameters: Iterable[Tensor]) -> None:
        """``.grad`` of these parameters, which had been applied, was cleared when backward was over."""
        mine = [parameter for parameter in parameters if self._clears(parameter)]
        self._released = set(map(id, mine))
        self._cleared += mine

    @property
    def were_released(self) -> bool:
        """Whether gradients that were applied are no longer there to show it, since backward has cleared them."""
        return bool(self._released)

    def begin_pass(self) -> None:
        """A backward begins."""
        self.forget()
        self._cleared = []
        self._unused = set()
        self._passes += 1

    @property
    def samples(self) -> bool:
        """Whether in this pass values are compared even where no version has moved. See [Note: edits by value]."""
        return is_sampled(self._passes)

    def note_values(self, *, are_there: bool, are_new: bool = False) -> None:
        """What is in ``.grad`` now is as the library left it, if DDP has set ``.grad`` on this rank at all;
        ``are_new``: a moment ago, so that the buckets have the same values."""
        if are_there and self._are_noted and self._versions is not None and self._versions.all_hold():
            return
        everything = {**self._reduced, **self._applied}
        if not are_there:
            self._versions = None
        elif are_new and self._copied is not None:
            buckets = tuple(self._copied)
            self._versions = GradientVersions(everything.values(), copies=lambda: _gradients_in(buckets))
        else:
            self._versions = GradientVersions(everything.values(), known=self._versions)
        self._are_noted = self._versions is not None and len(self._versions) == len(everything)

    def accept_values(self) -> None:
        """An error said that edits are lost; it is not repeated."""
        self._versions = None
        self.note_values(are_there=True)

    def forget(self) -> None:
        """What is in ``.grad`` from here on is not of a backward that was reduced."""
        self._reduced, self._applied, self._versions, self._released = {}, {}, None, set()
        self._copied = []

    def forget_cleared(self) -> None:
        """What comes where a gradient was cleared is not of a backward that was reduced."""
        self._reduced = {key: parameter for key, parameter in self._reduced.items() if parameter.grad is not None}

    def holds_new_tensor(self, parameter: Tensor) -> bool:
        """Whether ``.grad`` is a tensor that the library has not left there."""
        return self._versions is not None and self._versions.hold_another_tensor(parameter)

    def has_added_to_applied(self) -> bool:
        """Whether a backward has added to gradients that had been applied."""
        return self._versions is not None and any(
            p.grad is not None and not self._is_of_the_user(p) for p in self._applied.values()
        )

    def _is_of_the_user(self, parameter: Tensor) -> bool:
        """Whether what is in ``.grad`` is another tensor than what was applied, and so not added to that.

        If that was released, it cannot be known.
        """
        return id(parameter) not in self._released and self.holds_new_tensor(parameter)

    def edited(self, *, keeps_new_tensors: bool, ignores_zeros: bool, samples: bool) -> list[Tensor]:
        """Parameters whose gradients were changed after they had been applied."""
        if self._versions is None or self._is_as_it_was(
            ignores_cleared=ignores_zeros, samples=samples and self.samples
        ):
            return self._late.read()
        mine = [p for p in self._applied.values() if self._clears(p)]
        if keeps_new_tensors:
            mine = [p for p in mine if not self._is_of_the_user(p)]
        changed = self._versions.changed(
            mine, self._late, samples=samples and self.samples, ignores_zeros=ignores_zeros
        )
        return [*self._late.read(), *changed]

    def _is_as_it_was(self, *, ignores_cleared: bool, samples: bool) -> bool:
        """Whether no gradient that was applied can have been edited, by a look at all of them at once."""
        assert self._versions is not None
        if ignores_cleared and all(parameter.grad is None for parameter in self._applied.values()):
            return True
        return self._are_noted and not samples and self._versions.all_hold()

    def release_new_tensors(self) -> None:
        """What is in ``.grad`` now, where it is another tensor, has not been applied."""
        self._applied = {key: p for key, p in self._applied.items() if not self.holds_new_tensor(p)}

    def clear_applied(self) -> None:
        """Clear what was applied and is as it was left; what is in ``.grad`` then is the user's."""
        are_own = self._applied.keys() <= self._reduced.keys()
        hold = are_own and self._versions is not None and self._versions.all_hold()
        for parameter in self._applied.values():
            if hold or (self._clears(parameter) and (self._versions is None or self._versions.hold(parameter))):
                self._clear(parameter)
        self._reduced = {key: parameter for key, parameter in self._reduced.items() if key not in self._applied}
        self._applied = {}

    def clear_all(self, names: Iterable[Tensor]) -> None:
        """Clear every gradient of the model, after a failure."""
        for parameter in {**self._reduced, **{id(p): p for p in names}}.values():
            if self._clears(parameter):
                parameter.grad = None
        self.forget()
        self._cleared = []

    def clear_for_good(self) -> None:
        """Clear what was applied, edited or not, so that no optimizer left alone applies it again."""
        for parameter in self._applied.values():
            if self._clears(parameter) and not self.holds_new_tensor(parameter):
                parameter.grad = None
        self.forget()
        self._cleared = []

    def _clear(self, parameter: Tensor) -> None:
        if parameter.grad is not None:
            self._cleared.append(parameter)
        parameter.grad = None

    @torch.no_grad()
    def note_zero_grad(self, *, set_to_none: bool) -> None:
        """``zero_grad()`` came after a forward: zeros where it would have met what that forward has cleared."""
        for parameter in [] if set_to_none else self._cleared:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        self._cleared = []


def _gradients_in(buckets: Sequence[Bucket]) -> dict[int, Tensor]:
    return {
        id(parameter): gradient
        for bucket in buckets
        for parameter, gradient in zip(bucket.parameters, bucket.gradients, strict=True)
    }
