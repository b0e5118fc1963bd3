"""All checks."""

from __future__ import annotations

from .check import Check
from .host_waits import host_wait_checks
from .memory import memory_checks
from .parity import parity_checks
from .races import race_checks
from .sanitizer import sanitizer_checks
from .times import time_checks

__all__ = ["checks"]


def checks() -> list[Check]:
    """Of every topic, first those that show that the others can fail."""
    return [
        *parity_checks(),
        *race_checks(),
        *host_wait_checks(),
        *memory_checks(),
        *time_checks(),
        *sanitizer_checks(),
    ]
