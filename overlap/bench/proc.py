"""Values from Linux's `/proc`."""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path


def proc_value(path: str, key: str) -> str | None:
    """The value of the first line `key: value`; None where there is none, or no `/proc`."""
    with suppress(OSError):
        if match := re.search(rf"^{key}[ \t]*:[ \t]*(.*)$", Path(path).read_text(), re.MULTILINE):
            return match[1]
    return None


def proc_bytes(path: str, key: str) -> int:
    """A size that the kernel gives in kB; 0 where it gives none."""
    return int((proc_value(path, key) or "0").split()[0]) * 1024
