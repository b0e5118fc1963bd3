"""The exceptions of this library.

::

    OverlapError
    ├── ConfigurationError (ValueError)     a stage, chain or optimizer that cannot work as it was put together
    │   ├── UnsupportedError                a feature of the model or optimizer that this stage cannot serve
    │   └── ArgumentTypeError (TypeError)   an argument of another kind, where PyTorch raises a TypeError
    ├── RegistrationError (RuntimeError)    registering with a model that cannot take it
    ├── TrainingLoopError (RuntimeError)    calls in an order that would lose or repeat an update
    └── CollectiveError (RuntimeError)      a collective did not finish
        └── PeerError                       because another rank failed; names the rank and its error
"""

from __future__ import annotations

import os
from types import TracebackType

__all__ = [
    "ArgumentTypeError",
    "CollectiveError",
    "ConfigurationError",
    "OverlapError",
    "PeerError",
    "RegistrationError",
    "TrainingLoopError",
    "UnsupportedError",
]


class OverlapError(Exception):
    """Base of every error that this library raises on purpose.

    >>> issubclass(TrainingLoopError, OverlapError)
    True
    >>> try:
    ...     chain(AllReduce(), AllReduce())
    ... except OverlapError as error:
    ...     print(type(error).__name__)
    ConfigurationError
    """


class ConfigurationError(OverlapError, ValueError):
    """A stage, a chain or an optimizer cannot work as it was put together.

    >>> try:
    ...     PowerSGD(rank=0)
    ... except ConfigurationError as error:
    ...     print(error)
    rank must be a whole number of at least 1, got 0
    """


class UnsupportedError(ConfigurationError):
    """The model or the optimizer has a feature that the stage cannot serve.

    >>> optimizer = torch.optim.LBFGS(ddp.parameters())
    >>> try:
    ...     chain(AllReduce(), Step(optimizer)).register(ddp)
    ... except UnsupportedError as error:
    ...     print(type(error).__name__)
    UnsupportedError
    """


class ArgumentTypeError(ConfigurationError, TypeError):
    """An argument is of another kind; also the ``TypeError`` that PyTorch's class of the same name raises there.

    >>> try:
    ...     ZeroRedundancyOptimizer(ddp, optimizer_class=torch.optim.SGD, lr=0.1)
    ... except TypeError as error:
    ...     print(type(error).__name__)
    ArgumentTypeError
    """


class RegistrationError(OverlapError, RuntimeError):
    """A model cannot take this registration.

    >>> registration = chain(AllReduce()).register(ddp)
    >>> try:
    ...     chain(AllReduce()).register(ddp)
    ... except RegistrationError as error:
    ...     print(type(error).__name__)
    RegistrationError
    """


class TrainingLoopError(OverlapError, RuntimeError):
    """The training loop made calls in an order that would lose or repeat an update.

    >>> optim = OverlappedOptimizer(torch.optim.SGD(ddp.parameters(), lr=0.1))
    >>> chain(AllReduce(), Step(optim)).register(ddp)
    <chain(AllReduce(), Step(SGD, interleaved)) registered>
    >>> loss_fn(ddp(x), y).backward()  # updates
    >>> try:
    ...     optim.zero_grad()
    ... except TrainingLoopError as error:
    ...     print(type(error).__name__)
    TrainingLoopError
    """


class CollectiveError(OverlapError, RuntimeError):
    """A collective failed or timed out.

    >>> try:
    ...     raise PeerError("rank 1 failed")
    ... except CollectiveError as error:
    ...     print(error)
    rank 1 failed
    """


class PeerError(CollectiveError):
    """Another rank of the group failed; the message names the rank and carries its error.

    >>> try:
    ...     raise PeerError("rank 1 failed")  # as backward() does on the other ranks
    ... except PeerError as error:
    ...     print(error)
    rank 1 failed
    """


def hide_internal_frames(error: BaseException) -> None:
    """Take the frames of this library out of the traceback of ``error``, if it is raised by this library on purpose.

    Called where it leaves a call of the loop's: its message says all that they do. Frames of the loop, of PyTorch and
    of a stage of the user's stay. All stay where the environment has ``OVERLAP_FULL_TRACEBACK=1``.
    """
    if not isinstance(error, OverlapError) or os.environ.get("OVERLAP_FULL_TRACEBACK") == "1":
        return
    places, place = [], error.__traceback__
    while place is not None:
        places.append(place)
        place = place.tb_next
    kept: TracebackType | None = None
    for each in reversed(places):
        if each.tb_frame.f_globals.get("__name__", "").partition(".")[0] not in ("overlap", "contextlib"):
            kept = TracebackType(kept, each.tb_frame, each.tb_lasti, each.tb_lineno)
    error.__traceback__ = kept
