"""Labels in profiles."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.autograd import profiler

__all__ = ["LabelType", "label_type", "profile"]

# Private: it costs a fortieth of record_function where no profiler runs. Where one does, what it shows is an operator
# and not an annotation, for which a GPU has a row of its own.
_fast: Any = getattr(torch._C._profiler, "_RecordFunctionFast", None)


LabelType = Callable[[str], AbstractContextManager[Any]]


def label_type() -> LabelType:
    """Gives what runs within it a label in profiles, as an annotation of the user's: ``with label_type()(name): ...``.

    Private: whether a profiler of PyTorch's runs in this process, on whatever threads. One that is started from
    outside of Python shows the label as an operator.
    """
    return profiler.record_function if _fast is None or profiler._is_profiler_enabled else _fast


def profile(**options: Any) -> torch.profiler.profile:
    """``torch.profiler.profile(**options)`` that records all threads, so that it shows what the library's own do.

    PyTorch's profiler follows the thread that starts it and those of autograd. Stages of CPU tensors have a thread of
    the library's, which Python cannot let take part; all threads are recorded by a switch of PyTorch's that has no
    public name. On CUDA stages run on autograd's thread and are shown without it, too.

    >>> with profile(activities=[torch.profiler.ProfilerActivity.CPU]) as recorded:
    ...     _ = torch.ones(2).add(1)
    >>> "aten::add" in {event.name for event in recorded.events()}
    True
    """
    config: Any = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    return torch.profiler.profile(experimental_config=config, **options)
