"""What examples in docstrings and guides find, as docs/api/index.md says: a group of one rank, a model, batches."""

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

_PAGE = Path(__file__).parents[2] / "docs" / "api" / "index.md"


@cache
def _lines() -> Any:
    (lines,) = re.findall(r"^```python\n(.*?)^```", _PAGE.read_text(), re.MULTILINE | re.DOTALL)
    return compile(lines, str(_PAGE), "exec")


@contextmanager
def examples_on_one_rank() -> Iterator[dict[str, Any]]:
    """The names that an example may use; the process group is left when it has run."""
    namespace: dict[str, Any] = {"__name__": "example"}
    excepthook = sys.excepthook  # init_process_group wraps it.
    with torch.random.fork_rng():
        try:
            exec(_lines(), namespace)
            yield namespace
        finally:
            namespace.clear()
            if dist.is_initialized():
                dist.destroy_process_group()
            sys.excepthook = excepthook
