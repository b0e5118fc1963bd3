"""What an update has of the buckets, which is the same in every pass."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from overlap.hooks import Bucket

__all__ = ["Share", "Shares"]


class Share:
    """The parameters of one bucket that an update steps, and those whose gradients are its own.

    Args:
        parameters: of the bucket.
        steps: whether the update steps a parameter.
        owns: whether its gradient is the update's.
        layout: of the optimizer, as it is now.
    """

    def __init__(
        self,
        parameters: tuple[Tensor, ...],
        steps: Callable[[Tensor], bool],
        owns: Callable[[Tensor], bool],
        layout: object,
    ) -> None:
        self._of = parameters
        self._layout = layout
        self._places = [place for place, parameter in enumerate(parameters) if steps(parameter)]
        self.parameters = [parameters[place] for place in self._places]
        self.owned = {id(parameter): parameter for parameter in parameters if owns(parameter)}

    def is_of(self, parameters: tuple[Tensor, ...], layout: object) -> bool:
        """Whether it is that of a bucket of these parameters, while the optimizer has this layout."""
        return parameters is self._of and layout is self._layout

    def gradients(self, bucket: Bucket) -> list[Tensor]:
        """Of :attr:`parameters`."""
        views = bucket.gradients
        return list(views) if len(self._places) == len(views) else [views[place] for place in self._places]


class Shares:
    """One update's share of each bucket, by the bucket's place in the pass.

    Args:
        steps: whether the update steps a parameter.
        owns: whether its gradient is the update's.
    """

    def __init__(self, steps: Callable[[Tensor], bool], owns: Callable[[Tensor], bool]) -> None:
        self._steps = steps
        self._owns = owns
        self._shares: dict[int, Share] = {}

    def of(self, bucket: Bucket, layout: object) -> Share:
        """Found out anew where the bucket has other parameters, or the optimizer another ``layout``."""
        share = self._shares.get(bucket.index)
        if share is None or not share.is_of(bucket.parameters, layout):
            share = self._shares[bucket.index] = Share(bucket.parameters, self._steps, self._owns, layout)
        return share

    def forget(self) -> None:
        """Let go of the parameters."""
        self._shares.clear()
