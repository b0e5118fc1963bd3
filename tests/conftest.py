"""A fork server for the ranks of a test session."""

import os
import sys

import pytest

from harness import start_server

# Hundreds of processes import the package and its tests: compiled once, also where Python writes no bytecode.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False


def pytest_sessionstart(session: pytest.Session) -> None:
    """Lets the fork server preload while tests are collected; most sessions start ranks."""
    if not session.config.option.collectonly:
        start_server()
