"""Every way to wrap a module."""

from __future__ import annotations

import functools
from collections.abc import Callable

from torch import nn

from overlap.activations import checkpoint_wrapper, offload_wrapper

WRAPPERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "checkpoint": checkpoint_wrapper,
    "checkpoint, arguments offloaded": functools.partial(checkpoint_wrapper, offload_to_cpu=True),
    "offload": functools.partial(offload_wrapper, min_bytes=0),
    "both": lambda module: offload_wrapper(checkpoint_wrapper(module)),
}
