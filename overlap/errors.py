"""What can go wrong, a class each.

::

    OverlapError
    ├── ConfigurationError (ValueError)     a stage, chain or optimizer that cannot work as it was put together
    │   ├── UnsupportedError                a feature of the model or optimizer that this stage cannot serve
    │   └── ArgumentTypeError (TypeError)   an argument of another kind, where PyTorch raises a TypeError
    ├── RegistrationError (RuntimeError)    registering with a model that cannot take it
    ├── TrainingLoopError (RuntimeError)    calls in an order that would lose or repeat an update
    ├── QuantizationOverflowError (OverflowError)  a value does not fit the type that it was to be sent in
    └── CollectiveError (RuntimeError)      a collective did not finish
        └── PeerError                       because another rank failed; names the rank and its error
"""

from __future__ import annotations

__all__ = [
    "ArgumentTypeError",
    "CollectiveError",
    "ConfigurationError",
    "OverlapError",
    "PeerError",
    "QuantizationOverflowError",
    "RegistrationError",
    "TrainingLoopError",
    "UnsupportedError",
]


class OverlapError(Exception):
    """Base of every error that this library raises on purpose."""


class ConfigurationError(OverlapError, ValueError):
    """A stage, a chain or an optimizer cannot work as it was put together."""


class UnsupportedError(ConfigurationError):
    """The model or the optimizer has a feature that the stage cannot serve."""


class ArgumentTypeError(ConfigurationError, TypeError):
    """An argument is of another kind; also the ``TypeError`` that PyTorch's class of the same name raises there."""


class RegistrationError(OverlapError, RuntimeError):
    """A model cannot take this registration."""


class TrainingLoopError(OverlapError, RuntimeError):
    """The training loop made calls in an order that would lose or repeat an update."""


class QuantizationOverflowError(OverlapError, OverflowError):
    """A value on some rank does not fit the type that it was to be sent in."""


class CollectiveError(OverlapError, RuntimeError):
    """A collective failed or timed out."""


class PeerError(CollectiveError):
    """Another rank of the group failed; the message names the rank and carries its error."""
