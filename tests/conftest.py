"""A fork server for the ranks of a test session."""

from __future__ import annotations

import os
import sys

import pytest

from harness import run_ranks, start_server

# Hundreds of processes import the package and its tests: compiled once, also where Python writes no bytecode.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False


def pytest_collection_finish(session: pytest.Session) -> None:
    """Lets the fork server preload while the first tests run, if any of them starts ranks."""
    if session.config.option.collectonly:
        return
    modules = {getattr(item, "module", None) for item in session.items}
    if any(run_ranks in vars(module).values() for module in modules if module is not None):
        start_server()
