"""Labels in profiles."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.autograd import profiler

__all__ = ["labelled"]

# Private: it costs a fortieth of record_function where no profiler runs. Where one does, what it shows is an operator
# and not an annotation, for which a GPU has a row of its own.
_fast: Any = getattr(torch._C._profiler, "_RecordFunctionFast", None)


def labelled(name: str) -> AbstractContextManager[Any]:
    """What runs in it has the label ``name`` in profiles, as an annotation of the user's.

    Private: whether a profiler of PyTorch's runs in this process, on whatever threads. One that is started from
    outside of Python shows the label as an operator.
    """
    if _fast is None or profiler._is_profiler_enabled:
        return profiler.record_function(name)
    context: AbstractContextManager[Any] = _fast(name)
    return context
