"""On which stream an optimizer's update runs.

[Note: optimizers on the default stream]

An update in backward is made on the side stream on which its bucket was reduced. The kernels of ``torch.optim`` run on
the current stream, so they come after the reduction. Others may not: those of bitsandbytes run on the default stream,
whatever the current one is, and would read gradients that are not reduced yet. The interface of ``Optimizer`` does not
say so, and there would be no error.

So only an optimizer that is known to use the current stream is stepped there. Any other is stepped with the default
stream as the current one. The default stream first waits for the stream that was current, and that one then waits for
the default stream. All of ``step()`` runs there, since one ``step()`` may use both: bitsandbytes fills new state
with PyTorch's kernels, on the current stream, and reads it with its own, on the default one.

That is correct for every optimizer, but less overlaps: where the model computes on the default stream, as it does
unless a loop chooses another, backward waits for the bucket's reduction and update. In a deferred update in ``step()``
of such a loop the two streams are one, and nothing waits.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TypeVar
from weakref import WeakSet

import torch
from torch import Tensor
from torch.optim import Optimizer

from overlap._checks import described
from overlap._torch.device import current_stream, default_stream, on_stream
from overlap._torch.optimizer import own_step
from overlap.errors import ConfigurationError

__all__ = ["ordered_after_gradients", "uses_current_stream"]

T = TypeVar("T", bound=type[Optimizer])

_declared: WeakSet[type[Optimizer]] = WeakSet()


def uses_current_stream(optimizer_class: T) -> T:
    """Say that all kernels of an optimizer run on the current stream, so that its update in backward need not wait.

    On an accelerator, an update in backward runs beside the model on a stream of its own. Optimizers of ``torch.optim``
    do; another one is stepped on the default stream, on which backward then waits for each bucket, because some launch
    their kernels there whatever stream is current. Declare a class that does not, such as one that uses PyTorch's own
    operators alone::

        uses_current_stream(lion_pytorch.Lion)

    or use it as a decorator of the class. A declaration does not hold for derived classes. If it is wrong, updates
    silently read gradients that are not reduced yet.

    Args:
        optimizer_class: the class of the optimizer; for ``ZeroRedundancyOptimizer``, that of the one inside.

    Returns:
        ``optimizer_class``.

    Raises:
        ConfigurationError: it is not a subclass of ``torch.optim.Optimizer``.

    >>> class Lion(torch.optim.Optimizer): ...
    >>> Lion = uses_current_stream(Lion)
    """
    if not (isinstance(optimizer_class, type) and issubclass(optimizer_class, Optimizer)):
        raise ConfigurationError(
            f"uses_current_stream takes a class of optimizers, got {described(optimizer_class)}; give type(optimizer)"
        )
    _declared.add(optimizer_class)
    return optimizer_class


@contextmanager
def ordered_after_gradients(optimizer: Optimizer, parameters: Iterable[Tensor]) -> Iterator[None]:
    """Within it ``optimizer`` may step ``parameters``: on whatever stream it does, that comes after what the current
    streams have queued, and before what they queue afterwards. See [Note: optimizers on the default stream]."""
    if _is_known(optimizer):
        yield
        return
    with ExitStack() as stack:
        for device in {parameter.device for parameter in parameters}:
            current, default = current_stream(device), default_stream(device)
            if default is None or default == current:
                continue
            default.wait_stream(current)
            stack.callback(current.wait_stream, default)
            stack.enter_context(on_stream(default))
        yield


def _is_known(optimizer: Optimizer) -> bool:
    """Whether all kernels of ``optimizer`` run on the current stream."""
    cls = type(optimizer)
    is_pytorch_own = getattr(torch.optim, cls.__name__, None) is cls
    return (is_pytorch_own or cls in _declared) and own_step(optimizer) is None
